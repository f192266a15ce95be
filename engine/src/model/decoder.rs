//! The one decoder: a pre-norm transformer whose architecture is a set of knobs, over any [`Backend`].

use checkpoint::{Checkpoint, ModelConfig, RopeScaling, Tensor};
use proto::{KvDtype, KvLayout};

use super::rope::Rope;
use super::{ForwardError, Interrupt, Model};
use crate::backend::{Activation, Backend, LayerStep, Linear, Product, Qkv};
use crate::batch::{Batch, Logits};

/// Why a decoder could not be built.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The checkpoint lacks something or is not understood.
    #[error(transparent)]
    Checkpoint(#[from] checkpoint::Error),
    /// A tensor does not fit the configuration.
    #[error("tensor {name}: expected shape {expected:?}, found {found:?}")]
    Shape {
        /// The tensor.
        name: String,
        /// `[rows, cols]` by the configuration.
        expected: [usize; 2],
        /// `[rows, cols]` in the file.
        found: [usize; 2],
    },
    /// The device has no room, or no threads.
    #[error(transparent)]
    Device(#[from] ForwardError),
}

/// Where a decoder's weights come from.
pub trait WeightSource {
    /// The tensor of that name, in GGUF's naming.
    fn tensor(&self, name: &str) -> Result<Tensor<'_>, checkpoint::Error>;

    /// True when there is a tensor of that name.
    fn has_tensor(&self, name: &str) -> bool;
}

impl WeightSource for Checkpoint {
    fn tensor(&self, name: &str) -> Result<Tensor<'_>, checkpoint::Error> {
        self.tensor(name)
    }

    fn has_tensor(&self, name: &str) -> bool {
        self.has_tensor(name)
    }
}

/// A decoder-only transformer on one device.
pub struct Decoder<B: Backend> {
    backend: B,
    config: ModelConfig,
    weights: Weights<B>,
    rope: Rope,
    scratch: Scratch<B>,
}

struct Weights<B: Backend> {
    /// `[vocab, hidden]`; the output projection too where that is tied.
    embedding: Linear<B>,
    layers: Vec<Layer<B>>,
    /// `[hidden]`
    output_norm: B::Vector,
    /// `[vocab, hidden]`
    output: Option<Linear<B>>,
}

struct Layer<B: Backend> {
    /// `[hidden]`
    attention_norm: B::Vector,
    /// `[heads * head_dim, hidden]`
    q: Linear<B>,
    /// `[kv_heads * head_dim, hidden]`
    k: Linear<B>,
    /// `[kv_heads * head_dim, hidden]`
    v: Linear<B>,
    /// `[hidden, heads * head_dim]`
    attention_output: Linear<B>,
    /// `[hidden]`
    ffn_norm: B::Vector,
    /// `[ffn, hidden]`
    gate: Linear<B>,
    /// `[ffn, hidden]`
    up: Linear<B>,
    /// `[hidden, ffn]`
    down: Linear<B>,
}

/// Activations of one step, grown to the largest step so far.
struct Scratch<B: Backend> {
    /// The residual stream. `[tokens, hidden]`
    x: B::Activations,
    /// `[tokens, hidden]`
    normed: B::Activations,
    qkv: Qkv<B>,
    /// `[tokens, heads * head_dim]`
    attended: B::Activations,
    /// `[tokens, ffn]`
    gate: B::Activations,
    /// `[tokens, ffn]`
    up: B::Activations,
    /// What a sub-layer adds to the stream. `[tokens, hidden]`
    delta: B::Activations,
    /// The rows whose logits are wanted. `[rows, hidden]`
    selected: B::Activations,
    /// `[rows, vocab]`
    logits: B::Activations,
}

impl<B: Backend> Decoder<B> {
    /// Takes the weights over to the backend. Every shape is checked against `config` before it is used.
    pub fn load(mut backend: B, config: ModelConfig, source: &impl WeightSource) -> Result<Self, LoadError> {
        let weights = Loader { backend: &mut backend, source }.weights(&config)?;
        let stretch = match config.rope_scaling {
            RopeScaling::None => Vec::new(),
            RopeScaling::Linear { factor } => vec![factor; config.rope_dim / 2],
            RopeScaling::Factors => {
                let factors = source.tensor(RopeScaling::FACTORS)?;
                checked(factors, [1, config.rope_dim / 2])?.to_f32()
            }
        };
        let rope = Rope::new(config.rope_base, config.rope_dim, config.rope_pairing, &stretch);
        let scratch = Scratch::new(&backend, &config);
        Ok(Self { backend, config, weights, rope, scratch })
    }

