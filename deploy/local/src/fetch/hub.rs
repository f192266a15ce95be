//! A model hub, as Hugging Face's API has it: what a repository holds, and where each file is.

use std::fmt::{self, Write as _};
use std::path::{Path, PathBuf};

use http::Uri;
use node::Error;
use serde::Deserialize;

use super::{Wanted, client, fault, folder};

/// The hub that is asked where no other is named.
const ENDPOINT: &str = "https://huggingface.co";
/// The branch that is asked for where no revision is named.
const REVISION: &str = "main";

/// Which hub, and by what leave.
#[derive(Clone, PartialEq)]
pub struct Hub {
    /// Where it is, as a URL without a slash at its end.
    pub endpoint: String,
    /// What it is shown to prove who asks.
    pub token: Option<String>,
}

impl fmt::Debug for Hub {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hub").field("endpoint", &self.endpoint).finish_non_exhaustive()
    }
}

impl Hub {
    /// As the environment has it, by the names that the hub's own tools read: `HF_ENDPOINT` and `HF_TOKEN`. A token is no
    /// option, since options are printed and show in lists of processes.
    pub fn from_environment() -> Self {
        let named = |name| node::config::env_of_others(name);
        Self {
            endpoint: named("HF_ENDPOINT").unwrap_or_else(|| ENDPOINT.to_owned()),
            token: named("HF_TOKEN"),
        }
    }

    fn url(&self, path: &str) -> Result<Uri, Error> {
        let endpoint = self.endpoint.trim_end_matches('/');
        client::url(&format!("{endpoint}{path}"))
            .map_err(|message| Error::option("HF_ENDPOINT", format!("expected http(s)://HOST, {message}")))
    }

    /// Where the hub tells what the repository holds.
    pub(super) fn listing(&self, repository: &Repository) -> Result<Uri, Error> {
        let revision = repository.revision.as_deref().unwrap_or(REVISION);
        let Repository { owner, name, .. } = repository;
        self.url(&format!("/api/models/{owner}/{name}/revision/{}?blobs=true", escaped(revision, false)))
    }

    /// Where a file is.
    pub(super) fn file(&self, repository: &Repository, revision: &str, name: &Path) -> Result<Uri, Error> {
        let path = escaped(&name.to_string_lossy(), true);
        let Repository { owner, name, .. } = repository;
        self.url(&format!("/{owner}/{name}/resolve/{}/{path}", escaped(revision, false)))
    }
}

/// A repository of a hub, at a revision.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Repository {
    owner: String,
    name: String,
    /// A branch, a tag or a commit.
    revision: Option<String>,
}

impl Repository {
    /// Parses `OWNER/NAME[@REVISION]`.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let (path, revision) = match text.split_once('@') {
            Some((path, revision)) => (path, Some(revision.to_owned())),
            None => (text, None),
        };
        let is_name = |part: &str| {
            let is_of_names = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
            !part.is_empty() && part.chars().all(is_of_names) && !part.starts_with('.')
        };
        match path.split_once('/') {
            Some((owner, name)) if is_name(owner) && is_name(name) && revision.as_deref() != Some("") => {
                Ok(Self { owner: owner.to_owned(), name: name.to_owned(), revision })
            }
            _ => Err(format!("got {text:?}")),
        }
    }
}

impl fmt::Display for Repository {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.owner, self.name)?;
        self.revision.as_ref().map_or(Ok(()), |revision| write!(f, "@{revision}"))
    }
}

/// What a repository holds.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Listed {
    /// The commit that it holds this at: all files are fetched from there, whatever is pushed meanwhile.
    pub(super) revision: String,
    pub(super) files: Vec<Wanted>,
}

#[derive(Deserialize)]
struct Answer {
    sha: String,
    #[serde(default)]
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: PathBuf,
    size: Option<u64>,
    lfs: Option<Large>,
}

/// What is told of a file that lies outside of the repository itself, as all large ones do.
#[derive(Deserialize)]
struct Large {
    sha256: Option<String>,
    size: Option<u64>,
}

/// Reads what a hub tells of a repository.
pub(super) fn read_listing(repository: &Repository, text: &[u8]) -> Result<Listed, Error> {
    let what = format!("hf:{repository}");
    let answer: Answer = serde_json::from_slice(text)
        .map_err(|error| fault(&what, format!("expected a list of its files from the hub: {error}")))?;
    let mut files = Vec::new();
    for Sibling { rfilename, size, lfs } in answer.siblings {
        let Some(name) = folder::plain(&rfilename) else {
            let message = format!("expected files below one folder, the hub names {}", rfilename.display());
            return Err(fault(&what, message));
        };
        let (sha256, large) = lfs.map_or((None, None), |lfs| (lfs.sha256, lfs.size));
        let sha256 = sha256.filter(|digest| folder::is_digest(digest)).map(|digest| digest.to_lowercase());
        files.push(Wanted { name, bytes: large.or(size), sha256 });
    }
    Ok(Listed { revision: answer.sha, files })
}

/// Text as a part of a URL's path, or as several where slashes stay.
fn escaped(text: &str, slashes_stay: bool) -> String {
    let mut escaped = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'/' if slashes_stay => escaped.push('/'),
            byte if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) => escaped.push(byte as char),
            byte => {
                let _ = write!(escaped, "%{byte:02X}");
            }
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_of_a_repository() {
        let hub = Hub { endpoint: "http://host:80/".into(), token: None };
        let repository = Repository::parse("owner/na.me@refs/pr/1").unwrap();
        assert_eq!(repository.to_string(), "owner/na.me@refs/pr/1");
        assert_eq!(
            hub.listing(&repository).unwrap().to_string(),
            "http://host:80/api/models/owner/na.me/revision/refs%2Fpr%2F1?blobs=true"
        );
        assert_eq!(
            hub.file(&repository, "abc", Path::new("deep/a b.gguf")).unwrap().to_string(),
            "http://host:80/owner/na.me/resolve/abc/deep/a%20b.gguf"
        );
        let wrong = Hub { endpoint: "host".into(), token: None };
        assert!(wrong.listing(&repository).unwrap_err().to_string().starts_with("HF_ENDPOINT: expected"));
    }

    #[test]
    fn what_a_hub_tells_is_read_and_nothing_outside_the_folder_taken() {
        let repository = Repository::parse("owner/name").unwrap();
        let digest = "AB".repeat(32);
        let text = format!(
            r#"{{"id": "owner/name", "sha": "c0", "siblings": [
                {{"rfilename": "README.md", "size": 5, "blobId": "x"}},
                {{"rfilename": "a/b.gguf", "size": 7, "lfs": {{"sha256": "{digest}", "size": 7, "pointerSize": 1}}}},
                {{"rfilename": "bare"}}]}}"#
        );
        let listed = read_listing(&repository, text.as_bytes()).unwrap();
        assert_eq!(listed.revision, "c0");
        let told: Vec<_> = listed.files.iter().map(|file| (file.bytes, file.sha256.as_deref())).collect();
        assert_eq!(told, [(Some(5), None), (Some(7), Some("ab".repeat(32).as_str())), (None, None)]);
        for name in ["../../etc/passwd", "/etc/passwd", ".."] {
            let text = format!(r#"{{"sha": "c0", "siblings": [{{"rfilename": "{name}"}}]}}"#);
            let error = read_listing(&repository, text.as_bytes()).unwrap_err().to_string();
            assert!(error.contains("the hub names"), "{error}");
        }
    }
}
