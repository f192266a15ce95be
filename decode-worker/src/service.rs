//! The gRPC service by which routers ask for tokens.

use futures::StreamExt;
use futures::stream::{self, BoxStream};
use proto::convert::required;
use proto::wire::decode_server::Decode;
use proto::{Generation, Handoff, wire};
use tonic::{Request, Response, Status};
use worker::core::DecodeItem;
use worker::shell::Handle;
use worker::{CallStream, fail_points, items};

/// See [`wire::decode_server::Decode`].
pub(crate) struct DecodeService {
    shell: Handle,
    model: String,
}

impl DecodeService {
    /// Serves tokens of the model of that name.
    pub(crate) fn new(shell: Handle, model: &str) -> Self {
        Self { shell, model: model.to_owned() }
    }
}

#[tonic::async_trait]
impl Decode for DecodeService {
    type DecodeStream = BoxStream<'static, Result<wire::DecodeEvent, Status>>;

    async fn decode(
        &self,
        request: Request<wire::DecodeRequest>,
    ) -> Result<Response<Self::DecodeStream>, Status> {
        let wire::DecodeRequest { generation, handoff } = request.into_inner();
        let generation: Generation = required("generation", generation)?.try_into()?;
        let handoff: Option<Handoff> = handoff.map(TryInto::try_into).transpose()?;
        items::check_model(&self.model, &generation)?;
        node::fail_point(fail_points::DECODE_QUEUED).await;
        self.shell.prepare(&generation).await?;
        let stream = self.shell.decode(generation, handoff)?;
        Ok(Response::new(stream::unfold(Outgoing { stream, tokens: 0 }, Outgoing::next).boxed()))
    }
}

/// A decode call on its way out.
struct Outgoing {
    stream: CallStream<DecodeItem>,
    /// Tokens sent.
    tokens: usize,
}

impl Outgoing {
    async fn next(mut self) -> Option<(Result<wire::DecodeEvent, Status>, Self)> {
        // When this item is asked for, the ones before it are on their way.
        if self.tokens == fail_points::DECODE_DECODING_TOKENS {
            node::fail_point(fail_points::DECODE_DECODING).await;
        }
        let item = self.stream.next().await?;
        self.tokens += usize::from(matches!(item, Ok(DecodeItem::Token(_))));
        let event = item.map(items::decode_event).map_err(Into::into);
        Some((event, self))
    }
}
