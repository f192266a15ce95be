//! However tokens cut a text, a client sees the same characters, up to where a stop string first ends.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use arbitrary::{Result, Unstructured};
use checkpoint::Text;
use gateway::domain::{Finish, Stop};
use gateway::text::Transcript;
use proto::{FinishReason, Token, TokenId};

use crate::model;

/// Stops that overlap, share borders, and cut characters' neighbours.
const STOPS: [&str; 8] = ["a", "ab", "ABC", "BCD", "é", "🦜", "\u{fffd}", "AA"];

/// Any ids and any stops.
pub fn transcript(data: &[u8]) {
    let _ = any_ids(&mut Unstructured::new(data));
}

fn texts() -> &'static [Arc<Text>; 2] {
    static TEXTS: OnceLock<[Arc<Text>; 2]> = OnceLock::new();
    TEXTS.get_or_init(|| {
        let sentence_piece = model::sentence_piece().open().expect("a sound bundle");
        [model::model().text.clone(), Arc::new(sentence_piece)]
    })
}

fn any_ids(source: &mut Unstructured<'_>) -> Result<()> {
    let text = source.choose(texts())?;
    let skip_special = source.arbitrary()?;
    let reason = *source.choose(&[
        FinishReason::Eos,
        FinishReason::StopToken,
        FinishReason::Length,
        FinishReason::Grammar,
    ])?;
    let stop = Stop { strings: strings(source)?, include: source.arbitrary()?, ..Stop::default() };
    let known = source.int_in_range(0..=3)?;
    let ids = ids(source)?;
    let known = known.min(ids.len() - 1);

    // A stop string is looked for in what is new; the bytes of a character may have begun before.
    let hidden = match reason {
        FinishReason::Eos => true,
        FinishReason::StopToken => !stop.include,
        FinishReason::Length | FinishReason::Grammar => false,
    };
    let shown = if hidden { &ids[..ids.len() - 1] } else { &ids[..] };
    let fresh =
        fresh_text(text, &shown[..known.min(shown.len())], &shown[known.min(shown.len())..], skip_special);
    let expected = cut(&fresh, &stop);

    let mut transcript = Transcript::new(text, &stop, skip_special);
    transcript.replay(&ids[..known]);
    let (mut told, mut finish) = (String::new(), None);
    for (index, id) in ids.iter().enumerate().skip(known) {
        let last = (index + 1 == ids.len()).then_some(reason);
        let (piece, ends) = transcript.push(&token(index, *id, last));
        told.push_str(&piece);
        assert!(expected.0.starts_with(&told), "{told:?} is not a beginning of {:?}", expected.0);
        finish = ends;
        if finish.is_some() {
            break;
        }
    }
    assert_eq!(told, expected.0);
    assert_eq!(finish, Some(expected.1.map_or(Finish::from(reason), Finish::StopString)));
    Ok(())
}

/// By definition: what all tokens decode to, without what those that the client has decode to. A character that they
/// only began is new.
fn fresh_text(text: &Text, known: &[TokenId], new: &[TokenId], skip_special: bool) -> String {
    let visible = |ids: &[TokenId]| -> Vec<u8> {
        let seen = ids.iter().filter(|id| !(skip_special && text.is_special(**id)));
        seen.flat_map(|id| text.token_bytes(*id).unwrap_or_default()).copied().collect()
    };
    let known = visible(known);
    // What is left of the bytes when every whole or hopeless character is taken off the front.
    let begun = known.utf8_chunks().last().map_or(0, |chunk| {
        let open = std::str::from_utf8(chunk.invalid()).is_err_and(|error| error.error_len().is_none());
        if open { chunk.invalid().len() } else { 0 }
    });
    let mut bytes = known[known.len() - begun..].to_vec();
    bytes.extend(visible(new));
    String::from_utf8_lossy(&bytes).into_owned()
}

/// By definition: the text up to the first character at which a stop string ends, and the longest that ends there.
fn cut(text: &str, stop: &Stop) -> (String, Option<String>) {
    for end in (1..=text.len()).filter(|end| text.is_char_boundary(*end)) {
        let found = stop.strings.iter().filter(|stop| text[..end].ends_with(stop.as_str()));
        if let Some(longest) = found.max_by_key(|stop| stop.len()) {
            let end = if stop.include { end } else { end - longest.len() };
            return (text[..end].to_owned(), Some(longest.clone()));
        }
    }
    (text.to_owned(), None)
}

fn strings(source: &mut Unstructured<'_>) -> Result<Vec<String>> {
    let count = source.int_in_range(0..=4)?;
    let mut strings = Vec::new();
    for _ in 0..count {
        let string =
            if source.ratio(1, 4)? { source.arbitrary()? } else { (*source.choose(&STOPS)?).to_owned() };
        // Admission refuses empty ones.
        if !string.is_empty() {
            strings.push(string);
        }
    }
    Ok(strings)
}

/// One to forty ids, most of them within the vocabulary.
fn ids(source: &mut Unstructured<'_>) -> Result<Vec<TokenId>> {
    let count = source.int_in_range(1..=40)?;
    (0..count)
        .map(|_| match source.int_in_range(0..=7)? {
            0 => source.arbitrary(),
            1 => source.int_in_range(250..=270),
            _ => source.arbitrary::<u8>().map(TokenId::from),
        })
        .collect()
}

fn token(index: usize, id: TokenId, finish: Option<FinishReason>) -> Token {
    Token { index, id, logprob: 0.0, batch_size: 1, queue_wait: Duration::ZERO, finish, ..Token::default() }
}
