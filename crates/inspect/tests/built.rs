//! Sets of every geometry, and states that no image of a real device has.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "test code")]

mod common;

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use common::build::{BACKING, Build};
use format::superblock::BackingFormat;
use format::{BackingState, BackingSuper, Bkey, CacheMode, Inode, Sector, Sectors, Uuid};
use inspect::view::SlotKind;
use inspect::{
    Attachment, CheckOptions, ExtractError, ExtractOptions, Extraction, Invariant, Mode, ReadAt, Relation,
    SetView, Severity, StreamSink, Target, check_set,
};

fn strict(cache: &dyn ReadAt) -> SetView {
    SetView::open(cache, Mode::Strict).unwrap_or_else(|e| panic!("{e}"))
}

fn backing(uuid: Uuid, set_uuid: Uuid, state: BackingState) -> BackingSuper {
    let mut sb = BackingSuper::format(&BackingFormat {
        uuid,
        set_uuid,
        device_sectors: Sectors(100_000),
        block_sectors: Sectors(1),
        bucket_sectors: Sectors(128),
        data_offset: Sector(16),
        cache_mode: CacheMode::Writeback,
        label: [0; 32],
    })
    .unwrap();
    sb.set_state(state);
    sb
}

/// From 4 KiB to 32 MiB buckets: sizes of nodes, tables and sets change twice on the way.
#[test]
fn sets_of_every_bucket_size_are_in_order() {
    for (bucket_sectors, meta, node) in
        [(8, 8, 8), (128, 128, 128), (1024, 1024, 512), (8192, 8192, 2048), (65536, 8192, 2048)]
    {
        let mut b = Build::new(bucket_sectors, 1024);
        assert_eq!((b.geometry().meta_sectors, b.geometry().node_sectors), (Sectors(meta), Sectors(node)));
        b.keys = vec![b.extent(1, 100, 4, true, b.data(0)), b.extent(1, 500, 8, false, b.data(1))];
        let mut image = b.image();
        image.write(b.data(0).offset(), &[3; 2048]);
        image.write(b.data(1).offset(), &[4; 4096]);

        let report = check_set(&image, &[], CheckOptions::default());
        assert!(report.is_ok() && report.findings.is_empty(), "{bucket_sectors}: {report}");
        let usage = report.summary.unwrap().buckets;
        assert_eq!((usage.btree, usage.uuid, usage.data), (1, 1, 2));
        assert_eq!(usage.prio, u64::from(b.geometry().prio_buckets));

        let view = strict(&image);
        let x = Extraction::new(&view, &image, Target::Volume(Inode(1)), ExtractOptions::default()).unwrap();
        let mut sink = StreamSink::new(Vec::new());
        x.run(&mut sink, &mut |_| ControlFlow::Continue(())).unwrap();
        let mut expected = vec![0; 512_000];
        expected[51_200..][..2048].fill(3);
        expected[256_000..][..4096].fill(4);
        assert!(sink.into_inner() == expected, "{bucket_sectors}");
    }
}

/// Machines with larger pages write larger prio sets into buckets above 4 MiB.
#[test]
fn prio_sets_of_other_machines() {
    for prio_sectors in [16384, 32768] {
        let mut b = Build::new(65536, 600);
        b.prio_sectors = Some(prio_sectors);
        let view = strict(&b.image());
        assert_eq!(view.prio.set_sectors, Sectors(prio_sectors));
        assert!(view.prio.complete);
    }
}

#[test]
fn entries_missing_at_the_start_are_legal_with_discard_only() {
    let mut b = Build::new(128, 1024);
    b.entries = vec![(7, 5, vec![Bkey::hole(Inode(0), Sector(100), Sectors(8))]), (8, 5, Vec::new())];
    let e = SetView::open(&b.image(), Mode::Strict).unwrap_err();
    assert_eq!(e.fatal.invariant, Invariant::JournalContiguous);
    assert!(e.to_string().contains("entries missing"), "{e}");
    b.discard = true;
    let view = strict(&b.image());
    let journal = view.journal.unwrap();
    assert_eq!((journal.missing_at_start, journal.replay.len()), (2, 2));
    assert!(check_set(&b.image(), &[], CheckOptions::default()).is_ok());
}

#[test]
fn table_of_the_first_version() {
    let b = Build::new(128, 1024);
    let mut image = b.image();
    let g = b.geometry();
    // Version 0 in the entry, and slots of half the length.
    let at = g.bucket_start(g.journal_bucket(1).unwrap());
    let mut jset = vec![0; 512];
    image.read_at(at, &mut jset).unwrap();
    jset[24..28].fill(0);
    let csum = format::checksum::crc64(&jset[8..240]);
    jset[..8].copy_from_slice(&csum.to_le_bytes());
    image.write(at, &jset);
    let table = g.bucket_start(format::BucketNr(g.first_dynamic().0 + 1));
    let mut slots = vec![0; 512];
    slots[..16].fill(7);
    slots[64..80].fill(8);
    image.write(table, &slots);
    let view = strict(&image);
    let kinds: Vec<_> = view.slots.iter().map(|(i, s)| (i.0, s.kind, s.uuid)).collect();
    assert_eq!(kinds, [(0, SlotKind::Cached, BACKING), (1, SlotKind::Cached, Uuid([8; 16]))]);
}

