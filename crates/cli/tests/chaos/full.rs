//! Sparse files on a file system that runs out of room, under the backing device and under the cache.

use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::process::Command;

use tempfile::TempDir;

use crate::host;
use crate::load::{Load, Traffic};
use crate::place::*;
use crate::world::*;

/// The protocol's number for an error of a device, and for no room.
const EIO: u32 = 5;
const ENOSPC: u32 = 28;

/// A small file system of its own; unmounted when dropped.
struct SmallFs {
    at: PathBuf,
    /// What it is in. While it has a name, the incarnation of devices on it is known, and they have a crash log.
    memory: Option<TempDir>,
}

impl SmallFs {
    /// ext4 by a loop device, on which direct I/O works; in memory, as it is not the disk that is tested.
    fn ext4(dir: &Dir, bytes: u64) -> SmallFs {
        let memory = TempDir::new_in("/dev/shm").expect("a directory in memory");
        let image = memory.path().join("fs.img");
        File::create_new(&image).expect("a new file").set_len(bytes).expect("a sparse file");
        let image = host::text(&image);
        host::run("mkfs.ext4", &["-q", "-F", "-m", "0", "-O", "^has_journal", image]);
        let mut fs = SmallFs::mounted(dir, &["-o", "loop", image]);
        fs.memory = Some(memory);
        fs
    }

    /// A file system in memory.
    fn tmpfs(dir: &Dir, bytes: u64) -> SmallFs {
        SmallFs::mounted(dir, &["-t", "tmpfs", "-o", &format!("size={bytes}"), "tmpfs"])
    }

    fn mounted(dir: &Dir, what: &[&str]) -> SmallFs {
        let at = dir.root().join("small");
        std::fs::create_dir(&at).expect("a mount point");
        host::run("mount", &[what, &[host::text(&at)]].concat());
        SmallFs { at, memory: None }
    }

    fn sparse(&self, name: &str, bytes: u64) -> String {
        let path = self.at.join(name);
        File::create_new(&path).expect("a new file").set_len(bytes).expect("a sparse file");
        path.to_str().expect("a plain path").to_owned()
    }

    /// Takes all room that is left.
    fn fill(&self) {
        let mut ballast = File::create(self.at.join("ballast")).expect("a file");
        for len in [1 << 20, 64 << 10, 4 << 10] {
            let block = vec![1; len];
            while ballast.write_all(&block).is_ok() {}
        }
        // What was only promised is taken now.
        let _ = ballast.sync_all();
    }

    /// Gives room back.
    fn free(&self) {
        std::fs::remove_file(self.at.join("ballast")).expect("our file");
    }
}

impl Drop for SmallFs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.at).output();
        self.memory = None;
    }
}

/// Runs load until so many requests have failed, each with one of the error numbers in `allowed`.
fn until_errors(traffic: &mut Traffic, load: &mut Load, up: &Up, allowed: &[u32], errors: u64) {
    let mut seen = 0;
    for _ in 0..20_000 {
        traffic.top_up(load).expect("a server");
        match traffic.answer(load).expect("a server") {
            0 => {}
            errno if allowed.contains(&errno) => seen += 1,
            other => panic!("error {other}: {}", up.said()),
        }
        if seen == errors {
            return;
        }
    }
    panic!("{seen} errors instead of {errors}: {}", up.said());
}

/// Writes that need new room on the backing device fail, each with ENOSPC, although they go past the cache. All other
/// requests succeed, and these succeed, too, when there is room again.
fn backing_file(seed: u64, fs: fn(&Dir, u64) -> SmallFs, mode: &str) {
    if !host::ready(&["unshare", "mkfs.ext4"]) {
        return;
    }
    let dir = Dir::new();
    let fs = fs(&dir, 24 << 20);
    let (ssd, hdd) = (dir.sparse("ssd", 12 << 20), fs.sparse("hdd", 48 << 20));
    let place = Place::with(dir, ssd, hdd, &[]);
    let mut load = place.load(seed);
    let mode = format!("--set=cache_mode={mode}");
    let args = [mode.as_str(), "--set=sequential_cutoff=0"];
    let up = place.up(&args);
    let mut traffic = Traffic::connect(&place.socket);
    traffic.run(&mut load, 300);
    fs.fill();
    // More than a failing device is allowed (`io_error_limit`).
    until_errors(&mut traffic, &mut load, &up, &[ENOSPC], 100);
    traffic.settle(&mut load);
    load.judge_served(&place.socket, "served without room");
    up.kill();
    place.check();
    let up = place.up(&args);
    load.judge_served(&place.socket, "served again without room");
    let mut traffic = Traffic::connect(&place.socket);
    until_errors(&mut traffic, &mut load, &up, &[ENOSPC], 10);
    traffic.settle(&mut load);
    fs.free();
    traffic.run(&mut load, 300);
    up.stop();
    place.check();
    place.finish(&mut load);
}

#[test]
fn under_the_backing_device() {
    backing_file(21, SmallFs::ext4, "writethrough");
}

