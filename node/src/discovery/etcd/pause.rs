//! Pauses between tries, each twice as long as the last, up to a bound.

use std::time::Duration;

/// The first pause.
const FIRST: Duration = Duration::from_millis(100);

/// The pauses of one outage.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pause {
    next: Duration,
    longest: Duration,
}

impl Pause {
    /// Pauses of at most `longest`.
    pub(super) fn new(longest: Duration) -> Self {
        let longest = longest.max(FIRST);
        Self { next: FIRST, longest }
    }

    /// The next pause.
    pub(super) fn step(&mut self) -> Duration {
        let pause = self.next;
        self.next = (pause * 2).min(self.longest);
        pause
    }

    /// The outage is over.
    pub(super) fn reset(&mut self) {
        self.next = FIRST;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_a_bound() {
        let mut pause = Pause::new(Duration::from_millis(500));
        let steps: Vec<u128> = (0..5).map(|_| pause.step().as_millis()).collect();
        assert_eq!(steps, [100, 200, 400, 500, 500]);
        pause.reset();
        assert_eq!(pause.step(), FIRST);
    }
}
