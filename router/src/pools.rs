//! Which workers there are, which of them may work together, and whose turn it is. Without IO.
//!
//! The shell tells the pools what discovery and `Describe` say; the pools tell a [`Dispatch`](crate::dispatch)
//! where to go. Every model has pools of its own, one per role. A worker takes requests when it is a member, has
//! described itself, answers, is not draining, and matches its model's *reference* (invariant I9): the description
//! that most members of the model share, on a tie the one that was seen first. A worker that differs is refused at
//! registration by the name of the field that differs, so a mismatch never becomes a hang or wrong tokens.

mod member;
mod worker;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use proto::{Error, ModelDescription, Placed, PlacementKind, Reason, Role, WorkerDescription, WorkerEpoch};
use serde::{Deserialize, Serialize};

use crate::policy::{Candidate, Chooser, Policy};
pub use member::MemberDump;
use worker::Worker;
pub use worker::{Change, ChangeKind, WorkerState};

/// How requests are to be placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PlacementMode {
    /// Split where a prefill worker can take the request, fused otherwise.
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

/// The members of the cluster that serve models, by role.
#[derive(Debug)]
pub struct Pools {
    /// In the order of joining.
    workers: Vec<Worker>,
    chooser: Chooser,
    /// Counts descriptions that were new.
    sights: u64,
    /// Counts placements.
    turns: AtomicU64,
}

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
        Self { workers: Vec::new(), chooser: Chooser::new(policy, seed), sights: 0, turns: AtomicU64::new(0) }
    }

    /// Takes over what discovery says: workers that are new start unknown, those not named any more are forgotten.
    /// Routers are not workers and left out; of two members at one address the first counts.
    pub fn set_members<'a>(&mut self, members: impl IntoIterator<Item = (Role, &'a str)>) -> Vec<Change> {
        let named: Vec<(Role, &str)> =
            members.into_iter().filter(|(role, _)| *role != Role::Router).collect();
        let mut changes = Vec::new();
        self.workers.retain(|worker| {
            let stays = named.contains(&(worker.role, worker.address.as_str()));
            if !stays {
                changes.push(worker.change(ChangeKind::Left));
            }
            stays
        });
        let before = self.states();
        for (role, address) in named {
            if self.workers.iter().any(|worker| worker.address == address) {
                continue;
            }
            let worker = Worker::new(role, address);
            changes.push(worker.change(ChangeKind::Joined));
            self.workers.push(worker);
        }
        self.check_all();
        changes.extend(self.changes_since(&before));
        changes
    }

    /// Takes over what a worker says about itself. Empty when nothing that matters to placement has changed, or
    /// when it is no member.
    pub fn described(&mut self, address: &str, description: WorkerDescription) -> Vec<Change> {
        let before = self.states();
        let Some(worker) = self.workers.iter_mut().find(|worker| worker.address == address) else {
            return Vec::new();
        };
        worker.lost = None;
        let epoch = description.epoch;
        let old = worker.description.replace(description);
        let restarted = old.as_ref().is_some_and(|old| old.epoch != epoch);
        let mut changes = Vec::new();
        if restarted {
            changes.push(worker.change(ChangeKind::Restarted(epoch)));
        }
        let same = match (&old, &worker.description) {
            (Some(old), Some(new)) => {
                old.role == new.role && old.model.name == new.model.name && old.mismatch(new).is_none()
            }
            _ => false,
        };
        if !same {
            self.sights += 1;
            worker.seen = self.sights;
            self.check_all();
        }
        changes.extend(self.changes_since(&before));
        changes
    }

    /// Notes that a worker does not answer. It takes no requests until it describes itself again.
    pub fn lost(&mut self, address: &str, error: Error) -> Vec<Change> {
        let before = self.states();
        let Some(worker) = self.workers.iter_mut().find(|worker| worker.address == address) else {
            return Vec::new();
        };
        worker.lost = Some(error);
        self.changes_since(&before)
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
            let Some(own) = worker.description.as_ref().filter(|_| worker.stranger().is_none()) else {
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

    /// Chooses workers for a request: those of the placement that it wants to be `beside`, or else those of the
    /// policy. `failed` are workers that failed this request before, the latest last: they are chosen only when there is no
    /// other, and the latest after the rest.
    pub fn place(
        &self,
        model: &str,
        mode: PlacementMode,
        failed: &[String],
        beside: Option<&Placed>,
    ) -> Result<Placement, Unplaceable> {
        if let Some(placement) = beside.and_then(|placed| self.beside(model, mode, failed, placed)) {
            return Ok(placement);
        }
        let decode = self.next(Role::Decode, model, failed, None);
        let prefill = match mode {
            PlacementMode::Fused => None,
            PlacementMode::Auto | PlacementMode::Split => self.next(Role::Prefill, model, failed, None),
        };
        let Some(decode) = decode else { return Err(self.unplaceable(Role::Decode, model)) };
        if prefill.is_none() && mode == PlacementMode::Split {
            return Err(self.unplaceable(Role::Prefill, model));
        }
        Ok(Placement {
            prefill: prefill.map(|worker| self.take_turn(worker)),
            decode: self.take_turn(decode),
        })
    }

    /// The very workers of `placed`, if they take requests now, none has failed this one, and the mode allows it.
    fn beside(
        &self,
        model: &str,
        mode: PlacementMode,
        failed: &[String],
        placed: &Placed,
    ) -> Option<Placement> {
        let allowed = match placed.kind() {
            PlacementKind::Split => mode != PlacementMode::Fused,
            PlacementKind::Fused => mode != PlacementMode::Split,
        };
        let find = |role, address: &String| {
            let mut live = self.live(role, model).filter(|_| allowed && !failed.contains(address));
            live.find(|worker| worker.address == *address)
        };
        let decode = find(Role::Decode, &placed.decode)?;
        let prefill = match &placed.prefill {
            Some(address) => Some(find(Role::Prefill, address)?),
            None => None,
        };
        Some(Placement {
            prefill: prefill.map(|worker| self.take_turn(worker)),
            decode: self.take_turn(decode),
        })
    }

    /// The workers that take requests for the model.
    fn live(&self, role: Role, model: &str) -> impl Iterator<Item = &Worker> {
        self.workers
            .iter()
            .filter(move |worker| worker.role == role && worker.serves(model))
            .filter(|worker| worker.state() == WorkerState::Live)
    }

    /// The worker of the policy, other than `but`, among those that have not failed the request; without such, the one
    /// that failed it longest ago.
    fn next(&self, role: Role, model: &str, failed: &[String], but: Option<&str>) -> Option<&Worker> {
        let failure = |worker: &Worker| failed.iter().rposition(|address| *address == worker.address);
        let others = || self.live(role, model).filter(|worker| but != Some(worker.address.as_str()));
        let unfailed = || others().filter(|worker| failure(worker).is_none());
        let candidate = |(id, worker): (usize, &Worker)| Candidate {
            id,
            turn: worker.turn.load(Ordering::Relaxed),
            requests: worker.load.load(Ordering::Relaxed),
        };
        match self.chooser.choose(unfailed().enumerate().map(candidate)) {
            Some(chosen) => unfailed().nth(chosen),
            None => others().min_by_key(|worker| failure(worker)),
        }
    }

    fn take_turn(&self, worker: &Worker) -> PlacedWorker {
        let turn = self.turns.fetch_add(1, Ordering::Relaxed) + 1;
        worker.turn.store(turn, Ordering::Relaxed);
        let epoch = worker.description.as_ref().map_or(WorkerEpoch(0), |description| description.epoch);
        PlacedWorker { address: worker.address.clone(), epoch, load: Load::one_more_at(worker) }
    }

    /// True when the worker has said that it drains.
    pub fn is_draining(&self, address: &str) -> bool {
        let worker = self.workers.iter().find(|worker| worker.address == address);
        worker.is_some_and(|worker| worker.state() == WorkerState::Draining)
    }

    /// True when a worker of that role other than `address` takes requests for the model.
    pub fn has_other(&self, role: Role, model: &str, address: &str) -> bool {
        self.live(role, model).any(|worker| worker.address != address)
    }

    /// Chooses a worker of that role other than `address` for what `address` gives away; see [`place`](Self::place) for
    /// `failed`.
    pub fn place_other(
        &self,
        role: Role,
        model: &str,
        failed: &[String],
        address: &str,
    ) -> Option<PlacedWorker> {
        self.next(role, model, failed, Some(address)).map(|worker| self.take_turn(worker))
    }

    /// Says why no worker of that role can take a request for the model.
    fn unplaceable(&self, role: Role, model: &str) -> Unplaceable {
        let undescribed = self.workers.iter().any(|worker| worker.description.is_none());
        if !self.workers.is_empty() && !undescribed && !self.workers.iter().any(|worker| worker.serves(model))
        {
            let served: BTreeSet<&str> = self
                .workers
                .iter()
                .filter_map(|worker| worker.description.as_ref())
                .map(|description| description.model.name.as_str())
                .collect();
            let served: Vec<&str> = served.into_iter().collect();
            let message = format!("no worker serves model {model}; served: {}", served.join(", "));
            return Unplaceable { error: Error::new(Reason::ModelNotFound, message), settled: true };
        }
        let role_name = role.name();
        let pool: Vec<&Worker> =
            self.workers.iter().filter(|worker| worker.role == role && worker.may_serve(model)).collect();
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
        for worker in self.workers.iter().filter(|worker| worker.role == Role::Decode) {
            let Some(description) = &worker.description else { continue };
            let model = &description.model;
            let prefill =
                mode != PlacementMode::Split || self.live(Role::Prefill, &model.name).next().is_some();
            if prefill && worker.state() == WorkerState::Live {
                models.entry(model.name.as_str()).or_insert_with(|| model.clone());
            }
        }
        for worker in self.workers.iter().filter(|worker| worker.state() == WorkerState::Live) {
            let described = worker.description.as_ref().map(|description| &description.model);
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
            *counts.entry((worker.role, worker.state())).or_default() += 1;
        }
        counts
    }

    /// The state of a member.
    pub fn state(&self, address: &str) -> Option<WorkerState> {
        self.workers.iter().find(|worker| worker.address == address).map(Worker::state)
    }

    /// Requests that this router has placed on a member and that have not ended.
    pub fn load(&self, address: &str) -> usize {
        let worker = self.workers.iter().find(|worker| worker.address == address);
        worker.map_or(0, |worker| worker.load.load(Ordering::Relaxed))
    }
}
