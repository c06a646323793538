//! A cache device is lost for good: `detach --force` and `attach --force` release a clean disk that waits for it.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use crate::place::*;
use crate::world::*;

const DATA: [u8; 4096] = [7; 4096];

/// A disk that waits for its lost cache device, whose file is called `lost-ssd`.
struct Lost {
    place: Place,
    daemon: Daemon,
    lost_ssd: String,
}

fn lost(dirty: bool) -> Lost {
    let place = Place::new();
    let daemon = place.start_registered();
    let mut client = place.client("bcache0");
    client.write(0, &DATA).unwrap();
    client.flush().unwrap();
    drop(client);
    if !dirty {
        daemon.run(&["set", "one", "writeback_running=1"]).ok();
        daemon.run(&["drain", "one"]).ok();
    }
    daemon.stop();
    let lost_ssd = place.dir.path("lost-ssd");
    std::fs::rename(&place.ssd, &lost_ssd).unwrap();
    let daemon = place.start();
    assert_eq!(daemon.state_of(&place.hdd), "waiting");
    Lost { place, daemon, lost_ssd }
}

/// The cache device was lost while the disk was clean. No command of the daemon could release the disk: `attach` to a new set
/// refused it, and it waited for a device that would never come back.
#[test]
fn a_clean_disk_leaves_the_set_of_a_lost_cache_device() {
    let Lost { place, daemon, lost_ssd } = lost(false);
    let next = format!("the page dead-ssd-clean of the guide; run `ubcache register {}`", place.ssd);
    daemon.run(&["status"]).says(&["waits for it", &next]);
    daemon.run(&["detach", "one"]).refused(&["is not served"]);
    daemon.run(&["detach", "one", "--force"]).ok().says(&["without its cache device", "bcache0"]);
    assert_eq!(daemon.state_of(&place.hdd), "served");
    assert!(place.client("bcache0").read(0, 4096).unwrap() == DATA);
    run(&["super", &place.hdd]).ok().says(&["detached"]);
    // It is served, so there is nothing to force.
    daemon.run(&["detach", "one", "--force"]).refused(&["is attached to no cache set"]);
    daemon.stop();
    // The lost device comes back: the disk does not return to it by itself.
    let daemon = place.start();
    place.client("bcache0").write(0, &[8; 4096]).unwrap();
    daemon.run(&["register", &lost_ssd]).ok();
    assert!(place.client("bcache0").read(0, 4096).unwrap() == [8; 4096]);
    daemon.run(&["attach", &lost_ssd, "one"]).ok();
    assert!(place.client("bcache0").read(0, 4096).unwrap() == [8; 4096], "the old content is invalid");
    daemon.stop();
    run(&["check", &lost_ssd, &place.hdd]).ok();
}

#[test]
fn a_clean_disk_of_a_lost_cache_device_is_attached_to_a_new_one() {
    let Lost { place, daemon, .. } = lost(false);
    let new = place.dir.sparse("new", 8 << 20);
    run(&["make", "-C", &new, "--bucket", "8k"]).ok();
    daemon.run(&["register", &new]).ok();
    let next =
        format!("which is not served; run `ubcache register {}`, then `ubcache detach one`", place.ssd);
    daemon.run(&["attach", &new, "one"]).refused(&["is attached to cache set", &next, "dead-ssd-clean"]);
    assert_eq!(daemon.state_of(&place.hdd), "waiting");
    daemon.run(&["attach", &new, "one", "--force"]).ok().says(&["attached to"]);
    assert!(place.client("bcache0").read(0, 4096).unwrap() == DATA);
    daemon.stop();
    run(&["check", &new, &place.hdd]).ok();
    // The next start serves it through the new cache device.
    let daemon = place.start();
    assert_eq!(daemon.volume("bcache0")["attached"], true);
    daemon.stop();
}

