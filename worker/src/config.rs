//! Configuration of a worker of either role.

use std::time::Duration;

use node::Listener;
use node::config::size::MemorySize;
use proto::Role;
use serde::{Deserialize, Serialize};

use crate::device::Device;
use crate::limits::Mode;
use crate::load::Source;

/// Every option of a worker. Where a default differs by role or by machine, the field is absent until it is set.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Address to serve gRPC at: `host:port`, or `local:NAME` within the process.
    pub listen: String,
    /// Address under which peers reach `listen`; `listen` itself when absent. Needed when `listen` names no
    /// reachable host or leaves the port to the system.
    pub advertise: Option<String>,
    /// The model: path of a GGUF file, or `sim:` for the simulated one.
    pub model: Source,
    /// What to compute it on.
    pub device: Device,
    /// The model's public name; the file's name without its ending when absent.
    pub served_name: Option<String>,
    /// Threads that compute, the engine's own included; all cores when absent.
    pub threads: Option<usize>,
    /// Scheduling priority of those threads, 0 (normal) to 19 (least urgent). When absent 10 for prefill, so that
    /// a decode worker on the same cores keeps its pace, and 0 for decode.
    pub nice: Option<i32>,
    /// Who the worker is for: decides `sequences_max`, `step_tokens` and the size of the KV arena where they are absent,
    /// see [`crate::limits`].
    pub mode: Option<Mode>,
    /// KV blocks of the arena; when absent what `kv_tokens`, the mode or `kv_memory` say, and else as many as
    /// [`crate::limits`] finds fit for the machine.
    pub kv_blocks: Option<usize>,
    /// Tokens of the arena, in place of `kv_blocks`. MLC-LLM's `max_total_seq_length`.
    pub kv_tokens: Option<usize>,
    /// Memory for the KV of this worker; when absent a quarter of what is available, and at most 1 GiB, or on a GPU what
    /// `gpu_memory_utilization` leaves.
    pub kv_memory: Option<MemorySize>,
    /// Share of a GPU's memory that this worker takes for weights, steps and KV together, above 0 and up to 1.
    pub gpu_memory_utilization: f64,
    /// The longest sequence that is served, no longer than the model's context; the model's when absent. MLC-LLM's
    /// `context_window_size`.
    pub context_len: Option<usize>,
    /// Tokens per KV block.
    pub block_tokens: usize,
    /// Most tokens of a step: what a long prefill is cut into. When absent [`STEP_TOKENS`](crate::limits::STEP_TOKENS),
    /// or less by the mode. MLC-LLM's `prefill_chunk_size`.
    pub step_tokens: Option<usize>,
    /// Most sequences that run, or wait for their KV to arrive, at once. When absent
    /// [`SEQUENCES`](crate::limits::SEQUENCES), or less by the mode. MLC-LLM's `max_num_sequence`.
    pub sequences_max: Option<usize>,
    /// Most sequences that wait to run.
    pub waiting_max: usize,
    /// Keep the KV of finished sequences for later ones that start with the same tokens.
    pub prefix_cache: bool,
    /// How long a hold outlives the router's call and each renewal, seconds.
    #[serde(with = "node::config::seconds")]
    pub lease_ttl_seconds: Duration,
    /// How often a decode worker renews a lease, seconds; well below `lease_ttl_seconds`.
    #[serde(with = "node::config::seconds")]
    pub renew_every_seconds: Duration,
    /// How long a drain is only announced before new work is refused, seconds: what routers placed before they learnt
    /// of it still comes in.
    #[serde(with = "node::config::seconds")]
    pub drain_notice_seconds: Duration,
    /// Most calls that peers may have open at once.
    pub calls_max: usize,
    /// Most events that wait for the engine besides one for each open call.
    pub events_max: usize,
    /// Changes of the prefix cache that are kept for routers which watch; one that falls behind further is told anew what
    /// there is.
    pub changes_max: usize,
    /// Items (blocks, mostly) of one fetch that may wait on either side.
    pub fetch_window: usize,
    /// Folder where the digests of model files are kept between starts; none when absent.
    pub cache_dir: Option<std::path::PathBuf>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            listen: "127.0.0.1:9100".to_owned(),
            advertise: None,
            model: Source::default(),
            device: Device::default(),
            served_name: None,
            threads: None,
            nice: None,
            mode: None,
            kv_blocks: None,
            kv_tokens: None,
            kv_memory: None,
            gpu_memory_utilization: GPU_MEMORY_UTILIZATION,
            context_len: None,
            block_tokens: 16,
            step_tokens: None,
            sequences_max: None,
            waiting_max: 256,
            prefix_cache: true,
            lease_ttl_seconds: Duration::from_secs(10),
            renew_every_seconds: Duration::from_secs(2),
            drain_notice_seconds: Duration::from_secs(2),
            calls_max: 1024,
            events_max: 1024,
            changes_max: 65_536,
            fetch_window: 8,
            cache_dir: None,
        }
    }
}

/// The share of a GPU's memory that a worker takes, as MLC-LLM has it.
const GPU_MEMORY_UTILIZATION: f64 = 0.85;

/// Most tokens of a block: a block is what a prefix is shared by, a transfer checked by, and a last one wasted by.
const BLOCK_TOKENS_MAX: usize = 1024;

/// What a prefill worker's threads are set to, so that decode's latency wins. Measured on two cores, each worker with
/// two threads, prefill without a pause: the 99th percentile between tokens was 76 to 143 ms at equal priority and 33
/// to 59 ms at 10, no more than with decode alone; prefill kept about a quarter of its pace, and all of it when decode
/// is idle.
const PREFILL_NICE: i32 = 10;

