//! The GGUF container, versions 2 and 3: a header of metadata and a directory of tensors, then aligned tensor data.
//!
//! Layout, all little-endian: magic `GGUF`, u32 version, u64 tensor count, u64 metadata count; the metadata, each a
//! string key, a u32 type and a value; the directory, each entry a string name, u32 dimension count, u64 dimensions
//! (the contiguous one first), u32 element type and u64 offset into the data; padding to the alignment; the data.
//! A string is a u64 length and its bytes. Source: the format's specification, `docs/gguf.md` of the ggml project.
//!
//! [`Header::parse`] walks all of it once and keeps ranges into the file in place of copies, so what it allocates is
//! bounded by the size of the header itself.

mod cursor;
mod directory;
mod metadata;

use std::collections::BTreeMap;

use crate::Error;
use cursor::{Cursor, Part};
pub(crate) use directory::TensorEntry;
pub(crate) use metadata::{Metadata, Value};

/// A multiple of this many bytes is where each tensor starts, unless `general.alignment` says otherwise.
const DEFAULT_ALIGNMENT: u64 = 32;

/// A checked header. Its ranges hold for the bytes it was parsed from and for no others.
#[derive(Debug)]
pub(crate) struct Header {
    values: BTreeMap<String, Value>,
    tensors: BTreeMap<String, TensorEntry>,
}

impl Header {
    /// Reads and checks the header of a whole file.
    pub(crate) fn parse(file: &[u8]) -> Result<Self, Error> {
        let mut cursor = Cursor::new(file);
        let magic = cursor.take(4, Part::Magic)?;
        if magic != b"GGUF" {
            return Err(Part::Magic.malformed("the bytes \"GGUF\"", format_args!("{}", magic.escape_ascii())));
        }
        let version = cursor.u32(Part::Version)?;
        if !matches!(version, 2 | 3) {
            return Err(Part::Version.malformed("2 or 3, little-endian", version));
        }
        let tensor_count = cursor.u64(Part::TensorCount)?;
        let value_count = cursor.u64(Part::MetadataCount)?;
        let values = metadata::parse(&mut cursor, value_count)?;
        let entries = directory::parse(&mut cursor, tensor_count)?;
        let alignment = alignment(&Metadata { file, values: &values })?;
        let tensors = directory::place(entries, cursor.position(), alignment, file.len())?;
        Ok(Self { values, tensors })
    }

    /// The metadata, read from the bytes this header was parsed from.
    pub(crate) fn metadata<'a>(&'a self, file: &'a [u8]) -> Metadata<'a> {
        Metadata { file, values: &self.values }
    }

    /// A tensor's name, as the header holds it, and its place.
    pub(crate) fn tensor(&self, name: &str) -> Option<(&str, &TensorEntry)> {
        self.tensors.get_key_value(name).map(|(name, entry)| (name.as_str(), entry))
    }

    /// How many tensors the directory lists.
    pub(crate) fn tensor_count(&self) -> usize {
        self.tensors.len()
    }
}

fn alignment(metadata: &Metadata<'_>) -> Result<u64, Error> {
    const KEY: &str = "general.alignment";
    let alignment = metadata.uint(KEY)?.unwrap_or(DEFAULT_ALIGNMENT);
    if !alignment.is_power_of_two() || alignment > 1 << 20 {
        return Err(Error::bad_value(KEY, "a power of two up to 1048576", alignment));
    }
    Ok(alignment)
}
