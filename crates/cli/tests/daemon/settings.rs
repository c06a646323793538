//! Configuration, tunables, and what becomes of them.

use std::io::{Read, Write};

use rustix::process::Signal;

use crate::place::*;
use crate::world::*;

/// A lower limit of the set lowered writeback_percent of its volumes without a word.
#[test]
fn a_limit_of_the_set_says_which_volumes_follow_it() {
    let place = Place::new();
    let daemon = place.start_registered();
    let said = daemon.run(&["set", &place.ssd, "cutoff_writeback=5"]).ok();
    said.says(&["cutoff_writeback = 5", "one, bcache0: writeback_percent is 5 now (was 10)"]);
    let said = daemon.run(&["set", &place.ssd, "cutoff_writeback=40"]).ok();
    assert!(!said.to_string().contains("writeback_percent"), "{said}");
    // A pasted line of `get`, also as words.
    daemon.run(&["set", "one", "writeback_percent", "=", "7", "label = one"]).ok();
    daemon.run(&["get", "one", "writeback_percent"]).ok().says(&["7\n"]);
    daemon.stop();
}

#[test]
fn a_reload_applies_the_differences_and_says_them() {
    let place = Place::new();
    let daemon = place.start_registered();
    let mut client = place.client("bcache0");
    daemon.run(&["get", "one", "writeback_running"]).ok().says(&["0"]);
    daemon.run(&["set", "one", "writeback_delay=5"]).ok();
    place.configure(
        "preset = \"latency\"\n[tunables]\nsequential_cutoff = 4096\njournal_delay_ms = 50\n\
         [volume.one.tunables]\nwriteback_delay = 99\nwriteback_percent = 34\n",
    );
    daemon.run(&["reload"]).ok().says(&[
        "bcache0: sequential_cutoff: 0 → 4096",
        "bcache0: writeback_percent: 10 → 34",
        "bcache0: writeback_running: 0 → 1",
        "journal_delay_ms: 100 → 50",
    ]);
    // What was set at run time counts more.
    daemon.run(&["get", "one", "writeback_delay"]).ok().says(&["5"]);
    daemon.run(&["reset", "one", "writeback_delay"]).ok().says(&["99"]);
    daemon.run(&["reload"]).ok().says(&["nothing has changed"]);
    daemon.run(&["get", &place.ssd, "congested_read_threshold_us"]).ok().says(&["0"]);
    daemon.run(&["get", "one"]).ok().says(&["writeback_percent = 34 % (default 10)"]);

    // A mistake changes nothing.
    place.configure("preset = \"latency\"\n[tunables]\nwriteback_percentage = 5\n");
    daemon.run(&["reload"]).refused(&["line 4", "writeback_percentage"]);
    place.configure("devices = [\"/nowhere/at/all\"]\n[volume.one.tunables]\nwriteback_percent = 35\n");
    let before = daemon.said().len();
    daemon.signal(Signal::HUP);
    wait_until("the reload", || daemon.said()[before..].contains("writeback_percent: 34 → 35"));
    wait_until("the rest", || daemon.said()[before..].contains("/nowhere/at/all"));
    client.write(0, &[1; 512]).unwrap();
    daemon.stop();
}

#[test]
fn mistakes_are_told_before_anything_begins() {
    let place = Place::new();
    place.configure("scam = true\n");
    let said = place.refused();
    assert!(said.contains("line 2") && said.contains("scam") && said.contains("ubcache.toml"), "{said}");
    place.configure("group = \"no such group\"\n");
    assert!(place.refused().contains("there is no such group"));
}

