//! The settings of access over TCP: addresses, token, certificates.
//!
//! Owns these types alone. Must not know the rules that a file has to keep.

use std::net::SocketAddr;
use std::path::PathBuf;

/// A file that the configuration names, and the line that names it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct NamedFile {
    pub(crate) path: PathBuf,
    pub(crate) line: usize,
}

/// Addresses and access rules of TCP.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Tcp {
    /// Never empty.
    pub(crate) listen: Vec<SocketAddr>,
    pub(crate) token_file: NamedFile,
    /// The certificate file and the key file; always present if an address is reachable from other hosts.
    pub(crate) tls: Option<(NamedFile, NamedFile)>,
    pub(crate) metrics_without_token: bool,
}

/// Access rules of NBD over TCP.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(crate) struct Nbd {
    /// The certificate file and the key file.
    pub(crate) tls: Option<(NamedFile, NamedFile)>,
    /// The file with the authorities that sign the certificates of clients.
    pub(crate) client_ca: Option<NamedFile>,
    pub(crate) allow_unauthenticated: bool,
}

impl Nbd {
    /// Whether the configuration permits NBD over TCP.
    pub(super) fn opens_tcp(&self) -> bool {
        self.allow_unauthenticated || self.has_certificates()
    }

    /// Whether clients over TCP need certificates.
    pub(super) fn has_certificates(&self) -> bool {
        self.tls.is_some() && self.client_ca.is_some()
    }
}
