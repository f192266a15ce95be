//! The response of `generate` and the events of `generate_stream`.

use bytes::Bytes;
use serde::Serialize;

use crate::answer::Started;
use crate::dialect::mindie::{self, finish_reason};
use crate::dialect::{Events, Writer, json, milliseconds};
use crate::domain::{Finish, Piece, Whole};
use crate::fault::Fault;

/// What the request says of the response.
#[derive(Debug)]
pub(super) struct Shape {
    pub(super) id: String,
    pub(super) details: bool,
    /// Every event has the whole text so far.
    pub(super) full_text: bool,
    /// Costs are told of every request, not only of one that brings its own.
    pub(super) report_costs: bool,
}

/// Times of a request's tokens that were generated elsewhere, in milliseconds.
#[derive(Debug)]
pub(super) struct Earlier {
    pub(super) first_token_cost: Option<u64>,
    pub(super) decode_time: Vec<u64>,
}

/// Writes answers of one call.
#[derive(Debug)]
pub(crate) struct TritonWriter {
    shape: Shape,
    earlier: Option<Earlier>,
    model: String,
    /// Milliseconds to the first token, here or elsewhere.
    first_token_cost: Option<f64>,
    /// Milliseconds of decoding so far, those of elsewhere included.
    decode_cost: f64,
    /// What the events so far have carried, if each has the whole text.
    sent: String,
    begun: bool,
    /// Tokens so far.
    generated: usize,
}

/// Field order is part of the format.
#[derive(Serialize)]
struct Response<'a, T: Serialize> {
    id: &'a str,
    model_name: &'a str,
    model_version: Option<&'a str>,
    text_output: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    details: Option<Details<T>>,
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    times: Option<Times>,
}

/// Counts are single numbers in a stream and lists, one per token, in a whole answer.
#[derive(Serialize)]
struct Details<T: Serialize> {
    #[serde(skip_serializing_if = "Option::is_none")]
    finish_reason: Option<&'static str>,
    generated_tokens: usize,
    /// Milliseconds; told of a request that brought it along, and of all if the server is so configured.
    first_token_cost: Option<u64>,
    /// Milliseconds, likewise.
    decode_cost: Option<u64>,
    batch_size: T,
    /// Microseconds.
    queue_wait_time: T,
}

/// Milliseconds of the one token of an event.
#[derive(Serialize)]
struct Times {
    prefill_time: Option<f64>,
    decode_time: Option<f64>,
}

impl TritonWriter {
    pub(super) fn new(shape: Shape, earlier: Option<Earlier>) -> Self {
        let decode_cost = earlier.iter().flat_map(|earlier| &earlier.decode_time).map(|ms| *ms as f64).sum();
        let first_token_cost =
            earlier.as_ref().and_then(|earlier| earlier.first_token_cost).map(|ms| ms as f64);
        let (model, sent) = (String::new(), String::new());
        Self { shape, earlier, model, first_token_cost, decode_cost, sent, begun: false, generated: 0 }
    }

    /// Takes a token's latency: a first token's is its prefill's, unless the client has had its first token before;
    /// then the gap is one long decode step.
    fn times(&mut self, latency: std::time::Duration) -> Times {
        let ms = milliseconds(latency);
        let first = !self.begun && self.earlier.is_none();
        self.begun = true;
        if first {
            self.first_token_cost = Some(ms);
            return Times { prefill_time: Some(ms), decode_time: None };
        }
        self.decode_cost += ms;
        Times { prefill_time: None, decode_time: Some(ms) }
    }

    fn details<T: Serialize>(
        &self,
        finish: Option<&Finish>,
        generated_tokens: usize,
        batch_size: T,
        queue_wait_time: T,
    ) -> Option<Details<T>> {
        let brought = self.earlier.as_ref().is_some_and(|earlier| earlier.first_token_cost.is_some());
        let told = brought || self.shape.report_costs;
        let cost = |ms: f64| told.then(|| ms.round() as u64);
        self.shape.details.then(|| Details {
            finish_reason: finish.map(finish_reason),
            generated_tokens,
            first_token_cost: self.first_token_cost.and_then(cost),
            decode_cost: cost(self.decode_cost),
            batch_size,
            queue_wait_time,
        })
    }
}

