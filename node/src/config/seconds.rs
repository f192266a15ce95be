//! Durations as they stand in files and on the command line: a number of seconds, with a fraction if need be. For
//! serde's `with`.

use std::time::Duration;

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serializer};

/// Writes seconds.
pub fn serialize<S: Serializer>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(duration.as_secs_f64())
}

/// Reads seconds, 0 or more.
pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    let seconds = f64::deserialize(deserializer)?;
    Duration::try_from_secs_f64(seconds)
        .map_err(|_| D::Error::custom(format!("expected seconds, got {seconds}")))
}

/// The same for a duration that makes no sense as zero.
pub mod positive {
    use super::*;

    pub use super::serialize;

    /// Reads seconds, more than 0.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
        let seconds = f64::deserialize(deserializer)?;
        match Duration::try_from_secs_f64(seconds) {
            Ok(duration) if !duration.is_zero() => Ok(duration),
            _ => Err(D::Error::custom(format!("expected seconds, more than 0, got {seconds}"))),
        }
    }
}
