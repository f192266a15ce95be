//! The metadata: typed values by key, with arrays and strings left where they are in the file.

use std::collections::BTreeMap;
use std::ops::Range;

use super::{Cursor, Part};
use crate::Error;

/// A metadata value. Numbers are copied, the rest is a range of the file.
#[derive(Clone, Debug)]
pub(crate) enum Value {
    Uint(u64),
    Int(i64),
    Float(f64),
    Bool(bool),
    String(Range<usize>),
    Array(Array),
}

/// An array whose elements were all walked once, so that `bytes` holds exactly `len` of them.
#[derive(Clone, Debug)]
pub(crate) struct Array {
    element: ElementType,
    len: usize,
    bytes: Range<usize>,
}

/// The type of a value, or of an array's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ElementType {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    String,
    U64,
    I64,
    F64,
}

/// The number that marks an array in place of an element type.
const ARRAY: u32 = 9;

impl ElementType {
    fn of(code: u32, part: Part<'_>) -> Result<Self, Error> {
        Ok(match code {
            0 => Self::U8,
            1 => Self::I8,
            2 => Self::U16,
            3 => Self::I16,
            4 => Self::U32,
            5 => Self::I32,
            6 => Self::F32,
            7 => Self::Bool,
            8 => Self::String,
            10 => Self::U64,
            11 => Self::I64,
            12 => Self::F64,
            ARRAY => return Err(part.malformed("an array of plain values", "an array of arrays")),
            other => {
                return Err(part.malformed("a value type from 0 to 12", format_args!("type {other}")));
            }
        })
    }

    /// Bytes of one element; none for strings, which differ.
    fn width(self) -> Option<u64> {
        match self {
            Self::U8 | Self::I8 | Self::Bool => Some(1),
            Self::U16 | Self::I16 => Some(2),
            Self::U32 | Self::I32 | Self::F32 => Some(4),
            Self::U64 | Self::I64 | Self::F64 => Some(8),
            Self::String => None,
        }
    }

    fn scalar(self, cursor: &mut Cursor<'_>, part: Part<'_>) -> Result<Value, Error> {
        let Some(width) = self.width() else { return cursor.string(part).map(Value::String) };
        Ok(self.number(cursor.take(width, part)?))
    }

    /// The number in exactly one element's bytes.
    fn number(self, bytes: &[u8]) -> Value {
        let mut padded = [0; 8];
        padded[..bytes.len()].copy_from_slice(bytes);
        let bits = u64::from_le_bytes(padded);
        match self {
            Self::U8 | Self::U16 | Self::U32 | Self::U64 | Self::String => Value::Uint(bits),
            Self::I8 => Value::Int((bits as i8).into()),
            Self::I16 => Value::Int((bits as i16).into()),
            Self::I32 => Value::Int((bits as i32).into()),
            Self::I64 => Value::Int(bits as i64),
            Self::F32 => Value::Float(f32::from_bits(bits as u32).into()),
            Self::F64 => Value::Float(f64::from_bits(bits)),
            Self::Bool => Value::Bool(bits != 0),
        }
    }
}

impl Value {
    fn kind(&self) -> &'static str {
        match self {
            Self::Uint(_) | Self::Int(_) => "an integer",
            Self::Float(_) => "a float",
            Self::Bool(_) => "a bool",
            Self::String(_) => "a string",
            Self::Array(_) => "an array",
        }
    }

    fn as_int(&self) -> Option<i64> {
        match *self {
            Self::Uint(value) => i64::try_from(value).ok(),
            Self::Int(value) => Some(value),
            _ => None,
        }
    }
}

/// Reads `count` entries. Each is at least 13 bytes long, so a false count runs out of bytes, not of memory.
pub(super) fn parse(cursor: &mut Cursor<'_>, count: u64) -> Result<BTreeMap<String, Value>, Error> {
    let mut values = BTreeMap::new();
    for index in 0..count {
        let key = cursor.text(Part::Key(index))?;
        let part = Part::Value(key);
        let value = match cursor.u32(part)? {
            ARRAY => Value::Array(array(cursor, part)?),
            code => ElementType::of(code, part)?.scalar(cursor, part)?,
        };
        if values.insert(key.to_owned(), value).is_some() {
            return Err(part.malformed("each key once", "the key a second time"));
        }
    }
    Ok(values)
}

