//! Commands on volumes that are in use, and commands that are in each other's way.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;

use serde_json::Value;

use crate::life::Frozen;
use crate::place::*;
use crate::world::*;

/// A backing device that belongs to no set.
fn alone(place: &Place, name: &str) -> String {
    let disk = place.dir.sparse(name, 4 << 20);
    run(&["make", "-B", &disk]).ok();
    disk
}

/// A daemon whose volumes are files of a FUSE file system.
fn by_fuse(place: &Place) -> Daemon {
    let dir = place.dir.root().display();
    let exports = format!("exports = [\"fuse={dir}/{{volume}}\"]\nlinks = \"{dir}/links\"\n");
    std::fs::write(place.dir.path("ubcache.toml"), exports).unwrap();
    place.start()
}

/// The mount of a daemon that was killed made the export fail for ever: `cannot be made: File exists`.
#[test]
fn a_killed_daemon_leaves_no_mount_that_keeps_the_next_one_from_exporting() {
    if let Err(why) = export_fuse::probe().fuse {
        rig::skipped(why);
        return;
    }
    let place = Place::new();
    let daemon = by_fuse(&place);
    daemon.run(&["register", &place.ssd, &place.hdd]).ok();
    daemon.kill();
    let daemon = place.start();
    wait_until("the volume is served", || {
        daemon.json(&["status"])["sets"][0]["volumes"][0]["name"] == "bcache0"
    });
    let volume = daemon.volume("bcache0");
    assert_eq!(volume["problem"], Value::Null, "{volume}");
    File::open(place.dir.path("bcache0/bcache0")).unwrap().read_exact(&mut [0; 4096]).unwrap();
    daemon.stop();
}

/// `register CACHE DISK...` while the disks waited for the cache added each disk twice. It failed with "in use by this process",
/// and a later `unregister` of a disk left its volume served.
#[test]
fn a_cache_is_registered_together_with_disks_that_wait_for_it() {
    let place = Place::new();
    place.configure("[tunables]\nwriteback_running = 0\nsequential_cutoff = 0\n");
    let daemon = place.start_registered();
    let mut client = place.client("bcache0");
    client.write(0, &[9; 4096]).unwrap();
    client.flush().unwrap();
    drop(client);
    daemon.run(&["unregister", &place.ssd]).ok();
    let state = |daemon: &Daemon| daemon.json(&["status"])["devices"][0]["state"].clone();
    assert_eq!(state(&daemon), "waiting");
    daemon.run(&["register", &place.ssd, &place.hdd]).ok();
    assert_eq!(place.client("bcache0").read(0, 4096).unwrap(), [9; 4096]);
    daemon.run(&["unregister", &place.hdd]).ok();
    assert_eq!(daemon.json(&["status"])["sets"][0]["volumes"], serde_json::json!([]));
    daemon.stop();
}

/// The cache device failed while it had dirty data, so the loop device of the volume could not be flushed any more. Every stop
/// took the failed flush for a user of the volume and was refused.
#[test]
fn a_volume_that_cannot_be_flushed_can_be_stopped() {
    let host = export_fuse::probe();
    if let Err(why) = host.fuse.and(host.loop_device) {
        rig::skipped(why);
        return;
    }
    let place = Place::new();
    let daemon = by_fuse(&place);
    daemon.run(&["register", &place.ssd, &place.hdd]).ok();
    daemon.run(&["set-cachemode", &place.hdd, "writeback"]).ok();
    daemon.run(&["set", &place.hdd, "writeback_running=0"]).ok();
    let file = place.dir.path("bcache0/bcache0");
    let mut client = std::fs::OpenOptions::new().read(true).write(true).open(&file).unwrap();
    client.write_all(&[7; 4096]).unwrap();
    client.sync_all().unwrap();
    std::fs::OpenOptions::new().write(true).open(&place.ssd).unwrap().set_len(0).unwrap();
    // Reads past the page cache: so many fail that the set is disabled.
    let direct = i32::try_from(rustix::fs::OFlags::DIRECT.bits()).unwrap();
    let mut reader = std::fs::OpenOptions::new().read(true).custom_flags(direct).open(&file).unwrap();
    wait_until("the failure", || reader.read(&mut [0; 4096]).is_err() && client.sync_all().is_err());
    drop((reader, client));
    daemon.run(&["unregister", &place.hdd]).ok();
    daemon.run(&["unregister", &place.ssd]).ok();
    let status = daemon.json(&["status"]);
    // The disabled set stayed in the status, and the daemon ended with an error because of it.
    assert_eq!((&status["devices"], &status["sets"]), (&serde_json::json!([]), &serde_json::json!([])));
    daemon.stop();
}

