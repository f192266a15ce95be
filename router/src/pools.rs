//! Which workers there are, which of them may work together, and whose turn it is. Without IO.
//!
//! The shell tells the pools what discovery and `Describe` say; the pools tell a [`Dispatch`](crate::dispatch)
//! where to go. Every model has pools of its own, one per role. A worker takes requests when it is a member, has
//! described itself, answers, is not draining, and matches its model's *reference* (invariant I9): the description
//! that most members of the model share, on a tie the one that was seen first. A worker that differs is refused at
//! registration by the name of the field that differs, so a mismatch never becomes a hang or wrong tokens.

mod live;
mod member;
mod placing;
mod worker;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use proto::{
    BlockHash, Error, Generation, HashChain, ModelDescription, Placed, PlacementKind, Reason, Role, TokenId,
    WorkerDescription, WorkerEpoch, WorkerLoad,
};
use serde::{Deserialize, Serialize};

use crate::circuit::Circuit;
use crate::cost::{CostModel, Observation};
use crate::follow::Effect;
use crate::index::{Matches, PrefixIndex};
use crate::policy::{Chooser, Policy};
use live::Live;
pub use member::MemberDump;
use worker::Worker;
pub use worker::{Change, ChangeKind, WorkerState};

/// How requests are to be placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PlacementMode {
    /// Split where a prefill worker can take the request and the hop pays, as far as is known ([`crate::cost`]); fused
    /// otherwise.
    #[default]
    Auto,
    /// Prefill and decode on different workers, or not at all.
    Split,
    /// Both on a decode worker.
    Fused,
}

impl fmt::Display for PlacementMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Split => "split",
            Self::Fused => "fused",
        })
    }
}

impl FromStr for PlacementMode {
    type Err = Error;

    fn from_str(word: &str) -> Result<Self, Error> {
        match word {
            "auto" => Ok(Self::Auto),
            "split" => Ok(Self::Split),
            "fused" => Ok(Self::Fused),
            _ => Err(Error::invalid("placement", format!("expected auto, split or fused, got {word}"))),
        }
    }
}

/// One request more at a worker, until this is dropped.
#[derive(Debug)]
struct Load(Arc<AtomicUsize>);

impl Load {
    fn one_more_at(worker: &Worker) -> Self {
        worker.load.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(&worker.load))
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A worker that a request was placed on; counts as its load until dropped.
#[derive(Debug)]
pub struct PlacedWorker {
    /// Where it is.
    pub address: String,
    /// The life of the worker that was described last.
    pub epoch: WorkerEpoch,
    /// Tokens at the front of the prompt whose KV it is believed to have.
    pub cached_tokens: usize,
    /// Held, never read: its drop is what counts.
    #[expect(dead_code, reason = "a guard: only its drop matters")]
    load: Load,
}

/// Where one attempt of a request executes.
#[derive(Debug)]
pub struct Placement {
    /// Who builds the KV; `None` when the decode worker does (fused).
    pub prefill: Option<PlacedWorker>,
    /// Who makes the tokens.
    pub decode: PlacedWorker,
}

impl Placement {
    /// Split or fused.
    pub fn kind(&self) -> PlacementKind {
        if self.prefill.is_some() { PlacementKind::Split } else { PlacementKind::Fused }
    }
}

/// Why a request could not be placed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unplaceable {
    /// The reason, and a message that names the workers and what is wrong with each.
    pub error: Error,
    /// True when every member has answered and none can serve the request as it is: waiting will not help.
    pub settled: bool,
}

/// The names of the full blocks of a prompt, as workers with blocks of one size name them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedBlocks {
    /// Makes the names.
    pub chain: HashChain,
    /// From the first block on.
    pub blocks: Vec<BlockHash>,
}

impl NamedBlocks {
    /// The blocks of these tokens. Takes time in proportion to them.
    pub fn of(chain: HashChain, tokens: &[TokenId]) -> Self {
        let blocks = chain.of(tokens);
        Self { chain, blocks }
    }
}

/// A request that wants a place.
#[derive(Clone, Copy, Debug)]
pub struct Wish<'a> {
    /// The model's public name.
    pub model: &'a str,
    /// How to place.
    pub mode: PlacementMode,
    /// Workers that failed this request before, the latest last.
    pub failed: &'a [String],
    /// Where a request with the same prompt was placed.
    pub beside: Option<&'a Placed>,
    /// Tokens of the prompt, and those generated so far.
    pub tokens: usize,
    /// The names of their full blocks, for each size of blocks; empty where they are not known or not asked for.
    pub blocks: &'a [NamedBlocks],
    /// The session that it belongs to.
    pub session: Option<&'a str>,
    /// The present, on the router's clock.
    pub now: Duration,
}

