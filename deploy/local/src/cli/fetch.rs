//! Options of `baton fetch`.

use std::path::PathBuf;

use clap::Args;
use node::Error;
use serde::Serialize;

/// See [`crate::fetch::Config`].
#[derive(Args, Serialize)]
#[command(next_help_heading = "Fetching")]
pub(crate) struct FetchOptions {
    /// What to fetch: an http(s):// URL, hf:OWNER/NAME[@REVISION] at the hub of HF_ENDPOINT with the token of HF_TOKEN, or a path
    #[arg(long, value_name = "SOURCE")]
    source: Option<String>,
    /// Folder that the files are put into
    #[arg(long, value_name = "FOLDER")]
    to: Option<PathBuf>,
    /// Which files of a repository or a folder: * stands for any text, ? for one character
    #[arg(long, value_name = "PATTERN")]
    files: Option<String>,
    /// Name of the one file in the folder [default: its own]
    #[arg(long, value_name = "NAME")]
    file_name: Option<String>,
    /// What the SHA-256 of the one file must be, 64 hexadecimal digits [default: what a hub tells]
    #[arg(long, value_name = "DIGEST")]
    sha256: Option<String>,
    /// Failures without a byte more in between after which the fetch fails
    #[arg(long, value_name = "N")]
    failures_max: Option<usize>,
    /// Longest pause between two tries; the first pauses are shorter
    #[arg(long, value_name = "SECONDS")]
    pause_max_seconds: Option<f64>,
    /// Seconds of silence after which a server is asked anew
    #[arg(long, value_name = "SECONDS")]
    silence_max_seconds: Option<f64>,
}

impl FetchOptions {
    /// The word and the option mean the same.
    pub(crate) fn take_word(&mut self, word: Option<String>) -> Result<(), Error> {
        match (word, &self.source) {
            (Some(word), Some(source)) if word != *source => Err(Error::option(
                "--source",
                format!("two sources were named, {word} and {source}; one is fetched"),
            )),
            (Some(word), _) => {
                self.source = Some(word);
                Ok(())
            }
            (None, _) => Ok(()),
        }
    }
}