/// The newest data of a dirty disk is on its cache device alone, so no option of these commands releases it.
#[test]
fn a_dirty_disk_is_never_released() {
    let Lost { place, daemon, lost_ssd } = lost(true);
    let before = read(&place.hdd);
    daemon.run(&["status"]).says(&["has dirty data in", "the page dead-ssd-dirty of the guide"]);
    let says = ["has dirty data in cache set", "the page dead-ssd-dirty of the guide"];
    daemon.run(&["detach", "one", "--force"]).refused(&says);
    let new = place.dir.sparse("new", 8 << 20);
    run(&["make", "-C", &new, "--bucket", "8k"]).ok();
    daemon.run(&["register", &new]).ok();
    daemon.run(&["attach", &new, "one", "--force"]).refused(&says);
    assert!(read(&place.hdd) == before, "the disk was not changed");
    assert_eq!(daemon.state_of(&place.hdd), "waiting");
    // The device is found again, and nothing is lost.
    daemon.run(&["register", &lost_ssd]).ok();
    assert!(place.client("bcache0").read(0, 4096).unwrap() == DATA);
    daemon.stop();
}

/// The dirty data of a disk that died was in no problem after its cache device was unregistered.
#[test]
fn status_says_where_the_dirty_data_of_a_dead_disk_is() {
    let place = Place::new();
    let mut daemon = place.start_registered();
    let mut client = place.client("bcache0");
    client.write(0, &DATA).unwrap();
    client.flush().unwrap();
    drop(client);
    let away = place.dir.path("away");
    std::fs::rename(&place.hdd, &away).unwrap();
    daemon.run(&["unregister", &place.ssd]).ok().says(&["4.0 KiB of dirty data stay on it"]);
    let alone = format!("has dirty data of it, which is on its cache device ({}) alone", place.ssd);
    for _ in 0..2 {
        daemon.run(&["status"]).ok().says(&["1 PROBLEM", "hdd", " failed: ", &alone]);
        // The next start cannot read the disk.
        daemon.stop();
        daemon = place.start();
    }
    daemon.run(&["register", &place.ssd]).ok();
    let next = format!("register {}`", place.hdd);
    let belong = "4.0 KiB of dirty data in cache set ";
    let said = daemon.run(&["status"]).ok().says(&[belong, "a disk that is not registered (one, ", &next]);
    assert!(!said.out.contains(&alone) && !said.out.contains("it was formatted"), "{said}");
    std::fs::rename(&away, &place.hdd).unwrap();
    daemon.run(&["register", &place.hdd]).ok();
    daemon.run(&["status"]).ok().says(&["no problems"]);
    // The disk waits for its cache device, and is not said to have failed.
    daemon.run(&["unregister", &place.ssd]).ok();
    assert!(!daemon.run(&["status"]).ok().out.contains(&alone));
    let state = || std::fs::read_to_string(place.dir.path("state/state.json")).unwrap();
    assert!(state().contains("left_dirty"));
    daemon.run(&["register", &place.ssd]).ok();
    assert!(place.client("bcache0").read(0, 4096).unwrap() == DATA);
    assert!(!state().contains("left_dirty"));
    daemon.run(&["unregister", &place.ssd, "one"]).ok();
    assert!(!state().contains("left_dirty"));
    daemon.stop();
}

/// `--force` is for lost cache devices: a set that is served writes its dirty data back first.
#[test]
fn a_served_disk_is_not_detached_by_force() {
    let place = Place::new();
    let daemon = place.start_registered();
    daemon.run(&["detach", "one", "--force"]).refused(&["is served: detach it without --force"]);
    daemon.run(&["unregister", "one"]).ok();
    daemon.run(&["detach", &place.hdd, "--force"]).refused(&["is served: register the device"]);
    daemon.stop();
}

/// The answer was that nothing has this name.
#[test]
fn the_last_path_of_an_unregistered_disk_is_in_the_answer() {
    let place = Place::new();
    let mut daemon = place.start();
    daemon.run(&["register", &place.ssd, &place.hdd]).ok();
    let uuid = daemon.volume("one")["backing_uuid"].as_str().expect("a UUID").to_owned();
    daemon.run(&["unregister", "one"]).ok();
    for _ in 0..2 {
        let next = format!("; it was {}, which is not registered: run `ubcache register {0}`", place.hdd);
        for command in [
            &["detach", "one", "--force"][..],
            &["attach", &place.ssd, "one"],
            &["get", "one"],
            &["get", "bcache0"],
            &["drain", &uuid],
        ] {
            daemon.run(command).refused(&[&next]);
        }
        // The daemon knows it also after a restart.
        daemon.stop();
        daemon = place.start();
    }
    daemon.run(&["get", "two"]).refused(&["no registered device with this label\n"]);
    daemon.run(&["register", &place.hdd]).ok();
    daemon.run(&["get", "one", "cache_mode"]).ok();
    daemon.stop();
}

