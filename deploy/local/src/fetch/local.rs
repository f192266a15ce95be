//! From a path of this machine: a mounted volume, or a folder of an image that carries its model.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use node::Error;

use super::folder::Folder;
use super::{Config, Wanted, choose, fault, lower, name_of, renamed};

/// Copies the file, or those of a folder that the pattern names, unless they are there already.
pub(super) async fn copy(path: &Path, config: &Config, folder: &Folder) -> Result<Vec<PathBuf>, Error> {
    let shown = path.display().to_string();
    let known = fs::metadata(path).map_err(|error| fault(&shown, error.to_string()))?;
    if known.is_file() {
        let name = name_of(&path.to_string_lossy(), config)?;
        let wanted = Wanted { name, bytes: Some(known.len()), sha256: lower(config.sha256.as_deref()) };
        return Ok(vec![copy_one(path, wanted, folder).await?]);
    }
    let files = choose(files_of(path).map_err(|error| fault(&shown, error.to_string()))?, config, &shown)?;
    let mut copied = Vec::new();
    for wanted in files {
        let from = path.join(&wanted.name);
        let name = renamed(wanted.name.clone(), config);
        copied.push(copy_one(&from, Wanted { name, ..wanted }, folder).await?);
    }
    Ok(copied)
}

fn files_of(folder: &Path) -> io::Result<Vec<Wanted>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        // Of what a link leads to, not of the link: volumes of configuration are made of links.
        let known = fs::metadata(entry.path())?;
        if known.is_file() {
            files.push(Wanted { name: entry.file_name().into(), bytes: Some(known.len()), sha256: None });
        }
    }
    Ok(files)
}

async fn copy_one(from: &Path, wanted: Wanted, folder: &Folder) -> Result<PathBuf, Error> {
    let shown = from.display().to_string();
    let is_given = wanted.sha256.is_some();
    let place = folder.place(&wanted.name);
    let is_there = fs::metadata(&place).is_ok_and(|known| Some(known.len()) == wanted.bytes);
    // The original's digest is worth reading it only where there is something to compare it with.
    let sha256 = match wanted.sha256.clone() {
        None if is_there => Some(folder.digest(from).await?),
        given => given,
    };
    if folder.has(&Wanted { sha256: sha256.clone(), ..wanted.clone() }).await? {
        tracing::info!(file = %wanted.name.display(), "there already");
        return Ok(place);
    }
    let part = folder.part(&wanted.name).map_err(|error| fault(&shown, error.to_string()))?;
    let (source, target) = (from.to_owned(), part.clone());
    let copy = move || {
        target.remove()?;
        io::copy(&mut File::open(&source)?, &mut File::create(&target.path)?)
    };
    let bytes = folder.blocking(from, copy).await?;
    if is_given {
        let expected = sha256.unwrap_or_default();
        let digest = folder.digest(&part.path).await?;
        if digest != expected {
            part.remove().map_err(|error| fault(&shown, error.to_string()))?;
            return Err(fault(&shown, format!("expected sha256 {expected}, got {digest}")));
        }
    }
    tracing::info!(file = %wanted.name.display(), bytes, "copied");
    folder.keep(&part, &wanted.name).await
}
