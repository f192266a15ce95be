//! From a workload and its limits to the pools that serve it: a search by simulation.
//!
//! The search for the *fewest* workers bisects each pool with the other as large as it may be, since more workers of a
//! kind never make the other kind's work harder; then it walks from there, for the two pools do meet in the KV that goes
//! from one to the other. The search for the *most goodput* of a number of workers climbs over the share of prefill in
//! steps that halve. Both try every placement and policy, and no cluster twice.

mod file;

use proto::Error;
use router::PlacementMode;
use router::policy::Policy;

use crate::grid::{self, Trial};
use crate::machine::Machine;
use crate::report::{Report, Slo};
use crate::sim::{Cluster, Routing};
use crate::table::{FIGURES, Table, figures, percent};
use crate::workload::{Arrival, Workload, demand_seconds};

pub use file::{Goal, PlanFile, SloFile, WorkersFile};

/// What is planned for.
#[derive(Clone, Debug, PartialEq)]
pub struct Task {
    /// What users ask for.
    pub workload: Workload,
    /// What each worker is.
    pub machine: Machine,
    /// What makes a request a good one.
    pub slo: Slo,
    /// The part of the requests that must be good.
    pub attainment: f64,
    /// Most workers.
    pub workers_max: usize,
    /// What is best.
    pub goal: Goal,
    /// Decides all that is left to chance.
    pub seed: u64,
}

/// Pools and how requests are placed on them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// Prefill workers.
    pub prefill: usize,
    /// Decode workers.
    pub decode: usize,
    /// How requests are placed.
    pub routing: Routing,
}

impl Choice {
    /// Workers in all.
    pub fn workers(&self) -> usize {
        self.prefill + self.decode
    }

    /// Orders what is equally good.
    fn rank(&self) -> (usize, usize, String, Policy) {
        (self.prefill, self.decode, self.routing.placement.to_string(), self.routing.policy)
    }
}

/// A choice and what it is predicted to do.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prediction {
    /// The choice.
    pub choice: Choice,
    /// What came of it.
    pub report: Report,
}

/// What the search found.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// The best choice.
    pub best: Prediction,
    /// True when it keeps the limits for as many requests as it must.
    pub is_enough: bool,
    /// How many times the rate it takes before it does not; at least 1, or 0 when it is not enough as it is.
    pub margin: f64,
    /// Everything that was tried, the best first.
    pub tried: Vec<Prediction>,
    /// Simulations that it took.
    pub simulations: usize,
}

/// Rates are tried up to this many times the workload's.
const MARGIN_MAX: f64 = 4.0;
/// Bisections of the margin: to within 5 %.
const MARGIN_STEPS: usize = 6;
/// Two goodputs this close, as a part of what comes, are equal: the rest is the luck of the seed.
const CLOSE: f64 = 0.005;

/// Finds the pools for the task.
///
/// # Errors
/// INVALID_ARGUMENT that names the field.
pub fn plan(task: &Task) -> Result<Plan, Error> {
    task.validate()?;
    let mut search = Search::new(task);
    match task.goal {
        Goal::Fewest => search.fewest()?,
        Goal::Goodput => search.most_goodput(task.workers_max)?,
    }
    search.other_policies()?;
    let tried = search.ranked();
    let Some(&best) = tried.first() else {
        return Err(Error::invalid("workers.max", "room for a cluster expected"));
    };
    let is_enough = task.is_enough(&best.report);
    let margin = if is_enough { search.margin(&best.choice)? } else { 0.0 };
    Ok(Plan { best, is_enough, margin, simulations: search.simulations, tried })
}

/// Tries every cluster of that many workers, the best first.
///
/// # Errors
/// INVALID_ARGUMENT that names the field.
pub fn sweep(task: &Task, workers: usize) -> Result<Vec<Prediction>, Error> {
    task.validate()?;
    let mut search = Search::new(task);
    let split = (1..workers).flat_map(|prefill| {
        split_routings().map(move |routing| Choice { prefill, decode: workers - prefill, routing })
    });
    let fused = fused_routings().map(|routing| Choice { prefill: 0, decode: workers, routing });
    search.try_all(&split.chain(fused).collect::<Vec<_>>())?;
    Ok(search.ranked())
}

