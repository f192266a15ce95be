//! `inference.GRPCInferenceService`.

use std::pin::Pin;
use std::sync::Arc;

use futures::Stream;
use proto::wire::inference::grpc_inference_service_server::GrpcInferenceService;
use proto::wire::inference::*;
use proto::{Error, Reason};
use tonic::{Code, Request, Response, Status, Streaming};

use super::{DIALECT, Running, listed, statistics, stream};
use crate::dialect::kserve::inference::check_version;
use crate::dialect::kserve::messages::{self, Head};
use crate::dialect::kserve::{describe, inference::Inference};
use crate::fault::Fault;
use crate::metrics;
use crate::models::Model;
use crate::service::{Service, Ticket};

/// Set by clients that want a fault of any request to end the stream with its status.
const AS_STATUS: &str = "triton_grpc_error";

/// Messages of at least so many bytes are read where that holds up nobody.
const READ_INLINE_BYTES_MAX: usize = 64 << 10;

/// Why models are neither loaded nor unloaded.
const WORKERS_DECIDE: &str = "which models are served is decided where workers are started";
/// Why there is no shared memory.
const IN_MESSAGES: &str = "tensors travel in messages";
/// Why nothing is set while the server runs.
const AT_START: &str = "it is set where the server is started";

/// The service.
pub(crate) struct Inferences {
    pub(crate) service: Arc<Service>,
}

type Responses = Pin<Box<dyn Stream<Item = Result<ModelStreamInferResponse, Status>> + Send>>;

#[tonic::async_trait]
impl GrpcInferenceService for Inferences {
    type ModelStreamInferStream = Responses;

    async fn server_live(
        &self,
        _: Request<ServerLiveRequest>,
    ) -> Result<Response<ServerLiveResponse>, Status> {
        Ok(Response::new(ServerLiveResponse { live: true }))
    }

    async fn server_ready(
        &self,
        _: Request<ServerReadyRequest>,
    ) -> Result<Response<ServerReadyResponse>, Status> {
        Ok(Response::new(ServerReadyResponse { ready: self.service.is_ready() }))
    }

    async fn model_ready(
        &self,
        request: Request<ModelReadyRequest>,
    ) -> Result<Response<ModelReadyResponse>, Status> {
        let ModelReadyRequest { name, version } = request.into_inner();
        let ready = self.service.is_ready() && find(&self.service, &name, &version).is_ok();
        Ok(Response::new(ModelReadyResponse { ready }))
    }

    async fn server_metadata(
        &self,
        _: Request<ServerMetadataRequest>,
    ) -> Result<Response<ServerMetadataResponse>, Status> {
        Ok(Response::new(describe::server()))
    }

    async fn model_metadata(
        &self,
        request: Request<ModelMetadataRequest>,
    ) -> Result<Response<ModelMetadataResponse>, Status> {
        let ModelMetadataRequest { name, version } = request.into_inner();
        let model = find(&self.service, &name, &version).map_err(status)?;
        Ok(Response::new(describe::metadata(&model)))
    }

    async fn model_infer(
        &self,
        request: Request<ModelInferRequest>,
    ) -> Result<Response<ModelInferResponse>, Status> {
        let mut ticket = ticket(&self.service).map_err(status)?;
        let answered = whole(&self.service, request.into_inner(), &mut ticket).await;
        ticket.ended(answered.as_ref().map_or_else(status_of, |_| 200));
        answered.map(Response::new).map_err(status)
    }

    async fn model_stream_infer(
        &self,
        request: Request<Streaming<ModelInferRequest>>,
    ) -> Result<Response<Responses>, Status> {
        let as_status = request.metadata().get(AS_STATUS).is_some_and(|value| value == "true");
        let responses = stream::responses(self.service.clone(), request.into_inner(), as_status);
        Ok(Response::new(Box::pin(responses)))
    }

    async fn model_config(
        &self,
        request: Request<ModelConfigRequest>,
    ) -> Result<Response<ModelConfigResponse>, Status> {
        let ModelConfigRequest { name, version } = request.into_inner();
        let model = find(&self.service, &name, &version).map_err(status)?;
        Ok(Response::new(ModelConfigResponse { config: Some(describe::config(&model)) }))
    }

    async fn model_statistics(
        &self,
        request: Request<ModelStatisticsRequest>,
    ) -> Result<Response<ModelStatisticsResponse>, Status> {
        let ModelStatisticsRequest { name, version } = request.into_inner();
        let model = match name.as_str() {
            "" => None,
            name => Some(find(&self.service, name, &version).map_err(status)?),
        };
        Ok(Response::new(describe::statistics(&statistics(&self.service, model.as_deref()))))
    }

    async fn repository_index(
        &self,
        request: Request<RepositoryIndexRequest>,
    ) -> Result<Response<RepositoryIndexResponse>, Status> {
        let RepositoryIndexRequest { repository_name, ready } = request.into_inner();
        if !repository_name.is_empty() {
            return Err(unimplemented("a repository_name", WORKERS_DECIDE));
        }
        Ok(Response::new(describe::index(&listed(&self.service), ready)))
    }

    async fn repository_model_load(
        &self,
        _: Request<RepositoryModelLoadRequest>,
    ) -> Result<Response<RepositoryModelLoadResponse>, Status> {
        Err(unimplemented("RepositoryModelLoad", WORKERS_DECIDE))
    }

    async fn repository_model_unload(
        &self,
        _: Request<RepositoryModelUnloadRequest>,
    ) -> Result<Response<RepositoryModelUnloadResponse>, Status> {
        Err(unimplemented("RepositoryModelUnload", WORKERS_DECIDE))
    }

