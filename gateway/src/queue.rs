//! Who runs and who waits: so many requests at once, so many more in line, the rest refused.
//!
//! The line is ordered by priority, then by arrival. A place is a guard: dropping it lets the next one in.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

use crate::domain::Priority;

/// The places and the line before them.
#[derive(Debug)]
pub(crate) struct Queue {
    running_max: usize,
    waiting_max: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    running: usize,
    /// Numbers those that came to the line.
    arrivals: u64,
    /// Each is told when it has a place.
    waiting: BTreeMap<(Priority, u64), oneshot::Sender<()>>,
}

/// As many run and wait as may.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Full {
    /// How many run.
    pub(crate) running: usize,
    /// How many wait.
    pub(crate) waiting: usize,
}

impl Queue {
    /// Lets `running_max` run and as many as `waiting_max` wait.
    pub(crate) fn new(running_max: usize, waiting_max: usize) -> Self {
        Self { running_max: running_max.max(1), waiting_max, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Those that wait for a place now.
    pub(crate) fn waiting(&self) -> usize {
        self.state().waiting.len()
    }

    /// Places that are free now, and all there are.
    pub(crate) fn places(&self) -> (usize, usize) {
        (self.running_max.saturating_sub(self.state().running), self.running_max)
    }

    /// A place, at once or when it is this one's turn. Dropping the future leaves the line.
    ///
    /// # Errors
    /// When the line is full.
    pub(crate) async fn place(self: &Arc<Self>, priority: Priority) -> Result<Place, Full> {
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
            let key = (priority, state.arrivals);
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
struct Waiting {
    queue: Arc<Queue>,
    key: (Priority, u64),
    turn: Option<oneshot::Receiver<()>>,
}

impl Waiting {
    async fn turn(mut self) -> Result<Place, Full> {
        if let Some(turn) = &mut self.turn {
            turn.await.expect("the line outlives those who stand in it");
        }
        self.turn = None;
        Ok(Place { queue: self.queue.clone() })
    }
}

impl Drop for Waiting {
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
pub(crate) struct Place {
    queue: Arc<Queue>,
}

impl Drop for Place {
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
        let first = queue.place(Priority(5)).now_or_never().unwrap().unwrap();
        let mut later = Box::pin(queue.place(Priority(5)));
        let mut sooner = Box::pin(queue.place(Priority(1)));
        let mut second = Box::pin(queue.place(Priority(1)));
        for waiting in [&mut later, &mut sooner, &mut second] {
            assert!(now(waiting).is_none());
        }
        let full = queue.place(Priority(1)).now_or_never().unwrap().unwrap_err();
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
        let first = queue.place(Priority(5)).now_or_never().unwrap().unwrap();
        let mut gone = Box::pin(queue.place(Priority(1)));
        let mut told = Box::pin(queue.place(Priority(2)));
        assert!(now(&mut gone).is_none() && now(&mut told).is_none());
        drop(gone);
        drop(first);
        // Its turn has come, and it leaves without having looked.
        drop(told);
        assert_eq!(queue.places(), (1, 1));
        assert!(queue.place(Priority(5)).now_or_never().unwrap().is_ok());
    }
}
