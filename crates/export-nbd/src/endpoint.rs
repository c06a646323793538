//! Where a server listens: `nbd=SOCKET` and `nbd=HOST:PORT`, and the URIs that clients use.
//!
//! Owns the syntax, the rule that a TCP port reaches no further than the operator permits, and the syntax of URIs. The listener
//! (`blockio::Listener`) binds, takes over the socket of a dead server, and removes its own socket at the end.

use std::fmt::{self, Write as _};
use std::fs::FileType;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use blockio::{Address, Listener, Reactor};

/// The port of NBD that the IANA has assigned.
const DEFAULT_PORT: u16 = 10809;
/// Prefix of an export option for this server.
const PREFIX: &str = "nbd=";

/// Where a server is to listen.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Endpoint {
    /// A unix socket.
    Unix(PathBuf),
    /// A TCP port; 0 lets the system choose.
    Tcp {
        /// Name or address of a host, without brackets.
        host: String,
        /// The port.
        port: u16,
    },
}

/// What is at the path of a socket in its place.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum NotASocket {
    /// A directory, in which a socket could be.
    #[error("a directory")]
    Directory,
    /// A symbolic link.
    #[error("a symbolic link")]
    Link,
    /// A block or character device.
    #[error("a device")]
    Device,
    /// Another file.
    #[error("a file")]
    File,
}

impl NotASocket {
    /// `None` for a socket.
    fn of(found: FileType) -> Option<NotASocket> {
        Some(match () {
            () if found.is_socket() => return None,
            () if found.is_dir() => NotASocket::Directory,
            () if found.is_symlink() => NotASocket::Link,
            () if found.is_block_device() || found.is_char_device() => NotASocket::Device,
            () => NotASocket::File,
        })
    }
}

/// Why an endpoint cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum EndpointError {
    /// Nothing comes after `nbd=`.
    #[error("nbd= needs the path of a socket or HOST:PORT")]
    Empty,
    /// The text after the colon is not a port.
    #[error(
        "{0:?} is neither HOST:PORT (no port of 0 to 65535 after the colon) nor the path of a socket (no slash; write ./{0} if it is one)"
    )]
    BadPort(String),
    /// An address of a host has no port.
    #[error("{text} has no port: write {host}:{DEFAULT_PORT}, or ./{text} for a socket of this name")]
    NoPort {
        /// The text.
        text: String,
        /// The host, in brackets where a port needs them.
        host: String,
    },
    /// Nothing comes before the colon.
    #[error("{0:?} names no host: write localhost{0} for this host alone")]
    NoHost(String),
    /// Other hosts can reach the address.
    #[error(
        "{0} can be reached from other hosts, and NBD has no password: use a unix socket or localhost, or allow it explicitly"
    )]
    NotLoopback(SocketAddr),
    /// The endpoint is TCP, and only unix sockets are allowed.
    #[error("{0}: a TCP port is open to every user of this host, and has to be allowed explicitly")]
    Open(Endpoint),
    /// The host's name has no address.
    #[error("no address is known for {host:?}: {source}")]
    Unresolved {
        /// The name.
        host: String,
        /// The error of the resolver.
        source: std::io::Error,
    },
    /// The path of the socket is taken by something else.
    #[error("cannot listen on {}: expected no file or the socket of a server that has ended, found {found}{}", .path.display(), next_to(.path, *.found))]
    NoSocket {
        /// The path.
        path: PathBuf,
        /// What is there.
        found: NotASocket,
        /// The error of the system.
        source: std::io::Error,
    },
    /// Listening failed.
    #[error("cannot listen on {address}: {source}")]
    Bind {
        /// The address of the endpoint.
        address: Address,
        /// The error of the system.
        source: std::io::Error,
    },
}

/// How far an endpoint may reach.
///
/// The mode of a unix socket controls who may connect. TCP has no access control except certificates of the clients.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Reach {
    /// Unix sockets only.
    #[default]
    Sockets,
    /// TCP, for all processes and users of this host.
    Loopback,
    /// TCP on all addresses: with client certificates, or because the operator permits it.
    Anywhere,
}

impl Endpoint {
    /// Parses an export option; `None` if the option is for another server.
    pub fn from_export_option(option: &str) -> Option<Result<Endpoint, EndpointError>> {
        option.strip_prefix(PREFIX).map(str::parse)
    }

    /// Listens on this endpoint. Blocks while the host's name is resolved.
    ///
    /// # Errors
    /// If the endpoint is in use, cannot be bound, or reaches further than `reach`.
    pub fn bind(&self, reactor: &Reactor, reach: Reach) -> Result<Listener, EndpointError> {
        let mut last = None;
        for address in self.addresses(reach)? {
            match Listener::bind(reactor, &address) {
                Ok(listener) => return Ok(listener),
                Err(source) => last = Some(cannot_listen(address, source)),
            }
        }
        Err(last.unwrap_or_else(|| self.unresolved(std::io::ErrorKind::NotFound.into())))
    }

