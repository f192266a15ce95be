//! Elements as JSON: a flat list, or lists within lists by the tensor's shape.
//!
//! Numbers go straight from the text into their list, and reading stops at the first that the shape has no place for.

use std::fmt;

use bytes::Bytes;
use half::{bf16, f16};
use serde::Serialize;
use serde::de::{DeserializeSeed, Deserializer, Error, SeqAccess, Visitor};
use serde_json::value::RawValue;

use super::tensor::{Datatype, Elements, Kind, wrong_count};
use crate::fault::Fault;

/// Reads exactly `count` elements, which is what the shape holds.
pub(crate) fn decode(
    data: &RawValue,
    datatype: Datatype,
    shape: &[usize],
    count: usize,
    field: &str,
) -> Result<Elements, Fault> {
    let mut reader = Reader {
        datatype,
        shape,
        count,
        elements: Elements::empty(datatype.kind()),
        depth: 0,
        leaf_depth: None,
    };
    let mut json = serde_json::Deserializer::from_str(data.get());
    let read = Item { reader: &mut reader }.deserialize(&mut json).and_then(|()| json.end());
    read.map_err(|error| Fault::field(field, message_of(&error)))?;
    if reader.leaf_depth == Some(0) {
        return Err(Fault::field(field, "expected a list"));
    }
    if reader.elements.len() < count {
        return Err(wrong_count(field, count, reader.elements.len()));
    }
    Ok(reader.elements)
}

/// Without the place in the text, which is that of a part of the body.
fn message_of(error: &serde_json::Error) -> String {
    let text = error.to_string();
    text.rsplit_once(" at line ").map_or(text.clone(), |(message, _)| message.to_owned())
}

struct Reader<'a> {
    datatype: Datatype,
    shape: &'a [usize],
    count: usize,
    elements: Elements,
    /// Lists that are open.
    depth: usize,
    /// In how many lists the elements stand: one, or as many as there are dimensions.
    leaf_depth: Option<usize>,
}

impl Reader<'_> {
    /// Notes an element before it is read: it must have a place.
    fn place<E: Error>(&mut self) -> Result<(), E> {
        let rank = self.shape.len();
        let leaf_depth = *self.leaf_depth.get_or_insert(self.depth);
        if leaf_depth != self.depth || !(self.depth <= 1 || self.depth == rank) {
            return Err(E::custom(format!("expected a flat list, or lists within lists {rank} deep")));
        }
        if self.elements.len() == self.count {
            return Err(E::custom(format!("expected {} elements by the shape, got more", self.count)));
        }
        Ok(())
    }

    /// The length that the list which now ends must have, if that is known.
    fn expected_len(&self) -> Option<usize> {
        let nested = self.leaf_depth.is_none_or(|depth| depth == self.shape.len());
        let by_shape = self.shape.get(self.depth - 1).copied();
        if self.shape.len() > 1 && nested { by_shape } else { None }
    }

    fn wrong<E: Error>(&self, got: impl fmt::Display) -> E {
        let name = self.datatype.name();
        match self.datatype.kind() {
            Kind::Unsigned => {
                E::custom(format!("expected {name}, in [0, {}], got {got}", self.datatype.unsigned_max()))
            }
            Kind::Signed => {
                let range = self.datatype.signed_range();
                E::custom(format!("expected {name}, in [{}, {}], got {got}", range.start(), range.end()))
            }
            Kind::Bool => E::custom(format!("expected true or false for {name}, got {got}")),
            Kind::Float => E::custom(format!("expected a finite number for {name}, got {got}")),
            Kind::Bytes => E::custom(format!("expected a string for {name}, got {got}")),
        }
    }

    fn float<E: Error>(&mut self, number: f64) -> Result<(), E> {
        let rounded = round(self.datatype, number);
        match &mut self.elements {
            Elements::Floats(list) if rounded.is_finite() => list.push(rounded),
            _ => return Err(self.wrong(number)),
        }
        Ok(())
    }
}

/// The value that the type has for the number.
fn round(datatype: Datatype, number: f64) -> f64 {
    match datatype {
        Datatype::Fp16 => f16::from_f64(number).to_f64(),
        Datatype::Bf16 => bf16::from_f64(number).to_f64(),
        Datatype::Fp32 => f64::from(number as f32),
        _ => number,
    }
}

/// An element, or a list of items.
struct Item<'a, 'b> {
    reader: &'a mut Reader<'b>,
}

