//! The gRPC service by which routers ask for prefills.

use std::time::{Duration, Instant};

use futures::StreamExt;
use futures::stream::{self, BoxStream};
use node::telemetry::Span;
use proto::convert::required;
use proto::wire::prefill_server::Prefill;
use proto::{Error, Generation, Role, wire};
use tonic::{Request, Response, Status};
use worker::lives::Lives;
use worker::{CallStream, fail_points, items};

use worker::core::PrefillItem;

/// See [`wire::prefill_server::Prefill`].
pub(crate) struct PrefillService {
    lives: Lives,
}

impl PrefillService {
    /// Serves prefills while the worker is one for them.
    pub(crate) fn new(lives: Lives) -> Self {
        Self { lives }
    }
}

#[tonic::async_trait]
impl Prefill for PrefillService {
    type PrefillStream = BoxStream<'static, Result<wire::PrefillEvent, Status>>;

    async fn prefill(
        &self,
        request: Request<wire::PrefillRequest>,
    ) -> Result<Response<Self::PrefillStream>, Status> {
        let span = Span::server("prefill.request");
        let generation: Generation = required("generation", request.into_inner().generation)?.try_into()?;
        let life = self.lives.of(Role::Prefill)?;
        items::check_model(&life.identity.model.name, &generation)?;
        node::fail_point(fail_points::PREFILL_QUEUED).await;
        life.shell.prepare(&generation).await?;
        span.count("baton.tokens", generation.tokens.len());
        let stream = life.shell.prefill(generation).inspect_err(|error| span.fail(error))?;
        let outgoing = Outgoing { stream, stages: Stages { span, since: Instant::now() } };
        Ok(Response::new(stream::unfold(outgoing, Outgoing::next).boxed()))
    }
}

/// A prefill call on its way out.
struct Outgoing {
    stream: CallStream<PrefillItem>,
    stages: Stages,
}

impl Outgoing {
    async fn next(mut self) -> Option<(Result<wire::PrefillEvent, Status>, Self)> {
        let item = self.stream.next().await?;
        self.stages.told(&item);
        let event = item.map(items::prefill_event).map_err(Into::into);
        Some((event, self))
    }
}

/// What the core tells of its time, as spans.
struct Stages {
    span: Span,
    /// When the stage that runs began.
    since: Instant,
}

impl Stages {
    fn told(&mut self, item: &Result<PrefillItem, Error>) {
        match item {
            Ok(PrefillItem::Issued { queue_wait, cached_tokens, .. }) => {
                self.ended("prefill.queue", *queue_wait);
                self.span.count("baton.tokens.cached", *cached_tokens);
            }
            Ok(PrefillItem::Done { prefill, .. }) => {
                self.ended("prefill.compute", *prefill);
                self.span = Span::default();
            }
            Err(error) => self.span.fail(error),
        }
    }

    /// A stage took so long.
    fn ended(&mut self, name: &'static str, took: Duration) {
        let end = self.since.checked_add(took).map_or_else(Instant::now, |end| end.min(Instant::now()));
        self.span.child_since(name, self.since).end_at(end);
        self.since = end;
    }
}
