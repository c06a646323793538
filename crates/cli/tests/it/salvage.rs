//! `salvage`: the image, the map, the summary, and what is refused.

use std::path::Path;

use inspect::{FileSource, Mode, SetView};
use serde_json::Value;

use crate::world::*;

/// The lines of a map, which covers the volume without gaps.
fn map(path: &str) -> Vec<Value> {
    let text = String::from_utf8(read(path)).unwrap();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let mut at = 0;
    for line in &lines {
        assert_eq!(line["start_sector"].as_u64(), Some(at), "{line}");
        at += line["sectors"].as_u64().unwrap();
        let state = line["state"].as_str().unwrap();
        assert!(["certain", "uncertain", "lost"].contains(&state), "{line}");
        assert!(
            ["cache dirty", "cache clean", "backing"].contains(&line["from"].as_str().unwrap()),
            "{line}"
        );
        assert_eq!(line["why"].is_string(), state != "certain", "{line}");
    }
    assert_eq!(at, SET_SECTORS);
    lines
}

/// Asserts that no sector that a map calls certain has other bytes than it should.
fn nothing_certain_is_wrong(map: &[Value], image: &[u8], good: &[u8]) {
    for line in map.iter().filter(|line| line["state"] == "certain") {
        let start = line["start_sector"].as_u64().unwrap() as usize * SECTOR;
        let range = start..start + line["sectors"].as_u64().unwrap() as usize * SECTOR;
        assert!(image[range.clone()] == good[range], "{line}");
    }
}

#[test]
fn without_the_superblock_of_the_cache_device() {
    let dir = Dir::new();
    let [ssd, hdd] = dirty_files(&dir);
    let (out, lines) = (dir.path("out"), dir.path("map"));
    destroy(&ssd, 4096..8192);
    let before = [read(&ssd), read(&hdd)];
    run(&["extract", "-C", &ssd, "-B", &hdd, "-o", &out]).refused(&[]);

    // The journal ends in a part of the ring that was never written, so nothing proves that it ends there.
    let salvage = ["salvage", "-C", &ssd, "-B", &hdd, "-o", &out, "--map", &lines];
    let said =
        run(&salvage).refused(&["rebuilt for set", "(in memory)", "nothing proves that journal entry"]);
    let said = said.says(&["repeat with --trust-journal-end", &format!("{lines} has the ranges")]);
    assert!(said.out.contains("certain    0 bytes in 0 ranges"), "{said}");
    assert!(read(&out) == dirty_set()[2], "the contents are right all the same");
    assert!(map(&lines).iter().all(|line| line["state"] == "uncertain"));

    run(&salvage).refused(&["exists", "--force"]);
    let trust = [&salvage[..], &["--trust-journal-end", "--force", "--json"]].concat();
    let doc = run(&trust).ok().json();
    assert_eq!(doc["schema_version"], 1);
    assert_eq!(doc["sectors"].as_u64(), Some(SET_SECTORS));
    assert_eq!(doc["certain"]["bytes"].as_u64(), Some(SET_SECTORS * 512));
    assert_eq!((&doc["uncertain"]["bytes"], &doc["lost"]["ranges"]), (&0.into(), &0.into()));
    assert_eq!(doc["steps"][0]["structure"], "cache superblock");
    assert!(read(&out) == dirty_set()[2]);
    let lines = map(&lines);
    assert!(lines.iter().any(|line| line["from"] == "cache dirty"));
    assert!(lines.iter().any(|line| line["from"] == "backing"));
    assert_eq!(doc["certain"]["ranges"].as_u64(), Some(lines.len() as u64));
    assert!([read(&ssd), read(&hdd)] == before, "a salvage changes nothing");
    let meta = std::fs::metadata(&out).unwrap();
    assert!(std::os::unix::fs::MetadataExt::blocks(&meta) * 512 < meta.len(), "zeros take no room");
}

