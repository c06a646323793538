//! `check` and `extract` of a set whose data has checksums, and of damaged data.

use std::path::Path;

use format::superblock::{SUPERBLOCK_BYTES, SUPERBLOCK_SECTOR};
use format::{FooterKey, RawSuperblock, Sectors};
use inspect::{FileSource, Mode, PieceKind, SetView};
use ubcache_cli::nbd_client::Client;

use crate::world::*;

/// Sets the key in the superblock of a new cache device.
fn switch_on(ssd: &str) {
    let mut bytes = read(ssd);
    let place = SUPERBLOCK_SECTOR.bytes() as usize..SUPERBLOCK_SECTOR.bytes() as usize + SUPERBLOCK_BYTES;
    let size = Sectors::from_bytes_floor(bytes.len() as u64);
    let mut superblock =
        RawSuperblock::from_prefix(&bytes[place.clone()]).unwrap().check_cache(size, 512).unwrap();
    superblock.set_checksum_key(Some(FooterKey(77)));
    superblock.prepare_write(1);
    bytes[place].copy_from_slice(&superblock.encode());
    std::fs::write(ssd, bytes).unwrap();
}

/// The first sectors of the dirty extents: on the volume and on the cache device.
fn dirty(ssd: &str) -> Vec<(u64, u64)> {
    let view = SetView::open(&FileSource::open(ssd).unwrap(), Mode::Strict).unwrap();
    let live = view.pieces().filter(|(_, _, kind)| *kind == PieceKind::Dirty);
    live.map(|(_, piece, _)| (piece.start.0 - 16, piece.ptr.unwrap().offset().0)).collect()
}

#[test]
fn damaged_dirty_data_is_found_and_not_extracted() {
    let dir = Dir::new();
    let (ssd, hdd, out) = (dir.sparse("ssd", 8 << 20), dir.sparse("hdd", 8 << 20), dir.path("out"));
    run(&["make", "-C", &ssd, "-B", &hdd, "--bucket", "64k", "--writeback"]).ok();
    switch_on(&ssd);
    let socket = dir.path("s");
    let export = format!("--export=nbd={socket}");
    let up = Up::start(&dir, 1, &["-C", &ssd, "-B", &hdd, &export, "--set=writeback_running=0"]);
    let mut client = Client::connect(Path::new(&socket), "bcache0").expect("a server");
    for i in 0..100u64 {
        client.write(i * 40_960, &[i as u8 | 1; 4096]).expect("a write");
    }
    client.flush().expect("a flush");
    drop(client);
    up.stop();

    let doc = run(&["check", &ssd, &hdd, "--json"]).ok().json();
    let data = &doc["sets"][0]["summary"]["devices"][0]["data"];
    assert_eq!((data["verified_blocks"].as_u64(), data["unverified_blocks"].as_u64()), (Some(800), Some(0)));
    run(&["extract", "-C", &ssd, "-B", &hdd, "-o", &out]).ok();
    let intact = read(&out);
    std::fs::remove_file(&out).unwrap();

    let mut bytes = read(&ssd);
    let (sector, place) = dirty(&ssd)[50];
    bytes[place as usize * SECTOR + 5] ^= 64;
    std::fs::write(&ssd, &bytes).unwrap();
    let range = format!("{sector}+1");
    run(&["check", &ssd, &hdd]).refused(&[
        "21 data-checksum",
        &format!("sectors {range} of the volume"),
        "1 error",
    ]);
    let data = run(&["check", &ssd, &hdd, "--json"]).refused(&[]).json();
    let data = &data["sets"][0]["summary"]["devices"][0]["data"];
    assert_eq!(data["damaged"][0]["sector"].as_u64(), Some(sector));
    assert_eq!(data["damaged"].as_array().unwrap().len(), 1);
    run(&["check", &ssd, &hdd, "--quick"]).ok();

    // A repair does not mend it, and says so: it said that there was nothing to mend.
    let undo = dir.path("undo");
    for dry_run in [&["--dry-run"][..], &["--undo-file", &undo]] {
        let said = run(&[&["repair", "-C", &ssd, "-B", &hdd][..], dry_run].concat());
        let said = said.refused(&[
            "no structure is damaged",
            "1 damaged block of dirty data",
            &format!("sectors {range} of the volume"),
            &format!("`ubcache extract -C {ssd} -B {hdd} --damaged older -o FILE`"),
            &format!("`ubcache register {ssd} {hdd}`"),
            "`ubcache damaged ",
        ]);
        assert!(!said.to_string().contains("nothing to mend"));
    }
    let doc = run(&["repair", "-C", &ssd, "-B", &hdd, "--dry-run", "--json"]).refused(&[]).json();
    assert_eq!((&doc["complete"], &doc["damaged_data"][0]["blocks"]), (&false.into(), &1.into()), "{doc}");
    run(&["repair", "-C", &ssd, "-B", &hdd, "--dry-run", "--quick"]).ok().says(&["nothing to mend"]);
    assert!(read(&ssd) == bytes && !Path::new(&undo).exists());

    let extract = ["extract", "-C", &ssd, "-B", &hdd, "-o", &out];
    run(&extract).refused(&[&format!("1 damaged sector: {range}"), "--damaged older"]);
    assert!(!Path::new(&out).exists(), "wrong data was written");
    for (what, byte) in [("zeros", 0), ("older", 0), ("as-is", 5)] {
        let args = [&extract[..], &["--damaged", what, "--force"]].concat();
        run(&args).refused(&[&format!("sectors {range} of the volume"), "1 sector is lost"]);
        let mut expected = intact.clone();
        let at = sector as usize * SECTOR;
        let damaged = &mut expected[at..at + SECTOR];
        if byte == 0 {
            damaged.fill(0);
        } else {
            damaged[byte] ^= 64;
        }
        assert!(read(&out) == expected, "{what}");

        // A salvage calls the sector lost, and writes the same.
        let map = dir.path("map");
        let salvage =
            ["salvage", "-C", &ssd, "-B", &hdd, "-o", &out, "--map", &map, "--force", "--damaged", what];
        let doc = run(&[&salvage[..], &["--trust-journal-end", "--json"]].concat()).refused(&[]).json();
        assert_eq!((&doc["lost"]["sectors"], &doc["uncertain"]["sectors"]), (&1.into(), &0.into()), "{doc}");
        let lost = format!(r#"{{"start_sector":{sector},"sectors":1,"state":"lost","from":"cache dirty""#);
        assert!(std::fs::read_to_string(&map).unwrap().contains(&lost));
        assert!(read(&out) == expected, "{what}");
    }
}
