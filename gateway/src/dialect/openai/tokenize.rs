//! `/tokenize` and `/detokenize`, which vLLM serves beside `OpenAI`'s routes. A chat is read as
//! `/v1/chat/completions` reads it, so its tokens are those that an answer would continue.

use checkpoint::{Encode, Text};
use proto::TokenId;
use serde::Serialize;

use super::chat_plan::plan;
use super::chat_request::{Setting, chat};
use super::chat_tools::Tools;
use super::{chat_messages, chat_tools};
use crate::admit::render;
use crate::dialect::fields::{Fields, Integers};
use crate::dialect::{json, sampling};
use crate::domain::Chat;
use crate::fault::Fault;
use crate::models::Model;

/// Most bytes of a text. It may be longer than the context, since who asks wants to know by how much.
pub(crate) const TEXT_BYTES_MAX: usize = 4 << 20;

#[derive(Serialize)]
struct Tokenized<'a> {
    count: usize,
    /// The context, in tokens.
    max_model_len: usize,
    tokens: &'a [TokenId],
    token_strs: Option<Vec<String>>,
}

#[derive(Serialize)]
struct Detokenized {
    prompt: String,
}

/// The answer to a body of `/tokenize`.
pub(crate) fn tokenized(body: &[u8], setting: &Setting<'_>) -> Result<String, Fault> {
    let mut fields = Fields::parse(body, Integers::Whole)?;
    let model = fields.string("model")?;
    let strings = fields.flag("return_token_strs")?.unwrap_or(false);
    let special = fields.flag("add_special_tokens")?;
    let prompt = fields.string("prompt")?;
    let chat = chat_options(&mut fields, setting)?;
    let (model, text, field) = match (chat, prompt) {
        ((Some(chat), tools), _) => {
            let (model, text) = chat_text(chat, &tools, model.as_deref(), setting)?;
            (model, text, "messages")
        }
        (_, Some(text)) => ((setting.model)(model.as_deref())?, text, "prompt"),
        _ => return Err(Fault::field("prompt", "is required, or messages")),
    };
    fields.finish("/tokenize");
    check_length(&text, field)?;
    // A chat template writes the beginning of a sequence itself where the model wants one.
    let add_bos = special.unwrap_or(field == "prompt");
    let tokens = model
        .text
        .encode(&text, Encode { add_bos, parse_special: true })
        .map_err(|error| Fault::field(field, error.to_string()))?;
    let strings = strings.then(|| {
        let texts = tokens.iter().map(|&id| model.text.token_bytes(id).unwrap_or_default());
        texts.map(|bytes| String::from_utf8_lossy(bytes).into_owned()).collect()
    });
    Ok(json(&Tokenized {
        count: tokens.len(),
        max_model_len: max_model_len(&model, setting),
        tokens: &tokens,
        token_strs: strings,
    }))
}

/// The chat, if there is one, and its tools. What belongs to a chat is read beside a text too, so that what is wrong is
/// wrong everywhere.
fn chat_options(fields: &mut Fields, setting: &Setting<'_>) -> Result<(Option<Chat>, Tools), Fault> {
    let messages = match fields.take("messages") {
        Some(messages) => Some(chat_messages::read(messages, setting.config)?),
        None => None,
    };
    let tools = chat_tools::read(fields)?;
    let is_chat = messages.is_some();
    let chat = chat(fields, messages.unwrap_or_default(), setting.config)?;
    Ok((is_chat.then_some(chat), tools))
}

/// The text that a chat becomes, and its model.
fn chat_text(
    mut chat: Chat,
    tools: &Tools,
    model: Option<&str>,
    setting: &Setting<'_>,
) -> Result<(std::sync::Arc<Model>, String), Fault> {
    let model = (setting.model)(model)?;
    plan(&mut chat, tools, None, &model.text, setting.config);
    let text = render(&chat, &model.text).map_err(|error| Fault::field("messages", error.to_string()))?;
    Ok((model, text))
}

fn max_model_len(model: &Model, setting: &Setting<'_>) -> usize {
    setting.config.max_seq_len.unwrap_or(usize::MAX).min(model.description.context_len)
}

/// Refuses a text that is too long to be looked at.
pub(crate) fn check_length(text: &str, field: &str) -> Result<(), Fault> {
    if text.len() <= TEXT_BYTES_MAX {
        return Ok(());
    }
    Err(Fault::field(field, format!("expected at most {TEXT_BYTES_MAX} bytes, got {}", text.len())))
}

/// The answer to a body of `/detokenize`.
pub(crate) fn detokenized(body: &[u8], setting: &Setting<'_>) -> Result<String, Fault> {
    let mut fields = Fields::parse(body, Integers::Whole)?;
    let model = fields.string("model")?;
    if !fields.has("tokens") {
        return Err(Fault::field("tokens", "is required"));
    }
    let tokens = sampling::token_ids(&mut fields, "tokens")?;
    fields.finish("/detokenize");
    let model = (setting.model)(model.as_deref())?;
    let vocab = model.text.vocab_size();
    if let Some((index, id)) = tokens.iter().enumerate().find(|(_, id)| **id as usize >= vocab) {
        let message = format!("expected a token id below {vocab}, got {id}");
        return Err(Fault::field(format!("tokens[{index}]"), message));
    }
    Ok(json(&Detokenized { prompt: text_of(&model.text, &tokens) }))
}

