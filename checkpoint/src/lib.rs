//! A model on disk: the GGUF container, the model's configuration, its tokenizer and chat template.
//!
//! [`Checkpoint::open`] maps a file and checks every length and offset of its header; nothing after that can
//! read outside the map. From there two kinds of reader part ways. An engine takes [`Checkpoint::config`] and
//! each [`Checkpoint::tensor`]. A gateway takes [`Checkpoint::bundle`], which holds all that is about text, can
//! travel as bytes, and opens into a [`Text`] without the model file. Both take the vocabulary of a [`grammar`] from
//! it, which says what the model's outputs must look like.
//!
//! A file is not trusted: a hostile or cut one gives an [`Error`] that names the part at fault, and no length is
//! believed, for reading or for allocating, before it was held against the bytes that remain.

mod checkpoint;
mod config;
mod error;
mod fingerprint;
mod gguf;
pub mod grammar;
mod kept;
mod map;
pub mod quant;
mod tensor;
mod text;

#[cfg(any(test, feature = "testing"))]
pub mod testing;

pub use checkpoint::Checkpoint;
pub use config::{ModelConfig, RopePairing, RopeScaling};
pub use error::Error;
pub use kept::keep;
pub use tensor::{Tensor, TensorType};
pub use text::{Encode, Incremental, Text, TokenizerBundle};
