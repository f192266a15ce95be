//! What the routes of MindIE's family share: the error object, the limits of a prompt, the form of an id.

use std::ops::RangeInclusive;

use bytes::Bytes;
use http::StatusCode;
use proto::{Reason, SamplingParams};
use serde::Serialize;
use serde_json::Value;

use super::fields::Fields;
use super::{Family, json, parts};
use crate::dialect;
use crate::domain::Finish;
use crate::fault::Fault;

/// Range of counts: from 1 to the most of 32 bits with sign.
pub(crate) const COUNT: RangeInclusive<u64> = 1..=i32::MAX as u64;

/// Most characters of a prompt.
const PROMPT_CHARS_MAX: usize = 4 << 20;

/// What begins an event.
const DATA: &str = "data:";

/// The family of `/v2` and `/generate`.
pub(crate) struct MindIe;

#[derive(Serialize)]
struct ErrorBody<'a> {
    error: &'a str,
    error_type: &'a str,
}

/// The error object, as text.
pub(crate) fn error_json(fault: &Fault) -> String {
    json(&ErrorBody { error: &fault.to_string(), error_type: status_of(fault).1 })
}

/// An event of a stream.
pub(crate) fn event(value: &impl Serialize) -> Bytes {
    dialect::event(DATA, value)
}

/// A fault as a stream's last event.
pub(crate) fn fault_event(fault: &Fault) -> Bytes {
    format!("{DATA}{}\n\n", error_json(fault)).into()
}

/// Why a sequence ended. Both kinds of stop have the name that the KServe protocol gives them.
pub(crate) fn finish_reason(finish: &Finish) -> &'static str {
    match finish {
        Finish::Eos | Finish::Grammar => "eos_token",
        Finish::StopToken | Finish::StopString(_) | Finish::Stopped => "stop_sequence",
        Finish::Length => "length",
    }
}

impl Family for MindIe {
    fn refusal(fault: &Fault) -> (StatusCode, Bytes) {
        (status_of(fault).0, error_json(fault).into())
    }
}

fn status_of(fault: &Fault) -> (StatusCode, &'static str) {
    const INPUT: &str = "Input Validation Error";
    const INCOMPLETE: &str = "Incomplete Generation";
    const OVERLOADED: &str = "Overloaded";
    const UNAVAILABLE: &str = "Service Unavailable";
    const NOT_FOUND: &str = "NotFoundError";
    match fault {
        Fault::Field { .. } | Fault::Context { .. } | Fault::Body(_) => {
            (StatusCode::UNPROCESSABLE_ENTITY, INPUT)
        }
        Fault::BodyTooLarge { .. } => (StatusCode::PAYLOAD_TOO_LARGE, INPUT),
        Fault::BodyTimeout { .. } => (StatusCode::REQUEST_TIMEOUT, INPUT),
        Fault::Encoding(_) => (StatusCode::UNSUPPORTED_MEDIA_TYPE, INPUT),
        Fault::Unauthorized(_) => (StatusCode::UNAUTHORIZED, "Unauthorized"),
        Fault::Path(_) | Fault::Model(_) | Fault::Request(_) => (StatusCode::NOT_FOUND, NOT_FOUND),
        Fault::Unsupported(_) => (StatusCode::NOT_IMPLEMENTED, "Not Implemented"),
        Fault::Method { .. } => (StatusCode::METHOD_NOT_ALLOWED, "Method Not Allowed"),
        Fault::Stopped => (StatusCode::FAILED_DEPENDENCY, "Generation Error"),
        Fault::Busy { .. } => (StatusCode::TOO_MANY_REQUESTS, OVERLOADED),
        Fault::NotReady(_) => (StatusCode::SERVICE_UNAVAILABLE, UNAVAILABLE),
        Fault::Service(error) => match error.reason {
            Reason::InvalidArgument => (StatusCode::UNPROCESSABLE_ENTITY, INPUT),
            Reason::ModelNotFound => (StatusCode::NOT_FOUND, NOT_FOUND),
            Reason::QueueFull | Reason::OutOfBlocks => (StatusCode::TOO_MANY_REQUESTS, OVERLOADED),
            Reason::Deadline => (StatusCode::REQUEST_TIMEOUT, INCOMPLETE),
            Reason::WorkerLost => (StatusCode::SERVICE_UNAVAILABLE, UNAVAILABLE),
            Reason::Internal | Reason::Cancelled => (StatusCode::INTERNAL_SERVER_ERROR, INCOMPLETE),
            // A hand-off that failed in every attempt.
            _ => (StatusCode::FAILED_DEPENDENCY, "Generation Error"),
        },
    }
}

