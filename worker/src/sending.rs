//! A fetch as its owner serves it: header, the blocks in order as they are sealed, and the end with its proof, each
//! as the peer has credit for it.

use std::sync::Arc;

use engine::model::Model;
use engine::{Engine, SequenceId};
use proto::{Error, HandoffId, TokenId};

use crate::core::{Action, CallId, FetchItem};

/// A fetch being sent.
#[derive(Debug)]
pub struct Sending {
    call: CallId,
    sequence: SequenceId,
    handoff: HandoffId,
    tokens: Arc<[TokenId]>,
    /// Tokens at the front that are not sent; a multiple of the block size.
    skip: usize,
    /// Items that the peer can take.
    credit: usize,
    header_sent: bool,
    /// The blocks of tokens `skip..next` are sent.
    next: usize,
    /// Of the slabs sent, in order.
    checksums: Vec<u32>,
    /// The token that prefill sampled, once it did.
    first_token: Option<TokenId>,
}

/// What a [`Sending`] is of.
#[derive(Clone, Debug)]
pub struct Source {
    /// The engine's sequence.
    pub sequence: SequenceId,
    /// The hand-off's id, which the digest covers.
    pub handoff: HandoffId,
    /// The tokens whose KV is sent.
    pub tokens: Arc<[TokenId]>,
    /// The token that prefill sampled, if it has.
    pub first_token: Option<TokenId>,
}

impl Sending {
    /// Nothing sent yet, and no credit. `skip` is rounded down to a border of the owner's blocks.
    pub fn new(call: CallId, source: Source, skip: usize, block_tokens: usize) -> Self {
        let skip = skip.min(source.tokens.len()) / block_tokens * block_tokens;
        Self {
            call,
            sequence: source.sequence,
            handoff: source.handoff,
            tokens: source.tokens,
            skip,
            credit: 0,
            header_sent: false,
            next: skip,
            checksums: Vec::new(),
            first_token: source.first_token,
        }
    }

    /// The sequence whose KV is sent.
    pub fn sequence(&self) -> SequenceId {
        self.sequence
    }

    /// The peer can take more items.
    pub fn add_credit(&mut self, items: usize) {
        self.credit = self.credit.saturating_add(items);
    }

    /// The prefill sampled its token: when all blocks are sent, the end can be.
    pub fn complete(&mut self, first_token: TokenId) {
        self.first_token = Some(first_token);
    }

    /// Sends what is sealed and the peer has credit for. True when the end was sent.
    ///
    /// # Errors
    /// UNKNOWN_HANDOFF when the engine has no such sequence.
    pub fn pump<M: Model>(&mut self, engine: &Engine<M>, out: &mut Vec<Action>) -> Result<bool, Error> {
        while self.credit > 0 {
            let Some(item) = self.next_item(engine)? else { return Ok(false) };
            let is_end = matches!(item, FetchItem::End { .. });
            self.credit -= 1;
            out.push(Action::Fetch { call: self.call, item });
            if is_end {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The next item, if it exists yet.
    fn next_item<M: Model>(&mut self, engine: &Engine<M>) -> Result<Option<FetchItem>, Error> {
        if !self.header_sent {
            self.header_sent = true;
            let (skip, tokens) = (self.skip, self.tokens.len());
            return Ok(Some(FetchItem::Header { skip, tokens, layout: engine.layout() }));
        }
        if self.next < self.tokens.len() {
            let block = engine.export(self.sequence, self.next)?;
            return Ok(block.map(|block| {
                self.next = block.first + block.tokens;
                self.checksums.extend_from_slice(&block.checksums);
                FetchItem::Block(block)
            }));
        }
        Ok(self.first_token.map(|first_token| {
            let checksums = self.checksums.iter().copied();
            let digest =
                engine::digest::handoff_digest(self.handoff, &self.tokens, self.skip, checksums, first_token);
            FetchItem::End { first_token, digest }
        }))
    }
}