/// A cache device that fails every request while a file exists: a file of nbdfuse over nbdkit.
struct FaultySsd {
    fuse: Child,
    mount_point: PathBuf,
    errors: String,
    file: String,
}

impl FaultySsd {
    /// Over a file; `None` if this machine cannot have it.
    fn over(dir: &Dir, image: &str) -> Option<FaultySsd> {
        if let Err(why) = export_fuse::probe().fuse {
            rig::skipped(why);
            return None;
        }
        let (mount_point, errors) = (dir.root().join("faulty"), dir.path("errors"));
        std::fs::create_dir(&mount_point).expect("a directory");
        let file = dir.path("faulty/ssd");
        let fuse = Command::new("nbdfuse")
            .arg(&file)
            .args(["--command", "nbdkit", "-s", "--exit-with-parent", "--filter=error", "file", image])
            .args([&format!("error-file={errors}"), "error=EIO", "error-rate=100%"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        let Ok(fuse) = fuse else {
            rig::skipped("nbdfuse is missing: install the Debian package libnbd-bin");
            return None;
        };
        let faulty = FaultySsd { fuse, mount_point, errors, file };
        wait_until("the device", || std::fs::exists(&faulty.file).is_ok_and(|there| there));
        Some(faulty)
    }

    fn fail(&self) {
        std::fs::write(&self.errors, "").expect("a file");
    }
}

impl Drop for FaultySsd {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.mount_point).output();
        let _ = self.fuse.kill();
        let _ = self.fuse.wait();
    }
}

/// A cache device died under a volume with dirty data, and `status` did not say what is at stake.
#[test]
fn status_says_what_a_dead_cache_device_has_alone() {
    let place = Place::new();
    let Some(ssd) = FaultySsd::over(&place.dir, &place.ssd) else { return };
    let daemon = place.start();
    daemon.run(&["register", &ssd.file, &place.hdd]).ok();
    let mut client = place.client("bcache0");
    client.write(0, &DATA).unwrap();
    client.flush().unwrap();
    ssd.fail();
    let is_disabled = || {
        let _ = client.write(4096, &DATA);
        daemon.json(&["status"])["sets"][0]["set"]["failed"].is_string()
    };
    wait_until("the failure of the set", is_disabled);
    let words =
        ["is disabled: ", "dirty data is on this cache device alone (", "of one (bcache0)", "dead-ssd-dirty"];
    daemon.run(&["status"]).ok().says(&words);
    // Commands that need the cache device say the same, and had no next step.
    let again = format!("run `ubcache unregister {} && ubcache register {}`", ssd.file, ssd.file);
    let alone_of = "alone (4.0 KiB of one (bcache0))";
    let alone = format!("dirty data is on {} alone (4.0 KiB of one, bcache0)", ssd.file);
    for command in [["drain", "one"], ["detach", "one"], ["drain", &*ssd.file]] {
        daemon.run(&command).refused(&[
            " is disabled: ",
            &alone,
            &again,
            "the page dead-ssd-dirty of the guide",
        ]);
    }
    let create = ["volume", "create", &ssd.file, "64k"];
    for command in [&["gc", &ssd.file][..], &create] {
        daemon.run(command).refused(&[" is disabled: ", &alone, &again]);
    }
    // These were refused, or promised what cannot be, after the superblock of the disk was written.
    let superblock = run(&["super", &place.hdd]).ok().out;
    for command in [
        &["set-label", "one", "other"][..],
        &["set", "one", "label=other"],
        &["set-cachemode", "one", "writethrough"],
        &["set-label", &ssd.file, "fast"],
    ] {
        daemon.run(command).refused(&[
            " is disabled: ",
            "was not changed",
            "`ubcache status` has the next step",
        ]);
    }
    assert_eq!(run(&["super", &place.hdd]).ok().out, superblock);
    let said = daemon.run(&["explain", "one"]).ok().out;
    let words = ["The set is disabled: ", "4.0 KiB of dirty data are on the cache device alone"];
    assert!(words.iter().all(|words| said.contains(words)), "{said}");
    assert!(!said.contains("writeback_running=1"), "{said}");
    daemon.run(&["register", &place.hdd]).refused(&["already served", " is disabled: ", alone_of]);
    // `wipe` and `scrub` named the page of a clean disk.
    for command in ["wipe", "scrub"] {
        let words = [" is disabled: ", &alone, &again, "the page dead-ssd-dirty of the guide"];
        daemon.run(&[command, &ssd.file]).refused(&words);
    }
    drop(client);
    // With the volume its dirty data left the problem, and the page of a clean disk was named.
    for (command, of) in [("stop", "one (bcache0): stopped)"), ("unregister", ": not registered)")] {
        daemon.run(&[command, &place.hdd]).ok();
        daemon.run(&["status"]).ok().says(&["1 PROBLEM", "alone (4.0 KiB of ", of, "dead-ssd-dirty"]);
        for command in ["wipe", "scrub", "drain"] {
            let words = ["(4.0 KiB of one)", "the page dead-ssd-dirty of the guide"];
            daemon.run(&[command, &ssd.file]).refused(&words);
        }
    }
    daemon.run(&["unregister", &ssd.file]).ok();
    daemon.stop();
}

