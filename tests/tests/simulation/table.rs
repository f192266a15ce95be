//! What was done to requests, by the phase in which it was done.

use std::fmt;

/// Where a request is when a fault is aimed at it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Phase {
    /// At a router or in a worker's queue: no chunk of it has been computed.
    Queued,
    /// The first chunk has been computed; decode does not know of the request yet.
    Prefilling,
    /// Decode has reserved blocks for the hand-off and asks for it.
    Issued,
    /// KV arrives at decode.
    Transferring,
    /// Decode has the proof and computes tokens, or a fused worker does; nothing is held elsewhere.
    Decoding,
    /// The decode worker has given it away and holds it; no other has all of it.
    Moving,
    /// Whoever needed the KV has it or needs it no more, and the owner still holds it.
    FinishedButHeld,
}

impl Phase {
    pub(crate) const ALL: [Self; 7] = [
        Self::Queued,
        Self::Prefilling,
        Self::Issued,
        Self::Transferring,
        Self::Decoding,
        Self::Moving,
        Self::FinishedButHeld,
    ];
}

/// Something that goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Fault {
    /// A message is late, and all that follow it in its stream.
    Delay,
    /// A message is lost: an item of a stream without a trace, anything else with its connection.
    Loss,
    /// A message comes twice; a call that comes twice is opened twice.
    Duplicate,
    /// A message of a stream is overtaken by those that follow it.
    Reorder,
    /// A connection breaks, and both ends learn it at once.
    BrokenConnection,
    /// Two nodes cannot reach each other for a while.
    Partition,
    /// A process stands still for a while, its connections open.
    SilentPeer,
    /// A prefill worker dies, and comes back empty.
    PrefillCrash,
    /// A decode worker dies, and comes back empty.
    DecodeCrash,
    /// A router dies, and comes back empty.
    RouterCrash,
    /// The gateway of the request dies.
    ClientCrash,
    /// The client cancels.
    Cancel,
    /// The request's deadline passes.
    Deadline,
    /// A reference of an earlier attempt is used at its owner.
    StaleReference,
    /// A reference whose hold has ended is used again.
    Replay,
    /// A true reference with another id is used at its owner.
    ForgedId,
    /// A true reference with another epoch is used at its owner.
    OtherEpoch,
    /// A byte of a transfer flips.
    FlippedByte,
    /// KV and its checksums are replaced by others that agree with each other.
    ForgedBlock,
    /// Bytes of a block are missing, or the transfer ends before its end.
    Truncation,
    /// The blocks that a prefill worker holds are overwritten.
    StrayWrite,
    /// A worker begins to shut down.
    Drain,
    /// The decode worker does.
    DecodeDrain,
}

impl Fault {
    pub(crate) const ALL: [Self; 23] = [
        Self::Delay,
        Self::Loss,
        Self::Duplicate,
        Self::Reorder,
        Self::BrokenConnection,
        Self::Partition,
        Self::SilentPeer,
        Self::PrefillCrash,
        Self::DecodeCrash,
        Self::RouterCrash,
        Self::ClientCrash,
        Self::Cancel,
        Self::Deadline,
        Self::StaleReference,
        Self::Replay,
        Self::ForgedId,
        Self::OtherEpoch,
        Self::FlippedByte,
        Self::ForgedBlock,
        Self::Truncation,
        Self::StrayWrite,
        Self::Drain,
        Self::DecodeDrain,
    ];
}

impl Fault {
    /// Calls of any request may fail: who has to hear of its end may not, or not soon.
    pub(crate) fn disturbs_the_network(self) -> bool {
        matches!(
            self,
            Self::BrokenConnection
                | Self::Partition
                | Self::SilentPeer
                | Self::PrefillCrash
                | Self::DecodeCrash
                | Self::RouterCrash
        )
    }

    /// The same of calls of the request at which it is aimed.
    pub(crate) fn disturbs_a_call(self) -> bool {
        matches!(self, Self::Delay | Self::Loss | Self::Duplicate | Self::Reorder)
    }
}

/// Faults that struck, by phase.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Table {
    counts: [[u64; Phase::ALL.len()]; Fault::ALL.len()],
}

impl Table {
    pub(crate) fn count(&mut self, fault: Fault, phase: Phase) {
        self.counts[fault as usize][phase as usize] += 1;
    }

    pub(crate) fn add(&mut self, other: &Self) {
        for (row, others) in self.counts.iter_mut().zip(&other.counts) {
            for (count, more) in row.iter_mut().zip(others) {
                *count += more;
            }
        }
    }

    /// What never happened.
    pub(crate) fn empty_cells(&self) -> Vec<(Fault, Phase)> {
        let cells = Fault::ALL.into_iter().flat_map(|fault| Phase::ALL.map(|phase| (fault, phase)));
        cells.filter(|&(fault, phase)| self.counts[fault as usize][phase as usize] == 0).collect()
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<18}", "fault")?;
        for phase in Phase::ALL {
            write!(f, "{:>16}", format!("{phase:?}"))?;
        }
        writeln!(f, "{:>12}", "sum")?;
        for fault in Fault::ALL {
            let row = &self.counts[fault as usize];
            write!(f, "{:<18}", format!("{fault:?}"))?;
            for count in row {
                write!(f, "{count:>16}")?;
            }
            writeln!(f, "{:>12}", row.iter().sum::<u64>())?;
        }
        Ok(())
    }
}
