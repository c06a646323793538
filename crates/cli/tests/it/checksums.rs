//! Checksums of cached data with the program: made, shown, served, verified, and damage that is found and decided.

use std::os::unix::fs::FileExt;
use std::path::Path;

use format::checksum::crc32c;
use format::{BucketNr, FooterId, FooterLayout, Gen, RawSuperblock, Sectors, parse_footer};
use ubcache_cli::nbd_client::Client;

use crate::world::*;

const BLOCK: usize = 4096;

/// A set with checksums, blocks of 4 KiB and buckets of 64 KiB: cache device and backing device.
fn fresh(dir: &Dir) -> [String; 2] {
    let files = [dir.sparse("ssd", 16 << 20), dir.sparse("hdd", 16 << 20)];
    let sizes = ["--bucket", "64k", "--block", "4k", "--writeback", "--checksums"];
    run(&[&["make", "-C", &files[0], "-B", &files[1]], &sizes[..]].concat()).ok();
    files
}

/// Serves the set; no dirty data is written back.
fn serve(dir: &Dir, [ssd, hdd]: &[String; 2]) -> (Up, Client) {
    let socket = dir.path("s");
    let export = format!("--export=nbd={socket}");
    let tunables = ["--set=sequential_cutoff=0", "--set=writeback_running=0", "--set=scrub_share=100"];
    let up = Up::start(dir, 1, &[&["-C", ssd, "-B", hdd, &export], &tunables[..]].concat());
    let client = Client::connect(Path::new(&socket), "bcache0").expect("a server");
    (up, client)
}

fn data(seed: usize, blocks: usize) -> Vec<u8> {
    (0..blocks * BLOCK).map(|i| (seed + i / BLOCK * 31 + i % 251) as u8).collect()
}

#[test]
fn a_set_says_whether_it_has_checksums() {
    let dir = Dir::new();
    let (ssd, other) = (dir.sparse("ssd", 16 << 20), dir.sparse("other", 16 << 20));
    let made = |device: &str, more: &[&str]| {
        let said = run(&[&["make", "-C", device, "--bucket", "64k", "--json", "--wipe"], more].concat()).ok();
        said.json()["devices"][0]["checksums"].clone()
    };
    let key = |device: &str| read(device)[4096 + 144..4096 + 160].to_vec();
    assert_eq!(made(&ssd, &[]), false);
    assert_eq!(key(&ssd), [0; 16]);
    assert_eq!(made(&ssd, &["--checksums", "off"]), false);
    let shown = run(&["super", &ssd]).ok();
    assert!(!shown.out.contains("checksums"), "{shown}");
    assert_eq!(made(&ssd, &["--checksums"]), true);
    assert_eq!(made(&other, &["--checksums", "on"]), true);
    assert_eq!(&key(&ssd)[..8], b"ubcksum1");
    assert_ne!(key(&ssd), key(&other), "the key is random");
    run(&["super", &ssd]).ok().says(&["dev.cache.checksums\tyes"]);
    run(&["dump", &ssd, "superblock"]).ok().says(&["dev.cache.checksums\tyes"]);
    assert_eq!(run(&["super", &ssd, "--json"]).ok().json()["cache"]["checksums"], true);
    let said = run(&["make", "-C", &ssd, "--bucket", "64k", "--checksums", "--wipe"]).ok();
    said.says(&["with checksums of cached data"]);
    run(&["check", &ssd]).ok();
}

#[test]
fn sets_without_room_for_checksums_are_refused() {
    let dir = Dir::new();
    let (ssd, hdd) = (dir.sparse("ssd", 16 << 20), dir.sparse("hdd", 16 << 20));
    let before = read(&ssd);
    run(&["make", "-C", &ssd, "--bucket", "4k", "--block", "4k", "--checksums"])
        .refused(&["buckets of 4096 bytes and blocks of 4096 bytes, which give 1", "--bucket 8192"]);
    assert!(read(&ssd) == before, "nothing was written");
    run(&["make", "-B", &hdd, "--checksums"]).usage().says(&["expected a -C"]);
    let tools = dir.path("make-bcache");
    std::os::unix::fs::symlink(program(), &tools).unwrap();
    run_as(Path::new(&tools), &["-C", &ssd, "--checksums"]).usage().says(&["ubcache make"]);
    // One block of data and its footer are enough.
    run(&["make", "-C", &ssd, "--bucket", "8k", "--block", "4k", "--checksums"]).ok();
}