/// The cache device died under a clean volume, which is served from the disk alone. `attach` to a new device waited two
/// seconds and said `in use by this process`, which is no hint at what to do.
#[test]
fn attach_says_that_a_dead_cache_device_is_unregistered_first() {
    let place = Place::new();
    let Some(ssd) = FaultySsd::over(&place.dir, &place.ssd) else { return };
    let new = place.dir.sparse("new", 8 << 20);
    run(&["make", "-C", &new, "--bucket", "8k"]).ok();
    let daemon = place.start();
    daemon.run(&["register", &ssd.file, &place.hdd, &new]).ok();
    daemon.run(&["set-cachemode", "one", "writethrough"]).ok();
    let mut client = place.client("bcache0");
    client.write(0, &DATA).unwrap();
    ssd.fail();
    let is_disabled = || {
        client.write(4096, &DATA).expect("the disk alone serves it");
        let status = daemon.json(&["status"]);
        let mut sets = status["sets"].as_array().unwrap().iter();
        sets.any(|s| s["set"]["failed"].is_string())
    };
    wait_until("the failure of the set", is_disabled);
    let clean = format!(
        "this volume has no dirty data, so nothing is lost; unmount or close what uses the set, then run `ubcache unregister {}`",
        ssd.file
    );
    daemon.run(&["detach", "one"]).refused(&[
        " is disabled: ",
        &clean,
        "the page dead-ssd-clean of the guide",
    ]);
    // The disk is written without its cache, so it does not wait for the cache device any more.
    client.write(4096, &DATA).unwrap();
    drop(client);
    let refused = daemon.run(&["attach", &new, "one"]);
    let command = format!("run `ubcache unregister {}`, then this command again", ssd.file);
    refused.refused(&["is disabled, and has the device", &command, "the page dead-ssd-clean of the guide"]);
    assert_eq!(daemon.state_of(&place.hdd), "served", "nothing was stopped");
    daemon.run(&["unregister", &ssd.file]).ok();
    wait_until("the disk", || daemon.state_of(&place.hdd) == "served");
    daemon.run(&["attach", &new, "one"]).ok().says(&["attached to"]);
    assert!(place.client("bcache0").read(0, 8192).unwrap() == [DATA; 2].concat());
    daemon.stop();
}

/// `status` had no problem while a cache device failed reads, until there were so many that the set was disabled.
#[test]
fn status_says_that_a_cache_device_has_errors() {
    let place = Place::new();
    let Some(ssd) = FaultySsd::over(&place.dir, &place.ssd) else { return };
    let daemon = place.start();
    daemon.run(&["register", &ssd.file, &place.hdd]).ok();
    daemon.run(&["set", &ssd.file, "io_error_limit=1000"]).ok();
    daemon.run(&["set-cachemode", "one", "writethrough"]).ok();
    let mut client = place.client("bcache0");
    client.write(0, &DATA).unwrap();
    client.flush().unwrap();
    daemon.run(&["status"]).ok().says(&["no problems"]);
    ssd.fail();
    assert!(client.read(0, 4096).unwrap() == DATA, "the disk has the data");
    let said = daemon.run(&["status"]).ok();
    said.says(&[
        "1 PROBLEM",
        " to its cache device failed; the set is disabled at 1000 (io_error_limit); run `ubcache events ",
    ]);
    daemon.run(&["events", "--since", "1d"]).ok().says(&["read"]);
    std::fs::remove_file(&ssd.errors).unwrap();
    drop(client);
    daemon.run(&["unregister", &ssd.file]).ok();
    daemon.stop();
}
