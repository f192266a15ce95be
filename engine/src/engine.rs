//! The engine: one step after another, each planned by the scheduler, computed by the model, and turned into tokens.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use checkpoint::grammar::{GrammarEnv, Mask};
use proto::watch::BlockChange;
use proto::{
    BlockHash, Digest, Error, KvLayout, PromptLogprobs, PromptReport, Reason, TokenId, TokenLogprob,
};

use crate::batch::Logits;
use crate::grammar;
use crate::handoff::Arrival;
use crate::kv::slab;
use crate::model::{ForwardError, Interrupt, KvMemory, Model};
use crate::planted::{self, Bug};
use crate::report::{EngineEvent, KvCounts, SequenceCounts, StepReport, TokenCounts};
use crate::sampling::{Choice, History, NoChoice, Rules, Sampler};
use crate::scheduler::{BlockCopy, Scheduler, Work};
use crate::sequence::{ModelLimits, Sequence, SequenceId, SequenceSpec, State};

/// Sizes and bounds of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineConfig {
    /// KV blocks of the arena.
    pub kv_blocks: usize,
    /// Tokens per block.
    pub block_tokens: usize,
    /// Most tokens of a step: what a long prefill is cut into. Decodes share it and go first, so it should be at
    /// least `sequences_max`.
    pub step_tokens: usize,
    /// Most sequences running or reserved at once.
    pub sequences_max: usize,
    /// Most sequences that wait.
    pub waiting_max: usize,
    /// Seed of the block hashes: the checkpoint's fingerprint.
    pub prefix_seed: Digest,
    /// Give sequences the KV that is here already of the tokens they start with: that of living sequences, and that of
    /// finished ones, whose blocks are kept for it.
    pub prefix_cache: bool,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            kv_blocks: 1024,
            block_tokens: 16,
            step_tokens: 512,
            sequences_max: 64,
            waiting_max: 256,
            prefix_seed: Digest::default(),
            prefix_cache: true,
        }
    }
}

impl EngineConfig {
    fn validate(&self) -> Result<(), Error> {
        let positive = [
            ("kv_blocks", self.kv_blocks),
            ("block_tokens", self.block_tokens),
            ("step_tokens", self.step_tokens),
            ("sequences_max", self.sequences_max),
            ("waiting_max", self.waiting_max),
        ];
        if let Some((field, _)) = positive.into_iter().find(|&(_, value)| value == 0) {
            return Err(Error::invalid(field, "at least 1 expected, 0 came"));
        }
        // Slots of the arena are 32-bit numbers.
        match self.kv_blocks.checked_mul(self.block_tokens) {
            Some(slots) if u32::try_from(slots).is_ok() => Ok(()),
            _ => Err(Error::invalid("kv_blocks", "at most 2^32 - 1 token slots in all expected")),
        }
    }
}

/// Computes sequences on a model. See [`crate`].
#[derive(Debug)]
pub struct Engine<M: Model> {
    model: M,
    pub(crate) kv: M::Kv,
    pub(crate) scheduler: Scheduler,
    sampler: Sampler,
    logits: Logits,
    /// The vocabulary that grammars are compiled against; `None` where no request may have one.
    pub(crate) vocabulary: Option<Arc<GrammarEnv>>,
    /// Tokens that the grammar of the sequence at hand allows.
    mask: Mask,
    interrupt: Interrupt,
    /// KV bytes of the block at hand.
    pub(crate) scratch: Vec<u8>,
    /// Events that no report has carried yet.
    events: Vec<EngineEvent>,
    /// What has been imported, for each reserved sequence.
    pub(crate) arrivals: BTreeMap<SequenceId, Arrival>,
    /// Sequences whose blocks are not theirs any more: filled by [`Bug::FreeBeforeQuiescence`] alone.
    pub(crate) ghosts: BTreeMap<SequenceId, Sequence>,
}

impl<M: Model> Engine<M> {
    /// An engine with an empty arena.
    ///
    /// # Errors
    /// INVALID_ARGUMENT when a field of the configuration is out of its range; INTERNAL when the device has no room.
    pub fn new(model: M, config: EngineConfig) -> Result<Self, Error> {
        config.validate()?;
        let kv = model
            .new_kv(config.kv_blocks, config.block_tokens)
            .map_err(|fault| Error::new(Reason::Internal, fault.to_string()))?;
        Ok(Self {
            sampler: Sampler::new(model.vocab_size()),
            model,
            kv,
            scheduler: Scheduler::new(config),
            logits: Logits::default(),
            vocabulary: None,
            mask: Mask::default(),
            interrupt: Interrupt::default(),
            scratch: Vec::new(),
            events: Vec::new(),
            arrivals: BTreeMap::new(),
            ghosts: BTreeMap::new(),
        })
    }

