//! Flash-only volumes, and garbage collection by command.

use crate::place::*;

#[test]
fn flash_only_volumes_are_made_and_destroyed() {
    let place = Place::new();
    let daemon = place.start();
    daemon.run(&["register", &place.ssd, &place.hdd]).ok();
    let ssd = place.ssd.as_str();

    // What does not fit is refused with figures, and a dry run makes nothing.
    daemon
        .run(&["volume", "create", ssd, "7M"])
        .refused(&["a volume of 7168 KiB does not fit", "70 % of the cache"]);
    daemon
        .run(&["volume", "create", ssd, "1M", "--label", "one"])
        .refused(&["label one: belongs to one, bcache0"]);
    daemon.run(&["volume", "create", ssd, "100"]).usage();
    let said = daemon.json(&["volume", "create", ssd, "1M", "--label", "scratch", "--dry-run"]);
    assert!(said["volume"].is_null() && said["room"]["taken_bytes"] == 0, "{said}");
    daemon.run(&["get", "scratch"]).refused(&["there is no volume scratch"]);

    let made = daemon.json(&["volume", "create", ssd, "1M", "--label", "scratch"]);
    assert_eq!((&made["volume"], &made["size_bytes"]), (&"bcache1".into(), &(1 << 20).into()));
    let mut client = place.client("bcache1");
    client.write(0, &[7; 8192]).unwrap();
    client.flush().unwrap();
    let next = daemon.json(&["volume", "create", ssd, "1M", "--dry-run"]);
    assert_eq!(next["room"]["taken_bytes"], 1 << 20);

    // Without --force the data is named, and nothing is destroyed.
    daemon.run(&["volume", "delete", "scratch"]).refused(&["8192 bytes of data", "add --force"]);
    daemon.run(&["volume", "delete", "one", "--force"]).refused(&["is not a flash-only volume", "detach"]);
    let would = daemon.run(&["volume", "delete", "scratch", "--dry-run"]).ok();
    assert_eq!(would.out, "bcache1, label scratch: would destroy a volume of 1.0 MiB with 8.0 KiB of data\n");
    assert_eq!(client.read(0, 8192).unwrap(), [7; 8192]);
    drop(client);
    daemon
        .run(&["volume", "delete", "scratch", "--force"])
        .ok()
        .says(&["bcache1", "destroyed a volume of 1.0 MiB"]);
    daemon.run(&["volume", "delete", "scratch", "--force"]).refused(&["there is no volume scratch"]);

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