/// Policies that are tried with all pools; the others with the best of them only.
const POLICIES: [Policy; 2] = [Policy::RoundRobin, Policy::Prefix];

/// Ways to place where there are prefill workers.
fn split_routings() -> impl Iterator<Item = Routing> {
    let placements = [PlacementMode::Split, PlacementMode::Auto].into_iter();
    placements.flat_map(|placement| POLICIES.map(|policy| Routing { placement, policy }))
}

/// Ways to place where there are none.
fn fused_routings() -> impl Iterator<Item = Routing> {
    POLICIES.into_iter().map(|policy| Routing { placement: PlacementMode::Fused, policy })
}

impl Task {
    fn validate(&self) -> Result<(), Error> {
        self.workload.validate("workload.")?;
        self.machine.validate()?;
        self.slo.validate("slo.")?;
        if self.workers_max == 0 {
            return Err(Error::invalid("workers.max", "at least 1 expected, 0 came"));
        }
        Ok(())
    }

    fn is_enough(&self, report: &Report) -> bool {
        report.requests > 0 && report.attainment >= self.attainment
    }

    /// How near the limits the report is at the percentile that matters: 1 is at them.
    fn strain(&self, report: &Report) -> f64 {
        (report.ttft.p95 / self.slo.ttft_seconds).max(report.tpot.p95 / self.slo.tpot_seconds)
    }
}

struct Search<'a> {
    task: &'a Task,
    requests: Vec<Arrival>,
    /// In the order in which it was tried.
    known: Vec<Prediction>,
    simulations: usize,
}

impl<'a> Search<'a> {
    fn new(task: &'a Task) -> Self {
        let requests = task.workload.requests(task.seed, task.machine.sizes.context_len);
        Self { task, requests, known: Vec::new(), simulations: 0 }
    }

    fn cluster(&self, choice: &Choice) -> Cluster {
        Cluster::new(self.task.machine, choice.prefill, choice.decode, choice.routing)
    }

    /// Simulates the choices that are new.
    fn try_all(&mut self, choices: &[Choice]) -> Result<(), Error> {
        let mut new: Vec<Choice> = Vec::new();
        for choice in choices {
            if !new.contains(choice) && self.known.iter().all(|known| known.choice != *choice) {
                new.push(*choice);
            }
        }
        let trials: Vec<Trial<'_>> = new
            .iter()
            .map(|choice| Trial {
                cluster: self.cluster(choice),
                requests: &self.requests,
                slo: self.task.slo,
                seed: self.task.seed,
            })
            .collect();
        let (reports, _) = grid::run(&trials)?;
        self.simulations += new.len();
        let new = new.into_iter().zip(reports);
        self.known.extend(new.map(|(choice, report)| Prediction { choice, report }));
        Ok(())
    }

    /// The reports of the choices, in their order.
    fn reports(&mut self, choices: &[Choice]) -> Result<Vec<Report>, Error> {
        self.try_all(choices)?;
        let known = |choice: &Choice| {
            self.known.iter().find(|known| known.choice == *choice).map(|known| known.report)
        };
        Ok(choices.iter().filter_map(known).collect())
    }

    fn is_enough(&mut self, choice: Choice) -> Result<bool, Error> {
        let task = self.task;
        Ok(self.reports(&[choice])?.iter().all(|report| task.is_enough(report)))
    }

    /// Everything that was tried, the best first.
    fn ranked(&self) -> Vec<Prediction> {
        let mut tried = self.known.clone();
        tried.sort_by(|a, b| self.order(a, b).then_with(|| a.choice.rank().cmp(&b.choice.rank())));
        tried
    }

    /// The better one first.
    fn order(&self, a: &Prediction, b: &Prediction) -> std::cmp::Ordering {
        let task = self.task;
        let unit = (a.report.offered * CLOSE).max(1e-9);
        let goodput = |one: &Prediction| (one.report.goodput / unit).round();
        let fewest = match task.goal {
            Goal::Fewest => {
                let (a_enough, b_enough) = (task.is_enough(&a.report), task.is_enough(&b.report));
                let workers = if a_enough && b_enough {
                    a.choice.workers().cmp(&b.choice.workers())
                } else {
                    std::cmp::Ordering::Equal
                };
                b_enough.cmp(&a_enough).then(workers)
            }
            Goal::Goodput => std::cmp::Ordering::Equal,
        };
        fewest
            .then(goodput(b).total_cmp(&goodput(a)))
            .then(task.strain(&a.report).total_cmp(&task.strain(&b.report)))
    }

