//! Prices from measurements: least squares with no price below zero.

use proto::Error;
use serde::{Deserialize, Serialize};

use super::{Prices, StepWork};

/// A step of a real engine.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measurement {
    /// Tokens of prompts in the step.
    pub prefill_tokens: usize,
    /// For each of them the tokens before it, added up.
    pub prefill_context: f64,
    /// Sequences that decoded.
    pub decodes: usize,
    /// Tokens of their contexts, added up.
    pub decode_context: f64,
    /// How long the step took.
    pub seconds: f64,
}

impl Measurement {
    /// What the step had to compute.
    pub fn work(&self) -> StepWork {
        StepWork {
            prefill_tokens: self.prefill_tokens,
            prefill_context: self.prefill_context,
            decodes: self.decodes,
            decode_context: self.decode_context,
        }
    }

    fn row(&self) -> [f64; TERMS] {
        [1.0, self.prefill_tokens as f64, self.prefill_context, self.decodes as f64, self.decode_context]
    }
}

/// Prices, and how well they tell the measurements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fit {
    /// The prices; link and hop are those that were given.
    pub prices: Prices,
    /// Median over the measurements of how far off the price of the step is, as a part of what it took.
    pub error_median: f64,
    /// The same for the worst of them.
    pub error_max: f64,
}

/// Prices of a step: the constant, and four that go with the work.
const TERMS: usize = 5;

/// Reads measurements, a JSON object a line.
///
/// # Errors
/// INVALID_ARGUMENT that names the line.
pub fn read_measurements(text: &str) -> Result<Vec<Measurement>, Error> {
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    lines
        .map(|(number, line)| {
            let at = format!("measurements, line {}", number + 1);
            let read: Measurement = serde_json::from_str(line).map_err(|fault| Error::invalid(&at, fault))?;
            if !read.seconds.is_finite() || read.seconds <= 0.0 {
                return Err(Error::invalid(&format!("{at}: seconds"), "more than 0 expected"));
            }
            Ok(read)
        })
        .collect()
}

/// The prices of steps that tell the measurements best: least squares of the relative error, so that short steps count
/// as much as long ones. A price that would be below zero is left out, the lowest first. Link and hop come from `known`.
///
/// # Errors
/// INVALID_ARGUMENT when there are fewer measurements than prices, or they do not tell the prices apart.
pub fn fit(measurements: &[Measurement], known: Prices) -> Result<Fit, Error> {
    if measurements.len() < TERMS {
        let message = format_args!("at least {TERMS} expected, {} came", measurements.len());
        return Err(Error::invalid("measurements", message));
    }
    let mut used = [true; TERMS];
    let solution = loop {
        let solution = solve(measurements, used).ok_or_else(|| {
            Error::invalid(
                "measurements",
                "steps with more kinds of work expected: these do not tell the prices apart",
            )
        })?;
        let lowest = (0..TERMS).filter(|&term| used[term]).min_by(|&a, &b| {
            // In seconds of the typical step, since prices have different units.
            (solution[a] * scale(measurements, a)).total_cmp(&(solution[b] * scale(measurements, b)))
        });
        match lowest {
            Some(term) if solution[term] < 0.0 => used[term] = false,
            _ => break solution,
        }
    };
    let [
        step_seconds,
        prefill_token_seconds,
        prefill_context_seconds,
        decode_sequence_seconds,
        decode_context_seconds,
    ] = solution;
    let prices = Prices {
        step_seconds,
        prefill_token_seconds,
        prefill_context_seconds,
        decode_sequence_seconds,
        decode_context_seconds,
        ..known
    };
    let mut errors: Vec<f64> =
        measurements.iter().map(|step| (prices.step(&step.work()) / step.seconds - 1.0).abs()).collect();
    errors.sort_by(f64::total_cmp);
    Ok(Fit { prices, error_median: errors[errors.len() / 2], error_max: errors[errors.len() - 1] })
}

/// The largest value of a term.
fn scale(measurements: &[Measurement], term: usize) -> f64 {
    measurements.iter().map(|step| step.row()[term]).fold(0.0, f64::max).max(1e-300)
}

