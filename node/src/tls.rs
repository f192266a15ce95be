//! TLS towards clients, from PEM files.

use std::path::Path;
use std::sync::Arc;

use rustls::RootCertStore;
use rustls::ServerConfig;
use rustls::crypto::ring;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use tokio_rustls::TlsAcceptor;

use crate::Error;

const CERT: &str = "--tls-cert";
const KEY: &str = "--tls-key";
const CLIENT_CA: &str = "--tls-client-ca";

/// The PEM files of a server, each as its option names it.
#[derive(Clone, Copy, Debug, Default)]
pub struct TlsFiles<'a> {
    /// `--tls-cert`: the server's certificate, its issuers after it.
    pub cert: Option<&'a Path>,
    /// `--tls-key`: the private key of that certificate, as PKCS#8, PKCS#1 or SEC1.
    pub key: Option<&'a Path>,
    /// `--tls-client-ca`: authorities, one of which must have issued the certificate of each client.
    pub client_ca: Option<&'a Path>,
}

/// TLS 1.2 and 1.3 as a server speaks it.
#[derive(Clone, Debug)]
pub struct Tls(ServerConfig);

impl Tls {
    /// Reads the files. `None` when none is named: clients then speak plain text.
    ///
    /// # Errors
    /// [`Error::Option`] that names the option and the file: one cannot be read, has not what is expected of it, does
    /// not fit another, or is missing beside another.
    pub fn read(files: TlsFiles<'_>) -> Result<Option<Self>, Error> {
        let missing = |option, other| Error::option(option, format!("expected a PEM file beside {other}"));
        let (cert, key) = match files {
            TlsFiles { cert: None, key: None, client_ca: None } => return Ok(None),
            TlsFiles { cert: Some(cert), key: Some(key), .. } => (cert, key),
            TlsFiles { cert: Some(_), .. } => return Err(missing(KEY, CERT)),
            TlsFiles { key: Some(_), .. } => return Err(missing(CERT, KEY)),
            TlsFiles { client_ca: Some(_), .. } => return Err(missing(CERT, CLIENT_CA)),
        };
        let provider = Arc::new(ring::default_provider());
        let builder = ServerConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .map_err(|error| Error::option(CERT, error.to_string()))?;
        let builder = match files.client_ca {
            None => builder.with_no_client_auth(),
            Some(path) => {
                let verifier =
                    WebPkiClientVerifier::builder_with_provider(roots(CLIENT_CA, path)?.into(), provider)
                        .build()
                        .map_err(|error| fault(CLIENT_CA, path, error))?;
                builder.with_client_cert_verifier(verifier)
            }
        };
        let pair = SingleCertAndKey::from(pair((CERT, cert), (KEY, key))?);
        Ok(Some(Self(builder.with_cert_resolver(Arc::new(pair)))))
    }

    /// Does the handshakes of connections on which one of these protocols is spoken, the first one best.
    pub(crate) fn acceptor(&self, protocols: &[&[u8]]) -> TlsAcceptor {
        let mut config = self.0.clone();
        config.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
        TlsAcceptor::from(Arc::new(config))
    }
}

/// What is wrong with the file that an option names.
pub(crate) fn fault(option: &str, path: &Path, message: impl std::fmt::Display) -> Error {
    Error::option(option, format!("{}: {message}", path.display()))
}

/// The bytes of the file that an option names.
pub(crate) fn read(option: &str, path: &Path) -> Result<Vec<u8>, Error> {
    std::fs::read(path).map_err(|error| fault(option, path, error))
}

/// The certificates in the file that an option names, at least one.
pub(crate) fn certificates(option: &str, path: &Path) -> Result<Vec<CertificateDer<'static>>, Error> {
    let expected = "expected a certificate in PEM";
    let certificates: Vec<_> = CertificateDer::pem_slice_iter(&read(option, path)?)
        .collect::<Result<_, _>>()
        .map_err(|error| fault(option, path, format!("{expected}: {}", broken(&error))))?;
    if certificates.is_empty() {
        return Err(fault(option, path, format!("{expected}, found none")));
    }
    Ok(certificates)
}

fn private_key(option: &str, path: &Path) -> Result<PrivateKeyDer<'static>, Error> {
    let expected = "expected a private key in PEM, without a passphrase";
    PrivateKeyDer::from_pem_slice(&read(option, path)?).map_err(|error| match error {
        pem::Error::NoItemsFound => fault(option, path, format!("{expected}, found none")),
        error => fault(option, path, format!("{expected}: {}", broken(&error))),
    })
}

