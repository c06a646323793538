//! A daemon over TCP: its address, its token, and the CA certificates that verify it.
//!
//! Owns the rule that the token is sent to the daemon only: on this host, or under TLS to a daemon with a valid
//! certificate. Must not know the requests.

use std::error::Error;
use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{CertificateError, ClientConnection, StreamOwned};

use crate::failure::Failure;

/// Port of a daemon, if the address has none.
const DEFAULT_PORT: u16 = 9420;
/// File with the certificates of the public authorities, as Debian and most other systems have it.
const SYSTEM_CA: &str = "/etc/ssl/certs/ca-certificates.crt";
/// Time limit of a connect and of a TLS handshake.
const CONNECT_WITHIN: Duration = Duration::from_secs(10);

/// The address of a daemon: `http://HOST[:PORT]` or `https://HOST[:PORT]`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Url {
    tls: bool,
    host: String,
    port: u16,
}

/// The text is no address of a daemon.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{found}: expected http://HOST[:PORT] or https://HOST[:PORT]")]
pub(crate) struct UrlError {
    /// The text.
    found: String,
    /// The reason if it has a port that is no number.
    source: Option<std::num::ParseIntError>,
}

impl std::str::FromStr for Url {
    type Err = UrlError;

    fn from_str(text: &str) -> Result<Url, UrlError> {
        let because = |source| UrlError { found: text.to_owned(), source };
        let wrong = || because(None);
        let (tls, rest) = match text.split_once("://") {
            Some(("http", rest)) => (false, rest),
            Some(("https", rest)) => (true, rest),
            _ => return Err(wrong()),
        };
        let rest = rest.strip_suffix('/').unwrap_or(rest);
        // An IPv6 address is in brackets.
        let (host, port) = match rest.strip_prefix('[') {
            Some(rest) => rest.split_once(']').ok_or_else(wrong)?,
            None => rest.split_at(rest.find(':').unwrap_or(rest.len())),
        };
        let port = match port.strip_prefix(':') {
            Some(port) => port.parse().map_err(|e| because(Some(e)))?,
            None if port.is_empty() => DEFAULT_PORT,
            None => return Err(wrong()),
        };
        if host.is_empty() || host.contains(['/', '@', '?', '#']) || host.contains(char::is_whitespace) {
            return Err(wrong());
        }
        Ok(Url { tls, host: host.to_owned(), port })
    }
}

impl std::fmt::Display for Url {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let scheme = if self.tls { "https" } else { "http" };
        let (open, close) = if self.host.contains(':') { ("[", "]") } else { ("", "") };
        write!(f, "{scheme}://{open}{}{close}:{}", self.host, self.port)
    }
}

/// The connection parameters of a daemon over TCP.
#[derive(Clone, Debug)]
pub(crate) struct Remote {
    pub(crate) url: Url,
    pub(crate) token_file: Option<PathBuf>,
    pub(crate) ca: Option<PathBuf>,
}

impl Remote {
    /// The header line with the token; empty without a token.
    pub(crate) fn authorization(&self) -> Result<String, Failure> {
        let Some(file) = &self.token_file else { return Ok(String::new()) };
        let text = std::fs::read_to_string(file).map_err(|e| Failure::at(file, "cannot be read", e))?;
        let token = text.trim();
        if token.is_empty() || !token.bytes().all(|b| b.is_ascii_graphic()) {
            return Err(Failure::Failed(format!("{}: expected a token in one line", file.display())));
        }
        Ok(format!("Authorization: Bearer {token}\r\n"))
    }

    /// Connects. Under TLS this verifies the certificate of the daemon.
    pub(crate) fn connect(&self) -> Result<Stream, Failure> {
        let tcp = self.tcp()?;
        if !self.url.tls {
            return Ok(Stream::Plain(tcp));
        }
        let cannot = |e: Box<dyn Error + Send + Sync>| Failure::because(&self.url, e);
        let name = ServerName::try_from(self.url.host.clone()).map_err(|e| {
            Failure::caused(format!("{}: expected the name or the address of a host", self.url), e)
        })?;
        let connection = ClientConnection::new(self.tls_config()?, name).map_err(|e| cannot(e.into()))?;
        let mut stream = StreamOwned::new(connection, tcp);
        while stream.conn.is_handshaking() {
            stream
                .conn
                .complete_io(&mut stream.sock)
                .map_err(|e| Failure::caused(format!("{}: {}", self.url, self.tls_problem(&e)), e))?;
        }
        Ok(Stream::Tls(Box::new(stream)))
    }

