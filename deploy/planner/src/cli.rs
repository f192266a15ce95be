//! The command line of the simulator, for `baton sim` and `cargo xtask sim`.

mod tables;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use proto::Error;
use router::PlacementMode;

use crate::grid::{self, Trial};
use crate::machine::{Machine, MachineFile, fit, read_measurements};
use crate::plan::{self, PlanFile};
use crate::report::{Report, Slo};
use crate::sim::{Cluster, Routing};
use crate::table::{FIGURES, Table, figures, percent};
use crate::workload::{Arrival, NAMES, Workload, demand_seconds, preset, read_trace};

/// The commands that serve nothing.
#[derive(Subcommand, Clone, Debug)]
pub enum Planning {
    /// Simulate a cluster: placements and pools side by side
    Sim(Box<SimArgs>),
    /// Recommend pools for a workload and its limits
    Plan(PlanArgs),
    /// Fit a worker's prices to measured steps of a real engine
    Calibrate(CalibrateArgs),
}

impl Planning {
    /// What is to be printed.
    ///
    /// # Errors
    /// INVALID_ARGUMENT that names the option or the field.
    pub fn run(&self) -> Result<String, Error> {
        match self {
            Self::Sim(args) => args.run(),
            Self::Plan(args) => args.run(),
            Self::Calibrate(args) => args.run(),
        }
    }
}

/// Arguments of `baton sim`.
#[derive(Args, Clone, Debug)]
pub struct SimArgs {
    /// Name of a workload (chat, code, summaries, long-prompts, sessions, bursts), or a TOML file with one
    #[arg(long, default_value = "chat", value_name = "NAME|FILE")]
    workload: String,
    /// Requests from a file of JSON lines in the format of Mooncake's traces instead
    #[arg(long, value_name = "FILE", conflicts_with_all = ["workload", "rate", "load"])]
    trace: Option<PathBuf>,
    /// Requests per second in all; when absent what --load says
    #[arg(long)]
    rate: Option<f64>,
    /// Without a rate: the part of all workers' time that the requests would take if nothing were cached [default: 0.7]
    #[arg(long, conflicts_with = "rate")]
    load: Option<f64>,
    /// How long requests come, seconds; the first tenth does not count. When absent what the workload says
    #[arg(long)]
    seconds: Option<f64>,
    /// Kind of worker: cpu-smollm2 or gpu-8b [default: gpu-8b]
    #[arg(long)]
    preset: Option<String>,
    /// A TOML file with a preset, prices and sizes of a worker
    #[arg(long, value_name = "FILE", conflicts_with = "preset")]
    machine: Option<PathBuf>,
    /// Workers in all
    #[arg(long, default_value_t = 16)]
    workers: usize,
    /// Prefill to decode workers, side by side
    #[arg(long, default_value = "1:3,1:1,3:1", value_delimiter = ',')]
    ratios: Vec<String>,
    /// Placements, side by side: auto, split, fused
    #[arg(long, default_value = "split,fused,auto", value_delimiter = ',')]
    placements: Vec<String>,
    /// Policies, side by side: round-robin, least-loaded, power-of-two, prefix, session
    #[arg(long, default_value = "round-robin", value_delimiter = ',')]
    policies: Vec<String>,
    /// Routers, each with its own view of the workers
    #[arg(long, default_value_t = 2)]
    routers: usize,
    /// Longest time to the first token, milliseconds; when absent one that suits the workload
    #[arg(long)]
    ttft_ms: Option<f64>,
    /// Longest time per output token after the first, milliseconds; when absent one that suits the workload
    #[arg(long)]
    tpot_ms: Option<f64>,
    /// Seed of all that is left to chance
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// One of the tables of docs/benchmarks.md instead: placement, plan, policies, scale
    #[arg(long, value_name = "NAME")]
    table: Option<String>,
}

/// Arguments of `baton plan`.
#[derive(Args, Clone, Debug)]
pub struct PlanArgs {
    /// A TOML file with workload, limits, workers and their prices: see docs/planning.md
    #[arg(value_name = "FILE")]
    workload: PathBuf,
}

impl PlanArgs {
    /// Searches, and says what was found.
    ///
    /// # Errors
    /// INVALID_ARGUMENT that names the field.
    pub fn run(&self) -> Result<String, Error> {
        let task = parse::<PlanFile>(&self.workload, &read("workload", &self.workload)?)?.task()?;
        Ok(plan::plan(&task)?.text(&task))
    }
}

