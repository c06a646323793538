//! Real images, written by the kernel's bcache: every command agrees with what is known about them.

#[path = "../../../format/tests/common/fixtures.rs"]
#[allow(dead_code)]
mod files;

use serde_json::Value;

use crate::world::*;

struct Fixture {
    expected: Value,
    dir: Dir,
    cache: String,
    backing: String,
}

impl Fixture {
    fn open(name: &str) -> Fixture {
        let dir = Dir::new();
        let cache = dir.file("cache", &files::cache(name));
        let backing = dir.file("backing", &files::backing(name));
        Fixture { expected: files::expected(name), dir, cache, backing }
    }

    /// What is known about the devices of this kind.
    fn devices(&self, kind: &str) -> Vec<Value> {
        let all = self.expected["devices"].as_array().cloned().unwrap_or_default();
        all.into_iter().filter(|d| d["kind"] == kind).collect()
    }

    fn images(&self) -> [String; 2] {
        [sha256(&read(&self.cache)), sha256(&read(&self.backing))]
    }

    fn assert_untouched(&self) {
        let [cache, backing] = self.images();
        assert_eq!(self.expected["images"]["cache.img"]["sha256"], cache);
        assert_eq!(self.expected["images"]["backing.img"]["sha256"], backing);
    }
}

fn superblocks(f: &Fixture) {
    let c = run(&["super", &f.cache, "--json"]).ok().json();
    let b = run(&["super", &f.backing, "--json"]).ok().json();
    assert_eq!((c["kind"].as_str(), b["kind"].as_str()), (Some("cache"), Some("backing")));
    assert_eq!(c["csum"], c["csum_expected"]);
    assert_eq!(b["csum"], b["csum_expected"]);
    let known = &f.expected["cache"];
    if !known.is_null() {
        for (ours, theirs) in
            [("nbuckets", "nbuckets"), ("first_bucket", "first_bucket"), ("journal_buckets", "njournal")]
        {
            assert_eq!(c["cache"][ours], known[theirs], "{theirs}");
        }
        for (ours, theirs) in [
            ("version", "version"),
            ("bucket_sectors", "bucket_size"),
            ("block_sectors", "block_size"),
            ("set_uuid", "set_uuid"),
            ("uuid", "uuid"),
        ] {
            assert_eq!(c[ours], known[theirs], "{theirs}");
        }
        let csum = c["csum"].as_str().expect("a text").to_lowercase();
        assert_eq!(known["superblock_csum"], csum);
    }
    for d in f.devices("cached") {
        assert_eq!((&b["uuid"], &b["backing"]["data_offset"]), (&d["uuid"], &d["data_offset"]));
        assert_eq!(
            (&b["backing"]["state_name"], &b["backing"]["cache_mode_name"]),
            (&d["state"], &d["mode"])
        );
    }
    // The same as text, by either name.
    run(&["super", &f.cache]).ok().says(&["sb.magic\t\tok", "[match]", "dev.cache.total_sectors"]);
}

fn check(f: &Fixture) {
    let report = run(&["check", &f.cache, &f.backing, "--json"]).ok().json();
    assert_eq!(report["errors"], 0, "{report}");
    let slots = report["sets"][0]["summary"]["devices"].as_array().cloned().unwrap_or_default();
    for d in f.expected["devices"].as_array().into_iter().flatten() {
        let slot =
            slots.iter().find(|s| s["inode"] == d["inode"]).unwrap_or_else(|| panic!("{d} in {slots:?}"));
        assert_eq!(slot["kind"], d["kind"]);
        for (ours, theirs) in
            [("sectors", "sectors"), ("dirty_sectors", "dirty_sectors"), ("clean_sectors", "clean_sectors")]
        {
            assert_eq!(slot[ours], d[theirs], "{theirs}");
        }
    }
    run(&["check", &f.cache, &f.backing]).ok().says(&["no errors"]);
}

fn dump(f: &Fixture) {
    run(&["dump", &f.cache, "superblock"]).ok();
    run(&["dump", &f.backing, "superblock"]).ok();
    let whats = ["btree", "buckets", "uuids", "extents"];
    for what in whats {
        run(&["dump", &f.cache, what]).ok();
        assert_eq!(run(&["dump", &f.cache, what, "--json"]).ok().json()["schema_version"], 1, "{what}");
    }
    let journal = run(&["dump", &f.cache, "journal", "--json"]);
    match f.expected["journal"].get("newest_seq") {
        Some(seq) => assert_eq!(&journal.ok().json()["newest_seq"], seq),
        None => drop(journal.refused(&["never used"])),
    }
    let keys = run(&["dump", &f.cache, "btree", "--keys", "--json"]).ok().json();
    if let Some(nodes) = f.expected["btree"].get("nodes") {
        assert_eq!(&keys["node_count"], nodes);
        assert_eq!(keys["root_level"], f.expected["btree"]["root_level"]);
    }
    let buckets = run(&["dump", &f.cache, "buckets", "--json"]).ok().json();
    for (ours, theirs) in [("superblock", "sb"), ("journal", "journal"), ("btree", "btree"), ("data", "data")]
    {
        if let Some(n) = f.expected["buckets"].get(theirs) {
            assert_eq!(&buckets["counts"][ours], n, "{theirs}");
        }
    }
}