    /// Takes requests with a grammar from now on: their outputs are of this vocabulary.
    pub fn set_vocabulary(&mut self, vocabulary: Arc<GrammarEnv>) {
        self.vocabulary = Some(vocabulary);
    }

    /// Shape of the KV arena.
    pub fn layout(&self) -> KvLayout {
        self.kv.layout()
    }

    /// The flag that stops the running step, or the next; to be raised from another thread, and cleared by the
    /// engine's owner.
    pub fn interrupt(&self) -> Interrupt {
        self.interrupt.clone()
    }

    pub(crate) fn limits(&self) -> ModelLimits {
        ModelLimits { vocab: self.model.vocab_size(), context_len: self.model.context_len() }
    }

    /// Queues a sequence to be computed here.
    ///
    /// # Errors
    /// INVALID_ARGUMENT when a field is out of its range, the sequence can never fit (context length, or more blocks
    /// than the arena has), its grammar is not taken or does not allow the tokens generated before; QUEUE_FULL when the
    /// queue is at its bound.
    pub fn submit(&mut self, spec: SequenceSpec) -> Result<SequenceId, Error> {
        spec.validate(self.limits())?;
        let follower = grammar::follow(self.vocabulary.as_deref(), &spec)?;
        let id = self.scheduler.submit(spec)?;
        self.scheduler.planned(id).follower = follower;
        Ok(id)
    }

    /// Drops a sequence in any state and frees its blocks. No event of it follows. Unknown ids are ignored.
    pub fn cancel(&mut self, id: SequenceId) {
        self.bury(id);
        self.scheduler.remove(id);
        self.arrivals.remove(&id);
        self.events.retain(|event| event.id() != id);
    }

    /// Ends the hold of a sequence: nobody fetches its KV any more, and the blocks become prefix cache. Does the
    /// same to a sequence that is still computed to be held. Other ids are ignored.
    pub fn release(&mut self, id: SequenceId) {
        if self.scheduler.get(id).is_some_and(Sequence::is_for_hold) {
            self.cancel(id);
        }
    }

    /// Remembers the block table of a held sequence beyond its end, which is wrong.
    fn bury(&mut self, id: SequenceId) {
        if !planted::is(Bug::FreeBeforeQuiescence) {
            return;
        }
        if let Some(held) = self.scheduler.get(id).filter(|sequence| sequence.state == State::Held) {
            let mut ghost = Sequence::new(id, held.spec.clone(), State::Held);
            (ghost.computed, ghost.blocks) = (held.computed, held.blocks.clone());
            self.ghosts.insert(id, ghost);
        }
    }

    /// True when a step now would compute something or has something to report.
    pub fn has_work(&self) -> bool {
        !self.events.is_empty() || self.scheduler.has_work()
    }

    /// Computes one batch, if there is anything to compute.
    ///
    /// A model that fails takes the sequences of that batch with it (INTERNAL); the engine stays usable.
    ///
    /// # Panics
    /// When the device is lost: an engine without one must not look as if it worked. In debug builds also when the block
    /// accounting does not add up afterwards: a fault of the engine's own.
    pub fn step(&mut self) -> StepReport {
        let plan = self.scheduler.plan();
        for (id, error) in &plan.failed {
            self.events.push(EngineEvent::Failed { id: *id, error: error.clone() });
        }
        self.copy_blocks();
        let batch = self.scheduler.batch(&plan);
        let outcome = if batch.is_empty() { Ok(()) } else { self.forward(&batch) };
        match outcome {
            Ok(()) => {
                let mut row = 0;
                for work in plan.work {
                    self.advance(work, &mut row);
                }
            }
            Err(ForwardError::Interrupted) => {
                self.assert_consistent();
                return StepReport { interrupted: true, ..StepReport::default() };
            }
            Err(ForwardError::Device(message)) => {
                for work in plan.work {
                    self.fail(work.id, Error::new(Reason::Internal, format!("device: {message}")));
                }
            }
            Err(error @ ForwardError::Lost(_)) => panic!("{error}"),
        }
        self.assert_consistent();
        StepReport {
            batch_tokens: batch.len(),
            batch_sequences: batch.chunks.len(),
            events: std::mem::take(&mut self.events),
            interrupted: false,
        }
    }

    /// Makes the copies that are due, before anything else is written.
    pub(crate) fn copy_blocks(&mut self) {
        for BlockCopy { from, to } in self.scheduler.take_copies() {
            if !planted::is(Bug::ForkWithoutCopy) {
                self.kv.copy(from, to);
            }
        }
    }

