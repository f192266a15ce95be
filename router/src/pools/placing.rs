//! Where a request goes: the part of the pools that chooses.

use std::sync::atomic::Ordering;
use std::time::Duration;

use proto::{Placed, PlacementKind, Role, WorkerEpoch};

use super::worker::{Worker, WorkerState};
use super::{Load, PlacedWorker, Placement, PlacementMode, Pools, Unplaceable, Wish};
use crate::cost::Found;
use crate::index::Matches;
use crate::policy::{Ask, Candidate, Costs, Policy, Work, cheapest, name_hash};

impl Pools {
    /// Chooses workers for a request: those of the placement that it wants to be `beside`, or else those of the policy.
    /// Workers that `failed` this request before are chosen only when there is no other, and the latest after the rest.
    pub fn place(&self, wish: &Wish<'_>) -> Result<Placement, Unplaceable> {
        self.look_up(wish);
        if let Some(placement) = wish.beside.and_then(|placed| self.beside(wish, placed)) {
            return Ok(placement);
        }
        let prefill = match wish.mode {
            PlacementMode::Fused => None,
            PlacementMode::Split | PlacementMode::Auto => self.next(wish, Work::Prefill, None),
        };
        let (prefill, decode) = match (prefill, wish.mode) {
            (Some(prefill), PlacementMode::Auto) => self.cheaper(wish, prefill),
            (Some(prefill), _) => (Some(prefill), self.next(wish, Work::Decode, None)),
            (None, _) => (None, self.next(wish, Work::Both, None)),
        };
        let Some(decode) = decode else {
            return Err(self.unplaceable(Role::Decode, wish.model));
        };
        if prefill.is_none() && wish.mode == PlacementMode::Split {
            return Err(self.unplaceable(Role::Prefill, wish.model));
        }
        Ok(self.take_turns(wish, prefill, decode))
    }

    /// Chooses a decode worker other than `address` for a sequence that `address` gives away; `failed` of the wish counts as in
    /// [`place`](Self::place), where it wants to be and how do not.
    pub fn place_other(&self, wish: &Wish<'_>, address: &str) -> Option<PlacedWorker> {
        self.look_up(wish);
        self.next(wish, Work::Decode, Some(address)).map(|worker| self.take_turn(worker, wish, false))
    }

