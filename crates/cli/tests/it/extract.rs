//! `extract`: where the contents go, and what is said about them. (What they are: `fixtures`, `bad_input`.)

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use ubcache_cli::nbd_client::Client;

use crate::world::*;

#[test]
fn into_a_file_with_holes() {
    let dir = Dir::new();
    let [ssd, hdd] = dirty_files(&dir);
    let out = dir.path("out");
    let doc = run(&["extract", "-C", &ssd, "-B", &hdd, "-o", &out, "--json"]).ok().json();
    let [_, _, contents] = dirty_set();
    assert!(&read(&out) == contents);
    assert_eq!(doc["schema_version"], 1);
    assert_eq!(doc["sectors"].as_u64(), Some(SET_SECTORS));
    let parts = ["dirty_sectors", "clean_sectors", "backing_sectors", "zero_sectors"];
    let sum: u64 = parts.iter().map(|p| doc[p].as_u64().unwrap()).sum();
    assert_eq!(sum, SET_SECTORS, "{doc}");
    let meta = std::fs::metadata(&out).unwrap();
    assert!(meta.blocks() * 512 < meta.len(), "zeros take no room");
}

#[test]
fn over_a_file_that_is_there() {
    let dir = Dir::new();
    let [ssd, hdd] = dirty_files(&dir);
    let out = dir.file("out", &[9; 10 << 20]);
    run(&["extract", "-C", &ssd, "-B", &hdd, "-o", &out, "--force"]).ok();
    assert!(read(&out) == dirty_set()[2]);
}

#[test]
fn into_a_pipe_and_nowhere() {
    let dir = Dir::new();
    let [ssd, hdd] = dirty_files(&dir);
    let mut command = std::process::Command::new(program());
    command.args(["extract", "-C", &ssd, "-B", &hdd, "-o", "-"]);
    let output = output(command);
    assert!(output.stdout == dirty_set()[2] && output.status.success());
    run(&["extract", "-C", &ssd, "-B", &hdd, "-o", "/dev/null"]).ok();
    run(&["extract", "-C", &ssd, "-B", &hdd, "-o", "-", "--json"]).usage();
}

/// A reader that has enough is no error worth a message.
#[test]
fn into_a_pipe_that_closes() {
    let dir = Dir::new();
    let [ssd, hdd] = dirty_files(&dir);
    let mut child = std::process::Command::new(program())
        .args(["extract", "-C", &ssd, "-B", &hdd, "-o", "-"])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let said = Said::of(child.wait_with_output().unwrap());
    said.refused(&["Broken pipe"]);
}

#[test]
fn wrong_arguments() {
    let dir = Dir::new();
    let [ssd, hdd] = dirty_files(&dir);
    let out = dir.path("out");
    run(&["extract", "-C", &ssd, "-o", &out]).usage().says(&["--backing"]);
    run(&["extract", "-C", &ssd, "-B", &hdd, "--volume", "0", "-o", &out]).usage();
    run(&["extract", "-C", &ssd, "-B", &hdd]).usage().says(&["--output"]);
    run(&["extract", "-C", &ssd, "--volume", "x", "-o", &out]).usage();
    run(&["extract", "-C", &ssd, "--volume", "5", "-o", &out]).refused(&["slot 5", "found nothing"]);
    run(&["extract", "-C", &ssd, "--volume", "0", "-o", &out]).refused(&["slot 0", "found a cached device"]);
}

/// With the backing device's own data where the cache has the same.
#[test]
fn dirty_data_only() {
    let dir = Dir::new();
    let [ssd, hdd] = dirty_files(&dir);
    let out = dir.path("out");
    let doc = run(&["extract", "-C", &ssd, "-B", &hdd, "-o", &out, "--dirty-only", "--json"]).ok().json();
    assert_eq!(doc["clean_sectors"], 0);
    assert!(read(&out) == dirty_set()[2]);
}

fn mode(path: &str) -> u32 {
    std::fs::metadata(path).unwrap().mode() & 0o7777
}

/// A new output file is readable for its owner alone, because only root reads the disk. A replaced file keeps its mode and owner.
#[test]
fn a_new_file_is_its_owners_alone_and_a_replaced_one_keeps_its_mode() {
    let dir = Dir::new();
    let [ssd, hdd] = dirty_files(&dir);
    let out = dir.path("out");
    run(&["extract", "-C", &ssd, "-B", &hdd, "-o", &out]).ok();
    assert_eq!(mode(&out), 0o600);
    for wanted in [0o640, 0o644, 0o400] {
        std::fs::set_permissions(&out, PermissionsExt::from_mode(wanted)).unwrap();
        let writable = wanted & 0o200 != 0 || rustix::process::geteuid().is_root();
        let said = run(&["extract", "-C", &ssd, "-B", &hdd, "-o", &out, "--force"]);
        if writable {
            said.ok();
        }
        assert_eq!(mode(&out), wanted);
    }
    if rustix::process::geteuid().is_root() {
        std::os::unix::fs::chown(&out, Some(1234), Some(5678)).unwrap();
        run(&["extract", "-C", &ssd, "-B", &hdd, "-o", &out, "--force"]).ok();
        let meta = std::fs::metadata(&out).unwrap();
        assert_eq!((meta.uid(), meta.gid()), (1234, 5678));
    } else {
        rig::skipped_in_part("only root can give a file to another user");
    }
}