    /// Tries every policy with the best of the choices.
    fn other_policies(&mut self) -> Result<(), Error> {
        let Some(Prediction { choice, .. }) = self.ranked().first().copied() else { return Ok(()) };
        let others =
            Policy::ALL.map(|policy| Choice { routing: Routing { policy, ..choice.routing }, ..choice });
        self.try_all(&others)
    }

    /// Climbs over the share of prefill among that many workers.
    fn most_goodput(&mut self, workers: usize) -> Result<(), Error> {
        let fused: Vec<Choice> =
            fused_routings().map(|routing| Choice { prefill: 0, decode: workers, routing }).collect();
        self.try_all(&fused)?;
        if workers < 2 {
            return Ok(());
        }
        for routing in split_routings() {
            let at = |prefill: usize| Choice { prefill, decode: workers - prefill, routing };
            let mut best = self.first_guess(workers);
            let mut step = (workers / 4).max(1);
            loop {
                let lower = best.saturating_sub(step).max(1);
                let higher = (best + step).min(workers - 1);
                let around = [at(lower), at(best), at(higher)];
                let reports = self.reports(&around)?.into_iter();
                let mut predictions: Vec<Prediction> = around
                    .into_iter()
                    .zip(reports)
                    .map(|(choice, report)| Prediction { choice, report })
                    .collect();
                predictions.sort_by(|a, b| self.order(a, b));
                let next = predictions[0].choice.prefill;
                if next == best && step == 1 {
                    break;
                }
                if next == best {
                    step /= 2;
                }
                best = next;
            }
        }
        Ok(())
    }

    /// Prefill workers among so many, by the time that each kind of work takes.
    fn first_guess(&self, workers: usize) -> usize {
        let sizes = self.task.machine.sizes;
        let all = demand_seconds(&self.requests, &self.task.machine);
        let prefill = self
            .requests
            .iter()
            .map(|request| self.task.machine.prices.prefill(request.prompt, sizes.step_tokens));
        let prefill = prefill.sum::<f64>() / self.requests.len().max(1) as f64;
        ((workers as f64 * prefill / all.max(1e-12)).round() as usize).clamp(1, workers - 1)
    }

    /// Bisects each pool, and walks from there.
    fn fewest(&mut self) -> Result<(), Error> {
        let most = self.task.workers_max;
        for routing in fused_routings() {
            self.least(1, most, |decode| Choice { prefill: 0, decode, routing })?;
        }
        if most < 2 {
            return Ok(());
        }
        for routing in split_routings() {
            let ample = most - 1;
            let prefill = self.least(1, ample, |prefill| Choice { prefill, decode: ample, routing })?;
            let decode = self.least(1, ample, |decode| Choice { prefill: ample, decode, routing })?;
            self.walk(Choice {
                prefill: prefill.unwrap_or(ample),
                decode: decode.unwrap_or(ample),
                routing,
            })?;
        }
        // What is more than there may be only showed the way.
        self.known.retain(|known| known.choice.workers() <= most);
        if !self.known.iter().any(|known| self.task.is_enough(&known.report)) {
            self.most_goodput(most)?;
        }
        Ok(())
    }

