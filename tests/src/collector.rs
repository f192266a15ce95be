//! A collector of traces, as OpenTelemetry's protocol has it, that keeps what it gets.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::{KeyValue, any_value};
use tokio::task::JoinSet;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status};

/// A span as it came.
#[derive(Clone, Debug)]
pub struct Span {
    /// Whose it is: the name of the process's service.
    pub service: String,
    /// What it is of.
    pub name: String,
    /// 32 hexadecimal digits.
    pub trace: String,
    /// 16 hexadecimal digits.
    pub id: String,
    /// The same of the span that it is part of; empty for the first of a trace.
    pub parent: String,
    /// W3C's `tracestate`.
    pub state: String,
    /// Nanoseconds of Unix time.
    pub start: u64,
    /// Nanoseconds of Unix time.
    pub end: u64,
    /// What is said of it.
    pub attributes: BTreeMap<String, String>,
}

impl Span {
    /// A number that is said of it.
    ///
    /// # Panics
    /// When it is not.
    pub fn number(&self, key: &str) -> u64 {
        let value = self.attributes.get(key).unwrap_or_else(|| panic!("{key} of {self:?}"));
        value.parse().unwrap_or_else(|_| panic!("{key} is a number: {value}"))
    }
}

/// A running collector. Dropping it ends it.
#[derive(Debug)]
pub struct Collector {
    address: SocketAddr,
    spans: Arc<Mutex<Vec<Span>>>,
    _server: JoinSet<()>,
}

impl Collector {
    /// Listens on loopback. Must be in a tokio runtime.
    ///
    /// # Panics
    /// When there is no port.
    pub fn start() -> Self {
        let incoming = TcpIncoming::bind(([127, 0, 0, 1], 0).into()).expect("a free port");
        let address = incoming.local_addr().expect("a bound socket has an address");
        let spans = Arc::new(Mutex::new(Vec::new()));
        let service = TraceServiceServer::new(Keeper(spans.clone()));
        let mut server = JoinSet::new();
        server.spawn(async move {
            let served = tonic::transport::Server::builder().add_service(service);
            served.serve_with_incoming(incoming).await.expect("the collector serves");
        });
        Self { address, spans, _server: server }
    }

    /// Where it is, as `--otlp-endpoint` takes it.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// What has come so far.
    pub fn spans(&self) -> Vec<Span> {
        self.spans.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

struct Keeper(Arc<Mutex<Vec<Span>>>);

#[tonic::async_trait]
impl TraceService for Keeper {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        let mut spans = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for of_resource in request.into_inner().resource_spans {
            let resource = of_resource.resource.map(|resource| attributes(&resource.attributes));
            let service = resource.and_then(|said| said.get("service.name").cloned()).unwrap_or_default();
            for span in of_resource.scope_spans.into_iter().flat_map(|of_scope| of_scope.spans) {
                spans.push(Span {
                    service: service.clone(),
                    name: span.name,
                    trace: hex(&span.trace_id),
                    id: hex(&span.span_id),
                    parent: hex(&span.parent_span_id),
                    state: span.trace_state,
                    start: span.start_time_unix_nano,
                    end: span.end_time_unix_nano,
                    attributes: attributes(&span.attributes),
                });
            }
        }
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

fn attributes(list: &[KeyValue]) -> BTreeMap<String, String> {
    let text = |said: &KeyValue| match said.value.as_ref()?.value.as_ref()? {
        any_value::Value::StringValue(text) => Some(text.clone()),
        any_value::Value::IntValue(number) => Some(number.to_string()),
        any_value::Value::DoubleValue(number) => Some(number.to_string()),
        any_value::Value::BoolValue(flag) => Some(flag.to_string()),
        _ => None,
    };
    list.iter().filter_map(|said| Some((said.key.clone(), text(said)?))).collect()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
