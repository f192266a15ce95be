//! The half of the engine that moves KV between engines: hand over and export on one side; reserve, import and
//! activate on the other.
//!
//! What makes a hand-off safe is here (invariant I2): checksums are those taken at seal, every slab that arrives is
//! verified, and a sequence decodes only once all its tokens have arrived and the digest binds them to the
//! hand-off.

use std::collections::BTreeMap;
use std::ops::Range;

use checkpoint::grammar::GrammarError;
use proto::{Digest, Error, FinishReason, HandoffId, KvLayout, Reason, TokenId};

use crate::digest::handoff_digest;
use crate::engine::Engine;
use crate::grammar;
use crate::kv::slab;
use crate::model::{KvMemory, Model};
use crate::planted::{self, Bug};
use crate::report::{HandedOver, KvBlock, Reservation};
use crate::sequence::{Sequence, SequenceId, SequenceSpec, State, Until};

/// What has been imported for a reserved sequence.
#[derive(Debug)]
pub(crate) struct Arrival {
    /// Tokens whose KV was here already.
    skip: usize,
    /// Parts by their first token; no two overlap.
    parts: BTreeMap<usize, Part>,
}

/// A run of tokens as it was sent.
#[derive(Debug, PartialEq, Eq)]
struct Part {
    tokens: usize,
    /// `[layers]`
    checksums: Vec<u32>,
}

impl Arrival {
    /// Takes note of a part. `Ok(false)` when the very same part is known already.
    fn add(&mut self, first: usize, part: Part) -> Result<bool, Error> {
        if let Some(known) = self.parts.get(&first) {
            if *known == part {
                return Ok(false);
            }
            let message =
                format!("tokens {first}.. came twice, with other length or checksums the second time");
            return Err(Error::new(Reason::ChecksumMismatch, message));
        }
        let before = self.parts.range(..first).next_back().map_or(0, |(first, part)| first + part.tokens);
        let after = self.parts.range(first..).next().map_or(usize::MAX, |(first, _)| *first);
        if before > first || first + part.tokens > after {
            let message = format!("tokens {first}..{} overlap what came before", first + part.tokens);
            return Err(Error::invalid("first", message));
        }
        self.parts.insert(first, part);
        Ok(true)
    }

    /// The first token of `range` that neither was here nor has arrived.
    fn missing(&self, range: Range<usize>) -> Option<usize> {
        let mut at = range.start.max(self.skip);
        for (&first, part) in &self.parts {
            if first > at {
                break;
            }
            at = at.max(first + part.tokens);
        }
        (at < range.end).then_some(at)
    }

    /// The digest over what arrived. The owner rounds `skip` down to its own blocks and sends from there.
    fn digest(&self, handoff: HandoffId, tokens: &[TokenId], first: TokenId) -> Digest {
        let skip = self.parts.keys().next().copied().unwrap_or(self.skip);
        let checksums = self.parts.values().flat_map(|part| part.checksums.iter().copied());
        handoff_digest(handoff, tokens, skip, checksums, first)
    }
}

fn unknown(id: SequenceId) -> Error {
    Error::new(Reason::UnknownHandoff, format!("sequence {id} is not here"))
}

impl<M: Model> Engine<M> {
    /// Reserves blocks for a sequence whose KV will be imported. `spec.tokens` are the tokens whose KV is handed
    /// over: all but the one that prefill chooses. `spec.until` is without effect: the sequence goes on until it is
    /// finished.
    ///
    /// # Errors
    /// At once: INVALID_ARGUMENT as [`submit`](Self::submit); QUEUE_FULL when as many sequences as may run are
    /// running, reserved or have a claim to run; OUT_OF_BLOCKS when there is no room that nobody else has a claim to.
    pub fn reserve(&mut self, spec: SequenceSpec) -> Result<Reservation, Error> {
        spec.validate(self.limits())?;
        let follower = grammar::follow(self.vocabulary.as_deref(), &spec)?;
        let id = self.scheduler.reserve(SequenceSpec { until: Until::Finished, ..spec })?;
        self.scheduler.planned(id).follower = follower;
        self.copy_blocks();
        let skip = self.scheduler.planned(id).computed;
        self.arrivals.insert(id, Arrival { skip, parts: BTreeMap::new() });
        Ok(Reservation { id, skip })
    }