#[test]
fn tunables_of_sets_and_volumes() {
    let place = Place::new();
    let daemon = place.start_registered();
    let set = daemon.json(&["status"])["sets"][0]["id"].as_str().unwrap().to_owned();
    daemon.run(&["set", &set, "journal_delay_ms=20"]).ok().says(&["journal_delay_ms = 20"]);
    let refused = "expected 0 to 40 %, found 400; the set's cutoff_writeback is the upper limit";
    daemon.run(&["set", "bcache0", "writeback_percent=400"]).usage().says(&["writeback_percent", refused]);
    daemon.run(&["set", &set, "journal_delay_ms=70000"]).usage().says(&["0 to 65535 ms, found 70000"]);
    daemon
        .run(&["set", "bcache0", "writeback_percents=4"])
        .usage()
        .says(&["did you mean writeback_percent?"]);
    daemon.run(&["set", "bcache0", "colour=4"]).usage().says(&["unknown tunable colour; known are"]);
    daemon.run(&["set", "bcache0", "writeback_percent=x"]).usage().says(&["writeback_percent"]);
    let of_set = format!("run `ubcache set {set} journal_delay_ms=5 ");
    let refused = daemon.run(&["set", "bcache0", "journal_delay_ms=5"]).usage();
    refused.says(&["is a tunable of sets, not of one, bcache0, a volume of set", &of_set]);
    let of_set = format!("run `ubcache get {set} journal_delay_ms ");
    daemon.run(&["get", "bcache0", "journal_delay_ms"]).usage().says(&[&of_set]);
    daemon.run(&["set", &set, "cache_mode=none"]).usage().says(&["run `ubcache set one cache_mode=none "]);
    let near = daemon.run(&["set", &set, "writeback_precent=5"]).usage();
    near.says(&[
        "did you mean writeback_percent? ",
        "its volumes: one",
        "run `ubcache set one writeback_percent=5 ",
    ]);
    let near = daemon.run(&["get", "one", "journal_dealy_ms"]).usage();
    near.says(&["did you mean journal_delay_ms? ", &format!("run `ubcache get {set} journal_delay_ms ")]);
    let near = daemon.run(&["set", "one", "writeback_precent=5"]).usage();
    near.says(&["did you mean writeback_percent? Run `ubcache set one writeback_percent=5 "]);
    daemon.run(&["set", &set, "label=x"]).usage().says(&["`ubcache set-label "]);
    daemon.run(&["get", &place.ssd, "journal_delay_ms"]).ok().says(&["20"]);
    daemon.run(&["get", "bcache0", "writeback_percent"]).ok().says(&["10\n"]);
    // Of a volume the tunables of the volume are printed, and of a set those of the set.
    let keys = |whose: &str| -> Vec<String> {
        let said = daemon.run(&["get", whose]).ok();
        let keys = said.out.lines().map(|line| line.split_once(" = ").expect("KEY = VALUE").0.to_owned());
        keys.collect()
    };
    let (of_volume, of_set) = (keys("one"), keys(&set));
    for (key, in_volume) in [
        ("writeback_percent", true),
        ("cache_mode", true),
        ("journal_delay_ms", false),
        ("congested_read_threshold_us", false),
    ] {
        assert_eq!(of_volume.iter().any(|k| k == key), in_volume, "{key}: {of_volume:?}");
        assert_eq!(of_set.iter().any(|k| k == key), !in_volume, "{key}: {of_set:?}");
    }
    let of_both: Vec<_> = of_volume.iter().filter(|key| of_set.contains(key)).collect();
    assert_eq!(of_both, ["io_error_limit", "io_disable"], "each has its own");
    daemon.run(&["set", "bcache0", "writeback_percent"]).usage();
    daemon.run(&["set", "bcache9", "writeback_percent=4"]).refused(&["no volume bcache9"]);
    daemon.run(&["reset", "bcache0", "cache_mode"]).usage().says(&["superblock"]);
    let (status, body) = daemon.http("GET", "/v1/volumes/one/tunables/cache_mode", "");
    assert_eq!((status, &body["tunable"]["value"]), (200, &"writeback".into()));
    assert_eq!(body["tunable"]["shown"], "writethrough [writeback] writearound none");
    daemon.kill();
    let daemon = place.start();
    daemon.run(&["get", &place.ssd, "journal_delay_ms"]).ok().says(&["20"]);
    daemon.stop();
}

/// `set` refused `4194304 bytes`, which `get` prints.
#[test]
fn set_reads_the_values_that_get_prints() {
    let place = Place::new();
    let daemon = place.start_registered();
    daemon.run(&["set", &place.ssd, "scrub_rate=10 MiB/s"]).ok().says(&["scrub_rate = 10485760"]);
    for whose in [&*place.hdd, &*place.ssd] {
        let printed = daemon.run(&["get", whose]).ok().out;
        let settings: Vec<String> = printed
            .lines()
            .map(|line| {
                let (key, value) = line.split_once(" = ").expect("a tunable and its value");
                format!("{key}={}", value.split(" (").next().unwrap_or_default())
            })
            .collect();
        assert!(settings.iter().any(|s| s.ends_with(" bytes")), "{settings:?}");
        let words = ["set", whose].into_iter().chain(settings.iter().map(String::as_str));
        daemon.run(&words.collect::<Vec<_>>()).ok();
        assert_eq!(daemon.run(&["get", whose]).ok().out, printed);
    }
    daemon.stop();
}

/// An operator names a volume, and wants a tunable of its set.
#[test]
fn the_set_of_a_volume_is_named_by_the_volume() {
    let place = Place::new();
    let daemon = place.start_registered();
    let set = daemon.json(&["status"])["sets"][0]["id"].as_str().unwrap().to_owned();
    daemon.run(&["set", "one", "--set-of-volume", "journal_delay_ms=30"]).ok().says(&[&set, "= 30"]);
    daemon.run(&["get", "one", "--set-of-volume", "journal_delay_ms"]).ok().says(&["30\n"]);
    daemon.run(&["get", &set, "journal_delay_ms"]).ok().says(&["30\n"]);
    daemon.run(&["reset", "--set-of-volume", "one", "journal_delay_ms"]).ok().says(&["= 100"]);
    // Nothing is set on the volume when the option names its set.
    let refused = daemon.run(&["set", "one", "--set-of-volume", "writeback_percent=20"]);
    refused.usage().says(&["is a tunable of volumes, not of set", "its volumes: one"]);
    daemon.run(&["get", "one", "writeback_percent"]).ok().says(&["10\n"]);
    daemon.run(&["set", "two", "--set-of-volume", "journal_delay_ms=30"]).refused(&["no volume or set two"]);
    daemon.run(&["detach", "one"]).ok();
    let alone = daemon.run(&["get", "one", "--set-of-volume", "journal_delay_ms"]);
    alone.refused(&["one: is served without a set"]);
    daemon.stop();
}

