//! Weights as the kernels want them: panels of sixteen output rows, interleaved and still quantised.
//!
//! A panel holds rows `16 p .. 16 p + 16` of a matrix. Its columns (the key dimension of a product) are cut into
//! blocks of 32, as the quantised formats have them, and blocks into *octets* of eight columns. An octet is a few
//! cache lines in which lane r belongs to row r, so that decoding gives vectors of sixteen rows, one per column:
//!
//! | type | scales of a block | lines of an octet | word r of line i |
//! |---|---|---|---|
//! | `Q4_0` | d: 16 × f16 | 1 | columns 0 … 7 of row r, a nibble each |
//! | `Q4_1` | d, then m: 32 × f16 | 1 | the same |
//! | `Q8_0` | d: 16 × f16 | 2 | columns 4i … 4i + 3 of row r, a byte each |
//! | `F16`, `BF16` | none | 4 | half r of column 2i, then of column 2i + 1 |
//! | `F32` | none | 8 | column i of row r |
//!
//! Rows and columns past the matrix's end are zeros.

use checkpoint::{Tensor, TensorType};

use super::isa::{Isa, LANES, Line};

/// Columns of a block.
pub(super) const BLOCK: usize = 32;
/// Columns decoded together.
pub(super) const OCTET: usize = 8;
/// Octets of a block.
pub(super) const OCTETS: usize = BLOCK / OCTET;

/// Evaluates an expression with `$format` the [`Format`] of a tensor type.
macro_rules! with_format {
    ($dtype:expr, $format:ident => $body:expr) => {{
        use $crate::backend::cpu::panels;
        match $dtype {
            checkpoint::TensorType::F32 => {
                type $format = panels::F32;
                $body
            }
            checkpoint::TensorType::F16 => {
                type $format = panels::F16;
                $body
            }
            checkpoint::TensorType::BF16 => {
                type $format = panels::Bf16;
                $body
            }
            checkpoint::TensorType::Q4_0 => {
                type $format = panels::Q4_0;
                $body
            }
            checkpoint::TensorType::Q4_1 => {
                type $format = panels::Q4_1;
                $body
            }
            checkpoint::TensorType::Q8_0 => {
                type $format = panels::Q8_0;
                $body
            }
        }
    }};
}
pub(super) use with_format;

/// A matrix, repacked.
#[derive(Debug)]
pub(super) struct Panels {
    pub(super) dtype: TensorType,
    pub(super) rows: usize,
    /// Blocks per row, the last perhaps padded.
    blocks: usize,
    /// `[panel][block][SCALES]` of the format.
    scales: Vec<u16>,
    /// `[panel][block][octet][LINES]` of the format.
    lines: Vec<Line>,
}

impl Panels {
    /// Repacks a tensor.
    pub(super) fn pack(tensor: &Tensor<'_>) -> Self {
        with_format!(tensor.dtype, F => Self::pack_as::<F>(tensor))
    }

    fn pack_as<F: Format>(tensor: &Tensor<'_>) -> Self {
        let (panels, blocks) = (tensor.rows.div_ceil(LANES), tensor.cols.div_ceil(BLOCK));
        let mut packed = Self {
            dtype: tensor.dtype,
            rows: tensor.rows,
            blocks,
            scales: vec![0; panels * blocks * F::SCALES],
            lines: vec![Line::default(); panels * blocks * OCTETS * F::LINES],
        };
        for row in 0..tensor.rows {
            let (panel, lane) = (row / LANES, row % LANES);
            let stored = tensor.row_bytes(row).chunks(F::BLOCK_BYTES);
            for (block, bytes) in stored.enumerate() {
                let at = panel * blocks + block;
                let scales = &mut packed.scales[at * F::SCALES..][..F::SCALES];
                let lines = &mut packed.lines[at * OCTETS * F::LINES..][..OCTETS * F::LINES];
                F::pack(bytes, lane, scales, lines);
            }
        }
        packed
    }

    /// Number of panels.
    pub(super) fn panels(&self) -> usize {
        self.rows.div_ceil(LANES)
    }

    /// Columns with padding: a multiple of [`BLOCK`].
    pub(super) fn depth(&self) -> usize {
        self.blocks * BLOCK
    }

    /// Block `block` of a panel.
    #[inline(always)]
    pub(super) fn block<F: Format>(&self, panel: usize, block: usize) -> Block<'_> {
        let at = panel * self.blocks + block;
        Block {
            scales: &self.scales[at * F::SCALES..][..F::SCALES],
            lines: &self.lines[at * OCTETS * F::LINES..][..OCTETS * F::LINES],
        }
    }
}

