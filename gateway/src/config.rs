//! Configuration of the gateway.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Every option of the gateway.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Address to serve HTTP at, `host:port`; port 0 lets the system choose.
    pub listen: String,
    /// Address to serve gRPC at: `host:port`, or `local:NAME` within the process.
    pub grpc_listen: String,
    /// Most requests that run at once; the next is refused.
    pub requests_max: usize,
    /// Most bytes of a request's body.
    pub body_bytes_max: usize,
    /// Longest that the whole of a request's body may take to arrive, seconds.
    #[serde(with = "node::config::seconds::positive", rename = "body_timeout_seconds")]
    pub body_timeout: Duration,
    /// Total deadline of a request that names none, seconds.
    #[serde(with = "node::config::seconds::positive", rename = "timeout_seconds")]
    pub timeout: Duration,
    /// How long a request whose router is gone waits for one that goes on, seconds.
    #[serde(with = "node::config::seconds::positive", rename = "resume_window_seconds")]
    pub resume_window: Duration,
    /// How often routers are asked what is served, seconds.
    #[serde(with = "node::config::seconds::positive", rename = "models_every_seconds")]
    pub models_every: Duration,
    /// Where just one model is served, take any name for it.
    pub accept_any_model: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            listen: "127.0.0.1:8000".to_owned(),
            grpc_listen: "127.0.0.1:8001".to_owned(),
            requests_max: 1000,
            body_bytes_max: 32 << 20,
            body_timeout: Duration::from_secs(30),
            timeout: Duration::from_mins(10),
            resume_window: Duration::from_secs(15),
            models_every: Duration::from_secs(1),
            accept_any_model: false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_seconds_and_unknown_options_faults() {
        let config: Config =
            serde_json::from_str(r#"{"timeout_seconds": 1.5, "body_timeout_seconds": 2, "requests_max": 3}"#)
                .unwrap();
        let expected = Config {
            timeout: Duration::from_millis(1500),
            body_timeout: Duration::from_secs(2),
            requests_max: 3,
            ..Config::default()
        };
        assert_eq!(config, expected);
        let text = serde_json::to_string(&expected).unwrap();
        assert_eq!(serde_json::from_str::<Config>(&text).unwrap(), expected);
        for bad in [r#"{"timeout_seconds": 0}"#, r#"{"timeout_seconds": -1}"#, r#"{"port": 1}"#] {
            assert!(serde_json::from_str::<Config>(bad).is_err(), "{bad}");
        }
    }
}
