//! The program under the names of bcache-tools.

use std::path::PathBuf;

use crate::world::*;

fn called(dir: &Dir, name: &str) -> PathBuf {
    let path = dir.root().join(name);
    std::os::unix::fs::symlink(program(), &path).unwrap();
    path
}

#[test]
fn make_bcache_and_bcache_super_show() {
    let dir = Dir::new();
    let (make, show) = (called(&dir, "make-bcache"), called(&dir, "bcache-super-show"));
    let ssd = dir.sparse("ssd", 64 << 20);
    let disks = ["a", "b"].map(|n| dir.sparse(n, 8 << 20));
    run_as(&make, &["-C", &ssd, "-B", &disks[0], &disks[1], "-b", "64k", "-w", "4k", "--writeback"]).ok();
    let said = run_as(&show, &[&disks[1]]).ok();
    // The column of the values, as scripts expect it.
    for line in ["sb.magic\t\tok", "dev.sectors_per_block\t8", "dev.sectors_per_bucket\t128"] {
        assert!(said.out.contains(line), "{said}");
    }
    assert!(said.out.contains("dev.data.cache_mode\t1 [writeback]"), "{said}");
    run_as(&make, &["-C", &ssd]).refused(&["--wipe"]);
    run_as(&make, &["--wipe-bcache", "-C", &ssd, "-b", "64k"]).ok();
    run_as(&make, &[&ssd]).usage().says(&["-C or -B"]);
    run_as(&show, &["-f", &ssd]).ok();
}

#[test]
fn the_name_bcache_takes_its_own_and_our_commands() {
    let dir = Dir::new();
    let bcache = called(&dir, "bcache");
    let ssd = dir.sparse("ssd", 64 << 20);
    run_as(&bcache, &["make", "-C", &ssd, "--bucket", "64k"]).ok();
    run_as(&bcache, &["super-show", &ssd]).ok().says(&["cache device"]);
    run_as(&bcache, &["version"]).ok();
    run_as(&bcache, &["no-such-command"]).usage();
    run_as(&bcache, &["check", &ssd]).ok();
}

/// The page said for a while that most commands of bcache-tools do not exist.
#[test]
fn every_command_of_the_page_is_one_of_bcache() {
    let dir = Dir::new();
    let bcache = called(&dir, "bcache");
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/compat.md")).unwrap();
    let rows = page.lines().filter_map(|l| l.strip_prefix("| `bcache "));
    let commands: Vec<&str> = rows
        .flat_map(|row| row.split(" | ").next().unwrap().split("`bcache "))
        .map(|rest| rest.split('`').next().unwrap())
        .collect();
    assert!(commands.contains(&"set-cachemode") && commands.contains(&"super-show"), "{commands:?}");
    for command in commands {
        let said = run_as(&bcache, &[command, "--help"]).ok();
        assert!(said.out.contains(command) || command == "version", "{command}: {said}");
    }
}

#[test]
fn a_call_without_a_command_prints_the_usage() {
    let said = run::<&str>(&[]).usage();
    assert!(said.err.contains("Usage: ubcache"), "{said}");
    run(&["--help"]).ok().says(&["make", "extract", "wrong usage"]);
    run(&["--version"]).ok();
}

/// One action has one name. The former one of `drain -C` works, and is in no list.
#[test]
fn flush_is_a_hidden_name_of_drain() {
    let help = run(&["--help"]).ok();
    assert!(help.out.contains("\n  drain ") && !help.out.contains("flush "), "{help}");
    let help = run(&["drain", "--help"]).ok().says(&["-C", "without -B"]);
    assert!(!help.out.contains("flush"), "{help}");
    run(&["flush", "--help"]).ok().says(&["former name of `drain -C`"]);
}

