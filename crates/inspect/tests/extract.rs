//! Contents of cached devices and volumes.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "test code")]

mod common;

use std::ops::ControlFlow;

use common::{ALL, backing, backing_source, cache, cache_source, expected, open, sha256};
use format::Inode;
use inspect::extract::Extracted;
use inspect::{DamagedDirty, ExtractOptions, Extraction, StreamSink, Target};

fn run(extraction: &Extraction<'_>) -> (Vec<u8>, Extracted) {
    let mut sink = StreamSink::new(Vec::new());
    let result = extraction.run(&mut sink, &mut |_| ControlFlow::Continue(())).unwrap();
    let bytes = sink.into_inner();
    assert_eq!(bytes.len() as u64, extraction.sectors().bytes());
    (bytes, result)
}

/// What the kernel returned for each device.
#[test]
fn every_byte_is_what_the_kernel_returned() {
    for dir in ALL {
        let (cache, backing) = (cache(dir), backing(dir));
        let view = open(&cache);
        let (cache, backing) = (cache_source(&cache), backing_source(&backing));
        let expected = expected(dir);
        let Some(devices) = expected["devices"].as_array() else {
            let x =
                Extraction::new(&view, &cache, Target::Cached(&backing), ExtractOptions::default()).unwrap();
            let digest = sha256(&run(&x).0);
            assert_eq!(digest, "322f1c0859f7a5b12e9c6e5bdb484f61edb0411479eb599f7012a8dc85583664", "{dir}");
            continue;
        };
        for device in devices {
            let target = match device["kind"].as_str().unwrap() {
                "volume" => Target::Volume(Inode(device["inode"].as_u64().unwrap() as u32)),
                _ => Target::Cached(&backing),
            };
            let x = Extraction::new(&view, &cache, target, ExtractOptions::default()).unwrap();
            let (bytes, result) = run(&x);
            assert_eq!(sha256(&bytes), device["sha256"].as_str().unwrap(), "{dir}");
            assert_eq!(result.sectors, device["sectors"].as_u64().unwrap(), "{dir}");
            assert_eq!(result.dirty_sectors, device["dirty_sectors"].as_u64().unwrap(), "{dir}");
            assert_eq!(result.clean_sectors, device["clean_sectors"].as_u64().unwrap(), "{dir}");
            assert_eq!(
                result.sectors,
                result.dirty_sectors + result.clean_sectors + result.backing_sectors + result.zero_sectors
            );
            assert_eq!((result.lost_sectors, result.lost.len(), result.notes.len()), (0, 0, 0));
        }
    }
}

use common::edit::Edit;
use format::{Bkey, Gen, Ptr, Sector, Sectors};
use inspect::source::ReadFailure;
use inspect::{ExtractError, FileSink, Mode, ReadAt, ReadError, SetView, SliceSource};

const BEST: ExtractOptions =
    ExtractOptions { dirty_only: false, best_effort: true, damaged: DamagedDirty::Zeros };

/// The error of a plain extraction of the cached device, and the contents and result of a best effort.
fn both(e: &Edit) -> (ExtractError, Vec<u8>, Extracted) {
    let (cache, backing) = (cache_source(&e.cache), backing_source(&e.backing));
    let view = SetView::open(&cache, Mode::BestEffort).unwrap();
    let plain = Extraction::new(&view, &cache, Target::Cached(&backing), ExtractOptions::default());
    let error = plain.err().expect("an error");
    println!("{error}");
    let (bytes, result) = run(&Extraction::new(&view, &cache, Target::Cached(&backing), BEST).unwrap());
    (error, bytes, result)
}

const DIR: &str = "04-writeback-killed";

fn set_state(e: &mut Edit, state: u64) {
    e.backing_superblock(|sb| sb.flags = ((sb.flags.get() & !(3 << 61)) | (state << 61)).into());
}

#[test]
fn invalid_slots_are_refused_with_numbers() {
    for (state, name) in [(0, "no cache"), (3, "inconsistent")] {
        let mut e = Edit::new(DIR);
        set_state(&mut e, state);
        let (error, bytes, result) = both(&e);
        let text = error.to_string();
        assert!(
            matches!(error, ExtractError::InvalidSlot { dirty_sectors: 5997, clean_sectors: 5, .. }),
            "{text}"
        );
        assert!(text.contains(name) && text.contains("5997 dirty and 5 clean sectors of slot 0"), "{text}");
        assert_eq!(bytes, e.backing[16 * 512..]);
        assert_eq!((result.dirty_sectors, &result.notes), (0, &vec![text]));
    }
}

