//! TLS between the services of a cluster: each shows a certificate and checks the other's, all by one authority.
//!
//! The files are read again when they change. Connections that are open go on; each new one uses what was read last.

use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use http::Uri;
use hyper_util::rt::TokioIo;
use rustls::crypto::ring;
use rustls::pki_types::ServerName;
use rustls::server::WebPkiClientVerifier;
use rustls::sign::SingleCertAndKey;
use rustls::{ClientConfig, ServerConfig};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;
use tokio_rustls::{TlsAcceptor, TlsConnector};
use tower::{Service, service_fn};

use crate::tls::{fault, pair, read, roots};
use crate::{Error, Shutdown, Tasks};

const CA: &str = "--cluster-tls-ca";
const CERT: &str = "--cluster-tls-cert";
const KEY: &str = "--cluster-tls-key";
const NAME: &str = "--cluster-tls-name";

/// How often the files are looked at.
const POLL_EVERY: Duration = Duration::from_secs(1);
/// What is spoken on every connection.
const PROTOCOL: &[u8] = b"h2";

/// The PEM files of a service, each as its option names it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClusterTlsConfig {
    /// `--cluster-tls-ca`: the authorities, one of which must have issued every service's certificate.
    pub ca: Option<PathBuf>,
    /// `--cluster-tls-cert`: this service's certificate, its issuers after it, for servers and clients alike.
    pub cert: Option<PathBuf>,
    /// `--cluster-tls-key`: the private key of that certificate.
    pub key: Option<PathBuf>,
    /// `--cluster-tls-name`: the name that every service's certificate is for; the host of its address when absent.
    pub name: Option<String>,
}

/// A service's side of such connections, as a server and as a client.
#[derive(Clone)]
pub struct ClusterTls(Arc<Shared>);

struct Shared {
    files: Files,
    name: Option<ServerName<'static>>,
    current: RwLock<Arc<Sides>>,
}

struct Files {
    ca: PathBuf,
    cert: PathBuf,
    key: PathBuf,
}

/// What was made of the files when they were read last.
struct Sides {
    server: Arc<ServerConfig>,
    client: Arc<ClientConfig>,
}

impl ClusterTls {
    /// Reads the files. `None` when no option is set: services then speak plain text.
    ///
    /// # Errors
    /// [`Error::Option`] that names the option and the file: one cannot be read, has not what is expected of it, does
    /// not fit another, or is missing beside another.
    pub fn read(config: &ClusterTlsConfig) -> Result<Option<Self>, Error> {
        let files = [(CA, &config.ca), (CERT, &config.cert), (KEY, &config.key)];
        let set = files.iter().find(|(_, file)| file.is_some()).map(|(option, _)| *option);
        let Some(set) = set.or(config.name.is_some().then_some(NAME)) else { return Ok(None) };
        let file = |(option, file): (&str, &Option<PathBuf>)| {
            file.clone().ok_or_else(|| Error::option(option, format!("expected a PEM file beside {set}")))
        };
        let [ca, cert, key] = files.map(file);
        let name = config.name.clone().map(|name| {
            let expected =
                |_| Error::option(NAME, format!("expected a DNS name or IP address, got {name:?}"));
            ServerName::try_from(name.clone()).map_err(expected)
        });
        let (files, name) = (Files { ca: ca?, cert: cert?, key: key? }, name.transpose()?);
        let current = RwLock::new(Arc::new(files.sides()?));
        Ok(Some(Self(Arc::new(Shared { files, name, current }))))
    }

    /// Reads the files again whenever they have changed, until the process stops. Files that do not fit are logged, and
    /// what was read before stays.
    pub fn keep_fresh(&self, tasks: &Tasks, shutdown: &Shutdown) {
        let (tls, shutdown) = (self.clone(), shutdown.clone());
        drop(tasks.spawn("certificates", async move {
            tokio::select! {
                () = tls.follow() => {}
                () = shutdown.stopped() => {}
            }
        }));
    }

    async fn follow(&self) {
        let files = &self.0.files;
        let mut known = files.contents().ok();
        loop {
            tokio::time::sleep(POLL_EVERY).await;
            // One that is being replaced is missing for an instant.
            let Ok(contents) = files.contents() else { continue };
            if known.as_ref() == Some(&contents) {
                continue;
            }
            known = Some(contents);
            match files.sides() {
                Ok(sides) => {
                    *self.0.current.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(sides);
                    tracing::info!(cert = %files.cert.display(), "certificates read again");
                }
                Err(error) => {
                    tracing::error!(%error, "certificates changed and unusable, keeping the last ones");
                }
            }
        }
    }

