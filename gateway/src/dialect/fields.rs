//! Reads the fields of a JSON object, with faults that name the field, what was expected and what came.
//!
//! `null` is the same as absence. What was not taken in the end is unknown: it is ignored, and logged for people
//! who wonder why.

use std::fmt::Write as _;
use std::ops::{Bound, RangeBounds, RangeInclusive};

use serde_json::{Map, Value};

use crate::fault::Fault;

/// Whether `5.0` is an integer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Integers {
    /// It is not.
    Strict,
    /// It is, as in JSON schema.
    Whole,
}

/// The fields of an object that were not taken yet.
pub(crate) struct Fields {
    object: Map<String, Value>,
    /// Comes before each name in a fault: empty, or ends in a dot.
    path: String,
    integers: Integers,
}

impl Fields {
    /// The fields of an object at the top.
    pub(crate) fn new(object: Map<String, Value>, integers: Integers) -> Self {
        Self { object, path: String::new(), integers }
    }

    /// Parses a body, which must be an object.
    pub(crate) fn parse(body: &[u8], integers: Integers) -> Result<Self, Fault> {
        match serde_json::from_slice(body) {
            Ok(Value::Object(object)) => Ok(Self { object, path: String::new(), integers }),
            Ok(other) => Err(Fault::Body(format!("expected a JSON object, got {}", shown(&other)))),
            Err(error) => Err(Fault::Body(format!("expected JSON: {error}"))),
        }
    }

    /// The fields of a value at `path`, which must be an object.
    pub(crate) fn of(value: Value, path: &str, integers: Integers) -> Result<Self, Fault> {
        match value {
            Value::Object(object) => Ok(Self { object, path: format!("{path}."), integers }),
            other => Err(unexpected(path, "an object", &other)),
        }
    }

    /// The field's full name in a fault.
    pub(crate) fn path(&self, name: &str) -> String {
        format!("{}{name}", self.path)
    }

    /// A fault of this field.
    pub(crate) fn fault(&self, name: &str, message: impl Into<String>) -> Fault {
        Fault::field(self.path(name), message)
    }

    /// Any value but null.
    pub(crate) fn take(&mut self, name: &str) -> Option<Value> {
        #[cfg(test)]
        asked::note(&self.path(name));
        self.object.shift_remove(name).filter(|value| !value.is_null())
    }

    /// True when the field is there, and not null.
    pub(crate) fn has(&self, name: &str) -> bool {
        #[cfg(test)]
        asked::note(&self.path(name));
        self.object.get(name).is_some_and(|value| !value.is_null())
    }

    /// Any value but null, or a fault that it is missing.
    pub(crate) fn require(&mut self, name: &str) -> Result<Value, Fault> {
        self.take(name).ok_or_else(|| self.fault(name, "is required"))
    }

    fn read<T>(
        &mut self,
        name: &str,
        expected: &str,
        read: impl FnOnce(&Value) -> Option<T>,
    ) -> Result<Option<T>, Fault> {
        let Some(value) = self.take(name) else { return Ok(None) };
        match read(&value) {
            Some(read) => Ok(Some(read)),
            None => Err(unexpected(&self.path(name), expected, &value)),
        }
    }

