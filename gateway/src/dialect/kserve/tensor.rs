//! A tensor: a name, a type, a shape and elements in row-major order.
//!
//! Elements are kept in the widest type of their kind; that each fits the tensor's own type is checked where they come
//! in, so that every way out may rely on it.

use std::ops::RangeInclusive;

use bytes::Bytes;

use crate::fault::Fault;

/// Most dimensions of a tensor.
pub(crate) const RANK_MAX: usize = 16;

/// Type of a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Datatype {
    Bool,
    Uint8,
    Uint16,
    Uint32,
    Uint64,
    Int8,
    Int16,
    Int32,
    Int64,
    Fp16,
    Fp32,
    Fp64,
    Bf16,
    /// Text or bytes of any length.
    Bytes,
}

/// What the elements of several types have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Bool,
    Unsigned,
    Signed,
    Float,
    Bytes,
}

impl Datatype {
    /// Every type.
    pub(crate) const ALL: [Self; 14] = [
        Self::Bool,
        Self::Uint8,
        Self::Uint16,
        Self::Uint32,
        Self::Uint64,
        Self::Int8,
        Self::Int16,
        Self::Int32,
        Self::Int64,
        Self::Fp16,
        Self::Fp32,
        Self::Fp64,
        Self::Bf16,
        Self::Bytes,
    ];

    /// Its name in the protocol.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Bool => "BOOL",
            Self::Uint8 => "UINT8",
            Self::Uint16 => "UINT16",
            Self::Uint32 => "UINT32",
            Self::Uint64 => "UINT64",
            Self::Int8 => "INT8",
            Self::Int16 => "INT16",
            Self::Int32 => "INT32",
            Self::Int64 => "INT64",
            Self::Fp16 => "FP16",
            Self::Fp32 => "FP32",
            Self::Fp64 => "FP64",
            Self::Bf16 => "BF16",
            Self::Bytes => "BYTES",
        }
    }

    /// The type of that name, or a fault of the field that has it.
    pub(crate) fn from_name(name: &str, field: &str) -> Result<Self, Fault> {
        Self::ALL.into_iter().find(|datatype| datatype.name() == name).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            let shown: String = name.chars().take(40).collect();
            Fault::field(field, format!("expected one of {names}, got {shown:?}"))
        })
    }

    /// What it has in common with others.
    pub(crate) fn kind(self) -> Kind {
        match self {
            Self::Bool => Kind::Bool,
            Self::Uint8 | Self::Uint16 | Self::Uint32 | Self::Uint64 => Kind::Unsigned,
            Self::Int8 | Self::Int16 | Self::Int32 | Self::Int64 => Kind::Signed,
            Self::Fp16 | Self::Fp32 | Self::Fp64 | Self::Bf16 => Kind::Float,
            Self::Bytes => Kind::Bytes,
        }
    }

    /// Bytes of an element; `None` where each has its own length.
    pub(crate) fn size(self) -> Option<usize> {
        match self {
            Self::Bool | Self::Uint8 | Self::Int8 => Some(1),
            Self::Uint16 | Self::Int16 | Self::Fp16 | Self::Bf16 => Some(2),
            Self::Uint32 | Self::Int32 | Self::Fp32 => Some(4),
            Self::Uint64 | Self::Int64 | Self::Fp64 => Some(8),
            Self::Bytes => None,
        }
    }

    /// Greatest value of an unsigned type.
    pub(crate) fn unsigned_max(self) -> u64 {
        let bits = 8 * self.size().unwrap_or(8);
        u64::MAX >> (64 - bits)
    }

    /// Values of a signed type.
    pub(crate) fn signed_range(self) -> RangeInclusive<i64> {
        let bits = 8 * self.size().unwrap_or(8);
        i64::MIN >> (64 - bits)..=i64::MAX >> (64 - bits)
    }
}

/// Elements, each within its tensor's type.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Elements {
    Bools(Vec<bool>),
    Unsigned(Vec<u64>),
    Signed(Vec<i64>),
    Floats(Vec<f64>),
    Bytes(Vec<Bytes>),
}

impl Elements {
    /// None yet, of the kind.
    pub(crate) fn empty(kind: Kind) -> Self {
        match kind {
            Kind::Bool => Self::Bools(Vec::new()),
            Kind::Unsigned => Self::Unsigned(Vec::new()),
            Kind::Signed => Self::Signed(Vec::new()),
            Kind::Float => Self::Floats(Vec::new()),
            Kind::Bytes => Self::Bytes(Vec::new()),
        }
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Bools(list) => list.len(),
            Self::Unsigned(list) => list.len(),
            Self::Signed(list) => list.len(),
            Self::Floats(list) => list.len(),
            Self::Bytes(list) => list.len(),
        }
    }
}

