//! Who runs and who waits: so many requests at once, so many more in line, the rest refused.
//!
//! The line is ordered by a key, the smallest first, then by arrival. A place is a guard: dropping it lets the next one in.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

/// The places and the line before them, which is ordered by `K`.
#[derive(Debug)]
pub struct Queue<K: Ord + Copy> {
    running_max: usize,
    waiting_max: usize,
    state: Mutex<State<K>>,
}

#[derive(Debug)]
struct State<K> {
    running: usize,
    /// Numbers those that came to the line.
    arrivals: u64,
    /// Each is told when it has a place.
    waiting: BTreeMap<(K, u64), oneshot::Sender<()>>,
}

/// As many run and wait as may.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full {
    /// How many run.
    pub running: usize,
    /// How many wait.
    pub waiting: usize,
}

impl<K: Ord + Copy> Queue<K> {
    /// Lets `running_max` run and as many as `waiting_max` wait.
    pub fn new(running_max: usize, waiting_max: usize) -> Self {
        let state = State { running: 0, arrivals: 0, waiting: BTreeMap::new() };
        Self { running_max: running_max.max(1), waiting_max, state: Mutex::new(state) }
    }

    fn state(&self) -> MutexGuard<'_, State<K>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Those that wait for a place now.
    pub fn waiting(&self) -> usize {
        self.state().waiting.len()
    }

    /// Places that are free now, and all there are.
    pub fn places(&self) -> (usize, usize) {
        (self.running_max.saturating_sub(self.state().running), self.running_max)
    }

    /// What a request would find that came now; `None` when it could run or wait.
    pub fn full(&self) -> Option<Full> {
        let state = self.state();
        let (running, waiting) = (state.running, state.waiting.len());
        (running >= self.running_max && waiting >= self.waiting_max).then_some(Full { running, waiting })
    }

    /// A place, at once or when it is this one's turn. Dropping the future leaves the line.
    ///
    /// # Errors
    /// When the line is full.
    pub async fn place(self: &Arc<Self>, key: K) -> Result<Place<K>, Full> {
        let waiting = {
            let mut state = self.state();
            if state.running < self.running_max {
                state.running += 1;
                return Ok(Place { queue: self.clone() });
            }
            if state.waiting.len() >= self.waiting_max {
                return Err(Full { running: state.running, waiting: state.waiting.len() });
            }
            let (told, turn) = oneshot::channel();
            let key = (key, state.arrivals);
            state.arrivals += 1;
            state.waiting.insert(key, told);
            Waiting { queue: self.clone(), key, turn: Some(turn) }
        };
        waiting.turn().await
    }

    /// Somebody left a place: the first in line that is still there gets it.
    fn next(&self) {
        let mut state = self.state();
        while let Some((_, told)) = state.waiting.pop_first() {
            if told.send(()).is_ok() {
                return;
            }
        }
        state.running -= 1;
    }
}

/// One in line.
struct Waiting<K: Ord + Copy> {
    queue: Arc<Queue<K>>,
    key: (K, u64),
    turn: Option<oneshot::Receiver<()>>,
}

impl<K: Ord + Copy> Waiting<K> {
    async fn turn(mut self) -> Result<Place<K>, Full> {
        if let Some(turn) = &mut self.turn {
            turn.await.expect("the line outlives those who stand in it");
        }
        self.turn = None;
        Ok(Place { queue: self.queue.clone() })
    }
}

impl<K: Ord + Copy> Drop for Waiting<K> {
    fn drop(&mut self) {
        let Some(mut turn) = self.turn.take() else { return };
        self.queue.state().waiting.remove(&self.key);
        // The turn may have come in the same moment: then the place goes to the next.
        turn.close();
        if turn.try_recv().is_ok() {
            self.queue.next();
        }
    }
}

/// The right to run.
#[derive(Debug)]
pub struct Place<K: Ord + Copy> {
    queue: Arc<Queue<K>>,
}

impl<K: Ord + Copy> Drop for Place<K> {
    fn drop(&mut self) {
        self.queue.next();
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    fn now<T>(future: &mut (impl Future<Output = T> + Unpin)) -> Option<T> {
        future.now_or_never()
    }

    #[test]
    fn the_line_goes_by_priority_then_arrival_and_has_an_end() {
        let queue = Arc::new(Queue::new(1, 3));
        let first = queue.place(5).now_or_never().unwrap().unwrap();
        let mut later = Box::pin(queue.place(5));
        let mut sooner = Box::pin(queue.place(1));
        let mut second = Box::pin(queue.place(1));
        for waiting in [&mut later, &mut sooner, &mut second] {
            assert!(now(waiting).is_none());
        }
        let full = queue.place(1).now_or_never().unwrap().unwrap_err();
        assert_eq!(full, Full { running: 1, waiting: 3 });
        assert_eq!(queue.places(), (0, 1));
        drop(first);
        assert!(now(&mut later).is_none());
        assert!(now(&mut second).is_none());
        let place = now(&mut sooner).unwrap().unwrap();
        drop(place);
        drop(now(&mut second).unwrap().unwrap());
        drop(now(&mut later).unwrap().unwrap());
        assert_eq!(queue.places(), (1, 1));
    }

    #[test]
    fn who_leaves_the_line_takes_no_place_along() {
        let queue = Arc::new(Queue::new(1, 2));
        let first = queue.place(5).now_or_never().unwrap().unwrap();
        let mut gone = Box::pin(queue.place(1));
        let mut told = Box::pin(queue.place(2));
        assert!(now(&mut gone).is_none() && now(&mut told).is_none());
        drop(gone);
        drop(first);
        // Its turn has come, and it leaves without having looked.
        drop(told);
        assert_eq!(queue.places(), (1, 1));
        assert!(queue.place(5).now_or_never().unwrap().is_ok());
    }
}
