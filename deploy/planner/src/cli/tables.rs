//! The tables of `docs/benchmarks.md`.

use std::fmt::Write as _;

use proto::Error;
use router::PlacementMode;
use router::policy::Policy;

use super::{pace, pools, with_load};
use crate::grid::{self, Trial};
use crate::machine::Machine;
use crate::plan::{self, Goal, Task};
use crate::report::{Report, Slo};
use crate::sim::{Cluster, Routing};
use crate::table::{FIGURES, Table, figures, percent};
use crate::workload::{NAMES, Workload, preset};

/// The table of that name.
pub(super) fn table(name: &str, machine: Machine, seed: u64) -> Result<String, Error> {
    match name {
        "placement" => placement(machine, seed),
        "policies" => policies(machine, seed),
        "plan" => plan_against_sweep(machine, seed),
        "scale" => scale(machine, seed),
        _ => Err(Error::invalid(
            "table",
            format_args!("placement, plan, policies or scale expected, {name} came"),
        )),
    }
}

/// Every workload, placed in each way on the same workers.
fn placement(machine: Machine, seed: u64) -> Result<String, Error> {
    const WORKERS: usize = 16;
    let placements = [PlacementMode::Split, PlacementMode::Fused, PlacementMode::Auto];
    let mut heads = vec!["workload", "placement"];
    heads.extend(FIGURES);
    heads.extend(["split", "switches"]);
    let mut table = Table::new(&heads);
    let mut text = String::new();
    for name in NAMES {
        let workload = with_load(preset(name)?, &machine, WORKERS, 0.5, seed);
        let requests = workload.requests(seed, machine.sizes.context_len);
        let slo = Slo::of(&machine, &requests);
        let (prefill, decode) = pools(WORKERS, (1, 1));
        let trials = placements.map(|placement| Trial {
            cluster: Cluster::new(
                machine,
                prefill,
                decode,
                Routing { placement, policy: Policy::LeastLoaded },
            ),
            requests: &requests,
            slo,
            seed,
        });
        let (reports, _) = grid::run(&trials)?;
        for (placement, report) in placements.iter().zip(&reports) {
            let last = [percent(report.split), format!("{:.2}", report.switches_per_worker_minute)];
            let cells = [name.to_owned(), placement.to_string()];
            table.row(cells.into_iter().chain(figures(report)).chain(last));
        }
        let (ttft, tpot) = (slo.ttft_seconds * 1e3, slo.tpot_seconds * 1e3);
        let _ =
            writeln!(text, "{name}: {:.2} requests/s, TTFT {ttft:.0} ms, TPOT {tpot:.0} ms", workload.rate);
    }
    let _ = write!(text, "\n{}", table.text());
    Ok(text)
}

/// The planner's choice beside the best of all clusters of as many workers.
fn plan_against_sweep(machine: Machine, seed: u64) -> Result<String, Error> {
    const WORKERS: usize = 12;
    let mut table = Table::new(&[
        "workload",
        "who",
        "prefill + decode",
        "placement",
        "policy",
        "goodput/s",
        "in limits",
        "simulations",
    ]);
    for name in ["chat", "summaries", "sessions"] {
        let task = plan_task(machine, name, WORKERS, 1.0, seed)?;
        let found = plan::plan(&Task { goal: Goal::Goodput, ..task.clone() })?;
        let all = plan::sweep(&task, WORKERS)?;
        let best = all.iter().max_by(|a, b| a.report.goodput.total_cmp(&b.report.goodput));
        let choices = [("planner", Some(&found.best), found.simulations), ("best of all", best, all.len())];
        for (who, prediction, simulations) in choices {
            let Some(prediction) = prediction else { continue };
            let choice = prediction.choice;
            let Report { goodput, attainment, .. } = prediction.report;
            table.row([
                name.to_owned(),
                who.to_owned(),
                format!("{} + {}", choice.prefill, choice.decode),
                choice.routing.placement.to_string(),
                choice.routing.policy.to_string(),
                format!("{goodput:.2}"),
                percent(attainment),
                simulations.to_string(),
            ]);
        }
    }
    Ok(table.text())
}

/// A task of that workload that takes the given part of the workers' time.
pub(super) fn plan_task(
    machine: Machine,
    name: &str,
    workers: usize,
    load: f64,
    seed: u64,
) -> Result<Task, Error> {
    let workload = Workload { seconds: 60.0, ..preset(name)? };
    let workload = with_load(workload, &machine, workers, load, seed);
    let slo = Slo::of(&machine, &workload.requests(seed, machine.sizes.context_len));
    Ok(Task { workload, machine, slo, attainment: 0.95, workers_max: workers, goal: Goal::Goodput, seed })
}

/// Every policy on 256 workers, for sessions that share system prompts.
fn policies(machine: Machine, seed: u64) -> Result<String, Error> {
    const WORKERS: usize = 256;
    let workload = Workload { seconds: 60.0, ..preset("sessions")? };
    let workload = with_load(workload, &machine, WORKERS, 0.5, seed);
    let requests = workload.requests(seed, machine.sizes.context_len);
    let slo = Slo::of(&machine, &requests);
    let (prefill, decode) = pools(WORKERS, (1, 1));
    let trials = Policy::ALL.map(|policy| {
        let routing = Routing { placement: PlacementMode::Split, policy };
        Trial { cluster: Cluster::new(machine, prefill, decode, routing), requests: &requests, slo, seed }
    });
    let (reports, took) = grid::run(&trials)?;
    let mut heads = vec!["policy", "TTFT mean"];
    heads.extend(FIGURES);
    let mut table = Table::new(&heads);
    for (policy, report) in Policy::ALL.iter().zip(&reports) {
        let cells = [policy.to_string(), format!("{:.0}", report.ttft.mean * 1e3)];
        table.row(cells.into_iter().chain(figures(report)));
    }
    Ok(format!("{}{}", table.text(), pace(&reports, took)))
}

/// How fast the simulator is, by the size of the cluster.
fn scale(machine: Machine, seed: u64) -> Result<String, Error> {
    let mut text = String::new();
    for workers in [16, 256, 1024] {
        let workload = Workload { seconds: 20.0, ..preset("bursts")? };
        let workload = with_load(workload, &machine, workers, 0.5, seed);
        let requests = workload.requests(seed, machine.sizes.context_len);
        let slo = Slo::of(&machine, &requests);
        let (prefill, decode) = pools(workers, (1, 1));
        let routing = Routing { placement: PlacementMode::Auto, policy: Policy::PowerOfTwo };
        let cluster = Cluster { routers: 4, ..Cluster::new(machine, prefill, decode, routing) };
        let (reports, took) = grid::run(&[Trial { cluster, requests: &requests, slo, seed }])?;
        let _ = write!(
            text,
            "{workers} workers, {} requests in 20 s of virtual time:{}",
            requests.len(),
            pace(&reports, took)
        );
    }
    Ok(text)
}
