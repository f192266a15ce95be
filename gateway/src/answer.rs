//! One sequence of an answer on its way: tokens from routers in, pieces of text out.

use std::sync::Arc;
use std::time::Duration;

use proto::{Generation, Placed, TokenId};

use crate::answers::{Origin, Prepared};
use crate::domain::{Finish, Piece};
use crate::fault::Fault;
use crate::metrics;
use crate::models::Model;
use crate::resume::{Action, Event, Resume};
use crate::route::Call;
use crate::service::Service;
use crate::text::Transcript;
use crate::timing::Part;

/// What is known once a request is admitted.
#[derive(Clone, Debug)]
pub(crate) struct Started {
    /// The model that answers.
    pub model: Arc<Model>,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Those tokens, if the request asks for them; empty otherwise.
    pub prompt: Arc<[TokenId]>,
    /// The prompt's text, if the request asks for it.
    pub prompt_text: Option<String>,
    /// What decides the random numbers, be it the client's or drawn.
    pub seed: u64,
}

/// A running answer. Dropping it cancels the request everywhere.
pub(crate) struct Answer {
    service: Arc<Service>,
    resume: Resume,
    origin: Origin,
    /// It is the call's first sequence, whose stages are the call's: the others run beside it.
    leads: bool,
    /// A router was lost since the last piece.
    rerouted: bool,
    /// What the last token was of its placement.
    last: Last,
    call: Option<Call>,
    /// See [`Self::placed`]; known once the call is over.
    placed: Option<Placed>,
    transcript: Transcript,
    /// Arrival, then the time of the last token.
    last_token: Duration,
    /// What the next piece's latency is: `None` for a first token that is no client's first.
    timing: Option<Timing>,
    /// The first piece, read before the answer was begun.
    ahead: Option<Piece>,
    /// See [`Prepared::discard`].
    discard: bool,
    ended: bool,
}

/// What a token was of its placement, which says where the time to the next one goes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Last {
    /// There was none.
    None,
    /// The one that prefill gives: KV moves before the next.
    Prefilled,
    /// One that decode gave.
    Decoded,
}

#[derive(Clone, Copy)]
enum Timing {
    First,
    Next,
}

impl Answer {
    /// Starts the request, which may be the first of its call, and waits for its first token, so that a refusal
    /// is known before the answer begins.
    pub(crate) async fn start(
        service: Arc<Service>,
        prepared: &Prepared,
        mut generation: Generation,
        (origin, leads): (Origin, bool),
    ) -> Result<Self, Fault> {
        let Prepared { request, model, .. } = prepared;
        let now = service.clock.now();
        let deadline = origin.arrived.saturating_add(request.deadline(service.config.timeout));
        generation.time_left = deadline.saturating_sub(now);
        let mut transcript = Transcript::new(&model.text, &request.stop, request.skip_special_tokens);
        transcript.replay(&generation.tokens[generation.prompt_len()..]);
        let timing = (generation.generated == 0).then_some(Timing::First);
        let mut answer = Self {
            resume: Resume::new(generation, now, service.config.resume_window),
            service,
            leads,
            rerouted: false,
            last: Last::None,
            call: None,
            placed: None,
            transcript,
            last_token: origin.arrived,
            origin,
            timing,
            ahead: None,
            discard: prepared.discard,
            ended: false,
        };
        answer.ahead = answer.next().await?;
        Ok(answer)
    }

    /// Where the sequence was placed last.
    pub(crate) fn placed(&self) -> Option<&Placed> {
        self.call.as_ref().map_or(self.placed.as_ref(), Call::placed)
    }

    /// The next piece; `None` after the last one. A fault is the last item too. The deadline is the caller's to keep.
    pub(crate) async fn next(&mut self) -> Result<Option<Piece>, Fault> {
        if let Some(piece) = self.ahead.take() {
            return Ok(Some(piece));
        }
        if self.ended {
            return Ok(None);
        }
        match self.read().await {
            Ok(piece) => {
                if piece.finish.is_some() {
                    self.end();
                }
                Ok(Some(piece))
            }
            Err(fault) => {
                self.end();
                self.service.note(&fault);
                Err(fault)
            }
        }
    }

