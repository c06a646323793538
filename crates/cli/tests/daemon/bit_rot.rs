//! Bit rot: a scrub as a job, the problem in `status`, the figures, and the decisions of the operator.

use std::os::unix::fs::FileExt;

use crate::place::*;
use crate::world::*;

const BLOCK: usize = 4096;
/// What the damaged block has.
const ONE: &[u8; 24] = b"a-block-that-will-be-hit";

fn block() -> Vec<u8> {
    ONE.iter().copied().cycle().take(BLOCK).collect()
}

/// A set with checksums, whose volume `one` has a damaged block of dirty data at sector 16.
fn with_damage() -> Place {
    let place = Place::new();
    let sizes =
        ["--bucket", "16k", "--block", "4k", "--writeback", "--label", "one", "--checksums", "--wipe"];
    run(&[&["make", "-C", &place.ssd, "-B", &place.hdd], &sizes[..]].concat()).ok();
    let daemon = place.start_registered();
    let mut client = place.client("bcache0");
    client.write(16 * 512, &block()).unwrap();
    client.write(64 << 10, &vec![7; 32 * BLOCK]).unwrap();
    client.flush().unwrap();
    drop(client);
    daemon.stop();
    let file = std::fs::File::options().write(true).open(&place.ssd).unwrap();
    let image = read(&place.ssd);
    let hit: Vec<usize> =
        (0..image.len()).step_by(BLOCK).filter(|at| image[*at..].starts_with(ONE)).collect();
    assert!(!hit.is_empty());
    hit.iter().for_each(|at| file.write_all_at(b"X", *at as u64).unwrap());
    place
}

#[test]
fn a_scrub_is_a_job_that_reports_damage() {
    let place = with_damage();
    let daemon = place.start();
    daemon.run(&["status"]).ok().says(&["no problems", "checksums: on", "never scrubbed"]);
    daemon.run(&["scrub", &place.ssd, "--dry-run"]).ok().says(&["would read 132.0 KiB"]);
    let said = daemon.run(&["scrub", &place.ssd, "--rate", "1GiB"]);
    said.refused(&["1 block of dirty data is damaged", "run `ubcache damaged "]);
    let jobs = daemon.json(&["jobs"]);
    let job = jobs["jobs"].as_array().unwrap().last().unwrap().clone();
    assert_eq!((&job["kind"], &job["state"]), (&"scrub".into(), &"failed".into()), "{job}");
    assert_eq!(job["report"]["scrubbed"]["damaged_dirty_blocks"], 1, "{job}");
    assert_eq!(job["report"]["scrubbed"]["verified_blocks"], 32, "{job}");

    let said = daemon.run(&["status"]).ok();
    said.says(&[
        "1 PROBLEM",
        "1 block of dirty data is damaged",
        "sector 16 of one",
        "run `ubcache damaged",
        "4.0 KiB DAMAGED",
        "last scrub 20",
    ]);
    let status = daemon.json(&["status"]);
    assert_eq!(status["problems"][0]["kind"], "damaged", "{status}");
    let checksums = &status["sets"][0]["set"]["checksums"];
    assert_eq!(checksums["damaged"][0]["sector"], 16, "{checksums}");
    assert_eq!(checksums["scrub"]["running"], false, "{checksums}");
    let metrics = daemon.metrics();
    for line in ["ubcache_checksum_damaged_dirty_bytes{", "ubcache_scrub_completed_timestamp_seconds{"] {
        let line =
            metrics.lines().find(|l| l.starts_with(line)).unwrap_or_else(|| panic!("{line}: {metrics}"));
        assert!(!line.ends_with(" 0"), "{line}");
    }
    let events = daemon.run(&["events", "--since", "1h"]).ok();
    events.says(&[
        "8 sectors from 16 on are damaged",
        "see `ubcache damaged one`",
        "scrub: 32 blocks are verified",
    ]);
    daemon.run(&["scrub", "nothing"]).refused(&["nothing"]);
    // The command that works is named, also for a dry run.
    let set = status["sets"][0]["id"].as_str().unwrap().to_owned();
    daemon.run(&["scrub", "one"]).refused(&["found a volume of set ", &format!("run `ubcache scrub {set} ")]);
    let dry = daemon.run(&["scrub", "one", "--dry-run"]);
    dry.refused(&[&format!("run `ubcache scrub {set} --dry-run ")]);
    daemon.stop();
}

