//! Fits a request to a model: text into tokens, lengths against the context.

use checkpoint::{Encode, Text};
use proto::{Attempt, Generation, ModelDescription, RequestId, SamplingParams, StopConditions, TokenId};
use serde_json::{Value, json};

use crate::domain::{FieldNames, MaxTokens, Message, Prompt, Request};
use crate::fault::Fault;
use crate::models::Model;

/// A request that fits: what to ask of a router, and what the answer's writer may want to know of the prompt.
pub(crate) struct Admitted {
    /// Its `time_left` is still to be set.
    pub(crate) generation: Generation,
    /// The prompt's text, if the request asks for it.
    pub(crate) prompt_text: Option<String>,
}

/// Tokenises and checks. Takes time in proportion to the prompt.
pub(crate) fn admit(request: &Request, model: &Model, id: RequestId, seed: u64) -> Result<Admitted, Fault> {
    let names = &request.names;
    let encoded = encode(&request.prompt, &model.text, names)?;
    check_ids(&encoded.tokens, &model.description, names)?;
    let prompt_text = request.echo.then(|| match &request.prompt {
        Prompt::Text(text) => text.clone(),
        _ => model.text.decode(&encoded.tokens, request.skip_special_tokens),
    });
    let max_tokens = fit(&encoded, request.max_tokens, model.description.context_len, names)?;
    let eos_ids = if request.stop.ignore_eos { Vec::new() } else { model.text.eos_ids().to_vec() };
    let generation = Generation {
        request: id,
        attempt: Attempt::default(),
        model: model.description.name.clone(),
        generated: encoded.generated,
        tokens: encoded.tokens,
        sampling: SamplingParams { seed: request.seed.unwrap_or(seed), ..request.sampling.clone() },
        stop: StopConditions { max_tokens, eos_ids, stop_token_ids: request.stop.token_ids.clone() },
        time_left: std::time::Duration::ZERO,
        probe: false,
    };
    Ok(Admitted { generation, prompt_text })
}

struct Encoded {
    tokens: Vec<TokenId>,
    /// How many at the end were generated before.
    generated: usize,
}

fn encode(prompt: &Prompt, text: &Text, names: &FieldNames) -> Result<Encoded, Fault> {
    let (tokens, generated) = match prompt {
        Prompt::Tokens(tokens) => (tokens.clone(), 0),
        Prompt::Resumed { tokens, generated } => (tokens.clone(), *generated),
        Prompt::Text(prompt) => {
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
    use super::*;

    const NAMES: FieldNames = FieldNames { prompt: "prompt", max_tokens: "max_tokens", model: "model" };

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
