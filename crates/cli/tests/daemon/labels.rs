//! Labels of sets, and links to block devices by the labels of volumes.

use std::path::PathBuf;

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
    daemon.run(&["set-label", &place.ssd, "quick"]).refused(&["label quick: belongs to quick, set"]);
    daemon.run(&["set-label", &place.ssd, "one"]).refused(&["label one: belongs to one, bcache"]);
    daemon.run(&["set-label", "one", "quick"]).refused(&["label quick: belongs to quick, set"]);
    daemon.run(&["set-label", &place.ssd, "bcache7"]).usage();
    daemon.run(&["set-label", "quick", "calm"]).ok().says(&[": calm"]);
    daemon.run(&["get", "quick"]).refused(&["no registered device with this label"]);
    assert_eq!(daemon.json(&["gc", "calm"])["resolved"]["label"], "calm");
    assert_eq!(daemon.http("GET", "/v1/sets/calm", "").1["set"]["set"]["label"], "calm");
    daemon.stop();
    let daemon = place.start();
    daemon.run(&["gc", "calm"]).ok().says(&["buckets freed"]);
    daemon.stop();
}

/// The log named volumes and sets by names that change from start to start, and by UUIDs.
#[test]
fn the_log_names_labels_first() {
    let place = Place::new();
    let daemon = place.start_registered();
    let set = daemon.json(&["status"])["sets"][0]["id"].as_str().unwrap().to_owned();
    assert!(daemon.said().contains("ubcache: one, bcache0 ready: "), "{}", daemon.said());
    daemon.run(&["set-label", &place.ssd, "quick"]).ok();
    daemon.run(&["set", "quick", "journal_delay_ms=20"]).ok();
    daemon.run(&["set", "one", "writeback_percent=20"]).ok();
    daemon.run(&["drain", "one"]).ok().says(&["one, bcache0 ("]);
    let audit = format!("set journal_delay_ms=20 on quick, set {set} ({}, UUID ", place.ssd);
    assert!(daemon.said().contains(&audit), "{}", daemon.said());
    for event in [
        format!("quick, set {set}: journal_delay_ms is 20 now"),
        "one, bcache0: writeback_percent is 20 now".to_owned(),
        "drain one, bcache0: done".to_owned(),
    ] {
        daemon.run(&["events", "--since", "1h"]).ok().says(&[&event]);
    }
    daemon.run(&["unregister", &place.ssd]).ok();
    daemon.run(&["events", "--since", "1h"]).ok().says(&[&format!("quick, set {set} has stopped")]);
    // The disk waits for its set.
    assert!(daemon.said().contains(&format!("warning: one, {}: ", place.hdd)), "{}", daemon.said());
    daemon.stop();
}

/// The block devices of volumes had no names but those that change from start to start.
#[test]
fn a_link_leads_to_the_block_device_of_a_label() {
    let probe = export_fuse::probe();
    if let Err(why) = probe.fuse.and(probe.loop_device) {
        rig::skipped(why);
        return;
    }
    let place = Place::new();
    let dir = place.dir.root().display();
    let config = format!("exports = [\"fuse={dir}/{{volume}}\"]\nlinks = \"{dir}/links\"\n");
    std::fs::write(place.dir.path("ubcache.toml"), config).unwrap();
    let daemon = place.start_registered();
    let link = |label: &str| std::fs::read_link(place.dir.path(&format!("links/{label}"))).ok();
    let device = link("one").expect("a link");
    assert!(device.starts_with("/dev/"), "{device:?}");
    let exports = daemon.volume("bcache0")["exports"].clone();
    let is_it = |e: &serde_json::Value| e["address"].as_str().map(PathBuf::from) == Some(device.clone());
    assert!(exports.as_array().unwrap().iter().any(is_it), "{exports}");
    daemon.run(&["set-label", "one", "two"]).ok();
    assert_eq!((link("one"), link("two")), (None, Some(device)));
    daemon.run(&["stop", "two"]).ok();
    assert_eq!(link("two"), None);
    daemon.run(&["register", &place.hdd]).ok();
    assert!(link("two").is_some());
    // Another daemon with the same directory of links neither removes this link nor makes one beside it.
    let other = Place::new();
    let own =
        format!("exports = [\"fuse={}/{{volume}}\"]\nlinks = \"{dir}/links\"\n", other.dir.root().display());
    std::fs::write(other.dir.path("ubcache.toml"), own).unwrap();
    let second = other.start();
    assert!(
        second.said().contains("another daemon has links here, and this one makes none"),
        "{}",
        second.said()
    );
    second.run(&["register", &other.ssd, &other.hdd]).ok();
    assert!(link("two").is_some() && link("one").is_none());
    second.stop();
    assert!(link("two").is_some());
    daemon.stop();
    assert_eq!(link("two"), None);
}

