//! The router's policies and its choice between split and fused, over simulated workers.

use planner::grid::{self, Trial};
use planner::machine::Machine;
use planner::report::{Report, Slo};
use planner::sim::{Cluster, Routing};
use planner::workload::{Arrival, NAMES, Workload, preset};
use router::PlacementMode;
use router::policy::Policy;

/// The reports of the same requests by each way to place them.
fn reports(requests: &[Arrival], (prefill, decode): (usize, usize), routings: &[Routing]) -> Vec<Report> {
    let machine = Machine::preset("gpu-8b").expect("a preset");
    let slo = Slo::of(&machine, requests);
    let trial = |routing: &Routing| Trial {
        cluster: Cluster::new(machine, prefill, decode, *routing),
        requests,
        slo,
        seed: 1,
    };
    grid::run(&routings.iter().map(trial).collect::<Vec<_>>()).expect("clusters that can be").0
}

#[test]
fn prefixes_are_found_again_across_256_workers() {
    let workload = Workload { rate: 400.0, seconds: 8.0, ..preset("sessions").unwrap() };
    let requests = workload.requests(1, 8192);
    let placement = PlacementMode::Split;
    let routings = [Policy::RoundRobin, Policy::Prefix].map(|policy| Routing { placement, policy });
    let [round_robin, prefix] = reports(&requests, (128, 128), &routings).try_into().unwrap();
    println!(
        "round robin: {:.1} % cached, {:.0} ms",
        round_robin.hit_rate * 1e2,
        round_robin.ttft.mean * 1e3
    );
    println!("prefix:      {:.1} % cached, {:.0} ms", prefix.hit_rate * 1e2, prefix.ttft.mean * 1e3);
    assert!(prefix.hit_rate > 1.5 * round_robin.hit_rate, "{prefix:?} {round_robin:?}");
    assert!(prefix.ttft.mean <= round_robin.ttft.mean, "{prefix:?} {round_robin:?}");
}

/// Requests per second that strain four prefill and four decode workers, by workload.
const RATES: [f64; 6] = [50.0, 36.0, 8.0, 7.0, 20.0, 22.0];

#[test]
fn auto_is_as_good_as_the_better_of_split_and_fused() {
    for (name, rate) in NAMES.into_iter().zip(RATES) {
        let workload = Workload { rate, seconds: 40.0, ..preset(name).unwrap() };
        let requests = workload.requests(1, 32_768);
        let placements = [PlacementMode::Split, PlacementMode::Fused, PlacementMode::Auto];
        let policy = Policy::LeastLoaded;
        let routings = placements.map(|placement| Routing { placement, policy });
        let [split, fused, auto] = reports(&requests, (4, 4), &routings).try_into().unwrap();
        let better = split.goodput.max(fused.goodput);
        let switches = auto.switches_per_worker_minute;
        println!(
            "{name}: split {:.2}, fused {:.2}, auto {:.2} requests/s; {switches:.2} switches a worker and minute",
            split.goodput, fused.goodput, auto.goodput
        );
        assert!(auto.goodput >= 0.9 * better, "{name}: {} of {better}", auto.goodput);
        // Load comes and goes, and with it what is better; to switch with every other request would be to have no opinion.
        let requests = auto.offered * 60.0 / 8.0;
        assert!(switches <= requests / 20.0, "{name}: {switches} of {requests}");
    }
}
