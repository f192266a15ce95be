//! Metrics to reckon with: a process's own, and those that a worker reports to its routers for their dashboards.
//!
//! A figure is one series and its value, read from Prometheus's text format. So a dashboard shows what a scrape would,
//! and a metric that a service adds needs nothing else to be seen.

use std::collections::BTreeMap;
use std::time::Duration;

use proto::wire::figures_client::FiguresClient;
use proto::wire::figures_server::{self, FiguresServer};
use proto::wire::{FiguresPage, ReadFiguresRequest};
use tonic::{Request, Response, Status};

use crate::{Network, metrics};

/// Most figures of one worker that are read; it has some dozens.
const FIGURES_MAX: usize = 1000;

/// Series and their values at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Figures(Vec<Figure>);

#[derive(Clone, Debug, PartialEq)]
struct Figure {
    name: String,
    labels: Vec<(String, String)>,
    value: f64,
}

impl Figures {
    /// This process's figures now.
    ///
    /// # Errors
    /// Those of [`metrics::install`].
    pub fn own() -> Result<Self, crate::Error> {
        Ok(Self::parse(&metrics::render()?))
    }

    /// The figures of the worker at that address.
    ///
    /// # Errors
    /// The status of the call, which has that long.
    pub async fn of_worker(network: &Network, address: &str, limit: Duration) -> Result<Self, Status> {
        let mut client = crate::limits!(FiguresClient::new(network.connect(address)));
        let mut request = Request::new(ReadFiguresRequest {});
        request.set_timeout(limit);
        let page = client.read(request).await?.into_inner();
        Ok(Self(page.text.lines().filter_map(Figure::parse).take(FIGURES_MAX).collect()))
    }

    /// Reads the text format; what is no series is left out.
    pub fn parse(text: &str) -> Self {
        Self(text.lines().filter_map(Figure::parse).collect())
    }

    fn of<'a>(&'a self, name: &'a str, labels: &'a [(&str, &str)]) -> impl Iterator<Item = &'a Figure> {
        self.0.iter().filter(move |figure| {
            figure.name == name && labels.iter().all(|(label, value)| figure.label(label) == Some(*value))
        })
    }

    /// The sum of the series of that name with those labels; `None` when there is none.
    pub fn sum(&self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        self.of(name, labels).map(|figure| figure.value).reduce(|sum, value| sum + value)
    }

    /// The same by the values of one more label.
    pub fn by(&self, name: &str, labels: &[(&str, &str)], label: &str) -> BTreeMap<String, f64> {
        let mut sums = BTreeMap::new();
        for figure in self.of(name, labels) {
            if let Some(value) = figure.label(label) {
                *sums.entry(value.to_owned()).or_default() += figure.value;
            }
        }
        sums
    }

    /// A histogram: the upper bounds of its buckets, and how many values each has up to that. Series are added up.
    pub fn buckets(&self, name: &str, labels: &[(&str, &str)]) -> Buckets {
        let mut counts: Vec<(f64, f64)> = Vec::new();
        let name = format!("{name}_bucket");
        for figure in self.of(&name, labels) {
            let Some(bound) = figure.label("le").and_then(|bound| match bound {
                "+Inf" => Some(f64::INFINITY),
                bound => bound.parse().ok(),
            }) else {
                continue;
            };
            match counts.iter_mut().find(|(known, _)| *known == bound) {
                Some((_, count)) => *count += figure.value,
                None => counts.push((bound, figure.value)),
            }
        }
        counts.sort_by(|(one, _), (other, _)| one.total_cmp(other));
        Buckets(counts)
    }
}

impl Figure {
    /// A line such as `name{label="value"} 1.5`.
    fn parse(line: &str) -> Option<Self> {
        if line.starts_with('#') {
            return None;
        }
        let (series, value) = line.rsplit_once(' ')?;
        let value = value.parse().ok()?;
        let Some((name, labels)) = series.split_once('{') else {
            return Some(Self { name: series.to_owned(), labels: Vec::new(), value });
        };
        let mut rest = labels.strip_suffix('}')?;
        let mut labels = Vec::new();
        while let Some((label, quoted)) = rest.split_once("=\"") {
            let (value, after) = unquote(quoted)?;
            labels.push((label.trim_start_matches(',').to_owned(), value));
            rest = after;
        }
        Some(Self { name: name.to_owned(), labels, value })
    }

