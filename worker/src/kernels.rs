//! Compiled kernels of GPUs, kept in a folder between starts.

use std::path::PathBuf;

use engine::backend::cuda::compile::CodeStore;

/// A folder with a file for each; it is made when the first is kept.
#[derive(Clone, Debug)]
pub(crate) struct KernelFolder(pub(crate) PathBuf);

impl CodeStore for KernelFolder {
    fn get(&self, name: &str) -> Option<Vec<u8>> {
        std::fs::read(self.0.join(name)).ok()
    }

    fn put(&self, name: &str, code: &[u8]) {
        if let Err(fault) = checkpoint::keep(&self.0.join(name), code) {
            tracing::debug!(%fault, folder = %self.0.display(), "a compiled kernel was not kept");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_kept_is_found_whole() {
        let folder = tempfile::tempdir().unwrap();
        let store = KernelFolder(folder.path().join("kernels"));
        assert_eq!(store.get("a"), None);
        store.put("a", b"code");
        assert_eq!(store.get("a").as_deref(), Some(&b"code"[..]));
        let files: Vec<_> =
            std::fs::read_dir(&store.0).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(files, ["a"], "nothing is left beside it");
        // A folder that cannot be made costs no more than the time to compile.
        let nowhere = KernelFolder(store.0.join("a"));
        nowhere.put("b", b"code");
        assert_eq!(nowhere.get("b"), None);
    }
}
