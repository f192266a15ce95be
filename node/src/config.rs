//! Configuration in layers: defaults, then a TOML file, then `BATON_…` environment variables, then the command line.
//!
//! One struct per command holds every option. Its field `grpc_port` is `grpc_port` in the file, `BATON_GRPC_PORT` in
//! the environment and `--grpc-port` on the command line.

use std::path::Path;

use figment::providers::{Env, Format, Serialized, Toml};
use figment::{Figment, Provider, Source};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::Error;

/// In front of the name of every environment variable.
pub const ENV_PREFIX: &str = "BATON_";

/// Loads a configuration. `cli` is what the command line said: options that it did not name must be left out when it is
/// serialised. Only variables that name a field of `C` are read; an unknown key in the file is an error.
///
/// # Errors
/// [`Error::File`] when the file cannot be read, [`Error::Option`] that names the option, where its value came from,
/// and what was expected.
pub fn load<C>(file: Option<&Path>, cli: &impl Serialize) -> Result<C, Error>
where
    C: Serialize + DeserializeOwned + Default,
{
    let defaults = Serialized::defaults(C::default());
    let fields = fields(&defaults)?;
    let mut figment = Figment::from(defaults);
    if let Some(path) = file {
        figment = figment.merge(read(path, &fields)?);
    }
    let names: Vec<&str> = fields.iter().map(String::as_str).collect();
    figment
        .merge(Env::prefixed(ENV_PREFIX).only(&names))
        .merge(Serialized::defaults(cli))
        .extract()
        .map_err(|error| option_error(&error))
}

/// The value of the environment variable `BATON_{name}`, for the few options that are needed before [`load`].
pub fn env(name: &str) -> Option<String> {
    Env::var(&format!("{ENV_PREFIX}{name}")).filter(|value| !value.is_empty())
}

fn fields(defaults: &impl Provider) -> Result<Vec<String>, Error> {
    let data = defaults.data().map_err(|error| option_error(&error))?;
    Ok(data.into_values().flat_map(figment::value::Map::into_keys).collect())
}

fn read(path: &Path, fields: &[String]) -> Result<figment::providers::Data<Toml>, Error> {
    let fault = |message: String| Error::File { path: path.to_owned(), message };
    let text = std::fs::read_to_string(path).map_err(|error| fault(error.to_string()))?;
    let table: toml::Table =
        text.parse().map_err(|error: toml::de::Error| fault(one_line(&error.to_string())))?;
    if let Some(unknown) = table.keys().find(|key| !fields.contains(key)) {
        return Err(fault(format!("unknown option {unknown:?}, expected one of {}", fields.join(", "))));
    }
    Ok(Toml::file_exact(path))
}

fn one_line(text: &str) -> String {
    text.split('\n').map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join(" ")
}

/// Names the option as its source spells it.
fn option_error(error: &figment::Error) -> Error {
    let field = error.path.join(".");
    let metadata = error.metadata.as_ref();
    let option = match metadata.map(|metadata| (&metadata.source, metadata.name.as_ref())) {
        Some((Some(Source::File(path)), _)) => format!("{field} in {}", path.display()),
        Some((_, name)) if name.contains("environment") => format!("{ENV_PREFIX}{}", field.to_uppercase()),
        _ => format!("--{}", field.replace('_', "-")),
    };
    Error::option(option, error.kind.to_string())
}
