//! A worker without its tokens: the engine's rules of batching, chunked prefill, admission, reservation and preemption,
//! with a price in place of arithmetic.
//!
//! The order within a step is the engine's (`engine/src/scheduler.rs`): decodes, prefills under way, then admissions,
//! preempted sequences before waiting ones. Since a step has room for all decodes (`sequences_max` is at most
//! `step_tokens`), nobody waits among them.

use std::collections::VecDeque;
use std::sync::Arc;

use proto::{Reason, Role, WorkerEpoch};

use super::blocks::{BlockName, Blocks, Change};
use crate::machine::{Machine, StepWork};

/// An attempt of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Job {
    pub(crate) request: u32,
    pub(crate) attempt: u32,
}

/// What becomes of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Until {
    /// Computed to its first token, then held until released.
    Held,
    /// To its end, the prompt computed here.
    Finished,
    /// To its end, the prompt's KV taken over.
    TakenOver,
}

/// A sequence as it comes.
#[derive(Clone, Debug)]
pub(crate) struct Spec {
    pub(crate) job: Job,
    pub(crate) until: Until,
    /// Tokens known.
    pub(crate) len: usize,
    /// Tokens at its end.
    pub(crate) end: usize,
    /// Names of its full blocks, to the end.
    pub(crate) names: Arc<[BlockName]>,
}

/// What a step has brought.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum News {
    /// The first chunk of a sequence to be held was computed; so many tokens were cached.
    Issued { job: Job, cached: usize },
    /// The same for one that is computed to its end here.
    Started { job: Job, cached: usize },
    /// A sequence to be held has KV of so many tokens.
    Computed { job: Job, tokens: usize },
    /// The first token that this worker makes of a sequence: how long it waited to be computed, and was computed.
    First { job: Job, is_last: bool, cached: usize, waited: f64, took: f64 },
    /// One of the first tokens after a hand-off.
    Next { job: Job },
    /// The last token.
    Last { job: Job },
    /// A sequence needs more blocks than there are.
    TooLong { job: Job },
}

#[derive(Debug)]
struct Sequence {
    spec: Spec,
    /// Orders sequences by their coming.
    age: u64,
    len: usize,
    computed: usize,
    /// Blocks with names that it owns, from the first on.
    named: usize,
    /// Blocks without.
    nameless: usize,
    /// Tokens of the running step.
    chunk: usize,
    /// Its first chunk is behind it.
    is_started: bool,
    /// It has made a token here.
    is_decoding: bool,
    cached: usize,
    /// When it came, and when its first chunk began, seconds.
    came: f64,
    began: f64,
    /// Tokens made after a hand-off.
    made: usize,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Worker {
    pub(crate) role: Role,
    machine: Machine,
    blocks: Blocks,
    waiting: VecDeque<Sequence>,
    /// In the order of their age.
    running: Vec<Sequence>,
    preempted: Vec<Sequence>,
    reserved: Vec<Sequence>,
    held: Vec<Sequence>,
    ages: u64,
    is_stepping: bool,
    failed: Vec<Job>,
    /// Its life, which never ends here.
    pub(crate) epoch: WorkerEpoch,
    /// Time in steps, seconds.
    pub(crate) busy: f64,
    /// Sequences that had to make room.
    pub(crate) preemptions: u64,
    /// When what it sends and receives has gone, seconds.
    pub(crate) sends_until: f64,
    pub(crate) receives_until: f64,
    /// The present, seconds.
    pub(crate) now: f64,
}

/// What a worker has to do now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Gauges {
    pub(crate) running: usize,
    pub(crate) waiting: usize,
    pub(crate) blocks_free: usize,
    /// Tokens whose KV is to be computed.
    pub(crate) waiting_tokens: usize,
    /// Tokens of the sequences that run.
    pub(crate) running_tokens: usize,
}

impl Worker {
    pub(crate) fn new(role: Role, index: u32, machine: Machine) -> Self {
        Self {
            role,
            machine,
            blocks: Blocks::new(machine.sizes.kv_blocks),
            waiting: VecDeque::new(),
            running: Vec::new(),
            preempted: Vec::new(),
            reserved: Vec::new(),
            held: Vec::new(),
            ages: 0,
            is_stepping: false,
            failed: Vec::new(),
            epoch: WorkerEpoch(u64::from(index) + 1),
            busy: 0.0,
            preemptions: 0,
            sends_until: 0.0,
            receives_until: 0.0,
            now: 0.0,
        }
    }

