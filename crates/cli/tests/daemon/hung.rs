//! Disks that hang while clients wait for them.

use serde_json::Value;

use crate::life::Frozen;
use crate::place::*;
use crate::world::*;

fn kinds(daemon: &Daemon) -> Vec<String> {
    let (_, status) = daemon.http("GET", "/v1/status", "");
    let all = status["problems"].as_array().expect("a list");
    all.iter().map(|p| p["kind"].as_str().expect("a text").to_owned()).collect()
}

fn events_with(daemon: &Daemon, words: &str) -> usize {
    let (_, events) = daemon.http("GET", "/v1/events/history", "");
    let all = events["events"].as_array().expect("a list");
    all.iter()
        .filter(|e| e["type"] == "device" && e["text"].as_str().is_some_and(|t| t.contains(words)))
        .count()
}

/// A write of a client waited for a disk for ten minutes, and `status`, `/metrics`, `events` and `explain` said that all was
/// well. The export of the volume was gone during `unregister`, and all said that it was there.
#[test]
fn a_disk_that_hangs_is_seen_and_so_is_the_export_that_waits_for_it() {
    let place = Place::new();
    let daemon = place.start();
    let slow = Frozen::registered(&place, &daemon);
    let mut client = place.client("bcache0");
    slow.freeze();
    let here = &daemon;
    std::thread::scope(|threads| {
        // The first dirty data has to wait for the superblock of the disk.
        let writes = threads.spawn(move || client.write(0, &[8; 4096]));
        wait_until("the problem", || kinds(here).iter().any(|kind| kind == "device_silent"));
        let said = here.run(&["status"]).ok().to_string();
        assert!(said.contains("one, ") && said.contains(" s: 1 request to it waits"), "{said}");
        assert!(here.metrics().contains("ubcache_problems{kind=\"device_silent\"} 1\n"));
        here.run(&["explain", "one"]).ok().says(&["has not answered for", "No such request was answered"]);
        assert_eq!(events_with(here, "has not answered for 1"), 1);
        let exported = |value| {
            let metrics = here.metrics();
            let line = metrics.lines().find(|line| line.starts_with("ubcache_volume_exported{"));
            line.is_some_and(|line| line.ends_with(value))
        };
        assert!(exported(" 1"));
        let unregister = threads.spawn(|| here.run(&["unregister", &slow.file]));
        let problem = || here.volume("bcache0")["problem"].clone();
        wait_until("the end of the export", || problem() != Value::Null);
        let text = problem();
        assert!(
            text.as_str().is_some_and(|text| text.contains(" s ago has ended nbd+unix:///bcache0")),
            "{text}"
        );
        assert!(exported(" 0"));
        here.run(&["status", "--check"]).refused(&["there are"]);
        here.run(&["status"]).ok().says(&["NOT EXPORTED"]);
        slow.thaw();
        unregister.join().unwrap().ok();
        // The connection ended with the export.
        let _ = writes.join().unwrap();
    });
    // The write is dirty data of a disk that is not registered any more.
    wait_until("the end of the problem", || kinds(&daemon).iter().all(|kind| kind == "dirty_without_disk"));
    daemon.run(&["register", &slow.file]).ok();
    assert!(place.client("bcache0").read(0, 4096).is_ok());
    daemon.stop();
}
