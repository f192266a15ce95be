//! A model hub as the manifests name it, on this machine: its name leads here, and its certificate is one that the images
//! of this test trust.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use axum::Router;
use axum::body::Bytes;
use axum::extract::Request;
use axum::response::{IntoResponse as _, Response};
use http::StatusCode;
use node::{Context, Public, Tls, TlsFiles};
use rcgen::{CertificateParams, KeyPair};
use sha2::{Digest as _, Sha256};

/// The hub that is asked where the manifests name no other.
pub(crate) const HOST: &str = "huggingface.co";

/// A running hub, which ends when this is dropped.
pub(crate) struct Registry {
    /// The authorities by which its certificate holds.
    pub(crate) authorities: PathBuf,
    context: Context,
}

impl Registry {
    /// Serves a model as the file that a pattern and a repository name.
    pub(crate) async fn start(
        folder: &Path,
        address: &str,
        source: &str,
        pattern: &str,
        model: &Path,
    ) -> Self {
        let repository = source.strip_prefix("hf:").expect("the demo's model is of a hub").to_owned();
        let file = pattern.replace('*', "SmolLM2-135M-Instruct");
        let model = Bytes::from(std::fs::read(model).expect("the model was fetched"));
        let digest = Sha256::digest(&model).iter().fold(String::new(), |mut hex, byte| {
            let _ = write!(hex, "{byte:02x}");
            hex
        });
        let lfs = serde_json::json!({"sha256": digest, "size": model.len(), "pointerSize": 134});
        let listed = serde_json::json!({"sha": "0123abcd", "siblings": [
            {"rfilename": "README.md", "size": 5},
            {"rfilename": file, "size": model.len(), "lfs": lfs},
            {"rfilename": "SmolLM2-135M-Instruct-Q2_K.gguf", "size": 1, "lfs": {"sha256": "00", "size": 1}},
        ]});
        let listing = format!("/api/models/{repository}/revision/main");
        let resolve = format!("/{repository}/resolve/0123abcd/{file}");
        let answer = move |request: Request| {
            let path = request.uri().path();
            let answer: Response = match path {
                path if path == listing => listed.to_string().into_response(),
                path if path == resolve => model.clone().into_response(),
                _ => StatusCode::NOT_FOUND.into_response(),
            };
            async move { answer }
        };
        let key = KeyPair::generate().expect("a key can be drawn");
        let params = CertificateParams::new([HOST.to_owned()]).expect("the name is valid");
        let certificate = params.self_signed(&key).expect("a certificate can be signed").pem();
        let (authorities, key_file) = (folder.join("authorities.pem"), folder.join("hub.key.pem"));
        std::fs::write(&authorities, certificate).expect("a file can be written");
        std::fs::write(&key_file, key.serialize_pem()).expect("a file can be written");
        let files = TlsFiles { cert: Some(&authorities), key: Some(&key_file), client_ca: None };
        let public = Public { tls: Tls::read(files).expect("the files are whole"), ..Public::default() };
        let context = Context::new("hub", Vec::new());
        let router = Router::new().fallback(answer);
        let serving = node::serve_public_http(&format!("{address}:443"), router, &public, &context).await;
        serving.expect("this runs as root, which may listen at port 443");
        Self { authorities, context }
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        self.context.shutdown.stop();
    }
}
