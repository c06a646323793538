//! The identity of a device: the hardware or file with the superblock, which distinguishes the device from its copies.
//!
//! Owns the sources of identities in the system, and the comparison. A copy of a device has the same superblock and UUIDs,
//! but not the same serial number, WWN, or inode with its time of birth. Nothing here reads the device itself. Must not
//! know what an identity is used for.
//!
//! Identities are compared key by key; a key that only one of them has is no difference. Names that the kernel assigns at
//! each boot (`sdb`, device numbers) are never part of the identity of hardware.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use serde::{Deserialize, Serialize};

/// Longest stored value of a key, in characters.
const MAX_VALUE_CHARS: usize = 256;
/// Magic number of FUSE file systems, `include/uapi/linux/magic.h`.
const FUSE_MAGIC: u64 = 0x6573_5546;
/// Files of a disk in sysfs, and the key for each. Of several files for a key, the first with a value counts.
const DISK_FILES: &[(&str, &str)] = &[
    ("wwid", "wwid"),
    ("device/wwid", "wwid"),
    ("serial", "serial"),
    ("device/serial", "serial"),
    ("device/cid", "cid"),
    ("dm/uuid", "dm uuid"),
];
/// Properties of udev for identities that the kernel does not report, and the key for each.
const DISK_PROPERTIES: &[(&str, &str)] = &[("ID_SERIAL", "udev serial"), ("MD_UUID", "md uuid")];
/// Keys that show that two devices differ, but not that they are the same: a copy of a disk has these values, too.
const WEAK: &[&str] = &["partition", "partuuid", "cache uuid"];

/// The identity of a device, apart from its contents. Empty if the system reports nothing.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Identity(BTreeMap<String, String>);

/// The result of a comparison of two identities.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Likeness {
    /// The same device.
    Same,
    /// The stored identity has no key that can show that they are the same.
    Unknown,
    /// Another device; the text has the differences.
    Other(String),
}

/// Directories in which the system describes its devices.
struct System<'a> {
    class_block: &'a Path,
    udev_data: &'a Path,
}

impl Identity {
    /// The identity that the system reports for a block device or a file. `path` must not have links.
    pub(crate) fn of(path: &Path) -> Identity {
        let system =
            System { class_block: Path::new("/sys/class/block"), udev_data: Path::new("/run/udev/data") };
        match fs::metadata(path) {
            Ok(meta) if meta.file_type().is_block_device() => system.block_device(path),
            Ok(meta) => Identity(of_file(path, &meta)),
            Err(_) => Identity::default(),
        }
    }

    /// Adds the UUID of a cache device, because another cache device may have the UUID of its set.
    pub(crate) fn with_cache(mut self, uuid: &str) -> Identity {
        self.0.insert("cache uuid".into(), uuid.into());
        self
    }

    /// The UUID of the cache device, if it is one.
    pub(crate) fn cache_uuid(&self) -> Option<&str> {
        self.0.get("cache uuid").map(String::as_str)
    }

    /// Merges a newer identity: adds new keys and replaces changed values.
    pub(crate) fn and(mut self, now: &Identity) -> Identity {
        self.0.extend(now.0.clone());
        self
    }

    /// Compares this identity with that of the device that was found.
    pub(crate) fn compare(&self, found: &Identity) -> Likeness {
        let (mut same, mut different) = (false, Vec::new());
        let by_uuid = self.0.contains_key("partuuid") && found.0.contains_key("partuuid");
        for (key, was) in &self.0 {
            match found.0.get(key) {
                // A new partition table may number the partitions anew; their UUIDs stay.
                Some(_) if key == "partition" && by_uuid => {}
                Some(is) if is == was => same |= !WEAK.contains(&key.as_str()),
                Some(is) => different.push(format!("{key}: expected {was}, found {is}")),
                None => {}
            }
        }
        if !different.is_empty() {
            return Likeness::Other(different.join("; "));
        }
        match (same, self.hardware()) {
            (true, _) => Likeness::Same,
            (false, None) => Likeness::Unknown,
            (false, Some(was)) => {
                let is = found.hardware().unwrap_or_else(|| "no serial number".into());
                Likeness::Other(format!("expected {was}, found {is}"))
            }
        }
    }

    /// The keys that no other device shares, as text.
    fn hardware(&self) -> Option<String> {
        let strong = self.0.iter().filter(|(key, _)| !WEAK.contains(&key.as_str()));
        let words: Vec<String> = strong.map(|(key, value)| format!("{key} {value}")).collect();
        (!words.is_empty()).then(|| words.join(", "))
    }
}

