//! Claims: one writer, many readers, and the holder's name.
#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod common;

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use blockio::{Access, Claim, Driver, FileDevice, OpenError, OpenOptions, probe_signature};
use common::{LoopDevice, drivers, sparse_file};
use format::Sectors;

const WRITE: OpenOptions = OpenOptions {
    access: Access::ReadWrite,
    claim: Claim::ByAccess,
    buffered: false,
    logical_block_bytes: None,
};
const READ: OpenOptions = OpenOptions { access: Access::ReadOnly, ..WRITE };
const UNCLAIMED: OpenOptions = OpenOptions { claim: Claim::None, ..READ };

fn driver() -> Driver {
    drivers().remove(0)
}

fn open(driver: &Driver, path: &Path, options: &OpenOptions) -> Result<FileDevice, OpenError> {
    FileDevice::open(driver.reactor(), path, options)
}

/// Opens what was closed before. A child that another test of this process is about to start has copies of all
/// descriptors, and with them the lock, until it has become its program: on a busy machine that can take longer than
/// opening is patient.
fn open_again(driver: &Driver, path: &Path, options: &OpenOptions) -> FileDevice {
    let begun = Instant::now();
    loop {
        match open(driver, path, options) {
            Ok(device) => return device,
            Err(e) => assert!(begun.elapsed() < Duration::from_secs(60), "{e}"),
        }
    }
}

/// Who holds the device, as the refusal says.
fn holder(driver: &Driver, path: &Path, options: &OpenOptions) -> String {
    match open(driver, path, options) {
        Err(e @ OpenError::InUse { .. }) => e.to_string(),
        Err(e) => panic!("expected it to be in use, found: {e}"),
        Ok(_) => panic!("expected it to be in use, found it free"),
    }
}

#[test]
fn a_file_has_one_writer_or_many_readers() {
    let driver = driver();
    let dir = common::dir();
    let path = sparse_file(dir.path(), "disk", Sectors(64));
    let writer = open(&driver, &path, &WRITE).unwrap();
    for options in [&WRITE, &READ] {
        let text = holder(&driver, &path, options);
        assert_eq!(text, format!("{}: in use by this process", path.display()));
    }
    open(&driver, &path, &UNCLAIMED).unwrap();
    drop(writer);
    let reader = open_again(&driver, &path, &READ);
    let another = open(&driver, &path, &READ).unwrap();
    holder(&driver, &path, &WRITE);
    drop(reader);
    drop(another);
    open_again(&driver, &path, &WRITE);
}

/// Holds a lock on a file until its input ends.
struct Other(Child);

