//! A native gRPC client that keeps what a stream gave.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use proto::SamplingParams;
use proto::wire::generation_service_client::GenerationServiceClient;
use proto::wire::{self, GenerateRequest, TokenIds};
use tokio::task::JoinHandle;
use tonic::transport::{Channel, Endpoint};

/// What one request gave, in full or up to its error.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Answer {
    /// Token ids, in order.
    pub tokens: Vec<u32>,
    /// Their text.
    pub text: String,
    /// True when the stream said why it ended.
    pub finished: bool,
    /// How it failed, if it did: code and message.
    pub error: Option<String>,
}

/// A request for the continuation of token ids.
#[derive(Clone, Debug)]
pub struct Ask {
    /// The prompt.
    pub prompt: Vec<u32>,
    /// Tokens to generate; end-of-sequence is ignored, so that many come.
    pub max_tokens: usize,
    /// How to choose tokens.
    pub sampling: SamplingParams,
    /// The request's name; drawn by the gateway when absent.
    pub id: Option<String>,
    /// The model; needed where several are served.
    pub model: Option<String>,
    /// Time for all of it; the gateway's own limit when absent.
    pub timeout: Option<Duration>,
}

impl Ask {
    /// Greedy.
    pub fn greedy(prompt: &[u32], max_tokens: usize) -> Self {
        Self {
            prompt: prompt.to_vec(),
            max_tokens,
            sampling: SamplingParams::default(),
            id: None,
            model: None,
            timeout: None,
        }
    }

    /// Seeded, at temperature 0.8.
    pub fn seeded(prompt: &[u32], max_tokens: usize, seed: u64) -> Self {
        let sampling = SamplingParams { temperature: 0.8, seed, ..SamplingParams::default() };
        Self { sampling, ..Self::greedy(prompt, max_tokens) }
    }

    /// The same under a name.
    #[must_use]
    pub fn named(self, id: &str) -> Self {
        Self { id: Some(id.to_owned()), ..self }
    }

    fn request(&self) -> GenerateRequest {
        GenerateRequest {
            prompt: Some(wire::generate_request::Prompt::TokenIds(TokenIds { ids: self.prompt.clone() })),
            sampling: Some(self.sampling.clone().into()),
            max_tokens: Some(self.max_tokens as u64),
            timeout_us: self.timeout.map(|timeout| timeout.as_micros() as u64),
            id: self.id.clone(),
            model: self.model.clone(),
            ignore_eos: true,
            ..GenerateRequest::default()
        }
    }
}

/// A client of one gateway.
#[derive(Clone, Debug)]
pub struct Client(GenerationServiceClient<Channel>);

impl Client {
    /// Connects when first used.
    ///
    /// # Panics
    /// When the port makes no address.
    pub fn new(grpc_port: u16) -> Self {
        Self::at(&format!("127.0.0.1:{grpc_port}"))
    }

    /// The same at any `host:port`.
    ///
    /// # Panics
    /// When it is none.
    pub fn at(address: &str) -> Self {
        let endpoint = Endpoint::from_shared(format!("http://{address}")).expect("an address");
        Self(GenerationServiceClient::new(endpoint.connect_timeout(Duration::from_secs(5)).connect_lazy()))
    }

    /// Sends the request and reads its stream to the end.
    pub async fn ask(&self, ask: &Ask) -> Answer {
        self.read(ask, || {}).await
    }

    /// The same; `arrived` is called for each item.
    async fn read(&self, ask: &Ask, arrived: impl Fn()) -> Answer {
        let mut answer = Answer::default();
        let mut client = self.0.clone();
        let mut stream = match client.generate(ask.request()).await {
            Ok(response) => response.into_inner(),
            Err(status) => {
                answer.error = Some(format!("{:?}: {}", status.code(), status.message()));
                return answer;
            }
        };
        loop {
            match stream.message().await {
                Ok(Some(item)) => {
                    arrived();
                    assert!(!answer.finished, "an item came after the last: {item:?}");
                    for token in &item.tokens {
                        assert_eq!(token.index, answer.tokens.len() as u64, "token indexes have no gap");
                        answer.tokens.push(token.id);
                    }
                    answer.text.push_str(&item.text);
                    answer.finished = item.finish.is_some();
                }
                Ok(None) => return answer,
                Err(status) => {
                    answer.error = Some(format!("{:?}: {}", status.code(), status.message()));
                    return answer;
                }
            }
        }
    }

    /// Sends the request on a task of its own, which reads its stream to the end.
    #[expect(clippy::disallowed_methods, reason = "the test that holds the handle owns the task")]
    pub fn start(self, ask: Ask) -> JoinHandle<Answer> {
        tokio::spawn(async move { self.ask(&ask).await })
    }

    /// The same, and what has come so far can be looked at.
    #[expect(clippy::disallowed_methods, reason = "what is returned owns the task")]
    pub fn watch(self, ask: Ask) -> Watched {
        let arrivals = Arc::new(Mutex::new(Vec::new()));
        let noted = arrivals.clone();
        let task = tokio::spawn(async move { self.read(&ask, || lock(&noted).push(Instant::now())).await });
        Watched { task, arrivals }
    }

    /// Sends all requests at once and reads every stream to the end.
    pub async fn ask_all(&self, asks: &[Ask]) -> Vec<Answer> {
        let mut answers = Vec::with_capacity(asks.len());
        let mut running = tokio::task::JoinSet::new();
        for (index, ask) in asks.iter().cloned().enumerate() {
            let client = self.clone();
            running.spawn(async move { (index, client.ask(&ask).await) });
        }
        while let Some(answer) = running.join_next().await {
            answers.push(answer.expect("the client does not panic"));
        }
        answers.sort_by_key(|(index, _)| *index);
        answers.into_iter().map(|(_, answer)| answer).collect()
    }
}

/// A request that runs. Dropping it is leaving: its connection is closed.
#[derive(Debug)]
pub struct Watched {
    task: JoinHandle<Answer>,
    arrivals: Arc<Mutex<Vec<Instant>>>,
}

impl Watched {
    /// When each item of the stream came, so far.
    pub fn arrivals(&self) -> Vec<Instant> {
        lock(&self.arrivals).clone()
    }

    /// True once the stream has ended.
    pub fn is_over(&self) -> bool {
        self.task.is_finished()
    }

    /// What the whole stream gave.
    pub async fn answer(mut self) -> Answer {
        (&mut self.task).await.expect("the client does not panic")
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}
