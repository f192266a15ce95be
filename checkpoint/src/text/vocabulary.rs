//! The bytes of every token.

use proto::TokenId;

use super::VISIBLE_SPACE;
use super::bundle::{Algorithm, Content, TokenKind, byte_of};

/// Token bytes by id, in one run.
pub(crate) struct Vocabulary {
    bytes: Vec<u8>,
    /// Where each token ends in `bytes`; it starts where the one before ends.
    ends: Vec<usize>,
    special: Vec<bool>,
}

impl Vocabulary {
    pub(super) fn new(content: &Content) -> Self {
        let byte_level = matches!(content.algorithm, Algorithm::ByteLevel { .. });
        let mut bytes = Vec::new();
        let mut ends = Vec::with_capacity(content.tokens.len());
        for (_, token, kind) in content.vocabulary() {
            match kind {
                TokenKind::Normal | TokenKind::Unused if byte_level => push_byte_level(token, &mut bytes),
                TokenKind::Normal | TokenKind::Unused => {
                    bytes.extend_from_slice(token.replace(VISIBLE_SPACE, " ").as_bytes());
                }
                TokenKind::Byte => bytes.extend(byte_of(token)),
                // What a user added, and special tokens, are spelt out.
                TokenKind::UserDefined | TokenKind::Control | TokenKind::Unknown => {
                    bytes.extend_from_slice(token.as_bytes());
                }
            }
            ends.push(bytes.len());
        }
        let special = content.kinds.iter().map(|kind| kind.is_special()).collect();
        Self { bytes, ends, special }
    }

    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    pub(crate) fn bytes(&self, id: TokenId) -> Option<&[u8]> {
        let id = id as usize;
        let end = *self.ends.get(id)?;
        let start = id.checked_sub(1).map_or(0, |before| self.ends[before]);
        Some(&self.bytes[start..end])
    }

    pub(crate) fn is_special(&self, id: TokenId) -> bool {
        self.special.get(id as usize).copied().unwrap_or(false)
    }

    /// The bytes to show: none for an id outside the vocabulary, nor for a special one that is to be skipped.
    pub(super) fn visible_bytes(&self, id: TokenId, skip_special: bool) -> &[u8] {
        match self.bytes(id) {
            Some(bytes) if !(skip_special && self.is_special(id)) => bytes,
            _ => &[],
        }
    }
}

/// Turns the printable characters of a byte-level token back into bytes. A character that stands for no byte, which
/// a sound vocabulary does not have, is spelt out.
fn push_byte_level(token: &str, bytes: &mut Vec<u8>) {
    for character in token.chars() {
        match byte_shown_as(character) {
            Some(byte) => bytes.push(byte),
            None => bytes.extend_from_slice(character.encode_utf8(&mut [0; 4]).as_bytes()),
        }
    }
}

/// The byte that a character stands for. Bytes that print as Latin-1 show as themselves; the 68 others, ascending,
/// show as U+0100 and what follows. Source: `bytes_to_unicode` of GPT-2's encoder.
fn byte_shown_as(character: char) -> Option<u8> {
    match u32::from(character) {
        code @ (0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff) => Some(code as u8),
        code @ 0x100..=0x120 => Some((code - 0x100) as u8),
        code @ 0x121..=0x142 => Some((code - 0x121 + 0x7f) as u8),
        0x143 => Some(0xad),
        _ => None,
    }
}

/// The character that stands for a byte: the inverse of [`byte_shown_as`].
pub(super) fn character_of(byte: u8) -> char {
    match byte {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => char::from(byte),
        0x00..=0x20 => shown_above(0x100, byte),
        0x7f..=0xa0 => shown_above(0x121, byte - 0x7f),
        0xad => shown_above(0x143, 0),
    }
}

fn shown_above(first: u32, offset: u8) -> char {
    char::from_u32(first + u32::from(offset)).expect("no surrogate is that low")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_byte_is_shown_as_one_character() {
        let shown: Vec<(char, u8)> =
            ('\0'..='\u{200}').filter_map(|c| byte_shown_as(c).map(|byte| (c, byte))).collect();
        let bytes: BTreeSet<u8> = shown.iter().map(|(_, byte)| *byte).collect();
        assert_eq!((shown.len(), bytes.len()), (256, 256));
        for (character, byte) in [('Ġ', b' '), ('Ċ', b'\n'), ('ĉ', b'\t'), ('A', b'A'), ('ł', 0xa0)] {
            assert_eq!(byte_shown_as(character), Some(byte), "{character}");
        }
        assert!(shown.iter().all(|&(character, byte)| character_of(byte) == character));
    }
}
