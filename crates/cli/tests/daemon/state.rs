//! A state directory that is full or read-only: what is served, what commands answer, and what a restart knows.

use std::process::Command;

use rustix::process::Signal;
use serde_json::Value;

use crate::place::*;
use crate::world::*;

/// A small file system in memory.
pub struct Small {
    pub at: String,
}

impl Small {
    /// In this directory of the place, of this size. `None` if this machine cannot mount.
    pub fn new(place: &Place, name: &str, size: &str) -> Option<Small> {
        let at = place.dir.path(name);
        std::fs::create_dir(&at).unwrap();
        let mounted = mount(&["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs", &at]);
        if let Err(why) = mounted {
            rig::skipped(why);
            return None;
        }
        Some(Small { at })
    }

    pub fn fill(&self) {
        let mut file = std::fs::File::create(format!("{}/filler", self.at)).unwrap();
        while std::io::Write::write_all(&mut file, &[0; 512]).is_ok() {}
    }

    fn make_room(&self) {
        std::fs::remove_file(format!("{}/filler", self.at)).unwrap();
    }

    fn read_only(&self, is: bool) {
        mount(&["-o", if is { "remount,ro" } else { "remount,rw" }, &self.at]).unwrap();
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").args(["-l", &self.at]).status();
    }
}

fn mount(args: &[&str]) -> Result<(), String> {
    let out = Command::new("mount").args(args).output().map_err(|e| format!("mount: {e}"))?;
    if out.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&out.stderr).into_owned()) }
}

fn problems(daemon: &Daemon) -> Vec<Value> {
    daemon.json(&["status"])["problems"].as_array().expect("a list").clone()
}

fn kinds(daemon: &Daemon) -> Vec<String> {
    problems(daemon).iter().map(|p| p["kind"].as_str().unwrap_or_default().to_owned()).collect()
}

/// The value of the metric that says whether the state can be written.
fn writable(daemon: &Daemon) -> bool {
    let mut stream = daemon.connect();
    std::io::Write::write_all(&mut stream, b"GET /metrics HTTP/1.0\r\n\r\n").unwrap();
    let mut text = String::new();
    std::io::Read::read_to_string(&mut stream, &mut text).unwrap();
    let line = text.lines().find(|l| l.starts_with("ubcache_state_writable ")).expect("the metric");
    line.ends_with(" 1")
}

#[track_caller]
fn not_stored(said: Said) -> Said {
    assert_eq!(said.code, 3, "{said}");
    said.says(&["done, but not stored: ", "state.json: cannot be written: No space left on device"])
}

/// Commands acted and reported a failure, or acted and were forgotten.
#[test]
fn a_command_that_cannot_be_stored_is_refused_or_says_so() {
    let place = Place::new();
    let Some(small) = Small::new(&place, "state", "1m") else { return };
    let daemon = place.start();
    let refused = ["state.json: cannot be written: No space left on device", "nothing was changed"];
    small.fill();
    daemon.run(&["register", &place.ssd, &place.hdd]).refused(&refused);
    assert_eq!(daemon.json(&["status"])["devices"].as_array().map(Vec::len), Some(0));
    small.make_room();
    daemon.run(&["register", &place.ssd, &place.hdd]).ok();
    small.fill();
    // What is stored already needs no room.
    daemon.run(&["register", &place.ssd, &place.hdd]).ok();
    daemon.run(&["set", "one", "writeback_delay=7"]).refused(&refused);
    daemon.run(&["get", "one", "writeback_delay"]).ok().says(&["30\n"]);
    daemon.run(&["set", "one", "writeback_delay=7", "--runtime"]).ok();
    daemon.run(&["volume", "create", &place.ssd, "64k"]).refused(&refused);
    assert_eq!(kinds(&daemon), ["state_not_writable"], "all is stored");
    // The device may leave, and the daemon stores that later.
    not_stored(daemon.run(&["unregister", "one"]));
    assert_eq!(problems(&daemon)[0]["kind"], "state_not_stored");
    daemon.run(&["status"]).ok().says(&["1 PROBLEM\n", "tries again every 5 s", &format!("df {}", small.at)]);
    small.make_room();
    wait_until("the state to be stored", || problems(&daemon).is_empty());
    let events = daemon.run(&["events", "--since", "1h"]).ok();
    events.says(&["cannot be written: No space left", "is written again, and has all changes"]);
    daemon.stop();
    let daemon = place.start();
    let devices = daemon.json(&["status"])["devices"].clone();
    assert_eq!(devices.as_array().map(Vec::len), Some(1), "only the cache device is registered: {devices}");
    daemon.stop();
}

