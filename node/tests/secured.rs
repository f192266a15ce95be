//! Services that speak mutual TLS: who is let in, whose name is checked, and files that change.

#![expect(clippy::unwrap_used, reason = "these are tests")]

mod probe;

use std::time::Duration;

use baton_tests::certificates::{Certificates, MEMBER_NAME};
use node::{ClusterTls, ClusterTlsConfig, Context, Network, NetworkConfig};
use probe::{Rig, client, fence};
use tonic::Code;

/// Longer than changed files go unnoticed.
const NOTICED: Duration = Duration::from_millis(2500);

fn tls(certificates: &Certificates, who: &str, name: &str) -> ClusterTls {
    let file = |name: String| Some(certificates.path(&name));
    let config = ClusterTlsConfig {
        ca: file("ca.pem".to_owned()),
        cert: file(format!("{who}.pem")),
        key: file(format!("{who}.key.pem")),
        name: Some(name.to_owned()),
    };
    ClusterTls::read(&config).unwrap().unwrap()
}

fn context(tls: Option<ClusterTls>) -> Context {
    let mut context = Context::new("probe", Vec::new());
    context.network = Network::secured(NetworkConfig::default(), tls);
    context
}

/// A call on a connection of its own.
async fn call(rig: &Rig, tls: Option<ClusterTls>) -> Result<(), Code> {
    let answer = client(&context(tls), &rig.serving.address).fence(fence("good")).await;
    answer.map(drop).map_err(|status| status.code())
}

#[tokio::test(flavor = "multi_thread")]
async fn only_certificates_of_the_authority_and_names_that_fit_are_taken() {
    let certificates = Certificates::generate();
    let rig = Rig::of(context(Some(tls(&certificates, "member", MEMBER_NAME))), "127.0.0.1:0").await;
    assert_eq!(call(&rig, Some(tls(&certificates, "member", MEMBER_NAME))).await, Ok(()));
    let refused = [
        None,
        Some(tls(&certificates, "stranger", MEMBER_NAME)),
        // The server is not who it should be.
        Some(tls(&certificates, "member", "elsewhere.internal")),
        Some(tls(&Certificates::generate(), "member", MEMBER_NAME)),
    ];
    for stranger in refused {
        let who = format!("{stranger:?}");
        assert_eq!(call(&rig, stranger).await, Err(Code::Unavailable), "{who}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn changed_files_are_taken_and_broken_ones_are_not() {
    let mut certificates = Certificates::generate();
    let own = tls(&certificates, "member", MEMBER_NAME);
    let old = own.clone();
    let server = context(Some(own.clone()));
    own.keep_fresh(&server.tasks, &server.shutdown);
    let rig = Rig::of(server, "127.0.0.1:0").await;

    let key = certificates.path("member.key.pem");
    let whole = std::fs::read(&key).unwrap();
    std::fs::write(&key, "no key").unwrap();
    tokio::time::sleep(NOTICED).await;
    assert_eq!(call(&rig, Some(old)).await, Ok(()), "what was read before stays");
    std::fs::write(&key, whole).unwrap();

    let before = tls(&certificates, "client", MEMBER_NAME);
    assert_eq!(call(&rig, Some(before.clone())).await, Ok(()));
    certificates.rotate(async || tokio::time::sleep(NOTICED).await).await;
    assert_eq!(call(&rig, Some(tls(&certificates, "member", MEMBER_NAME))).await, Ok(()));
    assert_eq!(call(&rig, Some(before)).await, Err(Code::Unavailable), "its authority is trusted no more");
}
