//! Copies of devices, and older states of them: their UUIDs are right, and they are not what is remembered.

use std::os::unix::fs::PermissionsExt;

use serde_json::Value;

use crate::place::*;
use crate::world::*;

fn remembered(place: &Place) -> Vec<String> {
    let text = std::fs::read_to_string(place.dir.path("state/state.json")).unwrap();
    let state: Value = serde_json::from_str(&text).unwrap();
    state["devices"].as_object().unwrap().keys().cloned().collect()
}

/// A copy of a disk that is served is plugged in, with other contents.
#[test]
fn a_copy_does_not_take_the_place_of_what_is_served() {
    let place = Place::new();
    let daemon = place.start_registered();
    let mut client = place.client("bcache0");
    client.write(0, &[1; 4096]).unwrap();
    client.flush().unwrap();
    drop(client);
    let copies = ["hdd", "ssd"].map(|name| {
        let copy = place.dir.path(&format!("{name}.copy"));
        std::fs::copy(place.dir.path(name), &copy).unwrap();
        copy
    });
    let before = remembered(&place);
    assert_eq!(before, [place.hdd.clone(), place.ssd.clone()]);
    for copy in &copies {
        for more in [&[][..], &["--quiet"], &["--accept-replacement"]] {
            let args: Vec<&str> = ["register", copy].into_iter().chain(more.iter().copied()).collect();
            daemon.run(&args).refused(&[copy, "is served already", "unregister that one first"]);
        }
    }
    daemon.run(&["attach", &place.ssd, &copies[0]]).refused(&["is served already"]);
    assert_eq!(remembered(&place), before);
    assert_eq!(daemon.devices().len(), 2);
    let mode = std::fs::metadata(place.dir.path("state/state.json")).unwrap().permissions().mode();
    assert_eq!(mode & 0o7777, 0o600, "what is remembered is nobody else's business");
    daemon.kill();
    // The next start serves what was served.
    let daemon = place.start();
    assert_eq!(daemon.volume("bcache0")["backing_device"], place.hdd.as_str());
    assert!(place.client("bcache0").read(0, 4096).unwrap() == [1; 4096]);
    daemon.stop();
}

/// The original is detached and still served by its set's thread; the copy belongs to no set.
#[test]
fn a_copy_of_a_detached_disk_is_not_served_beside_it() {
    let place = Place::new();
    let daemon = place.start_registered();
    daemon.run(&["detach", "one"]).ok();
    let copy = place.dir.path("copy");
    std::fs::copy(&place.hdd, &copy).unwrap();
    let said = daemon.run(&["register", &copy]);
    assert_eq!(remembered(&place), [place.hdd.clone(), place.ssd.clone()], "{said}");
    said.refused(&["is served already"]);
    assert_eq!(daemon.devices().len(), 2);
    daemon.stop();
    let daemon = place.start();
    assert_eq!(daemon.volume("bcache0")["backing_device"], place.hdd.as_str());
    daemon.stop();
}

/// A disk is replaced by its copy, as `dd` makes one: that is the operator's to say.
#[test]
fn a_copy_takes_the_place_with_the_word_of_the_operator() {
    let place = Place::new();
    let daemon = place.start_registered();
    place.client("bcache0").write(0, &[1; 4096]).unwrap();
    daemon.stop();
    let new = place.dir.path("new");
    std::fs::copy(&place.hdd, &new).unwrap();
    std::fs::remove_file(&place.hdd).unwrap();
    let daemon = place.start();
    assert_eq!(daemon.state_of(&place.hdd), "failed");
    let differs =
        ["is not the device", "inode: expected", "--accept-replacement", "; see the page move of the guide"];
    daemon.run(&["register", &new]).refused(&differs);
    daemon.run(&["register", "--quiet", &new]).refused(&differs);
    daemon.run(&["attach", &place.ssd, &new]).refused(&differs);
    daemon.run(&["register", "--accept-replacement", &new]).ok().says(&[
        "accepted: is not the device",
        "inode: expected",
        "served as one (bcache0), UUID",
    ]);
    assert!(place.client("bcache0").read(0, 4096).unwrap() == [1; 4096]);
    daemon.stop();
    let daemon = place.start();
    assert_eq!(daemon.volume("bcache0")["backing_device"], new.as_str());
    daemon.stop();

    // Another disk with that UUID at the same path is not taken either.
    let copy = place.dir.path("copy");
    std::fs::copy(&new, &copy).unwrap();
    std::fs::rename(&copy, &new).unwrap();
    let daemon = place.start();
    assert_eq!(daemon.state_of(&new), "failed");
    daemon.run(&["status"]).ok().says(&differs);
    daemon.stop();
}

