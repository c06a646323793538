//! Files like the kernel's, of a running daemon.

use std::io::Write;
use std::path::Path;

use crate::place::*;
use crate::world::*;

#[test]
fn files_like_the_kernels() {
    let place = Place::new();
    let root = place.dir.path("sys");
    place.configure(&format!(
        "sysfs_view = \"{root}\"\n[tunables]\nwriteback_running = 0\nsequential_cutoff = 0\n"
    ));
    let daemon = place.start();
    let put = |path: &str, value: &str| {
        let mut file = std::fs::File::options().write(true).open(Path::new(&root).join(path)).unwrap();
        file.write_all(format!("{value}\n").as_bytes()).map_err(|e| e.raw_os_error().unwrap_or(-1))
    };
    let get = |path: &str| {
        std::fs::read_to_string(Path::new(&root).join(path)).unwrap_or_else(|e| format!("{path}: {e}"))
    };
    assert_eq!(put("fs/bcache/register", &place.ssd), Ok(()));
    assert_eq!(put("fs/bcache/register_quiet", &place.ssd), Ok(()));
    assert_eq!(put("fs/bcache/register", &place.ssd), Err(16), "EBUSY");
    assert_eq!(put("fs/bcache/register", "/nowhere/at/all"), Err(22));
    assert_eq!(put("fs/bcache/register", &place.hdd), Ok(()));
    let mut client = place.client("bcache0");
    client.write(0, &[1; 4096]).unwrap();
    assert_eq!(get("block/bcache0/bcache/state"), "dirty\n");
    assert_eq!(get("block/bcache0/bcache/dirty_data"), "4.0k\n");
    assert_eq!(put("block/bcache0/bcache/writeback_percent", "40"), Ok(()));
    daemon.run(&["get", "one", "writeback_percent"]).ok().says(&["40"]);
    // The kernel clamps, and so does the view; `ubcache set` refuses.
    assert_eq!(put("block/bcache0/bcache/writeback_percent", "30"), Ok(()));
    assert_eq!(put("block/bcache0/bcache/writeback_percent", "99"), Ok(()));
    daemon.run(&["get", "one", "writeback_percent"]).ok().says(&["40"]);
    assert_eq!(put("block/bcache0/bcache/writeback_percent", "many"), Err(22));
    let set = daemon.json(&["status"])["sets"][0]["id"].as_str().unwrap().to_owned();
    assert_eq!(put(&format!("fs/bcache/{set}/cache0/clear_stats"), "1"), Ok(()));
    assert!(get(&format!("fs/bcache/{set}/cache0/priority_stats")).starts_with("Unused:\t\t"));
    // The audit had the number of the error without words.
    assert_eq!(put(&format!("fs/bcache/{set}/unregister"), "1"), Err(95), "EOPNOTSUPP");
    assert!(daemon.said().contains("refused: Operation not supported (os error 95)"), "{}", daemon.said());
    drop(client);
    assert_eq!(put("block/bcache0/bcache/detach", "1"), Ok(()));
    wait_until("the detach", || get("block/bcache0/bcache/state") == "no cache\n");
    assert_eq!(put(&format!("fs/bcache/{set}/stop"), "1"), Ok(()));
    daemon.stop();
    assert!(!Path::new(&root).join("fs").exists(), "it is unmounted");
}

#[test]
fn without_fuse_it_is_said_and_everything_else_is_there() {
    if !rustix::process::geteuid().is_root() {
        rig::skipped("only root can hide /dev/fuse");
        return;
    }
    let place = Place::new();
    place.configure(&format!("sysfs_view = \"{}\"\n", place.dir.path("sys")));
    // A host on which /dev has nothing.
    let hides = ["unshare", "--mount", "sh", "-c", "mount -t tmpfs none /dev && exec \"$@\"", "sh"];
    let daemon = place.start_by(&hides, |_| ());
    let said = daemon.said();
    assert!(said.contains("warning: ") && said.contains("the sysfs view is not available: "), "{said}");
    assert!(said.contains("/dev/fuse"), "{said}");
    daemon.run(&["register", &place.ssd, &place.hdd]).ok().says(&["served"]);
    place.client("bcache0").write(0, &[1; 4096]).unwrap();
    daemon.stop();
}
