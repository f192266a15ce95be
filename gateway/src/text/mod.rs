//! Tokens into the text that a client sees.

mod stop;

use checkpoint::{Incremental, Text};
use proto::{FinishReason, Token, TokenId};

use crate::domain::{Finish, Stop};
pub use stop::StopStrings;

/// The text of one answer as its tokens come: whole characters only, nothing of a stop string, nothing of the
/// token that ended it. All that [`push`](Self::push) gives, in a row, does not depend on how tokens cut the text.
pub struct Transcript {
    decoder: Incremental,
    stop_strings: StopStrings,
    include_stop: bool,
}

impl Transcript {
    /// An empty transcript.
    pub fn new(text: &Text, stop: &Stop, skip_special: bool) -> Self {
        Self {
            decoder: text.decoder(skip_special),
            stop_strings: StopStrings::new(&stop.strings, stop.include),
            include_stop: stop.include,
        }
    }

    /// Takes tokens whose text the client has already.
    pub fn replay(&mut self, ids: &[TokenId]) {
        for id in ids {
            self.decoder.push(*id);
        }
    }

    /// The text that this token lets out, and, if the text ends here, why. Nothing may be pushed after that.
    pub fn push(&mut self, token: &Token) -> (String, Option<Finish>) {
        let hidden = match token.finish {
            Some(FinishReason::Eos) => true,
            Some(FinishReason::StopToken) => !self.include_stop,
            Some(FinishReason::Length) | None => false,
        };
        let mut fresh = if hidden { String::new() } else { self.decoder.push(token.id) };
        if token.finish.is_some() {
            fresh.push_str(&self.decoder.finish());
        }
        let mut out = String::new();
        if self.stop_strings.push(&fresh, &mut out) {
            return (out, Some(Finish::StopString));
        }
        if token.finish.is_some() {
            self.stop_strings.finish(&mut out);
        }
        (out, token.finish.map(Finish::from))
    }
}