    /// The least size for which `choice` is enough, if the largest is.
    fn least(
        &mut self,
        low: usize,
        high: usize,
        choice: impl Fn(usize) -> Choice,
    ) -> Result<Option<usize>, Error> {
        if !self.is_enough(choice(high))? {
            return Ok(None);
        }
        let (mut low, mut high) = (low, high);
        while low < high {
            let middle = usize::midpoint(low, high);
            if self.is_enough(choice(middle))? {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        Ok(Some(high))
    }

    /// Adds workers until it is enough, the kind that helps more first; then takes away what is not needed.
    fn walk(&mut self, from: Choice) -> Result<(), Error> {
        let (task, most) = (self.task, self.task.workers_max);
        let mut at = from;
        while at.workers() <= most && !self.is_enough(at)? {
            let more = [Choice { prefill: at.prefill + 1, ..at }, Choice { decode: at.decode + 1, ..at }];
            let reports = self.reports(&more)?;
            at = if reports[0].attainment > reports[1].attainment { more[0] } else { more[1] };
        }
        loop {
            let fewer = [
                Choice { prefill: at.prefill - 1, ..at },
                Choice { decode: at.decode - 1, ..at },
                // One kind may stand in for two of the other.
                Choice { prefill: at.prefill + 1, decode: at.decode.saturating_sub(2), ..at },
                Choice { prefill: at.prefill.saturating_sub(2), decode: at.decode + 1, ..at },
            ];
            let fewer = fewer.into_iter().filter(|choice| choice.prefill > 0 && choice.decode > 0);
            let fewer: Vec<Choice> = fewer.filter(|choice| choice.workers() < most).collect();
            let reports = self.reports(&fewer)?;
            match fewer.into_iter().zip(reports).find(|(_, report)| task.is_enough(report)) {
                Some((choice, _)) => at = choice,
                None => return Ok(()),
            }
        }
    }

    /// How many times the rate the choice takes.
    fn margin(&mut self, choice: &Choice) -> Result<f64, Error> {
        let (mut low, mut high) = (1.0, MARGIN_MAX);
        for _ in 0..MARGIN_STEPS {
            let middle = f64::midpoint(low, high);
            let workload = self.task.workload.faster(middle);
            let requests = workload.requests(self.task.seed, self.task.machine.sizes.context_len);
            let trial = Trial {
                cluster: self.cluster(choice),
                requests: &requests,
                slo: self.task.slo,
                seed: self.task.seed,
            };
            let (reports, _) = grid::run(&[trial])?;
            self.simulations += 1;
            if reports.iter().all(|report| self.task.is_enough(report)) {
                low = middle;
            } else {
                high = middle;
            }
        }
        Ok(low)
    }
}

/// Alternatives that are shown.
const SHOWN: usize = 6;

impl Plan {
    /// The plan in words.
    pub fn text(&self, task: &Task) -> String {
        let Prediction { choice, report } = &self.best;
        let ms = |seconds: f64| format!("{:.0}", seconds * 1e3);
        let wanted = percent(task.attainment);
        let verdict = if self.is_enough {
            let least = if self.margin >= MARGIN_MAX * 0.98 { "at least " } else { "" };
            format!(
                "margin:      {wanted} stay within the limits up to {least}{:.2} times the rate",
                self.margin
            )
        } else {
            format!("not enough:  {wanted} within the limits expected; with these workers fewer requests are")
        };
        let mut heads = vec!["prefill + decode", "placement", "policy"];
        heads.extend(FIGURES);
        let mut table = Table::new(&heads);
        for Prediction { choice, report } in self.tried.iter().take(SHOWN) {
            let Routing { placement, policy } = choice.routing;
            let pools = format!("{} + {}", choice.prefill, choice.decode);
            let cells = [pools, placement.to_string(), policy.to_string()];
            table.row(cells.into_iter().chain(figures(report)));
        }
        format!(
            "recommended: {} prefill and {} decode workers, --placement {} --policy {}\n\
             predicted:   {:.2} of {:.2} requests/s within the limits of TTFT {} ms and TPOT {} ms: {}\n\
             latencies:   TTFT {}/{}/{} ms and TPOT {:.1}/{:.1}/{:.1} ms at the 50th/95th/99th percentile\n\
             {verdict}\n\n\
             The best of {} tried, in {} simulations:\n\n{}",
            choice.prefill,
            choice.decode,
            choice.routing.placement,
            choice.routing.policy,
            report.goodput,
            report.offered,
            ms(task.slo.ttft_seconds),
            ms(task.slo.tpot_seconds),
            percent(report.attainment),
            ms(report.ttft.p50),
            ms(report.ttft.p95),
            ms(report.ttft.p99),
            report.tpot.p50 * 1e3,
            report.tpot.p95 * 1e3,
            report.tpot.p99 * 1e3,
            self.tried.len(),
            self.simulations,
            table.text()
        )
    }
}
