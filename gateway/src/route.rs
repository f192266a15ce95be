//! Which router to ask, and the call to it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use node::telemetry::{Span, TraceContext};
use node::{Channel, Clock, Member, Network};
use proto::convert::is_transport;
use proto::wire::router_client::RouterClient;
use proto::wire::{RouteRequest, route_event};
use proto::{Error, Generation, Placed, Reason, Role, Token};
use tokio::sync::watch;
use tonic::Streaming;

use crate::resume::Event;

/// How long a router that could not be reached comes last.
const AVOID_FOR: Duration = Duration::from_secs(2);

/// Round robin over routers, those lost lately last. Sans-IO.
#[derive(Debug, Default)]
pub struct Rotation {
    next: usize,
    /// When each router that was lost may be preferred again.
    lost_until: HashMap<String, Duration>,
}

impl Rotation {
    /// The router to ask at `now`; `None` when there is none at all.
    pub fn pick<'a>(&mut self, routers: &[&'a str], now: Duration) -> Option<&'a str> {
        self.lost_until.retain(|router, until| *until > now && routers.contains(&router.as_str()));
        let start = self.next;
        let order = (0..routers.len()).map(|step| (start + step) % routers.len());
        // The first of several smallest wins, so routers in good standing keep their turn.
        let chosen = order.min_by_key(|index| self.lost_until.get(routers[*index]).copied())?;
        self.next = (chosen + 1) % routers.len();
        Some(routers[chosen])
    }

    /// The router could not be reached, or its stream broke.
    pub fn lost(&mut self, router: &str, now: Duration) {
        self.lost_until.insert(router.to_owned(), now.saturating_add(AVOID_FOR));
    }
}

/// The routers that discovery knows.
pub(crate) struct Routers {
    network: Network,
    members: watch::Receiver<Arc<[Member]>>,
    clock: Clock,
    rotation: Mutex<Rotation>,
}

impl Routers {
    pub(crate) fn new(network: Network, members: watch::Receiver<Arc<[Member]>>, clock: Clock) -> Self {
        Self { network, members, clock, rotation: Mutex::default() }
    }

    /// Sees every change of the list of members.
    pub(crate) fn members(&self) -> watch::Receiver<Arc<[Member]>> {
        self.members.clone()
    }

    /// The next router, by address.
    pub(crate) fn pick(&self) -> Option<String> {
        let members = self.members.borrow().clone();
        let routers: Vec<&str> = members
            .iter()
            .filter(|member| member.role == Role::Router)
            .map(|member| member.address.as_str())
            .collect();
        let mut rotation = self.rotation.lock().unwrap_or_else(PoisonError::into_inner);
        rotation.pick(&routers, self.clock.now()).map(ToOwned::to_owned)
    }

    /// Notes that the router was lost.
    pub(crate) fn lost(&self, router: &str) {
        self.rotation.lock().unwrap_or_else(PoisonError::into_inner).lost(router, self.clock.now());
    }

    /// A channel to any address of the cluster.
    pub(crate) fn channel(&self, address: &str) -> Channel {
        self.network.connect(address)
    }

    /// A client of the router.
    pub(crate) fn client(&self, router: &str) -> RouterClient<Channel> {
        node::limits!(RouterClient::new(self.channel(router)))
    }

    /// Asks the next router. Dropping the call cancels the request.
    pub(crate) async fn route(&self, generation: Generation, trace: &TraceContext) -> Result<Call, Event> {
        let Some(router) = self.pick() else { return Err(Event::NoRouter) };
        let span = trace.client("gateway.route");
        if span.context().is_recording() {
            span.set("server.address", router.clone());
            span.set("baton.attempt", i64::from(generation.attempt.0));
        }
        let request = RouteRequest { generation: Some(generation.into()) };
        match span.scope(self.client(&router).route(request)).await {
            Ok(response) => Ok(Call::new(router, response.into_inner(), span)),
            Err(status) => Err(self.failed(&router, status, &span)),
        }
    }