    pub(crate) fn string(&mut self, name: &str) -> Result<Option<String>, Fault> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(unexpected(&self.path(name), "a string", &other)),
        }
    }

    pub(crate) fn flag(&mut self, name: &str) -> Result<Option<bool>, Fault> {
        self.read(name, "true or false", Value::as_bool)
    }

    pub(crate) fn list(&mut self, name: &str) -> Result<Option<Vec<Value>>, Fault> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Array(list)) => Ok(Some(list)),
            Some(other) => Err(unexpected(&self.path(name), "a list", &other)),
        }
    }

    /// The fields of an object within.
    pub(crate) fn object(&mut self, name: &str) -> Result<Option<Self>, Fault> {
        let (path, integers) = (self.path(name), self.integers);
        self.take(name).map(|value| Self::of(value, &path, integers)).transpose()
    }

    /// An integer within the range.
    pub(crate) fn integer(&mut self, name: &str, range: RangeInclusive<u64>) -> Result<Option<u64>, Fault> {
        let integers = self.integers;
        let expected = format!("an integer in [{}, {}]", range.start(), range.end());
        self.read(name, &expected, |value| unsigned(value, integers).filter(|n| range.contains(n)))
    }

    /// A signed integer within the range.
    pub(crate) fn signed(&mut self, name: &str, range: RangeInclusive<i64>) -> Result<Option<i64>, Fault> {
        let integers = self.integers;
        let expected = format!("an integer in [{}, {}]", range.start(), range.end());
        self.read(name, &expected, |value| signed(value, integers).filter(|n| range.contains(n)))
    }

    /// A finite number within the range, compared as it will be used: in single precision.
    pub(crate) fn float(&mut self, name: &str, range: impl RangeBounds<f32>) -> Result<Option<f32>, Fault> {
        let expected = described(&range);
        self.read(name, &expected, |value| {
            let number = value.as_f64()? as f32;
            (number.is_finite() && range.contains(&number)).then_some(number)
        })
    }

    /// Ends the reading: what is left is unknown.
    pub(crate) fn finish(self, route: &str) {
        for name in self.object.keys() {
            tracing::debug!(route, field = format!("{}{name}", self.path), "unknown field ignored");
        }
    }
}

/// The fault of a value that is not what was expected.
pub(crate) fn unexpected(path: &str, expected: &str, value: &Value) -> Fault {
    Fault::field(path, format!("expected {expected}, got {}", shown(value)))
}

/// Up to here every integer has a number of double precision to itself. Beyond, a number that was written with a
/// fraction, an exponent or too many digits may stand for another integer than the one that was meant.
const EXACT_BELOW: f64 = (1_u64 << f64::MANTISSA_DIGITS) as f64;

/// An unsigned integer, if the value is one.
pub(crate) fn unsigned(value: &Value, integers: Integers) -> Option<u64> {
    value.as_u64().or_else(|| whole(value, integers)?.try_into().ok())
}

fn signed(value: &Value, integers: Integers) -> Option<i64> {
    value.as_i64().or_else(|| whole(value, integers))
}

/// The integer that a number with a fraction or an exponent is.
fn whole(value: &Value, integers: Integers) -> Option<i64> {
    let number = value.as_f64().filter(|_| integers == Integers::Whole && value.is_f64())?;
    (number.fract() == 0.0 && number.abs() < EXACT_BELOW).then_some(number as i64)
}

/// A value as a fault shows it: its content where that is short, else what kind it is.
pub(crate) fn shown(value: &Value) -> String {
    match value {
        Value::Null => "null".to_owned(),
        Value::Bool(flag) => flag.to_string(),
        Value::Number(number) => number.to_string(),
        Value::String(text) if text.chars().count() <= 40 => format!("{text:?}"),
        Value::String(text) => format!("a string of {} characters", text.chars().count()),
        Value::Array(list) => format!("a list of {}", list.len()),
        Value::Object(_) => "an object".to_owned(),
    }
}

fn described(range: &impl RangeBounds<f32>) -> String {
    let mut text = "a number".to_owned();
    let (low, high) = (range.start_bound(), range.end_bound());
    let written = match low {
        Bound::Included(low) => write!(text, " of at least {}", bound(*low)),
        Bound::Excluded(low) => write!(text, " greater than {}", bound(*low)),
        Bound::Unbounded => Ok(()),
    };
    let and = if matches!(low, Bound::Unbounded) { "" } else { " and" };
    let written = written.and(match high {
        Bound::Included(high) => write!(text, "{and} at most {high}"),
        Bound::Excluded(high) => write!(text, "{and} less than {high}"),
        Bound::Unbounded => Ok(()),
    });
    written.expect("writing to a string does not fail");
    text
}