#[test]
fn keys_of_detached_devices_are_legal() {
    let mut b = Build::new(128, 1024);
    b.keys = vec![b.extent(2, 100, 4, true, b.data(0))];
    let image = b.image();
    let report = check_set(&image, &[], CheckOptions::default());
    assert!(report.is_ok() && report.findings.is_empty(), "{report}");
    let summary = report.summary.unwrap();
    assert_eq!((summary.devices[2].kind, summary.devices[2].dirty_sectors), ("invalidated", 4));
    let view = strict(&image);
    let error = Extraction::new(&view, &image, Target::Volume(Inode(2)), ExtractOptions::default());
    assert!(matches!(error.err(), Some(ExtractError::NotAVolume { .. })));
}

/// Every combination of state, set and slot has one attachment.
#[test]
fn every_state_set_and_slot_has_one_attachment() {
    use BackingState as S;
    let view = strict(&Build::new(128, 1024).image());
    let (ours, other, none) = (Uuid([2; 16]), Uuid([3; 16]), Uuid::NIL);
    let (known, unknown) = (BACKING, Uuid([5; 16]));
    let table = [
        (S::Clean, ours, known, Attachment::Attached),
        (S::Dirty, ours, known, Attachment::Attached),
        (S::Clean, ours, unknown, Attachment::NoSlot),
        (S::Dirty, ours, unknown, Attachment::NoSlot),
        (S::Stale, ours, known, Attachment::Invalid),
        (S::Stale, ours, unknown, Attachment::NoSlot),
        (S::None, ours, known, Attachment::Invalid),
        (S::None, none, known, Attachment::Invalid),
        (S::None, ours, unknown, Attachment::Unattached),
        (S::None, none, unknown, Attachment::Unattached),
        (S::None, other, unknown, Attachment::Unattached),
        (S::Clean, other, known, Attachment::OtherSet),
        (S::Dirty, other, unknown, Attachment::OtherSet),
        (S::Stale, other, unknown, Attachment::OtherSet),
        (S::Stale, other, known, Attachment::Invalid),
    ];
    for (state, set, uuid, attachment) in table {
        let relation = Relation::of(&view, &backing(uuid, set, state));
        assert_eq!(relation.attachment, attachment, "{state:?} {set} {uuid}");
        assert_eq!(relation.attached().is_some(), attachment == Attachment::Attached);
        assert_eq!(relation.slot, (uuid == known).then_some(Inode(0)));
    }
    // The volume's UUID is not that of a backing device.
    assert_eq!(Relation::of(&view, &backing(Uuid([8; 16]), ours, S::Clean)).attachment, Attachment::NoSlot);
}

/// 16 TiB in 4 KiB buckets, of which a few hundred KiB exist: what is said about the rest costs nothing.
#[test]
fn a_superblock_may_claim_any_size() {
    let begin = Instant::now();
    let mut b = Build::new(8, 4_000_000_000);
    b.keys = vec![b.extent(0, 100, 4, true, b.data(0)), b.extent(0, 200, 4, true, b.data(3_900_000_000))];
    let image = b.image();
    let e = SetView::open(&image, Mode::Strict).unwrap_err();
    assert_eq!(e.fatal.invariant, Invariant::PrioChain);
    let report = check_set(&image, &[], CheckOptions::default());
    assert_eq!(report.summary.unwrap().btree.dirty_extents, 2);
    let fatal: Vec<_> = report.findings.iter().filter(|f| f.severity == Severity::Fatal).collect();
    assert_eq!(fatal.len(), 1, "{fatal:?}");
    assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
}

/// Thousands of levels, or as many nodes that lie in holes: neither is followed far.
#[test]
fn trees_that_lead_nowhere() {
    let mut b = Build::new(65536, 2000);
    let g = b.geometry();
    let free = g.first_dynamic().0 + 10..g.nbuckets;
    b.keys = free
        .map(|n| {
            let ptr = format::Ptr::new(0, g.bucket_start(format::BucketNr(n)), format::Gen(0));
            Bkey::node(Inode(0), Sector(u64::from(n)), Sectors(65535), ptr)
        })
        .collect();
    let mut image = b.image();
    let begin = Instant::now();
    for (level, words) in [(1, "seq"), (60_000, "level of the root")] {
        let at = g.bucket_start(g.journal_bucket(1).unwrap());
        let mut jset = vec![0; 512];
        image.read_at(at, &mut jset).unwrap();
        jset[168..170].copy_from_slice(&u16::to_le_bytes(level));
        let csum = format::checksum::crc64(&jset[8..240]);
        jset[..8].copy_from_slice(&csum.to_le_bytes());
        image.write(at, &jset);
        let view = SetView::open(&image, Mode::BestEffort).unwrap();
        assert!(view.btree.missing > 0);
        assert!(view.findings.list().iter().any(|f| f.field == words), "{level}");
    }
    assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
}