impl<'a> Wish<'a> {
    /// What a generation wants.
    pub fn of(generation: &'a Generation, mode: PlacementMode) -> Self {
        Self {
            model: &generation.model,
            mode,
            failed: &[],
            beside: generation.beside.as_ref(),
            tokens: generation.tokens.len(),
            blocks: &[],
            session: generation.session.as_deref(),
            now: Duration::ZERO,
        }
    }
}

/// A member as others may look at it.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkerView {
    /// Where it is.
    pub address: String,
    /// What it is for.
    pub role: Role,
    /// The model's public name, once it has described itself.
    pub model: Option<String>,
    /// Whether it takes requests.
    pub state: WorkerState,
    /// What it has to do: as it said last, with what this router has placed since.
    pub load: WorkerLoad,
    /// True when it has said so itself; otherwise `load` counts what this router has placed.
    pub is_reported: bool,
}

/// The members of the cluster that serve models, by role.
#[derive(Debug)]
pub struct Pools {
    /// In the order of joining.
    workers: Vec<Worker>,
    /// Where each is among them, by address.
    places: HashMap<String, usize>,
    /// Those that take requests.
    live: Live,
    chooser: Chooser,
    /// What work costs, by model, once something was seen of it.
    costs: HashMap<String, CostModel>,
    /// Who has which blocks.
    index: PrefixIndex,
    /// What the index says of the prompt at hand, for each size of blocks.
    matches: RefCell<Vec<Matches>>,
    /// Counts descriptions that were new.
    sights: u64,
    /// Counts placements.
    turns: AtomicU64,
}

/// Most bytes of the index of blocks, where nothing else is said.
pub const INDEX_BYTES_MAX: usize = 256 << 20;

/// Entries of the index that are swept with each event of a watch, when there is something to sweep. A thousand idle
/// workers say something every 0.7 s each: a million entries are swept in a few seconds.
const SWEEP_ENTRIES: usize = 256;

/// Most workers that an error message names.
const COMPLAINTS_MAX: usize = 4;

impl Default for Pools {
    fn default() -> Self {
        Self::new()
    }
}

impl Pools {
    /// No workers, and round robin among those to come.
    pub fn new() -> Self {
        Self::with_policy(Policy::RoundRobin, 0)
    }

    /// No workers, and that policy among those to come. The seed is for what it draws by chance.
    pub fn with_policy(policy: Policy, seed: u64) -> Self {
        Self {
            workers: Vec::new(),
            places: HashMap::new(),
            live: Live::default(),
            chooser: Chooser::new(policy, seed),
            costs: HashMap::new(),
            index: PrefixIndex::new(INDEX_BYTES_MAX),
            matches: RefCell::default(),
            sights: 0,
            turns: AtomicU64::new(0),
        }
    }

    /// The same with an index of blocks that takes at most so many bytes. For pools that know of no blocks yet.
    #[must_use]
    pub fn with_index(self, bytes_max: usize) -> Self {
        Self { index: PrefixIndex::new(bytes_max), ..self }
    }

    /// Who has which blocks.
    pub fn index(&self) -> &PrefixIndex {
        &self.index
    }

    /// How the workers that take requests for the model name their blocks: one chain for each size of blocks.
    pub fn chains(&self, model: &str) -> Vec<HashChain> {
        self.live.chains(model).to_vec()
    }

    /// How workers are chosen.
    pub fn policy(&self) -> Policy {
        self.chooser.policy()
    }

    fn worker(&self, address: &str) -> Option<&Worker> {
        self.places.get(address).map(|&place| &self.workers[place])
    }

    fn worker_mut(&mut self, address: &str) -> Option<&mut Worker> {
        self.places.get(address).map(|&place| &mut self.workers[place])
    }

