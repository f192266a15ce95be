//! What an answer says of each choice, read from its one body or from the objects of its stream.

use gateway::fuzzing::Front;
use serde_json::Value;

/// What a choice says.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Choice {
    pub(crate) text: String,
    /// What the model thought.
    pub(crate) thought: String,
    /// Names and arguments of calls.
    pub(crate) calls: Vec<(String, String)>,
    /// Why it ended; a choice ends once.
    pub(crate) ended: Vec<String>,
    /// Log-probabilities of its tokens.
    pub(crate) logprobs: Vec<Value>,
}

impl Choice {
    /// Takes an object of a choice: `message` in one piece, `delta` in a stream.
    fn take_chat(&mut self, choice: &Value, message: &Value) {
        self.text.push_str(message["content"].as_str().unwrap_or_default());
        self.thought.push_str(message["reasoning_content"].as_str().unwrap_or_default());
        for (place, call) in message["tool_calls"].as_array().into_iter().flatten().enumerate() {
            let index = call["index"].as_u64().map_or(place, |index| index as usize);
            self.take_call(index, &call["function"]);
        }
        if message["function_call"].is_object() {
            self.take_call(0, &message["function_call"]);
        }
        self.logprobs.extend(choice["logprobs"]["content"].as_array().into_iter().flatten().cloned());
        self.take_end(&choice["finish_reason"]);
    }

    fn take_call(&mut self, index: usize, function: &Value) {
        assert!(index <= self.calls.len(), "calls are counted");
        if index == self.calls.len() {
            let name = function["name"].as_str().expect("a call begins with its name");
            self.calls.push((name.to_owned(), String::new()));
        }
        let arguments = match &function["arguments"] {
            Value::String(text) => text.clone(),
            object => object.to_string(),
        };
        self.calls[index].1.push_str(&arguments);
    }

    fn take_text(&mut self, choice: &Value) {
        self.text.push_str(choice["text"].as_str().unwrap_or_default());
        for list in ["text_offset", "tokens", "token_logprobs", "top_logprobs"] {
            self.logprobs.extend(choice["logprobs"][list].as_array().into_iter().flatten().cloned());
        }
        self.take_end(&choice["finish_reason"]);
    }

    fn take_end(&mut self, reason: &Value) {
        self.ended.extend(reason.as_str().map(ToOwned::to_owned));
        assert!(self.ended.len() <= 1, "a choice ends once: {:?}", self.ended);
    }

    /// Lists of a stream come piece by piece, those of a whole list by list: the order tells nothing.
    fn sorted(mut self) -> Self {
        self.logprobs.sort_by_cached_key(Value::to_string);
        self
    }
}

/// The choices of an answer in one piece.
pub(crate) fn choices(front: Front, whole: &Value) -> Vec<Choice> {
    let list = |name: &str| whole[name].as_array().into_iter().flatten();
    let told: Vec<Choice> = match front {
        Front::Triton { .. } => vec![triton([whole])],
        Front::Tgi { .. } => tgi_sequences(whole),
        Front::Vllm => list("text").map(|text| Choice { text: text_of(text), ..Choice::default() }).collect(),
        Front::Chat { .. } => list("choices")
            .map(|object| {
                let mut choice = Choice::default();
                choice.take_chat(object, &object["message"]);
                choice
            })
            .collect(),
        Front::Completions => list("choices")
            .map(|object| {
                let mut choice = Choice::default();
                choice.take_text(object);
                choice
            })
            .collect(),
    };
    told.into_iter().map(Choice::sorted).collect()
}

/// What the objects of a stream say of so many choices.
pub(crate) fn streamed(front: Front, objects: &[Value], count: usize) -> Vec<Choice> {
    if matches!(front, Front::Triton { .. }) {
        return vec![triton(objects)];
    }
    if matches!(front, Front::Tgi { .. }) {
        return vec![tgi_stream(objects)];
    }
    let mut told: Vec<Choice> = Vec::new();
    told.resize_with(count, Choice::default);
    for object in objects {
        for (index, text) in object["text"].as_array().into_iter().flatten().enumerate() {
            told[index].text.push_str(&text_of(text));
        }
        for choice in object["choices"].as_array().into_iter().flatten() {
            let index = choice["index"].as_u64().expect("a choice has a number") as usize;
            match front {
                Front::Completions => told[index].take_text(choice),
                _ => told[index].take_chat(choice, &choice["delta"]),
            }
        }
    }
    told.into_iter().map(Choice::sorted).collect()
}

fn triton<'a>(objects: impl IntoIterator<Item = &'a Value>) -> Choice {
    let mut choice = Choice::default();
    for object in objects {
        choice.text.push_str(&text_of(&object["text_output"]));
        choice.take_end(&object["details"]["finish_reason"]);
    }
    choice
}

/// The sequences of TGI's answer in one piece: the likeliest, and those among its details.
fn tgi_sequences(whole: &Value) -> Vec<Choice> {
    let sequence = |text: &Value, details: &Value| {
        let mut choice = Choice { text: text_of(text), ..Choice::default() };
        choice.take_end(&details["finish_reason"]);
        choice
    };
    let details = &whole["details"];
    let others = details["best_of_sequences"].as_array().into_iter().flatten();
    std::iter::once(sequence(&whole["generated_text"], details))
        .chain(others.map(|other| sequence(&other["generated_text"], other)))
        .collect()
}

/// What TGI's events say: a text token by token, which the last event has as a whole.
fn tgi_stream(objects: &[Value]) -> Choice {
    let mut choice = Choice::default();
    for (place, object) in objects.iter().enumerate() {
        assert_eq!(object["index"], place + 1, "events are counted");
        if object["token"]["special"] == false {
            choice.text.push_str(&text_of(&object["token"]["text"]));
        }
        if let Some(whole) = object["generated_text"].as_str() {
            assert_eq!(place + 1, objects.len(), "the whole text comes last");
            assert!(whole.ends_with(&choice.text), "{whole:?} {choice:?}");
            whole.clone_into(&mut choice.text);
        }
        choice.take_end(&object["details"]["finish_reason"]);
    }
    choice
}

fn text_of(value: &Value) -> String {
    value.as_str().expect("a text").to_owned()
}
