//! `make`, and `super` on what it made: field by field (format section 2.1, format section 13).

use crate::common_checks::resealed;
use crate::world::*;

fn u16_at(sb: &[u8], at: usize) -> u64 {
    u64::from(u16::from_le_bytes(sb[at..at + 2].try_into().unwrap()))
}

fn u64_at(sb: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(sb[at..at + 8].try_into().unwrap())
}

const MAGIC: [u8; 16] =
    [0xc6, 0x85, 0x73, 0xf6, 0x4e, 0x1a, 0x45, 0xca, 0x82, 0x65, 0xf5, 0x7f, 0x48, 0xba, 0x6d, 0x81];

/// Bytes of a superblock, after the checks that hold for both kinds.
fn superblock(path: &str) -> Vec<u8> {
    let image = read(path);
    assert!(image[..4096].iter().all(|b| *b == 0), "sectors 0 to 7 are zero");
    let sb = image[4096..8192].to_vec();
    assert_eq!(u64_at(&sb, 8), 8, "offset");
    assert_eq!(sb[24..40], MAGIC);
    assert!(sb[40..56].iter().any(|b| *b != 0), "uuid");
    assert_eq!(u64_at(&sb, 112), 0, "seq");
    assert_eq!(sb[200..204], [0; 4], "last_mount");
    assert_eq!(u16_at(&sb, 206), 0, "keys");
    assert!(sb[208..].iter().all(|b| *b == 0), "journal buckets and tail");
    assert_eq!(u64_at(&sb, 0), format::checksum::crc64(&sb[8..208]), "checksum");
    sb
}

#[test]
fn a_set_with_defaults() {
    let dir = Dir::new();
    let (ssd, hdd) = (dir.sparse("ssd", 1 << 30), dir.sparse("hdd", 4 << 30));
    let said = run(&["make", "-C", &ssd, "-B", &hdd, "--json"]).ok();
    let doc = said.json();
    let (c, b) = (superblock_head(&ssd), superblock_head(&hdd));

    assert_eq!(u64_at(&c, 16), 0, "version");
    assert_eq!(u64_at(&c, 104), 0, "flags: not initialised, no discard, lru");
    assert_eq!(u64_at(&c, 184), 2048, "nbuckets");
    assert_eq!([u16_at(&c, 192), u16_at(&c, 194)], [1, 1024], "block and bucket size");
    assert_eq!(
        [u16_at(&c, 196), u16_at(&c, 198), u16_at(&c, 204)],
        [1, 0, 1],
        "nr_in_set, nr_this_dev, first_bucket"
    );
    assert!(c[72..104].iter().all(|b| *b == 0), "label");

    assert_eq!(u64_at(&b, 16), 1, "version");
    assert_eq!(u64_at(&b, 104), 0, "flags: writethrough, not attached");
    assert_eq!(u64_at(&b, 184), 0, "data_offset of version 1");
    assert_eq!([u16_at(&b, 192), u16_at(&b, 194)], [1, 1024]);
    assert_eq!([u16_at(&b, 196), u16_at(&b, 198), u16_at(&b, 204)], [0, 0, 0]);
    assert_eq!(c[56..72], b[56..72], "one set");
    assert_ne!(c[40..56], b[40..56], "two devices");

    assert_eq!(doc["schema_version"], 1);
    let made = doc["devices"].as_array().unwrap();
    assert_eq!(made.len(), 2);
    assert_eq!((made[0]["kind"].as_str(), made[1]["kind"].as_str()), (Some("cache"), Some("backing")));
    assert_eq!((made[0]["nbuckets"].as_u64(), made[0]["bucket_sectors"].as_u64()), (Some(2048), Some(1024)));
    assert_eq!(made[1]["data_sectors"].as_u64(), Some((4 << 30) / 512 - 16));

    let shown = run(&["super", &ssd, "--json"]).ok().json();
    assert_eq!(shown["set_uuid"], doc["set_uuid"]);
    assert_eq!(shown["uuid"], made[0]["uuid"]);
    assert_eq!(shown["cache"]["nbuckets"], 2048);
    assert_eq!(shown["cache"]["synchronous"], false);
    let shown = run(&["super", &hdd, "--json"]).ok().json();
    assert_eq!(shown["set_uuid"], doc["set_uuid"]);
    assert_eq!(shown["backing"]["data_offset"], 16);
    assert_eq!(shown["backing"]["state_name"], "detached");
    run(&["check", &ssd, &hdd]).ok();
}

