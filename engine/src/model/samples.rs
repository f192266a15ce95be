//! Small decoders of random weights, which between them turn every knob: what tests run backends on.

use std::collections::BTreeMap;

use checkpoint::{ModelConfig, RopePairing, RopeScaling, Tensor, TensorType};
use half::{bf16, f16};

use super::decoder::WeightSource;

/// Every format of weights.
pub const FORMATS: [TensorType; 6] = [
    TensorType::F32,
    TensorType::F16,
    TensorType::BF16,
    TensorType::Q4_0,
    TensorType::Q4_1,
    TensorType::Q8_0,
];

/// A series of numbers that looks random; the same on every run.
#[derive(Clone, Debug)]
pub struct Series(pub u64);

impl Series {
    /// 31 bits.
    pub fn bits(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32
    }

    /// From -1 to 1.
    pub fn float(&mut self) -> f32 {
        self.bits() as f32 / (1_u32 << 30) as f32 - 1.0
    }

    /// So many of them.
    pub fn floats(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.float()).collect()
    }

    /// A tensor's bytes, elements about as large as `scale`.
    pub fn tensor(&mut self, dtype: TensorType, elements: usize, scale: f32) -> Vec<u8> {
        let mut bytes = Vec::new();
        for _ in 0..elements / dtype.block_len() {
            let value = self.float() * scale;
            match dtype {
                TensorType::F32 => bytes.extend(value.to_le_bytes()),
                TensorType::F16 => bytes.extend(f16::from_f32(value).to_le_bytes()),
                TensorType::BF16 => bytes.extend(bf16::from_f32(value).to_le_bytes()),
                TensorType::Q4_0 | TensorType::Q8_0 => {
                    let steps = if dtype == TensorType::Q4_0 { 8.0 } else { 127.0 };
                    bytes.extend(f16::from_f32(value / steps).to_le_bytes());
                }
                TensorType::Q4_1 => {
                    bytes.extend(f16::from_f32(scale / 8.0).to_le_bytes());
                    bytes.extend(f16::from_f32(value - scale).to_le_bytes());
                }
            }
            let header = match dtype {
                TensorType::Q4_1 => 4,
                TensorType::Q4_0 | TensorType::Q8_0 => 2,
                _ => dtype.block_bytes(),
            };
            bytes.extend((header..dtype.block_bytes()).map(|_| self.bits() as u8));
        }
        bytes
    }
}

/// Weights in memory, under GGUF's names.
#[derive(Clone, Debug)]
pub struct RandomWeights(pub BTreeMap<String, (TensorType, [usize; 2], Vec<u8>)>);

impl RandomWeights {
    /// Those of a configuration, matrices in one format.
    pub fn new(config: &ModelConfig, dtype: TensorType) -> Self {
        let mut weights = Self(BTreeMap::new());
        let mut series = Series(6);
        let mut add = |name: String, dtype, shape: [usize; 2], scale| {
            let bytes = series.tensor(dtype, shape[0] * shape[1], scale);
            weights.0.insert(name, (dtype, shape, bytes));
        };
        let ModelConfig { hidden, ffn, heads, kv_heads, head_dim, vocab_size, .. } = *config;
        let (q, kv) = (heads * head_dim, kv_heads * head_dim);
        add("token_embd.weight".into(), dtype, [vocab_size, hidden], 1.0);
        add("output_norm.weight".into(), TensorType::F32, [1, hidden], 1.0);
        if !config.tied_embeddings {
            add("output.weight".into(), dtype, [vocab_size, hidden], 0.3);
        }
        if config.rope_scaling == RopeScaling::Factors {
            add(RopeScaling::FACTORS.into(), TensorType::F32, [1, config.rope_dim / 2], 4.0);
        }
        for layer in 0..config.layers {
            let projections = [
                ("attn_q", [q, hidden], config.attention_bias),
                ("attn_k", [kv, hidden], config.attention_bias),
                ("attn_v", [kv, hidden], config.attention_bias),
                ("attn_output", [hidden, q], config.attention_output_bias),
                ("ffn_gate", [ffn, hidden], config.ffn_bias),
                ("ffn_up", [ffn, hidden], config.ffn_bias),
                ("ffn_down", [hidden, ffn], config.ffn_bias),
            ];
            for (name, shape, has_bias) in projections {
                add(format!("blk.{layer}.{name}.weight"), dtype, shape, 0.3);
                if has_bias {
                    add(format!("blk.{layer}.{name}.bias"), TensorType::F32, [1, shape[0]], 0.5);
                }
            }
            for norm in ["attn_norm", "ffn_norm"] {
                add(format!("blk.{layer}.{norm}.weight"), TensorType::F32, [1, hidden], 1.0);
            }
        }
        weights
    }
}

impl WeightSource for RandomWeights {
    fn tensor(&self, name: &str) -> Result<Tensor<'_>, checkpoint::Error> {
        let missing = || checkpoint::Error::MissingTensor { name: name.to_owned() };
        let (name, (dtype, [rows, cols], bytes)) = self.0.get_key_value(name).ok_or_else(missing)?;
        Ok(Tensor { name, dtype: *dtype, rows: *rows, cols: *cols, bytes })
    }

    fn has_tensor(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }
}

/// A Llama in small.
pub fn small() -> ModelConfig {
    ModelConfig {
        architecture: "llama".into(),
        layers: 2,
        hidden: 64,
        ffn: 96,
        heads: 4,
        kv_heads: 2,
        head_dim: 16,
        vocab_size: 70,
        context_len: 64,
        rms_eps: 1e-5,
        rope_base: 10_000.0,
        rope_dim: 16,
        rope_pairing: RopePairing::Adjacent,
        rope_scaling: RopeScaling::None,
        tied_embeddings: true,
        attention_bias: false,
        attention_output_bias: false,
        ffn_bias: false,
    }
}

/// Configurations that between them turn every knob.
pub fn configs() -> Vec<(ModelConfig, TensorType)> {
    vec![
        (small(), TensorType::Q4_1),
        (
            ModelConfig {
                kv_heads: 4,
                head_dim: 32,
                rope_dim: 32,
                rope_pairing: RopePairing::Halves,
                tied_embeddings: false,
                attention_bias: true,
                ..small()
            },
            TensorType::F32,
        ),
        (
            ModelConfig {
                kv_heads: 1,
                head_dim: 24,
                heads: 4,
                rope_dim: 8,
                rope_scaling: RopeScaling::Linear { factor: 4.0 },
                attention_output_bias: true,
                ffn_bias: true,
                ..small()
            },
            TensorType::BF16,
        ),
        (ModelConfig { rope_scaling: RopeScaling::Factors, ..small() }, TensorType::Q8_0),
        (ModelConfig { layers: 1, ..small() }, TensorType::Q4_0),
        (ModelConfig { tied_embeddings: false, ..small() }, TensorType::F16),
    ]
}
