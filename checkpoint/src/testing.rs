//! A writer of small GGUF files, for tests.

use std::path::Path;

use crate::TensorType;

/// A GGUF file in the making: metadata and tensors in the order they were added.
#[derive(Clone, Debug)]
pub struct GgufWriter {
    version: u32,
    alignment: usize,
    values: Vec<(String, Vec<u8>)>,
    tensors: Vec<StoredTensor>,
}

#[derive(Clone, Debug)]
struct StoredTensor {
    name: String,
    dims: Vec<u64>,
    code: u32,
    bytes: Vec<u8>,
}

impl Default for GgufWriter {
    fn default() -> Self {
        Self { version: 3, alignment: 32, values: Vec::new(), tensors: Vec::new() }
    }
}

impl GgufWriter {
    /// An empty file of version 3.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the format's version.
    #[must_use]
    pub fn version(mut self, version: u32) -> Self {
        self.version = version;
        self
    }

    /// Sets `general.alignment`, and aligns accordingly.
    #[must_use]
    pub fn alignment(mut self, alignment: u32) -> Self {
        self.alignment = alignment as usize;
        self.u32("general.alignment", alignment)
    }

    /// Adds a value of that type number and those bytes.
    #[must_use]
    pub fn raw(mut self, key: &str, code: u32, value: &[u8]) -> Self {
        self.values.push((key.to_owned(), [&code.to_le_bytes()[..], value].concat()));
        self
    }

    /// Adds an unsigned integer.
    #[must_use]
    pub fn u32(self, key: &str, value: u32) -> Self {
        self.raw(key, 4, &value.to_le_bytes())
    }

    /// Adds a float.
    #[must_use]
    pub fn f32(self, key: &str, value: f32) -> Self {
        self.raw(key, 6, &value.to_le_bytes())
    }

    /// Adds a bool.
    #[must_use]
    pub fn bool(self, key: &str, value: bool) -> Self {
        self.raw(key, 7, &[value.into()])
    }

    /// Adds a string.
    #[must_use]
    pub fn string(self, key: &str, value: &str) -> Self {
        self.raw(key, 8, &string(value))
    }

    /// Adds an array of strings.
    #[must_use]
    pub fn strings<S: AsRef<str>>(self, key: &str, values: &[S]) -> Self {
        let elements = values.iter().flat_map(|value| string(value.as_ref())).collect();
        self.array(key, 8, values.len(), elements)
    }

    /// Adds an array of signed integers.
    #[must_use]
    pub fn i32s(self, key: &str, values: &[i32]) -> Self {
        let elements = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.array(key, 5, values.len(), elements)
    }

    /// Adds an array of floats.
    #[must_use]
    pub fn f32s(self, key: &str, values: &[f32]) -> Self {
        let elements = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.array(key, 6, values.len(), elements)
    }

    fn array(self, key: &str, code: u32, len: usize, elements: Vec<u8>) -> Self {
        self.raw(key, 9, &[&code.to_le_bytes()[..], &(len as u64).to_le_bytes(), &elements].concat())
    }

    /// Adds a tensor as it is to be stored; `dims` has the contiguous dimension first.
    #[must_use]
    pub fn tensor(self, name: &str, dtype: TensorType, dims: &[u64], bytes: Vec<u8>) -> Self {
        self.raw_tensor(name, dtype.code(), dims, bytes)
    }

    /// Adds a tensor of a type by its number, known or not.
    #[must_use]
    pub fn raw_tensor(mut self, name: &str, code: u32, dims: &[u64], bytes: Vec<u8>) -> Self {
        self.tensors.push(StoredTensor { name: name.to_owned(), dims: dims.to_vec(), code, bytes });
        self
    }

    /// Adds a tensor of single-precision values.
    #[must_use]
    pub fn f32_tensor(self, name: &str, dims: &[u64], values: &[f32]) -> Self {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.tensor(name, TensorType::F32, dims, bytes)
    }

    /// The file's bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut file = b"GGUF".to_vec();
        file.extend(self.version.to_le_bytes());
        file.extend((self.tensors.len() as u64).to_le_bytes());
        file.extend((self.values.len() as u64).to_le_bytes());
        for (key, value) in &self.values {
            file.extend(string(key));
            file.extend(value);
        }
        let mut offset = 0;
        for tensor in &self.tensors {
            file.extend(string(&tensor.name));
            file.extend((tensor.dims.len() as u32).to_le_bytes());
            file.extend(tensor.dims.iter().flat_map(|dim| dim.to_le_bytes()));
            file.extend(tensor.code.to_le_bytes());
            file.extend((offset as u64).to_le_bytes());
            offset += tensor.bytes.len().next_multiple_of(self.alignment);
        }
        for tensor in &self.tensors {
            file.resize(file.len().next_multiple_of(self.alignment), 0);
            file.extend(&tensor.bytes);
        }
        file
    }

    /// Writes the file.
    ///
    /// # Panics
    /// When the file system refuses.
    pub fn write(&self, path: &Path) {
        std::fs::write(path, self.to_bytes()).expect("a folder that can be written to");
    }
}

fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}
