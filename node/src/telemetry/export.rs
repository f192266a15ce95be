//! Where traces go: an OpenTelemetry collector, by OTLP over gRPC.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use opentelemetry::trace::TracerProvider as _;
use opentelemetry_otlp::WithExportConfig as _;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{Sampler, SdkTracerProvider, SpanData, SpanExporter};

use super::span::TRACER;
use crate::Error;

/// Longest wait for a collector to take a batch.
const EXPORT_MAX: Duration = Duration::from_secs(5);

/// Variables that name the endpoint for whoever uses OpenTelemetry, the more exact first.
const VARIABLES: [&str; 2] = ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"];

/// What to export.
#[derive(Clone, Copy, Debug)]
pub struct TraceConfig<'a> {
    /// The collector, `http://HOST:PORT`. None is looked for in OpenTelemetry's own variables of the environment.
    pub endpoint: Option<&'a str>,
    /// Share of the traces begun here that are sampled, 0 to 1. Those that a client began go by the client's word.
    pub sampling: f64,
    /// The name of this service, where `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` give none.
    pub service: &'static str,
}

/// The traces of this process on their way out: collected, and sent in batches by a thread of its own. What a collector
/// does not take is lost; no request waits for one.
#[derive(Debug)]
pub struct Traces(Option<SdkTracerProvider>);

impl Traces {
    /// Begins to trace, if there is an endpoint. The first call in a process counts. Must be in a tokio runtime, which
    /// the exporter's connection lives in.
    ///
    /// # Errors
    /// [`Error::Option`] for an endpoint or a share that cannot be.
    pub fn export(config: TraceConfig<'_>) -> Result<Self, Error> {
        if !(0.0..=1.0).contains(&config.sampling) {
            let message = format!("expected a share from 0 to 1, got {}", config.sampling);
            return Err(Error::option("--otlp-sampling", message));
        }
        let Some((option, endpoint)) = endpoint(config.endpoint) else { return Ok(Self(None)) };
        let fault = |what: &str| {
            Error::option(
                option,
                format!("expected http://HOST:PORT of an OTLP collector, got {endpoint:?}{what}"),
            )
        };
        if !endpoint.starts_with("http://") {
            return Err(fault(""));
        }
        let exporter = opentelemetry_otlp::SpanExporter::builder()
            .with_tonic()
            .with_endpoint(&endpoint)
            .with_timeout(EXPORT_MAX)
            .build()
            .map_err(|error| fault(&format!(": {error}")))?;
        let provider = SdkTracerProvider::builder()
            .with_batch_exporter(Counted { exporter, failing: AtomicBool::new(false) })
            .with_sampler(Sampler::ParentBased(Box::new(Sampler::TraceIdRatioBased(config.sampling))))
            .with_resource(resource(config.service))
            .build();
        if TRACER.set(provider.tracer("baton")).is_err() {
            return Ok(Self(None));
        }
        tracing::info!(endpoint, sampling = config.sampling, service = config.service, "exporting traces");
        Ok(Self(Some(provider)))
    }

    /// Sends what is left, for so long at most. Blocks, so it is for the end of a process, while its runtime lives.
    pub fn finish(self, at_most: Duration) {
        if let Some(provider) = self.0
            && let Err(error) = provider.shutdown_with_timeout(at_most)
        {
            tracing::warn!(%error, "the last traces were not exported");
        }
    }
}

/// The endpoint, and who names it.
fn endpoint(option: Option<&str>) -> Option<(&'static str, String)> {
    let variable = |name| Some((name, env(name)?));
    match option {
        Some(endpoint) => Some(("--otlp-endpoint", endpoint.to_owned())),
        None => VARIABLES.into_iter().find_map(variable),
    }
}

#[expect(clippy::disallowed_methods, reason = "these names are OpenTelemetry's, not ours to prefix")]
fn env(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

fn resource(service: &'static str) -> Resource {
    let resource = Resource::builder();
    let named = env("OTEL_SERVICE_NAME").is_some()
        || env("OTEL_RESOURCE_ATTRIBUTES").is_some_and(|attributes| attributes.contains("service.name="));
    let resource = if named { resource } else { resource.with_service_name(service) };
    resource
        .with_attribute(opentelemetry::KeyValue::new("service.version", env!("CARGO_PKG_VERSION")))
        .build()
}

/// An exporter that counts, and says once when a collector stops taking spans.
#[derive(Debug)]
struct Counted<E> {
    exporter: E,
    failing: AtomicBool,
}

impl<E: SpanExporter> SpanExporter for Counted<E> {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let count = batch.len() as u64;
        let result = self.exporter.export(batch).await;
        let was_failing = self.failing.swap(result.is_err(), Ordering::Relaxed);
        match &result {
            Err(error) if !was_failing => {
                tracing::warn!(%error, "traces cannot be exported; they are dropped");
            }
            Ok(()) if was_failing => tracing::info!("traces are exported again"),
            _ => {}
        }
        crate::metrics::spans(if result.is_ok() { "exported" } else { "failed" }, count);
        result
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.exporter.shutdown_with_timeout(timeout)
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.exporter.force_flush()
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.exporter.set_resource(resource);
    }
}