/// `up --checksums` is for a set that was never used.
#[test]
fn up_switches_checksums_on_before_the_first_use() {
    let dir = Dir::new();
    let (ssd, hdd) = (dir.sparse("ssd", 16 << 20), dir.sparse("hdd", 16 << 20));
    run(&["make", "-C", &ssd, "-B", &hdd, "--bucket", "16k"]).ok();
    let export = format!("--export=nbd={}", dir.path("s"));
    let on = |device: &str| run(&["super", device, "--json"]).ok().json()["cache"]["checksums"].clone();
    for _ in 0..2 {
        let mut up = Up::start(&dir, 1, &["-C", &ssd, "-B", &hdd, &export, "--checksums"]);
        assert!(up.stats()["set"]["checksums"].is_object());
        up.stop();
        assert_eq!(on(&ssd), true);
    }
    let other = dir.sparse("other", 16 << 20);
    run(&["make", "-C", &other, "--bucket", "16k"]).ok();
    run(&["make", "-B", &hdd, "--wipe"]).ok();
    let mut up = Up::start(&dir, 1, &["-C", &other, "-B", &hdd, &export, "--attach"]);
    assert!(up.stats()["set"]["checksums"].is_null());
    assert!(up.ask("scrub")["error"].as_str().unwrap().contains("no checksums"));
    up.stop();
    let refused = ["up", "-C", &other, "-B", &hdd, &export, "--checksums"];
    run(&refused).refused(&["was used without checksums", "ubcache make --checksums"]);
    assert_eq!(on(&other), false);
}

/// The numbers of valid footers, and of blocks that match their checksum, of a stopped set.
fn footers(ssd: &str) -> (usize, usize) {
    let image = read(ssd);
    let raw = RawSuperblock::from_prefix(&image[4096..8192]).unwrap();
    let superblock = raw.check_cache(Sectors(image.len() as u64 / 512), 512).unwrap();
    let (geometry, key) = (*superblock.geometry(), superblock.checksum_key().unwrap());
    let layout = FooterLayout::of(&geometry).unwrap();
    let (mut valid, mut blocks) = (0, 0);
    for bucket in (0..geometry.nbuckets).map(BucketNr) {
        let start = geometry.bucket_start(bucket);
        let (at, size) = layout.place(start);
        let bytes = &image[at.bytes() as usize..][..size.bytes() as usize];
        let id = FooterId { set_uuid: superblock.set_uuid(), bucket, generation: Gen(bytes[40]) };
        let Ok(sums) = parse_footer(&layout, key, id, bytes) else { continue };
        valid += 1;
        for block in 0..layout.blocks() {
            let data = &image[start.bytes() as usize + block * BLOCK..][..BLOCK];
            blocks += usize::from(sums.get(block) == Some(crc32c(data)));
        }
    }
    (valid, blocks)
}

/// After a stop all buckets have footers, so the next start verifies everything. A process that is killed leaves buckets
/// without one, until a scrub.
#[test]
fn served_data_is_verified_and_has_footers_after_a_stop() {
    let dir = Dir::new();
    let files = fresh(&dir);
    let (up, mut client) = serve(&dir, &files);
    // Fifteen blocks of data in each bucket.
    client.write(0, &data(1, 300)).unwrap();
    client.flush().unwrap();
    drop(client);
    up.stop();
    let (valid, blocks) = footers(&files[0]);
    assert!(valid >= 300 / 15 && blocks == 300, "{valid} footers, {blocks} blocks");

    let (mut up, mut client) = serve(&dir, &files);
    let figures = up.stats()["set"]["checksums"].clone();
    assert_eq!(
        (&figures["unread_blocks"], &figures["block_bytes"]),
        (&300.into(), &4096.into()),
        "{figures}"
    );
    assert!(client.read(0, (300 * BLOCK) as u32).unwrap() == data(1, 300));
    let figures = up.stats()["set"]["checksums"].clone();
    assert_eq!(figures["verified_blocks"], 300, "{figures}");
    assert_eq!(figures["read_unverified_blocks"], 0, "{figures}");
    assert_eq!(
        (&figures["unread_blocks"], &figures["unverified_blocks"]),
        (&0.into(), &0.into()),
        "{figures}"
    );
    client.write(2 << 20, &data(2, 5)).unwrap();
    client.flush().unwrap();
    drop(client);
    up.kill();

    let (mut up, client) = serve(&dir, &files);
    let scrubbed = up.ask("scrub")["scrubbed"].clone();
    assert_eq!(scrubbed["unverified_blocks"], 0, "{scrubbed}");
    assert!(scrubbed["learnt_blocks"].as_u64().unwrap() >= 5, "{scrubbed}");
    let again = up.ask("scrub")["scrubbed"].clone();
    assert_eq!((&again["verified_blocks"], &again["learnt_blocks"]), (&305.into(), &0.into()), "{again}");
    drop(client);
    up.stop();
    run(&["check", &files[0], &files[1]]).ok();
}

