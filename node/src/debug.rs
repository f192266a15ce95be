//! What the services of a process tell of their state to an operator who looks: dumps, as JSON.
//!
//! A dump is made when it is asked for and costs nothing before. It is bounded in time and size, and no more than a few
//! are made at once, so that looking never becomes a load of its own.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use serde::Serialize;
use tokio::sync::Semaphore;

/// Most items of a list that a dump shows.
pub const ITEMS_MAX: usize = 500;
/// Longest that a dump may take.
const TIME_MAX: Duration = Duration::from_secs(2);
/// Most bytes of a dump.
const BYTES_MAX: usize = 4 << 20;
/// Most dumps that are made at once.
const AT_ONCE_MAX: usize = 4;

type Maker = Arc<dyn Fn() -> BoxFuture<'static, serde_json::Result<Vec<u8>>> + Send + Sync>;

/// The dumps of a process. Cheap to clone; all clones are one.
#[derive(Clone)]
pub struct Dumps {
    makers: Arc<Mutex<BTreeMap<String, Maker>>>,
    places: Arc<Semaphore>,
}

/// A dump that can be asked for until this is dropped.
#[derive(Debug)]
#[must_use]
pub struct Dump {
    dumps: Dumps,
    name: String,
}

/// Why there is no dump.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Missing {
    /// Nobody offers one of that name.
    #[error("no dump of this name")]
    Unknown,
    /// Its service did not answer.
    #[error("its service did not answer in time")]
    Late,
    /// It is longer than anybody could read.
    #[error("it is too large to be shown")]
    TooLarge,
    /// It cannot be written as JSON.
    #[error("it cannot be written as JSON")]
    Unwritten,
}

impl Default for Dumps {
    fn default() -> Self {
        Self { makers: Arc::default(), places: Arc::new(Semaphore::new(AT_ONCE_MAX)) }
    }
}

impl fmt::Debug for Dumps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.makers().keys()).finish()
    }
}

impl Dumps {
    /// Offers a dump by that name: `make` is called each time that somebody asks. It must not hold anything up that
    /// serves requests, and must have neither text nor tokens of them in it.
    pub fn add<T, F>(&self, name: &str, make: impl Fn() -> F + Send + Sync + 'static) -> Dump
    where
        T: Serialize,
        F: Future<Output = T> + Send + 'static,
    {
        let maker: Maker = Arc::new(move || {
            let made = make();
            async move { serde_json::to_vec_pretty(&made.await) }.boxed()
        });
        self.makers().insert(name.to_owned(), maker);
        Dump { dumps: self.clone(), name: name.to_owned() }
    }

    /// True when that name can be asked for.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.makers().contains_key(name)
    }

    /// The names that can be asked for.
    pub(crate) fn names(&self) -> Vec<String> {
        self.makers().keys().cloned().collect()
    }

    /// Makes a dump: JSON.
    pub(crate) async fn make(&self, name: &str) -> Result<Vec<u8>, Missing> {
        let maker = self.makers().get(name).cloned().ok_or(Missing::Unknown)?;
        let make = async {
            let _place = self.places.acquire().await;
            maker().await
        };
        let made = tokio::time::timeout(TIME_MAX, make).await.map_err(|_| Missing::Late)?;
        let json = made.map_err(|error| {
            tracing::error!(name, %error, "a dump cannot be written");
            Missing::Unwritten
        })?;
        if json.len() > BYTES_MAX { Err(Missing::TooLarge) } else { Ok(json) }
    }

    fn makers(&self) -> MutexGuard<'_, BTreeMap<String, Maker>> {
        self.makers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Dump {
    fn drop(&mut self) {
        self.dumps.makers().remove(&self.name);
    }
}

/// The first of many, as a dump shows them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Excerpt<T> {
    /// How many there are.
    pub count: usize,
    /// The first of them, at most [`ITEMS_MAX`].
    pub shown: Vec<T>,
}

impl<T> Default for Excerpt<T> {
    fn default() -> Self {
        Self { count: 0, shown: Vec::new() }
    }
}

impl<T> Excerpt<T> {
    /// The first of `count` items.
    pub fn of(count: usize, items: impl IntoIterator<Item = T>) -> Self {
        Self { count, shown: items.into_iter().take(ITEMS_MAX).collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn made(dumps: &Dumps, name: &str) -> Result<String, Missing> {
        dumps.make(name).await.map(|json| String::from_utf8(json).unwrap())
    }

    #[tokio::test(start_paused = true)]
    async fn a_dump_is_made_when_asked_for_and_bounded() {
        let dumps = Dumps::default();
        let short = dumps.add("short", || async { Excerpt::of(2, ["a", "b"]) });
        let text: String = made(&dumps, "short").await.unwrap().split_whitespace().collect();
        assert_eq!(text, r#"{"count":2,"shown":["a","b"]}"#);
        let _never = dumps.add("never", std::future::pending::<()>);
        assert_eq!(made(&dumps, "never").await, Err(Missing::Late));
        let _long = dumps.add("long", || async { "x".repeat(BYTES_MAX) });
        assert_eq!(made(&dumps, "long").await, Err(Missing::TooLarge));
        assert_eq!(dumps.names(), ["long", "never", "short"]);
        drop(short);
        assert_eq!(made(&dumps, "short").await, Err(Missing::Unknown));
        assert_eq!(dumps.names(), ["long", "never"]);
        // No more than a few are made at once.
        let late = futures::future::join_all((0..AT_ONCE_MAX).map(|_| dumps.make("never")));
        let next = async {
            tokio::task::yield_now().await;
            tokio::time::timeout(TIME_MAX / 2, dumps.make("long")).await
        };
        let (late, next) = tokio::join!(late, next);
        assert!(late.iter().all(|made| *made == Err(Missing::Late)) && next.is_err(), "{late:?} {next:?}");
    }

    #[test]
    fn an_excerpt_counts_all_and_shows_some() {
        let excerpt = Excerpt::of(ITEMS_MAX + 7, 0..ITEMS_MAX + 7);
        assert_eq!((excerpt.count, excerpt.shown.len()), (ITEMS_MAX + 7, ITEMS_MAX));
    }
}