    fn end(&mut self) {
        self.ended = true;
        self.placed = self.placed().cloned();
        // The engine may be past a stop string: this is what stops it.
        self.call = None;
    }

    /// Reads until there is a piece.
    async fn read(&mut self) -> Result<Piece, Fault> {
        let mut event = if self.call.is_some() { None } else { Some(Event::Start) };
        loop {
            let happened = match (event.take(), &mut self.call) {
                (Some(happened), _) => happened,
                (None, Some(call)) => self.service.routers.next(call).await,
                (None, None) => Event::Tick,
            };
            if let Event::Lost(error) = &happened {
                self.call = None;
                self.rerouted = true;
                metrics::router_lost();
                tracing::info!(%error, "going on through another router");
            }
            match self.resume.on(happened, self.service.clock.now()) {
                Action::Emit(token) => return Ok(self.piece(token)),
                Action::Skip => {}
                Action::Fail(error) => return Err(error.into()),
                Action::WaitUntil(until) => {
                    tokio::time::sleep(until.saturating_sub(self.service.clock.now())).await;
                    event = Some(Event::Tick);
                }
                // Boxed: what asking takes would be kept as long as the answer runs.
                Action::Route(generation) => {
                    match Box::pin(self.service.routers.route(generation, &self.origin.trace)).await {
                        Ok(call) => self.call = Some(call),
                        Err(failed) => event = Some(failed),
                    }
                }
            }
        }
    }

    /// Says where the time since the last mark went.
    fn account(&mut self, token: &proto::Token, now: Duration) {
        let (placed, again, split) = self.call.as_mut().map_or((None, None, false), Call::take_placements);
        let rerouted = std::mem::take(&mut self.rerouted);
        let last = self.last;
        let begins = placed.is_some() || again.is_some();
        self.last = if begins && split { Last::Prefilled } else { Last::Decoded };
        let mut parts = self.origin.timing.parts();
        let again = if rerouted { again.or(placed) } else { again };
        if last == Last::None && self.leads {
            if let Some(placed) = placed.filter(|_| !rerouted) {
                parts.mark(Part::Placement, placed);
            }
            if let Some(again) = again {
                parts.mark(Part::Replay, again);
            }
            let told = [(Part::PrefillQueue, token.queue_wait), (Part::Prefill, token.compute)];
            return parts.divide(&told, Part::Other, now);
        }
        if last != Last::None && (rerouted || again.is_some()) {
            return parts.mark(Part::Replay, now);
        }
        if !self.leads {
            return parts.mark(Part::Decode, now);
        }
        let rest = if last == Last::Prefilled { Part::Transfer } else { Part::Other };
        parts.divide(&[(Part::Decode, token.queue_wait + token.compute)], rest, now);
    }

    fn piece(&mut self, token: proto::Token) -> Piece {
        let now = self.service.clock.now();
        let latency = now.saturating_sub(self.last_token);
        self.last_token = now;
        self.account(&token, now);
        let is_first = matches!(self.timing, Some(Timing::First));
        match self.timing {
            Some(Timing::First) => metrics::first_token(latency, false),
            Some(Timing::Next) => metrics::next_token(latency, false),
            None => {}
        }
        self.timing = Some(Timing::Next);
        metrics::generated();
        if let Some(report) = token.prompt.as_ref().filter(|_| is_first) {
            metrics::cached(report.cached_tokens);
        }
        let (text, finish) = self.transcript.push(&token);
        if self.discard {
            return Piece {
                token,
                text: String::new(),
                latency,
                finish: Some(Finish::Length),
                discarded: true,
            };
        }
        Piece { token, text, latency, finish, discarded: false }
    }
}
