//! `repair`: dry runs, the undo file, and what is refused.

use std::path::Path;

use inspect::{FileSource, Mode, SetView};

use crate::world::*;

#[test]
fn a_superblock_is_rebuilt_and_taken_back() {
    let dir = Dir::new();
    let [ssd, hdd] = dirty_files(&dir);
    let (out, undo) = (dir.path("out"), dir.path("undo"));
    let repair = ["repair", "-C", &ssd, "-B", &hdd, "--undo-file", &undo];
    run(&repair).ok().says(&["nothing to mend"]);
    assert!(!Path::new(&undo).exists());

    destroy(&ssd, 4096..8192);
    let damaged = read(&ssd);
    run(&["check", &ssd, &hdd]).refused(&[]);
    let dry = [&repair[..], &["--dry-run"]].concat();
    run(&dry).ok().says(&[
        "cache superblock: rebuilt for set",
        "uncertain",
        "1 error before",
        "nothing was written",
    ]);
    assert!(read(&ssd) == damaged && !Path::new(&undo).exists());

    let doc = run(&[&repair[..], &["--json"]].concat()).ok().json();
    assert_eq!((&doc["schema_version"], &doc["errors_after"]), (&1.into(), &0.into()));
    assert_eq!((&doc["written"], &doc["complete"]), (&true.into(), &true.into()));
    assert_eq!(doc["undo_file"].as_str(), Some(&*undo));
    assert_eq!(doc["steps"][0]["structure"], "cache superblock");
    run(&["check", &ssd, &hdd]).ok();
    run(&["extract", "-C", &ssd, "-B", &hdd, "-o", &out]).ok();
    assert!(read(&out) == dirty_set()[2], "the dirty data came back");

    run(&["repair", "--undo", &undo, "--dry-run"]).ok().says(&["would be"]);
    assert!(read(&ssd) != damaged);
    run(&["repair", "--undo", &undo]).ok().says(&["are what they were before the repair"]);
    assert!(read(&ssd) == damaged && read(&hdd) == dirty_set()[1]);
    // Once more is no error: an interrupted undo is repeated.
    run(&["repair", "--undo", &undo]).ok();

    run(&repair).refused(&["cannot be created"]);
    assert!(read(&ssd) == damaged, "nothing is written without an undo file");
}

#[test]
fn an_undo_file_is_for_these_devices_as_the_repair_left_them() {
    let dir = Dir::new();
    let [ssd, hdd] = dirty_files(&dir);
    let undo = dir.path("undo");
    destroy(&ssd, 4096..8192);
    run(&["repair", "-C", &ssd, "-B", &hdd, "--undo-file", &undo]).ok();
    let mended = read(&ssd);
    let mut changed = mended.clone();
    changed[4096 + 80] ^= 1;
    std::fs::write(&ssd, &changed).unwrap();
    run(&["repair", "--undo", &undo]).refused(&["the device was changed since"]);
    assert!(read(&ssd) == changed);
    std::fs::write(&ssd, &mended[..mended.len() - 4096]).unwrap();
    run(&["repair", "--undo", &undo]).refused(&["this is another device"]);
    std::fs::write(&ssd, &mended).unwrap();
    let mut file = read(&undo);
    file[100] ^= 1;
    std::fs::write(&undo, &file).unwrap();
    run(&["repair", "--undo", &undo]).refused(&["a wrong checksum"]);
    std::fs::write(&undo, b"hello").unwrap();
    run(&["repair", "--undo", &undo]).refused(&["expected the undo file of a repair"]);
    assert!(read(&ssd) == mended);
    run(&["repair"]).usage();
    run(&["repair", "-C", &ssd, "--undo", &undo]).usage();
}

/// A set that was served has newer contents than those that the undo file knows.
#[test]
fn a_repair_is_not_taken_back_after_the_set_was_used() {
    let dir = Dir::new();
    let [ssd, hdd] = dirty_files(&dir);
    let view = SetView::open(&FileSource::open(&ssd).unwrap(), Mode::Strict).unwrap();
    let leaf = view.nodes.iter().find(|n| n.level == 0 && n.live > 0).unwrap();
    let at = leaf.key.pointer().unwrap().offset().bytes() as usize + 18;
    let mut damaged = read(&ssd);
    damaged[at] ^= 0x10;
    std::fs::write(&ssd, &damaged).unwrap();
    let undo = dir.path("undo");
    run(&["repair", "-C", &ssd, "-B", &hdd, "--undo-file", &undo]).ok().says(&["flipped"]);
    let export = format!("--export=nbd={}", dir.path("s"));
    Up::start(&dir, 1, &["-C", &ssd, "-B", &hdd, &export]).stop();
    let used = [read(&ssd), read(&hdd)];
    for more in [&[][..], &["--dry-run"][..]] {
        run(&[&["repair", "--undo", &undo][..], more].concat()).refused(&["since"]);
    }
    assert!([read(&ssd), read(&hdd)] == used, "nothing was written");
}

#[test]
fn a_repair_names_data_that_it_cannot_rebuild() {
    let dir = Dir::new();
    let [ssd, hdd] = dirty_files(&dir);
    let view = SetView::open(&FileSource::open(&ssd).unwrap(), Mode::Strict).unwrap();
    let leaf = view.nodes.iter().find(|n| n.level == 0 && n.live > 0).unwrap();
    let start = leaf.key.pointer().unwrap().offset().bytes() as usize;
    destroy(&ssd, start..start + 4096);
    let before = read(&ssd);
    let undo = dir.path("undo");
    let bucket = format!("bucket {} is destroyed", leaf.bucket);
    run(&["repair", "-C", &ssd, "-B", &hdd, "--undo-file", &undo]).refused(&[
        "not mended",
        &bucket,
        "remains",
    ]);
    assert!(read(&ssd) == before && !Path::new(&undo).exists());
    // Without its backing device nothing says to which set the cache device belongs.
    destroy(&ssd, 4096..8192);
    run(&["repair", "-C", &ssd, "--undo-file", &undo]).refused(&["give an attached backing device"]);
}

/// A disk that is no backing device is not overwritten by mistake.
#[test]
fn a_device_with_another_format_is_left_alone() {
    let dir = Dir::new();
    let [ssd, hdd] = dirty_files(&dir);
    destroy(&hdd, 4096..8192);
    let mut other = read(&hdd);
    other[..6].copy_from_slice(b"LUKS\xba\xbe");
    std::fs::write(&hdd, &other).unwrap();
    let repair = ["repair", "-C", &ssd, "-B", &hdd, "--undo-file", &dir.path("undo")];
    run(&repair).refused(&["holds LUKS encryption", "nothing was written"]);
    assert!(read(&hdd) == other);
    run(&[&repair[..], &["--force"]].concat()).ok().says(&["backing superblock: rebuilt from slot 0"]);
    run(&["check", &ssd, &hdd]).ok();
}

#[test]
fn a_set_that_is_served_is_left_alone() {
    let dir = Dir::new();
    let [ssd, hdd] = dirty_files(&dir);
    let export = format!("--export=nbd={}", dir.path("s"));
    let up = Up::start(&dir, 1, &["-C", &ssd, "-B", &hdd, &export]);
    for more in [&["--undo-file", "u"][..], &["--dry-run"][..]] {
        run(&[&["repair", "-C", &ssd, "-B", &hdd][..], more].concat()).refused(&["in use"]);
    }
    up.stop();
}