/// The superblock of a file that is too large to be read whole.
fn superblock_head(path: &str) -> Vec<u8> {
    use std::os::unix::fs::FileExt;
    let mut head = vec![0; 64 << 10];
    std::fs::File::open(path).unwrap().read_exact_at(&mut head, 0).unwrap();
    let dir = Dir::new();
    superblock(&dir.file("head", &head))
}

#[test]
fn every_option_is_in_the_superblock() {
    let dir = Dir::new();
    let (ssd, hdd) = (dir.sparse("ssd", 64 << 20), dir.sparse("hdd", 64 << 20));
    let set = "12345678-9abc-4def-8123-456789abcdef";
    let args = ["make", "-C", &ssd, "-B", &hdd, "--bucket", "64k", "--block", "4k", "--data-offset", "64"];
    let more = ["--writeback", "--discard", "--cache-replacement-policy", "fifo", "--label", "große Platte"];
    run(&[&args[..], &more, &["--cset-uuid", set]].concat()).ok();
    let (c, b) = (superblock(&ssd), superblock(&hdd));
    assert_eq!(u64_at(&c, 104), 0b110, "discard, fifo");
    assert_eq!([u16_at(&c, 192), u16_at(&c, 194), u16_at(&c, 204)], [8, 128, 1]);
    assert_eq!(u64_at(&b, 16), 4, "version with a data offset");
    assert_eq!(u64_at(&b, 184), 64, "data_offset");
    assert_eq!(u64_at(&b, 104), 1, "writeback");
    assert_eq!(&b[72..72 + 13], "große Platte".as_bytes());
    let uuid =
        [0x12, 0x34, 0x56, 0x78, 0x9a, 0xbc, 0x4d, 0xef, 0x81, 0x23, 0x45, 0x67, 0x89, 0xab, 0xcd, 0xef];
    assert_eq!((&c[56..72], &b[56..72]), (&uuid[..], &uuid[..]));
    let said = run(&["super", &hdd]).ok();
    said.says(&["dev.data.first_sector\t64", "dev.data.cache_mode\t1 [writeback]", set]);
}

/// Sectors reserved at the start depend on the bucket size: floor(23 / bucket) + 1 buckets.
#[test]
fn bucket_sizes() {
    let dir = Dir::new();
    for (bucket, size, sectors, first) in [
        ("4k", 4u64 << 20, 8, 3),
        ("8k", 8 << 20, 16, 2),
        ("16k", 8 << 20, 32, 1),
        ("16M", 4 << 30, 32768, 1),
    ] {
        let ssd = dir.sparse(&format!("ssd-{bucket}"), size);
        run(&["make", "-C", &ssd, "--bucket", bucket]).ok();
        let c = superblock_head(&ssd);
        assert_eq!((u64_at(&c, 16), u16_at(&c, 194), u16_at(&c, 204)), (0, sectors, first), "{bucket}");
        assert_eq!(u64_at(&c, 184), size / 512 / sectors, "{bucket}");
    }
    // 32 MiB do not fit 16 bits: version 5, feature 2, the logarithm.
    let ssd = dir.sparse("large", 8 << 30);
    run(&["make", "-C", &ssd, "--bucket", "32M"]).ok();
    let c = superblock_head(&ssd);
    assert_eq!((u64_at(&c, 16), u64_at(&c, 128), u16_at(&c, 194)), (5, 2, 16));
    assert_eq!((u64_at(&c, 184), u16_at(&c, 204)), (256, 1));
    run(&["super", &ssd]).ok().says(&["dev.sectors_per_bucket\t65536"]);
    run(&["check", &ssd]).ok();
}

#[test]
fn a_backing_device_alone_belongs_nowhere() {
    let dir = Dir::new();
    let hdd = dir.sparse("hdd", 1 << 20);
    let doc = run(&["make", "-B", &hdd, "--json"]).ok().json();
    assert!(doc.get("set_uuid").is_none(), "{doc}");
    assert!(superblock(&hdd)[56..72].iter().all(|b| *b == 0));
}

