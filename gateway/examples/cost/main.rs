//! What a gateway costs beside a bare server of the same events: `cost BATON [STREAMS…]`, where BATON is the binary and
//! STREAMS are how many streams there are at a time.
//!
//! Starts a gateway, a router, a prefill and a decode worker as processes of their own, the workers with the simulated
//! model, and puts chats on the gateway from this process: closed loops, each with one connection and one stream at a
//! time. Then the same for an echo (`cost echo …`): as many events of the same size at the same pace. Prints a table.
//! CPU is user and system time of the server's process alone.

mod client;
mod cluster;
mod echo;
mod process;
mod tokenising;

use std::time::Duration;

use anyhow::{Context as _, Result};

use crate::client::{Load, Outcome};
use crate::cluster::{Cluster, Pace};
use crate::process::Process;

/// Streams at a time.
const STREAMS: [usize; 4] = [32, 128, 512, 1000];
/// Tokens of a prompt; the chat template adds some.
const PROMPT_TOKENS: usize = 1000;
/// Generated tokens, and how many in the runs that tell what is a token's cost and what a request's.
const TOKENS: usize = 100;
const TOKENS_FEW: usize = 20;
/// Events of an answer besides one for each token: its role, its end, and `[DONE]`.
const EVENTS_MORE: usize = 3;
/// Streams whose memory is measured while they wait.
const IDLE_STREAMS: usize = 1000;

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let first = arguments.next().context("usage: cost BATON")?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    if first == "echo" {
        return runtime.block_on(echo::serve(&echo::Settings::parse(&mut arguments)?));
    }
    let mut streams = arguments.map(|word| word.parse()).collect::<Result<Vec<usize>, _>>()?;
    if streams.is_empty() {
        streams = STREAMS.to_vec();
    }
    let tokenising = tokenising::measure(PROMPT_TOKENS)?;
    println!("tokenising {} tokens, of which the prompt has {PROMPT_TOKENS}:", tokenising.tokens);
    println!(
        "  {:.3} ms: template {:.3}, encoding {:.3}",
        ms(tokenising.total()),
        ms(tokenising.rendering),
        ms(tokenising.encoding)
    );
    runtime.block_on(async {
        loads(&first, &streams, tokenising.total()).await?;
        idle(&first).await
    })
}

/// What a server's process spent on a load.
struct Measured {
    outcome: Outcome,
    cpu: Duration,
}

impl Measured {
    fn per_request(&self) -> f64 {
        ms(self.cpu) / self.outcome.requests as f64
    }
}

async fn loads(baton: &str, streams: &[usize], tokenising: Duration) -> Result<()> {
    println!("\n{TOKENS} tokens generated; CPU of the server's process:\n");
    println!(
        "| streams | requests/s | tokens/s | gateway, ms/request | echo | beyond echo and tokenising | of it not for tokens | gateway, µs/token | echo | ratio |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|");
    let cluster = Cluster::start(baton, Pace::default()).await?;
    // What is done once: connections, caches.
    load(&cluster.gateway, cluster.address(), 32, TOKENS_FEW, 64).await?;
    for &streams in streams {
        let requests = (3 * streams).max(300);
        let gateway = load(&cluster.gateway, cluster.address(), streams, TOKENS, requests).await?;
        let few = load(&cluster.gateway, cluster.address(), streams, TOKENS_FEW, requests).await?;
        let echo = echoed(&gateway.outcome, streams, TOKENS, requests).await?;
        let echo_few = echoed(&few.outcome, streams, TOKENS_FEW, requests).await?;
        let slope = |many: &Measured, few: &Measured| {
            1000.0 * (many.per_request() - few.per_request()) / (TOKENS - TOKENS_FEW) as f64
        };
        let (ours, bare) = (slope(&gateway, &few), slope(&echo, &echo_few));
        let beyond = gateway.per_request() - echo.per_request() - ms(tokenising);
        let for_tokens = (ours - bare) * TOKENS as f64 / 1000.0;
        let seconds = gateway.outcome.took.as_secs_f64();
        println!(
            "| {streams} | {:.0} | {:.0} | {:.3} | {:.3} | {beyond:.3} | {:.3} | {ours:.2} | {bare:.2} | {:.2} |",
            requests as f64 / seconds,
            (requests * TOKENS) as f64 / seconds,
            gateway.per_request(),
            echo.per_request(),
            beyond - for_tokens,
            ours / bare,
        );
    }
    Ok(())
}

async fn load(
    server: &Process,
    address: &str,
    streams: usize,
    tokens: usize,
    requests: usize,
) -> Result<Measured> {
    let load = Load { address, path: client::PATH, streams, tokens, requests };
    let before = server.cpu()?;
    let outcome = load.run().await?;
    Ok(Measured { outcome, cpu: server.cpu()?.saturating_sub(before) })
}

/// The same events from a bare server: as large, as many, at the same pace.
async fn echoed(like: &Outcome, streams: usize, tokens: usize, requests: usize) -> Result<Measured> {
    let events = like.events / like.requests;
    let settings = echo::Settings {
        address: process::free_address()?,
        tokens: events.saturating_sub(EVENTS_MORE),
        event_bytes: like.bytes / like.events,
        interval: like.between_tokens(streams, tokens),
    };
    let this = std::env::current_exe()?;
    let server = Process::spawn(&this.to_string_lossy(), &settings.arguments(), &[])?;
    process::wait_for(&settings.address).await?;
    load(&server, &settings.address, streams, tokens, requests).await
}

/// Memory of streams that have had their first token and wait for the next.
async fn idle(baton: &str) -> Result<()> {
    let cluster = Cluster::start(baton, Pace::standstill()).await?;
    load(&cluster.gateway, cluster.address(), 8, 1, 16).await?;
    let before = cluster.gateway.resident_bytes()?;
    let waiting = client::open(cluster.address(), IDLE_STREAMS).await?;
    tokio::time::sleep(Duration::from_secs(1)).await;
    let after = cluster.gateway.resident_bytes()?;
    let each = after.saturating_sub(before) as f64 / IDLE_STREAMS as f64 / 1024.0;
    println!(
        "\n{IDLE_STREAMS} streams that wait for their next token: {each:.1} KiB each ({} MiB before)",
        before >> 20
    );
    drop(waiting);
    Ok(())
}

fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}