fn extract(f: &Fixture) {
    let out = f.dir.path("out");
    for d in f.devices("cached") {
        run(&["extract", "-C", &f.cache, "-B", &f.backing, "-o", &out]).ok();
        assert_eq!(d["sha256"], sha256(&read(&out)));
        std::fs::remove_file(&out).unwrap();
        let mut command = std::process::Command::new(program());
        command.args(["extract", "-C", &f.cache, "-B", &f.backing, "-o", "-"]);
        assert_eq!(d["sha256"], sha256(&output(command).stdout), "to standard output");
    }
    for d in f.devices("volume") {
        run(&["extract", "-C", &f.cache, "--volume", &d["inode"].to_string(), "-o", &out]).ok();
        assert_eq!(d["sha256"], sha256(&read(&out)));
        std::fs::remove_file(&out).unwrap();
    }
}

/// Afterwards the backing device alone has everything that was dirty, and the set is in order.
fn flush(f: &Fixture) {
    let cached = f.devices("cached");
    let dirty: u64 = cached.iter().filter_map(|d| d["dirty_sectors"].as_u64()).sum();
    let report = run(&["flush", "-C", &f.cache, "-B", &f.backing, "--json"]).ok().json();
    let drained: u64 =
        report["drained"].as_array().unwrap().iter().filter_map(|d| d["drained_bytes"].as_u64()).sum();
    assert_eq!(drained, dirty * 512, "{report}");
    if dirty == 0 {
        // Nothing to do is nothing done.
        f.assert_untouched();
        return;
    }
    run(&["check", &f.cache, &f.backing]).ok().says(&[": 0 sectors dirty", "state clean"]);
    for d in cached {
        assert_eq!(
            d["sha256"],
            sha256(&read(&f.backing)[DATA_OFFSET as usize..]),
            "the backing device alone"
        );
        let out = f.dir.path("out");
        run(&["extract", "-C", &f.cache, "-B", &f.backing, "-o", &out]).ok();
        assert_eq!(d["sha256"], sha256(&read(&out)), "cache over backing device");
    }
    for d in f.devices("volume") {
        let out = f.dir.path("volume");
        run(&["extract", "-C", &f.cache, "--volume", &d["inode"].to_string(), "-o", &out]).ok();
        assert_eq!(d["sha256"], sha256(&read(&out)), "what lives in the cache alone is still there");
    }
    let images = f.images();
    run(&["flush", "-C", &f.cache, "-B", &f.backing]).ok().says(&["nothing is dirty"]);
    assert_eq!(images, f.images(), "a second time nothing is left to do");
}

/// Served, read by a client, stopped: the contents are the expected ones, and stay so.
fn up(f: &Fixture) {
    let cached = f.devices("cached");
    let volumes = f.devices("volume");
    if cached.is_empty() {
        return;
    }
    let export = format!("--export=nbd={}", f.dir.path("sock"));
    let up = Up::start(&f.dir, 1 + volumes.len(), &["-C", &f.cache, "-B", &f.backing, &export]);
    for (i, d) in cached.iter().chain(&volumes).enumerate() {
        let out = f.dir.path("served");
        let mut copy = tool("nbdcopy", "libnbd-bin");
        copy.args([&up.uri(i), &out]);
        succeed(copy);
        assert_eq!(d["sha256"], sha256(&read(&out)), "bcache{i}");
        std::fs::remove_file(&out).unwrap();
    }
    up.stop();
    run(&["check", &f.cache, &f.backing]).ok();
    extract(f);
}

macro_rules! fixtures {
    ($($module:ident: $name:literal;)+) => { $(mod $module {
        fixtures!(@ $name: superblocks check dump extract);
        #[test]
        fn flush() {
            super::flush(&super::Fixture::open($name));
        }
        #[test]
        fn up() {
            super::up(&super::Fixture::open($name));
        }
    })+ };
    (@ $name:literal: $($reads:ident)+) => { $(
        #[test]
        fn $reads() {
            let f = super::Fixture::open($name);
            super::$reads(&f);
            f.assert_untouched();
        }
    )+ };
}

fixtures! {
    fresh: "01-fresh";
    attached_empty: "02-attached-empty";
    writeback_clean_stop: "03-writeback-clean-stop";
    writeback_killed: "04-writeback-killed";
    clean_only: "05-clean-only";
    volume_and_backing_killed: "06-volume-and-backing-killed";
    busy_killed: "07-busy-killed";
    synthetic: "08-synthetic";
    small_buckets_killed: "09-small-buckets-killed";
}
