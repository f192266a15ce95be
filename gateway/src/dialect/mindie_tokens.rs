//! `/v1/tokenizer`, `MindIE`'s own: a text's tokens, counted and as texts.

use checkpoint::Encode;
use serde::Serialize;

use super::fields::{Fields, Integers};
use super::json;
use super::mindie::check_prompt;
use crate::fault::Fault;
use crate::models::Model;

/// What is asked.
pub(crate) struct Asked {
    /// The text.
    pub(crate) inputs: String,
    /// The model; the only one served when absent.
    pub(crate) model: Option<String>,
}

/// Field order is part of the format.
#[derive(Serialize)]
struct Answer {
    token_number: usize,
    /// What the tokens are as texts. A character that is spread over several tokens stands once, so there may be fewer
    /// than tokens.
    tokens: Vec<String>,
}

/// Reads a body.
pub(crate) fn parse(body: &[u8]) -> Result<Asked, Fault> {
    let mut fields = Fields::parse(body, Integers::Strict)?;
    let inputs = fields.string("inputs")?.ok_or_else(|| fields.fault("inputs", "is required"))?;
    check_prompt(&inputs, "inputs")?;
    let model = fields.string("model")?;
    fields.finish("/v1/tokenizer");
    Ok(Asked { inputs, model })
}

/// The answer.
pub(crate) fn counted(asked: &Asked, model: &Model) -> Result<String, Fault> {
    let tokens = model
        .text
        .encode(&asked.inputs, Encode { add_bos: true, parse_special: true })
        .map_err(|error| Fault::field("inputs", error.to_string()))?;
    let mut decoder = model.text.decoder(false);
    let mut texts: Vec<String> = tokens.iter().map(|&id| decoder.push(id)).collect();
    texts.push(decoder.finish());
    texts.retain(|text| !text.is_empty());
    Ok(json(&Answer { token_number: tokens.len(), tokens: texts }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dialect::tests::started;

    #[test]
    fn a_character_of_several_tokens_stands_once() {
        let model = started("m", 1, None).model;
        let asked = parse("{\"inputs\":\"a漢<|im_end|>\"}".as_bytes()).unwrap();
        assert_eq!(
            counted(&asked, &model).unwrap(),
            "{\"token_number\":5,\"tokens\":[\"a\",\"漢\",\"<|im_end|>\"]}"
        );
    }

    #[test]
    fn a_fault_names_its_field() {
        for (body, start) in [
            ("{}", "inputs: is required"),
            (r#"{"inputs":""}"#, "inputs: must not be empty"),
            (r#"{"inputs":5}"#, "inputs: expected a string"),
            (r#"{"inputs":"x","model":1}"#, "model: expected a string"),
        ] {
            let fault = parse(body.as_bytes()).err().unwrap().to_string();
            assert!(fault.starts_with(start), "{start}: {fault}");
        }
    }
}