/// The output is a device of a set, or in use: nothing is written, also with `--force`.
#[test]
fn an_output_in_use_is_not_overwritten() {
    let dir = Dir::new();
    let [ssd, hdd] = dirty_files(&dir);
    let extract = |to: &str| run(&["extract", "-C", &ssd, "-B", &hdd, "-o", to, "--force"]);
    let member = dir.sparse("member", 8 << 20);
    run(&["make", "-B", &member]).ok();
    let before = read(&member);
    extract(&member).refused(&["member", "is a device of a cache set"]);
    assert!(read(&member) == before);

    let out = dir.file("out", b"precious");
    let file = std::fs::File::options().read(true).write(true).open(&out).unwrap();
    rustix::fs::flock(&file, rustix::fs::FlockOperation::LockShared).unwrap();
    extract(&out).refused(&["out", "in use by"]);
    rustix::fs::flock(&file, rustix::fs::FlockOperation::Unlock).unwrap();
    rustix::fs::fcntl_lock(&file, rustix::fs::FlockOperation::LockExclusive).unwrap();
    extract(&out).refused(&["out", "another process has locked it"]);
    rustix::fs::fcntl_lock(&file, rustix::fs::FlockOperation::Unlock).unwrap();
    assert_eq!(read(&out), b"precious");

    // A file system that is mounted from a file stands on a loop device.
    let image = dir.sparse("image", 1 << 20);
    let attached = std::process::Command::new("losetup").args(["-f", "--show", &image]).output();
    match attached {
        Ok(o) if o.status.success() => {
            let device = String::from_utf8(o.stdout).unwrap();
            let said = extract(&image);
            let _ = std::process::Command::new("losetup").args(["-d", device.trim()]).status();
            said.refused(&["image", "in use by", "/dev/loop"]);
        }
        _ => rig::skipped_in_part("no loop device can be made"),
    }
    extract(&out).ok();
}

/// A cache device is put back to what it was before the backing device was registered the last time. A set refuses it for a
/// device with dirty data; `check` and `extract` said nothing.
#[test]
fn an_older_copy_of_a_cache_is_told() {
    let dir = Dir::new();
    let (ssd, hdd) = (dir.sparse("ssd", 8 << 20), dir.sparse("hdd", 8 << 20));
    run(&["make", "-C", &ssd, "-B", &hdd, "--bucket", "8k", "--writeback"]).ok();
    let (older, out, export) =
        (dir.path("older"), dir.path("out"), format!("--export=nbd={}", dir.path("s")));
    let serve = |byte: u8| {
        let args =
            ["-C", &ssd, "-B", &hdd, &export, "--set=sequential_cutoff=0", "--set=writeback_running=0"];
        let up = Up::start(&dir, 1, &args);
        let mut client = Client::connect(Path::new(&dir.path("s")), "bcache0").unwrap();
        client.write(0, &[byte; 4096]).unwrap();
        client.flush().unwrap();
        drop(client);
        up.stop();
    };
    let first = || {
        let bytes = read(&out);
        std::fs::remove_file(&out).unwrap();
        bytes[0]
    };
    serve(1);
    std::fs::copy(&ssd, &older).unwrap();
    run(&["check", &older, &hdd]).ok();
    serve(2);
    run(&["check", &ssd, &hdd]).ok();
    let said = run(&["extract", "-C", &ssd, "-B", &hdd, "-o", &out]).ok();
    assert!(first() == 2 && !said.err.contains("older copy"), "{said}");

    let words = ["restored from an older copy"];
    run(&["up", "-C", &older, "-B", &hdd, &export]).refused(&words);
    run(&["flush", "-C", &older, "-B", &hdd]).refused(&words);
    run(&["check", &older, &hdd]).refused(&["registration", words[0]]);
    let said = run(&["extract", "-C", &older, "-B", &hdd, "-o", &out]).ok().says(&words);
    assert!(said.err.contains("warning: "), "{said}");
    assert_eq!(first(), 1, "what the older copy has");

    // Everything is on the disk: what the older copy has is out of date, and a set starts without it.
    run(&["flush", "-C", &ssd, "-B", &hdd]).ok();
    run(&["check", &older, &hdd]).ok().says(&words);
    run(&["flush", "-C", &older, "-B", &hdd]).refused(&words);
    let doc = run(&["extract", "-C", &older, "-B", &hdd, "-o", &out, "--json"]).ok().json();
    assert_eq!(first(), 2, "what the disk has");
    assert!(doc["warnings"][0].as_str().unwrap().contains(words[0]), "{doc}");
}
