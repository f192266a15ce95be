//! Everything about a model's text, as a value that travels.

use std::collections::HashMap;
use std::sync::Arc;

use proto::{Digest, TokenId};
use serde::{Deserialize, Serialize};

use super::vocabulary::Vocabulary;
use super::{Text, metadata};
use crate::gguf::Metadata;
use crate::{Error, fingerprint};

/// The version of the byte form; another one is refused.
pub(super) const VERSION: u32 = 1;

/// Far above the longest token of any model. Looking for all ways to cut a token takes its length squared.
const TOKEN_BYTES_MAX: usize = 1024;

/// Tokenizer, special tokens and chat template of one model. Cheap to clone; equal models give equal bytes.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenizerBundle(pub(super) Arc<Content>);

/// The content, in its byte form JSON.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Content {
    pub(super) version: u32,
    pub(super) algorithm: Algorithm,
    /// The vocabulary; an id is an index.
    pub(super) tokens: Vec<String>,
    /// Parallel to `tokens`.
    pub(super) kinds: Vec<TokenKind>,
    pub(super) bos: Option<TokenId>,
    pub(super) add_bos: bool,
    pub(super) eos: Option<TokenId>,
    /// Ends of generation, `eos` first.
    pub(super) end_ids: Vec<TokenId>,
    pub(super) chat_template: Option<String>,
}

/// How text becomes tokens.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum Algorithm {
    /// Byte-pair encoding over bytes, each shown as a printable character.
    ByteLevel {
        pre_tokenizer: PreTokenizer,
        /// Pairs of tokens that join, the first pair first.
        merges: Vec<(TokenId, TokenId)>,
    },
    /// Byte-pair encoding over characters, with a token per byte for characters that have none.
    SentencePiece {
        /// Parallel to the tokens: two neighbours join into the token of the highest score.
        scores: Vec<f32>,
        unknown: Option<TokenId>,
        /// A space is put before a text.
        space_prefix: bool,
    },
}

/// How a text is cut into words before byte-pair encoding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum PreTokenizer {
    Gpt2,
    SmolLm,
    Llama3,
    Qwen2,
    Default,
}

/// What a token is. Source: `enum llama_token_type` of llama.cpp, which GGUF files use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "u8", try_from = "u8")]
pub(super) enum TokenKind {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

impl From<TokenKind> for u8 {
    fn from(kind: TokenKind) -> Self {
        match kind {
            TokenKind::Normal => 1,
            TokenKind::Unknown => 2,
            TokenKind::Control => 3,
            TokenKind::UserDefined => 4,
            TokenKind::Unused => 5,
            TokenKind::Byte => 6,
        }
    }
}

impl TryFrom<u8> for TokenKind {
    type Error = String;

    fn try_from(code: u8) -> Result<Self, String> {
        Ok(match code {
            1 => Self::Normal,
            2 => Self::Unknown,
            3 => Self::Control,
            4 => Self::UserDefined,
            5 => Self::Unused,
            6 => Self::Byte,
            other => return Err(format!("token kind {other}, expected 1 to 6")),
        })
    }
}

impl TokenKind {
    /// True for tokens that are not part of a text.
    pub(super) fn is_special(self) -> bool {
        matches!(self, Self::Control | Self::Unknown)
    }
}

impl TokenizerBundle {
    pub(crate) fn from_metadata(metadata: Metadata<'_>) -> Result<Self, Error> {
        Self::checked(metadata::read(metadata, VERSION)?)
    }

    fn checked(content: Content) -> Result<Self, Error> {
        content.check()?;
        Ok(Self(Arc::new(content)))
    }

    /// The byte form.
    pub fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(&*self.0).expect("strings, integers and finite floats are always JSON")
    }

    /// Reads the byte form and checks it as thoroughly as a model file.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, Error> {
        let content: Content = serde_json::from_slice(bytes).map_err(|error| Error::Bundle {
            part: "json",
            expected: format!("the fields of version {VERSION}"),
            found: error.to_string(),
        })?;
        Self::checked(content)
    }

    /// The SHA-256 of the byte form.
    pub fn digest(&self) -> Digest {
        fingerprint::sha256(&self.to_bytes())
    }

    /// The tokens that end a generation, the model's own end of sequence first.
    pub fn eos_ids(&self) -> &[TokenId] {
        &self.0.end_ids
    }

    /// Token ids are below this.
    pub fn vocab_size(&self) -> usize {
        self.0.tokens.len()
    }

    /// The bytes of every token.
    pub(crate) fn vocabulary(&self) -> Vocabulary {
        Vocabulary::new(&self.0)
    }

    /// Builds the tokenizer and compiles the chat template; tens to hundreds of milliseconds.
    pub fn open(&self) -> Result<Text, Error> {
        Text::new(&self.0)
    }
}

