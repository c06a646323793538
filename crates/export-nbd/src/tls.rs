//! TLS for a connection: the server's certificate, the clients that may connect, and the state between socket and codec.
//!
//! Owns rustls's state machine of one connection and the received ciphertext. It turns bytes of the socket into plain bytes and
//! back; the caller decides in which direction. TLS 1.3 only.
//!
//! Invariants: no state of rustls is borrowed across an await; records are sent in the order in which they were made, one send
//! at a time; the memory that a client can make this hold is at most [`TLS_BYTES`]. Must not know the protocol inside TLS, or
//! files: certificates and keys are passed in as PEM.

use std::cell::RefCell;
use std::io::{self, Read, Write};
use std::ops::Range;
use std::sync::Arc;

use ::io::sync::Mutex;
use ::io::{Buffer, BufferPool};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConnection};

use crate::socket::{Part, Socket};

/// Maximum bytes of ciphertext in one receive, and in one send.
const CIPHER_BYTES: usize = 128 << 10;

/// Memory of a connection for TLS: ciphertext in both directions, as held here and inside rustls.
pub(crate) const TLS_BYTES: u64 = 4 * CIPHER_BYTES as u64;

/// The certificate of a server, and the clients that it accepts. Cheap to clone.
#[derive(Clone)]
pub struct TlsConfig {
    config: Arc<rustls::ServerConfig>,
    authenticates: bool,
}

