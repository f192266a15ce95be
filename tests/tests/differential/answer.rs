//! What a dialect gave, in one form for all of them.

use serde_json::Value;

/// An answer. What a dialect does not tell is absent.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Answer {
    /// One for each sequence.
    pub(crate) outputs: Vec<Output>,
    pub(crate) prompt_tokens: Option<u64>,
    /// Of all sequences together.
    pub(crate) completion_tokens: Option<u64>,
}

/// One sequence.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Output {
    pub(crate) text: String,
    pub(crate) ids: Option<Vec<u32>>,
    pub(crate) finish: Finish,
    /// Natural logarithms of the probabilities of the tokens.
    pub(crate) logprobs: Option<Vec<f32>>,
    /// What might have stood in the place of each token, in the dialect's own form.
    pub(crate) alternatives: Vec<Value>,
}

/// Why a sequence ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Finish {
    /// The dialect has no word for it.
    #[default]
    Untold,
    Length,
    Eos,
    /// A stop string or a stop token.
    Stop,
    /// One of the last two.
    EosOrStop,
}

impl Finish {
    /// From the words that dialects have.
    pub(crate) fn named(word: &str) -> Self {
        match word {
            "length" => Self::Length,
            "eos_token" => Self::Eos,
            "stop_sequence" => Self::Stop,
            "stop" => Self::EosOrStop,
            other => panic!("a finish reason that no API has: {other:?}"),
        }
    }

    fn may_be(self, other: Self) -> bool {
        match self {
            Self::Untold => true,
            Self::EosOrStop => matches!(other, Self::Eos | Self::Stop),
            told => told == other,
        }
    }
}

impl Output {
    /// The ids so far, from a dialect that tells them.
    pub(crate) fn ids_mut(&mut self) -> &mut Vec<u32> {
        self.ids.get_or_insert_default()
    }

    /// The log-probabilities so far, from a dialect that tells them.
    pub(crate) fn logprobs_mut(&mut self) -> &mut Vec<f32> {
        self.logprobs.get_or_insert_default()
    }

    /// Takes why the sequence ended, which is told once.
    pub(crate) fn finished(&mut self, finish: Finish) {
        assert_eq!(self.finish, Finish::Untold, "a sequence ends once");
        self.finish = finish;
    }
}

impl Answer {
    /// With room for so many sequences.
    pub(crate) fn of(sequences: usize) -> Self {
        Self { outputs: vec![Output::default(); sequences], ..Self::default() }
    }

    /// The same; with its sequences in the order of their texts if the dialect has an order of its own.
    pub(crate) fn in_order(&self, ranked: bool) -> Self {
        let mut ordered = self.clone();
        if ranked {
            ordered.outputs.sort_by(|a, b| a.text.cmp(&b.text));
        }
        ordered
    }

    /// Where this contradicts an answer that tells everything.
    pub(crate) fn unlike(&self, reference: &Self, ranked: bool) -> Vec<String> {
        let (own, reference) = (self.in_order(ranked), reference.in_order(ranked));
        let mut differences = Vec::new();
        let mut held = |what: &str, holds: bool, own: &dyn std::fmt::Debug, other: &dyn std::fmt::Debug| {
            if !holds {
                differences.push(format!("{what}: {own:?}, and by the native API {other:?}"));
            }
        };
        let (count, expected) = (own.outputs.len(), reference.outputs.len());
        held("sequences", count == expected, &count, &expected);
        for (a, b) in own.outputs.iter().zip(&reference.outputs) {
            held("text", a.text == b.text, &a.text, &b.text);
            held("token ids", a.ids.is_none() || a.ids == b.ids, &a.ids, &b.ids);
            held("finish reason", a.finish.may_be(b.finish), &a.finish, &b.finish);
            held(
                "log-probabilities",
                a.logprobs.is_none() || a.logprobs == b.logprobs,
                &a.logprobs,
                &b.logprobs,
            );
        }
        for (what, a, b) in [
            ("prompt tokens", own.prompt_tokens, reference.prompt_tokens),
            ("completion tokens", own.completion_tokens, reference.completion_tokens),
        ] {
            held(what, a.is_none() || a == b, &a, &b);
        }
        differences
    }
}
