//! Spans of traces, and how they travel: as W3C `traceparent` and `tracestate`, in HTTP headers and gRPC metadata.
//!
//! A process without an exporter has no spans: every span here is then nothing, which costs a look at one pointer.

use std::sync::OnceLock;
use std::time::{Instant, SystemTime};

use futures::future::Either;
use http::{HeaderMap, HeaderName, HeaderValue};
use opentelemetry::propagation::{Extractor, Injector, TextMapPropagator};
use opentelemetry::trace::{
    FutureExt as _, SpanBuilder, SpanKind, Status, TraceContextExt as _, Tracer as _,
};
use opentelemetry::{Context, KeyValue, Value};
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::SdkTracer;

/// Makes every span of the process, once traces are exported.
pub(super) static TRACER: OnceLock<SdkTracer> = OnceLock::new();

/// Where a request stands in its trace: what a span begun here, or a call made here, belongs to. Nothing when the process
/// exports no traces, or the request came without one where it is not begun.
#[derive(Clone, Debug, Default)]
pub struct TraceContext(Option<Box<Context>>);

/// A part of a request's way, from its start until it is ended or dropped.
#[derive(Debug, Default)]
#[must_use = "a span ends when it is dropped"]
pub struct Span(TraceContext);

impl TraceContext {
    /// Where the running handler's call, or the scope around this, stands.
    pub fn current() -> Self {
        if TRACER.get().is_none() {
            return Self(None);
        }
        let context = Context::current();
        let is_in_trace = context.span().span_context().is_valid();
        Self(is_in_trace.then(|| Box::new(context)))
    }

    /// True where something can be recorded: the trace is sampled.
    pub fn is_recording(&self) -> bool {
        self.0.as_ref().is_some_and(|context| context.span().span_context().is_sampled())
    }

    /// The trace's id as logs show it, 32 hexadecimal digits.
    pub fn trace_id(&self) -> Option<String> {
        self.0.as_ref().map(|context| context.span().span_context().trace_id().to_string())
    }

    /// A span of something within this process.
    pub fn child(&self, name: &'static str) -> Span {
        self.begin(name, SpanKind::Internal, None)
    }

    /// The same of something that began before now.
    pub fn child_since(&self, name: &'static str, start: Instant) -> Span {
        self.begin(name, SpanKind::Internal, Some(start))
    }

    /// A span of a call to another service, which is made in its [`Span::scope`].
    pub fn client(&self, name: &'static str) -> Span {
        self.begin(name, SpanKind::Client, None)
    }

    /// Lets the calls that `future` makes belong here.
    pub fn scope<F: Future>(&self, future: F) -> impl Future<Output = F::Output> + use<F> {
        match &self.0 {
            None => Either::Left(future),
            Some(context) => Either::Right(future.with_context(Context::clone(context))),
        }
    }

    fn begin(&self, name: &'static str, kind: SpanKind, start: Option<Instant>) -> Span {
        match &self.0 {
            None => Span::default(),
            Some(parent) => begin(name, kind, start, parent),
        }
    }
}

fn begin(name: &'static str, kind: SpanKind, start: Option<Instant>, parent: &Context) -> Span {
    let Some(tracer) = TRACER.get() else { return Span::default() };
    let mut builder = SpanBuilder::from_name(name).with_kind(kind);
    builder.start_time = start.map(wall);
    let span = tracer.build_with_context(builder, parent);
    Span(TraceContext(Some(Box::new(parent.with_span(span)))))
}

/// The wall clock's time of an instant that has been.
fn wall(instant: Instant) -> SystemTime {
    let now = SystemTime::now();
    now.checked_sub(instant.elapsed()).unwrap_or(now)
}

impl Span {
    /// A request that a client has brought: in the client's trace, or the first of a new one.
    pub fn entry(name: &'static str) -> Self {
        if TRACER.get().is_none() {
            return Self::default();
        }
        begin(name, SpanKind::Server, None, &Context::current())
    }

    /// A call that another service has made: nothing unless it is part of a trace.
    pub fn server(name: &'static str) -> Self {
        TraceContext::current().begin(name, SpanKind::Server, None)
    }

    /// What belongs to this span.
    pub fn context(&self) -> &TraceContext {
        &self.0
    }

    /// See [`TraceContext::child`].
    pub fn child(&self, name: &'static str) -> Self {
        self.0.child(name)
    }