impl Drop for Other {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

#[test]
fn another_process_is_named() {
    let driver = driver();
    let dir = common::dir();
    let path = sparse_file(dir.path(), "disk", Sectors(64));
    let child = Command::new("flock")
        .args(["--exclusive", "--no-fork"])
        .arg(&path)
        .args(["sh", "-c", "echo locked; read line"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn();
    let Ok(mut child) = child else {
        rig::skipped("the program flock is missing");
        return;
    };
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let child = Other(child);
    let text = holder(&driver, &path, &WRITE);
    assert!(text.contains(&format!("in use by process {} (", child.0.id())), "{text}");
    drop(child);
    open_again(&driver, &path, &WRITE);
}

#[test]
fn a_block_device_has_one_writer() {
    let driver = driver();
    let dir = common::dir();
    let Some(device) = LoopDevice::new(dir.path(), "disk", Sectors(8192), 512) else { return };
    let writer = open(&driver, &device.path, &WRITE).unwrap();
    for options in [&WRITE, &READ] {
        let text = holder(&driver, &device.path, options);
        assert!(text.ends_with(": in use by this process"), "{text}");
    }
    open(&driver, &device.path, &UNCLAIMED).unwrap();
    drop(writer);
    let reader = open_again(&driver, &device.path, &READ);
    open(&driver, &device.path, &READ).unwrap();
    open(&driver, &device.path, &WRITE).unwrap();
    drop(reader);
}

#[test]
fn a_mounted_device_is_refused_and_its_mount_point_named() {
    let driver = driver();
    let dir = common::dir();
    let Some(device) = LoopDevice::new(dir.path(), "disk", Sectors(8192), 512) else { return };
    let made = Command::new("mkfs.ext4").arg("-q").arg(&device.path).status();
    if !made.is_ok_and(|s| s.success()) {
        rig::skipped("the program mkfs.ext4 is missing or fails");
        return;
    }
    assert_eq!(probe_signature(&device.path).unwrap().unwrap().kind, "ext4");
    // A blank in the path is escaped in /proc/mounts.
    let point = dir.path().join("mount point");
    std::fs::create_dir(&point).unwrap();
    let mounted = Command::new("mount").arg(&device.path).arg(&point).status().unwrap();
    if !mounted.success() {
        rig::skipped("this user may not mount");
        return;
    }
    let text = std::panic::catch_unwind(|| holder(&self::driver(), &device.path, &WRITE));
    let readable = open(&driver, &device.path, &UNCLAIMED).is_ok();
    assert!(Command::new("umount").arg(&point).status().unwrap().success());
    let text = text.unwrap();
    assert!(text.ends_with(&format!("in use by a file system mounted on {}", point.display())), "{text}");
    assert!(readable);
}

#[test]
fn a_file_under_a_loop_device_is_refused() {
    let driver = driver();
    let dir = common::dir();
    let Some(device) = LoopDevice::new(dir.path(), "disk", Sectors(8192), 512) else { return };
    let text = holder(&driver, &dir.path().join("disk"), &WRITE);
    assert!(text.ends_with(&format!("in use by {}, which is built on it", device.path.display())), "{text}");
}

/// `register` of a loop device over a file that another process served: two writers, and no error.
#[test]
fn a_loop_device_over_a_locked_file_is_refused() {
    let driver = driver();
    let dir = common::dir();
    let Some(device) = LoopDevice::new(dir.path(), "disk", Sectors(8192), 512) else { return };
    let file = File::open(dir.path().join("disk")).unwrap();
    let expected =
        format!(": in use by this process, which holds {} below it", dir.path().join("disk").display());
    rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive).unwrap();
    for options in [&WRITE, &READ] {
        let text = holder(&driver, &device.path, options);
        assert!(text.ends_with(&expected), "{text}");
    }
    open(&driver, &device.path, &UNCLAIMED).unwrap();
    rustix::fs::flock(&file, rustix::fs::FlockOperation::LockShared).unwrap();
    open_again(&driver, &device.path, &READ);
    assert!(holder(&driver, &device.path, &WRITE).ends_with(&expected), "readers exclude a writer");
    drop(file);
    open_again(&driver, &device.path, &WRITE);
}

/// `up`, `flush` and `make` with a second loop device on a file that the daemon served through the first: two writers, no
/// error, and data that a flush had acknowledged was lost.
#[test]
fn loop_devices_on_the_same_part_of_a_file_exclude_each_other() {
    let driver = driver();
    let dir = common::dir();
    let Some(first) = LoopDevice::new(dir.path(), "disk", Sectors(8192), 512) else { return };
    let file = dir.path().join("disk");
    let behind = (Sectors(4096).bytes()).to_string();
    let also = |args: &[&str]| LoopDevice::on(&file, args).expect("the first loop device was made");
    let (same, over, half) = (also(&[]), LoopDevice::on(&first.path, &[]).unwrap(), also(&["-o", &behind]));
    let expected = ": in use by another device on the same file or disk";
    let writer = open(&driver, &first.path, &WRITE).unwrap();
    for device in [&same, &over, &half] {
        for options in [&WRITE, &READ] {
            let text = holder(&driver, &device.path, options);
            assert!(text.ends_with(expected), "{text}");
        }
        open(&driver, &device.path, &UNCLAIMED).unwrap();
    }
    drop(writer);
    let _half = open_again(&driver, &half.path, &WRITE);
    assert!(holder(&driver, &first.path, &WRITE).ends_with(expected));
    let front = also(&["--sizelimit", &behind]);
    open(&driver, &front.path, &WRITE).expect("it is another part of the file");
}

#[test]
fn a_path_without_a_device_is_refused_by_name() {
    let driver = driver();
    let dir = common::dir();
    let text = |path: &Path| open(&driver, path, &WRITE).err().unwrap().to_string();
    assert!(text(dir.path()).ends_with("expected a block device or a regular file, found a directory"));
    assert!(text(Path::new("/dev/null")).ends_with("found a character device"));
    let missing = dir.path().join("missing");
    let found = text(&missing);
    assert!(found.starts_with(&format!("{}: cannot be examined: ", missing.display())), "{found}");
}

/// The real tools' marks, where they are installed.
#[test]
fn swap_is_recognised() {
    let dir = common::dir();
    let path = sparse_file(dir.path(), "swap", Sectors(8192));
    assert_eq!(probe_signature(&path).unwrap(), None);
    match Command::new("mkswap").arg(&path).output() {
        Ok(out) if out.status.success() => {}
        other => {
            rig::skipped(format_args!("the program mkswap is missing or fails: {other:?}"));
            return;
        }
    }
    assert_eq!(probe_signature(&path).unwrap().unwrap().kind, "swap");
    File::options().write(true).open(&path).unwrap().write_all(b"XFSB").unwrap();
    assert_eq!(probe_signature(&path).unwrap().unwrap().kind, "xfs", "file systems before swap");
}
