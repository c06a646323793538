//! Input that is wrong in ways the common checks do not know: damage inside a set, devices that do not belong together,
//! outputs that cannot be written. Clear message, exit code 1, nothing modified.

use std::path::Path;

use ubcache_cli::nbd_client::Client;

use crate::common_checks::resealed;
use crate::world::*;

/// Byte offsets of structures in the cache device of the dirty set.
fn places(dir: &Dir) -> Vec<(&'static str, usize)> {
    let [ssd, _] = dirty_files(dir);
    let journal = run(&["dump", &ssd, "journal", "--json"]).ok().json();
    let root = journal["btree_root"]["pointer"]["sector"].as_u64().unwrap();
    let prio_bucket = journal["prio_bucket"].as_u64().unwrap();
    // The test leaves the journal alone: a damaged entry looks like the end of the journal.
    let bucket_sectors = run(&["super", &ssd, "--json"]).ok().json()["bucket_sectors"].as_u64().unwrap();
    vec![
        ("the root of the index", root as usize * 512 + 20),
        ("a prio set", (prio_bucket * bucket_sectors) as usize * 512 + 40),
    ]
}

#[test]
fn a_bit_flipped_in_the_metadata() {
    let dir = Dir::new();
    for (what, at) in places(&dir) {
        let [ssd, hdd, _] = dirty_set();
        let mut bytes = ssd.clone();
        bytes[at] ^= 4;
        let (ssd, hdd_path) = (dir.file("ssd", &bytes), dir.file("hdd", hdd));
        let (out, socket) = (dir.path("out"), format!("nbd={}", dir.path("sock")));
        let commands: [&[&str]; 4] = [
            &["check", &ssd, &hdd_path],
            &["extract", "-C", &ssd, "-B", &hdd_path, "-o", &out],
            &["flush", "-C", &ssd, "-B", &hdd_path],
            &["up", "-C", &ssd, "-B", &hdd_path, "--export", &socket],
        ];
        for args in commands {
            let said = run(args).refused(&[&ssd, "sector", "expected", "found"]);
            assert!(read(&ssd) == bytes && &read(&hdd_path) == hdd, "{what}: {said}");
            assert!(!Path::new(&out).exists(), "{what}: {said}");
        }
        // An operator who needs the data gets what is left, and a warning.
        let said = run(&["extract", "-C", &ssd, "-B", &hdd_path, "-o", &out, "--best-effort"]).refused(&[]);
        assert_eq!(read(&out).len() as u64, SET_SECTORS * 512, "{what}: {said}");
        std::fs::remove_file(&out).unwrap();
    }
}

#[test]
fn a_backing_device_of_another_set() {
    let dir = Dir::new();
    let [ssd, hdd] = dirty_files(&dir);
    let other = dir.sparse("other", 8 << 20);
    run(&["make", "-C", &other, "--bucket", "8k"]).ok();
    let [_, hdd_bytes, _] = dirty_set();
    let other_bytes = read(&other);
    let (out, socket) = (dir.path("out"), format!("nbd={}", dir.path("sock")));
    let words = [hdd.as_str(), "expected", "set"];
    for args in [
        &["extract", "-C", &other, "-B", &hdd, "-o", &out][..],
        &["flush", "-C", &other, "-B", &hdd],
        &["up", "-C", &other, "-B", &hdd, "--export", &socket],
    ] {
        run(args).refused(&words);
        assert!(read(&other) == other_bytes && &read(&hdd) == hdd_bytes, "{args:?}");
    }
    assert!(!Path::new(&out).exists());

    // A device that names the set but is not in its table of devices.
    let [ssd_bytes, _, _] = dirty_set();
    let stranger = dir.file("stranger", &resealed(hdd_bytes, 40, &[7; 16]));
    let before = read(&stranger);
    for args in [
        &["extract", "-C", &ssd, "-B", &stranger, "-o", &out][..],
        &["flush", "-C", &ssd, "-B", &stranger],
        &["up", "-C", &ssd, "-B", &stranger, "--export", &socket],
    ] {
        run(args).refused(&[&stranger, "07070707-0707"]);
        assert!(read(&stranger) == before, "{args:?}");
    }
    run(&["check", &ssd, &hdd]).ok();
    assert_eq!(ssd_bytes.len(), read(&ssd).len());
}

#[test]
fn the_same_device_twice() {
    let dir = Dir::new();
    let [ssd, hdd] = dirty_files(&dir);
    let copy = dir.path("copy");
    std::fs::copy(&hdd, &copy).unwrap();
    let socket = format!("nbd={}", dir.path("sock"));
    run(&["up", "-C", &ssd, "-B", &hdd, "-B", &copy, "--export", &socket]).refused(&["same UUID", "copy"]);
    run(&["up", "-C", &ssd, "-B", &hdd, "-B", &hdd, "--export", &socket]).refused(&[&hdd, "in use"]);
    // Which of the two is the right one only the operator knows.
    run(&["flush", "-C", &ssd]).refused(&["same UUID", "-B"]);
    let [ssd_bytes, hdd_bytes, _] = dirty_set();
    assert!(&read(&ssd) == ssd_bytes && &read(&hdd) == hdd_bytes);
}