/// A bound in digits that can be read: 0.000001, but 1e-7.
fn bound(value: f32) -> String {
    if value != 0.0 && value.abs() < 1e-6 { format!("{value:e}") } else { value.to_string() }
}

/// Which fields are asked for: what a dialect reads, for tests.
#[cfg(test)]
pub(crate) mod asked {
    use std::cell::RefCell;
    use std::collections::BTreeSet;

    thread_local! {
        static NAMES: RefCell<BTreeSet<String>> = RefCell::default();
    }

    /// Forgets what this thread has asked for.
    pub(crate) fn start() {
        NAMES.with_borrow_mut(BTreeSet::clear);
    }

    pub(super) fn note(path: &str) {
        // `parameters.x` and `x` are one field where parameters may stand in either place; others within are not top.
        let name = path.strip_prefix("parameters.").unwrap_or(path);
        if !name.contains(['.', '[']) {
            NAMES.with_borrow_mut(|names| names.insert(name.to_owned()));
        }
    }

    /// The fields of the body that were asked for since.
    pub(crate) fn names() -> BTreeSet<String> {
        NAMES.with_borrow(Clone::clone)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn fields(value: Value, integers: Integers) -> Fields {
        Fields::of(value, "p", integers).unwrap()
    }

    #[test]
    fn null_is_absence() {
        let mut fields = fields(json!({"a": null}), Integers::Strict);
        assert_eq!(fields.string("a"), Ok(None));
        assert_eq!(fields.require("a"), Err(Fault::field("p.a", "is required")));
    }

    #[test]
    fn integers_are_as_strict_as_the_dialect_wants() {
        for (value, strict, whole) in [
            (json!(5), Some(5), Some(5)),
            (json!(5.0), None, Some(5)),
            (json!(5.5), None, None),
            (json!(-1), None, None),
            (json!(true), None, None),
            (json!("5"), None, None),
            (json!(1e30), None, None),
            (json!(9_007_199_254_740_991.0), None, Some((1 << 53) - 1)),
            (json!(9_007_199_254_740_992.0), None, None),
            (json!(u64::MAX), Some(u64::MAX), Some(u64::MAX)),
        ] {
            assert_eq!(unsigned(&value, Integers::Strict), strict, "{value}");
            assert_eq!(unsigned(&value, Integers::Whole), whole, "{value}");
        }
        let mut fields = fields(json!({"n": -1}), Integers::Strict);
        let fault = fields.integer("n", 1..=9).unwrap_err();
        assert_eq!(fault.to_string(), "p.n: expected an integer in [1, 9], got -1");
    }

    #[test]
    fn numbers_are_compared_in_single_precision() {
        let open = (Bound::Excluded(1e-6), Bound::Included(1.0));
        for (value, ok) in [(json!(1e-6), false), (json!(2e-6), true), (json!(1), true), (json!(1.1), false)]
        {
            assert_eq!(fields(json!({"x": value}), Integers::Strict).float("x", open).is_ok(), ok, "{value}");
        }
        let fault = fields(json!({"x": 1e300}), Integers::Strict).float("x", 0.0..).unwrap_err();
        assert_eq!(fault.to_string(), "p.x: expected a number of at least 0, got 1e+300");
        let fault = fields(json!({"x": true}), Integers::Strict).float("x", open).unwrap_err();
        assert_eq!(fault.to_string(), "p.x: expected a number greater than 0.000001 and at most 1, got true");
    }

    #[test]
    fn a_body_that_is_no_object_says_so() {
        let fault = |body: &str| Fields::parse(body.as_bytes(), Integers::Strict).err().unwrap().to_string();
        assert_eq!(fault("[]"), "body: expected a JSON object, got a list of 0");
        assert!(fault("{\"a\":NaN}").starts_with("body: expected JSON: "));
        assert!(fault("{\"a\":\"\\ud800\"}").starts_with("body: expected JSON: "));
        assert!(fault(&"[".repeat(10_000)).contains("recursion limit"));
    }
}
