//! One prefill and one decode worker, and the calls that a router makes.

use std::time::{Duration, Instant};

use engine::sim::{SimConfig, SimModel};
use node::{Channel, Context, Listener, Services, TaskHandle, limits};
use proto::wire::decode_client::DecodeClient;
use proto::wire::kv_transfer_client::KvTransferClient;
use proto::wire::kv_transfer_server::KvTransferServer;
use proto::wire::prefill_client::PrefillClient;
use proto::wire::worker_client::WorkerClient;
use proto::wire::{decode_event, prefill_event};
use proto::{
    Attempt, Error, FinishReason, Generation, Handoff, Priority, SamplingParams, StopConditions, Token,
    TokenId, WorkerDescription, wire,
};
use worker::sim::Sim;
use worker::{Config, Source};

use super::proxy::Proxy;

/// The public name of the simulated model.
pub(crate) const MODEL: &str = "sim-model";
/// Address of the prefill worker in process.
pub(crate) const PREFILL: &str = "local:prefill";

/// A lease short enough to wait for.
const LEASE: Duration = Duration::from_millis(500);

pub(crate) struct Cluster {
    pub(crate) context: Context,
    pub(crate) prefill: String,
    pub(crate) decode: String,
    pub(crate) workers: Vec<TaskHandle>,
}

/// What a router learns of a request.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) tokens: Vec<TokenId>,
    pub(crate) finish: Option<FinishReason>,
    pub(crate) skipped: u64,
}

pub(crate) fn prompt(len: usize) -> Vec<TokenId> {
    (0..len as u32).map(|position| position * 37 % 251).collect()
}

pub(crate) fn generation(request: &str, tokens: Vec<TokenId>, max_tokens: usize) -> Generation {
    Generation {
        request: request.into(),
        attempt: Attempt(1),
        model: MODEL.into(),
        tokens,
        generated: 0,
        sampling: SamplingParams { temperature: 0.8, seed: 11, ..SamplingParams::default() },
        stop: StopConditions { max_tokens, ..StopConditions::default() },
        time_left: Duration::from_mins(1),
        probe: false,
        beside: None,
        session: None,
        priority: Priority::default(),
    }
}

pub(crate) fn reference(generation: &Generation) -> Vec<TokenId> {
    SimModel::reference(SimConfig::default(), &generation.tokens, &generation.sampling, &generation.stop)
}

fn free_port() -> String {
    let socket = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    socket.local_addr().expect("an address").to_string()
}

impl Cluster {
    pub(crate) async fn start() -> Self {
        Self::start_at(PREFILL.into(), "local:decode".into()).await
    }

    pub(crate) async fn start_tcp() -> Self {
        Self::start_at(free_port(), free_port()).await
    }

