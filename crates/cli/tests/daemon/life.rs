//! Devices come and go, the daemon dies and comes back, and what was written is where it was.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use rustix::process::Signal;

use crate::place::*;
use crate::world::*;

#[test]
fn after_a_kill_volumes_are_where_they_were() {
    let place = Place::new();
    let daemon = place.start();
    // A volume that comes first takes the first name, and keeps it though it is found later from then on.
    let alone = place.dir.sparse("a-lone", 4 << 20);
    run(&["make", "-B", &alone]).ok();
    let zebra = place.dir.path("zebra");
    std::fs::rename(&alone, &zebra).unwrap();
    daemon.run(&["register", &zebra]).ok().says(&["served"]);
    daemon.run(&["register", &place.ssd, &place.hdd]).ok().says(&["served"]);
    daemon.run(&["set", "one", "writeback_delay=77"]).ok();
    daemon.run(&["set", "one", "writeback_percent=33", "--runtime"]).ok();
    assert_eq!(daemon.volume("bcache1")["label"], "one");
    let mut client = place.client("bcache1");
    client.write(4096, &[7; 4096]).unwrap();
    client.flush().unwrap();
    place.client("bcache0").write(0, &[9; 512]).unwrap();
    drop(client);
    daemon.kill();

    let daemon = place.start();
    assert_eq!(daemon.volume("bcache1")["label"], "one");
    assert_eq!(daemon.volume("bcache1")["state"], "dirty");
    assert_eq!(place.client("bcache1").read(4096, 4096).unwrap(), [7; 4096]);
    assert_eq!(place.client("bcache0").read(0, 512).unwrap(), [9; 512]);
    daemon.run(&["get", "one", "writeback_delay"]).ok().says(&["77"]);
    daemon.run(&["get", "one", "writeback_percent"]).ok().says(&["10"]);
    let both = daemon.run(&["get", "one", "writeback_delay", "writeback_percent"]).ok();
    assert_eq!(both.out, "writeback_delay = 77 s (default 30)\nwriteback_percent = 10 %\n");
    let both = daemon.run(&["get", "one", "writeback_percent", "writeback_delay", "--json"]).ok().json();
    assert_eq!(both["tunables"][1]["value"], "77", "{both}");
    assert_eq!(both["tunables"].as_array().map(Vec::len), Some(2));
    daemon.run(&["get", "one", "writeback_delay", "nothing"]).usage().says(&["unknown tunable nothing"]);
    daemon.run(&["set", "one", "=3"]).usage().says(&["expected KEY=VALUE"]);
    daemon.run(&["reset", "one", "writeback_delay"]).ok().says(&["30"]);
    daemon.run(&["stop", "one", "bcache0"]).ok().says(&["one, bcache1", "bcache0"]);
    daemon.stop();
    run(&["check", &place.ssd, &place.hdd]).ok();
}

#[test]
fn a_dirty_device_waits_for_its_cache_and_is_never_served_without() {
    let place = Place::new();
    let daemon = place.start();
    daemon.run(&["register", &place.hdd, &place.ssd]).ok();
    place.client("bcache0").write(0, &[1; 4096]).unwrap();
    daemon.run(&["unregister", &place.ssd]).ok();
    assert_eq!(daemon.state_of(&place.hdd), "waiting");
    assert!(daemon.json(&["status"])["sets"].as_array().unwrap().is_empty());
    assert!(!PathBuf::from(place.dir.path("bcache0.sock")).exists());
    daemon.run(&["status"]).ok().says(&["waiting", "has dirty data in cache set"]);
    daemon.run(&["show"]).ok().says(&["waiting", "1 (data)"]);
    run(&["super", &place.hdd]).ok().says(&["dirty"]);
    daemon.kill();

    // It is remembered that it waits.
    let daemon = place.start();
    assert_eq!(daemon.state_of(&place.hdd), "waiting");
    daemon.run(&["register", &place.ssd]).ok().says(&["served"]);
    assert_eq!(daemon.state_of(&place.hdd), "served");
    assert_eq!(place.client("bcache0").read(0, 4096).unwrap(), [1; 4096]);
    let already = ["hdd: already served as one (bcache0), UUID ", "ssd: already served as the cache of set "];
    daemon.run(&["register", "--quiet", &place.ssd, &place.hdd]).ok().says(&already);
    daemon.run(&["tree"]).ok().says(&["one  ", "bcache0  dirty(running)"]);
    daemon.stop();
}

