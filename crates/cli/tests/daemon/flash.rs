//! Flash-only volumes, and garbage collection by command.

use rustix::process::Signal;

use crate::place::*;
use crate::state::Small;
use crate::world::*;

#[test]
fn flash_only_volumes_are_made_and_destroyed() {
    let place = Place::new();
    let daemon = place.start_registered();
    let ssd = place.ssd.as_str();

    // What does not fit is refused with figures, and a dry run makes nothing.
    daemon
        .run(&["volume", "create", ssd, "7M"])
        .refused(&["a volume of 7.0 MiB does not fit", "70 % of the cache"]);
    daemon
        .run(&["volume", "create", ssd, "1M", "--label", "one"])
        .refused(&["label one: belongs to one, bcache0"]);
    daemon.run(&["volume", "create", ssd, "100"]).usage();
    for dry in [&["--dry-run"][..], &[]] {
        let create = ["volume", "create", ssd, "1M", "--label", &"x".repeat(33)];
        daemon
            .run(&[&create[..], dry].concat())
            .usage()
            .says(&["label: expected at most 32 bytes, found 33"]);
    }
    let said = daemon.json(&["volume", "create", ssd, "1M", "--label", "scratch", "--dry-run"]);
    assert!(said["volume"].is_null() && said["room"]["taken_bytes"] == 0, "{said}");
    daemon.run(&["get", "scratch"]).refused(&["there is no volume or set scratch"]);

    let made = daemon.json(&["volume", "create", ssd, "1M", "--label", "scratch"]);
    assert_eq!((&made["volume"], &made["size_bytes"]), (&"bcache1".into(), &(1 << 20).into()));
    let mut client = place.client("bcache1");
    client.write(0, &[7; 8192]).unwrap();
    client.flush().unwrap();
    let next = daemon.json(&["volume", "create", ssd, "1M", "--dry-run"]);
    assert_eq!(next["room"]["taken_bytes"], 1 << 20);

    // Without --force the data is named, and nothing is destroyed.
    daemon.run(&["volume", "delete", "scratch"]).refused(&["8.0 KiB of data", "add --force"]);
    daemon.run(&["volume", "delete", "one", "--force"]).refused(&["is not a flash-only volume", "detach"]);
    let would = daemon.run(&["volume", "delete", "scratch", "--dry-run"]).ok();
    assert_eq!(would.out, "scratch, bcache1: would destroy a volume of 1.0 MiB with 8.0 KiB of data\n");
    assert_eq!(client.read(0, 8192).unwrap(), [7; 8192]);
    drop(client);
    daemon
        .run(&["volume", "delete", "scratch", "--force"])
        .ok()
        .says(&["bcache1", "destroyed a volume of 1.0 MiB"]);
    daemon.run(&["volume", "delete", "scratch", "--force"]).refused(&["there is no volume or set scratch"]);

    // Its buckets come back, its name is free again, and after a restart it is gone.
    let gc = daemon.json(&["gc", ssd]);
    let number = |key: &str| gc["gc"][key].as_u64().unwrap_or_else(|| panic!("{key}: {gc}"));
    assert!(number("buckets_available") > 0 && number("buckets") > number("buckets_available"), "{gc}");
    assert_eq!(number("freed_bytes"), number("buckets_freed") * 8192);
    daemon.run(&["gc", ssd, "--dry-run"]).ok().says(&["would walk", "buckets are available"]);
    daemon.run(&["gc", "nothing"]).refused(&["nothing"]);
    daemon.stop();
    let daemon = place.start();
    assert_eq!(daemon.json(&["volume", "create", ssd, "64k"])["volume"], "bcache1");
    daemon.stop();
}

/// Regression: `volume create` succeeded although no export of the new volume was up.
#[test]
fn a_new_volume_that_is_not_exported_is_a_failure() {
    let place = Place::new();
    let daemon = place.start_registered();
    std::fs::write(place.dir.path("bcache1.sock"), "in the way").unwrap();
    let said = daemon.run(&["volume", "create", &place.ssd, "64k", "--label", "scratch"]);
    let said =
        said.refused(&["scratch, bcache1: 64.0 KiB in", "scratch, bcache1: NOT EXPORTED: ", "bcache1.sock"]);
    assert!(said.err.contains("NOT EXPORTED"), "{said}");
    assert!(daemon.volume("scratch")["problem"].is_string());
    daemon.stop();
}