    /// Verifies a run of KV and writes it. The sender's block size is its own. The same run may come twice; tokens
    /// before `skip` may come and are verified but not written, since their blocks are shared.
    ///
    /// # Errors
    /// UNKNOWN_HANDOFF when the sequence is gone; LAYOUT_MISMATCH for another number of layers; TRUNCATED for too
    /// few or too many bytes; CHECKSUM_MISMATCH, which also answers a run that came before with other content;
    /// INVALID_ARGUMENT for tokens that are not the sequence's or overlap. Nothing is written then.
    pub fn import(&mut self, id: SequenceId, block: &KvBlock) -> Result<(), Error> {
        let Some(arrival) = self.arrivals.get_mut(&id) else { return Err(unknown(id)) };
        let len = self.scheduler.planned(id).len();
        verify(&self.kv.layout(), len, block)?;
        let part = Part { tokens: block.tokens, checksums: block.checksums.clone() };
        if !arrival.add(block.first, part)? {
            return Ok(());
        }
        let (skip, end) = (arrival.skip, block.first + block.tokens);
        if end <= skip {
            return Ok(());
        }
        let written = block.first.max(skip)..end;
        self.write(id, block, written.clone());
        self.seal_arrived(id, written);
        Ok(())
    }

    /// Writes the tokens `range` of a verified run into the sequence's blocks.
    fn write(&mut self, id: SequenceId, run: &KvBlock, range: Range<usize>) {
        let layout = self.kv.layout();
        let blocks = &self.scheduler.planned(id).blocks;
        let mut at = range.start;
        while at < range.end {
            let (block, offset) = (blocks[at / layout.block_tokens], at % layout.block_tokens);
            let tokens = (layout.block_tokens - offset).min(range.end - at);
            let part = at - run.first..at - run.first + tokens;
            slab::cut(&layout, &run.slabs, run.tokens, part, &mut self.scratch);
            self.kv.import(block, offset, tokens, &self.scratch);
            at += tokens;
        }
    }

    /// Seals the full blocks that the tokens `written` completed.
    fn seal_arrived(&mut self, id: SequenceId, written: Range<usize>) {
        let (len, size) = (self.scheduler.planned(id).len(), self.kv.layout().block_tokens);
        for block in written.start / size..written.end.div_ceil(size).min(len / size) {
            if self.arrivals[&id].missing(block * size..(block + 1) * size).is_none() {
                self.seal_full(id, block..block + 1);
                if planted::is(Bug::CacheBeforeProof) {
                    self.scheduler.publish(id, block..block + 1);
                }
            }
        }
    }

    /// Starts decoding a sequence whose KV has arrived (invariant I2), with the token that prefill chose. When that token
    /// ends the sequence there is nothing to decode: it gives why, and the sequence stays reserved, to be cancelled.
    ///
    /// # Errors
    /// UNKNOWN_HANDOFF when the sequence is gone; INVALID_ARGUMENT when `first` is not in the vocabulary, or the grammar
    /// does not allow it; TRUNCATED when a token's KV has not arrived; CHECKSUM_MISMATCH when `digest` is not that of
    /// what arrived. The sequence stays reserved then.
    pub fn activate(
        &mut self,
        id: SequenceId,
        handoff: HandoffId,
        first: TokenId,
        digest: Digest,
    ) -> Result<Option<FinishReason>, Error> {
        let limits = self.limits();
        if first as usize >= limits.vocab {
            let message = format!("an id below {} expected, {first} came", limits.vocab);
            return Err(Error::invalid("first", message));
        }
        let Some(arrival) = self.arrivals.get(&id) else { return Err(unknown(id)) };
        let tokens = &self.scheduler.planned(id).spec.tokens;
        let proof = check_proof(arrival, tokens, digest, arrival.digest(handoff, tokens, first));
        if !planted::is(Bug::ActivateWithoutProof) {
            proof?;
        }
        let len = tokens.len();
        let finish = self.scheduler.planned(id).end_with(first, limits.context_len);
        let finish = finish.map_err(|fault| match fault {
            GrammarError::NotAllowed { .. } => Error::invalid("first", fault),
            _ => grammar::failed(&fault),
        })?;
        if finish.is_some() {
            return Ok(finish);
        }
        self.scheduler.planned(id).computed = len;
        self.scheduler.publish(id, 0..len / self.kv.layout().block_tokens);
        self.scheduler.push(id, first);
        self.scheduler.activate(id);
        self.arrivals.remove(&id);
        Ok(None)
    }

