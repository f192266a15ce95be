//! What a decoder has to know about a model besides its weights.

use crate::Error;
use crate::gguf::{Header, Metadata};

/// The shape and the constants of a decoder-only transformer.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// `general.architecture`.
    pub architecture: String,
    /// Transformer blocks.
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the gated feed-forward layer.
    pub ffn: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Elements of one head's query, key and value.
    pub head_dim: usize,
    /// Rows of the token embedding.
    pub vocab_size: usize,
    /// The most positions the model was made for.
    pub context_len: usize,
    /// Added to the mean square in an RMS norm.
    pub rms_eps: f32,
    /// Pair i of a head turns by position · `rope_base`^(−2i / `rope_dim`).
    pub rope_base: f32,
    /// Leading elements of a head that are rotated; even, at most `head_dim`.
    pub rope_dim: usize,
    /// Which two elements form a pair.
    pub rope_pairing: RopePairing,
    /// What is done to the angles for contexts longer than the original.
    pub rope_scaling: RopeScaling,
    /// True when the output projection is the token embedding.
    pub tied_embeddings: bool,
    /// True when the projections to query, key and value have biases (`blk.N.attn_q.bias`, …).
    pub attention_bias: bool,
    /// True when the projection out of attention has a bias (`blk.N.attn_output.bias`).
    pub attention_output_bias: bool,
    /// True when the feed-forward projections have biases (`blk.N.ffn_up.bias`, …).
    pub ffn_bias: bool,
}

/// Which two elements of a head a rotary embedding turns together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopePairing {
    /// Elements 2i and 2i + 1: how `llama` GGUF files permute their weights.
    Adjacent,
    /// Elements i and i + `rope_dim` / 2.
    Halves,
}

/// What is done to the rotary angles.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeScaling {
    /// Nothing.
    None,
    /// Positions are divided by the factor.
    Linear {
        /// How much longer the context is than the original.
        factor: f32,
    },
    /// Pair i's frequency is divided by element i of the tensor [`RopeScaling::FACTORS`].
    Factors,
}

impl RopeScaling {
    /// The tensor that [`RopeScaling::Factors`] speaks of: `[1, rope_dim / 2]`.
    pub const FACTORS: &'static str = "rope_freqs.weight";
}

/// Reads the configuration of an architecture that a decoder exists for.
pub(crate) fn read(header: &Header, metadata: Metadata<'_>) -> Result<ModelConfig, Error> {
    let architecture = required_string(metadata, "general.architecture")?;
    if architecture != "llama" {
        return Err(Error::UnsupportedArchitecture { found: architecture.to_owned() });
    }
    let keys = Keys { header, metadata, architecture };
    keys.refuse_what_no_decoder_has()?;

    let layers = keys.size("block_count")?;
    // Each block has tensors of its own, so this bounds what a caller allocates per layer.
    if layers > header.tensor_count() {
        let expected = format!("at most one layer per tensor ({})", header.tensor_count());
        return Err(Error::bad_value(keys.key("block_count"), expected, layers));
    }
    let hidden = keys.size("embedding_length")?;
    let heads = keys.size("attention.head_count")?;
    let kv_heads = keys.optional_size("attention.head_count_kv")?.unwrap_or(heads);
    if !heads.is_multiple_of(kv_heads) {
        let expected = format!("a divisor of the {heads} query heads");
        return Err(Error::bad_value(keys.key("attention.head_count_kv"), expected, kv_heads));
    }
    let head_dim = keys.head_dim(hidden, heads)?;
    Ok(ModelConfig {
        layers,
        hidden,
        ffn: keys.size("feed_forward_length")?,
        heads,
        kv_heads,
        head_dim,
        vocab_size: keys.vocab_size()?,
        context_len: keys.size("context_length")?,
        rms_eps: keys.positive("attention.layer_norm_rms_epsilon", None)?,
        rope_base: keys.positive("rope.freq_base", Some(10_000.0))?,
        rope_dim: keys.rope_dim(head_dim)?,
        rope_pairing: RopePairing::Adjacent,
        rope_scaling: keys.rope_scaling()?,
        tied_embeddings: header.tensor("output.weight").is_none(),
        attention_bias: keys.has_bias("attn_q") || keys.has_bias("attn_k") || keys.has_bias("attn_v"),
        attention_output_bias: keys.has_bias("attn_output"),
        ffn_bias: keys.has_bias("ffn_gate") || keys.has_bias("ffn_up") || keys.has_bias("ffn_down"),
        architecture: architecture.to_owned(),
    })
}

