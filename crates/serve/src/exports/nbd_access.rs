//! The access to volumes over NBD, and the memory that NBD clients can have.
//!
//! Owns the rule that a TCP port is never open by accident. NBD itself has no access control: the mode of a unix socket
//! protects it, client certificates protect TCP, and only the operator can permit anything else. Unix sockets have no TLS.
//! Must not know the clients.

use std::path::Path;

use export_nbd::{Endpoint, EndpointError, Hubs, Reach, TlsConfig, TlsConfigError};
use io::MemoryBudget;

use crate::failure::Failure;
use crate::ram;
use crate::secret::{self, SecretError};

/// All NBD clients together get the memory divided by this.
const SHARE: u64 = 8;
/// Smallest budget: some twenty clients with one piece of 1 MiB each.
const LEAST_BYTES: u64 = 32 << 20;
/// Largest budget: 64 clients with as many requests in flight as one may have need no more.
const MOST_BYTES: u64 = 2 << 30;

/// Where the operator sets the access rules, so that an error names the right setting.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum SaidBy {
    /// In options of the command line.
    #[default]
    Options,
    /// In the configuration file.
    Configuration,
}

/// The operator's access rules of NBD, and the budget that all NBD exports of the process share.
#[derive(Clone)]
pub struct NbdAccess {
    /// Memory budget of all clients of the process.
    pub memory: MemoryBudget,
    /// Sockets and ports that several exports share.
    pub hubs: Hubs,
    /// TLS for TCP.
    pub tls: Option<TlsConfig>,
    /// Whether TCP without client certificates is permitted.
    pub allow_unauthenticated: bool,
    /// Whether such ports may be reachable from other hosts.
    pub allow_remote: bool,
    /// Where the operator has set this.
    pub said_by: SaidBy,
}

impl Default for NbdAccess {
    fn default() -> NbdAccess {
        let bytes = (ram::available_bytes() / SHARE).clamp(LEAST_BYTES, MOST_BYTES);
        NbdAccess {
            memory: MemoryBudget::new(bytes),
            hubs: Hubs::default(),
            tls: None,
            allow_unauthenticated: false,
            allow_remote: false,
            said_by: SaidBy::default(),
        }
    }
}

impl NbdAccess {
    /// Refuses an endpoint that more clients can reach than the operator has permitted.
    ///
    /// # Errors
    /// If it is TCP without access control, and the operator has not permitted that.
    pub fn check(&self, endpoint: &Endpoint) -> Result<(), Failure> {
        endpoint.check(self.reach()).map_err(|e| match e {
            EndpointError::Open(_) => Failure::Usage(why_not(endpoint, self.tls.is_some(), self.said_by)),
            EndpointError::NotLoopback(_) => Failure::Failed(match self.said_by {
                SaidBy::Options => format!("{e} (--allow-remote)"),
                SaidBy::Configuration => why_not_remote(endpoint),
            }),
            other => other.into(),
        })
    }

    /// How far an endpoint may be reachable under these rules.
    pub(crate) fn reach(&self) -> Reach {
        if self.tls.as_ref().is_some_and(TlsConfig::authenticates) {
            return Reach::Anywhere;
        }
        match (self.allow_unauthenticated, self.allow_remote) {
            (false, _) => Reach::Sockets,
            (true, false) => Reach::Loopback,
            (true, true) => Reach::Anywhere,
        }
    }
}

/// Why a TCP port is not opened, and what the operator can do.
pub fn why_not(endpoint: &Endpoint, encrypted: bool, said_by: SaidBy) -> String {
    let lacking = if encrypted {
        "TLS without client certificates encrypts but does not authenticate clients"
    } else {
        "NBD over TCP has no access control"
    };
    let (certificates, open) = match said_by {
        SaidBy::Options => {
            ("--nbd-tls-cert, --nbd-tls-key and --nbd-tls-client-ca", "--nbd-allow-unauthenticated-tcp")
        }
        SaidBy::Configuration => {
            ("nbd_tls_certificate, nbd_tls_key and nbd_tls_client_ca", "nbd_allow_unauthenticated_tcp = true")
        }
    };
    format!(
        "{endpoint}: every user of this host could read and write the volumes through this port: {lacking}; \
         use a unix socket (nbd=/run/NAME.sock), or require client certificates ({certificates}), or allow \
         clients without authentication ({open})"
    )
}