    pub(crate) fn gauges(&self) -> Gauges {
        let remaining = |sequence: &Sequence| sequence.len - sequence.computed;
        let prefills = self.running.iter().filter(|sequence| remaining(sequence) > 1);
        let queued = self.waiting.iter().chain(&self.preempted);
        Gauges {
            running: self.running.len() + self.reserved.len(),
            waiting: self.waiting.len() + self.preempted.len(),
            blocks_free: self.blocks.available(),
            waiting_tokens: queued.chain(prefills).map(remaining).sum(),
            running_tokens: self.running.iter().chain(&self.reserved).map(|sequence| sequence.len).sum(),
        }
    }

    /// Changes of the prefix cache are noted from now on.
    pub(crate) fn note_changes(&mut self) {
        self.blocks.note_changes();
    }

    /// Changes of the prefix cache since it was asked last.
    pub(crate) fn take_changes(&mut self) -> Vec<Change> {
        self.blocks.take_changes()
    }

    fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.machine.sizes.block_tokens)
    }

    fn sequence(&mut self, spec: Spec) -> Sequence {
        self.ages += 1;
        let len = spec.len;
        Sequence {
            spec,
            age: self.ages,
            len,
            computed: 0,
            named: 0,
            nameless: 0,
            chunk: 0,
            is_started: false,
            is_decoding: false,
            cached: 0,
            came: self.now,
            began: self.now,
            made: 0,
        }
    }

    /// Queues a sequence, or says why not.
    pub(crate) fn submit(&mut self, spec: Spec) -> Result<(), Reason> {
        if self.blocks_for(spec.len) > self.blocks.total() {
            return Err(Reason::InvalidArgument);
        }
        if self.waiting.len() >= self.machine.sizes.waiting_max {
            return Err(Reason::QueueFull);
        }
        let sequence = self.sequence(spec);
        self.waiting.push_back(sequence);
        Ok(())
    }

    /// Gives a sequence room for the KV that it takes over, or says why not. `Ok` has the tokens that are here already.
    pub(crate) fn reserve(&mut self, spec: Spec) -> Result<usize, Reason> {
        let len = spec.len;
        if self.blocks_for(len + 1) > self.blocks.total() {
            return Err(Reason::InvalidArgument);
        }
        let next = self.waiting.front();
        let active = self.running.len() + self.reserved.len() + self.preempted.len();
        if active + usize::from(next.is_some()) >= self.machine.sizes.sequences_max {
            return Err(Reason::QueueFull);
        }
        let queued = self.preempted.iter().chain(next);
        let headroom: usize =
            queued.map(|sequence| self.blocks_for(sequence.len)).sum::<usize>() + self.growing();
        let mut sequence = self.sequence(spec);
        if !self.take_blocks(&mut sequence, len, len + 1, headroom) {
            return Err(Reason::OutOfBlocks);
        }
        let skipped = sequence.computed;
        self.reserved.push(sequence);
        Ok(skipped)
    }

    /// The KV of a reserved sequence is complete, and its first token known.
    pub(crate) fn activate(&mut self, job: Job) {
        let Some(at) = self.reserved.iter().position(|sequence| sequence.spec.job == job) else { return };
        let mut sequence = self.reserved.swap_remove(at);
        sequence.computed = sequence.len;
        sequence.len += 1;
        sequence.is_started = true;
        sequence.is_decoding = true;
        self.name_full_blocks(&mut sequence);
        self.run(sequence);
    }

    /// Adds to the running sequences, which are in the order of age.
    fn run(&mut self, sequence: Sequence) {
        let at = self.running.partition_point(|other| other.age < sequence.age);
        self.running.insert(at, sequence);
    }

    /// Drops the sequence of that request, if its attempt is not above; where it is, whatever it does.
    pub(crate) fn cancel(&mut self, job: Job) {
        let is_meant = |sequence: &Sequence| {
            sequence.spec.job.request == job.request && sequence.spec.job.attempt <= job.attempt
        };
        if let Some(at) = self.waiting.iter().position(is_meant) {
            self.waiting.remove(at);
        }
        for list in [&mut self.running, &mut self.preempted, &mut self.reserved, &mut self.held] {
            while let Some(at) = list.iter().position(is_meant) {
                let mut sequence = list.remove(at);
                give_back(&mut self.blocks, &mut sequence);
            }
        }
    }

    /// Running sequences that may ask for another block.
    fn growing(&self) -> usize {
        self.running.iter().filter(|sequence| sequence.spec.until != Until::Held).count()
    }

    /// Blocks of the first `share` tokens that are here.
    fn shared(&self, sequence: &Sequence, share: usize) -> usize {
        let full = (share / self.machine.sizes.block_tokens).min(sequence.spec.names.len());
        self.blocks.find(&sequence.spec.names[..full])
    }

    fn can_take(&self, sequence: &Sequence, shared: usize, tokens: usize, headroom: usize) -> bool {
        let needed = self.blocks_for(tokens) - shared;
        self.blocks.available() >= self.blocks.unowned(&sequence.spec.names[..shared]) + needed + headroom
    }

    fn take_blocks(&mut self, sequence: &mut Sequence, share: usize, tokens: usize, headroom: usize) -> bool {
        let shared = self.shared(sequence, share);
        if !self.can_take(sequence, shared, tokens, headroom) {
            return false;
        }
        self.blocks.share(&sequence.spec.names[..shared]);
        sequence.named = shared;
        sequence.nameless = self.blocks_for(tokens) - shared;
        for _ in 0..sequence.nameless {
            let taken = self.blocks.allocate();
            debug_assert!(taken, "as many blocks are available as were counted");
        }
        sequence.computed = shared * self.machine.sizes.block_tokens;
        if !sequence.is_started {
            sequence.cached = sequence.computed;
        }
        true
    }

    fn name_full_blocks(&mut self, sequence: &mut Sequence) {
        let full = (sequence.computed / self.machine.sizes.block_tokens).min(sequence.spec.names.len());
        while sequence.named < full && sequence.nameless > 0 {
            self.blocks.name(sequence.spec.names[sequence.named]);
            sequence.named += 1;
            sequence.nameless -= 1;
        }
    }

    /// Starts a step if there is something to do and none runs: how long it takes, seconds.
    pub(crate) fn start_step(&mut self) -> Option<f64> {
        if self.is_stepping {
            return None;
        }
        self.grow_decodes();
        let mut budget = self.machine.sizes.step_tokens;
        let mut work = StepWork::default();
        for sequence in &mut self.running {
            sequence.chunk = 0;
            if sequence.len - sequence.computed == 1 {
                sequence.chunk = 1;
                budget = budget.saturating_sub(1);
                work.add_decode(sequence.computed);
            }
        }
        for sequence in &mut self.running {
            if sequence.chunk == 0 {
                plan_chunk(sequence, &mut budget, &mut work, self.now);
            }
        }
        while budget > 0 {
            let Some(mut sequence) = self.admit() else { break };
            plan_chunk(&mut sequence, &mut budget, &mut work, self.now);
            self.run(sequence);
        }
        if work == StepWork::default() && self.failed.is_empty() {
            return None;
        }
        self.is_stepping = true;
        let seconds = self.machine.prices.step(&work);
        self.busy += seconds;
        Some(seconds)
    }

    /// Takes the next sequence off the queue, with its blocks, if it may run.
    fn admit(&mut self) -> Option<Sequence> {
        if self.running.len() + self.reserved.len() >= self.machine.sizes.sequences_max {
            return None;
        }
        let growing = self.growing();
        let oldest = (0..self.preempted.len()).min_by_key(|&at| self.preempted[at].age);
        let next = oldest.map_or_else(|| self.waiting.front(), |at| self.preempted.get(at))?;
        let (share, len) = (next.len - 1, next.len);
        if !self.can_take(next, self.shared(next, share), len, growing) {
            return None;
        }
        let mut sequence = match oldest {
            Some(at) => self.preempted.swap_remove(at),
            None => self.waiting.pop_front()?,
        };
        let taken = self.take_blocks(&mut sequence, share, len, 0);
        debug_assert!(taken, "admission was found possible");
        Some(sequence)
    }

    /// Gives every decode a block for its next token, the oldest first; the youngest makes room.
    fn grow_decodes(&mut self) {
        let mut at = 0;
        while at < self.running.len() {
            let sequence = &self.running[at];
            if self.blocks_for(sequence.len) <= sequence.named + sequence.nameless {
                at += 1;
            } else if self.blocks_for(sequence.len) > self.blocks.total() {
                let mut sequence = self.running.remove(at);
                give_back(&mut self.blocks, &mut sequence);
                self.failed.push(sequence.spec.job);
            } else if self.blocks.allocate() {
                self.running[at].nameless += 1;
                at += 1;
            } else {
                let youngest = self.running.iter().rposition(|sequence| sequence.spec.until != Until::Held);
                let victim = youngest.unwrap_or(at);
                let mut sequence = self.running.remove(victim);
                give_back(&mut self.blocks, &mut sequence);
                sequence.computed = 0;
                self.preemptions += 1;
                self.preempted.push(sequence);
            }
        }
    }

    /// Ends the step that runs; appends what it has brought.
    pub(crate) fn end_step(&mut self, news: &mut Vec<News>) {
        self.is_stepping = false;
        news.extend(self.failed.drain(..).map(|job| News::TooLong { job }));
        let mut running = std::mem::take(&mut self.running);
        running.retain_mut(|sequence| self.advance(sequence, news));
        self.running = running;
        for at in (0..self.running.len()).rev() {
            let sequence = &self.running[at];
            if sequence.spec.until == Until::Held && sequence.is_decoding {
                let sequence = self.running.remove(at);
                self.held.push(sequence);
            }
        }
    }

    /// What the step did to a sequence. False when it is over.
    fn advance(&mut self, sequence: &mut Sequence, news: &mut Vec<News>) -> bool {
        if sequence.chunk == 0 {
            return true;
        }
        sequence.computed += std::mem::take(&mut sequence.chunk);
        let job = sequence.spec.job;
        if sequence.computed / self.machine.sizes.block_tokens > sequence.named {
            self.name_full_blocks(sequence);
        }
        if !sequence.is_started {
            sequence.is_started = true;
            let cached = sequence.cached;
            news.push(match sequence.spec.until {
                Until::Held => News::Issued { job, cached },
                _ => News::Started { job, cached },
            });
        }
        if sequence.spec.until == Until::Held {
            news.push(News::Computed { job, tokens: sequence.computed });
        }
        if sequence.computed < sequence.len {
            return true;
        }
        sequence.len += 1;
        let is_last = sequence.len >= sequence.spec.end;
        if !sequence.is_decoding {
            sequence.is_decoding = true;
            let (waited, took) = (sequence.began - sequence.came, self.now - sequence.began);
            news.push(News::First { job, is_last, cached: sequence.cached, waited, took });
        } else if is_last {
            news.push(News::Last { job });
        } else if sequence.spec.until == Until::TakenOver && sequence.made < 2 {
            sequence.made += 1;
            news.push(News::Next { job });
        }
        if is_last && sequence.spec.until != Until::Held {
            give_back(&mut self.blocks, sequence);
            return false;
        }
        true
    }

    /// Checks that every block is somebody's or counted as free.
    #[cfg(test)]
    pub(crate) fn check(&self) {
        let lists = [&self.running, &self.preempted, &self.reserved, &self.held];
        self.blocks.check(lists.iter().flat_map(|list| list.iter()).map(|sequence| sequence.nameless).sum());
    }
}

