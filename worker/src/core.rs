//! What a worker's sans-IO core and its shell say to each other.
//!
//! A core owns one engine and every rule of the hand-off: leases, fences, admission, phases of cancellation. It is
//! driven by `on(event, now)` and `step(clock)`, never waits, and sees neither a socket nor any time but what it is given. The shell runs it on
//! the engine's own thread, turns gRPC calls into events and actions into gRPC items, and adds nothing. The
//! simulation drives the very same cores over a network of its own, in virtual time.

#![expect(missing_docs, reason = "the comment on a variant explains its fields, whose types say the rest")]

use std::time::Duration;

use engine::model::Interrupt;
use proto::watch::BlockChange;
use proto::{Attempt, BlockHash, Digest, Error, Generation, Handoff, RequestId, Token, TokenId};

use crate::dump::CoreDump;

/// Time on the worker's monotonic clock, since some fixed start.
pub type Now = Duration;

/// A call at or from this worker: one that a peer opened here, or one that this worker opened at a peer. Unique in
/// the life of the worker, whoever opened it: the shell draws even numbers, the core odd ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CallId(pub u64);

/// What happens to a core.
#[derive(Clone, Debug)]
pub enum Event {
    /// A router asks for a prefill. Answered by [`Action::Prefill`] items and one [`Action::Close`].
    Prefill { call: CallId, generation: Generation },
    /// A router asks for tokens, from a hand-off or from scratch. Answered by [`Action::Decode`] and `Close`.
    Decode { call: CallId, generation: Generation, handoff: Option<Handoff> },
    /// A peer fetches held KV. Answered by [`Action::Fetch`] items, as credit allows, and `Close`.
    Fetch { call: CallId, handoff: Handoff, skip: usize },
    /// The shell can take this many more items of the fetch; a fetch starts with none.
    FetchCredit { call: CallId, items: usize },
    /// A peer extends a lease. Answered by one [`Action::Renewed`].
    Renew { call: CallId, handoff: Handoff },
    /// A peer ends a hold. Needs no answer.
    Release { handoff: Handoff },
    /// A router refuses attempts of the request below this one.
    Fence { request: RequestId, attempt: Attempt },
    /// A router wants that attempt of the request handed over to another decode worker.
    Move { request: RequestId, attempt: Attempt },
    /// The peer that opened the call went away, cancelled, or its deadline passed. May come after `Close`.
    Dropped { call: CallId },
    /// An item of a fetch that this core started.
    Fetched { call: CallId, item: FetchItem },
    /// A fetch that this core started ended without [`FetchItem::End`].
    FetchFailed { call: CallId, error: Error },
    /// The answer to an [`Action::Renew`] of the fetch `call`: the lease's new time to live.
    RenewAnswered { call: CallId, result: Result<Duration, Error> },
    /// Time passed; see [`Core::next_wake`].
    Tick,
    /// A shutdown began: finish what runs, refuse what is new.
    Drain,
}

/// What a core wants done. Actions are carried out in order.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// An item for the router's prefill call.
    Prefill { call: CallId, item: PrefillItem },
    /// An item for the router's decode call.
    Decode { call: CallId, item: DecodeItem },
    /// An item for a peer's fetch.
    Fetch { call: CallId, item: FetchItem },
    /// The end of a call that a peer opened: with an error, or well after its last item. Exactly one per call, unless
    /// the call was dropped first.
    Close { call: CallId, error: Option<Error> },
    /// The answer to a renewal: the lease's new time to live.
    Renewed { call: CallId, result: Result<Duration, Error> },
    /// Open a fetch at the hand-off's owner; its items come back as [`Event::Fetched`].
    StartFetch { call: CallId, handoff: Handoff, skip: usize, time_left: Duration },
    /// Give up a fetch that this core started.
    DropFetch { call: CallId },
    /// Extend the lease of the hand-off that the fetch `call` belongs to.
    Renew { call: CallId, handoff: Handoff },
    /// Tell the owner that the hold is over.
    Release { handoff: Handoff },
}

/// An item of a prefill call.
#[derive(Clone, Debug, PartialEq)]
pub enum PrefillItem {
    /// The first chunk was scheduled: decode may start to fetch.
    Issued { handoff: Handoff, cached_tokens: usize, queue_wait: Duration },
    /// All KV is sealed and a token sampled; `Close` follows. `prefill` is the time from the start of the step that
    /// computed the first chunk to the start of the one that sampled: a core cannot know how long a step takes.
    Done { token: Token, prefill: Duration },
}