/// What says how tokens are chosen.
pub(crate) struct Choosing {
    pub(crate) do_sample: Option<bool>,
    /// There is a seed.
    pub(crate) seeded: bool,
    pub(crate) temperature: Option<f32>,
    pub(crate) top_k: Option<u64>,
    pub(crate) top_p: Option<f32>,
    pub(crate) typical_p: Option<f32>,
}

impl Choosing {
    /// Sampling if `do_sample` or else any of the others says so, else the likeliest.
    pub(crate) fn params(self) -> SamplingParams {
        let Self { do_sample, seeded, temperature, top_k, top_p, typical_p } = self;
        let sampled =
            seeded || temperature.is_some() || top_k.is_some() || top_p.is_some() || typical_p.is_some();
        SamplingParams {
            temperature: if do_sample.unwrap_or(sampled) { temperature.unwrap_or(1.0) } else { 0.0 },
            top_k: top_k.map(|k| k as u32),
            top_p: top_p.unwrap_or(1.0),
            typical_p: typical_p.unwrap_or(1.0),
            ..SamplingParams::default()
        }
    }
}

/// Seeds from here on are accepted, and told of in the log.
const SEED_LARGE: u64 = u64::MAX - u32::MAX as u64;

/// A seed, of which 0 is none.
pub(crate) fn seed(fields: &mut Fields, name: &str) -> Result<Option<u64>, Fault> {
    let seed = fields.integer(name, 1..=u64::MAX)?;
    if let Some(seed) = seed.filter(|seed| *seed >= SEED_LARGE) {
        tracing::warn!(field = name, seed, "seed is close to the largest that there is");
    }
    Ok(seed)
}

/// A prompt that is a text or a list of parts, none of them empty.
pub(crate) fn prompt_text(value: Value, field: &str) -> Result<String, Fault> {
    let is_empty = |part: &Value| part["type"] == "text" && part["text"] == "";
    if let Some(index) = value.as_array().and_then(|list| list.iter().position(is_empty)) {
        return Err(Fault::field(format!("{field}[{index}].text"), "must not be empty"));
    }
    let text = parts::text_or_parts(value, field)?;
    check_prompt(&text, field)?;
    Ok(text)
}

/// Checks the length of a prompt's text, in units of UTF-16 as MindIE counts characters.
pub(crate) fn check_prompt(text: &str, field: &str) -> Result<(), Fault> {
    if text.is_empty() {
        return Err(Fault::field(field, "must not be empty"));
    }
    // A unit takes at least one byte in UTF-8 too, so most texts need no count.
    if text.len() > PROMPT_CHARS_MAX {
        let count = text.encode_utf16().count();
        if count > PROMPT_CHARS_MAX {
            return Err(Fault::field(
                field,
                format!("expected at most {PROMPT_CHARS_MAX} characters, got {count}"),
            ));
        }
    }
    Ok(())
}

