//! A connection's byte stream: the plain socket, or TLS over it.
//!
//! Owns the socket and, after STARTTLS, the state of TLS. The two directions are independent: one task receives while another
//! task sends. Must not know what the bytes mean.

use std::cell::OnceCell;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;

use ::io::{Buffer, BufferPool};
use blockio::PeerId;

use crate::socket::{Part, Socket};
use crate::tls::{Tls, TlsConfig, TlsError, TlsParts};

/// The byte stream of a connection, plain or encrypted.
pub(crate) struct Channel<S> {
    socket: S,
    tls: OnceCell<Tls>,
}

impl<S: Socket> Channel<S> {
    pub(crate) fn new(socket: S) -> Channel<S> {
        Channel { socket, tls: OnceCell::new() }
    }

    /// A stream with which another thread has begun.
    pub(crate) fn resume(
        socket: S,
        tls: Option<TlsParts>,
        pool: &BufferPool,
    ) -> Result<Channel<S>, TlsError> {
        let channel = Channel::new(socket);
        if let Some(parts) = tls {
            let _ = channel.tls.set(Tls::resume(parts, pool)?);
        }
        Ok(channel)
    }

    /// Takes the stream out, for another thread. Nothing may be received or sent at the time, nor afterwards.
    pub(crate) fn take(&self) -> Option<(OwnedFd, Option<TlsParts>)> {
        let socket = self.socket.duplicate()?;
        let tls = self.tls.get().map(Tls::take).transpose().ok()?;
        Some((socket, tls))
    }

    /// The peer.
    pub(crate) fn peer(&self) -> PeerId {
        self.socket.peer()
    }

    /// Agrees on keys; from here on everything is encrypted.
    pub(crate) async fn start_tls(&self, config: &TlsConfig, pool: &BufferPool) -> Result<(), TlsError> {
        let tls = Tls::accept(config, pool, &self.socket).await?;
        // A handshake has one STARTTLS: the codec refuses a second one.
        let _ = self.tls.set(tls);
        Ok(())
    }

    /// Receives like [`Socket::recv`], decrypted under TLS.
    pub(crate) async fn recv(&self, buffer: Buffer, range: Range<usize>) -> (Buffer, io::Result<usize>) {
        match self.tls.get() {
            None => self.socket.recv(buffer, range).await,
            Some(tls) => tls.recv(&self.socket, buffer, range).await,
        }
    }

    /// Sends like [`Socket::send`], encrypted under TLS.
    pub(crate) async fn send(&self, parts: Vec<Part>) -> (Vec<Part>, io::Result<()>) {
        match self.tls.get() {
            None => self.socket.send(parts).await,
            Some(tls) => tls.send(&self.socket, parts).await,
        }
    }

    /// Announces the end of the stream to the client. Only TLS has such a message.
    pub(crate) async fn finish(&self) {
        if let Some(tls) = self.tls.get() {
            tls.finish(&self.socket).await;
        }
    }

    /// Shuts the socket down; see [`Socket::shutdown`].
    pub(crate) fn shutdown(&self) {
        self.socket.shutdown();
    }
}
