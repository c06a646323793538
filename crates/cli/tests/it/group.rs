//! A group of two cache devices: `kill -9` under load, and one of the two is lost, again and again.
//!
//! What a flush acknowledged is there whichever cache device is lost; see `crash.rs` for the oracle.

use std::path::Path;

use ubcache_cli::nbd_client::Client;

use crate::crash::load_and_kill;
use crate::load::{Load, number, read_all};
use crate::world::*;

const SECTORS: usize = (24 << 20) / SECTOR - 16;
const CACHE_BYTES: u64 = 12 << 20;

/// Two cache devices and a backing device in files, and the socket of their server.
struct Devices {
    caches: [String; 2],
    backing: String,
    socket: String,
}

impl Devices {
    fn make(dir: &Dir, options: &[&str]) -> Devices {
        let caches = ["a", "b"].map(|name| dir.sparse(name, CACHE_BYTES));
        let backing = dir.sparse("d", 24 << 20);
        let [a, b] = &caches;
        let made =
            run(&[&["make", "-C", a, "-C", b, "-B", &backing, "--writeback", "--json"], options].concat());
        let made = made.ok().json();
        let of = |i: usize| made["devices"][i]["set_uuid"].as_str().unwrap().to_owned();
        assert_ne!(of(0), of(1));
        assert_eq!(of(0), of(2), "the backing device belongs to the first set");
        assert!(made["group_uuid"].is_string() && made["set_uuid"].is_null(), "{made}");
        Devices { caches, backing, socket: dir.path("sock") }
    }

    /// Serves with these cache devices.
    fn up(&self, dir: &Dir, caches: &[&String], more: &[&str]) -> Up {
        let export = format!("--export=nbd={}", self.socket);
        let mut args: Vec<&str> = caches.iter().flat_map(|c| ["-C", c.as_str()]).collect();
        args.extend(["-B", &self.backing, &export]);
        Up::start(dir, 1, &[&args, more].concat())
    }

    fn up_with_both(&self, dir: &Dir, more: &[&str]) -> Up {
        let up = self.up(dir, &self.caches.each_ref(), more);
        wait_until("a copy in the second set", || has_copy(&up));
        up
    }

    fn show(&self) -> Said {
        let [a, b] = &self.caches;
        run(&["group", "show", "-C", a, "-C", b, "-B", &self.backing, "--in-use", "--json"])
    }
}

/// Whether the dirty data is in both sets. A copy from an earlier start is not made again.
fn has_copy(up: &Up) -> bool {
    up.said().contains("its dirty data is in sets")
}

#[test]
fn killed_and_one_cache_device_lost_again_and_again() {
    lost_again_and_again(1, &["--bucket", "16k"]);
}

#[test]
fn killed_and_one_cache_device_lost_with_checksums() {
    lost_again_and_again(2, &["--bucket", "64k", "--block", "4k", "--checksums"]);
}

fn lost_again_and_again(seed: u64, options: &[&str]) {
    let seed = number("UBCACHE_CRASH_SEED", seed);
    let dir = Dir::new();
    let devices = Devices::make(&dir, options);
    let mut load = Load::new(seed, SECTORS);
    for round in 0..number("UBCACHE_CRASH_ROUNDS", 8) {
        let what = format!("seed {seed}, round {round}");
        let percent = format!("--set=writeback_percent={}", [0, 10, 40][load.rng.below(3) as usize]);
        let up = devices.up_with_both(&dir, &["--set=sequential_cutoff=0", &percent]);
        let magnitude = 2 + load.rng.below(2) as u32;
        let answers = 1 + load.rng.below(10u64.pow(magnitude));
        load_and_kill(&mut load, &up, &devices.socket, answers);
        up.ended();
        let lost = load.rng.below(2) as usize;
        let (lost, left) = (&devices.caches[lost], &devices.caches[1 - lost]);
        destroy(lost, 0..CACHE_BYTES as usize);
        // It is not taken for an empty one.
        let refused = run(&["up", "-C", lost, "-C", left, "-B", &devices.backing]);
        refused.refused(&["no bcache superblock", "leave it out"]);
        let up = devices.up(&dir, &[left], &[]);
        assert!(up.said().contains("is the only one here of group"), "{}", up.said());
        load.judge_served(&devices.socket, &what);
        up.stop();
        run(&["check", left, &devices.backing]).ok();
        // A new cache device takes its place.
        run(&["group", "add", "-C", left, lost]).ok();
    }
    // The first start with the new cache device copies what is dirty.
    let up = devices.up_with_both(&dir, &["--set=writeback_running=0"]);
    devices.show().ok();
    let served = read_all(&devices.socket, SECTORS);
    load.oracle.judge(&served, "the end");
    up.stop();
    devices.show().ok();
}

