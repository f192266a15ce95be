//! From a model's name to an engine that runs it.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use bytes::Bytes;
use checkpoint::{Checkpoint, TokenizerBundle};
use engine::backend::cpu::{self, Cpu, CpuOptions};
use engine::model::Model;
use engine::model::decoder::Decoder;
use engine::{Engine, EngineConfig};
use proto::{Digest, Error, KvDtype, KvLayout, ModelDescription, Reason, Role};
use serde::{Deserialize, Serialize};

use crate::config::Config;
use crate::sim::{self, Sim, TimedSim};
use crate::{memory, shell};

/// Where a model comes from. As text: the path of a GGUF file, or what [`Sim`] reads.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum Source {
    /// A GGUF file.
    Gguf(PathBuf),
    /// The simulated model, for tests: tokens without sense, at next to no cost.
    Sim(Sim),
}

impl Default for Source {
    fn default() -> Self {
        Self::Gguf(PathBuf::from("model.gguf"))
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gguf(path) => write!(f, "{}", path.display()),
            Self::Sim(sim) => sim.fmt(f),
        }
    }
}

impl FromStr for Source {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        if text.starts_with(sim::PREFIX) { text.parse().map(Self::Sim) } else { Ok(Self::Gguf(text.into())) }
    }
}

impl From<Source> for String {
    fn from(source: Source) -> Self {
        source.to_string()
    }
}

impl TryFrom<String> for Source {
    type Error = Error;

    fn try_from(text: String) -> Result<Self, Error> {
        text.parse()
    }
}

/// An engine over one of the models that exist.
pub enum LoadedEngine {
    /// A decoder on the CPU.
    Cpu(Box<Engine<Decoder<Cpu>>>),
    /// The simulated model.
    Sim(Box<Engine<TimedSim>>),
}

impl LoadedEngine {
    /// Shape of the KV arena.
    pub fn layout(&self) -> KvLayout {
        match self {
            Self::Cpu(engine) => engine.layout(),
            Self::Sim(engine) => engine.layout(),
        }
    }
}

/// A model ready to serve.
pub struct Loaded {
    /// The engine.
    pub engine: LoadedEngine,
    /// What is said of the model.
    pub model: ModelDescription,
    /// The tokenizer bundle that `model.tokenizer` names.
    pub tokenizer: Bytes,
}

/// Loads the model that the configuration names. Blocks, for as long as the file takes to read.
///
/// Workers of one process that load a file at the same time read it once: they share its map, fingerprint and
/// tokenizer bundle. The weights are repacked for the CPU by each worker for itself, and then the map is let go.
///
/// # Errors
/// INVALID_ARGUMENT when the file cannot be read as a model or a size does not fit it; INTERNAL when the device fails.
pub fn load(config: &Config, role: Role) -> Result<Loaded, Error> {
    match &config.model {
        Source::Gguf(path) => load_gguf(config, role, path),
        Source::Sim(sim) => load_sim(config, *sim),
    }
}

fn load_gguf(config: &Config, role: Role, path: &Path) -> Result<Loaded, Error> {
    let file = ModelFile::open(path, config.cache_dir.as_deref())?;
    let nice = config.nice(role);
    let decoder = cpu::load(
        &file.checkpoint,
        CpuOptions {
            threads: config.threads.unwrap_or_else(cores),
            on_thread_start: Some(Arc::new(move || shell::lower_priority(nice))),
        },
    )
    .map_err(|fault| unreadable(path, &fault))?;
    let shape = file.checkpoint.config().map_err(|fault| unreadable(path, &fault))?;
    let layout = KvLayout {
        layers: shape.layers,
        kv_heads: shape.kv_heads,
        head_dim: shape.head_dim,
        dtype: KvDtype::F16,
        block_tokens: config.block_tokens,
    };
    let mut model = ModelDescription {
        name: served_name(config, path),
        fingerprint: file.fingerprint,
        tokenizer: file.tokenizer_digest,
        context_len: decoder.context_len(),
        vocab_size: decoder.vocab_size(),
        numerics: cpu::NUMERICS.to_owned(),
    };
    let engine = Engine::new(decoder, engine_config(config, &model, layout))?;
    model.context_len = servable(model.context_len, &engine);
    tracing::info!(
        model = model.name,
        fingerprint = %model.fingerprint,
        context_len = model.context_len,
        kv_blocks = engine.kv_counts().total,
        "model loaded"
    );
    Ok(Loaded { engine: LoadedEngine::Cpu(Box::new(engine)), model, tokenizer: file.tokenizer.clone() })
}