fn plan_chunk(sequence: &mut Sequence, budget: &mut usize, work: &mut StepWork, now: f64) {
    let is_new = sequence.computed == sequence.cached && !sequence.is_started;
    sequence.chunk = (sequence.len - sequence.computed).min(*budget);
    *budget -= sequence.chunk;
    if sequence.chunk > 0 {
        if is_new {
            sequence.began = now;
        }
        work.add_chunk(sequence.computed, sequence.chunk);
    }
}

fn give_back(blocks: &mut Blocks, sequence: &mut Sequence) {
    blocks.release(&sequence.spec.names[..sequence.named], sequence.nameless);
    (sequence.named, sequence.nameless) = (0, 0);
}

#[cfg(test)]
mod tests {
    use proto::BlockHash;

    use super::*;

    fn worker(role: Role, kv_blocks: usize) -> Worker {
        let mut machine = Machine::preset("gpu-8b").unwrap();
        machine.prices.step_seconds = 1.0;
        machine.sizes.kv_blocks = kv_blocks;
        machine.sizes.block_tokens = 4;
        machine.sizes.step_tokens = 8;
        machine.sizes.sequences_max = 4;
        Worker::new(role, 0, machine)
    }

    fn spec(request: u32, until: Until, len: usize, output: usize) -> Spec {
        let name = |block| {
            BlockHash([request as u8, block, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, request as u8, block])
        };
        let names = (0..((len + output) / 4) as u8).map(name).collect();
        Spec { job: Job { request, attempt: 0 }, until, len, end: len + output, names }
    }

