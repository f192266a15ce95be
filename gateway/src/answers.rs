//! The sequences that answer one call: of each prompt, the first is computed and the others share its KV.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use futures::Stream;
use futures::future::{BoxFuture, FutureExt};
use futures::stream::{BoxStream, SelectAll, StreamExt};
use node::Clock;
use node::telemetry::TraceContext;
use proto::{Generation, Placed, Reason, RequestId, TokenId};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio_util::sync::CancellationToken;

use crate::answer::{Answer, Started};
use crate::domain::{Finish, Piece, Request, Whole};
use crate::fault::Fault;
use crate::models::Model;
use crate::resume::past_deadline;
use crate::service::{Service, Stoppable};
use crate::timing::{Part, Timing};

/// Most sequences of one call that run at once; the others follow as these end.
const SEQUENCES_AT_ONCE: usize = 16;

/// Pause before a sequence that found no room among others of its call is tried again.
const PAUSE: Duration = Duration::from_millis(20);

/// A prompt that fits its model, and all that its sequences share.
pub(crate) struct Prepared {
    pub(crate) request: Request,
    pub(crate) model: Arc<Model>,
    /// The first sequence; its `time_left` is still to be set.
    pub(crate) generation: Generation,
    pub(crate) prompt_text: Option<String>,
    /// Nothing is asked for but what computing the prompt tells.
    pub(crate) discard: bool,
}

impl Prepared {
    /// The sequence of that index.
    fn sequence(&self, index: usize, beside: Option<Placed>) -> Generation {
        let mut generation = self.generation.clone();
        if index > 0 {
            generation.request = RequestId(format!("{}-{index}", generation.request));
            // The first tells it for all, and computing it anew would not share its KV.
            generation.sampling.prompt_logprobs = None;
        }
        generation.sampling.sequence = index as u32;
        generation.beside = beside;
        generation
    }

    /// The total deadline, from arrival.
    fn deadline(&self, service: &Service) -> Duration {
        self.request.deadline(service.config.timeout)
    }

    pub(crate) fn started(&self) -> Started {
        let prompt = &self.generation.tokens[..self.generation.prompt_len()];
        Started {
            model: self.model.clone(),
            prompt_tokens: prompt.len(),
            prompt: if self.request.prompt_ids { prompt } else { &[] }.into(),
            prompt_text: self.prompt_text.clone(),
            seed: self.generation.sampling.seed,
        }
    }
}

/// The running answers to one call. Dropping this cancels them everywhere.
pub(crate) struct Answers {
    started: Vec<Started>,
    wanted: Vec<Wanted>,
    sequences: Sequences,
    /// What ends the call before its last token. Made once, so that a token costs no timer of its own.
    ends: BoxFuture<'static, Fault>,
    clock: Clock,
    timing: Arc<Timing>,
    /// Read before the answer was begun.
    ahead: VecDeque<(usize, Piece)>,
    /// Sequences in all.
    choices: usize,
    unfinished: usize,
    _stoppable: Option<Stoppable>,
}

/// What of the sequences of a prompt is returned. All else of a prompt is let go once they have begun.
struct Wanted {
    n: usize,
    best_of: usize,
    ranked: bool,
}

/// The pieces of each choice, by its number.
type Pieces = BoxStream<'static, (usize, Result<Piece, Fault>)>;

/// The sequences of a call. Nearly always there is one, which needs nobody to choose among many.
enum Sequences {
    One(Pieces),
    Several(SelectAll<Pieces>),
    /// They are over.
    Over,
}

impl Sequences {
    fn new(mut sequences: Vec<Pieces>) -> Self {
        match (sequences.pop(), sequences.is_empty()) {
            (None, _) => Self::Over,
            (Some(one), true) => Self::One(one),
            (Some(last), false) => Self::Several(sequences.into_iter().chain([last]).collect()),
        }
    }

    async fn next(&mut self) -> Option<(usize, Result<Piece, Fault>)> {
        match self {
            Self::One(one) => one.next().await,
            Self::Several(several) => several.next().await,
            Self::Over => None,
        }
    }
}

