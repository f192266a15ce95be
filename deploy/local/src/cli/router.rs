//! Options of the router.

use clap::Args;
use serde::Serialize;

/// What a router of its own has besides [`RoutingOptions`].
#[derive(Args, Serialize)]
#[command(next_help_heading = "Addresses")]
pub(crate) struct RouterListenOptions {
    /// Address to serve gRPC at
    #[arg(long, value_name = "HOST:PORT")]
    listen: Option<String>,
    /// Address under which gateways reach this router, where it registers itself [default: that of --listen]
    #[arg(long, value_name = "HOST:PORT")]
    advertise: Option<String>,
    /// Most requests that run at once
    #[arg(long, value_name = "N")]
    requests_max: Option<usize>,
    /// Most requests that wait for their turn, by priority and then by deadline; the next is refused [default: twice
    /// --requests-max]
    #[arg(long, value_name = "N")]
    queue_max: Option<usize>,
}

/// See [`router::Config`].
#[derive(Args, Serialize)]
#[command(next_help_heading = "Routing")]
pub(crate) struct RoutingOptions {
    /// How to place requests: auto (split where a prefill worker lives and the hop pays), split or fused
    #[arg(long, value_name = "MODE")]
    placement: Option<String>,
    /// Which worker takes a request: round-robin, least-loaded, power-of-two, prefix (where most of it is cached and
    /// least waits) or session (one worker for a session)
    #[arg(long, value_name = "NAME")]
    policy: Option<String>,
    /// Most memory for knowing which worker has which KV blocks
    #[arg(long, value_name = "SIZE")]
    prefix_index_memory: Option<String>,
    /// Failed attempts after which a request fails
    #[arg(long, value_name = "N")]
    attempts_max: Option<u32>,
    /// Seconds that a request waits for a worker that can take it
    #[arg(long, value_name = "SECONDS")]
    retry_window_seconds: Option<f64>,
    /// Seconds before the first further attempt; they double with each
    #[arg(long, value_name = "SECONDS")]
    backoff_min_seconds: Option<f64>,
    /// Most seconds between two attempts
    #[arg(long, value_name = "SECONDS")]
    backoff_max_seconds: Option<f64>,
    /// Seconds between two questions to a worker about who it is
    #[arg(long, value_name = "SECONDS")]
    describe_every_seconds: Option<f64>,
    /// Seconds that a worker has to say who it is
    #[arg(long, value_name = "SECONDS")]
    describe_timeout_seconds: Option<f64>,
    /// Items of one answer that may wait for the gateway
    #[arg(long, value_name = "N")]
    items_max: Option<usize>,
    /// Tokens from decode that may wait for the first token, which prefill gives
    #[arg(long, value_name = "N")]
    early_tokens_max: Option<usize>,
    /// Most fences on their way at once
    #[arg(long, value_name = "N")]
    fences_max: Option<usize>,
}