    /// The next token of the call, or how it ended.
    pub(crate) async fn next(&self, call: &mut Call) -> Event {
        loop {
            let event = match call.events.message().await {
                Ok(Some(message)) => message.event,
                Ok(None) => {
                    self.lost(&call.router);
                    let message = format!("router {} ended the stream before the last token", call.router);
                    let error = Error::new(Reason::Truncated, message);
                    call.span.fail(&error);
                    return Event::Lost(error);
                }
                Err(status) => return self.failed(&call.router, status, &call.span),
            };
            match event {
                Some(route_event::Event::Token(token)) => match Token::try_from(token) {
                    Ok(token) => return Event::Token(token),
                    Err(error) => return Event::Refused(error),
                },
                Some(route_event::Event::Placed(placed)) => {
                    tracing::debug!(
                        router = call.router,
                        attempt = placed.attempt,
                        prefill = placed.prefill,
                        decode = placed.decode,
                        "request placed"
                    );
                    match Placed::try_from(placed) {
                        Ok(placed) => call.place(placed, self.clock.now()),
                        Err(error) => return Event::Refused(error),
                    }
                }
                None => {}
            }
        }
    }

    fn failed(&self, router: &str, status: tonic::Status, span: &Span) -> Event {
        let (event, error) = self.failure(router, status);
        span.fail(&error);
        event(error)
    }

    fn failure(&self, router: &str, status: tonic::Status) -> (fn(Error) -> Event, Error) {
        if is_transport(&status) {
            tracing::warn!(router, status = status.message(), "router lost");
            self.lost(router);
            let message = format!("router {router}: {}", status.message());
            (Event::Lost, Error::new(Reason::WorkerLost, message))
        } else {
            let error = Error::from(status);
            if error.reason == Reason::WorkerLost {
                // It drains, or sees no workers: others first.
                self.lost(router);
            }
            (Event::Refused, error)
        }
    }
}

/// A running call to a router.
pub(crate) struct Call {
    router: String,
    events: Streaming<proto::wire::RouteEvent>,
    placed: Option<Placed>,
    /// When the first placement was heard of, until that is taken.
    placed_at: Option<Duration>,
    /// The same of the latest of those that followed it.
    placed_again_at: Option<Duration>,
    /// Ends with the call.
    span: Span,
}

impl Call {
    fn new(router: String, events: Streaming<proto::wire::RouteEvent>, span: Span) -> Self {
        Self { router, events, placed: None, placed_at: None, placed_again_at: None, span }
    }

    fn place(&mut self, placed: Placed, now: Duration) {
        let at = if self.placed.is_none() { &mut self.placed_at } else { &mut self.placed_again_at };
        *at = Some(now);
        self.placed = Some(placed);
    }

    /// When the request was placed, and when it was placed anew, if that was since this was asked last; and whether it is
    /// split.
    pub(crate) fn take_placements(&mut self) -> (Option<Duration>, Option<Duration>, bool) {
        let split = self.placed.as_ref().is_some_and(|placed| placed.prefill.is_some());
        (self.placed_at.take(), self.placed_again_at.take(), split)
    }

    /// Where the router has placed the request last.
    pub(crate) fn placed(&self) -> Option<&Placed> {
        self.placed.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn routers_take_turns_and_lost_ones_come_last_for_a_while() {
        let at = Duration::from_millis;
        let mut rotation = Rotation::default();
        let routers = ["a", "b", "c"];
        let picks = |rotation: &mut Rotation, now| -> String {
            (0..4).filter_map(|_| rotation.pick(&routers, at(now))).collect()
        };
        assert_eq!(picks(&mut rotation, 0), "abca");
        rotation.lost("b", at(0));
        assert_eq!(picks(&mut rotation, 10), "caca");
        assert_eq!(picks(&mut rotation, 2000), "bcab");
    }

    #[test]
    fn when_all_are_lost_the_one_lost_first_is_tried() {
        let mut rotation = Rotation::default();
        rotation.lost("a", Duration::from_millis(5));
        rotation.lost("b", Duration::ZERO);
        assert_eq!(rotation.pick(&["a", "b"], Duration::from_millis(6)), Some("b"));
        assert_eq!(rotation.pick(&[], Duration::ZERO), None);
    }
}