/// Regression: `status` had no problem until a command was refused.
#[test]
fn a_full_or_read_only_state_directory_is_a_problem_before_a_command_fails() {
    let place = Place::new();
    let Some(small) = Small::new(&place, "state", "1m") else { return };
    let daemon = place.start();
    assert!(problems(&daemon).is_empty() && writable(&daemon));
    daemon.stop();

    // Known at the start. The start of a set would store the number of its superblock.
    small.read_only(true);
    let daemon = place.start();
    assert_eq!(kinds(&daemon), ["state_not_writable"]);
    let said = daemon.run(&["status"]).ok();
    said.says(&["1 PROBLEM\n", "Read-only file system", &format!("findmnt --target {}", small.at)]);
    assert!(!writable(&daemon));
    small.read_only(false);
    wait_until("the end of the problem", || problems(&daemon).is_empty() && writable(&daemon));

    // Known while it runs, without a command and without a write.
    daemon.run(&["register", &place.ssd, &place.hdd]).ok();
    let stored = std::fs::read(format!("{}/state.json", small.at)).unwrap();
    small.fill();
    wait_until("the problem", || kinds(&daemon) == ["state_not_writable"] && !writable(&daemon));
    let said = daemon.run(&["status"]).ok();
    said.says(&["No space left on device", "all changes are stored", &format!("df {}", small.at)]);
    assert_eq!(std::fs::read(format!("{}/state.json", small.at)).unwrap(), stored);
    small.make_room();
    wait_until("the end of the problem", || problems(&daemon).is_empty() && writable(&daemon));
    let events = daemon.run(&["events", "--since", "1h"]).ok();
    events.says(&["commands that change something are refused", "state.json: can be written again"]);
    daemon.stop();
}

/// `unregister` was carried out though it could not be stored, and `register` and `attach`, which undo it, were refused.
#[test]
fn an_unregistration_that_is_not_stored_can_be_undone() {
    for attach in [false, true] {
        let place = Place::new();
        let Some(small) = Small::new(&place, "state", "1m") else { return };
        let daemon = place.start_registered();
        place.client("bcache0").write(0, &[7; 4096]).unwrap();
        if attach {
            daemon.run(&["set", "one", "writeback_running=1"]).ok();
            daemon.run(&["detach", "one"]).ok();
        }
        small.fill();
        let undo = match attach {
            false => vec!["register", &*place.hdd],
            true => vec!["attach", &*place.ssd, &*place.hdd],
        };
        not_stored(daemon.run(&["unregister", "one"]));
        // Then the file has all that the next start needs.
        daemon.run(&undo).ok();
        assert_eq!(place.client("bcache0").read(0, 4096).unwrap(), [7; 4096]);
        small.make_room();
        wait_until("the state to be stored", || problems(&daemon).is_empty());
        daemon.stop();
        let daemon = place.start();
        assert_eq!(place.client("bcache0").read(0, 4096).unwrap(), [7; 4096]);
        daemon.stop();
    }
}