/// An item of a decode call.
#[derive(Clone, Debug, PartialEq)]
pub enum DecodeItem {
    /// Blocks are reserved, or the sequence is queued. Always the first item.
    Admitted { skipped_tokens: usize },
    /// A token; `Close` follows the one with `finish`.
    Token(Token),
    /// The sequence stands still and its KV is held for another decode worker; `Close` follows. The token that the KV
    /// is followed by is the last one that was sent.
    Moved { handoff: Handoff },
}

/// An item of a fetch.
#[derive(Clone, Debug, PartialEq)]
pub enum FetchItem {
    /// Always the first.
    Header { skip: usize, tokens: usize, layout: proto::KvLayout },
    /// The KV of consecutive tokens within one of the owner's blocks.
    Block(engine::KvBlock),
    /// The last: the token that prefill sampled, and the proof that everything was sent.
    End { first_token: TokenId, digest: Digest },
}

/// What a step was, for metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepSize {
    /// Tokens computed.
    pub tokens: usize,
    /// Sequences in the batch.
    pub sequences: usize,
}

/// A worker's state in numbers, for metrics and `Describe`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Gauges {
    /// KV blocks by state.
    pub blocks: engine::KvCounts,
    /// Sequences by state.
    pub sequences: engine::SequenceCounts,
    /// How often a sequence lost its blocks to an older one, since the worker's start.
    pub preemptions: u64,
    /// Tokens by what is to be done with them.
    pub tokens: engine::TokenCounts,
    /// Hand-offs under lease here.
    pub leases: usize,
    /// Held blocks whose owner (a call or an unexpired lease) is gone: zero, always.
    pub orphaned_blocks: usize,
    /// True after [`Event::Drain`].
    pub draining: bool,
    /// Sequences handed over while they ran, whose hold has ended.
    pub moves: Moves,
}

/// What has come of sequences that were handed over while they ran, since the worker's start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Moves {
    /// All KV was sent, and the hold released.
    pub taken: u64,
    /// The hold ended otherwise: by its lease, the deadline, a fence, or a release before all was sent.
    pub lost: u64,
}

/// A worker without its shell.
pub trait Core: Send + 'static {
    /// Takes an event in; appends what is to be done.
    fn on(&mut self, event: Event, now: Now, out: &mut Vec<Action>);

    /// Runs one engine step if there is work; appends what is to be done. `None` when there was none.
    ///
    /// A step takes time, so it gets a clock to read before and after, where an event gets the time it came at.
    fn step(&mut self, clock: &dyn Fn() -> Now, out: &mut Vec<Action>) -> Option<StepSize>;

    /// True when `step` would compute something.
    fn has_work(&self) -> bool;

    /// When a `Tick` is due at the latest.
    fn next_wake(&self) -> Option<Now>;

    /// The state in numbers.
    fn gauges(&self) -> Gauges;

    /// The state in detail, for an operator who asks. Bounded in size, and without tokens.
    fn dump(&self, _now: Now) -> CoreDump {
        CoreDump::default()
    }

    /// Stops the running step from another thread.
    fn interrupt(&self) -> Interrupt;

    /// The call whose prefill fills the batch alone, if one does: dropping it is worth an interrupt.
    fn sole_prefill(&self) -> Option<CallId>;

    /// Notes changes of the prefix cache from now on, at most so many until they are taken; `None` notes none. A core
    /// without a prefix cache has none to note.
    fn follow_blocks(&mut self, _bound: Option<usize>) {}

    /// Appends the changes of the prefix cache since they were taken last. False when there were more than the bound.
    fn take_block_changes(&mut self, _out: &mut Vec<BlockChange>) -> bool {
        true
    }

    /// The names of all blocks that the prefix cache has.
    fn known_blocks(&self) -> Vec<BlockHash> {
        Vec::new()
    }

    /// True when nothing is left to do or to keep: no call, no sequence, no lease. A draining worker may stop then.
    fn is_idle(&self) -> bool {
        let gauges = self.gauges();
        gauges.leases == 0 && gauges.sequences == engine::SequenceCounts::default()
    }
}
