//! A bare server of events on axum: takes a body, gives as many events of the same size at the same pace.

use std::convert::Infallible;
use std::time::Duration;

use anyhow::{Context as _, Result};
use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::response::sse::{Event, Sse};
use axum::routing::post;
use futures::Stream;
use tokio::sync::watch;

use crate::client;

/// What it gives.
pub(crate) struct Settings {
    /// Where it listens.
    pub(crate) address: String,
    /// Events that come one by one. Before them one comes at once, and after the last one two more.
    pub(crate) tokens: usize,
    /// Bytes of each event, framing included.
    pub(crate) event_bytes: usize,
    /// Time between two, the same for all streams.
    pub(crate) interval: Duration,
}

impl Settings {
    /// As the command line has it.
    pub(crate) fn arguments(&self) -> Vec<String> {
        let interval = self.interval.as_micros();
        [
            "echo",
            &self.address,
            &self.tokens.to_string(),
            &self.event_bytes.to_string(),
            &interval.to_string(),
        ]
        .map(ToOwned::to_owned)
        .to_vec()
    }

    /// The other way round, without the first word.
    pub(crate) fn parse(arguments: &mut impl Iterator<Item = String>) -> Result<Self> {
        let mut next = || arguments.next().context("usage: cost echo ADDRESS TOKENS BYTES MICROSECONDS");
        Ok(Self {
            address: next()?,
            tokens: next()?.parse()?,
            event_bytes: next()?.parse()?,
            interval: Duration::from_micros(next()?.parse()?),
        })
    }
}

#[derive(Clone)]
struct Echo {
    tokens: usize,
    data: String,
    /// Counts the steps of all streams.
    step: watch::Receiver<u64>,
}

/// Serves until the process is killed.
pub(crate) async fn serve(settings: &Settings) -> Result<()> {
    let (step, steps) = watch::channel(0);
    let echo = Echo {
        tokens: settings.tokens,
        data: "x".repeat(settings.event_bytes.saturating_sub("data: \n\n".len())),
        step: steps,
    };
    let app = Router::new().route(client::PATH, post(answer)).with_state(echo);
    let listener = tokio::net::TcpListener::bind(&settings.address).await?;
    let interval = settings.interval.max(Duration::from_micros(1));
    let pace = async move {
        let mut ticks = tokio::time::interval(interval);
        loop {
            ticks.tick().await;
            step.send_modify(|step| *step += 1);
        }
    };
    tokio::select! {
        served = axum::serve(listener, app) => Ok(served?),
        () = pace => Ok(()),
    }
}

async fn answer(State(echo): State<Echo>, body: Bytes) -> Sse<impl Stream<Item = Result<Event, Infallible>>> {
    drop(body);
    let total = echo.tokens + 3;
    Sse::new(futures::stream::unfold((echo, 0), move |(mut echo, sent)| async move {
        if sent == total {
            return None;
        }
        let waits = (1..=echo.tokens).contains(&sent);
        if waits {
            echo.step.changed().await.ok()?;
        }
        let event = Event::default().data(&echo.data);
        Some((Ok(event), (echo, sent + 1)))
    }))
}