    fn label(&self, name: &str) -> Option<&str> {
        self.labels.iter().find(|(label, _)| label == name).map(|(_, value)| value.as_str())
    }
}

/// A label's value from after its opening quote, and what follows its closing one.
fn unquote(text: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut characters = text.char_indices();
    while let Some((index, character)) = characters.next() {
        match character {
            '"' => return Some((value, &text[index + 1..])),
            '\\' => match characters.next()?.1 {
                'n' => value.push('\n'),
                other => value.push(other),
            },
            other => value.push(other),
        }
    }
    None
}

/// A histogram at one moment: upper bounds, and how many values there were up to each since the process started.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Buckets(Vec<(f64, f64)>);

impl Buckets {
    /// What came since an earlier moment.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let before =
            |bound: f64| earlier.0.iter().find(|(known, _)| *known == bound).map_or(0.0, |found| found.1);
        Self(self.0.iter().map(|&(bound, count)| (bound, (count - before(bound)).max(0.0))).collect())
    }

    /// The value below which a share `q` of all lies, as Prometheus's `histogram_quantile` estimates it: evenly spread
    /// within each bucket, and at most the last finite bound. `None` without values.
    pub fn quantile(&self, q: f64) -> Option<f64> {
        let total = self.0.last().map(|(_, count)| *count).filter(|count| *count > 0.0)?;
        let rank = q * total;
        let (mut lower, mut below) = (0.0, 0.0);
        for &(bound, count) in &self.0 {
            if count >= rank && count > below {
                let share = (rank - below) / (count - below);
                return Some(if bound.is_finite() { lower + (bound - lower) * share } else { lower });
            }
            if bound.is_finite() {
                lower = bound;
            }
            below = count;
        }
        Some(lower)
    }
}

/// Serves the figures of a worker: those with the name that it has at the moment as the label `worker`.
pub fn service(
    worker: impl Fn() -> String + Send + Sync + 'static,
) -> FiguresServer<impl figures_server::Figures> {
    crate::limits!(FiguresServer::new(Own { worker }))
}

struct Own<F> {
    worker: F,
}

#[tonic::async_trait]
impl<F: Fn() -> String + Send + Sync + 'static> figures_server::Figures for Own<F> {
    async fn read(&self, _request: Request<ReadFiguresRequest>) -> Result<Response<FiguresPage>, Status> {
        let all = metrics::render().map_err(|error| Status::internal(error.to_string()))?;
        let label = format!("worker=\"{}\"", (self.worker)());
        let own = all.lines().filter(|line| line.contains(&label) && !line.contains("_bucket{"));
        let text = own.flat_map(|line| [line, "\n"]).collect();
        Ok(Response::new(FiguresPage { text }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "\
# HELP a_total Things.
a_total{cause=\"X\",worker=\"p\\\"1\\\\\"} 2
a_total{cause=\"Y\",worker=\"p\"} 3
plain 7.5
t_seconds_bucket{le=\"0.1\"} 10
t_seconds_bucket{le=\"0.2\"} 30
t_seconds_bucket{le=\"+Inf\"} 40
t_seconds_sum 3
broken
";

    #[test]
    fn series_are_found_by_name_and_label() {
        let figures = Figures::parse(PAGE);
        assert_eq!(figures.sum("a_total", &[]), Some(5.0));
        assert_eq!(figures.sum("a_total", &[("worker", "p\"1\\")]), Some(2.0));
        assert_eq!(figures.sum("plain", &[]), Some(7.5));
        assert_eq!(figures.sum("a", &[]), None);
        assert_eq!(figures.by("a_total", &[], "cause"), [("X".into(), 2.0), ("Y".into(), 3.0)].into());
    }

    #[test]
    fn quantiles_are_those_of_the_values_since() {
        let now = Figures::parse(PAGE).buckets("t_seconds", &[]);
        let near = |value: Option<f64>, expected: f64| {
            assert!(value.is_some_and(|value| (value - expected).abs() < 1e-9), "{value:?}, not {expected}");
        };
        near(now.quantile(0.25), 0.1);
        near(now.quantile(0.5), 0.15);
        near(now.quantile(0.99), 0.2);
        assert_eq!(now.since(&now).quantile(0.5), None);
        assert_eq!(Buckets::default().quantile(0.5), None);
        let before = Buckets(vec![(0.1, 10.0), (0.2, 10.0), (f64::INFINITY, 10.0)]);
        near(now.since(&before).quantile(0.5), 0.175);
    }
}
