//! Configuration of the router.

use std::time::Duration;

use node::config::size::MemorySize;
use serde::{Deserialize, Serialize};

use crate::dispatch::DispatchConfig;
use crate::policy::Policy;
use crate::pools::{INDEX_BYTES_MAX, PlacementMode};

/// Every option of the router.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Address to serve gRPC at: `host:port`, or `local:NAME` within the process.
    pub listen: String,
    /// Address under which gateways reach `listen`, where routers register themselves; `listen` itself when absent.
    pub advertise: Option<String>,
    /// How to place requests: `auto` (split where a prefill worker is live and the hop pays, fused otherwise), `split` or `fused`.
    pub placement: PlacementMode,
    /// Which worker takes a request: `round-robin`, `least-loaded`, `power-of-two` (the less loaded of two drawn by chance),
    /// `prefix` (the least expected time, given what each has cached) or `session` (one worker for a session).
    pub policy: Policy,
    /// Most memory for knowing which worker has which KV blocks; those asked for longest ago are forgotten first.
    pub prefix_index_memory: MemorySize,
    /// Most requests that run at once.
    pub requests_max: usize,
    /// Most requests that wait for their turn, by priority and then by deadline; the next is refused. Twice `requests_max`
    /// when absent.
    pub queue_max: Option<usize>,
    /// Items of one answer that may wait for the gateway to read them.
    pub items_max: usize,
    /// How long a request waits for a worker that can take it, and puts up with refusals, seconds.
    #[serde(with = "node::config::seconds::positive", rename = "retry_window_seconds")]
    pub retry_window: Duration,
    /// Failed attempts after which a request fails; refusals for want of room are not counted.
    pub attempts_max: u32,
    /// Pause before the first replay, seconds; doubles with every further one.
    #[serde(with = "node::config::seconds::positive", rename = "backoff_min_seconds")]
    pub backoff_min: Duration,
    /// Longest pause between two attempts, seconds.
    #[serde(with = "node::config::seconds::positive", rename = "backoff_max_seconds")]
    pub backoff_max: Duration,
    /// Tokens from decode that may wait for the first token, which prefill gives.
    pub early_tokens_max: usize,
    /// How often every worker is asked who it is, seconds; one that does not answer is asked four times as often.
    #[serde(with = "node::config::seconds::positive", rename = "describe_every_seconds")]
    pub describe_every: Duration,
    /// How long a worker has to say who it is, seconds.
    #[serde(with = "node::config::seconds::positive", rename = "describe_timeout_seconds")]
    pub describe_timeout: Duration,
    /// Most fences on their way at once. A fence beyond them is left to the next attempt, which brings its own.
    pub fences_max: usize,
}

impl Default for Config {
    fn default() -> Self {
        let dispatch = DispatchConfig::default();
        Self {
            listen: "127.0.0.1:9000".to_owned(),
            advertise: None,
            placement: dispatch.placement,
            policy: Policy::default(),
            prefix_index_memory: MemorySize { bytes: INDEX_BYTES_MAX as u64 },
            requests_max: 1024,
            queue_max: None,
            items_max: 64,
            retry_window: dispatch.retry_window,
            attempts_max: dispatch.attempts_max,
            backoff_min: dispatch.backoff_min,
            backoff_max: dispatch.backoff_max,
            early_tokens_max: dispatch.early_tokens_max,
            describe_every: Duration::from_secs(1),
            describe_timeout: Duration::from_secs(2),
            fences_max: 1024,
        }
    }
}

impl Config {
    /// What each request's dispatch needs of it.
    pub(crate) fn dispatch(&self) -> DispatchConfig {
        DispatchConfig {
            placement: self.placement,
            retry_window: self.retry_window,
            attempts_max: self.attempts_max,
            backoff_min: self.backoff_min,
            backoff_max: self.backoff_max,
            early_tokens_max: self.early_tokens_max,
        }
    }

    /// Most requests that wait for their turn.
    pub(crate) fn queue_max(&self) -> usize {
        self.queue_max.unwrap_or(self.requests_max.saturating_mul(2))
    }

    /// Refuses values that no router can run with.
    ///
    /// # Errors
    /// An option error that names the field.
    pub fn validate(&self) -> Result<(), node::Error> {
        let positive = [
            ("requests_max", self.requests_max),
            ("items_max", self.items_max),
            ("attempts_max", self.attempts_max as usize),
            ("early_tokens_max", self.early_tokens_max),
            ("fences_max", self.fences_max),
        ];
        match positive.into_iter().find(|&(_, value)| value == 0) {
            Some((field, _)) => Err(node::Error::option(field, "expected at least 1, got 0")),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_of_nothing_is_refused_by_name() {
        Config::default().validate().unwrap();
        let faulty = Config { early_tokens_max: 0, ..Config::default() };
        let message = faulty.validate().unwrap_err().to_string();
        assert_eq!(message, "early_tokens_max: expected at least 1, got 0");
    }

    #[test]
    fn options_are_written_in_seconds_and_words() {
        let config: Config =
            toml::from_str("retry_window_seconds = 1.5\nplacement = 'split'\npolicy = 'least-loaded'")
                .unwrap();
        let expected = Config {
            retry_window: Duration::from_millis(1500),
            placement: PlacementMode::Split,
            policy: Policy::LeastLoaded,
            ..Config::default()
        };
        assert_eq!(config, expected);
        assert_eq!(toml::from_str::<Config>(&toml::to_string(&expected).unwrap()).unwrap(), expected);
        for bad in ["retry_window_seconds = 0.0", "placement = 'both'", "policy = 'best'", "requests = 3"] {
            assert!(toml::from_str::<Config>(bad).is_err(), "{bad}");
        }
    }
}
