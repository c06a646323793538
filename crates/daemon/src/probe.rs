//! Probes of devices: what the superblock of a device says.
//!
//! Owns the reading of a superblock and the scan of the host's block devices. Nothing here writes. Every probe has a thread
//! of its own and a deadline, so a device that hangs delays no other. Must not know what a probe is used for.

use std::error::Error;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use format::superblock::{SUPERBLOCK_BYTES, SUPERBLOCK_SECTOR};
use format::{BackingState, SECTOR_BYTES, Sector};
use inspect::{DeviceSuper, FileSource, ReadAt};
use serve::Failure;
use serve::superblock::HEAD;

use crate::identity::Identity;

/// Time limit for reading a superblock.
const PROBE_WITHIN: Duration = Duration::from_secs(15);

/// The role of a device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Role {
    /// Cache device of this set, which has a label, too, and the group of the set.
    Cache { set: String, label: String, group: Option<String> },
    /// Backing device; the set in its superblock, if any, and its relation to that set.
    Backing { set: Option<String>, attachment: Attachment, label: String },
}

/// The relation of a backing device to the set whose UUID is in its superblock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Attachment {
    /// It belongs to no set.
    Free,
    /// It was made together with the set and has never been attached.
    Made,
    /// It was served without the set since it was attached.
    Stale,
    /// Attached.
    Clean,
    /// Attached, with dirty data in the cache.
    Dirty,
}

/// A device with a superblock of bcache.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Probe {
    /// Path of the device, without links.
    pub(crate) path: PathBuf,
    pub(crate) uuid: String,
    pub(crate) role: Role,
    /// Number that distinguishes this block device from a later one with the same name; `None` for files.
    pub(crate) appearance: Option<u64>,
    /// Hardware or file of the device, which distinguishes the device from its copies.
    pub(crate) identity: Identity,
    /// Sequence number of the superblock.
    pub(crate) sequence: u64,
    /// Bytes before the data of a backing device.
    pub(crate) data_offset_bytes: u64,
    /// Whether the superblock of a backing device says that a second set has a copy of its dirty data.
    pub(crate) has_copy: bool,
}

impl Probe {
    /// Label of the device, or of the set of a cache device; empty if there is none.
    pub(crate) fn label(&self) -> &str {
        let (Role::Cache { label, .. } | Role::Backing { label, .. }) = &self.role;
        label
    }

    /// Key of the device in the state: the UUID of the set for a cache device, else the UUID of the device.
    pub(crate) fn key(&self) -> &str {
        match &self.role {
            Role::Cache { set, .. } => set,
            Role::Backing { .. } => &self.uuid,
        }
    }

    /// Whether the superblock says that the cache has data which the device does not have.
    pub(crate) fn is_dirty(&self) -> bool {
        matches!(self.role, Role::Backing { attachment: Attachment::Dirty, .. })
    }

    /// UUID of the set in the superblock of a backing device.
    pub(crate) fn set(&self) -> Option<&str> {
        match &self.role {
            Role::Cache { .. } => None,
            Role::Backing { set, .. } => set.as_deref(),
        }
    }

    /// Whether this block device was unplugged: its name is free, or another device has it.
    pub(crate) fn is_unplugged(&self) -> bool {
        self.appearance.is_some() && self.appearance != appearance(&self.path)
    }
}

/// The number that the kernel gives to a disk when it appears and never again; for a partition the number of its disk.
fn appearance(path: &Path) -> Option<u64> {
    let name = path.strip_prefix("/dev").ok()?.to_string_lossy().replace('/', "!");
    let about = Path::new("/sys/class/block").join(name).canonicalize().ok()?;
    let number = |dir: &Path| std::fs::read_to_string(dir.join("diskseq")).ok()?.trim().parse().ok();
    number(&about).or_else(|| number(about.parent()?))
}

/// The size of a block device or file now, without opening it; `None` if it is not there.
pub(crate) fn size_bytes(path: &Path) -> Option<u64> {
    let meta = std::fs::metadata(path).ok()?;
    if meta.is_file() {
        return Some(meta.len());
    }
    // The path can be a link, such as those in /dev/disk/by-id.
    let (major, minor) = (rustix::fs::major(meta.rdev()), rustix::fs::minor(meta.rdev()));
    let sectors = std::fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/size")).ok()?;
    sectors.trim().parse::<u64>().ok()?.checked_mul(SECTOR_BYTES)
}

/// The error of a device that can be read and has no superblock of bcache.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
struct WithoutSuperblock {
    text: String,
    identity: Identity,
    source: inspect::SuperblockError,
}

