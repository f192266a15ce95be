//! Who counts as a member, by what the registry said last. Without IO.
//!
//! While the registry is away, everyone known stays. When it is back, its word alone is not enough either: leases may
//! have ended meanwhile, and every member needs a moment to register anew. So for a while, the *grace*, those that it does
//! not name are *missing* and still count; after it everything is read once more, and who is missing then is gone.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::Member;

/// What the registry says, and when it falls silent.
#[derive(Clone, Debug)]
pub(super) enum Event {
    /// All that is registered, by key, as of a revision.
    Read {
        /// The revision.
        revision: i64,
        /// Keys and what they hold.
        members: Vec<(String, Member)>,
    },
    /// Changes are told from now on.
    Opened,
    /// A key has a new value.
    Put {
        /// Which key.
        key: String,
        /// What it holds.
        member: Member,
        /// The revision of the change.
        revision: i64,
    },
    /// A key is gone.
    Deleted {
        /// Which key.
        key: String,
        /// The revision of the change.
        revision: i64,
    },
    /// The registry does not answer.
    Lost,
}

/// The members, each under its key.
#[derive(Debug)]
pub(super) struct Known {
    members: BTreeMap<String, Seen>,
    /// Changes up to this one are in; `None` before the first reading.
    revision: Option<i64>,
    grace: Duration,
    phase: Phase,
}

#[derive(Debug)]
struct Seen {
    member: Member,
    /// Not registered any more, but nor is its time to register anew over.
    missing: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Nothing was heard yet.
    New,
    /// The registry is away, after it had been there.
    Away,
    /// It is back; whoever is missing has until then.
    Settling { until: Duration },
    /// Its word counts.
    Settled,
}

impl Known {
    /// Nobody, yet. `grace` is how long those that are missing after an outage still count.
    pub(super) fn new(grace: Duration) -> Self {
        Self { members: BTreeMap::new(), revision: None, grace, phase: Phase::New }
    }

    /// The revision up to which changes are in; `None` when everything has to be read.
    pub(super) fn revision(&self) -> Option<i64> {
        self.revision
    }

    /// Everyone who counts, in the order of their keys.
    pub(super) fn members(&self) -> Vec<Member> {
        self.members.values().map(|seen| seen.member.clone()).collect()
    }

    /// When everything has to be read once more.
    pub(super) fn settles_at(&self) -> Option<Duration> {
        match self.phase {
            Phase::Settling { until } => Some(until),
            Phase::New | Phase::Away | Phase::Settled => None,
        }
    }

