//! The requests that a router has, for an operator's eyes.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use node::debug::Excerpt;
use proto::{Placed, RequestId};
use serde::Serialize;

use crate::dispatch::{Dispatch, RequestState};

/// The table of them.
#[derive(Debug, Default)]
pub(crate) struct InFlight {
    requests: Mutex<BTreeMap<u64, Arc<Request>>>,
    /// Numbers them by arrival.
    arrivals: AtomicU64,
}

/// One of them, in the table until this is dropped.
#[derive(Debug)]
pub(crate) struct Entry {
    table: Arc<InFlight>,
    number: u64,
    request: Arc<Request>,
}

#[derive(Debug)]
struct Request {
    id: RequestId,
    probe: bool,
    arrived: Duration,
    tokens: AtomicUsize,
    place: Mutex<Place>,
}

/// What changes rarely, next to tokens.
#[derive(Clone, Debug, PartialEq)]
struct Place {
    state: RequestState,
    attempt: u32,
    prefill: Option<String>,
    decode: Option<String>,
    failures: u32,
}

/// A request as a dump shows it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct RequestDump {
    id: String,
    state: &'static str,
    attempt: u32,
    /// Attempts that failed here.
    retries: u32,
    prefill: Option<String>,
    decode: Option<String>,
    age_seconds: f64,
    tokens: usize,
    probe: bool,
}

impl InFlight {
    /// Adds a request that arrived at `now`.
    pub(crate) fn add(self: &Arc<Self>, id: RequestId, probe: bool, now: Duration) -> Entry {
        let place =
            Place { state: RequestState::Queued, attempt: 0, prefill: None, decode: None, failures: 0 };
        let request = Arc::new(Request {
            id,
            probe,
            arrived: now,
            tokens: AtomicUsize::new(0),
            place: Mutex::new(place),
        });
        let number = self.arrivals.fetch_add(1, Ordering::Relaxed);
        lock(&self.requests).insert(number, Arc::clone(&request));
        Entry { table: Arc::clone(self), number, request }
    }

    /// The oldest of them, as they are at `now`.
    pub(crate) fn dump(&self, now: Duration) -> Excerpt<RequestDump> {
        let (count, oldest) = {
            let requests = lock(&self.requests);
            (requests.len(), Excerpt::of(requests.len(), requests.values().cloned()).shown)
        };
        Excerpt::of(count, oldest.iter().map(|request| request.dump(now)))
    }
}

impl Request {
    fn dump(&self, now: Duration) -> RequestDump {
        let place = lock(&self.place).clone();
        RequestDump {
            id: self.id.0.clone(),
            state: place.state.name(),
            attempt: place.attempt,
            retries: place.failures,
            prefill: place.prefill,
            decode: place.decode,
            age_seconds: now.saturating_sub(self.arrived).as_secs_f64(),
            tokens: self.tokens.load(Ordering::Relaxed),
            probe: self.probe,
        }
    }
}

impl Entry {
    /// Takes over where the dispatch is.
    pub(crate) fn follow(&self, dispatch: &Dispatch) {
        let generation = dispatch.generation();
        self.request.tokens.store(generation.generated, Ordering::Relaxed);
        let mut place = lock(&self.request.place);
        place.state = dispatch.state();
        place.attempt = generation.attempt.0;
    }

    /// An attempt was placed.
    pub(crate) fn placed(&self, placed: &Placed) {
        let mut place = lock(&self.request.place);
        place.prefill.clone_from(&placed.prefill);
        place.decode = Some(placed.decode.clone());
    }

    /// An attempt failed.
    pub(crate) fn failed(&self) {
        let mut place = lock(&self.request.place);
        place.failures += 1;
        (place.prefill, place.decode) = (None, None);
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        lock(&self.table.requests).remove(&self.number);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