#[test]
fn several_backing_devices_share_the_set() {
    let dir = Dir::new();
    let ssd = dir.sparse("ssd", 64 << 20);
    let disks = ["a", "b", "c"].map(|n| dir.sparse(n, 1 << 20));
    run(&["make", "-B", &disks[0], "-C", &ssd, "-B", &disks[1], "-B", &disks[2], "--bucket", "64k"]).ok();
    let set = superblock(&ssd)[56..72].to_vec();
    let mut uuids: Vec<Vec<u8>> = Vec::new();
    for d in &disks {
        let sb = superblock(d);
        assert_eq!(sb[56..72], set);
        uuids.push(sb[40..56].to_vec());
    }
    uuids.sort();
    uuids.dedup();
    assert_eq!(uuids.len(), 3);
}

/// What a device is was found out by a write that failed, or said as an offset in a superblock.
#[test]
fn devices_that_do_not_fit() {
    let dir = Dir::new();
    let (ssd, hdd) = (dir.sparse("ssd", 64 << 20), dir.sparse("hdd", 64 << 20));
    let with_loop = |options: &[&str], check: &dyn Fn(&str)| {
        let made = std::process::Command::new("losetup").args(options).args(["-f", "--show", &hdd]).output();
        match made {
            Ok(o) if o.status.success() => {
                let device = String::from_utf8(o.stdout).unwrap().trim().to_owned();
                check(&device);
                let _ = std::process::Command::new("losetup").args(["-d", &device]).status();
            }
            _ => rig::skipped_in_part("no loop device can be made"),
        }
    };
    with_loop(&["--read-only"], &|device| {
        let said = run(&["make", "-C", &ssd, "-B", device, "--bucket", "64k"]);
        said.refused(&[&format!("{device} is read-only")]);
    });
    with_loop(&["--sector-size", "4096"], &|device| {
        let said = run(&["make", "-C", &ssd, "-B", device, "--bucket", "64k", "--block", "512"]);
        said.refused(&[&format!("--block 512 is smaller than the 4096-byte sectors of {device}")]);
    });
    assert!(read(&hdd).iter().all(|b| *b == 0));
}

/// `make -B DISK --wipe-dirty` let the data begin at sector 16: a file system at another place was not found any more.
#[test]
fn a_new_superblock_leaves_the_data_where_it_is() {
    let dir = Dir::new();
    let hdd = dir.sparse("hdd", 8 << 20);
    let make = |more: &[&str]| run(&[&["make", "-B", &hdd], more].concat());
    make(&["--data-offset", "2048"]).ok();
    make(&["--wipe", "--dry-run"]).ok().says(&["data from sector 2048 on"]);
    for more in [&["--wipe"][..], &["--wipe-dirty", "--label", "one"], &["--force"]] {
        make(more).ok().says(&["data from sector 2048 on"]);
        assert_eq!(u64_at(&superblock(&hdd), 184), 2048, "{more:?}");
    }
    make(&["--wipe", "--data-offset", "64"]).ok().says(&["data from sector 64 on"]);
    assert_eq!(u64_at(&superblock(&hdd), 184), 64);
    // A damaged superblock does not say where the data begins.
    destroy(&hdd, 4096..4104);
    let before = read(&hdd);
    make(&["--wipe-dirty"]).refused(&["cannot say where the data begins: give --data-offset"]);
    assert!(read(&hdd) == before);
    make(&["--wipe-dirty", "--data-offset", "2048"]).ok().says(&["data from sector 2048 on"]);
    // A device of another kind has no such data.
    let ssd = dir.sparse("ssd", 8 << 20);
    run(&["make", "-C", &ssd, "--bucket", "8k"]).ok();
    run(&["make", "-B", &ssd, "--wipe"]).ok().says(&["data from sector 16 on"]);
}

