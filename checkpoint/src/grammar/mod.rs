//! What an output must look like: a vocabulary, a grammar compiled against it, and which tokens may come next.
//!
//! An engine needs to know of text only this much: the bytes of each token. [`GrammarEnv`] holds them, and turns a
//! [`proto::Grammar`] into a [`Compiled`] one, within limits of its own, whoever asks. So a gateway refuses with the
//! very words of a worker, before a stream starts. A [`Matcher`] follows one output token by token; its state is a
//! function of the tokens that it accepted, so it can be had again anywhere by accepting them again.
//!
//! The grammar engine is the llguidance crate, of which nothing shows outside this module.

mod env;
mod lark;
mod limits;
mod mask;
mod matcher;
mod schema;
mod survey;

use proto::TokenId;

pub use env::{Compiled, GrammarEnv, Word};
pub use limits::GRAMMAR_BYTES_MAX;
pub use mask::Mask;
pub use matcher::Matcher;

/// Why a grammar, or a token under it, was not taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GrammarError {
    /// The vocabulary cannot carry grammars.
    #[error("vocabulary: {0}")]
    Vocabulary(String),
    /// The grammar is no grammar, uses what is not supported, or is over a limit.
    #[error("{kind}: {message}")]
    Refused {
        /// Which kind of grammar.
        kind: &'static str,
        /// What was wrong with it.
        message: String,
    },
    /// The token is not one that may come at this place.
    #[error("token {token} may not come as number {index} of the output")]
    NotAllowed {
        /// The token.
        token: TokenId,
        /// Its place among those accepted, from 0.
        index: usize,
    },
    /// Following the output takes more than the limits of a step, or is beyond the grammar engine.
    #[error("grammar after {tokens} tokens: {message}")]
    Failed {
        /// Tokens accepted before.
        tokens: usize,
        /// What happened.
        message: String,
    },
}
