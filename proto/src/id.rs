//! Newtypes for ids. None is ever interpreted; two are compared, or the answer is no.

use std::fmt;

use serde::{Deserialize, Serialize};

/// An index into the model's vocabulary.
pub type TokenId = u32;

/// A request, as the gateway named it: unique across the cluster, the same in every attempt, log line and trace.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct RequestId(pub String);

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<&str> for RequestId {
    fn from(id: &str) -> Self {
        Self(id.to_owned())
    }
}

/// One life of one worker process. A worker that restarts, even at the same address, has another epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct WorkerEpoch(pub u64);

impl WorkerEpoch {
    /// Draws an epoch from the operating system's random source.
    ///
    /// # Panics
    /// When the operating system has no random source.
    pub fn random() -> Self {
        let mut bytes = [0; 8];
        getrandom::fill(&mut bytes).expect("the operating system's random source");
        // Zero is what an absent proto3 field reads as, so it never names a life.
        Self(u64::from_le_bytes(bytes) | 1)
    }
}

impl fmt::Display for WorkerEpoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// The unguessable part of a hand-off reference: 128 random bits, compared and never interpreted.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HandoffId(pub [u8; 16]);

impl HandoffId {
    /// Draws an id from the operating system's random source.
    ///
    /// # Panics
    /// When the operating system has no random source.
    pub fn random() -> Self {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes).expect("the operating system's random source");
        Self(bytes)
    }
}

impl fmt::Debug for HandoffId {
    /// Prints the first four bytes only: the rest is the secret that makes a reference unforgeable.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, ..] = self.0;
        write!(f, "HandoffId({a:02x}{b:02x}{c:02x}{d:02x}..)")
    }
}

/// A SHA-256 digest: of a checkpoint (its fingerprint), of a tokenizer bundle, or of a hand-off's content.
///
/// As text, and so in JSON, it is 64 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Digest(pub [u8; 32]);

impl From<Digest> for String {
    fn from(digest: Digest) -> Self {
        digest.to_string()
    }
}

impl TryFrom<String> for Digest {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let expected = || format!("expected 64 hexadecimal digits, got {text:?}");
        if text.len() != 64 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(expected());
        }
        let mut bytes = [0; 32];
        for (index, byte) in bytes.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&text[2 * index..2 * index + 2], 16).map_err(|_| expected())?;
        }
        Ok(Self(bytes))
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Digest({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_reads_back_from_its_text() {
        let digest = Digest(std::array::from_fn(|index| index as u8 * 7));
        assert_eq!(Digest::try_from(String::from(digest)), Ok(digest));
        for text in ["", "00", &"0g".repeat(32), &"é".repeat(32)] {
            assert!(Digest::try_from(text.to_owned()).unwrap_err().starts_with("expected 64"), "{text}");
        }
    }
}