fn load_sim(config: &Config, sim: Sim) -> Result<Loaded, Error> {
    let shape = sim.shape;
    // Two simulated models agree when their shapes do, whatever they cost.
    let fingerprint = sha256(Sim::from(shape).to_string().as_bytes());
    let layout = KvLayout {
        layers: shape.layers,
        kv_heads: shape.kv_heads,
        head_dim: shape.head_dim,
        dtype: KvDtype::F16,
        block_tokens: config.block_tokens,
    };
    let tokenizer = TokenizerBundle::simulated(shape.vocab).to_bytes();
    let mut model = ModelDescription {
        name: config.served_name.clone().unwrap_or_else(|| "sim".to_owned()),
        fingerprint,
        tokenizer: sha256(&tokenizer),
        context_len: shape.context_len,
        vocab_size: shape.vocab,
        numerics: "sim".to_owned(),
    };
    let engine = Engine::new(TimedSim::new(sim), engine_config(config, &model, layout))?;
    model.context_len = servable(model.context_len, &engine);
    Ok(Loaded { engine: LoadedEngine::Sim(Box::new(engine)), model, tokenizer: tokenizer.into() })
}

fn sha256(bytes: &[u8]) -> Digest {
    use sha2::Digest as _;
    Digest(sha2::Sha256::digest(bytes).into())
}

/// All cores that this process may use.
fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

fn served_name(config: &Config, path: &Path) -> String {
    let stem = || path.file_stem().map_or_else(|| "model".into(), |stem| stem.to_string_lossy().into_owned());
    config.served_name.clone().unwrap_or_else(stem)
}

fn engine_config(config: &Config, model: &ModelDescription, layout: KvLayout) -> EngineConfig {
    let kv_blocks = || default_kv_blocks(layout, model.context_len, memory::available_bytes());
    EngineConfig {
        kv_blocks: config.kv_blocks.unwrap_or_else(kv_blocks),
        block_tokens: config.block_tokens,
        step_tokens: config.step_tokens,
        sequences_max: config.sequences_max,
        waiting_max: config.waiting_max,
        prefix_seed: model.fingerprint,
        prefix_cache: config.prefix_cache,
    }
}

/// The longest sequence that the worker says it serves: what outgrows its whole arena would be refused late, after all
/// the work.
fn servable<M: Model>(context_len: usize, engine: &Engine<M>) -> usize {
    context_len.min(engine.kv_counts().total * engine.layout().block_tokens)
}

/// Sequences of the full context that the default arena holds, memory permitting.
const DEFAULT_SEQUENCES: usize = 8;
/// The default arena takes at most this part of the memory that is available...
const MEMORY_SHARE: u64 = 4;
/// ...and at most this many bytes.
const KV_BYTES_MAX: u64 = 1 << 30;