/// Messages of the parser had another prefix, and named no command.
#[test]
fn wrong_arguments_are_told_like_everything_else() {
    let said = run(&["cancel", "x"]).usage();
    assert!(said.err.starts_with("ubcache: error: invalid value 'x' for '<JOB>': "), "{said}");
    assert!(said.err.ends_with("; `ubcache cancel --help` explains the arguments\n"), "{said}");
    assert_eq!(said.err.lines().count(), 1, "{said}");
    let said = run(&["volume", "create", "--colour"]).usage();
    assert!(said.err.starts_with("ubcache: error: unexpected argument '--colour' found\n"), "{said}");
    assert!(said.err.contains("\nUsage: ubcache volume create"), "{said}");
    assert!(said.err.ends_with("\n`ubcache volume create --help` explains the arguments\n"), "{said}");
    let said = run(&["cancel", "\u{1b}[31m"]).usage();
    assert!(!said.err.contains('\u{1b}'), "{said}");
}

/// Scripts parse `Set UUID:` of make-bcache, and other lines; ours printed a text of its own.
#[test]
fn the_output_that_scripts_parse() {
    let dir = Dir::new();
    let make = called(&dir, "make-bcache");
    let (ssd, hdd) = (dir.sparse("ssd", 64 << 20), dir.sparse("hdd", 64 << 20));
    let said = run_as(&make, &["-B", &hdd, "-C", &ssd, "-b", "512k", "-w", "4k"]).ok();
    // Cache devices come first. UUIDs are random.
    let lines: Vec<String> = said
        .out
        .lines()
        .map(|l| {
            l.split_once("UUID:").map_or(l.to_owned(), |(name, uuid)| {
                assert_eq!(uuid.trim().len(), 36, "{l}");
                format!("{name}UUID:")
            })
        })
        .collect();
    let cache = [
        "UUID:",
        "Set UUID:",
        "version:\t\t0",
        "nbuckets:\t\t128",
        "block_size:\t\t8",
        "bucket_size:\t\t1024",
        "nr_in_set:\t\t1",
        "nr_this_dev:\t\t0",
        "first_bucket:\t\t1",
    ];
    let backing = ["UUID:", "Set UUID:", "version:\t\t1", "block_size:\t\t8", "data_offset:\t\t16"];
    assert_eq!(lines, [&cache[..], &backing].concat());
    let help = run_as(&make, &["--help"]).ok();
    for option in
        ["-C, --cache", "-B, --bdev", "-b, --bucket", "-w, --block", "-o, --data-offset", "--cset-uuid"]
    {
        assert!(help.out.contains(option), "{option}: {help}");
    }
}

/// The exit codes of the original: 0 for a valid superblock, 2 for anything else.
#[test]
fn exit_codes_of_bcache_super_show() {
    let dir = Dir::new();
    let show = called(&dir, "bcache-super-show");
    let ssd = dir.sparse("ssd", 64 << 20);
    assert_eq!(run_as(&show, &[&ssd]).code, 2, "no superblock");
    assert_eq!(run_as(&show, &[&dir.path("nothing")]).code, 2, "no file");
    run(&["super", &ssd]).refused(&["bcache"]);
    run(&["make", "-C", &ssd, "--bucket", "64k"]).ok();
    run_as(&show, &[&ssd]).ok();
    let mut bytes = read(&ssd);
    bytes[4096 + 45] ^= 0x10;
    let damaged = dir.file("damaged", &bytes);
    assert_eq!(run_as(&show, &[&damaged]).code, 2, "wrong checksum");
    run_as(&show, &["-f", &damaged]).ok();
    run_as(&show, &["--help"]).ok();
}

#[test]
fn probe_bcache() {
    let dir = Dir::new();
    let probe = called(&dir, "probe-bcache");
    let (ssd, other) = (dir.sparse("ssd", 64 << 20), dir.sparse("other", 64 << 20));
    run(&["make", "-C", &ssd, "--bucket", "64k"]).ok();
    let superblock = run(&["super", "--json", &ssd]).ok().json();
    let uuid = superblock["uuid"].as_str().expect("a UUID");
    let said = run_as(&probe, &[&other, &ssd]).ok();
    assert_eq!(said.out, format!("{ssd}: UUID=\"{uuid}\" TYPE=\"bcache\"\n"));
    let said = run_as(&probe, &["-o", "udev", &ssd]).ok();
    assert_eq!(said.out, format!("ID_FS_UUID={uuid}\nID_FS_UUID_ENC={uuid}\nID_FS_TYPE=bcache\n"));
    assert_eq!(run_as(&probe, &[&other]).ok().out, "");
}