/// Thirty-two columns of a panel.
#[derive(Clone, Copy)]
pub(super) struct Block<'a> {
    scales: &'a [u16],
    lines: &'a [Line],
}

impl Block<'_> {
    /// The scale and the minimum of each row.
    #[inline(always)]
    pub(super) fn scale<S: Isa, F: Format>(self, isa: S) -> [S::V; 2] {
        F::scale(isa, self.scales)
    }

    /// The values of octet `octet`, a vector of sixteen rows per column.
    #[inline(always)]
    pub(super) fn octet<S: Isa, F: Format>(self, isa: S, scale: [S::V; 2], octet: usize) -> [S::V; OCTET] {
        F::decode(isa, scale, &self.lines[octet * F::LINES..][..F::LINES])
    }
}

/// How a tensor type is packed and decoded. Decoding gives each weight's f32 value rounded once.
pub(super) trait Format {
    /// f16 scales per panel and block.
    const SCALES: usize;
    /// Lines per octet.
    const LINES: usize;
    /// Bytes of a row's block in the file.
    const BLOCK_BYTES: usize;

    /// Puts one row's block into its lane. `bytes` is short only at the end of an unquantised row.
    fn pack(bytes: &[u8], lane: usize, scales: &mut [u16], lines: &mut [Line]);

    /// The scale and the minimum of each row; whatever the format lacks is zero.
    fn scale<S: Isa>(isa: S, scales: &[u16]) -> [S::V; 2];

    /// Eight columns.
    fn decode<S: Isa>(isa: S, scale: [S::V; 2], lines: &[Line]) -> [S::V; OCTET];
}

/// Zeros, for formats without scales.
#[inline(always)]
fn unscaled<S: Isa>(isa: S) -> [S::V; 2] {
    [isa.splat(0.0); 2]
}

#[inline(always)]
fn load_scale<S: Isa>(isa: S, scales: &[u16]) -> S::V {
    isa.load_f16(scales.first_chunk().expect("a scale per lane"))
}

/// ggml's nibble order: column i is the low nibble of byte i, column i + 16 the high one.
fn pack_nibbles(bytes: &[u8], lane: usize, lines: &mut [Line]) {
    for column in 0..BLOCK {
        let nibble = bytes[column % 16] >> (column / 16 * 4) & 15;
        lines[column / OCTET].0[lane] |= u32::from(nibble) << (column % OCTET * 4);
    }
}

fn pack_halves(bytes: &[u8], lane: usize, lines: &mut [Line]) {
    for (column, half) in bytes.as_chunks().0.iter().enumerate() {
        let halves: &mut [u16] = bytemuck::cast_slice_mut(lines);
        halves[column * LANES + lane] = u16::from_le_bytes(*half);
    }
}

/// The halves of column `column` of an octet.
#[inline(always)]
fn halves(lines: &[Line], column: usize) -> &[u16; LANES] {
    let halves: &[u16] = bytemuck::cast_slice(lines);
    halves[column * LANES..].first_chunk().expect("an octet has eight columns")
}

pub(super) struct Q4_0;

impl Format for Q4_0 {
    const SCALES: usize = LANES;
    const LINES: usize = 1;
    const BLOCK_BYTES: usize = 18;

    fn pack(bytes: &[u8], lane: usize, scales: &mut [u16], lines: &mut [Line]) {
        scales[lane] = u16::from_le_bytes([bytes[0], bytes[1]]);
        pack_nibbles(&bytes[2..], lane, lines);
    }

    #[inline(always)]
    fn scale<S: Isa>(isa: S, scales: &[u16]) -> [S::V; 2] {
        [load_scale(isa, scales), isa.splat(0.0)]
    }

    #[inline(always)]
    fn decode<S: Isa>(isa: S, scale: [S::V; 2], lines: &[Line]) -> [S::V; OCTET] {
        let mut values = isa.nibbles(&lines[0]);
        for value in &mut values {
            *value = isa.mul(scale[0], isa.sub(*value, isa.splat(8.0)));
        }
        values
    }
}

pub(super) struct Q4_1;

impl Format for Q4_1 {
    const SCALES: usize = 2 * LANES;
    const LINES: usize = 1;
    const BLOCK_BYTES: usize = 20;

    fn pack(bytes: &[u8], lane: usize, scales: &mut [u16], lines: &mut [Line]) {
        scales[lane] = u16::from_le_bytes([bytes[0], bytes[1]]);
        scales[LANES + lane] = u16::from_le_bytes([bytes[2], bytes[3]]);
        pack_nibbles(&bytes[4..], lane, lines);
    }