    async fn system_shared_memory_status(
        &self,
        _: Request<SystemSharedMemoryStatusRequest>,
    ) -> Result<Response<SystemSharedMemoryStatusResponse>, Status> {
        Err(unimplemented("SystemSharedMemoryStatus", IN_MESSAGES))
    }

    async fn system_shared_memory_register(
        &self,
        _: Request<SystemSharedMemoryRegisterRequest>,
    ) -> Result<Response<SystemSharedMemoryRegisterResponse>, Status> {
        Err(unimplemented("SystemSharedMemoryRegister", IN_MESSAGES))
    }

    async fn system_shared_memory_unregister(
        &self,
        _: Request<SystemSharedMemoryUnregisterRequest>,
    ) -> Result<Response<SystemSharedMemoryUnregisterResponse>, Status> {
        Err(unimplemented("SystemSharedMemoryUnregister", IN_MESSAGES))
    }

    async fn cuda_shared_memory_status(
        &self,
        _: Request<CudaSharedMemoryStatusRequest>,
    ) -> Result<Response<CudaSharedMemoryStatusResponse>, Status> {
        Err(unimplemented("CudaSharedMemoryStatus", IN_MESSAGES))
    }

    async fn cuda_shared_memory_register(
        &self,
        _: Request<CudaSharedMemoryRegisterRequest>,
    ) -> Result<Response<CudaSharedMemoryRegisterResponse>, Status> {
        Err(unimplemented("CudaSharedMemoryRegister", IN_MESSAGES))
    }

    async fn cuda_shared_memory_unregister(
        &self,
        _: Request<CudaSharedMemoryUnregisterRequest>,
    ) -> Result<Response<CudaSharedMemoryUnregisterResponse>, Status> {
        Err(unimplemented("CudaSharedMemoryUnregister", IN_MESSAGES))
    }

    async fn trace_setting(
        &self,
        _: Request<TraceSettingRequest>,
    ) -> Result<Response<TraceSettingResponse>, Status> {
        Err(unimplemented("TraceSetting", AT_START))
    }

    async fn log_settings(
        &self,
        _: Request<LogSettingsRequest>,
    ) -> Result<Response<LogSettingsResponse>, Status> {
        Err(unimplemented("LogSettings", AT_START))
    }
}

fn unimplemented(what: &str, why: &str) -> Status {
    Status::unimplemented(format!("{what} is not supported: {why}"))
}

/// Lets a request in.
pub(super) fn ticket(service: &Service) -> Result<Ticket, Fault> {
    service.ticket(DIALECT).inspect_err(|fault| metrics::answered(DIALECT, status_of(fault)))
}

/// The model of that name, in the only version that there is.
fn find(service: &Service, name: &str, version: &str) -> Result<Arc<Model>, Fault> {
    let model = service.model(Some(name), "model_name")?;
    check_version(name, version)?;
    Ok(model)
}

async fn whole(
    service: &Arc<Service>,
    message: ModelInferRequest,
    ticket: &mut Ticket,
) -> Result<ModelInferResponse, Fault> {
    let (head, mut running) = start(service, message, ticket).await?;
    Ok(head.whole(&running.whole().await?))
}

/// Reads the message and starts what it asks for.
pub(super) async fn start(
    service: &Arc<Service>,
    message: ModelInferRequest,
    ticket: &mut Ticket,
) -> Result<(Head, Running), Fault> {
    // An unknown model comes before a fault of the tensors.
    let model = find(service, &message.model_name, &message.model_version)?;
    let head = Head { id: message.id.clone(), model: message.model_name.clone() };
    let inference = read(service, message).await?;
    let running = Running::start(service, &model, inference, ticket).await?;
    Ok((head, running))
}

async fn read(service: &Service, message: ModelInferRequest) -> Result<Inference, Fault> {
    if prost::Message::encoded_len(&message) <= READ_INLINE_BYTES_MAX {
        return messages::read(message);
    }
    service.tasks.spawn_blocking("read tensors", move || messages::read(message)).await?
}

/// Metrics count gRPC by the HTTP status of the same fault.
pub(super) fn status_of(fault: &Fault) -> u16 {
    super::http::refusal_status(fault).as_u16()
}

/// The protocol knows fewer codes than there are reasons.
pub(super) fn status(fault: Fault) -> Status {
    let error = Error::from(fault);
    let code = match error.reason {
        Reason::InvalidArgument => Code::InvalidArgument,
        Reason::ModelNotFound => Code::NotFound,
        Reason::QueueFull | Reason::OutOfBlocks | Reason::WorkerLost => Code::Unavailable,
        Reason::Deadline => Code::DeadlineExceeded,
        Reason::Cancelled => Code::Cancelled,
        _ => Code::Internal,
    };
    let status = Status::from(error);
    Status::with_metadata(code, status.message(), status.metadata().clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_become_the_protocols_codes() {
        let service = |reason| status(Error::new(reason, "x").into()).code();
        for (reason, code) in [
            (Reason::InvalidArgument, Code::InvalidArgument),
            (Reason::ModelNotFound, Code::NotFound),
            (Reason::OutOfBlocks, Code::Unavailable),
            (Reason::WorkerLost, Code::Unavailable),
            (Reason::Deadline, Code::DeadlineExceeded),
            (Reason::Cancelled, Code::Cancelled),
            (Reason::ChecksumMismatch, Code::Internal),
            (Reason::Internal, Code::Internal),
        ] {
            assert_eq!(service(reason), code, "{reason}");
        }
        assert_eq!(status(Fault::Model("m".into())).code(), Code::NotFound);
        assert_eq!(status(Fault::Busy { running: 1, waiting: 1 }).code(), Code::Unavailable);
        assert_eq!(status(Fault::NotReady("x".into())).code(), Code::Unavailable);
    }
}
