//! How a member comes into the registry and stays there. Without IO.
//!
//! A lease is granted, the key put under it, and the lease kept alive at a third of its time. A lease that the registry
//! does not know any more is replaced by another; one that cannot be kept alive, since nobody answers, is tried again and
//! again. A member that was let in once is not compared with the others again: nothing that befalls the registry ends it.

use std::time::Duration;

use super::pause::Pause;

/// Longest pause between two tries.
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// A lease is kept alive so many times within its time.
const BEATS: u32 = 3;

/// What to do now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// Nothing before this time.
    Wait(Duration),
    /// Ask for a lease.
    Grant,
    /// Put the key under this lease; compare with the others first if this member was not let in yet.
    Put {
        /// The lease.
        lease: i64,
        /// Whether to compare.
        compare: bool,
    },
    /// Keep the lease alive.
    KeepAlive(i64),
}

/// What came of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// There is a lease.
    Granted {
        /// Its id.
        lease: i64,
        /// How long it lives without a beat.
        ttl: Duration,
    },
    /// The key is there.
    Put,
    /// The lease goes on.
    Kept,
    /// The registry knows no such lease.
    LeaseGone,
    /// Nobody answers.
    Unanswered,
}

/// One member's place in the registry.
#[derive(Debug)]
pub(super) struct Registration {
    lease: Option<Lease>,
    /// When the next thing is to be done.
    next: Duration,
    /// Let in once.
    admitted: bool,
    pause: Pause,
}

#[derive(Clone, Copy, Debug)]
struct Lease {
    id: i64,
    ttl: Duration,
    /// The key was put under it.
    registered: bool,
}

impl Registration {
    /// Not registered.
    pub(super) fn new() -> Self {
        Self { lease: None, next: Duration::ZERO, admitted: false, pause: Pause::new(PAUSE_MAX) }
    }

    /// The lease to give back at the end.
    pub(super) fn lease(&self) -> Option<i64> {
        self.lease.map(|lease| lease.id)
    }

    /// What to do at this time.
    pub(super) fn next(&self, now: Duration) -> Action {
        match self.lease {
            _ if now < self.next => Action::Wait(self.next),
            None => Action::Grant,
            Some(Lease { id, registered: false, .. }) => Action::Put { lease: id, compare: !self.admitted },
            Some(Lease { id, .. }) => Action::KeepAlive(id),
        }
    }

    /// The member has something else to say of itself: the key is put again.
    pub(super) fn changed(&mut self, now: Duration) {
        if let Some(lease) = &mut self.lease
            && std::mem::replace(&mut lease.registered, false)
        {
            self.next = now;
        }
    }

