//! A tokenizer from the metadata of a GGUF file.

use std::collections::{HashMap, HashSet};

use proto::TokenId;

use super::bundle::{Algorithm, Content, PreTokenizer, TokenKind};
use crate::Error;
use crate::config::required_string;
use crate::gguf::Metadata;

const MODEL: &str = "tokenizer.ggml.model";
const PRE: &str = "tokenizer.ggml.pre";
const TOKENS: &str = "tokenizer.ggml.tokens";
const KINDS: &str = "tokenizer.ggml.token_type";
const SCORES: &str = "tokenizer.ggml.scores";
const MERGES: &str = "tokenizer.ggml.merges";
const ADD_BOS: &str = "tokenizer.ggml.add_bos_token";
const SPACE_PREFIX: &str = "tokenizer.ggml.add_space_prefix";
const TEMPLATE: &str = "tokenizer.chat_template";

/// Tokens that end a turn wherever a vocabulary has them as special ones. `<|endoftext|>` is not among them: many
/// models use it to separate documents or to pad, so it ends a turn only where the metadata says so.
const TURN_ENDS: [&str; 5] = ["<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end_of_text|>"];

/// Reads the content of a bundle; what ties its parts together is checked by the bundle.
pub(super) fn read(metadata: Metadata<'_>, version: u32) -> Result<Content, Error> {
    let model = required_string(metadata, MODEL)?;
    let tokens = required(TOKENS, "an array of strings", metadata.strings(TOKENS)?)?;
    let kinds = kinds(metadata, tokens.len())?;
    let algorithm = match model {
        "gpt2" => byte_level(metadata, &tokens)?,
        "llama" => sentence_piece(metadata)?,
        other => return Err(Error::bad_value(MODEL, "gpt2 or llama", other)),
    };
    let asks_for_bos = match algorithm {
        Algorithm::ByteLevel { pre_tokenizer, .. } => pre_tokenizer == PreTokenizer::Llama3,
        Algorithm::SentencePiece { .. } => true,
    };
    let eos = id(metadata, "tokenizer.ggml.eos_token_id")?;
    Ok(Content {
        version,
        algorithm,
        bos: id(metadata, "tokenizer.ggml.bos_token_id")?,
        add_bos: metadata.bool(ADD_BOS)?.unwrap_or(asks_for_bos),
        eos,
        end_ids: end_ids(metadata, eos, &tokens, &kinds)?,
        chat_template: metadata.string(TEMPLATE)?.map(str::to_owned),
        tokens: tokens.into_iter().map(str::to_owned).collect(),
        kinds,
    })
}

fn required<T>(key: &str, expected: &'static str, value: Option<T>) -> Result<T, Error> {
    value.ok_or_else(|| Error::MissingKey { key: key.to_owned(), expected })
}

fn id(metadata: Metadata<'_>, key: &str) -> Result<Option<TokenId>, Error> {
    match metadata.uint(key)? {
        None => Ok(None),
        Some(id) => match TokenId::try_from(id) {
            Ok(id) => Ok(Some(id)),
            Err(_) => Err(Error::bad_value(key, "a token id", id)),
        },
    }
}

fn kinds(metadata: Metadata<'_>, tokens: usize) -> Result<Vec<TokenKind>, Error> {
    let Some(codes) = metadata.ints(KINDS)? else { return Ok(vec![TokenKind::Normal; tokens]) };
    let kind = |(index, code): (usize, &i64)| {
        u8::try_from(*code)
            .ok()
            .and_then(|code| TokenKind::try_from(code).ok())
            .ok_or_else(|| Error::bad_value(format!("{KINDS}[{index}]"), "1 to 6", code))
    };
    codes.iter().enumerate().map(kind).collect()
}

fn byte_level(metadata: Metadata<'_>, tokens: &[&str]) -> Result<Algorithm, Error> {
    let pre_tokenizer = pre_tokenizer(metadata.string(PRE)?.unwrap_or("default"))?;
    let index: HashMap<&str, TokenId> = tokens.iter().zip(0..).map(|(token, id)| (*token, id)).collect();
    let merges = required(MERGES, "an array of strings", metadata.strings(MERGES)?)?;
    let mut pairs = Vec::with_capacity(merges.len());
    for (at, merge) in merges.iter().enumerate() {
        let pair = split_merge(merge)
            .and_then(|(left, right)| Some((*index.get(left)?, *index.get(right)?)))
            .ok_or_else(|| {
                Error::bad_value(format!("{MERGES}[{at}]"), "two tokens and a space between", merge)
            })?;
        pairs.push(pair);
    }
    Ok(Algorithm::ByteLevel { pre_tokenizer, merges: pairs })
}

/// A token is never empty, so a space at the start belongs to the first one.
fn split_merge(merge: &str) -> Option<(&str, &str)> {
    let first = merge.chars().next()?.len_utf8();
    let space = first + merge[first..].find(' ')?;
    Some((&merge[..space], &merge[space + 1..]))
}

/// The families of names that cut text in the same way. Source: the vocabulary loader of llama.cpp.
fn pre_tokenizer(name: &str) -> Result<PreTokenizer, Error> {
    Ok(match name {
        "gpt-2" | "phi-2" | "mpt" | "olmo" | "jais" => PreTokenizer::Gpt2,
        "smollm" | "starcoder" | "refact" | "command-r" | "codeshell" | "exaone" => PreTokenizer::SmolLm,
        "llama-bpe" | "llama3" | "llama-v3" | "falcon3" => PreTokenizer::Llama3,
        "qwen2" | "stablelm2" | "deepseek-r1-qwen" => PreTokenizer::Qwen2,
        "default" => PreTokenizer::Default,
        other => {
            let expected = "one of the gpt-2, smollm, llama-bpe and qwen2 families, or default";
            return Err(Error::bad_value(PRE, expected, other));
        }
    })
}

fn sentence_piece(metadata: Metadata<'_>) -> Result<Algorithm, Error> {
    Ok(Algorithm::SentencePiece {
        scores: required(SCORES, "an array of floats", metadata.floats(SCORES)?)?,
        unknown: id(metadata, "tokenizer.ggml.unknown_token_id")?,
        space_prefix: metadata.bool(SPACE_PREFIX)?.unwrap_or(true),
    })
}

fn end_ids(
    metadata: Metadata<'_>,
    eos: Option<TokenId>,
    tokens: &[&str],
    kinds: &[TokenKind],
) -> Result<Vec<TokenId>, Error> {
    let mut ends: Vec<TokenId> = eos.into_iter().collect();
    ends.extend(id(metadata, "tokenizer.ggml.eot_token_id")?);
    ends.extend(id(metadata, "tokenizer.ggml.eom_token_id")?);
    for (id, (token, kind)) in tokens.iter().zip(kinds).enumerate() {
        let apart = matches!(kind, TokenKind::Control | TokenKind::UserDefined);
        if apart && TURN_ENDS.contains(token) {
            ends.push(id as TokenId);
        }
    }
    let mut seen = HashSet::new();
    ends.retain(|id| seen.insert(*id));
    Ok(ends)
}
