//! `--export auto`: the best export that this build and this host offer, and why.

use std::fs::DirBuilder;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use export_nbd::Endpoint;

use super::Spec;
use crate::failure::Failure;

/// Chooses; the text says what was chosen and why not something better.
pub(super) fn choose(id: &str) -> Result<(Spec, String), Failure> {
    let socket = runtime_dir()?.join(format!("{id}.sock"));
    let why = format!(
        "export: NBD on {}, as this build has neither ublk nor FUSE (choose with --export)",
        socket.display()
    );
    Ok((Spec::Nbd(Endpoint::Unix(socket)), why))
}

/// A directory for sockets that nobody else can write to.
fn runtime_dir() -> Result<PathBuf, Failure> {
    let euid = rustix::process::geteuid().as_raw();
    let user = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|d| d.is_absolute());
    let candidates = [
        (euid == 0).then(|| PathBuf::from("/run/ubcache")),
        user.map(|d| d.join("ubcache")),
        Some(std::env::temp_dir().join(format!("ubcache-{euid}"))),
    ];
    let mut last = None;
    for dir in candidates.into_iter().flatten() {
        match private_dir(&dir, euid) {
            Ok(()) => return Ok(dir),
            Err(e) => last = Some(Failure::at(&dir, "cannot be used for a socket", e)),
        }
    }
    Err(last.unwrap_or_else(|| Failure::Failed("no directory for a socket".into())))
}

/// Makes a directory, or takes one that is there, if it belongs to us alone.
fn private_dir(dir: &Path, euid: u32) -> std::io::Result<()> {
    match DirBuilder::new().mode(0o700).create(dir) {
        Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => return Err(e),
        _ => {}
    }
    let meta = std::fs::symlink_metadata(dir)?;
    if meta.is_dir() && meta.uid() == euid && meta.mode() & 0o022 == 0 {
        return Ok(());
    }
    Err(std::io::Error::other("others can write to it"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_directory_of_others_is_not_taken() {
        let dir = tempfile::tempdir().unwrap();
        let mine = dir.path().join("x");
        let euid = rustix::process::geteuid().as_raw();
        private_dir(&mine, euid).unwrap();
        private_dir(&mine, euid).unwrap();
        std::fs::set_permissions(&mine, PermissionsExt::from_mode(0o777)).unwrap();
        assert!(private_dir(&mine, euid).is_err());
        assert!(private_dir(&dir.path().join("no/such"), euid).is_err());
    }
}