/// `set-label` of a disk was carried out, and ended with exit code 3. So did commands of which the state has nothing, after
/// another change that was not stored.
#[test]
fn a_label_is_refused_and_what_the_state_does_not_have_is_done() {
    let place = Place::new();
    let Some(small) = Small::new(&place, "state", "1m") else { return };
    let two = place.dir.sparse("two", 8 << 20);
    run(&["make", "-B", &two, "--label", "two"]).ok();
    let daemon = place.start_registered();
    daemon.run(&["register", &two]).ok();
    small.fill();
    let superblock = run(&["super", &place.hdd]).ok().out;
    for command in [["set-label", "one", "films"], ["set", "one", "label=films"]] {
        daemon.run(&command).refused(&["No space left on device", "nothing was changed"]);
    }
    assert_eq!(run(&["super", &place.hdd]).ok().out, superblock);
    not_stored(daemon.run(&["unregister", "two"]));
    daemon.run(&["set-label", &place.ssd, "fast"]).ok();
    daemon.run(&["set-cachemode", "one", "writethrough"]).ok();
    daemon.run(&["reset", "one", "writeback_percent"]).ok();
    daemon.run(&["register", &two]).ok();
    // The file lacks the number of a superblock alone.
    daemon.run(&["stop", "one"]).ok();
    daemon.run(&["register", "one"]).ok();
    daemon.run(&["detach", "one"]).ok();
    daemon.run(&["attach", &place.ssd, "one"]).ok();
    small.make_room();
    wait_until("the state to be stored", || problems(&daemon).is_empty());
    daemon.run(&["set-label", "one", "films"]).ok();
    daemon.stop();
}

/// Another disk was accepted as the replacement of a registered one, which the next start would have refused.
#[test]
fn a_replacement_that_cannot_be_stored_is_refused() {
    let place = Place::new();
    let Some(small) = Small::new(&place, "state", "1m") else { return };
    let daemon = place.start_registered();
    daemon.run(&["stop", "one"]).ok();
    let copy = place.dir.path("copy");
    std::fs::copy(&place.hdd, &copy).unwrap();
    std::fs::rename(&copy, &place.hdd).unwrap();
    small.fill();
    let accept = ["register", "--accept-replacement", &place.hdd];
    daemon.run(&accept).refused(&["No space left on device", "nothing was changed"]);
    small.make_room();
    daemon.run(&accept).ok().says(&["accepted: "]);
    daemon.stop();
    let daemon = place.start();
    assert_eq!(daemon.state_of(&place.hdd), "served");
    daemon.stop();
}

/// A volume that was made by the sysfs view had a name that the next start did not know. A label was set there, too.
#[test]
fn the_sysfs_view_changes_nothing_that_cannot_be_stored() {
    let place = Place::new();
    let Some(small) = Small::new(&place, "state", "1m") else { return };
    let root = place.dir.path("sys");
    place.configure(&format!("sysfs_view = \"{root}\"\n"));
    let daemon = place.start_registered();
    let set = daemon.json(&["status"])["sets"][0]["id"].as_str().unwrap().to_owned();
    let put = |path: &str, value: &str| {
        std::fs::write(format!("{root}/{path}"), value).map_err(|e| e.raw_os_error().unwrap_or(-1))
    };
    let create = format!("fs/bcache/{set}/flash_vol_create");
    small.fill();
    assert_eq!(put(&create, "64k"), Err(22));
    assert_eq!(put("block/bcache0/bcache/label", "films"), Err(22));
    assert_eq!(daemon.volume("bcache0")["label"], "one");
    assert_eq!(daemon.http("GET", "/v1/volumes/bcache1", "").0, 404);
    small.make_room();
    assert_eq!(put(&create, "64k"), Ok(()));
    assert_eq!(put("block/bcache0/bcache/label", "films"), Ok(()));
    daemon.stop();
}