impl Writer for TritonWriter {
    const STREAM_TYPE: &'static str = "text/event-stream";

    fn begin(&mut self, started: &[Started], _events: &mut Events) {
        self.model.clone_from(&started[0].model.description.name);
    }

    fn piece(&mut self, _choice: usize, piece: &Piece, events: &mut Events) {
        let times = self.times(piece.latency);
        self.generated = piece.generated();
        let token = &piece.token;
        let queue_wait = u64::try_from(token.queue_wait.as_micros()).unwrap_or(u64::MAX);
        let details =
            self.details(piece.finish.as_ref(), piece.generated(), u64::from(token.batch_size), queue_wait);
        let mut text_output = piece.text.as_str();
        if self.shape.full_text {
            self.sent.push_str(text_output);
            text_output = &self.sent;
        }
        let response = Response {
            id: &self.shape.id,
            model_name: &self.model,
            model_version: None,
            text_output,
            details,
            times: Some(times),
        };
        events.push(mindie::event(&response));
    }

    fn end(&mut self, _events: &mut Events) {}

    /// Being stopped is an end like any other.
    fn fault(&mut self, fault: &Fault) -> Bytes {
        if *fault != Fault::Stopped {
            return mindie::fault_event(fault);
        }
        let details = self.details(Some(&Finish::Stopped), self.generated, 0, 0);
        let text_output = if self.shape.full_text { self.sent.as_str() } else { "" };
        mindie::event(&Response {
            id: &self.shape.id,
            model_name: &self.model,
            model_version: None,
            text_output,
            details,
            times: Some(Times { prefill_time: None, decode_time: None }),
        })
    }

