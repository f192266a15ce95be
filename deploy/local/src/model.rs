//! From what a user calls a model to its file.

use std::path::{Path, PathBuf};

use node::Error;
use serde::{Deserialize, Serialize};

/// Ending of a model file.
const ENDING: &str = "gguf";
/// Where models are looked for by name: below the working folder...
const NEAR: &str = ".cache/models";
/// ...and below the home folder.
const HOME: &str = ".cache/baton/models";

/// The model that was asked for: as a word, by `--model`, in the environment or in the file.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct ModelChoice {
    pub(crate) model: Option<String>,
    models_dir: Option<PathBuf>,
}

impl ModelChoice {
    /// The model as the worker's configuration spells it.
    ///
    /// # Errors
    /// When none was named (the binary insists on being told), or there is none of that name.
    pub(crate) fn find(self) -> Result<worker::Source, Error> {
        let fault = |message: String| Error::option("--model", message);
        let Some(model) = &self.model else {
            let message = "no model was named; `cargo xtask fetch-model` fetches one and prints its path";
            return Err(fault(message.to_owned()));
        };
        if model.starts_with("sim:") {
            return Ok(model.parse()?);
        }
        self.file(model).map(worker::Source::Gguf).map_err(fault)
    }

    fn file(&self, model: &str) -> Result<PathBuf, String> {
        let path = Path::new(model);
        if path.is_file() {
            return Ok(path.to_owned());
        }
        if path.is_dir() {
            return only_model(path);
        }
        if let Some((scheme, _)) = model.split_once("://") {
            let message = format!(
                "a worker fetches nothing, and so no {scheme}:// either; expected a GGUF file or its name, which `baton fetch` gets"
            );
            return Err(message);
        }
        let is_name = path.components().count() == 1 && !model.ends_with(&format!(".{ENDING}"));
        if !is_name {
            return Err(format!(
                "expected a GGUF file, found none at {model}; `cargo xtask fetch-model` fetches one"
            ));
        }
        self.by_name(model)
    }

    fn by_name(&self, name: &str) -> Result<PathBuf, String> {
        let folders = match &self.models_dir {
            Some(folder) => vec![folder.clone()],
            None => {
                let home = std::env::home_dir().map(|home| home.join(HOME));
                [PathBuf::from(NEAR)].into_iter().chain(home).collect()
            }
        };
        for folder in &folders {
            let file = folder.join(format!("{name}.{ENDING}"));
            if file.is_file() {
                return Ok(file);
            }
            if folder.join(name).is_dir() {
                return only_model(&folder.join(name));
            }
        }
        let shown: Vec<_> = folders.iter().map(|folder| folder.display().to_string()).collect();
        let known: Vec<_> = folders.iter().flat_map(|folder| stems(folder)).collect();
        let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
        Err(format!(
            "expected a GGUF file or the name of a model in {}, which has {known}; got {name}",
            shown.join(" or ")
        ))
    }
}

/// The one model file of a folder.
fn only_model(folder: &Path) -> Result<PathBuf, String> {
    let mut files = models(folder);
    match (files.pop(), files.len()) {
        (Some(file), 0) => Ok(file),
        (None, _) => Err(format!("expected a folder with a GGUF file, found none in {}", folder.display())),
        (Some(_), more) => {
            Err(format!("expected a folder with one GGUF file, found {} in {}", more + 1, folder.display()))
        }
    }
}

fn models(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut files: Vec<_> = entries
        .map(|entry| entry.path())
        .filter(|path| path.is_file() && path.extension().is_some_and(|ending| ending == ENDING))
        .collect();
    files.sort();
    files
}

fn stems(folder: &Path) -> Vec<String> {
    let stem = |path: PathBuf| path.file_stem().map(|stem| stem.to_string_lossy().into_owned());
    models(folder).into_iter().filter_map(stem).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(folder: &Path, model: &str) -> Result<PathBuf, String> {
        let choice = ModelChoice { model: Some(model.to_owned()), models_dir: Some(folder.to_owned()) };
        match choice.find() {
            Ok(worker::Source::Gguf(path)) => Ok(path),
            Ok(source) => panic!("a file, not {source}"),
            Err(error) => Err(error.to_string()),
        }
    }

    #[test]
    fn a_model_is_a_file_a_folder_or_a_name() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let (tiny, deep) = (folder.join("tiny.gguf"), folder.join("deep/model.gguf"));
        std::fs::create_dir(folder.join("deep")).unwrap();
        std::fs::create_dir(folder.join("empty")).unwrap();
        for file in [&tiny, &deep, &folder.join("note.txt")] {
            std::fs::write(file, "").unwrap();
        }
        let text = |path: &Path| path.display().to_string();
        for (model, expected) in [
            (text(&tiny).as_str(), &tiny),
            (text(folder).as_str(), &tiny),
            (&format!("{}/deep/", folder.display()), &deep),
            ("tiny", &tiny),
            ("deep", &deep),
        ] {
            assert_eq!(find(folder, model).as_ref(), Ok(expected), "{model}");
        }
        for (model, expected) in [
            ("other", "which has tiny; got other".to_owned()),
            ("other.gguf", "found none at other.gguf; `cargo xtask fetch-model` fetches one".to_owned()),
            ("/no/such", "found none at /no/such".to_owned()),
            ("empty", "expected a folder with a GGUF file, found none in ".to_owned()),
            ("HF://mlc-ai/Llama-3", "a worker fetches nothing, and so no HF:// either".to_owned()),
        ] {
            let error = find(folder, model).unwrap_err();
            assert!(error.starts_with("--model: ") && error.contains(&expected), "{error}");
        }
        std::fs::write(folder.join("second.gguf"), "").unwrap();
        let error = find(folder, &text(folder)).unwrap_err();
        assert!(error.contains("expected a folder with one GGUF file, found 2 in "), "{error}");
    }
}
