//! What each model has served, and where the time of its requests went: of all APIs, readiness probes left out.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// How often something happened, and how long it took in all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counted {
    pub(crate) count: u64,
    pub(crate) time: Duration,
}

impl Counted {
    fn add(&mut self, time: Duration) {
        self.count += 1;
        self.time = self.time.saturating_add(time);
    }
}

/// What a model has served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ModelStatistics {
    /// When the last request arrived, milliseconds of Unix time; 0 before the first.
    pub(crate) last_arrival_ms: u64,
    /// Requests that were answered, from arrival to the end.
    pub(crate) success: Counted,
    /// Requests that failed or were given up, likewise.
    pub(crate) fail: Counted,
    /// Of those that were answered: waiting for a turn and for the first step.
    pub(crate) queue: Counted,
    /// Of those that were answered: checks and tokenising.
    pub(crate) input: Counted,
    /// Of those that were answered: the rest.
    pub(crate) infer: Counted,
}

/// Where the time of one request went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Spent {
    /// From arrival to the end.
    pub(crate) total: Duration,
    /// Waiting for a turn and for the first step.
    pub(crate) queue: Duration,
    /// Checks and tokenising.
    pub(crate) input: Duration,
}

/// Statistics by model. Only models that are or were served come in here, so there are few.
#[derive(Debug, Default)]
pub(crate) struct Statistics {
    models: Mutex<HashMap<String, ModelStatistics>>,
}

impl Statistics {
    /// A request of the model has ended.
    pub(crate) fn ended(&self, model: &str, arrived_ms: u64, answered: bool, spent: Spent) {
        let mut models = self.models.lock().unwrap_or_else(PoisonError::into_inner);
        let model = match models.get_mut(model) {
            Some(model) => model,
            None => models.entry(model.to_owned()).or_default(),
        };
        model.last_arrival_ms = model.last_arrival_ms.max(arrived_ms);
        if !answered {
            model.fail.add(spent.total);
            return;
        }
        model.success.add(spent.total);
        model.queue.add(spent.queue);
        model.input.add(spent.input);
        model.infer.add(spent.total.saturating_sub(spent.queue).saturating_sub(spent.input));
    }

    /// What the model has served so far.
    pub(crate) fn of(&self, model: &str) -> ModelStatistics {
        let models = self.models.lock().unwrap_or_else(PoisonError::into_inner);
        models.get(model).copied().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_is_split_without_rest() {
        let ms = Duration::from_millis;
        let statistics = Statistics::default();
        statistics.ended("m", 5, true, Spent { total: ms(10), queue: ms(2), input: ms(1) });
        statistics.ended("m", 4, true, Spent { total: ms(1), queue: ms(2), input: ms(1) });
        statistics.ended("m", 7, false, Spent { total: ms(3), queue: ms(1), input: ms(1) });
        let counted = |count, time| Counted { count, time: ms(time) };
        assert_eq!(
            statistics.of("m"),
            ModelStatistics {
                last_arrival_ms: 7,
                success: counted(2, 11),
                fail: counted(1, 3),
                queue: counted(2, 4),
                input: counted(2, 2),
                infer: counted(2, 7),
            }
        );
        assert_eq!(statistics.of("other"), ModelStatistics::default());
    }
}