/// The text that becomes these tokens: without the blank that some tokenizers put before it.
fn text_of(text: &Text, tokens: &[TokenId]) -> String {
    let decoded = text.decode(tokens, false);
    match decoded.strip_prefix(' ') {
        Some(rest) if puts_blank(text) => rest.to_owned(),
        _ => decoded,
    }
}

fn puts_blank(text: &Text) -> bool {
    text.encode("x", Encode::default()).is_ok_and(|tokens| text.decode(&tokens, false).starts_with(' '))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::{Value, json};

    use super::*;
    use crate::Config;
    use crate::dialect::tests::started;

    fn asked(
        body: &Value,
        answer: fn(&[u8], &Setting<'_>) -> Result<String, Fault>,
    ) -> Result<String, String> {
        let model = started("m", 1, None).model;
        let find = |name: Option<&str>| -> Result<Arc<Model>, Fault> {
            match name {
                None | Some("m") => Ok(model.clone()),
                Some(other) => Err(Fault::Model(other.to_owned())),
            }
        };
        let setting = Setting { config: &Config::default(), model: &find };
        answer(body.to_string().as_bytes(), &setting).map_err(|fault| fault.to_string())
    }

    #[test]
    fn a_text_is_counted() {
        assert_eq!(
            asked(&json!({"model": "m", "prompt": "Hi"}), tokenized).unwrap(),
            r#"{"count":2,"max_model_len":64,"tokens":[72,105],"token_strs":null}"#
        );
        let body = json!({"prompt": "é<|im_end|>", "add_special_tokens": false, "return_token_strs": true});
        assert_eq!(
            asked(&body, tokenized).unwrap(),
            "{\"count\":3,\"max_model_len\":64,\"tokens\":[195,169,257],\
             \"token_strs\":[\"\u{fffd}\",\"\u{fffd}\",\"<|im_end|>\"]}"
        );
    }

    #[test]
    fn a_chat_is_counted_as_it_is_rendered() {
        let tokens = |extra: Value| {
            let mut body = json!({"messages": [{"role": "user", "content": "x"}]});
            body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
            let answer: Value = serde_json::from_str(&asked(&body, tokenized).unwrap()).unwrap();
            let text = asked(&json!({"tokens": answer["tokens"]}), detokenized).unwrap();
            serde_json::from_str::<Value>(&text).unwrap()["prompt"].as_str().unwrap().to_owned()
        };
        let turn = "<|im_start|>user\nx<|im_end|>\n";
        assert_eq!(tokens(json!({})), format!("{turn}<|im_start|>assistant\n"));
        assert_eq!(tokens(json!({"add_generation_prompt": false})), turn);
        assert_eq!(
            tokens(json!({"add_generation_prompt": false, "continue_final_message": true})),
            "<|im_start|>user\nx"
        );
        let tools = json!([{"type": "function", "function": {"name": "get_weather"}}]);
        assert!(tokens(json!({"tools": tools})).contains("get_weather"));
    }

    #[test]
    fn tokens_become_the_text_again() {
        let text = asked(&json!({"tokens": [72, 105, 257]}), detokenized).unwrap();
        assert_eq!(text, r#"{"prompt":"Hi<|im_end|>"}"#);
        assert_eq!(asked(&json!({"tokens": []}), detokenized).unwrap(), r#"{"prompt":""}"#);
    }

    #[test]
    fn a_fault_names_its_field() {
        for (body, start) in [
            (json!({}), "prompt: is required, or messages"),
            (json!({"prompt": 1}), "prompt: expected a string"),
            (json!({"prompt": "x", "model": "other"}), "model \"other\" is not served here"),
            (json!({"prompt": "x", "add_special_tokens": 1}), "add_special_tokens: "),
            (json!({"prompt": "x", "return_token_strs": 1}), "return_token_strs: "),
            (json!({"prompt": "x", "functions": [[null]]}), "functions[0]"),
            (json!({"prompt": "x", "documents": [1]}), "documents[0]: expected an object"),
            (json!({"messages": []}), "messages: expected at least 1 message"),
            (json!({"messages": [{"role": "user"}]}), "messages[0].content"),
            (json!({"prompt": "x".repeat(TEXT_BYTES_MAX + 1)}), "prompt: expected at most 4194304 bytes"),
        ] {
            let fault = asked(&body, tokenized).unwrap_err();
            assert!(fault.starts_with(start), "{start}: {fault}");
        }
        for (body, start) in [
            (json!({}), "tokens: is required"),
            (json!({"tokens": "x"}), "tokens: expected a list"),
            (json!({"tokens": [-1]}), "tokens[0]: expected a token id"),
            (json!({"tokens": [1, 99999]}), "tokens[1]: expected a token id below 261, got 99999"),
        ] {
            let fault = asked(&body, detokenized).unwrap_err();
            assert!(fault.starts_with(start), "{start}: {fault}");
        }
    }
}
