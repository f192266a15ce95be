//! What a worker costs in time, and what fits on it.
//!
//! A step of the engine takes
//!
//! ```text
//! step + prefill_token · tokens of prompts + prefill_context · Σ (token · tokens before it)
//!      + decode_sequence · decodes + decode_context · Σ (tokens of their contexts)
//! ```
//!
//! The first line is what arithmetic costs, the second what reading the KV of everybody costs: the linear model that
//! DistServe (Zhong et al., OSDI 2024) and Splitwise (Patel et al., ISCA 2024) fit their own simulators with.

mod fit;

use proto::Error;
use serde::{Deserialize, Serialize};

pub use fit::{Fit, Measurement, fit, read_measurements};

/// Prices in time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Prices {
    /// Of each step, seconds.
    pub step_seconds: f64,
    /// Of each token of a prompt, seconds: the inverse of the rate of prefill.
    pub prefill_token_seconds: f64,
    /// Of each token of a prompt, for each token before it, seconds.
    pub prefill_context_seconds: f64,
    /// Of each sequence that decodes, seconds.
    pub decode_sequence_seconds: f64,
    /// Of each token of the context of a sequence that decodes, seconds.
    pub decode_context_seconds: f64,
    /// What a worker sends, and what it receives, bytes per second.
    pub link_bytes_per_second: f64,
    /// A message from one process to the next, one way, seconds.
    pub hop_seconds: f64,
}

/// What fits on a worker; the options of a worker by the same names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sizes {
    /// KV of a token, bytes.
    pub kv_token_bytes: usize,
    /// Tokens per KV block.
    pub block_tokens: usize,
    /// KV blocks of the arena.
    pub kv_blocks: usize,
    /// Most tokens of a step; at least `sequences_max`.
    pub step_tokens: usize,
    /// Most sequences that run, or wait for their KV, at once.
    pub sequences_max: usize,
    /// Most sequences that wait to run.
    pub waiting_max: usize,
    /// Most tokens of a sequence, prompt and output together.
    pub context_len: usize,
}

/// A kind of worker.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// What it costs.
    pub prices: Prices,
    /// What fits.
    pub sizes: Sizes,
}

/// What a step has to compute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepWork {
    /// Tokens of prompts.
    pub prefill_tokens: usize,
    /// For each of them the tokens before it, added up.
    pub prefill_context: f64,
    /// Sequences that decode.
    pub decodes: usize,
    /// Tokens of their contexts, added up.
    pub decode_context: f64,
}

impl StepWork {
    /// Adds a chunk of a prompt: `tokens` tokens behind `before` others.
    pub fn add_chunk(&mut self, before: usize, tokens: usize) {
        self.prefill_tokens += tokens;
        let (before, tokens) = (before as f64, tokens as f64);
        self.prefill_context += tokens * before + tokens * (tokens - 1.0) / 2.0;
    }

    /// Adds a decode with a context of that many tokens.
    pub fn add_decode(&mut self, context: usize) {
        self.decodes += 1;
        self.decode_context += context as f64;
    }
}

impl Prices {
    /// How long a step takes, seconds.
    pub fn step(&self, work: &StepWork) -> f64 {
        self.step_seconds
            + self.prefill_token_seconds * work.prefill_tokens as f64
            + self.prefill_context_seconds * work.prefill_context
            + self.decode_sequence_seconds * work.decodes as f64
            + self.decode_context_seconds * work.decode_context
    }

    /// How long a prompt takes on an idle worker, in chunks of `step_tokens`, seconds.
    pub fn prefill(&self, tokens: usize, step_tokens: usize) -> f64 {
        let mut work = StepWork::default();
        work.add_chunk(0, tokens);
        self.step(&work) + self.step_seconds * (tokens.div_ceil(step_tokens).max(1) - 1) as f64
    }

    fn fields(&self) -> [(&'static str, f64); 7] {
        [
            ("step_seconds", self.step_seconds),
            ("prefill_token_seconds", self.prefill_token_seconds),
            ("prefill_context_seconds", self.prefill_context_seconds),
            ("decode_sequence_seconds", self.decode_sequence_seconds),
            ("decode_context_seconds", self.decode_context_seconds),
            ("link_bytes_per_second", self.link_bytes_per_second),
            ("hop_seconds", self.hop_seconds),
        ]
    }
}

/// The presets, by name.
pub const PRESETS: [&str; 2] = ["cpu-smollm2", "gpu-8b"];

impl Machine {
    /// A preset; `docs/planning.md` says where each figure comes from.
    ///
    /// # Errors
    /// INVALID_ARGUMENT that names `preset` and those there are.
    pub fn preset(name: &str) -> Result<Self, Error> {
        match name {
            "cpu-smollm2" => Ok(Self::cpu_smollm2()),
            "gpu-8b" => Ok(Self::gpu_8b()),
            _ => {
                Err(Error::invalid("preset", format_args!("{} expected, {name} came", PRESETS.join(" or "))))
            }
        }
    }

