//! Reads Prometheus text.

/// One scrape.
#[derive(Clone, Debug, Default)]
pub struct Metrics(Vec<(String, f64)>);

impl Metrics {
    /// Parses the text format; comments are dropped.
    pub fn parse(text: &str) -> Self {
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        Self(
            lines
                .filter_map(|line| {
                    let (series, value) = line.rsplit_once(' ')?;
                    Some((series.to_owned(), value.parse().ok()?))
                })
                .collect(),
        )
    }

    /// Sum of every series of that name whose labels contain all of `labels` (each `key="value"`).
    pub fn sum(&self, name: &str, labels: &[&str]) -> f64 {
        self.series(name, labels).map(|(_, value)| value).sum()
    }

    /// True when there is a series of that name with those labels.
    pub fn has(&self, name: &str, labels: &[&str]) -> bool {
        self.series(name, labels).next().is_some()
    }

    fn series<'a>(&'a self, name: &'a str, labels: &'a [&'a str]) -> impl Iterator<Item = (&'a str, f64)> {
        self.0.iter().filter_map(move |(series, value)| {
            let (found, rest) = series.split_once('{').unwrap_or((series, ""));
            let matches = found == name && labels.iter().all(|label| rest.contains(label));
            matches.then_some((series.as_str(), *value))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_by_label() {
        let text = "# TYPE a gauge\na{state=\"held\",worker=\"p\"} 2\na{state=\"free\"} 5\nab 1\n";
        let metrics = Metrics::parse(text);
        assert_eq!(metrics.sum("a", &["state=\"held\""]), 2.0);
        assert_eq!(metrics.sum("a", &[]), 7.0);
        assert!(!metrics.has("a", &["state=\"used\""]));
    }
}
