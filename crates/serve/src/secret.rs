//! Small files that the operator names: certificates, keys, tokens.
//!
//! Owns the checks: a file is a regular file of bounded size, and other users cannot read a secret one. No part of the
//! contents is ever in an error. Must not know what a file is used for.

use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

/// Limit of the bytes of a file.
const FILE_BYTES: u64 = 256 << 10;

/// The reason why such a file cannot be used. The message does not name the path.
#[derive(Debug, thiserror::Error)]
pub enum SecretError {
    /// The system does not open it.
    #[error("cannot be opened: {0}")]
    Open(#[source] io::Error),
    /// The system does not say what it is.
    #[error("cannot be examined: {0}")]
    Examine(#[source] io::Error),
    /// The system does not read it.
    #[error("cannot be read: {0}")]
    Read(#[source] io::Error),
    /// It is not a file, or too large.
    #[error("expected a file of at most {} KiB", FILE_BYTES >> 10)]
    NotAFile,
    /// It is secret, and its mode lets every user read it.
    #[error("can be read by every user (mode {mode:04o}): expected 0600 or 0640")]
    Public {
        /// Its mode.
        mode: u32,
    },
    /// It is secret, and another user can change it.
    #[error("belongs to user {found}: expected root or user {expected}")]
    Owner {
        /// Its user.
        found: u32,
        /// The user of this process.
        expected: u32,
    },
}

/// The contents of a file that others may know.
///
/// # Errors
/// If it cannot be read.
pub fn read_public(path: &Path) -> Result<Vec<u8>, SecretError> {
    bytes_of(path, |_| Ok(()))
}

/// The contents of a secret file.
///
/// # Errors
/// If it cannot be read, can be read by every user, or belongs to another user.
pub fn read_private(path: &Path) -> Result<Vec<u8>, SecretError> {
    let expected = rustix::process::geteuid().as_raw();
    bytes_of(path, |about| {
        if about.mode() & 0o007 != 0 {
            return Err(SecretError::Public { mode: about.mode() & 0o7777 });
        }
        if about.uid() != 0 && about.uid() != expected {
            return Err(SecretError::Owner { found: about.uid(), expected });
        }
        Ok(())
    })
}

fn bytes_of(
    path: &Path,
    allowed: impl FnOnce(&Metadata) -> Result<(), SecretError>,
) -> Result<Vec<u8>, SecretError> {
    // A pipe would be waited for.
    let nonblocking = i32::try_from(rustix::fs::OFlags::NONBLOCK.bits()).unwrap_or(0);
    let file = File::options().read(true).custom_flags(nonblocking).open(path);
    let file = file.map_err(SecretError::Open)?;
    let about = file.metadata().map_err(SecretError::Examine)?;
    if !about.is_file() || about.len() > FILE_BYTES {
        return Err(SecretError::NotAFile);
    }
    allowed(&about)?;
    let mut bytes = Vec::new();
    file.take(FILE_BYTES).read_to_end(&mut bytes).map_err(SecretError::Read)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    /// A caller can tell a missing file from one with a wrong mode.
    #[test]
    fn the_reason_has_its_kind() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("key");
        let missing =
            |e: SecretError| matches!(e, SecretError::Open(e) if e.kind() == io::ErrorKind::NotFound);
        assert!(missing(read_private(&path).expect_err("there is no file")));
        std::fs::write(&path, "secret").expect("the file is written");
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o644)).expect("the mode is set");
        assert!(matches!(read_private(&path), Err(SecretError::Public { mode: 0o644 })));
        assert_eq!(read_public(&path).expect("it is open to all"), b"secret");
        assert!(matches!(read_public(dir.path()), Err(SecretError::NotAFile)));
    }
}
