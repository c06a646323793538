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
fn bcache() {
    let dir = Dir::new();
    let bcache = called(&dir, "bcache");
    let ssd = dir.sparse("ssd", 64 << 20);
    run_as(&bcache, &["make", "-C", &ssd, "--bucket", "64k"]).ok();
    run_as(&bcache, &["super-show", &ssd]).ok().says(&["cache device"]);
    run_as(&bcache, &["version"]).ok();
    run_as(&bcache, &["no-such-command"]).usage();
    run_as(&bcache, &["check", &ssd]).ok();
}

#[test]
fn without_a_command() {
    let said = run::<&str>(&[]).usage();
    assert!(said.err.contains("Usage: ubcache"), "{said}");
    run(&["--help"]).ok().says(&["make", "extract", "wrong usage"]);
    run(&["--version"]).ok();
}
