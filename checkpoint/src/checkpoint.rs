//! An open model file.

use std::fs::File;
use std::path::{Path, PathBuf};

use proto::Digest;

use crate::Error;
use crate::config::{self, ModelConfig};
use crate::fingerprint::{self, Identity};
use crate::gguf::Header;
use crate::map::Map;
use crate::tensor::Tensor;
use crate::text::TokenizerBundle;

/// A memory-mapped GGUF file whose header was checked.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    file: File,
    identity: Identity,
    map: Map,
    header: Header,
}

impl Checkpoint {
    /// Maps the file and checks every length and offset of its header. An architecture, tensor type or tokenizer
    /// that is not supported is no fault here, only where it is asked for.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let io = |source| Error::Io { path: path.to_owned(), source };
        let file = File::open(path).map_err(io)?;
        let identity = Identity::of(&file).map_err(io)?;
        let map = Map::of(&file).map_err(io)?;
        let header = Header::parse(&map)?;
        Ok(Self { path: path.to_owned(), file, identity, map, header })
    }

    /// The model's shape and constants. An architecture without a decoder is an error.
    pub fn config(&self) -> Result<ModelConfig, Error> {
        config::read(&self.header, self.header.metadata(&self.map))
    }

    /// The tensor of that name. The error names it when it is missing or of a type that cannot be read.
    pub fn tensor(&self, name: &str) -> Result<Tensor<'_>, Error> {
        let (name, entry) =
            self.header.tensor(name).ok_or_else(|| Error::MissingTensor { name: name.to_owned() })?;
        match &entry.dtype {
            Ok(dtype) => Ok(Tensor {
                name,
                dtype: *dtype,
                rows: entry.rows,
                cols: entry.cols,
                bytes: &self.map[entry.start..][..entry.len],
            }),
            Err(dtype) => Err(Error::UnsupportedTensor { name: name.to_owned(), dtype: dtype.clone() }),
        }
    }

    /// True when the file has a tensor of that name, of whatever type.
    pub fn has_tensor(&self, name: &str) -> bool {
        self.header.tensor(name).is_some()
    }

    /// Everything a gateway needs about text.
    pub fn bundle(&self) -> Result<TokenizerBundle, Error> {
        TokenizerBundle::from_metadata(self.header.metadata(&self.map))
    }

    /// The SHA-256 of the whole file, computed now.
    pub fn fingerprint(&self) -> Result<Digest, Error> {
        self.fingerprint_cached(None)
    }

    /// The SHA-256 of the whole file. With a cache folder it is computed once per file identity (device, inode,
    /// size, time of modification); a cache that cannot be read or written costs time and is no error.
    pub fn fingerprint_cached(&self, cache_dir: Option<&Path>) -> Result<Digest, Error> {
        let known = cache_dir.and_then(|dir| fingerprint::load(dir, &self.identity));
        if let Some(digest) = known {
            return Ok(digest);
        }
        let digest = fingerprint::sha256(&self.map);
        let now = Identity::of(&self.file).map_err(|source| Error::Io { path: self.path.clone(), source })?;
        if let Some(dir) = cache_dir
            && now == self.identity
        {
            fingerprint::store(dir, &self.identity, &digest);
        }
        Ok(digest)
    }

    /// The path it was opened from.
    pub fn path(&self) -> &Path {
        &self.path
    }
}
