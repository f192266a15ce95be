//! The public services of gRPC, and what all of them have.

use std::sync::Arc;

use node::Services;
use proto::wire::generation_service_server::GenerationServiceServer;
use proto::wire::inference::grpc_inference_service_server::GrpcInferenceServiceServer;
use tonic::codec::CompressionEncoding::{Deflate, Gzip};

use crate::grpc::Generations;
use crate::kserve::grpc::Inferences;
use crate::service::Service;

/// Every public service.
pub(crate) fn services(service: &Arc<Service>) -> Services {
    let limit = service.config.grpc_message_bytes_max;
    /// The limit of a message, and compression both ways.
    macro_rules! public {
        ($server:expr) => {
            $server
                .max_decoding_message_size(limit)
                .max_encoding_message_size(usize::MAX)
                .accept_compressed(Gzip)
                .accept_compressed(Deflate)
                .send_compressed(Gzip)
                .send_compressed(Deflate)
        };
    }
    let generations = Generations { service: service.clone() };
    let inferences = Inferences { service: service.clone() };
    Services::new()
        .add(public!(GenerationServiceServer::new(generations)))
        .add(public!(GrpcInferenceServiceServer::new(inferences)))
}