    /// Checks that the endpoint reaches no further than `reach`, without listening. Blocks while the host's name is resolved.
    ///
    /// # Errors
    /// If the endpoint reaches further, or the host has no known address.
    pub fn check(&self, reach: Reach) -> Result<(), EndpointError> {
        self.addresses(reach).map(drop)
    }

    /// Whether two servers cannot listen on this endpoint and on `other` at the same time.
    ///
    /// That is so for the same socket, and for the same port of a common address. Two ports that the system chooses differ.
    /// Blocks while hosts' names are resolved.
    pub fn overlaps(&self, other: &Endpoint) -> bool {
        match (self, other) {
            (Endpoint::Unix(one), Endpoint::Unix(two)) => one == two || place(one) == place(two),
            (Endpoint::Tcp { port: 0, .. }, _) | (_, Endpoint::Tcp { port: 0, .. }) => false,
            (Endpoint::Tcp { host: one, port }, Endpoint::Tcp { host: two, port: other }) => {
                port == other && (one.eq_ignore_ascii_case(two) || share_an_address(one, two))
            }
            _ => false,
        }
    }

    /// Whether servers here and at `other` can share one socket. Not at a port that the system chooses, which is another one
    /// each time.
    pub fn is_same(&self, other: &Endpoint) -> bool {
        match (self, other) {
            (Endpoint::Unix(_), Endpoint::Unix(_)) => self.overlaps(other),
            (Endpoint::Tcp { port: 0, .. }, _) => false,
            _ => self == other,
        }
    }

    fn addresses(&self, reach: Reach) -> Result<Vec<Address>, EndpointError> {
        match self {
            Endpoint::Unix(path) => {
                // Clients may run in another directory. Without a current directory, the path stays relative.
                let path = std::path::absolute(path).unwrap_or_else(|_| path.clone());
                Ok(vec![Address::Unix(path)])
            }
            Endpoint::Tcp { .. } if reach == Reach::Sockets => Err(EndpointError::Open(self.clone())),
            Endpoint::Tcp { host, port } => {
                let found: Vec<SocketAddr> =
                    (host.as_str(), *port).to_socket_addrs().map_err(|e| self.unresolved(e))?.collect();
                if let Some(open) = found.iter().find(|a| reach == Reach::Loopback && !a.ip().is_loopback()) {
                    return Err(EndpointError::NotLoopback(*open));
                }
                Ok(found.into_iter().map(Address::Tcp).collect())
            }
        }
    }

    fn unresolved(&self, source: std::io::Error) -> EndpointError {
        let host = match self {
            Endpoint::Tcp { host, .. } => host.clone(),
            Endpoint::Unix(path) => path.display().to_string(),
        };
        EndpointError::Unresolved { host, source }
    }
}

impl FromStr for Endpoint {
    type Err = EndpointError;

    fn from_str(text: &str) -> Result<Endpoint, EndpointError> {
        if text.is_empty() {
            return Err(EndpointError::Empty);
        }
        if let Some(host) = host_without_port(text) {
            return Err(EndpointError::NoPort { text: text.to_string(), host });
        }
        let colon = if text.contains('/') { None } else { text.rsplit_once(':') };
        let Some((host, port)) = colon else { return Ok(Endpoint::Unix(PathBuf::from(text))) };
        let digits = !port.is_empty() && port.bytes().all(|b| b.is_ascii_digit());
        let port: u16 = match port.parse() {
            Ok(port) if digits => port,
            _ => return Err(EndpointError::BadPort(text.to_string())),
        };
        let host = host.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(host);
        if host.is_empty() {
            return Err(EndpointError::NoHost(text.to_string()));
        }
        Ok(Endpoint::Tcp { host: host.to_string(), port })
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Endpoint::Unix(path) => write!(f, "{PREFIX}{}", path.display()),
            Endpoint::Tcp { host, port } if host.contains(':') => write!(f, "{PREFIX}[{host}]:{port}"),
            Endpoint::Tcp { host, port } => write!(f, "{PREFIX}{host}:{port}"),
        }
    }
}

/// The error of a listener, which says what is at the path of a socket.
fn cannot_listen(address: Address, source: std::io::Error) -> EndpointError {
    let found = match &address {
        Address::Unix(path) => std::fs::symlink_metadata(path).ok(),
        Address::Tcp(_) => None,
    };
    match (address, found.and_then(|meta| NotASocket::of(meta.file_type()))) {
        (Address::Unix(path), Some(found)) => EndpointError::NoSocket { path, found, source },
        (address, _) => EndpointError::Bind { address, source },
    }
}

