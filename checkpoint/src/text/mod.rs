//! Text to token ids and back, and chats to text.
//!
//! A [`TokenizerBundle`] is read from a model file once, travels as bytes, and opens into a [`Text`].

mod bundle;
mod incremental;
mod json;
mod metadata;
mod model;
mod simulated;
mod special;
mod template;
mod vocabulary;

use std::sync::Arc;

use proto::TokenId;
use tokenizers::Tokenizer;

use crate::Error;
pub use bundle::TokenizerBundle;
use bundle::{Algorithm, Content};
pub use incremental::Incremental;
use special::{Piece, Splitter};
use template::ChatTemplate;
use vocabulary::Vocabulary;

/// What stands for a space inside a SentencePiece token.
const VISIBLE_SPACE: char = '\u{2581}';

/// How a text is to be encoded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Encode {
    /// Put the beginning-of-sequence token first, if the model asks for it.
    pub add_bos: bool,
    /// Read the text of a special token as that token; otherwise it is plain text like any other.
    pub parse_special: bool,
}

/// An opened bundle: tokenizer and chat template. Share it behind an `Arc`.
pub struct Text {
    tokenizer: Tokenizer,
    spaces: Spaces,
    splitter: Splitter,
    vocabulary: Arc<Vocabulary>,
    bos: Option<TokenId>,
    end_ids: Vec<TokenId>,
    /// The texts of the tokens that begin and end a sequence, as templates write them.
    ends: (String, String),
    /// The template's source, and what became of it.
    template: Option<(String, Result<ChatTemplate, String>)>,
}

/// How the tokenizer wants its spaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Spaces {
    AsTheyAre,
    /// As [`VISIBLE_SPACE`], with one more before each stretch of plain text if `prefix`.
    Visible {
        prefix: bool,
    },
}

impl Text {
    fn new(content: &Content) -> Result<Self, Error> {
        let spaces = match content.algorithm {
            Algorithm::ByteLevel { .. } => Spaces::AsTheyAre,
            Algorithm::SentencePiece { space_prefix, .. } => Spaces::Visible { prefix: space_prefix },
        };
        Ok(Self {
            tokenizer: model::build(content)?,
            spaces,
            splitter: Splitter::new(content)?,
            vocabulary: Arc::new(Vocabulary::new(content)),
            bos: content.bos.filter(|_| content.add_bos),
            end_ids: content.end_ids.clone(),
            ends: (content.token(content.bos).to_owned(), content.token(content.eos).to_owned()),
            template: content.chat_template.as_ref().map(|source| {
                let template =
                    ChatTemplate::new(source, content.token(content.bos), content.token(content.eos));
                (source.clone(), template)
            }),
        })
    }

    /// The token ids of a text.
    pub fn encode(&self, text: &str, options: Encode) -> Result<Vec<TokenId>, Error> {
        let mut ids: Vec<TokenId> = self.bos.filter(|_| options.add_bos).into_iter().collect();
        for piece in self.splitter.split(text, options.parse_special) {
            match piece {
                Piece::Token(id) => ids.push(id),
                Piece::Plain(plain) => self.encode_plain(plain, &mut ids)?,
            }
        }
        Ok(ids)
    }

    fn encode_plain(&self, plain: &str, ids: &mut Vec<TokenId>) -> Result<(), Error> {
        let encoding = match self.spaces {
            Spaces::AsTheyAre => self.tokenizer.encode_fast(plain, false),
            Spaces::Visible { prefix } => {
                let mut visible = String::with_capacity(plain.len() + VISIBLE_SPACE.len_utf8());
                visible.extend(prefix.then_some(VISIBLE_SPACE));
                visible.extend(plain.chars().map(|c| if c == ' ' { VISIBLE_SPACE } else { c }));
                self.tokenizer.encode_fast(visible, false)
            }
        };
        ids.extend_from_slice(encoding.map_err(Error::tokenizer)?.get_ids());
        Ok(())
    }

    /// The exact bytes of a token, which may be part of a character; a special token's are those of its literal
    /// text. `None` for an id outside the vocabulary.
    pub fn token_bytes(&self, id: TokenId) -> Option<&[u8]> {
        self.vocabulary.bytes(id)
    }

    /// True for control tokens and the unknown token: those that are not part of an answer's text.
    pub fn is_special(&self, id: TokenId) -> bool {
        self.vocabulary.is_special(id)
    }

    /// The text of a run of tokens: their bytes in a row, with U+FFFD for what is not UTF-8. Ids outside the
    /// vocabulary add nothing. A leading space that encoding put there is kept, as the run may continue another.
    pub fn decode(&self, ids: &[TokenId], skip_special: bool) -> String {
        let mut bytes = Vec::new();
        for id in ids {
            bytes.extend_from_slice(self.vocabulary.visible_bytes(*id, skip_special));
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// A decoder for tokens that come one by one. It keeps what it needs and may outlive this.
    pub fn decoder(&self, skip_special: bool) -> Incremental {
        Incremental::new(Arc::clone(&self.vocabulary), skip_special)
    }

    /// The tokens that end a generation, the model's own end of sequence first.
    pub fn eos_ids(&self) -> &[TokenId] {
        &self.end_ids
    }

    /// The beginning-of-sequence token, if the model asks for one before a text.
    pub fn bos_id(&self) -> Option<TokenId> {
        self.bos
    }

    /// Token ids are below this.
    pub fn vocab_size(&self) -> usize {
        self.vocabulary.len()
    }

    /// True when the model brings a chat template, even one that does not compile.
    pub fn has_chat_template(&self) -> bool {
        self.template.is_some()
    }

    /// The prompt for a chat: the template rendered with `messages` (an array), the members of `extra` (an object:
    /// `tools`, `add_generation_prompt`, …), and the model's `bos_token` and `eos_token`.
    pub fn render_chat(
        &self,
        messages: &serde_json::Value,
        extra: &serde_json::Value,
    ) -> Result<String, Error> {
        match &self.template {
            None => Err(Error::Template("the model has none".to_owned())),
            Some((_, Err(error))) => Err(Error::Template(error.clone())),
            Some((_, Ok(template))) => template.render(messages, extra),
        }
    }

    /// The same by another template than the model's own.
    pub fn render_chat_by(
        &self,
        source: &str,
        messages: &serde_json::Value,
        extra: &serde_json::Value,
    ) -> Result<String, Error> {
        let (begin, end) = &self.ends;
        ChatTemplate::new(source, begin, end).map_err(Error::Template)?.render(messages, extra)
    }

    /// The source of the model's chat template.
    pub fn chat_template(&self) -> Option<&str> {
        self.template.as_ref().map(|(source, _)| source.as_str())
    }
}

impl std::fmt::Debug for Text {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Text").field("vocab_size", &self.vocab_size()).finish_non_exhaustive()
    }
}