impl Content {
    /// The text of a token, for a template; empty when there is none.
    pub(super) fn token(&self, id: Option<TokenId>) -> &str {
        id.and_then(|id| self.tokens.get(id as usize)).map_or("", String::as_str)
    }

    /// Token and kind by id.
    pub(super) fn vocabulary(&self) -> impl Iterator<Item = (TokenId, &str, TokenKind)> {
        let pairs = self.tokens.iter().zip(&self.kinds);
        pairs.enumerate().map(|(id, (token, kind))| (id as TokenId, token.as_str(), *kind))
    }

    /// Checks all that opening relies on.
    fn check(&self) -> Result<(), Error> {
        if self.version != VERSION {
            return Err(fault("version", VERSION, self.version));
        }
        let len = self.tokens.len();
        if len == 0 || i32::try_from(len).is_err() {
            return Err(fault("tokens", "from 1 to 2147483647 tokens", len));
        }
        if let Some(token) = self.tokens.iter().find(|token| token.len() > TOKEN_BYTES_MAX) {
            return Err(fault("tokens", format_args!("at most {TOKEN_BYTES_MAX} bytes each"), token.len()));
        }
        if self.kinds.len() != len {
            return Err(fault("kinds", format_args!("{len}, one per token"), self.kinds.len()));
        }
        let ids = self.bos.iter().chain(&self.eos).chain(&self.end_ids);
        self.check_ids("special ids", ids)?;
        self.check_byte_tokens()?;
        let index = self.index()?;
        match &self.algorithm {
            Algorithm::ByteLevel { merges, .. } => self.check_merges(merges, &index),
            Algorithm::SentencePiece { scores, unknown, .. } => {
                self.check_ids("unknown id", unknown)?;
                if scores.len() != len {
                    return Err(fault("scores", format_args!("{len}, one per token"), scores.len()));
                }
                match scores.iter().find(|score| !score.is_finite()) {
                    Some(score) => Err(fault("scores", "finite floats", score)),
                    None => Ok(()),
                }
            }
        }
    }

    fn check_ids<'a>(
        &self,
        part: &'static str,
        ids: impl IntoIterator<Item = &'a TokenId>,
    ) -> Result<(), Error> {
        match ids.into_iter().find(|id| **id as usize >= self.tokens.len()) {
            Some(id) => Err(fault(part, format_args!("an id below {}", self.tokens.len()), id)),
            None => Ok(()),
        }
    }

    fn check_byte_tokens(&self) -> Result<(), Error> {
        let wrong =
            self.vocabulary().find(|(_, token, kind)| *kind == TokenKind::Byte && byte_of(token).is_none());
        match wrong {
            Some((id, token, _)) => Err(fault("tokens", format_args!("<0xNN> for byte token {id}"), token)),
            None => Ok(()),
        }
    }

    /// Ids by token. Two tokens of the same text could not be told apart.
    fn index(&self) -> Result<HashMap<&str, TokenId>, Error> {
        let mut index = HashMap::with_capacity(self.tokens.len());
        for (id, token, _) in self.vocabulary() {
            if let Some(before) = index.insert(token, id) {
                return Err(fault(
                    "tokens",
                    "each token once",
                    format_args!("{token:?} as {before} and as {id}"),
                ));
            }
        }
        Ok(index)
    }

    fn check_merges(
        &self,
        merges: &[(TokenId, TokenId)],
        index: &HashMap<&str, TokenId>,
    ) -> Result<(), Error> {
        let mut joined = String::new();
        for (left, right) in merges {
            self.check_ids("merges", [left, right])?;
            joined.clear();
            joined.push_str(&self.tokens[*left as usize]);
            joined.push_str(&self.tokens[*right as usize]);
            if !index.contains_key(joined.as_str()) {
                return Err(fault("merges", "a pair that joins into a token", format_args!("{joined:?}")));
            }
        }
        Ok(())
    }
}

/// The byte that a byte token stands for: `<0x0A>` is 10.
pub(super) fn byte_of(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    let well_formed = digits.len() == 2 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    well_formed.then(|| u8::from_str_radix(digits, 16).expect("two hexadecimal digits"))
}

fn fault(part: &'static str, expected: impl std::fmt::Display, found: impl std::fmt::Display) -> Error {
    Error::Bundle { part, expected: expected.to_string(), found: found.to_string() }
}
