//! Certificates for a server and its clients on loopback, as PEM files in a folder of their own.

use std::fs;
use std::path::PathBuf;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, Issuer, KeyPair};

/// `ca.pem`; `server`, `client` and `stranger`, each as `NAME.pem` and `NAME.key.pem`. The stranger's certificate is by
/// an authority that nobody knows.
pub struct Certificates {
    folder: tempfile::TempDir,
}

impl Certificates {
    /// Draws keys and signs everything.
    ///
    /// # Panics
    /// When the files cannot be written.
    pub fn generate() -> Self {
        let certificates = Self { folder: tempfile::tempdir().expect("a temporary folder") };
        let known = authority();
        certificates.write("ca.pem", &known.pem());
        certificates.issue("server", &known);
        certificates.issue("client", &known);
        certificates.issue("stranger", &authority());
        certificates
    }

    /// Path of a file.
    pub fn path(&self, file: &str) -> PathBuf {
        self.folder.path().join(file)
    }

    fn issue(&self, name: &str, authority: &Issuer<'_, KeyPair>) {
        let key = KeyPair::generate().expect("a key can be drawn");
        let names = ["localhost".to_owned(), "127.0.0.1".to_owned()];
        let mut params = CertificateParams::new(names).expect("the names are valid");
        params.distinguished_name.push(DnType::CommonName, name);
        let certificate = params.signed_by(&key, authority).expect("a certificate can be signed");
        self.write(&format!("{name}.pem"), &certificate.pem());
        self.write(&format!("{name}.key.pem"), &key.serialize_pem());
    }

    fn write(&self, file: &str, text: &str) {
        fs::write(self.path(file), text).expect("a temporary file can be written");
    }
}

fn authority() -> CertifiedIssuer<'static, KeyPair> {
    let mut params = CertificateParams::new(Vec::new()).expect("no name is invalid");
    // Another name than those it signs have, or these would look as if they had signed themselves.
    params.distinguished_name.push(DnType::CommonName, "authority");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let key = KeyPair::generate().expect("a key can be drawn");
    CertifiedIssuer::self_signed(params, key).expect("a certificate can be signed")
}
