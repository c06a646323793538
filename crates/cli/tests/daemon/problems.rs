//! What `status` and `show` say of volumes that are not served as they should be, and what a command says to do next.

use std::process::{Command, Stdio};

use serde_json::Value;

use crate::place::*;
use crate::world::*;

/// Writes `blocks` of 4 KiB, which stay dirty.
fn dirty(place: &Place, blocks: usize) {
    let mut client = place.client("bcache0");
    client.write(0, &vec![7; blocks * 4096]).unwrap();
    client.flush().unwrap();
}

fn problems(daemon: &Daemon) -> Vec<(String, String)> {
    let status = daemon.json(&["status"]);
    let text = |p: &Value, key: &str| p[key].as_str().expect("a text").to_owned();
    let all = status["problems"].as_array().expect("a list");
    all.iter().map(|p| (text(p, "kind"), text(p, "command"))).collect()
}

/// The command as an operator runs it: the name of the program is the first word.
fn follow(daemon: &Daemon, command: &str) -> Said {
    let words: Vec<&str> = command.split(' ').skip(1).collect();
    daemon.run(&words)
}

/// A stopped volume disappeared from `status`, and could not be named by its label any more.
#[test]
fn a_stopped_volume_stays_listed_and_comes_back_by_its_label() {
    let place = Place::new();
    let daemon = place.start_registered();
    dirty(&place, 2);
    daemon.run(&["status"]).ok().says(&["no problems", "one ", "bcache0", "8.0 KiB (", "cache "]);
    daemon.run(&["stop", "one"]).ok();
    let said = daemon.run(&["status"]).ok().to_string();
    let line = said.lines().find(|l| l.contains(&place.hdd)).expect("the stopped volume").to_owned();
    let words: Vec<&str> = line.split_whitespace().collect();
    let size_and_dirty = ["8.0", "MiB", "-", "8.0", "KiB"];
    let expected = [&["one", "bcache0", &place.hdd][..], &size_and_dirty, &["-", "stopped", "-", "-", "-"]];
    assert_eq!(words, expected.concat());
    assert_eq!(problems(&daemon), [], "a stop is no problem");
    daemon.run(&["show"]).ok().says(&["one ", "stopped", "8.0 KiB"]);
    let next = format!("is not served: it was stopped; run `ubcache register {}`", place.hdd);
    daemon.run(&["drain", "one"]).refused(&["bcache0", &next]);
    // The answer to an unknown label says that neither a file nor a device has this name.
    daemon.run(&["register", "two"]).refused(&["two: no file of this directory and no registered device"]);
    daemon.run(&["register", "one"]).ok().says(&["hdd: served as one (bcache0), UUID "]);
    daemon.run(&["register", "one"]).ok().says(&["hdd: already served as one (bcache0), UUID "]);
    let again = daemon.json(&["register", &place.hdd]);
    assert_eq!(again["already"], serde_json::json!([place.hdd]));
    daemon.stop();
}

/// The percentages of volumes and of the set have one base, the size of the cache.
#[test]
fn amounts_are_shares_of_the_cache() {
    let place = Place::new();
    let daemon = place.start_registered();
    dirty(&place, 64);
    let amounts = |of: &Value| {
        ["cached_bytes", "dirty_bytes", "cached_percent", "dirty_percent"].map(|key| of[key].as_f64())
    };
    // The count of what is cached can be a second old.
    wait_until("the count", || daemon.volume("bcache0")["cached_bytes"] == 64 * 4096);
    let status = daemon.json(&["status"]);
    let (set, volume) = (&status["sets"][0]["set"], &status["sets"][0]["volumes"][0]);
    let size = set["size_bytes"].as_f64().expect("a size");
    assert_eq!(size, set["nbuckets"].as_f64().unwrap() * set["bucket_bytes"].as_f64().unwrap());
    let share = (64.0 * 4096.0 * 1000.0 / size).round() / 10.0;
    assert_eq!(amounts(volume), [Some(262_144.0), Some(262_144.0), Some(share), Some(share)]);
    assert_eq!(amounts(set), amounts(volume), "the only volume of the set");
    assert_eq!(volume["cached_is_exact"], true);
    // The data of a detached disk is in no volume, and the figure of the set counts the same as those of the volumes.
    daemon.run(&["set", "one", "writeback_running=1"]).ok();
    daemon.run(&["detach", "one"]).ok();
    wait_until("the count of the set", || daemon.json(&["status"])["sets"][0]["set"]["cached_bytes"] == 0);
    daemon.stop();
}

