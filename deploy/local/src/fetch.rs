//! `baton fetch`: puts the files of a model into a folder before a worker starts, as an init container does.
//!
//! A file that is there with the right size and digest is left alone. What comes over the network is kept beside its
//! place under another name until it is whole and proven, so that no worker ever opens half of a file and a fetch that was
//! cut off goes on where it ended.

mod client;
mod download;
mod folder;
mod hub;
mod local;

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use node::{Error, Shutdown, Tasks};
use serde::{Deserialize, Serialize};
use tokio::signal::unix::{SignalKind, signal};

pub use hub::Hub;

use client::Client;
use download::Downloads;
use folder::Folder;

/// What to fetch, and where to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// An http:// or https:// URL of a file, `hf:OWNER/NAME[@REVISION]` for a repository of a model hub, or a path.
    pub source: Option<String>,
    /// The folder that it is put into; made where it is missing.
    pub to: Option<PathBuf>,
    /// Which files of a repository or a folder: `*` stands for any text, `?` for one character.
    pub files: String,
    /// Name of the file in the folder, where one file is fetched; its own when absent.
    pub file_name: Option<String>,
    /// What the file's SHA-256 must be, 64 hexadecimal digits, where one file is fetched.
    pub sha256: Option<String>,
    /// Failures after which the fetch fails; a fetch that moves on counts from nothing again.
    pub failures_max: usize,
    /// Longest pause between two tries, seconds; the first is a hundredth part of it, and they double.
    #[serde(with = "node::config::seconds")]
    pub pause_max_seconds: Duration,
    /// Longest that a server may be silent, seconds.
    #[serde(with = "node::config::seconds::positive")]
    pub silence_max_seconds: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            source: None,
            to: None,
            files: "*.gguf".to_owned(),
            file_name: None,
            sha256: None,
            failures_max: 10,
            pause_max_seconds: Duration::from_secs(30),
            silence_max_seconds: Duration::from_secs(30),
        }
    }
}

impl Config {
    /// Refuses what nothing can be fetched by.
    ///
    /// # Errors
    /// An option error that names the field.
    pub fn validate(&self) -> Result<(), Error> {
        self.source()?;
        self.folder()?;
        if self.failures_max == 0 {
            return Err(Error::option("failures_max", "expected at least 1, got 0"));
        }
        if let Some(digest) = &self.sha256
            && !folder::is_digest(digest)
        {
            return Err(Error::option("sha256", format!("expected 64 hexadecimal digits, got {digest:?}")));
        }
        if let Some(name) = &self.file_name
            && Path::new(name).file_name().is_none_or(|only| only != name.as_str())
        {
            return Err(Error::option("file_name", format!("expected a name without folders, got {name:?}")));
        }
        Ok(())
    }

    fn source(&self) -> Result<Source, Error> {
        let expected = "expected http(s)://HOST/FILE, hf:OWNER/NAME[@REVISION] or a path";
        let Some(source) = self.source.as_deref().filter(|source| !source.is_empty()) else {
            return Err(Error::option("--source", format!("{expected}; none came")));
        };
        let fault = |message: String| Error::option("--source", format!("{expected}; {message}"));
        if let Some(repository) = source.strip_prefix("hf:") {
            return hub::Repository::parse(repository).map(Source::Repository).map_err(fault);
        }
        match source.split_once("://") {
            Some(("http" | "https", _)) => client::url(source).map(Source::Url).map_err(fault),
            Some((scheme, _)) => Err(fault(format!("{scheme}:// is not known"))),
            None => Ok(Source::Path(PathBuf::from(source))),
        }
    }

    fn folder(&self) -> Result<&Path, Error> {
        let missing = || Error::option("--to", "expected the folder to put files into, none came");
        self.to.as_deref().filter(|folder| !folder.as_os_str().is_empty()).ok_or_else(missing)
    }
}

/// Where the files are now.
#[derive(Clone, Debug, PartialEq)]
enum Source {
    Url(http::Uri),
    Repository(hub::Repository),
    Path(PathBuf),
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            // A query may carry a signature, which is as good as a key.
            Self::Url(url) => write!(f, "{}", client::shown(url)),
            Self::Repository(repository) => write!(f, "hf:{repository}"),
            Self::Path(path) => write!(f, "{}", path.display()),
        }
    }
}

