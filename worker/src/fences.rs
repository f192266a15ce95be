//! Which attempts of a request are still welcome (invariant I1).
//!
//! Attempt n + 1 of a request fences attempt n wherever it is known. A worker learns of an attempt by its calls, or
//! because a router says so; what it has learnt it keeps for a while after its last use, and within a bound.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use node::debug::Excerpt;
use proto::{Attempt, Error, Reason, RequestId};

use crate::core::Now;
use crate::dump::FenceDump;
use crate::planted::{self, Bug};

/// Most requests whose fences are remembered. The one not used for longest makes room.
pub const FENCES_MAX: usize = 1 << 16;

/// The lowest welcome attempt of each request that has one above zero.
#[derive(Debug)]
pub struct Fences {
    ttl: Duration,
    max: usize,
    by_request: HashMap<RequestId, Fence>,
    /// Uses in the order of time; only the last use of a request counts.
    uses: VecDeque<(Now, RequestId)>,
}

#[derive(Clone, Copy, Debug)]
struct Fence {
    /// The lowest attempt that is welcome.
    attempt: Attempt,
    used: Now,
}

impl Fences {
    /// No fences; each will be remembered for `ttl` after its last use, `max` of them at most.
    pub fn new(ttl: Duration, max: usize) -> Self {
        Self { ttl, max: max.max(1), by_request: HashMap::new(), uses: VecDeque::new() }
    }

    /// Refuses an attempt below the fence.
    ///
    /// # Errors
    /// STALE_ATTEMPT.
    pub fn check(&self, request: &RequestId, attempt: Attempt) -> Result<(), Error> {
        match self.by_request.get(request) {
            Some(fence) if attempt < fence.attempt => {
                let message = format!(
                    "request {request}: attempt {} or later expected, attempt {} came",
                    fence.attempt.0, attempt.0
                );
                Err(Error::new(Reason::StaleAttempt, message))
            }
            _ => Ok(()),
        }
    }

    /// Refuses attempts of the request below `attempt` from now on. True when that is news: work of earlier
    /// attempts may be here.
    pub fn raise(&mut self, request: &RequestId, attempt: Attempt, now: Now) -> bool {
        self.forget(now);
        // Nothing is below the first attempt.
        if attempt == Attempt::default() || planted::is(Bug::NoFencing) {
            return false;
        }
        let known = self.by_request.get(request).copied();
        let is_news = known.is_none_or(|fence| fence.attempt < attempt);
        let lowest = known.map_or(attempt, |fence| fence.attempt.max(attempt));
        // One use per request and instant is enough, so that repeating itself costs a peer more than us.
        if is_news || known.is_some_and(|fence| fence.used != now) {
            self.by_request.insert(request.clone(), Fence { attempt: lowest, used: now });
            self.uses.push_back((now, request.clone()));
            self.make_room();
        }
        is_news
    }

    /// The fences as an operator sees them: those used last come first.
    pub fn dump(&self) -> Excerpt<FenceDump> {
        let last_uses = self.uses.iter().rev().filter_map(|(used, request)| {
            let fence = self.by_request.get(request).filter(|fence| fence.used == *used)?;
            Some(FenceDump { request: request.0.clone(), attempt: fence.attempt.0 })
        });
        Excerpt::of(self.len(), last_uses)
    }

    /// Requests that have a fence.
    pub fn len(&self) -> usize {
        self.by_request.len()
    }

    /// True when every attempt of every request is welcome.
    pub fn is_empty(&self) -> bool {
        self.by_request.is_empty()
    }

    /// Forgets fences not used for the time to live.
    fn forget(&mut self, now: Now) {
        while self.uses.front().is_some_and(|(used, _)| used.saturating_add(self.ttl) <= now) {
            self.forget_oldest_use();
        }
    }

    /// Keeps both the fences and the record of their uses within bounds.
    fn make_room(&mut self) {
        while self.by_request.len() > self.max {
            self.forget_oldest_use();
        }
        if self.uses.len() > 4 * self.max {
            let fences = &self.by_request;
            self.uses.retain(|(used, request)| fences.get(request).is_some_and(|fence| fence.used == *used));
        }
    }

    fn forget_oldest_use(&mut self) {
        let Some((used, request)) = self.uses.pop_front() else { return };
        if self.by_request.get(&request).is_some_and(|fence| fence.used == used) {
            self.by_request.remove(&request);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn fences(max: usize) -> Fences {
        Fences::new(10 * SECOND, max)
    }

    fn welcome(fences: &Fences, request: &str, attempt: u32) -> bool {
        match fences.check(&request.into(), Attempt(attempt)) {
            Ok(()) => true,
            Err(error) => {
                assert_eq!(error.reason, Reason::StaleAttempt);
                false
            }
        }
    }

    #[test]
    fn attempts_below_the_fence_are_refused() {
        let mut fences = fences(8);
        assert!(welcome(&fences, "a", 0));
        assert!(fences.raise(&"a".into(), Attempt(2), SECOND));
        assert!(!welcome(&fences, "a", 0) && !welcome(&fences, "a", 1));
        assert!(welcome(&fences, "a", 2) && welcome(&fences, "a", 3));
        assert!(welcome(&fences, "b", 0), "other requests are not concerned");
    }

    #[test]
    fn a_fence_is_never_lowered() {
        let mut fences = fences(8);
        assert!(fences.raise(&"a".into(), Attempt(2), SECOND));
        assert!(!fences.raise(&"a".into(), Attempt(1), SECOND), "no news");
        assert!(!fences.raise(&"a".into(), Attempt(1), 2 * SECOND), "no news");
        assert!(!welcome(&fences, "a", 1));
        assert!(!fences.raise(&"a".into(), Attempt(2), SECOND), "no news");
    }

    #[test]
    fn the_first_attempt_needs_no_memory() {
        let mut fences = fences(8);
        assert!(!fences.raise(&"a".into(), Attempt(0), SECOND));
        assert!(fences.is_empty());
    }

    #[test]
    fn fences_are_forgotten_a_time_to_live_after_their_last_use() {
        let mut fences = fences(8);
        fences.raise(&"a".into(), Attempt(1), SECOND);
        fences.raise(&"b".into(), Attempt(1), 2 * SECOND);
        fences.raise(&"a".into(), Attempt(1), 8 * SECOND);
        fences.raise(&"c".into(), Attempt(0), 13 * SECOND);
        assert!(!welcome(&fences, "a", 0), "used at 8 s");
        assert!(welcome(&fences, "b", 0), "used at 2 s");
        fences.raise(&"c".into(), Attempt(0), 18 * SECOND);
        assert!(fences.is_empty() && fences.uses.is_empty());
    }

    #[test]
    fn the_bound_forgets_the_one_not_used_for_longest() {
        let mut fences = fences(2);
        for (millis, request) in ["a", "b", "a", "c"].into_iter().enumerate() {
            fences.raise(&request.into(), Attempt(1), Duration::from_millis(millis as u64));
        }
        assert!(!welcome(&fences, "a", 0) && welcome(&fences, "b", 0) && !welcome(&fences, "c", 0));
        for millis in 10..1000 {
            fences.raise(&"a".into(), Attempt(1), Duration::from_millis(millis));
        }
        assert!(fences.uses.len() <= 8 && fences.len() <= 2);
        assert!(!welcome(&fences, "a", 0));
    }
}
