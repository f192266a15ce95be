//! Watching a worker: its stream of events, as the follower understands them, into the pools.

use std::time::Duration;

use node::Network;
use proto::watch::{News, WatchEvent};
use proto::{WorkerEpoch, wire};
use tokio::sync::Notify;
use tokio::time::timeout;
use tonic::{Request, Streaming};
use tracing::debug;
use wire::worker_client::WorkerClient;

use crate::cluster::{Cluster, DescribeConfig};
use crate::follow::{Effect, Follower};
use crate::meters;

/// Longest silence of a worker that is watched: four of its heartbeats. That its host is gone is known sooner, by the
/// connection.
const SILENCE_MAX: Duration = Duration::from_secs(3);

/// What a worker has said of itself that a watch says again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Told {
    pub(crate) epoch: WorkerEpoch,
    pub(crate) draining: bool,
}

/// How a stream of events came to its end.
enum End {
    /// The worker is to be asked who it is.
    Ask,
    /// Something is missing: the watch is to be opened anew.
    Resync,
    /// It ended by itself.
    Closed,
}

/// Follows a worker's events until it should be asked who it is: it is another than it was, it drains, it says nothing
/// any more, or somebody wants to know. False when it could not be watched at all.
pub(crate) async fn follow(
    cluster: &Cluster,
    network: &Network,
    (address, told): (&str, Told),
    nudge: &Notify,
    config: DescribeConfig,
) -> bool {
    let mut follower = Follower::new();
    let mut heard = false;
    loop {
        let mut client = node::limits!(WorkerClient::new(network.connect(address)));
        let request = Request::new(wire::WatchRequest { blocks: config.with_blocks });
        let stream = match timeout(config.timeout, client.watch(request)).await {
            Ok(Ok(answer)) => answer.into_inner(),
            Ok(Err(status)) => {
                debug!(address, %status, "worker cannot be watched");
                return heard;
            }
            Err(_) => return heard,
        };
        follower.reopened();
        let mut watch = Watch { cluster, address, told, follower: &mut follower, heard: &mut heard };
        let end = tokio::select! {
            end = watch.take_in(stream) => end,
            () = nudge.notified() => End::Ask,
        };
        match end {
            End::Ask => return true,
            End::Closed => return heard,
            End::Resync => tokio::time::sleep(config.every / 4).await,
        }
    }
}

/// One stream of events.
struct Watch<'a> {
    cluster: &'a Cluster,
    address: &'a str,
    told: Told,
    follower: &'a mut Follower,
    heard: &'a mut bool,
}

impl Watch<'_> {
    async fn take_in(&mut self, mut stream: Streaming<wire::WatchEvent>) -> End {
        loop {
            let event = match timeout(SILENCE_MAX, stream.message()).await {
                Ok(Ok(Some(event))) => WatchEvent::try_from(event),
                Ok(Ok(None)) => return End::Closed,
                Ok(Err(status)) => {
                    debug!(address = self.address, %status, "a watch ended");
                    return End::Closed;
                }
                Err(_) => return End::Ask,
            };
            let event = match event {
                Ok(event) => event,
                Err(error) => {
                    debug!(address = self.address, %error, "a watch cannot be read");
                    return End::Closed;
                }
            };
            *self.heard = true;
            let drains = matches!(&event.news, News::Load(load) if load.draining != self.told.draining);
            if event.epoch != self.told.epoch || drains {
                return End::Ask;
            }
            if let Some(end) = self.tell(event) {
                return end;
            }
        }
    }

    fn tell(&mut self, event: WatchEvent) -> Option<End> {
        if matches!(event.news, News::Stored(_)) && node::goes_wrong("router.watch.stored") {
            return None;
        }
        let mut effects = Vec::new();
        self.follower.on(event, &mut effects);
        let mut end = None;
        for effect in effects {
            if let Effect::Resync(cause) = &effect {
                meters::resynced(*cause);
                debug!(address = self.address, cause = cause.name(), "watching anew");
                end = Some(End::Resync);
            }
            self.cluster.heard(self.address, effect);
        }
        end
    }
}