/// Dirty data that stays behind was not mentioned by `unregister`.
#[test]
fn unregister_says_how_much_dirty_data_stays_where() {
    let place = Place::new();
    let daemon = place.start_registered();
    dirty(&place, 3);
    let stays =
        format!("unregistered; 12.0 KiB of dirty data stay on {}, and this disk is out of date", place.ssd);
    daemon.run(&["unregister", "one"]).ok().says(&[&stays]);
    let found = problems(&daemon);
    assert_eq!(found, [("dirty_without_disk".to_owned(), format!("ubcache register {}", place.hdd))]);
    daemon.run(&["status"]).ok().says(&["1 PROBLEM\n", "12.0 KiB of dirty data", "(one, UUID "]);
    daemon.run(&["unregister", &place.ssd]).ok().says(&["12.0 KiB of dirty data stay on it"]);
    // Without the set, the superblock of the disk says that there is some.
    daemon.run(&["register", &place.hdd]).ok().says(&["waiting"]);
    let next = format!("ubcache register {}", place.ssd);
    assert_eq!(problems(&daemon)[0], ("device_waiting".to_owned(), next.clone()));
    let next = format!("run `{next}`");
    daemon.run(&["drain", "one"]).refused(&[
        "is not served: has dirty data in cache set",
        "waits for it",
        &next,
    ]);
    daemon.run(&["unregister", &place.hdd]).ok().says(&["dirty data stays on the cache device of set"]);
    daemon.run(&["register", &place.ssd, &place.hdd]).ok();
    daemon.run(&["set", "one", "writeback_running=1"]).ok();
    daemon.run(&["drain", "one"]).ok();
    let clean = daemon.run(&["unregister", "one"]).ok().to_string();
    assert!(!clean.contains("dirty"), "{clean}");
    daemon.stop();
}

/// `unregister` took one device only, and did not say so.
#[test]
fn several_devices_are_unregistered_by_one_command() {
    let place = Place::new();
    let daemon = place.start_registered();
    let said = daemon.run(&["unregister", "one", "nothing", &place.ssd]);
    said.refused(&["hdd", ": unregistered", "nothing"]);
    assert_eq!(daemon.devices().len(), 1, "the command ended at what it does not know");
    daemon.run(&["register", &place.hdd]).ok();
    let said = daemon.run(&["unregister", "one", &place.ssd]).ok();
    assert_eq!(said.out.matches(": unregistered").count(), 2, "{said}");
    assert_eq!(daemon.devices().len(), 0);
    daemon.stop();
}

/// Regression: refusals named types of the parser or fields of the format, and not the value that was expected.
#[test]
fn a_refused_value_says_what_is_expected() {
    let place = Place::new();
    let fast = place.dir.sparse("fast", 8 << 20);
    for bucket in ["1k", "12k"] {
        run(&["make", "-C", &fast, "--bucket", bucket])
            .usage()
            .says(&["--bucket: expected a power of two of at least 4.0 KiB, such as 512k, found 1"]);
    }
    run(&["top", "-i", "0.1"]).usage().says(&["expected whole seconds from 1 to 3600, such as 5"]);
    run(&["wait", "one", "--timeout", "soon"]).usage().says(&["expected whole seconds, such as 0, 5"]);
    place.configure("memory_limit = 1048576\n");
    assert!(
        place
            .refused()
            .contains("line 2: memory_limit: expected a size of at least 64 MiB, such as 256MiB, found")
    );
    place.configure("drain_deadline_s = \"5m\"\n");
    let said = place.refused();
    assert!(
        said.contains("line 2: drain_deadline_s: expected seconds, such as `drain_deadline_s = 300`"),
        "{said}"
    );
    place.configure("memory_limit = 268435456\n");
    let daemon = place.start_registered();
    daemon.run(&["set", "one", "writeback_delay=2m"]).ok().says(&["writeback_delay = 120"]);
    daemon
        .run(&["set", "one", "--set-of-volume", "journal_delay_ms=1s"])
        .ok()
        .says(&["journal_delay_ms = 1000"]);
    daemon.run(&["set", "one", "writeback_percent", "5"]).usage().says(&["such as writeback_percent=10"]);
    daemon.stop();
}

/// `status` said nothing of a volume whose every request fails, and nothing of what to do.
#[test]
fn the_command_of_a_problem_ends_it() {
    let place = Place::new();
    let daemon = place.start_registered();
    daemon.run(&["set", "one", "io_disable=1"]).ok();
    let found = problems(&daemon);
    assert_eq!(found, [("io_disabled".to_owned(), "ubcache set one io_disable=0".to_owned())]);
    daemon.run(&["status"]).ok().says(&["1 PROBLEM\n  one (bcache0) fails every request"]);
    daemon.run(&["show"]).ok().says(&["1 PROBLEM\n  one (bcache0) fails every request"]);
    follow(&daemon, &found[0].1).ok();
    assert_eq!(problems(&daemon), []);
    daemon.stop();
}

