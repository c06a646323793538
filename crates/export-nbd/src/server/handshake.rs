//! The handshake over a stream: from the greeting to the choice of an export, with TLS if it is required.
//!
//! Owns the receive buffer, which the connection takes over. The caller owns the time limit. Must not know volumes.

use std::io::ErrorKind;

use io::{Buffer, Handle};

use crate::channel::Channel;
use crate::codec::{Catalogue, HandshakeStep, Negotiation, Session};
use crate::server::events::ConnectionEnd;
use crate::socket::{Part, Socket};
use crate::tls::TlsConfig;

/// Size of a connection's receive buffer. Several hundred small requests fit into it.
pub(super) const RECEIVE_BYTES: usize = 256 << 10;

/// The result of a handshake.
pub(super) struct Agreed {
    pub(super) session: Session,
    /// The receive buffer, and the range of the bytes in it that follow the handshake.
    pub(super) buffer: Buffer,
    pub(super) rest: std::ops::Range<usize>,
}

impl Agreed {
    /// A handshake that another server has finished; `None` without memory.
    pub(super) fn resume(rt: &Handle, session: Session, received: &[u8]) -> Option<Agreed> {
        let mut buffer = rt.pool().try_take(RECEIVE_BYTES)?;
        buffer.as_mut().get_mut(..received.len())?.copy_from_slice(received);
        Some(Agreed { session, buffer, rest: 0..received.len() })
    }
}

/// Agrees with a client on an export.
pub(super) async fn run<S: Socket>(
    rt: &Handle,
    exports: &dyn Catalogue,
    channel: &Channel<S>,
    tls: Option<&TlsConfig>,
) -> Result<Agreed, ConnectionEnd> {
    let mut out = Vec::new();
    let mut negotiation = match tls {
        Some(_) => Negotiation::begin_with_tls(&mut out),
        None => Negotiation::begin(&mut out),
    };
    let mut buffer = rt.pool().try_take(RECEIVE_BYTES).ok_or(ConnectionEnd::NoMemory)?;
    let (mut at, mut end) = (0, 0);
    loop {
        let (used, step) = negotiation.step(&buffer.as_slice()[at..end], exports, &mut out);
        at += used;
        if !out.is_empty() {
            let reply = rt.pool().copy_of(&out);
            out.clear();
            let range = 0..reply.len();
            let (_, sent) = channel.send(vec![Part { buffer: reply, range }]).await;
            sent.map_err(socket_end)?;
        }
        match (step, tls) {
            (HandshakeStep::Continue, _) => {}
            (HandshakeStep::Agreed(session), _) => return Ok(Agreed { session, buffer, rest: at..end }),
            (HandshakeStep::Ended(why), _) => {
                // No more bytes are sent, and the client may still read.
                channel.finish().await;
                return Err(ConnectionEnd::Handshake(why));
            }
            (HandshakeStep::StartTls, Some(tls)) => {
                channel.start_tls(tls, rt.pool()).await.map_err(ConnectionEnd::Tls)?;
                negotiation.encrypted();
            }
            (HandshakeStep::NeedMore | HandshakeStep::StartTls, _) => {
                let whole = 0..buffer.len();
                let (back, received) = channel.recv(buffer, whole).await;
                buffer = back;
                match received {
                    Ok(0) => return Err(ConnectionEnd::Truncated),
                    Ok(n) => (at, end) = (0, n),
                    Err(e) => return Err(socket_end(e)),
                }
            }
        }
    }
}

/// The end of a connection whose socket failed during the handshake.
///
/// A client that closes its socket before it has chosen an export may have checked only whether the server listens.
fn socket_end(e: std::io::Error) -> ConnectionEnd {
    match e.kind() {
        ErrorKind::BrokenPipe | ErrorKind::ConnectionReset => ConnectionEnd::Truncated,
        _ => ConnectionEnd::Socket(e),
    }
}
