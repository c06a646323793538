//! Page faults of a process that serves: a fault waits for memory, which may wait for the volume.

use crate::load::{Load, Traffic};
use crate::world::*;

const SECTORS: usize = (96 << 20) / SECTOR - 16;

/// Faults of all threads of a process that were served without reading a device.
#[track_caller]
fn minor_faults(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("it runs");
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