    /// See [`TraceContext::child_since`].
    pub fn child_since(&self, name: &'static str, start: Instant) -> Self {
        self.0.child_since(name, start)
    }

    /// See [`TraceContext::client`].
    pub fn client(&self, name: &'static str) -> Self {
        self.0.client(name)
    }

    /// See [`TraceContext::scope`].
    pub fn scope<F: Future>(&self, future: F) -> impl Future<Output = F::Output> + use<F> {
        self.0.scope(future)
    }

    /// Says something about the span.
    pub fn set(&self, key: &'static str, value: impl Into<Value>) {
        if let Some(context) = &self.0.0 {
            context.span().set_attribute(KeyValue::new(key, value));
        }
    }

    /// The same of a count.
    pub fn count(&self, key: &'static str, count: usize) {
        if self.0.is_recording() {
            self.set(key, i64::try_from(count).unwrap_or(i64::MAX));
        }
    }

    /// What the span is of has failed.
    pub fn fail(&self, error: &proto::Error) {
        if let Some(context) = self.0.0.as_ref().filter(|_| self.0.is_recording()) {
            let span = context.span();
            span.set_attribute(KeyValue::new("error.type", error.reason.name()));
            span.set_status(Status::error(error.message.clone()));
        }
    }

    /// Ends the span, at a time that has been.
    pub fn end_at(self, end: Instant) {
        if let Some(context) = &self.0.0 {
            context.span().end_with_timestamp(wall(end));
        }
    }
}

impl Drop for Span {
    fn drop(&mut self) {
        if let Some(context) = self.0.0.take() {
            // Without effect on a span that has ended.
            context.span().end();
        }
    }
}

/// What a request that came in belongs to.
pub(crate) fn incoming(headers: &HeaderMap) -> TraceContext {
    if TRACER.get().is_none() || !headers.contains_key(TRACEPARENT) {
        return TraceContext(None);
    }
    let context = TraceContextPropagator::new().extract_with_context(&Context::new(), &Headers(headers));
    TraceContext(context.has_active_span().then(|| Box::new(context)))
}

/// Writes what a call that goes out belongs to, in place of what its headers say.
pub(crate) fn outgoing(headers: &mut HeaderMap) {
    if TRACER.get().is_none() {
        return;
    }
    Context::map_current(|context| {
        if context.has_active_span() {
            TraceContextPropagator::new().inject_context(context, &mut HeadersMut(headers));
        }
    });
}

const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

struct Headers<'a>(&'a HeaderMap);

impl Extractor for Headers<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key)?.to_str().ok()
    }

    fn keys(&self) -> Vec<&str> {
        self.0.keys().map(HeaderName::as_str).collect()
    }
}

struct HeadersMut<'a>(&'a mut HeaderMap);

impl Injector for HeadersMut<'_> {
    fn set(&mut self, key: &str, value: String) {
        // A trace without a state has an empty one, which is not worth a header.
        if let (false, Ok(name), Ok(value)) =
            (value.is_empty(), HeaderName::try_from(key), HeaderValue::try_from(value))
        {
            self.0.insert(name, value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_an_exporter_there_is_nothing() {
        let mut headers = HeaderMap::new();
        headers.insert(TRACEPARENT, HeaderValue::from_static(PARENT));
        assert!(incoming(&headers).0.is_none());
        let span = Span::entry("x");
        assert!(span.0.0.is_none() && span.child("y").0.0.is_none() && span.context().trace_id().is_none());
        let mut out = HeaderMap::new();
        outgoing(&mut out);
        assert!(out.is_empty());
    }

    const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    #[test]
    fn headers_are_read_and_written_as_w3c_has_them() {
        let mut headers = HeaderMap::new();
        headers.insert(TRACEPARENT, HeaderValue::from_static(PARENT));
        headers.insert("tracestate", HeaderValue::from_static("vendor=1"));
        let propagator = TraceContextPropagator::new();
        let context = propagator.extract_with_context(&Context::new(), &Headers(&headers));
        let mut out = HeaderMap::new();
        propagator.inject_context(&context, &mut HeadersMut(&mut out));
        assert_eq!(out, headers);
        headers.remove("tracestate");
        let context = propagator.extract_with_context(&Context::new(), &Headers(&headers));
        let mut out = HeaderMap::new();
        propagator.inject_context(&context, &mut HeadersMut(&mut out));
        assert_eq!(out, headers);
    }
}
