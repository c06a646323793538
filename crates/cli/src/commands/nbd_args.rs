//! The options for access to volumes over NBD.
//!
//! Owns the options and the reading of their files. Must not know which combinations are permitted: crate `serve` decides
//! that.

use std::path::{Path, PathBuf};

use clap::Args;
use serve::exports::{NbdAccess, SaidBy, TlsFile, TlsFileError, read_tls};

use crate::failure::Failure;

/// The options for access over NBD.
#[derive(Args, Debug)]
pub(crate) struct NbdArgs {
    /// Certificate of this server for NBD over TCP, in PEM form; connections without TLS are then refused
    #[arg(long, value_name = "FILE", requires = "nbd_tls_key")]
    nbd_tls_cert: Option<PathBuf>,
    /// Private key of that certificate, in a file that other users cannot read
    #[arg(long, value_name = "FILE", requires = "nbd_tls_cert")]
    nbd_tls_key: Option<PathBuf>,
    /// CA certificates of the clients; clients without a certificate signed by one of these CAs are refused
    #[arg(long, value_name = "FILE", requires = "nbd_tls_cert")]
    nbd_tls_client_ca: Option<PathBuf>,
    /// Serve NBD over TCP without client certificates: every user of this host can read and write the volumes
    #[arg(long)]
    nbd_allow_unauthenticated_tcp: bool,
    /// With --nbd-allow-unauthenticated-tcp: listen also on addresses that other hosts can reach
    #[arg(long)]
    allow_remote: bool,
}

impl NbdArgs {
    /// The access that the options permit, with the contents of the files.
    pub(crate) fn access(&self) -> Result<NbdAccess, Failure> {
        let tls = match (&self.nbd_tls_cert, &self.nbd_tls_key) {
            (Some(certificate), Some(key)) => {
                let read = read_tls(certificate, key, self.nbd_tls_client_ca.as_deref());
                Some(read.map_err(|e| self.unusable(e))?)
            }
            _ => None,
        };
        Ok(NbdAccess {
            tls,
            allow_unauthenticated: self.nbd_allow_unauthenticated_tcp,
            allow_remote: self.allow_remote,
            said_by: SaidBy::Options,
            ..NbdAccess::default()
        })
    }

    fn unusable(&self, e: TlsFileError) -> Failure {
        let (option, path) = match e.file {
            TlsFile::Certificate => ("--nbd-tls-cert", &self.nbd_tls_cert),
            TlsFile::Key => ("--nbd-tls-key", &self.nbd_tls_key),
            TlsFile::ClientCa => ("--nbd-tls-client-ca", &self.nbd_tls_client_ca),
        };
        let path = path.as_deref().unwrap_or(Path::new(""));
        Failure::because(format_args!("{option} {}", path.display()), e)
    }
}
