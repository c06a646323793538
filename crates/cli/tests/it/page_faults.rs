//! Page faults of a process that serves: a fault waits for memory, which may wait for the volume.

use std::path::Path;

use ubcache_cli::nbd_client::Client;

use crate::load::{Load, Traffic};
use crate::world::*;

const SECTORS: usize = (96 << 20) / SECTOR - 16;

/// Faults of the thread that serves which were served without reading a device. Another one fills the heap up.
#[track_caller]
fn minor_faults(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/stat")).expect("it runs");
    let (_, behind_name) = stat.rsplit_once(") ").expect("the name in parentheses");
    let faults = behind_name.split(' ').nth(7).and_then(|word| word.parse().ok());
    faults.unwrap_or_else(|| panic!("{stat}"))
}

/// The memory that requests need is there when the first of them comes, and is not given back in between.
#[test]
fn requests_are_served_without_page_faults() {
    let dir = Dir::new();
    let (ssd, hdd) = (dir.sparse("ssd", 64 << 20), dir.sparse("hdd", 96 << 20));
    run(&["make", "-C", &ssd, "-B", &hdd, "--bucket", "64k", "--writeback"]).ok();
    let socket = dir.path("s");
    let export = format!("--export=nbd={socket}");
    let up = Up::start(&dir, 1, &["-C", &ssd, "-B", &hdd, &export, "--set=sequential_cutoff=0"]);
    let mut load = Load::new(1, SECTORS);
    let mut traffic = Traffic::connect(&socket);
    traffic.run(&mut load, 10);
    let before = minor_faults(up.pid());
    traffic.run(&mut load, 8000);
    let faults = minor_faults(up.pid()) - before;
    // Seen: none; 1137 when memory came from the system as it was needed.
    assert!(faults < 100, "{faults} page faults during 8000 requests");
    traffic.settle(&mut load);
    drop(traffic);
    up.stop();
}

/// Writeback of many runs at a time stays within the memory that is resident, and what it used is filled up behind it.
#[test]
fn bursts_of_writeback_are_served_without_page_faults() {
    const MIB: usize = 1 << 20;
    const PIECE: usize = 64 << 10;
    const PIECES: usize = 192 * MIB / PIECE;
    let dir = Dir::new();
    let (ssd, hdd) = (dir.sparse("ssd", 768 << 20), dir.sparse("hdd", 256 << 20));
    run(&["make", "-C", &ssd, "-B", &hdd, "--bucket", "256k", "--writeback"]).ok();
    let socket = dir.path("s");
    let export = format!("--export=nbd={socket}");
    let stopped = ["--set=sequential_cutoff=0", "--set=writeback_running=0", "--set=writeback_percent=0"];
    // The smallest host that has the whole reserve. As many runs at once as there may be.
    let by = ["prlimit", "--data=536870912"];
    let args = ["-C", &ssd, "-B", &hdd, &export, "--set=writeback_latency_ms=10000"];
    let mut up = Up::try_start_by(&by, &dir, 1, &[&args[..], &stopped].concat()).expect("it starts");
    let mut client = Client::connect(Path::new(&socket), "").expect("a server");
    client.set_timeout(Some(DEADLINE)).expect("a socket");
    // Neighbours come at different times, so that each is an extent of its own.
    for n in 0..PIECES {
        let at = n * 1021 % PIECES;
        client.write((at * PIECE) as u64, &vec![n as u8; PIECE]).expect("a write");
    }
    let before = minor_faults(up.pid());
    up.ask("set writeback_running=1");
    wait_until("the end of writeback", || up.stats()["volumes"][0]["dirty_bytes"] == 0);
    let faults = minor_faults(up.pid()) - before;
    assert!(faults < 200, "{faults} page faults during writeback of {} MiB", PIECES * PIECE / MIB);
    drop(client);
    up.stop();
}

/// The resident memory of a process, in KiB.
#[track_caller]
fn resident_kib(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a figure");
    line.split_whitespace().next().and_then(|word| word.parse().ok()).expect("a number")
}

/// A host with other tenants could not tell a process to take less than the reserve of the whole host.
#[test]
fn a_memory_limit_makes_the_reserve_smaller() {
    let serve = |limit: &[&str]| {
        let dir = Dir::new();
        let (ssd, hdd) = (dir.sparse("ssd", 64 << 20), dir.sparse("hdd", 96 << 20));
        run(&["make", "-C", &ssd, "-B", &hdd, "--bucket", "64k"]).ok();
        let export = format!("--export=nbd={}", dir.path("s"));
        let up = Up::start(&dir, 1, &[&["-C", &ssd, "-B", &hdd, &export], limit].concat());
        (dir, up)
    };
    let ((_dir, limited), (_other, free)) = (serve(&["--memory-limit=64MiB"]), serve(&[]));
    // The reserves are 8 and 64 MiB.
    let differ = || resident_kib(free.pid()) > resident_kib(limited.pid()) + (48 << 10);
    wait_until("the difference of the reserves", differ);
    limited.stop();
    free.stop();
}