/// A tensor that came in.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Tensor {
    /// Its name.
    pub(crate) name: String,
    /// Type of its elements.
    pub(crate) datatype: Datatype,
    /// Dimensions, whose product is the number of elements.
    pub(crate) shape: Vec<usize>,
    /// The elements.
    pub(crate) elements: Elements,
}

/// A tensor that goes out.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Output {
    /// Its name.
    pub(crate) name: &'static str,
    /// Type of its elements.
    pub(crate) datatype: Datatype,
    /// Dimensions, whose product is the number of elements.
    pub(crate) shape: Vec<usize>,
    /// The elements.
    pub(crate) elements: Elements,
}

impl Output {
    /// Texts, in one dimension.
    pub(crate) fn texts(name: &'static str, texts: Vec<String>) -> Self {
        let elements = Elements::Bytes(texts.into_iter().map(Bytes::from).collect());
        Self::list(name, Datatype::Bytes, elements)
    }

    /// Elements in one dimension.
    pub(crate) fn list(name: &'static str, datatype: Datatype, elements: Elements) -> Self {
        Self { name, datatype, shape: vec![elements.len()], elements }
    }
}

/// Checks dimensions, and says how many elements they hold. Nothing is reserved for any of them.
pub(crate) fn element_count(shape: &[i64], field: &str) -> Result<(Vec<usize>, usize), Fault> {
    if shape.len() > RANK_MAX {
        return Err(Fault::field(
            field,
            format!("expected at most {RANK_MAX} dimensions, got {}", shape.len()),
        ));
    }
    let mut dimensions = Vec::with_capacity(shape.len());
    let mut count: usize = 1;
    for dimension in shape {
        let size = usize::try_from(*dimension).map_err(|_| {
            Fault::field(field, format!("expected dimensions of at least 0, got {dimension}"))
        })?;
        count = count.checked_mul(size).ok_or_else(|| {
            Fault::field(
                field,
                "expected fewer elements: the product of the dimensions has more than 64 bits",
            )
        })?;
        dimensions.push(size);
    }
    Ok((dimensions, count))
}

/// The fault of a tensor whose elements are not as many as its shape says.
pub(crate) fn wrong_count(field: &str, expected: usize, got: impl std::fmt::Display) -> Fault {
    Fault::field(field, format!("expected {expected} elements by the shape, got {got}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_read_back() {
        for datatype in Datatype::ALL {
            assert_eq!(Datatype::from_name(datatype.name(), "d"), Ok(datatype));
        }
        let fault = Datatype::from_name("uint32", "inputs[0].datatype").unwrap_err().to_string();
        assert!(fault.starts_with("inputs[0].datatype: expected one of BOOL, "), "{fault}");
        assert!(fault.ends_with("got \"uint32\""), "{fault}");
    }

    #[test]
    fn ranges_follow_from_the_bits() {
        assert_eq!(Datatype::Uint8.unsigned_max(), u64::from(u8::MAX));
        assert_eq!(Datatype::Uint64.unsigned_max(), u64::MAX);
        assert_eq!(Datatype::Int16.signed_range(), i64::from(i16::MIN)..=i64::from(i16::MAX));
        assert_eq!(Datatype::Int64.signed_range(), i64::MIN..=i64::MAX);
    }

    #[test]
    fn a_shape_is_checked_before_anything_is_reserved() {
        assert_eq!(element_count(&[2, 3], "s"), Ok((vec![2, 3], 6)));
        assert_eq!(element_count(&[], "s"), Ok((vec![], 1)));
        assert_eq!(element_count(&[5, 0], "s"), Ok((vec![5, 0], 0)));
        for (shape, part) in [
            (vec![-1], "expected dimensions of at least 0, got -1"),
            (vec![2, i64::MIN], "expected dimensions of at least 0"),
            (vec![i64::MAX, 3], "more than 64 bits"),
            (vec![1 << 32, 1 << 32, 1 << 32], "more than 64 bits"),
            (vec![1; 17], "at most 16 dimensions, got 17"),
        ] {
            let fault = element_count(&shape, "s").unwrap_err().to_string();
            assert!(fault.starts_with("s: ") && fault.contains(part), "{fault}");
        }
        // Zero comes last, after a product that is too large: refused, not wrapped.
        assert!(element_count(&[i64::MAX, i64::MAX, 0], "s").is_err());
    }
}
