//! `--export fuse=DIR`: every volume is a file in a directory and, if root may make one, a loop device over it.
//!
//! Owns the mount and its directory. Must not know FUSE.

use std::any::Any;
use std::fmt;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

use engine::VolumeRef;
use export_fuse::{FuseError, FuseOptions, PunchHole, ServeOptions, probe, serve};
use io::{Handle, Nanos};

use super::spec::SpecError;
use super::{Context, Export, Force, Kind, Occupied, Opens, Place, Spec, Way, WayKind, Work};
use crate::failure::{Failure, failed};
use crate::message;

/// Time between two attempts to stop a volume that is in use.
const AGAIN: Nanos = Nanos::from_ms(500);

pub(super) const KIND: Kind = Kind {
    name: "fuse",
    forms: &[(
        "fuse=DIR",
        "Each volume is a file in this directory, and, as root, a loop device over the file.",
    )],
    ways: &[&LOOP, &FILE],
    parse,
    #[cfg(test)]
    example: |dir| match probe().fuse {
        Ok(()) => Ok(option(&dir.join("mnt"))),
        Err(why) => Err(why.to_string()),
    },
};

pub(super) static LOOP: WayKind = WayKind { name: "loop", opens: Opens::BlockDevice { prefix: "loop" } };
pub(super) static FILE: WayKind = WayKind { name: "fuse", opens: Opens::File };

failed!(FuseError);

const PREFIX: &str = "fuse=";

/// The option that names this directory.
pub(super) fn option(dir: &Path) -> String {
    format!("{PREFIX}{}", dir.display())
}

fn parse(text: &str) -> Option<Result<Spec, SpecError>> {
    let dir = text.strip_prefix(PREFIX).filter(|dir| !dir.is_empty())?;
    Some(Ok(Spec::new(Dir(PathBuf::from(dir)))))
}

/// A directory in which the volumes are files, with loop devices on them.
#[derive(Debug)]
struct Dir(PathBuf);

impl fmt::Display for Dir {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&option(&self.0))
    }
}

impl Place for Dir {
    fn start<'a>(&'a self, context: &'a Context<'_>) -> Work<'a, Result<Box<dyn Export>, Failure>> {
        Box::pin(async { Ok(Box::new(start(&self.0, false, context).await?) as Box<dyn Export>) })
    }

    fn prepare(&self) -> Result<(), Failure> {
        match std::fs::create_dir_all(&self.0) {
            // The mount of a process that was killed is there. Nothing can look into it, and the start removes it.
            Err(e) if e.kind() == ErrorKind::AlreadyExists && is_not_connected(&self.0) => Ok(()),
            made => made.map_err(|e| Failure::at(&self.0, "cannot be made", e)),
        }
    }

    fn overlaps(&self, other: &dyn Place) -> bool {
        (other as &dyn Any).downcast_ref::<Dir>().is_some_and(|other| self.0 == other.0)
    }
}

/// Whether the path is the mount of a FUSE file system whose process has ended.
fn is_not_connected(path: &Path) -> bool {
    std::fs::metadata(path).is_err_and(|e| e.kind() == ErrorKind::NotConnected)
}

/// A mounted directory of volumes.
pub(super) struct Fuse {
    fuse: export_fuse::Fuse,
    rt: Handle,
    /// The directory, if it was made for this run; it is removed at the end.
    own_dir: Option<PathBuf>,
}

/// Why the host cannot offer block devices this way; `None` if it can.
pub(crate) fn obstacle() -> Option<Arc<FuseError>> {
    let host = probe();
    host.fuse.and(host.loop_device).err()
}