/// KV blocks of the default arena: enough for 8 sequences of the full context, but at most a quarter of the available
/// memory and at most 1 GiB; at least one sequence of 512 tokens.
fn default_kv_blocks(layout: KvLayout, context_len: usize, available: Option<u64>) -> usize {
    let blocks_of = |tokens: usize| layout.blocks_for(tokens.max(1));
    let wanted = DEFAULT_SEQUENCES.saturating_mul(blocks_of(context_len));
    let bytes = available.map_or(KV_BYTES_MAX, |bytes| (bytes / MEMORY_SHARE).min(KV_BYTES_MAX));
    let affordable = bytes / (layout.block_bytes(layout.block_tokens) as u64).max(1);
    let least = blocks_of(context_len.min(512));
    wanted.min(usize::try_from(affordable).unwrap_or(usize::MAX)).max(least)
}

fn unreadable(path: &Path, fault: &dyn fmt::Display) -> Error {
    Error::new(Reason::InvalidArgument, format!("model {}: {fault}", path.display()))
}

/// What all workers of a process share of one model file.
struct ModelFile {
    checkpoint: Checkpoint,
    fingerprint: Digest,
    tokenizer: Bytes,
    tokenizer_digest: Digest,
}

/// Model files that are being loaded, by path. The map and the digest of a file are the same for all workers of the
/// process, and a digest takes a while.
static OPEN_FILES: Mutex<Vec<(PathBuf, Weak<ModelFile>)>> = Mutex::new(Vec::new());

impl ModelFile {
    fn open(path: &Path, cache_dir: Option<&Path>) -> Result<Arc<Self>, Error> {
        // Held while the file is read: a second worker waits for the first instead of doing the same work.
        let mut open = OPEN_FILES.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|(_, file)| file.strong_count() > 0);
        if let Some(file) = open.iter().find(|(known, _)| known == path).and_then(|(_, file)| file.upgrade())
        {
            return Ok(file);
        }
        let file = Arc::new(Self::read(path, cache_dir).map_err(|fault| unreadable(path, &fault))?);
        open.push((path.to_owned(), Arc::downgrade(&file)));
        Ok(file)
    }

    fn read(path: &Path, cache_dir: Option<&Path>) -> Result<Self, checkpoint::Error> {
        let checkpoint = Checkpoint::open(path)?;
        let tokenizer = checkpoint.bundle()?.to_bytes();
        Ok(Self {
            fingerprint: checkpoint.fingerprint_cached(cache_dir)?,
            tokenizer_digest: sha256(&tokenizer),
            tokenizer: tokenizer.into(),
            checkpoint,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_read_as_they_print() {
        for source in [Source::Gguf("/models/a.gguf".into()), Source::Sim(Sim::default())] {
            assert_eq!(source.to_string().parse(), Ok(source));
        }
        assert!("sim:1".parse::<Source>().is_err());
    }

    #[test]
    fn the_default_arena_is_bounded_by_context_and_memory() {
        let layout =
            KvLayout { layers: 30, kv_heads: 3, head_dim: 64, dtype: KvDtype::F16, block_tokens: 16 };
        let bytes = layout.block_bytes(16) as u64;
        // A small context: eight of them.
        assert_eq!(default_kv_blocks(layout, 100, None), 8 * 7);
        // A large one: 1 GiB.
        assert_eq!(default_kv_blocks(layout, 8192, None), (KV_BYTES_MAX / bytes) as usize);
        // Little memory: a quarter of it.
        assert_eq!(default_kv_blocks(layout, 8192, Some(400 * bytes)), 100);
        // Hardly any: one sequence of 512 tokens all the same.
        assert_eq!(default_kv_blocks(layout, 8192, Some(bytes)), 32);
    }

    #[test]
    fn a_simulated_model_is_told_by_its_shape() {
        let load = |shape: &str| {
            let config = Config { model: shape.parse().unwrap(), ..Config::default() };
            super::load(&config, Role::Decode).unwrap()
        };
        let (a, b, c) = (load("sim:"), load("sim:step_us=1"), load("sim:3,1,4,256,1024"));
        assert_eq!(a.model, b.model);
        assert_ne!(a.model.fingerprint, c.model.fingerprint);
        assert_eq!(c.engine.layout().layers, 3);
    }
}
