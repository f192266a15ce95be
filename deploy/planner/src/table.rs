//! Tables of figures, as Markdown that lines up in a terminal.

use std::fmt::Write as _;

use crate::report::Report;

/// A table that grows by rows.
#[derive(Clone, Debug)]
pub(crate) struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    pub(crate) fn new(heads: &[&str]) -> Self {
        Self { rows: vec![heads.iter().map(ToString::to_string).collect()] }
    }

    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().collect());
    }

    /// The table, each column as wide as its widest cell.
    pub(crate) fn text(&self) -> String {
        let columns = self.rows[0].len();
        let width = |column: usize| {
            self.rows
                .iter()
                .filter_map(|row| row.get(column))
                .map(|cell| cell.chars().count())
                .max()
                .unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        let mut text = String::new();
        for (index, row) in self.rows.iter().enumerate() {
            let cells: Vec<String> =
                row.iter().zip(&widths).map(|(cell, &width)| format!("{cell:<width$}")).collect();
            let _ = writeln!(text, "| {} |", cells.join(" | "));
            if index == 0 {
                let lines: Vec<String> = widths.iter().map(|&width| "-".repeat(width)).collect();
                let _ = writeln!(text, "|-{}-|", lines.join("-|-"));
            }
        }
        text
    }
}

/// Heads of the columns that [`figures`] fills.
pub(crate) const FIGURES: [&str; 11] = [
    "goodput/s",
    "in limits",
    "TTFT p50",
    "p95",
    "p99, ms",
    "TPOT p50",
    "p95",
    "p99, ms",
    "cached",
    "prefill used",
    "decode used",
];

/// The figures of a simulation.
pub(crate) fn figures(report: &Report) -> [String; 11] {
    let ms = |seconds: f64| {
        let ms = seconds * 1e3;
        if ms < 99.95 { format!("{ms:.1}") } else { format!("{ms:.0}") }
    };
    [
        format!("{:.2}", report.goodput),
        percent(report.attainment),
        ms(report.ttft.p50),
        ms(report.ttft.p95),
        ms(report.ttft.p99),
        ms(report.tpot.p50),
        ms(report.tpot.p95),
        ms(report.tpot.p99),
        percent(report.hit_rate),
        percent(report.prefill_used),
        percent(report.decode_used),
    ]
}

pub(crate) fn percent(part: f64) -> String {
    format!("{:.1} %", part * 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let mut table = Table::new(&["a", "long head"]);
        table.row(["wide cell".to_owned(), "1".to_owned()]);
        let expected = "\
| a         | long head |
|-----------|-----------|
| wide cell | 1         |
";
        assert_eq!(table.text(), expected);
    }
}
