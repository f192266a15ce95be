//! Continuous batching and chunked prefill by one rule: advance each sequence's computed tokens towards its known
//! tokens, within the step's budgets of tokens and sequences.
//!
//! A decode step is a chunk of one token, a prefill is cut into as many chunks as the budget asks for, and a
//! preempted sequence is one whose computed tokens went back to what the prefix cache has. The order within a
//! step:
//!
//! 1. Decodes, the longest unserved first, so that no prefill delays them.
//! 2. Prefills under way, the oldest first.
//! 3. Admissions with what is left: preempted sequences, the oldest first, then waiting ones as they came.
//!
//! Admission takes the blocks of all known tokens at once, so a prefill that started never runs out of them.
//! Only decodes grow, by a block at a time. One that finds no block preempts the youngest decode there is, perhaps
//! itself; held and reserved sequences, and those computed to be held, are never preempted. The oldest decode
//! therefore always advances, unless others' holds and reservations take all room; then it waits for them to end.
//! A sequence that needs more blocks than there are fails.
//!
//! The scheduler knows neither model nor logits. It gives out a [`Plan`] and is told how it went.

mod prefix;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;

use proto::{Error, HashChain, Reason, TokenId};

use crate::batch::{Batch, Chunk};
use crate::engine::EngineConfig;
use crate::kv::BlockPool;
use crate::report::{KvCounts, SequenceCounts, TokenCounts};
use crate::sequence::{Sequence, SequenceId, SequenceSpec, State};
pub(crate) use prefix::BlockCopy;
use prefix::Prefix;

/// Most tokens of prompts in a step whose logits are wanted for their log-probabilities: 64 rows of 49,152 logits take
/// 12.6 MB. Prompts that ask for them are computed in chunks no longer than this.
const PROMPT_ROWS_MAX: usize = 64;

/// Tokens of one sequence to be computed in a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Work {
    pub(crate) id: SequenceId,
    /// Positions in the sequence.
    pub(crate) tokens: Range<usize>,
}

/// A step, before it is computed.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    pub(crate) work: Vec<Work>,
    /// Sequences that can never get the blocks they need; gone already.
    pub(crate) failed: Vec<(SequenceId, Error)>,
}

/// What a step may still take.
#[derive(Clone, Copy, Debug)]
struct Budget {
    tokens: usize,
    /// Tokens of prompts whose logits are wanted.
    prompt_rows: usize,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Scheduler {
    config: EngineConfig,
    pub(crate) pool: BlockPool,
    /// Names blocks for the prefix cache; `None` when there is none.
    chain: Option<HashChain>,
    sequences: BTreeMap<SequenceId, Sequence>,
    next_id: u64,
    waiting: VecDeque<SequenceId>,
    preempted: BTreeSet<SequenceId>,
    /// How often a sequence was preempted.
    preemptions: u64,
    /// The longest unserved first.
    running: Vec<SequenceId>,
    reserved: BTreeSet<SequenceId>,
    /// Copies that are due, in order.
    copies: Vec<BlockCopy>,
}

impl Scheduler {
    pub(crate) fn new(config: EngineConfig) -> Self {
        Self {
            pool: BlockPool::new(config.kv_blocks),
            chain: config.prefix_cache.then(|| HashChain::new(config.prefix_seed, config.block_tokens)),
            sequences: BTreeMap::new(),
            next_id: 0,
            waiting: VecDeque::new(),
            preempted: BTreeSet::new(),
            preemptions: 0,
            running: Vec::new(),
            reserved: BTreeSet::new(),
            copies: Vec::new(),
            config,
        }
    }

    pub(crate) fn get(&self, id: SequenceId) -> Option<&Sequence> {
        self.sequences.get(&id)
    }

    /// A sequence of the plan under way.
    pub(crate) fn planned(&mut self, id: SequenceId) -> &mut Sequence {
        self.sequences.get_mut(&id).expect("a planned sequence lives until its step ends")
    }