/// The list was lost at a restart: `status` said that there were no problems, until the next scrub.
#[test]
fn damage_is_known_after_a_restart() {
    let place = with_damage();
    let daemon = place.start();
    daemon.run(&["scrub", &place.ssd]).refused(&["1 block of dirty data is damaged"]);
    let state = place.dir.path("state/state.json");
    let is_stored = || std::fs::read_to_string(&state).unwrap().contains("\"damaged\"");
    wait_until("the stored list", is_stored);
    let is_known = |daemon: &Daemon| daemon.json(&["status"])["problems"][0]["kind"] == "damaged";
    daemon.kill();
    let daemon = place.start();
    wait_until("the damage after a kill", || is_known(&daemon));
    daemon.stop();
    let daemon = place.start();
    wait_until("the damage after a stop", || is_known(&daemon));
    daemon.run(&["damaged", "one"]).ok().says(&["one: sectors 16+8, 4.0 KiB"]);
    // The events named the sector of the disk, because the volume was not there yet.
    let count_of = |what: &str| daemon.said().matches(what).count();
    wait_until("the events", || count_of(" are damaged (sector") == 3);
    assert_eq!(count_of("one: 8 sectors from 16 on are damaged"), 3, "{}", daemon.said());
    // Buckets that are read again are no scrub.
    daemon
        .run(&["damaged", "one", "accept", "--all"])
        .ok()
        .says(&["4.0 KiB accepted; 0 damaged ranges left"]);
    wait_until("the empty list", || !is_stored());
    daemon.run(&["damaged", "one"]).ok().says(&["no damaged dirty data is known; `ubcache scrub "]);
    daemon.stop();
    let daemon = place.start();
    daemon.run(&["status"]).ok().says(&["no problems"]);
    daemon.stop();
}

#[test]
fn damaged_data_is_listed_accepted_and_dropped() {
    for decision in ["accept", "drop"] {
        let place = with_damage();
        let daemon = place.start();
        assert!(place.client("bcache0").read(16 * 512, BLOCK as u32).is_err(), "damaged data was served");
        for name in ["one", &place.ssd] {
            daemon.run(&["damaged", name]).ok().says(&["one: sectors 16+8, 4.0 KiB"]);
        }
        let listed = daemon.json(&["damaged", "one"]);
        assert_eq!(listed["damaged"][0]["sectors"], 8, "{listed}");
        daemon.run(&["damaged", "one", decision]).usage().says(&["--range START+LENGTH, or --all"]);
        daemon.run(&["damaged", "one", decision, "--all", "--dry-run"]).ok().says(&["would", "16+8"]);
        if decision == "drop" {
            daemon
                .run(&["damaged", "one", "drop", "--all"])
                .usage()
                .says(&["pass --yes to drop it: one: sectors 16+8"]);
        }
        // A range without damage is a mistake.
        let other = daemon.run(&["damaged", "one", decision, "--range", "24+8", "--yes"]);
        other.refused(&["one: sectors 24+8 have no damaged dirty data, so nothing was changed"]);
        let done = daemon.json(&["damaged", "one", decision, "--range", "16+1", "--yes"]);
        assert_eq!((&done["bytes"], &done["damaged"]), (&4096.into(), &serde_json::json!([])), "{done}");
        daemon.run(&["damaged", "one"]).ok().says(&["no damaged dirty data"]);
        daemon.run(&["status"]).ok().says(&["no problems"]);
        let mut expected = if decision == "accept" { block() } else { vec![0; BLOCK] };
        if decision == "accept" {
            expected[0] = b'X';
        }
        assert!(place.client("bcache0").read(16 * 512, BLOCK as u32).unwrap() == expected, "{decision}");
        daemon.run(&["drain", "one"]).ok();
        let said = daemon.said();
        assert!(said.contains(&format!("{decision} damaged data (sectors 16+1)")), "{said}");
        daemon.stop();
    }
}

/// A scrub that was ended by a kill or by `cancel` continues where it was.
#[test]
fn a_scrub_is_cancelled() {
    let place = with_damage();
    let daemon = place.start();
    let job = daemon.json(&["scrub", &place.ssd, "--rate", "4096", "--no-wait"])["job"]["id"].clone();
    wait_until("the begin of the scrub", || {
        daemon.json(&["status"])["sets"][0]["set"]["checksums"]["scrub"]["running"] == true
    });
    daemon.run(&["status"]).ok().says(&["; scrub: "]);
    daemon.run(&["cancel", &job.to_string()]).ok();
    wait_until("the end of the job", || {
        let jobs = daemon.json(&["jobs"]);
        jobs["jobs"].as_array().unwrap().iter().any(|j| j["id"] == job && j["state"] == "cancelled")
    });
    daemon.run(&["set", &place.ssd, "scrub_interval_days=0"]).ok();
    daemon.stop();
}