/// The identity of a device without a superblock of bcache, which fails each time that it is registered; `None` if this is
/// another failure.
pub(crate) fn without_superblock<'a>(failure: &'a (dyn Error + 'static)) -> Option<&'a Identity> {
    let mut causes = std::iter::successors(Some(failure), |&e| e.source());
    causes.find_map(|e| e.downcast_ref::<WithoutSuperblock>()).map(|found| &found.identity)
}

/// What to say of a device without a superblock of bcache; `None` if it has one.
fn found_instead(path: &Path, source: &FileSource) -> Option<String> {
    let mut bytes = [0; SUPERBLOCK_BYTES];
    let is_read = source.read_at(SUPERBLOCK_SECTOR, &mut bytes).is_ok();
    if !is_read || format::identify(&bytes) != format::Identity::NotBcache {
        return None;
    }
    let found = match blockio::probe_signature(path) {
        Ok(Some(signature)) => signature.to_string(),
        _ => "none".to_owned(),
    };
    Some(format!(
        "{}: expected a superblock of bcache, found {found}; a new device gets one by `ubcache make`, which loses what is on it",
        path.display()
    ))
}

fn probe_now(path: &Path) -> Result<Probe, Failure> {
    let path = path.canonicalize().map_err(|e| Failure::at(path, "cannot be found", e))?;
    let appearance = appearance(&path);
    let source = FileSource::open(&path)?;
    serve::superblock::has_room(&source)?;
    let mut identity = Identity::of(&path);
    let superblock = inspect::read_superblock(&source).map_err(|e| match found_instead(&path, &source) {
        Some(text) => Failure::of(WithoutSuperblock { text, identity: identity.clone(), source: e }),
        None => Failure::of(e),
    })?;
    let mut has_copy = false;
    let (uuid, sequence, role, data_offset) = match superblock {
        DeviceSuper::Cache(sb) => {
            let uuid = sb.uuid().to_string();
            identity = identity.with_cache(&uuid);
            let group = sb.group().map(|group| group.to_string());
            let role = Role::Cache { set: sb.set_uuid().to_string(), label: sb.label(), group };
            (uuid, sb.seq(), role, Sector(0))
        }
        DeviceSuper::Backing(sb) => {
            let attachment = match sb.state() {
                _ if sb.set_uuid() == format::Uuid::NIL => Attachment::Free,
                BackingState::None => Attachment::Made,
                BackingState::Stale => Attachment::Stale,
                BackingState::Clean => Attachment::Clean,
                BackingState::Dirty => Attachment::Dirty,
            };
            has_copy = sb.copy().is_some() && matches!(attachment, Attachment::Clean | Attachment::Dirty);
            let set = (attachment != Attachment::Free).then(|| sb.set_uuid().to_string());
            let role = Role::Backing { set, attachment, label: sb.label() };
            (sb.uuid().to_string(), sb.seq(), role, sb.data_offset())
        }
    };
    let data_offset_bytes = data_offset.0.saturating_mul(SECTOR_BYTES);
    Ok(Probe { path, uuid, role, appearance, identity, sequence, data_offset_bytes, has_copy })
}

/// Probes a device.
///
/// # Errors
/// If the device has no superblock of bcache, cannot be read, or does not answer in time.
pub(crate) async fn probe_device(path: &Path) -> Result<Probe, Failure> {
    let owned = path.to_owned();
    let probed = tokio::task::spawn_blocking(move || probe_now(&owned));
    match tokio::time::timeout(PROBE_WITHIN, probed).await {
        Ok(Ok(probe)) => probe,
        Ok(Err(e)) => Err(Failure::at(path, "cannot be probed", e)),
        Err(_) => Err(Failure::Failed(format!(
            "{}: reading the superblock took longer than {} seconds",
            path.display(),
            PROBE_WITHIN.as_secs()
        ))),
    }
}

/// Probes many devices concurrently. The results have the order of the paths.
pub(crate) async fn probe_all(paths: Vec<PathBuf>) -> Vec<(PathBuf, Result<Probe, Failure>)> {
    let probes: Vec<_> = paths
        .into_iter()
        .map(|path| {
            let owned = path.clone();
            (path, tokio::spawn(async move { probe_device(&owned).await }))
        })
        .collect();
    let mut probed = Vec::new();
    for (path, probe) in probes {
        let result = probe.await.unwrap_or_else(|e| Err(Failure::at(&path, "cannot be probed", e)));
        probed.push((path, result));
    }
    probed
}

/// Whether a device with this name may be probed without a command.
///
/// The devices of ubcache itself, of the kernel's bcache, loop devices and drives with removable media are not probed.
pub(crate) fn may_be_ours(name: &OsStr) -> bool {
    let name = name.as_bytes();
    let mut others = serve::exports::device_prefixes().chain(["bcache", "loop", "fd", "sr"]);
    !others.any(|prefix| name.starts_with(prefix.as_bytes()))
}

/// The block devices of this host that may hold a superblock.
pub(crate) fn block_devices() -> Vec<PathBuf> {
    let large_enough = |path: &PathBuf| FileSource::open(path).is_ok_and(|s| s.sectors() >= HEAD);
    let mut found: Vec<PathBuf> = std::fs::read_dir("/sys/class/block")
        .into_iter()
        .flatten()
        .flatten()
        .map(|e| Path::new("/dev").join(e.file_name()))
        .filter(|p| p.file_name().is_some_and(may_be_ours))
        .filter(large_enough)
        .collect();
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A path of `/dev/disk/by-id` is a link, so its name says nothing about the device.
    #[test]
    fn the_size_of_a_device_is_found_through_a_link() {
        use std::io::{Seek, SeekFrom};
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("file");
        std::fs::write(&file, vec![0; 5000]).expect("the file is written");
        assert_eq!(size_bytes(&file), Some(5000));
        assert_eq!(size_bytes(&dir.path().join("missing")), None);
        let mut names = std::fs::read_dir("/sys/class/block").into_iter().flatten().flatten();
        let device = names.find_map(|entry| {
            let path = Path::new("/dev").join(entry.file_name());
            let size = std::fs::File::open(&path).ok()?.seek(SeekFrom::End(0)).ok()?;
            (size > 0).then_some((path, size))
        });
        let Some((path, size)) = device else {
            return rig::skipped(format_args!("no block device can be read"));
        };
        let link = dir.path().join("by-id");
        std::os::unix::fs::symlink(path, &link).expect("a link");
        assert_eq!(size_bytes(&link), Some(size));
    }

    /// The finding about a superblock was turned into text.
    #[test]
    fn a_bad_superblock_is_the_cause() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("hdd");
        std::fs::write(&path, vec![0; 1 << 20]).expect("the file is written");
        let failure = probe_now(&path).expect_err("it has no superblock");
        assert_eq!(without_superblock(&failure), Some(&Identity::of(&path)), "{failure:?}");
        let of_file = probe_now(&dir.path().join("missing")).expect_err("there is no such file");
        assert_eq!(without_superblock(&of_file), None, "{of_file:?}");
        let cause = failure.source().and_then(Error::source);
        let cause = cause.and_then(|e| e.downcast_ref::<inspect::SuperblockError>());
        assert!(matches!(cause, Some(inspect::SuperblockError::Broken(_))), "{failure:?}");
        let words =
            "hdd: expected a superblock of bcache, found none; a new device gets one by `ubcache make`";
        assert!(failure.message().expect("a message").contains(words), "{failure:?}");
    }

    /// The message began with the severity of a finding, ended with the name of an invariant and named the device twice.
    #[test]
    fn a_cache_device_that_was_cut_is_named_once() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = crate::testing::cache_device(dir.path(), 2);
        std::fs::OpenOptions::new()
            .write(true)
            .open(&path)
            .and_then(|f| f.set_len(1 << 19))
            .expect("it is cut");
        let failure = probe_now(&path).expect_err("its buckets lie behind its end");
        let said = failure.message().expect("a message");
        assert!(said.starts_with(&path.display().to_string()) && !said.contains('['), "{said}");
        assert!(said.contains("limited by the size of the device"), "{said}");
        assert_eq!(said.matches(&*path.to_string_lossy()).count(), 1, "{said}");
    }

    #[test]
    fn a_device_with_the_same_name_is_another_one() {
        let dir = tempfile::tempdir().unwrap();
        let file = probe_now(&crate::testing::cache_device(dir.path(), 2)).unwrap();
        assert!(file.appearance.is_none() && !file.is_unplugged(), "files do not come and go");
        // Every Linux host has some block device. Kernels before 5.15 do not number them.
        let numbered = std::fs::read_dir("/sys/class/block").into_iter().flatten().flatten().find_map(|e| {
            let path = Path::new("/dev").join(e.file_name());
            appearance(&path).map(|number| (path, number))
        });
        let Some((path, number)) = numbered else {
            return rig::skipped_in_part("no block device in /sys/class/block has a sequence number");
        };
        let there = Probe { path, appearance: Some(number), ..file };
        assert!(!there.is_unplugged());
        assert!(Probe { appearance: Some(number + 1), ..there.clone() }.is_unplugged(), "an earlier one");
        assert!(Probe { path: "/dev/none".into(), ..there }.is_unplugged());
    }

    #[test]
    fn a_device_says_what_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let cache = crate::testing::cache_device(dir.path(), 2);
        let probe = probe_now(&cache).unwrap();
        assert!(matches!(&probe.role, Role::Cache { set, .. } if set.starts_with("02020202-")));
        let other = dir.path().join("other");
        std::fs::write(&other, vec![0; 1 << 16]).unwrap();
        assert!(probe_now(&other).unwrap_err().message().unwrap().contains("other"));
        assert!(
            probe_now(&dir.path().join("none")).unwrap_err().message().unwrap().contains("cannot be found")
        );
    }
}
