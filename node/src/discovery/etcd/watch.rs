//! Keeps the list of members: reads it, then follows its changes, for as long as the process runs.

use std::sync::Arc;
use std::time::Duration;

use etcd_client::{EventType, ResponseHeader, WatchResponse, WatchStream};
use tokio::sync::watch;

use super::known::{Event, Known};
use super::pause::Pause;
use super::registry::{Fault, Registry, registered};
use crate::{Clock, Member};

/// Longest pause between two tries to reach etcd.
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// Time beyond a lease's that members have to register anew after an outage.
const MARGIN: Duration = Duration::from_secs(2);

/// Follows the members until dropped; `answers` tells whether etcd has answered yet.
pub(super) async fn follow(
    registry: Registry,
    sender: watch::Sender<Arc<[Member]>>,
    answers: watch::Sender<bool>,
) {
    let known = Known::new(registry.lease() + MARGIN);
    let mut follower =
        Follower { registry, known, sender, answers, clock: Clock::new(), heard: Heard::Never };
    let mut pause = Pause::new(PAUSE_MAX);
    loop {
        let fault = follower.follow(&mut pause).await;
        follower.lost(&fault);
        tokio::time::sleep(pause.step()).await;
    }
}

/// Whether etcd answered last time, for the log: an outage is said once, not once per try.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Heard {
    Never,
    Now,
    Not,
}

/// How a stream of changes ended.
enum End {
    /// Everything is to be read anew.
    Stale,
    /// etcd does not answer.
    Lost(Fault),
}

impl From<Fault> for End {
    fn from(fault: Fault) -> Self {
        Self::Lost(fault)
    }
}

struct Follower {
    registry: Registry,
    known: Known,
    sender: watch::Sender<Arc<[Member]>>,
    answers: watch::Sender<bool>,
    clock: Clock,
    heard: Heard,
}

impl Follower {
    /// Reads and follows until etcd does not answer.
    async fn follow(&mut self, pause: &mut Pause) -> Fault {
        loop {
            if self.known.revision().is_none()
                && let Err(fault) = self.read().await
            {
                return fault;
            }
            match self.changes(pause).await {
                End::Stale => {
                    tracing::info!(
                        "the changes since the last outage are not kept, reading all members anew"
                    );
                    if let Err(fault) = self.read().await {
                        return fault;
                    }
                }
                End::Lost(fault) => return fault,
            }
        }
    }

    async fn read(&mut self) -> Result<(), Fault> {
        let reading = self.registry.read().await?;
        let members = reading.members.into_iter().map(Into::into).collect();
        self.apply(Event::Read { revision: reading.revision, members });
        self.answers.send_replace(true);
        Ok(())
    }

    /// Follows the changes that come after what is known.
    async fn changes(&mut self, pause: &mut Pause) -> End {
        let after = self.known.revision().unwrap_or_default();
        let mut stream = match self.registry.watch(after + 1).await {
            Ok(stream) => stream,
            Err(fault) => return fault.into(),
        };
        // The first answer tells how far etcd is: one that has lost its data is behind what is known here, and would
        // tell of nothing until it has caught up.
        let first = match tokio::time::timeout(self.registry.patience(), stream.message()).await {
            Ok(Ok(Some(first))) => first,
            Ok(Ok(None)) => return ended().into(),
            Ok(Err(error)) => return Fault::from(error).into(),
            Err(_) => return unanswered().into(),
        };
        let current = first.header().map_or(after, ResponseHeader::revision);
        if first.canceled() || current < after {
            return End::Stale;
        }
        self.apply(Event::Opened);
        self.opened();
        pause.reset();
        self.take(&first);
        self.listen(stream).await
    }

    /// Takes changes as they come. Asks for a sign of life in between: a connection may look whole for long after etcd has
    /// stopped.
    async fn listen(&mut self, mut stream: WatchStream) -> End {
        let patience = self.registry.patience();
        let mut asks = tokio::time::interval(patience / 2);
        asks.reset();
        let mut heard_at = self.clock.now();
        loop {
            let settles = self.known.settles_at();
            let settled = async {
                match settles {
                    Some(until) => tokio::time::sleep(until.saturating_sub(self.clock.now())).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                message = stream.message() => match message {
                    Ok(Some(message)) if message.canceled() => return End::Stale,
                    Ok(Some(message)) => {
                        heard_at = self.clock.now();
                        self.take(&message);
                    }
                    Ok(None) => return ended().into(),
                    Err(error) => return Fault::from(error).into(),
                },
                () = settled => if let Err(fault) = self.read().await {
                    return fault.into();
                },
                _ = asks.tick() => {
                    if self.clock.now().saturating_sub(heard_at) > patience {
                        return unanswered().into();
                    }
                    if let Err(error) = stream.request_progress().await {
                        return Fault::from(error).into();
                    }
                }
            }
        }
    }

    fn take(&mut self, message: &WatchResponse) {
        for event in message.events() {
            let Some(kv) = event.kv() else { continue };
            let revision = kv.mod_revision();
            let gone = || Event::Deleted { key: String::from_utf8_lossy(kv.key()).into_owned(), revision };
            let event = match event.event_type() {
                EventType::Delete => gone(),
                EventType::Put => match registered(kv) {
                    Some((key, entry)) => Event::Put { key, member: entry.member(), revision },
                    None => gone(),
                },
            };
            self.apply(event);
        }
    }

    fn apply(&mut self, event: Event) {
        self.known.on(event, self.clock.now());
        let members = self.known.members();
        if **self.sender.borrow() != *members {
            tracing::info!(count = members.len(), "members changed");
            self.sender.send_replace(members.into());
        }
    }

    fn opened(&mut self) {
        if std::mem::replace(&mut self.heard, Heard::Now) == Heard::Not {
            tracing::info!(members = self.sender.borrow().len(), "etcd answers again");
        }
    }

    fn lost(&mut self, fault: &Fault) {
        self.apply(Event::Lost);
        match std::mem::replace(&mut self.heard, Heard::Not) {
            Heard::Never => tracing::warn!(%fault, "etcd does not answer, no member is known until it does"),
            Heard::Now => {
                let members = self.sender.borrow().len();
                tracing::warn!(%fault, members, "etcd does not answer, keeping the last known members");
            }
            Heard::Not => tracing::debug!(%fault, "etcd does not answer"),
        }
    }
}

fn ended() -> Fault {
    Fault::Unanswered("the stream ended".to_owned())
}

fn unanswered() -> Fault {
    Fault::Unanswered("no sign of life on the stream of changes".to_owned())
}