#[test]
fn a_volume_is_stopped_and_comes_back() {
    let place = Place::new();
    let daemon = place.start_registered();
    place.client("bcache0").write(8192, &[3; 4096]).unwrap();
    let size = daemon.volume("one")["size_bytes"].clone();
    daemon.run(&["stop", "one"]).ok();
    assert_eq!(daemon.state_of(&place.hdd), "stopped");
    assert_eq!(daemon.http("GET", "/v1/volumes/bcache0", "").0, 404);
    let devices = daemon.json(&["status"])["devices"].as_array().unwrap().clone();
    let stopped = devices.iter().find(|d| d["path"] == place.hdd.as_str()).unwrap();
    assert_eq!(stopped["size_bytes"], size, "the size of a stopped volume is known");
    // The set serves on, and the device is free.
    daemon.run(&["show"]).ok().says(&["active"]);
    run(&["super", &place.hdd]).ok().says(&["dirty"]);
    daemon.run(&["register", &place.hdd]).ok().says(&["served"]);
    assert_eq!(place.client("bcache0").read(8192, 4096).unwrap(), [3; 4096]);
    daemon.run(&["unregister", "one"]).ok();
    assert_eq!(daemon.devices().len(), 1);
    daemon.run(&["unregister", "nothing"]).refused(&["nothing"]);
    daemon.stop();
    run(&["check", &place.ssd, &place.hdd]).ok();
}

#[test]
fn detaching_writes_everything_back_and_attaching_begins_anew() {
    let place = Place::new();
    let daemon = place.start_registered();
    let mut client = place.client("bcache0");
    client.write(0, &[5; 1 << 20]).unwrap();
    assert!(daemon.volume("bcache0")["dirty_bytes"].as_u64().unwrap() > 0);
    daemon.run(&["detach", &place.hdd]).ok().says(&["detach done"]);
    assert_eq!(read(&place.hdd)[DATA_OFFSET as usize..][..1 << 20], [5; 1 << 20]);
    // Its client has not noticed.
    assert_eq!(client.read(0, 4096).unwrap(), [5; 4096]);
    daemon.run(&["show"]).ok().says(&["no cache(running)"]);
    let jobs = daemon.json(&["jobs"]);
    assert_eq!((&jobs["jobs"][0]["state"], &jobs["jobs"][0]["percent"]), (&"done".into(), &100.into()));
    drop(client);

    daemon.run(&["attach", &place.ssd, "one"]).ok();
    daemon.run(&["attach", &place.ssd, "one"]).refused(&["already attached"]);
    daemon.run(&["attach", &place.hdd, "one"]).refused(&["expected a set, found a volume of set"]);
    let mut client = place.client("bcache0");
    assert_eq!(client.read(0, 4096).unwrap(), [5; 4096]);
    client.write(0, &[6; 4096]).unwrap();
    assert_eq!(daemon.volume("bcache0")["dirty_bytes"], 4096);
    daemon.run(&["drain", "bcache0"]).ok();
    assert_eq!(daemon.volume("bcache0")["dirty_bytes"], 0);
    daemon.run(&["set-cachemode", &place.hdd, "writethrough"]).ok();
    daemon.run(&["set-label", &place.hdd, "two"]).ok();
    daemon.run(&["set-cachemode", &place.hdd, "sideways"]).usage();
    daemon.stop();
    run(&["super", &place.hdd]).ok().says(&["writethrough", "two"]);
    run(&["check", &place.ssd, &place.hdd]).ok();
}

#[test]
fn a_stop_keeps_dirty_data_or_drains_it_first() {
    let place = Place::new();
    let daemon = place.start_registered();
    place.client("bcache0").write(0, &[1; 65536]).unwrap();
    daemon.stop();
    run(&["super", &place.hdd]).ok().says(&["dirty"]);
    place.configure("drain_on_stop = true\n[tunables]\nwriteback_running = 0\n");
    let daemon = place.start();
    daemon.stop();
    run(&["super", &place.hdd]).ok().says(&["clean"]);
    assert_eq!(read(&place.hdd)[DATA_OFFSET as usize..][..65536], [1; 65536]);
}

