//! Downloads: try after try, each going on where the last one ended, until a file is whole and proven.

use std::io::Write as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use http::{StatusCode, Uri};
use node::Error;

use super::client::{self, Answer, Client, Failure};
use super::folder::{Folder, Part, Version};
use super::hub::{self, Hub, Listed, Repository};
use super::{Config, Wanted, fault};

/// How often a download says how far it is.
const PROGRESS_EVERY: Duration = Duration::from_secs(5);
/// How much shorter than the longest pause the first one is: two to this power.
const PAUSE_DOUBLINGS: u32 = 7;

/// Fetches files one after the other.
pub(super) struct Downloads {
    client: Client,
    tries: Tries,
    /// The furthest byte of the file that any try came to.
    furthest: u64,
}

/// Counts failures, and says how long to wait after each.
#[derive(Clone, Debug)]
struct Tries {
    failures: usize,
    failures_max: usize,
    pause_max: Duration,
}

impl Tries {
    /// Something was got: what failed before counts no more.
    fn moved(&mut self) {
        self.failures = 0;
    }

    /// Takes a failure: how long to wait before the next try, or the message when there is none.
    fn failed(&mut self, failure: Failure) -> Result<Duration, String> {
        let (message, after) = match failure {
            Failure::Final(message) | Failure::OutOfRange(message) => return Err(message),
            Failure::Passing(message, after) => (message, after),
        };
        self.failures += 1;
        if self.failures >= self.failures_max {
            return Err(format!("{message}; that was failure {} of {}", self.failures, self.failures_max));
        }
        let doublings = (self.failures as u32 - 1).min(PAUSE_DOUBLINGS);
        let pause = self.pause_max / 2_u32.pow(PAUSE_DOUBLINGS - doublings);
        let pause = pause.max(after.unwrap_or_default().min(self.pause_max));
        tracing::warn!(failure = message, pause_seconds = pause.as_secs_f64(), "trying again");
        Ok(pause)
    }
}

/// What a try came to that did not fail.
enum Outcome {
    /// The file was there already.
    Present,
    /// The part is the whole file.
    Whole,
}

impl Downloads {
    pub(super) fn new(client: Client, config: &Config) -> Self {
        let tries =
            Tries { failures: 0, failures_max: config.failures_max, pause_max: config.pause_max_seconds };
        Self { client, tries, furthest: 0 }
    }

    /// Asks the hub what a repository holds.
    pub(super) async fn list(&mut self, hub: &Hub, repository: &Repository) -> Result<Listed, Error> {
        let url = hub.listing(repository)?;
        self.tries.moved();
        loop {
            let text = match self.client.get(&url, 0, None).await {
                Ok(answer) => answer.whole().await,
                Err(failure) => Err(failure),
            };
            match text {
                Ok(text) => return hub::read_listing(repository, &text),
                Err(failure) => self.pause(failure, &format!("hf:{repository}")).await?,
            }
        }
    }

    /// Fetches the file unless it is there, and gives its place.
    pub(super) async fn fetch(
        &mut self,
        url: &Uri,
        wanted: Wanted,
        folder: &Folder,
    ) -> Result<PathBuf, Error> {
        let shown = wanted.name.display().to_string();
        if folder.has(&wanted).await? {
            tracing::info!(file = shown, "there already");
            return Ok(folder.place(&wanted.name));
        }
        let part = folder.part(&wanted.name).map_err(|error| fault(&shown, error.to_string()))?;
        self.tries.moved();
        self.furthest = part.begun().0;
        loop {
            match self.attempt(url, &wanted, &part, folder).await? {
                Ok(Outcome::Present) => {
                    tracing::info!(file = shown, "there already");
                    return Ok(folder.place(&wanted.name));
                }
                Ok(Outcome::Whole) => return folder.keep(&part, &wanted.name).await,
                Err(failure) => self.pause(failure, &shown).await?,
            }
        }
    }

    async fn pause(&mut self, failure: Failure, what: &str) -> Result<(), Error> {
        let pause = self.tries.failed(failure).map_err(|message| fault(what, message))?;
        tokio::time::sleep(pause).await;
        Ok(())
    }

    /// One request, and all that comes of it. The outer error is one of this machine, which no other try mends.
    async fn attempt(
        &mut self,
        url: &Uri,
        wanted: &Wanted,
        part: &Part,
        folder: &Folder,
    ) -> Result<Result<Outcome, Failure>, Error> {
        let shown = wanted.name.display().to_string();
        let (begun, version) = part.begun();
        let is_this = version.url == client::shown(url);
        // Without a name for the version only a digest can tell whether two parts belong together.
        let from = if is_this && (version.tag.is_some() || wanted.sha256.is_some()) { begun } else { 0 };
        let failed = |error: std::io::Error| fault(&shown, error.to_string());
        if from > 0 && wanted.bytes == Some(from) {
            // All of it had come when the last try ended.
            return self.proven(wanted.sha256.as_deref(), true, part, folder).await;
        }
        let answer = match self.client.get(url, from, version.tag.as_deref()).await {
            Ok(answer) => answer,
            Err(Failure::OutOfRange(message)) if from > 0 => {
                part.remove().map_err(failed)?;
                return Ok(Err(Failure::Passing(message, None)));
            }
            Err(failure) => return Ok(Err(failure)),
        };
        let from = if answer.status == StatusCode::PARTIAL_CONTENT { from } else { 0 };
        let bytes = match length(&answer, from) {
            Ok(bytes) => bytes,
            Err(failure) => {
                part.remove().map_err(failed)?;
                return Ok(Err(failure));
            }
        };
        if let (Some(expected), Some(bytes)) = (wanted.bytes, bytes)
            && expected != bytes
        {
            return Ok(Err(Failure::Final(format!("expected {expected} bytes, the server has {bytes}"))));
        }
        let expected =
            Wanted { bytes, sha256: wanted.sha256.clone().or(answer.sha256.clone()), ..wanted.clone() };
        if from == 0 && folder.has(&expected).await? {
            return Ok(Ok(Outcome::Present));
        }
        let version = Version { url: client::shown(url), tag: strong_tag(&answer) };
        let mut file = part.open(from > 0, &version).map_err(failed)?;
        if let Err(failure) = self.receive(answer, &mut file, (from, bytes), &shown).await? {
            return Ok(Err(failure));
        }
        drop(file);
        self.proven(expected.sha256.as_deref(), from > 0, part, folder).await
    }