/// `unregister` of a cache whose volume was mounted waited for its users without a message, for ever. The volume had left
/// `status` and the metrics meanwhile, and every other `register` and `attach` waited, too.
#[test]
fn a_volume_in_use_is_neither_stopped_nor_unregistered_and_its_users_are_named() {
    if let Err(why) = export_fuse::probe().fuse {
        rig::skipped(why);
        return;
    }
    let place = Place::new();
    let daemon = by_fuse(&place);
    let other = alone(&place, "other");
    daemon.run(&["register", &place.ssd, &place.hdd, &other]).ok();
    let of = |disk: &str| {
        let devices = daemon.json(&["status"]);
        let uuid = devices["devices"].as_array().unwrap().iter().find(|d| d["path"] == disk).unwrap()["uuid"]
            .clone();
        let sets = devices["sets"].as_array().unwrap().clone();
        let volumes = sets.iter().flat_map(|s| s["volumes"].as_array().unwrap().clone());
        volumes.into_iter().find(|v| v["backing_uuid"] == uuid).unwrap()["name"].as_str().unwrap().to_owned()
    };
    let (cached, lone) = (of(&place.hdd), of(&other));
    let open = |volume: &str| {
        let file = place.dir.path(&format!("{volume}/{volume}"));
        File::open(&file).unwrap_or_else(|e| panic!("{file}: {e}"))
    };
    let users = [open(&cached), open(&lone)];
    let me = format!("process {}", std::process::id());
    for (args, volume) in [
        (&["unregister", &place.ssd][..], &cached),
        (&["unregister", &place.hdd], &cached),
        (&["stop", &cached], &cached),
        (&["unregister", &other], &lone),
        (&["stop", &lone], &lone),
        (&["attach", &place.ssd, &other], &lone),
    ] {
        // The message named no page of the guide.
        let page = "see the page upgrade of the guide";
        daemon.run(args).refused(&[volume, "is in use", &me, "stays served", page]);
        assert_eq!(daemon.volume(volume)["problem"], Value::Null, "{args:?}");
        assert!(daemon.metrics().contains(&format!("\"{volume}\"")), "{args:?}");
    }
    // The label comes first.
    daemon.run(&["stop", &cached]).refused(&[&format!("one, {cached} is in use")]);
    // They are served as before.
    for (mut file, disk) in users.into_iter().zip([&place.hdd, &other]) {
        file.read_exact(&mut [1; 4096]).unwrap();
        assert_eq!(daemon.state_of(disk), "served");
    }
    daemon.run(&["attach", &place.ssd, &other]).ok();
    daemon.run(&["stop", &cached]).ok();
    // A volume that was detached while it was in use is on another page.
    let lone = of(&other);
    let user = open(&lone);
    daemon.run(&["detach", &lone]).ok();
    daemon.run(&["unregister", &place.ssd]).refused(&[&lone, &me, "see the page give-up of the guide"]);
    drop(user);
    daemon.run(&["unregister", &place.ssd]).ok();
    daemon.stop();
}

/// A set took long to stop: commands on other devices waited for it, and those that their users had interrupted were carried
/// out afterwards.
#[test]
fn a_long_command_delays_no_other_and_an_interrupted_one_is_not_carried_out() {
    let place = Place::new();
    let daemon = place.start();
    let other = alone(&place, "other");
    let slow = Frozen::registered(&place, &daemon);
    let mut client = place.client("bcache0");
    slow.freeze();
    // The stop waits for the answer to this read.
    let reader = std::thread::spawn(move || client.read(6 << 20, 4096).is_ok());
    wait_until("the read", || daemon.volume("bcache0")["requests"]["reads"] == 1);
    std::thread::scope(|scope| {
        let stop = scope.spawn(|| daemon.run(&["unregister", &place.ssd]));
        let exports = || daemon.volume("bcache0")["exports"].as_array().unwrap().len();
        wait_until("the stop", || exports() == 0);
        // Other volumes are served.
        daemon.run(&["register", &other]).ok().says(&["served"]);
        assert!(daemon.metrics().contains("\"bcache0\""));
        daemon.run(&["status"]).ok().says(&["bcache0"]);
        // The user of this one presses Ctrl-C while it waits.
        let body = format!("{{\"device\": {:?}}}", slow.file);
        let mut interrupted = daemon.connect();
        write!(interrupted, "POST /v1/unregister HTTP/1.0\r\nContent-Length: {}\r\n\r\n{body}", body.len())
            .unwrap();
        wait_until("its wait", || daemon.said().contains(" waits; under way: unregister"));
        drop(interrupted);
        let gone = "the client disconnected before the command began";
        wait_until("its end", || daemon.said().contains(gone));
        slow.thaw();
        stop.join().unwrap().ok();
    });
    reader.join().unwrap();
    assert_eq!(daemon.state_of(&slow.file), "waiting");
    daemon.stop();
}