    /// Appends a generated token to a sequence of the plan, or one about to be activated. Returns its generated
    /// index.
    pub(crate) fn push(&mut self, id: SequenceId, token: TokenId) -> usize {
        let sequence = self.sequences.get_mut(&id).expect("only living sequences get tokens");
        sequence.push(token, self.chain.as_ref())
    }

    fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.config.block_tokens)
    }

    /// Refuses a sequence that needs more blocks for `tokens` tokens than there are.
    fn check_fits(&self, tokens: usize) -> Result<(), Error> {
        let (needed, total) = (self.blocks_for(tokens), self.pool.total());
        if needed <= total {
            return Ok(());
        }
        let message = format_args!(
            "{tokens} tokens need {needed} kv blocks of {} tokens, {total} are there",
            self.config.block_tokens
        );
        Err(Error::invalid("tokens", message))
    }

    fn insert(&mut self, spec: SequenceSpec, state: State) -> SequenceId {
        let id = SequenceId(self.next_id);
        self.next_id += 1;
        let mut sequence = Sequence::new(id, spec, state);
        sequence.extend_hashes(self.chain.as_ref());
        self.sequences.insert(id, sequence);
        id
    }

    /// Queues a sequence.
    pub(crate) fn submit(&mut self, spec: SequenceSpec) -> Result<SequenceId, Error> {
        self.check_fits(spec.tokens.len())?;
        if self.waiting.len() >= self.config.waiting_max {
            let message = format!("{} sequences wait already, which is the bound", self.waiting.len());
            return Err(Error::new(Reason::QueueFull, message));
        }
        let id = self.insert(spec, State::Waiting);
        self.waiting.push_back(id);
        Ok(id)
    }

    /// Gives a sequence blocks for all its tokens and one more, to be filled by import.
    ///
    /// A reservation is refused rather than queued, and it never overtakes: it leaves room for the sequences that
    /// were preempted, for the first that waits, and for each running decode to grow by a block.
    pub(crate) fn reserve(&mut self, spec: SequenceSpec) -> Result<SequenceId, Error> {
        let len = spec.tokens.len();
        self.check_fits(len + 1)?;
        let next = self.waiting.front();
        let active = self.running.len() + self.reserved.len() + self.preempted.len();
        if active + usize::from(next.is_some()) >= self.config.sequences_max {
            let message = format!("{active} of {} sequences are active", self.config.sequences_max);
            return Err(Error::new(Reason::QueueFull, message));
        }
        let queued = self.preempted.iter().chain(next);
        let headroom: usize = queued.map(|id| self.blocks_for(self.sequences[id].len())).sum();
        let id = self.insert(spec, State::Reserved);
        if !self.take_blocks(id, len, len + 1, headroom + self.growing()) {
            self.sequences.remove(&id);
            let message = format!(
                "{len} tokens and one more need up to {} kv blocks, {} are available and {} of them spoken for",
                self.blocks_for(len + 1),
                self.pool.available(),
                headroom + self.growing()
            );
            return Err(Error::new(Reason::OutOfBlocks, message));
        }
        self.reserved.insert(id);
        Ok(id)
    }

    /// A reserved sequence whose KV is complete starts to run.
    pub(crate) fn activate(&mut self, id: SequenceId) {
        self.reserved.remove(&id);
        self.running.push(id);
        self.planned(id).state = State::Running;
    }

    /// Running sequences that may ask for another block.
    fn growing(&self) -> usize {
        self.running.iter().filter(|id| !self.sequences[id].is_for_hold()).count()
    }

    /// True when `take_blocks` would succeed.
    fn can_take(&self, prefix: &Prefix, tokens: usize, headroom: usize) -> bool {
        let needed = self.blocks_for(tokens) - prefix.shared.len();
        self.pool.available() >= self.pool.unowned(&prefix.shared) + needed + headroom
    }

    /// Gives a sequence without blocks those for `tokens` tokens, with what is here of the first `share` of them, if
    /// `headroom` blocks stay available. All or nothing.
    fn take_blocks(&mut self, id: SequenceId, share: usize, tokens: usize, headroom: usize) -> bool {
        let prefix = self.prefix(&self.sequences[&id], share);
        if !self.can_take(&prefix, tokens, headroom) {
            return false;
        }
        let Prefix { shared: mut blocks, tail, tokens: computed } = prefix;
        // Shared first: only then can the allocations not evict them.
        for &block in &blocks {
            self.pool.share(block);
        }
        let first = blocks.len();
        while blocks.len() < self.blocks_for(tokens) {
            blocks.push(self.pool.allocate().expect("as many blocks are available as were counted"));
        }
        // The block to copy from may just have been evicted, even for this sequence, and hold its KV still: copies come
        // before all writes, in the order in which they were planned.
        self.copies.extend(tail.map(|from| BlockCopy { from, to: blocks[first] }));
        let sequence = self.planned(id);
        sequence.blocks = blocks;
        sequence.computed = computed;
        if !sequence.announced {
            sequence.cached = computed;
        }
        true
    }

    /// What the next admission would be, and whether there is room for it.
    fn next_admission(&self) -> Option<SequenceId> {
        if self.running.len() + self.reserved.len() >= self.config.sequences_max {
            return None;
        }
        let &id = self.preempted.first().or(self.waiting.front())?;
        let sequence = &self.sequences[&id];
        // The last token is always computed: its logits are wanted.
        let prefix = self.prefix(sequence, sequence.len() - 1);
        self.can_take(&prefix, sequence.len(), self.growing()).then_some(id)
    }

    /// How often a sequence lost its blocks to an older one.
    pub(crate) fn preemptions(&self) -> u64 {
        self.preemptions
    }

    /// True when the next plan has work in it, or preempts or fails a sequence.
    pub(crate) fn has_work(&self) -> bool {
        !self.running.is_empty() || self.next_admission().is_some()
    }

    /// Decides what the next step computes.
    pub(crate) fn plan(&mut self) -> Plan {
        let mut plan = Plan::default();
        self.grow_decodes(&mut plan);
        let mut budget = Budget { tokens: self.config.step_tokens, prompt_rows: PROMPT_ROWS_MAX };
        self.plan_decodes(&mut plan, &mut budget);
        let mut prefills = self.running.clone();
        prefills.retain(|id| self.sequences[id].remaining() > 1);
        prefills.sort_unstable();
        for id in prefills {
            self.plan_chunk(id, &mut plan, &mut budget);
        }
        while budget.tokens > 0 {
            let Some(id) = self.next_admission() else { break };
            self.admit(id);
            self.plan_chunk(id, &mut plan, &mut budget);
        }
        plan
    }

    fn plan_chunk(&self, id: SequenceId, plan: &mut Plan, budget: &mut Budget) {
        let sequence = &self.sequences[&id];
        let (first, mut len) = (sequence.computed, sequence.remaining().min(budget.tokens));
        if !sequence.prompt_rows(&(first..first + len)).is_empty() {
            len = len.min(budget.prompt_rows);
        }
        if len > 0 {
            let tokens = first..first + len;
            budget.tokens -= len;
            budget.prompt_rows -= sequence.prompt_rows(&tokens).len();
            plan.work.push(Work { id, tokens });
        }
    }

    /// Plans decodes within the budget; those served go to the end of the line.
    fn plan_decodes(&mut self, plan: &mut Plan, budget: &mut Budget) {
        let (mut served, mut line) = (Vec::new(), Vec::with_capacity(self.running.len()));
        for &id in &self.running {
            if self.sequences[&id].remaining() == 1 && budget.tokens > 0 {
                self.plan_chunk(id, plan, budget);
                served.push(id);
            } else {
                line.push(id);
            }
        }
        line.append(&mut served);
        self.running = line;
    }

    /// Gives every running decode a block for its next token, the oldest first.
    fn grow_decodes(&mut self, plan: &mut Plan) {
        let mut by_age = self.running.clone();
        by_age.sort_unstable();
        for id in by_age {
            if self.sequences[&id].state == State::Running {
                self.grow(id, plan);
            }
        }
    }

    fn grow(&mut self, id: SequenceId, plan: &mut Plan) {
        let len = self.sequences[&id].len();
        let needed = self.blocks_for(len);
        if needed > self.pool.total() {
            let message =
                format!("{len} tokens need {needed} kv blocks, {} are there in all", self.pool.total());
            plan.failed.push((id, Error::new(Reason::OutOfBlocks, message)));
            return self.remove(id);
        }
        // Admission and reservation give all known tokens their blocks, so at most one is missing.
        while self.sequences[&id].blocks.len() < needed {
            if let Some(block) = self.pool.allocate() {
                self.planned(id).blocks.push(block);
                continue;
            }
            let victim = self.youngest_decode().unwrap_or(id);
            self.preempt(victim);
            if victim == id {
                return;
            }
        }
    }

    fn youngest_decode(&self) -> Option<SequenceId> {
        self.running.iter().copied().filter(|id| !self.sequences[id].is_for_hold()).max()
    }

    fn preempt(&mut self, id: SequenceId) {
        self.free_blocks(id);
        self.running.retain(|&other| other != id);
        self.preempted.insert(id);
        self.preemptions += 1;
        let sequence = self.planned(id);
        sequence.state = State::Preempted;
        sequence.computed = 0;
    }

    fn admit(&mut self, id: SequenceId) {
        let len = self.sequences[&id].len();
        let taken = self.take_blocks(id, len - 1, len, 0);
        debug_assert!(taken, "admission was found possible");
        if !self.preempted.remove(&id) {
            self.waiting.pop_front();
        }
        self.running.push(id);
        self.planned(id).state = State::Running;
    }

    /// A sequence computed to be held is complete.
    pub(crate) fn hold(&mut self, id: SequenceId) {
        self.running.retain(|&other| other != id);
        self.planned(id).state = State::Held;
    }

    /// Drops a sequence in any state. Blocks that the prefix cache knows stay there.
    pub(crate) fn remove(&mut self, id: SequenceId) {
        self.free_blocks(id);
        let Some(sequence) = self.sequences.remove(&id) else { return };
        match sequence.state {
            State::Waiting => self.waiting.retain(|&other| other != id),
            State::Running => self.running.retain(|&other| other != id),
            State::Preempted => drop(self.preempted.remove(&id)),
            State::Reserved => drop(self.reserved.remove(&id)),
            State::Held => {}
        }
    }

    fn free_blocks(&mut self, id: SequenceId) {
        let Some(sequence) = self.sequences.get_mut(&id) else { return };
        // From the end, so that eviction takes the end of a prefix before its beginning.
        for block in std::mem::take(&mut sequence.blocks).into_iter().rev() {
            self.pool.release(block);
        }
    }

    /// Makes the blocks of a sequence unknown to the prefix cache: their KV is not to be trusted.
    pub(crate) fn forget_blocks(&mut self, id: SequenceId) {
        let Some(sequence) = self.sequences.get(&id) else { return };
        sequence.blocks.iter().for_each(|&block| self.pool.forget(block));
    }

    /// Enters the full blocks among `blocks` (indices into the block table) into the prefix cache.
    pub(crate) fn publish(&mut self, id: SequenceId, blocks: Range<usize>) {
        let Some(sequence) = self.sequences.get(&id) else { return };
        let named = sequence.blocks.iter().zip(&sequence.hashes);
        for (&block, &hash) in named.take(blocks.end).skip(blocks.start) {
            self.pool.publish(block, hash);
        }
    }

    /// The plan as a batch.
    pub(crate) fn batch(&self, plan: &Plan) -> Batch {
        let mut batch = Batch::default();
        for Work { id, tokens } in &plan.work {
            let sequence = &self.sequences[id];
            let (first_token, first_block) = (batch.tokens.len(), batch.block_tables.len());
            batch.tokens.extend_from_slice(&sequence.spec.tokens[tokens.clone()]);
            batch.positions.extend(tokens.clone().map(|position| position as u32));
            batch.slots.extend(tokens.clone().map(|position| {
                let block = sequence.blocks[position / self.config.block_tokens] as usize;
                (block * self.config.block_tokens + position % self.config.block_tokens) as u32
            }));
            batch.block_tables.extend_from_slice(&sequence.blocks[..self.blocks_for(tokens.end)]);
            batch.chunks.push(Chunk {
                tokens: first_token..batch.tokens.len(),
                block_table: first_block..batch.block_tables.len(),
            });
            let row = |position: usize| (first_token + position - tokens.start) as u32;
            batch.logit_rows.extend(sequence.prompt_rows(tokens).map(row));
            if tokens.end == sequence.len() {
                batch.logit_rows.push(row(tokens.end - 1));
            }
        }
        batch
    }

    /// How many tokens of `tokens` the prefix cache has.
    pub(crate) fn cached_tokens(&self, tokens: &[TokenId]) -> usize {
        let Some(chain) = &self.chain else { return 0 };
        self.pool.find(&chain.of(tokens)).len() * self.config.block_tokens
    }

    pub(crate) fn kv_counts(&self) -> KvCounts {
        let mut is_held = vec![false; self.pool.total()];
        for sequence in self.sequences.values().filter(|sequence| sequence.is_for_hold()) {
            sequence.blocks.iter().for_each(|&block| is_held[block as usize] = true);
        }
        let (total, free, cached) = (self.pool.total(), self.pool.free(), self.pool.cached());
        KvCounts {
            total,
            free,
            cached,
            used: total - free - cached,
            held: is_held.into_iter().filter(|&held| held).count(),
        }
    }

    pub(crate) fn sequence_counts(&self) -> SequenceCounts {
        let held = self.sequences.values().filter(|sequence| sequence.state == State::Held);
        SequenceCounts {
            waiting: self.waiting.len(),
            running: self.running.len(),
            preempted: self.preempted.len(),
            reserved: self.reserved.len(),
            held: held.count(),
        }
    }

    pub(crate) fn token_counts(&self) -> TokenCounts {
        let mut counts = TokenCounts::default();
        for sequence in self.sequences.values() {
            match sequence.state {
                State::Waiting | State::Preempted => counts.waiting += sequence.remaining(),
                State::Running => {
                    counts.waiting += sequence.remaining();
                    counts.running += sequence.computed;
                }
                State::Reserved | State::Held => {}
            }
        }
        counts
    }

    /// Checks that blocks and sequences are in exactly one state each, and that every block has as many owners as
    /// block tables it is in.
    pub(crate) fn check(&self) -> Result<(), String> {
        let owned = self.sequences.values().flat_map(|sequence| sequence.blocks.iter().copied());
        self.pool.check(owned)?;
        for sequence in self.sequences.values() {
            let id = sequence.id;
            let listed = match sequence.state {
                State::Waiting => self.waiting.contains(&id),
                State::Preempted => self.preempted.contains(&id),
                State::Running => self.running.contains(&id),
                State::Reserved => self.reserved.contains(&id),
                State::Held => true,
            };
            let owns = !matches!(sequence.state, State::Waiting | State::Preempted);
            if !listed || owns == sequence.blocks.is_empty() {
                return Err(format!(
                    "sequence {id}: {:?} and {} blocks",
                    sequence.state,
                    sequence.blocks.len()
                ));
            }
            if sequence.blocks.len() < self.blocks_for(sequence.computed) {
                return Err(format!(
                    "sequence {id}: {} tokens computed in too few blocks",
                    sequence.computed
                ));
            }
        }
        let counts = self.sequence_counts();
        let in_lists = counts.waiting + counts.running + counts.preempted + counts.reserved + counts.held;
        if in_lists != self.sequences.len() {
            return Err(format!("{} sequences, {in_lists} in lists", self.sequences.len()));
        }
        let kv = self.kv_counts();
        if kv.free + kv.cached + kv.used != kv.total || kv.held > kv.used {
            return Err(format!("kv blocks do not add up: {kv:?}"));
        }
        Ok(())
    }
}