#[test]
fn without_a_leaf() {
    let dir = Dir::new();
    let [ssd, hdd] = dirty_files(&dir);
    let view = SetView::open(&FileSource::open(&ssd).unwrap(), Mode::Strict).unwrap();
    let leaf = view.nodes.iter().find(|n| n.level == 0 && n.live > 0).unwrap();
    let start = leaf.key.pointer().unwrap().offset().bytes() as usize;
    destroy(&ssd, start..start + 4096);
    let (out, lines) = (dir.path("out"), dir.path("map"));
    let salvage = ["salvage", "-C", &ssd, "-B", &hdd, "-o", &out, "--map", &lines, "--trust-journal-end"];
    run(&salvage).refused(&["not rebuilt", "is destroyed", "a node of the btree", "uncertain"]);
    let lines = map(&lines);
    assert!(lines.iter().any(|line| line["state"] == "uncertain"));
    nothing_certain_is_wrong(&lines, &read(&out), &dirty_set()[2]);

    // To a pipe, with the summary on the other channel.
    let mut command = std::process::Command::new(program());
    command.args(["salvage", "-C", &ssd, "-B", &hdd, "-o", "-"]);
    let output = output(command);
    assert!(output.stdout == read(&out) && output.status.code() == Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("repeat with --map FILE"));
}

#[test]
fn wrong_arguments_and_wrong_devices() {
    let dir = Dir::new();
    let [ssd, hdd] = dirty_files(&dir);
    let (out, lines) = (dir.path("out"), dir.path("map"));
    let set = ["salvage", "-C", &ssd, "-B", &hdd];
    let with = |more: &[&str]| run(&[&set[..], more].concat());
    run(&["salvage", "-B", &hdd, "-o", &out]).usage().says(&["--cache"]);
    run(&["salvage", "-C", &ssd, "-o", &out]).usage().says(&["--backing"]);
    with(&[]).usage().says(&["--output"]);
    with(&["-o", "-", "--json"]).usage();
    with(&["-o", &ssd, "--force"]).usage().says(&["both input and output"]);
    with(&["-o", &out, "--map", &hdd, "--force"]).usage();
    with(&["-o", &out, "--map", &out]).usage();
    with(&["-o", &out, "--damaged", "refuse"]).usage();
    with(&["-o", &out, "--volume", "0"]).refused(&["slot 0", "found a cached device"]);
    let other = dir.sparse("other", 8 << 20);
    run(&["make", "-B", &other]).ok();
    with(&["-o", &other, "--force"]).refused(&["is a device of a cache set"]);
    with(&["-o", &out, "--map", &other, "--force"]).refused(&["is a device of a cache set"]);
    let (ssd2, hdd2) = (dir.sparse("ssd2", 8 << 20), dir.sparse("hdd2", 8 << 20));
    run(&["make", "-C", &ssd2, "-B", &hdd2, "--bucket", "8k"]).ok();
    // A start attaches it.
    Up::start(&dir, 1, &["-C", &ssd2, "-B", &hdd2, &format!("--export=nbd={}", dir.path("s"))]).stop();
    run(&["salvage", "-C", &ssd, "-B", &hdd2, "-o", &out]).refused(&["this cache has none of its data"]);
    run(&["salvage", "-C", &ssd, "-B", &ssd2, "-o", &out]).refused(&["found a cache device"]);
    assert!(!Path::new(&out).exists() && !Path::new(&lines).exists());
    assert_eq!(partial(&out), [""; 0]);
    run(&["salvage", "--help"]).ok().says(&["ubcache salvage -C /dev/nvme0n1p4 -B /dev/sdb", "--map"]);
}

/// The names in the directory of a file that is not complete yet.
fn partial(out: &str) -> Vec<String> {
    let all = std::fs::read_dir(Path::new(out).parent().unwrap()).unwrap().flatten();
    let names = all.map(|e| e.file_name().to_string_lossy().into_owned());
    names.filter(|name| name.contains("partial")).collect()
}

