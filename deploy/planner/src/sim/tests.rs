//! The simulator against what can be worked out by hand.

use router::PlacementMode;

use super::*;
use crate::machine::StepWork;
use crate::workload::{Part, Workload, preset};

const SLO: Slo = Slo { ttft_seconds: 1.0, tpot_seconds: 0.05 };

fn machine() -> Machine {
    Machine::preset("gpu-8b").unwrap()
}

fn routing(placement: PlacementMode) -> Routing {
    Routing { placement, policy: Policy::RoundRobin }
}

fn request(at: f64, stream: u64, prompt: usize, output: usize) -> Arrival {
    Arrival { at, prompt, output, parts: vec![Part { stream, start: 0, len: prompt + output }] }
}

fn run(cluster: &Cluster, requests: &[Arrival]) -> Report {
    simulate(cluster, requests, SLO, 1).unwrap()
}

/// Within a microsecond.
fn assert_near(got: f64, expected: f64) {
    assert!((got - expected).abs() < 1e-6, "{got} for {expected}");
}

#[test]
fn one_request_takes_what_its_parts_do() {
    let (prompt, output) = (1000, 5);
    let Machine { prices, sizes } = machine();
    let mut prefill = StepWork::default();
    prefill.add_chunk(0, prompt);
    let prefill = prices.step(&prefill);
    let decode = |from: usize| -> f64 {
        (0..output - 1)
            .map(|token| {
                let mut work = StepWork::default();
                work.add_decode(from + token);
                prices.step(&work)
            })
            .sum()
    };
    // To the router counts as the gateway's; from there to the worker, back, and on to the client.
    let ttft = prefill + 3.0 * prices.hop_seconds;
    let fused = run(
        &Cluster::new(machine(), 0, 1, routing(PlacementMode::Fused)),
        &[request(0.0, 1, prompt, output)],
    );
    assert_near(fused.ttft.p50, ttft);
    assert_near(fused.tpot.p50, decode(prompt) / (output - 1) as f64);
    let split = run(
        &Cluster::new(machine(), 1, 1, routing(PlacementMode::Split)),
        &[request(0.0, 1, prompt, output)],
    );
    assert_near(split.ttft.p50, ttft);
    // The prompt is one chunk, so nothing is sent before it is computed: issued, called, fetched, sent.
    let sent =
        (prompt * sizes.kv_token_bytes) as f64 / prices.link_bytes_per_second + 4.0 * prices.hop_seconds;
    assert_near(split.tpot.p50, (sent + decode(prompt)) / (output - 1) as f64);
    assert_eq!((split.finished, split.split, fused.split), (1, 1.0, 0.0));
    assert_eq!(split.transferred_bytes, (prompt * sizes.kv_token_bytes) as f64);
}

#[test]
fn most_kv_is_sent_while_the_rest_is_computed() {
    let prompt = 16 * machine().sizes.step_tokens;
    let cluster = Cluster::new(machine(), 1, 1, routing(PlacementMode::Split));
    let report = run(&cluster, &[request(0.0, 1, prompt, 2)]);
    let Machine { prices, sizes } = machine();
    let all = (prompt * sizes.kv_token_bytes) as f64 / prices.link_bytes_per_second;
    let mut token = StepWork::default();
    token.add_decode(prompt);
    let wait = report.tpot.p50 - prices.step(&token);
    assert!(wait < all / 8.0, "{wait} of {all}");
}

#[test]
fn a_prefix_is_found_again_and_saves_its_time() {
    let cluster = Cluster::new(machine(), 1, 1, routing(PlacementMode::Split));
    let requests = [request(0.0, 1, 4096, 1), request(50.0, 1, 4096, 1), request(100.0, 2, 4096, 1)];
    let report = run(&cluster, &requests);
    // Two of the three count. All blocks but the last, whose last token has to be computed.
    assert_eq!(report.requests, 2);
    assert_near(report.hit_rate, (4096.0 - 16.0) / (2.0 * 4096.0));
    assert!(report.ttft.p50 < report.ttft.p99 / 5.0, "{report:?}");
}

#[test]
fn a_queue_of_one_server_waits_as_theory_says() {
    // Prompts of one length, outputs of one token, Poisson arrivals, one request a step: M/D/1, whose mean wait is
    // s · u / 2(1 − u) for a service time of s and a use of u (Pollaczek and Khinchine).
    let mut machine = machine();
    machine.sizes.sequences_max = 1;
    machine.prices.hop_seconds = 0.0;
    let service = machine.prices.prefill(2000, machine.sizes.step_tokens);
    let cluster = Cluster::new(machine, 0, 1, routing(PlacementMode::Fused));
    for used in [0.5, 0.8] {
        let workload = Workload { rate: used / service, seconds: 3000.0, ..preset("chat").unwrap() };
        let times = workload.requests(4, 8192).into_iter().map(|request| request.at);
        let requests: Vec<Arrival> =
            times.zip(0..).map(|(at, stream)| request(at, stream, 2000, 1)).collect();
        let report = run(&cluster, &requests);
        let wait = report.ttft.mean - service;
        let expected = service * used / (2.0 * (1.0 - used));
        assert!((wait / expected - 1.0).abs() < 0.1, "at {used}: {wait} for {expected}");
        assert!((report.decode_used / used - 1.0).abs() < 0.05, "{}", report.decode_used);
    }
}

#[test]
fn what_is_too_much_is_refused_and_the_rest_goes_on() {
    let mut machine = machine();
    machine.sizes.kv_blocks = 200;
    machine.sizes.context_len = 8192;
    let cluster = Cluster::new(machine, 1, 1, routing(PlacementMode::Split));
    let mut requests = vec![request(0.0, 1, 100, 5), request(1.0, 2, 5000, 5)];
    requests.extend((3..40).map(|stream| request(2.0, stream, 1000, 50)));
    let report = run(&cluster, &requests);
    assert_eq!(report.finished + 1, report.requests, "all but the one that fits nowhere: {report:?}");
    assert!(report.retries > 0);
}

#[test]
fn a_seed_gives_the_same_report_and_another_seed_another() {
    let workload = Workload { rate: 30.0, seconds: 20.0, ..preset("sessions").unwrap() };
    let cluster = Cluster::new(machine(), 2, 4, routing(PlacementMode::Auto));
    let report = |seed| simulate(&cluster, &workload.requests(seed, 8192), SLO, seed).unwrap();
    assert_eq!(report(1), report(1));
    assert_ne!(report(1), report(2));
}

#[test]
fn clusters_that_cannot_be_are_refused_by_the_field() {
    let fault = |change: fn(&mut Cluster)| {
        let mut cluster = Cluster::new(machine(), 1, 1, routing(PlacementMode::Auto));
        change(&mut cluster);
        simulate(&cluster, &[], SLO, 1).unwrap_err().message
    };
    assert!(fault(|c| c.decode = 0).starts_with("decode: "));
    assert!(fault(|c| c.routers = 0).starts_with("routers: "));
    assert!(fault(|c| c.deadline_seconds = 0.0).starts_with("deadline_seconds: "));
    assert!(fault(|c| c.machine.prices.hop_seconds = f64::NAN).starts_with("prices.hop_seconds: "));
}
