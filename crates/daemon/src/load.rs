//! The configuration together with the contents of the files that it names.
//!
//! Owns the reading at the start and at a reload: either all settings are valid, or the error names line and file. Must not
//! know what is running.

use std::path::Path;
use std::sync::Arc;

use serve::Failure;
use serve::exports::{TlsConfig, TlsFile};

use crate::config::{self, Config};
use crate::remote::{Remote, in_line};

/// The configuration with the contents of its files.
pub(crate) struct Read {
    pub(crate) config: Config,
    pub(crate) remote: Option<Arc<Remote>>,
    pub(crate) nbd: Option<TlsConfig>,
}

/// Reads the configuration and the files that it names.
///
/// # Errors
/// If a setting is not valid; the message names its line.
pub(crate) fn read(path: &Path) -> Result<Read, Failure> {
    let config = Config::read(path)?;
    let in_file = |e: Failure| Failure::because(path.display(), e);
    let remote = config.tcp.as_ref().map(Remote::load).transpose().map_err(in_file)?;
    let nbd = nbd_tls(&config.nbd).map_err(in_file)?;
    Ok(Read { config, remote: remote.map(Arc::new), nbd })
}

/// TLS for NBD, from the files that the configuration names.
fn nbd_tls(nbd: &config::Nbd) -> Result<Option<TlsConfig>, Failure> {
    let Some((certificate, key)) = &nbd.tls else { return Ok(None) };
    let ca = nbd.client_ca.as_ref();
    let read = serve::exports::read_tls(&certificate.path, &key.path, ca.map(|ca| &*ca.path));
    read.map(Some).map_err(|e| {
        let (setting, file) = match e.file {
            TlsFile::Certificate => ("nbd_tls_certificate", certificate),
            TlsFile::Key => ("nbd_tls_key", key),
            TlsFile::ClientCa => ("nbd_tls_client_ca", ca.unwrap_or(certificate)),
        };
        in_line(setting, file, e)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::errno;

    /// The error of a file that the configuration names was turned into text.
    #[test]
    fn the_error_of_a_named_file_is_the_cause() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("ubcache.toml");
        let missing = std::fs::read("/nowhere/token").expect_err("there is no such file").raw_os_error();
        for text in [
            "listen = [\"127.0.0.1:1\"]\ntoken_file = \"/nowhere/token\"\n",
            "nbd_tls_certificate = \"/nowhere/c\"\nnbd_tls_key = \"/nowhere/k\"\n",
        ] {
            std::fs::write(&path, text).expect("the file is written");
            let failure = read(&path).err().expect(text);
            assert_eq!(errno(&failure), missing, "{failure}");
            assert!(failure.to_string().contains("ubcache.toml: line "), "{failure}");
        }
    }
}
