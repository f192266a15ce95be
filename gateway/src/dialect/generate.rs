//! `POST /generate`, which two APIs have: vLLM's body has a `prompt`, TGI's has `inputs`.

use bytes::Bytes;

use super::fields::{Fields, Integers};
use super::tgi::{self, Route, TgiWriter};
use super::vllm::{self, VllmWriter};
use super::{Call, Events, Writer};
use crate::Config;
use crate::answer::Started;
use crate::domain::{Piece, Whole};
use crate::fault::Fault;

/// Writes the answer in the way of the body that asked.
pub(crate) enum GenerateWriter {
    Vllm(VllmWriter),
    Tgi(Box<TgiWriter>),
}

/// Reads a call of either API; a body with both fields is vLLM's.
pub(crate) fn parse(config: &Config, body: &[u8]) -> Result<Call<GenerateWriter>, Fault> {
    let fields = Fields::parse(body, Integers::Strict)?;
    if fields.has("prompt") {
        let Call { requests, writer, stream } = vllm::parse(config, fields)?;
        return Ok(Call { requests, writer: GenerateWriter::Vllm(writer), stream });
    }
    if fields.has("inputs") {
        let Call { requests, writer, stream } = tgi::parse(config, Route::Generate, fields)?;
        return Ok(Call { requests, writer: GenerateWriter::Tgi(Box::new(writer)), stream });
    }
    Err(fields.fault("prompt", "is required; or inputs, for a body of TGI's form"))
}

impl Writer for GenerateWriter {
    const STREAM_TYPE: &'static str = {
        assert!(
            matches!(VllmWriter::STREAM_TYPE.as_bytes(), b"text/event-stream")
                && matches!(TgiWriter::STREAM_TYPE.as_bytes(), b"text/event-stream"),
            "both stream alike"
        );
        VllmWriter::STREAM_TYPE
    };

    fn dialect(&self) -> Option<&'static str> {
        Some(match self {
            Self::Vllm(_) => "vllm",
            Self::Tgi(_) => "tgi",
        })
    }

    fn begin(&mut self, started: &[Started], events: &mut Events) {
        match self {
            Self::Vllm(writer) => writer.begin(started, events),
            Self::Tgi(writer) => writer.begin(started, events),
        }
    }

    fn piece(&mut self, choice: usize, piece: &Piece, events: &mut Events) {
        match self {
            Self::Vllm(writer) => writer.piece(choice, piece, events),
            Self::Tgi(writer) => writer.piece(choice, piece, events),
        }
    }

    fn end(&mut self, events: &mut Events) {
        match self {
            Self::Vllm(writer) => writer.end(events),
            Self::Tgi(writer) => writer.end(events),
        }
    }

    fn fault(&mut self, fault: &Fault) -> Bytes {
        match self {
            Self::Vllm(writer) => writer.fault(fault),
            Self::Tgi(writer) => writer.fault(fault),
        }
    }

    fn whole(&mut self, started: &[Started], wholes: &[Whole]) -> Bytes {
        match self {
            Self::Vllm(writer) => writer.whole(started, wholes),
            Self::Tgi(writer) => writer.whole(started, wholes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_body_says_whose_it_is() {
        let read = |body: &str| {
            parse(&Config::default(), body.as_bytes())
                .map(|call| call.writer.dialect() == Some("vllm"))
                .map_err(|fault| fault.to_string())
        };
        assert_eq!(read(r#"{"prompt":"x"}"#), Ok(true));
        assert_eq!(read(r#"{"inputs":"x"}"#), Ok(false));
        assert_eq!(read(r#"{"prompt":null,"inputs":"x"}"#), Ok(false));
        assert_eq!(read(r#"{"prompt":"x","inputs":5}"#), Ok(true));
        let fault = read("{}").unwrap_err();
        assert_eq!(fault, "prompt: is required; or inputs, for a body of TGI's form");
    }
}