/// One file that the folder shall have.
#[derive(Clone, Debug, PartialEq)]
struct Wanted {
    /// Its path below the folder.
    name: PathBuf,
    /// Its length, where it is known beforehand.
    bytes: Option<u64>,
    /// Its SHA-256 in lower case, where it is known beforehand.
    sha256: Option<String>,
}

/// Fetches until all is there, or Ctrl-C or SIGTERM comes. Gives the files, in the order of their names.
///
/// # Errors
/// [`Error::Option`] for what cannot be asked; [`Error::Fetch`] when something is not to be had, is not what it should be,
/// or a signal came. What was fetched by then stays, and the next fetch goes on from there.
pub async fn run(config: Config, hub: Hub) -> Result<Vec<PathBuf>, Error> {
    config.validate()?;
    // A process whose number is 1, as in a container, dies of no signal that it does not listen to.
    let listen = |kind| signal(kind).map_err(|error| fault("files", format!("signal handler: {error}")));
    let (mut interrupt, mut terminate) = (listen(SignalKind::interrupt())?, listen(SignalKind::terminate())?);
    let tasks = Tasks::new(Shutdown::new());
    tokio::select! {
        fetched = fetch(&config, hub, tasks) => fetched,
        _ = interrupt.recv() => Err(fault("all files", "a signal came; the next fetch goes on from here")),
        _ = terminate.recv() => Err(fault("all files", "a signal came; the next fetch goes on from here")),
    }
}

async fn fetch(config: &Config, hub: Hub, tasks: Tasks) -> Result<Vec<PathBuf>, Error> {
    let source = config.source()?;
    let folder = Folder::lock(config.folder()?, tasks).await?;
    tracing::info!(%source, to = %folder.path().display(), "fetching");
    let files = match source {
        Source::Path(path) => local::copy(&path, config, &folder).await?,
        Source::Url(url) => {
            let name = name_of(url.path(), config)?;
            let wanted = Wanted { name, bytes: None, sha256: lower(config.sha256.as_deref()) };
            let mut downloads = Downloads::new(Client::new(config.silence_max_seconds, None), config);
            vec![downloads.fetch(&url, wanted, &folder).await?]
        }
        Source::Repository(repository) => {
            let client = Client::new(config.silence_max_seconds, hub.token.clone());
            let mut downloads = Downloads::new(client, config);
            let listed = downloads.list(&hub, &repository).await?;
            let chosen = choose(listed.files, config, &format!("hf:{repository}"))?;
            let mut files = Vec::new();
            for wanted in chosen {
                let url = hub.file(&repository, &listed.revision, &wanted.name)?;
                let name = renamed(wanted.name.clone(), config);
                files.push(downloads.fetch(&url, Wanted { name, ..wanted }, &folder).await?);
            }
            files
        }
    };
    tracing::info!(files = files.len(), "all there");
    Ok(files)
}

/// The name that the file of a URL gets.
fn name_of(path: &str, config: &Config) -> Result<PathBuf, Error> {
    if let Some(name) = &config.file_name {
        return Ok(name.into());
    }
    let last = path.rsplit('/').next().unwrap_or_default();
    folder::plain(Path::new(last)).ok_or_else(|| {
        Error::option("--file-name", format!("expected a name, since the URL's path {path:?} ends in none"))
    })
}

fn renamed(own: PathBuf, config: &Config) -> PathBuf {
    config.file_name.as_ref().map_or(own, PathBuf::from)
}