/// What to write in the place of a path that has no socket.
fn next_to(path: &Path, found: NotASocket) -> String {
    match found {
        NotASocket::Directory => {
            format!("; name a socket in it, such as {}", path.join("ubcache.sock").display())
        }
        _ => "; name another path, or remove it".to_owned(),
    }
}

/// The host of an endpoint that has no port, as it is written before one: an address, or the name of this host.
fn host_without_port(text: &str) -> Option<String> {
    let plain = text.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(text);
    match plain.parse() {
        Ok(IpAddr::V4(_)) => Some(plain.to_owned()),
        // Without brackets the last number may be the port.
        Ok(IpAddr::V6(_)) if plain != text => Some(text.to_owned()),
        Ok(IpAddr::V6(_)) => {
            let is_host = |(host, _): (&str, &str)| host.parse::<IpAddr>().is_ok();
            (!text.rsplit_once(':').is_some_and(is_host)).then(|| format!("[{text}]"))
        }
        Err(_) => text.eq_ignore_ascii_case("localhost").then(|| text.to_owned()),
    }
}

/// Resolves the links in the directory part of a socket's path. The socket need not exist.
fn place(socket: &Path) -> PathBuf {
    let path = std::path::absolute(socket).unwrap_or_else(|_| socket.to_path_buf());
    match (path.parent().and_then(|dir| dir.canonicalize().ok()), path.file_name()) {
        (Some(dir), Some(name)) => dir.join(name),
        _ => path,
    }
}

/// Whether two hosts have a common address. The unspecified address has all addresses.
fn share_an_address(one: &str, two: &str) -> bool {
    let addresses = |host: &str| -> Vec<IpAddr> {
        let found = (host, 0).to_socket_addrs().map(|all| all.map(|a| a.ip().to_canonical()).collect());
        found.unwrap_or_default()
    };
    let (one, two) = (addresses(one), addresses(two));
    one.iter().any(|a| two.iter().any(|b| a == b || a.is_unspecified() || b.is_unspecified()))
}

/// The URI of the export `name` on a server that listens on `address`; `encrypted` is true under TLS.
pub fn uri(address: &Address, name: &str, encrypted: bool) -> String {
    let scheme = if encrypted { "nbds" } else { "nbd" };
    match address {
        Address::Unix(path) => {
            format!("{scheme}+unix:///{}?socket={}", escaped(name.as_bytes()), escaped(path_bytes(path)))
        }
        Address::Tcp(address) => format!("{scheme}://{address}/{}", escaped(name.as_bytes())),
    }
}

fn path_bytes(path: &Path) -> &[u8] {
    std::os::unix::ffi::OsStrExt::as_bytes(path.as_os_str())
}

