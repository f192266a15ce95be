//! Gateway, scripted routers and a worker that has a tokenizer, all in this process.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use gateway::{Config, Gateway, bind};
use node::{Context, Listener, Member, Registration, Services, serve_grpc};
use proto::wire::generation_service_client::GenerationServiceClient;
use proto::wire::router_server::RouterServer;
use proto::wire::worker_server::{Worker, WorkerServer};
use proto::wire::{
    ChangeRoleRequest, ChangeRoleResponse, DescribeRequest, DescribeResponse, FenceRequest, FenceResponse,
    GetTokenizerRequest, TokenizerChunk, WatchEvent, WatchRequest,
};
use proto::worker::PROTOCOL_VERSION;
use proto::{
    Digest, Error, KvDtype, KvLayout, ModelDescription, Reason, Role, WorkerDescription, WorkerEpoch,
};
use tokio_stream::Stream;
use tonic::{Request, Response, Status};

use super::bundle::{VOCAB, byte_bundle};
use super::script::{Script, ScriptedRouter};

pub(crate) const MODEL: &str = "test-model";

/// Most tokens of a sequence.
const CONTEXT: usize = 64;

pub(crate) struct Cluster {
    pub(crate) script: Arc<Script>,
    pub(crate) context: Context,
    pub(crate) gateway: Gateway,
    http: reqwest::Client,
    routers: Mutex<HashMap<String, Registration>>,
}

impl Cluster {
    /// A cluster that is ready.
    pub(crate) async fn start(routers: &[&str], change: impl FnOnce(&mut Config)) -> Self {
        let cluster = Self::start_unready(routers, change).await;
        cluster.until_ready(true).await;
        cluster
    }

    pub(crate) async fn start_unready(routers: &[&str], change: impl FnOnce(&mut Config)) -> Self {
        // Before anything is counted: what was looked up without a recorder is never recorded.
        node::metrics::install().unwrap();
        let member = |name: &&str| Member { role: Role::Router, address: format!("local:{name}") };
        let context = Context::new("gateway", routers.iter().map(member).collect());
        let bundle = byte_bundle();
        let description = ModelDescription {
            name: MODEL.to_owned(),
            fingerprint: Digest([7; 32]),
            tokenizer: bundle.digest(),
            context_len: CONTEXT,
            vocab_size: VOCAB,
            numerics: "test".to_owned(),
        };
        let script = Script::new(vec![description.clone()]);
        let worker = WorkerServer::new(TokenizerWorker {
            digest: bundle.digest(),
            bytes: bundle.to_bytes(),
            model: description,
        });
        let listener = Listener::Local("worker".to_owned());
        serve_grpc(&listener, Services::new().add(node::limits!(worker)), &context).await.unwrap();
        let mut config = Config {
            listen: "127.0.0.1:0".to_owned(),
            grpc_listen: "local:gateway".to_owned(),
            models_every: Duration::from_millis(50),
            ..Config::default()
        };
        change(&mut config);
        let gateway = bind(config, context.clone()).await.unwrap();
        let http = reqwest::Client::new();
        let cluster = Self { script, context, gateway, http, routers: Mutex::default() };
        for name in routers {
            cluster.raise(name);
        }
        cluster
    }

    /// Puts a router at its address.
    pub(crate) fn raise(&self, name: &str) {
        let router = ScriptedRouter { name: name.to_owned(), script: self.script.clone() };
        let routes = tonic::service::Routes::new(node::limits!(RouterServer::new(router)));
        let registration = self.context.network.register(name, routes, self.context.shutdown.clone());
        self.routers.lock().unwrap().insert(name.to_owned(), registration);
    }

    /// Takes a router away: new calls to it are refused.
    pub(crate) fn fell(&self, name: &str) {
        self.routers.lock().unwrap().remove(name);
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.gateway.http_address())
    }

    pub(crate) fn client(&self) -> &reqwest::Client {
        &self.http
    }

    pub(crate) async fn get(&self, path: &str) -> reqwest::Response {
        self.http.get(self.url(path)).send().await.unwrap()
    }

    pub(crate) async fn post(&self, path: &str, body: &serde_json::Value) -> reqwest::Response {
        self.http.post(self.url(path)).json(body).send().await.unwrap()
    }

    /// Status and body of an answer.
    pub(crate) async fn answer(&self, path: &str, body: &serde_json::Value) -> (u16, String) {
        let response = self.post(path, body).await;
        (response.status().as_u16(), response.text().await.unwrap())
    }

    pub(crate) fn grpc(&self) -> GenerationServiceClient<node::Channel> {
        GenerationServiceClient::new(self.context.network.connect(self.gateway.grpc_address()))
    }

    pub(crate) async fn until_ready(&self, ready: bool) {
        let expected = if ready { 200 } else { 503 };
        self.until("readiness", || async { self.get("/v2/health/ready").await.status() == expected }).await;
    }

    /// Waits until no stream is open at any router.
    pub(crate) async fn until_idle(&self) {
        self.until("idle routers", || async { self.script.open() == 0 }).await;
    }

    async fn until<F: Future<Output = bool>>(&self, what: &str, mut holds: impl FnMut() -> F) {
        let deadline = tokio::time::Instant::now() + Duration::from_secs(20);
        while !holds().await {
            assert!(tokio::time::Instant::now() < deadline, "no {what} within 20 s");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

struct TokenizerWorker {
    model: ModelDescription,
    digest: Digest,
    bytes: Vec<u8>,
}

#[tonic::async_trait]
impl Worker for TokenizerWorker {
    type GetTokenizerStream = Pin<Box<dyn Stream<Item = Result<TokenizerChunk, Status>> + Send>>;
    type WatchStream = Pin<Box<dyn Stream<Item = Result<WatchEvent, Status>> + Send>>;

    async fn watch(&self, _: Request<WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        Err(Status::unimplemented("a gateway does not ask this"))
    }

    async fn describe(&self, _: Request<DescribeRequest>) -> Result<Response<DescribeResponse>, Status> {
        let description = WorkerDescription {
            protocol: PROTOCOL_VERSION,
            epoch: WorkerEpoch(1),
            role: Role::Decode,
            model: self.model.clone(),
            layout: KvLayout { layers: 1, kv_heads: 1, head_dim: 4, dtype: KvDtype::F16, block_tokens: 16 },
            draining: false,
            blocks_total: 12,
            blocks_free: 10,
            sequences: 0,
        };
        Ok(Response::new(description.into()))
    }

    async fn get_tokenizer(
        &self,
        request: Request<GetTokenizerRequest>,
    ) -> Result<Response<Self::GetTokenizerStream>, Status> {
        if request.into_inner().digest()? != self.digest {
            return Err(Error::new(Reason::InvalidArgument, "no such tokenizer").into());
        }
        let chunks: Vec<_> = self
            .bytes
            .chunks(1000)
            .map(|bytes| Ok(TokenizerChunk { bytes: bytes.to_vec().into() }))
            .collect();
        Ok(Response::new(Box::pin(tokio_stream::iter(chunks))))
    }

    async fn change_role(
        &self,
        _: Request<ChangeRoleRequest>,
    ) -> Result<Response<ChangeRoleResponse>, Status> {
        Err(Status::unimplemented("a gateway does not ask this"))
    }

    async fn fence(&self, _: Request<FenceRequest>) -> Result<Response<FenceResponse>, Status> {
        Err(Error::new(Reason::Internal, "a gateway does not ask this").into())
    }
}
