//! Known-wrong behaviours, each switched on by name, that the simulation must catch.
//! See [`proto::planted`].

/// A planted bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    /// `export` takes the checksums of whatever the blocks hold at that moment, not those taken at seal: an
    /// overwritten block passes.
    ChecksumAtSend,
    /// `release` and `cancel` free the blocks of a held sequence while `export` still reads them.
    FreeBeforeQuiescence,
    /// `activate` starts decoding whether or not everything arrived and the digest holds.
    ActivateWithoutProof,
    /// `import` believes the checksums that came with the bytes.
    ImportWithoutChecksum,
    /// Imported blocks enter the prefix cache as they arrive, before `activate` has proven them.
    CacheBeforeProof,
    /// A sequence that shares a prefix with another gets no copy of the block where they part.
    ForkWithoutCopy,
    /// A token's random number depends on how many tokens this attempt generated, not on its position.
    RandomByAttempt,
    /// A running sequence that is handed over keeps its last block unsealed.
    HandedOverUnsealed,
}

impl Bug {
    /// Every bug.
    pub const ALL: [Self; 8] = [
        Self::ChecksumAtSend,
        Self::FreeBeforeQuiescence,
        Self::ActivateWithoutProof,
        Self::ImportWithoutChecksum,
        Self::CacheBeforeProof,
        Self::ForkWithoutCopy,
        Self::RandomByAttempt,
        Self::HandedOverUnsealed,
    ];
}

proto::planted_switch!();