    fn forward(&mut self, batch: &crate::batch::Batch) -> Result<(), ForwardError> {
        self.logits.vocab = self.model.vocab_size();
        self.model.forward(batch, &mut self.kv, &self.interrupt, &mut self.logits)?;
        let (expected, came) = (batch.logit_rows.len() * self.model.vocab_size(), self.logits.data.len());
        if came != expected {
            return Err(ForwardError::Device(format!("{expected} logits expected, {came} came")));
        }
        self.logits.vocab = self.model.vocab_size();
        Ok(())
    }

    /// Takes note of what a step computed for one sequence. `row` is the next row of the logits.
    fn advance(&mut self, work: Work, row: &mut usize) {
        let (id, block_tokens) = (work.id, self.layout().block_tokens);
        let sequence = self.scheduler.planned(id);
        let prompt_rows = sequence.prompt_rows(&work.tokens);
        sequence.computed = work.tokens.end;
        let complete = sequence.remaining() == 0;
        let mut sealed_before = work.tokens.start / block_tokens * block_tokens;
        if !std::mem::replace(&mut sequence.announced, true) {
            self.events.push(EngineEvent::Scheduled { id, cached: sequence.cached });
            sealed_before = 0;
        }
        self.seal_full(id, work.tokens.start / block_tokens..work.tokens.end / block_tokens);
        self.scheduler.publish(id, work.tokens.start / block_tokens..work.tokens.end / block_tokens);
        let first_row = *row;
        *row += prompt_rows.len() + usize::from(complete);
        if let Err(error) = self.report_prompt(id, prompt_rows, first_row) {
            return self.fail(id, error);
        }
        let choice = match complete.then(|| self.choose(id, *row - 1)).transpose() {
            Ok(choice) => choice,
            Err(error) => return self.fail(id, error),
        };
        if complete && self.scheduler.planned(id).is_for_hold() {
            self.seal_tail(id);
            self.scheduler.hold(id);
        }
        let sequence = self.scheduler.planned(id);
        let sealed = sequence.sealed(block_tokens);
        if sequence.is_for_hold() && sealed > sealed_before {
            self.events.push(EngineEvent::Sealed { id, tokens: sealed });
        }
        if let Some(choice) = choice {
            self.accept(id, choice);
        }
    }

    /// Takes the log-probabilities of the tokens that follow `positions` from the logits, from row `first_row` on.
    fn report_prompt(
        &mut self,
        id: SequenceId,
        positions: Range<usize>,
        first_row: usize,
    ) -> Result<(), Error> {
        let Sequence { spec, report, .. } = self.scheduler.planned(id);
        let (Some(report), Some(count)) = (report, spec.sampling.prompt_logprobs) else { return Ok(()) };
        for (row, position) in (first_row..).zip(positions) {
            let token = spec.tokens[position + 1];
            let (logprob, top) = self
                .sampler
                .logprobs(self.logits.row(row), token, count as usize)
                .map_err(|error| refused(position + 1, spec.generated, error))?;
            report.logprobs.push(PromptLogprobs { token: TokenLogprob { id: token, logprob }, top });
        }
        Ok(())
    }

    /// Chooses the sequence's next token from a row of the logits.
    fn choose(&mut self, id: SequenceId, row: usize) -> Result<Choice, Error> {
        let sequence = self.scheduler.planned(id);
        let mut allowed = None;
        if let Some(follower) = &mut sequence.follower {
            follower.allowed(&mut self.mask).map_err(|fault| grammar::failed(&fault))?;
            allowed = Some(self.mask.words());
        }
        let (spec, mut position) = (&sequence.spec, sequence.spec.tokens.len());
        if planted::is(Bug::RandomByAttempt) {
            position = spec.generated - sequence.generated_before;
        }
        let history = History { tokens: &spec.tokens, generated: spec.generated, position };
        let rules = Rules { sampling: &spec.sampling, stop: &spec.stop, allowed };
        self.sampler
            .choose(self.logits.row(row), history, rules)
            .map_err(|error| refused(position, spec.generated, error))
    }

