//! The UUID table is lost: which slot is given to which device, and what is refused. Data that only the cache has is never given to a
//! device that could have no part in it, because the device would be overwritten by it.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "test code")]

#[path = "../../inspect/tests/common/build.rs"]
#[allow(dead_code, clippy::unwrap_used, clippy::indexing_slicing, reason = "test code")]
mod build;

use std::ops::ControlFlow;

use build::{BACKING, Build};
use format::superblock::BackingFormat;
use format::uuid_table::encode_uuid_table;
use format::{BackingState, BackingSuper, CacheMode, INVALID_UUID, Inode, Sector, Sectors, Uuid, UuidEntry};
use inspect::view::SlotKind;
use inspect::{Mode, ReadAt, SetView, SliceSource, StreamSink};
use repair::{Plan, Salvage, SalvageOptions, SalvageTarget, plan};

/// Sectors of a backing device.
const DISK: u64 = 8192;
/// UUID of a second backing device.
const SECOND: Uuid = Uuid([6; 16]);

/// A set whose table is lost.
struct Lost {
    build: Build,
    /// The cache device.
    cache: Vec<u8>,
}

fn disk(uuid: Uuid, at: u32) -> UuidEntry {
    UuidEntry::backing(uuid, [0; 32], at)
}

fn volume(n: u8, at: u32) -> UuidEntry {
    UuidEntry::volume(Uuid([n; 16]), [0; 32], Sectors(4096), at)
}

fn deleted(mut entry: UuidEntry, at: u32) -> UuidEntry {
    entry.invalidate(at);
    entry
}

/// Cached data: inode, first sector, whether it is dirty, and its bytes.
type Data = (u32, u64, bool, u8);

impl Lost {
    /// A set with the data, whose table has these slots and is not damaged yet.
    fn with_table(slots: Vec<UuidEntry>, data: &[Data]) -> Lost {
        let mut build = Build::new(64, 256);
        build.slots = slots;
        let places = (0u32..).map(|n| build.data(n));
        let keys =
            data.iter().zip(places).map(|((inode, at, dirty, _), p)| build.extent(*inode, *at, 8, *dirty, p));
        build.keys = keys.collect();
        let mut image = build.image();
        for ((.., byte), n) in data.iter().zip(0..) {
            image.write(build.data(n).offset(), &[*byte; 4096]);
        }
        let mut cache = vec![0; Sectors(image.sectors).bytes() as usize];
        image.read_at(Sector(0), &mut cache).unwrap();
        Lost { build, cache }
    }

    /// The table is destroyed.
    fn new(data: &[Data]) -> Lost {
        let mut lost = Lost::with_table(vec![disk(BACKING, 1)], data);
        let view = lost.view();
        let at = view.geometry().bucket_start(view.uuid_bucket.unwrap());
        let len = view.geometry().meta_sectors.bytes() as usize;
        lost.cache[at.bytes() as usize..][..len].fill(0);
        lost
    }

    fn view(&self) -> SetView {
        SetView::open(&SliceSource::new("cache", &self.cache), Mode::Strict).unwrap()
    }

    /// A copy of the table in the n-th bucket for data.
    fn copy(mut self, n: u32, slots: &[UuidEntry]) -> Lost {
        let at = self.build.data(n).offset().bytes() as usize;
        let len = self.build.geometry().meta_sectors.bytes() as usize;
        encode_uuid_table(&mut self.cache[at..at + len], slots);
        self
    }

