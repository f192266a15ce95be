//! Certificates for a server and its clients on loopback, as PEM files in a folder of their own.

use std::fs;
use std::path::PathBuf;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, Issuer, KeyPair};

/// The name that every member of a cluster has in its certificate.
pub const MEMBER_NAME: &str = "baton.internal";

/// `ca.pem`; `server`, `client`, `member` and `stranger`, each as `NAME.pem` and `NAME.key.pem`. The stranger's certificate
/// is by an authority that nobody knows, the member's for [`MEMBER_NAME`] and nothing else.
pub struct Certificates {
    folder: tempfile::TempDir,
    known: CertifiedIssuer<'static, KeyPair>,
}

impl Certificates {
    /// Draws keys and signs everything.
    ///
    /// # Panics
    /// When the files cannot be written.
    pub fn generate() -> Self {
        let certificates =
            Self { folder: tempfile::tempdir().expect("a temporary folder"), known: authority() };
        let loopback = ["localhost", "127.0.0.1"];
        certificates.trust(&[&certificates.known]);
        certificates.issue("server", &loopback, &certificates.known);
        certificates.issue("client", &loopback, &certificates.known);
        certificates.issue("member", &[MEMBER_NAME], &certificates.known);
        certificates.issue("stranger", &[MEMBER_NAME], &authority());
        certificates
    }

    /// Replaces the authority, and with it the member's certificate, in steps: both authorities are trusted, the member has
    /// its new certificate, the old authority is trusted no more. After each, waits for `taken`.
    ///
    /// # Panics
    /// When the files cannot be written.
    pub async fn rotate(&mut self, mut taken: impl AsyncFnMut()) {
        let old = std::mem::replace(&mut self.known, authority());
        self.trust(&[&old, &self.known]);
        taken().await;
        self.issue("member", &[MEMBER_NAME], &self.known);
        taken().await;
        self.trust(&[&self.known]);
        taken().await;
    }

    /// Path of a file.
    pub fn path(&self, file: &str) -> PathBuf {
        self.folder.path().join(file)
    }

    /// The text of a file.
    ///
    /// # Panics
    /// When there is none of that name.
    pub fn text(&self, file: &str) -> String {
        fs::read_to_string(self.path(file)).expect("a file of this name was written")
    }

    fn trust(&self, authorities: &[&CertifiedIssuer<'static, KeyPair>]) {
        let texts: Vec<String> = authorities.iter().map(|authority| authority.pem()).collect();
        self.write("ca.pem", &texts.concat());
    }

    fn issue(&self, name: &str, names: &[&str], authority: &Issuer<'_, KeyPair>) {
        let key = KeyPair::generate().expect("a key can be drawn");
        let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
        let mut params = CertificateParams::new(names).expect("the names are valid");
        params.distinguished_name.push(DnType::CommonName, name);
        let certificate = params.signed_by(&key, authority).expect("a certificate can be signed");
        self.write(&format!("{name}.pem"), &certificate.pem());
        self.write(&format!("{name}.key.pem"), &key.serialize_pem());
    }

    /// Writes to a new file that takes the old one's place, so no reader sees half of it.
    fn write(&self, file: &str, text: &str) {
        let new = self.path("new");
        fs::write(&new, text).expect("a temporary file can be written");
        fs::rename(new, self.path(file)).expect("a temporary file can be replaced");
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
