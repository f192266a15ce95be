//! A router whose "model" continues every prompt with the same tokens, and that fails when told to.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use proto::wire::router_server::Router;
use proto::wire::{
    ListModelsRequest, ListModelsResponse, Placed, PlacementKind, RouteEvent, RouteRequest, route_event,
};
use proto::{Error, FinishReason, Generation, Token};
use tokio_stream::Stream;
use tonic::{Request, Response, Status};

/// What befalls a call after so many of its tokens.
#[derive(Clone, Debug)]
pub(crate) enum Trouble {
    /// The way to the router breaks.
    Break,
    /// The stream ends as if complete, without a last token.
    End,
    /// The router fails with a reason.
    Fail(Error),
    /// Nothing more comes.
    Hang,
}

/// What all routers of a test do.
pub(crate) struct Script {
    /// The continuation; the last token repeats for ever.
    pub(crate) tokens: Mutex<Vec<u32>>,
    /// The first token of each sequence and its log-probability, where sequences are to differ.
    pub(crate) firsts: Mutex<Vec<(u32, f32)>>,
    /// By router: after how many tokens of a call, counted within that call, and what.
    pub(crate) troubles: Mutex<HashMap<String, (usize, Trouble)>>,
    /// What befalls the first call of every request, whichever router gets it.
    pub(crate) first: Mutex<Option<(usize, Trouble)>>,
    /// Time between tokens.
    pub(crate) pace: Mutex<Duration>,
    /// What routers list.
    pub(crate) models: Mutex<Vec<proto::ModelDescription>>,
    /// Requests that came, by router; probes are left out.
    pub(crate) seen: Mutex<Vec<(String, Generation)>>,
    /// Probes that came.
    pub(crate) probes: AtomicUsize,
    /// Streams that are open, probes left out.
    pub(crate) open: Arc<AtomicUsize>,
}

impl Script {
    pub(crate) fn new(models: Vec<proto::ModelDescription>) -> Arc<Self> {
        Arc::new(Self {
            tokens: Mutex::new(vec![u32::from(b'x')]),
            firsts: Mutex::default(),
            troubles: Mutex::default(),
            first: Mutex::default(),
            pace: Mutex::default(),
            models: Mutex::new(models),
            seen: Mutex::default(),
            probes: AtomicUsize::new(0),
            open: Arc::default(),
        })
    }

    /// From now on every prompt goes on with this text, token by byte, and ends.
    pub(crate) fn says(&self, text: &str) {
        let mut tokens: Vec<u32> = text.bytes().map(u32::from).collect();
        tokens.push(super::bundle::END);
        self.goes_on_with(&tokens);
    }

    pub(crate) fn goes_on_with(&self, tokens: &[u32]) {
        *self.tokens.lock().unwrap() = tokens.to_vec();
    }

    pub(crate) fn trouble(&self, router: &str, after: usize, trouble: Trouble) {
        self.troubles.lock().unwrap().insert(router.to_owned(), (after, trouble));
    }

    pub(crate) fn pace(&self, pace: Duration) {
        *self.pace.lock().unwrap() = pace;
    }

    pub(crate) fn open(&self) -> usize {
        self.open.load(Ordering::SeqCst)
    }

    /// The requests that came so far, and forgets them.
    pub(crate) fn take_seen(&self) -> Vec<(String, Generation)> {
        std::mem::take(&mut self.seen.lock().unwrap())
    }

    /// The token at `index` of the answer to a request.
    fn token(&self, generation: &Generation, index: usize) -> Token {
        let tokens = self.tokens.lock().unwrap();
        let said = *tokens.get(index).or(tokens.last()).expect("a token");
        let firsts = self.firsts.lock().unwrap();
        let own = firsts.get(generation.sampling.sequence as usize).filter(|_| index == 0);
        let (id, logprob) = own.copied().unwrap_or((said, -0.5));
        let stop = &generation.stop;
        let finish = if stop.eos_ids.contains(&id) {
            Some(FinishReason::Eos)
        } else if stop.stop_token_ids.contains(&id) {
            Some(FinishReason::StopToken)
        } else if index + 1 == stop.max_tokens {
            Some(FinishReason::Length)
        } else {
            None
        };
        Token {
            index,
            id,
            logprob,
            batch_size: 1,
            queue_wait: Duration::from_micros(40),
            finish,
            ..Token::default()
        }
    }
}

