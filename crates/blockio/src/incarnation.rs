//! The incarnation of a device: distinguishes a device from its replacement, and from itself after a power loss.
//!
//! A crash log outlives a process, and names data that may be only in a device's volatile cache. The log is valid only while
//! that cache has lost nothing. The kernel numbers each appearance of a disk (`diskseq`, Linux 5.15). A disk that was
//! unplugged and plugged in again has another number, and so has the disk under a file system that was mounted again.
//!
//! Some devices can lose their cache and keep their number. A network target can restart while the initiator retries. The
//! process behind a ublk device or a FUSE file system can restart too. The incarnation of such a device is unknown, unless
//! the device reports that it has no volatile cache (`queue/write_cache`): then every completed write is durable.
//!
//! Owns the reading of sysfs for this purpose. Must not know the crash log.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::mountinfo;

/// The incarnation of the volatile cache of a device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Incarnation {
    /// As long as this text is the same, the device has lost no completed write.
    Known(String),
    /// Nothing shows whether the device has lost completed writes; the text is the reason.
    Unknown(String),
}

/// Maximum number of levels of stacked devices.
const MOST_LEVELS: usize = 16;

/// Types of file systems in memory (tmpfs, ramfs), which lose their contents only with the host.
const IN_MEMORY: [u64; 2] = [0x0102_1994, 0x8584_58f6];
/// Types of file systems on block devices: ext2 to ext4, XFS, F2FS, btrfs.
const ON_BLOCK_DEVICES: [u64; 4] = [0xef53, 0x5846_5342, 0xf2f5_2010, BTRFS];
const BTRFS: u64 = 0x9123_683e;

/// Prefixes of the names of block devices that another host, another process or ZFS serves.
const SERVED_BY_OTHERS: [&str; 5] = ["nbd", "rbd", "drbd", "ublkb", "zd"];

/// The incarnation of a block device, or of the device under a file.
///
/// # Errors
/// If the incarnation cannot be read now, for example without a free descriptor.
pub fn incarnation(path: &Path) -> io::Result<Incarnation> {
    match (Host { sys: "/sys".into() }.of(path)) {
        Err(e) if is_absent(&e) => Ok(Incarnation::Unknown(format!("{}: {e}", path.display()))),
        other => other,
    }
}

/// The sysfs of a host; tests use a directory of their own.
struct Host {
    sys: PathBuf,
}

/// Major and minor number of a device.
type DeviceNumber = (u32, u32);

fn numbers(dev: u64) -> DeviceNumber {
    (rustix::fs::major(dev), rustix::fs::minor(dev))
}

impl Host {
    fn of(&self, path: &Path) -> io::Result<Incarnation> {
        let meta = fs::metadata(path)?;
        if meta.file_type().is_block_device() {
            return self.of_block_device(numbers(meta.rdev()), 0);
        }
        let file_system = rustix::fs::statfs(path)?.f_type as u64;
        self.of_file(path, &meta, file_system, 0)
    }

    /// The incarnation of a file: that of the device on which its file system lies.
    fn of_file(
        &self,
        path: &Path,
        meta: &fs::Metadata,
        file_system: u64,
        level: usize,
    ) -> io::Result<Incarnation> {
        if IN_MEMORY.contains(&file_system) {
            return Ok(Incarnation::Known(format!("memory {:x}:{:x}", meta.dev(), meta.ino())));
        }
        if !ON_BLOCK_DEVICES.contains(&file_system) {
            let path = path.display();
            return Ok(Incarnation::Unknown(format!("{path}: file system of type {file_system:#x}")));
        }
        let below = match numbers(meta.dev()) {
            anonymous @ (0, _) => match mounted_from(anonymous)? {
                Some(device) => numbers(fs::metadata(device)?.rdev()),
                None => {
                    let path = path.display();
                    return Ok(Incarnation::Unknown(format!("{path}: its file system names no device")));
                }
            },
            device => device,
        };
        if file_system == BTRFS {
            return self.of_btrfs(below, level);
        }
        self.of_block_device(below, level + 1)
    }

