//! What came of the runs, as a table.

use std::time::Instant;

use crate::Run;
use crate::chat::Answer;

/// A kind of runs.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    what: &'static str,
    pub(crate) runs: usize,
    /// Those that came to their end by themselves.
    pub(crate) ended: usize,
    /// Of these, those that the validator takes.
    valid: usize,
    /// Those that were cut by the length.
    cut: usize,
    tokens: u64,
    seconds: f64,
}

/// Rows, and what went wrong.
pub(crate) struct Table {
    rows: Vec<Row>,
    failures: Vec<String>,
    since: Instant,
}

impl Default for Table {
    fn default() -> Self {
        Self { rows: Vec::new(), failures: Vec::new(), since: Instant::now() }
    }
}

impl Table {
    /// Judges the answers of a kind of runs, which have just ended.
    pub(crate) fn add(&mut self, what: &'static str, runs: &[Run], answers: &[Answer]) -> Row {
        let seconds = self.since.elapsed().as_secs_f64();
        self.since = Instant::now();
        let mut row = Row { what, runs: runs.len(), ended: 0, valid: 0, cut: 0, tokens: 0, seconds };
        for ((case, seed), answer) in runs.iter().zip(answers) {
            row.tokens += answer.tokens;
            let fault = match (&answer.error, answer.finish.as_str()) {
                (Some(error), _) => Some(error.clone()),
                (None, "stop") => {
                    row.ended += 1;
                    case.fault(&answer.text)
                }
                (None, "length") => {
                    row.cut += 1;
                    continue;
                }
                (None, other) => Some(format!("finish reason {other:?}")),
            };
            match fault {
                None => row.valid += 1,
                Some(fault) => {
                    self.failures.push(format!("{}, seed {seed}: {fault}: {}", case.name, answer.text));
                }
            }
        }
        self.rows.push(row.clone());
        row
    }

    /// What went wrong, one line a run.
    pub(crate) fn failures(&self) -> &[String] {
        &self.failures
    }

    /// Prints the rows.
    pub(crate) fn print(&self, kills: usize, hit: usize) {
        println!(
            "{:<28} {:>6} {:>6} {:>6} {:>6} {:>8} {:>8} {:>9}",
            "", "runs", "ended", "valid", "cut", "ended, %", "tokens", "tokens/s"
        );
        for row in &self.rows {
            let share = 100.0 * row.ended as f64 / row.runs.max(1) as f64;
            let pace = row.tokens as f64 / row.seconds.max(f64::MIN_POSITIVE);
            println!(
                "{:<28} {:>6} {:>6} {:>6} {:>6} {share:>8.1} {:>8} {pace:>9.1}",
                row.what, row.runs, row.ended, row.valid, row.cut, row.tokens
            );
        }
        println!("decode workers killed: {kills}, with {hit} chats under way");
    }
}