#[test]
fn volumes_are_made_in_the_cache_and_devices_are_checked() {
    let place = Place::new();
    let daemon = place.start_registered();
    let set = daemon.json(&["status"])["sets"][0]["id"].as_str().unwrap().to_owned();
    let path = format!("/v1/sets/{set}/volumes");
    assert_eq!(daemon.http("POST", &path, r#"{"size_bytes": 1000}"#).0, 400);
    assert_eq!(daemon.http("POST", &path, r#"{"size_bytes": 65536, "label": "small"}"#).0, 200);
    place.client("bcache1").write(0, &[8; 4096]).unwrap();
    daemon.run(&["tree"]).ok().says(&["bcache1  flash-only"]);
    assert_eq!(daemon.http("POST", &format!("/v1/sets/{set}/gc"), "").0, 200);
    let check_as = |devices: &[&str], in_use: bool| {
        let body = serde_json::json!({"devices": devices, "in_use": in_use}).to_string();
        let (status, body) = daemon.http("POST", "/v1/check", &body);
        assert_eq!(status, 202, "{body}");
        let path = format!("/v1/jobs/{}", body["job"]["id"]);
        wait_until("the end of the check", || daemon.http("GET", &path, "").1["job"]["state"] != "running");
        daemon.http("GET", &path, "").1["job"].clone()
    };
    let check = |devices: &[&str]| check_as(devices, false);
    let job = check(&[&place.ssd]);
    assert_eq!(job["state"], "failed", "somebody writes to it");
    let why = job["error"].as_str().unwrap();
    assert!(why.contains(&place.ssd) && why.contains("\"in_use\": true"), "{why}");
    // As it says. Nothing happens meanwhile, so that nothing is torn.
    let job = check_as(&[&place.ssd, &place.hdd], true);
    assert!(job["report"].is_object(), "{job}");
    daemon.run(&["unregister", &place.ssd]).ok();
    let job = check(&[&place.ssd, &place.hdd]);
    assert_eq!(job["state"], "done", "{job}");
    assert!(job["report"].is_object());
    // Names are kept.
    daemon.run(&["register", &place.ssd]).ok();
    assert_eq!(place.client("bcache1").read(0, 4096).unwrap(), [8; 4096]);
    daemon.stop();
}

#[test]
fn another_device_at_the_same_place_is_not_taken_for_the_old_one() {
    let place = Place::new();
    let daemon = place.start_registered();
    assert!(place.refused().contains("another daemon"));
    daemon.stop();
    std::fs::remove_file(&place.hdd).unwrap();
    let hdd = place.dir.sparse("hdd", 8 << 20);
    run(&["make", "-B", &hdd]).ok();
    let daemon = place.start();
    assert_eq!(daemon.state_of(&hdd), "failed");
    daemon.run(&["status"]).ok().says(&["expected the device with UUID", "register it again"]);
    daemon.run(&["register", &hdd]).ok().says(&["served"]);
    // What is missing at the start does not keep the rest from coming up.
    daemon.stop();
    std::fs::remove_file(&hdd).unwrap();
    let daemon = place.start();
    assert_eq!(daemon.state_of(&hdd), "failed");
    assert_eq!(daemon.state_of(&place.ssd), "served");
    daemon.stop();
}

/// A backing device whose data is in another process, which can be made to stand still.
pub struct Frozen {
    fuse: Child,
    server: u32,
    mount_point: PathBuf,
    pub file: String,
}

impl Frozen {
    /// Puts the disk of a place behind a file system that can be stopped, and registers it with its cache device.
    pub fn registered(place: &Place, daemon: &Daemon) -> Frozen {
        let slow = Frozen::over(&place.dir, &place.hdd);
        daemon.run(&["register", &place.ssd, &slow.file]).ok();
        slow
    }

    pub fn over(dir: &Dir, image: &str) -> Frozen {
        let mount_point = dir.root().join("mnt");
        std::fs::create_dir(&mount_point).unwrap();
        let (pid_file, file) = (dir.path("nbdkit.pid"), mount_point.join("hdd"));
        let fuse = Command::new("nbdfuse")
            .arg(&file)
            .args(["--command", "nbdkit", "-s", "--exit-with-parent", "-P", &pid_file, "file", image])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("this test needs nbdfuse: install the Debian package libnbd-bin");
        wait_until("the device", || file.exists());
        let pid = || std::fs::read_to_string(&pid_file).ok()?.trim().parse().ok();
        wait_until("nbdkit", || pid().is_some());
        Frozen { fuse, server: pid().unwrap(), mount_point, file: file.to_str().unwrap().to_owned() }
    }

    /// Has it stand still. Busy threads run for a moment after the signal.
    pub fn freeze(&self) {
        signal(self.server, Signal::STOP);
        wait_until("the standstill", || {
            let threads = std::fs::read_dir(format!("/proc/{}/task", self.server)).unwrap();
            threads.flatten().all(|thread| {
                let about = std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
                about.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('T'))
            })
        });
    }

    pub fn thaw(&self) {
        signal(self.server, Signal::CONT);
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        signal(self.server, Signal::CONT);
        let _ = Command::new("umount").arg("-l").arg(&self.mount_point).output();
        let _ = self.fuse.kill();
        let _ = self.fuse.wait();
    }
}

#[test]
fn a_job_on_a_device_that_stands_still_can_be_cancelled() {
    let place = Place::new();
    let daemon = place.start();
    let slow = Frozen::registered(&place, &daemon);
    place.client("bcache0").write(0, &[1; 65536]).unwrap();
    slow.freeze();
    daemon.run(&["detach", "one", "--no-wait"]).ok().says(&["job 1"]);
    daemon.run(&["jobs"]).ok().says(&["detach one, bcache0: [---"]);
    daemon.run(&["cancel", "1"]).ok();
    let state = || daemon.json(&["jobs"])["jobs"][0]["state"].clone();
    wait_until("the end of the job", || state() != "running");
    assert_eq!(state(), "cancelled");
    slow.thaw();
    // The set works as before: new data is dirty.
    place.client("bcache0").write(1 << 20, &[2; 4096]).unwrap();
    assert!(daemon.volume("bcache0")["dirty_bytes"].as_u64().unwrap() >= 4096);
    assert_eq!(daemon.volume("bcache0")["attached"], true);
    daemon.run(&["detach", "one"]).ok();
    assert_eq!(daemon.http("GET", "/v1/jobs/77", "").0, 404);
    daemon.stop();
}

/// The thread of an idle set held the device of a volume that had been detached from it, so every second `attach` to the other
/// set failed with "in use by this process" and took a healthy volume down.
#[test]
fn a_disk_moves_between_two_sets_as_often_as_one_likes() {
    let place = Place::new();
    let other = place.dir.sparse("other", 8 << 20);
    run(&["make", "-C", &other, "--bucket", "8k"]).ok();
    let daemon = place.start();
    daemon.run(&["register", &place.ssd, &other, &place.hdd]).ok();
    let refused = daemon.run(&["attach", &other, "one"]);
    refused.refused(&["run `ubcache detach one`, then this command; see the page move of the guide"]);
    for _ in 0..5 {
        for to in [&other, &place.ssd] {
            daemon.run(&["detach", "one"]).ok();
            daemon.run(&["attach", to, "one"]).ok();
            assert_eq!(daemon.state_of(&place.hdd), "served");
        }
    }
    daemon.stop();
}

/// `register` of a disk whose volume had been detached, and was served still, failed with "in use by this process". Then
/// `unregister` said "unregistered", and clients still wrote to the disk.
#[test]
fn a_detached_disk_is_registered_and_can_be_unregistered() {
    let place = Place::new();
    let daemon = place.start_registered();
    daemon.run(&["detach", "one"]).ok();
    daemon.run(&["register", &place.hdd]).ok();
    assert_eq!(daemon.state_of(&place.hdd), "served");
    let mut client = place.client("bcache0");
    client.read(0, 4096).unwrap();
    drop(client);
    daemon.run(&["unregister", &place.hdd]).ok();
    let (status, body) = daemon.http("GET", "/v1/volumes/bcache0", "");
    assert_eq!(status, 404, "{body}");
    assert!(daemon.devices().iter().all(|d| d["path"] != place.hdd.as_str()));
    daemon.stop();
}
