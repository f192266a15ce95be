//! Configuration in layers: defaults, then a TOML file, then `BATON_…` environment variables, then the command line.
//!
//! A process reads several configurations from the same layers: its own, and that of each service that it runs. A
//! field `grpc_port` of any of them is `grpc_port` in the file, `BATON_GRPC_PORT` in the environment and `--grpc-port`
//! on the command line.

pub mod seconds;
pub mod size;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use figment::error::Kind;
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
    /// What [`Layers::expand`] found in the environment.
    environment: Dict,
    /// What the command line said.
    said: Dict,
    known: BTreeSet<String>,
}

impl Layers {
    /// Reads the file, if there is one. `said` is what the command line said: fields of any configuration, each `None`
    /// where it was not named.
    ///
    /// # Errors
    /// [`Error::File`] when it cannot be read or is no TOML.
    pub fn read(file: Option<&Path>, said: &impl Serialize) -> Result<Self, Error> {
        let mut layers = Self {
            file: file.map(File::read).transpose()?,
            environment: Dict::new(),
            said: Dict::new(),
            known: BTreeSet::new(),
        };
        layers.said = layers.dict(said)?;
        layers.said.retain(|_, value| !matches!(value, Value::Empty(..)));
        Ok(layers)
    }

    /// Gives keys of the file a second spelling: each pair is another name and the field's own.
    ///
    /// # Errors
    /// [`Error::File`] when the file has both.
    pub fn alias(&mut self, names: &[(&'static str, &'static str)]) -> Result<(), Error> {
        self.file.as_mut().map_or(Ok(()), |file| file.alias(names))
    }

    /// Lets the text of one key stand for several fields, in each layer for itself. What `expand` makes of it takes the
    /// place of what that layer says of the same fields.
    ///
    /// # Errors
    /// [`Error::Option`] that names the key as its source spells it, with what `expand` says.
    pub fn expand(
        &mut self,
        key: &'static str,
        mut expand: impl FnMut(&str) -> Result<toml::Table, String>,
    ) -> Result<(), Error> {
        self.known.insert(key.to_owned());
        if let Some(file) = &mut self.file
            && let Some(value) = file.table.remove(key)
        {
            let option = || format!("{key} in {}", file.path.display());
            let text = value
                .as_str()
                .ok_or_else(|| Error::option(option(), format!("expected text, got {value}")))?;
            let fields = expand(text).map_err(|message| Error::option(option(), message))?;
            file.table.extend(fields);
        }
        let name = key.to_uppercase();
        if let Some(text) = env(&name) {
            let fields =
                expand(&text).map_err(|message| Error::option(format!("{ENV_PREFIX}{name}"), message))?;
            let fields = self.dict(&fields)?;
            self.environment.extend(fields);
        }
        if let Some(value) = self.said.remove(key) {
            let text = value.as_str().unwrap_or_default();
            let fields = expand(text)
                .map_err(|message| Error::option(format!("--{}", key.replace('_', "-")), message))?;
            let fields = self.dict(&fields)?;
            self.said.extend(fields);
        }
        Ok(())
    }

