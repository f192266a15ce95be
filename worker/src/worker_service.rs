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

use crate::shell::Handle;
use crate::watcher::Watcher;

/// Bytes of a tokenizer bundle in one message.
const CHUNK_BYTES: usize = 1 << 20;

/// What does not change in a worker's life.
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
    /// What it registers with, at the address that peers use.
    pub fn entry(&self, address: &str) -> Entry {
        let (model, layout) = (self.model.clone(), self.layout);
        let capabilities = Capabilities { protocol: PROTOCOL_VERSION, model, layout };
        let (role, epoch) = (self.role, self.epoch);
        Entry { role, address: address.to_owned(), epoch, capabilities: Some(capabilities) }
    }
}

/// See [`wire::worker_server::Worker`].
pub struct WorkerService {
    identity: Identity,
    shell: Handle,
    shutdown: Shutdown,
}

impl WorkerService {
    /// Describes the worker of that identity.
    pub fn new(identity: Identity, shell: Handle, shutdown: Shutdown) -> Self {
        Self { identity, shell, shutdown }
    }

    /// The worker now. Does not wait for the engine's thread: the numbers are those of its last step.
    fn describe_now(&self) -> WorkerDescription {
        let gauges = self.shell.gauges();
        let sequences = gauges.sequences;
        WorkerDescription {
            protocol: PROTOCOL_VERSION,
            epoch: self.identity.epoch,
            role: self.identity.role,
            model: self.identity.model.clone(),
            layout: self.identity.layout,
            draining: gauges.draining || self.shutdown.is_draining(),
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
        let watcher =
            Watcher::new(self.shell.clone(), self.identity.epoch, self.shutdown.clone(), with_blocks);
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
        let Identity { model, tokenizer, .. } = &self.identity;
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
        self.shell.fence(RequestId(request), Attempt(attempt)).await?;
        Ok(Response::new(wire::FenceResponse {}))
    }
}
