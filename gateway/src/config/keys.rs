//! Keys of clients, as they stand in options: never written out again, neither in logs nor in a dump.

use std::fmt;

use serde::de::{Error, SeqAccess, Visitor};
use serde::ser::SerializeSeq;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Keys of clients. They can be read from a list of texts or from one text; they are written as an empty list.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct ApiKeys(Vec<String>);

impl ApiKeys {
    /// The keys, in the order in which they were given.
    pub fn iter(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(String::as_str)
    }
}

impl<K: Into<String>> FromIterator<K> for ApiKeys {
    fn from_iter<I: IntoIterator<Item = K>>(keys: I) -> Self {
        Self(keys.into_iter().map(Into::into).collect())
    }
}

impl fmt::Debug for ApiKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} keys", self.0.len())
    }
}

impl Serialize for ApiKeys {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_seq(Some(0))?.end()
    }
}

impl<'de> Deserialize<'de> for ApiKeys {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Keys)
    }
}

/// What is wrong with a value, without the value: it may be a key.
const EXPECTED: &str = "expected text or a list of texts; a key that is all digits needs quotes";

struct Keys;

impl<'de> Visitor<'de> for Keys {
    type Value = ApiKeys;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("text or a list of texts")
    }

    fn visit_str<E: Error>(self, key: &str) -> Result<ApiKeys, E> {
        Ok(ApiKeys(vec![key.to_owned()]))
    }

    fn visit_bool<E: Error>(self, _: bool) -> Result<ApiKeys, E> {
        Err(E::custom(EXPECTED))
    }

    fn visit_i64<E: Error>(self, _: i64) -> Result<ApiKeys, E> {
        Err(E::custom(EXPECTED))
    }

    fn visit_u64<E: Error>(self, _: u64) -> Result<ApiKeys, E> {
        Err(E::custom(EXPECTED))
    }

    fn visit_f64<E: Error>(self, _: f64) -> Result<ApiKeys, E> {
        Err(E::custom(EXPECTED))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<ApiKeys, A::Error> {
        let mut keys = Vec::new();
        while let Some(ApiKeys(key)) = list.next_element()? {
            keys.extend(key);
        }
        Ok(ApiKeys(keys))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_read_and_never_written() {
        for text in [r#""secret""#, r#"["secret"]"#] {
            let keys: ApiKeys = serde_json::from_str(text).unwrap();
            assert_eq!(keys, ApiKeys::from_iter(["secret"]));
            assert_eq!(format!("{keys:?}"), "1 keys");
            assert_eq!(serde_json::to_string(&keys).unwrap(), "[]");
        }
        for text in ["271828", "-1", "2.5", "true", "[271828]"] {
            let error = serde_json::from_str::<ApiKeys>(text).unwrap_err().to_string();
            assert!(error.starts_with(EXPECTED) && !error.contains("271828"), "{error}");
        }
    }
}
