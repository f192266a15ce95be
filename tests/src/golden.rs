//! The golden prompts of the default model, with their reference continuations.

use std::path::PathBuf;

use serde::Deserialize;

/// One prompt and what a float32 reference makes of it.
#[derive(Clone, Debug, Deserialize)]
pub struct Case {
    /// The text.
    pub prompt: String,
    /// Its tokens.
    pub prompt_ids: Vec<u32>,
    /// The reference's greedy continuation.
    pub greedy_ids: Vec<u32>,
    /// Log-probability of the best token minus that of the second best, at each of `greedy_ids`.
    pub greedy_gap: Vec<f32>,
}

#[derive(Deserialize)]
struct File {
    cases: Vec<Case>,
}

/// The workspace's root.
pub fn root() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

/// The default model's file, fetched by `cargo xtask fetch-model`.
///
/// # Panics
/// When it was not fetched.
pub fn model() -> PathBuf {
    let path = root().join(".cache/models/SmolLM2-135M-Instruct.gguf");
    assert!(path.exists(), "no {}: run `cargo xtask fetch-model` first", path.display());
    path
}

/// Every golden case.
///
/// # Panics
/// When the file is missing or not in its format.
pub fn cases() -> Vec<Case> {
    let path = root().join("engine/testdata/smollm2-visible.json");
    let text = std::fs::read_to_string(&path).expect("the golden file is part of the repository");
    serde_json::from_str::<File>(&text).expect("the golden file is JSON").cases
}