/// Sizes that make no sense are refused with the numbers, and nothing is written to any device.
#[test]
fn bad_sizes() {
    let dir = Dir::new();
    let (ssd, hdd) = (dir.sparse("ssd", 64 << 20), dir.sparse("hdd", 8 << 20));
    let cases: [(&[&str], &[&str]); 4] = [
        (&["--bucket", "1M"], &["too small", "at least 128 buckets", "give 64"]),
        (
            &["--data-offset", "16385", "--bucket", "64k"],
            &["too small", "more than 16385 sectors, found 16384"],
        ),
        (
            &["--data-offset", "20", "--block", "4k", "--bucket", "64k"],
            &["multiple of the block size of 8", "found 20"],
        ),
        (
            &["--label", "a label of more than thirty-two bytes", "--bucket", "64k"],
            &["at most 32 bytes", "found 37"],
        ),
    ];
    for (args, words) in cases {
        run(&[&["make", "-C", &ssd, "-B", &hdd], args].concat()).refused(words);
        for path in [&ssd, &hdd] {
            assert!(read(path).iter().all(|b| *b == 0), "{args:?}");
        }
    }
    for (args, words) in [
        (
            ["--bucket", "2k"],
            "--bucket: expected a power of two of at least 4.0 KiB, such as 512k, found 2.0 KiB",
        ),
        (
            ["--bucket", "48k"],
            "--bucket: expected a power of two of at least 4.0 KiB, such as 512k, found 48.0 KiB",
        ),
        (["--block", "8k"], "--block: expected a power of two up to 4.0 KiB, such as 4k, found 8.0 KiB"),
        (["--data-offset", "8"], "expected at least 16 sectors, which the superblock takes, found 8"),
        (["--block", "1536"], "--block: expected a power of two up to 4.0 KiB, such as 4k, found 1.5 KiB"),
    ] {
        run(&[&["make", "-C", &*ssd, "-B", &hdd][..], &args].concat()).usage().says(&[words]);
    }
    let said = run(&["make", "-C", &ssd, "-B", &hdd, "--data-offset", "1M"]).usage();
    said.says(&["expected sectors of 512 bytes, for example 2048"]);
    for bad in [&["--bucket", "0"][..], &["--bucket", "1000"], &["--bucket", "x"], &["--cset-uuid", "x"]] {
        run(&[&["make", "-C", &ssd], bad].concat()).usage();
    }
    run(&["make", "-C", &ssd, "--cset-uuid", "00000000-0000-0000-0000-000000000000"]).usage();
    run(&["make", "-C", &ssd, "--writeback"]).usage();
    run(&["make", "-C", &ssd, "--label", "x"]).usage();
    run(&["make", "-B", &hdd, "--discard"]).usage();
    run(&["make", "-C", &ssd, "-B", &ssd]).usage().says(&["the same device"]);
}

/// One device that must not be overwritten keeps the others as they are.
#[test]
fn all_or_nothing() {
    let dir = Dir::new();
    let [ssd, hdd] = dirty_files(&dir);
    let fresh = dir.sparse("fresh", 8 << 20);
    let said = run(&["make", "-C", &fresh, "-B", &hdd, "--bucket", "8k"]);
    said.refused(&[&hdd, "\"disk one\"", "state dirty", "nowhere else", "--wipe"]);
    assert!(read(&fresh).iter().all(|b| *b == 0));
    let said = run(&["make", "-C", &ssd, "-B", &hdd, "--bucket", "8k"]);
    said.refused(&["is the cache device", "is the bcache backing device"]);
    let [ssd_bytes, hdd_bytes, _] = dirty_set();
    assert!(&read(&ssd) == ssd_bytes && &read(&hdd) == hdd_bytes);
}

#[test]
fn with_the_operators_word() {
    let dir = Dir::new();
    let [ssd, hdd] = dirty_files(&dir);
    // Dirty data exists nowhere else, and has an option of its own.
    for option in ["--wipe", "--force"] {
        let said = run(&["make", "-C", &ssd, "--bucket", "8k", option]);
        said.refused(&[
            "dirty data that exists nowhere else: ",
            " of \"disk one\"",
            "--wipe-dirty",
            &format!("`ubcache drain -C {ssd}`"),
        ]);
        // Without the cache device there is nothing to write back.
        run(&["make", "-B", &hdd, option]).refused(&[
            "state dirty (cache set ",
            &format!("`ubcache drain -C CACHE-DEVICE -B {hdd}`"),
            "if that device is lost, `--wipe-dirty` gives it up",
            "the page dead-ssd-dirty of the guide",
        ]);
    }
    let [ssd_bytes, hdd_bytes, _] = dirty_set();
    assert!(&read(&ssd) == ssd_bytes && &read(&hdd) == hdd_bytes, "nothing is written by a refused command");
    run(&["make", "-C", &ssd, "-B", &hdd, "--bucket", "8k", "--wipe-dirty"]).ok();
    assert_eq!(u64_at(&superblock(&ssd), 104), 0);
    // The old set is not to be seen any more, whatever is left of it.
    run(&["check", &ssd, &hdd]).ok().says(&["never initialised"]);

    // `--wipe` is about bcache alone.
    let other = dir.sparse("other", 8 << 20);
    let mut mkfs = tool("mkfs.ext4", "e2fsprogs");
    mkfs.args(["-q", "-F", &other]);
    succeed(mkfs);
    run(&["make", "-B", &other, "--wipe"]).refused(&["ext4", "--force"]);
    run(&["make", "-B", &other, "--force"]).ok();
    superblock(&other);
    assert_eq!(blockio::probe_signature(other.as_ref()).unwrap().map(|s| s.kind), Some("bcache"));
}