    /// Takes over what came of it. `is_listed` is whether the registry names this member, as far as is known here: a key
    /// that somebody deleted is put again.
    pub(super) fn on(&mut self, outcome: Outcome, is_listed: bool, now: Duration) {
        let beat = self.lease.map_or(Duration::ZERO, |lease| lease.ttl / BEATS);
        match (outcome, &mut self.lease) {
            (Outcome::Granted { lease: id, ttl }, lease) => {
                *lease = Some(Lease { id, ttl, registered: false });
                self.next = now;
            }
            (Outcome::Put, Some(lease)) => {
                (lease.registered, self.admitted) = (true, true);
                self.next = now + beat;
                self.pause.reset();
            }
            (Outcome::Kept, Some(lease)) => {
                lease.registered = is_listed;
                self.next = if is_listed { now + beat } else { now };
                self.pause.reset();
            }
            (Outcome::LeaseGone, lease) => {
                // One that ends as soon as it is there is not asked for without a pause.
                let was_kept = lease.take().is_some_and(|lease| lease.registered);
                self.next = if was_kept { now } else { now + self.pause.step() };
            }
            (Outcome::Unanswered | Outcome::Put | Outcome::Kept, _) => self.next = now + self.pause.step(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TTL: Duration = Duration::from_secs(6);

    fn at(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    fn registered() -> Registration {
        let mut registration = Registration::new();
        assert_eq!(registration.next(at(0)), Action::Grant);
        registration.on(Outcome::Granted { lease: 7, ttl: TTL }, false, at(0));
        assert_eq!(registration.next(at(0)), Action::Put { lease: 7, compare: true });
        registration.on(Outcome::Put, false, at(10));
        assert_eq!(registration.lease(), Some(7));
        registration
    }

    #[test]
    fn a_lease_is_kept_alive_at_a_third_of_its_time() {
        let mut registration = registered();
        assert_eq!(registration.next(at(10)), Action::Wait(at(2010)));
        assert_eq!(registration.next(at(2010)), Action::KeepAlive(7));
        registration.on(Outcome::Kept, true, at(2020));
        assert_eq!(registration.next(at(2020)), Action::Wait(at(4020)));
    }

    #[test]
    fn a_lost_lease_is_replaced_at_once_and_nothing_compared_again() {
        let mut registration = registered();
        registration.on(Outcome::LeaseGone, true, at(3000));
        assert_eq!((registration.next(at(3000)), registration.lease()), (Action::Grant, None));
        registration.on(Outcome::Granted { lease: 8, ttl: TTL }, true, at(3001));
        assert_eq!(registration.next(at(3001)), Action::Put { lease: 8, compare: false });
        // This one is gone before the key is put: the next try has to wait.
        registration.on(Outcome::LeaseGone, true, at(3002));
        assert_eq!(registration.next(at(3002)), Action::Wait(at(3102)));
        assert_eq!(registration.next(at(3102)), Action::Grant);
    }

    #[test]
    fn an_outage_is_met_by_tries_with_growing_pauses() {
        let mut registration = registered();
        let mut now = at(2010);
        for pause in [100, 200, 400, 800, 1000, 1000] {
            assert_eq!(registration.next(now), Action::KeepAlive(7));
            registration.on(Outcome::Unanswered, true, now);
            assert_eq!(registration.next(now), Action::Wait(now + at(pause)));
            now += at(pause);
        }
        registration.on(Outcome::Kept, true, now);
        registration.on(Outcome::Unanswered, true, now);
        assert_eq!(registration.next(now), Action::Wait(now + at(100)));
    }

    #[test]
    fn a_key_that_was_deleted_is_put_again() {
        let mut registration = registered();
        registration.on(Outcome::Kept, false, at(2010));
        assert_eq!(registration.next(at(2010)), Action::Put { lease: 7, compare: false });
        registration.on(Outcome::Put, false, at(2011));
        assert_eq!(registration.next(at(2011)), Action::Wait(at(4011)));
        assert_eq!(registration.next(at(4011)), Action::KeepAlive(7));
    }

    #[test]
    fn what_a_member_has_to_say_anew_is_put_at_once_under_its_lease() {
        let mut registration = registered();
        registration.changed(at(100));
        assert_eq!(registration.next(at(100)), Action::Put { lease: 7, compare: false });
        // A second change, while nobody answers, does not shorten the pause.
        registration.on(Outcome::Unanswered, true, at(100));
        registration.changed(at(110));
        assert_eq!(registration.next(at(110)), Action::Wait(at(200)));
        assert_eq!(registration.next(at(200)), Action::Put { lease: 7, compare: false });
        registration.on(Outcome::Put, true, at(200));
        assert_eq!(registration.next(at(200)), Action::Wait(at(2200)));
        // Without a lease there is one to be had first.
        registration.on(Outcome::LeaseGone, true, at(2200));
        registration.changed(at(2201));
        assert_eq!(registration.next(at(2201)), Action::Grant);
    }

    #[test]
    fn a_start_without_a_registry_tries_on() {
        let mut registration = Registration::new();
        registration.on(Outcome::Unanswered, false, at(0));
        assert_eq!(registration.next(at(0)), Action::Wait(at(100)));
        assert_eq!(registration.next(at(100)), Action::Grant);
        registration.on(Outcome::Granted { lease: 7, ttl: TTL }, false, at(100));
        registration.on(Outcome::Unanswered, false, at(101));
        assert_eq!(registration.next(at(500)), Action::Put { lease: 7, compare: true });
    }
}