#[test]
fn under_a_backing_device_in_memory() {
    backing_file(22, SmallFs::tmpfs, "writearound");
}

/// Dirty data that the backing device has no room for stays in the cache, and is written back once there is room. There is
/// room for what was written, but not for what lies between: writeback goes over gaps and wrote their zeroes once, until the
/// file system was full again and the last dirty blocks found no room.
#[test]
fn under_the_backing_device_while_data_is_written_back() {
    if !host::ready(&["unshare", "mkfs.ext4"]) {
        return;
    }
    let dir = Dir::new();
    let fs = SmallFs::ext4(&dir, 24 << 20);
    // Nothing has to go past a cache of this size.
    let (ssd, hdd) = (dir.sparse("ssd", 160 << 20), fs.sparse("hdd", 48 << 20));
    let place = Place::with(dir, ssd, hdd, &["--writeback"]);
    let mut load = place.load(23);
    let args = [
        "--set=sequential_cutoff=0",
        "--set=congested_read_threshold_us=0",
        "--set=congested_write_threshold_us=0",
        "--set=writeback_delay=0",
        "--set=writeback_percent=0",
        "--set=writeback_bridge=always",
    ];
    let mut up = place.up(&args);
    let mut traffic = Traffic::connect(&place.socket);
    traffic.run(&mut load, 100);
    fs.fill();
    traffic.run(&mut load, 500);
    traffic.settle(&mut load);
    wait_until("a warning", || up.said().contains("writeback: "));
    let refused = up.ask("detach bcache0");
    assert_eq!(refused["event"], "error", "{refused}");
    // Giving up was not the end of it.
    traffic.run(&mut load, 100);
    traffic.settle(&mut load);
    assert!(dirty_bytes(&mut up) > 0);
    fs.free();
    let written_back = comes_about(|| dirty_bytes(&mut up) == 0);
    assert!(written_back, "{}: {}", up.stats(), up.said());
    up.kill();
    place.check();
    place.finish(&mut load);
}

/// A cache without room for data, then without room for its journal: with dirty data everything fails in the end, and
/// is there at the next start that has room.
fn cache_file(seed: u64, fs: fn(&Dir, u64) -> SmallFs) {
    if !host::ready(&["unshare", "mkfs.ext4"]) {
        return;
    }
    let dir = Dir::new();
    // All of the cache has room in the end.
    let fs = fs(&dir, 40 << 20);
    let (ssd, hdd) = (fs.sparse("ssd", 24 << 20), dir.sparse("hdd", 48 << 20));
    let place = Place::with(dir, ssd, hdd, &["--writeback"]);
    let mut load = place.load(seed);
    let args = ["--set=sequential_cutoff=0", "--set=writeback_running=0"];
    let up = place.up(&args);
    let mut traffic = Traffic::connect(&place.socket);
    traffic.run(&mut load, 150);
    fs.fill();
    until_errors(&mut traffic, &mut load, &up, &[ENOSPC, EIO], 50);
    traffic.settle(&mut load);
    wait_until("a message", || up.said().contains("the cache set is disabled"));
    signal(up.pid(), rustix::process::Signal::TERM);
    up.ended();
    place.check();
    // A start may need room or not; in neither case it takes anything away.
    if let Ok(up) = place.try_up(&[], &args) {
        up.kill();
        place.check();
    }
    fs.free();
    let up = place.up(&args);
    load.judge_served(&place.socket, "served again");
    Traffic::connect(&place.socket).run(&mut load, 100);
    up.stop();
    place.check();
    place.finish(&mut load);
}

#[test]
fn a_full_file_system_under_the_cache_loses_nothing() {
    cache_file(24, SmallFs::ext4);
}

#[test]
fn a_full_tmpfs_under_the_cache_loses_nothing() {
    cache_file(25, SmallFs::tmpfs);
}

/// Without dirty data a cache that has no room costs no client an error.
#[test]
fn a_clean_cache_without_room_costs_no_client_an_error() {
    if !host::ready(&["unshare", "mkfs.ext4"]) {
        return;
    }
    let dir = Dir::new();
    // All of the cache has room in the end: else the last stop could fail to write its metadata.
    let fs = SmallFs::ext4(&dir, 48 << 20);
    let (ssd, hdd) = (fs.sparse("ssd", 32 << 20), dir.sparse("hdd", 48 << 20));
    let place = Place::with(dir, ssd, hdd, &[]);
    let mut load = place.load(26);
    let args = ["--set=cache_mode=writethrough", "--set=sequential_cutoff=0"];
    let up = place.up(&args);
    let mut traffic = Traffic::connect(&place.socket);
    traffic.run(&mut load, 150);
    fs.fill();
    traffic.run(&mut load, 1500);
    wait_until("a warning", || up.said().contains("No space left on device"));
    traffic.settle(&mut load);
    load.judge_served(&place.socket, "served without room");
    up.kill();
    fs.free();
    let up = place.up(&args);
    load.judge_served(&place.socket, "served again");
    up.kill();
    place.finish(&mut load);
}
