//! The encoder for plain text, on the tokenizers crate.

use std::collections::HashMap;

use proto::TokenId;
use tokenizers::models::bpe::{BPE, Merges, Vocab};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{PreTokenizerWrapper, SplitDelimiterBehavior, Tokenizer};

use super::bundle::{Algorithm, Content, PreTokenizer, TokenKind};
use crate::Error;

/// The word pattern of the Llama 3 tokenizer, as its `tokenizer.json` has it.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// The word pattern of the Qwen 2 tokenizer, as its `tokenizer.json` has it: Llama 3's with digits one by one.
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Cuts before and after the GPT-2 pattern where a file names no pre-tokenizer. Source: llama.cpp's default.
const DEFAULT_BEFORE: &str = r"[\p{P}\$\+<=>\^~\|]+";
const DEFAULT_AFTER: [&str; 2] = [r"\p{N}+", r"[0-9][0-9][0-9]"];

/// Builds the encoder. The content was checked: every merge joins two tokens into a third.
pub(super) fn build(content: &Content) -> Result<Tokenizer, Error> {
    let vocabulary: Vocab = content.vocabulary().map(|(id, token, _)| (token.to_owned(), id)).collect();
    match &content.algorithm {
        Algorithm::ByteLevel { pre_tokenizer, merges } => {
            let bpe = BPE::builder()
                .vocab_and_merges(vocabulary, named(merges, content))
                // Llama 3 takes a word that is a token as it is, even where no merges lead to it.
                .ignore_merges(*pre_tokenizer == PreTokenizer::Llama3)
                .build()
                .map_err(Error::tokenizer)?;
            let mut tokenizer = Tokenizer::new(bpe);
            tokenizer.with_pre_tokenizer(Some(pre_tokenizer.build()?));
            Ok(tokenizer)
        }
        Algorithm::SentencePiece { scores, unknown, .. } => {
            let mut builder = BPE::builder()
                .vocab_and_merges(vocabulary, named(&merges_by_score(content, scores), content))
                .fuse_unk(true)
                .byte_fallback(true);
            if let Some(unknown) = unknown {
                builder = builder.unk_token(content.token(Some(*unknown)).to_owned());
            }
            Ok(Tokenizer::new(builder.build().map_err(Error::tokenizer)?))
        }
    }
}

fn named(merges: &[(TokenId, TokenId)], content: &Content) -> Merges {
    let token = |id: TokenId| content.tokens[id as usize].clone();
    merges.iter().map(|(left, right)| (token(*left), token(*right))).collect()
}

/// SentencePiece joins the two neighbours whose token has the highest score, so every way to cut a token into two
/// others is a merge, ranked by the score of what it makes.
fn merges_by_score(content: &Content, scores: &[f32]) -> Vec<(TokenId, TokenId)> {
    let joins = |kind| matches!(kind, TokenKind::Normal | TokenKind::UserDefined);
    let index: HashMap<&str, TokenId> =
        content.vocabulary().filter(|(.., kind)| joins(*kind)).map(|(id, token, _)| (token, id)).collect();
    let mut merges = Vec::new();
    for (id, token, _) in content.vocabulary().filter(|(.., kind)| joins(*kind)) {
        for (cut, _) in token.char_indices().skip(1) {
            let (left, right) = token.split_at(cut);
            if let (Some(left), Some(right)) = (index.get(left), index.get(right)) {
                merges.push((id, *left, *right));
            }
        }
    }
    let score = |id: TokenId| scores[id as usize];
    merges.sort_by(|(a, ..), (b, ..)| score(*b).total_cmp(&score(*a)).then(a.cmp(b)));
    merges.into_iter().map(|(_, left, right)| (left, right)).collect()
}

impl PreTokenizer {
    /// The last step shows bytes as printable characters and, where it is told to, cuts by the GPT-2 pattern.
    fn build(self) -> Result<Sequence, Error> {
        let bytes = |gpt2_pattern| PreTokenizerWrapper::from(ByteLevel::new(false, false, gpt2_pattern));
        let steps = match self {
            Self::Gpt2 => vec![bytes(true)],
            Self::SmolLm => vec![Digits::new(true).into(), bytes(true)],
            Self::Llama3 => vec![cut(LLAMA3)?, bytes(false)],
            Self::Qwen2 => vec![cut(QWEN2)?, bytes(false)],
            Self::Default => {
                let [numbers, threes] = DEFAULT_AFTER;
                vec![cut(DEFAULT_BEFORE)?, cut(GPT2)?, cut(numbers)?, cut(threes)?, bytes(false)]
            }
        };
        Ok(Sequence::new(steps))
    }
}

/// The word pattern of the GPT-2 tokenizer.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

fn cut(pattern: &str) -> Result<PreTokenizerWrapper, Error> {
    let pattern = SplitPattern::Regex(pattern.to_owned());
    let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false).map_err(Error::tokenizer)?;
    Ok(split.into())
}
