//! How an export ends: in good order, refused, by force, and by a kill.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::host::{self, Debris, Mounted, run, text};
use crate::server::{FILES, LOOPS, Server};
use rig::RamDisk;

const MIB: u64 = 1 << 20;

#[test]
fn a_stop_while_mounted_is_refused_and_names_the_mount() {
    if !host::ready(&["mkfs.ext4"]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let mount_point = dir.path().join("a mount point");
    let (used, idle) = (
        RamDisk::new("used", 32 * MIB).with_garbage().shared(),
        RamDisk::new("idle", MIB).with_garbage().shared(),
    );
    let mut server = Server::start(&dir.path().join("m"), &[&used, &idle], LOOPS);
    run("mkfs.ext4", &["-q", text(server.device())]);
    let mounted = Mounted::new(server.device(), &mount_point);
    let why = server.stop().expect_err("in use");
    assert!(why.contains(text(server.device())) && why.contains("is mounted at"), "{why}");
    assert!(why.contains(text(&mount_point)), "{why}");
    // It serves on, everything of it.
    fs::write(mount_point.join("after"), "still here").unwrap();
    assert_eq!(host::loops_over(&server.dir).len(), 2);
    mounted.unmount();
    server.stop().unwrap();
    assert!(host::loops_over(&server.dir).is_empty());
}

#[test]
fn a_stop_while_a_process_uses_the_device_or_a_file_is_refused() {
    if !host::ready(&[]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let disk = RamDisk::new("bcache0", MIB).with_garbage().shared();
    let mut server = Server::start(&dir.path().join("m"), &[&disk], LOOPS);
    let me = format!("process {}", std::process::id());
    for path in [server.device().to_path_buf(), server.file().to_path_buf()] {
        let open = File::open(&path).unwrap();
        let why = server.stop().expect_err("in use");
        assert!(why.contains(&me) && why.contains(text(&path)), "{why}");
        drop(open);
    }
    // A process that another test is just starting has everything open that this one had, until it is its program.
    host::soon("a stop", || server.stop().is_ok());
}

#[test]
fn the_page_cache_is_written_back_before_a_stop() {
    if !host::ready(&[]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let disk = RamDisk::new("bcache0", 8 * MIB).with_garbage().shared();
    let mut server = Server::start(&dir.path().join("m"), &[&disk], LOOPS);
    let mut device = File::options().write(true).open(server.device()).unwrap();
    device.write_all(&vec![0x5a; 8 << 20]).unwrap();
    drop(device);
    server.stop().unwrap();
    assert!(disk.contents(0..8 << 20).iter().all(|b| *b == 0x5a));
    assert!(disk.counts().flushes > 0);
}

#[test]
fn force_takes_everything_away_and_says_from_whom() {
    if !host::ready(&["mkfs.ext4"]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let mount_point = dir.path().join("mnt");
    let disk = RamDisk::new("bcache0", 32 * MIB).with_garbage().shared();
    let mut server = Server::start(&dir.path().join("m"), &[&disk], LOOPS);
    run("mkfs.ext4", &["-q", text(server.device())]);
    let mounted = Mounted::new(server.device(), &mount_point);
    let file = File::open(server.file()).unwrap();
    let notes = server.force();
    assert_eq!(notes.len(), 1, "{notes:?}");
    assert!(notes[0].contains("was unmounted by force while in use"), "{notes:?}");
    assert!(notes[0].contains(text(&mount_point)), "{notes:?}");
    assert!(!host::is_mount_point(&server.dir));
    // A program that still has a file open gets an error and does not wait.
    let mut byte = [0];
    assert!(std::os::unix::fs::FileExt::read_at(&file, &mut byte, 0).is_err());
    drop(mounted);
    drop(file);
}

/// A second signal to an export that waits for a user of its file.
#[test]
fn a_stop_that_nobody_waits_for_any_more_becomes_a_forced_one() {
    if !host::ready(&[]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let disk = RamDisk::new("bcache0", MIB).with_garbage().shared();
    let mut server = Server::start(&dir.path().join("m"), &[&disk], LOOPS);
    let open = File::open(server.device()).unwrap();
    server.abandon();
    host::soon("the export is gone", || !host::is_mount_point(&server.dir));
    assert!(std::os::unix::fs::FileExt::read_at(&open, &mut [0; 4096], 0).is_err());
    drop(open);
    host::soon("the loop device is free", || host::loops_over(&server.dir).is_empty());
}

#[test]
fn an_operator_who_unmounts_by_hand_is_not_in_the_way() {
    if !host::ready(&[]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let disk = RamDisk::new("bcache0", MIB).with_garbage().shared();
    let mut server = Server::start(&dir.path().join("m"), &[&disk], FILES);
    run("umount", &[text(&server.dir)]);
    run("mount", &["-t", "tmpfs", "tmpfs", text(&server.dir)]);
    let _other = Debris(server.dir.clone());
    server.stop().unwrap();
    assert!(host::is_mount_point(&server.dir), "what is not ours stays");
}

/// A namespace that got a copy of the mount keeps the connection alive after it was unmounted here.
#[test]
fn a_copy_of_the_mount_elsewhere_does_not_keep_the_export() {
    if !host::ready(&["unshare", "mount"]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let disk = RamDisk::new("bcache0", MIB).with_garbage().shared();
    let mut server = Server::start(&dir.path().join("m"), &[&disk], FILES);
    let _control = host::fuse_control();
    let mut other = Command::new("unshare")
        .args(["-m", "--propagation", "private", "sh", "-c", "echo ready; read line"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(other.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "ready\n");
    let stopped = server.stop();
    drop(other.stdin.take());
    other.wait().unwrap();
    stopped.unwrap();
}

/// Not a test by itself: what a child process of the next tests does.
#[test]
fn child_that_serves() {
    let Some(dir) = std::env::var_os("UBCACHE_TEST_SERVE_AT") else { return };
    let disk = RamDisk::new("bcache0", 32 * MIB).with_garbage().shared();
    let server = Server::start(&PathBuf::from(dir), &[&disk], LOOPS);
    // Around what the test harness prints.
    println!("\nready: {}", text(server.device()));
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
}

struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn serve_in_child(dir: &Path) -> (Killed, PathBuf) {
    let mut child = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", "ends::child_that_serves", "--nocapture"])
        .env("UBCACHE_TEST_SERVE_AT", dir)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("this program starts");
    let output = BufReader::new(child.stdout.take().expect("a pipe"));
    let child = Killed(child);
    let line = output.lines().map(|l| l.expect("text")).find(|l| l.starts_with("ready: "));
    let line = line.expect("the child says that it is ready");
    (child, PathBuf::from(&line["ready: ".len()..]))
}

#[test]
fn a_mount_of_a_killed_process_is_cleaned_up() {
    if !host::ready(&["losetup"]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().canonicalize().unwrap().join("m");
    let _debris = Debris(at.clone());
    let (child, device) = serve_in_child(&at);
    // Data in the page cache that has nowhere to go any more.
    File::options().write(true).open(&device).unwrap().write_all(&[1; 65536]).unwrap();
    drop(child);
    assert_eq!(fs::read_dir(&at).unwrap_err().raw_os_error(), Some(107), "not connected");
    assert_eq!(host::loops_over(&at).len(), 1);

    let disk = RamDisk::new("bcache0", MIB).with_garbage().shared();
    let mut server = Server::start(&at, &[&disk], LOOPS);
    assert_eq!(server.notes.len(), 2, "{:?}", server.notes);
    assert!(server.notes[0].contains("has ended: removed"), "{:?}", server.notes);
    assert!(server.notes[1].contains("unmounted"), "{:?}", server.notes);
    assert_eq!(host::loops_over(&at).len(), 1, "the new one");
    server.stop().unwrap();
    assert!(host::loops_over(&at).is_empty());
    assert!(!host::is_mount_point(&at));
}

#[test]
fn a_dead_device_that_is_still_mounted_is_named() {
    if !host::ready(&["mkfs.ext4", "losetup"]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().canonicalize().unwrap().join("m");
    let mount_point = dir.path().join("mnt");
    let _debris = Debris(at.clone());
    let (child, device) = serve_in_child(&at);
    run("mkfs.ext4", &["-q", text(&device)]);
    let mounted = Mounted::new(&device, &mount_point);
    drop(child);
    let disk = RamDisk::new("bcache0", MIB).with_garbage().shared();
    let mut server = Server::start(&at, &[&disk], LOOPS);
    assert!(server.notes[0].contains("every access to it fails"), "{:?}", server.notes);
    assert!(server.notes[0].contains(text(&mount_point)), "{:?}", server.notes);
    assert_ne!(server.device(), device);
    drop(mounted);
    server.stop().unwrap();
}

#[test]
fn a_dead_file_system_of_another_kind_is_left_alone() {
    if !host::ready(&["losetup"]) {
        return;
    }
    // Ours by its making, not by its type.
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().canonicalize().unwrap().join("m");
    fs::create_dir(&at).unwrap();
    let _debris = Debris(at.clone());
    let script = "exec 9<>/dev/fuse && mount -i -t fuse.other -o fd=9,rootmode=40000,user_id=0,group_id=0 other \"$1\"";
    run("bash", &["-c", script, "bash", text(&at)]);
    assert_eq!(fs::metadata(&at).unwrap_err().raw_os_error(), Some(107), "not connected");
    let disk = RamDisk::new("bcache0", MIB).with_garbage().shared();
    let why = Server::try_start(&at, &[&disk], FILES).map(drop).unwrap_err();
    assert!(why.contains("fuse.other") && why.contains("has ended"), "{why}");
    assert!(host::is_mount_point(&at));
}
