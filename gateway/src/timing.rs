//! Where the time of a request went, as parts that add up to it.
//!
//! Consecutive marks on the gateway's own clock cut the time; each says what the time since the one before was. What a
//! worker reports of its own time subdivides the interval that it lies in, as far as it fits, so that no clock but one is
//! ever subtracted from.

use std::fmt::Write as _;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::ser::{Serialize, SerializeMap, Serializer};

/// What a request's time was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Its body came and was parsed.
    Read,
    /// Its text became tokens, and its parameters were checked.
    Tokenise,
    /// It waited for a place among those that run.
    Queue,
    /// The router found workers for it.
    Placement,
    /// It waited for the first step of its prefill.
    PrefillQueue,
    /// Its prompt was computed.
    Prefill,
    /// Its KV moved to the decode worker, as far as that took longer than the first token.
    Transfer,
    /// Its tokens were computed, with what each waited for its step.
    Decode,
    /// A router or a worker was lost, or gave the request away, and what had been computed was computed again.
    Replay,
    /// Tokens became text and events, and the client took them.
    Write,
    /// The rest: the ways between processes, and what none of them has told.
    Other,
}

impl Part {
    /// Every part, in the order in which most requests go through them.
    pub const ALL: [Self; 11] = [
        Self::Read,
        Self::Tokenise,
        Self::Queue,
        Self::Placement,
        Self::PrefillQueue,
        Self::Prefill,
        Self::Transfer,
        Self::Decode,
        Self::Replay,
        Self::Write,
        Self::Other,
    ];

    /// The name in answers, headers and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Tokenise => "tokenise",
            Self::Queue => "queue",
            Self::Placement => "placement",
            Self::PrefillQueue => "prefill_queue",
            Self::Prefill => "prefill",
            Self::Transfer => "transfer",
            Self::Decode => "decode",
            Self::Replay => "replay",
            Self::Write => "write",
            Self::Other => "other",
        }
    }
}

/// The parts of a request's time so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Parts {
    /// When the request arrived, nanoseconds of the gateway's clock.
    arrived: u64,
    /// When the last mark was set, likewise.
    marked: u64,
    /// Nanoseconds of each part, in the order of [`Part::ALL`].
    nanos: [u64; Part::ALL.len()],
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

impl Parts {
    /// A request that arrives now.
    pub fn new(now: Duration) -> Self {
        Self { arrived: nanos(now), marked: nanos(now), nanos: [0; Part::ALL.len()] }
    }

    /// The time since the last mark was this.
    pub fn mark(&mut self, part: Part, now: Duration) {
        self.divide(&[], part, now);
    }

    /// Of the time since the last mark this much was that, as it fits, and the rest was `rest`.
    pub fn divide(&mut self, told: &[(Part, Duration)], rest: Part, now: Duration) {
        // A clock never goes back; a mark from before the last one is at the last one.
        let now = nanos(now).max(self.marked);
        let mut left = now - self.marked;
        for (part, time) in told {
            let time = nanos(*time).min(left);
            self.nanos[*part as usize] += time;
            left -= time;
        }
        self.nanos[rest as usize] += left;
        self.marked = now;
    }

    /// One of them.
    pub fn of(&self, part: Part) -> Duration {
        Duration::from_nanos(self.nanos[part as usize])
    }

    /// From the arrival to the last mark: what the parts add up to.
    pub fn total(&self) -> Duration {
        Duration::from_nanos(self.marked - self.arrived)
    }

    /// The parts that there are, each with its name.
    pub fn named(&self) -> impl Iterator<Item = (&'static str, Duration)> {
        Part::ALL.into_iter().map(|part| (part.name(), self.of(part))).filter(|(_, time)| !time.is_zero())
    }

    /// The value of a `Server-Timing` header: <https://www.w3.org/TR/server-timing/>, durations in milliseconds.
    pub fn header(&self) -> String {
        let mut header = format!("total;dur={:.3}", self.total().as_secs_f64() * 1e3);
        for (name, time) in self.named() {
            let _ = write!(header, ", {name};dur={:.3}", time.as_secs_f64() * 1e3);
        }
        header
    }
}

/// Milliseconds to the microsecond: `total_ms`, then every part.
impl Serialize for Parts {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let milliseconds = |time: Duration| time.as_micros() as f64 / 1e3;
        let mut map = serializer.serialize_map(Some(1 + Part::ALL.len()))?;
        map.serialize_entry("total_ms", &milliseconds(self.total()))?;
        for part in Part::ALL {
            map.serialize_entry(&format_args!("{}_ms", part.name()), &milliseconds(self.of(part)))?;
        }
        map.end()
    }
}

/// The parts of a request that several write: who lets it in, who asks for its tokens, who sends them.
#[derive(Debug)]
pub(crate) struct Timing(Mutex<Parts>);

impl Timing {
    pub(crate) fn new(now: Duration) -> Self {
        Self(Mutex::new(Parts::new(now)))
    }

    pub(crate) fn parts(&self) -> MutexGuard<'_, Parts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// See [`Parts::mark`].
    pub(crate) fn mark(&self, part: Part, now: Duration) {
        self.parts().mark(part, now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_add_up_whatever_is_told() {
        let ms = Duration::from_millis;
        let mut parts = Parts::new(ms(100));
        parts.mark(Part::Read, ms(101));
        parts.divide(&[(Part::PrefillQueue, ms(2)), (Part::Prefill, ms(5))], Part::Other, ms(111));
        // More is told than there was: what comes first has it.
        parts.divide(&[(Part::Decode, ms(9)), (Part::Prefill, ms(9))], Part::Transfer, ms(121));
        // A time that was before the last mark.
        parts.mark(Part::Replay, ms(120));
        parts.mark(Part::Write, ms(122));
        let of = |part| parts.of(part).as_millis();
        assert_eq!(
            Part::ALL.map(of),
            [1, 0, 0, 0, 2, 6, 0, 9, 0, 1, 3],
            "read, prefill_queue, prefill, decode, write, other"
        );
        assert_eq!(parts.total(), ms(22));
        assert_eq!(Part::ALL.map(|part| parts.of(part)).iter().sum::<Duration>(), parts.total());
        assert_eq!(
            parts.header(),
            "total;dur=22.000, read;dur=1.000, prefill_queue;dur=2.000, prefill;dur=6.000, decode;dur=9.000, \
             write;dur=1.000, other;dur=3.000"
        );
    }

    #[test]
    fn every_part_has_its_place() {
        for (index, part) in Part::ALL.into_iter().enumerate() {
            assert_eq!(part as usize, index, "{part:?}");
        }
    }
}
