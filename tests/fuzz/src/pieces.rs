//! Answers made of any texts.

use std::time::Duration;

use arbitrary::{Result, Unstructured};
use gateway::domain::{Finish, Piece};
use proto::{FinishReason, Token};

/// Most pieces of an answer.
const PIECES_MAX: usize = 12;

/// Texts that are hard on a line format.
const HARD: [&str; 12] = [
    "",
    "\n",
    "\r",
    "\r\n\r\n",
    "\0",
    "\u{2028}",
    "\u{85}",
    "data: [DONE]\n\n",
    "\\u0000\"",
    "é🦜",
    "\u{fffd}",
    "\u{7f}\u{1b}",
];

/// One to twelve pieces, the last with its finish.
pub(crate) fn pieces(source: &mut Unstructured<'_>) -> Result<Vec<Piece>> {
    let finish = source
        .choose(&[
            Finish::Eos,
            Finish::StopToken,
            Finish::StopString("b".to_owned()),
            Finish::Length,
            Finish::Grammar,
            Finish::Stopped,
        ])?
        .clone();
    let count = source.int_in_range(1..=PIECES_MAX)?;
    (0..count)
        .map(|index| {
            let text =
                if source.arbitrary()? { source.arbitrary()? } else { (*source.choose(&HARD)?).to_owned() };
            Ok(piece(index, text, (index + 1 == count).then(|| finish.clone()), source.arbitrary()?))
        })
        .collect()
}

/// The answer of a front that is asked about something else.
pub(crate) fn short() -> Vec<Piece> {
    vec![piece(0, "a".to_owned(), None, 7), piece(1, "b".to_owned(), Some(Finish::Eos), 8)]
}

fn piece(index: usize, text: String, finish: Option<Finish>, micros: u32) -> Piece {
    let token = Token {
        index,
        id: index as u32,
        logprob: -0.5,
        batch_size: 1,
        queue_wait: Duration::from_micros(micros.into()),
        finish: finish.as_ref().map(FinishReason::from),
        ..Token::default()
    };
    Piece { token, text, latency: Duration::from_micros(micros.into()), finish, discarded: false }
}
