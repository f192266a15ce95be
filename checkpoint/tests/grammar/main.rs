//! Grammars against vocabularies: what they let come, what they refuse, and what the worst of them cost.

#![expect(clippy::unwrap_used, reason = "a test's panic is its report")]

mod costly;
mod following;
mod schemas;

use std::path::Path;
use std::sync::LazyLock;

use checkpoint::Checkpoint;
use checkpoint::grammar::{Compiled, GrammarEnv, GrammarError, Mask, Matcher};
use proto::{Grammar, TokenId};
use serde_json::Value;

/// Ends a generation in [`BYTES`].
const EOS: TokenId = 0;

/// Every byte is a token.
static BYTES: LazyLock<GrammarEnv> = LazyLock::new(|| GrammarEnv::of_bytes(256, EOS).unwrap());

/// The default model's vocabulary.
static SMOLLM2: LazyLock<GrammarEnv> = LazyLock::new(|| {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.cache/models/SmolLM2-135M-Instruct.gguf");
    let checkpoint = Checkpoint::open(&path)
        .unwrap_or_else(|error| panic!("run `cargo xtask fetch-model` first: {error}"));
    GrammarEnv::of_bundle(&checkpoint.bundle().unwrap()).unwrap()
});

fn json(schema: &Value) -> Grammar {
    Grammar::JsonSchema(schema.to_string().into())
}

fn regex(text: &str) -> Grammar {
    Grammar::Regex(text.into())
}

fn lark(text: &str) -> Grammar {
    Grammar::Lark(text.into())
}

fn compiled(env: &GrammarEnv, grammar: &Grammar) -> Compiled {
    env.compile(grammar).unwrap_or_else(|fault| panic!("{grammar:?}: {fault}"))
}

/// Why the grammar is refused.
#[track_caller]
fn refusal(grammar: &Grammar) -> String {
    match BYTES.compile(grammar) {
        Err(fault @ GrammarError::Refused { .. }) => fault.to_string(),
        other => panic!("{grammar:?}: {other:?}"),
    }
}

/// True when the whole text is one that the grammar lets come.
fn takes(grammar: &Grammar, text: &str) -> bool {
    let mut matcher = compiled(&BYTES, grammar).matcher();
    text.bytes().all(|byte| matcher.accept(byte.into()).is_ok()) && matcher.is_accepting().unwrap()
}

/// Texts that the grammar takes, and others that it does not.
#[track_caller]
fn check(grammar: &Grammar, taken: &[&str], not_taken: &[&str]) {
    for text in taken {
        assert!(takes(grammar, text), "{grammar:?} takes {text:?}");
    }
    for text in not_taken {
        assert!(!takes(grammar, text), "{grammar:?} does not take {text:?}");
    }
}

/// SplitMix64.
struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) % bound as u64) as usize
    }
}

/// Lets chance choose among the allowed tokens, at most `steps` times; `seen` gets the matcher, the mask and the chosen
/// token at each. True when the output came to its end.
fn wander(
    mut matcher: Matcher,
    dice: &mut Dice,
    steps: usize,
    mut seen: impl FnMut(&mut Matcher, &Mask, TokenId),
) -> Result<bool, GrammarError> {
    let mut mask = Mask::default();
    for _ in 0..steps {
        matcher.allowed(&mut mask)?;
        let allowed: Vec<TokenId> = mask.iter().collect();
        let token = allowed[dice.below(allowed.len())];
        seen(&mut matcher, &mask, token);
        matcher.accept(token)?;
        if matcher.is_stopped() {
            return Ok(true);
        }
    }
    Ok(false)
}
