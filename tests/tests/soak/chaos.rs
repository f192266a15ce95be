//! What happens to the processes of a soak: one thing after another, chosen by a seed, and undone a while later.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use baton_tests::cluster::{Cluster, Name, Service, host};

use crate::ELDERS;

/// Numbers from a seed: xorshift64*, by Vigna, "An experimental exploration of Marsaglia's xorshift generators".
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    /// A number below `end`.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) % end
    }
}

/// What can happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Fault {
    /// Dies without a word, and comes back at its address.
    Kill,
    /// Is asked to end, and comes back at its address.
    Drain,
    /// Stands still.
    Stop,
    /// Its cable is pulled.
    Cut,
    /// It and another lose each other.
    Part(Name),
}

impl Fault {
    fn word(self) -> &'static str {
        match self {
            Self::Kill => "killed",
            Self::Drain => "drained",
            Self::Stop => "stopped",
            Self::Cut => "cut off",
            Self::Part(_) => "parted from another",
        }
    }
}

/// What happens, and what has.
pub(crate) struct Chaos {
    random: Random,
    /// Who suffers, from what, and until when.
    suffering: BTreeMap<Name, (Fault, Instant)>,
    next: Instant,
    counts: BTreeMap<&'static str, usize>,
}

impl Chaos {
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            random: Random::new(seed),
            suffering: BTreeMap::new(),
            next: Instant::now() + Duration::from_secs(1),
            counts: BTreeMap::new(),
        }
    }

    /// Time until something happens, or is undone.
    pub(crate) fn pause(&self) -> Duration {
        let ends = self.suffering.values().map(|(_, until)| *until);
        ends.chain([self.next]).min().unwrap_or(self.next).saturating_duration_since(Instant::now())
    }

    /// Undoes what has had its time, and lets the next thing happen if it is time for it.
    pub(crate) fn act(&mut self, cluster: &mut Cluster) {
        let now = Instant::now();
        let due = self.suffering.iter().filter(|(_, (_, until))| *until <= now);
        for name in due.map(|(name, _)| *name).collect::<Vec<_>>() {
            self.undo(cluster, name);
        }
        if now < self.next {
            return;
        }
        self.next = now + Duration::from_millis(300 + self.random.below(1500));
        if let Some((name, fault)) = self.choose(cluster) {
            let until = now + self.begin(cluster, name, fault);
            self.suffering.insert(name, (fault, until));
            *self.counts.entry(fault.word()).or_default() += 1;
        }
    }

    /// Undoes everything.
    pub(crate) async fn mend(&mut self, cluster: &mut Cluster) {
        for name in self.suffering.keys().copied().collect::<Vec<_>>() {
            self.undo(cluster, name);
        }
        cluster.wait_ready().await;
    }

    pub(crate) fn print(&self) {
        println!("\n| faults | |\n|---|---|");
        self.counts.iter().for_each(|(word, count)| println!("| {word} | {count} |"));
    }

    /// A victim and its fault; none when too many suffer already. Of each service somebody is left in peace; what there is
    /// only one of, the real engine's workers, stands still for a moment at most.
    fn choose(&mut self, cluster: &Cluster) -> Option<(Name, Fault)> {
        let mut all = Vec::new();
        for service in [Service::Gateway, Service::Router, Service::Prefill, Service::Decode] {
            let names = cluster.running(service);
            let (pairs, alone): (Vec<Name>, Vec<Name>) = names.into_iter().partition(|name| name.1 < 9);
            let well = pairs.iter().filter(|name| !self.suffers(**name)).count();
            if well > 1 {
                all.extend(pairs.into_iter().filter(|name| !self.suffers(*name)));
            }
            all.extend(alone.into_iter().filter(|name| !self.suffers(*name)));
        }
        if all.is_empty() {
            return None;
        }
        let name = all[self.random.below(all.len() as u64) as usize];
        if name.1 == 9 {
            return Some((name, Fault::Stop));
        }
        let kinds = if ELDERS.contains(&name) { 3 } else { 6 };
        let fault = match self.random.below(kinds) {
            0 => Fault::Stop,
            1 => Fault::Cut,
            2 => {
                let others: Vec<Name> =
                    all.into_iter().filter(|other| other.0 != name.0 && other.1 != 9).collect();
                if others.is_empty() {
                    Fault::Cut
                } else {
                    Fault::Part(others[self.random.below(others.len() as u64) as usize])
                }
            }
            3 => Fault::Drain,
            _ => Fault::Kill,
        };
        Some((name, fault))
    }

    fn suffers(&self, name: Name) -> bool {
        let parted = |(_, (fault, _)): (&Name, &(Fault, Instant))| *fault == Fault::Part(name);
        self.suffering.contains_key(&name) || self.suffering.iter().any(parted)
    }

    /// Begins, and gives how long it lasts.
    fn begin(&mut self, cluster: &mut Cluster, name: Name, fault: Fault) -> Duration {
        let mut between = |from: u64, to: u64| Duration::from_millis(from + self.random.below(to - from));
        match fault {
            Fault::Kill => {
                cluster.kill(name);
                between(50, 1500)
            }
            Fault::Drain => {
                cluster.signal(name, "TERM");
                between(1000, 5000)
            }
            Fault::Stop => {
                cluster.signal(name, "STOP");
                // A moment is no reason to take it for dead; longer is.
                if name.1 == 9 { between(50, 1000) } else { between(50, 5000) }
            }
            Fault::Cut => {
                cluster.net().cut(&host(name));
                between(50, 5000)
            }
            Fault::Part(other) => {
                cluster.net().part(&host(name), &host(other));
                between(50, 5000)
            }
        }
    }

    fn undo(&mut self, cluster: &mut Cluster, name: Name) {
        let Some((fault, _)) = self.suffering.remove(&name) else { return };
        match fault {
            Fault::Kill => cluster.spawn(name),
            Fault::Drain => {
                // Whatever it has not finished by now is lost.
                cluster.kill(name);
                cluster.spawn(name);
            }
            Fault::Stop => cluster.signal(name, "CONT"),
            Fault::Cut => cluster.net().mend(&host(name)),
            Fault::Part(other) => cluster.net().join(&host(name), &host(other)),
        }
    }
}