    /// Baton's CPU backend on two cores of its own, with SmolLM2-135M-Instruct (Q4_1): measured.
    fn cpu_smollm2() -> Self {
        Self {
            prices: Prices {
                step_seconds: 5.2e-3,
                prefill_token_seconds: 1.20e-3,
                prefill_context_seconds: 3.0e-7,
                decode_sequence_seconds: 2.2e-3,
                decode_context_seconds: 1.5e-6,
                link_bytes_per_second: 1e9,
                hop_seconds: 2e-4,
            },
            sizes: Sizes {
                // 30 layers, keys and values, 3 heads of 64 numbers of 2 bytes.
                kv_token_bytes: 23_040,
                block_tokens: 16,
                // 1 GiB.
                kv_blocks: 2_912,
                step_tokens: 128,
                sequences_max: 64,
                waiting_max: 256,
                context_len: 8_192,
            },
        }
    }

    /// An accelerator of 80 GB with a model of eight billion 16-bit weights: assumed, from data sheets and a roofline.
    fn gpu_8b() -> Self {
        Self {
            prices: Prices {
                // 16 GB of weights at 70 % of 3.35 TB/s, and what a launch costs.
                step_seconds: 7e-3,
                // 16 GFLOP at half of 990 TFLOP/s.
                prefill_token_seconds: 3.3e-5,
                // 4 · 32 layers · 4,096 FLOP at the same pace.
                prefill_context_seconds: 1.1e-9,
                decode_sequence_seconds: 3.3e-5,
                // 131,072 bytes of KV at 70 % of 3.35 TB/s.
                decode_context_seconds: 5.6e-8,
                // 200 Gbit/s, four fifths of it used.
                link_bytes_per_second: 2e10,
                hop_seconds: 3e-4,
            },
            sizes: Sizes {
                // 32 layers, keys and values, 8 heads of 128 numbers of 2 bytes.
                kv_token_bytes: 131_072,
                block_tokens: 16,
                // What 90 % of the memory leaves beside weights and activations: 52 GB.
                kv_blocks: 25_000,
                step_tokens: 2_048,
                sequences_max: 256,
                waiting_max: 256,
                context_len: 131_072,
            },
        }
    }

    /// Refuses what no worker can be.
    ///
    /// # Errors
    /// INVALID_ARGUMENT that names the field.
    pub fn validate(&self) -> Result<(), Error> {
        for (field, value) in self.prices.fields() {
            if !value.is_finite() || value < 0.0 {
                let field = format!("prices.{field}");
                return Err(Error::invalid(&field, format_args!("a number from 0 expected, {value} came")));
            }
        }
        let positive = [
            ("step_seconds", self.prices.step_seconds),
            ("link_bytes_per_second", self.prices.link_bytes_per_second),
        ];
        if let Some((field, _)) = positive.into_iter().find(|&(_, value)| value == 0.0) {
            return Err(Error::invalid(&format!("prices.{field}"), "more than 0 expected, 0 came"));
        }
        let Sizes { block_tokens, kv_blocks, step_tokens, sequences_max, waiting_max, context_len, .. } =
            self.sizes;
        let positive = [
            ("sizes.block_tokens", block_tokens),
            ("sizes.kv_blocks", kv_blocks),
            ("sizes.step_tokens", step_tokens),
            ("sizes.sequences_max", sequences_max),
            ("sizes.waiting_max", waiting_max),
            ("sizes.context_len", context_len),
        ];
        if let Some((field, _)) = positive.into_iter().find(|&(_, value)| value == 0) {
            return Err(Error::invalid(field, "at least 1 expected, 0 came"));
        }
        if sequences_max > step_tokens {
            let message =
                format_args!("at least sequences_max ({sequences_max}) expected, {step_tokens} came");
            return Err(Error::invalid("sizes.step_tokens", message));
        }
        Ok(())
    }
}

/// A machine as a file says it: a preset, and what differs from it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineFile {
    /// Name of a preset; `gpu-8b` when absent.
    pub preset: Option<String>,
    /// Prices that differ.
    #[serde(default)]
    pub prices: toml::Table,
    /// Sizes that differ.
    #[serde(default)]
    pub sizes: toml::Table,
}

