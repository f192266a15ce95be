//! Where a request executes.

use crate::Attempt;

/// How a placement executes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PlacementKind {
    /// Prefill and decode on different workers.
    Split,
    /// Both on the decode worker.
    Fused,
}

impl PlacementKind {
    /// The name in logs and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Split => "split",
            Self::Fused => "fused",
        }
    }
}

/// The placement of one attempt of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placed {
    /// The attempt it belongs to.
    pub attempt: Attempt,
    /// Address of the prefill worker; `None` when fused.
    pub prefill: Option<String>,
    /// Address of the decode worker.
    pub decode: String,
}

impl Placed {
    /// Split or fused.
    pub fn kind(&self) -> PlacementKind {
        if self.prefill.is_some() { PlacementKind::Split } else { PlacementKind::Fused }
    }
}
