//! The served models: learnt from routers, their tokenizers fetched from workers by digest and kept.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use checkpoint::grammar::GrammarEnv;
use checkpoint::{Text, TokenizerBundle};
use node::Tasks;
use proto::wire::worker_client::WorkerClient;
use proto::wire::{GetTokenizerRequest, ListModelsRequest};
use proto::{Digest, Error, ModelDescription, Reason, TokenId};
use tokio::sync::watch;

use crate::route::Routers;

/// Longest wait for one answer of a router, and for each chunk of a tokenizer.
const ANSWER_MAX: Duration = Duration::from_secs(5);
/// Most bytes of a tokenizer bundle that are taken.
const BUNDLE_BYTES_MAX: usize = 512 << 20;

/// A served model.
#[derive(Debug)]
pub struct Model {
    /// What the workers say of it.
    pub description: ModelDescription,
    /// Its tokenizer and chat template.
    pub text: Arc<Text>,
    /// See [`token_bytes_max`].
    pub token_bytes_max: usize,
    /// Its vocabulary as grammars see it; `None` when it cannot carry any.
    pub grammars: Option<Arc<GrammarEnv>>,
}

/// What is served now.
#[derive(Clone, Debug, Default)]
pub struct Served {
    /// In the order of the routers' list, each name once.
    pub models: Vec<Arc<Model>>,
    /// Addresses of the workers behind them.
    pub workers: Arc<[String]>,
    /// False when no router lists a model: those above were served before, and may be again.
    pub placeable: bool,
}

impl Served {
    /// The model of that name.
    pub fn find(&self, name: &str) -> Option<&Arc<Model>> {
        self.models.iter().find(|model| model.description.name == name)
    }

    /// The only model, if there is just one.
    pub fn only(&self) -> Option<&Arc<Model>> {
        self.models.first().filter(|_| self.models.len() == 1)
    }
}

/// An opened tokenizer, and what is made of it once.
#[derive(Clone)]
struct Opened {
    text: Arc<Text>,
    token_bytes_max: usize,
    grammars: Option<Arc<GrammarEnv>>,
}

impl Opened {
    fn new(bundle: &TokenizerBundle) -> Result<Self, checkpoint::Error> {
        let text = bundle.open()?;
        let grammars = match GrammarEnv::of_bundle(bundle) {
            Ok(grammars) => Some(Arc::new(grammars)),
            Err(error) => {
                tracing::warn!(%error, "outputs cannot be held to grammars");
                None
            }
        };
        Ok(Self { token_bytes_max: token_bytes_max(&text), text: Arc::new(text), grammars })
    }
}

/// Keeps [`Served`] up to date.
pub(crate) struct Models {
    routers: Arc<Routers>,
    tasks: Tasks,
    /// Opened tokenizers of the models that are served.
    texts: HashMap<Digest, Opened>,
    served: watch::Sender<Served>,
}

impl Models {
    pub(crate) fn new(routers: Arc<Routers>, tasks: Tasks) -> Self {
        Self { routers, tasks, texts: HashMap::new(), served: watch::Sender::default() }
    }

    pub(crate) fn served(&self) -> watch::Receiver<Served> {
        self.served.subscribe()
    }

    /// Asks again every so often, and at once when the members change. Never returns.
    pub(crate) async fn keep(mut self, every: Duration) {
        let mut members = self.routers.members();
        let mut known = None;
        loop {
            match self.refresh().await {
                Ok(()) => known = Some(true),
                Err(error) => {
                    // Said once per outage, not once per try.
                    match known {
                        None => tracing::info!(%error, "waiting for a router"),
                        Some(true) => tracing::warn!(%error, "models not learnt"),
                        Some(false) => {}
                    }
                    known = Some(false);
                }
            }
            tokio::select! {
                () = tokio::time::sleep(every) => {}
                Ok(()) = members.changed() => {}
            }
        }
    }

    /// Asks a router for its list and fetches what is new. On an error all stays as it was, but for models that
    /// routers no longer list.
    async fn refresh(&mut self) -> Result<(), Error> {
        let (descriptions, workers) = self.list().await?;
        if descriptions.is_empty() {
            self.served.send_if_modified(|served| std::mem::take(&mut served.placeable));
            return Err(Error::new(Reason::WorkerLost, "no model has the workers it needs"));
        }
        let mut models: Vec<Arc<Model>> = Vec::with_capacity(descriptions.len());
        for description in descriptions {
            if models.iter().any(|model| model.description.name == description.name) {
                continue;
            }
            let Opened { text, token_bytes_max, grammars } = self.text(&description, &workers).await?;
            models.push(Arc::new(Model { description, text, token_bytes_max, grammars }));
        }
        self.texts.retain(|digest, _| models.iter().any(|model| model.description.tokenizer == *digest));
        self.served.send_if_modified(|served| {
            let same = served.placeable
                && served
                    .models
                    .iter()
                    .map(|model| &model.description)
                    .eq(models.iter().map(|model| &model.description))
                && served.workers[..] == workers[..];
            if !same {
                *served = Served { models, workers: workers.as_slice().into(), placeable: true };
            }
            !same
        });
        Ok(())
    }

