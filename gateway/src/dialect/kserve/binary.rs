//! Elements as bytes: little-endian, row-major, nothing between them. An element of BYTES follows its length, four
//! bytes of it.

use bytes::Bytes;
use half::{bf16, f16};

use super::tensor::{Datatype, Elements, Kind, wrong_count};
use crate::fault::Fault;

/// Bytes that say how long an element of BYTES is.
const LENGTH_BYTES: usize = 4;

/// Reads exactly `count` elements out of all of the bytes. Lengths are checked before anything is reserved.
pub(crate) fn decode(raw: &Bytes, datatype: Datatype, count: usize, field: &str) -> Result<Elements, Fault> {
    let Some(size) = datatype.size() else { return decode_bytes(raw, count, field) };
    if count.checked_mul(size) != Some(raw.len()) {
        let name = datatype.name();
        return Err(Fault::field(
            field,
            format!("expected {count} elements of {name}, {size} bytes each, got {} bytes", raw.len()),
        ));
    }
    let numbers = raw.chunks_exact(size).map(|bytes| {
        let mut wide = [0; 8];
        wide[..size].copy_from_slice(bytes);
        u64::from_le_bytes(wide)
    });
    // Moves the sign of a narrow number to where a wide one has it.
    let shift = 64 - 8 * size;
    Ok(match datatype.kind() {
        Kind::Bool => {
            if let Some(byte) = raw.iter().find(|byte| **byte > 1) {
                return Err(Fault::field(field, format!("expected bytes 0 and 1 for BOOL, got {byte}")));
            }
            Elements::Bools(raw.iter().map(|byte| *byte == 1).collect())
        }
        Kind::Unsigned => Elements::Unsigned(numbers.collect()),
        Kind::Signed => Elements::Signed(numbers.map(|bits| ((bits << shift) as i64) >> shift).collect()),
        Kind::Float => Elements::Floats(numbers.map(|bits| float(datatype, bits)).collect()),
        Kind::Bytes => Elements::Bytes(Vec::new()),
    })
}

fn float(datatype: Datatype, bits: u64) -> f64 {
    match datatype {
        Datatype::Fp16 => f16::from_bits(bits as u16).to_f64(),
        Datatype::Bf16 => bf16::from_bits(bits as u16).to_f64(),
        Datatype::Fp32 => f64::from(f32::from_bits(bits as u32)),
        _ => f64::from_bits(bits),
    }
}

fn decode_bytes(raw: &Bytes, count: usize, field: &str) -> Result<Elements, Fault> {
    if count > raw.len() / LENGTH_BYTES {
        let shown = format!("{} bytes, too few for their lengths alone", raw.len());
        return Err(wrong_count(field, count, shown));
    }
    let mut elements = Vec::with_capacity(count);
    let mut at = 0;
    while at < raw.len() {
        if elements.len() == count {
            return Err(wrong_count(field, count, "more"));
        }
        let length = raw.get(at..at + LENGTH_BYTES).and_then(|bytes| bytes.try_into().ok());
        let length = length.map(|bytes| u32::from_le_bytes(bytes) as usize);
        let begin = at + LENGTH_BYTES;
        let end = length.and_then(|length| begin.checked_add(length)).filter(|end| *end <= raw.len());
        let Some(end) = end else {
            return Err(Fault::field(
                field,
                format!(
                    "expected an element after its length of {LENGTH_BYTES} bytes, got {} bytes at byte {at}",
                    raw.len() - at
                ),
            ));
        };
        elements.push(raw.slice(begin..end));
        at = end;
    }
    if elements.len() < count {
        return Err(wrong_count(field, count, elements.len()));
    }
    Ok(Elements::Bytes(elements))
}

/// Writes the elements.
pub(crate) fn encode(elements: &Elements, datatype: Datatype) -> Vec<u8> {
    let size = datatype.size().unwrap_or(LENGTH_BYTES);
    let mut raw = Vec::with_capacity(elements.len() * size);
    let mut put = |bits: u64| raw.extend_from_slice(&bits.to_le_bytes()[..size]);
    match elements {
        Elements::Bools(list) => list.iter().for_each(|flag| put(u64::from(*flag))),
        Elements::Unsigned(list) => list.iter().for_each(|number| put(*number)),
        Elements::Signed(list) => list.iter().for_each(|number| put(*number as u64)),
        Elements::Floats(list) => list.iter().for_each(|number| put(float_bits(datatype, *number))),
        Elements::Bytes(list) => {
            for element in list {
                let length = u32::try_from(element.len()).expect("an element of less than 4 GiB");
                raw.extend_from_slice(&length.to_le_bytes());
                raw.extend_from_slice(element);
            }
        }
    }
    raw
}