    /// The incarnations of all devices of the btrfs to which `member` belongs.
    fn of_btrfs(&self, member: DeviceNumber, level: usize) -> io::Result<Incarnation> {
        let name = self.directory(member)?.file_name().map(ToOwned::to_owned).unwrap_or_default();
        for file_system in fs::read_dir(self.sys.join("fs/btrfs"))? {
            let devices = file_system?.path().join("devices");
            if devices.join(&name).exists() {
                return self.of_all(&devices, level);
            }
        }
        Ok(Incarnation::Unknown(format!("{}: not among the devices of a btrfs", name.display())))
    }

    fn directory(&self, (major, minor): DeviceNumber) -> io::Result<PathBuf> {
        fs::canonicalize(self.sys.join(format!("dev/block/{major}:{minor}")))
    }

    fn of_block_device(&self, device: DeviceNumber, level: usize) -> io::Result<Incarnation> {
        let mut directory = self.directory(device)?;
        if directory.join("partition").exists()
            && let Some(disk) = directory.parent()
        {
            directory = disk.to_path_buf();
        }
        let name = directory.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if level > MOST_LEVELS {
            return Ok(Incarnation::Unknown(format!("{name}: more than {MOST_LEVELS} levels of devices")));
        }
        let Some(diskseq) = read(&directory.join("diskseq"))? else {
            return Ok(Incarnation::Unknown(format!("{name}: no diskseq, which Linux has from 5.15 on")));
        };
        let own = format!("{name} {diskseq}");
        let below = directory.join("slaves");
        if has_members(&below)? {
            return Ok(join(own, self.of_all(&below, level)?));
        }
        if let Some(file) = read(&directory.join("loop/backing_file"))? {
            return self.of_loop_device(own, Path::new(&file), level);
        }
        if read(&directory.join("queue/write_cache"))?.is_some_and(|kind| kind == "write through") {
            return Ok(Incarnation::Known(own));
        }
        Ok(match reached_over(&directory, &name)? {
            None => Incarnation::Known(own),
            Some(how) => {
                Incarnation::Unknown(format!("{name}: has a volatile cache and is reached over {how}"))
            }
        })
    }

    fn of_loop_device(&self, own: String, file: &Path, level: usize) -> io::Result<Incarnation> {
        let meta = match fs::metadata(file) {
            Ok(meta) => meta,
            Err(e) if is_absent(&e) => {
                return Ok(Incarnation::Unknown(format!("{own}: its file {} is not there", file.display())));
            }
            Err(e) => return Err(e),
        };
        let below = match meta.file_type().is_block_device() {
            true => self.of_block_device(numbers(meta.rdev()), level + 1)?,
            false => self.of_file(file, &meta, rustix::fs::statfs(file)?.f_type as u64, level + 1)?,
        };
        Ok(join(own, below))
    }

    /// The incarnations of all devices that have a link in `directory`.
    fn of_all(&self, directory: &Path, level: usize) -> io::Result<Incarnation> {
        let mut members = Vec::new();
        for member in fs::read_dir(directory)? {
            let path = member?.path();
            let text = read(&path.join("dev"))?;
            let device = text.as_deref().and_then(|t| t.split_once(':'));
            let device = device.and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
            match device {
                Some(device) => members.push(self.of_block_device(device, level + 1)?),
                None => return Ok(Incarnation::Unknown(format!("{}: not a device", path.display()))),
            }
        }
        let mut words = Vec::new();
        for member in members {
            match member {
                Incarnation::Known(word) => words.push(word),
                unknown => return Ok(unknown),
            }
        }
        words.sort();
        Ok(Incarnation::Known(words.join(", ")))
    }
}

/// The device from which a file system without a device number of its own is mounted.
fn mounted_from(file_system: DeviceNumber) -> io::Result<Option<PathBuf>> {
    let mount = mountinfo::mounts()?.into_iter().find(|m| m.device == file_system);
    Ok(mount.map(|m| PathBuf::from(m.source)).filter(|source| source.starts_with("/dev")))
}

/// One line of sysfs; `None` if the file does not exist or is empty. Any other failure is an error.
fn read(path: &Path) -> io::Result<Option<String>> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text.trim().to_owned()).filter(|text| !text.is_empty())),
        Err(e) if is_absent(&e) => Ok(None),
        Err(source) => Err(io::Error::new(source.kind(), ReadFailed { path: path.to_owned(), source })),
    }
}