    async fn list(&self) -> Result<(Vec<ModelDescription>, Vec<String>), Error> {
        let router =
            self.routers.pick().ok_or_else(|| Error::new(Reason::WorkerLost, "no router is known"))?;
        let mut client = self.routers.client(&router);
        let answer = answered(client.list_models(ListModelsRequest {})).await.inspect_err(|error| {
            if error.reason == Reason::WorkerLost {
                self.routers.lost(&router);
            }
        })?;
        let answer = answer.into_inner();
        let models = answer.models.into_iter().map(TryInto::try_into).collect::<Result<_, _>>()?;
        Ok((models, answer.workers))
    }

    /// The model's tokenizer: kept, or from the first worker that has it.
    async fn text(&mut self, model: &ModelDescription, workers: &[String]) -> Result<Opened, Error> {
        let digest = model.tokenizer;
        if let Some(text) = self.texts.get(&digest) {
            return Ok(text.clone());
        }
        let mut last = Error::new(Reason::WorkerLost, "no worker is known");
        for worker in workers {
            let fetched = self.fetch(worker, digest).await;
            match fetched.and_then(|bundle| check_vocabulary(model, &bundle).map(|()| bundle)) {
                Ok(bundle) => {
                    let opened =
                        self.tasks.spawn_blocking("open-tokenizer", move || Opened::new(&bundle)).await?;
                    let text = opened.map_err(|error| Error::new(Reason::Internal, error.to_string()))?;
                    tracing::info!(model = model.name, worker, %digest, "tokenizer fetched");
                    self.texts.insert(digest, text.clone());
                    return Ok(text);
                }
                Err(error) => {
                    tracing::debug!(worker, %digest, %error, "tokenizer not fetched");
                    last = error;
                }
            }
        }
        let message = format!("tokenizer {digest} of model {}: {}", model.name, last.message);
        Err(Error::new(last.reason, message))
    }

    async fn fetch(&self, worker: &str, digest: Digest) -> Result<TokenizerBundle, Error> {
        let mut client = node::limits!(WorkerClient::new(self.routers.channel(worker)));
        let request = GetTokenizerRequest { digest: digest.0.to_vec() };
        let mut chunks = answered(client.get_tokenizer(request)).await?.into_inner();
        let mut bytes = Vec::new();
        while let Some(chunk) = answered(chunks.message()).await? {
            if bytes.len() + chunk.bytes.len() > BUNDLE_BYTES_MAX {
                let message = format!("tokenizer: more than {BUNDLE_BYTES_MAX} bytes");
                return Err(Error::new(Reason::InvalidArgument, message));
            }
            bytes.extend_from_slice(&chunk.bytes);
        }
        let read = move || {
            let bundle = TokenizerBundle::from_bytes(&bytes)
                .map_err(|error| Error::new(Reason::InvalidArgument, error.to_string()))?;
            let found = bundle.digest();
            if found == digest {
                return Ok(bundle);
            }
            let message = format!("tokenizer digest: expected {digest}, got {found}");
            Err(Error::new(Reason::ChecksumMismatch, message))
        };
        self.tasks.spawn_blocking("read-tokenizer", read).await?
    }
}

/// Most bytes of a text that become one token, or `usize::MAX` when there is no such bound: a vocabulary that lacks
/// some byte may drop what it cannot spell, or put any length of it into one unknown token.
pub fn token_bytes_max(text: &Text) -> usize {
    let mut spelt = [false; 256];
    let mut longest = 0;
    for id in 0..text.vocab_size() {
        let bytes = text.token_bytes(id as TokenId).unwrap_or_default();
        longest = longest.max(bytes.len());
        if let [byte] = bytes {
            spelt[usize::from(*byte)] = true;
        }
    }
    if spelt == [true; 256] { longest } else { usize::MAX }
}

fn check_vocabulary(model: &ModelDescription, bundle: &TokenizerBundle) -> Result<(), Error> {
    // A model may have more rows than tokens (padding), never fewer.
    if bundle.vocab_size() <= model.vocab_size {
        return Ok(());
    }
    let message = format!("tokenizer of {} tokens, model of {}", bundle.vocab_size(), model.vocab_size);
    Err(Error::new(Reason::FingerprintMismatch, message))
}

/// The call's answer, or its failure, in bounded time.
async fn answered<T>(call: impl Future<Output = Result<T, tonic::Status>>) -> Result<T, Error> {
    match tokio::time::timeout(ANSWER_MAX, call).await {
        Ok(answer) => answer.map_err(Error::from),
        Err(_) => {
            let message = format!("no answer within {} s", ANSWER_MAX.as_secs());
            Err(Error::new(Reason::WorkerLost, message))
        }
    }
}