    #[inline(always)]
    fn scale<S: Isa>(isa: S, scales: &[u16]) -> [S::V; 2] {
        [load_scale(isa, scales), load_scale(isa, &scales[LANES..])]
    }

    #[inline(always)]
    fn decode<S: Isa>(isa: S, scale: [S::V; 2], lines: &[Line]) -> [S::V; OCTET] {
        let mut values = isa.nibbles(&lines[0]);
        for value in &mut values {
            *value = isa.fma(scale[0], *value, scale[1]);
        }
        values
    }
}

pub(super) struct Q8_0;

impl Format for Q8_0 {
    const SCALES: usize = LANES;
    const LINES: usize = 2;
    const BLOCK_BYTES: usize = 34;

    fn pack(bytes: &[u8], lane: usize, scales: &mut [u16], lines: &mut [Line]) {
        scales[lane] = u16::from_le_bytes([bytes[0], bytes[1]]);
        for (line, bytes) in lines.iter_mut().zip(bytes[2..].as_chunks().0) {
            line.0[lane] = u32::from_le_bytes(*bytes);
        }
    }

    #[inline(always)]
    fn scale<S: Isa>(isa: S, scales: &[u16]) -> [S::V; 2] {
        [load_scale(isa, scales), isa.splat(0.0)]
    }

    #[inline(always)]
    fn decode<S: Isa>(isa: S, scale: [S::V; 2], lines: &[Line]) -> [S::V; OCTET] {
        let [a, b, c, d] = isa.bytes(&lines[0]);
        let [e, f, g, h] = isa.bytes(&lines[1]);
        let mut values = [a, b, c, d, e, f, g, h];
        for value in &mut values {
            *value = isa.mul(scale[0], *value);
        }
        values
    }
}

pub(super) struct F16;

impl Format for F16 {
    const SCALES: usize = 0;
    const LINES: usize = 4;
    const BLOCK_BYTES: usize = 2 * BLOCK;

    fn pack(bytes: &[u8], lane: usize, _scales: &mut [u16], lines: &mut [Line]) {
        pack_halves(bytes, lane, lines);
    }

    #[inline(always)]
    fn scale<S: Isa>(isa: S, _scales: &[u16]) -> [S::V; 2] {
        unscaled(isa)
    }

    #[inline(always)]
    fn decode<S: Isa>(isa: S, _scale: [S::V; 2], lines: &[Line]) -> [S::V; OCTET] {
        let mut values = [isa.splat(0.0); OCTET];
        for (column, value) in values.iter_mut().enumerate() {
            *value = isa.load_f16(halves(lines, column));
        }
        values
    }
}

pub(super) struct Bf16;

impl Format for Bf16 {
    const SCALES: usize = 0;
    const LINES: usize = 4;
    const BLOCK_BYTES: usize = 2 * BLOCK;

    fn pack(bytes: &[u8], lane: usize, _scales: &mut [u16], lines: &mut [Line]) {
        pack_halves(bytes, lane, lines);
    }

    #[inline(always)]
    fn scale<S: Isa>(isa: S, _scales: &[u16]) -> [S::V; 2] {
        unscaled(isa)
    }

    #[inline(always)]
    fn decode<S: Isa>(isa: S, _scale: [S::V; 2], lines: &[Line]) -> [S::V; OCTET] {
        let mut values = [isa.splat(0.0); OCTET];
        for (column, value) in values.iter_mut().enumerate() {
            *value = isa.load_bf16(halves(lines, column));
        }
        values
    }
}

pub(super) struct F32;

impl Format for F32 {
    const SCALES: usize = 0;
    const LINES: usize = 8;
    const BLOCK_BYTES: usize = 4 * BLOCK;

    fn pack(bytes: &[u8], lane: usize, _scales: &mut [u16], lines: &mut [Line]) {
        for (line, bytes) in lines.iter_mut().zip(bytes.as_chunks().0) {
            line.0[lane] = u32::from_le_bytes(*bytes);
        }
    }

    #[inline(always)]
    fn scale<S: Isa>(isa: S, _scales: &[u16]) -> [S::V; 2] {
        unscaled(isa)
    }

    #[inline(always)]
    fn decode<S: Isa>(isa: S, _scale: [S::V; 2], lines: &[Line]) -> [S::V; OCTET] {
        let mut values = [isa.splat(0.0); OCTET];
        for (value, line) in values.iter_mut().zip(lines) {
            *value = isa.load(bytemuck::cast_ref(&line.0));
        }
        values
    }
}