    fn whole(&mut self, started: &[Started], wholes: &[Whole]) -> Bytes {
        let (started, whole) = (&started[0], &wholes[0]);
        for latency in &whole.latencies {
            self.times(*latency);
        }
        let batch_sizes = whole.tokens.iter().map(|token| u64::from(token.batch_size)).collect();
        let waits = whole
            .tokens
            .iter()
            .map(|token| u64::try_from(token.queue_wait.as_micros()).unwrap_or(u64::MAX))
            .collect::<Vec<u64>>();
        let details = self.details(Some(&whole.finish), whole.generated(), batch_sizes, waits);
        let response = Response {
            id: &self.shape.id,
            model_name: &started.model.description.name,
            model_version: None,
            text_output: &whole.text,
            details,
            times: None,
        };
        json(&response).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dialect::tests::{pieces, started, streamed, whole};

    fn writer(details: bool, earlier: Option<Earlier>) -> TritonWriter {
        TritonWriter::new(
            Shape { id: "a123".into(), details, full_text: false, report_costs: false },
            earlier,
        )
    }

    #[test]
    fn a_stream_with_details_has_the_documented_bytes() {
        let started = started("llama3-70b", 6, None);
        let events = streamed(&mut writer(true, None), &started, &pieces(&["live", " in"], Finish::Length));
        assert_eq!(
            events,
            [
                "data:{\"id\":\"a123\",\"model_name\":\"llama3-70b\",\"model_version\":null,\"text_output\":\"live\",\
                 \"details\":{\"generated_tokens\":1,\"first_token_cost\":null,\"decode_cost\":null,\"batch_size\":2,\
                 \"queue_wait_time\":30},\"prefill_time\":5.25,\"decode_time\":null}\n\n",
                "data:{\"id\":\"a123\",\"model_name\":\"llama3-70b\",\"model_version\":null,\"text_output\":\" in\",\
                 \"details\":{\"finish_reason\":\"length\",\"generated_tokens\":2,\"first_token_cost\":null,\
                 \"decode_cost\":null,\"batch_size\":2,\"queue_wait_time\":31},\"prefill_time\":null,\
                 \"decode_time\":5.25}\n\n",
            ]
        );
    }

    #[test]
    fn a_stream_without_details_has_times_alone() {
        let events =
            streamed(&mut writer(false, None), &started("m", 1, None), &pieces(&["a\u{2028}"], Finish::Eos));
        assert_eq!(
            events,
            [
                "data:{\"id\":\"a123\",\"model_name\":\"m\",\"model_version\":null,\"text_output\":\"a\\u2028\",\
                 \"prefill_time\":5.25,\"decode_time\":null}\n\n"
            ]
        );
    }

    #[test]
    fn a_whole_answer_lists_what_a_stream_tells_one_by_one() {
        let pieces = pieces(&["a", "b"], Finish::Eos);
        let body = writer(true, None).whole(&[started("m", 1, None)], &[whole(&pieces)]);
        assert_eq!(
            body,
            "{\"id\":\"a123\",\"model_name\":\"m\",\"model_version\":null,\"text_output\":\"ab\",\"details\":\
             {\"finish_reason\":\"eos_token\",\"generated_tokens\":2,\"first_token_cost\":null,\"decode_cost\":null,\
             \"batch_size\":[2,2],\"queue_wait_time\":[30,31]}}"
        );
    }

    #[test]
    fn a_moved_request_shows_one_long_gap_and_no_second_first_token() {
        let earlier = Earlier { first_token_cost: Some(31), decode_time: vec![9, 8] };
        let events =
            streamed(&mut writer(true, Some(earlier)), &started("m", 1, None), &pieces(&["x"], Finish::Eos));
        assert!(events[0].contains("\"first_token_cost\":31,\"decode_cost\":22,"), "{}", events[0]);
        assert!(events[0].ends_with("\"prefill_time\":null,\"decode_time\":5.25}\n\n"), "{}", events[0]);
    }

    #[test]
    fn events_may_carry_the_full_text_and_all_costs() {
        let shape = Shape { id: "a".into(), details: true, full_text: true, report_costs: true };
        let mut writer = TritonWriter::new(shape, None);
        let events = streamed(&mut writer, &started("m", 1, None), &pieces(&["'m", " from"], Finish::Length));
        assert!(events[0].contains("\"text_output\":\"'m\""), "{}", events[0]);
        assert!(events[1].contains("\"text_output\":\"'m from\""), "{}", events[1]);
        assert!(events[0].contains("\"first_token_cost\":5,\"decode_cost\":0,"), "{}", events[0]);
        assert!(events[1].contains("\"first_token_cost\":5,\"decode_cost\":5,"), "{}", events[1]);
    }

    #[test]
    fn a_stopped_stream_ends_like_any_other() {
        let mut writer = writer(true, None);
        streamed(&mut writer, &started("m", 1, None), &pieces(&["a", "b"], Finish::Length));
        let event = writer.fault(&Fault::Stopped);
        let event = std::str::from_utf8(&event).unwrap();
        assert!(event.contains("\"finish_reason\":\"stop_sequence\",\"generated_tokens\":2"), "{event}");
        assert!(!event.contains("error"), "{event}");
    }

    #[test]
    fn every_end_has_a_name() {
        for (finish, name) in [
            (Finish::Eos, "eos_token"),
            (Finish::Grammar, "eos_token"),
            (Finish::StopToken, "stop_sequence"),
            (Finish::StopString("x".into()), "stop_sequence"),
            (Finish::Stopped, "stop_sequence"),
            (Finish::Length, "length"),
        ] {
            let body = writer(true, None).whole(&[started("m", 1, None)], &[whole(&pieces(&["a"], finish))]);
            let body: serde_json::Value = serde_json::from_slice(&body).unwrap();
            assert_eq!(body["details"]["finish_reason"], name);
        }
    }

    #[test]
    fn a_late_fault_is_an_event() {
        let event = writer(true, None).fault(&Fault::NotReady("gone".into()));
        assert_eq!(event, "data:{\"error\":\"gone\",\"error_type\":\"Service Unavailable\"}\n\n");
    }
}