/// Escapes every character with a meaning in a URI, except slashes.
fn escaped(bytes: &[u8]) -> String {
    let mut out = String::with_capacity(bytes.len());
    for &b in bytes {
        if b.is_ascii_alphanumeric() || b"-._~/".contains(&b) {
            out.push(char::from(b));
        } else {
            // Writing to a string cannot fail.
            let _ = write!(out, "%{b:02X}");
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unix(path: &str) -> Endpoint {
        Endpoint::Unix(PathBuf::from(path))
    }

    fn tcp(host: &str, port: u16) -> Endpoint {
        Endpoint::Tcp { host: host.to_string(), port }
    }

    #[test]
    fn endpoints_are_told_apart() {
        let cases = [
            ("/run/u.sock", unix("/run/u.sock")),
            ("u.sock", unix("u.sock")),
            ("./a:1", unix("./a:1")),
            ("/a:b/c:10809", unix("/a:b/c:10809")),
            ("localhost:10809", tcp("localhost", 10809)),
            ("127.0.0.1:0", tcp("127.0.0.1", 0)),
            ("[::1]:10809", tcp("::1", 10809)),
            ("::1:10809", tcp("::1", 10809)),
            ("::1:1080", tcp("::1", 1080)),
            ("./127.0.0.1", unix("./127.0.0.1")),
        ];
        for (text, expected) in cases {
            let parsed = Endpoint::from_export_option(&format!("nbd={text}")).expect("an NBD option");
            assert_eq!(parsed.expect(text), expected, "{text}");
        }
        assert!(Endpoint::from_export_option("ublk").is_none());
    }

    #[test]
    fn an_endpoint_prints_as_the_option_that_makes_it() {
        for option in ["nbd=/run/u.sock", "nbd=localhost:10809", "nbd=[::1]:10809"] {
            let parsed = Endpoint::from_export_option(option).expect("an NBD option").expect(option);
            assert_eq!(parsed.to_string(), option);
        }
    }

    #[test]
    fn mistakes_are_named() {
        let fails = |text: &str| text.parse::<Endpoint>().expect_err(text);
        assert!(matches!(fails(""), EndpointError::Empty));
        for text in ["host:", "host:65536", "host:+1", "host:1x", "sock:et"] {
            assert!(matches!(fails(text), EndpointError::BadPort(_)), "{text}");
        }
        for (text, expected) in [
            ("127.0.0.1", "127.0.0.1 has no port: write 127.0.0.1:10809, or ./127.0.0.1 for a socket"),
            ("[::1]", "write [::1]:10809,"),
            ("::1", "write [::1]:10809,"),
            ("fe80::1", "write [fe80::1]:10809,"),
            ("localhost", "write localhost:10809,"),
        ] {
            let said = fails(text).to_string();
            assert!(said.contains(expected), "{said}");
        }
        for text in [":10809", "[]:10809"] {
            assert!(matches!(fails(text), EndpointError::NoHost(_)), "{text}");
        }
    }

    /// A directory in the place of a socket was said to be in use.
    #[test]
    fn a_file_at_the_path_of_a_socket_is_named() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("file");
        std::fs::write(&file, "").expect("room");
        let said = |path: &Path| {
            let source = std::io::Error::from_raw_os_error(98);
            cannot_listen(Address::Unix(path.to_owned()), source).to_string()
        };
        let socket = dir.path().join("ubcache.sock");
        let expected = format!(", found a directory; name a socket in it, such as {}", socket.display());
        assert!(said(dir.path()).ends_with(&expected), "{}", said(dir.path()));
        assert!(said(&file).ends_with(", found a file; name another path, or remove it"), "{}", said(&file));
        assert!(said(&dir.path().join("none")).ends_with("Address already in use (os error 98)"));
    }

    #[test]
    fn addresses_that_others_can_reach_need_a_word_of_the_operator() {
        for open in ["0.0.0.0:10809", "[::]:10809", "192.0.2.1:10809"] {
            let endpoint: Endpoint = open.parse().expect(open);
            assert!(matches!(endpoint.addresses(Reach::Loopback), Err(EndpointError::NotLoopback(_))));
            assert_eq!(endpoint.addresses(Reach::Anywhere).expect("an address needs no resolver").len(), 1);
        }
        for own in ["127.0.0.1:10809", "127.3.2.1:10809", "[::1]:10809"] {
            let endpoint: Endpoint = own.parse().expect(own);
            assert_eq!(endpoint.addresses(Reach::Loopback).expect("loopback").len(), 1);
            assert!(matches!(endpoint.addresses(Reach::Sockets), Err(EndpointError::Open(_))));
        }
    }

    #[test]
    fn two_servers_cannot_listen_at_places_that_overlap() {
        let dir = std::env::temp_dir().canonicalize().expect("a directory");
        let link = dir.join(format!("ubcache-endpoint-{}", std::process::id()));
        std::os::unix::fs::symlink(&dir, &link).expect("a link");
        let (direct, by_link) = (dir.join("s"), link.join("s"));
        let overlap =
            unix(direct.to_str().expect("a path")).overlaps(&unix(by_link.to_str().expect("a path")));
        std::fs::remove_file(&link).expect("the link");
        assert!(overlap, "one directory by two names");
        for (one, two, expected) in [
            ("/run/a", "/run/a", true),
            ("/run/a", "/run/b", false),
            ("127.0.0.1:1", "127.0.0.1:1", true),
            ("127.0.0.1:1", "127.0.0.1:2", false),
            ("127.0.0.1:1", "127.0.0.2:1", false),
            ("127.0.0.1:1", "0.0.0.0:1", true),
            ("[::ffff:127.0.0.1]:1", "127.0.0.1:1", true),
            ("127.0.0.1:0", "127.0.0.1:0", false),
            ("/run/a", "127.0.0.1:1", false),
        ] {
            let of = |text: &str| -> Endpoint { text.parse().expect(text) };
            assert_eq!(of(one).overlaps(&of(two)), expected, "{one} and {two}");
            assert_eq!(of(two).overlaps(&of(one)), expected, "{two} and {one}");
        }
    }

    #[test]
    fn uris_are_escaped() {
        let socket = Address::Unix(PathBuf::from("/tmp/a b&c/ü.sock"));
        assert_eq!(
            uri(&socket, "disk #1/x?", false),
            "nbd+unix:///disk%20%231/x%3F?socket=/tmp/a%20b%26c/%C3%BC.sock"
        );
        let port = Address::Tcp("[::1]:10809".parse().expect("an address"));
        assert_eq!(uri(&port, "bcache0", false), "nbd://[::1]:10809/bcache0");
        assert_eq!(uri(&port, "bcache0", true), "nbds://[::1]:10809/bcache0");
    }
}