/// Without its map an image does not get its name, and the message names what could not be written.
#[test]
fn an_output_or_a_map_that_cannot_be_written() {
    let dir = Dir::new();
    let [ssd, hdd] = dirty_files(&dir);
    let (out, map) = (dir.path("out"), dir.path("map"));
    let with = |more: &[&str]| run(&[&["salvage", "-C", &ssd, "-B", &hdd], more].concat());
    with(&["-o", &out, "--map", "/dev/full"]).refused(&["/dev/full: cannot be written: No space left"]);
    with(&["-o", "/dev/full", "--map", &map]).refused(&["/dev/full: cannot be written: No space left"]);
    let dir_missing = dir.path("none/map");
    with(&["-o", &out, "--map", &dir_missing]).refused(&["none/map: cannot be created"]);
    with(&["-o", &out, "--map", "-"]).usage().says(&["expected a file for the map, found -"]);
    with(&["-o", &out, "--map", &dir.path("./out")]).usage().says(&["cannot be the map, too"]);
    assert!(!Path::new(&out).exists() && !Path::new(&map).exists());
    assert_eq!(partial(&out), [""; 0]);

    // What a process that was killed has left, under the number of this one.
    let script = format!(
        ": > {out}.partial-$$; exec {} salvage -C {ssd} -B {hdd} -o {out}",
        program().to_str().unwrap()
    );
    let mut command = std::process::Command::new("sh");
    command.args(["-c", &script]);
    Said::of(output(command)).refused(&["out.partial-", "remove it"]);
    assert_eq!(partial(&out).len(), 1);

    // Standard output can be a device of the set.
    let mut command = std::process::Command::new(program());
    command.args(["salvage", "-C", &ssd, "-B", &hdd, "-o", "-"]);
    let file = std::fs::File::options().write(true).open(&hdd).unwrap();
    let ended = command.stdout(file).output().unwrap();
    assert_eq!(ended.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&ended.stderr).contains("both input and output"));
    assert!([&read(&ssd), &read(&hdd)] == [&dirty_set()[0], &dirty_set()[1]], "a salvage changes nothing");
}

/// A link such as /dev/stdout stays a link.
#[test]
fn a_symbolic_link_as_output_is_followed() {
    let dir = Dir::new();
    let [ssd, hdd] = dirty_files(&dir);
    let (link, target, map) = (dir.path("link"), dir.path("target"), dir.path("map"));
    std::os::unix::fs::symlink(&target, &link).unwrap();
    std::os::unix::fs::symlink(dir.path("lines"), &map).unwrap();
    for command in ["salvage", "extract"] {
        let with = |more: &[&str]| run(&[&[command, "-C", &ssd, "-B", &hdd, "-o", &link], more].concat());
        let _ = std::fs::remove_file(&target);
        with(&[]).refused(&["link: a symbolic link to a file that does not exist"]);
        std::fs::write(&target, b"old").unwrap();
        with(&[]).refused(&["link: exists"]);
        with(&["--force"]);
        assert!(read(&target) == dirty_set()[2] && Path::new(&link).is_symlink());
    }
    let both = ["salvage", "-C", &ssd, "-B", &hdd, "-o", &link, "--map", &map, "--force"];
    run(&both).refused(&["map: a symbolic link to a file that does not exist"]);
    std::fs::write(dir.path("lines"), b"old").unwrap();
    run(&both).refused(&["nothing proves"]);
    assert_eq!(self::map(&dir.path("lines")).len(), self::map(&map).len());
    assert!(Path::new(&map).is_symlink());
    let through = ["salvage", "-C", &ssd, "-B", &hdd, "-o", &link, "--map", &target, "--force"];
    run(&through).usage().says(&["cannot be the map, too"]);
    std::os::unix::fs::symlink(&hdd, dir.path("device")).unwrap();
    run(&["salvage", "-C", &ssd, "-B", &hdd, "-o", &dir.path("device"), "--force"]).usage();
}

#[test]
fn a_set_that_is_served_is_not_read() {
    let dir = Dir::new();
    let [ssd, hdd] = dirty_files(&dir);
    let export = format!("--export=nbd={}", dir.path("s"));
    let up = Up::start(&dir, 1, &["-C", &ssd, "-B", &hdd, &export]);
    let out = dir.path("out");
    let salvage = ["salvage", "-C", &ssd, "-B", &hdd, "-o", &out];
    run(&salvage).refused(&["in use", "--in-use"]);
    assert!(!Path::new(&out).exists());

    // The devices can change while they are read.
    let in_use = [&salvage[..], &["--in-use", "--trust-journal-end", "--json"]].concat();
    let said = run(&in_use).refused(&["can change while they are read"]);
    assert_eq!(said.json()["certain"]["sectors"], 0);
    assert_eq!(said.json()["backing_is_clean"], false);
    up.stop();
}