/// Why a TLS configuration cannot be used. The error contains no part of a key.
#[derive(Debug, thiserror::Error)]
pub enum TlsConfigError {
    /// The server's certificates cannot be used.
    #[error("server certificate: {0}")]
    Certificate(#[source] PemError),
    /// The server's private key.
    #[error("server key: {0}")]
    Key(#[source] PemError),
    /// The authorities that sign clients' certificates.
    #[error("CA of the clients: {0}")]
    ClientCa(#[source] PemError),
}

/// The reason why certificates or a key cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PemError {
    /// They are not certificates in PEM form.
    #[error("expected certificates in PEM form: {0}")]
    NotCertificates(#[source] rustls::pki_types::pem::Error),
    /// There is no certificate in them.
    #[error("expected certificates in PEM form, found none")]
    NoCertificates,
    /// It is no private key in PEM form. The cause is left out, because it could quote the key.
    #[error("expected a private key in PEM form")]
    NoKey,
    /// TLS refuses them.
    #[error(transparent)]
    Refused(rustls::Error),
    /// The key belongs to another certificate.
    #[error("does not fit the certificate: {0}")]
    OfAnother(#[source] rustls::Error),
    /// Clients cannot be verified by them.
    #[error(transparent)]
    NoVerifier(rustls::server::VerifierBuilderError),
}

/// Why the TLS handshake or the encrypted stream failed.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// The error of the TLS handshake with the client.
    #[error("{0}")]
    Protocol(#[from] rustls::Error),
    /// The socket failed.
    #[error("the socket failed: {0}")]
    Socket(#[source] io::Error),
    /// The stream ended.
    #[error("the client closed the connection")]
    Closed,
    /// The system has no memory.
    #[error("no memory for TLS")]
    NoMemory,
}

impl TlsConfig {
    /// Reads the server's certificate chain and key and, if clients need a certificate, the authorities that sign those.
    ///
    /// All are in PEM form.
    ///
    /// # Errors
    /// If one of them cannot be parsed, or the key does not fit the certificate.
    pub fn from_pem(
        certificates: &[u8],
        key: &[u8],
        client_ca: Option<&[u8]>,
    ) -> Result<TlsConfig, TlsConfigError> {
        let chain = parse_chain(certificates).map_err(TlsConfigError::Certificate)?;
        let key = PrivateKeyDer::from_pem_slice(key).map_err(|_| TlsConfigError::Key(PemError::NoKey))?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = rustls::ServerConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .map_err(|e| TlsConfigError::Certificate(PemError::Refused(e)))?;
        let builder = match client_ca {
            None => builder.with_no_client_auth(),
            Some(pem) => {
                let mut roots = RootCertStore::empty();
                for ca in parse_chain(pem).map_err(TlsConfigError::ClientCa)? {
                    roots.add(ca).map_err(|e| TlsConfigError::ClientCa(PemError::Refused(e)))?;
                }
                let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).build();
                let no_verifier = |e| TlsConfigError::ClientCa(PemError::NoVerifier(e));
                builder.with_client_cert_verifier(verifier.map_err(no_verifier)?)
            }
        };
        let mut config =
            builder.with_single_cert(chain, key).map_err(|e| TlsConfigError::Key(PemError::OfAnother(e)))?;
        // Sessions are long: a client that comes back shows its certificate again.
        config.session_storage = Arc::new(rustls::server::NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(TlsConfig { config: Arc::new(config), authenticates: client_ca.is_some() })
    }

    /// Whether clients must have a certificate.
    pub fn authenticates(&self) -> bool {
        self.authenticates
    }
}

fn parse_chain(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, PemError> {
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    match chain {
        Ok(chain) if chain.is_empty() => Err(PemError::NoCertificates),
        Ok(chain) => Ok(chain),
        Err(e) => Err(PemError::NotCertificates(e)),
    }
}

/// Received ciphertext that rustls has not processed.
struct Ciphertext {
    buffer: Buffer,
    range: Range<usize>,
}

/// The state of TLS of a connection that moves to another thread.
pub(crate) struct TlsParts {
    session: ServerConnection,
    /// Ciphertext that was received and that rustls has not taken in.
    received: Vec<u8>,
    config: Arc<rustls::ServerConfig>,
}

/// The state of TLS of one connection.
pub(crate) struct Tls {
    config: Arc<rustls::ServerConfig>,
    session: RefCell<ServerConnection>,
    /// `None` while a receive is under way.
    incoming: RefCell<Option<Ciphertext>>,
    /// The buffer in which records are collected; `None` while they are sent.
    outgoing: RefCell<Option<Buffer>>,
    /// Locked from the making of records to the end of their send.
    sending: Mutex,
}

impl Tls {
    /// Performs the TLS handshake with the client at the other end of `socket`.
    pub(crate) async fn accept<S: Socket>(
        config: &TlsConfig,
        pool: &BufferPool,
        socket: &S,
    ) -> Result<Tls, TlsError> {
        let mut session = ServerConnection::new(config.config.clone())?;
        session.set_buffer_limit(Some(CIPHER_BYTES));
        let buffer = || pool.try_take(CIPHER_BYTES).ok_or(TlsError::NoMemory);
        let tls = Tls {
            config: config.config.clone(),
            session: RefCell::new(session),
            incoming: RefCell::new(Some(Ciphertext { buffer: buffer()?, range: 0..0 })),
            outgoing: RefCell::new(Some(buffer()?)),
            sending: Mutex::default(),
        };
        while tls.session.borrow().is_handshaking() {
            tls.flush(socket).await.map_err(TlsError::Socket)?;
            if !tls.session.borrow().is_handshaking() {
                break;
            }
            let more = tls.receive(socket).await.map_err(TlsError::Socket)?;
            if !more {
                return Err(TlsError::Closed);
            }
            if let Err(e) = tls.feed() {
                // The client gets the alert that tells the reason.
                let _ = tls.flush(socket).await;
                return Err(e.into());
            }
        }
        tls.flush(socket).await.map_err(TlsError::Socket)?;
        Ok(tls)
    }

    /// Continues a session at the point where another thread has stopped.
    pub(crate) fn resume(parts: TlsParts, pool: &BufferPool) -> Result<Tls, TlsError> {
        let buffer = || pool.try_take(CIPHER_BYTES).ok_or(TlsError::NoMemory);
        let mut incoming = buffer()?;
        let n = parts.received.len();
        incoming.as_mut().get_mut(..n).ok_or(TlsError::NoMemory)?.copy_from_slice(&parts.received);
        Ok(Tls {
            config: parts.config,
            session: RefCell::new(parts.session),
            incoming: RefCell::new(Some(Ciphertext { buffer: incoming, range: 0..n })),
            outgoing: RefCell::new(Some(buffer()?)),
            sending: Mutex::default(),
        })
    }

    /// Takes the state out. Nothing may be received or sent at the time, nor afterwards.
    pub(crate) fn take(&self) -> Result<TlsParts, TlsError> {
        let Ciphertext { buffer, range } = self.incoming.borrow_mut().take().ok_or(TlsError::Closed)?;
        let received = buffer.as_slice().get(range).unwrap_or_default().to_vec();
        let spent = ServerConnection::new(self.config.clone())?;
        let session = self.session.replace(spent);
        Ok(TlsParts { session, received, config: self.config.clone() })
    }

    pub(crate) async fn recv<S: Socket>(
        &self,
        socket: &S,
        mut buffer: Buffer,
        range: Range<usize>,
    ) -> (Buffer, io::Result<usize>) {
        let mut filled = 0;
        loop {
            let into = buffer.as_mut().get_mut(range.start + filled..range.end).unwrap_or_default();
            let wanted = into.len();
            match self.take_plain(into) {
                Ok(Plain::Bytes(n)) if n == wanted => return (buffer, Ok(filled + n)),
                Ok(Plain::Bytes(n)) => filled += n,
                // Data that came before the end is returned first; the next call finds the end again.
                Ok(Plain::End) => return (buffer, Ok(filled)),
                Ok(Plain::Nothing) => match self.feed() {
                    Ok(true) => {}
                    Ok(false) if filled > 0 => return (buffer, Ok(filled)),
                    Ok(false) => match self.receive(socket).await {
                        Ok(true) => {}
                        // Every message inside TLS has a length, so a truncated stream is noticed without a closing alert.
                        Ok(false) => return (buffer, Ok(0)),
                        Err(e) => return (buffer, Err(e)),
                    },
                    Err(e) => {
                        if let Some(_turn) = self.sending.try_lock() {
                            let _ = self.drain(socket).await;
                        }
                        return (buffer, Err(io::Error::new(io::ErrorKind::InvalidData, e)));
                    }
                },
                Err(e) => return (buffer, Err(e)),
            }
        }
    }

    pub(crate) async fn send<S: Socket>(
        &self,
        socket: &S,
        mut parts: Vec<Part>,
    ) -> (Vec<Part>, io::Result<()>) {
        let _turn = self.sending.lock().await;
        for part in parts.drain(..) {
            let mut at = part.range.start;
            while at < part.range.end {
                let plain = part.buffer.as_slice().get(at..part.range.end).unwrap_or_default();
                let taken = self.session.borrow_mut().writer().write(plain);
                match taken {
                    Ok(0) => {
                        if let Err(e) = self.drain(socket).await {
                            return (Vec::new(), Err(e));
                        }
                    }
                    Ok(n) => at += n,
                    Err(e) => return (Vec::new(), Err(e)),
                }
            }
        }
        let result = self.drain(socket).await;
        (parts, result)
    }

    /// Sends the closing alert.
    pub(crate) async fn finish<S: Socket>(&self, socket: &S) {
        let _turn = self.sending.lock().await;
        self.session.borrow_mut().send_close_notify();
        // If the client has disconnected, it does not need the alert.
        let _ = self.drain(socket).await;
    }

    async fn flush<S: Socket>(&self, socket: &S) -> io::Result<()> {
        let _turn = self.sending.lock().await;
        self.drain(socket).await
    }

    /// Sends the records that are ready. The caller must hold `sending`.
    async fn drain<S: Socket>(&self, socket: &S) -> io::Result<()> {
        while self.session.borrow().wants_write() {
            // `None` only if a send was dropped half-way, which ends the connection.
            let Some(mut buffer) = self.outgoing.borrow_mut().take() else {
                return Err(io::ErrorKind::BrokenPipe.into());
            };
            let capacity = buffer.capacity();
            buffer.set_len(capacity);
            let mut filled = 0;
            while self.session.borrow().wants_write() && filled < capacity {
                let mut room = buffer.as_mut().get_mut(filled..).unwrap_or_default();
                filled += self.session.borrow_mut().write_tls(&mut room)?;
            }
            let part = Part { buffer: buffer.clone(), range: 0..filled };
            let (parts, result) = socket.send(vec![part]).await;
            drop(parts);
            *self.outgoing.borrow_mut() = Some(buffer);
            result?;
        }
        Ok(())
    }

    /// Receives ciphertext; false at the end of the stream. All earlier ciphertext must have been processed.
    async fn receive<S: Socket>(&self, socket: &S) -> io::Result<bool> {
        // `None` only if a receive was dropped, which ends the connection.
        let Some(Ciphertext { buffer, .. }) = self.incoming.borrow_mut().take() else {
            return Err(io::ErrorKind::BrokenPipe.into());
        };
        let whole = 0..buffer.len();
        let (buffer, result) = socket.recv(buffer, whole).await;
        let n = *result.as_ref().unwrap_or(&0);
        *self.incoming.borrow_mut() = Some(Ciphertext { buffer, range: 0..n });
        result.map(|n| n > 0)
    }

    /// Passes some of the received ciphertext to rustls; false if there is none.
    fn feed(&self) -> Result<bool, rustls::Error> {
        let mut incoming = self.incoming.borrow_mut();
        let Some(Ciphertext { buffer, range }) = incoming.as_mut() else { return Ok(false) };
        let mut bytes = buffer.as_slice().get(range.clone()).unwrap_or_default();
        if bytes.is_empty() {
            return Ok(false);
        }
        let mut session = self.session.borrow_mut();
        let other = |e| rustls::Error::Other(rustls::OtherError(std::sync::Arc::new(e)));
        let taken = session.read_tls(&mut bytes).map_err(other)?;
        if taken == 0 {
            // Bytes after the closing alert are ignored.
            range.start = range.end;
            return Ok(false);
        }
        range.start += taken;
        session.process_new_packets()?;
        Ok(true)
    }

    fn take_plain(&self, into: &mut [u8]) -> io::Result<Plain> {
        match self.session.borrow_mut().reader().read(into) {
            Ok(0) => Ok(Plain::End),
            Ok(n) => Ok(Plain::Bytes(n)),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(Plain::Nothing),
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => Ok(Plain::End),
            Err(e) => Err(e),
        }
    }
}

/// The result of a read of decrypted data.
enum Plain {
    Bytes(usize),
    Nothing,
    /// The client closed the TLS session.
    End,
}