/// A certificate with its issuers, and its key, from the files that two options name.
pub(crate) fn pair(cert: (&str, &Path), key: (&str, &Path)) -> Result<Arc<CertifiedKey>, Error> {
    let (chain, private) = (certificates(cert.0, cert.1)?, private_key(key.0, key.1)?);
    let pair = CertifiedKey::from_der(chain, private, &ring::default_provider());
    let pair = pair.map_err(|error| match error {
        rustls::Error::InconsistentKeys(_) => {
            fault(key.0, key.1, format!("expected the key of the certificate in {}", cert.1.display()))
        }
        rustls::Error::InvalidCertificate(_) => fault(cert.0, cert.1, error),
        _ => fault(key.0, key.1, error),
    })?;
    Ok(Arc::new(pair))
}

/// What is broken, without a line of the file: it may be a key's.
fn broken(error: &pem::Error) -> &'static str {
    match error {
        pem::Error::MissingSectionEnd { .. } => "a section has no end",
        pem::Error::IllegalSectionStart { .. } => "a section's first line is malformed",
        pem::Error::Base64Decode(_) => "a section is not base64",
        _ => "the file is malformed",
    }
}

/// The authorities in the file that an option names, at least one.
pub(crate) fn roots(option: &str, path: &Path) -> Result<RootCertStore, Error> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(option, path)? {
        roots.add(certificate).map_err(|error| fault(option, path, error))?;
    }
    Ok(roots)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    struct Folder(tempfile::TempDir);

    impl Folder {
        /// A certificate with its key, the key of another, and files that are neither.
        fn new() -> Self {
            let folder = Self(tempfile::tempdir().unwrap());
            let own = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
            let (cert, key) = (own.cert.pem(), own.signing_key.serialize_pem());
            folder.write("cut.pem", &cert[..cert.len() - 30]);
            folder.write("garbled.pem", &cert.replace("\nM", "\n?"));
            folder.write("cert.pem", &cert);
            folder.write("key.pem", &key);
            folder.write("other.pem", &rcgen::KeyPair::generate().unwrap().serialize_pem());
            folder.write("empty.pem", "");
            folder.write("no.pem", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n");
            folder
        }

        fn write(&self, name: &str, text: &str) {
            std::fs::write(self.path(name), text).unwrap();
        }

        fn path(&self, name: &str) -> PathBuf {
            self.0.path().join(name)
        }

        fn read(&self, cert: &str, key: &str, client_ca: &str) -> Result<Option<Tls>, Error> {
            let paths = [cert, key, client_ca].map(|name| (!name.is_empty()).then(|| self.path(name)));
            let [cert, key, client_ca] = paths.each_ref().map(Option::as_deref);
            Tls::read(TlsFiles { cert, key, client_ca })
        }
    }

    #[test]
    fn whole_files_are_taken() {
        let folder = Folder::new();
        assert!(folder.read("", "", "").unwrap().is_none());
        assert!(folder.read("cert.pem", "key.pem", "").unwrap().is_some());
        assert!(folder.read("cert.pem", "key.pem", "cert.pem").unwrap().is_some());
    }

    #[test]
    fn a_fault_names_the_option_and_the_file() {
        let folder = Folder::new();
        for (files, option, file, expected) in [
            (["cert.pem", "", ""], KEY, "", "expected a PEM file beside --tls-cert"),
            (["", "key.pem", ""], CERT, "", "expected a PEM file beside --tls-key"),
            (["", "", "cert.pem"], CERT, "", "expected a PEM file beside --tls-client-ca"),
            (["missing.pem", "key.pem", ""], CERT, "missing.pem", "No such file"),
            (["empty.pem", "key.pem", ""], CERT, "empty.pem", "expected a certificate in PEM, found none"),
            (["key.pem", "key.pem", ""], CERT, "key.pem", "expected a certificate in PEM, found none"),
            (["cut.pem", "key.pem", ""], CERT, "cut.pem", "a section has no end"),
            (["garbled.pem", "key.pem", ""], CERT, "garbled.pem", "not base64"),
            (["no.pem", "key.pem", ""], CERT, "no.pem", "certificate"),
            (["cert.pem", "missing.pem", ""], KEY, "missing.pem", "No such file"),
            (["cert.pem", "cert.pem", ""], KEY, "cert.pem", "expected a private key in PEM"),
            (["cert.pem", "other.pem", ""], KEY, "other.pem", "expected the key of the certificate in "),
            (["cert.pem", "key.pem", "missing.pem"], CLIENT_CA, "missing.pem", "No such file"),
            (["cert.pem", "key.pem", "key.pem"], CLIENT_CA, "key.pem", "expected a certificate in PEM"),
            (["cert.pem", "key.pem", "no.pem"], CLIENT_CA, "no.pem", "certificate"),
        ] {
            let error = folder.read(files[0], files[1], files[2]).unwrap_err();
            assert!(error.is_usage());
            let error = error.to_string();
            let named = error.starts_with(&format!("{option}: ")) && error.contains(file);
            assert!(named && error.contains(expected), "{files:?}: {error}");
        }
    }
}
