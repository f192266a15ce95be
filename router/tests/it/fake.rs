//! Scripted workers, served over a network like real ones. Their model is [`next_token`].

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::StreamExt;
use futures::stream::{self, BoxStream};
use node::{Context, Listener, Services};
use proto::watch::{News, WatchEvent};
use proto::{
    Error, FinishReason, Generation, Handoff, HandoffId, Reason, Role, Token, TokenId, WorkerDescription,
    WorkerEpoch, wire,
};
use tokio::sync::watch;
use tonic::{Request, Response, Status};

use crate::script;

/// The model: each token depends on all before it.
pub(crate) fn next_token(tokens: &[TokenId]) -> TokenId {
    let hash = tokens.iter().fold(7_u64, |hash, id| hash.wrapping_mul(31).wrapping_add(u64::from(*id) + 1));
    (hash >> 7) as TokenId % 40
}

/// What a worker does with its next call.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Behaviour {
    /// What it is asked.
    Good,
    /// Refuses the call.
    Refuse(Reason),
    /// Says this many items, then this.
    FailAfter(usize, Reason),
    /// Says this many items, then ends as if that were all.
    EndAfter(usize),
    /// Says this many items, then nothing more.
    HangAfter(usize),
    /// Says this many items, then panics.
    PanicAfter(usize),
}

/// What has come to a worker, in order.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Came {
    /// A call of that attempt.
    Call { attempt: u32, generated: usize, handoff: bool },
    /// The call of that attempt was dropped before its end.
    Dropped { attempt: u32 },
    /// A fence.
    Fence { attempt: u32 },
}

/// A worker.
#[derive(Clone)]
pub(crate) struct Fake {
    name: String,
    state: Arc<Mutex<State>>,
    /// What it tells those who watch it; without anything to tell it cannot be watched.
    told: watch::Sender<Vec<WatchEvent>>,
}

struct State {
    description: WorkerDescription,
    script: VecDeque<Behaviour>,
    came: Vec<Came>,
}

impl Fake {
    /// A worker whose name says its role.
    pub(crate) fn new(name: &str) -> Self {
        let description = script::description(name);
        let state = State { description, script: VecDeque::new(), came: Vec::new() };
        Self { name: name.to_owned(), state: Arc::new(Mutex::new(state)), told: watch::channel(Vec::new()).0 }
    }

    /// What it does with its next calls; with all after them it does what it is asked.
    pub(crate) fn will(&self, script: impl IntoIterator<Item = Behaviour>) {
        self.state.lock().unwrap().script.extend(script);
    }

    /// Changes what it says about itself.
    pub(crate) fn describe(&self, change: impl FnOnce(&mut WorkerDescription)) {
        change(&mut self.state.lock().unwrap().description);
    }

    /// Tells those who watch it, now and later.
    pub(crate) fn tell(&self, sequence: u64, news: News) {
        let epoch = self.state.lock().unwrap().description.epoch;
        self.told.send_modify(|told| told.push(WatchEvent { epoch, sequence, news }));
    }

    /// Another life.
    pub(crate) fn restarted(&self) {
        self.describe(|description| description.epoch = WorkerEpoch(description.epoch.0 + 1));
    }

    /// What came so far.
    pub(crate) fn came(&self) -> Vec<Came> {
        self.state.lock().unwrap().came.clone()
    }

