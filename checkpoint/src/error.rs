//! What can be wrong with a model file, each fault with the name of the part that has it.

use std::path::PathBuf;

/// A fault of a model file, or of the text it is asked to handle.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file system refused.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A part of the container breaks the GGUF format or contradicts the file's size.
    #[error("gguf {part}: expected {expected}, found {found}")]
    Malformed {
        /// The part of the file: a header field, a metadata entry, a tensor's directory entry.
        part: String,
        /// What the format asks for.
        expected: String,
        /// What the file has.
        found: String,
    },
    /// A metadata key that is needed is not there.
    #[error("metadata {key}: missing, expected {expected}")]
    MissingKey {
        /// The metadata key.
        key: String,
        /// What its value would have been.
        expected: &'static str,
    },
    /// A metadata value is of the wrong type or out of its range.
    #[error("metadata {key}: expected {expected}, found {found}")]
    BadValue {
        /// The metadata key, with an index where one element is at fault.
        key: String,
        /// What would have been right.
        expected: String,
        /// What the file has.
        found: String,
    },
    /// No tensor of that name.
    #[error("tensor {name}: missing")]
    MissingTensor {
        /// The name asked for.
        name: String,
    },
    /// The tensor's elements are stored in a format that cannot be read.
    #[error("tensor {name}: type {dtype} is not supported, expected one of {}", crate::TensorType::NAMES)]
    UnsupportedTensor {
        /// The tensor's name.
        name: String,
        /// The format's name, or its number where that is unknown.
        dtype: String,
    },
    /// No decoder knows this architecture.
    #[error("metadata general.architecture: {found} is not supported, expected llama")]
    UnsupportedArchitecture {
        /// What the file declares.
        found: String,
    },
    /// The tokenizer could not be built, or a text could not be encoded.
    #[error("tokenizer: {0}")]
    Tokenizer(String),
    /// The bytes are not a tokenizer bundle, or one of another version.
    #[error("tokenizer bundle {part}: expected {expected}, found {found}")]
    Bundle {
        /// The part of the bundle.
        part: &'static str,
        /// What would have been right.
        expected: String,
        /// What came.
        found: String,
    },
    /// The chat template does not compile, does not render, or there is none.
    #[error("chat template: {0}")]
    Template(String),
}

impl Error {
    pub(crate) fn bad_value(
        key: impl Into<String>,
        expected: impl Into<String>,
        found: impl std::fmt::Display,
    ) -> Self {
        Self::BadValue { key: key.into(), expected: expected.into(), found: found.to_string() }
    }

    /// An error of the tokenizers crate, whose own type is a boxed trait object.
    pub(crate) fn tokenizer(error: impl std::fmt::Display) -> Self {
        Self::Tokenizer(error.to_string())
    }
}