    async fn start_at(prefill: String, decode: String) -> Self {
        let context = Context::new("test", Vec::new());
        let config = |listen: &str| Config {
            listen: listen.to_owned(),
            model: Source::Sim(Sim::default()),
            served_name: Some(MODEL.to_owned()),
            kv_blocks: Some(256),
            // Several chunks for most prompts, so that blocks stream while later ones are computed.
            step_tokens: Some(32),
            lease_ttl_seconds: LEASE,
            renew_every_seconds: LEASE / 5,
            drain_notice_seconds: Duration::ZERO,
            ..Config::default()
        };
        let prefill_run = prefill_worker::run(config(&prefill), context.named("prefill-0"));
        let decode_run = decode_worker::run(config(&decode), context.named("decode-0"));
        let workers = vec![
            context.tasks.spawn("prefill", async { prefill_run.await.expect("the prefill worker runs") }),
            context.tasks.spawn("decode", async { decode_run.await.expect("the decode worker runs") }),
        ];
        let cluster = Self { context, prefill, decode, workers };
        for address in [&cluster.prefill, &cluster.decode] {
            let start = Instant::now();
            while cluster.worker(address).describe(wire::DescribeRequest {}).await.is_err() {
                assert!(start.elapsed() < Duration::from_secs(20), "{address} never answered");
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
        cluster
    }

    /// Offers a proxy's `KvTransfer` at `local:NAME`.
    pub(crate) async fn offer(&self, name: &str, proxy: Proxy) {
        proxy.connect(self.context.network.clone());
        let services = Services::new().add(limits!(KvTransferServer::new(proxy)));
        let listener = Listener::Local(name.to_owned());
        node::serve_grpc(&listener, services, &self.context.named("proxy")).await.expect("the proxy serves");
    }

    pub(crate) fn worker(&self, address: &str) -> WorkerClient<Channel> {
        limits!(WorkerClient::new(self.context.network.connect(address)))
    }

    pub(crate) fn kv_transfer(&self, address: &str) -> KvTransferClient<Channel> {
        limits!(KvTransferClient::new(self.context.network.connect(address)))
    }

    pub(crate) fn prefiller(&self) -> PrefillClient<Channel> {
        limits!(PrefillClient::new(self.context.network.connect(&self.prefill)))
    }

    pub(crate) fn decoder(&self) -> DecodeClient<Channel> {
        limits!(DecodeClient::new(self.context.network.connect(&self.decode)))
    }

    pub(crate) async fn describe(&self, address: &str) -> WorkerDescription {
        let answer = self.worker(address).describe(wire::DescribeRequest {}).await.expect("an answer");
        answer.into_inner().try_into().expect("a description")
    }

    /// A prefill up to the hand-off, its token, and the stream.
    pub(crate) async fn prefill(
        &self,
        generation: Generation,
    ) -> Result<(Handoff, Token, tonic::Streaming<wire::PrefillEvent>), Error> {
        let request = wire::PrefillRequest { generation: Some(generation.into()) };
        let mut stream = self.prefiller().prefill(request).await?.into_inner();
        let Some(prefill_event::Event::Issued(issued)) = next(&mut stream).await?.event else {
            panic!("the first item is the hand-off");
        };
        let Some(prefill_event::Event::Done(done)) = next(&mut stream).await?.event else {
            panic!("the second item is the token");
        };
        let handoff = issued.handoff.expect("a hand-off").try_into()?;
        Ok((handoff, done.token.expect("a token").try_into()?, stream))
    }

    /// A whole decode call.
    pub(crate) async fn decode(
        &self,
        generation: Generation,
        handoff: Option<Handoff>,
    ) -> Result<Outcome, Error> {
        let request =
            wire::DecodeRequest { generation: Some(generation.into()), handoff: handoff.map(Into::into) };
        let mut stream = self.decoder().decode(request).await?.into_inner();
        let mut outcome = Outcome { tokens: Vec::new(), finish: None, skipped: 0 };
        let mut ended = Ok(());
        loop {
            match stream.message().await {
                Ok(None) => break,
                Ok(Some(event)) => match event.event.expect("an event") {
                    decode_event::Event::Admitted(admitted) => outcome.skipped = admitted.skipped_tokens,
                    decode_event::Event::Token(token) => {
                        let token = Token::try_from(token)?;
                        outcome.tokens.push(token.id);
                        outcome.finish = token.finish;
                    }
                    decode_event::Event::Moved(_) => panic!("nobody asked for that"),
                },
                Err(status) => {
                    ended = Err(Error::from(status));
                    break;
                }
            }
        }
        if ended.is_err() {
            assert!(outcome.tokens.is_empty(), "no token of a refused hand-off");
        }
        ended.map(|()| outcome)
    }

    /// A request in both workers, as a router places it; `change` may tamper with the reference. Decode starts when the
    /// hand-off is issued, while the prefill still computes.
    pub(crate) async fn split(
        &self,
        generation: Generation,
        change: impl Fn(&mut Handoff),
    ) -> Result<Outcome, Error> {
        let request = wire::PrefillRequest { generation: Some(generation.clone().into()) };
        let mut stream = self.prefiller().prefill(request).await?.into_inner();
        let Some(prefill_event::Event::Issued(issued)) = next(&mut stream).await?.event else {
            panic!("the first item is the hand-off");
        };
        let mut handoff: Handoff = issued.handoff.expect("a hand-off").try_into()?;
        change(&mut handoff);
        let first = async {
            let Some(prefill_event::Event::Done(done)) = next(&mut stream).await?.event else {
                panic!("the second item is the token");
            };
            assert_eq!(stream.message().await?, None, "nothing follows the token");
            Token::try_from(done.token.expect("a token"))
        };
        let (first, rest) = tokio::join!(first, self.decode(generation, Some(handoff)));
        let mut outcome = rest?;
        outcome.tokens.insert(0, first?.id);
        Ok(outcome)
    }

    /// Waits until neither worker holds a block for anybody, with no call that would make it so.
    pub(crate) async fn settled(&self) {
        for address in [&self.prefill, &self.decode] {
            let start = Instant::now();
            loop {
                let now = self.describe(address).await;
                if now.blocks_free == now.blocks_total && now.sequences == 0 {
                    break;
                }
                assert!(start.elapsed() < LEASE * 10, "{address} does not come to rest: {now:?}");
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
    }
}

async fn next<T>(stream: &mut tonic::Streaming<T>) -> Result<T, Error> {
    Ok(stream.message().await?.expect("another item"))
}
