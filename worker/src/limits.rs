//! How much a worker takes on: from what was asked for, the model, and the memory that there is.
//!
//! Without a [`Mode`], what is not set has Baton's own defaults. With one, it follows the rules that MLC-LLM has for its
//! modes (`InferrableEngineConfig` in its `cpp/serve/config.cc`), in which FIT is the number of tokens whose KV the
//! memory holds:
//!
//! | mode | sequences | tokens of KV | tokens of a step |
//! |---|---|---|---|
//! | local | min(4, the model's) | min(FIT, context, 8192) | min(the model's, tokens of KV, context) |
//! | interactive | 1 | min(FIT, context) | min(the model's, tokens of KV, context) |
//! | server | the model's | min(FIT, sequences × context) | the model's |
//!
//! What a model there is compiled for is here a property of the device: [`SEQUENCES`] and [`STEP_TOKENS`] on the CPU,
//! [`GPU_SEQUENCES`] and [`GPU_STEP_TOKENS`] on a GPU.

use node::config::size::MemorySize;
use proto::{Error, KvLayout};
use serde::{Deserialize, Serialize};

use crate::config::Config;

/// Sequences that the CPU backend runs at once with profit.
pub const SEQUENCES: usize = 64;
/// What a long prefill is cut into. On the CPU a prefill gains nothing beyond some 100 tokens, and a larger step only
/// keeps the others waiting.
pub const STEP_TOKENS: usize = 128;

/// Sequences that a GPU runs at once with profit: until then a step of decoding mostly reads weights.
pub const GPU_SEQUENCES: usize = 256;
/// What a long prefill is cut into on a GPU: enough rows to keep its matrix units busy.
pub const GPU_STEP_TOKENS: usize = 2048;

/// Most sequences of [`Mode::Local`].
const LOCAL_SEQUENCES_MAX: usize = 4;
/// Most tokens of KV of [`Mode::Local`].
const LOCAL_TOKENS_MAX: usize = 8192;

/// Without a mode, sequences of the full context that the arena holds, memory permitting.
const DEFAULT_SEQUENCES: usize = 8;
/// Where no memory is named, the arena takes at most this part of what is available...
const MEMORY_SHARE: u64 = 4;
/// ...and at most this many bytes.
const KV_BYTES_MAX: u64 = 1 << 30;

/// Who a worker is for, which decides what was not set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// A few requests at a time, with little memory.
    Local,
    /// One request at a time.
    Interactive,
    /// As many requests as the memory holds.
    Server,
}

impl Mode {
    /// Most sequences that run at once on the CPU, where that is not set.
    pub fn sequences(self) -> usize {
        self.sequences_of(SEQUENCES)
    }

    /// The same on a device that runs so many with profit.
    fn sequences_of(self, device: usize) -> usize {
        match self {
            Self::Local => LOCAL_SEQUENCES_MAX.min(device),
            Self::Interactive => 1,
            Self::Server => device,
        }
    }
}

/// What a model brings to the calculation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    /// Most positions of a sequence.
    pub(crate) context_len: usize,
    /// Shape of the KV arena.
    pub(crate) layout: KvLayout,
    /// What KV is kept in.
    pub(crate) room: Room,
}

/// Memory for KV.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Room {
    /// The machine's, which others want too: bytes that can still be had, if that is known.
    Machine(Option<u64>),
    /// A GPU's: bytes that were set apart.
    Gpu(u64),
}

impl Room {
    /// Sequences that the device runs at once with profit.
    pub(crate) fn sequences(self) -> usize {
        match self {
            Self::Machine(_) => SEQUENCES,
            Self::Gpu(_) => GPU_SEQUENCES,
        }
    }

    /// Tokens of a step.
    pub(crate) fn step_tokens(self) -> usize {
        match self {
            Self::Machine(_) => STEP_TOKENS,
            Self::Gpu(_) => GPU_STEP_TOKENS,
        }
    }
}

/// How much a worker takes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Most sequences that run at once.
    pub(crate) sequences_max: usize,
    /// Most tokens of a step.
    pub(crate) step_tokens: usize,
    /// KV blocks of the arena.
    pub(crate) kv_blocks: usize,
    /// The longest sequence that is served. What outgrows the whole arena would be refused late, after all the work.
    pub(crate) context_len: usize,
}