    fn current(&self) -> Arc<Sides> {
        self.0.current.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Does the handshake of a connection that comes in now.
    pub(crate) fn acceptor(&self) -> TlsAcceptor {
        TlsAcceptor::from(self.current().server.clone())
    }

    /// Connects to other services, each time within `longest`.
    pub(crate) fn connector(
        &self,
        longest: Duration,
    ) -> impl Service<
        Uri,
        Response = TokioIo<TlsStream<TcpStream>>,
        Error = std::io::Error,
        Future: Send + 'static,
    > + Clone
    + Send
    + Sync
    + 'static {
        let tls = self.clone();
        service_fn(move |uri: Uri| {
            let tls = tls.clone();
            async move {
                let connected = tokio::time::timeout(longest, tls.connect(&uri)).await;
                connected.unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into())).map(TokioIo::new)
            }
        })
    }

    async fn connect(&self, uri: &Uri) -> std::io::Result<TlsStream<TcpStream>> {
        let host = uri.host().unwrap_or_default();
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        let name = match &self.0.name {
            Some(name) => name.clone(),
            None => ServerName::try_from(host.to_owned()).map_err(std::io::Error::other)?,
        };
        let stream = TcpStream::connect((host, uri.port_u16().unwrap_or_default())).await?;
        stream.set_nodelay(true)?;
        TlsConnector::from(self.current().client.clone()).connect(name, stream).await
    }
}

impl fmt::Debug for ClusterTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClusterTls").field("name", &self.0.name).finish_non_exhaustive()
    }
}

impl Files {
    /// The bytes of all, to see whether they have changed.
    fn contents(&self) -> Result<[Vec<u8>; 3], Error> {
        Ok([read(CA, &self.ca)?, read(CERT, &self.cert)?, read(KEY, &self.key)?])
    }

    fn sides(&self) -> Result<Sides, Error> {
        let provider = Arc::new(ring::default_provider());
        let authorities = Arc::new(roots(CA, &self.ca)?);
        let pair = Arc::new(SingleCertAndKey::from(pair((CERT, &self.cert), (KEY, &self.key))?));
        let unusable = |error: rustls::Error| Error::option(CERT, error.to_string());
        let verifier = WebPkiClientVerifier::builder_with_provider(authorities.clone(), provider.clone())
            .build()
            .map_err(|error| fault(CA, &self.ca, error))?;
        let mut server = ServerConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .map_err(unusable)?
            .with_client_cert_verifier(verifier)
            .with_cert_resolver(pair.clone());
        let mut client = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(unusable)?
            .with_root_certificates(authorities)
            .with_client_cert_resolver(pair);
        server.alpn_protocols = vec![PROTOCOL.to_vec()];
        client.alpn_protocols = vec![PROTOCOL.to_vec()];
        Ok(Sides { server: Arc::new(server), client: Arc::new(client) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_names_the_option() {
        assert!(ClusterTls::read(&ClusterTlsConfig::default()).unwrap().is_none());
        let refused = |change: fn(&mut ClusterTlsConfig)| {
            let mut config = ClusterTlsConfig::default();
            change(&mut config);
            ClusterTls::read(&config).unwrap_err().to_string()
        };
        let alone = refused(|config| config.name = Some("baton.internal".to_owned()));
        assert_eq!(alone, "--cluster-tls-ca: expected a PEM file beside --cluster-tls-name");
        let alone = refused(|config| config.ca = Some("ca.pem".into()));
        assert_eq!(alone, "--cluster-tls-cert: expected a PEM file beside --cluster-tls-ca");
        let file = |name: &str| Some(PathBuf::from("/no/such").join(name));
        let (ca, cert, key) = (file("ca.pem"), file("c.pem"), file("k.pem"));
        let mut config = ClusterTlsConfig { ca, cert, key, name: None };
        let missing = ClusterTls::read(&config).unwrap_err().to_string();
        assert!(missing.starts_with("--cluster-tls-ca: /no/such/ca.pem: "), "{missing}");
        config.name = Some("no name".to_owned());
        let name = ClusterTls::read(&config).unwrap_err().to_string();
        assert_eq!(name, "--cluster-tls-name: expected a DNS name or IP address, got \"no name\"");
    }
}