    /// Loads one configuration. Of the layers, only what names a field of `C` is looked at.
    ///
    /// # Errors
    /// [`Error::Option`] that names the option as its source spells it, and says what was expected.
    pub fn load<C>(&mut self) -> Result<C, Error>
    where
        C: Serialize + DeserializeOwned + Default,
    {
        let defaults = self.dict(&C::default())?;
        let fields: Vec<String> = defaults.into_keys().collect();
        let names: Vec<&str> = fields.iter().map(String::as_str).collect();
        let mut figment = Figment::from(Serialized::defaults(C::default()));
        if let Some(file) = &self.file {
            figment = figment.merge(file.only(&names));
        }
        let config = figment
            .merge(Env::prefixed(ENV_PREFIX).only(&names))
            .merge(Part::of("environment", &self.environment, &names))
            .merge(Part::of("command line", &self.said, &names))
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
                let written = self.file.as_ref().map_or(field.as_str(), |file| file.written(&field));
                format!("{written} in {}", path.display())
            }
            Some((_, name)) if name.contains("environment") => {
                format!("{ENV_PREFIX}{}", field.to_uppercase())
            }
            _ => format!("--{}", field.replace('_', "-")),
        };
        let message = match &error.kind {
            Kind::UnknownVariant(found, names) => {
                format!("expected one of {}, got {found}", names.join(", "))
            }
            kind => kind.to_string(),
        };
        Error::option(option, message)
    }

    fn dict(&self, fields: &impl Serialize) -> Result<Dict, Error> {
        let data = Serialized::defaults(fields).data().map_err(|error| self.option_error(&error))?;
        Ok(data.into_values().flatten().collect())
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
                let unknown = file.written(unknown);
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

/// The value of an environment variable that other programs give its name, such as `HF_TOKEN`.
pub fn env_of_others(name: &str) -> Option<String> {
    Env::var(name).filter(|value| !value.is_empty())
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

    /// The name that the file has for a field.
    fn written<'a>(&self, field: &'a str) -> &'a str {
        self.written.get(field).copied().unwrap_or(field)
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

/// Those fields of a layer that one configuration has.
struct Part {
    layer: &'static str,
    fields: Dict,
}

impl Part {
    fn of(layer: &'static str, fields: &Dict, names: &[&str]) -> Self {
        let fields = fields.iter().filter(|(name, _)| names.contains(&name.as_str()));
        Self { layer, fields: fields.map(|(name, value)| (name.clone(), value.clone())).collect() }
    }
}

impl Provider for Part {
    fn metadata(&self) -> Metadata {
        Metadata::named(self.layer)
    }

    fn data(&self) -> figment::Result<Map<Profile, Dict>> {
        Ok(Map::from([(Profile::Default, self.fields.clone())]))
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
        both: Option<&'static str>,
    }

    fn layers_with(text: &str, cli: &Cli) -> (tempfile::NamedTempFile, Result<Layers, Error>) {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        let layers = Layers::read(Some(file.path()), cli);
        (file, layers)
    }

    fn layers(text: &str) -> (tempfile::NamedTempFile, Result<Layers, Error>) {
        layers_with(text, &Cli::default())
    }

    #[test]
    fn the_command_line_wins_over_the_file_and_the_file_over_defaults() {
        let mut none = Layers::read(None, &Cli::default()).unwrap();
        assert_eq!(none.load::<Front>().unwrap(), Front::default());

        let text = "port = 1\nname = 'x'\nthreads = 3";
        let mut layers_read = layers(text).1.unwrap();
        assert_eq!(layers_read.load::<Front>().unwrap(), Front { port: 1, name: Some("x".into()) });
        assert_eq!(layers_read.load::<Back>().unwrap(), Back { threads: Some(3) });
        layers_read.finish().unwrap();

        let mut layers_read = layers_with(text, &Cli { port: Some(2), both: None }).1.unwrap();
        assert_eq!(layers_read.load::<Front>().unwrap(), Front { port: 2, name: Some("x".into()) });
        assert_eq!(layers_read.load::<Back>().unwrap(), Back { threads: Some(3) });
    }

    /// `PORT/THREADS` stands for both.
    fn both(text: &str) -> Result<toml::Table, String> {
        let (port, threads) = text.split_once('/').ok_or_else(|| format!("expected a slash, got {text}"))?;
        let number = |text: &str| text.parse::<i64>().map_err(|error| error.to_string());
        let fields = [("port", number(port)?), ("threads", number(threads)?)];
        Ok(fields.map(|(name, number)| (name.to_owned(), number.into())).into_iter().collect())
    }

    #[test]
    fn one_key_may_stand_for_several_fields_of_its_layer() {
        let cases = [
            // The file's key wins over the file's field.
            ("both = '5/6'\nport = 1", Cli::default(), (5, Some(6))),
            // The command line's field wins over the file's key.
            ("both = '5/6'", Cli { port: Some(9), both: None }, (9, Some(6))),
            // The command line's key wins over the file's fields.
            ("port = 1\nthreads = 2", Cli { port: None, both: Some("7/8") }, (7, Some(8))),
        ];
        for (text, cli, (port, threads)) in cases {
            let (_file, layers_read) = layers_with(text, &cli);
            let mut layers_read = layers_read.unwrap();
            layers_read.expand("both", both).unwrap();
            assert_eq!(layers_read.load::<Front>().unwrap().port, port, "{text}");
            assert_eq!(layers_read.load::<Back>().unwrap().threads, threads, "{text}");
            layers_read.finish().unwrap();
        }
        let (file, layers_read) = layers("both = '5'");
        let error = layers_read.unwrap().expand("both", both).unwrap_err().to_string();
        assert_eq!(error, format!("both in {}: expected a slash, got 5", file.path().display()));
        let (file, layers_read) = layers("both = 5");
        let error = layers_read.unwrap().expand("both", both).unwrap_err().to_string();
        assert_eq!(error, format!("both in {}: expected text, got 5", file.path().display()));
        let (_file, layers_read) = layers_with("", &Cli { port: None, both: Some("x") });
        let error = layers_read.unwrap().expand("both", both).unwrap_err().to_string();
        assert_eq!(error, "--both: expected a slash, got x");
    }

    #[test]
    fn a_field_of_the_file_may_have_a_second_name() {
        const NAMES: &[(&str, &str)] = &[("portNumber", "port")];
        let aliased = |text| {
            let (file, layers_read) = layers(text);
            let mut layers_read = layers_read.unwrap();
            let aliased = layers_read.alias(NAMES);
            (file, layers_read, aliased.map_err(|error| error.to_string()))
        };
        let (_file, mut layers_read, _) = aliased("portNumber = 5");
        assert_eq!(layers_read.load::<Front>().unwrap().port, 5);
        layers_read.finish().unwrap();

        let (file, mut layers_read, _) = aliased("portNumber = 'http'");
        let error = layers_read.load::<Front>().unwrap_err().to_string();
        assert!(error.starts_with(&format!("portNumber in {}: ", file.path().display())), "{error}");

        let (_file, mut layers_read, _) = aliased("portNumber = 5");
        layers_read.load::<Back>().unwrap();
        let error = layers_read.finish().unwrap_err().to_string();
        assert!(error.contains("unknown option \"portNumber\", expected one of threads"), "{error}");

        let (_file, _, aliased) = aliased("portNumber = 5\nport = 6");
        let error = aliased.unwrap_err();
        assert!(error.contains("portNumber and port are the same option"), "{error}");
    }

    #[test]
    fn faults_name_the_file_and_the_option() {
        let (file, layers_read) = layers("port = 'http'");
        let error = layers_read.unwrap().load::<Front>().unwrap_err().to_string();
        assert!(error.starts_with(&format!("port in {}: ", file.path().display())), "{error}");
        assert!(error.contains("expected u16"), "{error}");

        let (_file, layers_read) = layers("prot = 1");
        let mut layers_read = layers_read.unwrap();
        layers_read.load::<Front>().unwrap();
        let error = layers_read.finish().unwrap_err().to_string();
        assert!(error.contains("unknown option \"prot\", expected one of name, port"), "{error}");

        let (_file, broken) = layers("a = 1\nport = = 1");
        assert!(broken.unwrap_err().to_string().contains("line 2: "));
        let missing =
            Layers::read(Some(Path::new("/no/such/baton.toml")), &Cli::default()).unwrap_err().to_string();
        assert!(missing.starts_with("/no/such/baton.toml: "), "{missing}");
    }
}