/// Ctrl-C while the daemon did not run, as on a machine without memory: the command was carried out as soon as it ran.
#[test]
fn a_command_whose_client_left_before_the_daemon_read_it_is_not_carried_out() {
    let place = Place::new();
    let daemon = place.start_registered();
    for path in ["stop", "unregister"] {
        daemon.signal(rustix::process::Signal::STOP);
        let body = match path {
            "unregister" => format!("{{\"device\": {:?}}}", place.hdd),
            _ => String::new(),
        };
        let path = if path == "unregister" {
            "/v1/unregister".into()
        } else {
            format!("/v1/volumes/bcache0/{path}")
        };
        let mut stream = daemon.connect();
        write!(stream, "POST {path} HTTP/1.0\r\nContent-Length: {}\r\n\r\n{body}", body.len()).unwrap();
        drop(stream);
        let before = daemon.said().matches("the client disconnected before the command began").count();
        daemon.signal(rustix::process::Signal::CONT);
        let said = || daemon.said().matches("the client disconnected before the command began").count();
        wait_until("the end of the command", || said() > before);
        assert_eq!(daemon.state_of(&place.hdd), "served");
    }
    daemon.stop();
}

/// Jobs began, and settings were changed, although the client had left before the daemon read the command.
#[test]
fn no_command_begins_without_its_client() {
    let place = Place::new();
    let daemon = place.start_registered();
    let set = daemon.json(&["status"])["sets"][0]["id"].as_str().unwrap().to_owned();
    let before = daemon.volume("bcache0")["tunables"].clone();
    let mode = r#"{"mode": "writethrough"}"#;
    for (method, path, body) in [
        ("POST", "/v1/volumes/bcache0/detach".to_owned(), "{}"),
        ("POST", "/v1/volumes/bcache0/detach".to_owned(), r#"{"wipe": true}"#),
        ("POST", "/v1/volumes/bcache0/drain".to_owned(), ""),
        ("POST", format!("/v1/sets/{set}/wipe"), ""),
        ("POST", format!("/v1/sets/{set}/scrub"), ""),
        ("POST", format!("/v1/sets/{set}/gc"), "{}"),
        ("POST", format!("/v1/sets/{set}/volumes"), r#"{"size_bytes": 65536}"#),
        ("PUT", format!("/v1/sets/{set}/label"), r#"{"label": "other"}"#),
        ("PUT", "/v1/volumes/bcache0/label".to_owned(), r#"{"label": "other"}"#),
        ("PUT", "/v1/volumes/bcache0/cache-mode".to_owned(), mode),
        ("PUT", "/v1/volumes/bcache0/tunables/writeback_delay".to_owned(), r#"{"value": "7"}"#),
        ("DELETE", "/v1/jobs/1".to_owned(), ""),
    ] {
        let refused = || daemon.said().matches("the client disconnected before the command began").count();
        let before = refused();
        daemon.signal(rustix::process::Signal::STOP);
        let mut stream = daemon.connect();
        write!(stream, "{method} {path} HTTP/1.0\r\nContent-Length: {}\r\n\r\n{body}", body.len()).unwrap();
        drop(stream);
        daemon.signal(rustix::process::Signal::CONT);
        wait_until(&path, || refused() > before);
    }
    assert_eq!(daemon.json(&["jobs"])["jobs"], serde_json::json!([]));
    assert_eq!(daemon.volume("bcache0")["tunables"], before);
    let status = daemon.json(&["status"]);
    assert_eq!(status["sets"][0]["volumes"].as_array().unwrap().len(), 1);
    assert_eq!(status["sets"][0]["set"]["label"], "");
    daemon.stop();
}

/// `repair --dry-run` of a set that is served named `--in-use`, which it does not have.
#[test]
fn a_repair_of_a_served_set_names_what_releases_it() {
    let place = Place::new();
    let daemon = place.start_registered();
    let next =
        format!("stop that first; what the daemon serves it releases by `ubcache unregister {}`", place.ssd);
    for more in [&["--dry-run"][..], &[]] {
        let refused = run(&[&["repair", "-C", &place.ssd, "-B", &place.hdd], more].concat());
        let refused = refused.refused(&["in use by", &next]);
        assert!(!refused.err.contains("--in-use"), "{refused}");
    }
    daemon.run(&["unregister", &place.ssd]).ok();
    run(&["repair", "-C", &place.ssd, "-B", &place.hdd, "--dry-run"]).ok();
    daemon.stop();
}
