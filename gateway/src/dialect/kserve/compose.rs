//! Pieces of text and tokens into the tensors of a response.

use std::collections::BTreeMap;

use bytes::Bytes;
use proto::Token;
use serde::Serialize;

use super::catalogue::OutputName;
use super::tensor::{Elements, Output};
use crate::answer::Started;
use crate::dialect::json;
use crate::domain::{Finish, Piece, Whole};

/// What a request says of its answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    /// Outputs, in the order they go out.
    pub(crate) outputs: Vec<OutputName>,
    /// Sequences that the answer has.
    pub(crate) sequences: usize,
    /// Responses as tokens come, where the transport has them; one for all otherwise.
    pub(crate) stream: bool,
    /// What fills the rows of the shorter sequences.
    pub(crate) pad_id: u32,
}

/// Writes the responses of one answer.
#[derive(Debug)]
pub(crate) struct Composer {
    shape: Shape,
    /// What is known of each sequence.
    known: Vec<Known>,
}

#[derive(Clone, Debug, Default)]
struct Known {
    finish: Option<&'static str>,
    cumulative_logprob: f64,
}

/// What is new of a sequence.
#[derive(Default)]
struct Part<'a> {
    text: String,
    tokens: &'a [Token],
}

impl Composer {
    pub(crate) fn new(shape: Shape) -> Self {
        let known = vec![Known::default(); shape.sequences];
        Self { shape, known }
    }

    /// The outputs of a piece of a sequence: the others have nothing new.
    pub(crate) fn piece(&mut self, started: &Started, choice: usize, piece: &Piece) -> Vec<Output> {
        let mut parts: Vec<Part<'_>> = Vec::new();
        parts.resize_with(self.shape.sequences, Part::default);
        let tokens = if piece.discarded { &[] } else { std::slice::from_ref(&piece.token) };
        parts[choice] = Part { text: piece.text.clone(), tokens };
        self.know(choice, piece.finish.as_ref(), tokens);
        self.outputs(started, &parts)
    }

    /// The outputs of a whole answer.
    pub(crate) fn whole(&mut self, started: &Started, wholes: &[Whole]) -> Vec<Output> {
        let prompt = started.prompt_text.as_deref().unwrap_or_default();
        let mut parts = Vec::with_capacity(wholes.len());
        for (choice, whole) in wholes.iter().enumerate() {
            self.know(choice, Some(&whole.finish), &whole.tokens);
            parts.push(Part { text: format!("{prompt}{}", whole.text), tokens: &whole.tokens });
        }
        self.outputs(started, &parts)
    }

    fn know(&mut self, choice: usize, finish: Option<&Finish>, tokens: &[Token]) {
        let known = &mut self.known[choice];
        known.finish = finish.map(finish_reason);
        known.cumulative_logprob += tokens.iter().map(|token| f64::from(token.logprob)).sum::<f64>();
    }

