//! Stored elements to single precision: ggml's formats.
//!
//! A block format keeps [`BLOCK`] consecutive elements of a row together, little-endian, with no padding:
//!
//! | type | bytes | layout | element i |
//! |---|---|---|---|
//! | `Q4_0` | 18 | f16 d, u8 q\[16\] | d · (n(i) − 8) |
//! | `Q4_1` | 20 | f16 d, f16 m, u8 q\[16\] | d · n(i) + m |
//! | `Q8_0` | 34 | f16 d, i8 q\[32\] | d · q\[i\] |
//!
//! where n(i) is the low nibble of q\[i\] for i < 16 and the high nibble of q\[i − 16\] for the others. Source:
//! `block_q4_0`, `block_q4_1` and `block_q8_0` with their `dequantize_row` functions in ggml.

use half::{bf16, f16};

use crate::TensorType;

/// The elements of a quantised block.
pub const BLOCK: usize = 32;

/// Reads whole blocks of stored elements into `out`.
///
/// # Panics
/// When `out.len()` is not a whole number of blocks or `bytes` is not exactly their size.
pub fn dequantize(dtype: TensorType, bytes: &[u8], out: &mut [f32]) {
    let (block_len, block_bytes) = (dtype.block_len(), dtype.block_bytes());
    assert!(
        out.len().is_multiple_of(block_len) && out.len() / block_len * block_bytes == bytes.len(),
        "{} elements of {} from {} bytes",
        out.len(),
        dtype.name(),
        bytes.len()
    );
    match dtype {
        TensorType::F32 => elements(bytes, out, f32::from_le_bytes),
        TensorType::F16 => elements(bytes, out, |stored| f16::from_le_bytes(stored).to_f32()),
        TensorType::BF16 => elements(bytes, out, |stored| bf16::from_le_bytes(stored).to_f32()),
        TensorType::Q4_0 => blocks(bytes, out, q4_0),
        TensorType::Q4_1 => blocks(bytes, out, q4_1),
        TensorType::Q8_0 => blocks(bytes, out, q8_0),
    }
}

fn elements<const N: usize>(bytes: &[u8], out: &mut [f32], read: impl Fn([u8; N]) -> f32) {
    for (stored, value) in bytes.as_chunks::<N>().0.iter().zip(out) {
        *value = read(*stored);
    }
}

fn blocks<const N: usize>(bytes: &[u8], out: &mut [f32], read: impl Fn(&[u8; N], &mut [f32; BLOCK])) {
    for (block, values) in bytes.as_chunks::<N>().0.iter().zip(out.as_chunks_mut::<BLOCK>().0) {
        read(block, values);
    }
}

fn q4_0(block: &[u8; 18], out: &mut [f32; BLOCK]) {
    let [d0, d1, q @ ..] = block;
    let d = f16::from_le_bytes([*d0, *d1]).to_f32();
    for (i, byte) in q.iter().enumerate() {
        out[i] = d * (f32::from(byte & 0x0f) - 8.0);
        out[i + BLOCK / 2] = d * (f32::from(byte >> 4) - 8.0);
    }
}

fn q4_1(block: &[u8; 20], out: &mut [f32; BLOCK]) {
    let [d0, d1, m0, m1, q @ ..] = block;
    let d = f16::from_le_bytes([*d0, *d1]).to_f32();
    let m = f16::from_le_bytes([*m0, *m1]).to_f32();
    for (i, byte) in q.iter().enumerate() {
        out[i] = d * f32::from(byte & 0x0f) + m;
        out[i + BLOCK / 2] = d * f32::from(byte >> 4) + m;
    }
}

fn q8_0(block: &[u8; 34], out: &mut [f32; BLOCK]) {
    let [d0, d1, q @ ..] = block;
    let d = f16::from_le_bytes([*d0, *d1]).to_f32();
    for (byte, value) in q.iter().zip(out) {
        *value = d * f32::from(*byte as i8);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(dtype: TensorType, bytes: &[u8]) -> Vec<f32> {
        let mut out = vec![f32::NAN; bytes.len() / dtype.block_bytes() * dtype.block_len()];
        dequantize(dtype, bytes, &mut out);
        out
    }

    /// The f16 bit patterns of the scales below: 1 + 5 + 10 bits, exponent bias 15.
    const HALF: [u8; 2] = [0x00, 0x38]; // 0.5: exponent 14
    const TWO: [u8; 2] = [0x00, 0x40]; // 2.0: exponent 16
    const MINUS_THREE: [u8; 2] = [0x00, 0xc2]; // -3.0: exponent 16, fraction 1/2

    #[test]
    fn single_elements_are_read_bit_by_bit() {
        assert_eq!(read(TensorType::F32, &[0, 0, 0xc0, 0xbf, 0, 0, 0, 0x40]), [-1.5, 2.0]);
        assert_eq!(read(TensorType::F16, &[0x00, 0xc2, 0x01, 0x00]), [-3.0, 2.0_f32.powi(-24)]);
        assert_eq!(read(TensorType::BF16, &[0xc0, 0xbf, 0x49, 0x40]), [-1.5, 3.140_625]);
    }

    #[test]
    fn q4_0_takes_low_nibbles_first_around_eight() {
        let mut block = HALF.to_vec();
        // bytes 0x0f, 0x1e, 0x2d, ...: low nibbles 15, 14, ... 0 and high nibbles 0, 1, ... 15
        block.extend((0..16_u8).map(|i| i << 4 | (15 - i)));
        let values = read(TensorType::Q4_0, &block);
        for i in 0..16 {
            assert_eq!(values[i], 0.5 * (15.0 - i as f32 - 8.0), "element {i}");
            assert_eq!(values[i + 16], 0.5 * (i as f32 - 8.0), "element {}", i + 16);
        }
    }

    #[test]
    fn q4_1_adds_the_minimum() {
        let mut block = [HALF, MINUS_THREE].concat();
        block.extend((0..16_u8).map(|i| i << 4 | (15 - i)));
        let values = read(TensorType::Q4_1, &block);
        assert_eq!((values[0], values[15], values[16], values[31]), (4.5, -3.0, -3.0, 4.5));
        assert_eq!((values[1], values[17]), (4.0, -2.5));
    }

    #[test]
    fn q8_0_is_signed() {
        let mut block = TWO.to_vec();
        block.extend([0_u8, 1, 127, 128, 255]);
        block.resize(34, 7);
        let values = read(TensorType::Q8_0, &block);
        assert_eq!(values[..6], [0.0, 2.0, 254.0, -256.0, -2.0, 14.0]);
        assert_eq!(values[31], 14.0);
    }

    #[test]
    fn blocks_follow_each_other() {
        let block = |d: [u8; 2], q: u8| [&d[..], &[q; 32]].concat();
        let values = read(TensorType::Q8_0, &[block(HALF, 2), block(TWO, 3)].concat());
        assert_eq!((values[31], values[32]), (1.0, 6.0));
    }

    #[test]
    #[should_panic(expected = "32 elements of Q4_1 from 19 bytes")]
    fn a_wrong_size_is_refused() {
        dequantize(TensorType::Q4_1, &[0; 19], &mut [0.0; 32]);
    }
}
