//! From a model's name to an engine that runs it.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use bytes::Bytes;
use checkpoint::grammar::GrammarEnv;
use checkpoint::{Checkpoint, TokenizerBundle};
use engine::backend::Backend;
use engine::backend::cpu::{self, Cpu, CpuOptions};
use engine::backend::cuda::compile::CodeStore;
use engine::backend::cuda::{self, Cuda, CudaOptions};
use engine::model::decoder::{Decoder, LoadError};
use engine::model::{ForwardError, Model as _};
use engine::{Engine, EngineConfig};
use proto::{Digest, Error, KvDtype, KvLayout, ModelDescription, Reason, Role};
use serde::{Deserialize, Serialize};

use crate::config::Config;
use crate::device::DeviceKind;
use crate::kernels::KernelFolder;
use crate::limits::{Limits, Room, Shape};
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
    /// A decoder on a GPU.
    Cuda(Box<Engine<Decoder<Cuda>>>),
    /// The simulated model.
    Sim(Box<Engine<TimedSim>>),
}

impl LoadedEngine {
    /// Shape of the KV arena.
    pub fn layout(&self) -> KvLayout {
        match self {
            Self::Cpu(engine) => engine.layout(),
            Self::Cuda(engine) => engine.layout(),
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
    /// The vocabulary of grammars, which the engine has as well; `None` for a model whose tokens cannot carry them.
    pub vocabulary: Option<Arc<GrammarEnv>>,
}

/// Loads the model that the configuration names. Blocks, for as long as the file takes to read.
///
/// Workers of one process that load a file at the same time read it once: they share its map, fingerprint, tokenizer
/// bundle and vocabulary. The weights are repacked for the CPU, or copied to the GPU, by each worker for itself, and then
/// the map is let go.
///
/// # Errors
/// INVALID_ARGUMENT when the file cannot be read as a model, a size does not fit it, or the device is not there or has no
/// room for it.
pub fn load(config: &Config, role: Role) -> Result<Loaded, Error> {
    match &config.model {
        Source::Gguf(path) => load_gguf(config, role, path),
        Source::Sim(sim) => load_sim(config, *sim),
    }
}

fn load_gguf(config: &Config, role: Role, path: &Path) -> Result<Loaded, Error> {
    let file = ModelFile::open(path, config.cache_dir.as_deref())?;
    let (engine, model) = match cuda_of(config)? {
        Some(gpu) => {
            let (engine, model) = on_cuda(config, path, &file, gpu)?;
            (LoadedEngine::Cuda(Box::new(engine)), model)
        }
        None => {
            let (engine, model) = on_cpu(config, role, path, &file)?;
            (LoadedEngine::Cpu(Box::new(engine)), model)
        }
    };
    Ok(Loaded { engine, model, tokenizer: file.tokenizer.clone(), vocabulary: file.vocabulary.clone() })
}

/// The GPU to compute on; none when that is the processor. A GPU that `auto` finds and cannot use is passed over.
fn cuda_of(config: &Config) -> Result<Option<Cuda>, Error> {
    let options = CudaOptions {
        number: config.device.number as usize,
        store: config
            .cache_dir
            .as_ref()
            .map(|folder| -> Arc<dyn CodeStore> { Arc::new(KernelFolder(folder.join("kernels"))) }),
    };
    match config.device.kind {
        DeviceKind::Cuda => Cuda::new(&options).map(Some).map_err(|fault| no_device(&fault)),
        DeviceKind::Auto if cuda::devices() > 0 => match Cuda::new(&options) {
            Ok(gpu) => Ok(Some(gpu)),
            Err(fault) => {
                tracing::warn!(%fault, "the GPU is not used");
                Ok(None)
            }
        },
        _ => Ok(None),
    }
}

fn on_cpu(
    config: &Config,
    role: Role,
    path: &Path,
    file: &ModelFile,
) -> Result<(Engine<Decoder<Cpu>>, ModelDescription), Error> {
    let nice = config.nice(role);
    let decoder = cpu::load(
        &file.checkpoint,
        CpuOptions {
            threads: config.threads.unwrap_or_else(cores),
            on_thread_start: Some(Arc::new(move || shell::lower_priority(nice))),
        },
    )
    .map_err(|fault| not_loaded(path, &fault))?;
    let limits = Limits::of(config, shape_of(config, &decoder, Room::Machine(memory::available_bytes())))?;
    new_engine(config, path, file, decoder, limits, cpu::NUMERICS)
}

/// All that steps need is taken before KV gets the rest, so that no step finds too little later.
fn on_cuda(
    config: &Config,
    path: &Path,
    file: &ModelFile,
    gpu: Cuda,
) -> Result<(Engine<Decoder<Cuda>>, ModelDescription), Error> {
    tracing::info!(device = %config.device, name = gpu.device_name(), "computing on a GPU");
    let mut decoder = cuda::load(&file.checkpoint, gpu).map_err(|fault| not_loaded(path, &fault))?;
    let before = Limits::of(config, shape_of(config, &decoder, Room::Gpu(u64::MAX)))?;
    // Of each sequence of a step there is one row of logits, and a block table no longer than the context.
    let table = decoder.context_len().div_ceil(config.block_tokens);
    decoder
        .reserve(
            before.step_tokens.max(before.sequences_max),
            before.sequences_max,
            before.sequences_max * table,
        )
        .map_err(|fault| no_device(&fault))?;
    let room = decoder.backend().room(config.gpu_memory_utilization).map_err(|fault| no_device(&fault))?;
    let limits = Limits::of(config, shape_of(config, &decoder, Room::Gpu(room)))?;
    new_engine(config, path, file, decoder, limits, cuda::NUMERICS)
}

fn shape_of<B: Backend>(config: &Config, decoder: &Decoder<B>, room: Room) -> Shape {
    let shape = decoder.config();
    let layout = KvLayout {
        layers: shape.layers,
        kv_heads: shape.kv_heads,
        head_dim: shape.head_dim,
        dtype: KvDtype::F16,
        block_tokens: config.block_tokens,
    };
    Shape { context_len: decoder.context_len(), layout, room }
}

fn new_engine<B: Backend>(
    config: &Config,
    path: &Path,
    file: &ModelFile,
    decoder: Decoder<B>,
    limits: Limits,
    numerics: &str,
) -> Result<(Engine<Decoder<B>>, ModelDescription), Error> {
    let model = ModelDescription {
        name: served_name(config, path),
        fingerprint: file.fingerprint,
        tokenizer: file.tokenizer_digest,
        context_len: limits.context_len,
        vocab_size: decoder.vocab_size(),
        numerics: numerics.to_owned(),
    };
    let mut engine = Engine::new(decoder, engine_config(config, &model, limits))?;
    if let Some(vocabulary) = &file.vocabulary {
        engine.set_vocabulary(Arc::clone(vocabulary));
    }
    say_loaded(&model, limits);
    Ok((engine, model))
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
    let bundle = TokenizerBundle::simulated(shape.vocab);
    let (tokenizer, vocabulary) = (bundle.to_bytes(), vocabulary(&bundle));
    let limits = Limits::of(
        config,
        Shape { context_len: shape.context_len, layout, room: Room::Machine(memory::available_bytes()) },
    )?;
    let model = ModelDescription {
        name: config.served_name.clone().unwrap_or_else(|| "sim".to_owned()),
        fingerprint,
        tokenizer: sha256(&tokenizer),
        context_len: limits.context_len,
        vocab_size: shape.vocab,
        numerics: "sim".to_owned(),
    };
    let mut engine = Engine::new(TimedSim::new(sim), engine_config(config, &model, limits))?;
    if let Some(vocabulary) = &vocabulary {
        engine.set_vocabulary(Arc::clone(vocabulary));
    }
    say_loaded(&model, limits);
    Ok(Loaded { engine: LoadedEngine::Sim(Box::new(engine)), model, tokenizer: tokenizer.into(), vocabulary })
}

/// What grammars need of a tokenizer. A model without it serves all other requests.
fn vocabulary(bundle: &TokenizerBundle) -> Option<Arc<GrammarEnv>> {
    match GrammarEnv::of_bundle(bundle) {
        Ok(vocabulary) => Some(Arc::new(vocabulary)),
        Err(fault) => {
            tracing::warn!(%fault, "requests with a grammar are refused");
            None
        }
    }
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

fn engine_config(config: &Config, model: &ModelDescription, limits: Limits) -> EngineConfig {
    EngineConfig {
        kv_blocks: limits.kv_blocks,
        block_tokens: config.block_tokens,
        step_tokens: limits.step_tokens,
        sequences_max: limits.sequences_max,
        waiting_max: config.waiting_max,
        prefix_seed: model.fingerprint,
        prefix_cache: config.prefix_cache,
    }
}

fn say_loaded(model: &ModelDescription, limits: Limits) {
    tracing::info!(
        model = model.name,
        fingerprint = %model.fingerprint,
        context_len = model.context_len,
        kv_blocks = limits.kv_blocks,
        sequences_max = limits.sequences_max,
        step_tokens = limits.step_tokens,
        "model loaded"
    );
}

fn not_loaded(path: &Path, fault: &LoadError) -> Error {
    match fault {
        LoadError::Device(fault) => no_device(fault),
        other => unreadable(path, other),
    }
}

/// A device says for itself what it lacks.
fn no_device(fault: &ForwardError) -> Error {
    Error::new(Reason::InvalidArgument, fault.to_string())
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
    vocabulary: Option<Arc<GrammarEnv>>,
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
        let bundle = checkpoint.bundle()?;
        let tokenizer = bundle.to_bytes();
        Ok(Self {
            fingerprint: checkpoint.fingerprint_cached(cache_dir)?,
            tokenizer_digest: sha256(&tokenizer),
            tokenizer: tokenizer.into(),
            vocabulary: vocabulary(&bundle),
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