    /// Waits until that has come.
    pub(crate) async fn wait_for(&self, came: Came) {
        for _ in 0..400 {
            if self.came().contains(&came) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("{}: {came:?} did not come, only {:?}", self.name, self.came());
    }

    /// Serves it; gives its address.
    pub(crate) async fn serve(&self, listener: Listener, context: &Context) -> String {
        let services = Services::new()
            .add(node::limits!(wire::worker_server::WorkerServer::new(self.clone())))
            .add(node::limits!(wire::prefill_server::PrefillServer::new(self.clone())))
            .add(node::limits!(wire::decode_server::DecodeServer::new(self.clone())));
        node::serve_grpc(&listener, services, context).await.unwrap().address
    }

    /// Notes a call, and says how to behave in it.
    fn start(&self, generation: &Generation, handoff: bool) -> (Behaviour, Open) {
        let attempt = generation.attempt.0;
        let mut state = self.state.lock().unwrap();
        state.came.push(Came::Call { attempt, generated: generation.generated, handoff });
        let behaviour = state.script.pop_front().unwrap_or(Behaviour::Good);
        (behaviour, Open { state: Arc::clone(&self.state), attempt, over: false })
    }
}

/// A call that is open, and notes when it is dropped.
struct Open {
    state: Arc<Mutex<State>>,
    attempt: u32,
    over: bool,
}

impl Open {
    fn end(&mut self) {
        self.over = true;
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        if !self.over {
            self.state.lock().unwrap().came.push(Came::Dropped { attempt: self.attempt });
        }
    }
}

/// Says the items as the behaviour has it.
fn say<T: Send + 'static>(
    items: Vec<T>,
    behaviour: Behaviour,
    open: Open,
) -> BoxStream<'static, Result<T, Status>> {
    let error = |reason| Some(Status::from(Error::new(reason, "as scripted")));
    let (said, then) = match behaviour {
        Behaviour::Good | Behaviour::Refuse(_) => (items.len(), None),
        Behaviour::FailAfter(said, reason) => (said, error(reason)),
        Behaviour::EndAfter(said) | Behaviour::HangAfter(said) | Behaviour::PanicAfter(said) => (said, None),
    };
    let mut items: VecDeque<Result<T, Status>> = items.into_iter().take(said).map(Ok).collect();
    items.extend(then.map(Err));
    stream::unfold((items, open), move |(mut items, mut open)| async move {
        // As slow as a quick model, so that tests can interfere.
        tokio::time::sleep(Duration::from_millis(2)).await;
        if let Some(item) = items.pop_front() {
            // The last item of a call is its end, even if nobody reads on.
            if item.is_err() || (items.is_empty() && matches!(behaviour, Behaviour::Good)) {
                open.end();
            }
            return Some((item, (items, open)));
        }
        match behaviour {
            Behaviour::HangAfter(_) => std::future::pending().await,
            Behaviour::PanicAfter(_) => panic!("as scripted"),
            _ => open.end(),
        }
        None
    })
    .boxed()
}

/// The token after these.
fn sample(tokens: &mut Vec<TokenId>, generated: &mut usize, max_tokens: usize) -> Token {
    let (id, index) = (next_token(tokens), *generated);
    tokens.push(id);
    *generated += 1;
    let finish = (*generated == max_tokens).then_some(FinishReason::Length);
    Token { index, id, logprob: -1.0, batch_size: 1, queue_wait: Duration::ZERO, finish, ..Token::default() }
}

fn generation(wire: Option<wire::Generation>) -> Result<Generation, Status> {
    Ok(wire.ok_or_else(|| Error::invalid("generation", "is required"))?.try_into()?)
}

#[tonic::async_trait]
impl wire::prefill_server::Prefill for Fake {
    type PrefillStream = BoxStream<'static, Result<wire::PrefillEvent, Status>>;

    async fn prefill(
        &self,
        request: Request<wire::PrefillRequest>,
    ) -> Result<Response<Self::PrefillStream>, Status> {
        use wire::prefill_event::Event;
        let mut asked = generation(request.into_inner().generation)?;
        let (behaviour, mut open) = self.start(&asked, false);
        if let Behaviour::Refuse(reason) = behaviour {
            open.end();
            return Err(Error::new(reason, "as scripted").into());
        }
        let description = self.state.lock().unwrap().description.clone();
        let handoff = Handoff {
            owner: format!("local:{}", self.name),
            epoch: description.epoch,
            request: asked.request.clone(),
            attempt: asked.attempt,
            id: HandoffId([5; 16]),
            fingerprint: description.model.fingerprint,
            layout: description.layout,
            tokens: asked.tokens.len(),
        };
        let token = sample(&mut asked.tokens, &mut asked.generated, asked.stop.max_tokens);
        let issued =
            wire::HandoffIssued { handoff: Some(handoff.into()), cached_tokens: 0, queue_wait_us: 0 };
        let done = wire::PrefillDone { token: Some(token.into()), prefill_us: 0 };
        let items = [Event::Issued(issued), Event::Done(done)];
        let items = items.into_iter().map(|event| wire::PrefillEvent { event: Some(event) }).collect();
        Ok(Response::new(say(items, behaviour, open)))
    }
}