/// A cache device that missed writes is out of date, and no start takes it for a copy.
#[test]
fn a_cache_device_that_comes_back_is_out_of_date() {
    let dir = Dir::new();
    let devices = Devices::make(&dir, &["--bucket", "16k"]);
    let [a, b] = &devices.caches;
    let write = |byte: u8| {
        let mut client = Client::connect(Path::new(&devices.socket), "").expect("a server");
        client.write(0, &[byte; 8192]).expect("a write");
        client.flush().expect("a flush");
    };
    let stay = ["--set=writeback_running=0"];
    let up = devices.up_with_both(&dir, &stay);
    write(1);
    up.stop();
    let report = devices.show().ok().json();
    assert_eq!((&report["one_copy_bytes"], &report["devices"][0]["dirty_bytes"]), (&0.into(), &8192.into()));
    // The second one is away.
    let up = devices.up(&dir, &[a], &stay);
    write(2);
    up.stop();
    let report = devices.show();
    assert_eq!(report.code, 1);
    assert_eq!(report.json()["one_copy_bytes"], 8192);
    let export = format!("--export=nbd={}", devices.socket);
    run(&["up", "-C", b, "-B", &devices.backing, &export])
        .refused(&["is dirty and attached to another cache set"]);
    // It is back: it gets a new copy, and is one.
    devices.up_with_both(&dir, &stay).stop();
    destroy(a, 0..CACHE_BYTES as usize);
    let up = devices.up(&dir, &[b], &stay);
    assert_eq!(read_all(&devices.socket, 16), vec![2; 8192]);
    assert!(up.said().contains("has taken over"), "{}", up.said());
    up.stop();
}

/// Sets that are not of one group are not served together, and a set is not served twice.
#[test]
fn other_cache_devices_are_refused() {
    let dir = Dir::new();
    let devices = Devices::make(&dir, &["--bucket", "16k"]);
    let [a, b] = &devices.caches;
    let other = dir.sparse("other", CACHE_BYTES);
    run(&["make", "-C", &other, "--bucket", "16k"]).ok();
    let export = format!("--export=nbd={}", devices.socket);
    let up =
        |first: &str, second: &str| run(&["up", "-C", first, "-C", second, "-B", &devices.backing, &export]);
    up(a, &other).refused(&["expected the same group", "nothing was changed"]);
    up(&other, a).refused(&["expected the same group"]);
    std::fs::copy(a, dir.path("twin")).unwrap();
    up(a, &dir.path("twin")).refused(&["same set", "is one a copy of the other?"]);
    run(&["make", "-C", a, "-C", b, "--cset-uuid", "11111111-2222-3333-4444-555555555555", "--wipe"]).usage();
    run(&["make", "-C", a, "-C", b, "--set-label", "x", "--wipe"]).usage();
    run(&["group", "add", "-C", a, b]).refused(&["bcache"]);
    let dry = run(&["group", "add", "-C", a, b, "--wipe", "--dry-run"]).ok();
    assert!(dry.out.contains("nothing was written"), "{dry}");
    // Nothing of that has changed the group.
    devices.up_with_both(&dir, &[]).stop();
}