/// The inode of a file and its time of birth. A rename and a boot do not change them; a copy has others.
fn of_file(path: &Path, meta: &fs::Metadata) -> BTreeMap<String, String> {
    // A FUSE server may report other inodes and times for the same file at its next start.
    let made_up = rustix::fs::statfs(path)
        .is_ok_and(|about| u64::try_from(about.f_type).is_ok_and(|magic| magic == FUSE_MAGIC));
    if made_up {
        return BTreeMap::new();
    }
    let born = meta.created().ok().and_then(|at| at.duration_since(UNIX_EPOCH).ok());
    let more = match born {
        Some(at) => ("born".to_owned(), at.as_nanos().to_string()),
        // A file of another file system can have the same inode. The device number distinguishes file systems until the
        // next boot.
        None => {
            let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
            (format!("device number in boot {}", boot.trim()), meta.dev().to_string())
        }
    };
    BTreeMap::from([("inode".to_owned(), meta.ino().to_string()), more])
}

/// The printable part of a value, on one line; `None` if it is empty.
fn sane(bytes: &[u8]) -> Option<String> {
    let text: String = String::from_utf8_lossy(bytes).chars().filter(|c| !c.is_control()).collect();
    let text: String = text.trim().chars().take(MAX_VALUE_CHARS).collect();
    let nothing = text.chars().all(|c| matches!(c, '0' | ' ' | '-'));
    (!nothing).then_some(text)
}

impl System<'_> {
    fn block_device(&self, path: &Path) -> Identity {
        let Ok(name) = path.strip_prefix("/dev") else { return Identity::default() };
        let name = name.to_string_lossy().replace('/', "!");
        let Ok(about) = self.class_block.join(name).canonicalize() else { return Identity::default() };
        let mut found = BTreeMap::new();
        let mut disk = about.clone();
        if let Some(number) = read(&about.join("partition")) {
            found.insert("partition".to_owned(), number);
            let partuuid = self.property(&about, "ID_PART_ENTRY_UUID").or_else(|| partuuid(&about));
            found.extend(partuuid.map(|uuid| ("partuuid".to_owned(), uuid)));
            disk = about.parent().map(PathBuf::from).unwrap_or(about);
        }
        for (file, key) in DISK_FILES {
            if let Some(value) = read(&disk.join(file)) {
                found.entry((*key).to_owned()).or_insert(value);
            }
        }
        if let Some(value) = fs::read(disk.join("device/vpd_pg80")).ok().and_then(|page| serial_of(&page)) {
            found.entry("serial".to_owned()).or_insert(value);
        }
        for (property, key) in DISK_PROPERTIES {
            if let Some(value) = self.property(&disk, property) {
                found.entry((*key).to_owned()).or_insert(value);
            }
        }
        found.extend(of_loop(&disk));
        Identity(found)
    }

    /// A property of a device in the database of udev; `about` is the directory of the device in sysfs.
    fn property(&self, about: &Path, name: &str) -> Option<String> {
        let numbers = read(&about.join("dev"))?;
        let entry = fs::read(self.udev_data.join(format!("b{numbers}"))).ok()?;
        let lines = entry.split(|b| *b == b'\n').filter_map(|line| line.strip_prefix(b"E:"));
        let pairs = lines.filter_map(|line| {
            let at = line.iter().position(|b| *b == b'=')?;
            Some((line.get(..at)?, line.get(at + 1..)?))
        });
        let pairs: HashMap<&[u8], &[u8]> = pairs.collect();
        pairs.get(name.as_bytes()).and_then(|value| sane(value))
    }
}

fn read(path: &Path) -> Option<String> {
    sane(&fs::read(path).ok()?)
}

/// The UUID of a partition, which newer kernels report.
fn partuuid(about: &Path) -> Option<String> {
    let said = fs::read_to_string(about.join("uevent")).ok()?;
    said.lines().find_map(|line| line.strip_prefix("PARTUUID=")).map(str::to_lowercase)
}

/// The unit serial number of SCSI: a header of 4 bytes, whose last 2 bytes are the length, then the text.
fn serial_of(page: &[u8]) -> Option<String> {
    let (head, rest) = page.split_at_checked(4)?;
    let length = usize::from(*head.get(2)?) << 8 | usize::from(*head.get(3)?);
    sane(rest.get(..length.min(rest.len()))?)
}