    /// The model's shape and constants.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// What it runs on.
    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// Takes the memory that steps need now, so that none is missing later: for `tokens` tokens in a step, of `rows` of
    /// which logits are wanted, over block tables of `blocks` entries together.
    ///
    /// # Errors
    /// When the device has no room.
    pub fn reserve(&mut self, tokens: usize, rows: usize, blocks: usize) -> Result<(), ForwardError> {
        let Self { backend, rope, scratch, config, .. } = self;
        rope.reach(config.context_len);
        backend.reserve_step(rope, tokens, blocks)?;
        let Scratch { x, normed, qkv: Qkv { q, k, v }, attended, gate, up, delta, selected, logits } =
            scratch;
        for activations in [x, normed, q, k, v, attended, gate, up, delta] {
            backend.reserve(activations, tokens)?;
        }
        backend.reserve(selected, rows)?;
        backend.reserve(logits, rows)
    }

    /// Refuses what would index past a table on the device.
    fn check(&self, batch: &Batch) -> Result<(), ForwardError> {
        if let Some(token) = batch.tokens.iter().find(|token| **token as usize >= self.config.vocab_size) {
            let vocab = self.config.vocab_size;
            return Err(ForwardError::Device(format!("token id: expected below {vocab}, found {token}")));
        }
        let context = self.config.context_len;
        match batch.positions.iter().find(|position| **position as usize >= context) {
            Some(position) => {
                Err(ForwardError::Device(format!("position: expected below {context}, found {position}")))
            }
            None => Ok(()),
        }
    }

    fn layer(&mut self, step: LayerStep<'_>, kv: &mut B::Kv) -> Result<(), ForwardError> {
        let Self { backend, scratch, .. } = self;
        let (layer, eps) = (&self.weights.layers[step.layer], self.config.rms_eps);

        backend.rms_norm(&scratch.x, &layer.attention_norm, eps, &mut scratch.normed)?;
        let Qkv { q, k, v } = &mut scratch.qkv;
        let mut projections = [
            Product { linear: &layer.q, out: q },
            Product { linear: &layer.k, out: k },
            Product { linear: &layer.v, out: v },
        ];
        backend.matmul(&scratch.normed, &mut projections)?;
        backend.rope_and_store(step, &self.rope, &mut scratch.qkv, kv)?;
        backend.attention(step, &scratch.qkv.q, kv, &mut scratch.attended)?;
        let mut output = [Product { linear: &layer.attention_output, out: &mut scratch.delta }];
        backend.matmul(&scratch.attended, &mut output)?;
        backend.add(&mut scratch.x, &scratch.delta)?;

        backend.rms_norm(&scratch.x, &layer.ffn_norm, eps, &mut scratch.normed)?;
        let mut inputs = [
            Product { linear: &layer.gate, out: &mut scratch.gate },
            Product { linear: &layer.up, out: &mut scratch.up },
        ];
        backend.matmul(&scratch.normed, &mut inputs)?;
        backend.gate(Activation::Silu, &mut scratch.gate, &scratch.up)?;
        let mut down = [Product { linear: &layer.down, out: &mut scratch.delta }];
        backend.matmul(&scratch.gate, &mut down)?;
        backend.add(&mut scratch.x, &scratch.delta)
    }

    /// Logits of the wanted rows, from the residual stream.
    fn logits(&mut self, rows: &[u32], logits: &mut Logits) -> Result<(), ForwardError> {
        let Self { backend, weights, scratch, .. } = self;
        logits.vocab = self.config.vocab_size;
        if rows.is_empty() {
            logits.data.clear();
            return Ok(());
        }
        backend.select(&scratch.x, rows, &mut scratch.selected)?;
        let eps = self.config.rms_eps;
        backend.rms_norm(&scratch.selected, &weights.output_norm, eps, &mut scratch.normed)?;
        let linear = weights.output.as_ref().unwrap_or(&weights.embedding);
        backend.matmul(&scratch.normed, &mut [Product { linear, out: &mut scratch.logits }])?;
        backend.read(&scratch.logits, &mut logits.data)
    }
}

impl<B: Backend> Model for Decoder<B> {
    type Kv = B::Kv;

    fn vocab_size(&self) -> usize {
        self.config.vocab_size
    }

    fn context_len(&self) -> usize {
        self.config.context_len
    }