    fn repaired<T>(&self, backings: &[&[u8]], examine: impl FnOnce(&Plan<'_>) -> T) -> T {
        let cache = SliceSource::new("cache", &self.cache);
        let sources: Vec<SliceSource<'_>> = backings.iter().map(|b| SliceSource::new("disk", b)).collect();
        let all: Vec<&dyn ReadAt> = sources.iter().map(|s| s as &dyn ReadAt).collect();
        examine(&plan(&cache, &all, Uuid([3; 16])))
    }

    /// The reasons of a repair that is refused and changes nothing.
    fn refused(&self, backings: &[&[u8]]) -> String {
        self.repaired(backings, |plan| {
            let report = plan.report();
            assert!(plan.is_empty() && !plan.is_complete(), "{report}");
            report.refused.join("\n")
        })
    }

    /// The slots after a repair that is complete, and what is uncertain.
    fn mended(&self, backings: &[&[u8]]) -> (SetView, String) {
        self.repaired(backings, |plan| {
            let report = plan.report();
            assert!(plan.is_complete() && !plan.is_empty(), "{report}");
            let view = SetView::open(plan.cache(), Mode::Strict).unwrap();
            (view, report.steps.iter().flat_map(|s| s.uncertain.clone()).collect::<Vec<_>>().join("\n"))
        })
    }
}

/// A backing device of the set that is full of one byte.
fn device(uuid: Uuid, state: BackingState, byte: u8) -> Vec<u8> {
    let mut superblock = BackingSuper::format(&BackingFormat {
        uuid,
        set_uuid: Uuid([2; 16]),
        device_sectors: Sectors(DISK),
        block_sectors: Sectors(1),
        bucket_sectors: Sectors(64),
        data_offset: Sector(16),
        cache_mode: CacheMode::Writeback,
        label: [0; 32],
    })
    .unwrap();
    superblock.set_state(state);
    let mut image = vec![byte; Sectors(DISK).bytes() as usize];
    image[4096..8192].copy_from_slice(&superblock.encode());
    image
}

fn kind(view: &SetView, inode: u32) -> (SlotKind, Uuid) {
    let slot = &view.slots[&Inode(inode)];
    (slot.kind, slot.uuid)
}

/// Volume A was made and deleted. Volume B has dirty data where the disk has other data.
#[test]
fn a_copy_with_a_deleted_volume_counts() {
    let slots = |now| vec![disk(BACKING, now), deleted(volume(8, 2), 3), volume(9, 4)];
    let lost = Lost::new(&[(2, 2064, true, b'B')]).copy(50, &slots(5));
    let (view, _) = lost.mended(&[&device(BACKING, BackingState::Clean, b'D')]);
    assert_eq!(kind(&view, 0), (SlotKind::Cached, BACKING));
    assert_eq!(kind(&view, 1), (SlotKind::Invalidated, INVALID_UUID));
    assert_eq!(kind(&view, 2), (SlotKind::Volume(Sectors(4096)), Uuid([9; 16])));
}

/// As above, and no copy is left: the volume was given to the disk, and its data was written over that of the disk.
#[test]
fn dirty_data_is_not_given_to_a_clean_device() {
    let lost = Lost::new(&[(2, 2064, true, b'B')]);
    let why = lost.refused(&[&device(BACKING, BackingState::Clean, b'D')]);
    assert!(why.contains("slot 2 has data and no device") && why.contains("the device is clean"), "{why}");
    // Some clean data that is equal by chance changes nothing.
    let lost = Lost::new(&[(2, 2064, true, b'B'), (2, 4096, false, b'D')]);
    let why = lost.refused(&[&device(BACKING, BackingState::Clean, b'D')]);
    assert!(why.contains("clean data that is on backing device"), "{why}");
}

#[test]
fn nothing_is_certain_of_a_disk_whose_slot_is_not_known() {
    let lost = Lost::new(&[(2, 2064, true, b'B')]);
    let backing = device(BACKING, BackingState::Clean, b'D');
    lost.repaired(&[&backing], |plan| {
        let options = SalvageOptions { trust_journal_end: true, ..SalvageOptions::default() };
        let salvage = Salvage::new(plan, SalvageTarget::Backing(0), options).unwrap();
        let mut sink = StreamSink::new(Vec::new());
        let done = salvage.run(&mut sink, &mut |_| Ok(()), &mut |_| ControlFlow::Continue(())).unwrap();
        assert_eq!((done.certain.sectors, done.uncertain.sectors), (0, DISK - 16), "{done}");
    });
}

#[test]
fn the_last_data_is_that_of_the_last_dirty_device() {
    let lost = Lost::new(&[(0, 2064, true, b'B')]);
    let (view, uncertain) = lost.mended(&[&device(BACKING, BackingState::Dirty, b'D')]);
    assert_eq!(kind(&view, 0), (SlotKind::Cached, BACKING));
    assert!(uncertain.contains("no clean data confirms"), "{uncertain}");
    // Data before that of the device, or behind its end, cannot be its data.
    for (at, why) in [(8, "begins at sector 8"), (DISK, "reaches to sector 8200")] {
        let lost = Lost::new(&[(0, at, true, b'B')]);
        let refused = lost.refused(&[&device(BACKING, BackingState::Dirty, b'D')]);
        assert!(refused.contains(why), "{refused}");
    }
    // Nor is it known whose it is if another device has no slot either.
    let second = device(SECOND, BackingState::Clean, b'E');
    let why = lost.refused(&[&device(BACKING, BackingState::Dirty, b'D'), &second]);
    assert!(why.contains("several slots or devices are left"), "{why}");
}

/// The copy is from before the disk was attached. All data of the disk is written back, and its state is still dirty.
#[test]
fn data_of_a_volume_is_not_given_to_a_dirty_device() {
    let lost = Lost::new(&[(0, 2064, true, b'B')]).copy(50, &[volume(9, 1)]);
    let why = lost.refused(&[&device(BACKING, BackingState::Dirty, b'D')]);
    assert!(why.contains("flash-only volume"), "{why}");
}

#[test]
fn clean_data_says_which_device_has_which_slot() {
    let lost = Lost::new(&[(0, 2064, false, b'D'), (1, 2064, false, b'E'), (1, 4096, true, b'x')]);
    let first = device(BACKING, BackingState::Clean, b'D');
    let second = device(SECOND, BackingState::Dirty, b'E');
    for backings in [[&first[..], &second], [&second, &first]] {
        let (view, uncertain) = lost.mended(&backings);
        assert_eq!(kind(&view, 0), (SlotKind::Cached, BACKING));
        assert_eq!(kind(&view, 1), (SlotKind::Cached, SECOND));
        assert!(!uncertain.contains("confirms"), "{uncertain}");
    }
    // A clone has the same data.
    let clone = device(SECOND, BackingState::Dirty, b'D');
    let why = lost.refused(&[&first, &clone]);
    assert!(why.contains("clean data fits several"), "{why}");
}

/// Both copies have two slots. The newer one has volume B in the slot that A had.
#[test]
fn the_newest_copy_counts() {
    let older = [disk(BACKING, 1), volume(8, 2)];
    let newer = [disk(BACKING, 1), volume(9, 20)];
    for (first, second) in [(&older, &newer), (&newer, &older)] {
        let lost = Lost::new(&[(1, 2064, true, b'B')]).copy(50, first).copy(51, second);
        let (view, _) = lost.mended(&[&device(BACKING, BackingState::Clean, b'D')]);
        assert_eq!(kind(&view, 1).1, Uuid([9; 16]));
    }
}

/// Clients decide about the bytes of data.
#[test]
fn data_is_no_copy_of_the_table() {
    let data = [(1, 1024, true, b'B'), (1, 2064, true, b'x')];
    let lost = Lost::new(&data).copy(50, &[disk(BACKING, 1), volume(9, 2)]);
    let lost = lost.copy(1, &[disk(Uuid([5; 16]), 3), disk(BACKING, 1 << 30)]);
    let (view, _) = lost.mended(&[&device(BACKING, BackingState::Clean, b'D')]);
    assert_eq!(kind(&view, 1), (SlotKind::Volume(Sectors(4096)), Uuid([9; 16])));
}

/// After the copy was made, the disk was detached and attached again, and volume C has its old slot.
#[test]
fn a_slot_of_an_older_copy_is_not_given_to_a_device_that_contradicts_it() {
    let lost = Lost::new(&[(0, 2064, true, b'C')]).copy(50, &[disk(BACKING, 1)]);
    let why = lost.refused(&[&device(BACKING, BackingState::Clean, b'D')]);
    assert!(why.contains("slot 0 has data and no device"), "{why}");
    let lost = Lost::new(&[(0, 2064, false, b'C'), (1, 4096, true, b'D')]).copy(50, &[disk(BACKING, 1)]);
    let why = lost.refused(&[&device(BACKING, BackingState::Dirty, b'D')]);
    assert!(why.contains("several slots or devices are left (0, 1)"), "{why}");
}

/// After the copy was made, volume B got the slot of the deleted volume A.
#[test]
fn dirty_data_of_a_slot_that_was_free_is_not_dropped() {
    let lost = Lost::new(&[(1, 2064, true, b'B')]).copy(50, &[disk(BACKING, 1), deleted(volume(8, 2), 3)]);
    let why = lost.refused(&[&device(BACKING, BackingState::Clean, b'D')]);
    assert!(why.contains("slot 1 has 8 dirty sectors, and was free"), "{why}");
}

/// All dirty data counts as that of the slots that are known: that of a dirty device is among it, or lost.
#[test]
fn a_dirty_device_gets_no_empty_slot() {
    let lost = Lost::new(&[(1, 2064, true, b'B')]).copy(50, &[disk(BACKING, 1), volume(9, 2)]);
    let (first, second) =
        (device(BACKING, BackingState::Clean, b'D'), device(SECOND, BackingState::Dirty, b'E'));
    let why = lost.refused(&[&first, &second]);
    assert!(why.contains("is dirty, and no slot with data is left"), "{why}");
}

/// A crash between the two writes of a detach leaves a clean device whose slot is invalid. It gets a new slot.
#[test]
fn an_intact_table_without_a_clean_device_is_not_replaced() {
    let lost = Lost::with_table(vec![deleted(disk(BACKING, 1), 5), volume(9, 4)], &[(1, 2064, true, b'B')]);
    let lost = lost.copy(50, &[disk(BACKING, 1)]);
    lost.repaired(&[&device(BACKING, BackingState::Clean, b'D')], |plan| {
        assert!(plan.is_empty() && plan.is_complete(), "{}", plan.report());
    });
}

/// One bit of the UUID of the disk. The copy is from before the volume was made.
#[test]
fn one_bit_of_a_slot_does_not_cost_the_others() {
    let mut wrong = disk(BACKING, 1);
    wrong.uuid.0[3] ^= 4;
    let lost = Lost::with_table(vec![wrong, volume(9, 4)], &[(0, 2064, true, b'B')]);
    let lost = lost.copy(50, &[disk(BACKING, 1)]);
    let (view, _) = lost.mended(&[&device(BACKING, BackingState::Dirty, b'D')]);
    assert_eq!(kind(&view, 0), (SlotKind::Cached, BACKING));
    assert_eq!(kind(&view, 1), (SlotKind::Volume(Sectors(4096)), Uuid([9; 16])));
}

/// The slot has dirty data alone, which is on no other device.
#[test]
fn one_of_several_devices_without_a_superblock_is_not_guessed() {
    let lost = Lost::with_table(vec![disk(BACKING, 1)], &[(0, 2064, true, b'B')]);
    let blank = vec![0; Sectors(DISK).bytes() as usize];
    let why = lost.refused(&[&blank, &blank]);
    assert!(why.contains("several devices have no superblock"), "{why}");
    // The slot comes from a copy, so it may be that of another device.
    let lost = Lost::new(&[(0, 2064, true, b'B'), (1, 2064, false, b'E')])
        .copy(50, &[disk(BACKING, 1), disk(SECOND, 1)]);
    lost.repaired(&[&device(SECOND, BackingState::Clean, b'E'), &blank], |plan| {
        let report = plan.report();
        assert!(report.refused.iter().any(|why| why.contains("rebuilt from an older copy")), "{report}");
        assert!(!plan.backings()[1].is_changed());
    });
}
