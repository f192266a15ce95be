//! The bugs that the simulation must catch.

use engine::planted::Bug as EngineBug;
use router::planted::Bug as RouterBug;
use worker::planted::Bug as WorkerBug;

/// A planted bug, wherever it is.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Planted {
    Engine(EngineBug),
    Worker(WorkerBug),
    Router(RouterBug),
}

/// Each bug, and what it does wrong.
pub(crate) const ALL: [(Planted, &str); 32] = [
    (Planted::Worker(WorkerBug::NoFencing), "no attempt is refused for a later one"),
    (Planted::Worker(WorkerBug::RenewalByStaleAttempt), "a fenced attempt may renew"),
    (Planted::Worker(WorkerBug::EpochNotChecked), "a reference of another life is believed"),
    (Planted::Worker(WorkerBug::ForgedIdAccepted), "a reference is believed whatever its id"),
    (Planted::Worker(WorkerBug::LeaseNeverExpires), "no lease runs out"),
    (Planted::Worker(WorkerBug::ReleaseIgnoredOnReject), "decode refuses a hand-off and does not release it"),
    (Planted::Worker(WorkerBug::CancelLeaksHold), "a router that goes away leaves its hold behind"),
    (Planted::Worker(WorkerBug::TokenBeforeProof), "the first token goes out before the proof is checked"),
    (Planted::Worker(WorkerBug::DeadlineNotCheckedInTransfer), "a deadline does not end a transfer"),
    (Planted::Worker(WorkerBug::MovedTokenBefore), "a moved sequence goes on after the wrong token"),
    (Planted::Worker(WorkerBug::MovedWithoutLease), "what moves away is held without a lease"),
    (Planted::Worker(WorkerBug::FenceSparesMoved), "a fence leaves what moved away"),
    (
        Planted::Worker(WorkerBug::IdleWhileHolding),
        "a drained worker would end while another fetches from it",
    ),
    (Planted::Engine(EngineBug::ChecksumAtSend), "checksums are taken while sending, not at seal"),
    (Planted::Engine(EngineBug::FreeBeforeQuiescence), "blocks are freed while a fetch reads them"),
    (Planted::Engine(EngineBug::ActivateWithoutProof), "decode starts whether or not the digest holds"),
    (Planted::Engine(EngineBug::ImportWithoutChecksum), "checksums that come are not compared"),
    (Planted::Engine(EngineBug::CacheBeforeProof), "blocks enter the prefix cache before they are proven"),
    (Planted::Engine(EngineBug::ForkWithoutCopy), "a block that is shared in part is not copied"),
    (Planted::Engine(EngineBug::RandomByAttempt), "random numbers begin anew with every attempt"),
    (Planted::Engine(EngineBug::HandedOverUnsealed), "the last block of what moves away is not sealed"),
    (Planted::Router(RouterBug::AttemptNotRaised), "a replay has the number of the attempt that failed"),
    (Planted::Router(RouterBug::EmitUnorderedTokens), "tokens go out in whatever order they come"),
    (Planted::Router(RouterBug::FirstTokenNotAwaited), "tokens of decode do not wait for the first"),
    (Planted::Router(RouterBug::FinishTwice), "a request that ended ends again"),
    (Planted::Router(RouterBug::RetryLosesTokens), "a replay starts without the tokens that are out"),
    (Planted::Router(RouterBug::NoFence), "workers of a failed attempt are not fenced"),
    (Planted::Router(RouterBug::CallsOutliveAttempt), "calls of a failed attempt stay open"),
    (Planted::Router(RouterBug::EndLeavesHandoff), "a hand-off that nobody took is left to its lease"),
    (Planted::Router(RouterBug::MoveKeepsLastToken), "a moved sequence keeps the token that has no KV"),
    (Planted::Router(RouterBug::MoveLeavesSource), "a failed move does not fence where it came from"),
    (
        Planted::Router(RouterBug::EndForgetsMove),
        "an end leaves a sequence that was asked to move to its lease",
    ),
];

impl Planted {
    /// Runs `body` with the bug switched on in this thread.
    pub(crate) fn with<R>(self, body: impl FnOnce() -> R) -> R {
        match self {
            Self::Engine(bug) => engine::planted::with(bug, body),
            Self::Worker(bug) => worker::planted::with(bug, body),
            Self::Router(bug) => router::planted::with(bug, body),
        }
    }
}