/// The identity of the file under a loop device.
fn of_loop(disk: &Path) -> BTreeMap<String, String> {
    let Ok(file) = fs::read_to_string(disk.join("loop/backing_file")) else { return BTreeMap::new() };
    let file = Path::new(file.trim_end_matches('\n'));
    let Ok(meta) = fs::metadata(file) else { return BTreeMap::new() };
    let mut found = of_file(file, &meta);
    if let Some(offset) = fs::read_to_string(disk.join("loop/offset")).ok().filter(|_| !found.is_empty()) {
        found.insert("offset".into(), offset.trim().to_owned());
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(root: &Path, path: &str, text: impl AsRef<[u8]>) {
        let path = root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn identity(pairs: &[(&str, &str)]) -> Identity {
        Identity(pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect())
    }

    /// The test makes directories like those of sysfs and udev, so it needs no hardware.
    #[test]
    fn hardware_is_known_by_what_the_system_says() {
        let dir = tempfile::tempdir().unwrap();
        let (class_block, udev_data) = (dir.path().join("class"), dir.path().join("data"));
        let system = System { class_block: &class_block, udev_data: &udev_data };
        let of = |name: &str| system.block_device(&Path::new("/dev").join(name));
        put(&class_block, "sda/device/wwid", "naa.5000c500a1b2c3d4\n");
        put(&class_block, "sda/device/vpd_pg80", b"\0\x80\0\x09  WD-1234trailing");
        put(&class_block, "sda/dev", "8:0\n");
        put(&class_block, "nvme0n1/wwid", "eui.0025385b71b0a2c1\n");
        put(&class_block, "vda/serial", "cache");
        put(&class_block, "vdb/serial", "\n");
        put(&class_block, "dm-0/dm/uuid", "LVM-abc\n");
        put(&udev_data, "b8:0", "S:disk\nE:ID_SERIAL=WDC_WD-1234\nE:ID_WWN=0x5\n");
        assert_eq!(
            of("sda"),
            identity(&[
                ("serial", "WD-1234"),
                ("udev serial", "WDC_WD-1234"),
                ("wwid", "naa.5000c500a1b2c3d4")
            ])
        );
        assert_eq!(of("nvme0n1"), identity(&[("wwid", "eui.0025385b71b0a2c1")]));
        assert_eq!(of("vda"), identity(&[("serial", "cache")]));
        assert_eq!(of("dm-0"), identity(&[("dm uuid", "LVM-abc")]));
        assert_eq!(of("vdb"), Identity::default(), "an empty serial number is none");
        assert_eq!(of("none"), Identity::default());
        // A partition has the identity of its disk, and keys of its own.
        put(&class_block, "disks/sdb/device/wwid", "t10.one");
        put(&class_block, "disks/sdb/sdb2/partition", "2");
        put(&class_block, "disks/sdb/sdb2/uevent", "PARTN=2\nPARTUUID=AB-CD\n");
        std::os::unix::fs::symlink(class_block.join("disks/sdb/sdb2"), class_block.join("sdb2")).unwrap();
        assert_eq!(of("sdb2"), identity(&[("partition", "2"), ("partuuid", "ab-cd"), ("wwid", "t10.one")]));
    }

    #[test]
    fn a_file_is_its_inode_and_a_copy_is_another() {
        let dir = tempfile::tempdir().unwrap();
        let [one, moved, copy] = ["one", "moved", "copy"].map(|name| dir.path().join(name));
        fs::write(&one, "x").unwrap();
        let was = Identity::of(&one);
        fs::copy(&one, &copy).unwrap();
        fs::rename(&one, &moved).unwrap();
        assert_eq!(was.compare(&Identity::of(&moved)), Likeness::Same);
        assert!(matches!(was.compare(&Identity::of(&copy)), Likeness::Other(_)));
        assert!(matches!(was.compare(&Identity::of(&one)), Likeness::Other(_)), "it is there no more");
    }

    #[test]
    fn properties_that_are_not_known_of_both_make_no_difference() {
        let disk = identity(&[("serial", "A"), ("wwid", "w")]);
        assert_eq!(disk.compare(&identity(&[("wwid", "w"), ("udev serial", "x")])), Likeness::Same);
        let Likeness::Other(why) = disk.compare(&identity(&[("serial", "B"), ("wwid", "w")])) else {
            panic!()
        };
        assert_eq!(why, "serial: expected A, found B");
        let Likeness::Other(why) = disk.compare(&Identity::default()) else { panic!() };
        assert!(why.contains("found no serial number"), "{why}");
        assert_eq!(Identity::default().compare(&disk), Likeness::Unknown);
        assert_eq!(
            identity(&[("partition", "1")]).compare(&identity(&[("partition", "1")])),
            Likeness::Unknown
        );
        // A partition that gets another number keeps its identity by its UUID; another UUID is another partition.
        let part = |n, uuid| identity(&[("wwid", "w"), ("partition", n), ("partuuid", uuid)]);
        assert_eq!(part("1", "u").compare(&part("2", "u")), Likeness::Same);
        assert!(matches!(part("1", "u").compare(&part("1", "v")), Likeness::Other(_)));
        // A set can get another cache device.
        let cache = |uuid: &str| identity(&[("wwid", "w")]).with_cache(uuid);
        assert!(matches!(cache("a").compare(&cache("b")), Likeness::Other(_)));
    }

    #[test]
    fn texts_of_a_device_are_one_short_line() {
        assert_eq!(sane(b" a\n\x1b[2Jb \0"), Some("a[2Jb".into()));
        assert_eq!(sane(b"0000 -\n"), None);
        assert_eq!(sane(&[b'x'; 999]).map(|t| t.len()), Some(MAX_VALUE_CHARS));
        assert_eq!(serial_of(b"\0\x80\xff\xffab"), Some("ab".into()));
        assert_eq!(serial_of(b"\0\x80"), None);
    }
}
