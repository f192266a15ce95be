//! Addresses: `host:port` for TCP, `local:NAME` within one process.

use std::fmt;

use crate::Error;

/// The scheme of addresses within one process.
pub(crate) const LOCAL: &str = "local:";

/// Where a service listens.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Listener {
    /// `host:port`; port 0 lets the system choose.
    Tcp(String),
    /// A name in this process's [`crate::Network`], without the `local:` in front.
    Local(String),
}

impl Listener {
    /// Parses the value of `option`: `host:port` or `local:NAME`.
    ///
    /// # Errors
    /// [`Error::Option`] that names the option, what was expected and what came.
    pub fn parse(option: &str, value: &str) -> Result<Self, Error> {
        if let Some(name) = value.strip_prefix(LOCAL) {
            if name.is_empty() {
                return Err(Error::option(option, format!("expected local:NAME, got {value:?}")));
            }
            return Ok(Self::Local(name.to_owned()));
        }
        check_host_port(value).map_err(|expected| {
            Error::option(
                option,
                format!("expected host:port, such as 127.0.0.1:9101; {expected}, got {value:?}"),
            )
        })?;
        Ok(Self::Tcp(value.to_owned()))
    }
}

impl fmt::Display for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => f.write_str(address),
            Self::Local(name) => write!(f, "{LOCAL}{name}"),
        }
    }
}

/// Checks `host:port` (or `[v6]:port`); the error says which part is missing or wrong.
pub(crate) fn check_host_port(value: &str) -> Result<(), &'static str> {
    let (host, port) = value.rsplit_once(':').ok_or("the port is missing")?;
    if host.is_empty() {
        return Err("the host is empty");
    }
    let bracketed = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
    match bracketed {
        Some(v6) if v6.parse::<std::net::Ipv6Addr>().is_err() => return Err("the host is no IPv6 address"),
        None if host.contains(':') => return Err("an IPv6 host needs brackets"),
        None if !host.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_')) => {
            return Err("the host is no name or address");
        }
        _ => {}
    }
    port.parse::<u16>().map(drop).map_err(|_| "the port is no number from 0 to 65535")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_and_port_are_checked_and_the_option_named() {
        for good in ["127.0.0.1:0", "localhost:9101", "[::1]:80", "decode-0.baton:8001"] {
            assert_eq!(Listener::parse("--listen", good).unwrap(), Listener::Tcp(good.to_owned()));
        }
        let cases = [
            ("9101", "the port is missing"),
            (":9101", "the host is empty"),
            ("host:", "the port is no number"),
            ("host:70000", "the port is no number"),
            ("::1:80", "needs brackets"),
            ("[nope]:80", "no IPv6 address"),
            ("http://host:80", "needs brackets"),
            ("ho st:80", "no name or address"),
        ];
        for (value, expected) in cases {
            let error = Listener::parse("--listen", value).unwrap_err().to_string();
            assert!(error.starts_with("--listen: ") && error.contains(expected), "{value}: {error}");
        }
    }

    #[test]
    fn local_names() {
        let listener = Listener::parse("--listen", "local:prefill-0").unwrap();
        assert_eq!(listener, Listener::Local("prefill-0".to_owned()));
        assert_eq!(listener.to_string(), "local:prefill-0");
        assert!(Listener::parse("--listen", "local:").is_err());
    }
}
