//! A network of its own for a cluster: each process lives in its own network namespace, and a bridge in one more joins
//! them. Links are cut and mended without either end being told, as cables are; the machine's own network sees nothing of it.
//!
//! Needs root and Debian's iproute2. Namespaces go when this is dropped; those of a run that was killed go at the start of
//! the next.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write as _;
use std::net::Ipv4Addr;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// Where iproute2 keeps its namespaces.
const NAMESPACES: &str = "/run/netns";
/// Where each network has a file that is locked for as long as it is in use.
const LOCKS: &str = "/run/baton-tests";
/// In front of every namespace's name.
const PREFIX: &str = "baton-";
/// The address of the bridge, from which clients call.
pub const BRIDGE: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);
/// A link address that nobody has: what is sent there is never heard of again.
const NOWHERE: &str = "02:00:00:00:00:01";

/// See the module.
#[derive(Debug)]
pub struct Net {
    /// The name of the bridge's namespace, and what the others' begin with.
    name: String,
    hosts: BTreeMap<String, Ipv4Addr>,
    /// Locked while this lives.
    _lock: File,
}

impl Net {
    /// A network without hosts.
    ///
    /// # Panics
    /// Without root or iproute2.
    pub fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        assert!(
            rustix::process::geteuid().is_root(),
            "these tests lay networks of their own: run them as root (they change nothing of the machine's network)"
        );
        fs::create_dir_all(LOCKS).expect("/run can be written by root");
        let turn = exclusive(&Path::new(LOCKS).join("turn"));
        sweep();
        let name = format!("{PREFIX}{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let lock = exclusive(&lock_file(&name));
        let net = Self { name, hosts: BTreeMap::new(), _lock: lock };
        ip(None, &[format!("netns add {}", net.name)]);
        ip(
            Some(&net.name),
            &[
                "link set dev lo up".to_owned(),
                "link add name bridge type bridge".to_owned(),
                format!("addr add {BRIDGE}/16 dev bridge"),
                "link set dev bridge up".to_owned(),
            ],
        );
        drop(turn);
        net
    }

    /// Adds a host, unless it is there.
    pub fn add(&mut self, host: &str, address: Ipv4Addr) {
        if self.hosts.insert(host.to_owned(), address).is_some() {
            return;
        }
        let there = self.namespace(host);
        ip(None, &[format!("netns add {there}")]);
        ip(
            Some(&self.name),
            &[
                format!("link add name {host} type veth peer name eth0 netns {there}"),
                format!("link set dev {host} master bridge"),
                format!("link set dev {host} up"),
            ],
        );
        ip(
            Some(&there),
            &[
                "link set dev lo up".to_owned(),
                format!("addr add {address}/16 dev eth0"),
                "link set dev eth0 up".to_owned(),
            ],
        );
    }

    /// Moves the calling thread, and every thread and process that it starts from now on, to the bridge: from there all
    /// hosts can be called.
    pub fn enter(&self) {
        let namespace = File::open(Path::new(NAMESPACES).join(&self.name)).expect("the namespace is there");
        move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))
            .expect("root may enter a network namespace");
    }

    /// A program that is to run on a host. Its process is the program itself, so signals reach it.
    pub fn command(&self, host: &str, program: &Path) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={NAMESPACES}/{}", self.namespace(host))).arg(program);
        command
    }

    /// Pulls a host's cable. No connection is closed: what is sent from now on is lost.
    pub fn cut(&self, host: &str) {
        ip(Some(&self.name), &[format!("link set dev {host} down")]);
    }

    /// Plugs it in again.
    pub fn mend(&self, host: &str) {
        ip(Some(&self.name), &[format!("link set dev {host} up")]);
    }

    /// Loses all that two hosts send to each other, while each still reaches all others.
    pub fn part(&self, one: &str, other: &str) {
        for (from, to) in [(one, other), (other, one)] {
            let lost = format!("neigh replace {} lladdr {NOWHERE} dev eth0 nud permanent", self.hosts[to]);
            ip(Some(&self.namespace(from)), &[lost]);
        }
    }

    /// Lets two hosts reach each other again.
    pub fn join(&self, one: &str, other: &str) {
        for (from, to) in [(one, other), (other, one)] {
            ip(Some(&self.namespace(from)), &[format!("neigh del {} dev eth0", self.hosts[to])]);
        }
    }

    fn namespace(&self, host: &str) -> String {
        format!("{}-{host}", self.name)
    }
}

