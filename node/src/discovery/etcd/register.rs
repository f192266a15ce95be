//! Keeps one member registered, from its start to its end.

use std::sync::Arc;
use std::time::Duration;

use proto::{Error as Refusal, Role};
use tokio::sync::watch;

use super::registration::{Action, Outcome, Registration};
use super::registry::{Beats, Fault, Registered, Registry};
use crate::{Busy, Clock, Entry, Member, Shutdown};

/// Registers what is wanted, and keeps it so until the process drains; then takes the member out: a router at once, a worker
/// when nothing but `busy` is left of the process, since until then peers fetch from it and routers move what it has.
///
/// # Errors
/// When the member does not fit the others of its model (invariant I9): the message names the field.
pub(super) async fn keep(
    registry: Registry,
    mut wanted: watch::Receiver<Entry>,
    members: watch::Receiver<Arc<[Member]>>,
    shutdown: &Shutdown,
    busy: &Busy,
) -> Result<(), Refusal> {
    let entry = wanted.borrow_and_update().clone();
    let registration = Registration::new();
    let stays = entry.role != Role::Router;
    let mut place = Registrar { registry, wanted, entry, former: None, members, registration, beats: None };
    let ended = tokio::select! {
        biased;
        () = shutdown.draining(), if !stays => Ok(()),
        () = shutdown.idle_but(busy), if stays => Ok(()),
        refusal = place.stay() => Err(refusal),
    };
    if let Some(lease) = place.registration.lease() {
        place.registry.leave(lease).await;
    }
    ended
}

struct Registrar {
    registry: Registry,
    /// What the member has to say of itself, as it changes.
    wanted: watch::Receiver<Entry>,
    /// The last of that which was taken over.
    entry: Entry,
    /// The key under which it was registered before, to be taken out with the next put. A worker has two roles to be
    /// registered for, and so no more than one of them is a former one.
    former: Option<String>,
    members: watch::Receiver<Arc<[Member]>>,
    registration: Registration,
    /// Opened with the first beat of a lease, and anew when it broke.
    beats: Option<Beats>,
}

/// Why a put came to nothing.
enum Unput {
    Refused(Refusal),
    Fault(Fault),
}

impl From<Fault> for Unput {
    fn from(fault: Fault) -> Self {
        Self::Fault(fault)
    }
}

impl Registrar {
    /// Registers and stays so; returns only when refused.
    async fn stay(&mut self) -> Refusal {
        let clock = Clock::new();
        loop {
            self.take_wanted(clock.now());
            let done = match self.registration.next(clock.now()) {
                Action::Wait(until) => {
                    tokio::select! {
                        () = tokio::time::sleep(until.saturating_sub(clock.now())) => {}
                        Ok(()) = self.wanted.changed() => {}
                    }
                    continue;
                }
                Action::Grant => {
                    let granted = self.registry.grant().await;
                    granted.map(|(lease, ttl)| Outcome::Granted { lease, ttl })
                }
                Action::Put { lease, compare } => match self.put(lease, compare).await {
                    Ok(()) => Ok(Outcome::Put),
                    Err(Unput::Fault(fault)) => Err(fault),
                    Err(Unput::Refused(refusal)) => return refusal,
                },
                Action::KeepAlive(lease) => self.keep_alive(lease).await.map(|()| Outcome::Kept),
            };
            let outcome = done.unwrap_or_else(|fault| self.broken(&fault));
            let own = self.entry.member();
            let is_listed = self.members.borrow().contains(&own);
            self.registration.on(outcome, is_listed, clock.now());
        }
    }

    /// Takes over what is wanted now, if that is something else.
    fn take_wanted(&mut self, now: Duration) {
        let wanted = self.wanted.borrow_and_update().clone();
        if wanted == self.entry {
            return;
        }
        let before = self.registry.key(&self.entry);
        self.former =
            Some(before).filter(|before| *before != self.registry.key(&wanted)).or(self.former.take());
        self.entry = wanted;
        self.registration.changed(now);
    }

    fn broken(&mut self, fault: &Fault) -> Outcome {
        self.beats = None;
        match fault {
            Fault::LeaseGone => {
                tracing::info!("the lease in etcd has ended, registering anew");
                Outcome::LeaseGone
            }
            Fault::Unanswered(_) => {
                tracing::debug!(%fault, "registration waits for etcd");
                Outcome::Unanswered
            }
        }
    }

    /// Puts the key. With `compare`, nobody who does not fit is let in: neither one that comes later than those that it does
    /// not fit, nor the later one of two that come at once.
    async fn put(&mut self, lease: i64, compare: bool) -> Result<(), Unput> {
        if compare {
            let reading = self.registry.read().await?;
            self.check(&reading.members, i64::MAX)?;
        }
        let revision = self.registry.put(&self.entry, self.former.as_deref(), lease).await?;
        self.former = None;
        if compare {
            let reading = self.registry.read().await?;
            self.check(&reading.members, revision)?;
        }
        let Entry { role, address, epoch, .. } = &self.entry;
        tracing::info!(role = role.name(), address, %epoch, "registered");
        Ok(())
    }

    /// Compares with those that were put before a revision.
    fn check(&self, registered: &[Registered], before: i64) -> Result<(), Unput> {
        let own = self.registry.key(&self.entry);
        let others = registered.iter().filter(|other| other.key != own && other.revision < before);
        let refusal = others.into_iter().find_map(|other| self.entry.mismatch(&other.entry));
        refusal.map_or(Ok(()), |refusal| Err(Unput::Refused(refusal)))
    }

    async fn keep_alive(&mut self, lease: i64) -> Result<(), Fault> {
        match &mut self.beats {
            Some(beats) => beats.beat().await,
            None => {
                self.beats = Some(self.registry.keep_alive(lease).await?);
                Ok(())
            }
        }
    }
}