    fn tcp(&self) -> Result<TcpStream, Failure> {
        let text = |why: &dyn std::fmt::Display| {
            format!(
                "{}: cannot connect: {why}; check that a daemon runs there and that its configuration has `listen`",
                self.url
            )
        };
        let cannot = |e: io::Error| Failure::caused(text(&e), e);
        let addresses = (self.url.host.as_str(), self.url.port).to_socket_addrs().map_err(cannot)?;
        let mut last = None;
        for address in addresses {
            if !self.url.tls && !address.ip().to_canonical().is_loopback() {
                return Err(Failure::Usage(format!(
                    "{}: http:// would send the token to another host unencrypted; use https://",
                    self.url
                )));
            }
            match TcpStream::connect_timeout(&address, CONNECT_WITHIN) {
                Ok(stream) => {
                    // The limits apply to the handshake. The caller sets the limit of an answer.
                    stream.set_read_timeout(Some(CONNECT_WITHIN)).map_err(cannot)?;
                    stream.set_write_timeout(Some(CONNECT_WITHIN)).map_err(cannot)?;
                    return Ok(stream);
                }
                Err(e) => last = Some(e),
            }
        }
        Err(last.map_or_else(|| Failure::Failed(text(&"this host has no address")), cannot))
    }

    fn tls_config(&self) -> Result<Arc<rustls::ClientConfig>, Failure> {
        let file = self.ca.as_deref().unwrap_or(Path::new(SYSTEM_CA));
        let pem = std::fs::read(file).map_err(|e| Failure::at(file, "cannot be read", e))?;
        let mut roots = rustls::RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(&pem) {
            let certificate = certificate.map_err(|e| Failure::at(file, "expected certificates", e))?;
            let added = roots.add(certificate);
            // A certificate of the system that cannot be parsed is skipped. Certificates that the operator names have to be
            // valid.
            if self.ca.is_some() {
                added.map_err(|e| Failure::at(file, "expected certificates", e))?;
            }
        }
        if roots.is_empty() {
            return Err(Failure::Failed(format!(
                "{}: expected certificates in PEM form, found none",
                file.display()
            )));
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(Failure::of)?
            .with_root_certificates(roots)
            .with_no_client_auth();
        Ok(Arc::new(config))
    }

    /// The error of a failed handshake, with the next step.
    fn tls_problem(&self, e: &io::Error) -> String {
        let of_tls = e.get_ref().and_then(|e| e.downcast_ref::<rustls::Error>());
        match of_tls {
            Some(rustls::Error::InvalidCertificate(
                CertificateError::UnknownIssuer | CertificateError::BadSignature,
            )) => {
                "certificate not signed by a trusted CA; pass the server's or the CA's certificate with --ca"
                    .into()
            }
            Some(rustls::Error::InvalidCertificate(why)) => format!("certificate not valid: {why}"),
            Some(rustls::Error::InvalidMessage(_)) => {
                "does not answer with TLS; use http:// if the daemon has no certificate".into()
            }
            _ => format!("no agreement about TLS: {e}"),
        }
    }
}

/// A connection to a daemon.
pub(crate) enum Stream {
    Unix(std::os::unix::net::UnixStream),
    Plain(TcpStream),
    Tls(Box<StreamOwned<ClientConnection, TcpStream>>),
}

impl Stream {
    /// Sets the time limit of reads.
    pub(crate) fn set_read_timeout(&self, timeout: Duration) -> io::Result<()> {
        match self {
            Stream::Unix(s) => s.set_read_timeout(Some(timeout)),
            Stream::Plain(s) => s.set_read_timeout(Some(timeout)),
            Stream::Tls(s) => s.sock.set_read_timeout(Some(timeout)),
        }
    }
}

impl Read for Stream {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Unix(s) => s.read(buf),
            Stream::Plain(s) => s.read(buf),
            Stream::Tls(s) => s.read(buf),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Unix(s) => s.write(buf),
            Stream::Plain(s) => s.write(buf),
            Stream::Tls(s) => s.write(buf),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Stream::Unix(s) => s.flush(),
            Stream::Plain(s) => s.flush(),
            Stream::Tls(s) => s.flush(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A caller can tell a daemon that does not run from a host that does not exist.
    #[test]
    fn a_failed_connection_keeps_its_cause() {
        let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let kind = |url: &str| {
            let remote = Remote { url: url.parse().unwrap(), token_file: None, ca: None };
            let failure = remote.connect().err().expect("no server listens");
            let cause = failure.source().and_then(|e| e.downcast_ref::<io::Error>());
            cause.unwrap_or_else(|| panic!("{failure}: no cause")).kind()
        };
        assert_eq!(kind(&format!("http://{closed}")), io::ErrorKind::ConnectionRefused);
        assert_eq!(kind(&format!("https://{closed}")), io::ErrorKind::ConnectionRefused);
    }

    #[test]
    fn addresses_of_daemons() {
        for (text, shown) in [
            ("http://127.0.0.1", "http://127.0.0.1:9420"),
            ("https://storage.example:1234/", "https://storage.example:1234"),
            ("https://[fe80::1]", "https://[fe80::1]:9420"),
            ("http://[::1]:1", "http://[::1]:1"),
        ] {
            assert_eq!(text.parse::<Url>().map(|u| u.to_string()), Ok(shown.to_owned()));
        }
        for text in [
            "",
            "storage",
            "ftp://x",
            "http://",
            "http://:1",
            "http://x:y",
            "http://x:99999",
            "http://[::1",
            "http://[::1]x",
            "http://a@b",
            "http://a/b",
            "http://a b",
        ] {
            assert!(text.parse::<Url>().is_err(), "{text:?}");
        }
    }
}
