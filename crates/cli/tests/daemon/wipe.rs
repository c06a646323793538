//! What is left of a volume on the cache device, and `--wipe`, which leaves nothing.

use crate::place::*;
use crate::world::*;

/// What is searched for on the cache device.
const SECRET: &[u8] = b"the-secret-of-volume-one";
const OTHER: &[u8] = b"what-volume-two-says";

/// 64 KiB of a pattern.
fn pattern(of: &[u8]) -> Vec<u8> {
    of.iter().copied().cycle().take(64 << 10).collect()
}

/// How often the beginning of a pattern is found in a file.
fn found(file: &str, what: &[u8]) -> usize {
    read(file).windows(what.len()).filter(|w| *w == what).count()
}

/// Two volumes in one set, `one` and `two`, with data of both in the cache, written several times over and read.
fn two_volumes(place: &Place) -> (Daemon, String) {
    let second = place.dir.sparse("second", 8 << 20);
    run(&["make", "-B", &second, "--writeback", "--label", "two"]).ok();
    let daemon = place.start_registered();
    daemon.run(&["attach", &place.ssd, &second]).ok();
    for round in 0..3 {
        for (volume, text) in [("bcache0", SECRET), ("bcache1", OTHER)] {
            let mut client = place.client(volume);
            for at in [0, 12 << 10, 300 << 10] {
                client.write(at + (round << 12), &pattern(text)).unwrap();
            }
            client.flush().unwrap();
            client.read(0, 64 << 10).unwrap();
        }
    }
    (daemon, second)
}

/// A detach alone leaves the data readable on the cache device; with `--wipe` nothing of it is left, also no older version, and the
/// other volume keeps its data, dirty and clean.
#[test]
fn a_wipe_leaves_nothing_of_the_volume_on_the_cache_device() {
    let place = Place::new();
    let (daemon, _) = two_volumes(&place);
    daemon.run(&["detach", "one"]).ok().says(&["detach done"]);
    assert!(found(&place.ssd, SECRET) > 1000, "a detach alone leaves the data");
    daemon.run(&["wipe", &place.ssd]).ok().says(&["wipe done", "overwritten with zeros", "buckets"]);
    assert_eq!(found(&place.ssd, SECRET), 0);
    assert!(found(&place.ssd, OTHER) > 1000);
    assert!(daemon.volume("bcache1")["dirty_bytes"].as_u64().unwrap() > 0, "dirty data stays");
    let mut client = place.client("bcache1");
    assert!(client.read(300 << 10, 4096).unwrap() == pattern(OTHER)[..4096]);
    drop(client);
    // Both steps in one, of the other volume; and what it did, for scripts.
    let said = daemon.json(&["detach", "two", "--wipe"]);
    let wiped = &said["job"]["report"]["wiped"];
    assert_eq!(said["job"]["state"], "done");
    assert!(
        wiped["zeroed_bytes"].as_u64().unwrap() > 1 << 20 && wiped["whole_buckets"].as_u64().unwrap() > 100,
        "{said}"
    );
    assert_eq!(found(&place.ssd, OTHER), 0);
    assert!(place.client("bcache1").read(300 << 10, 4096).unwrap() == pattern(OTHER)[..4096]);
    daemon.run(&["wipe", "nothing"]).refused(&["nothing"]);
    daemon.stop();
    run(&["check", &place.ssd]).ok();
}

/// The process dies after the detach and before the end of the wipe: the next daemon wipes the rest, although it does not
/// know the volume.
#[test]
fn a_wipe_is_run_again_after_a_kill() {
    let place = Place::new();
    let (daemon, second) = two_volumes(&place);
    daemon.run(&["detach", "one"]).ok();
    daemon.run(&["wipe", &place.ssd, "--no-wait"]).ok();
    daemon.kill();
    let daemon = place.start();
    daemon.run(&["wipe", &place.ssd]).ok();
    assert_eq!(found(&place.ssd, SECRET), 0);
    assert!(place.client("bcache1").read(300 << 10, 4096).unwrap() == pattern(OTHER)[..4096]);
    daemon.stop();
    run(&["check", &place.ssd, &second]).ok();
}