/// A volume could be made in a served set only.
#[test]
fn a_flash_only_volume_is_made_offline() {
    let place = Place::new();
    let daemon = place.start_registered();
    let ssd = place.ssd.as_str();
    let create = |more: &[&str]| {
        let command = ["volume", "create", ssd];
        run(&[&command[..], more, &["--offline"]].concat())
    };
    // The daemon has the device.
    create(&["1M", "--label", "scratch"]).refused(&[ssd, "in use by"]);
    daemon.stop();

    let before = read(ssd);
    create(&["7M"]).refused(&["a volume of 7.0 MiB does not fit", "70 % of the cache"]);
    create(&["100"]).usage().says(&["a multiple of 512 bytes, found 100"]);
    create(&["1M", "--label", "one"]).refused(&["label one: belongs to UUID"]);
    create(&["1M", "--label", "bcache3"]).usage();
    create(&["1M", "--socket", "x"]).usage().says(&["cannot be used with"]);
    run(&["volume", "create", &place.hdd, "1M", "--offline"]).refused(&["expected a cache device"]);
    create(&["1M", "--label", "scratch", "--dry-run"]).ok().says(&["would make a volume of 1.0 MiB"]);
    assert!(read(ssd) == before, "nothing was written");

    let said = create(&["1M", "--label", "scratch"]).ok();
    said.says(&["made a volume of 1.0 MiB, which is served when the set is", "had 0 B of"]);
    create(&["1M", "--label", "scratch"]).refused(&["label scratch: belongs to UUID"]);
    let next = create(&["1M", "--dry-run", "--json"]).ok().json();
    assert_eq!(next["room"]["taken_bytes"], 1 << 20);
    run(&["check", ssd, &place.hdd]).ok();

    let daemon = place.start();
    let volume = daemon.volume("scratch");
    assert_eq!((&volume["flash_only"], &volume["size_bytes"]), (&true.into(), &(1 << 20).into()));
    let mut client = place.client(volume["name"].as_str().unwrap());
    client.write(0, &[7; 4096]).unwrap();
    assert_eq!(client.read(0, 4096).unwrap(), [7; 4096]);
    drop(client);

    // No disk is out of date without this data, and no drain writes it back.
    let stays = "): unregistered; 4.0 KiB of data of flash-only volumes stay on it; scratch (";
    wait_until("the end of the client", || daemon.run(&["unregister", ssd]).out.contains(stays));
    daemon.stop();
    let volume = run(&["dump", ssd, "uuids", "--json"]).ok().json();
    let is_volume = |s: &&serde_json::Value| s["label"] == "scratch";
    let slot = volume["slots"].as_array().unwrap().iter().find(is_volume).expect("a slot")["inode"].clone();
    let copy = place.dir.path("copy");
    let said = run(&["make", "-C", ssd, "--wipe"]);
    let said = said.refused(&[
        "no backing device has the data of flash-only volumes: copy each with ",
        &format!("`ubcache extract -C {ssd} --volume {slot} -o FILE`, or lose the data with --wipe-dirty"),
    ]);
    assert!(!said.err.contains("drain"), "{said}");
    run(&["extract", "-C", ssd, "--volume", &slot.to_string(), "-o", &copy]).ok();
    assert_eq!(read(&copy)[..4096], [7; 4096]);
}

