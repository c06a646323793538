//! Options about who may reach volumes over NBD.
//!
//! Owns the options and the reading of the files that they name. What they mean together is `serve`'s business.

use std::path::{Path, PathBuf};

use clap::Args;
use serve::exports::{NbdAccess, SaidBy, TlsFile, read_tls};

use crate::failure::Failure;

/// See the module head.
#[derive(Args, Debug)]
pub(crate) struct NbdArgs {
    /// Certificate of this server for NBD over TCP, in PEM form; with it, nothing is served in plain text there
    #[arg(long, value_name = "FILE", requires = "nbd_tls_key")]
    nbd_tls_cert: Option<PathBuf>,
    /// Its private key, in a file that is closed to others
    #[arg(long, value_name = "FILE", requires = "nbd_tls_cert")]
    nbd_tls_key: Option<PathBuf>,
    /// Authorities that sign the certificates of clients; with it, clients without such a certificate are refused
    #[arg(long, value_name = "FILE", requires = "nbd_tls_cert")]
    nbd_tls_client_ca: Option<PathBuf>,
    /// Serve NBD over TCP without certificates of clients: every user of this host can read and write the volumes
    #[arg(long)]
    nbd_allow_unauthenticated_tcp: bool,
    /// Let other hosts connect to such ports, too
    #[arg(long)]
    allow_remote: bool,
}

impl NbdArgs {
    /// What was said, with what is in the files.
    pub(crate) fn access(&self) -> Result<NbdAccess, Failure> {
        let tls = match (&self.nbd_tls_cert, &self.nbd_tls_key) {
            (Some(certificate), Some(key)) => {
                let read = read_tls(certificate, key, self.nbd_tls_client_ca.as_deref());
                Some(read.map_err(|(file, why)| self.unusable(file, &why))?)
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

    fn unusable(&self, file: TlsFile, why: &str) -> Failure {
        let (option, path) = match file {
            TlsFile::Certificate => ("--nbd-tls-cert", &self.nbd_tls_cert),
            TlsFile::Key => ("--nbd-tls-key", &self.nbd_tls_key),
            TlsFile::ClientCa => ("--nbd-tls-client-ca", &self.nbd_tls_client_ca),
        };
        let path = path.as_deref().unwrap_or(Path::new(""));
        Failure::Failed(format!("{option} {}: {why}", path.display()))
    }
}
