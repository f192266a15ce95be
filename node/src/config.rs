//! Configuration in layers: defaults, then a TOML file, then `BATON_…` environment variables, then the command line.
//!
//! A process reads several configurations from the same layers: its own, and that of each service that it runs. A
//! field `grpc_port` of any of them is `grpc_port` in the file, `BATON_GRPC_PORT` in the environment and `--grpc-port`
//! on the command line.

pub mod seconds;
pub mod size;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use figment::providers::{Env, Serialized};
use figment::value::{Dict, Map, Value};
use figment::{Figment, Metadata, Profile, Provider, Source};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::Error;

/// In front of the name of every environment variable.
pub const ENV_PREFIX: &str = "BATON_";

/// Where configurations are read from.
#[derive(Clone, Debug)]
pub struct Layers {
    file: Option<File>,
    known: BTreeSet<String>,
}

impl Layers {
    /// Reads the file, if there is one.
    ///
    /// # Errors
    /// [`Error::File`] when it cannot be read or is no TOML.
    pub fn read(file: Option<&Path>) -> Result<Self, Error> {
        Ok(Self { file: file.map(File::read).transpose()?, known: BTreeSet::new() })
    }

    /// Gives keys of the file a second spelling: each pair is another name and the field's own.
    ///
    /// # Errors
    /// [`Error::File`] when the file has both.
    pub fn alias(&mut self, names: &[(&'static str, &'static str)]) -> Result<(), Error> {
        self.file.as_mut().map_or(Ok(()), |file| file.alias(names))
    }

    /// Loads one configuration. `cli` is what the command line said: fields of `C`, each `None` where it was not named.
    /// Of the file and the environment, only what names a field of `C` is looked at.
    ///
    /// # Errors
    /// [`Error::Option`] that names the option as its source spells it, and says what was expected.
    pub fn load<C>(&mut self, cli: &impl Serialize) -> Result<C, Error>
    where
        C: Serialize + DeserializeOwned + Default,
    {
        let defaults = Serialized::defaults(C::default());
        let data = defaults.data().map_err(|error| self.option_error(&error))?;
        let fields: Vec<String> = data.into_values().flat_map(Map::into_keys).collect();
        let names: Vec<&str> = fields.iter().map(String::as_str).collect();
        let mut figment = Figment::from(defaults);
        if let Some(file) = &self.file {
            figment = figment.merge(file.only(&names));
        }
        let config = figment
            .merge(Env::prefixed(ENV_PREFIX).only(&names))
            .merge(Said(cli))
            .extract()
            .map_err(|error| self.option_error(&error))?;
        self.known.extend(fields);
        Ok(config)
    }

    /// Names the option as its source spells it.
    fn option_error(&self, error: &figment::Error) -> Error {
        let field = error.path.join(".");
        let metadata = error.metadata.as_ref();
        let option = match metadata.map(|metadata| (&metadata.source, metadata.name.as_ref())) {
            Some((Some(Source::File(path)), _)) => {
                let written = self.file.as_ref().and_then(|file| file.written.get(field.as_str()));
                format!("{} in {}", written.copied().unwrap_or(&field), path.display())
            }
            Some((_, name)) if name.contains("environment") => {
                format!("{ENV_PREFIX}{}", field.to_uppercase())
            }
            _ => format!("--{}", field.replace('_', "-")),
        };
        Error::option(option, error.kind.to_string())
    }

    /// Called after everything was loaded: refuses a file with a key that no configuration has.
    ///
    /// # Errors
    /// [`Error::File`] that names the key and those that there are.
    pub fn finish(self) -> Result<(), Error> {
        let Some(file) = self.file else { return Ok(()) };
        match file.table.keys().find(|key| !self.known.contains(*key)) {
            None => Ok(()),
            Some(unknown) => {
                let known: Vec<_> = self.known.into_iter().collect();
                let message = format!("unknown option {unknown:?}, expected one of {}", known.join(", "));
                Err(Error::File { path: file.path, message })
            }
        }
    }
}

/// The value of the environment variable `BATON_{name}`, for what is needed before there are layers: the file's path.
pub fn env(name: &str) -> Option<String> {
    Env::var(&format!("{ENV_PREFIX}{name}")).filter(|value| !value.is_empty())
}

/// A TOML file.
#[derive(Clone, Debug)]
struct File {
    path: PathBuf,
    table: toml::Table,
    /// Fields that the file gives another name, and that name.
    written: BTreeMap<&'static str, &'static str>,
}

impl File {
    fn read(path: &Path) -> Result<Self, Error> {
        let fault = |message: String| Error::File { path: path.to_owned(), message };
        let text = std::fs::read_to_string(path).map_err(|error| fault(error.to_string()))?;
        let table = text.parse().map_err(|error: toml::de::Error| {
            let line = error.span().map_or(0, |span| text[..span.start].matches('\n').count() + 1);
            fault(format!("line {line}: {}", error.message()))
        })?;
        Ok(Self { path: path.to_owned(), table, written: BTreeMap::new() })
    }