    /// A hop by way of that prefill worker, or none where it is expected to cost more than it saves. While nothing is known it
    /// pays.
    fn cheaper<'a>(
        &'a self,
        wish: &Wish<'_>,
        prefill: &'a Worker,
    ) -> (Option<&'a Worker>, Option<&'a Worker>) {
        let Some(costs) = self.costs.get(wish.model) else {
            return (Some(prefill), self.next(wish, Work::Decode, None));
        };
        let [Some(split), Some(fused)] = self.next_of(wish, Role::Decode, [Work::Decode, Work::Both], None)
        else {
            return (Some(prefill), None);
        };
        let matches = self.matches.borrow();
        let missing = |worker: &Worker| wish.tokens - Self::cached_tokens(worker, wish, &matches);
        let waiting = |worker: &Worker| worker.load_now().waiting_tokens;
        let by_hop = Found {
            waiting: waiting(prefill),
            missing: missing(prefill),
            transferred: missing(split),
            decoding: 0,
        };
        let here = Found {
            waiting: waiting(fused),
            missing: missing(fused),
            transferred: 0,
            decoding: fused.load_now().running,
        };
        match costs.decide(by_hop, here) {
            PlacementKind::Split => (Some(prefill), Some(split)),
            PlacementKind::Fused => (None, Some(fused)),
        }
    }

    /// When the first token of a request may be expected, by what waits at the workers that could compute its prompt;
    /// `None` while nothing is known, or while one of them has nothing that waits and could begin at once.
    pub fn first_token_in(&self, wish: &Wish<'_>) -> Option<Duration> {
        let costs = self.costs.get(wish.model)?;
        let roles: &[Role] = match wish.mode {
            PlacementMode::Fused => &[Role::Decode],
            PlacementMode::Split => &[Role::Prefill],
            PlacementMode::Auto => &[Role::Prefill, Role::Decode],
        };
        let able = || {
            let places = roles.iter().flat_map(|role| self.live.of(*role, wish.model));
            places.map(|&place| &self.workers[place as usize])
        };
        let waiting = |worker: &Worker| worker.load_now().waiting_tokens;
        if able().any(|worker| waiting(worker) == 0) {
            return None;
        }
        self.look_up(wish);
        let matches = self.matches.borrow();
        let missing = |worker: &Worker| wish.tokens - Self::cached_tokens(worker, wish, &matches);
        let fewest = able().map(|worker| waiting(worker) + missing(worker)).min()?;
        costs.prefill(fewest)
    }

    /// When a decode worker may be expected to have room for the KV of a request: sequences end as they did of late, and those
    /// go first that wait already. `None` while nothing is known, or while one of them has room.
    ///
    /// By Little's law a worker with `n` sequences that take `d` each sees one end every `d / n`.
    pub fn room_in(&self, wish: &Wish<'_>) -> Option<Duration> {
        let decode = self.costs.get(wish.model)?.decode()?;
        let expected = |&place: &u32| {
            let worker = &self.workers[place as usize];
            let load = worker.load_now();
            let room = load.blocks_free.saturating_mul(worker.hot.block_tokens as usize);
            let is_full = load.blocks_total > 0 && room < wish.tokens;
            is_full.then(|| decode.mul_f64((load.waiting + 1) as f64 / load.running.max(1) as f64))
        };
        let able = self.live.of(Role::Decode, wish.model);
        able.iter().map(expected).collect::<Option<Vec<Duration>>>()?.into_iter().min()
    }

    /// The very workers of `placed`, if they take requests now, none has failed this one, and the mode allows it.
    fn beside(&self, wish: &Wish<'_>, placed: &Placed) -> Option<Placement> {
        let allowed = match placed.kind() {
            PlacementKind::Split => wish.mode != PlacementMode::Fused,
            PlacementKind::Fused => wish.mode != PlacementMode::Split,
        };
        let find = |role, address: &String| {
            let worker = self.worker(address).filter(|_| allowed && !wish.failed.contains(address))?;
            let takes = worker.role() == role && worker.serves(wish.model);
            (takes && worker.state() == WorkerState::Live).then_some(worker)
        };
        let decode = find(Role::Decode, &placed.decode)?;
        let prefill = match &placed.prefill {
            Some(address) => Some(find(Role::Prefill, address)?),
            None => None,
        };
        Some(self.take_turns(wish, prefill, decode))
    }

    /// The worker for that work: see [`next_of`](Self::next_of).
    fn next(&self, wish: &Wish<'_>, work: Work, but: Option<&str>) -> Option<&Worker> {
        let role = if work == Work::Prefill { Role::Prefill } else { Role::Decode };
        let [worker] = self.next_of(wish, role, [work], but);
        worker
    }

    /// For each work the worker of that role by the policy, other than `but`, among those that have not failed the request and
    /// whose circuit admits it; without such among those that have not failed it, and at last the one that failed it longest
    /// ago.
    fn next_of<const N: usize>(
        &self,
        wish: &Wish<'_>,
        role: Role,
        works: [Work; N],
        but: Option<&str>,
    ) -> [Option<&Worker>; N] {
        let live = self.live.of(role, wish.model);
        let is_other = |place: usize| but != Some(self.workers[place].address.as_str());
        let session = wish.session.map(name_hash);
        let asks = works.map(|work| Ask { work, tokens: wish.tokens, session });
        let failed = |place: usize| wish.failed.iter().any(|address| *address == self.workers[place].address);
        let others = || live.iter().map(|&place| place as usize).filter(|&place| is_other(place));
        let unfailed = || others().filter(|&place| !failed(place));
        let admits = |place: &usize| self.workers[*place].is_admitted(wish.now);
        let matches = self.matches.borrow();
        let assumed = Costs::default();
        let costs = self.costs.get(wish.model).map_or(assumed, |costs| costs.costs(assumed));
        let is_any_admitted = unfailed().any(|place| admits(&place));
        let open = || unfailed().filter(|place| !is_any_admitted || admits(place));
        let seen = |place| self.candidate(place, wish, &matches);
        // The one that computes something for each candidate is a loop of its own, for the compiler to see through.
        let chosen = match self.chooser.policy() {
            Policy::Prefix => {
                cheapest(&asks, &costs, open().map(|place| self.candidate(place, wish, &matches)))
            }
            _ => asks.map(|ask| self.chooser.choose(&ask, &costs, open().map(seen))),
        };
        let failure = |worker: &&Worker| wish.failed.iter().rposition(|address| *address == worker.address);
        chosen.map(|chosen| match chosen {
            Some(chosen) => Some(&self.workers[chosen]),
            None => others().map(|place| &self.workers[place]).min_by_key(failure),
        })
    }

    /// Asks the index of whom it knows to have the beginning of the prompt.
    fn look_up(&self, wish: &Wish<'_>) {
        let mut matches = self.matches.borrow_mut();
        matches.resize_with(wish.blocks.len(), Matches::default);
        for (named, matches) in wish.blocks.iter().zip(matches.iter_mut()) {
            self.index.find(&named.blocks, matches);
        }
    }

    /// Tokens at the front of the prompt that the worker has. The last is always computed.
    #[inline]
    fn cached_tokens(worker: &Worker, wish: &Wish<'_>, matches: &[Matches]) -> usize {
        let Some(slot) = worker.hot.slot else { return 0 };
        let size = worker.hot.block_tokens as usize;
        let named = wish.blocks.iter().position(|named| named.chain.block_tokens() == size);
        let blocks = named.map_or(0, |named| matches[named].blocks(slot));
        (blocks * size).min(wish.tokens.saturating_sub(1))
    }

    #[inline]
    fn candidate(&self, place: usize, wish: &Wish<'_>, matches: &[Matches]) -> Candidate {
        let worker = &self.workers[place];
        Candidate {
            id: place,
            name: worker.hot.name,
            turn: worker.hot.turn.load(Ordering::Relaxed),
            load: worker.load_now(),
            block_tokens: worker.hot.block_tokens as usize,
            cached_tokens: Self::cached_tokens(worker, wish, matches),
        }
    }

    /// Counts the workers as placed, prefill first.
    fn take_turns(&self, wish: &Wish<'_>, prefill: Option<&Worker>, decode: &Worker) -> Placement {
        let is_split = prefill.is_some();
        let prefill = prefill.map(|worker| self.take_turn(worker, wish, true));
        Placement { prefill, decode: self.take_turn(decode, wish, !is_split) }
    }

    /// Counts one request more at the worker, which `computes` its prompt or has it computed elsewhere.
    fn take_turn(&self, worker: &Worker, wish: &Wish<'_>, computes: bool) -> PlacedWorker {
        let cached_tokens = Self::cached_tokens(worker, wish, &self.matches.borrow());
        let tokens = if computes { wish.tokens - cached_tokens } else { 0 };
        let turn = self.turns.fetch_add(1, Ordering::Relaxed) + 1;
        worker.placed(turn, tokens, wish.now);
        let epoch = worker.description.as_deref().map_or(WorkerEpoch(0), |description| description.epoch);
        let load = Load::one_more_at(worker);
        PlacedWorker { address: worker.address.clone(), epoch, cached_tokens, load }
    }
}
