//! Tensors of every type, for properties that hold for all of them.

use bytes::Bytes;
use half::{bf16, f16};
use proptest::prelude::*;

use super::tensor::{Datatype, Elements, Kind};

/// A type and elements that are within it. No element is a NaN, which equals nothing.
pub(crate) fn tensors() -> impl Strategy<Value = (Datatype, Elements)> {
    proptest::sample::select(Datatype::ALL.to_vec())
        .prop_flat_map(|datatype| elements(datatype).prop_map(move |elements| (datatype, elements)))
}

fn elements(datatype: Datatype) -> BoxedStrategy<Elements> {
    use proptest::collection::vec;
    match datatype.kind() {
        Kind::Bool => vec(any::<bool>(), 0..20).prop_map(Elements::Bools).boxed(),
        Kind::Unsigned => vec(0..=datatype.unsigned_max(), 0..20).prop_map(Elements::Unsigned).boxed(),
        Kind::Signed => vec(datatype.signed_range(), 0..20).prop_map(Elements::Signed).boxed(),
        Kind::Float => vec(float(datatype), 0..20).prop_map(Elements::Floats).boxed(),
        Kind::Bytes => {
            let texts = vec(any::<String>(), 0..20);
            texts.prop_map(|list| Elements::Bytes(list.into_iter().map(Bytes::from).collect())).boxed()
        }
    }
}

fn float(datatype: Datatype) -> BoxedStrategy<f64> {
    let finite = |number: &f64| number.is_finite();
    match datatype {
        Datatype::Fp16 => {
            any::<u16>().prop_map(|bits| f16::from_bits(bits).to_f64()).prop_filter("finite", finite).boxed()
        }
        Datatype::Bf16 => {
            any::<u16>().prop_map(|bits| bf16::from_bits(bits).to_f64()).prop_filter("finite", finite).boxed()
        }
        Datatype::Fp32 => any::<f32>().prop_map(f64::from).prop_filter("finite", finite).boxed(),
        _ => any::<f64>().prop_filter("finite", finite).boxed(),
    }
}
