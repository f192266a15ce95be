//! Detecting the watermark: the engine's own detector over a text's tokens.

use anyhow::Result;

use crate::model;
use crate::process::{command, run};

/// Prints what the detector says of the text on standard input.
pub(crate) fn detect(name: model::Name, key: u64, gamma: f32) -> Result<()> {
    let model = model::fetch(name)?;
    let example =
        ["run", "--quiet", "--release", "--locked", "--package", "engine", "--example", "watermark", "--"];
    let mut detector = command("cargo", &example);
    detector.arg(&model).args([key.to_string(), gamma.to_string()]);
    run(detector)
}