/// Checks a client's name for its request.
pub(crate) fn check_id(id: &str, field: &str) -> Result<(), Fault> {
    let well_formed = (1..=256).contains(&id.len())
        && id.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-'));
    if well_formed {
        return Ok(());
    }
    Err(Fault::field(field, "expected 1 to 256 of A-Z, a-z, 0-9, _ and -"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::dialect::fields::Integers;

    #[test]
    fn an_error_has_a_message_and_a_type() {
        let fault = Fault::field("parameters.top_k", "expected an integer");
        let (status, body) = MindIe::refusal(&fault);
        assert_eq!(status, 422);
        assert_eq!(
            body,
            r#"{"error":"parameters.top_k: expected an integer","error_type":"Input Validation Error"}"#
        );
        assert_eq!(MindIe::refusal(&Fault::Model("x".into())).0, 404);
        assert_eq!(MindIe::refusal(&Fault::Stopped).0, 424);
        assert_eq!(MindIe::refusal(&Fault::Busy { running: 1, waiting: 2 }).0, 429);
        assert_eq!(MindIe::refusal(&proto::Error::new(Reason::Deadline, "late").into()).0, 408);
        assert_eq!(MindIe::refusal(&proto::Error::new(Reason::WorkerLost, "gone").into()).0, 503);
        assert_eq!(MindIe::refusal(&proto::Error::new(Reason::ChecksumMismatch, "bad").into()).0, 424);
    }

    #[test]
    fn ids_are_of_a_few_characters() {
        assert_eq!(check_id("a123-_B", "id"), Ok(()));
        assert_eq!(check_id(&"x".repeat(256), "id"), Ok(()));
        for bad in ["", "a b", "é", "a/b", &"x".repeat(257)] {
            assert!(check_id(bad, "id").is_err(), "{bad}");
        }
    }

    #[test]
    fn parts_are_texts_that_are_not_empty() {
        let text = |parts: Value| prompt_text(parts, "p").map_err(|fault| fault.to_string());
        let (one, two) = (json!({"type": "text", "text": "a"}), json!({"type": "text", "text": "b"}));
        assert_eq!(text(json!([one, two])), Ok("ab".to_owned()));
        for kind in ["image_url", "video_url", "audio_url"] {
            let fault = text(json!([one, {"type": kind, kind: "/x"}])).unwrap_err();
            let expected = format!("p[1].type: this model takes text only, got a part of type {kind:?}");
            assert_eq!(fault, expected);
        }
        for (parts, expected) in [
            (json!([one, {"type": "text", "text": ""}]), "p[1].text: must not be empty"),
            (json!([{"type": "text"}]), "p[0].text: is required"),
            (json!([{"type": "text", "text": 5}]), "p[0].text: expected a string, got 5"),
            (json!([{"text": "a"}]), "p[0].type: is required"),
            (json!([{"type": 5}]), "p[0].type: expected a string, got 5"),
            (json!([]), "p: must not be empty"),
        ] {
            assert_eq!(text(parts), Err(expected.to_owned()));
        }
    }

    #[test]
    fn every_seed_but_zero_is_taken() {
        let read = |value: Value| {
            let mut fields = Fields::of(json!({"seed": value}), "", Integers::Strict).unwrap();
            seed(&mut fields, "seed").map_err(|fault| fault.to_string())
        };
        for number in [1, SEED_LARGE, u64::MAX] {
            assert_eq!(read(json!(number)), Ok(Some(number)));
        }
        assert_eq!(read(json!(null)), Ok(None));
        for bad in [json!(0), json!(-1), json!(1.5), json!("1"), json!(2e19)] {
            assert!(
                read(bad.clone()).unwrap_err().contains("an integer in [1, 18446744073709551615]"),
                "{bad}"
            );
        }
    }

    #[test]
    fn a_prompt_may_have_four_mebi_characters() {
        assert!(check_prompt("", "p").is_err());
        assert_eq!(check_prompt(&"é".repeat(PROMPT_CHARS_MAX), "p"), Ok(()));
        assert!(check_prompt(&"a".repeat(PROMPT_CHARS_MAX + 1), "p").is_err());
    }
}