/// A stopped flash-only volume was in no list until the next start: no command knew it, its size and its label did not count,
/// and its data belonged to a disk that was not registered.
#[test]
fn a_stopped_flash_only_volume_stays_listed_and_is_served_again() {
    let place = Place::new();
    let daemon = place.start_registered();
    let ssd = place.ssd.as_str();
    daemon.run(&["volume", "create", ssd, "1M", "--label", "scratch"]).ok();
    let mut client = place.client("bcache1");
    client.write(0, &[7; 8192]).unwrap();
    client.flush().unwrap();
    drop(client);
    wait_until("the stop", || daemon.run(&["stop", "scratch"]).code == 0);

    let said = daemon.run(&["status"]).ok().says(&["no problems"]).to_string();
    let line = said.lines().find(|l| l.contains("scratch")).expect("the stopped volume").to_owned();
    assert!(line.contains(" bcache1 ") && line.contains(" 8.0 KiB ") && line.contains(" stopped "), "{said}");
    daemon.run(&["tree"]).ok().says(&["scratch  bcache1  stopped"]);
    let shown = daemon.run(&["show"]).ok().to_string();
    let line = shown.lines().find(|l| l.starts_with("scratch")).expect("a flash-only volume in the list");
    let columns: Vec<&str> = line.split_whitespace().collect();
    assert_eq!(columns[..5], ["scratch", "bcache1", "N/A", "flash-only", "stopped"], "{shown}");
    daemon.run(&["show", "--device", "scratch"]).ok().says(&["flash-only", "stopped", "1.0 MiB"]);
    let next = "scratch, bcache1: is not served: it was stopped; run `ubcache register scratch`";
    daemon.run(&["stop", "scratch"]).refused(&[next]);
    daemon.run(&["wait", "scratch", "--timeout", "0"]).refused(&["it was stopped; run `ubcache register"]);
    // Its size and its label count.
    daemon.run(&["volume", "create", ssd, "1M", "--label", "scratch"]).refused(&["belongs to scratch"]);
    let would = daemon.json(&["volume", "create", ssd, "1M", "--dry-run"]);
    assert_eq!(would["room"]["taken_bytes"], 1 << 20);

    let uuid = daemon.volume("scratch")["flash_uuid"].as_str().expect("a UUID").to_owned();
    for name in ["scratch", "bcache1", &uuid] {
        daemon.run(&["register", name]).ok().says(&["scratch, bcache1 (UUID ", "): served"]);
        daemon.run(&["register", name]).ok().says(&["): already served"]);
        assert_eq!(place.client("bcache1").read(0, 8192).unwrap(), [7; 8192]);
        wait_until("the stop", || daemon.run(&["stop", name]).code == 0);
    }
    daemon.run(&["volume", "delete", "scratch", "--force"]).ok();
    daemon.run(&["get", "scratch"]).refused(&["there is no volume or set scratch"]);
    daemon.stop();
}

/// After the failed stop the volume has no exports, so it stays stopped.
#[test]
fn a_flush_that_fails_at_the_stop_is_an_error_and_the_volume_stays_stopped() {
    let place = Place::new();
    let Some(small) = Small::new(&place, "cache", "2m") else { return };
    let daemon = place.start();
    let ssd = format!("{}/ssd", small.at);
    std::fs::File::create(&ssd).unwrap().set_len(8 << 20).unwrap();
    run(&["make", "-C", &ssd, "--bucket", "8k"]).ok();
    daemon.run(&["register", &ssd]).ok();
    daemon.run(&["volume", "create", &ssd, "1M", "--label", "scratch"]).ok();
    let name = daemon.volume("scratch")["name"].as_str().unwrap().to_owned();
    // The file of the cache device is sparse, so a full file system below it fails its writes.
    small.fill();
    let mut client = place.client(&name);
    client.write(0, &[7; 65536]).expect_err("there is no room below");
    drop(client);
    wait_until("the stop", || !daemon.run(&["stop", "scratch"]).to_string().contains("in use"));
    daemon.run(&["stop", "scratch"]).refused(&["is not served: it was stopped"]);
    assert_eq!(daemon.volume("scratch")["stopped"], true);
    daemon.run(&["show"]).ok().says(&["stopped"]);
    daemon.signal(Signal::TERM);
    daemon.ended();
}

/// The advice was `ubcache reload`, which tried nothing if the configuration had not changed.
#[test]
fn a_reload_tries_exports_again_that_are_not_up() {
    let place = Place::new();
    let daemon = place.start();
    let in_the_way = ["bcache0.sock", "bcache1.sock"].map(|name| place.dir.path(name));
    in_the_way.iter().for_each(|path| std::fs::write(path, "in the way").unwrap());
    daemon.run(&["register", &place.ssd, &place.hdd]).refused(&["NOT EXPORTED"]);
    daemon.run(&["volume", "create", &place.ssd, "64k", "--label", "scratch"]).refused(&["NOT EXPORTED"]);
    let still = "scratch, bcache1: still cannot be exported: ";
    daemon.run(&["reload"]).refused(&[still, "one, bcache0: still cannot be exported: "]);
    std::fs::remove_file(&in_the_way[0]).unwrap();
    daemon.run(&["reload"]).refused(&[still, "one, bcache0: exported: "]);
    place.client("bcache0").read(0, 4096).unwrap();
    std::fs::remove_file(&in_the_way[1]).unwrap();
    daemon.run(&["reload"]).ok().says(&["scratch, bcache1: exported: "]);
    place.client("bcache1").read(0, 4096).unwrap();
    daemon.run(&["reload"]).ok().says(&["nothing has changed"]);
    daemon.run(&["status"]).ok().says(&["no problems"]);
    daemon.stop();
}
