//! What MLC-LLM's users type, in Baton's words.

use std::path::PathBuf;

use node::Error;
use node::config::Layers;
use serde::{Deserialize, Serialize};
use toml::Table;

use crate::overrides::{self, Fields};

/// What is taken from MLC-LLM's users and does nothing, or nothing yet.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Unused {
    model_lib: Option<PathBuf>,
    additional_models: Vec<String>,
    speculative_mode: SpeculativeMode,
}

#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum SpeculativeMode {
    #[default]
    Disable,
    SmallDraft,
    Eagle,
    Medusa,
}

/// Turns the text of an option into fields.
type Reader = fn(&str) -> Result<Fields, String>;

/// Puts options of MLC-LLM into the words of the configurations. Gives what has no effect, a line each.
///
/// # Errors
/// An option without a valid value, or that asks for what comes later.
pub(crate) fn translate(layers: &mut Layers) -> Result<Vec<String>, Error> {
    let mut notes = Vec::new();
    let readers: [(&'static str, Reader); 3] = [
        ("prefix_cache_mode", overrides::prefix_cache_mode),
        ("prefill_mode", overrides::prefill_mode),
        // What is overridden comes last.
        ("overrides", overrides::read),
    ];
    for (key, read) in readers {
        let mut noted = |text: &str| -> Result<Table, String> {
            let Fields { fields, notes: new } = read(text)?;
            let option = key.replace('_', "-");
            notes.extend(new.into_iter().map(|note| format!("--{option}: {note}")));
            Ok(fields)
        };
        layers.expand(key, &mut noted)?;
    }
    let unused: Unused = layers.load()?;
    if unused.speculative_mode != SpeculativeMode::Disable {
        let message = "speculative decoding comes later; expected disable";
        return Err(Error::option("--speculative-mode", message));
    }
    if !unused.additional_models.is_empty() {
        let message = "further models come later, with speculative decoding; expected none";
        return Err(Error::option("--additional-models", message));
    }
    if let Some(path) = unused.model_lib {
        notes.push(format!("--model-lib: {} is ignored, since models are not compiled", path.display()));
    }
    Ok(notes)
}