/// The normal equations over the terms in use, by elimination with pivots.
fn solve(measurements: &[Measurement], used: [bool; TERMS]) -> Option<[f64; TERMS]> {
    let terms: Vec<usize> = (0..TERMS).filter(|&term| used[term]).collect();
    let scales: Vec<f64> = terms.iter().map(|&term| scale(measurements, term)).collect();
    let size = terms.len();
    // `size` equations, each with its right side last.
    let mut rows = vec![vec![0.0; size + 1]; size];
    for step in measurements {
        let row = step.row();
        let scaled: Vec<f64> =
            terms.iter().zip(&scales).map(|(&term, scale)| row[term] / scale / step.seconds).collect();
        for i in 0..size {
            for j in 0..size {
                rows[i][j] += scaled[i] * scaled[j];
            }
            rows[i][size] += scaled[i];
        }
    }
    for column in 0..size {
        let pivot =
            (column..size).max_by(|&a, &b| rows[a][column].abs().total_cmp(&rows[b][column].abs()))?;
        rows.swap(column, pivot);
        let largest = rows[column].iter().take(size).fold(0.0_f64, |most, value| most.max(value.abs()));
        if rows[column][column].abs() <= 1e-12 * largest.max(1e-300) {
            return None;
        }
        let head = rows[column].clone();
        for (index, row) in rows.iter_mut().enumerate().filter(|(index, _)| *index != column) {
            debug_assert_ne!(index, column, "the pivot row stays");
            let factor = row[column] / head[column];
            row.iter_mut().zip(&head).for_each(|(value, head)| *value -= factor * head);
        }
    }
    let mut solution = [0.0; TERMS];
    for (index, &term) in terms.iter().enumerate() {
        solution[term] = rows[index][size] / rows[index][index] / scales[index];
    }
    Some(solution)
}

#[cfg(test)]
mod tests {
    use super::super::Machine;
    use super::*;
    use crate::random::Random;

    /// Steps of the given prices, off by a little.
    fn steps(prices: &Prices, noise: f64) -> Vec<Measurement> {
        let mut random = Random::new(3);
        let mut steps = Vec::new();
        for tokens in [0, 16, 128, 512] {
            for decodes in [0, 1, 4, 16] {
                for context in [64, 1024] {
                    let mut work = StepWork::default();
                    if tokens > 0 {
                        work.add_chunk(context, tokens);
                    }
                    (0..decodes).for_each(|_| work.add_decode(context));
                    let seconds = prices.step(&work) * (1.0 + noise * random.normal());
                    let StepWork { prefill_tokens, prefill_context, decodes, decode_context } = work;
                    steps.push(Measurement {
                        prefill_tokens,
                        prefill_context,
                        decodes,
                        decode_context,
                        seconds,
                    });
                }
            }
        }
        steps
    }

    #[test]
    fn prices_are_found_again() {
        let known = Machine::preset("cpu-smollm2").unwrap().prices;
        let exact = fit(&steps(&known, 0.0), known).unwrap();
        assert!(exact.error_max < 1e-6, "{exact:?}");
        let rough = fit(&steps(&known, 0.02), known).unwrap();
        assert!(
            (rough.prices.prefill_token_seconds / known.prefill_token_seconds - 1.0).abs() < 0.1,
            "{rough:?}"
        );
        assert!(rough.error_median < 0.05, "{rough:?}");
    }

    #[test]
    fn no_price_is_below_zero() {
        let mut known = Machine::preset("cpu-smollm2").unwrap().prices;
        known.decode_context_seconds = -1e-7;
        let fitted = fit(&steps(&known, 0.0), known).unwrap().prices;
        assert_eq!(fitted.decode_context_seconds, 0.0);
        assert!(fitted.step_seconds > 0.0);
    }

    #[test]
    fn too_little_is_refused() {
        let known = Machine::preset("cpu-smollm2").unwrap().prices;
        let same = vec![steps(&known, 0.0)[3]; 8];
        assert!(fit(&same, known).unwrap_err().message.starts_with("measurements: "));
        assert!(fit(&same[..2], known).unwrap_err().message.starts_with("measurements: at least 5"));
        let line = r#"{"prefill_tokens":1,"prefill_context":0,"decodes":0,"decode_context":0,"seconds":0}"#;
        assert!(read_measurements(line).unwrap_err().message.starts_with("measurements, line 1: seconds: "));
    }
}
