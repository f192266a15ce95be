//! Discovery from a fixed file and from names.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use node::{Context, DiscoverySource, EtcdConfig, Member, discovery};
use proto::Role;
use tokio::sync::watch;

const ONE: &str = "[[member]]\nrole = \"prefill\"\naddress = \"127.0.0.1:9101\"\n";
const TWO: &str = "[[member]]\nrole = \"router\"\naddress = \"127.0.0.1:9100\"\n
[[member]]\nrole = \"decode\"\naddress = \"decode-0.baton:9102\"\n";

fn member(role: Role, address: &str) -> Member {
    Member { role, address: address.to_owned() }
}

async fn watch(source: &str, context: &Context) -> Result<watch::Receiver<Arc<[Member]>>, node::Error> {
    let (source, etcd) = (source.parse()?, EtcdConfig::default());
    Ok(discovery::start(source, &etcd, &context.tasks, &context.shutdown).await?.members)
}

async fn watch_file(path: &Path, context: &Context) -> Result<watch::Receiver<Arc<[Member]>>, node::Error> {
    watch(&format!("fixed:{}", path.display()), context).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_changed_file_is_read_again_and_a_broken_one_is_not_taken() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("members.toml");
    std::fs::write(&path, ONE).unwrap();
    let context = Context::new("watcher", Vec::new());
    let mut members = watch_file(&path, &context).await.unwrap();
    let first = [member(Role::Prefill, "127.0.0.1:9101")];
    assert_eq!(**members.borrow_and_update(), first);

    std::fs::write(&path, "[[member]]\nrole = \"cook\"\n").unwrap();
    assert!(tokio::time::timeout(Duration::from_millis(1500), members.changed()).await.is_err());
    std::fs::remove_file(&path).unwrap();
    assert!(tokio::time::timeout(Duration::from_millis(1500), members.changed()).await.is_err());
    assert_eq!(**members.borrow(), first);

    // In one piece: a file that is half written is a shorter list.
    let whole = folder.path().join("members.new");
    std::fs::write(&whole, TWO).unwrap();
    std::fs::rename(&whole, &path).unwrap();
    tokio::time::timeout(Duration::from_secs(3), members.changed()).await.unwrap().unwrap();
    let second = [member(Role::Router, "127.0.0.1:9100"), member(Role::Decode, "decode-0.baton:9102")];
    assert_eq!(**members.borrow(), second);

    context.shutdown.stop();
    tokio::time::timeout(Duration::from_secs(1), context.tasks.wait()).await.unwrap();
}

#[tokio::test]
async fn a_file_that_is_broken_from_the_start_says_what_is_wrong() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("members.toml");
    let context = Context::new("watcher", Vec::new());
    let missing = watch_file(&path, &context).await.unwrap_err();
    assert!(missing.is_usage() && missing.to_string().starts_with(&path.display().to_string()), "{missing}");
    let cases = [
        ("[[member]]\nrole = \"cook\"\naddress = \"a:1\"", "unknown variant `cook`"),
        ("[[member]]\nrole = \"decode\"", "missing field `address`"),
        ("[[member]]\nrole = \"decode\"\naddress = \"a\"", "member 1, address: expected host:port"),
        ("[[members]]\nrole = \"decode\"\naddress = \"a:1\"", "unknown field `members`"),
    ];
    for (text, expected) in cases {
        std::fs::write(&path, text).unwrap();
        let error = watch_file(&path, &context).await.unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_address_of_a_name_is_a_member() {
    let context = Context::new("watcher", Vec::new());
    let source = "dns:router=127.0.0.1:9100,decode=localhost:9201,prefill=no-such-name.invalid:9101";
    let mut members = watch(source, &context).await.unwrap();
    tokio::time::timeout(Duration::from_secs(10), members.changed()).await.unwrap().unwrap();
    let members = members.borrow_and_update().clone();
    let (first, others) = members.split_first().unwrap();
    assert_eq!(*first, member(Role::Router, "127.0.0.1:9100"));
    assert!(!others.is_empty());
    for other in others {
        let address: std::net::SocketAddr = other.address.parse().unwrap();
        assert!(
            other.role == Role::Decode && address.ip().is_loopback() && address.port() == 9201,
            "{other:?}"
        );
    }
    context.shutdown.stop();
    tokio::time::timeout(Duration::from_secs(1), context.tasks.wait()).await.unwrap();
}

#[test]
fn sources_are_parsed() {
    assert_eq!("fixed:a.toml".parse::<DiscoverySource>().unwrap(), DiscoverySource::Fixed("a.toml".into()));
    let name = |role, host_port: &str| discovery::Name { role, host_port: host_port.to_owned() };
    assert_eq!(
        "dns:prefill=prefill.baton:9101,decode=[::1]:9201".parse::<DiscoverySource>().unwrap(),
        DiscoverySource::Dns(vec![
            name(Role::Prefill, "prefill.baton:9101"),
            name(Role::Decode, "[::1]:9201")
        ])
    );
    for (value, expected) in [
        ("dns:cook=a:1", "expected dns:ROLE=HOST:PORT"),
        ("etcd:http://127.0.0.1:2379", "expected etcd:http://HOST:PORT,…/PREFIX, got"),
        ("fixed:", "/PREFIX, got \"fixed:\""),
        ("members.toml", "expected fixed:FILE"),
    ] {
        let error = value.parse::<DiscoverySource>().unwrap_err().to_string();
        assert!(error.starts_with("--discovery: ") && error.contains(expected), "{error}");
    }
}
