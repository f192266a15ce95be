//! The dialects there are.

use futures::future::BoxFuture;

use crate::answer::Answer;
use crate::case::Case;
use crate::server::Server;
use crate::{kserve, native, openai, text};

/// How an answer comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Whole,
    Streamed,
}

/// Asks, and reads the answer to its end; panics at what is no answer of the dialect.
type Ask = for<'a> fn(&'a Server, &'a Case, Mode) -> BoxFuture<'a, Answer>;

/// An API.
pub(crate) struct Dialect {
    pub(crate) name: &'static str,
    /// Which cases it has words for.
    pub(crate) takes: fn(&Case) -> bool,
    pub(crate) modes: &'static [Mode],
    /// Whole answers have the likeliest sequence first, and not the first.
    pub(crate) ranked: bool,
    pub(crate) ask: Ask,
}

const BOTH: &[Mode] = &[Mode::Whole, Mode::Streamed];

const fn dialect(name: &'static str, modes: &'static [Mode], ask: Ask) -> Dialect {
    Dialect { name, takes: |_| true, modes, ranked: false, ask }
}

/// The API that tells the most.
pub(crate) const NATIVE: Dialect =
    dialect("native gRPC", &[Mode::Streamed], |server, case, _| Box::pin(native::text(server, case)));

/// Every API that generates. Modes of one dialect are held against each other, and all against [`NATIVE`].
pub(crate) const ALL: &[Dialect] = &[
    NATIVE,
    Dialect {
        takes: |case| case.messages.is_some(),
        ..dialect("native gRPC, a chat", &[Mode::Streamed], |server, case, _| {
            Box::pin(native::chat(server, case))
        })
    },
    Dialect {
        takes: |case| case.n == 1,
        ..dialect("Triton's generate", BOTH, |server, case, mode| Box::pin(text::triton(server, case, mode)))
    },
    Dialect {
        ranked: true,
        ..dialect("vLLM's generate", BOTH, |server, case, mode| Box::pin(text::vllm(server, case, mode)))
    },
    Dialect {
        takes: |case| {
            case.n == 1 && case.stop_token_ids.is_empty() && (case.stop.is_empty() || case.include_stop)
        },
        ..dialect("TGI's generate", BOTH, |server, case, mode| Box::pin(text::tgi(server, case, mode)))
    },
    dialect("KServe's infer over HTTP", &[Mode::Whole], |server, case, _| {
        Box::pin(kserve::http(server, case))
    }),
    dialect("KServe's infer over gRPC", BOTH, |server, case, mode| {
        Box::pin(kserve::grpc(server, case, mode))
    }),
    dialect("OpenAI's completions", BOTH, |server, case, mode| {
        Box::pin(openai::completion(server, case, mode))
    }),
    Dialect {
        takes: |case| case.messages.is_some(),
        ..dialect("OpenAI's chat", BOTH, |server, case, mode| Box::pin(openai::chat(server, case, mode)))
    },
];
