//! The gRPC service by which a worker tells who it is. Both roles serve it.

use bytes::Bytes;
use futures::StreamExt;
use futures::stream::{self, BoxStream};
use node::{Entry, Shutdown};
use proto::wire::worker_server::Worker;
use proto::worker::PROTOCOL_VERSION;
use proto::{
    Attempt, Capabilities, Error, KvLayout, ModelDescription, Reason, RequestId, Role, WorkerDescription,
    WorkerEpoch, wire,
};
use tonic::{Request, Response, Status};

use crate::lives::{Changed, Life, Lives, ending};
use crate::watcher::Watcher;

/// Bytes of a tokenizer bundle in one message.
const CHUNK_BYTES: usize = 1 << 20;

/// What does not change in one life of a worker.
#[derive(Clone, Debug)]
pub struct Identity {
    /// This life.
    pub epoch: WorkerEpoch,
    /// What it is for.
    pub role: Role,
    /// What it serves.
    pub model: ModelDescription,
    /// The shape of its KV.
    pub layout: KvLayout,
    /// The tokenizer bundle whose digest is `model.tokenizer`; empty when there is none.
    pub tokenizer: Bytes,
}

impl Identity {
    /// What must fit for others to work with it.
    pub fn capabilities(&self) -> Capabilities {
        Capabilities { protocol: PROTOCOL_VERSION, model: self.model.clone(), layout: self.layout }
    }

    /// What it registers with, at the address that peers use.
    pub fn entry(&self, address: &str) -> Entry {
        let (role, epoch) = (self.role, self.epoch);
        Entry { role, address: address.to_owned(), epoch, capabilities: Some(self.capabilities()) }
    }
}

/// See [`wire::worker_server::Worker`].
pub struct WorkerService {
    lives: Lives,
    shutdown: Shutdown,
}

impl WorkerService {
    /// Describes the present life of a worker.
    pub fn new(lives: Lives, shutdown: Shutdown) -> Self {
        Self { lives, shutdown }
    }

    /// The worker now. Does not wait for the engine's thread: the numbers are those of its last step.
    fn describe_now(&self) -> WorkerDescription {
        let life = self.lives.present();
        let Life { identity, shell, .. } = &*life;
        let gauges = shell.gauges();
        let sequences = gauges.sequences;
        WorkerDescription {
            protocol: PROTOCOL_VERSION,
            epoch: identity.epoch,
            role: identity.role,
            model: identity.model.clone(),
            layout: identity.layout,
            draining: gauges.draining || life.is_leaving() || self.shutdown.is_draining(),
            blocks_total: gauges.blocks.total,
            blocks_free: gauges.blocks.free + gauges.blocks.cached,
            sequences: sequences.waiting + sequences.running + sequences.preempted + sequences.reserved,
        }
    }
}

#[tonic::async_trait]
impl Worker for WorkerService {
    type GetTokenizerStream = BoxStream<'static, Result<wire::TokenizerChunk, Status>>;
    type WatchStream = BoxStream<'static, Result<wire::WatchEvent, Status>>;

    async fn watch(
        &self,
        request: Request<wire::WatchRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let with_blocks = request.into_inner().blocks;
        let watcher = Watcher::new(&self.lives, self.shutdown.clone(), with_blocks);
        let events = stream::unfold(Some(watcher), |watcher| async {
            let mut watcher = watcher?;
            match watcher.next().await? {
                Ok(event) => Some((Ok(event.into()), Some(watcher))),
                Err(error) => Some((Err(error.into()), None)),
            }
        });
        Ok(Response::new(events.boxed()))
    }

    async fn describe(
        &self,
        _request: Request<wire::DescribeRequest>,
    ) -> Result<Response<wire::DescribeResponse>, Status> {
        Ok(Response::new(self.describe_now().into()))
    }

    async fn get_tokenizer(
        &self,
        request: Request<wire::GetTokenizerRequest>,
    ) -> Result<Response<Self::GetTokenizerStream>, Status> {
        let asked = request.into_inner().digest()?;
        let life = self.lives.present();
        let Identity { model, tokenizer, .. } = &*life.identity;
        if asked != model.tokenizer || tokenizer.is_empty() {
            let message = format!("tokenizer {} expected, {asked} was asked for", model.tokenizer);
            return Err(Error::new(Reason::ModelNotFound, message).into());
        }
        let bundle = tokenizer.clone();
        let chunks = (0..bundle.len()).step_by(CHUNK_BYTES).map(move |start| {
            let end = bundle.len().min(start + CHUNK_BYTES);
            Ok(wire::TokenizerChunk { bytes: bundle.slice(start..end) })
        });
        Ok(Response::new(stream::iter(chunks).boxed()))
    }

    async fn fence(
        &self,
        request: Request<wire::FenceRequest>,
    ) -> Result<Response<wire::FenceResponse>, Status> {
        let wire::FenceRequest { request, attempt } = request.into_inner();
        if request.is_empty() {
            return Err(Error::invalid("request", "must not be empty").into());
        }
        self.lives.present().shell.fence(RequestId(request), Attempt(attempt)).await?;
        Ok(Response::new(wire::FenceResponse {}))
    }

    async fn change_role(
        &self,
        request: Request<wire::ChangeRoleRequest>,
    ) -> Result<Response<wire::ChangeRoleResponse>, Status> {
        let role = request.into_inner().role().try_into()?;
        if self.shutdown.is_draining() {
            return Err(ending().into());
        }
        let Changed { epoch, is_new } = self.lives.change(role).await?;
        Ok(Response::new(wire::ChangeRoleResponse { epoch: epoch.0, changed: is_new }))
    }
}
