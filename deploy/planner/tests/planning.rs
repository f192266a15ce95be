//! The planner against a full sweep, its files, and the examples of `docs/planning.md`.

use planner::machine::Machine;
use planner::plan::{Goal, PlanFile, Task, plan, sweep};
use planner::report::Slo;
use planner::workload::{Workload, preset};

const PAGE: &str = include_str!("../../../docs/planning.md");

/// A task of the workload at that rate, on small clusters and for a short time.
fn task(name: &str, rate: f64, workers: usize, goal: Goal) -> Task {
    let machine = Machine::preset("gpu-8b").expect("a preset");
    let workload = Workload { rate, seconds: 25.0, ..preset(name).expect("a preset") };
    let slo = Slo::of(&machine, &workload.requests(1, machine.sizes.context_len));
    Task { workload, machine, slo, attainment: 0.9, workers_max: workers, goal, seed: 1 }
}

/// Three workloads at rates that strain six workers.
const STRAINED: [(&str, f64); 3] = [("chat", 70.0), ("summaries", 12.0), ("bursts", 36.0)];

#[test]
fn the_choice_is_within_a_tenth_of_the_best_of_all() {
    for (name, rate) in STRAINED {
        let task = task(name, rate, 6, Goal::Goodput);
        let found = plan(&task).unwrap();
        let all = sweep(&task, 6).unwrap();
        let best = all.iter().map(|prediction| prediction.report.goodput).fold(0.0, f64::max);
        let worst = all.iter().map(|prediction| prediction.report.goodput).fold(f64::MAX, f64::min);
        let got = found.best.report.goodput;
        assert!(got >= 0.9 * best, "{name}: {got} of {best}, by {:?}", found.best.choice);
        assert!(worst < 0.9 * best, "{name}: any choice would do");
        assert_eq!(found.best.choice.workers(), 6, "{name}");
    }
}

#[test]
fn the_fewest_workers_are_as_few_as_a_sweep_finds() {
    for (name, rate) in [("chat", 24.0), ("summaries", 5.0), ("bursts", 14.0)] {
        let task = task(name, rate, 6, Goal::Fewest);
        let found = plan(&task).unwrap();
        assert!(found.is_enough && found.margin >= 1.0, "{name}: {found:?}");
        let enough = |workers: &usize| {
            sweep(&task, *workers)
                .unwrap()
                .iter()
                .any(|prediction| prediction.report.attainment >= task.attainment)
        };
        let fewest = (1..=6).find(enough).unwrap();
        assert_eq!(found.best.choice.workers(), fewest, "{name}: {:?}", found.best.choice);
        assert!(fewest < 6, "{name}: {fewest}");
    }
}

#[test]
fn too_few_workers_are_told_so() {
    let task = task("summaries", 60.0, 3, Goal::Fewest);
    let found = plan(&task).unwrap();
    assert!(!found.is_enough);
    assert_eq!((found.margin, found.best.choice.workers()), (0.0, 3));
    assert!(
        found.text(&task).contains("not enough:  90.0 % within the limits expected"),
        "{}",
        found.text(&task)
    );
}

/// The TOML files of the page.
fn examples() -> Vec<&'static str> {
    PAGE.split("```toml\n").skip(1).filter_map(|rest| rest.split("```").next()).collect()
}

#[test]
fn the_examples_of_the_page_are_planned() {
    let examples = examples();
    assert_eq!(examples.len(), 2);
    for example in examples {
        let task = toml::from_str::<PlanFile>(example).unwrap().task().unwrap();
        let found = plan(&task).unwrap();
        let text = found.text(&task);
        assert!(found.is_enough, "{text}");
        let choice = found.best.choice;
        let said = format!("recommended: {} prefill and {} decode workers", choice.prefill, choice.decode);
        assert!(text.starts_with(&said), "{text}");
        assert!(choice.workers() <= task.workers_max);
    }
}

#[test]
fn a_bad_file_is_refused_by_the_field() {
    let fault = |from: &str, to: &str| {
        let text = examples()[0].replacen(from, to, 1);
        assert_ne!(text, examples()[0], "{from}");
        match toml::from_str::<PlanFile>(&text) {
            Ok(file) => file.task().unwrap_err().message,
            Err(fault) => fault.to_string(),
        }
    };
    for (from, to, named) in [
        ("rate = 24.0", "rate = -1.0", "workload.rate: more than 0 expected, -1 came"),
        ("rate = 24.0", "speed = 24.0", "unknown field `speed`"),
        ("cv = 2.0", "cv = 0.0", "workload.arrivals.cv: more than 0 expected"),
        ("shape = \"gamma\"", "shape = \"wild\"", "wild"),
        (
            "prompt_median = 1020",
            "prompt_median = 0",
            "workload.lengths[0].prompt_median: a number from 1 expected",
        ),
        ("output_median = 129\n", "", "missing field `output_median`"),
        ("ttft_seconds = 0.5", "ttft_seconds = 0", "slo.ttft_seconds: more than 0 expected"),
        ("percentile = 95", "percentile = 101", "slo.percentile: more than 0 and at most 100 expected"),
        ("max = 12", "max = 0", "workers.max: at least 1 expected"),
        ("goal = \"fewest\"", "goal = \"best\"", "unknown variant `best`"),
        ("preset = \"gpu-8b\"", "preset = \"abacus\"", "machine.preset: cpu-smollm2 or gpu-8b expected"),
    ] {
        let message = fault(from, to);
        assert!(message.contains(named), "{to}: {message}");
    }
}
