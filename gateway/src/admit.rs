//! Fits a request to a model: text into tokens, lengths against the context.

use checkpoint::Encode;
use proto::{Attempt, Generation, ModelDescription, RequestId, SamplingParams, StopConditions, TokenId};
use serde_json::{Value, json};

use crate::domain::{FieldNames, MaxTokens, Message, Prompt, Request, Stop};
use crate::fault::Fault;
use crate::models::Model;
use crate::text::Transcript;

/// Most stop strings.
const STOP_STRINGS_MAX: usize = 1024;
/// Most characters of all stop strings together.
const STOP_CHARS_MAX: usize = 32 << 10;
/// Most stop token ids.
const STOP_TOKENS_MAX: usize = 1024;

/// A request that fits: what to ask of a router, and what the answer's writer may want to know of the prompt.
pub(crate) struct Admitted {
    /// Its `time_left` is still to be set.
    pub(crate) generation: Generation,
    /// The prompt's text, if the request asks for it.
    pub(crate) prompt_text: Option<String>,
    /// Has the text of the tokens that were generated before.
    pub(crate) transcript: Transcript,
}

/// Tokenises and checks. Takes time in proportion to the prompt, so it has no place on a thread of the runtime.
pub(crate) fn admit(request: &Request, model: &Model, id: RequestId, seed: u64) -> Result<Admitted, Fault> {
    let names = &request.names;
    check_stop(&request.stop, names)?;
    let encoded = encode(&request.prompt, model, names)?;
    check_ids(&encoded.tokens, &model.description, names)?;
    let prompt_text = request.echo.then(|| match &request.prompt {
        Prompt::Text(text) => text.clone(),
        _ => model.text.decode(&encoded.tokens, request.skip_special_tokens),
    });
    let max_tokens = fit(&encoded, request.max_tokens, model.description.context_len, names)?;
    let eos_ids = if request.stop.ignore_eos { Vec::new() } else { model.text.eos_ids().to_vec() };
    let mut transcript = Transcript::new(&model.text, &request.stop, request.skip_special_tokens);
    transcript.replay(&encoded.tokens[encoded.tokens.len() - encoded.generated..]);
    let generation = Generation {
        request: id,
        attempt: Attempt::default(),
        model: model.description.name.clone(),
        generated: encoded.generated,
        tokens: encoded.tokens,
        sampling: SamplingParams { seed: request.seed.unwrap_or(seed), ..request.sampling.clone() },
        stop: StopConditions {
            max_tokens,
            eos_ids,
            stop_token_ids: request.stop.token_ids.clone(),
            min_tokens: request.stop.min_tokens,
        },
        time_left: std::time::Duration::ZERO,
        probe: false,
        beside: None,
    };
    Ok(Admitted { generation, prompt_text, transcript })
}

/// The limits that every API has, since what finds a stop string grows with all of them together.
fn check_stop(stop: &Stop, names: &FieldNames) -> Result<(), Fault> {
    let count = stop.strings.len();
    if count > STOP_STRINGS_MAX {
        let message = format!("expected at most {STOP_STRINGS_MAX} strings, got {count}");
        return Err(Fault::field(names.stop, message));
    }
    if stop.strings.iter().any(String::is_empty) {
        return Err(Fault::field(names.stop, "expected strings of at least 1 character, got an empty one"));
    }
    let chars: usize = stop.strings.iter().map(|string| string.chars().count()).sum();
    if chars > STOP_CHARS_MAX {
        let message = format!("expected at most {STOP_CHARS_MAX} characters in all, got {chars}");
        return Err(Fault::field(names.stop, message));
    }
    let count = stop.token_ids.len();
    if count > STOP_TOKENS_MAX {
        let message = format!("expected at most {STOP_TOKENS_MAX} token ids, got {count}");
        return Err(Fault::field(names.stop_token_ids, message));
    }
    Ok(())
}

struct Encoded {
    tokens: Vec<TokenId>,
    /// How many at the end were generated before.
    generated: usize,
}

