//! Stream sockets on the driver's thread: unix paths and TCP.
//!
//! Owns listeners and connections for exports and clients. A buffer moves into an operation and comes back with it. If the
//! future is dropped, the operation is given up, and the kernel releases the buffer before the memory is reused (module
//! `reactor`). Bytes that a dropped receive has received are lost, so a stream can be used further only if every receive was
//! awaited to its end. Must not know what the bytes mean.

use std::future::Future;
use std::io;
use std::net::{IpAddr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;
use std::{fmt, fs};

use ::io::Buffer;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::message::Message;
use crate::operation::socket::{SocketKind, SocketOp};
use crate::reactor::{OpId, Reactor};

/// Time limit of a TCP connection attempt.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Number and interval of the checks whether the socket of an ended process is removed: 2 s in all.
const LISTENER_TRIES: u32 = 100;
const BETWEEN_LISTENER_TRIES: Duration = Duration::from_millis(20);

/// Maximum number of connections that wait to be accepted.
const BACKLOG: i32 = 128;

/// The address of a listener, or of the server of a client.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Address {
    /// A socket in the file system.
    Unix(PathBuf),
    /// A TCP port; port 0 lets the system choose one.
    Tcp(SocketAddr),
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Unix(path) => write!(f, "unix:{}", path.display()),
            Address::Tcp(address) => write!(f, "tcp:{address}"),
        }
    }
}

/// The peer of a connection, as far as the kernel knows it. Limits for each peer count by it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum PeerId {
    /// The user of the process that connected to a unix socket.
    User(u32),
    /// The address of a TCP client. Of an IPv6 address only the network of 64 bits, because a single host chooses the rest.
    Host(IpAddr),
    /// The kernel does not name the peer.
    Unknown,
}

impl PeerId {
    /// The peer at an IP address.
    pub fn of_address(address: IpAddr) -> PeerId {
        match address.to_canonical() {
            IpAddr::V6(v6) if !v6.is_loopback() => {
                let network = v6.to_bits() & !u128::from(u64::MAX);
                PeerId::Host(IpAddr::V6(Ipv6Addr::from_bits(network)))
            }
            other => PeerId::Host(other),
        }
    }
}

impl fmt::Display for PeerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PeerId::User(uid) => write!(f, "user {uid}"),
            PeerId::Host(IpAddr::V6(network)) if !network.is_loopback() => write!(f, "network {network}/64"),
            PeerId::Host(address) => write!(f, "host {address}"),
            PeerId::Unknown => f.write_str("an unknown peer"),
        }
    }
}

/// Waits for a socket operation. If it is dropped, the operation is given up.
struct SocketFuture {
    reactor: Reactor,
    state: FutureState,
}

enum FutureState {
    Running(OpId),
    /// The operation failed before it began.
    Refused(SocketOp),
    Taken,
}

impl SocketFuture {
    fn start(reactor: &Reactor, socket: &Rc<OwnedFd>, kind: SocketKind) -> SocketFuture {
        let state = match reactor.start(SocketOp::new(socket.clone(), kind)) {
            Ok(id) => FutureState::Running(id),
            Err(mut op) => {
                op.fail(libc::ECANCELED);
                FutureState::Refused(op)
            }
        };
        SocketFuture { reactor: reactor.clone(), state }
    }
}

impl Future for SocketFuture {
    type Output = (SocketKind, io::Result<usize>);

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let op = match std::mem::replace(&mut self.state, FutureState::Taken) {
            FutureState::Running(id) => {
                let ended = self.reactor.with(id, |op: &mut SocketOp| {
                    if !op.has_ended() {
                        op.set_waker(cx.waker());
                    }
                    op.has_ended()
                });
                if !ended {
                    self.state = FutureState::Running(id);
                    return Poll::Pending;
                }
                self.reactor.take::<SocketOp>(id)
            }
            FutureState::Refused(op) => op,
            FutureState::Taken => panic!("polled after it was ready"),
        };
        let outcome = match op.outcome() {
            Some(Ok(n)) => Ok(n),
            Some(Err(errno)) => Err(io::Error::from_raw_os_error(errno)),
            None => unreachable!("it has ended"),
        };
        Poll::Ready((op.kind, outcome))
    }
}

impl Drop for SocketFuture {
    fn drop(&mut self) {
        if let FutureState::Running(id) = self.state {
            self.reactor.abandon_socket(id);
        }
    }
}

/// A socket that waits for connections. Its drop closes it and removes the path of a unix socket.
pub struct Listener {
    reactor: Reactor,
    socket: Rc<OwnedFd>,
    address: Address,
    /// Path, device and inode of the unix socket that the drop removes.
    owned_path: Option<(PathBuf, u64, u64)>,
}

