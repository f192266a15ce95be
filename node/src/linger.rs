//! How a connection is closed whose peer is still sending.
//!
//! A request that is refused before all of it was read leaves bytes behind. Were the socket closed on them, the kernel
//! would reset the connection, and many a client would see a broken pipe in place of its answer. So the way out is
//! closed first, and what still comes is read and thrown away, for a while.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep};

/// Longest silence of a peer whose bytes are thrown away.
const SILENCE_MAX: Duration = Duration::from_secs(1);
/// Longest time for which bytes are thrown away.
const LINGER_MAX: Duration = Duration::from_secs(10);
/// Bytes that are thrown away at a time.
const PIECE_BYTES: usize = 16 << 10;

/// Says of a connection that a request on it was not read to its end.
#[derive(Clone, Debug, Default)]
pub(crate) struct Unread(Arc<AtomicBool>);

impl Unread {
    pub(crate) fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    fn get(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// A connection that is closed in that way, if something was left unread.
pub(crate) struct Lingering<S> {
    stream: S,
    unread: Unread,
    /// Set once the way out is closed.
    waste: Option<Waste>,
}

struct Waste {
    piece: Box<[u8]>,
    until: Instant,
    silence: Pin<Box<Sleep>>,
}

impl<S> Lingering<S> {
    pub(crate) fn new(stream: S, unread: Unread) -> Self {
        Self { stream, unread, waste: None }
    }
}

impl<S: AsyncRead + Unpin> Lingering<S> {
    /// Ready when the peer has closed, fallen silent, or had its time.
    fn poll_waste(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(waste) = &mut self.waste else { return Poll::Ready(()) };
        loop {
            let mut piece = ReadBuf::new(&mut waste.piece);
            match Pin::new(&mut self.stream).poll_read(cx, &mut piece) {
                Poll::Ready(Ok(())) if !piece.filled().is_empty() => {
                    let now = Instant::now();
                    if now >= waste.until {
                        return Poll::Ready(());
                    }
                    waste.silence.as_mut().reset(waste.until.min(now + SILENCE_MAX));
                }
                Poll::Ready(_) => return Poll::Ready(()),
                Poll::Pending => return waste.silence.as_mut().poll(cx),
            }
        }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Lingering<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.waste.is_none() {
            ready!(Pin::new(&mut self.stream).poll_shutdown(cx))?;
            if !self.unread.get() {
                return Poll::Ready(Ok(()));
            }
            let now = Instant::now();
            self.waste = Some(Waste {
                piece: vec![0; PIECE_BYTES].into(),
                until: now + LINGER_MAX,
                silence: Box::pin(tokio::time::sleep_until(now + SILENCE_MAX)),
            });
        }
        self.poll_waste(cx).map(Ok)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, pieces)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Lingering<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        piece: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, piece)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    use super::*;

    /// Closes the connection, and gives the time that it took.
    async fn close(stream: tokio::io::DuplexStream, is_unread: bool) -> Duration {
        let unread = Unread::default();
        if is_unread {
            unread.set();
        }
        let start = Instant::now();
        Lingering::new(stream, unread).shutdown().await.unwrap();
        start.elapsed()
    }

    #[tokio::test(start_paused = true)]
    async fn what_still_comes_is_taken_until_the_peer_closes() {
        let (stream, mut peer) = duplex(100);
        let sending = async {
            for _ in 0..1000 {
                peer.write_all(&[7; 99]).await.unwrap();
            }
            assert_eq!(peer.read(&mut [0]).await.unwrap(), 0, "the way out is closed");
            drop(peer);
        };
        assert_eq!(tokio::join!(close(stream, true), sending).0, Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_peer_is_not_waited_for_long() {
        let (stream, _peer) = duplex(100);
        assert_eq!(close(stream, true).await, SILENCE_MAX);
    }

    #[tokio::test(start_paused = true)]
    async fn a_peer_that_never_ends_is_cut() {
        let (stream, mut peer) = duplex(100);
        let sending = async {
            while peer.write_all(&[7]).await.is_ok() {
                tokio::time::sleep(SILENCE_MAX / 2).await;
            }
        };
        assert_eq!(tokio::join!(close(stream, true), sending).0, LINGER_MAX);
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_is_waited_for_when_all_was_read() {
        let (stream, _peer) = duplex(100);
        assert_eq!(close(stream, false).await, Duration::ZERO);
    }
}
