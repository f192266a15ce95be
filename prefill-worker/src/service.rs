//! The gRPC service by which routers ask for prefills.

use futures::StreamExt;
use futures::stream::{self, BoxStream};
use proto::convert::required;
use proto::wire::prefill_server::Prefill;
use proto::{Generation, wire};
use tonic::{Request, Response, Status};
use worker::shell::Handle;
use worker::{CallStream, fail_points, items};

use worker::core::PrefillItem;

/// See [`wire::prefill_server::Prefill`].
pub(crate) struct PrefillService {
    shell: Handle,
    model: String,
}

impl PrefillService {
    /// Serves prefills of the model of that name.
    pub(crate) fn new(shell: Handle, model: &str) -> Self {
        Self { shell, model: model.to_owned() }
    }
}

#[tonic::async_trait]
impl Prefill for PrefillService {
    type PrefillStream = BoxStream<'static, Result<wire::PrefillEvent, Status>>;

    async fn prefill(
        &self,
        request: Request<wire::PrefillRequest>,
    ) -> Result<Response<Self::PrefillStream>, Status> {
        let generation: Generation = required("generation", request.into_inner().generation)?.try_into()?;
        items::check_model(&self.model, &generation)?;
        node::fail_point(fail_points::PREFILL_QUEUED).await;
        self.shell.prepare(&generation).await?;
        let stream = self.shell.prefill(generation)?;
        Ok(Response::new(stream::unfold(stream, next).boxed()))
    }
}

async fn next(
    mut stream: CallStream<PrefillItem>,
) -> Option<(Result<wire::PrefillEvent, Status>, CallStream<PrefillItem>)> {
    let event = stream.next().await?.map(items::prefill_event).map_err(Into::into);
    Some((event, stream))
}