fn encode(prompt: &Prompt, model: &Model, names: &FieldNames) -> Result<Encoded, Fault> {
    let text = &model.text;
    let (tokens, generated) = match prompt {
        Prompt::Tokens(tokens) => (tokens.clone(), 0),
        Prompt::Resumed { tokens, generated } => (tokens.clone(), *generated),
        Prompt::Text(prompt) => {
            check_bytes(prompt, model, names)?;
            let options = Encode { add_bos: true, parse_special: true };
            (
                text.encode(prompt, options)
                    .map_err(|error| Fault::field(names.prompt, error.to_string()))?,
                0,
            )
        }
        Prompt::Chat(messages) => {
            let rendered = text
                .render_chat(&chat(messages), &json!({"add_generation_prompt": true}))
                .map_err(|error| Fault::field(names.prompt, error.to_string()))?;
            check_bytes(&rendered, model, names)?;
            // A template writes the beginning-of-sequence token itself where the model wants one.
            let options = Encode { add_bos: false, parse_special: true };
            (
                text.encode(&rendered, options)
                    .map_err(|error| Fault::field(names.prompt, error.to_string()))?,
                0,
            )
        }
    };
    if tokens.len() <= generated {
        return Err(Fault::field(names.prompt, "expected at least 1 token, got none"));
    }
    Ok(Encoded { tokens, generated })
}

/// Refuses a text that cannot fit, however it is tokenised, before time is spent on that.
fn check_bytes(text: &str, model: &Model, names: &FieldNames) -> Result<(), Fault> {
    let context = model.description.context_len;
    let bytes_max = context.saturating_mul(model.token_bytes_max);
    if text.len() <= bytes_max {
        return Ok(());
    }
    let message = format!(
        "the prompt has {} bytes, and the model's context of {context} tokens never holds more than {bytes_max}",
        text.len()
    );
    Err(Fault::Context { field: names.prompt.to_owned(), message })
}

fn chat(messages: &[Message]) -> Value {
    let objects = messages.iter().map(|message| {
        let mut object = json!({"role": message.role, "content": message.content});
        if let Some(name) = &message.name {
            object["name"] = json!(name);
        }
        object
    });
    Value::Array(objects.collect())
}

fn check_ids(tokens: &[TokenId], model: &ModelDescription, names: &FieldNames) -> Result<(), Fault> {
    match tokens.iter().find(|id| **id as usize >= model.vocab_size) {
        None => Ok(()),
        Some(id) => {
            let message = format!("expected token ids below {}, got {id}", model.vocab_size);
            Err(Fault::field(names.prompt, message))
        }
    }
}

