//! Requests from a trace: JSON lines in the format of Mooncake's public traces.
//!
//! ```json
//! {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48]}
//! ```
//!
//! `timestamp` is in milliseconds. An id stands for a block of 512 tokens *and all before it*, so equal ids are equal
//! beginnings. Tokens without an id are nobody else's.

use proto::Error;
use serde::Deserialize;

use super::{Arrival, Part};
use crate::random::mix;

/// Tokens that an id of a trace stands for.
pub const TRACE_BLOCK_TOKENS: usize = 512;

/// A line. Other fields are left alone.
#[derive(Deserialize)]
struct Line {
    timestamp: f64,
    input_length: usize,
    output_length: usize,
    #[serde(default)]
    hash_ids: Vec<u64>,
}

/// The requests of a trace, in the order of time, from its first on. Prompts and outputs are cut to `context_len`.
///
/// # Errors
/// INVALID_ARGUMENT that names the line and the field.
pub fn read_trace(text: &str, context_len: usize) -> Result<Vec<Arrival>, Error> {
    let mut requests = Vec::new();
    for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let at = format!("trace, line {}", number + 1);
        let line: Line = serde_json::from_str(line).map_err(|fault| Error::invalid(&at, fault))?;
        let fault = |field: &str, message: &str| Err(Error::invalid(&format!("{at}: {field}"), message));
        if !line.timestamp.is_finite() || line.timestamp < 0.0 {
            return fault("timestamp", "milliseconds from 0 expected");
        }
        if line.input_length == 0 {
            return fault("input_length", "at least 1 expected, 0 came");
        }
        if line.output_length == 0 {
            return fault("output_length", "at least 1 expected, 0 came");
        }
        let prompt = line.input_length.min(context_len - 1);
        let output = line.output_length.min(context_len - prompt);
        let mut parts = Vec::with_capacity(line.hash_ids.len() + 1);
        let mut left = prompt;
        for id in line.hash_ids {
            let len = left.min(TRACE_BLOCK_TOKENS);
            if len > 0 {
                parts.push(Part { stream: mix(0x7ace, id), start: 0, len });
            }
            left -= len;
        }
        let own = mix(0x7ace_0000, number as u64);
        parts.push(Part { stream: own, start: 0, len: left + output });
        requests.push(Arrival { at: line.timestamp / 1e3, prompt, output, parts });
    }
    requests.sort_by(|a, b| a.at.total_cmp(&b.at));
    let first = requests.first().map_or(0.0, |request| request.at);
    requests.iter_mut().for_each(|request| request.at -= first);
    Ok(requests)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_ids_are_equal_beginnings() {
        let text = r#"
{"timestamp": 2000, "input_length": 1200, "output_length": 5, "hash_ids": [1, 2, 9]}
{"timestamp": 500, "input_length": 1030, "output_length": 7, "hash_ids": [1, 2, 3], "type": "chat"}
{"timestamp": 900, "input_length": 30, "output_length": 7}
"#;
        let requests = read_trace(text, 4096).unwrap();
        let times: Vec<f64> = requests.iter().map(|request| request.at).collect();
        assert_eq!(times, [0.0, 0.4, 1.5]);
        let tokens: Vec<Vec<u32>> = requests
            .iter()
            .map(|request| {
                let mut tokens = Vec::new();
                request.tokens(&mut tokens);
                assert_eq!(tokens.len(), request.prompt + request.output);
                tokens
            })
            .collect();
        assert_eq!(tokens[0][..1024], tokens[2][..1024]);
        assert_ne!(tokens[0][1024..1030], tokens[2][1024..1030]);
    }

    #[test]
    fn what_is_too_long_is_cut_and_faults_name_line_and_field() {
        let long = r#"{"timestamp": 0, "input_length": 5000, "output_length": 9, "hash_ids": [1,2,3,4,5,6,7,8,9,10]}"#;
        let cut = &read_trace(long, 1000).unwrap()[0];
        assert_eq!((cut.prompt, cut.output), (999, 1));
        for (text, message) in [
            ("{}", "trace, line 1: missing field"),
            (
                "\n{\"timestamp\": 0, \"input_length\": 0, \"output_length\": 1}",
                "trace, line 2: input_length: ",
            ),
            ("{\"timestamp\": -1, \"input_length\": 1, \"output_length\": 1}", "trace, line 1: timestamp: "),
            (
                "{\"timestamp\": 1, \"input_length\": 1, \"output_length\": 0}",
                "trace, line 1: output_length: ",
            ),
        ] {
            let fault = read_trace(text, 1000).unwrap_err().message;
            assert!(fault.starts_with(message), "{fault}");
        }
    }
}
