//! The meaning of a name: a label from the superblock of a disk never takes the place of a name, a path or another label.

use std::os::unix::fs::FileExt;
use std::process::{Command, Stdio};

use format::superblock::{SUPERBLOCK_BYTES, label_bytes};
use format::{RawSuperblock, Sectors};
use serde_json::Value;

use crate::place::*;
use crate::world::*;

/// A disk that was formatted elsewhere, with this label.
fn stick(place: &Place, name: &str, label: &str) -> String {
    let path = place.dir.sparse(name, 8 << 20);
    run(&["make", "-B", &path]).ok();
    let file = std::fs::File::options().read(true).write(true).open(&path).unwrap();
    let mut bytes = vec![0; SUPERBLOCK_BYTES];
    file.read_exact_at(&mut bytes, 4096).unwrap();
    let raw = RawSuperblock::from_prefix(&bytes).unwrap().clone();
    let mut superblock = raw.check_backing(Sectors(16384), 512).unwrap();
    superblock.set_label(label_bytes(label).unwrap());
    file.write_all_at(&superblock.encode(), 4096).unwrap();
    path
}

fn uuid_of(daemon: &Daemon, path: &str) -> String {
    let devices = daemon.devices();
    let found = devices.iter().find(|d| d["path"] == path).expect("registered");
    found["uuid"].as_str().expect("a text").to_owned()
}

/// The disk has the name of a volume for its label. As long as that volume is served it was meant; when it was stopped, the
/// disk was.
#[test]
fn a_label_that_is_a_volumes_name_is_not_taken_for_it() {
    let place = Place::new();
    let daemon = place.start_registered();
    let stick = stick(&place, "stick", "bcache0");
    daemon.run(&["register", &stick]).ok();
    assert_eq!(daemon.volume("bcache1")["backing_device"], stick.as_str());
    daemon.run(&["stop", "bcache0"]).ok();
    assert_eq!((daemon.state_of(&place.hdd), daemon.state_of(&stick)), ("stopped".into(), "served".into()));
    for command in [
        &["stop", "bcache0"][..],
        &["detach", "bcache0"],
        &["set", "bcache0", "writeback_percent=5"],
        &["set-cachemode", "bcache0", "writeback"],
        &["set-label", "bcache0", "mine"],
        &["drain", "bcache0"],
    ] {
        daemon.run(command).refused(&["bcache0", "is not served"]);
    }
    assert_eq!(daemon.state_of(&stick), "served");
    assert_eq!(daemon.volume("bcache1")["label"], "bcache0", "nothing has happened to it");
    // A label has printable characters.
    for label in ["bcache7", "/dev/sda", "a\nb", ".."] {
        daemon.run(&["set-label", "bcache1", label]).usage().says(&["label: expected a letter or digit"]);
    }
    daemon.stop();
}

/// The disk has the path of another one for its label. It was attached in the place of that one.
#[test]
fn a_label_that_is_a_path_is_not_taken_for_it() {
    let place = Place::new();
    let daemon = place.start();
    let other = place.dir.sparse("other", 8 << 20);
    run(&["make", "-B", &other]).ok();
    assert!(other.len() <= 32, "it has to fit into a label: {other}");
    let stick = stick(&place, "stick", &other);
    daemon.run(&["register", &place.ssd, &stick]).ok();
    let attached = daemon.run(&["attach", &place.ssd, &other]).ok();
    assert_eq!(daemon.volume("bcache0")["attached"], false, "that of the stick");
    attached.says(&[&format!("bcache1 ({other}, UUID ")]);
    assert_eq!(daemon.volume("bcache1")["backing_device"], other.as_str());
    daemon.run(&["stop", &other]).ok();
    assert_eq!((daemon.state_of(&stick), daemon.state_of(&other)), ("served".into(), "stopped".into()));
    daemon.run(&["unregister", &other]).ok();
    daemon.run(&["unregister", &other]).refused(&["is not registered"]);
    assert_eq!(daemon.state_of(&stick), "served");
    daemon.run(&["show", "-d", &other]).refused(&["not registered"]);
    daemon.stop();
}

