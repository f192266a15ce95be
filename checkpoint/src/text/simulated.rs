//! The tokenizer of a model that has no file: every byte is a token, and what is left of the vocabulary are words
//! that nobody has ever said, so that what such a model generates at random reads like text and costs like it.

use std::sync::Arc;

use proto::TokenId;

use super::bundle::{Algorithm, Content, PreTokenizer, TokenKind, TokenizerBundle, VERSION};
use super::vocabulary::character_of;

/// Ids 0 to 255 are bytes.
const BYTES: usize = 256;
/// Behind the bytes: the start and the end of a chat's turn.
const TURN: [&str; 2] = ["<|im_start|>", "<|im_end|>"];
/// The widespread ChatML form.
const TEMPLATE: &str = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}\
                        {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
const CONSONANTS: &[u8; 16] = b"bdfghjklmnprstvz";
const VOWELS: &[u8; 5] = b"aeiou";

impl TokenizerBundle {
    /// The tokenizer of a simulated model: ids below 256 are bytes, and text is encoded as nothing else. From 258 tokens
    /// on there are the two that begin and end a turn of a chat, of which the second ends a generation; all others
    /// are made-up words, each with a space in front. A vocabulary of less than 256 has the first bytes alone.
    ///
    /// # Panics
    /// When `vocab_size` is 0 or does not fit 31 bits.
    pub fn simulated(vocab_size: usize) -> Self {
        assert!(vocab_size > 0 && i32::try_from(vocab_size).is_ok(), "a size that token ids have");
        let has_turns = vocab_size >= BYTES + TURN.len();
        let bytes = (0..=u8::MAX).map(|byte| character_of(byte).to_string());
        let turns = TURN.iter().filter(|_| has_turns).map(|&turn| turn.to_owned());
        let tokens: Vec<String> =
            bytes.chain(turns).chain((0..vocab_size).map(word)).take(vocab_size).collect();
        let mut kinds = vec![TokenKind::Normal; vocab_size];
        if has_turns {
            kinds[BYTES..][..TURN.len()].fill(TokenKind::Control);
        }
        let end = has_turns.then_some((BYTES + 1) as TokenId);
        Self(Arc::new(Content {
            version: VERSION,
            algorithm: Algorithm::ByteLevel { pre_tokenizer: PreTokenizer::Gpt2, merges: Vec::new() },
            tokens,
            kinds,
            bos: None,
            add_bos: false,
            eos: end,
            end_ids: end.into_iter().collect(),
            chat_template: Some(TEMPLATE.to_owned()),
        }))
    }
}

/// The word of that number, of two syllables or more. No two numbers have the same.
fn word(mut number: usize) -> String {
    let mut word = character_of(b' ').to_string();
    let syllables = CONSONANTS.len() * VOWELS.len();
    let mut count = 0;
    // As digits, the least first; the last of three or more is never zero, so that no word has two numbers.
    while count < 2 || number > 0 {
        count += 1;
        let syllable = number % syllables;
        word.push(char::from(CONSONANTS[syllable / VOWELS.len()]));
        word.push(char::from(VOWELS[syllable % VOWELS.len()]));
        number /= syllables;
    }
    word
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Encode, Text};

    fn open(vocab_size: usize) -> Text {
        let bundle = TokenizerBundle::simulated(vocab_size);
        assert_eq!(bundle.vocab_size(), vocab_size);
        let travelled = TokenizerBundle::from_bytes(&bundle.to_bytes()).expect("as sound as one from a file");
        assert_eq!(travelled, bundle);
        travelled.open().unwrap()
    }

    #[test]
    fn bytes_are_tokens_and_text_is_bytes() {
        for vocab_size in [256, 257, 4096] {
            let text = open(vocab_size);
            for byte in 0..=u8::MAX {
                assert_eq!(text.token_bytes(byte.into()), Some(&[byte][..]));
            }
            let said = "Grüße, 世界!\n\0";
            let ids = text.encode(said, Encode::default()).unwrap();
            assert_eq!(ids, said.bytes().map(TokenId::from).collect::<Vec<_>>());
            assert_eq!(text.decode(&ids, true), said);
        }
    }

    #[test]
    fn a_large_vocabulary_has_turns_and_words() {
        let text = open(20_000);
        assert_eq!(text.eos_ids(), [257]);
        assert_eq!(text.decode(&[258, 259, 258 + 6400], true), " baba beba bababe");
        let chat = serde_json::json!([{"role": "user", "content": "hi"}]);
        let prompt = text.render_chat(&chat, &serde_json::json!({"add_generation_prompt": true})).unwrap();
        let ids = text.encode(&prompt, Encode { add_bos: true, parse_special: true }).unwrap();
        assert_eq!((ids[0], ids.iter().filter(|id| **id >= 256).count()), (256, 3));
    }

    #[test]
    fn a_small_vocabulary_has_the_first_bytes() {
        let text = open(100);
        assert!(text.eos_ids().is_empty());
        assert_eq!(text.encode("Az", Encode::default()).unwrap(), [65], "no token is a z");
    }
}
