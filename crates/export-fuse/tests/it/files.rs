//! The files, used directly.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use export_fuse::{MountBy, PunchHole};
use io::Rng;

use crate::host;
use crate::server::{FILES, Server, Setup};
use rig::RamDisk;

const MIB: u64 = 1 << 20;

fn open(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).open(path).expect("the file opens")
}

fn errno(result: std::io::Result<impl std::fmt::Debug>) -> i32 {
    result.expect_err("refused").raw_os_error().expect("an error of the system")
}

fn fallocate(file: &File, mode: i32, offset: u64, bytes: u64) -> std::io::Result<()> {
    let flags = rustix::fs::FallocateFlags::from_bits_retain(mode.cast_unsigned());
    Ok(rustix::fs::fallocate(file, flags, offset, bytes)?)
}

#[test]
fn a_directory_lists_volumes_with_their_sizes() {
    if !host::ready(&[]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().join("made/../new");
    std::fs::create_dir(dir.path().join("made")).unwrap();
    let (a, b) = (
        RamDisk::new("bcache0", 3 * MIB).with_garbage().shared(),
        RamDisk::new("flash #1", 5 * MIB).with_garbage().with_blocks(4096, 4096).with_read_only().shared(),
    );
    let mut server = Server::start(&at, &[&a, &b], FILES);
    assert_eq!(server.dir, dir.path().canonicalize().unwrap().join("new"));
    let mut names: Vec<_> = std::fs::read_dir(&server.dir)
        .unwrap()
        .map(|e| e.unwrap())
        .map(|e| (e.file_name().into_string().unwrap(), e.metadata().unwrap().len()))
        .collect();
    names.sort();
    assert_eq!(names, [("bcache0".to_string(), 3 * MIB), ("flash #1".to_string(), 5 * MIB)]);
    let meta = std::fs::metadata(server.file()).unwrap();
    assert_eq!((meta.mode() & 0o7777, meta.blocks()), (0o600, 3 * MIB / 512));
    assert!(std::fs::metadata(server.dir.join("absent")).is_err());
    assert_eq!(errno(File::create(server.dir.join("absent"))), libc_errno("ENOSYS"));
    assert_eq!(errno(open_for_writing(&server.exports[1].file)), libc_errno("EROFS"));
    assert!(host::run("stat", &["-f", "-c", "%s %b", host::text(&server.dir)]).starts_with("4096 2048"));
    server.stop().unwrap();
    assert!(!host::is_mount_point(&server.dir));
}

fn open_for_writing(path: &Path) -> std::io::Result<File> {
    OpenOptions::new().write(true).open(path)
}

fn libc_errno(name: &str) -> i32 {
    match name {
        "EPERM" => 1,
        "EIO" => 5,
        "EINVAL" => 22,
        "ENOSPC" => 28,
        "EROFS" => 30,
        "ENOSYS" => 38,
        "EOPNOTSUPP" => 95,
        other => panic!("{other}"),
    }
}

/// Random byte ranges from several handles, beside a model in memory.
#[test]
fn any_range_of_bytes_is_read_and_written() {
    if !host::ready(&[]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let size = 2 * MIB;
    let disk = RamDisk::new("bcache0", size).with_garbage().shared();
    let mut server = Server::start(&dir.path().join("m"), &[&disk], FILES);
    let file = open(server.file());
    let mut rng = Rng::new(7);
    let mut model = vec![0u8; size as usize];
    for round in 0..2000 {
        let offset = rng.below(size);
        let bytes = match round % 4 {
            0 => 1 + rng.below(16),
            1 => 512 * (1 + rng.below(8)),
            2 => 1 + rng.below(5000),
            _ => 1 + rng.below(300_000),
        };
        let bytes = bytes.min(size - offset) as usize;
        let offset = if round % 4 == 1 { offset / 512 * 512 } else { offset };
        let range = offset as usize..offset as usize + bytes;
        match rng.below(8) {
            0 => fallocate(&file, 1 | 2, offset, bytes as u64).map(|()| model[range].fill(0)).unwrap(),
            1 => fallocate(&file, 16, offset, bytes as u64).map(|()| model[range].fill(0)).unwrap(),
            2..=4 => {
                let mut data = vec![0; bytes];
                data.fill_with(|| rng.next_u64() as u8);
                file.write_all_at(&data, offset).unwrap();
                model[range].copy_from_slice(&data);
            }
            _ => {
                let mut data = vec![0; bytes];
                file.read_exact_at(&mut data, offset).unwrap();
                assert!(data == model[range], "round {round}: {bytes} bytes at {offset}");
            }
        }
    }
    assert!(disk.contents(0..size as usize) == model);
    drop(file);
    server.stop().unwrap();
}

/// Threads that write neighbouring bytes of the same sectors do not undo each other's work, whether they
/// write whole sectors or parts.
#[test]
fn parts_of_a_sector_from_many_threads_all_arrive() {
    if !host::ready(&[]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let disk = RamDisk::new("bcache0", MIB).with_garbage().shared();
    let mut server = Server::start(&dir.path().join("m"), &[&disk], FILES);
    let path = server.file();
    std::thread::scope(|scope| {
        for t in 0..4u8 {
            scope.spawn(move || {
                let file = open(path);
                // Of each 1024 bytes: 100 of every thread, across the border of two sectors.
                for at in (312 + u64::from(t) * 100..64 << 10).step_by(1024) {
                    file.write_all_at(&[t + 1; 100], at).unwrap();
                }
            });
        }
        scope.spawn(move || {
            let file = open(path);
            for at in ((64 << 10)..(128 << 10)).step_by(512) {
                file.write_all_at(&[9; 512], at).unwrap();
            }
        });
    });
    let contents = disk.contents(0..128 << 10);
    for piece in contents[..64 << 10].chunks(1024) {
        for t in 0..4usize {
            let start = 312 + 100 * t;
            assert!(piece[start..start + 100].iter().all(|b| *b == t as u8 + 1));
        }
        assert!(piece[..312].iter().chain(&piece[712..]).all(|b| *b == 0));
    }
    assert!(contents[64 << 10..].iter().all(|b| *b == 9));
    server.stop().unwrap();
}

#[test]
fn the_end_of_a_volume_is_the_end_of_its_file() {
    if !host::ready(&[]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let disk = RamDisk::new("bcache0", MIB).with_garbage().shared();
    let mut server = Server::start(&dir.path().join("m"), &[&disk], FILES);
    let mut file = open(server.file());
    file.seek(SeekFrom::Start(MIB - 10)).unwrap();
    assert_eq!(file.write(&[5; 100]).unwrap(), 10, "cut at the end");
    assert_eq!(errno(file.write(&[5; 100])), libc_errno("ENOSPC"));
    file.seek(SeekFrom::Start(MIB - 20)).unwrap();
    let mut rest = Vec::new();
    file.read_to_end(&mut rest).unwrap();
    assert_eq!(rest, [[0; 10], [5; 10]].concat());
    assert_eq!(std::fs::metadata(server.file()).unwrap().len(), MIB);
    assert_eq!(errno(file.set_len(2 * MIB)), libc_errno("EPERM"));
    assert_eq!(errno(file.set_len(MIB / 2)), libc_errno("EPERM"));
    assert_eq!(errno(fallocate(&file, 16, MIB - 512, 1024)), libc_errno("ENOSPC"));
    fallocate(&file, 1 | 2, MIB - 512, 1024).unwrap();
    assert_eq!(disk.contents(MIB as usize - 512..MIB as usize), [0; 512]);
    // Like a block device: truncation at opening is ignored, and the size known to the kernel stays.
    std::fs::write(server.file(), b"new head").unwrap();
    assert_eq!(std::fs::metadata(server.file()).unwrap().len(), MIB);
    assert_eq!(disk.contents(0..8), b"new head");
    drop(file);
    server.stop().unwrap();
}

#[test]
fn durability_reaches_the_volume() {
    if !host::ready(&[]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let disk = RamDisk::new("bcache0", MIB).with_garbage().shared();
    let mut server = Server::start(&dir.path().join("m"), &[&disk], FILES);
    let file = open(server.file());
    file.write_all_at(&[1; 512], 0).unwrap();
    assert_eq!((disk.counts().writes, disk.counts().durable, disk.counts().flushes), (1, 0, 0));
    file.sync_all().unwrap();
    file.sync_data().unwrap();
    assert_eq!(disk.counts().flushes, 2);
    drop(file);
    assert_eq!(disk.counts().flushes, 2, "closing is no fsync");
    for (flag, name) in [(0o4_010_000, "O_SYNC"), (0o10_000, "O_DSYNC")] {
        let before = disk.counts().durable;
        let file = OpenOptions::new().write(true).custom_flags(flag).open(server.file()).unwrap();
        file.write_all_at(&[2; 4096], 4096).unwrap();
        file.write_all_at(&[2; 3], 1).unwrap();
        assert_eq!(disk.counts().durable, before + 2, "{name}");
    }
    server.stop().unwrap();
}

#[test]
fn failures_have_their_numbers() {
    if !host::ready(&[]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let disk = RamDisk::new("bcache0", MIB).with_garbage().shared();
    disk.fail(8..16, 5);
    disk.fail(32..40, 28);
    let setup = Setup { punch_hole: PunchHole::Refuse, ..FILES };
    let mut server = Server::start(&dir.path().join("m"), &[&disk], setup);
    let file = open(server.file());
    let mut byte = [0];
    assert_eq!(errno(file.read_at(&mut byte, 4100)), libc_errno("EIO"));
    assert_eq!(errno(file.write_at(&[1; 10], 4100)), libc_errno("EIO"), "the sector cannot be read");
    assert_eq!(errno(file.write_at(&[1; 512], 16384)), libc_errno("ENOSPC"));
    assert_eq!(errno(fallocate(&file, 1 | 2, 0, 4096)), libc_errno("EOPNOTSUPP"));
    assert_eq!(errno(fallocate(&file, 0, 0, 4096)), libc_errno("EOPNOTSUPP"));
    file.write_all_at(&[1; 512], 0).unwrap();
    fallocate(&file, 16, 0, 512).unwrap();
    assert_eq!(disk.contents(0..512), [0; 512]);
    drop(file);
    server.stop().unwrap();
}

/// From memory that does not begin at a page the kernel cuts requests within sectors.
#[test]
fn requests_are_large() {
    if !host::ready(&["dd"]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let disk = RamDisk::new("bcache0", 8 * MIB).with_garbage().shared();
    let mut server = Server::start(&dir.path().join("m"), &[&disk], FILES);
    // Its memory begins at a page.
    let output = format!("of={}", host::text(server.file()));
    host::run("dd", &["if=/dev/zero", &output, "bs=4M", "count=1", "status=none"]);
    assert_eq!((disk.counts().writes, disk.counts().largest_bytes), (4, MIB), "a megabyte at a time");
    assert_eq!(disk.counts().reads, 0);
    let file = open(server.file());
    let data: Vec<u8> = (0..(4 << 20) + 4096u32).map(|i| (i / 3) as u8).collect();
    for start in [0, 1, 100, 512] {
        let before = disk.counts().writes;
        file.write_all_at(&data[start..start + (4 << 20)], 0).unwrap();
        assert!(disk.contents(0..4 << 20) == data[start..start + (4 << 20)]);
        assert!(disk.counts().writes <= before + 5);
    }
    drop(file);
    server.stop().unwrap();
}

#[test]
fn the_program_that_mounts_for_users_is_used_where_asked_for() {
    if !host::ready(&["fusermount3"]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let disk = RamDisk::new("bcache0", MIB).with_garbage().shared();
    let setup = Setup { mount_by: MountBy::Helper, ..FILES };
    let mut server = Server::start(&dir.path().join("m"), &[&disk], setup);
    open(server.file()).write_all_at(b"through the helper", 700).unwrap();
    assert_eq!(disk.contents(700..718), b"through the helper");
    server.stop().unwrap();
    assert!(!host::is_mount_point(&server.dir));
    // What it says is passed on.
    let file = dir.path().join("file");
    std::fs::write(&file, "").unwrap();
    assert!(Server::try_start(&file, &[&disk], setup).is_err());
}

#[test]
fn a_place_that_is_taken_is_refused_with_the_reason() {
    if !host::ready(&[]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let disk = RamDisk::new("bcache0", MIB).with_garbage().shared();
    let refused = |at: &Path, disks: &[&_]| Server::try_start(at, disks, FILES).map(drop).unwrap_err();
    let full = dir.path().join("full");
    std::fs::create_dir(&full).unwrap();
    std::fs::write(full.join("precious"), "").unwrap();
    assert!(refused(&full, &[&disk]).contains("not empty"));
    assert!(refused(&full.join("precious"), &[&disk]).contains("Not a directory"));
    assert!(refused(&dir.path().join("no/such"), &[&disk]).contains("No such file"));
    let twin = RamDisk::new("bcache0", MIB).with_garbage().shared();
    assert!(refused(&dir.path().join("m"), &[&disk, &twin]).contains("two volumes"));
    let mut server = Server::start(&dir.path().join("m"), &[&disk], FILES);
    let again = refused(&dir.path().join("m"), &[&disk]);
    assert!(again.contains("a running ubcache is mounted there"), "{again}");
    server.stop().unwrap();
}
