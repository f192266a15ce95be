//! Known-wrong behaviours of the worker's rules, in addition to [`engine::planted`], that the simulation must catch.
//!
//! Each is one line at the place where a correct core does the right thing. Without the cargo feature `planted` the
//! question is the constant `false`, and the line compiles to nothing.

pub use engine::planted as engine_bugs;

/// A planted bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    /// No attempt of a request is ever refused for a later one.
    NoFencing,
    /// A renewal that comes from a fenced attempt is granted.
    RenewalByStaleAttempt,
    /// A reference from an earlier life of the worker is looked up like any other.
    EpochNotChecked,
    /// A reference is believed for its request and attempt, whatever its id.
    ForgedIdAccepted,
    /// No lease ever runs out.
    LeaseNeverExpires,
    /// A decode worker that refuses a hand-off does not release it.
    ReleaseIgnoredOnReject,
    /// A router that goes away during a prefill whose hand-off is issued leaves the hold behind.
    CancelLeaksHold,
    /// The decode worker passes on the first token as it arrives, before the proof is checked.
    TokenBeforeProof,
    /// The request's deadline is not looked at once its KV is being fetched.
    DeadlineNotCheckedInTransfer,
    /// A sequence that moves away is handed over with the token before its last one.
    MovedTokenBefore,
    /// The lease of a sequence that moved away never begins.
    MovedWithoutLease,
    /// A fence ends the jobs of earlier attempts, but not what is held of them.
    FenceSparesMoved,
    /// A decode worker says that it is idle while it holds KV for another.
    IdleWhileHolding,
}

impl Bug {
    /// Every bug.
    pub const ALL: [Self; 13] = [
        Self::NoFencing,
        Self::RenewalByStaleAttempt,
        Self::EpochNotChecked,
        Self::ForgedIdAccepted,
        Self::LeaseNeverExpires,
        Self::ReleaseIgnoredOnReject,
        Self::CancelLeaksHold,
        Self::TokenBeforeProof,
        Self::DeadlineNotCheckedInTransfer,
        Self::MovedTokenBefore,
        Self::MovedWithoutLease,
        Self::FenceSparesMoved,
        Self::IdleWhileHolding,
    ];
}

proto::planted_switch!();
