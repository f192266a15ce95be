//! Items of streams between the core's form and the wire's. Fields of shared types are mapped by `proto::convert`.

use std::time::Duration;

use proto::convert::{count, micros, required};
use proto::wire::{self, decode_event, fetch_event, prefill_event};
use proto::{Error, Generation, Handoff, Reason};

use crate::core::{DecodeItem, FetchItem, PrefillItem};

/// A prefill item for the wire.
pub fn prefill_event(item: PrefillItem) -> wire::PrefillEvent {
    let event = match item {
        PrefillItem::Issued { handoff, cached_tokens, queue_wait } => {
            prefill_event::Event::Issued(wire::HandoffIssued {
                handoff: Some(handoff.into()),
                cached_tokens: cached_tokens as u64,
                queue_wait_us: micros(queue_wait),
            })
        }
        PrefillItem::Done { token, prefill } => prefill_event::Event::Done(wire::PrefillDone {
            token: Some(token.into()),
            prefill_us: micros(prefill),
        }),
    };
    wire::PrefillEvent { event: Some(event) }
}

/// A decode item for the wire.
pub fn decode_event(item: DecodeItem) -> wire::DecodeEvent {
    let event = match item {
        DecodeItem::Admitted { skipped_tokens } => {
            decode_event::Event::Admitted(wire::DecodeAdmitted { skipped_tokens: skipped_tokens as u64 })
        }
        DecodeItem::Token(token) => decode_event::Event::Token(token.into()),
        DecodeItem::Moved { handoff } => {
            decode_event::Event::Moved(wire::Moved { handoff: Some(handoff.into()) })
        }
    };
    wire::DecodeEvent { event: Some(event) }
}

/// A fetch item for the wire.
pub fn fetch_event(item: FetchItem) -> wire::FetchEvent {
    let event = match item {
        FetchItem::Header { skip, tokens, layout } => fetch_event::Event::Header(wire::FetchHeader {
            skip: skip as u64,
            tokens: tokens as u64,
            layout: Some(layout.into()),
        }),
        FetchItem::Block(block) => fetch_event::Event::Block(wire::KvBlock {
            first: block.first as u64,
            tokens: block.tokens as u32,
            slabs: block.slabs.into(),
            checksums: block.checksums,
        }),
        FetchItem::End { first_token, digest } => {
            fetch_event::Event::End(wire::FetchEnd { first_token, digest: digest.0.to_vec() })
        }
    };
    wire::FetchEvent { event: Some(event) }
}

/// A fetch item from the wire.
///
/// # Errors
/// INVALID_ARGUMENT that names the field. Whether the bytes are right is for the engine to say.
pub fn fetch_item(message: wire::FetchEvent) -> Result<FetchItem, Error> {
    Ok(match required("fetch.event", message.event)? {
        fetch_event::Event::Header(header) => FetchItem::Header {
            skip: count("header.skip", header.skip)?,
            tokens: count("header.tokens", header.tokens)?,
            layout: required("header.layout", header.layout)?.try_into()?,
        },
        fetch_event::Event::Block(block) => FetchItem::Block(engine::KvBlock {
            first: count("block.first", block.first)?,
            tokens: block.tokens as usize,
            slabs: block.slabs.into(),
            checksums: block.checksums,
        }),
        fetch_event::Event::End(end) => {
            FetchItem::End { first_token: end.first_token, digest: end.digest()? }
        }
    })
}

/// A hand-off reference from a request.
pub fn handoff(message: Option<wire::Handoff>) -> Result<Handoff, Error> {
    required("handoff", message)?.try_into()
}

/// Refuses a request for another model than the one served: MODEL_NOT_FOUND.
pub fn check_model(served: &str, generation: &Generation) -> Result<(), Error> {
    if generation.model == served {
        return Ok(());
    }
    let message = format!("{served} is served here, {} was asked for", generation.model);
    Err(Error::new(Reason::ModelNotFound, message))
}

/// The request for a fetch.
pub(crate) fn fetch_request(handoff: Handoff, skip: usize, time_left: Duration) -> wire::FetchRequest {
    wire::FetchRequest { handoff: Some(handoff.into()), skip: skip as u64, time_left_us: micros(time_left) }
}

/// What a status means to the caller: the peer's own reason; without one, the way to the peer broke (WORKER_LOST), or
/// the time was over (DEADLINE).
pub fn peer_error(peer: &str, status: tonic::Status) -> Error {
    if !proto::convert::is_transport(&status) {
        return status.into();
    }
    let reason = match status.code() {
        tonic::Code::DeadlineExceeded => Reason::Deadline,
        _ => Reason::WorkerLost,
    };
    Error::new(reason, format!("{peer}: {}", status.message()))
}

#[cfg(test)]
mod tests {
    use proto::{Digest, KvDtype, KvLayout};

    use super::*;

    #[test]
    fn fetch_items_survive_the_wire() {
        let layout = KvLayout { layers: 2, kv_heads: 1, head_dim: 4, dtype: KvDtype::F16, block_tokens: 16 };
        let items = [
            FetchItem::Header { skip: 16, tokens: 40, layout },
            FetchItem::Block(engine::KvBlock {
                first: 32,
                tokens: 8,
                slabs: vec![1, 2, 3],
                checksums: vec![4, u32::MAX],
            }),
            FetchItem::End { first_token: 7, digest: Digest([9; 32]) },
        ];
        for item in items {
            assert_eq!(fetch_item(fetch_event(item.clone())), Ok(item));
        }
    }

    #[test]
    fn a_malformed_item_names_its_field() {
        let field = |event| fetch_item(wire::FetchEvent { event }).expect_err("malformed").message;
        assert_eq!(field(None), "fetch.event: is required");
        let header = wire::FetchHeader { skip: 0, tokens: 1, layout: None };
        assert_eq!(field(Some(fetch_event::Event::Header(header))), "header.layout: is required");
        let end = wire::FetchEnd { first_token: 0, digest: vec![1; 31] };
        assert_eq!(field(Some(fetch_event::Event::End(end))), "digest: expected 32 bytes, got 31");
    }

    #[test]
    fn a_bare_status_is_the_ways_fault_and_a_reason_is_the_peers() {
        let lost = peer_error("w-1", tonic::Status::internal("h2 protocol error"));
        assert_eq!((lost.reason, lost.message.as_str()), (Reason::WorkerLost, "w-1: h2 protocol error"));
        let own = Error::new(Reason::LeaseExpired, "10 s passed");
        assert_eq!(peer_error("w-1", own.clone().into()), own);
        assert_eq!(peer_error("w-1", tonic::Status::deadline_exceeded("x")).reason, Reason::Deadline);
    }
}
