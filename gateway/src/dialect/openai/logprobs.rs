//! Log-probabilities as `/v1` writes them.

use checkpoint::Text;
use proto::{PromptReport, Token, TokenId, TokenLogprob};
use serde::{Serialize, Serializer};

use crate::dialect::finite;

/// How tokens are shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Spelling {
    /// By their text.
    Text,
    /// As `token_id:7`.
    Id,
}

/// A token of a chat's answer, and what might have stood in its place.
#[derive(Debug, Serialize)]
pub(super) struct Entry {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
    top_logprobs: Vec<Alternative>,
}

#[derive(Debug, Serialize)]
struct Alternative {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
}

/// A token's entry in a chat.
pub(super) fn entry(text: &Text, token: &Token, top: usize, spelling: Spelling) -> Entry {
    let alternative = |one: &TokenLogprob| Alternative {
        token: shown(text, one.id, spelling),
        logprob: finite(one.logprob),
        bytes: bytes(text, one.id),
    };
    Entry {
        token: shown(text, token.id, spelling),
        logprob: finite(token.logprob),
        bytes: bytes(text, token.id),
        top_logprobs: token.top.iter().take(top).map(alternative).collect(),
    }
}

/// A token as text; bytes that are no character by themselves show as U+FFFD.
pub(super) fn shown(text: &Text, id: TokenId, spelling: Spelling) -> String {
    match spelling {
        Spelling::Text => String::from_utf8_lossy(text.token_bytes(id).unwrap_or_default()).into_owned(),
        Spelling::Id => format!("token_id:{id}"),
    }
}

fn bytes(text: &Text, id: TokenId) -> Vec<u8> {
    text.token_bytes(id).unwrap_or_default().to_vec()
}

/// An object whose members keep their order. Of members of one name the first is kept.
#[derive(Debug)]
pub(super) struct Ordered<T>(Vec<(String, T)>);

impl<T> FromIterator<(String, T)> for Ordered<T> {
    fn from_iter<I: IntoIterator<Item = (String, T)>>(members: I) -> Self {
        let mut kept: Vec<(String, T)> = Vec::new();
        for (name, value) in members {
            if kept.iter().all(|(other, _)| *other != name) {
                kept.push((name, value));
            }
        }
        Self(kept)
    }
}

impl<T: Serialize> Serialize for Ordered<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(name, value)| (name, value)))
    }
}

/// What is known of a token in the place of one of the prompt's.
#[derive(Debug, Serialize)]
pub(super) struct PromptEntry {
    logprob: f32,
    /// From 1; `None` for a token that is not among the likeliest that were reported.
    rank: Option<usize>,
    decoded_token: String,
}

/// vLLM's `prompt_logprobs`: null for the first token, then for each an object of token ids, the prompt's own first
/// and the likeliest after it.
pub(super) type PromptLogprobs = Vec<Option<Ordered<PromptEntry>>>;

/// Those of a report.
pub(super) fn prompt(text: &Text, report: Option<&PromptReport>) -> Option<PromptLogprobs> {
    let tokens = report?.logprobs.iter().map(|position| {
        let chosen_rank = position.top.iter().position(|one| one.id == position.token.id);
        let chosen = (&position.token, chosen_rank);
        let others = position.top.iter().enumerate().map(|(rank, one)| (one, Some(rank)));
        let entries = std::iter::once(chosen).chain(others).map(|(one, rank)| {
            let entry = PromptEntry {
                logprob: finite(one.logprob),
                rank: rank.map(|rank| rank + 1),
                decoded_token: shown(text, one.id, Spelling::Text),
            };
            (one.id.to_string(), entry)
        });
        Some(entries.collect())
    });
    Some(std::iter::once(None).chain(tokens).collect())
}

#[cfg(test)]
mod tests {
    use proto::PromptLogprobs;
    use serde_json::json;

    use super::*;

    #[test]
    fn a_token_that_is_no_character_shows_its_bytes() {
        let text = crate::bundle::byte_bundle().open().unwrap();
        let one = |id, logprob| TokenLogprob { id, logprob };
        let token = Token {
            id: 0x9c,
            logprob: -1.5,
            top: vec![one(0x61, -0.5), one(0x9c, f32::NEG_INFINITY)],
            ..Token::default()
        };
        let json = |entry: Entry| serde_json::to_value(entry).unwrap();
        assert_eq!(
            json(entry(&text, &token, 2, Spelling::Text)),
            json!({"token": "\u{fffd}", "logprob": -1.5, "bytes": [0x9c], "top_logprobs": [
                {"token": "a", "logprob": -0.5, "bytes": [0x61]},
                {"token": "\u{fffd}", "logprob": -9999.0, "bytes": [0x9c]},
            ]})
        );
        let entry = json(entry(&text, &token, 0, Spelling::Id));
        assert_eq!((&entry["token"], &entry["top_logprobs"]), (&json!("token_id:156"), &json!([])));
    }

    #[test]
    fn the_first_token_of_a_prompt_has_no_probability() {
        let text = crate::bundle::byte_bundle().open().unwrap();
        let one = |id, logprob| TokenLogprob { id, logprob };
        let report = PromptReport {
            cached_tokens: 0,
            logprobs: vec![PromptLogprobs {
                token: one(0x62, -2.1),
                top: vec![one(0x63, -0.1), one(0x61, -0.3), one(0x62, -2.1)],
            }],
        };
        // Single precision is written in its own digits, and the order is the likelihood's.
        assert_eq!(
            serde_json::to_string(&prompt(&text, Some(&report))).unwrap(),
            "[null,{\"98\":{\"logprob\":-2.1,\"rank\":3,\"decoded_token\":\"b\"},\
             \"99\":{\"logprob\":-0.1,\"rank\":1,\"decoded_token\":\"c\"},\
             \"97\":{\"logprob\":-0.3,\"rank\":2,\"decoded_token\":\"a\"}}]"
        );
        assert!(prompt(&text, None).is_none());
    }
}
