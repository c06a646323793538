//! Devices that appear while the daemon runs: real block devices, and the kernel's own events.

use std::fs;
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, PoisonError};

use format::superblock::{BackingSuper, RawSuperblock, SUPERBLOCK_BYTES, SUPERBLOCK_SECTOR};
use format::{BackingState, SECTOR_BYTES, Sectors, Uuid};

use crate::place::*;
use crate::world::*;

/// Held by a test with a daemon that takes what appears: it would take the devices of the other tests, too.
static ALONE: Mutex<()> = Mutex::new(());

/// A block device in memory; gone when dropped.
struct Zram(String);

impl Zram {
    /// `None`, and the test is skipped, where this system or user has none to give, or where the kernel's own driver might
    /// take it.
    fn new() -> Option<Zram> {
        if std::path::Path::new("/sys/fs/bcache").exists() {
            rig::skipped("the kernel's bcache is loaded");
            return None;
        }
        match fs::read_to_string("/sys/class/zram-control/hot_add") {
            Ok(number) => {
                let zram = Zram(format!("zram{}", number.trim()));
                fs::write(format!("/sys/block/{}/disksize", zram.0), "16M").unwrap();
                Some(zram)
            }
            Err(e) => {
                rig::skipped(format_args!("no zram device can be made: {e}"));
                None
            }
        }
    }

    fn path(&self) -> String {
        format!("/dev/{}", self.0)
    }

    /// Has the kernel say that something happened to it.
    fn says(&self, what: &str) {
        fs::write(format!("/sys/block/{}/uevent", self.0), what).unwrap();
    }
}

impl Drop for Zram {
    fn drop(&mut self) {
        let _ = fs::write(format!("/sys/block/{}/reset", self.0), "1");
        let _ = fs::write("/sys/class/zram-control/hot_remove", self.0.trim_start_matches("zram"));
    }
}

#[test]
fn a_hotplugged_device_is_registered_if_configured() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let (Some(ssd), Some(hdd), Some(other)) = (Zram::new(), Zram::new(), Zram::new()) else { return };
    let place = Place::new();
    place.configure("scan_on_events = true\n");
    let daemon = place.start();
    run(&["make", "-C", &ssd.path(), "-B", &hdd.path(), "--bucket", "8k", "--writeback", "--label", "came"])
        .ok();
    let known = |zram: &Zram| {
        let path = zram.path();
        daemon.devices().iter().find(|d| d["path"] == path).map(|d| d["state"].as_str().unwrap().to_owned())
    };
    // The backing device first: it waits for its cache.
    hdd.says("change");
    wait_until("the backing device", || known(&hdd).as_deref() == Some("waiting"));
    assert_eq!(known(&ssd), None, "nothing was said of it");
    ssd.says("add");
    wait_until("the set", || known(&ssd).as_deref() == Some("served"));
    // Its superblock says that it was made for that set; it was never attached, and no command has named it.
    let waits = || daemon.run(&["status"]).ok().to_string().contains("no operator has named it");
    wait_until("the word that is missing", waits);
    assert_eq!(known(&hdd).as_deref(), Some("waiting"));
    daemon.run(&["register", &hdd.path()]).ok().says(&["served"]);
    place.client("bcache0").write(0, &[7; 4096]).unwrap();
    daemon.run(&["show", "-m"]).ok().says(&["came"]);

    // A device that was unregistered stays unregistered, whatever changes. Its uevent is handled before the next one.
    daemon.run(&["unregister", "came"]).ok();
    hdd.says("change");
    run(&["make", "-B", &other.path(), "--label", "other"]).ok();
    other.says("change");
    wait_until("the other device", || known(&other).as_deref() == Some("served"));
    assert_eq!(known(&hdd), None);
    hdd.says("add");
    wait_until("the device that was taken out and put in", || known(&hdd).as_deref() == Some("served"));
    assert_eq!(place.client("bcache0").read(0, 4096).unwrap(), [7; 4096]);
    daemon.stop();

    // Without the word of the operator nothing is taken; what was registered is.
    place.configure("");
    std::fs::remove_dir_all(place.dir.path("state")).unwrap();
    let daemon = place.start();
    ssd.says("add");
    daemon.run(&["register", &place.ssd]).ok();
    assert_eq!(daemon.devices().len(), 1);
    daemon.stop();
    run(&["check", &ssd.path(), &hdd.path()]).ok();
}

