//! What the daemon says of sets and devices in its log.

use crate::place::*;
use crate::world::*;

/// A process without a crash log warns at the start of the set, whatever the export: a crash loses completed, unflushed writes.
#[test]
fn a_set_without_a_crash_log_is_told() {
    let place = Place::new();
    let daemon = place.start_registered();
    let set = daemon.json(&["status"])["sets"][0]["id"].as_str().unwrap().to_owned();
    let warnings = daemon.said().matches(NO_CRASH_LOG).count();
    assert_eq!(warnings, usize::from(!has_crash_log(&set)), "{}", daemon.said());
    daemon.stop();
}

/// A backing device that was served alone is no set.
#[test]
fn a_backing_device_that_stops_is_not_called_a_set() {
    let place = Place::new();
    let disk = place.dir.sparse("disk", 8 << 20);
    run(&["make", "-B", &disk]).ok();
    let daemon = place.start();
    daemon.run(&["register", &disk]).ok();
    let uuid = daemon.volume("bcache0")["backing_uuid"].as_str().unwrap().to_owned();
    daemon.run(&["stop", "bcache0"]).ok();
    let said = daemon.said();
    assert!(said.contains(&format!("backing device {uuid} ({disk}) has stopped")), "{said}");
    assert!(!said.contains(&format!("set {uuid}")), "{said}");
    daemon.stop();
}

/// A disk waited for its cache device, which was there and had failed: that was said of the cache device only.
#[test]
fn a_disk_whose_cache_device_has_failed_says_so() {
    let place = Place::new();
    let daemon = place.start_registered();
    daemon.stop();
    let copy = place.dir.path("copy");
    std::fs::copy(&place.ssd, &copy).unwrap();
    std::fs::rename(&copy, &place.ssd).unwrap();
    let daemon = place.start();
    assert_eq!(daemon.state_of(&place.ssd), "failed");
    let devices = daemon.devices();
    let disk = devices.iter().find(|d| d["path"] == place.hdd.as_str()).unwrap();
    assert_eq!(disk["state"], "waiting");
    let why = disk["why"].as_str().unwrap();
    assert!(why.contains(&format!("its cache device {} has failed: is not the device", place.ssd)), "{why}");
    daemon.stop();
}
