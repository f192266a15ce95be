//! The gRPC service by which routers ask for tokens.

use std::time::Instant;

use futures::StreamExt;
use futures::stream::{self, BoxStream};
use node::telemetry::Span;
use proto::convert::required;
use proto::wire::decode_server::Decode;
use proto::{Attempt, Error, Generation, Handoff, RequestId, Role, wire};
use tonic::{Request, Response, Status};
use worker::core::DecodeItem;
use worker::lives::Lives;
use worker::{CallStream, fail_points, items};

/// See [`wire::decode_server::Decode`].
pub(crate) struct DecodeService {
    lives: Lives,
}

impl DecodeService {
    /// Serves tokens while the worker is one for them.
    pub(crate) fn new(lives: Lives) -> Self {
        Self { lives }
    }
}

#[tonic::async_trait]
impl Decode for DecodeService {
    type DecodeStream = BoxStream<'static, Result<wire::DecodeEvent, Status>>;

    async fn decode(
        &self,
        request: Request<wire::DecodeRequest>,
    ) -> Result<Response<Self::DecodeStream>, Status> {
        let span = Span::server("decode.request");
        let wire::DecodeRequest { generation, handoff } = request.into_inner();
        let generation: Generation = required("generation", generation)?.try_into()?;
        let handoff: Option<Handoff> = handoff.map(TryInto::try_into).transpose()?;
        let life = self.lives.of(Role::Decode)?;
        items::check_model(&life.identity.model.name, &generation)?;
        node::fail_point(fail_points::DECODE_QUEUED).await;
        life.shell.prepare(&generation).await?;
        span.count("baton.tokens", generation.tokens.len());
        let fused = handoff.is_none();
        // The fetch that the core starts for it is part of this span.
        let stream = span.scope(async { life.shell.decode(generation, handoff) }).await;
        let stream = stream.inspect_err(|error| span.fail(error))?;
        let stages = Stages { span, fused, since: Instant::now(), generating: Span::default() };
        Ok(Response::new(stream::unfold(Outgoing { stream, tokens: 0, stages }, Outgoing::next).boxed()))
    }

    async fn r#move(
        &self,
        request: Request<wire::MoveRequest>,
    ) -> Result<Response<wire::MoveResponse>, Status> {
        let wire::MoveRequest { request, attempt } = request.into_inner();
        if request.is_empty() {
            return Err(Error::invalid("request", "must not be empty").into());
        }
        self.lives.of(Role::Decode)?.shell.move_away(RequestId(request), Attempt(attempt)).await?;
        Ok(Response::new(wire::MoveResponse {}))
    }
}

/// A decode call on its way out.
struct Outgoing {
    stream: CallStream<DecodeItem>,
    /// Tokens sent.
    tokens: usize,
    stages: Stages,
}

impl Outgoing {
    async fn next(mut self) -> Option<(Result<wire::DecodeEvent, Status>, Self)> {
        // When this item is asked for, the ones before it are on their way.
        if self.tokens == fail_points::DECODE_DECODING_TOKENS {
            node::fail_point(fail_points::DECODE_DECODING).await;
        }
        let item = self.stream.next().await?;
        self.stages.told(&item, self.tokens);
        self.tokens += usize::from(matches!(item, Ok(DecodeItem::Token(_))));
        let event = item.map(items::decode_event).map_err(Into::into);
        Some((event, self))
    }
}

/// What the core tells of its time, as spans.
struct Stages {
    span: Span,
    /// The prompt is computed here.
    fused: bool,
    /// When the call was opened.
    since: Instant,
    /// From the first token on.
    generating: Span,
}

impl Stages {
    /// An item comes, after so many tokens.
    fn told(&mut self, item: &Result<DecodeItem, Error>, tokens: usize) {
        let token = match item {
            Ok(DecodeItem::Token(token)) if tokens == 0 || token.finish.is_some() => token,
            Ok(DecodeItem::Admitted { skipped_tokens }) => {
                return self.span.count("baton.tokens.cached", *skipped_tokens);
            }
            Ok(DecodeItem::Moved { .. }) => {
                self.generating.count("baton.tokens", tokens);
                // Nor does the reader of this come back.
                return drop((std::mem::take(&mut self.generating), std::mem::take(&mut self.span)));
            }
            Ok(DecodeItem::Token(_)) => return,
            Err(error) => return self.span.fail(error),
        };
        if tokens == 0 {
            if self.fused {
                let now = Instant::now();
                let scheduled = self.since.checked_add(token.queue_wait).map_or(now, |at| at.min(now));
                self.span.child_since("decode.queue", self.since).end_at(scheduled);
                drop(self.span.child_since("decode.prefill", scheduled));
            }
            self.generating = self.span.child("decode.generate");
        }
        if token.finish.is_some() {
            self.generating.count("baton.tokens", tokens + 1);
            // The reader of the last token need not come back.
            drop((std::mem::take(&mut self.generating), std::mem::take(&mut self.span)));
        }
    }
}
