//! Small files that are kept between runs, to be found again or done without.

use std::path::Path;
use std::{fs, io};

/// Writes a file, and its folder where that is missing. It is written aside and renamed: who reads at the same time sees all of
/// it or nothing.
///
/// # Errors
/// What the system says; then nothing is left of it.
pub fn keep(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let aside = path.with_file_name(format!("{name}.{}.partial", std::process::id()));
    let written = path
        .parent()
        .map_or(Ok(()), fs::create_dir_all)
        .and_then(|()| fs::write(&aside, bytes))
        .and_then(|()| fs::rename(&aside, path));
    if written.is_err() {
        let _ = fs::remove_file(&aside);
    }
    written
}
