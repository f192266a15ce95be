//! A seeded simulation of the cluster: the very state machines that the processes run, over a virtual network and a
//! virtual clock.
//!
//! A **schedule** is all that follows from one seed ([`plan`]): one or two routers, one to three prefill and decode
//! workers with arenas that may be too small for what comes, block sizes that differ, and up to four requests whose
//! prompts share beginnings; and faults ([`faults`]), each aimed at a request in a phase of its life. The actors are
//! `router::dispatch` and `router::pools` ([`routers`]), `PrefillCore` and `DecodeCore` over the simulated model
//! ([`workers`]), and `gateway::resume` ([`clients`]). What is between them is ours ([`network`]): calls with streams
//! of answers, connections that break, peers that stand still, processes that die and start again empty, and an
//! adversary that has seen every hand-off reference and uses what it should not.
//!
//! After every event the invariants are checked ([`checks`]), by models of their own that see only messages:
//!
//! - **I1** no bytes, no renewal and no release for a reference that is stale, replayed, forged, or of another life;
//! - **I2** no token before the proof; every token, wherever it is seen, is the one of the [`oracle`];
//! - **I3** bytes sent are the bytes sealed, and only for holds that still are;
//! - **I4** an owner holds exactly what it has to; one lease after everything has ended nobody has anything left,
//!   and nothing new was needed for that;
//! - **I5** every way out of every phase frees what it has to;
//! - **I6** nothing outlives its deadline anywhere;
//! - **I7** what ends on one side ends on the other with the same event; where no connection was disturbed, an end
//!   that a router or a client knows is everybody's soon after, without a lease or a deadline;
//! - **I8** a client gets exactly one end: all tokens, or an error;
//! - and at last the cluster, whole again, serves one more request.
//!
//! The [`table`] counts what was done to requests in which phase; no cell may be empty. Each bug of [`planted`] is
//! switched on, and has to be caught. A schedule that fails prints its seed and the end of its trace; run it again
//! with `BATON_SIM_SEED=n cargo test -p baton-tests --test simulation -- --exact one_seed --nocapture`.

mod checks;
mod clients;
mod faults;
mod network;
mod oracle;
mod plan;
mod planted;
mod relief;
mod rng;
mod routers;
mod table;
mod trace;
mod workers;
mod world;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use checks::{Check, Violation};
use table::Table;
use world::World;

/// Schedules of the test run.
const SCHEDULES: u64 = 100_000;
/// Most schedules until a planted bug must have been caught.
const PLANTED_MAX: u64 = 20_000;
/// Lines of a trace that are printed.
const TRACE_LINES: usize = 150;

/// What came of a schedule.
struct Outcome {
    check: Check,
    table: Table,
    counts: Counts,
}

/// What happened in schedules.
#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    events: u64,
    /// References issued, by prefill workers and by decode workers that gave a sequence away.
    handoffs: u64,
    /// Sequences that went on at another decode worker.
    moves: u64,
}

impl Counts {
    fn add(&mut self, other: Self) {
        self.events += other.events;
        self.handoffs += other.handoffs;
        self.moves += other.moves;
    }
}

/// Runs the schedule of a seed. A panic of a core is a violation like any other.
fn run(seed: u64) -> Outcome {
    let mut world = World::new(seed, false);
    let check = run_contained(&mut world);
    let World { events, handoffs, moves, .. } = world;
    Outcome { check, table: world.table, counts: Counts { events, handoffs, moves } }
}

fn run_contained(world: &mut World) -> Check {
    catch_unwind(AssertUnwindSafe(|| world.run())).unwrap_or_else(|panic| {
        let message = panic.downcast_ref::<String>().cloned().unwrap_or_else(|| "a panic".into());
        Err(Violation { invariant: "panic", message })
    })
}

/// The same schedule again, as text.
fn trace(seed: u64, lines: usize) -> String {
    let mut world = World::new(seed, true);
    let check = run_contained(&mut world);
    format!("{}\n{check:?}", world.take_trace(lines))
}