impl Listener {
    /// Listens on `address`.
    ///
    /// Only the owner of a unix socket can connect to it (mode 0600). The listener takes over the path of a
    /// socket on which no process listens any more.
    ///
    /// # Errors
    /// `AddrInUse` if a process listens there or the path is no socket; else the error of bind(2).
    pub fn bind(reactor: &Reactor, address: &Address) -> io::Result<Listener> {
        match address {
            Address::Unix(path) => Self::bind_unix(reactor, path),
            Address::Tcp(wanted) => {
                let listener = TcpListener::bind(wanted)?;
                let address = Address::Tcp(listener.local_addr()?);
                Ok(Self::wrap(reactor, listener.into(), address, None)?)
            }
        }
    }

    fn bind_unix(reactor: &Reactor, path: &Path) -> io::Result<Listener> {
        let name = SocketAddrUnix::new(path)?;
        let socket =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        match rustix::net::bind(&socket, &name) {
            Err(rustix::io::Errno::ADDRINUSE) => {
                remove_dead_socket(path)?;
                rustix::net::bind(&socket, &name)?;
            }
            result => result?,
        }
        // Before listen(2), so that no client connects while the socket has the mode of the umask.
        fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o600))?;
        let meta = fs::symlink_metadata(path)?;
        rustix::net::listen(&socket, BACKLOG)?;
        use std::os::unix::fs::MetadataExt;
        let owned = Some((path.to_path_buf(), meta.dev(), meta.ino()));
        Self::wrap(reactor, socket, Address::Unix(path.to_path_buf()), owned)
    }

    /// Takes over a listening stream socket (socket activation).
    ///
    /// # Errors
    /// If its flags cannot be set.
    pub fn from_fd(reactor: &Reactor, socket: OwnedFd, address: Address) -> io::Result<Listener> {
        Self::wrap(reactor, socket, address, None)
    }

    fn wrap(
        reactor: &Reactor,
        socket: OwnedFd,
        address: Address,
        owned_path: Option<(PathBuf, u64, u64)>,
    ) -> io::Result<Listener> {
        set_blocking_for(reactor, &socket)?;
        Ok(Listener { reactor: reactor.clone(), socket: Rc::new(socket), address, owned_path })
    }

    /// The address on which the socket listens, with the port that the system chose.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Makes it a socket on which several threads listen.
    ///
    /// # Errors
    /// The error of dup(2).
    pub fn share(mut self) -> io::Result<SharedListener> {
        let socket = self.socket.try_clone()?;
        let path = OwnedPath(self.owned_path.take());
        Ok(SharedListener { socket, address: self.address.clone(), _path: path })
    }

    /// The next connection.
    ///
    /// # Errors
    /// The error of accept(2); `EMFILE` and the like are temporary.
    pub async fn accept(&self) -> io::Result<Connection> {
        loop {
            let kind = SocketKind::Accept { accepted: None };
            let (kind, outcome) = SocketFuture::start(&self.reactor, &self.socket, kind).await;
            match outcome {
                // The client gave up before its connection was accepted.
                Err(e) if e.raw_os_error() == Some(libc::ECONNABORTED) => {}
                Err(e) => return Err(e),
                Ok(_) => match kind {
                    SocketKind::Accept { accepted: Some(fd) } => {
                        if matches!(self.address, Address::Tcp(_)) {
                            rustix::net::sockopt::set_tcp_nodelay(&fd, true)?;
                        }
                        return Connection::wrap(&self.reactor, fd);
                    }
                    _ => unreachable!("accept yields a descriptor"),
                },
            }
        }
    }
}

/// A listening socket for several threads. Dropping it removes the path of a unix socket.
pub struct SharedListener {
    /// Removed before the socket is closed.
    _path: OwnedPath,
    socket: OwnedFd,
    address: Address,
}

impl SharedListener {
    /// Where it listens.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// The listener of one thread. The socket stays open until the last one is dropped.
    ///
    /// # Errors
    /// The error of dup(2), or if its flags cannot be set.
    pub fn listener(&self, reactor: &Reactor) -> io::Result<Listener> {
        Listener::from_fd(reactor, self.socket.try_clone()?, self.address.clone())
    }
}

/// The path of a unix socket, with its device and inode; dropping it removes the path.
struct OwnedPath(Option<(PathBuf, u64, u64)>);

impl Drop for Listener {
    fn drop(&mut self) {
        drop(OwnedPath(self.owned_path.take()));
    }
}

