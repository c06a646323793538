//! Labels of sets.

use crate::place::*;
use crate::world::*;

/// A set had no label: commands named it by its UUID or its device.
#[test]
fn a_set_is_named_by_its_label() {
    let place = Place::new();
    let (fast, slow) = (place.dir.sparse("fast", 8 << 20), place.dir.sparse("slow", 8 << 20));
    run(&["make", "-C", &fast, "-B", &slow, "--bucket", "8k", "--set-label", "x/y"]).usage();
    run(&["make", "-B", &slow, "--set-label", "quick"]).usage().says(&["expected a -C"]);
    run(&["make", "-C", &fast, "-B", &slow, "--bucket", "8k", "--set-label", "quick"]).ok();
    run(&["super", &fast]).ok().says(&["quick"]);
    let daemon = place.start();
    daemon.run(&["register", &place.ssd, &place.hdd, &fast, &slow]).ok();
    daemon.run(&["get", "quick", "congested_read_threshold_us"]).ok().says(&["2000"]);
    // Labels of volumes and sets are unique together.
    daemon.run(&["set-label", &place.ssd, "quick"]).refused(&["label quick: belongs to set"]);
    daemon.run(&["set-label", &place.ssd, "one"]).refused(&["label one: belongs to bcache0"]);
    daemon.run(&["set-label", "one", "quick"]).refused(&["label quick: belongs to set"]);
    daemon.run(&["set-label", &place.ssd, "bcache7"]).usage();
    daemon.run(&["set-label", "quick", "calm"]).ok().says(&["label calm"]);
    daemon.run(&["get", "quick"]).refused(&["no registered device with this label"]);
    assert_eq!(daemon.json(&["gc", "calm"])["resolved"]["label"], "calm");
    assert_eq!(daemon.http("GET", "/v1/sets/calm", "").1["set"]["set"]["label"], "calm");
    daemon.stop();
    let daemon = place.start();
    daemon.run(&["wipe", "calm", "--no-wait"]).ok();
    daemon.stop();
}
