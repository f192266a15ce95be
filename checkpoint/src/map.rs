//! The memory map of a model file.

use std::fs::File;
use std::ops::Deref;

/// A whole file, mapped read-only.
#[derive(Debug)]
pub(crate) struct Map(memmap2::Mmap);

impl Map {
    /// Maps a file that is open for reading.
    pub(crate) fn of(file: &File) -> std::io::Result<Self> {
        // SAFETY: the map is private to this type and read-only, so no Rust code writes through it. Another process
        // could still change or cut the file: changed bytes are only ever read as plain numbers, after lengths and
        // offsets have been copied out and checked, so they can give wrong values but no access outside the map; a
        // file that is cut while mapped ends the process with a bus error, which is why model files are to be
        // replaced by renaming and never written in place.
        #[expect(unsafe_code, reason = "a memory map of a file has no safe form")]
        let map = unsafe { memmap2::Mmap::map(file) }?;
        Ok(Self(map))
    }
}

impl Deref for Map {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}
