//! One watch: what a worker tells a router of its load and its blocks, as fast as the router takes it and no faster.
//!
//! Nothing waits here for a router that does not read: a watch makes its next messages when the last are taken, from
//! what holds then. Loads are told as they are at that moment; changes of blocks come from the [`Feed`], and where that
//! has gone on too far, all blocks that are known are told anew.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use node::Shutdown;
use proto::watch::{BlockChange, News, WatchEvent};
use proto::{BlockHash, Error, WorkerLoad};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::core::Gauges;
use crate::feed::Feed;
use crate::lives::{Life, Lives};
use crate::shell::Shown;

/// Least time between two messages' making: what happens within it is told together.
const PAUSE: Duration = Duration::from_millis(50);
/// Longest time without a word. It is less than the interval of keep-alives: whoever watches then needs to send none.
const HEARTBEAT: Duration = Duration::from_millis(700);
/// Most names in a message: 64 KiB of them.
const NAMES_MAX: usize = 4096;

/// See the module.
pub(crate) struct Watcher {
    /// Of which it tells.
    life: Arc<Life>,
    /// The watch ends when this is another one.
    present: watch::Receiver<Arc<Life>>,
    shutdown: Shutdown,
    shown: watch::Receiver<Shown>,
    /// `None` when blocks are not asked for.
    blocks: Option<Blocks>,
    /// What was told last, when, and how many times that makes.
    load: Option<(WorkerLoad, Instant)>,
    loads: u64,
    /// When messages were made last.
    made: Option<Instant>,
    outbox: VecDeque<WatchEvent>,
}

/// The blocks' part of a watch.
struct Blocks {
    feed: Arc<Feed>,
    changed: watch::Receiver<u64>,
    /// The number of the first change that was not told; `None` before all that is known was told.
    next: Option<u64>,
}

impl Watcher {
    /// A watch of the present life.
    pub(crate) fn new(lives: &Lives, shutdown: Shutdown, with_blocks: bool) -> Self {
        let mut present = lives.follow();
        let life = Arc::clone(&present.borrow_and_update());
        let blocks = with_blocks.then(|| {
            let feed = life.shell.feed();
            Blocks { changed: feed.follow(), feed, next: None }
        });
        let shown = life.shell.watch();
        Self {
            life,
            present,
            shutdown,
            shown,
            blocks,
            load: None,
            loads: 0,
            made: None,
            outbox: VecDeque::new(),
        }
    }

    /// The next message; `None` when the worker stops, or begins another life.
    pub(crate) async fn next(&mut self) -> Option<Result<WatchEvent, Error>> {
        loop {
            if let Some(event) = self.outbox.pop_front() {
                return Some(Ok(event));
            }
            if self.load.is_none() {
                // The load is known at once; blocks the engine has to be asked for, and it answers between two steps.
                self.make_load(self.is_leaving());
                continue;
            }
            if self.made.is_some() && !self.wait().await {
                return None;
            }
            self.made = Some(Instant::now());
            if let Err(error) = self.make().await {
                return Some(Err(error));
            }
        }
    }

    /// Waits until there is something to tell. False when the worker stops, or begins another life. An engine that has ended
    /// before the next life begins has nothing to tell: the load that was told last is said again.
    async fn wait(&mut self) -> bool {
        let heartbeat = self.load.map_or_else(Instant::now, |(_, at)| at + HEARTBEAT);
        let told_drain = self.load.is_some_and(|(load, _)| load.draining);
        let changed = async {
            match &mut self.blocks {
                Some(blocks) => blocks.changed.changed().await.is_ok(),
                None => std::future::pending().await,
            }
        };
        let goes_on = tokio::select! {
            Ok(()) = self.shown.changed() => true,
            Ok(()) = self.present.changed() => true,
            changed = changed => changed,
            () = tokio::time::sleep_until(heartbeat) => true,
            () = self.shutdown.draining(), if !told_drain => true,
            () = self.shutdown.idle() => false,
        };
        if goes_on && let Some(made) = self.made {
            tokio::time::sleep_until(made + PAUSE).await;
        }
        goes_on && self.present.borrow_and_update().identity.epoch == self.life.identity.epoch
    }

    /// True once the life that this tells of is to end, or has.
    fn is_leaving(&self) -> bool {
        let present = self.present.borrow();
        present.is_leaving() || present.identity.epoch != self.life.identity.epoch
    }

    /// Makes the messages that are due.
    async fn make(&mut self) -> Result<(), Error> {
        self.shown.borrow_and_update();
        let is_leaving = self.is_leaving();
        if let Some(blocks) = &mut self.blocks {
            blocks.changed.borrow_and_update();
            let changes = blocks.next.and_then(|next| Some((next, blocks.feed.since(next)?)));
            if let Some((first, changes)) = changes {
                blocks.next = Some(first + changes.len() as u64);
                self.tell_changes(first, &changes);
            } else {
                match self.life.shell.known_blocks().await {
                    Ok((next, known)) => {
                        blocks.next = Some(next);
                        self.tell_known(next, &known);
                    }
                    // The engine has ended, and its blocks with it.
                    Err(_) if is_leaving => {}
                    Err(error) => return Err(error),
                }
            }
        }
        self.make_load(is_leaving);
        Ok(())
    }

    /// Tells the load if that is due.
    fn make_load(&mut self, is_leaving: bool) {
        let now = Instant::now();
        let mut load = load(&self.life.shell.gauges());
        load.draining |= is_leaving || self.shutdown.is_draining();
        if self.load.is_none_or(|(told, at)| told != load || now >= at + HEARTBEAT) {
            self.loads += 1;
            self.load = Some((load, now));
            self.tell(self.loads, News::Load(load));
        }
    }

    fn tell(&mut self, sequence: u64, news: News) {
        self.outbox.push_back(WatchEvent { epoch: self.life.identity.epoch, sequence, news });
    }

    fn tell_known(&mut self, next: u64, known: &[BlockHash]) {
        let chunks = known.len().div_ceil(NAMES_MAX).max(1);
        for chunk in 0..chunks {
            let end = known.len().min((chunk + 1) * NAMES_MAX);
            let blocks = known[chunk * NAMES_MAX..end].to_vec();
            self.tell(next, News::Known { chunk: chunk as u32, last: chunk + 1 == chunks, blocks });
        }
    }

    /// Runs of one kind become one message each.
    fn tell_changes(&mut self, mut first: u64, changes: &[BlockChange]) {
        let is_stored = |change: &BlockChange| matches!(change, BlockChange::Stored(_));
        for run in changes.chunk_by(|a, b| is_stored(a) == is_stored(b)) {
            for part in run.chunks(NAMES_MAX) {
                let names = part.iter().map(|change| match change {
                    BlockChange::Stored(block) | BlockChange::Removed(block) => *block,
                });
                let names = names.collect();
                let news = if is_stored(&part[0]) { News::Stored(names) } else { News::Removed(names) };
                self.tell(first, news);
                first += part.len() as u64;
            }
        }
    }
}

/// The load in a core's numbers.
pub(crate) fn load(gauges: &Gauges) -> WorkerLoad {
    let Gauges { blocks, sequences, tokens, .. } = gauges;
    WorkerLoad {
        waiting: sequences.waiting + sequences.preempted,
        running: sequences.running + sequences.reserved,
        waiting_tokens: tokens.waiting,
        running_tokens: tokens.running,
        blocks_free: blocks.free + blocks.cached,
        blocks_total: blocks.total,
        draining: gauges.draining,
    }
}