    /// Writes what comes to the file.
    async fn receive(
        &mut self,
        mut answer: Answer,
        file: &mut std::fs::File,
        (from, bytes): (u64, Option<u64>),
        shown: &str,
    ) -> Result<Result<(), Failure>, Error> {
        let (start, mut told, mut at) = (Instant::now(), Instant::now(), from);
        let progress = |at: u64, message: &str| {
            let rate = (at - from) as f64 / start.elapsed().as_secs_f64().max(0.001) / 1e6;
            let of = bytes.unwrap_or_default();
            let percent = (at * 100).checked_div(of).unwrap_or_default().min(100);
            tracing::info!(
                file = shown,
                bytes = at,
                of,
                percent,
                megabytes_per_second = rate.round(),
                "{message}"
            );
        };
        progress(at, if from > 0 { "going on" } else { "begins" });
        loop {
            let chunk = match answer.next().await {
                Ok(Some(chunk)) => chunk,
                Ok(None) => break,
                Err(failure) => return Ok(Err(failure)),
            };
            file.write_all(&chunk).map_err(|error| fault(shown, error.to_string()))?;
            at += chunk.len() as u64;
            if at > self.furthest {
                self.furthest = at;
                self.tries.moved();
            }
            if told.elapsed() >= PROGRESS_EVERY {
                told = Instant::now();
                progress(at, "coming");
            }
        }
        progress(at, "came");
        if bytes.is_some_and(|bytes| bytes != at) {
            let message = format!("expected {} bytes, {at} came", bytes.unwrap_or_default());
            return Ok(Err(Failure::Passing(message, None)));
        }
        Ok(Ok(()))
    }

    /// Holds the part to its digest. One that was joined of two tries may be worth another, one from a single try is not.
    async fn proven(
        &self,
        sha256: Option<&str>,
        was_joined: bool,
        part: &Part,
        folder: &Folder,
    ) -> Result<Result<Outcome, Failure>, Error> {
        let Some(expected) = sha256 else { return Ok(Ok(Outcome::Whole)) };
        let digest = folder.digest(&part.path).await?;
        if digest == expected {
            return Ok(Ok(Outcome::Whole));
        }
        part.remove().map_err(|error| fault(&part.path.display().to_string(), error.to_string()))?;
        let message = format!("expected sha256 {expected}, got {digest}");
        Ok(Err(if was_joined { Failure::Passing(message, None) } else { Failure::Final(message) }))
    }
}

/// A name for the version of the file that can be asked for again; a weak one says only that it means the same.
fn strong_tag(answer: &Answer) -> Option<String> {
    answer.header("etag").filter(|tag| tag.starts_with('"')).map(str::to_owned)
}

/// The length of the whole file, where the server tells it; a failure when its answer begins elsewhere than asked.
fn length(answer: &Answer, from: u64) -> Result<Option<u64>, Failure> {
    if answer.status != StatusCode::PARTIAL_CONTENT {
        return Ok(answer.header("content-length").and_then(|text| text.parse().ok()));
    }
    let range = answer.header("content-range").unwrap_or_default();
    let parsed = range.strip_prefix("bytes ").and_then(|range| range.split_once('/'));
    match parsed {
        Some((part, whole)) if part.split('-').next() == Some(from.to_string().as_str()) => {
            Ok(whole.parse().ok())
        }
        _ => Err(Failure::Passing(format!("asked for bytes from {from}, the server sends {range:?}"), None)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest_and_end() {
        let mut tries = Tries { failures: 0, failures_max: 10, pause_max: Duration::from_secs(32) };
        let passing = |after| Failure::Passing("no".to_owned(), after);
        let pauses: Vec<_> = (0..9).map(|_| tries.failed(passing(None)).unwrap().as_secs_f64()).collect();
        assert_eq!(pauses, [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 32.0]);
        assert_eq!(tries.failed(passing(None)).unwrap_err(), "no; that was failure 10 of 10");
        tries.moved();
        let asked = Some(Duration::from_secs(3));
        assert_eq!(tries.failed(passing(asked)).unwrap(), Duration::from_secs(3));
        let long = Some(Duration::from_hours(1));
        assert_eq!(tries.failed(passing(long)).unwrap(), Duration::from_secs(32));
        assert_eq!(tries.failed(Failure::Final("gone".to_owned())).unwrap_err(), "gone");
    }
}
