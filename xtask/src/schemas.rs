//! Structured output on the whole corpus of schemas: many chats with real processes, which takes minutes.

use anyhow::Result;

use crate::model::{self, Name};
use crate::process::{command, run};
use crate::stages;

/// Runs the chats, every schema of the corpus or, if `short`, the tenth that the tests run, and prints what came of them.
pub(crate) fn check(short: bool) -> Result<()> {
    model::fetch(Name::Smollm2)?;
    stages::e2e_binary()?;
    let test = ["test", "--locked", "--package", "baton-tests", "--test", "schemas", "--", "--nocapture"];
    let mut test = command("cargo", &test);
    if !short {
        test.env("BATON_SCHEMAS", "all");
    }
    run(test)
}