/// What every sequence of a call comes from.
#[derive(Clone)]
pub(crate) struct Origin {
    /// When the call arrived.
    pub(crate) arrived: Duration,
    /// What the calls to routers belong to.
    pub(crate) trace: TraceContext,
    /// Where the call's time goes.
    pub(crate) timing: Arc<Timing>,
}

/// What the sequences of a call have in common.
#[derive(Clone)]
struct Common {
    service: Arc<Service>,
    prompts: Arc<[Prepared]>,
    origin: Origin,
    /// Lets so many run.
    gate: Arc<Semaphore>,
}

impl Answers {
    /// Starts the sequences and waits for the first token of the first, so that a refusal is known before the answer
    /// begins.
    pub(crate) async fn start(
        service: Arc<Service>,
        mut prompts: Vec<Prepared>,
        origin: Origin,
    ) -> Result<Self, Fault> {
        let stopped = CancellationToken::new();
        let name = prompts.first().and_then(|prepared| prepared.request.stoppable.clone());
        let stoppable = name.map(|name| service.stoppable(name, stopped.clone()));
        let started = prompts.iter().map(Prepared::started).collect();
        let wanted = prompts.iter().map(|prepared| {
            let Request { n, best_of, ranked, .. } = prepared.request;
            Wanted { n, best_of, ranked }
        });
        let wanted = wanted.collect();
        // Nearly always one sequence is all there is: it needs no copy of its prompt.
        let mut first_tokens = match prompts.first_mut() {
            Some(first) if first.request.best_of == 1 => Some(std::mem::take(&mut first.generation.tokens)),
            _ => None,
        };
        let prompts: Arc<[Prepared]> = prompts.into();
        let gate = Arc::new(Semaphore::new(SEQUENCES_AT_ONCE));
        let deadline = prompts.first().map_or(service.config.timeout, |first| first.deadline(&service));
        let ends = ends(service.clone(), origin.arrived.saturating_add(deadline), stopped);
        let (clock, timing) = (service.clock, origin.timing.clone());
        let common = Common { service, prompts: prompts.clone(), origin, gate };
        let mut sequences = Vec::new();
        let mut first = 0;
        for (prompt, prepared) in prompts.iter().enumerate() {
            let (mut tell, told) = match prepared.request.best_of {
                1 => (None, None),
                _ => Some(watch::channel(None)).unzip(),
            };
            for index in 0..prepared.request.best_of {
                let choice = first + index;
                let role = match &told {
                    Some(told) if index > 0 => Role::Follower(told.clone()),
                    _ => Role::Leader(tell.take()),
                };
                let tokens = first_tokens.take();
                let waiting = Waiting { common: common.clone(), prompt, index, role, tokens };
                sequences.push(waiting.pieces().map(move |piece| (choice, piece)).boxed());
            }
            first += prepared.request.best_of;
        }
        let mut answers = Self {
            started,
            wanted,
            sequences: Sequences::new(sequences),
            ahead: VecDeque::new(),
            choices: first,
            unfinished: first,
            ends: ends.boxed(),
            clock,
            timing,
            _stoppable: stoppable,
        };
        if let Some(piece) = answers.read().await? {
            answers.ahead.push_back(piece);
        }
        Ok(answers)
    }

    /// One for each prompt.
    pub(crate) fn started(&self) -> &[Started] {
        &self.started
    }

    /// The same, for who needs them no more: a stream would keep its prompt until it ends.
    pub(crate) fn take_started(&mut self) -> Vec<Started> {
        std::mem::take(&mut self.started)
    }

    /// How long the first token waited for its step, if it was not taken yet.
    pub(crate) fn first_queue_wait(&self) -> Duration {
        self.ahead.front().map_or(Duration::ZERO, |(_, piece)| piece.token.queue_wait)
    }

    /// The next piece and the choice it belongs to: choices are numbered prompt by prompt. `None` after the last one.
    /// A fault is the last item too.
    pub(crate) async fn next(&mut self) -> Result<Option<(usize, Piece)>, Fault> {
        if let Some(piece) = self.ahead.pop_front() {
            return Ok(Some(piece));
        }
        self.read().await
    }