/// Arguments of `baton calibrate`.
#[derive(Args, Clone, Debug)]
pub struct CalibrateArgs {
    /// Steps of a real engine, a JSON object a line: prefill_tokens, prefill_context, decodes, decode_context, seconds
    #[arg(value_name = "FILE")]
    measurements: PathBuf,
    /// Where what cannot be measured so, link, hop and sizes, is taken from
    #[arg(long, default_value = "cpu-smollm2")]
    preset: String,
}

/// Reads a file that an option names.
pub(crate) fn read(option: &str, path: &Path) -> Result<String, Error> {
    std::fs::read_to_string(path)
        .map_err(|fault| Error::invalid(option, format_args!("{}: {fault}", path.display())))
}

/// Reads TOML; a fault names the file, the line and the field.
pub(crate) fn parse<T: serde::de::DeserializeOwned>(path: &Path, text: &str) -> Result<T, Error> {
    toml::from_str(text)
        .map_err(|fault| Error::invalid(&path.display().to_string(), fault.to_string().trim_end()))
}

/// A ratio as it is written.
fn ratio(text: &str) -> Result<(usize, usize), Error> {
    let parts = text
        .split_once(':')
        .and_then(|(prefill, decode)| Some((prefill.parse().ok()?, decode.parse().ok()?)));
    match parts {
        Some((prefill, decode)) if decode > 0 => Ok((prefill, decode)),
        _ => Err(Error::invalid(
            "ratios",
            format_args!("PREFILL:DECODE expected, decode at least 1, {text} came"),
        )),
    }
}

/// Workers of each role by a ratio, at least one of each that the ratio has.
pub(crate) fn pools(workers: usize, (prefill, decode): (usize, usize)) -> (usize, usize) {
    let exact = workers as f64 * prefill as f64 / (prefill + decode) as f64;
    let prefill = if prefill == 0 { 0 } else { (exact.round() as usize).clamp(1, workers - 1) };
    (prefill, workers - prefill)
}

impl SimArgs {
    fn machine(&self) -> Result<Machine, Error> {
        match (&self.machine, &self.preset) {
            (Some(path), _) => parse::<MachineFile>(path, &read("machine", path)?)?.machine(),
            (None, Some(name)) => Machine::preset(name),
            (None, None) => MachineFile::default().machine(),
        }
    }

    fn workload(&self) -> Result<Workload, Error> {
        let path = Path::new(&self.workload);
        if NAMES.contains(&self.workload.as_str()) || path.extension().is_none_or(|kind| kind != "toml") {
            return preset(&self.workload);
        }
        parse(path, &read("workload", path)?)
    }

    /// The requests, and what they are in words.
    fn requests(&self, machine: &Machine) -> Result<(Vec<Arrival>, String), Error> {
        let context_len = machine.sizes.context_len;
        if let Some(path) = &self.trace {
            let mut requests = read_trace(&read("trace", path)?, context_len)?;
            if let Some(seconds) = self.seconds {
                requests.retain(|request| request.at < seconds);
            }
            return Ok((requests, path.display().to_string()));
        }
        let mut workload = self.workload()?;
        workload.seconds = self.seconds.unwrap_or(workload.seconds);
        let is_named = NAMES.contains(&self.workload.as_str());
        match (self.rate, self.load) {
            (Some(rate), _) => workload.rate = rate,
            (None, None) if !is_named => {}
            (None, load) => {
                let load = load.unwrap_or(0.7);
                if !load.is_finite() || load <= 0.0 {
                    return Err(Error::invalid("load", format_args!("more than 0 expected, {load} came")));
                }
                workload.validate("workload.")?;
                workload = with_load(workload, machine, self.workers, load, self.seed);
            }
        }
        workload.validate("workload.")?;
        Ok((workload.requests(self.seed, context_len), self.workload.clone()))
    }