/// One router.
#[derive(Clone)]
pub(crate) struct ScriptedRouter {
    pub(crate) name: String,
    pub(crate) script: Arc<Script>,
}

type Events = Pin<Box<dyn Stream<Item = Result<RouteEvent, Status>> + Send>>;

#[tonic::async_trait]
impl Router for ScriptedRouter {
    type RouteStream = Events;

    async fn route(&self, request: Request<RouteRequest>) -> Result<Response<Events>, Status> {
        let wire = request.into_inner().generation.expect("a generation");
        let generation = Generation::try_from(wire).map_err(Status::from)?;
        if generation.probe {
            self.script.probes.fetch_add(1, Ordering::SeqCst);
        } else {
            self.script.seen.lock().unwrap().push((self.name.clone(), generation.clone()));
        }
        let first = generation.attempt.0 == 0 && !generation.probe;
        let first = self.script.first.lock().unwrap().clone().filter(|_| first);
        let own = self.script.troubles.lock().unwrap().get(&self.name).cloned();
        let trouble = match first.or(own) {
            Some((0, Trouble::Break)) => return Err(Status::unavailable("connection refused")),
            Some((0, Trouble::Fail(error))) => return Err(error.into()),
            trouble => trouble,
        };
        let open = (!generation.probe).then(|| Open::new(&self.script));
        let call = Call {
            router: self.clone(),
            generation,
            trouble,
            sent: 0,
            placed: false,
            ended: false,
            _open: open,
        };
        Ok(Response::new(Box::pin(futures::stream::unfold(call, |mut call| async move {
            Some((call.next().await?, call))
        }))))
    }

    async fn list_models(
        &self,
        _request: Request<ListModelsRequest>,
    ) -> Result<Response<ListModelsResponse>, Status> {
        let models = self.script.models.lock().unwrap().clone();
        let models = models.into_iter().map(Into::into).collect();
        Ok(Response::new(ListModelsResponse { models, workers: vec!["local:worker".into()] }))
    }
}

/// Counts an open stream.
struct Open(Arc<AtomicUsize>);

impl Open {
    fn new(script: &Script) -> Self {
        script.open.fetch_add(1, Ordering::SeqCst);
        Self(script.open.clone())
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

struct Call {
    router: ScriptedRouter,
    generation: Generation,
    trouble: Option<(usize, Trouble)>,
    sent: usize,
    placed: bool,
    ended: bool,
    _open: Option<Open>,
}

impl Call {
    async fn next(&mut self) -> Option<Result<RouteEvent, Status>> {
        if self.ended {
            return None;
        }
        if !std::mem::replace(&mut self.placed, true) {
            let placed = Placed {
                attempt: self.generation.attempt.0,
                kind: PlacementKind::Fused.into(),
                prefill: String::new(),
                decode: "local:worker".to_owned(),
            };
            return Some(Ok(RouteEvent { event: Some(route_event::Event::Placed(placed)) }));
        }
        if let Some((after, trouble)) = &self.trouble
            && self.sent == *after
        {
            self.ended = true;
            return match trouble {
                Trouble::Break => Some(Err(Status::unavailable("connection reset"))),
                Trouble::End => None,
                Trouble::Fail(error) => Some(Err(error.clone().into())),
                Trouble::Hang => std::future::pending().await,
            };
        }
        let pace = *self.router.script.pace.lock().unwrap();
        tokio::time::sleep(pace).await;
        let token = self.router.script.token(&self.generation, self.generation.generated + self.sent);
        self.sent += 1;
        self.ended = token.finish.is_some();
        Some(Ok(RouteEvent { event: Some(route_event::Event::Token(token.into())) }))
    }
}
