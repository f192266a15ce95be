//! Carries one request through the deaths of routers. Sans-IO: it is told what happened and when, and answers what
//! to do; it neither opens a connection nor reads a clock.
//!
//! The gateway knows prompt, parameters and every token so far, which is all that another router needs to go on.
//! Each router starts at an attempt of its own, above all of its predecessor's, so that whatever the lost one left
//! running is fenced. A token reaches the client exactly once: tokens are numbered, a number that was already seen
//! is skipped, and one that leaves a gap ends the request.

use std::time::Duration;

use proto::{Error, Generation, Reason, Token};

/// First pause before a router is tried again when an immediate try did not help; doubles with each.
const PAUSE_MIN: Duration = Duration::from_millis(50);
/// Tokens for which there is room from the start.
const ROOM_TOKENS: usize = 256;
/// Longest pause between tries.
const PAUSE_MAX: Duration = Duration::from_millis(500);

/// What happened.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The request was admitted.
    Start,
    /// A router sent a token.
    Token(Token),
    /// The way to the router failed, or its stream ended without a last token.
    Lost(Error),
    /// A router answered that it will not, or could not.
    Refused(Error),
    /// No router is known.
    NoRouter,
    /// The time asked for has come.
    Tick,
}

/// What to do next.
#[derive(Clone, Debug, PartialEq)]
#[expect(clippy::large_enum_variant, reason = "one at a time, and never kept")]
pub enum Action {
    /// Ask a router, another one than the last where there is a choice, and report what comes.
    Route(Generation),
    /// Report [`Event::Tick`] at this time.
    WaitUntil(Duration),
    /// Give the token to the client, and read on unless it is the last.
    Emit(Token),
    /// Read on: the client has this token.
    Skip,
    /// End with this error.
    Fail(Error),
}

/// One request on its way through one or more routers.
#[derive(Debug)]
pub struct Resume {
    generation: Generation,
    /// When the request's total deadline passes.
    deadline: Duration,
    /// How long a request waits for a router that goes on.
    window: Duration,
    /// When the router was lost, while none has sent a token since.
    lost: Option<Loss>,
    /// A router has refused since the last token for want of workers.
    refused: bool,
}

#[derive(Debug)]
struct Loss {
    since: Duration,
    pause: Duration,
    last: Error,
}

impl Resume {
    /// For a request admitted at `now`, whose `time_left` counts from then.
    pub fn new(mut generation: Generation, now: Duration, window: Duration) -> Self {
        let deadline = now.saturating_add(generation.time_left);
        // A long prompt would take twice its room at the first token.
        let more = generation.stop.max_tokens.saturating_sub(generation.generated);
        generation.tokens.reserve_exact(more.min(ROOM_TOKENS));
        Self { generation, deadline, window, lost: None, refused: false }
    }

    /// When the total deadline passes.
    pub fn deadline(&self) -> Duration {
        self.deadline
    }

    /// Takes what happened at `now`.
    pub fn on(&mut self, event: Event, now: Duration) -> Action {
        match event {
            Event::Start | Event::Tick => self.route(now),
            Event::Token(token) => self.token(token),
            // Perhaps only that router is on its way out; a second one that says the same is right.
            Event::Refused(error) if error.reason == Reason::WorkerLost && !self.refused => {
                self.refused = true;
                self.generation.attempt = self.generation.attempt.next_router();
                self.route(now)
            }
            Event::Refused(error) => Action::Fail(error),
            Event::Lost(error) => {
                self.generation.attempt = self.generation.attempt.next_router();
                let first = self.lost.is_none();
                self.remember(error, now);
                if first { self.route(now) } else { self.pause(now) }
            }
            Event::NoRouter => {
                self.remember(Error::new(Reason::WorkerLost, "no router is known"), now);
                self.pause(now)
            }
        }
    }

    fn route(&self, now: Duration) -> Action {
        match self.deadline.checked_sub(now) {
            Some(time_left) if !time_left.is_zero() => {
                Action::Route(Generation { time_left, ..self.generation.clone() })
            }
            _ => Action::Fail(past_deadline()),
        }
    }

    fn token(&mut self, token: Token) -> Action {
        let expected = self.generation.generated;
        if token.index < expected {
            return Action::Skip;
        }
        if token.index > expected {
            let message = format!("token index: expected {expected}, got {}", token.index);
            return Action::Fail(Error::new(Reason::Internal, message));
        }
        self.generation.tokens.push(token.id);
        self.generation.generated += 1;
        self.lost = None;
        self.refused = false;
        Action::Emit(token)
    }

    /// Notes the loss; the window counts from the first since the last token.
    fn remember(&mut self, error: Error, now: Duration) {
        match &mut self.lost {
            Some(loss) => loss.last = error,
            None => self.lost = Some(Loss { since: now, pause: PAUSE_MIN, last: error }),
        }
    }

    /// Waits before the next try, if the window and the deadline leave time for one.
    fn pause(&mut self, now: Duration) -> Action {
        if now >= self.deadline {
            return Action::Fail(past_deadline());
        }
        let Some(loss) = &mut self.lost else { return self.route(now) };
        let ends = loss.since.saturating_add(self.window);
        if now >= ends {
            let seconds = self.window.as_secs_f64();
            let message = format!("no router went on within {seconds} s: {}", loss.last.message);
            return Action::Fail(Error::new(Reason::WorkerLost, message));
        }
        let until = now.saturating_add(loss.pause).min(ends).min(self.deadline);
        loss.pause = (loss.pause * 2).min(PAUSE_MAX);
        Action::WaitUntil(until)
    }
}

/// The error of a request whose total deadline passed.
pub fn past_deadline() -> Error {
    Error::new(Reason::Deadline, "the request's total deadline passed")
}