    async fn read(&mut self) -> Result<Option<(usize, Piece)>, Fault> {
        if self.unfinished == 0 {
            return Ok(None);
        }
        // What was done with the piece before; from here on it is the sequences' to say.
        self.timing.mark(Part::Write, self.clock.now());
        let read = tokio::select! {
            biased;
            read = self.sequences.next() => read,
            fault = &mut self.ends => {
                self.end();
                return Err(fault);
            }
        };
        match read {
            Some((choice, Ok(piece))) => {
                self.unfinished -= usize::from(piece.finish.is_some());
                Ok(Some((choice, piece)))
            }
            Some((_, Err(fault))) => {
                self.end();
                Err(fault)
            }
            None => {
                self.end();
                Err(proto::Error::new(Reason::Internal, "the answer ended without a last token").into())
            }
        }
    }

    /// Cancels what still runs.
    fn end(&mut self) {
        self.unfinished = 0;
        self.sequences = Sequences::Over;
    }

    /// The whole answer: of each prompt as many sequences as were asked for.
    pub(crate) async fn whole(&mut self) -> Result<Vec<Whole>, Fault> {
        let mut wholes: Vec<Growing> = Vec::new();
        wholes.resize_with(self.choices, Growing::default);
        let mut stopped = false;
        loop {
            match self.next().await {
                Ok(Some((choice, piece))) => wholes[choice].take(piece),
                Ok(None) => break,
                // Who is stopped has the text so far.
                Err(Fault::Stopped) if wholes.iter().all(|whole| !whole.tokens.is_empty()) => {
                    stopped = true;
                    break;
                }
                Err(fault) => return Err(fault),
            }
        }
        let mut wholes = wholes.into_iter().map(|whole| whole.finished(stopped));
        let mut chosen = Vec::new();
        for &Wanted { n, best_of, ranked } in &self.wanted {
            let mut of_prompt: Vec<Whole> = wholes.by_ref().take(best_of).collect();
            // What the first tells of the prompt is what computing it has told.
            let prompt = of_prompt.first().and_then(|whole| whole.prompt.clone());
            of_prompt.iter_mut().for_each(|whole| whole.prompt.clone_from(&prompt));
            if ranked || n < best_of {
                // Stable: of equals the earlier comes first.
                of_prompt.sort_by(|a, b| b.cumulative_logprob().total_cmp(&a.cumulative_logprob()));
            }
            let unreturned = of_prompt.iter().skip(n).map(Whole::generated).sum();
            of_prompt.truncate(n);
            of_prompt[0].unreturned = unreturned;
            chosen.append(&mut of_prompt);
        }
        Ok(chosen)
    }
}

/// Why a call ends before its last token: its deadline, the end of the process, or a call that stops it.
async fn ends(service: Arc<Service>, deadline: Duration, stopped: CancellationToken) -> Fault {
    let left = deadline.saturating_sub(service.clock.now());
    tokio::select! {
        biased;
        () = stopped.cancelled() => Fault::Stopped,
        () = service.shutdown.stopped() => Fault::NotReady("the server stopped".to_owned()),
        () = tokio::time::sleep(left) => past_deadline().into(),
    }
}

/// A whole answer so far.
#[derive(Default)]
struct Growing {
    text: String,
    tokens: Vec<proto::Token>,
    latencies: Vec<Duration>,
    prompt: Option<Box<proto::PromptReport>>,
    finish: Option<Finish>,
}

impl Growing {
    fn take(&mut self, mut piece: Piece) {
        self.text.push_str(&piece.text);
        if let Some(prompt) = piece.token.prompt.take() {
            self.prompt.get_or_insert(prompt);
        }
        if !piece.discarded {
            self.tokens.push(piece.token);
            self.latencies.push(piece.latency);
        }
        self.finish = piece.finish;
    }

    fn finished(self, stopped: bool) -> Whole {
        let Self { text, tokens, latencies, prompt, finish } = self;
        let prompt = prompt.map(|prompt| Arc::new(*prompt));
        let finish = finish.unwrap_or(if stopped { Finish::Stopped } else { Finish::Length });
        Whole { text, tokens, latencies, prompt, finish, unreturned: 0 }
    }
}

