//! Options of workers.

use std::path::PathBuf;

use clap::Args;
use serde::Serialize;

/// Where a worker of its own listens.
#[derive(Args, Serialize)]
#[command(next_help_heading = "Addresses")]
pub(crate) struct WorkerListenOptions {
    /// Address to serve gRPC at
    #[arg(long, value_name = "HOST:PORT")]
    listen: Option<String>,
    /// Address under which others reach this worker [default: that of --listen]
    #[arg(long, value_name = "HOST:PORT")]
    advertise: Option<String>,
    /// Seconds that a drain is only announced before new work is refused
    #[arg(long, value_name = "SECONDS")]
    drain_notice_seconds: Option<f64>,
}

/// See [`worker::Config`].
#[derive(Args, Serialize)]
pub(crate) struct EngineOptions {
    #[command(flatten)]
    #[serde(flatten)]
    pub(crate) model: ModelOptions,
    #[command(flatten)]
    #[serde(flatten)]
    sizes: SizeOptions,
    #[command(flatten)]
    #[serde(flatten)]
    hand_off: HandOffOptions,
}

#[derive(Args, Serialize)]
#[command(next_help_heading = "Model and machine")]
pub(crate) struct ModelOptions {
    /// Model: a GGUF file, a folder with one, the name of one in the models folder, or sim: for the simulated model
    #[arg(long, value_name = "MODEL")]
    pub(crate) model: Option<String>,
    /// Folder where models are looked for by name [default: .cache/models, and .cache/baton/models of the home folder]
    #[arg(long, value_name = "FOLDER")]
    models_dir: Option<PathBuf>,
    /// The model's public name [default: the file's name]
    #[arg(long, value_name = "NAME")]
    served_name: Option<String>,
    /// Folder where the digests of model files are kept between starts [default: none]
    #[arg(long, value_name = "FOLDER")]
    cache_dir: Option<PathBuf>,
    /// What to compute on: auto, or a device and perhaps its number, such as cpu or cuda:0
    #[arg(long, value_name = "DEVICE")]
    device: Option<String>,
    /// Threads that compute, per worker [default: all cores]
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Scheduling priority of those threads, 0 to 19 [default: 10 for prefill, 0 for decode]
    #[arg(long, value_name = "N")]
    nice: Option<i32>,
}

#[derive(Args, Serialize)]
#[command(next_help_heading = "Sizes of each worker")]
struct SizeOptions {
    /// Who it is for: local, interactive or server; decides on sequences, KV and steps where they are not set
    /// [default: local with --dialect mlc, else none]
    #[arg(long, value_name = "MODE")]
    mode: Option<String>,
    /// Memory for KV, such as 2GiB [default: a quarter of what is available, at most 1GiB; on a GPU what is left of its
    /// share]
    #[arg(long, value_name = "SIZE")]
    kv_memory: Option<String>,
    /// Share of a GPU's memory for weights, steps and KV together; the workers of one process part it between them
    #[arg(long, value_name = "SHARE")]
    gpu_memory_utilization: Option<f64>,
    /// KV blocks [default: by the mode, or what --kv-memory holds, or eight full contexts]
    #[arg(long, value_name = "N")]
    kv_blocks: Option<usize>,
    /// Tokens of KV, in place of --kv-blocks
    #[arg(long, value_name = "N")]
    kv_tokens: Option<usize>,
    /// Tokens per KV block
    #[arg(long, value_name = "N")]
    block_tokens: Option<usize>,
    /// Most tokens of a served sequence [default: the model's context]
    #[arg(long, value_name = "N")]
    context_len: Option<usize>,
    /// Most tokens of a step, which long prefills are cut into [default: 128, on a GPU 2048, or less by the
    /// mode]
    #[arg(long, value_name = "N")]
    step_tokens: Option<usize>,
    /// Most sequences that run at once [default: 64, on a GPU 256, or less by the mode]
    #[arg(long, value_name = "N")]
    sequences_max: Option<usize>,
    /// Most sequences that wait to run
    #[arg(long, value_name = "N")]
    waiting_max: Option<usize>,
    /// Keep the KV of finished sequences for later ones that start alike
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    prefix_cache: Option<bool>,
}

#[derive(Args, Serialize)]
#[command(next_help_heading = "Hand-off")]
struct HandOffOptions {
    /// Seconds that held KV outlives the router's call and each renewal
    #[arg(long, value_name = "SECONDS")]
    lease_ttl_seconds: Option<f64>,
    /// Seconds between two renewals, at most half of that
    #[arg(long, value_name = "SECONDS")]
    renew_every_seconds: Option<f64>,
    /// Most calls that peers may have open at once
    #[arg(long, value_name = "N")]
    calls_max: Option<usize>,
    /// Most events that wait for the engine besides one for each open call
    #[arg(long, value_name = "N")]
    events_max: Option<usize>,
    /// Changes of the prefix cache that are kept for routers that watch
    #[arg(long, value_name = "N")]
    changes_max: Option<usize>,
    /// Items of one fetch that may wait on either side
    #[arg(long, value_name = "N")]
    fetch_window: Option<usize>,
}
