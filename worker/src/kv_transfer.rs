//! The gRPC service that gives out held KV. Both roles serve it.

use futures::StreamExt;
use futures::stream::{self, BoxStream};
use node::telemetry::Span;
use proto::convert::{count, micros};
use proto::wire;
use proto::wire::kv_transfer_server::KvTransfer;
use tonic::{Request, Response, Status};

use crate::core::FetchItem;
use crate::fail_points;
use crate::items;
use crate::lives::Lives;
use crate::peers::Counted;
use crate::shell::FetchStream;

/// See [`wire::kv_transfer_server::KvTransfer`].
pub struct KvTransferService {
    lives: Lives,
}

impl KvTransferService {
    /// Serves what the present life holds.
    pub fn new(lives: Lives) -> Self {
        Self { lives }
    }
}

#[tonic::async_trait]
impl KvTransfer for KvTransferService {
    type FetchStream = BoxStream<'static, Result<wire::FetchEvent, Status>>;

    async fn fetch(
        &self,
        request: Request<wire::FetchRequest>,
    ) -> Result<Response<Self::FetchStream>, Status> {
        let span = Span::server("prefill.kv_send");
        let request = request.into_inner();
        let handoff = items::handoff(request.handoff)?;
        let skip = count("skip", request.skip)?;
        node::fail_point(fail_points::PREFILL_ISSUED).await;
        let life = self.lives.present();
        let stream = life.shell.fetch(handoff, skip).await.inspect_err(|error| span.fail(error))?;
        let counted = Counted::default();
        let outgoing = Outgoing { stream, first_block: FirstBlock::Ahead, counted, span };
        Ok(Response::new(stream::unfold(outgoing, Outgoing::next).boxed()))
    }

    async fn renew(
        &self,
        request: Request<wire::RenewRequest>,
    ) -> Result<Response<wire::RenewResponse>, Status> {
        let handoff = items::handoff(request.into_inner().handoff)?;
        let ttl = self.lives.present().shell.renew(handoff).await?;
        Ok(Response::new(wire::RenewResponse { ttl_us: micros(ttl) }))
    }

    async fn release(
        &self,
        request: Request<wire::ReleaseRequest>,
    ) -> Result<Response<wire::ReleaseResponse>, Status> {
        let handoff = items::handoff(request.into_inner().handoff)?;
        self.lives.present().shell.release(handoff).await?;
        Ok(Response::new(wire::ReleaseResponse {}))
    }
}

/// A fetch on its way out.
struct Outgoing {
    stream: FetchStream,
    first_block: FirstBlock,
    counted: Counted,
    span: Span,
}

/// Where a fetch is, for the fail point between the first block and the second.
#[derive(Clone, Copy, PartialEq, Eq)]
enum FirstBlock {
    Ahead,
    JustSent,
    Passed,
}

impl Outgoing {
    async fn next(mut self) -> Option<(Result<wire::FetchEvent, Status>, Self)> {
        if self.first_block == FirstBlock::JustSent {
            self.first_block = FirstBlock::Passed;
            node::fail_point(fail_points::PREFILL_TRANSFERRING).await;
        }
        let mut item = self.stream.next().await?;
        if let Ok(FetchItem::Block(block)) = &mut item {
            if node::goes_wrong(fail_points::TRANSFER_CUT) {
                return None;
            }
            if node::goes_wrong(fail_points::TRANSFER_CORRUPTED) {
                block.slabs[0] ^= 1;
            }
        }
        if self.first_block == FirstBlock::Ahead && matches!(item, Ok(FetchItem::Block(_))) {
            self.first_block = FirstBlock::JustSent;
        }
        match &item {
            Ok(item @ FetchItem::End { .. }) => {
                self.counted.add(item);
                self.counted.tell(&self.span);
                // The reader of the last item need not come back.
                self.span = Span::default();
            }
            Ok(item) => self.counted.add(item),
            Err(error) => self.span.fail(error),
        }
        let event = item.map(items::fetch_event).map_err(Into::into);
        Some((event, self))
    }
}
