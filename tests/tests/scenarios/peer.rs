//! A peer of a worker that speaks the protocol between services, for words that no honest peer would say.

use baton_tests::client::Ask;
use baton_tests::cluster::{Cluster, MODEL, Name};
use proto::Error;
use proto::wire::decode_client::DecodeClient;
use proto::wire::kv_transfer_client::KvTransferClient;
use proto::wire::prefill_client::PrefillClient;
use proto::wire::{self, decode_event, fetch_event, prefill_event};
use tonic::transport::{Channel, Endpoint};
use tonic::{Status, Streaming};

/// Time that each call may take.
const TIME_LEFT_MICROS: u64 = 60_000_000;

/// A connection to one worker. Refusals are given by the name of their reason.
pub(crate) struct Peer {
    channel: Channel,
}

impl Peer {
    /// Of a worker of the cluster.
    pub(crate) fn of(cluster: &Cluster, name: Name) -> Self {
        let endpoint = Endpoint::from_shared(format!("http://{}", cluster.address(name)));
        Self { channel: endpoint.expect("an address").connect_lazy() }
    }

    /// Has a prompt computed, and gives the reference to its KV.
    pub(crate) async fn prefill(&self, ask: &Ask, attempt: u32) -> Result<wire::Handoff, String> {
        let request = wire::PrefillRequest { generation: Some(generation(ask, attempt)) };
        let mut client = PrefillClient::new(self.channel.clone());
        let mut events = client.prefill(request).await.map_err(reason)?.into_inner();
        let mut issued = None;
        while let Some(event) = events.message().await.map_err(reason)? {
            if let Some(prefill_event::Event::Issued(event)) = event.event {
                issued = event.handoff;
            }
        }
        Ok(issued.expect("a prefill that ends well has issued a hand-off"))
    }

    /// Opens a fetch and reads its header.
    pub(crate) async fn open(&self, handoff: &wire::Handoff, skip: u64) -> Result<Reading, String> {
        let request =
            wire::FetchRequest { handoff: Some(handoff.clone()), skip, time_left_us: TIME_LEFT_MICROS };
        let mut client = KvTransferClient::new(self.channel.clone()).max_decoding_message_size(64 << 20);
        let mut events = client.fetch(request).await.map_err(reason)?.into_inner();
        match events.message().await.map_err(reason)?.and_then(|event| event.event) {
            Some(fetch_event::Event::Header(header)) => Ok(Reading { events, tokens: header.skip as usize }),
            other => panic!("a header first, {other:?} came"),
        }
    }

    /// Fetches to the end, and gives the tokens whose KV was sent or skipped.
    pub(crate) async fn fetch(&self, handoff: &wire::Handoff, skip: u64) -> Result<usize, String> {
        let mut reading = self.open(handoff, skip).await?;
        while reading.block().await?.is_some() {}
        Ok(reading.tokens)
    }

    /// Extends the lease.
    pub(crate) async fn renew(&self, handoff: &wire::Handoff) -> Result<(), String> {
        let request = wire::RenewRequest { handoff: Some(handoff.clone()) };
        KvTransferClient::new(self.channel.clone()).renew(request).await.map(drop).map_err(reason)
    }

    /// Ends the hold.
    pub(crate) async fn release(&self, handoff: &wire::Handoff) {
        let request = wire::ReleaseRequest { handoff: Some(handoff.clone()) };
        KvTransferClient::new(self.channel.clone())
            .release(request)
            .await
            .expect("a release is never refused");
    }

    /// Asks for tokens, and gives those that came, and how it failed, if it did.
    pub(crate) async fn decode(
        &self,
        ask: &Ask,
        attempt: u32,
        handoff: Option<&wire::Handoff>,
    ) -> (Vec<u32>, Option<String>) {
        let request =
            wire::DecodeRequest { generation: Some(generation(ask, attempt)), handoff: handoff.cloned() };
        let mut tokens = Vec::new();
        let mut events = match DecodeClient::new(self.channel.clone()).decode(request).await {
            Ok(events) => events.into_inner(),
            Err(status) => return (tokens, Some(reason(status))),
        };
        loop {
            match events.message().await {
                Ok(Some(event)) => {
                    if let Some(decode_event::Event::Token(token)) = event.event {
                        tokens.push(token.id);
                    }
                }
                Ok(None) => return (tokens, None),
                Err(status) => return (tokens, Some(reason(status))),
            }
        }
    }
}

/// A fetch that is open.
pub(crate) struct Reading {
    events: Streaming<wire::FetchEvent>,
    /// Tokens whose KV was skipped or came.
    tokens: usize,
}

impl Reading {
    /// The next block; `None` at the end, which carries the proof.
    pub(crate) async fn block(&mut self) -> Result<Option<wire::KvBlock>, String> {
        match self.events.message().await.map_err(reason)?.and_then(|event| event.event) {
            Some(fetch_event::Event::Block(block)) => {
                assert_eq!(block.first as usize, self.tokens, "blocks come in order");
                self.tokens += block.tokens as usize;
                Ok(Some(block))
            }
            Some(fetch_event::Event::End(_)) => Ok(None),
            other => panic!("a block or the end, {other:?} came"),
        }
    }
}

fn generation(ask: &Ask, attempt: u32) -> wire::Generation {
    wire::Generation {
        request: ask.id.clone().expect("these requests have names"),
        attempt,
        model: MODEL.to_owned(),
        tokens: ask.prompt.clone(),
        sampling: Some(ask.sampling.clone().into()),
        stop: Some(wire::StopConditions { max_tokens: ask.max_tokens as u64, ..Default::default() }),
        time_left_us: TIME_LEFT_MICROS,
        ..Default::default()
    }
}

fn reason(status: Status) -> String {
    Error::from(status).reason.name().to_owned()
}
