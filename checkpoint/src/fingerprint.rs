//! The digest of a whole file, and a cache of it by file identity.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use proto::Digest;
use sha2::{Digest as _, Sha256};

use crate::kept::keep;

/// What names a file's content as long as nobody sets its clock back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    device: u64,
    inode: u64,
    size: u64,
    modified_seconds: i64,
    modified_nanoseconds: i64,
}

impl Identity {
    pub(crate) fn of(file: &File) -> io::Result<Self> {
        let metadata = file.metadata()?;
        Ok(Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            size: metadata.size(),
            modified_seconds: metadata.mtime(),
            modified_nanoseconds: metadata.mtime_nsec(),
        })
    }

    /// Where the digest of a file of this identity is kept.
    fn entry(&self, dir: &Path) -> PathBuf {
        let Self { device, inode, size, modified_seconds, modified_nanoseconds } = self;
        dir.join(format!("{device}-{inode}-{size}-{modified_seconds}.{modified_nanoseconds}.sha256"))
    }
}

pub(crate) fn sha256(bytes: &[u8]) -> Digest {
    Digest(Sha256::digest(bytes).into())
}

/// The digest kept for that identity, if one is there and whole.
pub(crate) fn load(dir: &Path, identity: &Identity) -> Option<Digest> {
    let text = fs::read_to_string(identity.entry(dir)).ok()?;
    let (pairs, rest) = text.trim_end().as_bytes().as_chunks::<2>();
    if pairs.len() != 32 || !rest.is_empty() {
        return None;
    }
    let mut digest = [0; 32];
    for (byte, pair) in digest.iter_mut().zip(pairs) {
        let [high, low] = pair.map(|digit| (digit as char).to_digit(16));
        *byte = (high? << 4 | low?) as u8;
    }
    Some(Digest(digest))
}

/// Keeps a digest.
pub(crate) fn store(dir: &Path, identity: &Identity, digest: &Digest) {
    // Nothing to say to the caller: the digest is right, it will only be computed again.
    let _ = keep(&identity.entry(dir), format!("{digest}\n").as_bytes());
}