    /// Appends the chosen token, and ends the sequence if the token does.
    fn accept(&mut self, id: SequenceId, choice: Choice) {
        let sequence = self.scheduler.planned(id);
        let finish = match sequence.end_with(choice.token, self.model.context_len()) {
            Ok(finish) => finish,
            Err(fault) => return self.fail(id, grammar::failed(&fault)),
        };
        let held = sequence.state == State::Held;
        let cached_tokens = sequence.cached;
        let prompt = sequence.report.take().map(|report| Box::new(PromptReport { cached_tokens, ..*report }));
        let index = self.scheduler.push(id, choice.token);
        self.events.push(EngineEvent::Token {
            id,
            index,
            token: choice.token,
            logprob: choice.logprob,
            top: choice.top,
            prompt,
            finish,
        });
        if finish.is_some() && !held {
            self.scheduler.remove(id);
        }
    }

    /// Ends a sequence that cannot go on. What it computed is not to be trusted, unless the request is at fault.
    fn fail(&mut self, id: SequenceId, error: Error) {
        if error.reason != Reason::InvalidArgument {
            self.scheduler.forget_blocks(id);
        }
        self.scheduler.remove(id);
        self.events.push(EngineEvent::Failed { id, error });
    }

    /// Takes the checksums of blocks (indices into the block table) whose last token was just written.
    pub(crate) fn seal_full(&mut self, id: SequenceId, blocks: Range<usize>) {
        let sequence = self.scheduler.planned(id);
        // Nobody can ask for the checksums of blocks that are neither held nor cached.
        if !sequence.is_for_hold() && sequence.hashes.is_empty() {
            return;
        }
        let blocks = sequence.blocks[blocks].to_vec();
        let tokens = self.layout().block_tokens;
        for block in blocks {
            self.scheduler.pool.seal(block, slab::read(&self.kv, block, tokens, &mut self.scratch));
        }
    }

    /// Takes the checksums of the last block of a complete sequence, if it is partial.
    pub(crate) fn seal_tail(&mut self, id: SequenceId) {
        let block_tokens = self.layout().block_tokens;
        let sequence = self.scheduler.planned(id);
        let tokens = sequence.computed % block_tokens;
        if tokens > 0 {
            let block = sequence.blocks[sequence.computed / block_tokens];
            self.scheduler.pool.seal(block, slab::read(&self.kv, block, tokens, &mut self.scratch));
        }
    }

    /// KV blocks by state.
    pub fn kv_counts(&self) -> KvCounts {
        self.scheduler.kv_counts()
    }

    /// How often a sequence lost its blocks to an older one.
    pub fn preemptions(&self) -> u64 {
        self.scheduler.preemptions()
    }

    /// Sequences by state.
    pub fn sequence_counts(&self) -> SequenceCounts {
        self.scheduler.sequence_counts()
    }

    /// Tokens by what is to be done with them.
    pub fn token_counts(&self) -> TokenCounts {
        self.scheduler.token_counts()
    }

    /// Notes, from now on, which blocks enter and leave the prefix cache: at most `bound` changes until they are taken.
    /// `None` notes nothing, which costs nothing.
    pub fn follow_blocks(&mut self, bound: Option<usize>) {
        self.scheduler.pool.follow(bound);
    }

    /// Appends the changes that were noted since they were taken last. False when there were more than the bound; then
    /// only [`Self::known_blocks`] tells what is there.
    pub fn take_block_changes(&mut self, out: &mut Vec<BlockChange>) -> bool {
        self.scheduler.pool.take_changes(out)
    }

    /// The names of all blocks that the prefix cache has, in no order that means anything.
    pub fn known_blocks(&self) -> Vec<BlockHash> {
        self.scheduler.pool.known()
    }

    /// How many tokens at the front of `tokens` the prefix cache has the KV of.
    pub fn cached_tokens(&self, tokens: &[TokenId]) -> usize {
        self.scheduler.cached_tokens(tokens)
    }

    /// Checks the block accounting: `free + cached + used == total`, no block in two states, as many owners as
    /// block tables. The message names the first block or sequence that is wrong.
    pub fn check(&self) -> Result<(), String> {
        self.scheduler.check()?;
        if self.arrivals.len() != self.scheduler.sequence_counts().reserved {
            return Err(format!("{} imports under way, other than reserved sequences", self.arrivals.len()));
        }
        Ok(())
    }

    fn assert_consistent(&self) {
        if cfg!(debug_assertions)
            && let Err(fault) = self.check()
        {
            panic!("block accounting: {fault}");
        }
    }
}

/// Why logits gave no token, or no log-probability, at `position` of a sequence with `generated` tokens of output.
fn refused(position: usize, generated: usize, error: NoChoice) -> Error {
    match error {
        NoChoice::NotFinite { .. } => {
            Error::new(Reason::Internal, format!("sampling position {position}: {error}"))
        }
        NoChoice::NothingLeft => {
            Error::invalid("sampling", format_args!("token {generated} of the output: {error}"))
        }
    }
}