/// Values are typed as they are printed, on the command line and in the configuration.
#[test]
fn units_are_typed_as_they_are_printed() {
    let place = Place::new();
    place.configure("[tunables]\nwriteback_delay = \"2min\"\nwriteback_running = 0\n");
    let daemon = place.start_registered();
    daemon.run(&["get", "one", "writeback_delay"]).ok().says(&["120\n"]);
    daemon.run(&["set", "one", "writeback_delay=10s", "sequential_cutoff=512KiB"]).ok();
    daemon.run(&["get", "one"]).ok().says(&["writeback_delay = 10 s", "sequential_cutoff = 524288 bytes"]);
    daemon.run(&["set", "one", "writeback_delay=500ms"]).usage().says(&["also with a unit such as 10s"]);
    let set = daemon.json(&["status"])["sets"][0]["id"].as_str().expect("a set").to_owned();
    daemon.run(&["set", &set, "journal_delay_ms=500ms"]).ok();
    let hint = format!("run `ubcache set {set} journal_delay_ms=5 ");
    daemon.run(&["set", "one", "journal_delay_ms=5"]).usage().says(&[&hint]);
    daemon.run(&["set", "one", "writeback_dealy=5s"]).usage().says(&["did you mean writeback_delay?"]);
    // The number that was stored is the number of the configuration: a reload finds no difference.
    daemon.run(&["reset", "one", "writeback_delay"]).ok();
    daemon.run(&["reload"]).ok().says(&["nothing has changed"]);
    daemon.stop();
}

/// The environment names the socket; the option overrides it.
#[test]
fn the_environment_names_the_socket() {
    let place = Place::new();
    let daemon = place.start();
    let by = |socket: &str, more: &[&str], api: Option<&str>| {
        let mut command = Command::new(program());
        command.arg("status").args(more).env("UBCACHE_SOCKET", socket).stdin(Stdio::null());
        if let Some(api) = api {
            command.env("UBCACHE_API", api);
        }
        Said::of(output(command))
    };
    by(daemon.socket(), &[], None).ok().says(&["no problems"]);
    let nowhere = place.dir.path("nowhere");
    by(&nowhere, &[], None).refused(&["no daemon runs at", &nowhere, "UBCACHE_SOCKET"]);
    by(&nowhere, &["--socket", daemon.socket()], None).ok();
    by(daemon.socket(), &[], Some("http://127.0.0.1:1")).usage().says(&["UBCACHE_SOCKET and UBCACHE_API"]);
    daemon.stop();
}

/// A mode without new dirty data was set without a word of the dirty data that there is.
#[test]
fn set_cachemode_says_what_becomes_of_dirty_data() {
    let place = Place::new();
    let daemon = place.start_registered();
    daemon.run(&["set-cachemode", "one", "writeback"]).ok();
    dirty(&place, 1);
    let said = daemon.run(&["set-cachemode", "one", "writethrough"]).ok();
    said.says(&["writethrough; 4.0 KiB of dirty data stay in the cache, because writeback_running is 0"]);
    daemon.stop();
}

/// A disk that had become larger was served with its old size, without a word.
#[test]
fn a_grown_disk_has_a_hint() {
    let place = Place::new();
    let daemon = place.start_registered();
    assert!(!daemon.run(&["status"]).ok().out.contains("grown"));
    std::fs::File::options().write(true).open(&place.hdd).unwrap().set_len(12 << 20).unwrap();
    let command = format!("`ubcache stop one && ubcache register {}`", place.hdd);
    let said = daemon.run(&["status", "--check"]).ok();
    said.says(&["the page grow-disk of the guide", "one, bcache0 (", "4.0 MiB more; unmount it", &command]);
    let devices = daemon.json(&["status"])["devices"].clone();
    let grown = devices.as_array().unwrap().iter().find(|d| d["path"] == place.hdd.as_str()).unwrap();
    assert_eq!(grown["grown_bytes"], 4 << 20);
    // The commands of the hint serve all of it.
    daemon.run(&["stop", "bcache0"]).ok();
    daemon.run(&["register", &place.hdd]).ok();
    assert_eq!(daemon.volume("bcache0")["size_bytes"], (12 << 20) - 8192);
    assert!(!daemon.run(&["status"]).ok().out.contains("grown"));
    daemon.stop();
}

/// Of several exports that were down one was named, the volume was not reached by the one that works, and `reload` was done.
#[test]
fn every_export_that_is_down_is_named() {
    let place = Place::new();
    let (works, in_the_way) = (place.dir.path("works.sock"), place.dir.path("file"));
    std::fs::write(&in_the_way, "").unwrap();
    let down = ["a", "b"].map(|name| format!("{in_the_way}/{name}.sock"));
    let exports = format!("exports = [\"nbd={works}\", \"nbd={}\", \"nbd={}\"]\n", down[0], down[1]);
    std::fs::write(place.dir.path("ubcache.toml"), &exports).unwrap();
    let daemon = place.start();
    let words = ["NOT EXPORTED", &*down[0], &*down[1]];
    daemon.run(&["register", &place.ssd, &place.hdd]).refused(&words);
    let status = daemon.run(&["status"]).ok();
    status.says(&words).says(&[
        "is reached by nbd+",
        &format!("{works} only"),
        &format!("{works}; NOT EXPORTED: "),
    ]);
    let reload = daemon.run(&["reload"]);
    reload.refused(&["still cannot be exported", &*down[0], &*down[1]]);
    std::fs::remove_file(&in_the_way).unwrap();
    std::fs::create_dir(&in_the_way).unwrap();
    daemon.run(&["reload"]).ok().says(&["exported: "]);
    daemon.run(&["status"]).ok().says(&["no problems"]);
    daemon.stop();
}