    /// Takes over what discovery says: workers that are new start unknown, those not named any more are forgotten.
    /// Routers are not workers and left out; of two members at one address the first counts. One that is named for another
    /// role than before is the same worker.
    pub fn set_members<'a>(&mut self, members: impl IntoIterator<Item = (Role, &'a str)>) -> Vec<Change> {
        let mut named: Vec<(Role, &str)> = Vec::new();
        let mut roles: HashMap<&str, Role> = HashMap::new();
        for (role, address) in members.into_iter().filter(|(role, _)| *role != Role::Router) {
            roles.entry(address).or_insert_with(|| {
                named.push((role, address));
                role
            });
        }
        let mut changes = Vec::new();
        let index = &mut self.index;
        self.workers.retain_mut(|worker| {
            let Some(role) = roles.get(worker.address.as_str()) else {
                changes.push(worker.change(ChangeKind::Left));
                worker.hot.slot.into_iter().for_each(|slot| index.retire(slot));
                return false;
            };
            worker.listed = *role;
            true
        });
        let place = |(place, worker): (usize, &Worker)| (worker.address.clone(), place);
        self.places = self.workers.iter().enumerate().map(place).collect();
        let before = self.states();
        for (role, address) in named {
            if self.places.contains_key(address) {
                continue;
            }
            let worker = Worker::new(role, address);
            changes.push(worker.change(ChangeKind::Joined));
            self.places.insert(address.to_owned(), self.workers.len());
            self.workers.push(worker);
        }
        self.check_all();
        changes.extend(self.changes_since(&before));
        self.live = Live::among(&self.workers);
        changes
    }

    /// Takes over what a worker says about itself. Empty when nothing that matters to placement has changed, or
    /// when it is no member.
    pub fn described(&mut self, address: &str, description: WorkerDescription) -> Vec<Change> {
        let before = self.states();
        let Some(worker) = self.worker_mut(address) else { return Vec::new() };
        let epoch = description.epoch;
        let old = worker.describe(description);
        let restarted = old.as_ref().is_some_and(|old| old.epoch != epoch);
        let mut changes = Vec::new();
        let gone = worker.hot.slot.take_if(|_| restarted);
        if restarted {
            worker.judge(Duration::ZERO, Circuit::succeeded);
            worker.set_reported(None);
            changes.push(worker.change(ChangeKind::Restarted(epoch)));
        }
        if let Some(from) = old.as_ref().map(|old| old.role).filter(|from| *from != worker.role()) {
            changes.push(worker.change(ChangeKind::Turned { from }));
        }
        let same = match (&old, &worker.description) {
            (Some(old), Some(new)) => {
                old.role == new.role && old.model.name == new.model.name && old.mismatch(new).is_none()
            }
            _ => false,
        };
        gone.into_iter().for_each(|slot| self.index.retire(slot));
        if !same {
            self.sights += 1;
            let seen = self.sights;
            if let Some(worker) = self.worker_mut(address) {
                worker.seen = seen;
            }
            self.check_all();
        }
        changes.extend(self.changes_since(&before));
        if !same || !changes.is_empty() {
            self.live = Live::among(&self.workers);
        }
        changes
    }

    /// Takes over what a worker says about its load. Without effect for a life that it has not described.
    pub fn reported(&mut self, address: &str, epoch: WorkerEpoch, load: WorkerLoad) {
        let Some(worker) = self.worker_mut(address) else { return };
        if worker.description.as_deref().is_some_and(|description| description.epoch == epoch) {
            worker.set_reported(Some(load));
        }
    }

    /// Takes over what an event of a worker's watch means.
    pub fn heard(&mut self, address: &str, effect: &Effect) {
        if self.index.needs_sweep() {
            self.index.sweep(SWEEP_ENTRIES);
        }
        match effect {
            Effect::Load(epoch, load) => self.reported(address, *epoch, *load),
            Effect::Forget => {
                let slot = self.worker_mut(address).and_then(|worker| worker.hot.slot.take());
                slot.into_iter().for_each(|slot| self.index.retire(slot));
            }
            Effect::Insert(blocks) => self.has_blocks(address, blocks),
            Effect::Remove(blocks) => {
                if let Some(slot) = self.worker(address).and_then(|worker| worker.hot.slot) {
                    self.index.remove(slot, blocks);
                }
            }
            Effect::Resync(_) => {}
        }
    }

    /// The worker has these blocks, the first of them first.
    pub fn has_blocks(&mut self, address: &str, blocks: &[BlockHash]) {
        let Some(&place) = self.places.get(address) else { return };
        let worker = &mut self.workers[place];
        if worker.hot.slot.is_none() {
            worker.hot.slot = self.index.join();
        }
        if let Some(slot) = worker.hot.slot {
            self.index.insert(slot, blocks);
        }
    }

    /// The blocks were asked for: others are forgotten before them.
    pub fn touch(&mut self, blocks: &[NamedBlocks]) {
        blocks.iter().for_each(|named| self.index.touch(&named.blocks));
    }

    /// Notes that a worker does not answer. It takes no requests until it describes itself again.
    pub fn lost(&mut self, address: &str, error: Error) -> Vec<Change> {
        let before = self.states();
        let Some(worker) = self.worker_mut(address) else { return Vec::new() };
        worker.lost = Some(error);
        worker.set_reported(None);
        let changes = self.changes_since(&before);
        if !changes.is_empty() {
            self.live = Live::among(&self.workers);
        }
        changes
    }

    /// Each worker's state, and why it is refused if it is.
    fn states(&self) -> Vec<(WorkerState, Option<Error>)> {
        self.workers.iter().map(Worker::state_with_refusal).collect()
    }

    /// The transitions from the given states, in the order of `workers`; later workers are new.
    fn changes_since(&self, before: &[(WorkerState, Option<Error>)]) -> Vec<Change> {
        let old = before.iter().cloned().chain(std::iter::repeat((WorkerState::Unknown, None)));
        let moved = self.workers.iter().zip(old).filter(|(worker, old)| worker.state_with_refusal() != *old);
        moved.filter_map(|(worker, _)| Some(worker.change(worker.arrival()?))).collect()
    }

    /// Compares every worker with its model's reference (I9).
    fn check_all(&mut self) {
        let references = self.references();
        let verdicts: Vec<Option<Error>> =
            self.workers.iter().map(|worker| worker.verdict(&references)).collect();
        for (worker, verdict) in self.workers.iter_mut().zip(verdicts) {
            worker.refused = verdict;
        }
    }

    /// For each model, the description that most of its members share; on a tie the one seen first. A worker that
    /// is lost for the moment still counts, so that a restart elsewhere does not turn the pool over.
    fn references(&self) -> BTreeMap<String, WorkerDescription> {
        let mut groups: Vec<(&WorkerDescription, usize, u64)> = Vec::new();
        for worker in &self.workers {
            let Some(own) = worker.description.as_deref().filter(|_| worker.stranger().is_none()) else {
                continue;
            };
            let shares = |other: &WorkerDescription| {
                other.model.name == own.model.name && other.mismatch(own).is_none()
            };
            match groups.iter_mut().find(|(other, ..)| shares(other)) {
                Some((_, count, seen)) => {
                    *count += 1;
                    *seen = (*seen).min(worker.seen);
                }
                None => groups.push((own, 1, worker.seen)),
            }
        }
        groups.sort_by_key(|(_, count, seen)| (*count, std::cmp::Reverse(*seen)));
        groups.into_iter().map(|(own, ..)| (own.model.name.clone(), own.clone())).collect()
    }

    /// The worker failed a request, for another reason than want of room. True when that has changed its circuit.
    pub fn failed(&mut self, address: &str, now: Duration) -> bool {
        self.worker_mut(address).is_some_and(|worker| worker.judge(now, |circuit| circuit.failed(now)))
    }

    /// The worker did what it was asked. True when that has changed its circuit.
    pub fn succeeded(&mut self, address: &str, now: Duration) -> bool {
        self.worker_mut(address).is_some_and(|worker| worker.judge(now, Circuit::succeeded))
    }

    /// How many workers' circuits are not closed.
    pub fn spared(&self) -> usize {
        self.workers.iter().filter(|worker| worker.is_spared()).count()
    }

    /// Takes in what a request has shown of what work costs.
    pub fn observe(&mut self, model: &str, observation: Observation) {
        match self.costs.get_mut(model) {
            Some(costs) => costs.observe(observation),
            None => self.costs.entry(model.to_owned()).or_default().observe(observation),
        }
    }

    /// What is known of a model's costs.
    pub fn costs(&self, model: &str) -> Option<&CostModel> {
        self.costs.get(model)
    }

    /// True when the worker has said that it drains.
    pub fn is_draining(&self, address: &str) -> bool {
        self.state(address) == Some(WorkerState::Draining)
    }

    /// True when a worker of that role other than `address` takes requests for the model.
    pub fn has_other(&self, role: Role, model: &str, address: &str) -> bool {
        let is_other = |&place: &u32| self.workers[place as usize].address != address;
        self.live.of(role, model).iter().any(is_other)
    }

    /// Says why no worker of that role can take a request for the model.
    fn unplaceable(&self, role: Role, model: &str) -> Unplaceable {
        let undescribed = self.workers.iter().any(|worker| worker.description.is_none());
        if !self.workers.is_empty() && !undescribed && !self.workers.iter().any(|worker| worker.serves(model))
        {
            let served: BTreeSet<&str> = self
                .workers
                .iter()
                .filter_map(|worker| worker.description.as_deref())
                .map(|description| description.model.name.as_str())
                .collect();
            let served: Vec<&str> = served.into_iter().collect();
            let message = format!("no worker serves model {model}; served: {}", served.join(", "));
            return Unplaceable { error: Error::new(Reason::ModelNotFound, message), settled: true };
        }
        let role_name = role.name();
        let pool: Vec<&Worker> =
            self.workers.iter().filter(|worker| worker.role() == role && worker.may_serve(model)).collect();
        if pool.is_empty() {
            let message = format!("no {role_name} worker for model {model} is known");
            return Unplaceable { error: Error::new(Reason::WorkerLost, message), settled: false };
        }
        let refused = pool.iter().find_map(|worker| match worker.state() {
            WorkerState::Refused => worker.refused.as_ref().map(|error| error.reason),
            _ => None,
        });
        let settled = pool.iter().all(|worker| worker.state() == WorkerState::Refused);
        let complaints: Vec<String> =
            pool.iter().take(COMPLAINTS_MAX).map(|worker| worker.complaint()).collect();
        let message = format!("no {role_name} worker can take model {model}: {}", complaints.join("; "));
        Unplaceable { error: Error::new(refused.unwrap_or(Reason::WorkerLost), message), settled }
    }

    /// The models that a request could be placed for now, each as a worker describes it.
    ///
    /// The context is the shortest among a model's live workers, so that what fits it fits wherever it is placed.
    pub fn served_models(&self, mode: PlacementMode) -> Vec<ModelDescription> {
        let mut models: BTreeMap<&str, ModelDescription> = BTreeMap::new();
        for worker in self.workers.iter().filter(|worker| worker.role() == Role::Decode) {
            let Some(description) = &worker.description else { continue };
            let model = &description.model;
            let prefill =
                mode != PlacementMode::Split || !self.live.of(Role::Prefill, &model.name).is_empty();
            if prefill && worker.state() == WorkerState::Live {
                models.entry(model.name.as_str()).or_insert_with(|| model.clone());
            }
        }
        for worker in self.workers.iter().filter(|worker| worker.state() == WorkerState::Live) {
            let described = worker.description.as_deref().map(|description| &description.model);
            if let Some(described) = described
                && let Some(model) = models.get_mut(described.name.as_str())
            {
                model.context_len = model.context_len.min(described.context_len);
            }
        }
        models.into_values().collect()
    }

    /// Addresses of the workers that answer and match their pool, draining ones last.
    pub fn live_addresses(&self) -> Vec<String> {
        let of = |state: WorkerState| self.workers.iter().filter(move |worker| worker.state() == state);
        let both = of(WorkerState::Live).chain(of(WorkerState::Draining));
        both.map(|worker| worker.address.clone()).collect()
    }

    /// How many workers are in each state, by role.
    pub fn counts(&self) -> BTreeMap<(Role, WorkerState), usize> {
        let mut counts = BTreeMap::new();
        for worker in &self.workers {
            *counts.entry((worker.role(), worker.state())).or_default() += 1;
        }
        counts
    }

    /// The state of a member.
    pub fn state(&self, address: &str) -> Option<WorkerState> {
        self.worker(address).map(Worker::state)
    }

    /// Every member, in the order of joining.
    pub fn views(&self) -> impl Iterator<Item = WorkerView> {
        self.workers.iter().map(|worker| WorkerView {
            address: worker.address.clone(),
            role: worker.role(),
            model: worker.description.as_deref().map(|description| description.model.name.clone()),
            state: worker.state(),
            load: worker.load_now(),
            is_reported: worker.is_reported(),
        })
    }

    /// Requests that this router has placed on a member and that have not ended.
    pub fn load(&self, address: &str) -> usize {
        self.worker(address).map_or(0, |worker| worker.load.load(Ordering::Relaxed))
    }
}