/// Those that the pattern names, each with the digest that was asked for.
fn choose(mut files: Vec<Wanted>, config: &Config, source: &str) -> Result<Vec<Wanted>, Error> {
    files.sort_by(|a, b| a.name.cmp(&b.name));
    let all: Vec<String> = files.iter().map(|file| file.name.display().to_string()).collect();
    files.retain(|file| is_like(&file.name.to_string_lossy(), &config.files));
    if files.is_empty() {
        let has = if all.is_empty() { "nothing".to_owned() } else { all.join(", ") };
        return Err(Error::option(
            "--files",
            format!("expected a file like {:?} in {source}, which has {has}", config.files),
        ));
    }
    let one_only = [("--sha256", config.sha256.is_some()), ("--file-name", config.file_name.is_some())];
    if let Some((option, _)) = one_only.into_iter().find(|(_, set)| *set && files.len() > 1) {
        let message = format!("expected one file like {:?} in {source}, found {}", config.files, files.len());
        return Err(Error::option(option, message));
    }
    if let Some(digest) = lower(config.sha256.as_deref()) {
        for file in &mut files {
            if let Some(listed) = &file.sha256
                && *listed != digest
            {
                let what = file.name.display().to_string();
                return Err(fault(&what, format!("expected sha256 {digest}, {source} has {listed}")));
            }
            file.sha256 = Some(digest.clone());
        }
    }
    Ok(files)
}

fn lower(digest: Option<&str>) -> Option<String> {
    digest.map(str::to_ascii_lowercase)
}

/// True when the text is like the pattern, in which `*` stands for any text, slashes included, and `?` for a character.
fn is_like(text: &str, pattern: &str) -> bool {
    let (text, pattern): (Vec<char>, Vec<char>) = (text.chars().collect(), pattern.chars().collect());
    let (mut at, mut of) = (0, 0);
    // Where the last star stands, and how much of the text it is taken for.
    let mut star: Option<(usize, usize)> = None;
    while at < text.len() {
        match pattern.get(of) {
            Some('*') => {
                star = Some((of, at));
                of += 1;
            }
            Some(&wanted) if wanted == '?' || wanted == text[at] => {
                at += 1;
                of += 1;
            }
            _ => match &mut star {
                Some((place, taken)) => {
                    *taken += 1;
                    (at, of) = (*taken, *place + 1);
                }
                None => return false,
            },
        }
    }
    pattern[of..].iter().all(|&left| left == '*')
}

/// Something that cannot be fetched.
fn fault(what: &str, message: impl Into<String>) -> Error {
    Error::Fetch { what: what.to_owned(), message: message.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns() {
        for (text, pattern, expected) in [
            ("model.gguf", "*.gguf", true),
            ("deep/model-Q8_0.gguf", "*q8_0.gguf", false),
            ("deep/model-Q8_0.gguf", "*Q?_0.gguf", true),
            ("model.gguf.part", "*.gguf", false),
            ("aXbXc", "a*X?", true),
            ("", "*", true),
            ("", "?", false),
            ("abc", "abc**", true),
        ] {
            assert_eq!(is_like(text, pattern), expected, "{text} like {pattern}");
        }
    }

    #[test]
    fn what_cannot_be_fetched_is_refused_by_name() {
        let config = |source: &str| Config {
            source: Some(source.to_owned()),
            to: Some("models".into()),
            ..Config::default()
        };
        for good in
            ["http://host/a.gguf", "https://host:8443/a?sig=x", "hf:owner/name", "hf:a/b@v1", "a/b.gguf"]
        {
            config(good).validate().unwrap();
        }
        for (source, expected) in [
            ("", "none came"),
            ("ftp://host/x", "ftp:// is not known"),
            ("http://", "got \"http://\""),
            ("hf:name", "got \"name\""),
            ("hf:a/b/c", "got \"a/b/c\""),
            ("hf:../b", "got \"../b\""),
        ] {
            let error = config(source).validate().unwrap_err().to_string();
            assert!(error.starts_with("--source: ") && error.contains(expected), "{error}");
        }
        let with = |change: fn(&mut Config)| {
            let mut config = config("a.gguf");
            change(&mut config);
            config.validate().unwrap_err().to_string()
        };
        assert!(with(|config| config.to = None).starts_with("--to: "));
        assert!(with(|config| config.sha256 = Some("abc".into())).starts_with("sha256: "));
        assert!(with(|config| config.file_name = Some("../x".into())).starts_with("file_name: "));
        assert!(with(|config| config.failures_max = 0).starts_with("failures_max: "));
    }

    #[test]
    fn a_signature_is_not_shown() {
        let source = Config { source: Some("https://host/a.gguf?sig=secret".into()), ..Config::default() };
        assert_eq!(source.source().unwrap().to_string(), "https://host/a.gguf");
    }
}