fn float_bits(datatype: Datatype, number: f64) -> u64 {
    match datatype {
        Datatype::Fp16 => u64::from(f16::from_f64(number).to_bits()),
        Datatype::Bf16 => u64::from(bf16::from_f64(number).to_bits()),
        Datatype::Fp32 => u64::from((number as f32).to_bits()),
        _ => number.to_bits(),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn fault(raw: &[u8], datatype: Datatype, count: usize) -> String {
        decode(&Bytes::copy_from_slice(raw), datatype, count, "t").unwrap_err().to_string()
    }

    #[test]
    fn bytes_are_as_the_protocol_has_them() {
        let encoded = |elements, datatype| encode(&elements, datatype);
        assert_eq!(encoded(Elements::Bools(vec![true, false]), Datatype::Bool), [1, 0]);
        assert_eq!(encoded(Elements::Signed(vec![-2]), Datatype::Int16), [0xfe, 0xff]);
        assert_eq!(encoded(Elements::Unsigned(vec![258]), Datatype::Uint32), [2, 1, 0, 0]);
        assert_eq!(encoded(Elements::Floats(vec![1.0]), Datatype::Fp16), [0, 0x3c]);
        assert_eq!(encoded(Elements::Floats(vec![1.0]), Datatype::Bf16), [0x80, 0x3f]);
        assert_eq!(encoded(Elements::Floats(vec![1.0]), Datatype::Fp32), [0, 0, 0x80, 0x3f]);
        let texts = Elements::Bytes(vec![Bytes::from_static(b"ab"), Bytes::new()]);
        assert_eq!(encoded(texts, Datatype::Bytes), [2, 0, 0, 0, b'a', b'b', 0, 0, 0, 0]);
    }

    #[test]
    fn lengths_that_do_not_fit_are_faults() {
        assert_eq!(
            fault(&[0; 7], Datatype::Uint32, 2),
            "t: expected 2 elements of UINT32, 4 bytes each, got 7 bytes"
        );
        assert_eq!(
            fault(&[], Datatype::Fp64, usize::MAX),
            format!("t: expected {} elements of FP64, 8 bytes each, got 0 bytes", usize::MAX)
        );
        assert_eq!(fault(&[0, 2], Datatype::Bool, 2), "t: expected bytes 0 and 1 for BOOL, got 2");
        assert!(fault(&[0; 4], Datatype::Bytes, usize::MAX).contains("too few for their lengths"));
        assert!(fault(&[5, 0, 0, 0, b'a'], Datatype::Bytes, 1).contains("got 5 bytes at byte 0"));
        assert!(fault(&[0xff, 0xff, 0xff, 0xff], Datatype::Bytes, 1).contains("at byte 0"));
        assert!(fault(&[0, 0, 0, 0, 1, 0], Datatype::Bytes, 1).contains("got more"));
        assert!(fault(&[0, 0, 0, 0, 1, 0, 0, 0, 7, 9], Datatype::Bytes, 2).contains("got more"));
        assert!(
            fault(&[4, 0, 0, 0, 0, 0, 0, 0], Datatype::Bytes, 2)
                .contains("expected 2 elements by the shape, got 1")
        );
    }

    proptest! {
        #[test]
        fn what_was_written_reads_back(
            (datatype, elements) in crate::dialect::kserve::tensor_strategy::tensors()
        ) {
            let raw = Bytes::from(encode(&elements, datatype));
            prop_assert_eq!(decode(&raw, datatype, elements.len(), "t").unwrap(), elements);
        }

        #[test]
        fn no_bytes_make_it_panic(
            raw in proptest::collection::vec(any::<u8>(), 0..64),
            datatype in proptest::sample::select(Datatype::ALL.to_vec()),
            count in prop_oneof![0_usize..70, any::<usize>()],
        ) {
            let raw = Bytes::from(raw);
            if let Ok(elements) = decode(&raw, datatype, count, "t") {
                prop_assert_eq!(elements.len(), count);
                // What is no number has many spellings; all else has one.
                if datatype.kind() != Kind::Float {
                    prop_assert_eq!(encode(&elements, datatype), raw.to_vec());
                }
            }
        }
    }
}