impl Drop for OwnedPath {
    fn drop(&mut self) {
        if let Some((path, dev, ino)) = &self.0
            && let Ok(meta) = fs::symlink_metadata(path)
        {
            use std::os::unix::fs::MetadataExt;
            // Another process may have replaced the socket at the path.
            if (meta.dev(), meta.ino()) == (*dev, *ino) {
                let _ = fs::remove_file(path);
            }
        }
    }
}

/// Removes `path` if it is a socket on which no process listens.
fn remove_dead_socket(path: &Path) -> io::Result<()> {
    use std::os::unix::fs::FileTypeExt;
    let in_use = || io::Error::from_raw_os_error(libc::EADDRINUSE);
    if !fs::symlink_metadata(path)?.file_type().is_socket() {
        return Err(in_use());
    }
    for _ in 0..LISTENER_TRIES {
        match UnixStream::connect(path) {
            Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => return fs::remove_file(path),
            // The kernel closes a ring some time after its process was killed. Until then the socket stays open, because the
            // ring has an accept on it.
            Ok(stream) if listener_is_dead(&stream) => {
                drop(stream);
                std::thread::sleep(BETWEEN_LISTENER_TRIES);
            }
            // Without a free descriptor, the check is not possible.
            Err(e) if matches!(e.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) => return Err(e),
            _ => break,
        }
    }
    Err(in_use())
}

/// Whether the process that listens at the other end has ended. False for a process in another namespace.
fn listener_is_dead(stream: &UnixStream) -> bool {
    let Ok(peer) = rustix::net::sockopt::socket_peercred(stream) else { return false };
    rustix::process::test_kill_process(peer.pid) == Err(rustix::io::Errno::SRCH)
}

/// Sets the blocking mode of a socket for the backend.
///
/// The ring waits for blocking sockets itself, and reports non-blocking ones as not ready. poll(2) needs non-blocking ones.
fn set_blocking_for(reactor: &Reactor, socket: &OwnedFd) -> io::Result<()> {
    let mut flags = rustix::fs::fcntl_getfl(socket)?;
    flags.set(rustix::fs::OFlags::NONBLOCK, !reactor.is_uring());
    Ok(rustix::fs::fcntl_setfl(socket, flags)?)
}

/// A stream socket. Cheap to clone: one task may receive while another sends.
#[derive(Clone)]
pub struct Connection {
    reactor: Reactor,
    socket: Rc<OwnedFd>,
}

impl Connection {
    /// Connects to `address`.
    ///
    /// # Errors
    /// The error of connect(2); `TimedOut` after 10 s.
    pub async fn connect(reactor: &Reactor, address: &Address) -> io::Result<Connection> {
        let wanted = address.clone();
        let fd = reactor
            .blocking(move || match wanted {
                Address::Unix(path) => UnixStream::connect(path).map(OwnedFd::from),
                Address::Tcp(address) => {
                    let stream = TcpStream::connect_timeout(&address, CONNECT_TIMEOUT)?;
                    stream.set_nodelay(true)?;
                    Ok(stream.into())
                }
            })
            .await?;
        Self::from_fd(reactor, fd)
    }

    /// Takes over a connected stream socket.
    ///
    /// # Errors
    /// If its flags cannot be set.
    pub fn from_fd(reactor: &Reactor, socket: OwnedFd) -> io::Result<Connection> {
        Self::wrap(reactor, socket)
    }

    fn wrap(reactor: &Reactor, socket: OwnedFd) -> io::Result<Connection> {
        set_blocking_for(reactor, &socket)?;
        Ok(Connection { reactor: reactor.clone(), socket: Rc::new(socket) })
    }

    /// The socket once more, for another thread that takes over this connection.
    ///
    /// # Errors
    /// The error of dup(2).
    pub fn duplicate(&self) -> io::Result<OwnedFd> {
        self.socket.try_clone()
    }

    /// Receives what is there, at least one byte, into `range` of `buffer`. `Ok(0)` is the end of the
    /// stream, or an empty range. Dropping the future loses what was received.
    ///
    /// # Errors
    /// The error of recv(2).
    ///
    /// # Panics
    /// If the range does not lie in the buffer, or the buffer is shared.
    pub async fn recv_some(&self, buffer: Buffer, range: Range<usize>) -> (Buffer, io::Result<usize>) {
        self.recv(buffer, range, false).await
    }