/// The cache device is as it was before it was last served: what was written since is missing on it.
#[test]
fn an_older_state_is_not_served_until_it_is_accepted() {
    let place = Place::new();
    let older = read(&place.ssd);
    let daemon = place.start_registered();
    daemon.stop();
    std::fs::write(&place.ssd, older).unwrap();
    let daemon = place.start();
    assert_eq!(daemon.state_of(&place.ssd), "failed");
    assert_eq!(daemon.state_of(&place.hdd), "waiting");
    daemon.run(&["status"]).ok().says(&[
        "is older than the last known state of cache set",
        "sequence number of the superblock: expected",
    ]);
    daemon.run(&["register", &place.ssd]).refused(&["is older than"]);
    daemon.run(&["register", &place.ssd, "--accept-replacement"]).ok().says(&["accepted: is older than"]);
    assert_eq!(daemon.state_of(&place.ssd), "served");
    daemon.stop();
}

/// What is served is moved, by whatever name: there is nothing to be asked.
#[test]
fn a_device_that_has_another_name_is_the_same() {
    let place = Place::new();
    let daemon = place.start_registered();
    daemon.run(&["stop", "one"]).ok();
    let moved = place.dir.path("moved");
    std::fs::rename(&place.hdd, &moved).unwrap();
    daemon.run(&["register", &moved]).ok().says(&["moved: served"]);
    assert_eq!(daemon.volume("bcache0")["backing_device"], moved.as_str());
    assert_eq!(daemon.devices().len(), 2, "where it was there is nothing");
    daemon.stop();
}

/// Two blocks, the second of which is written past the cache.
fn write_both(place: &Place, daemon: &Daemon, byte: u8) {
    let write = |at: u64| {
        let mut client = place.client("bcache0");
        client.write(at, &[byte; 4096]).unwrap();
        client.flush().unwrap();
    };
    daemon.run(&["set-cachemode", "one", "writeback"]).ok();
    write(0);
    daemon.run(&["set-cachemode", "one", "writearound"]).ok();
    write(1 << 20);
    daemon.run(&["set-cachemode", "one", "writeback"]).ok();
}

fn read_both(place: &Place) -> [u8; 2] {
    let mut client = place.client("bcache0");
    [0, 1 << 20].map(|at| client.read(at, 4096).unwrap()[0])
}

/// A set with both blocks on the disk, and a copy of the disk as it was then.
fn disk_and_copy(place: &Place) -> String {
    let daemon = place.start_registered();
    write_both(place, &daemon, 1);
    daemon.stop();
    run(&["flush", "-C", &place.ssd, "-B", &place.hdd]).ok();
    let copy = place.dir.path("copy");
    std::fs::copy(&place.hdd, &copy).unwrap();
    copy
}

/// What docs/durability.md says of a disk that is restored: one start behind it is served with a newer cache. A start without
/// the cache makes the cached data invalid.
#[test]
fn a_disk_that_was_restored_is_complete_after_a_start_without_its_cache() {
    let place = Place::new();
    let copy = disk_and_copy(&place);
    let daemon = place.start();
    write_both(&place, &daemon, 2);
    daemon.stop();
    std::fs::copy(&copy, &place.hdd).unwrap();
    let daemon = place.start();
    assert_eq!(read_both(&place), [2, 1], "not noticed: {}", daemon.said());
    daemon.run(&["unregister", &place.hdd]).ok();
    std::fs::copy(&copy, &place.hdd).unwrap();
    let socket = format!("--export=nbd={}", place.dir.path("once"));
    Up::start(&place.dir, 1, &["--without-cache", "-B", &place.hdd, &socket]).stop();
    daemon.run(&["register", &place.hdd]).ok();
    assert_eq!(read_both(&place), [1, 1], "{}", daemon.said());
    daemon.stop();
}

#[test]
fn a_disk_is_restored_after_it_was_detached() {
    let place = Place::new();
    let copy = disk_and_copy(&place);
    let daemon = place.start();
    write_both(&place, &daemon, 2);
    daemon.run(&["detach", "one"]).ok();
    daemon.run(&["unregister", &place.hdd]).ok();
    std::fs::copy(&copy, &place.hdd).unwrap();
    daemon.run(&["register", &place.hdd]).ok();
    assert_eq!(read_both(&place), [1, 1], "{}", daemon.said());
    assert_eq!(daemon.volume("bcache0")["attached"], true);
    daemon.stop();
}
