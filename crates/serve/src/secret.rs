//! Small files that the operator names: certificates, keys, tokens.
//!
//! Owns the checks: a file is a regular file of bounded size, and other users cannot read a secret one. No part of the
//! contents is ever in an error. Must not know what a file is used for.

use std::fs::{File, Metadata};
use std::io::Read;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

/// Limit of the bytes of a file.
const FILE_BYTES: u64 = 256 << 10;

/// The contents of a file that is not secret.
///
/// # Errors
/// If the file cannot be read; the text has the reason without the path.
pub fn read_public(path: &Path) -> Result<Vec<u8>, String> {
    bytes_of(path, |_| Ok(()))
}

/// The contents of a secret file.
///
/// # Errors
/// If it cannot be read, can be read by every user, or belongs to another user; the text names the reason without the path.
pub fn read_private(path: &Path) -> Result<Vec<u8>, String> {
    let own_uid = rustix::process::geteuid().as_raw();
    bytes_of(path, |about| {
        if about.mode() & 0o007 != 0 {
            let mode = about.mode() & 0o7777;
            return Err(format!("can be read by every user (mode {mode:04o}): expected 0600 or 0640"));
        }
        if about.uid() != 0 && about.uid() != own_uid {
            return Err(format!("belongs to user {}: expected root or user {own_uid}", about.uid()));
        }
        Ok(())
    })
}

fn bytes_of(path: &Path, allowed: impl FnOnce(&Metadata) -> Result<(), String>) -> Result<Vec<u8>, String> {
    // Without this flag, the open of a pipe would block.
    let nonblocking = i32::try_from(rustix::fs::OFlags::NONBLOCK.bits()).unwrap_or(0);
    let file = File::options().read(true).custom_flags(nonblocking).open(path);
    let file = file.map_err(|e| format!("cannot be opened: {e}"))?;
    let about = file.metadata().map_err(|e| format!("cannot be examined: {e}"))?;
    if !about.is_file() || about.len() > FILE_BYTES {
        return Err(format!("expected a file of at most {} KiB", FILE_BYTES >> 10));
    }
    allowed(&about)?;
    let mut bytes = Vec::new();
    file.take(FILE_BYTES).read_to_end(&mut bytes).map_err(|e| format!("cannot be read: {e}"))?;
    Ok(bytes)
}