impl<'de> DeserializeSeed<'de> for Item<'_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Item<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "elements of {}", self.reader.datatype.name())
    }

    fn visit_bool<E: Error>(self, flag: bool) -> Result<(), E> {
        self.reader.place()?;
        match &mut self.reader.elements {
            Elements::Bools(list) => list.push(flag),
            _ => return Err(self.reader.wrong(flag)),
        }
        Ok(())
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<(), E> {
        self.reader.place()?;
        let datatype = self.reader.datatype;
        match &mut self.reader.elements {
            Elements::Unsigned(list) if number <= datatype.unsigned_max() => list.push(number),
            Elements::Signed(list) if number <= *datatype.signed_range().end() as u64 => {
                list.push(number as i64);
            }
            Elements::Floats(_) => return self.reader.float(number as f64),
            _ => return Err(self.reader.wrong(number)),
        }
        Ok(())
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<(), E> {
        self.reader.place()?;
        let datatype = self.reader.datatype;
        match &mut self.reader.elements {
            Elements::Signed(list) if datatype.signed_range().contains(&number) => list.push(number),
            Elements::Floats(_) => return self.reader.float(number as f64),
            _ => return Err(self.reader.wrong(number)),
        }
        Ok(())
    }

    fn visit_f64<E: Error>(self, number: f64) -> Result<(), E> {
        self.reader.place()?;
        self.reader.float(number)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<(), E> {
        self.reader.place()?;
        match &mut self.reader.elements {
            Elements::Bytes(list) => list.push(Bytes::copy_from_slice(text.as_bytes())),
            _ => return Err(self.reader.wrong("a string")),
        }
        Ok(())
    }

    fn visit_unit<E: Error>(self) -> Result<(), E> {
        Err(self.reader.wrong("null"))
    }

    fn visit_map<A>(self, _map: A) -> Result<(), A::Error>
    where
        A: serde::de::MapAccess<'de>,
    {
        Err(self.reader.wrong("an object"))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        let reader = self.reader;
        if reader.depth >= reader.shape.len().max(1) {
            let rank = reader.shape.len().max(1);
            return Err(A::Error::custom(format!("expected lists at most {rank} deep by the shape")));
        }
        reader.depth += 1;
        let mut len = 0;
        while items.next_element_seed(Item { reader })?.is_some() {
            len += 1;
        }
        // A flat list of nothing is as good as lists of nothing.
        let none = len == 0 && reader.depth == 1;
        if let Some(expected) = reader.expected_len()
            && len != expected
            && !none
        {
            return Err(A::Error::custom(format!("expected lists of {expected} by the shape, got {len}")));
        }
        reader.depth -= 1;
        Ok(())
    }
}

/// The elements as a flat list. What is no text is shown with U+FFFD for what cannot be read, as JSON has no other
/// way; a client that wants the bytes asks for binary data.
pub(crate) struct Flat<'a>(pub(crate) &'a Elements, pub(crate) Datatype);

impl Serialize for Flat<'_> {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            Elements::Bools(list) => serializer.collect_seq(list),
            Elements::Unsigned(list) => serializer.collect_seq(list),
            Elements::Signed(list) => serializer.collect_seq(list),
            // The digits of single precision, not those of what it is widened to.
            Elements::Floats(list) if self.1 == Datatype::Fp64 => serializer.collect_seq(list),
            Elements::Floats(list) => serializer.collect_seq(list.iter().map(|number| *number as f32)),
            Elements::Bytes(list) => {
                serializer.collect_seq(list.iter().map(|bytes| String::from_utf8_lossy(bytes)))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::tensor::element_count;
    use super::*;

    fn read(json: &str, datatype: Datatype, shape: &[i64]) -> Result<Elements, String> {
        let data: Box<RawValue> = serde_json::from_str(json).unwrap();
        let (shape, count) = element_count(shape, "s").unwrap();
        decode(&data, datatype, &shape, count, "data").map_err(|fault| fault.to_string())
    }

    #[test]
    fn flat_and_nested_lists_are_the_same() {
        let expected = Ok(Elements::Unsigned(vec![1, 2, 3, 4, 5, 6]));
        for json in ["[1,2,3,4,5,6]", "[[1,2,3],[4,5,6]]", " [ [1 ,2,3] , [4,5,6]]"] {
            assert_eq!(read(json, Datatype::Uint32, &[2, 3]), expected, "{json}");
        }
        assert_eq!(read("[[[7]]]", Datatype::Int8, &[1, 1, 1]), Ok(Elements::Signed(vec![7])));
        assert_eq!(read("[]", Datatype::Uint8, &[0]), Ok(Elements::Unsigned(vec![])));
        assert_eq!(read("[[],[]]", Datatype::Uint8, &[2, 0]), Ok(Elements::Unsigned(vec![])));
        assert_eq!(read("[]", Datatype::Uint8, &[2, 0]), Ok(Elements::Unsigned(vec![])));
        assert_eq!(read("[5]", Datatype::Uint8, &[]), Ok(Elements::Unsigned(vec![5])));
    }

    #[test]
    fn every_kind_is_read_as_its_own() {
        assert_eq!(read("[true,false]", Datatype::Bool, &[2]), Ok(Elements::Bools(vec![true, false])));
        assert_eq!(read("[-1,255]", Datatype::Int16, &[2]), Ok(Elements::Signed(vec![-1, 255])));
        assert_eq!(read("[1,-2,0.5]", Datatype::Fp32, &[3]), Ok(Elements::Floats(vec![1.0, -2.0, 0.5])));
        assert_eq!(read("[\"é\"]", Datatype::Bytes, &[1]), Ok(Elements::Bytes(vec!["é".into()])));
    }

    #[test]
    fn a_value_that_is_no_element_is_named() {
        for (json, datatype, shape, part) in [
            ("[256]", Datatype::Uint8, vec![1], "expected UINT8, in [0, 255], got 256"),
            ("[-1]", Datatype::Uint32, vec![1], "expected UINT32, in [0, 4294967295], got -1"),
            ("[128]", Datatype::Int8, vec![1], "expected INT8, in [-128, 127], got 128"),
            ("[18446744073709551615]", Datatype::Int64, vec![1], "got 18446744073709551615"),
            ("[1.0]", Datatype::Int32, vec![1], "expected INT32"),
            ("[true]", Datatype::Int32, vec![1], "got true"),
            ("[1]", Datatype::Bool, vec![1], "expected true or false for BOOL, got 1"),
            ("[1e300]", Datatype::Fp32, vec![1], "expected a finite number for FP32"),
            ("[70000]", Datatype::Fp16, vec![1], "expected a finite number for FP16"),
            ("[1]", Datatype::Bytes, vec![1], "expected a string for BYTES, got 1"),
            ("[null]", Datatype::Bytes, vec![1], "got null"),
            ("[{\"a\":1}]", Datatype::Fp32, vec![1], "got an object"),
            ("\"x\"", Datatype::Bytes, vec![1], "expected a list"),
            ("7", Datatype::Uint8, vec![], "expected a list"),
            ("[1,2]", Datatype::Uint8, vec![3], "expected 3 elements by the shape, got 2"),
            ("[1,2,3]", Datatype::Uint8, vec![2], "expected 2 elements by the shape, got more"),
            ("[[1,2],[3,4,5]]", Datatype::Uint8, vec![2, 3], "expected lists of 3 by the shape, got 2"),
            ("[[1],[2,3],[4]]", Datatype::Uint8, vec![2, 2], "expected lists of 2"),
            ("[[1,2],3,4]", Datatype::Uint8, vec![2, 2], "a flat list, or lists within lists 2 deep"),
            ("[1,[2]]", Datatype::Uint8, vec![2, 1], "a flat list, or lists within lists 2 deep"),
            ("[[1],[2]]", Datatype::Uint8, vec![2, 1, 1], "a flat list, or lists within lists 3 deep"),
            ("[[1]]", Datatype::Uint8, vec![1], "expected lists at most 1 deep"),
            (
                "[]",
                Datatype::Uint8,
                vec![1 << 60],
                "expected 1152921504606846976 elements by the shape, got 0",
            ),
        ] {
            let fault = read(json, datatype, &shape).expect_err(json);
            assert!(fault.starts_with("data: ") && fault.contains(part), "{json}: {fault}");
            assert!(!fault.contains("at line"), "{fault}");
        }
    }

    proptest! {
        #[test]
        fn what_was_written_reads_back(
            (datatype, elements) in crate::dialect::kserve::tensor_strategy::tensors()
        ) {
            let json = serde_json::to_string(&Flat(&elements, datatype)).unwrap();
            prop_assert_eq!(read(&json, datatype, &[elements.len() as i64]).unwrap(), elements);
        }
    }
}