    /// Runs steps until nothing is left to do; each step's news.
    fn run(worker: &mut Worker) -> Vec<Vec<News>> {
        let mut steps = Vec::new();
        while worker.start_step().is_some() {
            let mut news = Vec::new();
            worker.end_step(&mut news);
            worker.check();
            steps.push(news);
        }
        steps
    }

    fn job(request: u32) -> Job {
        Job { request, attempt: 0 }
    }

    #[test]
    fn a_prefill_comes_in_chunks_and_is_held() {
        let mut worker = worker(Role::Prefill, 100);
        worker.submit(spec(1, Until::Held, 18, 5)).unwrap();
        let steps = run(&mut worker);
        let computed = |tokens| News::Computed { job: job(1), tokens };
        assert_eq!(steps[0], [News::Issued { job: job(1), cached: 0 }, computed(8)]);
        assert_eq!(steps[1], [computed(16)]);
        assert_eq!(
            steps[2],
            [computed(18), News::First { job: job(1), is_last: false, cached: 0, waited: 0.0, took: 0.0 }]
        );
        assert_eq!((steps.len(), worker.blocks.available()), (3, 95));
        worker.cancel(job(1));
        worker.check();
        assert_eq!(worker.blocks.available(), 100);
        // Four full blocks are cached.
        worker.submit(spec(1, Until::Held, 18, 5)).unwrap();
        assert_eq!(run(&mut worker)[0][0], News::Issued { job: job(1), cached: 16 });
    }

