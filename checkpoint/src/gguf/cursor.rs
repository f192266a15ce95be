//! Reading forward through bytes that are not trusted.

use std::fmt;
use std::ops::Range;

use crate::Error;

/// The part of the header that is being read, for the error that names it.
#[derive(Clone, Copy, Debug)]
pub(super) enum Part<'a> {
    Magic,
    Version,
    TensorCount,
    MetadataCount,
    /// The n-th metadata entry, its key not yet read.
    Key(u64),
    /// The value of that key.
    Value(&'a str),
    /// The n-th entry of the tensor directory, its name not yet read.
    TensorName(u64),
    /// The directory entry of that name.
    Tensor(&'a str),
}

impl fmt::Display for Part<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Magic => write!(f, "magic"),
            Self::Version => write!(f, "version"),
            Self::TensorCount => write!(f, "tensor count"),
            Self::MetadataCount => write!(f, "metadata count"),
            Self::Key(index) => write!(f, "metadata key {index}"),
            Self::Value(key) => write!(f, "metadata {key}"),
            Self::TensorName(index) => write!(f, "name of tensor {index}"),
            Self::Tensor(name) => write!(f, "tensor {name}"),
        }
    }
}

impl Part<'_> {
    /// The error that says what was expected here and what came.
    pub(super) fn malformed(self, expected: impl fmt::Display, found: impl fmt::Display) -> Error {
        Error::Malformed { part: self.to_string(), expected: expected.to_string(), found: found.to_string() }
    }
}

/// A position in a file. Each read is checked against the bytes that remain.
pub(super) struct Cursor<'a> {
    file: &'a [u8],
    position: usize,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(file: &'a [u8]) -> Self {
        Self { file, position: 0 }
    }

    pub(super) fn position(&self) -> usize {
        self.position
    }

    /// The range of the next `len` bytes, which are then behind the cursor.
    pub(super) fn skip(&mut self, len: u64, part: Part<'_>) -> Result<Range<usize>, Error> {
        let remaining = self.file.len() - self.position;
        match usize::try_from(len) {
            Ok(len) if len <= remaining => {
                let start = self.position;
                self.position += len;
                Ok(start..self.position)
            }
            _ => Err(part.malformed(
                format_args!("at most the {remaining} bytes that remain at offset {}", self.position),
                format_args!("a length of {len}"),
            )),
        }
    }

    pub(super) fn take(&mut self, len: u64, part: Part<'_>) -> Result<&'a [u8], Error> {
        self.skip(len, part).map(|range| &self.file[range])
    }

    fn array<const N: usize>(&mut self, part: Part<'_>) -> Result<[u8; N], Error> {
        let bytes = self.take(N as u64, part)?;
        Ok(bytes.try_into().expect("take gives as many bytes as asked for"))
    }

    pub(super) fn u32(&mut self, part: Part<'_>) -> Result<u32, Error> {
        self.array(part).map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self, part: Part<'_>) -> Result<u64, Error> {
        self.array(part).map(u64::from_le_bytes)
    }

    /// The range of a string's bytes, its length read first.
    pub(super) fn string(&mut self, part: Part<'_>) -> Result<Range<usize>, Error> {
        let len = self.u64(part)?;
        self.skip(len, part)
    }

    /// A string that has to be UTF-8.
    pub(super) fn text(&mut self, part: Part<'_>) -> Result<&'a str, Error> {
        let range = self.string(part)?;
        std::str::from_utf8(&self.file[range]).map_err(|error| part.malformed("UTF-8", error))
    }
}
