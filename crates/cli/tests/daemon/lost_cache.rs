//! A cache device is lost for good: `detach --force` and `attach --force` release a clean disk that waits for it.

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
    let daemon = place.start();
    daemon.run(&["register", &place.ssd, &place.hdd]).ok();
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
    daemon
        .run(&["status"])
        .says(&["waits for it", "the page dead-ssd-clean of the guide; run `ubcache register CACHE-DEVICE`"]);
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
    daemon.run(&["attach", &new, "one"]).refused(&["is attached to cache set", "dead-ssd-clean"]);
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

/// `--force` is for lost cache devices: a set that is served writes its dirty data back first.
#[test]
fn a_served_disk_is_not_detached_by_force() {
    let place = Place::new();
    let daemon = place.start();
    daemon.run(&["register", &place.ssd, &place.hdd]).ok();
    daemon.run(&["detach", "one", "--force"]).refused(&["is served: detach it without --force"]);
    daemon.run(&["unregister", "one"]).ok();
    daemon.run(&["detach", &place.hdd, "--force"]).refused(&["is served: register the device"]);
    daemon.stop();
}
