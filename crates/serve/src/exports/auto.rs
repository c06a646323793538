//! `--export auto`: the best export that this host offers, and why.
//!
//! Owns the order: ublk, FUSE with loop devices, NBD on a unix socket; and the directory for sockets. Must not know how an
//! export works.

use std::fmt;
use std::fs::DirBuilder;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use export_nbd::Endpoint;

use super::{Context, Export, Kind, Place, SaidBy, Spec, Work, fuse, nbd, ublk};
use crate::failure::Failure;
use crate::message;

/// The option of this kind.
pub(super) const OPTION: &str = "auto";

pub(super) const KIND: Kind = Kind {
    name: OPTION,
    forms: &[(
        OPTION,
        "The best that the host offers: ublk, else files with loop devices over them (FUSE), else an NBD socket.",
    )],
    // Clients reach the volumes by the ways of the kind that it chooses.
    ways: &[],
    parse: |text| (text == OPTION).then(|| Ok(Spec::new(Auto))),
    #[cfg(test)]
    example: |_| Err("it is one of the other kinds".into()),
};

/// The best export that build and host offer.
#[derive(Debug)]
struct Auto;

impl fmt::Display for Auto {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(OPTION)
    }
}

impl Place for Auto {
    fn start<'a>(&'a self, context: &'a Context<'_>) -> Work<'a, Result<Box<dyn Export>, Failure>> {
        Box::pin(start(context))
    }

    fn recovers(&self) -> bool {
        true
    }
}

/// Where the operator chooses the export.
fn choice_of(said_by: SaidBy) -> &'static str {
    match said_by {
        SaidBy::Options => "choose with --export",
        SaidBy::Configuration => "choose with `exports` in the configuration",
    }
}

/// Starts the best export, and logs which one and why.
async fn start(context: &Context<'_>) -> Result<Box<dyn Export>, Failure> {
    let choose = choice_of(context.nbd.said_by);
    let no_ublk = match context.driver.reactor().blocking(ublk::obstacle).await {
        None => match ublk::start(None, context).await {
            Ok(ublk) => {
                message::note(format!("export: ublk ({choose})"));
                return Ok(Box::new(ublk));
            }
            Err(e) if ublk::may_fall_back(&e) => e.to_string(),
            Err(e) => return Err(e.into()),
        },
        Some(why) => why.to_string(),
    };
    let dir = runtime_dir()?;
    let no_fuse = match fuse::obstacle() {
        None => {
            // Some obstacles, such as the rules of a container, show only at the mount.
            match fuse::start(&dir.join(&context.place), true, context).await {
                Ok(fuse) => {
                    message::note(format!("export: FUSE and loop devices: {no_ublk} ({choose})"));
                    return Ok(Box::new(fuse));
                }
                Err(e) => e.to_string(),
            }
        }
        Some(why) => why.to_string(),
    };
    let socket = dir.join(format!("{}.sock", context.place));
    message::note(format!(
        "export: NBD on {}, because block devices are not available: {no_ublk}; by FUSE: {no_fuse} ({choose})",
        socket.display()
    ));
    let socket_text = socket.display().to_string();
    match nbd::start(&Endpoint::Unix(socket), context) {
        Ok(nbd) => Ok(Box::new(nbd)),
        Err(e @ (Failure::Failed(_) | Failure::Caused { .. })) => Err(Failure::because(
            format_args!("no export can start: {no_ublk}; by FUSE: {no_fuse}; NBD on {socket_text}"),
            e,
        )),
        Err(e) => Err(e),
    }
}

/// A directory for sockets and crash logs that no other user can write to.
pub(crate) fn runtime_dir() -> Result<PathBuf, Failure> {
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

/// Why root's directory `/run/ubcache` is not used; `None` if it is.
pub(crate) fn passed_over() -> Option<String> {
    let (euid, dir) = (rustix::process::geteuid().as_raw(), Path::new("/run/ubcache"));
    let refused = private_dir(dir, euid).err().filter(|_| euid == 0)?;
    Some(format!("{} is not used: {refused}; ", dir.display()))
}

/// Makes a directory, or accepts an existing one that belongs to this user alone.
fn private_dir(dir: &Path, euid: u32) -> std::io::Result<()> {
    match DirBuilder::new().mode(0o700).create(dir) {
        Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => return Err(e),
        _ => {}
    }
    let meta = std::fs::symlink_metadata(dir)?;
    if meta.is_dir() && meta.uid() == euid && meta.mode() & 0o022 == 0 {
        return Ok(());
    }
    Err(std::io::Error::other("other users can write to it"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    /// The log of the daemon named an option that the daemon does not have.
    #[test]
    fn the_choice_is_where_the_operator_makes_it() {
        assert_eq!(choice_of(SaidBy::Options), "choose with --export");
        assert_eq!(choice_of(SaidBy::Configuration), "choose with `exports` in the configuration");
        assert!(!export_ublk::UblkError::NoDriver.to_string().contains("--"));
    }

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
