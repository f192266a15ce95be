//! An end reaches everybody (I7): soon after a request is over, nobody works for it and nothing is held for it.

use std::time::Duration;

use proto::{Attempt, RequestId};

use crate::checks::{Check, ensure};
use crate::world::World;

/// Longest time from an end until everybody knows it, where no connection was disturbed. Some round trips and engine
/// steps fit into it many times; a lease does not fit.
pub(crate) const RELIEF: Duration = Duration::from_secs(1);

impl World {
    /// Nothing is left of the request up to that attempt, unless a fault kept somebody from hearing of the end.
    pub(crate) fn check_relieved(&self, request: usize, attempt: Attempt) -> Check {
        let client = &self.clients[request];
        if self.is_disturbed || client.is_disturbed {
            return Ok(());
        }
        ensure(!client.is_relieved(self.now) || !self.is_routed(request), "I7", || {
            format!("a router still works on r{request}, which its client gave up")
        })?;
        let id = RequestId(format!("r{request}"));
        self.workers.iter().try_for_each(|worker| {
            let remains = worker.owner.remains(&id, attempt).or_else(|| worker.decode.remains(&id, attempt));
            ensure(remains.is_none(), "I7", || {
                let what = remains.unwrap_or_default();
                format!("{}: {what} is left of r{request}, which has ended", self.name(worker.node))
            })
        })
    }
}