#[test]
fn of_two_with_the_same_label_neither_is_chosen() {
    let place = Place::new();
    let daemon = place.start();
    let stick = stick(&place, "stick", "one");
    daemon.run(&["register", &stick]).ok();
    daemon.run(&["register", &place.ssd, &place.hdd]).ok();
    let (ours, theirs) = (uuid_of(&daemon, &place.hdd), uuid_of(&daemon, &stick));
    daemon.http("POST", "/v1/volumes/one/stop", "");
    let states = || (daemon.state_of(&stick), daemon.state_of(&place.hdd));
    assert_eq!(states(), ("served".into(), "served".into()), "nothing was stopped");
    let all =
        ["one: is ambiguous, 2 have this name", "bcache0", "bcache1", &stick, &place.hdd, &ours, &theirs];
    for command in [
        &["stop", "one"][..],
        &["unregister", "one"],
        &["attach", &place.ssd, "one"],
        &["detach", "one"],
        &["drain", "one"],
        &["set", "one", "writeback_percent=5"],
        &["reset", "one", "writeback_percent"],
        &["get", "one"],
        &["set-label", "one", "two"],
        &["set-cachemode", "one", "writeback"],
        &["explain", "one"],
        &["show", "-d", "one"],
    ] {
        daemon.run(command).refused(&all);
    }
    assert_eq!(daemon.http("POST", "/v1/volumes/one/stop", "").0, 409);
    assert_eq!(states(), ("served".into(), "served".into()));
    // By its UUID, in whatever case, and by its path each can be named.
    daemon.run(&["set-label", &theirs.to_uppercase(), "two"]).ok().says(&[&stick, &theirs]);
    daemon.run(&["stop", "one"]).ok().says(&[&place.hdd, &ours]);
    assert_eq!(daemon.state_of(&stick), "served");
    daemon.stop();
}

/// A word that is also a file of the directory in which the command is called.
#[test]
fn a_file_here_and_a_label_there_are_told_apart() {
    let place = Place::new();
    let daemon = place.start_registered();
    let here = |args: &[&str]| {
        let mut command = Command::new(program());
        command.args(args).args(["--socket", daemon.socket()]).current_dir(place.dir.root());
        command.stdin(Stdio::null());
        Said::of(output(command))
    };
    place.dir.sparse("one", 8 << 20);
    here(&["stop", "one"]).usage().says(&["ambiguous: it is the file", &place.hdd, "write ./one"]);
    here(&["stop", "./one"]).refused(&["one: is not registered"]);
    assert_eq!(daemon.state_of(&place.hdd), "served");
    // The file is what the daemon has under that name, or nothing else is.
    here(&["get", "hdd", "writeback_percent"]).ok();
    here(&["stop", "./hdd"]).ok().says(&[&place.hdd]);
    // An empty directory, as of a mount, is none.
    std::fs::remove_file(place.dir.path("one")).unwrap();
    std::fs::create_dir(place.dir.path("one")).unwrap();
    here(&["register", "hdd"]).ok();
    here(&["stop", "one"]).ok().says(&[&place.hdd]);
    daemon.stop();
}

/// A label has control characters that end the line and clear the screen, and then text.
#[test]
fn control_characters_of_a_label_are_not_printed() {
    let label = "x\n\u{1b}[2J\u{9b}1merror: gone";
    let place = Place::new();
    let daemon = place.start();
    let stick = stick(&place, "stick", label);
    daemon.run(&["register", &stick]).ok();
    let uuid = uuid_of(&daemon, &stick);
    for command in [
        &["show", "-m"][..],
        &["show", "-d", &stick],
        &["status"],
        &["tree"],
        &["get", &uuid],
        &["stop", label],
        &["show", "-m", "--json"],
        &["set", &uuid, "writeback_percent=11"],
    ] {
        let said = daemon.run(command).to_string();
        assert!(!said.contains(['\u{1b}', '\u{9b}']), "{command:?}: {said}");
        assert!(
            !said.lines().any(|l| l.starts_with("error: gone") || l.starts_with("\"error: gone")),
            "{said}"
        );
    }
    daemon.run(&["show", "-m"]).ok().says(&["\"x\\n\\u{1b}[2J\\u{9b}1merror: gone\""]);
    let found = daemon.devices().into_iter().find(|d| d["path"] == stick.as_str()).unwrap();
    assert_eq!(found["label"], label, "data is what it is");
    run(&["super", &stick]).ok();
    assert!(!daemon.said().contains(['\u{1b}', '\u{9b}']), "{}", daemon.said());
    daemon.stop();
}