fn array(cursor: &mut Cursor<'_>, part: Part<'_>) -> Result<Array, Error> {
    let code = cursor.u32(part)?;
    let element = ElementType::of(code, part)?;
    let len = cursor.u64(part)?;
    let start = cursor.position();
    if let Some(width) = element.width() {
        cursor.skip(len.saturating_mul(width), part)?;
    } else {
        for _ in 0..len {
            cursor.string(part)?;
        }
    }
    let len = usize::try_from(len)
        .map_err(|_| part.malformed("a length this machine can address", format_args!("{len} elements")))?;
    Ok(Array { element, len, bytes: start..cursor.position() })
}

/// The metadata of one file. A getter gives `None` for a key that is not there and an error for one of another type.
#[derive(Clone, Copy)]
pub(crate) struct Metadata<'a> {
    pub(super) file: &'a [u8],
    pub(super) values: &'a BTreeMap<String, Value>,
}

impl<'a> Metadata<'a> {
    fn wrong<T>(key: &str, expected: &str, value: &Value) -> Result<Option<T>, Error> {
        Err(Error::bad_value(key, expected, value.kind()))
    }

    /// A non-negative integer.
    pub(crate) fn uint(&self, key: &str) -> Result<Option<u64>, Error> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Uint(value)) => Ok(Some(*value)),
            Some(Value::Int(value)) => match u64::try_from(*value) {
                Ok(value) => Ok(Some(value)),
                Err(_) => Err(Error::bad_value(key, "an integer of at least 0", value)),
            },
            Some(other) => Self::wrong(key, "an integer", other),
        }
    }

    /// A float, rounded to single precision as the models use it.
    pub(crate) fn float(&self, key: &str) -> Result<Option<f32>, Error> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Float(value)) => Ok(Some(*value as f32)),
            Some(other) => Self::wrong(key, "a float", other),
        }
    }

    /// A bool.
    pub(crate) fn bool(&self, key: &str) -> Result<Option<bool>, Error> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Bool(value)) => Ok(Some(*value)),
            Some(other) => Self::wrong(key, "a bool", other),
        }
    }

    /// A string.
    pub(crate) fn string(&self, key: &str) -> Result<Option<&'a str>, Error> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::String(range)) => match std::str::from_utf8(&self.file[range.clone()]) {
                Ok(text) => Ok(Some(text)),
                Err(error) => Err(Error::bad_value(key, "UTF-8", error)),
            },
            Some(other) => Self::wrong(key, "a string", other),
        }
    }

    /// An array of strings.
    pub(crate) fn strings(&self, key: &str) -> Result<Option<Vec<&'a str>>, Error> {
        let Some(array) = self.array(key)? else { return Ok(None) };
        if array.element != ElementType::String {
            return Err(Error::bad_value(key, "an array of strings", "an array of numbers"));
        }
        let mut cursor = Cursor::new(&self.file[array.bytes.clone()]);
        // An element is at least 8 bytes of the file, so this is at most twice what the file holds.
        let mut strings = Vec::with_capacity(array.len);
        for index in 0..array.len {
            let range = cursor.string(Part::Value(key))?;
            let bytes = &self.file[array.bytes.clone()][range];
            let text = std::str::from_utf8(bytes)
                .map_err(|error| Error::bad_value(format!("{key}[{index}]"), "UTF-8", error))?;
            strings.push(text);
        }
        Ok(Some(strings))
    }

    /// An array of integers of any width and sign.
    pub(crate) fn ints(&self, key: &str) -> Result<Option<Vec<i64>>, Error> {
        self.numbers(key, "an array of integers", Value::as_int)
    }

    /// An array of floats.
    pub(crate) fn floats(&self, key: &str) -> Result<Option<Vec<f32>>, Error> {
        self.numbers(key, "an array of floats", |value| match value {
            Value::Float(value) => Some(*value as f32),
            _ => None,
        })
    }

    /// True when the key is there, whatever its value.
    pub(crate) fn has(&self, key: &str) -> bool {
        self.values.contains_key(key)
    }

    fn array(&self, key: &str) -> Result<Option<&'a Array>, Error> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Array(array)) => Ok(Some(array)),
            Some(other) => Self::wrong(key, "an array", other),
        }
    }

    fn numbers<T>(
        &self,
        key: &str,
        expected: &str,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Result<Option<Vec<T>>, Error> {
        let Some(array) = self.array(key)? else { return Ok(None) };
        let Some(width) = array.element.width() else {
            return Err(Error::bad_value(key, expected, "an array of strings"));
        };
        let elements = self.file[array.bytes.clone()].chunks_exact(width as usize);
        let numbers: Option<Vec<T>> = elements.map(|bytes| read(&array.element.number(bytes))).collect();
        match numbers {
            Some(numbers) => Ok(Some(numbers)),
            None => {
                Err(Error::bad_value(key, expected, format_args!("elements of type {:?}", array.element)))
            }
        }
    }
}
