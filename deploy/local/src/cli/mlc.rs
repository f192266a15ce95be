//! Options as MLC-LLM's users know them, where Baton has others for the same.

use clap::Args;
use serde::Serialize;

/// See [`crate::mlc`].
#[derive(Args, Serialize)]
#[command(next_help_heading = "As MLC-LLM has them")]
pub(crate) struct MlcOptions {
    /// Engine options in MLC-LLM's words, such as max_num_sequence=32;max_total_seq_length=4096
    #[arg(long, value_name = "KEY=VALUE;…")]
    overrides: Option<String>,
    /// disable, or radix: what --prefix-cache decides
    #[arg(long, value_name = "MODE")]
    prefix_cache_mode: Option<String>,
    /// hybrid; chunked is taken and changes nothing
    #[arg(long, value_name = "MODE")]
    prefill_mode: Option<String>,
    /// Taken and ignored: models are not compiled
    #[arg(long, value_name = "FILE")]
    model_lib: Option<String>,
    /// Models for speculative decoding, which comes later
    #[arg(long, value_name = "MODEL[,LIB]", num_args = 0..)]
    additional_models: Option<Vec<String>>,
    /// disable; small_draft, eagle and medusa come later
    #[arg(long, value_name = "MODE")]
    speculative_mode: Option<String>,
}
