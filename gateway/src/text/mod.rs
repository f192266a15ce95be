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
    /// Tokens before which no stop string counts.
    min_tokens: usize,
}

impl Transcript {
    /// An empty transcript.
    pub fn new(text: &Text, stop: &Stop, skip_special: bool) -> Self {
        Self {
            decoder: text.decoder(skip_special),
            stop_strings: StopStrings::new(&stop.strings, stop.include),
            include_stop: stop.include,
            min_tokens: stop.min_tokens,
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
            Some(FinishReason::Length | FinishReason::Grammar) | None => false,
        };
        let mut fresh = if hidden { String::new() } else { self.decoder.push(token.id) };
        if token.finish.is_some() {
            fresh.push_str(&self.decoder.finish());
        }
        if self.stop_strings.is_empty() || token.index + 1 < self.min_tokens && token.finish.is_none() {
            return (fresh, token.finish.map(Finish::from));
        }
        let mut out = String::new();
        if let Some(found) = self.stop_strings.push(&fresh, &mut out) {
            return (out, Some(Finish::StopString(found)));
        }
        if token.finish.is_some() {
            self.stop_strings.finish(&mut out);
        }
        (out, token.finish.map(Finish::from))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;
    use crate::bundle::{END, byte_bundle};

    fn token(index: usize, id: TokenId, finish: Option<FinishReason>) -> Token {
        Token {
            index,
            id,
            logprob: 0.0,
            batch_size: 1,
            queue_wait: Duration::ZERO,
            finish,
            ..Token::default()
        }
    }

    /// The text of the tokens, piece by piece, and how many tokens it took.
    fn run(text: &Text, stop: &Stop, ids: &[TokenId], finish: FinishReason) -> (Vec<String>, usize, Finish) {
        let mut transcript = Transcript::new(text, stop, true);
        let mut pieces = Vec::new();
        for (index, id) in ids.iter().enumerate() {
            let last = (index + 1 == ids.len()).then_some(finish);
            let (piece, finish) = transcript.push(&token(index, *id, last));
            pieces.push(piece);
            if let Some(finish) = finish {
                return (pieces, index + 1, finish);
            }
        }
        unreachable!("the last token has a finish");
    }

    proptest! {
        #[test]
        fn pieces_are_the_text_of_all_tokens_up_to_the_stop(
            ids in prop::collection::vec(prop_oneof![0..261_u32, 97..100_u32, Just(258), Just(0xf0), Just(0x9f)], 1..30),
            strings in prop::collection::vec("[abcABC]{1,3}", 0..3),
            eos: bool,
        ) {
            let text = byte_bundle().open().unwrap();
            let stop = Stop { strings, ..Stop::default() };
            let finish = if eos { FinishReason::Eos } else { FinishReason::Length };
            let (pieces, count, _) = run(&text, &stop, &ids, finish);
            let shown = if eos { &ids[..ids.len() - 1] } else { &ids[..] };
            let whole = text.decode(shown, true);
            // Where the text ends, by definition: before the stop string that is complete first.
            let ends = stop.strings.iter().filter_map(|stop| whole.find(stop.as_str()).map(|at| (at + stop.len(), at)));
            let cut = ends.min().map_or(whole.len(), |(_, at)| at);
            prop_assert_eq!(pieces.concat(), &whole[..cut]);
            prop_assert_eq!(pieces.len(), count);
        }
    }

    #[test]
    fn a_character_comes_whole_and_special_tokens_have_no_text() {
        let text = byte_bundle().open().unwrap();
        let ids: Vec<TokenId> = [0xf0, 0x9f, 0xa6, 0x9c, END, 0x61].to_vec();
        let (pieces, _, finish) = run(&text, &Stop::default(), &ids, FinishReason::Length);
        assert_eq!(pieces, ["", "", "", "\u{1f99c}", "", "a"]);
        assert_eq!(finish, Finish::Length);
    }

    #[test]
    fn text_that_the_client_has_is_not_sent_again_but_finishes_characters() {
        let text = byte_bundle().open().unwrap();
        let mut transcript = Transcript::new(&text, &Stop::default(), true);
        transcript.replay(&[0x61, 0xc3]);
        assert_eq!(transcript.push(&token(2, 0xa9, None)).0, "\u{e9}");
    }
}