impl Default for Net {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        // Links go with their namespaces.
        for host in self.hosts.keys() {
            remove(&self.namespace(host));
        }
        remove(&self.name);
        let _ = fs::remove_file(lock_file(&self.name));
    }
}

fn lock_file(net: &str) -> PathBuf {
    Path::new(LOCKS).join(net)
}

/// The file, made if need be, once nobody else has it locked.
fn exclusive(path: &Path) -> File {
    let file = File::create(path).expect("a lock file can be made");
    file.lock().expect("a lock file can be locked");
    file
}

/// Removes the namespaces that dead runs have left, with what still runs there. The caller has the turn.
fn sweep() {
    for entry in fs::read_dir(NAMESPACES).into_iter().flatten().flatten() {
        let namespace = entry.file_name().to_string_lossy().into_owned();
        if !namespace.starts_with(PREFIX) {
            continue;
        }
        // `baton-PROCESS-NUMBER`, or that and `-HOST`.
        let net: Vec<&str> = namespace.splitn(4, '-').take(3).collect();
        let lock = lock_file(&net.join("-"));
        let is_used = File::open(&lock).is_ok_and(|file| file.try_lock().is_err());
        if !is_used {
            let left = Command::new("ip").args(["netns", "pids", &namespace]).output();
            for pid in left.map(|left| left.stdout).unwrap_or_default().split(|&byte| byte == b'\n') {
                let pid = String::from_utf8_lossy(pid).into_owned();
                if !pid.is_empty() {
                    let _ = Command::new("kill").args(["-KILL", &pid]).status();
                }
            }
            remove(&namespace);
        }
    }
}

fn remove(namespace: &str) {
    let _ = Command::new("ip").args(["netns", "del", namespace]).stderr(Stdio::null()).status();
}

/// Runs `ip` in a namespace, or where the thread is, on some lines of commands.
fn ip(namespace: Option<&str>, lines: &[String]) {
    let mut command = Command::new("ip");
    if let Some(namespace) = namespace {
        command.args(["-n", namespace]);
    }
    let mut child = command
        .args(["-batch", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("`ip` is there: `cargo xtask fetch-network` installs it");
    let mut input = child.stdin.take().expect("piped");
    input.write_all((lines.join("\n") + "\n").as_bytes()).expect("ip reads its commands");
    drop(input);
    let output = child.wait_with_output().expect("ip ends");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "ip {namespace:?} {lines:?}: {error}");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_there(name: &str) -> bool {
        Path::new(NAMESPACES).join(name).exists()
    }

    /// Whether a host can send to an address and hears back.
    fn reaches(net: &Net, host: &str, address: Ipv4Addr) -> bool {
        // A refused connection is an answer too; bash tells it from silence by the time.
        let script = format!("timeout 0.3 bash -c ': < /dev/tcp/{address}/9'; [ $? -ne 124 ]");
        let mut command = net.command(host, Path::new("bash"));
        command.args(["-c", &script]).stderr(Stdio::null()).status().expect("bash starts").success()
    }

    #[test]
    fn links_are_cut_and_mended_and_nothing_stays() {
        let (one, other) = (Ipv4Addr::new(10, 77, 1, 1), Ipv4Addr::new(10, 77, 1, 2));
        let mut net = Net::new();
        net.add("one", one);
        net.add("other", other);
        assert!(reaches(&net, "one", other) && reaches(&net, "other", one));
        net.part("one", "other");
        assert!(!reaches(&net, "one", other) && reaches(&net, "one", BRIDGE));
        net.join("one", "other");
        assert!(reaches(&net, "one", other));
        net.cut("one");
        assert!(!reaches(&net, "other", one) && !reaches(&net, "one", BRIDGE));
        net.mend("one");
        // A link that comes up has its peers' addresses asked for anew.
        assert!((0..20).any(|_| reaches(&net, "one", other)));
        let name = net.name.clone();
        assert!(is_there(&name) && is_there(&net.namespace("one")));
        drop(net);
        assert!(!is_there(&name) && !is_there(&format!("{name}-one")));
    }

    #[test]
    fn what_a_dead_run_left_is_swept_away() {
        let stale = format!("{PREFIX}0-0");
        remove(&stale);
        ip(None, &[format!("netns add {stale}")]);
        let net = Net::new();
        assert!(!is_there(&stale) && is_there(&net.name));
        let _second = Net::new();
        assert!(is_there(&net.name), "one that is in use stays");
    }
}