impl Config {
    /// Other names that options have in a configuration file: those of MLC-LLM.
    pub const ALIASES: &[(&str, &str)] = &[
        ("max_num_sequence", "sequences_max"),
        ("max_total_seq_length", "kv_tokens"),
        ("prefill_chunk_size", "step_tokens"),
        ("context_window_size", "context_len"),
    ];

    /// Where to listen, and the address that peers use.
    ///
    /// # Errors
    /// An option error that names the field.
    pub(crate) fn addresses(&self) -> Result<(Listener, String), node::Error> {
        let listener = Listener::parse("listen", &self.listen)?;
        let advertised = self.advertise.clone().unwrap_or_else(|| listener.to_string());
        if advertised.ends_with(":0") {
            let message = "expected the port that peers use, since listen leaves it to the system; none came";
            return Err(node::Error::option("advertise", message));
        }
        Ok((listener, advertised))
    }

    /// Refuses values that no worker can run with.
    ///
    /// # Errors
    /// An option error that names the field. What depends on the model is checked when it is loaded.
    pub fn validate(&self) -> Result<(), node::Error> {
        let positive = [
            ("calls_max", Some(self.calls_max)),
            ("events_max", Some(self.events_max)),
            ("fetch_window", Some(self.fetch_window)),
            ("waiting_max", Some(self.waiting_max)),
            ("kv_blocks", self.kv_blocks),
            ("kv_tokens", self.kv_tokens),
            ("context_len", self.context_len),
            ("step_tokens", self.step_tokens),
            ("sequences_max", self.sequences_max),
        ];
        if let Some((field, _)) = positive.into_iter().find(|&(_, value)| value == Some(0)) {
            return Err(node::Error::option(field, "at least 1 expected, 0 came"));
        }
        if !(1..=BLOCK_TOKENS_MAX).contains(&self.block_tokens) {
            let message =
                format!("a number from 1 to {BLOCK_TOKENS_MAX} expected, {} came", self.block_tokens);
            return Err(node::Error::option("block_tokens", message));
        }
        self.device.check()?;
        let share = self.gpu_memory_utilization;
        if !(share > 0.0 && share <= 1.0) {
            let message = format!("a number above 0 and up to 1 expected, {share} came");
            return Err(node::Error::option("gpu_memory_utilization", message));
        }
        if let (Some(blocks), Some(tokens)) = (self.kv_blocks, self.kv_tokens) {
            let message = format!("expected no kv_tokens beside kv_blocks {blocks}, {tokens} came");
            return Err(node::Error::option("kv_tokens", message));
        }
        if self.threads == Some(0) {
            return Err(node::Error::option("threads", "at least 1 expected, 0 came"));
        }
        if self.nice.is_some_and(|nice| !(0..=19).contains(&nice)) {
            return Err(node::Error::option("nice", "a number from 0 to 19 expected"));
        }
        if self.renew_every_seconds.is_zero() || self.renew_every_seconds * 2 > self.lease_ttl_seconds {
            let message = format!(
                "more than 0 and at most half of lease_ttl_seconds ({:?}) expected, {:?} came",
                self.lease_ttl_seconds, self.renew_every_seconds
            );
            return Err(node::Error::option("renew_every_seconds", message));
        }
        Ok(())
    }

    /// The priority of the computing threads.
    pub(crate) fn nice(&self, role: Role) -> i32 {
        self.nice.unwrap_or(if role == Role::Prefill { PREFILL_NICE } else { 0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_valid_and_faults_name_their_field() {
        Config::default().validate().unwrap();
        let fault = |change: fn(&mut Config)| {
            let mut config = Config::default();
            change(&mut config);
            config.validate().unwrap_err().to_string()
        };
        assert!(fault(|c| c.fetch_window = 0).starts_with("fetch_window: "));
        assert!(fault(|c| c.nice = Some(20)).starts_with("nice: "));
        for share in [0.0, -1.0, 1.01, f64::NAN] {
            let error = Config { gpu_memory_utilization: share, ..Config::default() }.validate().unwrap_err();
            assert!(error.to_string().starts_with("gpu_memory_utilization: a number above 0"), "{error}");
        }
        assert!(fault(|c| c.block_tokens = 0).starts_with("block_tokens: "));
        assert!(fault(|c| c.threads = Some(0)).starts_with("threads: "));
        assert!(fault(|c| c.sequences_max = Some(0)).starts_with("sequences_max: "));
        assert!(fault(|c| c.context_len = Some(0)).starts_with("context_len: "));
        assert!(fault(|c| (c.kv_blocks, c.kv_tokens) = (Some(1), Some(1))).starts_with("kv_tokens: "));
        assert!(
            fault(|c| c.renew_every_seconds = Duration::from_secs(6)).starts_with("renew_every_seconds: ")
        );
    }

    #[test]
    fn a_port_left_to_the_system_needs_an_address_for_peers() {
        let mut config = Config { listen: "127.0.0.1:0".into(), ..Config::default() };
        assert!(config.addresses().unwrap_err().to_string().starts_with("advertise: "));
        config.advertise = Some("worker-0:9100".into());
        assert_eq!(config.addresses().unwrap().1, "worker-0:9100");
        config = Config { listen: "local:p".into(), ..Config::default() };
        assert_eq!(config.addresses().unwrap(), (Listener::Local("p".into()), "local:p".to_owned()));
    }

    #[test]
    fn prefill_gives_way_to_decode() {
        let config = Config::default();
        assert_eq!((config.nice(Role::Prefill), config.nice(Role::Decode)), (10, 0));
        let config = Config { nice: Some(3), ..config };
        assert_eq!((config.nice(Role::Prefill), config.nice(Role::Decode)), (3, 3));
    }
}
