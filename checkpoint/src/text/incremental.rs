//! Text from tokens that come one by one.

use std::sync::Arc;

use proto::TokenId;

use super::Vocabulary;

/// Decodes a stream of tokens. All that [`push`](Self::push) and [`finish`](Self::finish) give, in a row, is what
/// decoding all tokens at once gives; a character whose bytes are spread over tokens appears with its last one.
pub struct Incremental {
    vocabulary: Arc<Vocabulary>,
    skip_special: bool,
    /// The start of a character that is not complete: at most three bytes between calls.
    pending: Vec<u8>,
}

impl Incremental {
    pub(super) fn new(vocabulary: Arc<Vocabulary>, skip_special: bool) -> Self {
        Self { vocabulary, skip_special, pending: Vec::new() }
    }

    /// The text that this token completes, often empty. Bytes that cannot become a character give U+FFFD.
    pub fn push(&mut self, token: TokenId) -> String {
        let bytes = self.vocabulary.visible_bytes(token, self.skip_special);
        // Most tokens are whole characters.
        if self.pending.is_empty()
            && let Ok(text) = std::str::from_utf8(bytes)
        {
            return text.to_owned();
        }
        self.pending.extend_from_slice(bytes);
        let complete = self.pending.len() - incomplete_tail(&self.pending);
        let text = String::from_utf8_lossy(&self.pending[..complete]).into_owned();
        self.pending.drain(..complete);
        text
    }

    /// What is left when no more tokens come: U+FFFD for a character cut short. The decoder is then as new.
    pub fn finish(&mut self) -> String {
        let pending = std::mem::take(&mut self.pending);
        String::from_utf8_lossy(&pending).into_owned()
    }
}

/// How many bytes at the end could still become a character.
fn incomplete_tail(bytes: &[u8]) -> usize {
    match bytes.utf8_chunks().last() {
        // The last invalid stretch counts only if more bytes could make it valid.
        Some(chunk) if !chunk.invalid().is_empty() => match std::str::from_utf8(chunk.invalid()) {
            Err(error) if error.error_len().is_none() => chunk.invalid().len(),
            _ => 0,
        },
        _ => 0,
    }
}

impl std::fmt::Debug for Incremental {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Incremental").field("pending", &self.pending).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_may_still_grow_is_kept_back() {
        for (bytes, tail) in [
            (&b""[..], 0),
            (b"abc", 0),
            (b"a\xe4", 1),
            (b"a\xe4\xbd", 2),
            (b"\xe4\xbd\xa0", 0),
            (b"\xf0\x9f\xa6", 3),
            (b"\x9c", 0),
            (b"\xff", 0),
            (b"\xe4a", 0),
            (b"\xed\xa0", 0),
            (b"\xff\xf0\x9f", 2),
        ] {
            assert_eq!(incomplete_tail(bytes), tail, "{}", bytes.escape_ascii());
        }
    }
}