/// `set-label` gave a label to a second volume, and commands then took one of the two without a word.
#[test]
fn a_label_has_one_owner() {
    let place = Place::new();
    let daemon = place.start();
    let media = stick(&place, "stick", "media");
    daemon.run(&["register", &place.ssd, &place.hdd, &media]).ok();
    let theirs = uuid_of(&daemon, &media);
    let refused = &["label media: belongs to ", &media, &theirs, "choose another one"];
    daemon.run(&["set-label", "one", "media"]).refused(refused);
    daemon.run(&["set", "one", "label=media"]).refused(refused);
    let set =
        daemon.json(&["status"])["sets"].as_array().unwrap().iter().find(|s| s["has_cache"] == true).unwrap()
            ["id"]
            .clone();
    let path = format!("/v1/sets/{}/volumes", set.as_str().unwrap());
    assert_eq!(daemon.http("POST", &path, r#"{"size_bytes": 1048576, "label": "media"}"#).0, 409);
    // A device may get the label that it has, and a label that another device had before.
    daemon.run(&["set-label", "media", "media"]).ok();
    daemon.run(&["set-label", "media", "films"]).ok();
    daemon.run(&["set-label", "one", "media"]).ok();
    // A stopped volume keeps its label.
    daemon.run(&["stop", "films"]).ok();
    daemon.run(&["set-label", "media", "films"]).refused(&["label films: belongs to ", &media]);
    daemon.stop();
    let [ssd, hdd, more] = ["c", "b", "d"].map(|name| place.dir.sparse(name, 8 << 20));
    for label in ["bcache0", "/dev/sda", "x/y"] {
        run(&["make", "-B", &hdd, "--label", label]).usage().says(&["label: expected a letter or digit"]);
    }
    run(&["make", "-C", &ssd, "-B", &hdd, "-B", &more, "--label", "x"]).usage().says(&["labels are unique"]);
}

/// The operator gave the name of a set to a command that needs a volume, or the name of a volume to one that needs a set. The
/// refusal did not say which command works.
#[test]
fn a_refused_kind_of_name_comes_with_the_command_that_works() {
    let place = Place::new();
    let daemon = place.start_registered();
    daemon.run(&["set-label", &place.ssd, "fast"]).ok();
    for (command, right) in [
        (&["detach", "fast"][..], "run `ubcache detach one --socket "),
        (&["stop", &place.ssd], "run `ubcache stop one --socket "),
        (&["explain", "fast"], "run `ubcache explain one --socket "),
        (&["set-cachemode", "fast", "writeback"], "run `ubcache set-cachemode one writeback --socket "),
        (&["wipe", "one"], "run `ubcache wipe fast --socket "),
        (&["gc", "bcache0"], "run `ubcache gc fast --socket "),
        (&["scrub", &place.hdd], "run `ubcache scrub fast --socket "),
    ] {
        daemon.run(command).refused(&["expected a ", right]);
    }
    let near = daemon.run(&["set", "fast", "writeback_precent=5"]).usage();
    near.says(&["did you mean writeback_percent?", "run `ubcache set one writeback_percent=5 --socket "]);
    daemon.run(&["attach", "fast", &place.ssd]).refused(&["found a cache device; give a disk in its place"]);
    // A disk that is served alone is no set, and no job begins.
    let alone = place.dir.sparse("alone", 8 << 20);
    run(&["make", "-B", &alone, "--label", "media"]).ok();
    daemon.run(&["register", &alone]).ok();
    for command in ["scrub", "wipe", "gc"] {
        daemon
            .run(&[command, "media"])
            .refused(&["expected a set, found a volume that is served without one"]);
    }
    assert_eq!(daemon.json(&["jobs"])["jobs"], serde_json::json!([]));
    let exchanged = format!("the cache comes first: run `ubcache attach {} media`", place.ssd);
    daemon.run(&["attach", "media", &place.ssd]).refused(&[&exchanged]);
    // Events of the set begin with its label, also in the log.
    place.client("bcache0").write(0, &[1; 4096]).unwrap();
    daemon.run(&["drain", "fast"]).ok();
    let events = daemon.run(&["events", "--since", "1h"]).ok();
    events.says(&["Z fast: ", "Z fast, set "]);
    wait_until("the log", || daemon.said().contains("ubcache: fast: "));
    daemon.stop();
}

/// Every command that changes something prints the device, set or volume that the name means.
#[test]
fn a_change_is_reported_with_its_device_and_uuid() {
    let place = Place::new();
    let daemon = place.start();
    daemon.run(&["register", &place.ssd, &place.hdd]).ok().says(&["served as one (bcache0), UUID "]);
    let uuid = uuid_of(&daemon, &place.hdd);
    let exact = format!("bcache0 ({}, UUID {uuid})", place.hdd);
    for (command, words) in [
        (&["set", "one", "writeback_percent=20"][..], ": writeback_percent = 20"),
        (&["reset", "one", "writeback_percent"], ": writeback_percent = 10"),
        (&["set-cachemode", "one", "writethrough"], ": writethrough"),
        (&["set-label", "one", "two"], ": two"),
        (&["set-label", &uuid, "one"], ": one"),
        (&["drain", "one"], ": drain done"),
        (&["detach", "one"], ": detach done"),
        (&["attach", &place.ssd, "one"], ": attached to set "),
        (&["stop", "one"], ": stopped"),
        (&["unregister", &uuid], ": unregistered"),
    ] {
        daemon.run(command).ok().says(&[&exact, words]);
    }
    daemon.run(&["register", &place.hdd]).ok();
    let resolved = |of: &Value| {
        assert_eq!((&of["device"], &of["uuid"]), (&place.hdd.as_str().into(), &uuid.as_str().into()), "{of}");
    };
    for command in [
        &["set", "one", "writeback_percent=20"][..],
        &["reset", "one", "writeback_percent"],
        &["set-cachemode", "one", "writeback"],
        &["set-label", "one", "one"],
        &["stop", "one"],
        &["unregister", "one"],
    ] {
        resolved(&daemon.json(command)["resolved"]);
    }
    daemon.run(&["register", &place.hdd]).ok();
    resolved(&daemon.json(&["detach", "one"])["job"]);
    daemon.stop();
}
