//! Known-wrong behaviours, each switched on by name, that the tests and the simulation must catch.
//! See [`proto::planted`].

/// A planted bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    /// A replay uses the number of the attempt that failed, so it cannot be told from it.
    AttemptNotRaised,
    /// Tokens go to the client in whatever order and number they come.
    EmitUnorderedTokens,
    /// Tokens from decode do not wait for the first token, which prefill samples.
    FirstTokenNotAwaited,
    /// A request that ended ends again.
    FinishTwice,
    /// A replay starts from what the client asked, without the tokens that it already has.
    RetryLosesTokens,
    /// The workers of a failed attempt are not fenced.
    NoFence,
    /// A retry leaves the calls of the failed attempt open.
    CallsOutliveAttempt,
    /// The end of a request leaves a hand-off that nobody took to its lease.
    EndLeavesHandoff,
    /// A sequence that moves is continued elsewhere with its last token, whose KV nobody has.
    MoveKeepsLastToken,
    /// When a move fails, the worker that the sequence came from is not fenced.
    MoveLeavesSource,
    /// A request that ends while it was asked to move leaves the hold that may have come of it.
    EndForgetsMove,
}

impl Bug {
    /// Every bug.
    pub const ALL: [Self; 11] = [
        Self::AttemptNotRaised,
        Self::EmitUnorderedTokens,
        Self::FirstTokenNotAwaited,
        Self::FinishTwice,
        Self::RetryLosesTokens,
        Self::NoFence,
        Self::CallsOutliveAttempt,
        Self::EndLeavesHandoff,
        Self::MoveKeepsLastToken,
        Self::MoveLeavesSource,
        Self::EndForgetsMove,
    ];
}

proto::planted_switch!();
