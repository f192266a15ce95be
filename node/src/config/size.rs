//! Amounts of memory as they stand in files and on the command line.

use std::fmt;
use std::str::FromStr;

use serde::de::{Error, Unexpected, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Units, each with its bytes. A letter alone is the power of two.
const UNITS: [(&str, u64); 14] = [
    ("", 1),
    ("b", 1),
    ("k", 1 << 10),
    ("kib", 1 << 10),
    ("kb", 1000),
    ("m", 1 << 20),
    ("mib", 1 << 20),
    ("mb", 1_000_000),
    ("g", 1 << 30),
    ("gib", 1 << 30),
    ("gb", 1_000_000_000),
    ("t", 1 << 40),
    ("tib", 1 << 40),
    ("tb", 1_000_000_000_000),
];

/// What a text should have been.
const EXPECTED: &str = "bytes, or a number and a unit such as 512MiB, 1.5GB or 2G (binary)";

/// A number of bytes, at least 1. As text a number with a unit, in any case: `512MiB` (binary), `1.5GB` (decimal), `2G` (binary).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct MemorySize {
    /// The number.
    pub bytes: u64,
}

impl FromStr for MemorySize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let fault = || format!("expected {EXPECTED}, got {text:?}");
        let text = text.trim();
        let digits = text.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(text.len());
        let (number, unit) = text.split_at(digits);
        let unit = unit.trim_start().to_ascii_lowercase();
        let (_, unit) = UNITS.into_iter().find(|(name, _)| *name == unit).ok_or_else(fault)?;
        let bytes = match number.parse::<u64>() {
            Ok(number) => number.checked_mul(unit),
            Err(_) => number.parse::<f64>().ok().map(|number| number * unit as f64).and_then(whole),
        };
        bytes.filter(|bytes| *bytes > 0).map(|bytes| Self { bytes }).ok_or_else(fault)
    }
}

/// What is left without the fraction, where that is a number of 63 bits.
fn whole(number: f64) -> Option<u64> {
    (0.0..9e18).contains(&number).then_some(number as u64)
}

impl fmt::Display for MemorySize {
    /// In the largest binary unit that gives a whole number.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
        match units.into_iter().find(|(_, bits)| self.bytes.trailing_zeros() >= *bits) {
            Some((unit, bits)) => write!(f, "{}{unit}", self.bytes >> bits),
            None => write!(f, "{}", self.bytes),
        }
    }
}

impl Serialize for MemorySize {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for MemorySize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(SizeVisitor)
    }
}

struct SizeVisitor;

impl Visitor<'_> for SizeVisitor {
    type Value = MemorySize;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(EXPECTED)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<MemorySize, E> {
        text.parse().map_err(E::custom)
    }

    fn visit_u64<E: Error>(self, bytes: u64) -> Result<MemorySize, E> {
        if bytes == 0 {
            return Err(E::invalid_value(Unexpected::Unsigned(0), &self));
        }
        Ok(MemorySize { bytes })
    }

    fn visit_i64<E: Error>(self, bytes: i64) -> Result<MemorySize, E> {
        match u64::try_from(bytes) {
            Ok(bytes) => self.visit_u64(bytes),
            Err(_) => Err(E::invalid_value(Unexpected::Signed(bytes), &self)),
        }
    }
}

#[cfg(test)]
mod tests {
    use toml::Value;

    use super::*;

    #[test]
    fn sizes_have_units() {
        for (text, bytes) in [
            ("1", 1),
            ("4096", 4096),
            ("3 B", 3),
            ("512MiB", 512 << 20),
            ("512 mib", 512 << 20),
            ("2G", 2 << 30),
            ("1.5GB", 1_500_000_000),
            ("0.5k", 512),
            ("1TiB", 1 << 40),
            ("7tb", 7_000_000_000_000),
        ] {
            assert_eq!(text.parse(), Ok(MemorySize { bytes }), "{text}");
        }
        for wrong in
            ["", "MiB", "0", "0GiB", "-1", "1.2.3k", "1XB", "1e9", "nan", "99999999999T", "0.1", "1 G B"]
        {
            let error = wrong.parse::<MemorySize>().unwrap_err();
            assert!(error.starts_with("expected bytes, or a number and a unit"), "{wrong}: {error}");
        }
    }

    #[test]
    fn sizes_read_as_they_print() {
        for (bytes, text) in
            [(1, "1"), (1000, "1000"), (3 << 10, "3KiB"), (1 << 30, "1GiB"), (5 << 40, "5TiB")]
        {
            let size = MemorySize { bytes };
            assert_eq!((size.to_string().as_str(), text.parse()), (text, Ok(size)));
            let value = Value::try_from(size).unwrap();
            assert_eq!((value.as_str(), value.clone().try_into()), (Some(text), Ok(size)));
        }
        assert_eq!(Value::Integer(10).try_into(), Ok(MemorySize { bytes: 10 }));
        let wrong =
            [Value::Integer(0), Value::Integer(-5), Value::Float(1.5), Value::Boolean(true), "x".into()];
        for wrong in wrong {
            assert!(wrong.clone().try_into::<MemorySize>().is_err(), "{wrong}");
        }
    }
}