/// `make --wipe` counted the dirty data on the device only. The crash log of a killed process has writes that are not there.
#[test]
fn a_crash_log_is_dirty_data() {
    use std::os::unix::fs::MetadataExt;
    let Ok(logs) = serve::exports::runtime_dir() else {
        rig::skipped("there is no directory for crash logs");
        return;
    };
    let dir = Dir::new();
    let ssd = dir.sparse("ssd", 8 << 20);
    run(&["make", "-C", &ssd, "--bucket", "8k"]).ok();
    let set = run(&["super", "--json", &ssd]).ok().json()["set_uuid"].as_str().unwrap().to_owned();
    let device = std::fs::metadata(&ssd).unwrap();
    let log = logs.join(format!("{set}-{:x}-{:x}.kept", device.dev(), device.ino()));
    std::fs::write(&log, "writes").unwrap();
    for option in ["--wipe", "--force"] {
        let said = run(&["make", "-C", &ssd, "--bucket", "8k", option]);
        said.refused(&[log.to_str().unwrap(), "--wipe-dirty"]);
    }
    std::fs::remove_file(&log).unwrap();
    run(&["make", "-C", &ssd, "--bucket", "8k", "--wipe"]).ok();
}

/// A dry run says what would be made and lost, and refuses what the command refuses.
#[test]
fn a_dry_run_writes_nothing() {
    let dir = Dir::new();
    let (ssd, hdd) = (dir.sparse("ssd", 16 << 20), dir.sparse("hdd", 32 << 20));
    let dry = |args: &[&str]| {
        run(&[&["make", "-C", &ssd, "-B", &hdd, "--bucket", "8k", "--dry-run"], args].concat())
    };
    let before = (read(&ssd), read(&hdd));
    let said = dry(&["--label", "films"]).ok().says(&[
        "would become a cache device of a new cache set",
        "would become a backing device",
        "all data on it would be lost",
        "nothing was written",
    ]);
    assert!(!said.out.contains("cache set "), "a dry run has no UUID: {said}");
    assert_eq!(dry(&["--json"]).ok().json()["dry_run"], true);
    assert!(before == (read(&ssd), read(&hdd)));
    run(&["make", "-C", &ssd, "-B", &hdd, "--bucket", "8k", "--label", "films"]).ok();
    let before = (read(&ssd), read(&hdd));
    dry(&[]).refused(&["overwrite it with --wipe"]);
    dry(&["--wipe"]).ok().says(&[
        "is the cache device",
        "\"films\"",
        "this would be lost",
        "nothing was written",
    ]);
    assert!(before == (read(&ssd), read(&hdd)));
}

/// A dry run named the flash-only volumes with data alone, and the others would have been lost without a word.
#[test]
fn a_flash_only_volume_without_data_is_named_before_it_is_lost() {
    let dir = Dir::new();
    let ssd = dir.sparse("ssd", 16 << 20);
    run(&["make", "-C", &ssd, "--bucket", "8k"]).ok();
    for label in ["scratch", "swap"] {
        run(&["volume", "create", &ssd, "1M", "--label", label, "--offline"]).ok();
    }
    let make = |more: &str| run(&["make", "-C", &ssd, "--bucket", "8k", more]);
    let volumes = "with 2 flash-only volumes without data: \"scratch\" (1.0 MiB), \"swap\" (1.0 MiB)";
    make("--dry-run").refused(&[volumes, "overwrite it with --wipe"]);
    let said = run(&["make", "-C", &ssd, "--bucket", "8k", "--wipe", "--dry-run"]).ok();
    said.says(&[&format!("{volumes}: this would be lost"), "nothing was written"]);
    make("--wipe").ok();
    let said = run(&["make", "-C", &ssd, "--bucket", "8k", "--wipe", "--dry-run"]).ok();
    assert!(!said.out.contains("flash-only"), "{said}");
}