/// With `--json` standard output has one document or nothing, whatever the exit code is.
#[test]
fn json_of_each_exit_code() {
    let dir = Dir::new();
    let [ssd, hdd] = dirty_files(&dir);
    let out = dir.path("out");
    let with = |output: &str, more: &[&str]| {
        run(&[&["salvage", "-C", &ssd, "-B", &hdd, "--json", "-o", output], more].concat())
    };
    let uncertain = with(&out, &[]).refused(&["nothing proves"]);
    assert_ne!(uncertain.json()["uncertain"]["sectors"], 0);
    let certain = with(&out, &["--force", "--trust-journal-end"]).ok();
    assert_eq!(certain.json()["certain"]["sectors"].as_u64(), Some(SET_SECTORS));
    let exists = with(&out, &[]).refused(&["out: exists"]);
    assert_eq!(exists.out, "");
    with(&hdd, &["--force"]).usage();
}

/// A process that is killed leaves a file as large as the disk, which the next run names.
#[test]
fn an_incomplete_output_of_a_killed_process_is_named() {
    let dir = Dir::new();
    let [ssd, hdd] = dirty_files(&dir);
    let out = dir.path("out");
    let left = dir.file("out.partial-4194305", b"left");
    let other = dir.file("out.partial-of-a-user", b"another file");
    let written = dir.file("out.partial-4194306", b"a process writes it");
    let writer = std::fs::File::open(&written).unwrap();
    rustix::fs::flock(&writer, rustix::fs::FlockOperation::NonBlockingLockExclusive).unwrap();
    let salvage = ["salvage", "-C", &ssd, "-B", &hdd, "-o", &out, "--trust-journal-end"];
    let said = run(&salvage).ok().says(&[&format!("{left}: an incomplete file"), "remove it"]);
    assert!(!said.err.contains(&other) && !said.err.contains(&written), "{said}");
    assert!([&left, &other, &written].iter().all(|path| Path::new(path).exists()));
    std::fs::remove_file(&left).unwrap();
    let said = run(&[&salvage[..], &["--force"]].concat()).ok();
    assert!(!said.err.contains("incomplete"), "{said}");
}

/// A file system without room ends the salvage. No output has its name.
#[test]
fn a_full_file_system() {
    let dir = Dir::new();
    let [ssd, hdd] = dirty_files(&dir);
    let small = dir.path("small");
    std::fs::create_dir(&small).unwrap();
    let mut mount = std::process::Command::new("mount");
    mount.args(["-t", "tmpfs", "-o", "size=256k", "tmpfs", &small]);
    if !mount.output().is_ok_and(|o| o.status.success()) {
        return rig::skipped("no tmpfs can be mounted");
    }
    let (out, map) = (dir.path("small/out"), dir.path("map"));
    let to_full = run(&["salvage", "-C", &ssd, "-B", &hdd, "-o", &out, "--map", &map]);
    let in_full: Vec<_> = std::fs::read_dir(&small).unwrap().flatten().collect();
    // The image has room, and the map has none.
    let ballast = vec![1; 256 << 10];
    let _ = std::fs::write(dir.path("small/ballast"), ballast);
    let (image, full) = (dir.path("image"), dir.path("small/map"));
    let map_to_full = run(&["salvage", "-C", &ssd, "-B", &hdd, "-o", &image, "--map", &full]);
    let unmounted = std::process::Command::new("umount").arg(&small).status();
    to_full.refused(&["small/out: cannot be written: No space left"]);
    map_to_full.refused(&["small/map: cannot be written: No space left"]);
    assert!(unmounted.is_ok_and(|s| s.success()) && in_full.is_empty());
    assert!(!Path::new(&map).exists() && !Path::new(&image).exists());
    assert_eq!(partial(&image), [""; 0]);
}

/// Dirty data behind the end of a backing device says that it was larger: nothing is certain then.
#[test]
fn a_backing_device_that_is_too_small() {
    let dir = Dir::new();
    let [ssd, hdd] = dirty_files(&dir);
    std::fs::File::options().write(true).open(&hdd).unwrap().set_len(4 << 20).unwrap();
    let out = dir.path("out");
    let salvage = ["salvage", "-C", &ssd, "-B", &hdd, "-o", &out, "--trust-journal-end"];
    let said = run(&salvage).refused(&["expected inside the device", "sectors outside"]);
    assert!(said.out.contains("certain    0 bytes in 0 ranges"), "{said}");
    assert!(read(&out) == dirty_set()[2][..(4 << 20) - 16 * SECTOR]);
    std::fs::File::options().write(true).open(&hdd).unwrap().set_len(4096).unwrap();
    run(&[&salvage[..], &["--force"]].concat()).refused(&["hdd", "the device ends at sector 8"]);
}
