//! The requests that a gateway has, for an operator's eyes.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use node::debug::Excerpt;
use serde::Serialize;

/// The table of them.
#[derive(Debug, Default)]
pub(crate) struct InHouse {
    requests: Mutex<BTreeMap<u64, Arc<Request>>>,
    /// Numbers them by arrival.
    arrivals: AtomicU64,
}

/// One of them, in the table until this is dropped.
#[derive(Debug)]
pub(crate) struct Entry {
    table: Arc<InHouse>,
    number: u64,
    request: Arc<Request>,
}

#[derive(Debug)]
struct Request {
    id: String,
    dialect: &'static str,
    arrived: Duration,
    model: OnceLock<String>,
    placed: AtomicBool,
    running: AtomicBool,
}

/// A request as a dump shows it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct RequestDump {
    id: String,
    dialect: &'static str,
    /// Arriving, waiting (for its first token) or running.
    state: &'static str,
    model: Option<String>,
    age_seconds: f64,
}

impl InHouse {
    /// Adds a request that arrived at `now`.
    pub(crate) fn add(self: &Arc<Self>, id: String, dialect: &'static str, now: Duration) -> Entry {
        let request = Arc::new(Request {
            id,
            dialect,
            arrived: now,
            model: OnceLock::new(),
            placed: AtomicBool::new(false),
            running: AtomicBool::new(false),
        });
        let number = self.arrivals.fetch_add(1, Ordering::Relaxed);
        self.requests().insert(number, Arc::clone(&request));
        Entry { table: Arc::clone(self), number, request }
    }

    /// The oldest of them, as they are at `now`.
    pub(crate) fn dump(&self, now: Duration) -> Excerpt<RequestDump> {
        let (count, oldest) = {
            let requests = self.requests();
            (requests.len(), Excerpt::of(requests.len(), requests.values().cloned()).shown)
        };
        Excerpt::of(count, oldest.iter().map(|request| request.dump(now)))
    }

    fn requests(&self) -> MutexGuard<'_, BTreeMap<u64, Arc<Request>>> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Request {
    fn dump(&self, now: Duration) -> RequestDump {
        let state = if self.running.load(Ordering::Relaxed) {
            "running"
        } else if self.placed.load(Ordering::Relaxed) {
            "waiting for its first token"
        } else if self.model.get().is_some() {
            "waiting for a place"
        } else {
            "arriving"
        };
        RequestDump {
            id: self.id.clone(),
            dialect: self.dialect,
            state,
            model: self.model.get().cloned(),
            age_seconds: now.saturating_sub(self.arrived).as_secs_f64(),
        }
    }
}

impl Entry {
    /// The request was read: it is for that model.
    pub(crate) fn read(&self, model: &str) {
        self.request.model.get_or_init(|| model.to_owned());
    }

    /// It has a place among those that run.
    pub(crate) fn placed(&self) {
        self.request.placed.store(true, Ordering::Relaxed);
    }

    /// It has its first token.
    pub(crate) fn running(&self) {
        self.request.running.store(true, Ordering::Relaxed);
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.table.requests().remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_there_from_its_arrival_to_its_end() {
        let table = Arc::new(InHouse::default());
        let states = |table: &InHouse| -> Vec<&'static str> {
            table.dump(Duration::from_secs(3)).shown.iter().map(|request| request.state).collect()
        };
        let first = table.add("a".into(), "openai", Duration::from_secs(1));
        let second = table.add("b".into(), "triton", Duration::from_secs(2));
        assert_eq!(states(&table), ["arriving", "arriving"]);
        first.read("m");
        assert_eq!(states(&table), ["waiting for a place", "arriving"]);
        first.placed();
        second.read("m");
        assert_eq!(states(&table), ["waiting for its first token", "waiting for a place"]);
        first.running();
        let dump = table.dump(Duration::from_secs(3)).shown.remove(0);
        assert_eq!((dump.id.as_str(), dump.state, dump.age_seconds), ("a", "running", 2.0));
        drop(first);
        assert_eq!(states(&table), ["waiting for a place"]);
    }
}
