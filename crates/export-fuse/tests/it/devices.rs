//! The loop devices, and file systems on them.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use export_fuse::PunchHole;

use crate::host::{self, Mounted, run, text};
use crate::server::{LOOPS, Server, Setup};
use rig::RamDisk;

const MIB: u64 = 1 << 20;

/// Where the workspace's sources are: something real to copy.
fn sources() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the crates' folder").to_path_buf()
}

/// Names and sums of everything under `dir`.
fn sums(dir: &Path) -> String {
    let script = "cd \"$1\" && find . -type f -print0 | sort -z | xargs -0 sha256sum";
    let sums = run("sh", &["-c", script, "sh", text(dir)]);
    assert!(sums.lines().count() > 50, "there is something to compare");
    sums
}

fn attribute(device: &Path, name: &str) -> String {
    let device = device.file_name().and_then(|n| n.to_str()).expect("a device");
    fs::read_to_string(format!("/sys/block/{device}/{name}")).expect(name).trim().to_string()
}

#[test]
fn a_file_system_survives_a_restart_of_everything() {
    if !host::ready(&["mkfs.ext4", "e2fsck", "sha256sum", "fstrim"]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (at, mount_point) = (dir.path().join("files"), dir.path().join("mnt"));
    let disk = RamDisk::new("bcache0", 256 * MIB).with_garbage().shared();
    let mut server = Server::start(&at, &[&disk], LOOPS);
    let device = server.device().to_path_buf();
    assert!(server.exports[0].direct_io);
    assert_eq!(
        (attribute(&device, "loop/dio"), attribute(&device, "loop/autoclear")),
        ("1".into(), "0".into())
    );
    assert_eq!(attribute(&device, "size"), (256 * MIB / 512).to_string());

    run("mkfs.ext4", &["-q", text(&device)]);
    let mounted = Mounted::new(&device, &mount_point);
    run("cp", &["-a", text(&sources()), text(&mount_point.join("copy"))]);
    let before = sums(&mount_point.join("copy"));
    assert_eq!(before, sums(&sources()));
    fs::remove_dir_all(mount_point.join("copy/engine")).unwrap();
    let unmapped = disk.counts().unmapped_sectors;
    run("fstrim", &[text(&mount_point)]);
    assert!(disk.counts().unmapped_sectors > unmapped + 100_000, "what is free was discarded");
    let before = sums(&mount_point.join("copy"));
    mounted.unmount();
    assert!(disk.counts().flushes > 0);
    run("e2fsck", &["-fn", text(&device)]);
    server.stop().unwrap();
    assert!(host::loops_over(&server.dir).is_empty());
    assert!(!host::is_mount_point(&server.dir));

    let mut server = Server::start(&at, &[&disk], LOOPS);
    assert_eq!(server.notes, [""; 0]);
    run("e2fsck", &["-fn", text(server.device())]);
    let mounted = Mounted::new(server.device(), &mount_point);
    assert_eq!(sums(&mount_point.join("copy")), before);
    mounted.unmount();
    server.stop().unwrap();
}

/// The loop driver sends the same request for both, so a volume's discard, which may leave anything behind,
/// must not be what carries it out.
#[test]
fn discards_reach_the_volume_and_unmapped_zeros_are_zeros() {
    if !host::ready(&["blkdiscard", "fallocate"]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let disk = RamDisk::new("bcache0", 16 * MIB).with_garbage().shared();
    disk.fill(0, &vec![0xaa; 16 << 20]);
    let mut server = Server::start(&dir.path().join("m"), &[&disk], LOOPS);
    let device = server.device();
    run("blkdiscard", &["-o", "1048576", "-l", "2097152", text(device)]);
    assert_eq!(disk.counts().unmapped_sectors, 4096);
    assert_eq!(disk.counts().discards, 0);
    assert_eq!(attribute(device, "queue/discard_granularity"), "4096");
    let zeroes = disk.counts().zeroes;
    run("fallocate", &["-p", "-o", "4194304", "-l", "1048576", text(device)]);
    assert!(disk.counts().zeroes > zeroes, "the kernel did not write zeros itself");
    assert_eq!(disk.contents(4 << 20..5 << 20), vec![0; 1 << 20]);
    run("blkdiscard", &["-z", "-o", "8388608", "-l", "1048576", text(device)]);
    assert_eq!(disk.contents(8 << 20..9 << 20), vec![0; 1 << 20]);
    assert!(disk.contents(3 << 20..4 << 20).iter().all(|b| *b == 0xaa));
    assert!(disk.contents(5 << 20..8 << 20).iter().all(|b| *b == 0xaa));
    server.stop().unwrap();
}

#[test]
fn a_volume_that_refuses_holes_has_no_discard_but_zeros() {
    if !host::ready(&["blkdiscard", "fallocate", "mkfs.ext4"]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let disk = RamDisk::new("bcache0", 16 * MIB).with_garbage().shared();
    disk.fill(0, &vec![0xaa; 16 << 20]);
    let setup = Setup { punch_hole: PunchHole::Refuse, ..LOOPS };
    let mut server = Server::start(&dir.path().join("m"), &[&disk], setup);
    let device = server.device();
    assert_eq!(attribute(device, "queue/discard_max_bytes"), "0");
    assert!(!host::outcome("blkdiscard", &[text(device)]).status.success());
    assert_eq!(disk.contents(0..4096), [0xaa; 4096]);
    run("blkdiscard", &["-z", "-o", "8388608", "-l", "1048576", text(device)]);
    assert_eq!(disk.contents(8 << 20..9 << 20), vec![0; 1 << 20]);
    assert!(disk.contents(9 << 20..16 << 20).iter().all(|b| *b == 0xaa));
    run("mkfs.ext4", &["-q", text(device)]);
    assert_eq!(disk.counts().unmaps, 0);
    server.stop().unwrap();
}

#[test]
fn direct_io_of_odd_sizes() {
    if !host::ready(&["dd"]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (small, large) = (
        RamDisk::new("small", 8 * MIB).with_garbage().shared(),
        RamDisk::new("large", 8 * MIB).with_garbage().with_blocks(4096, 4096).shared(),
    );
    let mut server = Server::start(&dir.path().join("m"), &[&small, &large], LOOPS);
    let path = |i: usize| server.exports[i].loop_device.clone().expect("a loop device");
    assert_eq!(attribute(&path(0), "queue/logical_block_size"), "512");
    assert_eq!(attribute(&path(1), "queue/logical_block_size"), "4096");
    let source = dir.path().join("source");
    let data: Vec<u8> = (0..6_000_000u32).map(|i| (i / 7) as u8).collect();
    fs::write(&source, &data).unwrap();
    for (i, disk, block) in [(0, &small, 512), (1, &large, 4096)] {
        for blocks in [1, 3, 7, 129, 1025] {
            let bs = block * blocks;
            let (input, output) = (format!("if={}", text(&source)), format!("of={}", text(&path(i))));
            let sizes = [format!("bs={bs}"), format!("seek={}", 8 * MIB as usize / 2 / bs)];
            let count = 3_000_000 / bs;
            let count = format!("count={count}");
            run(
                "dd",
                &[
                    "oflag=direct",
                    "conv=notrunc",
                    &input,
                    &output,
                    &sizes[0],
                    &sizes[1],
                    &count,
                    "status=none",
                ],
            );
            let start = 8 * MIB as usize / 2 / bs * bs;
            let bytes = 3_000_000 / bs * bs;
            assert!(disk.contents(start..start + bytes) == data[..bytes], "blocks of {bs} bytes");
        }
    }
    // Direct I/O of less than a block is refused by the kernel, not by us.
    let file = OpenOptions::new().read(true).custom_flags(0o40_000).open(path(1)).unwrap();
    assert_eq!(file.read_at(&mut [0; 512], 0).unwrap_err().raw_os_error(), Some(22));
    drop(file);
    server.stop().unwrap();
}

#[test]
fn a_volume_that_is_read_only_is_a_read_only_device() {
    if !host::ready(&["blockdev"]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let disk = RamDisk::new("bcache0", MIB).with_garbage().with_read_only().shared();
    let mut server = Server::start(&dir.path().join("m"), &[&disk], LOOPS);
    assert_eq!(run("blockdev", &["--getro", text(server.device())]).trim(), "1");
    let mut byte = [1];
    File::open(server.device()).unwrap().read_exact_at(&mut byte, 1000).unwrap();
    assert_eq!(byte, [0]);
    server.stop().unwrap();
}

#[test]
fn partitions_can_be_used_and_are_in_use() {
    if !host::ready(&["partx", "mkfs.ext4"]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let mount_point = dir.path().join("mnt");
    let disk = RamDisk::new("bcache0", 32 * MIB).with_garbage().shared();
    // A table of the old kind: type 0x83, 16384 sectors from sector 2048 on.
    let mut entry = [0; 16];
    entry[4] = 0x83;
    entry[8..12].copy_from_slice(&2048u32.to_le_bytes());
    entry[12..].copy_from_slice(&16384u32.to_le_bytes());
    disk.fill(446, &entry);
    disk.fill(510, &[0x55, 0xaa]);
    let mut server = Server::start(&dir.path().join("m"), &[&disk], LOOPS);
    let first = PathBuf::from(format!("{}p1", text(server.device())));
    if !first.exists() {
        // This kernel cannot read such tables, so the test passes their contents to it.
        run("partx", &["-a", text(server.device())]);
    }
    run("mkfs.ext4", &["-q", text(&first)]);
    let mounted = Mounted::new(&first, &mount_point);
    let why = server.stop().expect_err("in use");
    assert!(why.contains(text(&first)) && why.contains(text(&mount_point)), "{why}");
    mounted.unmount();
    assert!(disk.contents(0..512) != [0; 512] && disk.contents(MIB as usize..9 << 20) != vec![0; 8 << 20]);
    server.stop().unwrap();
    assert!(!first.exists());
}

#[test]
fn fio_verifies_what_it_wrote_at_depth() {
    if !host::ready(&["fio"]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let disk = RamDisk::new("bcache0", 64 * MIB).with_garbage().shared();
    let mut server = Server::start(&dir.path().join("m"), &[&disk], LOOPS);
    let filename = format!("--filename={}", text(server.device()));
    let jobs: [&[&str]; 2] = [
        &["--rw=randwrite", "--bsrange=512-128k", "--blockalign=512", "--ioengine=libaio", "--iodepth=32"],
        &["--rw=randrw", "--bs=4k", "--ioengine=libaio", "--iodepth=16", "--fsync=32", "--trim_percentage=5"],
    ];
    for job in jobs {
        // The state file of the verification would be left in the current directory.
        let common = ["--name=verify", &filename, "--direct=1", "--verify=crc32c", "--verify_state_save=0"];
        run("fio", &[&common[..], job, &["--size=64m", "--io_size=32m", "--end_fsync=1"]].concat());
    }
    assert!(disk.counts().flushes > 0);
    server.stop().unwrap();
}