    fn outputs(&self, started: &Started, parts: &[Part<'_>]) -> Vec<Output> {
        self.shape.outputs.iter().map(|output| self.output(*output, started, parts)).collect()
    }

    fn output(&self, output: OutputName, started: &Started, parts: &[Part<'_>]) -> Output {
        let (name, datatype) = (output.name(), output.datatype());
        let list = |elements| Output::list(name, datatype, elements);
        let counts = || parts.iter().map(|part| part.tokens.len());
        match output {
            OutputName::TextOutput => {
                Output::texts(name, parts.iter().map(|part| part.text.clone()).collect())
            }
            OutputName::FinishReason => {
                let reasons = self.known.iter().map(|known| known.finish.unwrap_or("None").to_owned());
                Output::texts(name, reasons.collect())
            }
            OutputName::CumulativeLogprob | OutputName::CumLogProbs => {
                list(Elements::Floats(self.known.iter().map(|known| known.cumulative_logprob).collect()))
            }
            OutputName::Logprobs => {
                let texts = parts.iter().map(|part| json(&logprobs(started, part.tokens)));
                Output::texts(name, texts.collect())
            }
            OutputName::NumInputTokens => list(Elements::Unsigned(vec![started.prompt_tokens as u64])),
            OutputName::NumOutputTokens => list(Elements::Unsigned(counts().map(|len| len as u64).collect())),
            OutputName::SequenceLength => list(Elements::Signed(counts().map(|len| len as i64).collect())),
            OutputName::Output0 => {
                let pad = u64::from(self.shape.pad_id);
                let (shape, ids) = rows(parts, pad, |token| u64::from(token.id));
                Output { name, datatype, shape, elements: Elements::Unsigned(ids) }
            }
            OutputName::OutputIds => {
                let pad = i64::from(self.shape.pad_id);
                let (shape, ids) = rows(parts, pad, |token| i64::from(token.id));
                Output { name, datatype, shape, elements: Elements::Signed(ids) }
            }
            OutputName::OutputLogProbs => {
                let (shape, logprobs) = rows(parts, 0.0, |token| f64::from(token.logprob));
                Output { name, datatype, shape, elements: Elements::Floats(logprobs) }
            }
        }
    }
}

/// A row for each sequence, all as long as the longest.
fn rows<T: Clone>(parts: &[Part<'_>], pad: T, of: impl Fn(&Token) -> T) -> (Vec<usize>, Vec<T>) {
    let longest = parts.iter().map(|part| part.tokens.len()).max().unwrap_or(0);
    let mut elements = Vec::with_capacity(parts.len() * longest);
    for part in parts {
        elements.extend(part.tokens.iter().map(&of));
        elements.extend(std::iter::repeat_n(pad.clone(), longest - part.tokens.len()));
    }
    (vec![parts.len(), longest], elements)
}

fn finish_reason(finish: &Finish) -> &'static str {
    match finish {
        Finish::Eos | Finish::StopToken | Finish::StopString(_) | Finish::Grammar => "stop",
        Finish::Length => "length",
        Finish::Stopped => "abort",
    }
}

/// What is told of one token in a place.
#[derive(Serialize)]
struct Alternative {
    logprob: f32,
    /// How many tokens are at least as likely; unknown of a chosen token that is not among the likeliest.
    rank: Option<usize>,
    decoded_token: String,
}

/// Of each token, by its id and those of the likeliest in its place.
fn logprobs(started: &Started, tokens: &[Token]) -> Vec<BTreeMap<u32, Alternative>> {
    let alternative = |id: u32, logprob: f32, rank: Option<usize>| Alternative {
        logprob,
        rank,
        decoded_token: started.model.text.decode(&[id], false),
    };
    let of_token = |token: &Token| {
        let top = token.top.iter().enumerate();
        let mut map: BTreeMap<u32, Alternative> =
            top.map(|(index, top)| (top.id, alternative(top.id, top.logprob, Some(index + 1)))).collect();
        map.entry(token.id).or_insert_with(|| alternative(token.id, token.logprob, None));
        map
    };
    tokens.iter().map(of_token).collect()
}

/// The bytes of the only element, if it is one text.
pub(crate) fn only_text(elements: &Elements) -> Option<&Bytes> {
    match elements {
        Elements::Bytes(list) if list.len() == 1 => list.first(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use proto::TokenLogprob;

    use super::super::tensor::Datatype;
    use super::*;
    use crate::dialect::tests::{pieces, started, whole};

    fn composer(outputs: &[OutputName], sequences: usize) -> Composer {
        Composer::new(Shape { outputs: outputs.to_vec(), sequences, stream: true, pad_id: 9 })
    }

    fn texts(output: &Output) -> Vec<String> {
        let Elements::Bytes(list) = &output.elements else { panic!("{output:?}") };
        list.iter().map(|bytes| String::from_utf8(bytes.to_vec()).unwrap()).collect()
    }

    #[test]
    fn a_whole_answer_has_an_element_for_each_sequence() {
        let started = started("m", 3, Some("Hi"));
        let wholes = [whole(&pieces(&["a", "b"], Finish::Eos)), whole(&pieces(&["c"], Finish::Length))];
        let outputs = composer(&OutputName::ALL, 2).whole(&started, &wholes);
        assert_eq!(texts(&outputs[0]), ["Hiab", "Hic"]);
        let expected = [
            (vec![2, 2], Elements::Unsigned(vec![0, 1, 0, 9])),
            (vec![2, 2], Elements::Signed(vec![0, 1, 0, 9])),
            (vec![2], Elements::Signed(vec![2, 1])),
        ];
        for (output, (shape, elements)) in outputs[1..].iter().zip(expected) {
            assert_eq!((&output.shape, &output.elements), (&shape, &elements), "{}", output.name);
        }
        assert_eq!(texts(&outputs[4]), ["stop", "length"]);
        for output in &outputs[5..7] {
            assert_eq!(output.elements, Elements::Floats(vec![-2.0, -1.0]));
        }
        assert_eq!(
            texts(&outputs[7])[1],
            "[{\"0\":{\"logprob\":-1.0,\"rank\":null,\"decoded_token\":\"\\u0000\"}}]"
        );
        assert_eq!((&outputs[8].shape, outputs[8].datatype), (&vec![2, 2], Datatype::Fp32));
        assert_eq!(outputs[8].elements, Elements::Floats(vec![-1.0, -1.0, -1.0, 0.0]));
        assert_eq!(outputs[9].elements, Elements::Unsigned(vec![3]));
        assert_eq!(outputs[10].elements, Elements::Unsigned(vec![2, 1]));
    }

    #[test]
    fn a_piece_is_new_for_its_own_sequence_alone() {
        let started = started("m", 3, None);
        let names = [
            OutputName::TextOutput,
            OutputName::FinishReason,
            OutputName::CumulativeLogprob,
            OutputName::NumOutputTokens,
            OutputName::Output0,
            OutputName::Logprobs,
        ];
        let mut composer = composer(&names, 2);
        let pieces = pieces(&["a", "b"], Finish::Length);
        composer.piece(&started, 1, &pieces[0]);
        let outputs = composer.piece(&started, 1, &pieces[1]);
        assert_eq!(texts(&outputs[0]), ["", "b"]);
        assert_eq!(texts(&outputs[1]), ["None", "length"]);
        assert_eq!(outputs[2].elements, Elements::Floats(vec![0.0, -2.0]));
        assert_eq!(outputs[3].elements, Elements::Unsigned(vec![0, 1]));
        assert_eq!((&outputs[4].shape, &outputs[4].elements), (&vec![2, 1], &Elements::Unsigned(vec![9, 1])));
        assert_eq!(texts(&outputs[5])[0], "[]");
        let outputs = composer.piece(&started, 0, &pieces[0]);
        assert_eq!(texts(&outputs[1]), ["None", "length"], "what ended stays so");
    }

    #[test]
    fn alternatives_have_ranks() {
        let started = started("m", 1, None);
        let mut piece = pieces(&["a"], Finish::Length).remove(0);
        piece.token.id = 98;
        piece.token.top =
            vec![TokenLogprob { id: 97, logprob: -0.5 }, TokenLogprob { id: 98, logprob: -1.0 }];
        let outputs = composer(&[OutputName::Logprobs], 1).piece(&started, 0, &piece);
        assert_eq!(
            texts(&outputs[0]),
            ["[{\"97\":{\"logprob\":-0.5,\"rank\":1,\"decoded_token\":\"a\"},\
              \"98\":{\"logprob\":-1.0,\"rank\":2,\"decoded_token\":\"b\"}}]"]
        );
    }
}