/// A label such as `--force` was taken, and a command read it as an option.
#[test]
fn a_label_that_is_an_option_or_hides_is_refused() {
    let place = Place::new();
    let (fast, slow) = (place.dir.sparse("fast", 8 << 20), place.dir.sparse("slow", 8 << 20));
    let daemon = place.start_registered();
    for label in ["--force", "$(id)", "da\u{200b}ta", "a;b", "-x", " x", "bcache1", "a/b"] {
        let (set_label, of_new) = (format!("--set-label={label}"), format!("--label={label}"));
        let rule = ["expected a letter or digit", "such as films-2", "found \""];
        run(&["make", "-C", &fast, "-B", &slow, "--bucket", "8k", &of_new]).usage().says(&rule);
        run(&["make", "-C", &fast, "-B", &slow, "--bucket", "8k", &set_label]).usage().says(&rule);
        daemon.run(&["volume", "create", &place.ssd, "64k", &of_new]).usage().says(&rule);
        assert_eq!(
            daemon.http("PUT", "/v1/volumes/one/label", &serde_json::json!({"label": label}).to_string()).0,
            400
        );
    }
    assert!(read(&fast).iter().all(|b| *b == 0), "nothing was made");
    daemon.run(&["set-label", "one", "übung 2"]).ok().says(&[": übung 2"]);
    daemon.stop();
}

/// A stranger's disk with the label of a volume got the exports and tunables of that volume's section.
#[test]
fn a_section_by_label_applies_to_one_volume() {
    let place = Place::new();
    place.configure("[volume.one.tunables]\nwriteback_percent = 20\n");
    let other = place.dir.sparse("other", 8 << 20);
    run(&["make", "-B", &other, "--label", "one"]).ok();
    let daemon = place.start_registered();
    daemon.run(&["register", &other]).ok();
    let percents = |daemon: &Daemon| {
        ["bcache0", "bcache1"].map(|name| {
            let tunables = daemon.volume(name)["tunables"].as_array().unwrap().clone();
            let found = tunables.iter().find(|t| t["key"] == "writeback_percent").unwrap();
            found["value"].as_str().unwrap().to_owned()
        })
    };
    let problem = |daemon: &Daemon| {
        let status = daemon.json(&["status"]);
        let problems = status["problems"].as_array().unwrap();
        problems.iter().find(|p| p["kind"] == "label_shared").cloned()
    };
    assert_eq!(percents(&daemon), ["20", "10"]);
    let found = problem(&daemon).unwrap();
    assert!(
        found["text"]
            .as_str()
            .unwrap()
            .contains("[volume.one] of the configuration applies to bcache0 alone")
    );
    assert_eq!(found["command"], "ubcache set-label bcache1 one-2");
    daemon.stop();
    // While the owner is absent, the other one does not get the section either.
    let away = place.dir.path("away");
    std::fs::rename(&place.hdd, &away).unwrap();
    let daemon = place.start();
    daemon.run(&["get", "bcache1", "writeback_percent"]).ok().says(&["10"]);
    let text = problem(&daemon).unwrap()["text"].as_str().unwrap().to_owned();
    assert!(text.contains("bcache1 has the label one, which bcache0 had first"), "{text}");
    std::fs::rename(&away, &place.hdd).unwrap();
    daemon.run(&["register", &place.hdd]).ok();
    assert_eq!(percents(&daemon), ["20", "10"]);
    daemon.run(&["set-label", "bcache1", "one-2"]).ok();
    assert_eq!(problem(&daemon), None);
    daemon.stop();
}