/// Generated tokens in all, those from before included.
fn fit(encoded: &Encoded, asked: MaxTokens, context: usize, names: &FieldNames) -> Result<usize, Fault> {
    let Encoded { tokens, generated } = encoded;
    if tokens.len() >= context {
        let message = format!(
            "the prompt has {} tokens, and the model's context of {context} tokens must leave room for 1 more",
            tokens.len()
        );
        return Err(Fault::Context { field: names.prompt.to_owned(), message });
    }
    let prompt = tokens.len() - generated;
    let room = context - prompt;
    let max_tokens = match asked {
        MaxTokens::Fill => room,
        MaxTokens::Clamp(asked) => asked.min(room),
        MaxTokens::Exact(asked) if asked <= room => asked,
        MaxTokens::Exact(asked) => {
            let message = format!(
                "the prompt has {prompt} tokens and {asked} are asked for, {} in all, \
                 more than the model's context of {context} tokens",
                prompt.saturating_add(asked)
            );
            return Err(Fault::Context { field: names.max_tokens.to_owned(), message });
        }
    };
    if max_tokens <= *generated {
        let message = format!("expected more than the {generated} tokens generated before, got {max_tokens}");
        return Err(Fault::field(names.max_tokens, message));
    }
    Ok(max_tokens)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const NAMES: FieldNames = FieldNames {
        prompt: "prompt",
        max_tokens: "max_tokens",
        stop: "the_stop",
        stop_token_ids: "the_ids",
        model: "model",
    };

    fn admitted(request: &Request) -> Result<Admitted, Fault> {
        let started = crate::dialect::tests::started("m", 1, None);
        admit(request, &started.model, RequestId("r".into()), 1)
    }

    #[test]
    fn stops_are_bounded_and_named_as_the_client_wrote_them() {
        let text = |strings: Vec<String>| Stop { strings, ..Stop::default() };
        let ids = |count: usize| Stop { token_ids: vec![7; count], ..Stop::default() };
        let request = |stop: Stop| Request { stop, ..Request::new(Prompt::Text("x".into()), NAMES) };
        for (stop, start) in [
            (text(vec!["a".into(), String::new()]), "the_stop: expected strings of at least 1 character"),
            (
                text(vec!["\u{e9}".repeat(32_768), "b".into()]),
                "the_stop: expected at most 32768 characters in all, got 32769",
            ),
            (text(vec!["a".into(); 1025]), "the_stop: expected at most 1024 strings, got 1025"),
            (ids(1025), "the_ids: expected at most 1024 token ids, got 1025"),
        ] {
            let fault = admitted(&request(stop)).err().expect("a fault").to_string();
            assert!(fault.starts_with(start), "{fault}");
        }
        for stop in [text(vec!["\u{e9}".repeat(32_768)]), text(vec!["a".into(); 1024]), ids(1024)] {
            assert_eq!(
                admitted(&request(stop.clone())).unwrap().generation.stop.stop_token_ids,
                stop.token_ids
            );
        }
    }

    #[test]
    fn a_text_that_cannot_fit_is_refused_before_it_is_tokenised() {
        // The longest token of the test's vocabulary is <|im_start|>.
        let most = 64 * "<|im_start|>".len();
        let message = |text: String| Message { role: "user".into(), content: text, name: None };
        for prompt in [Prompt::Text("x".repeat(most + 1)), Prompt::Chat(vec![message("x".repeat(most))])] {
            let fault = admitted(&Request::new(prompt, NAMES)).err().expect("a fault");
            assert!(matches!(fault, Fault::Context { .. }), "{fault}");
            let fault = fault.to_string();
            assert!(fault.starts_with("prompt: the prompt has ") && fault.contains(" bytes, "), "{fault}");
        }
        // As many bytes as could fit, and they do not: told after tokenising.
        let fault = admitted(&Request::new(Prompt::Text("x".repeat(most)), NAMES)).err().expect("a fault");
        assert!(fault.to_string().starts_with("prompt: the prompt has 768 tokens"), "{fault}");
        let fits = "<|im_start|>".repeat(63);
        assert_eq!(admitted(&Request::new(Prompt::Text(fits), NAMES)).unwrap().generation.tokens.len(), 63);
    }

    #[test]
    fn a_deadline_is_never_longer_than_a_month() {
        let mut request = Request::new(Prompt::Text("x".into()), NAMES);
        let (second, month) = (Duration::from_secs(1), Duration::from_hours(30 * 24));
        for (timeout, default, expected) in [
            (None, second, second),
            (None, Duration::MAX, month),
            (Some(second), month, second),
            (Some(Duration::from_micros(1 << 63)), second, month),
            (Some(Duration::from_micros(u64::MAX)), second, month),
        ] {
            request.timeout = timeout;
            assert_eq!(request.deadline(default), expected);
        }
    }

    fn fitted(prompt: usize, generated: usize, asked: MaxTokens) -> Result<usize, String> {
        let encoded = Encoded { tokens: vec![0; prompt + generated], generated };
        fit(&encoded, asked, 10, &NAMES).map_err(|fault| fault.to_string())
    }

    #[test]
    fn lengths_are_held_against_the_context() {
        assert_eq!(fitted(4, 0, MaxTokens::Fill), Ok(6));
        assert_eq!(fitted(4, 0, MaxTokens::Clamp(20)), Ok(6));
        assert_eq!(fitted(4, 0, MaxTokens::Clamp(2)), Ok(2));
        assert_eq!(fitted(4, 0, MaxTokens::Exact(6)), Ok(6));
        let error = fitted(4, 0, MaxTokens::Exact(7)).unwrap_err();
        assert!(error.starts_with("max_tokens: ") && error.contains("4 tokens and 7"), "{error}");
        assert!(error.contains("context of 10 tokens"), "{error}");
        assert_eq!(fitted(9, 0, MaxTokens::Clamp(5)), Ok(1));
        let error = fitted(10, 0, MaxTokens::Clamp(5)).unwrap_err();
        assert!(error.starts_with("prompt: ") && error.contains("10 tokens"), "{error}");
    }

    #[test]
    fn tokens_generated_before_count_towards_the_most() {
        assert_eq!(fitted(3, 2, MaxTokens::Clamp(5)), Ok(5));
        assert!(fitted(3, 2, MaxTokens::Clamp(2)).unwrap_err().contains("more than the 2 tokens"));
    }
}
