//! The load: closed loops over HTTP/1.1, each with a connection of its own, that count events and bytes and parse
//! nothing.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use crate::{EVENTS_MORE, PROMPT_TOKENS, tokenising};

/// The route of a chat, and of the echo.
pub(crate) const PATH: &str = "/v1/chat/completions";

/// So many requests, so many at a time.
pub(crate) struct Load<'a> {
    /// The server.
    pub(crate) address: &'a str,
    pub(crate) path: &'static str,
    /// Streams at a time.
    pub(crate) streams: usize,
    /// Tokens that each asks for.
    pub(crate) tokens: usize,
    /// Requests in all.
    pub(crate) requests: usize,
}

/// What came of a load.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) requests: usize,
    pub(crate) events: usize,
    /// Of bodies, chunk framing included.
    pub(crate) bytes: usize,
    pub(crate) took: Duration,
}

impl Outcome {
    /// Mean time from token to token of a stream.
    pub(crate) fn between_tokens(&self, streams: usize, tokens: usize) -> Duration {
        self.took.mul_f64(streams as f64 / (self.requests * tokens) as f64)
    }
}

impl Load<'_> {
    /// Runs it to its end. An answer that is not complete is an error.
    pub(crate) async fn run(&self) -> Result<Outcome> {
        let next = Arc::new(AtomicUsize::new(0));
        let started = Instant::now();
        let mut loops = JoinSet::new();
        for _ in 0..self.streams {
            let (address, path, next) = (self.address.to_owned(), self.path, next.clone());
            let (tokens, requests) = (self.tokens, self.requests);
            loops.spawn(async move {
                let mut connection = Connection::open(&address).await?;
                let mut outcome = Outcome::default();
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= requests {
                        return anyhow::Ok(outcome);
                    }
                    connection.ask(path, number, tokens).await?;
                    let answer = connection.answer().await?;
                    // Some tokens are no whole character, and have no event.
                    if !(tokens / 2..=tokens + EVENTS_MORE).contains(&answer.events) {
                        bail!("expected an event for most of {tokens} tokens, got {}", answer.events);
                    }
                    outcome.requests += 1;
                    outcome.events += answer.events;
                    outcome.bytes += answer.bytes;
                }
            });
        }
        let mut all = Outcome::default();
        while let Some(outcome) = loops.join_next().await {
            let outcome = outcome??;
            all.requests += outcome.requests;
            all.events += outcome.events;
            all.bytes += outcome.bytes;
        }
        Ok(Outcome { took: started.elapsed(), ..all })
    }
}

/// Opens streams and returns when each has its first event.
pub(crate) async fn open(address: &str, streams: usize) -> Result<Vec<Connection>> {
    let mut opening = JoinSet::new();
    for number in 0..streams {
        let address = address.to_owned();
        opening.spawn(async move {
            let mut connection = Connection::open(&address).await?;
            connection.ask(PATH, number, crate::TOKENS).await?;
            connection.begun().await?;
            anyhow::Ok(connection)
        });
    }
    let mut open = Vec::new();
    while let Some(connection) = opening.join_next().await {
        open.push(connection??);
    }
    Ok(open)
}

/// A connection to a server.
pub(crate) struct Connection {
    stream: TcpStream,
    buffer: Box<[u8]>,
}

struct Answer {
    events: usize,
    bytes: usize,
}

impl Connection {
    async fn open(address: &str) -> Result<Self> {
        let stream = TcpStream::connect(address).await.with_context(|| format!("connecting to {address}"))?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, buffer: vec![0; 32 << 10].into() })
    }

    async fn ask(&mut self, path: &str, number: usize, tokens: usize) -> Result<()> {
        let prompt = tokenising::prompt(PROMPT_TOKENS, number);
        let body = serde_json::json!({
            "model": "sim",
            "messages": [{"role": "user", "content": prompt}],
            "stream": true,
            "ignore_eos": true,
            "temperature": 0,
            "max_tokens": tokens,
        })
        .to_string();
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        Ok(self.stream.write_all(&[head.as_bytes(), body.as_bytes()].concat()).await?)
    }

    /// Reads the head of an answer, and gives how many bytes of the body came with it, at the front of the buffer.
    async fn head(&mut self) -> Result<usize> {
        let mut filled = 0;
        loop {
            let read = self.stream.read(&mut self.buffer[filled..]).await?;
            if read == 0 {
                bail!("the connection ended before an answer");
            }
            filled += read;
            if let Some(end) = position(&self.buffer[..filled], b"\r\n\r\n") {
                if !self.buffer.starts_with(b"HTTP/1.1 200") {
                    bail!("{}", String::from_utf8_lossy(&self.buffer[..filled]));
                }
                self.buffer.copy_within(end + 4..filled, 0);
                return Ok(filled - end - 4);
            }
        }
    }

    /// Waits for the first event of an answer.
    async fn begun(&mut self) -> Result<()> {
        if self.head().await? == 0 {
            let read = self.stream.read(&mut self.buffer).await?;
            if read == 0 {
                bail!("the connection ended before an event");
            }
        }
        Ok(())
    }

    /// Reads a whole answer in chunks, counting the empty lines that end events.
    async fn answer(&mut self) -> Result<Answer> {
        let mut filled = self.head().await?;
        let mut answer = Answer { events: 0, bytes: 0 };
        // The last bytes of all that came before: an event's end and the answer's may lie across two reads.
        let mut tail = [0_u8; 5];
        loop {
            let new = &self.buffer[..filled];
            answer.bytes += new.len();
            let mut before = tail[4];
            for byte in new {
                answer.events += usize::from(before == b'\n' && *byte == b'\n');
                before = *byte;
            }
            for byte in &new[new.len().saturating_sub(5)..] {
                tail.rotate_left(1);
                tail[4] = *byte;
            }
            if &tail == b"0\r\n\r\n" {
                return Ok(answer);
            }
            filled = self.stream.read(&mut self.buffer).await?;
            if filled == 0 {
                bail!("the connection ended within an answer, after {} events", answer.events);
            }
        }
    }
}

fn position(bytes: &[u8], wanted: &[u8]) -> Option<usize> {
    bytes.windows(wanted.len()).position(|window| window == wanted)
}
