//! Ready means routable: readiness turns true only when a request of its own came back through real workers.

use std::sync::Arc;
use std::time::Duration;

use checkpoint::Encode;
use node::telemetry::TraceContext;
use node::{Clock, Standing};
use proto::{Attempt, Error, Generation, Priority, Reason, RequestId, SamplingParams, StopConditions};
use tokio::sync::{Notify, watch};
use uuid::Uuid;

use crate::metrics;
use crate::models::{Model, Served};
use crate::resume::Event;
use crate::route::Routers;

/// What a probe continues.
const PROMPT: &str = "The quick brown fox jumps over the lazy dog";
/// Tokens that a probe asks for: one that prefill samples and one that decode does.
const TOKENS: usize = 2;
/// Longest time for a probe.
const PROBE_MAX: Duration = Duration::from_secs(10);
/// Pause after a probe that failed.
const RETRY: Duration = Duration::from_millis(250);
/// Shortest time from a probe that succeeded to the next.
const REST: Duration = Duration::from_secs(1);

/// Probes, and says what came of it.
pub(crate) struct Readiness {
    pub(crate) routers: Arc<Routers>,
    pub(crate) served: watch::Receiver<Served>,
    pub(crate) clock: Clock,
    /// Told by requests that failed.
    pub(crate) doubt: Arc<Notify>,
    pub(crate) ready: watch::Sender<bool>,
    /// Says the same to operators, and why not.
    pub(crate) standing: Standing,
}

impl Readiness {
    /// Probes at the start, when models or members change, and when requests fail. Never returns.
    pub(crate) async fn keep(mut self) {
        let mut members = self.routers.members();
        loop {
            let outcome = self.probe_all().await;
            let is_ready = outcome.is_ok();
            let changed = self.ready.send_if_modified(|ready| std::mem::replace(ready, is_ready) != is_ready);
            match &outcome {
                Ok(()) => self.standing.ready(),
                Err(error) => self.standing.not_ready(error.to_string()),
            }
            match outcome {
                Ok(()) if changed => tracing::info!("ready: a probe went through"),
                Ok(()) => {}
                Err(error) if changed => tracing::warn!(%error, "not ready"),
                Err(error) => tracing::debug!(%error, "still not ready"),
            }
            if !is_ready {
                tokio::time::sleep(RETRY).await;
                continue;
            }
            tokio::time::sleep(REST).await;
            tokio::select! {
                Ok(()) = self.served.changed() => {}
                Ok(()) = members.changed() => {}
                () = self.doubt.notified() => {}
            }
        }
    }

    async fn probe_all(&mut self) -> Result<(), Error> {
        let served = self.served.borrow_and_update().clone();
        if !served.placeable || served.models.is_empty() {
            return Err(Error::new(Reason::WorkerLost, "no model can be placed"));
        }
        for model in &served.models {
            let probed = tokio::time::timeout(PROBE_MAX, self.probe(model)).await;
            let outcome = probed.unwrap_or_else(|_| {
                let message = format!("no answer within {} s", PROBE_MAX.as_secs());
                Err(Error::new(Reason::Deadline, message))
            });
            metrics::answered("probe", if outcome.is_ok() { 200 } else { 503 });
            outcome.map_err(|error| {
                Error::new(error.reason, format!("probe of {}: {}", model.description.name, error.message))
            })?;
        }
        Ok(())
    }

    async fn probe(&self, model: &Model) -> Result<(), Error> {
        let mut last = self.clock.now();
        let mut call = match self.routers.route(probe_generation(model)?, &TraceContext::default()).await {
            Ok(call) => call,
            Err(event) => return Err(failure(event)),
        };
        for index in 0..TOKENS {
            let token = match self.routers.next(&mut call).await {
                Event::Token(token) => token,
                event => return Err(failure(event)),
            };
            if token.index != index || token.finish.is_some() != (index + 1 == TOKENS) {
                let message = format!(
                    "token {index} of {TOKENS}: got index {}, finish {:?}",
                    token.index, token.finish
                );
                return Err(Error::new(Reason::Internal, message));
            }
            let latency = self.clock.now().saturating_sub(last);
            last += latency;
            if index == 0 {
                metrics::first_token(latency, true);
            } else {
                metrics::next_token(latency, true);
            }
        }
        Ok(())
    }
}

fn probe_generation(model: &Model) -> Result<Generation, Error> {
    let options = Encode { add_bos: true, parse_special: false };
    let tokens = model
        .text
        .encode(PROMPT, options)
        .map_err(|error| Error::new(Reason::Internal, error.to_string()))?;
    Ok(Generation {
        request: RequestId(format!("probe-{}", Uuid::new_v4().simple())),
        attempt: Attempt::default(),
        model: model.description.name.clone(),
        tokens,
        generated: 0,
        sampling: SamplingParams::default(),
        // No end-of-sequence ids: the second token must come from decode.
        stop: StopConditions { max_tokens: TOKENS, ..StopConditions::default() },
        time_left: PROBE_MAX,
        probe: true,
        beside: None,
        session: None,
        priority: Priority::default(),
    })
}

fn failure(event: Event) -> Error {
    match event {
        Event::Lost(error) | Event::Refused(error) => error,
        Event::NoRouter => Error::new(Reason::WorkerLost, "no router is known"),
        Event::Start | Event::Tick | Event::Token(_) => Error::new(Reason::Internal, "not a failure"),
    }
}