/// The second of two values was refused after the first had been set.
#[test]
fn one_bad_value_changes_nothing() {
    let place = Place::new();
    let daemon = place.start_registered();
    let both = ["set", "bcache0", "writeback_delay=7", "writeback_percent=99"];
    daemon.run(&both).usage().says(&["expected 0 to 70 %, found 99"]);
    daemon.run(&["get", "bcache0", "writeback_delay"]).ok().says(&["30\n"]);
    // The range of this one depends on the set, so the daemon alone can refuse it.
    let both = ["set", "bcache0", "writeback_delay=7", "writeback_percent=50"];
    daemon.run(&both).refused(&["found 50", "changed before: writeback_delay = 7"]);
    place.configure("[tunables]\nwriteback_delay = 9\nwriteback_percent = 99\n");
    daemon.run(&["reload"]).refused(&["line 4", "expected 0 to 70 %, found 99"]);
    daemon.run(&["get", "bcache0", "writeback_delay"]).ok().says(&["7\n"]);
    daemon.stop();
}

/// A reload printed the value of the file where a smaller one was set.
/// A new label selected another section of the configuration, which took effect at the next start of the daemon only. And
/// a reload that changed nothing printed lines such as "10 → 10".
#[test]
fn a_new_label_selects_its_section_at_once() {
    let place = Place::new();
    place.configure(
        "[volume.one.tunables]\nwriteback_delay = 7\n[volume.two.tunables]\nwriteback_delay = 9\n\
         writeback_percent = 20\n",
    );
    let daemon = place.start_registered();
    daemon.run(&["get", "one", "writeback_delay"]).ok().says(&["7"]);
    daemon.run(&["set-label", "one", "two"]).ok().says(&[
        "[volume.one] of the configuration no longer applies to bcache0",
        "writeback_delay: 7 → 9",
        "writeback_percent: 10 → 20",
    ]);
    daemon.run(&["get", "two", "writeback_delay"]).ok().says(&["9"]);
    daemon.run(&["set", "two", "sequential_cutoff=4096", "--runtime"]).ok();
    place.configure("[tunables]\nsequential_cutoff = 4096\n[volume.two.tunables]\nwriteback_percent = 21\n");
    let said = daemon.run(&["reload"]).ok().says(&["writeback_percent: 20 → 21", "writeback_delay: 9 → 30"]);
    assert!(!said.out.contains("sequential_cutoff"), "{said}");
    daemon.stop();
}

#[test]
fn a_reload_prints_the_value_that_is_set() {
    let place = Place::new();
    let daemon = place.start_registered();
    place.configure("[tunables]\nio_error_halflife = 1000\ncutoff_writeback = 60\nwriteback_percent = 50\n");
    daemon.run(&["reload"]).ok().says(&["io_error_halflife: 0 → 968", "writeback_percent: 10 → 50"]);
    daemon.stop();
}

#[test]
fn figures_are_scraped_explained_and_watched() {
    let place = Place::new();
    let daemon = place.start_registered();
    let mut client = place.client("bcache0");
    client.write(0, &[1; 4096]).unwrap();
    client.read(0, 4096).unwrap();
    let mut stream = daemon.connect();
    stream.write_all(b"GET /metrics HTTP/1.0\r\nAccept: application/openmetrics-text\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    assert!(text.contains("application/openmetrics-text") && text.ends_with("# EOF\n"), "{text}");
    assert!(text.contains("bcache0"), "{text}");
    daemon.run(&["explain", "one"]).ok().says(&["Writeback\n", "Bypassed\n", "Hits\n"]);
    daemon.run(&["explain", "nothing"]).refused(&["no volume or set nothing"]);
    daemon.run(&["top", "-n", "1"]).ok().says(&["bcache0", "dirty"]);
    let said = daemon.run(&["top", "-n", "2", "--json"]).ok();
    assert_eq!(said.out.lines().count(), 2);
    let (status, latencies) = daemon.http("GET", "/v1/latencies", "");
    assert_eq!(status, 200, "{latencies}");
    for op in ["read", "write"] {
        let buckets = latencies["volumes"]["bcache0"][op].as_array().unwrap();
        assert!(buckets.iter().map(|b| b[1].as_u64().unwrap()).sum::<u64>() > 0, "{op}: {latencies}");
    }
    daemon.run(&["show", "-m"]).ok().says(&["AttachToDev", "Label", "one", "bcache0"]);
    daemon.run(&["show", "-d", "one"]).ok().says(&["reached by", "nbd+unix://", "writeback"]);
    daemon.run(&["detach", "one"]).ok();
    daemon.run(&["explain", "one"]).ok().says(&["without a cache"]);
    daemon.stop();
}