    fn alias(&mut self, names: &[(&'static str, &'static str)]) -> Result<(), Error> {
        for &(alias, field) in names {
            let Some(value) = self.table.remove(alias) else { continue };
            if self.table.contains_key(field) {
                let message = format!("{alias} and {field} are the same option, expected one of them");
                return Err(Error::File { path: self.path.clone(), message });
            }
            self.table.insert(field.to_owned(), value);
            self.written.insert(field, alias);
        }
        Ok(())
    }

    /// The part of the file that holds these keys.
    fn only(&self, keys: &[&str]) -> Self {
        let table = self.table.iter().filter(|(key, _)| keys.contains(&key.as_str()));
        Self {
            path: self.path.clone(),
            written: BTreeMap::new(),
            table: table.map(|(key, value)| (key.clone(), value.clone())).collect(),
        }
    }
}

impl Provider for File {
    fn metadata(&self) -> Metadata {
        Metadata::from("file", Source::File(self.path.clone()))
    }

    fn data(&self) -> figment::Result<Map<Profile, Dict>> {
        Serialized::defaults(&self.table).data()
    }
}

/// The command line, without what it did not say.
struct Said<'a, T>(&'a T);

impl<T: Serialize> Provider for Said<'_, T> {
    fn metadata(&self) -> Metadata {
        Metadata::named("command line")
    }

    fn data(&self) -> figment::Result<Map<Profile, Dict>> {
        let mut data = Serialized::defaults(self.0).data()?;
        for options in data.values_mut() {
            options.retain(|_, value| !matches!(value, Value::Empty(..)));
        }
        Ok(data)
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Front {
        port: u16,
        name: Option<String>,
    }

    impl Default for Front {
        fn default() -> Self {
            Self { port: 8000, name: None }
        }
    }

    #[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Back {
        threads: Option<usize>,
    }

    #[derive(Default, Serialize)]
    struct Cli {
        port: Option<u16>,
    }

    fn layers(text: &str) -> (tempfile::NamedTempFile, Result<Layers, Error>) {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        let layers = Layers::read(Some(file.path()));
        (file, layers)
    }

    #[test]
    fn the_command_line_wins_over_the_file_and_the_file_over_defaults() {
        let mut none = Layers::read(None).unwrap();
        assert_eq!(none.load::<Front>(&Cli::default()).unwrap(), Front::default());

        let (_file, layers) = layers("port = 1\nname = 'x'\nthreads = 3");
        let mut layers = layers.unwrap();
        let front: Front = layers.load(&Cli::default()).unwrap();
        assert_eq!(front, Front { port: 1, name: Some("x".into()) });
        let front: Front = layers.load(&Cli { port: Some(2) }).unwrap();
        assert_eq!(front, Front { port: 2, name: Some("x".into()) });
        assert_eq!(layers.load::<Back>(&Cli::default()).unwrap(), Back { threads: Some(3) });
        layers.finish().unwrap();
    }

    #[test]
    fn a_field_of_the_file_may_have_a_second_name() {
        const NAMES: &[(&str, &str)] = &[("portNumber", "port")];
        let (_file, layers_read) = layers("portNumber = 5");
        let mut layers_read = layers_read.unwrap();
        layers_read.alias(NAMES).unwrap();
        assert_eq!(layers_read.load::<Front>(&Cli::default()).unwrap().port, 5);
        layers_read.finish().unwrap();

        let (file, layers_read) = layers("portNumber = 'http'");
        let mut layers_read = layers_read.unwrap();
        layers_read.alias(NAMES).unwrap();
        let error = layers_read.load::<Front>(&Cli::default()).unwrap_err().to_string();
        assert!(error.starts_with(&format!("portNumber in {}: ", file.path().display())), "{error}");

        let (_file, layers_read) = layers("portNumber = 5\nport = 6");
        let error = layers_read.unwrap().alias(NAMES).unwrap_err().to_string();
        assert!(error.contains("portNumber and port are the same option"), "{error}");
    }

    #[test]
    fn faults_name_the_file_and_the_option() {
        let (file, layers_read) = layers("port = 'http'");
        let error = layers_read.unwrap().load::<Front>(&Cli::default()).unwrap_err().to_string();
        assert!(error.starts_with(&format!("port in {}: ", file.path().display())), "{error}");
        assert!(error.contains("expected u16"), "{error}");

        let (_file, layers_read) = layers("prot = 1");
        let mut layers_read = layers_read.unwrap();
        layers_read.load::<Front>(&Cli::default()).unwrap();
        let error = layers_read.finish().unwrap_err().to_string();
        assert!(error.contains("unknown option \"prot\", expected one of name, port"), "{error}");

        let (_file, broken) = layers("a = 1\nport = = 1");
        assert!(broken.unwrap_err().to_string().contains("line 2: "));
        let missing = Layers::read(Some(Path::new("/no/such/baton.toml"))).unwrap_err().to_string();
        assert!(missing.starts_with("/no/such/baton.toml: "), "{missing}");
    }
}
