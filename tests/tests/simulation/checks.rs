//! The invariants, kept as models of their own beside the cores: what each worker may and may not do, told from the
//! messages it takes and gives alone.

mod decode;
mod dispatch;
mod owner;

use std::time::Duration;

use proto::{Generation, Token};

use crate::plan::PlannedRequest;

pub(crate) use decode::DecodeWatch;
pub(crate) use dispatch::DispatchWatch;
pub(crate) use owner::OwnerWatch;

/// A broken invariant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Violation {
    /// `I1` to `I8`, or `accounting`, `contract`, `liveness`.
    pub(crate) invariant: &'static str,
    pub(crate) message: String,
}

/// How a check ends.
pub(crate) type Check = Result<(), Violation>;

/// A violation, unless the claim holds.
pub(crate) fn ensure(claim: bool, invariant: &'static str, message: impl FnOnce() -> String) -> Check {
    if claim { Ok(()) } else { Err(Violation { invariant, message: message() }) }
}

/// What every watch looks things up in: the requests by number, and the time.
#[derive(Clone, Copy)]
pub(crate) struct Truth<'a> {
    pub(crate) requests: &'a [PlannedRequest],
    pub(crate) now: Duration,
}

impl<'a> Truth<'a> {
    /// The request of that id; `None` for ids that no client gave.
    pub(crate) fn request(&self, id: &proto::RequestId) -> Option<&'a PlannedRequest> {
        self.requests.get(number(id)?)
    }

    /// A token is the one that a correct cluster gives at its index, and says whether it is the last.
    pub(crate) fn check_token(&self, id: &proto::RequestId, token: &Token, by: &str) -> Check {
        let Some(request) = self.request(id) else { return Ok(()) };
        let reference = &request.oracle.reference;
        let expected = reference.get(token.index).copied();
        ensure(expected == Some(token.id), "I2", || {
            format!("{by}: request {id}, token {}: {expected:?} is right, {} came", token.index, token.id)
        })?;
        let is_last = token.index + 1 == reference.len();
        ensure(token.finish.is_some() == is_last, "I8", || {
            format!(
                "{by}: request {id}, token {} of {}: finish {:?}",
                token.index,
                reference.len(),
                token.finish
            )
        })
    }

    /// What is to be continued is what the client asked and got.
    pub(crate) fn check_generation(&self, generation: &Generation) -> Check {
        let Some(request) = self.request(&generation.request) else { return Ok(()) };
        let so_far = &request.oracle.reference[..generation.generated.min(request.oracle.reference.len())];
        let expected: Vec<_> = request.prompt.iter().chain(so_far).copied().collect();
        ensure(generation.tokens == expected, "I8", || {
            format!("request {}: a call for other tokens than prompt and output", generation.request)
        })
    }
}

/// The number in a request's id.
pub(crate) fn number(id: &proto::RequestId) -> Option<usize> {
    id.0.strip_prefix('r')?.parse().ok()
}