impl MachineFile {
    /// The machine.
    ///
    /// # Errors
    /// INVALID_ARGUMENT that names the field.
    pub fn machine(&self) -> Result<Machine, Error> {
        let preset = Machine::preset(self.preset.as_deref().unwrap_or("gpu-8b"))?;
        let machine = Machine {
            prices: over(preset.prices, &self.prices, "prices")?,
            sizes: over(preset.sizes, &self.sizes, "sizes")?,
        };
        machine.validate()?;
        Ok(machine)
    }
}

/// `base` with the fields that `table` has.
fn over<T: Serialize + for<'a> Deserialize<'a>>(base: T, table: &toml::Table, at: &str) -> Result<T, Error> {
    let mut fields = toml::Table::try_from(base).map_err(|fault| Error::invalid(at, fault))?;
    for (name, value) in table {
        let field = format!("{at}.{name}");
        let Some(known) = fields.get_mut(name) else {
            return Err(Error::invalid(&field, "no such field"));
        };
        *known = match (&*known, value) {
            (toml::Value::Float(_), toml::Value::Integer(whole)) => toml::Value::Float(*whole as f64),
            (toml::Value::Float(_), toml::Value::Float(_)) => value.clone(),
            (toml::Value::Integer(_), toml::Value::Integer(whole)) if *whole >= 0 => value.clone(),
            (toml::Value::Integer(_), _) => {
                return Err(Error::invalid(
                    &field,
                    format_args!("a whole number from 0 expected, {value} came"),
                ));
            }
            _ => return Err(Error::invalid(&field, format_args!("a number expected, {value} came"))),
        };
    }
    fields.try_into().map_err(|fault| Error::invalid(at, fault))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Machine, Error> {
        toml::from_str::<MachineFile>(text).unwrap().machine()
    }

    #[test]
    fn presets_are_valid_and_can_be_changed() {
        for name in PRESETS {
            Machine::preset(name).unwrap().validate().unwrap();
        }
        let machine = read("[prices]\nhop_seconds = 1\n[sizes]\nkv_blocks = 7").unwrap();
        assert_eq!((machine.prices.hop_seconds, machine.sizes.kv_blocks), (1.0, 7));
        assert_eq!(machine.prices.step_seconds, Machine::gpu_8b().prices.step_seconds);
    }

    #[test]
    fn the_measured_preset_tells_what_was_measured() {
        // docs/benchmarks.md, "Engine", two cores: a prompt of 512 tokens in one chunk, then 64 tokens of one sequence.
        let prices = Machine::cpu_smollm2().prices;
        let prefill = 512.0 / prices.prefill(512, 512);
        assert!((prefill / 780.0 - 1.0).abs() < 0.02, "{prefill} tokens/s");
        let decode = |context| {
            let mut work = StepWork::default();
            work.add_decode(context);
            prices.step(&work)
        };
        let decode = 64.0 / (512..576).map(decode).sum::<f64>();
        assert!((decode / 122.0 - 1.0).abs() < 0.02, "{decode} tokens/s");
    }

    #[test]
    fn faults_name_their_field() {
        for (text, field) in [
            ("preset = 'tpu'", "preset: "),
            ("[prices]\nhop = 1", "prices.hop: "),
            ("[prices]\nhop_seconds = 'x'", "prices.hop_seconds: "),
            ("[prices]\nhop_seconds = -1.0", "prices.hop_seconds: "),
            ("[prices]\nlink_bytes_per_second = 0", "prices.link_bytes_per_second: "),
            ("[sizes]\nkv_blocks = 1.5", "sizes.kv_blocks: "),
            ("[sizes]\nkv_blocks = 0", "sizes.kv_blocks: "),
            ("[sizes]\nstep_tokens = 8", "sizes.step_tokens: "),
        ] {
            let message = read(text).unwrap_err().message;
            assert!(message.starts_with(field), "{text}: {message}");
        }
    }

    #[test]
    fn a_step_costs_the_sum_of_its_parts() {
        let prices = Prices {
            step_seconds: 1.0,
            prefill_token_seconds: 0.1,
            prefill_context_seconds: 0.01,
            decode_sequence_seconds: 0.5,
            decode_context_seconds: 0.001,
            link_bytes_per_second: 1.0,
            hop_seconds: 0.0,
        };
        let mut work = StepWork::default();
        work.add_chunk(10, 3);
        work.add_decode(100);
        // Tokens 10, 11 and 12 have as many before them.
        assert_eq!(
            work,
            StepWork { prefill_tokens: 3, prefill_context: 33.0, decodes: 1, decode_context: 100.0 }
        );
        assert!((prices.step(&work) - (1.0 + 0.3 + 0.33 + 0.5 + 0.1)).abs() < 1e-12);
        // Two chunks pay for two steps, and for the same arithmetic.
        let (one, two) = (prices.prefill(8, 8), prices.prefill(8, 4));
        assert!((two - one - 1.0).abs() < 1e-12);
    }
}
