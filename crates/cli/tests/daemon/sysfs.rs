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
    // The audit had no process: it is this one.
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    let who = format!("ubcache: audit: uid {uid} gid {gid} pid {} by the sysfs view: ", std::process::id());
    let said = daemon.said();
    for (action, outcome) in [("Register {", "done"), ("Register {", "refused"), ("ClearDeviceStats", "done")]
    {
        let is_it =
            |l: &str| l.starts_with(&who) && l.contains(action) && l.contains(&format!(": {outcome}"));
        assert!(said.lines().any(is_it), "{action} {outcome}: {said}");
    }
    drop(client);
    assert_eq!(put("block/bcache0/bcache/detach", "1"), Ok(()));
    wait_until("the detach", || get("block/bcache0/bcache/state") == "no cache\n");
    assert_eq!(put(&format!("fs/bcache/{set}/stop"), "1"), Ok(()));
    daemon.stop();
    assert!(!Path::new(&root).join("fs").exists(), "it is unmounted");
}

/// The view counted the volumes itself and gave the lowest free number to the next one. After volumes had come and gone its
/// `bcache0` was another disk than that of the daemon, and a write to `writeback_percent` changed, and one to `detach`
/// detached, the wrong disk. Two files of one name in two directories were one directory of the view, too.
#[test]
fn a_name_in_the_view_is_the_volume_that_the_daemon_calls_so() {
    let place = Place::new();
    let root = place.dir.path("sys");
    place.configure(&format!("sysfs_view = \"{root}\"\n[tunables]\nwriteback_running = 0\n"));
    let daemon = place.start();
    let view = |name: &str, file: &str| Path::new(&root).join(format!("block/{name}/bcache/{file}"));
    let get = |name: &str, file: &str| {
        let path = view(name, file);
        std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display())).trim().to_owned()
    };
    let same_name = |dir: &str, label: &str| {
        std::fs::create_dir(place.dir.path(dir)).unwrap();
        let disk = place.dir.sparse(&format!("{dir}/disk.img"), 4 << 20);
        run(&["make", "-B", &disk, "--label", label]).ok();
        disk
    };
    let (two, three) = (same_name("a", "two"), same_name("b", "three"));
    // They are asked for from the beginning, and come and go.
    assert!(std::fs::read_dir(Path::new(&root).join("block")).unwrap().next().is_none());
    daemon.run(&["register", &place.ssd, &place.hdd]).ok();
    daemon.run(&["register", &two]).ok();
    assert_eq!([get("bcache0", "label"), get("bcache1", "label")], ["one", "two"]);
    daemon.run(&["unregister", &place.hdd]).ok();
    assert_eq!(get("bcache1", "label"), "two");
    daemon.run(&["register", &three]).ok();
    daemon.run(&["register", &place.hdd]).ok();
    for (name, label) in [("bcache0", "one"), ("bcache1", "two"), ("bcache2", "three")] {
        assert_eq!(daemon.volume(name)["label"], label);
        assert_eq!(get(name, "label"), label, "{name} of the view");
    }
    for (n, name) in ["bcache2", "bcache0", "bcache1"].into_iter().enumerate() {
        let percent = (20 + n).to_string();
        std::fs::write(view(name, "writeback_percent"), &percent).unwrap();
        daemon.run(&["get", name, "writeback_percent"]).ok().says(&[&percent]);
    }
    std::fs::write(view("bcache2", "stop"), "1").unwrap();
    assert_eq!(daemon.state_of(&three), "stopped");
    assert_eq!([daemon.state_of(&two), daemon.state_of(&place.hdd)], ["served", "served"]);
    daemon.stop();
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
