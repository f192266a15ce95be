//! A vocabulary ready for grammars, and compiling one.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use llguidance::ParserFactory;
use llguidance::api::TopLevelGrammar;
use proto::{Grammar, TokenId};
use toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};

use super::limits::{self, EXPRESSION_BYTES_MAX, GRAMMAR_BYTES_MAX};
use super::survey::Survey;
use super::{GrammarError, Matcher, lark, schema};
use crate::TokenizerBundle;

/// The bytes of a model's tokens, as the grammars of its outputs see them. Built once per model: 60 ms for 50,000
/// tokens. Share it behind an `Arc`.
pub struct GrammarEnv {
    factory: ParserFactory,
    eos_ids: Arc<[TokenId]>,
    vocab_size: usize,
    /// The grammars asked for last, the latest at the back.
    kept: Mutex<VecDeque<(Grammar, Compiled)>>,
}

/// A grammar, ready to follow outputs. Cheap to clone.
#[derive(Clone)]
pub struct Compiled {
    start: Arc<Mutex<llguidance::Matcher>>,
    eos_ids: Arc<[TokenId]>,
}

/// What a token is to a grammar.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Word<'a> {
    /// These bytes of a text, perhaps a part of a character; a token without bytes never comes.
    Text(&'a [u8]),
    /// No text: a control token, which comes only where a Lark grammar asks for it by this name (`<|name|>`) or by id
    /// (`<[7]>`).
    Special(&'a [u8]),
}

impl GrammarEnv {
    /// A vocabulary: what each token is, by id, and the tokens that end a generation.
    ///
    /// # Errors
    /// [`GrammarError::Vocabulary`] when there are no tokens, too many, none that ends a generation, or one that is not
    /// among them.
    pub fn new<'a>(
        tokens: impl IntoIterator<Item = Word<'a>>,
        eos_ids: &[TokenId],
    ) -> Result<Self, GrammarError> {
        let words: Vec<Vec<u8>> = tokens.into_iter().map(Word::in_trie).collect();
        let vocab_size = words.len();
        if vocab_size == 0 || vocab_size > VOCAB_MAX {
            let message = format!("from 1 to {VOCAB_MAX} tokens expected, {vocab_size} came");
            return Err(GrammarError::Vocabulary(message));
        }
        let Some(&eos) = eos_ids.first() else {
            let message = "a token that ends a generation expected, none came".to_owned();
            return Err(GrammarError::Vocabulary(message));
        };
        if let Some(id) = eos_ids.iter().find(|id| **id as usize >= vocab_size) {
            let message = format!("ends of generation below {vocab_size} expected, {id} came");
            return Err(GrammarError::Vocabulary(message));
        }
        let trie = TokTrie::from(&TokRxInfo::new(vocab_size as u32, eos), &words).with_eos_tokens(eos_ids);
        // Not a canonical tokenizer, so no token is forced: where the grammar leaves one text only, the model still
        // chooses how to cut it into tokens.
        let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let factory = ParserFactory::new_simple(&env);
        let mut factory = factory.map_err(|fault| GrammarError::Vocabulary(short(&fault)))?;
        factory.quiet();
        *factory.limits_mut() = limits::parser_limits();
        Ok(Self { factory, eos_ids: eos_ids.into(), vocab_size, kept: Mutex::default() })
    }

    /// The vocabulary of a tokenizer.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn of_bundle(bundle: &TokenizerBundle) -> Result<Self, GrammarError> {
        let vocabulary = bundle.vocabulary();
        let tokens = (0..vocabulary.len() as TokenId).map(|id| {
            let bytes = vocabulary.bytes(id).unwrap_or_default();
            if vocabulary.is_special(id) { Word::Special(bytes) } else { Word::Text(bytes) }
        });
        Self::new(tokens, bundle.eos_ids())
    }

    /// A vocabulary for tests of models without text: token `b` is the byte `b`, except that `eos` ends a generation,
    /// and tokens from 256 on are no text.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn of_bytes(vocab_size: usize, eos: TokenId) -> Result<Self, GrammarError> {
        let bytes: Vec<u8> = (0..=255).collect();
        let tokens = (0..vocab_size).map(|id| match bytes.get(id..=id) {
            Some(byte) if id != eos as usize => Word::Text(byte),
            _ => Word::Special(b""),
        });
        Self::new(tokens, &[eos])
    }

    /// Token ids are below this.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// The tokens that end a generation.
    pub fn eos_ids(&self) -> &[TokenId] {
        &self.eos_ids
    }

    /// Compiles a grammar, or finds it among those compiled last. Takes well under a millisecond for what tools and
    /// APIs ask, and is bounded for all others; see `docs/benchmarks.md`.
    ///
    /// # Errors
    /// [`GrammarError::Refused`] when the text is no such grammar, asks for what is not supported (which it names), or
    /// is over a limit.
    pub fn compile(&self, grammar: &Grammar) -> Result<Compiled, GrammarError> {
        if let Some(compiled) = self.find(grammar) {
            return Ok(compiled);
        }
        let compiled = self.compile_anew(grammar)?;
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() >= limits::KEPT_MAX {
            kept.pop_front();
        }
        kept.push_back((grammar.clone(), compiled.clone()));
        Ok(compiled)
    }

    fn find(&self, grammar: &Grammar) -> Option<Compiled> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let index = kept.iter().position(|(known, _)| known == grammar)?;
        let entry = kept.remove(index)?;
        let compiled = entry.1.clone();
        kept.push_back(entry);
        Some(compiled)
    }

    fn compile_anew(&self, grammar: &Grammar) -> Result<Compiled, GrammarError> {
        let (kind, text) = match grammar {
            Grammar::JsonSchema(text) => ("json schema", text),
            Grammar::Regex(text) => ("regex", text),
            Grammar::Lark(text) => ("lark grammar", text),
        };
        let refused = |message| GrammarError::Refused { kind, message };
        if text.trim().is_empty() {
            return Err(refused("some text expected, none came".to_owned()));
        }
        if text.len() > GRAMMAR_BYTES_MAX {
            let message = format!("at most {GRAMMAR_BYTES_MAX} bytes expected, {} came", text.len());
            return Err(refused(message));
        }
        let compile = || {
            let ready = match grammar {
                Grammar::JsonSchema(text) => {
                    let schema = serde_json::from_str(text).map_err(|fault| fault.to_string())?;
                    let mut survey = Survey::default();
                    TopLevelGrammar::from_json_schema(schema::prepare(schema, &mut survey)?)
                }
                Grammar::Regex(text) if text.len() > EXPRESSION_BYTES_MAX => {
                    let len = text.len();
                    return Err(format!("at most {EXPRESSION_BYTES_MAX} bytes expected, {len} came"));
                }
                Grammar::Regex(text) => TopLevelGrammar::from_regex(text),
                Grammar::Lark(text) => TopLevelGrammar::from_lark(lark::prepare(text)?),
            };
            let mut start = llguidance::Matcher::new(self.factory.create_parser(ready));
            start.get_error().map_or(Ok(()), |fault| Err(short(&fault)))?;
            self.try_out(&mut start)?;
            Ok(start)
        };
        let start = on_a_deep_stack(compile).map_err(refused)?;
        Ok(Compiled { start: Arc::new(Mutex::new(start)), eos_ids: Arc::clone(&self.eos_ids) })
    }

    /// Takes a first step, where most grammars that cannot be followed fail. What it finds out of the first token
    /// stays known to the matchers.
    fn try_out(&self, start: &mut llguidance::Matcher) -> Result<(), String> {
        let first = start.compute_mask_or_eos().map_err(|fault| short(&fault))?;
        if let Some(token) = first.iter().find(|token| !self.eos_ids.contains(token)) {
            let mut trial = start.deep_clone();
            trial.consume_token(token).map_err(|fault| short(&fault))?;
            if !trial.is_stopped() {
                trial.compute_mask().map_err(|fault| short(&fault))?;
            }
        }
        Ok(())
    }
}