    /// Receives exactly `range` of `buffer`.
    ///
    /// # Errors
    /// `UnexpectedEof` if the stream ends before; else the error of recv(2).
    ///
    /// # Panics
    /// If the range does not lie in the buffer, or the buffer is shared.
    pub async fn recv_exact(&self, buffer: Buffer, range: Range<usize>) -> (Buffer, io::Result<()>) {
        let wanted = range.len();
        let (buffer, result) = self.recv(buffer, range, true).await;
        let result = match result {
            Ok(n) if n == wanted => Ok(()),
            Ok(n) => Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                format!("the peer closed the connection after {n} of {wanted} bytes"),
            )),
            Err(e) => Err(e),
        };
        (buffer, result)
    }

    async fn recv(&self, mut buffer: Buffer, range: Range<usize>, all: bool) -> (Buffer, io::Result<usize>) {
        assert!(range.start <= range.end && range.end <= buffer.len(), "{range:?} of {} bytes", buffer.len());
        assert!(buffer.get_mut().is_some(), "a shared buffer cannot be received into");
        if range.is_empty() {
            return (buffer, Ok(0));
        }
        let kind = SocketKind::Recv { buffer, range, all };
        match SocketFuture::start(&self.reactor, &self.socket, kind).await {
            (SocketKind::Recv { buffer, .. }, outcome) => (buffer, outcome),
            _ => unreachable!("a receive stays one"),
        }
    }

    /// Sends the whole of `message`, and gives it back for reuse.
    ///
    /// # Errors
    /// The error of sendmsg(2); a part of the message may have been sent.
    pub async fn send(&self, message: Message) -> (Message, io::Result<()>) {
        if message.is_empty() {
            return (message, Ok(()));
        }
        let kind = SocketKind::Send { message, block: self.reactor.take_block() };
        match SocketFuture::start(&self.reactor, &self.socket, kind).await {
            (SocketKind::Send { message, block }, outcome) => {
                self.reactor.recycle_block(block);
                (message, outcome.map(drop))
            }
            _ => unreachable!("a send stays one"),
        }
    }

    /// Sends the whole of `buffer`, and gives it back for reuse.
    ///
    /// # Errors
    /// The error of sendmsg(2); a part of the buffer may have been sent.
    pub async fn send_all(&self, buffer: Buffer) -> (Buffer, io::Result<()>) {
        let mut message = Message::new();
        let range = 0..buffer.len();
        let spare = buffer.clone();
        message.push(buffer, range);
        let (message, result) = self.send(message).await;
        drop(message);
        (spare, result)
    }

    /// The peer, for the log: address and port, or process and user of a unix socket's peer.
    pub fn peer(&self) -> String {
        if let Ok(Some(address)) = rustix::net::getpeername(&*self.socket)
            && let Ok(address) = SocketAddr::try_from(address)
        {
            return address.to_string();
        }
        match rustix::net::sockopt::socket_peercred(&*self.socket) {
            Ok(c) => format!("process {} of user {}", c.pid.as_raw_pid(), c.uid.as_raw()),
            Err(_) => "unknown".to_string(),
        }
    }

    /// The peer, for limits: the host of a TCP client, or the user of a unix socket's peer.
    pub fn peer_id(&self) -> PeerId {
        if let Ok(Some(address)) = rustix::net::getpeername(&*self.socket)
            && let Ok(address) = SocketAddr::try_from(address)
        {
            return PeerId::of_address(address.ip());
        }
        let credentials = rustix::net::sockopt::socket_peercred(&*self.socket);
        credentials.map_or(PeerId::Unknown, |c| PeerId::User(c.uid.as_raw()))
    }

    /// Shuts one or both directions down. A receive that waits ends with `Ok(0)`.
    ///
    /// # Errors
    /// `NotConnected` if the peer has disconnected.
    pub fn shutdown(&self, direction: Shutdown) -> io::Result<()> {
        let direction = match direction {
            Shutdown::Read => rustix::net::Shutdown::Read,
            Shutdown::Write => rustix::net::Shutdown::Write,
            Shutdown::Both => rustix::net::Shutdown::Both,
        };
        Ok(rustix::net::shutdown(&*self.socket, direction)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_one_host_are_one_peer() {
        let peer = |text: &str| PeerId::of_address(text.parse().unwrap());
        assert_eq!(peer("::ffff:192.0.2.1"), peer("192.0.2.1"));
        assert_ne!(peer("192.0.2.1"), peer("192.0.2.2"));
        assert_eq!(peer("2001:db8::1"), peer("2001:db8::ffff:1"));
        assert_ne!(peer("2001:db8::1"), peer("2001:db8:0:1::1"));
        assert_eq!(peer("2001:db8::1").to_string(), "network 2001:db8::/64");
        assert_eq!(peer("::1").to_string(), "host ::1");
    }
}
