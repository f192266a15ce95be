//! A schedule as text, for people.

use std::fmt;

use proto::{Generation, Handoff};
use router::dispatch::Emission;
use worker::core::{DecodeItem, FetchItem, PrefillItem};

use crate::network::{Answer, Ask};
use crate::world::{What, World};

impl World {
    /// Writes a line of the trace.
    pub(crate) fn note(&mut self, line: impl FnOnce(&Self) -> String) {
        if self.trace.is_some() {
            let line = format!("{:>12.6}  {}", self.now.as_secs_f64(), line(self));
            self.trace.iter_mut().for_each(|trace| trace.push(line.clone()));
        }
    }

    /// Writes what is about to happen, without the shells' own timers and the routers' polling.
    pub(crate) fn trace_event(&mut self, what: &What) {
        let line = match what {
            What::Open(call)
            | What::Item(call, ..)
            | What::End(call, _)
            | What::CallerLost(call)
            | What::ServerLost(call)
            | What::TimeOut(call) => {
                if matches!(self.calls[*call].ask, Ask::Describe) {
                    return;
                }
                self.describe_message(*call, what)
            }
            What::Arrive(_) | What::Restart(_) | What::Awake(_) | What::CutNoticed(..) | What::Silence(_) => {
                Some(format!("{what:?}"))
            }
            _ => None,
        };
        if let Some(line) = line {
            self.note(|_| line);
        }
    }

    fn describe_message(&self, key: usize, what: &What) -> Option<String> {
        let call = &self.calls[key];
        let (from, to) = (self.name(call.from), self.name(call.to));
        let deaf = if self.is_heard(key) { "" } else { " (nobody listens)" };
        Some(match what {
            What::Open(_) if call.is_opening => format!("{from} -> {to}: #{key} {}", call.ask),
            What::Item(_, answer, _) => format!("{from} <- {to}: #{key} {answer}{deaf}"),
            What::End(_, Ok(())) => format!("{from} <- {to}: #{key} ends{deaf}"),
            What::End(_, Err(error)) => format!("{from} <- {to}: #{key} ends: {error}{deaf}"),
            What::ServerLost(_) if self.is_served(key) => format!("{to} sees #{key} of {from} go"),
            What::CallerLost(_) if self.is_heard(key) => format!("{from} loses #{key} at {to}"),
            What::TimeOut(_) if self.is_heard(key) => format!("{from} waits no more for #{key} at {to}"),
            _ => return None,
        })
    }

    /// The last lines of the trace.
    pub(crate) fn take_trace(&mut self, lines: usize) -> String {
        let trace = self.trace.take().unwrap_or_default();
        trace[trace.len().saturating_sub(lines)..].join("\n")
    }
}

fn sequence(generation: &Generation) -> String {
    let (all, generated) = (generation.tokens.len(), generation.generated);
    format!("{} attempt {}, {all} tokens, {generated} generated", generation.request, generation.attempt.0)
}

fn reference(handoff: &Handoff) -> String {
    let Handoff { epoch, request, attempt, id, tokens, .. } = handoff;
    format!("{id:?} of {request} attempt {}, {tokens} tokens, epoch {epoch}", attempt.0)
}

impl fmt::Display for Ask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Route(generation) => {
                write!(f, "route {}, {:?}", sequence(generation), generation.time_left)
            }
            Self::Prefill(generation) => write!(f, "prefill {}", sequence(generation)),
            Self::Decode(generation, None) => write!(f, "decode {}", sequence(generation)),
            Self::Decode(generation, Some(handoff)) => {
                write!(f, "decode {} from {}", sequence(generation), reference(handoff))
            }
            Self::Fetch(handoff, skip) => write!(f, "fetch {} from token {skip}", reference(handoff)),
            Self::Renew(handoff) => write!(f, "renew {}", reference(handoff)),
            Self::Release(handoff) => write!(f, "release {}", reference(handoff)),
            Self::Fence(request, attempt) => write!(f, "fence {request} below {}", attempt.0),
            Self::Move(request, attempt) => write!(f, "give away {request} attempt {}", attempt.0),
            Self::Describe => write!(f, "describe"),
        }
    }
}

impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Emission(Emission::Placed(placed)) => {
                let prefill = placed.prefill.as_deref().unwrap_or("nobody");
                write!(f, "attempt {} at {prefill} and {}", placed.attempt.0, placed.decode)
            }
            Self::Emission(Emission::Token(token))
            | Self::Prefill(PrefillItem::Done { token, .. })
            | Self::Decode(DecodeItem::Token(token)) => {
                write!(f, "token {} is {}, {:?}", token.index, token.id, token.finish)
            }
            Self::Prefill(PrefillItem::Issued { handoff, .. }) => write!(f, "issued {}", reference(handoff)),
            Self::Decode(DecodeItem::Moved { handoff }) => write!(f, "moved: {}", reference(handoff)),
            Self::Decode(DecodeItem::Admitted { skipped_tokens }) => {
                write!(f, "admitted, {skipped_tokens} tokens are there")
            }
            Self::Fetch(FetchItem::Header { skip, tokens, .. }) => write!(f, "kv of tokens {skip}..{tokens}"),
            Self::Fetch(FetchItem::Block(block)) => {
                let sums = &block.checksums;
                write!(f, "kv of {} tokens from {}, checksums {sums:08x?}", block.tokens, block.first)
            }
            Self::Fetch(FetchItem::End { first_token, .. }) => {
                write!(f, "kv ends, first token {first_token}")
            }
            Self::Lease(ttl) => write!(f, "renewed for {ttl:?}"),
            Self::Description(_) => write!(f, "description"),
        }
    }
}
