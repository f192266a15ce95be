//! The folder that files are put into: who may write to it, what is there already, and how a whole file gets its name.

use std::fmt::Write as _;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read as _};
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use node::{Error, Tasks};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::{Wanted, fault};

/// Lies in the folder, and is held by whoever writes there.
const LOCK: &str = ".baton-fetch.lock";
/// Ends the name of a file that is not whole yet.
const PART: &str = "part";
/// How often a folder that another process writes to is asked for.
const LOCK_EVERY: Duration = Duration::from_millis(500);
/// Bytes read at once for a digest.
const READ_BYTES: usize = 1 << 20;

/// A folder that this process alone writes to. Two pods may share one volume.
#[derive(Debug)]
pub(super) struct Folder {
    path: PathBuf,
    tasks: Tasks,
    /// Released when it is closed, by the system if by nobody else.
    _lock: File,
}

/// Which version of a file a part is of, so that the two are never joined to something that nobody served.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Version {
    /// Where it comes from, without its query.
    pub(super) url: String,
    /// What the server calls this version: a strong entity tag.
    pub(super) tag: Option<String>,
}

/// A file that is not whole yet, and the version that it is of.
#[derive(Clone, Debug)]
pub(super) struct Part {
    pub(super) path: PathBuf,
    version: PathBuf,
}

impl Folder {
    /// Makes the folder if need be, and waits until no other process writes to it.
    pub(super) async fn lock(path: &Path, tasks: Tasks) -> Result<Self, Error> {
        let shown = path.display().to_string();
        let failed = |error: io::Error| fault(&shown, format!("cannot be written to: {error}"));
        fs::create_dir_all(path).map_err(failed)?;
        let lock = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(path.join(LOCK))
            .map_err(failed)?;
        let mut is_told = false;
        loop {
            match lock.try_lock() {
                Ok(()) => return Ok(Self { path: path.to_owned(), tasks, _lock: lock }),
                Err(TryLockError::WouldBlock) => {}
                Err(TryLockError::Error(error)) => return Err(failed(error)),
            }
            if !std::mem::replace(&mut is_told, true) {
                tracing::info!(folder = shown, "another fetch writes there, waiting for it");
            }
            tokio::time::sleep(LOCK_EVERY).await;
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Where the file shall lie.
    pub(super) fn place(&self, name: &Path) -> PathBuf {
        self.path.join(name)
    }

    /// True when the file is there, as long as it should be, and with the right digest where that is known. A length that
    /// nobody knows fits nothing, unless the digest does.
    pub(super) async fn has(&self, wanted: &Wanted) -> Result<bool, Error> {
        let place = self.place(&wanted.name);
        let Ok(known) = fs::metadata(&place) else { return Ok(false) };
        if !known.is_file() {
            return Err(fault(&place.display().to_string(), "expected a file or nothing there"));
        }
        if wanted.bytes.is_some_and(|bytes| bytes != known.len()) {
            return Ok(false);
        }
        match &wanted.sha256 {
            None => Ok(wanted.bytes.is_some()),
            Some(expected) => Ok(self.digest(&place).await? == *expected),
        }
    }

    /// The file's SHA-256, as it lies on the disk.
    pub(super) async fn digest(&self, path: &Path) -> Result<String, Error> {
        let (owned, shown) = (path.to_owned(), path.display().to_string());
        let digest = self.tasks.spawn_blocking("digest", move || sha256(&owned)).await?;
        digest.map_err(|error| fault(&shown, format!("cannot be read: {error}")))
    }

    /// Does something with files that takes long.
    pub(super) async fn blocking<T: Send + 'static>(
        &self,
        what: &Path,
        work: impl FnOnce() -> io::Result<T> + Send + 'static,
    ) -> Result<T, Error> {
        let result = self.tasks.spawn_blocking("files", work).await?;
        result.map_err(|error| fault(&what.display().to_string(), error.to_string()))
    }

    /// The place of the file while it is not whole; folders above it are made.
    pub(super) fn part(&self, name: &Path) -> io::Result<Part> {
        let place = self.place(name);
        if let Some(parent) = place.parent() {
            fs::create_dir_all(parent)?;
        }
        let with = |ending: &str| {
            let mut name = place.file_name().unwrap_or_default().to_owned();
            name.push(ending);
            place.with_file_name(name)
        };
        Ok(Part { path: with(&format!(".{PART}")), version: with(&format!(".{PART}.version")) })
    }

    /// Gives a whole file its name, once its bytes are on the disk.
    pub(super) async fn keep(&self, part: &Part, name: &Path) -> Result<PathBuf, Error> {
        let (place, part) = (self.place(name), part.clone());
        let moved = place.clone();
        let keep = move || {
            File::open(&part.path)?.sync_all()?;
            fs::rename(&part.path, &moved)?;
            part.forget_version()?;
            // The name itself is on the disk when its folder is.
            moved.parent().map_or(Ok(()), |folder| File::open(folder)?.sync_all())
        };
        self.blocking(&place.clone(), keep).await?;
        Ok(place)
    }
}

impl Part {
    /// How much of the file is there of this version; nothing of another one, whose bytes are removed.
    pub(super) fn begun(&self) -> (u64, Version) {
        let version = fs::read(&self.version).ok().and_then(|text| serde_json::from_slice(&text).ok());
        let bytes = fs::metadata(&self.path).map(|known| known.len());
        match (version, bytes) {
            (Some(version), Ok(bytes)) => (bytes, version),
            _ => (0, Version::default()),
        }
    }

    /// Opens it: at its end to go on, or empty and of a new version.
    pub(super) fn open(&self, go_on: bool, version: &Version) -> io::Result<File> {
        if go_on {
            return OpenOptions::new().append(true).open(&self.path);
        }
        // In this order a process that dies in between leaves no bytes under a version that they are not of.
        let file = File::create(&self.path)?;
        fs::write(&self.version, serde_json::to_vec(version)?)?;
        Ok(file)
    }

    /// Removes what is there.
    pub(super) fn remove(&self) -> io::Result<()> {
        fs::remove_file(&self.path).or_else(absent)?;
        self.forget_version()
    }

    fn forget_version(&self) -> io::Result<()> {
        fs::remove_file(&self.version).or_else(absent)
    }
}

/// What is not there need not be removed.
fn absent(error: io::Error) -> io::Result<()> {
    if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) }
}

/// A path that stays below the folder that it is joined to; nothing of any other.
pub(super) fn plain(path: &Path) -> Option<PathBuf> {
    let is_plain = path.components().all(|part| matches!(part, Component::Normal(_)));
    (is_plain && path.file_name().is_some()).then(|| path.to_owned())
}

/// True for 64 hexadecimal digits.
pub(super) fn is_digest(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

fn sha256(path: &Path) -> io::Result<String> {
    let mut file = File::open(path)?;
    let (mut hasher, mut buffer) = (Sha256::new(), vec![0; READ_BYTES]);
    loop {
        match file.read(&mut buffer)? {
            0 => break,
            read => hasher.update(&buffer[..read]),
        }
    }
    let mut hex = String::with_capacity(64);
    for byte in hasher.finalize() {
        let _ = write!(hex, "{byte:02x}");
    }
    Ok(hex)
}