impl Limits {
    /// Works them out.
    ///
    /// # Errors
    /// INVALID_ARGUMENT that names the option: when the memory holds no token, not what was asked for, or when the
    /// context asked for is longer than the model's.
    pub(crate) fn of(config: &Config, shape: Shape) -> Result<Self, Error> {
        let context_len = context_len(config, shape.context_len)?;
        let memory = Memory::of(config, shape)?;
        let of_device = shape.room.sequences();
        let sequences_max = config
            .sequences_max
            .unwrap_or_else(|| config.mode.map_or(of_device, |mode| mode.sequences_of(of_device)));
        let (kv_blocks, tokens) = match (config.kv_blocks, config.kv_tokens) {
            (Some(blocks), _) => (blocks, blocks.saturating_mul(config.block_tokens)),
            (None, Some(tokens)) => (tokens.div_ceil(config.block_tokens), tokens),
            (None, None) => memory.arena(config, sequences_max, context_len)?,
        };
        let of_device = shape.room.step_tokens();
        let step_tokens = config.step_tokens.unwrap_or(match config.mode {
            None | Some(Mode::Server) => of_device,
            Some(Mode::Local | Mode::Interactive) => of_device.min(tokens).min(context_len),
        });
        Ok(Self { sequences_max, step_tokens, kv_blocks, context_len: context_len.min(tokens) })
    }
}

/// The served context: the model's, or less.
fn context_len(config: &Config, model: usize) -> Result<usize, Error> {
    match config.context_len {
        Some(asked) if asked > model => {
            let message = format!("at most the model's {model} tokens expected, {asked} came");
            Err(Error::invalid("context_len", message))
        }
        asked => Ok(asked.unwrap_or(model)),
    }
}

/// The memory for KV.
#[derive(Clone, Copy, Debug)]
struct Memory {
    bytes: u64,
    /// The option that bounds it.
    named_by: &'static str,
    /// True when all of it is for KV.
    is_set_apart: bool,
    layout: KvLayout,
}

impl Memory {
    /// What was named, or a share of what is available. What the options ask for must fit what was named.
    fn of(config: &Config, shape: Shape) -> Result<Self, Error> {
        let layout = shape.layout;
        let memory = match (config.kv_memory, shape.room) {
            (Some(MemorySize { bytes }), _) => {
                Self { bytes, named_by: "kv_memory", is_set_apart: true, layout }
            }
            (None, Room::Gpu(bytes)) => {
                Self { bytes, named_by: "gpu_memory_utilization", is_set_apart: true, layout }
            }
            (None, Room::Machine(available)) => {
                let share = available.map_or(KV_BYTES_MAX, |bytes| bytes / MEMORY_SHARE);
                let bytes = share.min(KV_BYTES_MAX);
                return Ok(Self { bytes, named_by: "kv_memory", is_set_apart: false, layout });
            }
        };
        let asked = [
            ("kv_blocks", config.kv_blocks.unwrap_or(0)),
            ("kv_tokens", config.kv_tokens.unwrap_or(0).div_ceil(config.block_tokens)),
            // Without one block nothing can be served.
            (memory.named_by, 1),
        ];
        match asked.into_iter().find(|(_, blocks)| *blocks > memory.blocks()) {
            None => Ok(memory),
            Some((option, blocks)) => {
                let needed = memory.block_bytes().saturating_mul(blocks as u64);
                let there = match config.kv_memory {
                    Some(size) => format!("kv_memory has {size}"),
                    None => format!("gpu_memory_utilization leaves {}", memory.bytes),
                };
                let message = format!(
                    "{needed} bytes are needed for {blocks} blocks of {} tokens, {there}",
                    layout.block_tokens
                );
                Err(Error::invalid(option, message))
            }
        }
    }

    fn block_bytes(&self) -> u64 {
        (self.layout.block_bytes(self.layout.block_tokens) as u64).max(1)
    }

    /// Whole blocks that it holds.
    fn blocks(&self) -> usize {
        usize::try_from(self.bytes / self.block_bytes()).unwrap_or(usize::MAX)
    }

    /// Blocks of the arena, and the tokens of them that count, where the options name neither.
    fn arena(&self, config: &Config, sequences: usize, context_len: usize) -> Result<(usize, usize), Error> {
        let block_tokens = config.block_tokens;
        let Some(mode) = config.mode else {
            let blocks = if self.is_set_apart { self.blocks() } else { self.default_blocks(context_len) };
            return Ok((blocks, blocks.saturating_mul(block_tokens)));
        };
        let wanted = match mode {
            Mode::Local => context_len.min(LOCAL_TOKENS_MAX),
            Mode::Interactive => context_len,
            Mode::Server => sequences.saturating_mul(context_len),
        };
        let tokens = wanted.min(self.fit()?);
        // A last block that is not whole must not take more than there is.
        Ok((tokens.div_ceil(block_tokens).min(self.blocks()), tokens))
    }

    /// FIT: the tokens that it holds.
    fn fit(&self) -> Result<usize, Error> {
        if self.blocks() == 0 {
            let message =
                format!("{} bytes expected for a block of KV, {} came", self.block_bytes(), self.bytes);
            return Err(Error::invalid(self.named_by, message));
        }
        let token_bytes = (self.layout.block_bytes(1) as u64).max(1);
        Ok(usize::try_from(self.bytes / token_bytes).unwrap_or(usize::MAX))
    }