#[test]
fn devices_of_other_sets_are_refused() {
    let mut e = Edit::new(DIR);
    e.backing_superblock(|sb| sb.set_uuid[0] ^= 1);
    let (error, bytes, _) = both(&e);
    assert!(
        error.to_string().contains("found one of set a24b4015-5dde-48e2-8161-814abb8df8fe (state dirty)"),
        "{error}"
    );
    assert_eq!(bytes, e.backing[16 * 512..]);
    let mut e = Edit::new(DIR);
    e.backing_superblock(|sb| sb.uuid[0] ^= 1);
    assert!(matches!(both(&e).0, ExtractError::NoSlot { state: "dirty", .. }));
    // Clean: complete without the cache.
    set_state(&mut e, 1);
    let (cache, backing) = (cache_source(&e.cache), backing_source(&e.backing));
    let x = Extraction::new(&e.view, &cache, Target::Cached(&backing), ExtractOptions::default()).unwrap();
    assert!(run(&x).1.notes[0].contains("has nothing in cache"));
}

#[test]
fn without_the_backing_device() {
    let e = Edit::new(DIR);
    let cache = cache_source(&e.cache);
    let target = Target::without_backing(Inode(0));
    let error = Extraction::new(&e.view, &cache, target, ExtractOptions::default()).err().unwrap();
    assert!(
        error
            .to_string()
            .contains("945cfb77-beed-47ba-922a-d07f1eb0a9c5, found none: only 5997 dirty and 5 clean"),
        "{error}"
    );
    let (bytes, result) = run(&Extraction::new(&e.view, &cache, target, BEST).unwrap());
    assert_eq!((result.dirty_sectors, result.clean_sectors), (5997, 5));
    let backing = backing_source(&e.backing);
    let whole = run(&Extraction::new(&e.view, &cache, Target::Cached(&backing), BEST).unwrap()).0;
    for (piece, _) in e.view.live(Inode(0)) {
        let range = (piece.start.0 as usize - 16) * 512..(piece.end().0 as usize - 16) * 512;
        assert_eq!(bytes[range.clone()], whole[range]);
    }
    let none = Extraction::new(&e.view, &cache, Target::without_backing(Inode(9)), BEST);
    assert!(matches!(none.err(), Some(ExtractError::NothingInSlot { .. })));
}

#[test]
fn volumes_and_cached_devices_are_not_confused() {
    let e = Edit::new("06-volume-and-backing-killed");
    let cache = cache_source(&e.cache);
    for (target, words) in [
        (Target::Volume(Inode(1)), "found a cached device"),
        (Target::Volume(Inode(5)), "volumes are in [0]), found nothing"),
        (Target::Cached(&cache), "found a cache device"),
    ] {
        let error = Extraction::new(&e.view, &cache, target, BEST).err().unwrap();
        assert!(error.to_string().contains(words), "{error}");
    }
    let nothing = vec![0; 1 << 20];
    let nothing = SliceSource::new("nothing", &nothing);
    let error = Extraction::new(&e.view, &cache, Target::Cached(&nothing), BEST).err().unwrap();
    assert!(error.to_string().contains("not a bcache device"), "{error}");
}

/// The six clean extents of this image that are older or newer than the backing device.
#[test]
fn dirty_only_leaves_clean_extents_alone() {
    let e = Edit::new("07-busy-killed");
    let (cache, backing) = (cache_source(&e.cache), backing_source(&e.backing));
    let options = ExtractOptions { dirty_only: true, ..ExtractOptions::default() };
    let (bytes, result) = run(&Extraction::new(&e.view, &cache, Target::Cached(&backing), options).unwrap());
    assert_eq!(bytes, e.backing[16 * 512..]);
    assert_eq!((result.dirty_sectors, result.clean_sectors), (0, 0));
}

