//! Reads streams as the strictest clients do: by the definition of an event stream, and line by line as Unicode has it.

use serde_json::Value;

/// What a stream said.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Told {
    /// The objects, in order.
    pub(crate) objects: Vec<Value>,
    /// `[DONE]` came last.
    pub(crate) done: bool,
}

/// Reads a stream of server-sent events; each chunk must be one whole event of one line of data.
///
/// Source: "Server-sent events" in the HTML standard, interpreting an event stream.
pub(crate) fn server_sent(chunks: &[impl AsRef<[u8]>]) -> Told {
    let mut told = Told::default();
    for chunk in chunks {
        assert!(!told.done, "an event after [DONE]");
        let text = std::str::from_utf8(chunk.as_ref()).expect("an event is UTF-8");
        let line = text.strip_suffix("\n\n").expect("an event ends in an empty line");
        assert!(!line.contains(is_line_break), "an event is one line: {line:?}");
        let data = line.strip_prefix("data:").expect("an event is data");
        let data = data.strip_prefix(' ').unwrap_or(data);
        if data == "[DONE]" {
            told.done = true;
        } else {
            told.objects.push(object(data));
        }
    }
    told
}

/// Reads a stream of objects that each end in NUL; each chunk must be one.
pub(crate) fn nul_framed(chunks: &[impl AsRef<[u8]>]) -> Told {
    let objects = chunks.iter().map(|chunk| {
        let text = std::str::from_utf8(chunk.as_ref()).expect("an object is UTF-8");
        let json = text.strip_suffix('\0').expect("an object ends in NUL");
        assert!(!json.contains('\0'), "one NUL: {json:?}");
        object(json)
    });
    Told { objects: objects.collect(), done: false }
}

fn object(json: &str) -> Value {
    let value: Value = serde_json::from_str(json).unwrap_or_else(|error| panic!("{error}: {json:?}"));
    assert!(value.is_object(), "an object: {json:?}");
    value
}

/// Where some client or other ends a line: what the standard says, and what Python's `splitlines` adds.
fn is_line_break(character: char) -> bool {
    matches!(
        character,
        '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}'
    )
}