/// A set with a volume that had no name in the state was not served.
#[test]
fn a_start_serves_what_a_read_only_state_does_not_name() {
    let place = Place::new();
    let Some(small) = Small::new(&place, "state", "1m") else { return };
    place.configure(&format!("devices = [{:?}, {:?}]\n", place.ssd, place.hdd));
    small.read_only(true);
    let daemon = place.start();
    // The next start may not know the name, so it follows from the UUID.
    let name = daemon.volume("one")["name"].as_str().unwrap().to_owned();
    assert!(name.len() == "bcache".len() + 6, "{name}");
    place.client(&name).write(0, &[7; 4096]).unwrap();
    daemon.signal(Signal::TERM);
    let (status, said) = daemon.ended();
    assert!(status.code() == Some(1) && said.contains("does not know the last changes"), "{said}");
    let daemon = place.start();
    assert_eq!(daemon.volume("one")["name"], *name);
    assert_eq!(problems(&daemon)[0]["kind"], "state_not_stored");
    daemon
        .run(&["set", "one", "writeback_delay=7"])
        .refused(&["Read-only file system", "nothing was changed"]);
    place.refused();
    small.read_only(false);
    wait_until("the state to be stored", || problems(&daemon).is_empty());
    daemon.stop();
    let state = std::fs::read_to_string(format!("{}/state.json", small.at)).unwrap();
    assert!(state.contains(&name), "{state}");
}

/// The second daemon said nothing while it waited.
#[test]
fn a_second_daemon_with_the_same_state_says_what_it_waits_for() {
    let place = Place::new();
    let daemon = place.start();
    let said = place.refused();
    for words in [
        "another daemon has this state directory; waiting for its end for at most 5 s",
        "stop it, or give this one",
    ] {
        assert!(said.contains(words), "{words}: {said}");
    }
    daemon.stop();
}

/// The directory is lost while the daemon runs.
#[test]
fn a_lost_state_directory_is_a_problem_that_ends() {
    let place = Place::new();
    let daemon = place.start_registered();
    let (state, aside) = (place.dir.path("state"), place.dir.path("aside"));
    std::fs::rename(&state, &aside).unwrap();
    std::fs::write(&state, "").unwrap();
    daemon.run(&["set", "one", "writeback_delay=7"]).refused(&["Not a directory", "nothing was changed"]);
    let said = daemon.run(&["unregister", "one"]);
    assert_eq!(said.code, 3, "{said}");
    std::fs::remove_file(&state).unwrap();
    std::fs::rename(&aside, &state).unwrap();
    wait_until("the state to be stored", || problems(&daemon).is_empty());
    daemon.stop();
}

/// Regression: the state was locked while its file was written. If the file system of the state did not answer, as one on a
/// volume of the daemon, no command was answered.
#[test]
fn a_state_directory_that_does_not_answer_stops_neither_commands_nor_volumes() {
    use std::os::unix::fs::OpenOptionsExt;
    let place = Place::new();
    let daemon = place.start_registered();
    daemon.run(&["volume", "create", &place.ssd, "64k"]).ok();
    // Who opens a pipe to write it waits for a reader.
    let pipe = place.dir.path("state/state.new");
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    let late = "state.json: cannot be written: a write has not ended after 5 s";
    daemon.run(&["set", "one", "writeback_delay=7"]).refused(&[late, "nothing was changed"]);
    daemon.run(&["volume", "create", &place.ssd, "64k"]).refused(&[late]);
    daemon.run(&["set", "one", "writeback_delay=7", "--runtime"]).ok();
    place.client("bcache0").write(0, &[7; 4096]).unwrap();
    let said = daemon.run(&["unregister", "one"]);
    assert_eq!(said.code, 3, "{said}");
    said.says(&["done, but not stored: ", late]);
    place.client("bcache1").write(0, &[7; 4096]).unwrap();
    // The data of the first volume is dirty, and its disk is gone.
    assert_eq!(kinds(&daemon), ["dirty_without_disk", "state_not_stored"]);
    assert!(!writable(&daemon));
    let nonblocking = rustix::fs::OFlags::NONBLOCK.bits() as i32;
    let reader = std::fs::File::options().read(true).custom_flags(nonblocking).open(&pipe).unwrap();
    wait_until("the state to be stored", || kinds(&daemon) == ["dirty_without_disk"] && writable(&daemon));
    drop(reader);
    daemon.stop();
    let text = std::fs::read_to_string(place.dir.path("state/state.json")).unwrap();
    let state: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert!(state["devices"].get(&*place.hdd).is_none(), "it is unregistered: {text}");
}
