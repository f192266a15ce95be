//! An owner that passes calls on to the true one and changes what comes back.

use std::sync::OnceLock;

use futures::StreamExt;
use futures::stream::{self, BoxStream};
use node::{Network, limits};
use proto::wire::kv_transfer_client::KvTransferClient;
use proto::wire::kv_transfer_server::KvTransfer;
use proto::wire::{self, fetch_event};
use tonic::{Request, Response, Status};

/// Changes an item in place; false ends the stream before it.
type Change = fn(&mut fetch_event::Event) -> bool;

pub(crate) struct Proxy {
    owner: &'static str,
    change: Change,
    network: OnceLock<Network>,
}

impl Proxy {
    /// Passes calls on to `owner`.
    pub(crate) fn new(owner: &'static str, change: Change) -> Self {
        Self { owner, change, network: OnceLock::new() }
    }

    /// The network in which the owner is.
    pub(crate) fn connect(&self, network: Network) {
        self.network.set(network).expect("connected once");
    }

    fn client(&self) -> KvTransferClient<node::Channel> {
        let network = self.network.get().expect("connected");
        limits!(KvTransferClient::new(network.connect(self.owner)))
    }

    fn true_reference(&self, handoff: Option<wire::Handoff>) -> Option<wire::Handoff> {
        handoff.map(|handoff| wire::Handoff { owner: self.owner.to_owned(), ..handoff })
    }
}

#[tonic::async_trait]
impl KvTransfer for Proxy {
    type FetchStream = BoxStream<'static, Result<wire::FetchEvent, Status>>;

    async fn fetch(
        &self,
        request: Request<wire::FetchRequest>,
    ) -> Result<Response<Self::FetchStream>, Status> {
        let mut request = request.into_inner();
        request.handoff = self.true_reference(request.handoff);
        let items = self.client().fetch(request).await?.into_inner();
        let change = self.change;
        let changed = stream::unfold(items, move |mut items| async move {
            match items.message().await {
                Ok(None) => None,
                Ok(Some(mut message)) => {
                    let passes = message.event.as_mut().is_none_or(change);
                    passes.then_some((Ok(message), items))
                }
                Err(status) => Some((Err(status), items)),
            }
        });
        Ok(Response::new(changed.boxed()))
    }

    async fn renew(
        &self,
        request: Request<wire::RenewRequest>,
    ) -> Result<Response<wire::RenewResponse>, Status> {
        let handoff = self.true_reference(request.into_inner().handoff);
        self.client().renew(wire::RenewRequest { handoff }).await
    }

    async fn release(
        &self,
        request: Request<wire::ReleaseRequest>,
    ) -> Result<Response<wire::ReleaseResponse>, Status> {
        let handoff = self.true_reference(request.into_inner().handoff);
        self.client().release(wire::ReleaseRequest { handoff }).await
    }
}