    /// Takes over what happened.
    pub(super) fn on(&mut self, event: Event, now: Duration) {
        match event {
            Event::Read { revision, members } => {
                let is_over = self.settles_at().is_some_and(|until| now >= until);
                if is_over {
                    self.phase = Phase::Settled;
                }
                self.revision = Some(revision);
                self.members.values_mut().for_each(|seen| seen.missing = true);
                for (key, member) in members {
                    self.members.insert(key, Seen { member, missing: false });
                }
                if self.phase == Phase::Settled {
                    self.members.retain(|_, seen| !seen.missing);
                }
            }
            Event::Opened => {
                self.phase = match self.phase {
                    Phase::New => Phase::Settled,
                    Phase::Away => Phase::Settling { until: now + self.grace },
                    phase => phase,
                };
            }
            Event::Put { key, member, revision } => {
                self.revision = self.revision.max(Some(revision));
                self.members.insert(key, Seen { member, missing: false });
            }
            Event::Deleted { key, revision } => {
                self.revision = self.revision.max(Some(revision));
                if self.phase == Phase::Settled {
                    self.members.remove(&key);
                } else if let Some(seen) = self.members.get_mut(&key) {
                    seen.missing = true;
                }
            }
            Event::Lost => {
                if self.phase != Phase::New {
                    self.phase = Phase::Away;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proto::Role;

    use super::*;

    const GRACE: Duration = Duration::from_secs(6);

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn member(address: &str) -> Member {
        Member { role: Role::Decode, address: address.to_owned() }
    }

    fn read(revision: i64, addresses: &[&str]) -> Event {
        let members = addresses.iter().map(|address| (format!("p/{address}"), member(address)));
        Event::Read { revision, members: members.collect() }
    }

    fn put(revision: i64, address: &str) -> Event {
        Event::Put { key: format!("p/{address}"), member: member(address), revision }
    }

    fn deleted(revision: i64, address: &str) -> Event {
        Event::Deleted { key: format!("p/{address}"), revision }
    }

    /// Addresses after these events, in short.
    fn after(known: &mut Known, now: Duration, events: impl IntoIterator<Item = Event>) -> String {
        events.into_iter().for_each(|event| known.on(event, now));
        known.members().iter().map(|member| member.address.as_str()).collect::<Vec<_>>().join(" ")
    }

    /// Two members, seen on a first day without trouble.
    fn settled() -> Known {
        let mut known = Known::new(GRACE);
        assert_eq!(after(&mut known, at(0), [read(10, &["a", "b"]), Event::Opened]), "a b");
        assert_eq!((known.settles_at(), known.revision()), (None, Some(10)));
        known
    }

    #[test]
    fn changes_count_at_once() {
        let mut known = settled();
        assert_eq!(after(&mut known, at(1), [put(12, "c"), deleted(15, "a")]), "b c");
        assert_eq!(known.revision(), Some(15));
        assert_eq!(after(&mut known, at(2), [read(20, &["d"])]), "d");
    }

    #[test]
    fn an_outage_changes_nothing_and_the_missing_have_time_to_come_back() {
        let mut known = settled();
        assert_eq!(after(&mut known, at(9), [Event::Lost]), "a b");
        assert_eq!(known.settles_at(), None);
        // Long after, the registry is back without its leases.
        assert_eq!(after(&mut known, at(400), [Event::Opened, deleted(11, "a"), deleted(12, "b")]), "a b");
        assert_eq!(known.settles_at(), Some(at(406)));
        assert_eq!(after(&mut known, at(403), [put(13, "a"), put(14, "c")]), "a b c");
        // A reading before the time is over drops nobody, one after it does.
        assert_eq!(after(&mut known, at(404), [read(15, &["a", "c"])]), "a b c");
        assert_eq!(after(&mut known, at(406), [read(15, &["a", "c"])]), "a c");
        assert_eq!(known.settles_at(), None);
        assert_eq!(after(&mut known, at(407), [deleted(16, "c")]), "a");
    }

    #[test]
    fn a_second_outage_gives_the_time_anew() {
        let mut known = settled();
        let events = [Event::Lost, Event::Opened, deleted(11, "a")];
        assert_eq!(after(&mut known, at(10), events), "a b");
        assert_eq!(after(&mut known, at(12), [Event::Lost]), "a b");
        assert_eq!(after(&mut known, at(17), [Event::Opened]), "a b");
        assert_eq!(known.settles_at(), Some(at(23)));
        assert_eq!(after(&mut known, at(23), [read(12, &["b"])]), "b");
    }

    #[test]
    fn a_registry_that_was_never_there_owes_nothing() {
        let mut known = Known::new(GRACE);
        assert_eq!(after(&mut known, at(5), [Event::Lost]), "");
        assert_eq!(known.revision(), None);
        assert_eq!(after(&mut known, at(6), [read(3, &["a"]), Event::Opened, deleted(4, "a")]), "");
    }

    #[test]
    fn a_registry_that_forgot_everything_is_believed_after_the_grace() {
        let mut known = settled();
        assert_eq!(after(&mut known, at(10), [Event::Lost, read(2, &[]), Event::Opened]), "a b");
        assert_eq!(known.revision(), Some(2));
        assert_eq!(after(&mut known, at(11), [put(3, "b")]), "a b");
        assert_eq!(after(&mut known, at(16), [read(3, &["b"])]), "b");
    }
}