/// How many schedules to run: as many as `cargo xtask simulate` says, or the usual number.
#[expect(
    clippy::disallowed_methods,
    reason = "how the tool tells its test, and no configuration of anything"
)]
fn schedules() -> u64 {
    let asked = std::env::var("BATON_SIM_SCHEDULES").ok();
    asked.map_or(SCHEDULES, |asked| asked.parse().expect("BATON_SIM_SCHEDULES: a number expected"))
}

fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

#[test]
fn no_schedule_breaks_an_invariant() {
    let schedules = schedules();
    let next = AtomicU64::new(0);
    let (start, total) = (Instant::now(), Mutex::new((Table::default(), Counts::default())));
    let first_failure: Mutex<Option<(u64, Violation)>> = Mutex::new(None);
    std::thread::scope(|scope| {
        for _ in 0..threads() {
            scope.spawn(|| {
                let (mut table, mut counts) = (Table::default(), Counts::default());
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= schedules || first_failure.lock().expect("no panic").is_some() {
                        break;
                    }
                    let outcome = run(seed);
                    table.add(&outcome.table);
                    counts.add(outcome.counts);
                    if let Err(violation) = outcome.check {
                        first_failure.lock().expect("no panic").get_or_insert((seed, violation));
                    }
                }
                let mut total = total.lock().expect("no panic");
                total.0.add(&table);
                total.1.add(counts);
            });
        }
    });
    if let Some((seed, violation)) = first_failure.into_inner().expect("no panic") {
        panic!(
            "seed {seed} breaks {}: {}\n{}",
            violation.invariant,
            violation.message,
            trace(seed, TRACE_LINES)
        );
    }
    let (table, counts) = total.into_inner().expect("no panic");
    let seconds = start.elapsed().as_secs_f64();
    println!("{table}");
    let Counts { events, handoffs, moves } = counts;
    println!(
        "{handoffs} hand-offs, {moves} of them of sequences that ran and moved on, in {schedules} schedules with \
         {events} events: no invariant broken, {seconds:.1} s, {:.0} hand-offs/s",
        handoffs as f64 / seconds
    );
    assert_eq!(table.empty_cells(), [], "every fault strikes in every phase");
}

#[test]
fn every_planted_bug_is_caught() {
    let bugs =
        engine::planted::Bug::ALL.len() + worker::planted::Bug::ALL.len() + router::planted::Bug::ALL.len();
    assert_eq!(planted::ALL.len(), bugs, "every bug that can be planted is listed");
    let (next, missed) = (AtomicU64::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..threads() {
            scope.spawn(|| {
                while let Some(&(bug, meaning)) =
                    planted::ALL.get(next.fetch_add(1, Ordering::Relaxed) as usize)
                {
                    let caught = (0..PLANTED_MAX).find_map(|seed| {
                        let violation = bug.with(|| run(seed).check).err()?;
                        Some((seed + 1, violation))
                    });
                    match caught {
                        Some((schedules, violation)) => println!(
                            "{bug:?} ({meaning}): {} after {schedules} schedules: {}",
                            violation.invariant, violation.message
                        ),
                        None => missed.lock().expect("no panic").push(bug),
                    }
                }
            });
        }
    });
    let missed = missed.into_inner().expect("no panic");
    assert!(missed.is_empty(), "not caught within {PLANTED_MAX} schedules: {missed:?}");
}

#[test]
fn equal_seeds_give_equal_schedules() {
    for seed in 0..20 {
        assert_eq!(trace(seed, usize::MAX), trace(seed, usize::MAX));
    }
    assert_ne!(trace(1, usize::MAX), trace(2, usize::MAX));
}

#[test]
#[expect(clippy::disallowed_methods, reason = "a seed to look at is given by hand")]
fn one_seed() {
    let seed = std::env::var("BATON_SIM_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(0);
    let text = trace(seed, usize::MAX);
    println!("{text}");
    assert!(text.ends_with("Ok(())"), "seed {seed} breaks an invariant");
}