    /// Stops a running sequence between two steps and keeps it to be fetched: everything that is computed is sealed, its
    /// partial last block too, and from now on it is held like one that was computed for it. Gives what its KV is of.
    ///
    /// `None`, and nothing is changed, when there is no such sequence, it does not run, more than its last token is
    /// still to be computed, or it has not given a token here yet that takes the prompt's report along.
    pub fn hand_over(&mut self, id: SequenceId) -> Option<HandedOver> {
        let sequence = self.scheduler.get(id)?;
        let is_whole = sequence.state == State::Running && sequence.computed > 0 && sequence.remaining() == 1;
        if !is_whole || sequence.is_for_hold() || sequence.report.is_some() {
            return None;
        }
        let (&next, tokens) = sequence.spec.tokens.split_last()?;
        let handed_over = HandedOver { tokens: tokens.to_vec(), next };
        let full = sequence.computed / self.kv.layout().block_tokens;
        self.scheduler.planned(id).spec.until = Until::FirstToken;
        for block in 0..full {
            // Without a prefix cache nobody has wanted their checksums so far.
            let place = self.scheduler.planned(id).blocks[block];
            if self.scheduler.pool.checksums(place).is_empty() {
                self.seal_full(id, block..block + 1);
            }
        }
        if !planted::is(Bug::HandedOverUnsealed) {
            self.seal_tail(id);
        }
        self.scheduler.hold(id);
        Some(handed_over)
    }

    /// Sealed KV of a sequence that is held, or is computed to be: the block whose first token is `first`, with the
    /// checksums taken at seal. `Ok(None)` while it is not sealed.
    ///
    /// # Errors
    /// UNKNOWN_HANDOFF when no such sequence is here; INVALID_ARGUMENT when no block of it starts at `first`.
    pub fn export(&self, id: SequenceId, first: usize) -> Result<Option<KvBlock>, Error> {
        let exportable = self.scheduler.get(id).filter(|sequence| sequence.is_for_hold());
        let Some(sequence) = exportable.or(self.ghosts.get(&id)) else { return Err(unknown(id)) };
        let layout = self.kv.layout();
        // A held sequence knows one token more than it has KV of.
        let len = if sequence.state == State::Held { sequence.computed } else { sequence.len() };
        if !first.is_multiple_of(layout.block_tokens) || first >= len {
            let message = format!("a multiple of {} below {len} expected, {first} came", layout.block_tokens);
            return Err(Error::invalid("first", message));
        }
        let tokens = layout.block_tokens.min(len - first);
        if sequence.sealed(layout.block_tokens) < first + tokens {
            return Ok(None);
        }
        let block = sequence.blocks[first / layout.block_tokens];
        let mut slabs = Vec::with_capacity(layout.block_bytes(tokens));
        self.kv.export(block, 0, tokens, &mut slabs);
        let mut checksums = self.scheduler.pool.checksums(block).to_vec();
        if self.checksums_are_lost(sequence) {
            checksums = slab::checksums(&layout, tokens, &slabs).collect();
        }
        Ok(Some(KvBlock { first, tokens, slabs, checksums }))
    }

    /// True when a planted bug takes checksums anew.
    fn checksums_are_lost(&self, sequence: &Sequence) -> bool {
        planted::is(Bug::ChecksumAtSend) || self.ghosts.contains_key(&sequence.id)
    }
}

/// Refuses a run of KV that is not of this layout, not of the sequence, or not intact.
fn verify(layout: &KvLayout, len: usize, block: &KvBlock) -> Result<(), Error> {
    let end = block.first.checked_add(block.tokens).filter(|&end| end <= len && block.tokens > 0);
    if end.is_none() {
        let message =
            format!("tokens within 0..{len} expected, {} came from {} on", block.tokens, block.first);
        return Err(Error::invalid("first", message));
    }
    if block.checksums.len() != layout.layers {
        let message = format!("layers: {} here, {} checksums came", layout.layers, block.checksums.len());
        return Err(Error::new(Reason::LayoutMismatch, message));
    }
    let expected = layout.block_bytes(block.tokens);
    if block.slabs.len() != expected {
        let message = format!(
            "kv of {} tokens takes {expected} bytes, {} came for tokens from {} on",
            block.tokens,
            block.slabs.len(),
            block.first
        );
        return Err(Error::new(Reason::Truncated, message));
    }
    if planted::is(Bug::ImportWithoutChecksum) {
        return Ok(());
    }
    let computed = slab::checksums(layout, block.tokens, &block.slabs);
    match computed.zip(&block.checksums).position(|(computed, expected)| computed != *expected) {
        None => Ok(()),
        Some(layer) => {
            let message =
                format!("kv of tokens from {} on, layer {layer}: not the bytes sealed", block.first);
            Err(Error::new(Reason::ChecksumMismatch, message))
        }
    }
}

/// The proof that decoding may start: everything arrived, and it is what the hand-off promised.
fn check_proof(
    arrival: &Arrival,
    tokens: &[TokenId],
    promised: Digest,
    arrived: Digest,
) -> Result<(), Error> {
    if let Some(position) = arrival.missing(0..tokens.len()) {
        let message = format!("kv of {} tokens expected, none came for token {position}", tokens.len());
        return Err(Error::new(Reason::Truncated, message));
    }
    if promised == arrived {
        return Ok(());
    }
    Err(Error::new(Reason::ChecksumMismatch, format!("digest {promised} promised, {arrived} arrived")))
}
