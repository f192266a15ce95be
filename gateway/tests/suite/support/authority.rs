//! A certificate authority and what it issued, as PEM files.

use std::path::PathBuf;

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, KeyUsagePurpose};

/// An authority with a certificate for this machine's loopback names, `server`, and one for a client, `client`.
pub(crate) struct Authority {
    folder: tempfile::TempDir,
}

impl Authority {
    pub(crate) fn new() -> Self {
        let authority = Self { folder: tempfile::tempdir().unwrap() };
        let mut params = CertificateParams::default();
        // Another name than those it signs have, or these would look as if they had signed themselves.
        params.distinguished_name.push(DnType::CommonName, "authority");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        let key = KeyPair::generate().unwrap();
        authority.write("ca.pem", &params.self_signed(&key).unwrap().pem());
        let issuer = Issuer::new(params, key);
        for (name, names) in [("server", vec!["localhost", "127.0.0.1"]), ("client", vec!["client"])] {
            let names: Vec<String> = names.into_iter().map(ToOwned::to_owned).collect();
            let key = KeyPair::generate().unwrap();
            let certificate = CertificateParams::new(names).unwrap().signed_by(&key, &issuer).unwrap();
            authority.write(&format!("{name}.pem"), &certificate.pem());
            authority.write(&format!("{name}.key.pem"), &key.serialize_pem());
        }
        authority
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::write(self.path(name), text).unwrap();
    }

    /// A file of it: `ca.pem`, `server.pem`, `server.key.pem`, `client.pem`, `client.key.pem`.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// What the options name, so that the gateway is `server`.
    pub(crate) fn serve(&self, config: &mut gateway::Config) {
        config.tls_cert = Some(self.path("server.pem"));
        config.tls_key = Some(self.path("server.key.pem"));
    }
}
