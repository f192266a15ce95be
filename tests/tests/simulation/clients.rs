//! Clients, each with its gateway: `gateway::resume` over virtual calls to routers.

use std::time::Duration;

use gateway::resume::{Action, Event, Resume};
use proto::{Attempt, Error, Generation, Placed, Priority, Reason, RequestId};
use router::dispatch::Emission;

use crate::checks::{Check, Violation, ensure};
use crate::network::{Answer, Ask, CallKey, KEEP_ALIVE, Purpose};
use crate::relief::RELIEF;
use crate::table::Fault;
use crate::workers::MODEL_NAME;
use crate::world::{GATEWAY, Node, What, World};

/// How long a gateway waits for a router that goes on with a request.
const RESUME_WINDOW: Duration = Duration::from_secs(20);

/// A client and its request.
#[derive(Default)]
pub(crate) struct Client {
    resume: Option<Resume>,
    call: Option<CallKey>,
    router: Option<Node>,
    tokens: usize,
    /// Where it was placed last.
    placed: Option<Placed>,
    outcome: Option<Result<(), Error>>,
    pub(crate) over_at: Option<Duration>,
    /// A fault has struck one of the request's calls.
    pub(crate) is_disturbed: bool,
}

impl Client {
    pub(crate) fn is_over(&self) -> bool {
        self.outcome.is_some()
    }

    /// The end came long enough ago for everybody to know it.
    pub(crate) fn is_relieved(&self, now: Duration) -> bool {
        self.over_at.is_some_and(|at| at + RELIEF <= now)
    }

    pub(crate) fn has_arrived(&self) -> bool {
        self.resume.is_some()
    }

    pub(crate) fn outcome(&self) -> Option<Result<(), Error>> {
        self.outcome.clone()
    }
}

impl World {
    /// The client makes its request.
    pub(crate) fn arrive(&mut self, request: usize) -> Check {
        let planned = &self.plan.requests[request];
        let generation = Generation {
            request: RequestId(format!("r{request}")),
            attempt: Attempt::default(),
            model: MODEL_NAME.into(),
            tokens: planned.prompt.clone(),
            generated: 0,
            sampling: planned.sampling.clone(),
            stop: planned.stop.clone(),
            time_left: planned.time_left,
            probe: false,
            beside: planned.sibling.and_then(|other| self.clients[other].placed.clone()),
            session: None,
            priority: Priority::default(),
        };
        let mut resume = Resume::new(generation, self.now, RESUME_WINDOW);
        self.push_at(resume.deadline(), What::ClientDeadline(request));
        let action = resume.on(Event::Start, self.now);
        self.clients[request].resume = Some(resume);
        self.client_acts(request, action)
    }

    fn on_client(&mut self, request: usize, event: Event) -> Check {
        let now = self.now;
        let client = &mut self.clients[request];
        match &mut client.resume {
            Some(resume) if client.outcome.is_none() => {
                let action = resume.on(event, now);
                self.client_acts(request, action)
            }
            _ => Ok(()),
        }
    }

    fn client_acts(&mut self, request: usize, action: Action) -> Check {
        match action {
            Action::Route(generation) => {
                let router = self.pick_router(self.clients[request].router);
                self.clients[request].router = Some(router);
                let call = self.open(GATEWAY, router, Ask::Route(generation), Purpose::Client(request));
                self.clients[request].call = Some(call);
                Ok(())
            }
            Action::WaitUntil(at) => {
                self.push_at(at, What::ClientTick(request));
                Ok(())
            }
            Action::Emit(token) => {
                self.truth().check_token(&RequestId(format!("r{request}")), &token, "client")?;
                let client = &mut self.clients[request];
                ensure(token.index == client.tokens, "I8", || format!("client: token {} came", token.index))?;
                client.tokens += 1;
                if token.finish.is_some() { self.client_over(request, Ok(())) } else { Ok(()) }
            }
            Action::Skip => Ok(()),
            Action::Fail(error) => self.client_over(request, Err(error)),
        }
    }

    /// Another router than the last where there is one.
    fn pick_router(&mut self, last: Option<Node>) -> Node {
        let routers: Vec<_> = self.router_nodes().filter(|node| Some(*node) != last).collect();
        if routers.is_empty() {
            self.router_nodes().next().expect("a router")
        } else {
            self.rng.pick(&routers)
        }
    }

    /// The one end of a client's stream.
    fn client_over(&mut self, request: usize, outcome: Result<(), Error>) -> Check {
        let client = &mut self.clients[request];
        ensure(client.outcome.is_none(), "I8", || format!("request r{request} ended twice"))?;
        if outcome.is_ok() {
            let expected = self.plan.requests[request].oracle.reference.len();
            ensure(client.tokens == expected, "I8", || {
                format!("request r{request}: {} of {expected} tokens, and success", client.tokens)
            })?;
        }
        client.outcome = Some(outcome.clone());
        client.over_at = Some(self.now);
        if let Some(call) = client.call.take() {
            self.cancel(call);
        }
        self.push(RELIEF, What::Relieved(request, Attempt(u32::MAX)));
        self.note(|_| format!("## r{request} is over: {outcome:?}"));
        Ok(())
    }

    pub(crate) fn client_heard(&mut self, key: CallKey, answer: Answer) -> Check {
        match (self.calls[key].purpose.clone(), answer) {
            (Purpose::Client(request), Answer::Emission(Emission::Token(token))) => {
                self.on_client(request, Event::Token(token))
            }
            (Purpose::Client(request), Answer::Emission(Emission::Placed(placed))) => {
                self.clients[request].placed = Some(placed);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    pub(crate) fn client_ended(&mut self, key: CallKey, outcome: Result<(), Error>, is_lost: bool) -> Check {
        let Purpose::Client(request) = self.calls[key].purpose else { return Ok(()) };
        if self.clients[request].call == Some(key) {
            self.clients[request].call = None;
        }
        let event = match outcome {
            Ok(()) => Event::Lost(Error::new(Reason::Truncated, "the stream ended before the last token")),
            Err(error) if is_lost => Event::Lost(error),
            Err(error) => Event::Refused(error),
        };
        self.on_client(request, event)
    }

    pub(crate) fn client_tick(&mut self, request: usize) -> Check {
        self.on_client(request, Event::Tick)
    }

    pub(crate) fn client_deadline(&mut self, request: usize) -> Check {
        if self.clients[request].is_over() {
            return Ok(());
        }
        if let Some(phase) = self.phase(request) {
            self.table.count(Fault::Deadline, phase);
        }
        self.client_over(request, Err(gateway::resume::past_deadline()))
    }

    /// The client cancels, or its gateway dies: then only the connection tells the router. False when it has had
    /// its end already.
    pub(crate) fn client_leaves(&mut self, request: usize, dies: bool) -> Result<bool, Violation> {
        if self.clients[request].is_over() || !self.clients[request].has_arrived() {
            return Ok(false);
        }
        if dies && let Some(call) = self.clients[request].call.take() {
            self.calls[call].at_caller = false;
            let is_silent = self.rng.percent(50);
            let after = if is_silent { KEEP_ALIVE } else { self.delay() };
            self.clients[request].is_disturbed |= is_silent;
            self.push(after, What::ServerLost(call));
        }
        self.client_over(request, Err(Error::new(Reason::Cancelled, "the client left")))?;
        Ok(true)
    }
}