pub(crate) fn required_string<'a>(metadata: Metadata<'a>, key: &str) -> Result<&'a str, Error> {
    metadata.string(key)?.ok_or_else(|| Error::MissingKey { key: key.to_owned(), expected: "a string" })
}

/// The metadata of one architecture, whose keys start with its name.
struct Keys<'a> {
    header: &'a Header,
    metadata: Metadata<'a>,
    architecture: &'a str,
}

impl Keys<'_> {
    fn key(&self, suffix: &str) -> String {
        format!("{}.{suffix}", self.architecture)
    }

    fn size(&self, suffix: &str) -> Result<usize, Error> {
        self.optional_size(suffix)?
            .ok_or_else(|| Error::MissingKey { key: self.key(suffix), expected: "an integer of at least 1" })
    }

    fn optional_size(&self, suffix: &str) -> Result<Option<usize>, Error> {
        let key = self.key(suffix);
        match self.metadata.uint(&key)? {
            None => Ok(None),
            Some(value @ 1..=0x7fff_ffff) => Ok(Some(value as usize)),
            Some(value) => Err(Error::bad_value(key, "an integer from 1 to 2147483647", value)),
        }
    }

    fn positive(&self, suffix: &str, default: Option<f32>) -> Result<f32, Error> {
        let key = self.key(suffix);
        match self.metadata.float(&key)?.or(default) {
            None => Err(Error::MissingKey { key, expected: "a positive float" }),
            Some(value) if value.is_finite() && value > 0.0 => Ok(value),
            Some(value) => Err(Error::bad_value(key, "a positive finite float", value)),
        }
    }

    fn head_dim(&self, hidden: usize, heads: usize) -> Result<usize, Error> {
        let head_dim = match self.optional_size("attention.key_length")? {
            Some(head_dim) => head_dim,
            None if hidden.is_multiple_of(heads) => hidden / heads,
            None => {
                let expected = format!("a divisor of the embedding length {hidden}");
                return Err(Error::bad_value(self.key("attention.head_count"), expected, heads));
            }
        };
        match self.optional_size("attention.value_length")? {
            Some(value) if value != head_dim => {
                let expected = format!("the length of a key, {head_dim}");
                Err(Error::bad_value(self.key("attention.value_length"), expected, value))
            }
            _ => Ok(head_dim),
        }
    }

    /// The embedding's rows where the tensor is there, the declared size otherwise.
    fn vocab_size(&self) -> Result<usize, Error> {
        if let Some((_, embedding)) = self.header.tensor("token_embd.weight") {
            return Ok(embedding.rows);
        }
        self.size("vocab_size")
    }

    fn rope_dim(&self, head_dim: usize) -> Result<usize, Error> {
        let rope_dim = self.optional_size("rope.dimension_count")?.unwrap_or(head_dim);
        if rope_dim > head_dim || !rope_dim.is_multiple_of(2) {
            let expected = format!("an even number up to the head's {head_dim} elements");
            return Err(Error::bad_value(self.key("rope.dimension_count"), expected, rope_dim));
        }
        Ok(rope_dim)
    }

    fn rope_scaling(&self) -> Result<RopeScaling, Error> {
        if self.header.tensor(RopeScaling::FACTORS).is_some() {
            return Ok(RopeScaling::Factors);
        }
        let key = self.key("rope.scaling.type");
        match self.metadata.string(&key)? {
            // Files from before the type existed have the factor alone, under another name.
            None if self.metadata.has(&self.key("rope.scale_linear")) => {
                self.positive("rope.scale_linear", None).map(|factor| RopeScaling::Linear { factor })
            }
            None | Some("none") => Ok(RopeScaling::None),
            Some("linear") => {
                self.positive("rope.scaling.factor", None).map(|factor| RopeScaling::Linear { factor })
            }
            Some(other) => Err(Error::bad_value(key, "none or linear", other)),
        }
    }

    fn has_bias(&self, projection: &str) -> bool {
        self.header.tensor(&format!("blk.0.{projection}.bias")).is_some()
    }

    fn refuse_what_no_decoder_has(&self) -> Result<(), Error> {
        let key = self.key("expert_count");
        match self.metadata.uint(&key)? {
            None | Some(0) => Ok(()),
            Some(experts) => Err(Error::bad_value(key, "a dense model, 0 experts", experts)),
        }
    }
}
