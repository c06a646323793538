//! What fails half way, or is given up in the middle, leaves nothing half done.

use std::io::Write;

use crate::life::Frozen;
use crate::place::*;
use crate::world::*;

#[test]
fn a_device_that_cannot_be_attached_stays_as_it_was() {
    let place = Place::new();
    let (ssd, small) = (place.dir.sparse("coarse", 8 << 20), place.dir.sparse("fine", 8 << 20));
    run(&["make", "-C", &ssd, "--bucket", "64k", "--block", "4k"]).ok();
    run(&["make", "-B", &small, "--block", "512"]).ok();
    let daemon = place.start();
    daemon.run(&["register", &ssd]).ok();
    // A device that was never registered is not served because of it.
    daemon.run(&["attach", &ssd, &small]).refused(&["block"]);
    assert_eq!(daemon.devices().len(), 1);
    assert_eq!(daemon.http("GET", "/v1/volumes/bcache0", "").0, 404);
    daemon.run(&["register", &small]).ok();
    place.client("bcache0").write(0, &[4; 512]).unwrap();
    daemon.run(&["attach", &ssd, &small]).refused(&["block"]);
    assert_eq!(daemon.state_of(&small), "served");
    assert_eq!(place.client("bcache0").read(0, 512).unwrap(), [4; 512]);
    daemon.stop();
}

#[test]
fn a_command_that_cannot_be_stored_changes_nothing_and_can_be_repeated() {
    let place = Place::new();
    let daemon = place.start();
    // The state is written beside the old one first, which cannot be done now.
    let in_the_way = place.dir.path("state/state.new");
    std::fs::create_dir(&in_the_way).unwrap();
    daemon.run(&["register", &place.ssd]).refused(&["cannot be written", "nothing was changed"]);
    daemon.run(&["register", &place.hdd]).refused(&["cannot be written", "nothing was changed"]);
    assert_eq!(daemon.devices().len(), 0);
    std::fs::remove_dir(&in_the_way).unwrap();
    daemon.run(&["register", &place.ssd]).ok();
    daemon.run(&["register", &place.hdd]).ok().says(&["served"]);
    place.client("bcache0").write(0, &[4; 4096]).unwrap();
    daemon.run(&["register", &place.ssd]).ok().says(&["already served as the cache of set "]);
    // One that is known and cannot be had any more does not vanish.
    daemon.run(&["stop", "one"]).ok();
    std::fs::create_dir(&in_the_way).unwrap();
    let moved = place.dir.path("moved");
    std::fs::rename(&place.hdd, &moved).unwrap();
    daemon.run(&["register", &place.hdd]).refused(&["cannot be found"]);
    assert_eq!(daemon.state_of(&place.hdd), "stopped");
    std::fs::rename(&moved, &place.hdd).unwrap();
    std::fs::remove_dir(&in_the_way).unwrap();
    daemon.kill();
    let daemon = place.start();
    assert_eq!(place.client("bcache0").read(0, 4096).unwrap(), [4; 4096]);
    daemon.stop();
}

#[test]
fn a_client_that_goes_away_in_the_middle_leaves_nothing_half_done() {
    let place = Place::new();
    // What the configuration names comes back with the next start, unless it is remembered that it was set.
    place.configure("[tunables]\nwriteback_running = 0\ncache_mode = \"writeback\"\n");
    let daemon = place.start();
    let slow = Frozen::registered(&place, &daemon);
    slow.freeze();
    let mut stream = daemon.connect();
    let body = r#"{"mode": "writethrough"}"#;
    let head = "PUT /v1/volumes/bcache0/cache-mode HTTP/1.1\r\nHost: x\r\n";
    write!(stream, "{head}Content-Length: {}\r\n\r\n{body}", body.len()).unwrap();
    // By then the set has the order; it cannot write its superblock.
    for _ in 0..30 {
        daemon.volume("bcache0");
    }
    drop(stream);
    for _ in 0..10 {
        daemon.volume("bcache0");
    }
    slow.thaw();
    wait_until("the mode", || daemon.volume("bcache0")["cache_mode"] == "writethrough");
    let state = place.dir.path("state/state.json");
    wait_until("the state", || std::fs::read_to_string(&state).unwrap().contains("writethrough"));
    daemon.stop();
    let daemon = place.start();
    assert_eq!(daemon.volume("bcache0")["cache_mode"], "writethrough");
    daemon.stop();
}

#[test]
fn reloads_beside_each_other_and_beside_other_changes() {
    let place = Place::new();
    let daemon = place.start_registered();
    let config = |n: u64| {
        format!(
            "[tunables]\nwriteback_running = 0\nwriteback_delay = {n}\njournal_delay_ms = {}\n",
            n % 90 + 1
        )
    };
    std::thread::scope(|scope| {
        for part in 0..2 {
            let (place, daemon, config) = (&place, &daemon, &config);
            scope.spawn(move || {
                for n in 0..25 {
                    // Half a file is a mistake, which changes nothing: that it is refused is all right.
                    place.configure(&config(100 * part + n));
                    daemon.http("POST", "/v1/reload", "{}");
                }
            });
        }
        for _ in 0..4 {
            daemon.run(&["detach", "one"]).ok();
            daemon.run(&["attach", &place.ssd, "one"]).ok();
        }
    });
    place.configure(&config(7));
    assert_eq!(daemon.http("POST", "/v1/reload", "{}").0, 200);
    daemon.run(&["get", "one", "writeback_delay"]).ok().says(&["7\n"]);
    daemon.run(&["get", &place.ssd, "journal_delay_ms"]).ok().says(&["8\n"]);
    daemon.stop();
    run(&["check", &place.ssd, &place.hdd]).ok();
}