    /// Simulates every placement with every ratio; the table, and how long it took.
    ///
    /// # Errors
    /// INVALID_ARGUMENT that names the option.
    pub fn run(&self) -> Result<String, Error> {
        if self.workers < 2 {
            return Err(Error::invalid(
                "workers",
                format_args!("at least 2 expected, {} came", self.workers),
            ));
        }
        let machine = self.machine()?;
        if let Some(table) = &self.table {
            return tables::table(table, machine, self.seed);
        }
        let (requests, name) = self.requests(&machine)?;
        let suited = Slo::of(&machine, &requests);
        let slo = Slo {
            ttft_seconds: self.ttft_ms.map_or(suited.ttft_seconds, |ms| ms / 1e3),
            tpot_seconds: self.tpot_ms.map_or(suited.tpot_seconds, |ms| ms / 1e3),
        };
        slo.validate("")?;
        let mut trials = Vec::new();
        for ratio_text in &self.ratios {
            let (prefill, decode) = pools(self.workers, ratio(ratio_text)?);
            for placement in &self.placements {
                let placement: PlacementMode = placement.parse()?;
                for policy in &self.policies {
                    let routing = Routing { placement, policy: policy.parse()? };
                    let cluster = Cluster::new(machine, prefill, decode, routing);
                    let cluster = Cluster { routers: self.routers, ..cluster };
                    trials.push(Trial { cluster, requests: &requests, slo, seed: self.seed });
                }
            }
        }
        let (reports, took) = grid::run(&trials)?;
        let mut text = format!(
            "{name}: {} requests in {:.0} s, {:.0} tokens in and {:.0} out on average; limits: TTFT {:.0} ms, TPOT {:.0} ms\n\n",
            requests.len(),
            requests.last().map_or(0.0, |last| last.at),
            mean(requests.iter().map(|request| request.prompt)),
            mean(requests.iter().map(|request| request.output)),
            slo.ttft_seconds * 1e3,
            slo.tpot_seconds * 1e3,
        );
        let mut heads = vec!["prefill + decode", "placement", "policy"];
        heads.extend(FIGURES);
        heads.extend(["split", "switches"]);
        let mut table = Table::new(&heads);
        for (trial, report) in trials.iter().zip(&reports) {
            let Cluster { prefill, decode, routing, .. } = &trial.cluster;
            let Routing { placement, policy } = routing;
            let cells = [format!("{prefill} + {decode}"), placement.to_string(), policy.to_string()];
            let last = [percent(report.split), format!("{:.2}", report.switches_per_worker_minute)];
            table.row(cells.into_iter().chain(figures(report)).chain(last));
        }
        text.push_str(&table.text());
        text.push_str(&pace(&reports, took));
        Ok(text)
    }
}

/// How fast the simulations ran.
pub(crate) fn pace(reports: &[Report], took: std::time::Duration) -> String {
    let events: u64 = reports.iter().map(|report| report.events).sum();
    let tokens: u64 = reports.iter().map(|report| report.tokens).sum();
    let seconds = took.as_secs_f64().max(1e-9);
    format!(
        "\n{} simulations, {events} events and {tokens} tokens in {seconds:.1} s: {:.0} events/s, {:.0} tokens/s\n",
        reports.len(),
        events as f64 / seconds,
        tokens as f64 / seconds
    )
}

/// The workload at the rate that takes that part of the workers' time.
pub(crate) fn with_load(
    workload: Workload,
    machine: &Machine,
    workers: usize,
    load: f64,
    seed: u64,
) -> Workload {
    let sample = Workload { rate: 1000.0 / workload.seconds, ..workload.clone() };
    let demand = demand_seconds(&sample.requests(seed, machine.sizes.context_len), machine);
    Workload { rate: load * workers as f64 / demand.max(1e-9), ..workload }
}

pub(crate) fn mean(values: impl ExactSizeIterator<Item = usize>) -> f64 {
    let count = values.len().max(1);
    values.sum::<usize>() as f64 / count as f64
}

impl CalibrateArgs {
    /// Fits prices to measured steps: a file for `--machine`.
    ///
    /// # Errors
    /// INVALID_ARGUMENT that names the option or the line.
    pub fn run(&self) -> Result<String, Error> {
        let machine = Machine::preset(&self.preset)?;
        let steps = read_measurements(&read("measurements", &self.measurements)?)?;
        let fitted = fit(&steps, machine.prices)?;
        let mut text = String::new();
        let (median, worst) = (percent(fitted.error_median), percent(fitted.error_max));
        let _ = writeln!(text, "# {} steps; off by {median} in the median, {worst} at most", steps.len());
        let file = toml::to_string(&Machine { prices: fitted.prices, ..machine });
        text.push_str(&file.map_err(|fault| Error::new(proto::Reason::Internal, fault.to_string()))?);
        Ok(text)
    }
}