/// Mounts the volumes at `dir`. `own`: the directory was made for this run.
pub(crate) async fn start(dir: &Path, own: bool, context: &Context<'_>) -> Result<Fuse, Failure> {
    let rt = context.driver.handle();
    let served = |v: &Rc<engine::Volume>| {
        // Writes of zeros and discards reach the backing device. A flash-only volume only drops its data.
        let punch_hole = v.backing_name().map_or(PunchHole::Zero, |b| PunchHole::for_device(Path::new(&b)));
        let options = ServeOptions { punch_hole, ..ServeOptions::default() };
        serve(&rt, Rc::new(VolumeRef(v.clone())), options)
    };
    let volumes = context.volumes.iter().map(served).collect();
    let fuse = export_fuse::Fuse::mount(
        dir,
        volumes,
        FuseOptions { limits: crate::pressure::fuse_limits(), ..FuseOptions::default() },
    )
    .await?;
    for note in fuse.notes() {
        message::note(note);
    }
    let mut this = Fuse { fuse, rt, own_dir: own.then(|| dir.to_path_buf()) };
    if let Err(why) = probe().loop_device {
        message::note(format!("no block devices, only files: {why}"));
        return Ok(this);
    }
    match this.fuse.attach_loop_devices().await {
        Ok(()) => Ok(this),
        Err(e) => {
            let _ = this.take_away().await;
            Err(e.into())
        }
    }
}

impl Export for Fuse {
    fn ways(&self, volume: &str) -> Vec<Way> {
        let Some(exported) = self.fuse.exports().find(|e| e.name == volume) else { return Vec::new() };
        let way = |kind: &'static WayKind, path: &Path| Way { kind, address: path.display().to_string() };
        let device = exported.loop_device.iter().map(|d| way(&LOOP, d));
        device.chain([way(&FILE, &exported.file)]).collect()
    }

    /// Waits while a volume is in use: a stop would lose data that a program has not written yet.
    fn stop(mut self: Box<Self>, _force: &Force) -> Work<'_, Result<(), Failure>> {
        Box::pin(async move {
            let mut warned_of = String::new();
            loop {
                match self.fuse.stop().await {
                    Ok(()) => break,
                    Err(refused) => {
                        let refused = *refused;
                        self.fuse = refused.fuse;
                        let why = refused.error.to_string();
                        if !in_use(&refused.error) {
                            return Err(refused.error.into());
                        }
                        if why != warned_of {
                            message::warn(format!(
                                "{why}: waiting until it is no longer in use; unmount it to continue"
                            ));
                            warned_of = why;
                        }
                        self.rt.sleep(AGAIN).await;
                    }
                }
            }
            remove(self.own_dir.as_deref());
            Ok(())
        })
    }

    fn stop_if_free(mut self: Box<Self>) -> Work<'static, Result<(), Occupied>> {
        Box::pin(async move {
            if let Err(refused) = self.fuse.stop().await {
                let refused = *refused;
                self.fuse = refused.fuse;
                if in_use(&refused.error) {
                    return Err(Occupied { why: refused.error.into(), export: self });
                }
                // The volume has no users. A later attempt would fail in the same way: a device that is gone takes no
                // data of the loop device's page cache.
                message::warn(format!("{}; data that was not written back is lost", refused.error));
                let _ = self.take_away().await;
                return Ok(());
            }
            remove(self.own_dir.as_deref());
            Ok(())
        })
    }

    fn can_be_handed_over(&self) -> bool {
        false
    }

    fn hand_over(self: Box<Self>) -> Work<'static, Option<Box<dyn Export>>> {
        Box::pin(async { Some(self as Box<dyn Export>) })
    }
}

impl Fuse {
    /// Stops at once, even if volumes are in use.
    async fn take_away(self) -> Result<(), Failure> {
        let stopped = self.fuse.stop_by_force().await;
        remove(self.own_dir.as_deref());
        stopped?.into_iter().for_each(message::warn);
        Ok(())
    }
}

fn in_use(e: &FuseError) -> bool {
    matches!(e, FuseError::FilesInUse { .. } | FuseError::LoopInUse { .. })
}

fn remove(dir: Option<&Path>) {
    if let Some(dir) = dir {
        // A directory that is not empty stays.
        let _ = std::fs::remove_dir(dir);
    }
}