#[test]
fn a_dirty_device_is_not_served_alone() {
    let dir = Dir::new();
    let [_, hdd] = dirty_files(&dir);
    let socket = format!("nbd={}", dir.path("sock"));
    let args = ["up", "-B", &hdd, "--export", &socket];
    run(&args).usage().says(&["--without-cache"]);
    // The message ended with what would be lost.
    let set = run(&["super", &hdd, "--json"]).ok().json()["set_uuid"].as_str().unwrap().to_owned();
    run(&[&args[..], &["--without-cache"]].concat()).refused(&[
        &format!("{hdd}: has dirty data in cache set {set}, which only the cache device has"),
        "serving this device alone would lose it",
        &format!("`ubcache up -C CACHE-DEVICE -B {hdd}` serves both"),
        "see the page dead-ssd-dirty of the guide",
    ]);
    assert!(read(&hdd) == dirty_set()[1]);
}

#[test]
fn outputs_that_cannot_be_written() {
    let dir = Dir::new();
    let [ssd, hdd] = dirty_files(&dir);
    let extract = |out: &str| run(&["extract", "-C", &ssd, "-B", &hdd, "-o", out]);
    extract(&dir.path("no/such/dir/out")).refused(&["no/such/dir/out", "No such file"]);
    extract(dir.root().to_str().unwrap()).refused(&["directory"]);
    extract("/proc/none").refused(&["/proc/none"]);
    let there = dir.file("there", b"precious");
    extract(&there).refused(&[&there, "--force"]);
    assert_eq!(read(&there), b"precious");
    extract(&hdd).usage().says(&["input and output"]);
    // A device that is always full: as a file would be on a full file system.
    run(&["extract", "-C", &ssd, "-B", &hdd, "-o", "/dev/full"]).refused(&["No space left"]);
    let [ssd_bytes, hdd_bytes, _] = dirty_set();
    assert!(&read(&ssd) == ssd_bytes && &read(&hdd) == hdd_bytes);
    let left: Vec<_> = std::fs::read_dir(dir.root()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(left.len(), 3, "{left:?}");
}

#[test]
fn sockets_that_cannot_be_had() {
    let dir = Dir::new();
    let [ssd, hdd] = dirty_files(&dir);
    let up = |export: &str| run(&["up", "-C", &ssd, "-B", &hdd, "--export", export]);
    up(&format!("nbd={}", dir.path("no/dir/sock"))).refused(&["no/dir/sock", "cannot listen"]);
    let file = dir.file("file", b"precious");
    up(&format!("nbd={file}")).refused(&[&file]);
    assert_eq!(read(&file), b"precious");
    for bad in ["ublk=", "ublk=x", "ublk=99999999"] {
        up(bad).usage();
    }
    up("nbd=").usage();
    up("nbd=host:port").usage();
    up("sideways").usage().says(&["auto", "fuse=DIR"]);
    // What was opened for that was closed in good order.
    run(&["check", &ssd, &hdd]).ok();
}

/// A process that serves a set keeps all others off it.
#[test]
fn devices_in_use_by_up() {
    let dir = Dir::new();
    let [ssd, hdd] = dirty_files(&dir);
    let socket = dir.path("sock");
    let export = format!("--export=nbd={socket}");
    let up = Up::start(&dir, 1, &["-C", &ssd, "-B", &hdd, &export]);
    let (out, other) = (dir.path("out"), format!("--export=nbd={}", dir.path("other")));
    for args in [
        &["make", "-C", &ssd, "--bucket", "8k", "--wipe"][..],
        &["make", "-B", &hdd, "--force"],
        &["check", &ssd, &hdd],
        &["check", &hdd],
        &["dump", &ssd, "journal"],
        &["extract", "-C", &ssd, "-B", &hdd, "-o", &out],
        &["flush", "-C", &ssd, "-B", &hdd],
        &["up", "-C", &ssd, "-B", &hdd, &other],
    ] {
        run(args).refused(&["in use", "ubcache"]);
    }
    // The second one on a socket that is taken.
    let dir2 = Dir::new();
    let [ssd2, hdd2] = dirty_files(&dir2);
    run(&["up", "-C", &ssd2, "-B", &hdd2, &export]).refused(&[&socket, "in use"]);
    // Commands that only read a block, or have an option to ignore the checksum.
    run(&["super", &ssd]).ok();
    run(&["dump", &ssd, "uuids", "--in-use"]).ok();
    Client::connect(Path::new(&socket), "").unwrap().read(0, 4096).unwrap();
    up.stop();
    run(&["check", &ssd, &hdd]).ok();
}

#[test]
fn nothing_to_serve() {
    let dir = Dir::new();
    let ssd = dir.sparse("ssd", 8 << 20);
    run(&["make", "-C", &ssd, "--bucket", "8k"]).ok();
    run(&["up", "-C", &ssd]).refused(&["nothing to serve"]);
    run(&["up"]).usage();
}