/// Changes the superblock of a disk.
pub(crate) fn edit(path: &str, change: impl FnOnce(&mut BackingSuper)) {
    let disk = fs::File::options().read(true).write(true).open(path).unwrap();
    let (at, mut bytes) = (SUPERBLOCK_SECTOR.0 * SECTOR_BYTES, [0; SUPERBLOCK_BYTES]);
    disk.read_exact_at(&mut bytes, at).unwrap();
    let raw = RawSuperblock::from_prefix(&bytes).unwrap();
    let mut superblock = raw.check_backing(Sectors(8192), 0).unwrap();
    change(&mut superblock);
    disk.write_all_at(&superblock.encode(), at).unwrap();
    disk.sync_all().unwrap();
}

/// Makes a disk that says of itself that it was attached to this set.
fn stranger(path: &str, set: &str, state: BackingState) {
    run(&["make", "-B", path]).ok();
    edit(path, |superblock| {
        superblock.set_set_uuid(set.parse::<Uuid>().unwrap());
        superblock.set_state(state);
    });
}

/// Only a disk that was made for a set waited. A stranger's disk that claimed to be attached got a slot of the set.
#[test]
fn a_disk_that_claims_to_be_attached_waits_until_it_is_named() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    for state in [BackingState::Clean, BackingState::Stale] {
        let (Some(before), Some(after)) = (Zram::new(), Zram::new()) else { return };
        let place = Place::new();
        place.configure("scan_on_events = true\n");
        let daemon = place.start();
        daemon.run(&["register", &place.ssd]).ok();
        let set = daemon.json(&["status"])["sets"][0]["id"].as_str().unwrap().to_owned();
        daemon.run(&["unregister", &place.ssd]).ok();
        let appears = |zram: &Zram| {
            zram.says("add");
            let is_there = || daemon.devices().iter().any(|d| d["path"] == zram.path());
            wait_until("the disk", is_there);
        };
        // One comes before the set. A clean one waits for the set, a stale one is served without it.
        stranger(&before.path(), &set, state);
        appears(&before);
        daemon.run(&["register", &place.ssd, &place.hdd]).ok();
        stranger(&after.path(), &set, state);
        appears(&after);
        let mut strangers = vec![after.path()];
        match state {
            BackingState::Clean => strangers.push(before.path()),
            _ => assert_eq!(daemon.volume("bcache0")["attached"], false),
        }
        for path in &strangers {
            assert_eq!(daemon.state_of(path), "waiting");
            let problems = daemon.json(&["status"])["problems"].clone();
            let problem = problems.as_array().unwrap().iter().find(|p| p["device"] == **path).unwrap();
            let text = problem["text"].as_str().unwrap();
            assert!(text.contains("has no slot for it, and no operator has named it"), "{text}");
            assert_eq!(problem["command"], format!("ubcache register {path}"));
        }
        daemon.stop();
        // The next start remembers the strangers and attaches none of them. It attaches the disk that the operator has named.
        let daemon = place.start();
        assert_eq!(daemon.state_of(&place.hdd), "served");
        for path in &strangers {
            assert_eq!(daemon.state_of(path), "waiting");
            daemon.run(&["register", path]).ok().says(&["served"]);
        }
        daemon.stop();
        let daemon = place.start();
        strangers.iter().for_each(|path| assert_eq!(daemon.state_of(path), "served", "it has a slot"));
        daemon.stop();
    }
}