#[tonic::async_trait]
impl wire::decode_server::Decode for Fake {
    type DecodeStream = BoxStream<'static, Result<wire::DecodeEvent, Status>>;

    async fn decode(
        &self,
        request: Request<wire::DecodeRequest>,
    ) -> Result<Response<Self::DecodeStream>, Status> {
        use wire::decode_event::Event;
        let wire::DecodeRequest { generation: asked, handoff } = request.into_inner();
        let Generation { mut tokens, mut generated, stop, .. } = generation(asked.clone())?;
        let handoff: Option<Handoff> = handoff.map(TryInto::try_into).transpose()?;
        let (behaviour, mut open) = self.start(&generation(asked)?, handoff.is_some());
        if let Behaviour::Refuse(reason) = behaviour {
            open.end();
            return Err(Error::new(reason, "as scripted").into());
        }
        if handoff.is_some() {
            sample(&mut tokens, &mut generated, stop.max_tokens);
        }
        let mut items = vec![Event::Admitted(wire::DecodeAdmitted { skipped_tokens: 0 })];
        while generated < stop.max_tokens {
            items.push(Event::Token(sample(&mut tokens, &mut generated, stop.max_tokens).into()));
        }
        let items = items.into_iter().map(|event| wire::DecodeEvent { event: Some(event) }).collect();
        Ok(Response::new(say(items, behaviour, open)))
    }

    async fn r#move(&self, _: Request<wire::MoveRequest>) -> Result<Response<wire::MoveResponse>, Status> {
        Ok(Response::new(wire::MoveResponse {}))
    }
}

#[tonic::async_trait]
impl wire::worker_server::Worker for Fake {
    type GetTokenizerStream = BoxStream<'static, Result<wire::TokenizerChunk, Status>>;
    type WatchStream = BoxStream<'static, Result<wire::WatchEvent, Status>>;

    async fn watch(&self, _: Request<wire::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let mut told = self.told.subscribe();
        if told.borrow().is_empty() {
            return Err(Status::unimplemented("nothing to tell"));
        }
        let so_far = told.borrow_and_update().clone();
        let is_load = |event: &WatchEvent| matches!(event.news, News::Load(_));
        let last_load = so_far.iter().rposition(is_load);
        // What was the load before is no news to anybody.
        let outdated = |(at, event): &(usize, WatchEvent)| is_load(event) && Some(*at) != last_load;
        let said = so_far.len();
        let first: VecDeque<_> =
            so_far.into_iter().enumerate().filter(|item| !outdated(item)).map(|(_, event)| event).collect();
        let events = stream::unfold((told, first, said), |(mut told, mut first, said)| async move {
            if let Some(event) = first.pop_front() {
                return Some((Ok(event.into()), (told, first, said)));
            }
            loop {
                let next = told.borrow_and_update().get(said).cloned();
                match next {
                    Some(event) => return Some((Ok(event.into()), (told, first, said + 1))),
                    None => told.changed().await.ok()?,
                }
            }
        });
        Ok(Response::new(events.boxed()))
    }

    async fn describe(
        &self,
        _: Request<wire::DescribeRequest>,
    ) -> Result<Response<wire::DescribeResponse>, Status> {
        Ok(Response::new(self.state.lock().unwrap().description.clone().into()))
    }

    async fn get_tokenizer(
        &self,
        _: Request<wire::GetTokenizerRequest>,
    ) -> Result<Response<Self::GetTokenizerStream>, Status> {
        Ok(Response::new(stream::empty().boxed()))
    }

    async fn change_role(
        &self,
        _: Request<wire::ChangeRoleRequest>,
    ) -> Result<Response<wire::ChangeRoleResponse>, Status> {
        Err(Status::unimplemented("it has one role"))
    }

    async fn fence(
        &self,
        request: Request<wire::FenceRequest>,
    ) -> Result<Response<wire::FenceResponse>, Status> {
        let attempt = request.into_inner().attempt;
        self.state.lock().unwrap().came.push(Came::Fence { attempt });
        Ok(Response::new(wire::FenceResponse {}))
    }
}

/// The role that discovery is told.
pub(crate) fn role(fake: &Fake) -> Role {
    script::role(&fake.name)
}