/// A file of sysfs cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("{}: {source}", path.display())]
struct ReadFailed {
    path: PathBuf,
    source: io::Error,
}

/// Whether a directory of sysfs exists and is not empty.
fn has_members(path: &Path) -> io::Result<bool> {
    match fs::read_dir(path) {
        Ok(mut members) => Ok(members.next().is_some()),
        Err(e) if is_absent(&e) => Ok(false),
        Err(e) => Err(e),
    }
}

fn is_absent(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

fn join(own: String, below: Incarnation) -> Incarnation {
    match below {
        Incarnation::Known(below) => Incarnation::Known(format!("{own} on {below}")),
        unknown => unknown,
    }
}

/// The network or process between the host and the disk, if there is one.
fn reached_over(directory: &Path, name: &str) -> io::Result<Option<String>> {
    let served = |driver: &&str| {
        name.strip_prefix(driver).is_some_and(|number| number.starts_with(|c: char| c.is_ascii_digit()))
    };
    if let Some(driver) = SERVED_BY_OTHERS.iter().find(|driver| served(driver)) {
        return Ok(Some((*driver).to_owned()));
    }
    let part = |prefix: &str| {
        directory.components().any(|c| c.as_os_str().to_str().is_some_and(|c| c.starts_with(prefix)))
    };
    if part("session") {
        return Ok(Some("iSCSI".into()));
    }
    if part("rport-") {
        return Ok(Some("Fibre Channel".into()));
    }
    if name.starts_with("nvme") {
        let transports = nvme_transports(&directory.join("device"))?;
        let remote = transports.iter().find(|transport| *transport != "pcie");
        return Ok(match (remote, transports.is_empty()) {
            (Some(remote), _) => Some(format!("NVMe {remote}")),
            (None, true) => Some("an NVMe transport that the kernel does not name".into()),
            (None, false) => None,
        });
    }
    Ok(None)
}

/// The transports of a namespace's controllers: of its single controller, or of each controller of its subsystem.
fn nvme_transports(device: &Path) -> io::Result<Vec<String>> {
    if let Some(transport) = read(&device.join("transport"))? {
        return Ok(vec![transport]);
    }
    let mut transports = Vec::new();
    if has_members(device)? {
        for member in fs::read_dir(device)? {
            transports.extend(read(&member?.path().join("transport"))?);
        }
    }
    Ok(transports)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// A simulated sysfs.
    struct Tree(tempfile::TempDir);

    impl Tree {
        fn new() -> Tree {
            let tree = Tree(tempfile::tempdir().unwrap());
            fs::create_dir_all(tree.0.path().join("dev/block")).unwrap();
            tree
        }

        fn host(&self) -> Host {
            Host { sys: self.0.path().into() }
        }

        /// Adds a disk at `place` below `devices`, with some attributes.
        fn disk(&self, (major, minor): DeviceNumber, place: &str, attributes: &[(&str, &str)]) {
            let directory = self.0.path().join("devices").join(place);
            for (name, value) in attributes {
                let file = directory.join(name);
                fs::create_dir_all(file.parent().unwrap()).unwrap();
                fs::write(file, format!("{value}\n")).unwrap();
            }
            fs::write(directory.join("dev"), format!("{major}:{minor}\n")).unwrap();
            symlink(&directory, self.0.path().join(format!("dev/block/{major}:{minor}"))).unwrap();
        }

        fn of(&self, device: DeviceNumber) -> Incarnation {
            self.host().of_block_device(device, 0).unwrap()
        }
    }

    fn known(words: &str) -> Incarnation {
        Incarnation::Known(words.into())
    }

    const CACHED: (&str, &str) = ("queue/write_cache", "write back");

    #[test]
    fn a_disk_and_its_partitions_have_one_number() {
        let tree = Tree::new();
        tree.disk((8, 0), "pci0/ata1/block/sda", &[("diskseq", "7"), CACHED]);
        tree.disk((8, 1), "pci0/ata1/block/sda/sda1", &[("partition", "1")]);
        assert_eq!(tree.of((8, 0)), known("sda 7"));
        assert_eq!(tree.of((8, 1)), known("sda 7"));
    }

    #[test]
    fn stacked_devices_have_the_numbers_of_all_below() {
        let tree = Tree::new();
        tree.disk((8, 0), "ata1/block/sda", &[("diskseq", "7"), CACHED]);
        tree.disk((8, 16), "ata2/block/sdb", &[("diskseq", "8"), CACHED]);
        tree.disk((9, 0), "virtual/block/md0", &[("diskseq", "9"), CACHED]);
        let below = tree.0.path().join("devices/virtual/block/md0/slaves");
        fs::create_dir(&below).unwrap();
        for (name, place) in [("sdb", "ata2/block/sdb"), ("sda", "ata1/block/sda")] {
            symlink(tree.0.path().join("devices").join(place), below.join(name)).unwrap();
        }
        assert_eq!(tree.of((9, 0)), known("md0 9 on sda 7, sdb 8"));
        tree.disk((43, 0), "virtual/block/nbd0", &[("diskseq", "3"), CACHED]);
        symlink(tree.0.path().join("devices/virtual/block/nbd0"), below.join("nbd0")).unwrap();
        assert!(matches!(tree.of((9, 0)), Incarnation::Unknown(why) if why.contains("nbd0")));
    }

    #[test]
    fn remote_disks_count_only_without_a_volatile_cache() {
        for (n, place) in [
            "platform/host2/session1/target2:0:0/block/sdc",
            "pci0/host3/rport-3:0-0/target3:0:0/block/sdd",
            "virtual/block/nbd3",
            "virtual/block/rbd0",
            "virtual/block/ublkb5",
            "virtual/nvme-subsystem/nvme-subsys0/nvme0n1",
        ]
        .into_iter()
        .enumerate()
        {
            let tree = Tree::new();
            let [first, second] = [(8, n as u32), (9, n as u32)];
            tree.disk(first, place, &[("diskseq", "4"), CACHED]);
            assert!(matches!(tree.of(first), Incarnation::Unknown(_)), "{place}");
            let durable = &[("diskseq", "4"), ("queue/write_cache", "write through")];
            tree.disk(second, &format!("other/{place}"), durable);
            assert!(matches!(tree.of(second), Incarnation::Known(_)), "{place}");
        }
        let tree = Tree::new();
        tree.disk(
            (259, 0),
            "pci0/nvme/nvme0/nvme0n1",
            &[("diskseq", "2"), CACHED, ("device/transport", "pcie")],
        );
        tree.disk((259, 1), "x/nvme/nvme1/nvme1n1", &[("diskseq", "2"), CACHED, ("device/transport", "tcp")]);
        assert_eq!(tree.of((259, 0)), known("nvme0n1 2"));
        assert!(matches!(tree.of((259, 1)), Incarnation::Unknown(why) if why.contains("NVMe tcp")));
    }

    #[test]
    fn files_count_with_the_device_of_their_file_system() {
        let tree = Tree::new();
        let file = tree.0.path().join("image");
        fs::write(&file, b"x").unwrap();
        let meta = fs::metadata(&file).unwrap();
        tree.disk(numbers(meta.dev()), "ata1/block/sda", &[("diskseq", "7"), CACHED]);
        let host = tree.host();
        assert_eq!(host.of_file(&file, &meta, 0xef53, 0).unwrap(), known("sda 7"));
        assert!(matches!(host.of_file(&file, &meta, IN_MEMORY[0], 0).unwrap(), Incarnation::Known(_)));
        const NFS: u64 = 0x6969;
        assert!(matches!(host.of_file(&file, &meta, NFS, 0).unwrap(), Incarnation::Unknown(_)));
    }

    #[test]
    fn a_file_that_cannot_be_read_keeps_its_error() {
        let dir = tempfile::tempdir().unwrap();
        let failed = read(dir.path()).unwrap_err();
        assert!(failed.to_string().starts_with(&dir.path().display().to_string()), "{failed}");
        let source = std::error::Error::source(&failed).and_then(|e| e.downcast_ref::<io::Error>());
        assert_eq!(source.and_then(io::Error::raw_os_error), Some(libc::EISDIR));
    }

    #[test]
    fn a_kernel_that_does_not_number_disks_is_not_trusted() {
        let tree = Tree::new();
        tree.disk((8, 0), "ata1/block/sda", &[CACHED]);
        assert!(matches!(tree.of((8, 0)), Incarnation::Unknown(why) if why.contains("diskseq")));
    }
}