#[test]
fn dirty_data_outside_the_device() {
    let mut e = Edit::new(DIR);
    e.backing_superblock(|sb| {
        sb.version = 4.into();
        sb.nbuckets = 32.into();
    });
    let (error, bytes, _) = both(&e);
    assert!(
        matches!(error, ExtractError::OutsideDevice { at: Sector(25), first: Sector(32), .. }),
        "{error}"
    );
    let whole = {
        let e = Edit::new(DIR);
        let (cache, backing) = (cache_source(&e.cache), backing_source(&e.backing));
        run(&Extraction::new(&e.view, &cache, Target::Cached(&backing), BEST).unwrap()).0
    };
    assert_eq!(bytes, whole[16 * 512..]);
}

#[test]
fn dirty_data_with_invalid_pointers() {
    let mut e = Edit::new(DIR);
    let bad = Ptr::new(0, Sector(1 << 40), Gen(0));
    e.append_set(inspect::NodeId(0), &[Bkey::extent(Inode(0), Sector(408), Sectors(8), true, bad)]);
    let (error, _, result) = both(&e);
    assert!(
        matches!(error, ExtractError::InvalidPointer { dirty_sectors: 8, at: Sector(400), .. }),
        "{error}"
    );
    assert_eq!(result.notes.len(), 1);
}

#[test]
fn damaged_sets_need_best_effort() {
    let mut e = Edit::new(DIR);
    let last = e.view.nodes[0].bsets.len() - 1;
    let at = e.set_byte(inspect::NodeId(0), last, 40);
    e.cache[at] ^= 1;
    let (error, _, result) = both(&e);
    assert!(matches!(error, ExtractError::Damaged { .. }), "{error}");
    assert!(result.notes[0].contains("the first 11 bsets"), "{:?}", result.notes);
}

#[test]
fn impossible_sizes_are_refused() {
    let mut e = Edit::new("06-volume-and-backing-killed");
    e.slot(0, |slot| slot.sectors = Sectors(u64::MAX));
    let cache = cache_source(&e.cache);
    let view = SetView::open(&cache, Mode::BestEffort).unwrap();
    let error = Extraction::new(&view, &cache, Target::Volume(Inode(0)), BEST).err().unwrap();
    assert!(matches!(error, ExtractError::TooLarge { .. }), "{error}");
}

/// A device of which a range cannot be read.
struct BadSectors<'a> {
    good: SliceSource<'a>,
    bad: std::ops::Range<u64>,
}

impl ReadAt for BadSectors<'_> {
    fn read_at(&self, at: Sector, into: &mut [u8]) -> Result<(), ReadError> {
        let sectors = Sectors::from_bytes_ceil(into.len() as u64);
        if at.0 < self.bad.end && at.0 + sectors.0 > self.bad.start {
            let reason = ReadFailure::Io(std::io::Error::from_raw_os_error(5));
            return Err(ReadError { device: self.name().into(), at, sectors, reason });
        }
        self.good.read_at(at, into)
    }
    fn sectors(&self) -> Sectors {
        self.good.sectors()
    }
    fn name(&self) -> &str {
        self.good.name()
    }
}

