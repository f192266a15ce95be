//! The last minutes of a process in numbers, for the charts of its dashboard.

use std::collections::{BTreeMap, VecDeque};

use serde::Serialize;

/// Moments that are kept.
pub const MOMENTS_MAX: usize = 150;

/// Columns of numbers, one row for each moment. A number that was not to be had is `None`.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct History {
    /// When each was, milliseconds of Unix time.
    at_ms: VecDeque<u64>,
    columns: BTreeMap<&'static str, VecDeque<Option<f64>>>,
}

impl History {
    /// Adds a moment; the oldest makes room. Columns are the same each time.
    pub fn push(&mut self, at_ms: u64, row: &[(&'static str, Option<f64>)]) {
        keep(&mut self.at_ms, at_ms);
        for &(name, value) in row {
            // What cannot be divided or is not finite is not to be had.
            keep(self.columns.entry(name).or_default(), value.filter(|value| value.is_finite()));
        }
    }
}

fn keep<T>(column: &mut VecDeque<T>, value: T) {
    if column.len() == MOMENTS_MAX {
        column.pop_front();
    }
    column.push_back(value);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_moment_makes_room() {
        let mut history = History::default();
        for at in 0..MOMENTS_MAX as u64 + 2 {
            history.push(at, &[("a", Some(at as f64)), ("b", Some(f64::NAN))]);
        }
        assert_eq!((history.at_ms.len(), history.at_ms[0]), (MOMENTS_MAX, 2));
        assert_eq!(history.columns["a"][0], Some(2.0));
        assert!(history.columns["b"].iter().all(Option::is_none));
    }
}