    /// Enough for 8 sequences of the full context, memory permitting; at least one sequence of 512 tokens.
    fn default_blocks(&self, context_len: usize) -> usize {
        let blocks_of = |tokens: usize| self.layout.blocks_for(tokens.max(1));
        let wanted = DEFAULT_SEQUENCES.saturating_mul(blocks_of(context_len));
        wanted.min(self.blocks()).max(blocks_of(context_len.min(512)))
    }
}

#[cfg(test)]
mod tests {
    use proto::KvDtype;

    use super::*;

    /// That of SmolLM2-135M: 30 layers × 2 × 3 heads × 64 elements × 2 bytes = 23,040 bytes for a token, 368,640 for a block.
    fn shape(available: Option<u64>) -> Shape {
        let layout =
            KvLayout { layers: 30, kv_heads: 3, head_dim: 64, dtype: KvDtype::F16, block_tokens: 16 };
        assert_eq!((layout.block_bytes(1), layout.block_bytes(16)), (23_040, 368_640));
        Shape { context_len: 8192, layout, room: Room::Machine(available) }
    }

    fn memory(text: &str) -> MemorySize {
        text.parse().unwrap()
    }

    /// Sequences, tokens of a step, blocks and context.
    fn limits(config: Config) -> (usize, usize, usize, usize) {
        let limits = Limits::of(&config, shape(None)).unwrap();
        (limits.sequences_max, limits.step_tokens, limits.kv_blocks, limits.context_len)
    }

    fn mode(mode: Mode, kv_memory: &str) -> Config {
        Config { mode: Some(mode), kv_memory: Some(memory(kv_memory)), ..Config::default() }
    }

    #[test]
    fn a_mode_decides_what_is_not_set() {
        // 100 MiB = 104,857,600 bytes: FIT = 104,857,600 / 23,040 = 4551 (.1), in 284 whole blocks (of 368,640: 284.4).
        // local: min(4551, 8192, 8192) = 4551 tokens; a step of min(128, 4551, 8192).
        assert_eq!(limits(mode(Mode::Local, "100MiB")), (4, 128, 284, 4551));
        // interactive: min(4551, 8192).
        assert_eq!(limits(mode(Mode::Interactive, "100MiB")), (1, 128, 284, 4551));
        // server: min(4551, 64 × 8192 = 524,288).
        assert_eq!(limits(mode(Mode::Server, "100MiB")), (64, 128, 284, 4551));

        // 4 GiB = 4,294,967,296 bytes: FIT = 186,413 (.5), 11,650 whole blocks (.8).
        // local: min(186,413, 8192, 8192) = 8192 tokens = 512 blocks; so has interactive.
        assert_eq!(limits(mode(Mode::Local, "4GiB")), (4, 128, 512, 8192));
        assert_eq!(limits(mode(Mode::Interactive, "4GiB")), (1, 128, 512, 8192));
        // server: min(186,413, 524,288) = 186,413 tokens, which would end within block 11,651.
        assert_eq!(limits(mode(Mode::Server, "4GiB")), (64, 128, 11_650, 8192));
        // 16 GiB: FIT = 745,654; server: min(745,654, 524,288) = 524,288 tokens = 32,768 blocks.
        assert_eq!(limits(mode(Mode::Server, "16GiB")), (64, 128, 32_768, 8192));

        // 1 MiB = 1,048,576 bytes: FIT = 45 (.5), 2 whole blocks (.8); the step shrinks with it, but not that of a server.
        assert_eq!(limits(mode(Mode::Local, "1MiB")), (4, 45, 2, 45));
        assert_eq!(limits(mode(Mode::Interactive, "1MiB")), (1, 45, 2, 45));
        assert_eq!(limits(mode(Mode::Server, "1MiB")), (64, 128, 2, 45));
    }

    #[test]
    fn a_long_context_is_cut_for_local_use_alone() {
        let shape = Shape { context_len: 131_072, ..shape(None) };
        let tokens = |mode_| {
            let limits = Limits::of(&mode(mode_, "16GiB"), shape).unwrap();
            (limits.kv_blocks * 16, limits.context_len)
        };
        // local: min(745,654, 131,072, 8192); interactive: min(745,654, 131,072); server: min(745,654, 64 × 131,072),
        // of which 46,603 whole blocks fit.
        assert_eq!(tokens(Mode::Local), (8192, 8192));
        assert_eq!(tokens(Mode::Interactive), (131_072, 131_072));
        assert_eq!(tokens(Mode::Server), (46_603 * 16, 131_072));
    }