#[test]
fn bad_sectors_cost_no_more_than_themselves() {
    let dir = "03-writeback-clean-stop";
    let e = Edit::new(dir);
    let backing = backing_source(&e.backing);
    let whole = {
        let cache = cache_source(&e.cache);
        run(&Extraction::new(&e.view, &cache, Target::Cached(&backing), BEST).unwrap()).0
    };
    // A whole bucket of clean and dirty data.
    let bucket = e.view.gens.bucket_of(e.extent(0, true, 1).ptr, Sectors(1)).unwrap();
    let start = e.view.geometry().bucket_start(bucket).0;
    let cache = BadSectors { good: cache_source(&e.cache), bad: start..start + 128 };
    let plain =
        Extraction::new(&e.view, &cache, Target::Cached(&backing), ExtractOptions::default()).unwrap();
    let error =
        plain.run(&mut StreamSink::new(std::io::sink()), &mut |_| ControlFlow::Continue(())).unwrap_err();
    assert!(error.to_string().contains("cannot read") && error.to_string().contains("os error 5"), "{error}");
    let (bytes, result) = run(&Extraction::new(&e.view, &cache, Target::Cached(&backing), BEST).unwrap());
    let dirty_there: u64 = (e.view.live(Inode(0)))
        .filter(|(p, kind)| {
            *kind == inspect::PieceKind::Dirty && (start..start + 128).contains(&p.ptr.unwrap().offset().0)
        })
        .map(|(p, _)| p.len.0)
        .sum();
    assert!(dirty_there > 0);
    assert_eq!(result.lost_sectors, dirty_there);
    assert_eq!(result.lost.iter().map(|l| l.sectors).sum::<u64>(), dirty_there);
    let differing = bytes.chunks(512).zip(whole.chunks(512)).filter(|(a, b)| a != b).count() as u64;
    assert!(differing <= dirty_there, "{differing} of {dirty_there}");

    // Inside a range that is not cached.
    let live: Vec<_> = e.view.live(Inode(0)).map(|(piece, _)| *piece).collect();
    let gap = live.windows(2).find(|w| w[1].start.0 - w[0].end().0 >= 8).unwrap()[0].end().0;
    let backing = BadSectors { good: backing_source(&e.backing), bad: gap + 3..gap + 6 };
    let cache = cache_source(&e.cache);
    let (bytes, result) = run(&Extraction::new(&e.view, &cache, Target::Cached(&backing), BEST).unwrap());
    assert_eq!((result.lost_sectors, bytes.len()), (8, whole.len()));
    assert!(result.lost[0].reason.contains("backing: cannot read"), "{:?}", result.lost);
}

#[test]
fn output_files_keep_holes_and_extraction_can_be_stopped() {
    use std::os::unix::fs::MetadataExt;
    let e = Edit::new("06-volume-and-backing-killed");
    let cache = cache_source(&e.cache);
    let x = Extraction::new(&e.view, &cache, Target::Volume(Inode(0)), ExtractOptions::default()).unwrap();
    let file = tempfile::NamedTempFile::new().unwrap();
    let mut seen = Vec::new();
    let mut sink = FileSink::new(file.reopen().unwrap());
    x.run(&mut sink, &mut |p| {
        seen.push(p.done.0);
        assert_eq!(p.total, Sectors(8192));
        ControlFlow::Continue(())
    })
    .unwrap();
    assert!(seen.is_sorted() && seen.last() == Some(&8192));
    assert_eq!(std::fs::read(file.path()).unwrap(), run(&x).0);
    // 3042 sectors are written; the rest are holes.
    assert!(file.path().metadata().unwrap().blocks() < 6000);

    let mut calls = 0;
    let error = x.run(&mut StreamSink::new(std::io::sink()), &mut |_| {
        calls += 1;
        if calls == 3 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    assert!(matches!(error, Err(ExtractError::Cancelled { .. })));
    assert_eq!(calls, 3);
}

/// Through files, as the command does it: holes of the backing image are skipped, not read.
#[test]
fn images_in_files() {
    use inspect::FileSource;
    use std::os::unix::fs::FileExt;
    let e = Edit::new(DIR);
    let sparse = |bytes: &[u8]| {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(bytes.len() as u64).unwrap();
        for (n, block) in bytes.chunks(4096).enumerate().filter(|(_, b)| b.iter().any(|&b| b != 0)) {
            file.as_file().write_all_at(block, n as u64 * 4096).unwrap();
        }
        file
    };
    let (cache, backing) = (sparse(&e.cache), sparse(&e.backing));
    let (cache, backing) =
        (FileSource::open(cache.path()).unwrap(), FileSource::open(backing.path()).unwrap());
    let view = SetView::open(&cache, Mode::Strict).unwrap();
    let x = Extraction::new(&view, &cache, Target::Cached(&backing), ExtractOptions::default()).unwrap();
    let output = tempfile::NamedTempFile::new().unwrap();
    let mut sink = FileSink::new(output.reopen().unwrap());
    let result = x.run(&mut sink, &mut |_| ControlFlow::Continue(())).unwrap();
    let digest = sha256(&std::fs::read(output.path()).unwrap());
    assert_eq!(digest, expected(DIR)["devices"][0]["sha256"].as_str().unwrap());
    // Only a file system without holes makes this zero.
    println!("{} of {} sectors are holes", result.zero_sectors, result.sectors);
    assert_eq!(
        result.sectors,
        result.dirty_sectors + result.clean_sectors + result.backing_sectors + result.zero_sectors
    );
}