/// A sequence on its way.
enum Sequence {
    /// It waits for its turn.
    Waiting(Box<Waiting>),
    /// It runs.
    Running(Box<Running>),
    /// It has had its last item.
    Over,
}

/// A sequence that does not run yet.
struct Waiting {
    common: Common,
    prompt: usize,
    index: usize,
    role: Role,
    /// Its tokens, where its prompt has left them to it. It is the first of its call, which is started once.
    tokens: Option<Vec<TokenId>>,
}

/// What a sequence is to the others of its prompt.
enum Role {
    /// Computes the prompt, and tells where, if there are others.
    Leader(Option<watch::Sender<Option<Placed>>>),
    /// Waits for that.
    Follower(watch::Receiver<Option<Placed>>),
}

/// A sequence that runs.
struct Running {
    answer: Answer,
    tell: Option<watch::Sender<Option<Placed>>>,
    _turn: OwnedSemaphorePermit,
}

impl Waiting {
    /// The pieces of the sequence, from its turn on.
    fn pieces(self) -> impl Stream<Item = Result<Piece, Fault>> + Send + 'static {
        futures::stream::unfold(Sequence::Waiting(Box::new(self)), |sequence| async move {
            let mut running = match sequence {
                Sequence::Over => return None,
                Sequence::Running(running) => running,
                // Boxed: what starting takes would be kept as long as the sequence runs.
                Sequence::Waiting(waiting) => match Box::pin(waiting.run()).await {
                    Ok(running) => Box::new(running),
                    Err(fault) => return Some((Err(fault), Sequence::Over)),
                },
            };
            match running.next().await {
                Ok(Some(piece)) => Some((Ok(piece), Sequence::Running(running))),
                Ok(None) => None,
                Err(fault) => Some((Err(fault), Sequence::Over)),
            }
        })
    }

    /// Waits until the prompt's KV is somewhere and there is room among the sequences of the call, then starts.
    async fn run(self) -> Result<Running, Fault> {
        let Self { common, prompt, index, role, mut tokens } = self;
        let (beside, tell) = match role {
            Role::Leader(tell) => (None, tell),
            Role::Follower(mut told) => {
                // Without a word the leader failed, and with it the call.
                let beside = told.wait_for(Option::is_some).await.map(|beside| beside.clone());
                (beside.ok().flatten(), None)
            }
        };
        let turn = common.gate.acquire_owned().await.expect("the gate is never closed");
        let prepared = &common.prompts[prompt];
        let is_first = prompt == 0 && index == 0;
        let deadline = common.origin.arrived.saturating_add(prepared.deadline(&common.service));
        loop {
            let mut generation = prepared.sequence(index, beside.clone());
            if let Some(tokens) = tokens.take() {
                generation.tokens = tokens;
            }
            let service = common.service.clone();
            let answer =
                Answer::start(service, prepared, generation, (common.origin.clone(), is_first)).await;
            match answer {
                // The client has had its answer's beginning: what was admitted goes on as soon as there is room.
                Err(fault)
                    if !is_first
                        && matches!(fault.reason(), Reason::QueueFull | Reason::OutOfBlocks)
                        && common.service.clock.now() + PAUSE < deadline =>
                {
                    tokio::time::sleep(PAUSE).await;
                }
                answer => return Ok(Running { answer: answer?, tell, _turn: turn }),
            }
        }
    }
}

impl Running {
    async fn next(&mut self) -> Result<Option<Piece>, Fault> {
        let piece = self.answer.next().await?;
        if let (Some(tell), Some(piece)) = (&self.tell, &piece) {
            // From its second token on a sequence has its KV where it decodes; one that ends before leaves it where
            // it was computed.
            let decodes = piece.token.index > 0;
            if decodes || piece.finish.is_some() {
                let placed = self.answer.placed().cloned();
                tell.send_replace(
                    placed.map(|placed| if decodes { Placed { prefill: None, ..placed } } else { placed }),
                );
                self.tell = None;
            }
        }
        Ok(piece)
    }
}