/// Flips a bit in each block of the cache device that begins with these bytes.
fn damage(ssd: &str, begin: &[u8]) {
    let (image, file) = (read(ssd), std::fs::File::options().write(true).open(ssd).unwrap());
    let mut damaged = 0;
    for (n, block) in image.chunks(BLOCK).enumerate().filter(|(_, b)| b.starts_with(begin)) {
        file.write_all_at(&[block[100] ^ 8], (n * BLOCK + 100) as u64).unwrap();
        damaged += 1;
    }
    assert!(damaged > 0, "the block is not in the cache");
}

#[test]
fn damage_is_found_and_decided() {
    let dir = Dir::new();
    let files = fresh(&dir);
    let (up, mut client) = serve(&dir, &files);
    let (one, two) = (data(77, 1), data(99, 1));
    for (at, block) in [(8, &one), (40, &two)] {
        client.write(at * 512, block).unwrap();
    }
    client.flush().unwrap();
    drop(client);
    up.stop();
    damage(&files[0], &one[..64]);
    damage(&files[0], &two[..64]);

    let (mut up, mut client) = serve(&dir, &files);
    assert_eq!(up.ask("scrub")["scrubbed"]["damaged_dirty_blocks"], 2);
    assert!(client.read(8 * 512, BLOCK as u32).is_err(), "damaged data was served");
    let listed = up.ask("damaged")["damaged"].clone();
    let places: Vec<_> =
        listed.as_array().unwrap().iter().map(|d| (d["sector"].as_u64(), d["sectors"].as_u64())).collect();
    assert_eq!(places, [(Some(8), Some(8)), (Some(40), Some(8))], "{listed}");
    let figures = up.stats()["set"]["checksums"].clone();
    assert_eq!(figures["damaged_dirty_bytes"], 2 * BLOCK as u64, "{figures}");
    assert_eq!(up.ask("accept bcache0 8+1")["sectors"], 8);
    let mut accepted = one.clone();
    accepted[100] ^= 8;
    assert!(client.read(8 * 512, BLOCK as u32).unwrap() == accepted);
    assert_eq!(up.ask("drop bcache0")["sectors"], 8);
    assert!(client.read(40 * 512, BLOCK as u32).unwrap() == vec![0; BLOCK], "the disk has zeros");
    assert_eq!(up.ask("damaged")["damaged"], serde_json::json!([]));
    drop(client);
    let said = up.stop();
    for words in [
        "sectors from 8 on are damaged",
        "2 blocks of dirty data are damaged",
        "were accepted",
        "were dropped",
    ] {
        assert!(said.contains(words), "{words}: {said}");
    }

    let (mut up, mut client) = serve(&dir, &files);
    assert!(client.read(8 * 512, BLOCK as u32).unwrap() == accepted);
    assert!(client.read(40 * 512, BLOCK as u32).unwrap() == vec![0; BLOCK]);
    assert_eq!(up.ask("scrub")["scrubbed"]["damaged_dirty_blocks"], 0);
    drop(client);
    up.stop();
    run(&["flush", "-C", &files[0], "-B", &files[1]]).ok();
    assert!(read(&files[1])[DATA_OFFSET as usize + 8 * 512..][..BLOCK] == accepted);
}