    #[test]
    fn decodes_go_on_beside_a_prefill() {
        let mut worker = worker(Role::Decode, 100);
        assert_eq!(worker.reserve(spec(1, Until::TakenOver, 10, 4)), Ok(0));
        assert!(worker.start_step().is_none(), "its kv is on its way");
        worker.activate(job(1));
        worker.submit(spec(2, Until::Finished, 14, 2)).unwrap();
        let steps = run(&mut worker);
        // One token of eight is the decode's, so the prompt takes two steps.
        assert_eq!(steps[0], [News::Next { job: job(1) }, News::Started { job: job(2), cached: 0 }]);
        assert_eq!(
            steps[1],
            [
                News::Next { job: job(1) },
                News::First { job: job(2), is_last: false, cached: 0, waited: 0.0, took: 0.0 }
            ]
        );
        assert_eq!(steps[2], [News::Last { job: job(1) }, News::Last { job: job(2) }]);
        assert_eq!((steps.len(), worker.blocks.available()), (3, 100));
    }

    #[test]
    fn the_youngest_makes_room_and_everybody_ends() {
        let mut worker = worker(Role::Decode, 8);
        for request in 1..=3 {
            worker.submit(spec(request, Until::Finished, 5, 14)).unwrap();
        }
        let lasts: Vec<Job> = run(&mut worker)
            .concat()
            .into_iter()
            .filter_map(|news| if let News::Last { job } = news { Some(job) } else { None })
            .collect();
        assert_eq!(lasts, [job(1), job(2), job(3)]);
        assert!(worker.preemptions > 0);
        assert_eq!(worker.blocks.available(), 8);
    }

    #[test]
    fn refusals_have_the_engines_reasons() {
        let mut worker = worker(Role::Decode, 8);
        assert_eq!(worker.reserve(spec(1, Until::TakenOver, 40, 1)), Err(Reason::InvalidArgument));
        assert_eq!(worker.submit(spec(1, Until::Finished, 40, 1)), Err(Reason::InvalidArgument));
        assert_eq!(worker.reserve(spec(1, Until::TakenOver, 22, 1)), Ok(0));
        assert_eq!(worker.reserve(spec(2, Until::TakenOver, 22, 1)), Err(Reason::OutOfBlocks));
        for request in 3..5 {
            assert_eq!(worker.reserve(spec(request, Until::TakenOver, 3, 1)), Ok(0));
        }
        worker.submit(spec(5, Until::Finished, 3, 1)).unwrap();
        assert_eq!(worker.reserve(spec(6, Until::TakenOver, 1, 1)), Err(Reason::QueueFull));
        worker.check();
        // One that outgrows the whole arena fails.
        for request in 1..6 {
            worker.cancel(job(request));
        }
        worker.submit(spec(7, Until::Finished, 5, 100)).unwrap();
        let news = run(&mut worker).concat();
        assert!(news.contains(&News::TooLong { job: job(7) }), "{news:?}");
        assert_eq!(worker.blocks.available(), 8);
    }
}