/// Why a port without access control is not opened to other hosts by the configuration, and what the operator can do.
pub fn why_not_remote(endpoint: &Endpoint) -> String {
    format!(
        "{endpoint}: other hosts can reach this address, and nbd_allow_unauthenticated_tcp = true permits \
         loopback addresses only; use nbd=127.0.0.1:PORT or a unix socket (nbd=/run/NAME.sock), or require \
         client certificates (nbd_tls_certificate, nbd_tls_key and nbd_tls_client_ca)"
    )
}

/// Whether other hosts can reach this endpoint. A name that cannot be resolved now is checked later, at the start.
pub fn is_remote(endpoint: &Endpoint) -> bool {
    matches!(endpoint.check(Reach::Loopback), Err(EndpointError::NotLoopback(_)))
}

/// Reads the files for TLS, in PEM form; other users must not be able to read the file of the key.
///
/// # Errors
/// If one of them cannot be used: which one, and why.
pub fn read_tls(certificate: &Path, key: &Path, client_ca: Option<&Path>) -> Result<TlsConfig, TlsFileError> {
    let in_file = |file| move |e| TlsFileError { file, why: TlsFileProblem::Read(e) };
    let chain = secret::read_public(certificate).map_err(in_file(TlsFile::Certificate))?;
    let private = secret::read_private(key).map_err(in_file(TlsFile::Key))?;
    let ca = client_ca.map(secret::read_public).transpose().map_err(in_file(TlsFile::ClientCa))?;
    TlsConfig::from_pem(&chain, &private, ca.as_deref()).map_err(|e| {
        let file = match e {
            TlsConfigError::Certificate(_) => TlsFile::Certificate,
            TlsConfigError::Key(_) => TlsFile::Key,
            TlsConfigError::ClientCa(_) => TlsFile::ClientCa,
        };
        TlsFileError { file, why: TlsFileProblem::Contents(e) }
    })
}

/// A file that TLS needs cannot be used. The message does not name the path.
#[derive(Debug, thiserror::Error)]
#[error("{why}")]
pub struct TlsFileError {
    /// Which one.
    pub file: TlsFile,
    /// The reason.
    #[source]
    pub why: TlsFileProblem,
}

/// The reason why a file that TLS needs cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsFileProblem {
    /// It cannot be read.
    #[error(transparent)]
    Read(SecretError),
    /// Its contents do not fit.
    #[error(transparent)]
    Contents(TlsConfigError),
}

/// A file that TLS needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TlsFile {
    /// The server's certificates.
    Certificate,
    /// The server's key.
    Key,
    /// The authorities that sign the certificates of clients.
    ClientCa,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tcp_is_open_only_if_somebody_asked_for_it() {
        let socket: Endpoint = "/run/x".parse().unwrap();
        let port: Endpoint = "127.0.0.1:10809".parse().unwrap();
        let closed = NbdAccess::default();
        closed.check(&socket).unwrap();
        let refused = closed.check(&port).unwrap_err();
        let text = refused.message().unwrap();
        for words in ["every user of this host", "unix socket", "--nbd-tls-client-ca", "--nbd-allow-un"] {
            assert!(text.contains(words), "{text}");
        }
        assert_eq!(refused.exit_code(), Failure::USAGE);
        let open = NbdAccess { allow_unauthenticated: true, ..NbdAccess::default() };
        open.check(&port).unwrap();
        assert_eq!(open.reach(), Reach::Loopback);
        assert_eq!(NbdAccess { allow_remote: true, ..open }.reach(), Reach::Anywhere);
        assert_eq!(NbdAccess { allow_remote: true, ..closed }.reach(), Reach::Sockets);
    }

    /// The error of the system was turned into text.
    #[test]
    fn a_file_that_cannot_be_read_is_the_cause() {
        use std::error::Error;
        let nowhere = Path::new("/nowhere/pem");
        let failure = read_tls(nowhere, nowhere, None).err().expect("there is no such file");
        assert_eq!(failure.file, TlsFile::Certificate);
        let cause = failure.source().and_then(Error::source).and_then(|e| e.downcast_ref::<std::io::Error>());
        assert_eq!(cause.map(std::io::Error::kind), Some(std::io::ErrorKind::NotFound), "{failure}");
    }

    #[test]
    fn the_budget_is_a_share_of_the_memory() {
        let limit = NbdAccess::default().memory.limit();
        assert!((LEAST_BYTES..=MOST_BYTES).contains(&limit), "{limit}");
    }
}