    fn new_kv(&self, blocks: usize, block_tokens: usize) -> Result<B::Kv, ForwardError> {
        let ModelConfig { layers, kv_heads, head_dim, .. } = self.config;
        let layout = KvLayout { layers, kv_heads, head_dim, dtype: KvDtype::F16, block_tokens };
        self.backend.kv(layout, blocks)
    }

    fn forward(
        &mut self,
        batch: &Batch,
        kv: &mut B::Kv,
        interrupt: &Interrupt,
        logits: &mut Logits,
    ) -> Result<(), ForwardError> {
        self.check(batch)?;
        self.rope.reach(batch.positions.iter().max().map_or(0, |last| *last as usize + 1));
        self.backend.embed(&self.weights.embedding.weight, &batch.tokens, &mut self.scratch.x)?;
        for layer in 0..self.config.layers {
            if interrupt.is_raised() {
                return Err(ForwardError::Interrupted);
            }
            self.layer(LayerStep { layer, batch }, kv)?;
        }
        self.logits(&batch.logit_rows, logits)
    }
}

impl<B: Backend> Scratch<B> {
    fn new(backend: &B, config: &ModelConfig) -> Self {
        let (q, kv) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
        Self {
            x: backend.activations(config.hidden),
            normed: backend.activations(config.hidden),
            qkv: Qkv { q: backend.activations(q), k: backend.activations(kv), v: backend.activations(kv) },
            attended: backend.activations(q),
            gate: backend.activations(config.ffn),
            up: backend.activations(config.ffn),
            delta: backend.activations(config.hidden),
            selected: backend.activations(config.hidden),
            logits: backend.activations(config.vocab_size),
        }
    }
}

/// Reads weights by their GGUF names.
struct Loader<'a, B, W> {
    backend: &'a mut B,
    source: &'a W,
}

impl<B: Backend, W: WeightSource> Loader<'_, B, W> {
    fn weights(&mut self, config: &ModelConfig) -> Result<Weights<B>, LoadError> {
        let table = [config.vocab_size, config.hidden];
        Ok(Weights {
            embedding: Linear { weight: self.matrix("token_embd.weight", table)?, bias: None },
            layers: (0..config.layers).map(|i| self.layer(i, config)).collect::<Result<_, _>>()?,
            output_norm: self.vector("output_norm.weight", config.hidden)?,
            output: if config.tied_embeddings { None } else { Some(self.linear("output", table)?) },
        })
    }

    fn layer(&mut self, layer: usize, config: &ModelConfig) -> Result<Layer<B>, LoadError> {
        let ModelConfig { hidden, ffn, .. } = *config;
        let (q, kv) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
        let name = |part: &str| format!("blk.{layer}.{part}");
        Ok(Layer {
            attention_norm: self.vector(&name("attn_norm.weight"), hidden)?,
            q: self.linear(&name("attn_q"), [q, hidden])?,
            k: self.linear(&name("attn_k"), [kv, hidden])?,
            v: self.linear(&name("attn_v"), [kv, hidden])?,
            attention_output: self.linear(&name("attn_output"), [hidden, q])?,
            ffn_norm: self.vector(&name("ffn_norm.weight"), hidden)?,
            gate: self.linear(&name("ffn_gate"), [ffn, hidden])?,
            up: self.linear(&name("ffn_up"), [ffn, hidden])?,
            down: self.linear(&name("ffn_down"), [hidden, ffn])?,
        })
    }

    /// `NAME.weight`, and `NAME.bias` where there is one.
    fn linear(&mut self, name: &str, shape: [usize; 2]) -> Result<Linear<B>, LoadError> {
        let weight = self.matrix(&format!("{name}.weight"), shape)?;
        let bias = format!("{name}.bias");
        let bias = if self.source.has_tensor(&bias) { Some(self.vector(&bias, shape[0])?) } else { None };
        Ok(Linear { weight, bias })
    }

    fn matrix(&mut self, name: &str, shape: [usize; 2]) -> Result<B::Matrix, LoadError> {
        let tensor = checked(self.source.tensor(name)?, shape)?;
        Ok(self.backend.matrix(&tensor)?)
    }

    fn vector(&mut self, name: &str, len: usize) -> Result<B::Vector, LoadError> {
        let tensor = checked(self.source.tensor(name)?, [1, len])?;
        Ok(self.backend.vector(&tensor)?)
    }
}

fn checked(tensor: Tensor<'_>, expected: [usize; 2]) -> Result<Tensor<'_>, LoadError> {
    let found = [tensor.rows, tensor.cols];
    if found == expected {
        return Ok(tensor);
    }
    Err(LoadError::Shape { name: tensor.name.to_owned(), expected, found })
}
