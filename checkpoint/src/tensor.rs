//! A tensor's elements, as they lie in the file.

use crate::quant;

/// How elements are stored. The block formats are described in [`quant`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TensorType {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// The upper half of single precision.
    BF16,
    /// 4 bits with a scale per 32 elements.
    Q4_0,
    /// 4 bits with a scale and a minimum per 32 elements.
    Q4_1,
    /// 8 bits with a scale per 32 elements.
    Q8_0,
}

impl TensorType {
    /// The names of all types, for messages.
    pub(crate) const NAMES: &'static str = "F32, F16, BF16, Q4_0, Q4_1, Q8_0";

    /// The type of that number in a GGUF directory. Source: `enum ggml_type` of ggml.
    pub(crate) fn of(code: u32) -> Option<Self> {
        Some(match code {
            0 => Self::F32,
            1 => Self::F16,
            2 => Self::Q4_0,
            3 => Self::Q4_1,
            8 => Self::Q8_0,
            30 => Self::BF16,
            _ => return None,
        })
    }

    /// The number of the type in a GGUF directory.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn code(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q4_0 => 2,
            Self::Q4_1 => 3,
            Self::Q8_0 => 8,
            Self::BF16 => 30,
        }
    }

    /// The elements of one block; a row is a whole number of blocks.
    pub fn block_len(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::BF16 => 1,
            Self::Q4_0 | Self::Q4_1 | Self::Q8_0 => quant::BLOCK,
        }
    }

    /// The bytes of one block.
    pub fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::Q4_0 => 2 + quant::BLOCK / 2,
            Self::Q4_1 => 4 + quant::BLOCK / 2,
            Self::Q8_0 => 2 + quant::BLOCK,
        }
    }

    /// The name, as ggml and model cards write it.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::BF16 => "BF16",
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q8_0 => "Q8_0",
        }
    }
}

/// The name of a type that cannot be read, for messages. Source: `enum ggml_type` of ggml.
pub(crate) fn type_name(code: u32) -> String {
    let name = match code {
        6 => "Q5_0",
        7 => "Q5_1",
        9 => "Q8_1",
        10 => "Q2_K",
        11 => "Q3_K",
        12 => "Q4_K",
        13 => "Q5_K",
        14 => "Q6_K",
        15 => "Q8_K",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        20 => "IQ4_NL",
        21 => "IQ3_S",
        22 => "IQ2_S",
        23 => "IQ4_XS",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        27 => "I64",
        28 => "F64",
        29 => "IQ1_M",
        34 => "TQ1_0",
        35 => "TQ2_0",
        39 => "MXFP4",
        other => return format!("number {other}"),
    };
    name.to_owned()
}

/// A tensor, row-major: `rows` rows of `cols` contiguous elements. A vector has one row; dimensions above the second
/// are folded into `rows`.
#[derive(Clone, Copy, Debug)]
pub struct Tensor<'a> {
    /// Its name in the file.
    pub name: &'a str,
    /// How its elements are stored.
    pub dtype: TensorType,
    /// Rows.
    pub rows: usize,
    /// Elements of a row, a multiple of `dtype.block_len()`.
    pub cols: usize,
    /// All rows, one after the other; `rows * cols / block_len * block_bytes` bytes, and aligned as the file says.
    pub bytes: &'a [u8],
}

impl<'a> Tensor<'a> {
    /// The stored bytes of one row.
    ///
    /// # Panics
    /// When `row >= self.rows`.
    pub fn row_bytes(&self, row: usize) -> &'a [u8] {
        assert!(row < self.rows, "row {row} of tensor {} with {} rows", self.name, self.rows);
        let len = self.cols / self.dtype.block_len() * self.dtype.block_bytes();
        &self.bytes[row * len..][..len]
    }

    /// One row as single precision, into `out: [cols]`.
    ///
    /// # Panics
    /// When `row >= self.rows` or `out.len() != self.cols`.
    pub fn dequantize_row(&self, row: usize, out: &mut [f32]) {
        quant::dequantize(self.dtype, self.row_bytes(row), out);
    }

    /// The whole tensor as single precision, `[rows * cols]`.
    pub fn to_f32(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.rows * self.cols];
        quant::dequantize(self.dtype, self.bytes, &mut out);
        out
    }
}
