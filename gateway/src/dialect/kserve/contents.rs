//! Elements as typed lists of a protobuf message.

use proto::wire::inference::InferTensorContents;

use super::tensor::{Datatype, Elements, wrong_count};
use crate::fault::Fault;

/// The elements of the tensor's type; any of another type are a fault.
pub(crate) fn decode(
    contents: InferTensorContents,
    datatype: Datatype,
    count: usize,
    field: &str,
) -> Result<Elements, Fault> {
    let own = own_list(datatype).ok_or_else(|| {
        let name = datatype.name();
        Fault::field(field, format!("{name} has no typed contents, expected raw_input_contents"))
    })?;
    if let Some((other, len)) = lens(&contents).into_iter().find(|(list, len)| *list != own && *len > 0) {
        let name = datatype.name();
        return Err(Fault::field(field, format!("expected {own} for {name}, got {other} of {len}")));
    }
    let elements = match datatype {
        Datatype::Bool => Elements::Bools(contents.bool_contents),
        Datatype::Int8 | Datatype::Int16 | Datatype::Int32 => {
            signed(contents.int_contents.into_iter().map(i64::from), datatype, field)?
        }
        Datatype::Int64 => Elements::Signed(contents.int64_contents),
        Datatype::Uint8 | Datatype::Uint16 | Datatype::Uint32 => {
            unsigned(contents.uint_contents.into_iter().map(u64::from), datatype, field)?
        }
        Datatype::Uint64 => Elements::Unsigned(contents.uint64_contents),
        Datatype::Fp32 => Elements::Floats(contents.fp32_contents.into_iter().map(f64::from).collect()),
        // The last two have no list, which was said above.
        Datatype::Fp64 | Datatype::Fp16 | Datatype::Bf16 => Elements::Floats(contents.fp64_contents),
        Datatype::Bytes => Elements::Bytes(contents.bytes_contents),
    };
    if elements.len() != count {
        return Err(wrong_count(field, count, elements.len()));
    }
    Ok(elements)
}

/// Name of the list that has the elements of a type; `None` for types that only travel raw.
fn own_list(datatype: Datatype) -> Option<&'static str> {
    match datatype {
        Datatype::Bool => Some("bool_contents"),
        Datatype::Int8 | Datatype::Int16 | Datatype::Int32 => Some("int_contents"),
        Datatype::Int64 => Some("int64_contents"),
        Datatype::Uint8 | Datatype::Uint16 | Datatype::Uint32 => Some("uint_contents"),
        Datatype::Uint64 => Some("uint64_contents"),
        Datatype::Fp32 => Some("fp32_contents"),
        Datatype::Fp64 => Some("fp64_contents"),
        Datatype::Fp16 | Datatype::Bf16 => None,
        Datatype::Bytes => Some("bytes_contents"),
    }
}

fn lens(contents: &InferTensorContents) -> [(&'static str, usize); 8] {
    [
        ("bool_contents", contents.bool_contents.len()),
        ("int_contents", contents.int_contents.len()),
        ("int64_contents", contents.int64_contents.len()),
        ("uint_contents", contents.uint_contents.len()),
        ("uint64_contents", contents.uint64_contents.len()),
        ("fp32_contents", contents.fp32_contents.len()),
        ("fp64_contents", contents.fp64_contents.len()),
        ("bytes_contents", contents.bytes_contents.len()),
    ]
}

fn signed(numbers: impl Iterator<Item = i64>, datatype: Datatype, field: &str) -> Result<Elements, Fault> {
    let range = datatype.signed_range();
    let checked = numbers.map(|number| {
        if range.contains(&number) {
            return Ok(number);
        }
        let name = datatype.name();
        Err(Fault::field(
            field,
            format!("expected {name}, in [{}, {}], got {number}", range.start(), range.end()),
        ))
    });
    checked.collect::<Result<_, _>>().map(Elements::Signed)
}

fn unsigned(numbers: impl Iterator<Item = u64>, datatype: Datatype, field: &str) -> Result<Elements, Fault> {
    let max = datatype.unsigned_max();
    let checked = numbers.map(|number| {
        if number <= max {
            return Ok(number);
        }
        let name = datatype.name();
        Err(Fault::field(field, format!("expected {name}, in [0, {max}], got {number}")))
    });
    checked.collect::<Result<_, _>>().map(Elements::Unsigned)
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use proptest::prelude::*;

    use super::*;

    /// The typed list of the elements; `None` for types that only travel raw.
    fn encode(elements: &Elements, datatype: Datatype) -> Option<InferTensorContents> {
        own_list(datatype)?;
        let mut contents = InferTensorContents::default();
        match elements {
            Elements::Bools(list) => contents.bool_contents.clone_from(list),
            Elements::Signed(list) if datatype == Datatype::Int64 => contents.int64_contents.clone_from(list),
            Elements::Signed(list) => {
                contents.int_contents = list.iter().map(|number| *number as i32).collect();
            }
            Elements::Unsigned(list) if datatype == Datatype::Uint64 => {
                contents.uint64_contents.clone_from(list);
            }
            Elements::Unsigned(list) => {
                contents.uint_contents = list.iter().map(|number| *number as u32).collect();
            }
            Elements::Floats(list) if datatype == Datatype::Fp64 => contents.fp64_contents.clone_from(list),
            Elements::Floats(list) => {
                contents.fp32_contents = list.iter().map(|number| *number as f32).collect();
            }
            Elements::Bytes(list) => contents.bytes_contents = list.iter().map(Bytes::clone).collect(),
        }
        Some(contents)
    }

    #[test]
    fn contents_of_another_type_are_faults() {
        let contents = InferTensorContents { int_contents: vec![1], ..InferTensorContents::default() };
        let fault = |datatype, count| {
            decode(contents.clone(), datatype, count, "inputs[0].contents").unwrap_err().to_string()
        };
        assert_eq!(
            fault(Datatype::Uint32, 1),
            "inputs[0].contents: expected uint_contents for UINT32, got int_contents of 1"
        );
        assert_eq!(
            fault(Datatype::Fp16, 1),
            "inputs[0].contents: FP16 has no typed contents, expected raw_input_contents"
        );
        assert_eq!(fault(Datatype::Int32, 2), "inputs[0].contents: expected 2 elements by the shape, got 1");
        let wide = InferTensorContents { int_contents: vec![200], ..InferTensorContents::default() };
        let fault = decode(wide, Datatype::Int8, 1, "c").unwrap_err().to_string();
        assert_eq!(fault, "c: expected INT8, in [-128, 127], got 200");
        let wide = InferTensorContents { uint_contents: vec![256], ..InferTensorContents::default() };
        let fault = decode(wide, Datatype::Uint8, 1, "c").unwrap_err().to_string();
        assert_eq!(fault, "c: expected UINT8, in [0, 255], got 256");
    }

    proptest! {
        #[test]
        fn what_was_written_reads_back(
            (datatype, elements) in crate::dialect::kserve::tensor_strategy::tensors()
        ) {
            let contents = encode(&elements, datatype);
            prop_assert_eq!(contents.is_none(), matches!(datatype, Datatype::Fp16 | Datatype::Bf16));
            if let Some(contents) = contents {
                prop_assert_eq!(decode(contents, datatype, elements.len(), "t").unwrap(), elements);
            }
        }
    }
}