/// mkswap leaves the superblock of bcache in place. `make --wipe` then overwrote the swap space without a word.
#[test]
fn a_signature_beside_an_old_superblock_needs_force() {
    let dir = Dir::new();
    let hdd = dir.sparse("hdd", 8 << 20);
    run(&["make", "-B", &hdd]).ok();
    let mut bytes = read(&hdd);
    bytes[4086..4096].copy_from_slice(b"SWAPSPACE2");
    std::fs::write(&hdd, &bytes).unwrap();
    run(&["make", "-B", &hdd, "--wipe"]).refused(&["holds swap (at byte 4086) and an older", "--force"]);
    assert_eq!(read(&hdd), bytes);
    run(&["make", "-B", &hdd, "--force"]).ok();
    run(&["make", "-B", &hdd, "--wipe"]).ok();
}

/// A cache whose metadata is damaged may have dirty data. It cannot be counted.
#[test]
fn a_damaged_cache_may_have_dirty_data() {
    let dir = Dir::new();
    let [ssd, hdd] = dirty_files(&dir);
    let mut bytes = read(&ssd);
    bytes[16384..].fill(0x55);
    let damaged = dir.file("damaged", &bytes);
    run(&["make", "-C", &damaged, "--bucket", "8k", "--wipe"])
        .refused(&["cannot be counted", "--wipe-dirty"]);
    run(&["make", "-C", &damaged, "--bucket", "8k", "--wipe-dirty"]).ok();
    // Without dirty data, --wipe is enough.
    run(&["flush", "-C", &ssd, "-B", &hdd]).ok();
    run(&["make", "-C", &ssd, "-B", &hdd, "--bucket", "8k"]).refused(&["overwrite it with --wipe"]);
    run(&["make", "-C", &ssd, "-B", &hdd, "--bucket", "8k", "--wipe"]).ok();
}

/// Signatures that the superblock does not cover are erased, or the device would still look like something else.
#[test]
fn every_old_signature_goes() {
    let dir = Dir::new();
    let mut image = vec![0; 8 << 20];
    image[0x1_0040..0x1_0048].copy_from_slice(b"_BHRfS_M");
    image[512..520].copy_from_slice(b"EFI PART");
    let end = image.len();
    image[end - 512..end - 504].copy_from_slice(b"EFI PART");
    let path = dir.file("disk", &image);
    run(&["make", "-B", &path]).refused(&["btrfs"]);
    assert!(read(&path) == image);
    run(&["make", "-B", &path, "--force"]).ok();
    assert_eq!(blockio::probe_signature(path.as_ref()).unwrap().map(|s| s.kind), Some("bcache"));
    let after = read(&path);
    assert!(after[0x1_0040..0x1_0048].iter().chain(&after[end - 512..]).all(|b| *b == 0));
}

#[test]
fn make_warns_of_a_set_that_the_kernel_refuses() {
    let dir = Dir::new();
    let ssd = dir.sparse("ssd", 16 << 20);
    run(&["make", "-C", &ssd, "--bucket", "64k"]).ok().says(&["warning", "513"]);
}

/// A superblock that is not as the rules say: what is wrong is on stderr, everything else is shown all the same.
#[test]
fn broken_superblocks_are_shown() {
    let dir = Dir::new();
    let [ssd, _, _] = dirty_set();
    let path = dir.file("ssd", &resealed(ssd, 192, &3u16.to_le_bytes()));
    let said = run(&["super", &path]).refused(&["block_size", "power of two", "found 3"]);
    assert!(said.out.contains("dev.sectors_per_block\t3"), "{said}");
    let doc = run(&["super", &path, "--json"]).refused(&[]).json();
    assert_eq!(doc["problem"]["found"], "3");
}