impl Word<'_> {
    /// As the trie has it: special tokens start with a byte that no text has.
    fn in_trie(self) -> Vec<u8> {
        match self {
            Self::Text(bytes) => bytes.to_vec(),
            Self::Special(b"") => Vec::new(),
            Self::Special(name) => [&[TokTrie::SPECIAL_TOKEN_MARKER], name].concat(),
        }
    }
}

/// Far above the vocabulary of any model, and far below what the trie's node numbers can hold.
const VOCAB_MAX: usize = 1 << 22;

/// Runs a function on a thread with room for deep recursion. A panic becomes a message.
fn on_a_deep_stack<T: Send>(work: impl FnOnce() -> Result<T, String> + Send) -> Result<T, String> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("grammar".to_owned());
        let thread = thread.stack_size(limits::COMPILE_STACK_BYTES).spawn_scoped(scope, work);
        let thread = thread.map_err(|fault| format!("no thread to compile it on: {fault}"))?;
        thread.join().unwrap_or_else(|_| Err("the compiler panicked".to_owned()))
    })
}

/// A message of the grammar engine in our style: its first line, and where that only announces it the line that tells
/// what is wrong, each cut to a length.
pub(super) fn short(fault: &impl fmt::Display) -> String {
    let text = fault.to_string();
    // What is in angle brackets is the state of the engine.
    let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('<'));
    let first = lines.next().unwrap_or("no message");
    let mut line = cut(first);
    let detail = lines.find_map(|line| line.strip_prefix("error: "));
    if let Some(detail) = detail.filter(|_| first.ends_with(':')) {
        line = format!("{} {}", line, cut(detail));
    }
    // The engine's name for a mask that allows nothing.
    if line.eq_ignore_ascii_case("noExtensionBias") {
        return "nothing can match".to_owned();
    }
    let mut characters = line.trim_end_matches('.').chars();
    let first = characters.next().map(|first| first.to_lowercase().to_string()).unwrap_or_default();
    first.chars().chain(characters).collect()
}

/// The beginning of a long text, and its end.
fn cut(text: &str) -> String {
    let characters: Vec<char> = text.chars().collect();
    if characters.len() <= limits::MESSAGE_CHARS_MAX {
        return text.to_owned();
    }
    let (start, end) = (limits::MESSAGE_CHARS_MAX * 3 / 4, characters.len() - limits::MESSAGE_CHARS_MAX / 4);
    let part = |part: &[char]| part.iter().collect::<String>();
    format!("{} … {}", part(&characters[..start]), part(&characters[end..]))
}

impl Compiled {
    /// Follows an output from its beginning.
    pub fn matcher(&self) -> Matcher {
        // Deep: matchers must not use up each other's limits.
        let start = self.start.lock().unwrap_or_else(PoisonError::into_inner).deep_clone();
        Matcher::new(start, Arc::clone(&self.eos_ids))
    }
}

impl fmt::Debug for GrammarEnv {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GrammarEnv").field("vocab_size", &self.vocab_size).finish_non_exhaustive()
    }
}

impl fmt::Debug for Compiled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Compiled").finish_non_exhaustive()
    }
}