    #[test]
    fn what_is_set_wins_over_the_mode_and_counts_in_the_rest() {
        let config = Config { sequences_max: Some(10), ..mode(Mode::Server, "4GiB") };
        // min(186,413, 10 × 8192 = 81,920) = 5120 blocks.
        assert_eq!(limits(config), (10, 128, 5120, 8192));
        let config = Config { kv_tokens: Some(100), ..mode(Mode::Local, "4GiB") };
        // 100 tokens take 7 blocks; a step of min(128, 100, 8192).
        assert_eq!(limits(config), (4, 100, 7, 100));
        let config = Config { kv_blocks: Some(7), step_tokens: Some(32), ..mode(Mode::Interactive, "4GiB") };
        assert_eq!(limits(config), (1, 32, 7, 112));
        let config = Config { context_len: Some(50), ..mode(Mode::Interactive, "4GiB") };
        // min(186,413, 50) tokens = 4 blocks; a step of min(128, 50, 50).
        assert_eq!(limits(config), (1, 50, 4, 50));
        let config = Config { context_len: Some(50), ..mode(Mode::Server, "4GiB") };
        // min(186,413, 64 × 50 = 3200) tokens = 200 blocks.
        assert_eq!(limits(config), (64, 128, 200, 50));
    }

    #[test]
    fn without_a_mode_the_arena_is_bounded_by_context_and_memory() {
        let blocks = |context_len, available| {
            let config = Config { context_len: Some(context_len), ..Config::default() };
            Limits::of(&config, shape(available)).unwrap().kv_blocks
        };
        // A small context: eight of them, of 7 blocks each.
        assert_eq!(blocks(100, None), 8 * 7);
        // A large one: 1 GiB = 1,073,741,824 bytes, 2912 blocks (.7).
        assert_eq!(blocks(8192, None), 2912);
        // Little memory: a quarter of it.
        assert_eq!(blocks(8192, Some(400 * 368_640)), 100);
        // Hardly any: one sequence of 512 tokens all the same.
        assert_eq!(blocks(8192, Some(368_640)), 32);
        // Named memory is taken as it is.
        assert_eq!(
            limits(Config { kv_memory: Some(memory("100MiB")), ..Config::default() }),
            (64, 128, 284, 4544)
        );
        assert_eq!(
            limits(Config { kv_memory: Some(memory("368640")), ..Config::default() }),
            (64, 128, 1, 16)
        );
        assert_eq!(limits(Config { kv_tokens: Some(33), ..Config::default() }), (64, 128, 3, 33));
    }

    #[test]
    fn on_a_gpu_all_that_was_set_apart_is_for_kv() {
        let of = |config: &Config, bytes| Limits::of(config, Shape { room: Room::Gpu(bytes), ..shape(None) });
        // 4 GiB: 11,650 whole blocks, whatever the default of the CPU.
        let limits = of(&Config::default(), 4 << 30).unwrap();
        assert_eq!((limits.sequences_max, limits.step_tokens, limits.kv_blocks), (256, 2048, 11_650));
        let server = Config { mode: Some(Mode::Server), ..Config::default() };
        assert_eq!(of(&server, 4 << 30).unwrap().sequences_max, 256);
        // Named memory wins, and what does not fit is told by the option that bounds it.
        assert_eq!(of(&Config { kv_memory: Some(memory("100MiB")), ..server }, 0).unwrap().kv_blocks, 284);
        let error = of(&Config::default(), 368_639).unwrap_err().message;
        assert_eq!(
            error,
            "gpu_memory_utilization: 368640 bytes are needed for 1 blocks of 16 tokens, \
             gpu_memory_utilization leaves 368639"
        );
        let error = of(&Config { kv_blocks: Some(2), ..Config::default() }, 368_640).unwrap_err().message;
        assert!(error.starts_with("kv_blocks: 737280 bytes are needed for 2 blocks"), "{error}");
    }

    #[test]
    fn what_cannot_be_is_named() {
        let fault = |config: Config| Limits::of(&config, shape(Some(0))).unwrap_err().message;
        let long = fault(Config { context_len: Some(8193), ..Config::default() });
        assert_eq!(long, "context_len: at most the model's 8192 tokens expected, 8193 came");
        let little = fault(Config { kv_memory: Some(memory("368639")), ..Config::default() });
        assert_eq!(
            little,
            "kv_memory: 368640 bytes are needed for 1 blocks of 16 tokens, kv_memory has 368639"
        );
        let tokens = fault(Config { kv_tokens: Some(8192), ..mode(Mode::Local, "100MiB") });
        assert!(tokens.starts_with("kv_tokens: 188743680 bytes are needed for 512 blocks"), "{tokens}");
        let blocks = fault(Config { kv_blocks: Some(285), ..mode(Mode::Local, "100MiB") });
        assert!(blocks.starts_with("kv_blocks: 105062400 bytes are needed"), "{blocks}");
        let none = fault(Config { mode: Some(Mode::Local), ..Config::default() });
        assert_eq!(none, "kv_memory: 368640 bytes expected for a block of KV, 0 came");
    }
}
