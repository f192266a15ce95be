//! Finding the tokens that are matched as a whole before a text is encoded.

use aho_corasick::{AhoCorasick, MatchKind};
use proto::TokenId;

use super::bundle::{Content, TokenKind};
use crate::Error;

/// A stretch of a text.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Piece<'a> {
    /// The literal text of this token.
    Token(TokenId),
    /// Text to be encoded; never empty.
    Plain(&'a str),
}

/// Cuts a text at whole tokens: the leftmost first, and of those the longest.
pub(super) struct Splitter {
    /// The tokens a user added to the vocabulary, which are always whole.
    user_defined: Matcher,
    /// Those and the special ones.
    with_special: Matcher,
}

struct Matcher {
    automaton: AhoCorasick,
    /// By the automaton's pattern.
    ids: Vec<TokenId>,
}

impl Splitter {
    pub(super) fn new(content: &Content) -> Result<Self, Error> {
        Ok(Self {
            user_defined: Matcher::new(content, |kind| kind == TokenKind::UserDefined)?,
            with_special: Matcher::new(content, |kind| kind == TokenKind::UserDefined || kind.is_special())?,
        })
    }

    pub(super) fn split<'a>(&self, text: &'a str, parse_special: bool) -> Vec<Piece<'a>> {
        let matcher = if parse_special { &self.with_special } else { &self.user_defined };
        matcher.split(text)
    }
}

impl Matcher {
    fn new(content: &Content, wanted: impl Fn(TokenKind) -> bool) -> Result<Self, Error> {
        let (tokens, ids): (Vec<&str>, Vec<TokenId>) = content
            .vocabulary()
            .filter(|(_, token, kind)| wanted(*kind) && !token.is_empty())
            .map(|(id, token, _)| (token, id))
            .unzip();
        let automaton = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(tokens)
            .map_err(Error::tokenizer)?;
        Ok(Self { automaton, ids })
    }

    fn split<'a>(&self, text: &'a str) -> Vec<Piece<'a>> {
        let mut pieces = Vec::new();
        let mut plain_start = 0;
        let mut plain_until = |pieces: &mut Vec<_>, start: usize, next: usize| {
            if plain_start < start {
                pieces.push(Piece::Plain(&text[plain_start..start]));
            }
            plain_start = next;
        };
        for found in self.automaton.find_iter(text) {
            plain_until(&mut pieces, found.start(), found.end());
            pieces.push(Piece::Token(self.ids[found.pattern()]));
        }
        plain_until(&mut pieces, text.len(), text.len());
        pieces
    }
}
