//! An idle router that a thousand workers talk to: each its description once, its blocks, and then a heartbeat as a worker has it.

use std::io::{BufRead, BufReader, Write as _};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use futures::stream::{self, BoxStream};
use node::{Context, Listener, Member, Services};
use proto::watch::{News, WatchEvent};
use proto::wire::worker_server::{Worker, WorkerServer};
use proto::{Error, Role, WorkerEpoch, WorkerLoad, wire};
use router::{Config, Policy};
use tonic::{Request, Response, Status};

use crate::decisions::{WORKERS, description, own_blocks};

/// Blocks that each worker has.
const BLOCKS: usize = 1000;
/// Time for everybody to get to know each other.
const SETTLE: Duration = Duration::from_secs(15);
/// Time that is measured.
const MEASURED: Duration = Duration::from_secs(20);

/// A process that is killed when this is dropped.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Process {
    /// This program again; what it prints can be read.
    fn again(arguments: &[&str]) -> Result<(Self, BufReader<ChildStdout>), String> {
        let program = std::env::current_exe().map_err(|fault| fault.to_string())?;
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(|fault| fault.to_string())?;
        let stdout = child.stdout.take().ok_or("no standard output")?;
        Ok((Self(child), BufReader::new(stdout)))
    }

    /// User and system time so far.
    fn cpu(&self) -> Result<Duration, String> {
        let stat =
            std::fs::read_to_string(format!("/proc/{}/stat", self.0.id())).map_err(|e| e.to_string())?;
        // The name before may have blanks; it ends at the last bracket. Fields 14 and 15 of proc_pid_stat(5), in ticks of
        // USER_HZ, which is 100 on every architecture that Linux has today.
        let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
        let field = |at: usize| fields.get(at).and_then(|text| text.parse::<u64>().ok());
        let ticks = field(11).zip(field(12)).map(|(user, system)| user + system).ok_or("no times in stat")?;
        Ok(Duration::from_millis(ticks * 10))
    }

    /// Bytes of memory that it has in RAM.
    fn resident_bytes(&self) -> Result<usize, String> {
        let status =
            std::fs::read_to_string(format!("/proc/{}/status", self.0.id())).map_err(|e| e.to_string())?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).ok_or("no VmRSS")?;
        let kib: usize = line.trim().trim_end_matches(" kB").parse().map_err(|_| "no number in VmRSS")?;
        Ok(kib << 10)
    }
}

/// Starts workers and a router, and measures the router.
pub(crate) fn run() -> Result<(), String> {
    let (_workers, mut said) = Process::again(&["workers", &WORKERS.to_string()])?;
    let mut members = String::new();
    said.read_line(&mut members).map_err(|fault| fault.to_string())?;
    let (router, mut said) = Process::again(&["router", members.trim()])?;
    let mut ready = String::new();
    said.read_line(&mut ready).map_err(|fault| fault.to_string())?;
    std::thread::sleep(SETTLE);
    let before = router.cpu()?;
    std::thread::sleep(MEASURED);
    let used = router.cpu()?.saturating_sub(before);
    println!();
    println!("An idle router, {WORKERS} workers with {BLOCKS} blocks each:");
    println!("| cores | memory, MiB |");
    println!("|---|---|");
    println!(
        "| {:.3} | {:.0} |",
        used.as_secs_f64() / MEASURED.as_secs_f64(),
        router.resident_bytes()? as f64 / f64::from(1 << 20)
    );
    Ok(())
}

fn runtime(threads: usize) -> Result<tokio::runtime::Runtime, String> {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder.worker_threads(threads).enable_all().build().map_err(|fault| fault.to_string())
}

/// One of the workers.
struct Idle {
    role: Role,
    number: usize,
}

#[tonic::async_trait]
impl Worker for Idle {
    type GetTokenizerStream = BoxStream<'static, Result<wire::TokenizerChunk, Status>>;
    type WatchStream = BoxStream<'static, Result<wire::WatchEvent, Status>>;

    async fn describe(
        &self,
        _: Request<wire::DescribeRequest>,
    ) -> Result<Response<wire::DescribeResponse>, Status> {
        Ok(Response::new(description(self.role, self.number as u64 + 1).into()))
    }

    async fn watch(&self, _: Request<wire::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let epoch = WorkerEpoch(self.number as u64 + 1);
        let event = move |sequence, news| Ok(WatchEvent { epoch, sequence, news }.into());
        let known = News::Known { chunk: 0, last: true, blocks: own_blocks(self.number, BLOCKS) };
        let beats = stream::unfold(1, move |beat| async move {
            tokio::time::sleep(Duration::from_millis(700)).await;
            let load = WorkerLoad { blocks_free: 1 << 19, blocks_total: 1 << 20, ..WorkerLoad::default() };
            Some((event(beat, News::Load(load)), beat + 1))
        });
        let first = stream::iter([event(1, known)]);
        Ok(Response::new(first.chain(beats).boxed()))
    }

    async fn get_tokenizer(
        &self,
        _: Request<wire::GetTokenizerRequest>,
    ) -> Result<Response<Self::GetTokenizerStream>, Status> {
        Err(Error::invalid("digest", "there is no tokenizer").into())
    }

    async fn change_role(
        &self,
        _: Request<wire::ChangeRoleRequest>,
    ) -> Result<Response<wire::ChangeRoleResponse>, Status> {
        Err(Status::unimplemented("it has one role"))
    }

    async fn fence(&self, _: Request<wire::FenceRequest>) -> Result<Response<wire::FenceResponse>, Status> {
        Ok(Response::new(wire::FenceResponse {}))
    }
}

/// Serves so many workers, and prints where they are: `ROLE=ADDRESS`, with commas.
pub(crate) fn workers(count: &str) -> Result<(), String> {
    let count: usize = count.parse().map_err(|_| format!("{count}: a number expected"))?;
    runtime(1)?.block_on(async {
        let context = Context::new("workers", Vec::new());
        let mut members = Vec::new();
        for number in 0..count {
            let role = if number.is_multiple_of(2) { Role::Prefill } else { Role::Decode };
            let services = Services::new().add(node::limits!(WorkerServer::new(Idle { role, number })));
            let listener = Listener::Tcp("127.0.0.1:0".to_owned());
            let serving = node::serve_grpc(&listener, services, &context).await.map_err(|e| e.to_string())?;
            members.push(format!("{}={}", role.name(), serving.address));
        }
        println!("{}", members.join(","));
        std::io::stdout().flush().map_err(|fault| fault.to_string())?;
        std::future::pending().await
    })
}

/// Runs a router with those workers.
pub(crate) fn router(members: &str) -> Result<(), String> {
    let member = |text: &str| {
        let (role, address) = text.split_once('=')?;
        let role = if role == Role::Prefill.name() { Role::Prefill } else { Role::Decode };
        Some(Member { role, address: address.to_owned() })
    };
    let members: Option<Vec<Member>> = members.split(',').map(member).collect();
    let members = members.ok_or("ROLE=ADDRESS, with commas, expected")?;
    node::metrics::install().map_err(|error| error.to_string())?;
    runtime(2)?.block_on(async {
        let mut context = Context::new("router", Vec::new());
        let (_keep, receiver) = tokio::sync::watch::channel(Arc::from(members));
        context.members = receiver;
        let config = Config { listen: "127.0.0.1:0".into(), policy: Policy::Prefix, ..Config::default() };
        println!("ready");
        std::io::stdout().flush().map_err(|fault| fault.to_string())?;
        router::run(config, context).await.map_err(|error| error.to_string())
    })
}
