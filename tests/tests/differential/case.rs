//! What is asked.

use serde_json::{Map, Value, json};

use crate::answer::{Answer, Finish};

/// Alternatives of each token, where a dialect tells them.
pub(crate) const LOGPROBS: u32 = 2;

/// More than a double holds to the last digit.
const SEED: u64 = (1 << 53) + 1;

const MAX_TOKENS: usize = 24;

/// A prompt and how to go on with it.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) name: &'static str,
    /// As text, which a chat's template has made if there are messages.
    pub(crate) prompt: String,
    /// The same as a chat.
    pub(crate) messages: Option<Value>,
    /// The chat goes on with its last message.
    pub(crate) continues: bool,
    pub(crate) max_tokens: usize,
    pub(crate) sampling: Sampling,
    pub(crate) n: usize,
    pub(crate) stop: Vec<String>,
    pub(crate) include_stop: bool,
    pub(crate) stop_token_ids: Vec<u32>,
    /// How the native API must say that it ended.
    finish: Finish,
}

/// How tokens are chosen.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sampling {
    /// With a temperature, `top_p` and `top_k`; the likeliest otherwise.
    pub(crate) seed: Option<u64>,
    pub(crate) repetition_penalty: Option<f32>,
}

impl Sampling {
    pub(crate) const TEMPERATURE: f32 = 0.8;
    pub(crate) const TOP_P: f32 = 0.95;
    pub(crate) const TOP_K: u32 = 40;

    const SEEDED: Self = Self { seed: Some(SEED), repetition_penalty: Some(1.15) };
}

/// The start of every chat by the model's template.
const SYSTEM: &str =
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n";

impl Case {
    /// The likeliest continuation, cut by its length.
    pub(crate) fn plain() -> Self {
        Self {
            name: "greedy",
            prompt: "Once upon a time, there was a little".into(),
            messages: None,
            continues: false,
            max_tokens: MAX_TOKENS,
            sampling: Sampling::default(),
            n: 1,
            stop: Vec::new(),
            include_stop: false,
            stop_token_ids: Vec::new(),
            finish: Finish::Length,
        }
    }

    /// All others, some of which stop within what came of the plain one.
    pub(crate) fn all_after(plain: &Answer) -> Vec<Self> {
        let base = Self::plain();
        let text: Vec<char> = plain.outputs[0].text.chars().collect();
        // From the middle of a word to the middle of another, so that tokens and stop begin and end apart.
        let within: String = text[30..42].iter().collect();
        let ids = plain.outputs[0].ids.as_ref().expect("the native API tells ids");
        let stopped = Self { stop: vec!["never said".into(), within], finish: Finish::Stop, ..base.clone() };
        let seeded = Self { sampling: Sampling::SEEDED, ..base.clone() };
        vec![
            Self { name: "a stop string", ..stopped.clone() },
            Self { name: "a stop string, shown", include_stop: true, ..stopped.clone() },
            Self { name: "a stop token", stop_token_ids: vec![ids[9]], finish: Finish::Stop, ..base.clone() },
            Self { name: "one token", max_tokens: 1, ..base.clone() },
            Self {
                name: "characters of several tokens",
                prompt: "🦜漢字é 🦜漢字é 🦜漢字é 🦜".into(),
                ..base.clone()
            },
            Self { name: "seeded", ..seeded.clone() },
            Self { name: "two sequences", n: 2, ..seeded.clone() },
            Self {
                name: "two sequences and a stop",
                n: 2,
                stop: vec!["e".into()],
                finish: Finish::Stop,
                ..seeded
            },
            Self::chat("a chat", Sampling::default()),
            Self::chat("a chat, seeded", Sampling { seed: Some(SEED), repetition_penalty: None }),
            Self::continued(),
        ]
    }

    /// A question whose answer ends by itself.
    fn chat(name: &'static str, sampling: Sampling) -> Self {
        let question = "What is the capital of Japan?";
        Self {
            name,
            prompt: format!("{SYSTEM}<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"),
            messages: Some(json!([{ "role": "user", "content": question }])),
            sampling,
            max_tokens: 40,
            finish: Finish::Eos,
            ..Self::plain()
        }
    }

    /// The answer has begun.
    fn continued() -> Self {
        let begun = "The capital of";
        let chat = Self::chat("a chat that goes on", Sampling::default());
        let question = json!({ "role": "user", "content": "What is the capital of Japan?" });
        Self {
            prompt: format!("{}{begun}", chat.prompt),
            messages: Some(json!([question, { "role": "assistant", "content": begun }])),
            continues: true,
            ..chat
        }
    }

    /// The options that all dialects of JSON have by the same names.
    pub(crate) fn options(&self) -> Map<String, Value> {
        let mut options = Map::new();
        let mut put = |name: &str, value: Value| options.insert(name.to_owned(), value);
        if let Some(seed) = self.sampling.seed {
            put("seed", json!(seed));
            put("temperature", decimal(Sampling::TEMPERATURE));
            put("top_p", decimal(Sampling::TOP_P));
            put("top_k", json!(Sampling::TOP_K));
        }
        if let Some(penalty) = self.sampling.repetition_penalty {
            put("repetition_penalty", decimal(penalty));
        }
        if self.include_stop {
            put("include_stop_str_in_output", json!(true));
        }
        options
    }

    /// Those that are lists.
    pub(crate) fn lists(&self) -> Map<String, Value> {
        let mut lists = Map::new();
        if !self.stop.is_empty() {
            lists.insert("stop".to_owned(), json!(self.stop));
        }
        if !self.stop_token_ids.is_empty() {
            lists.insert("stop_token_ids".to_owned(), json!(self.stop_token_ids));
        }
        lists
    }

    /// What a case was made for and the reference does not show.
    pub(crate) fn unexpected(&self, reference: &Answer) -> Vec<String> {
        let mut faults = Vec::new();
        for output in &reference.outputs {
            if output.finish != self.finish {
                faults.push(format!("{}: ended by {:?}: {:?}", self.name, output.finish, output.text));
            }
        }
        faults
    }
}

/// A number as a client writes it, `0.8` and not the many digits of its single precision.
fn decimal(number: f32) -> Value {
    number.to_string().parse::<f64>().map(Value::from).expect("a number")
}
