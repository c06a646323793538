//! Tests of footers whose requests are slow: the bucket, or the footer on the device, changes meanwhile.

use format::superblock::CacheFormat;
use format::{CacheSuper, FooterKey, Inode, Replacement, Sector, Uuid};
use io::{Disk, Handle, Nanos, WriteFlags};

use super::super::{SumsTable, Verdict};
use super::*;
use crate::alloc::Allocator;
use crate::data::DamagedBlock;
use crate::device::BackingDevice;
use crate::index::{Durability, Kind};
use crate::set::{CacheSet, SetOptions};
use crate::testing::{TestDisk, Watching, backing_device, backing_device_of, components, run};
use crate::tunables::Overwrite;
use crate::volume::{Cache, Volume};

/// Sectors of data in a bucket of 16 sectors.
const DATA: Sectors = Sectors(15);

/// A set with checksums, and a volume whose dirty data stays in the cache.
struct Fixture {
    device: Rc<Watching>,
    cache: Rc<Cache>,
    volume: Rc<Volume>,
    inode: Inode,
}

impl Fixture {
    async fn open(rt: &Handle) -> Fixture {
        let backing = backing_device(&TestDisk::new(8192), rt);
        Fixture::of(rt, (Sectors(1), Sectors(16)), backing, SetOptions::default()).await
    }

    /// A set with blocks and buckets of these sizes, and one volume.
    async fn of(
        rt: &Handle,
        (block_sectors, bucket_sectors): (Sectors, Sectors),
        backing: Rc<BackingDevice>,
        options: SetOptions,
    ) -> Fixture {
        let device = Watching::new(16_384);
        let disk = Disk::new(device.clone(), rt.clone());
        let superblock = CacheSuper::format(&CacheFormat {
            uuid: Uuid([1; 16]),
            set_uuid: Uuid([7; 16]),
            device_sectors: disk.info().sectors,
            block_sectors,
            bucket_sectors,
            replacement: Replacement::Lru,
            discard: false,
        });
        let mut superblock = superblock.unwrap();
        superblock.set_checksum_key(Some(FooterKey(7)));
        disk.write(Sector(8), rt.pool().copy_of(&superblock.encode()), true).await.unwrap();
        let set = CacheSet::open(disk, options).await.unwrap();
        let volume = set.attached(backing).await.unwrap();
        volume.settings_mut().writeback_running = false;
        let (cache, inode) = (components(set, rt), volume.inode().unwrap());
        rt.sleep(Nanos::from_secs(60)).await;
        Fixture { device, cache, volume, inode }
    }

    /// Writes dirty data to the cache; returns its place.
    async fn write(&self, rt: &Handle, start: u64, sectors: Sectors, byte: u8) -> Ptr {
        let data = rt.pool().copy_of(&vec![byte; sectors.bytes() as usize]);
        self.volume.write(Sector(start), sectors, data, 0, WriteFlags::default()).await.unwrap();
        let at = self.volume.backing().unwrap().data_offset() + Sectors(start);
        match self.cache.index.segment(self.inode, at, at + sectors).unwrap().kind {
            Kind::Hit { ptr, .. } => ptr,
            Kind::Hole { .. } => panic!("the data is not cached"),
        }
    }

    /// Begins to overwrite all data of a bucket in place.
    async fn begin_overwrite(&self, ptr: Ptr, byte: u8) -> bool {
        self.cache.data.begin_overwrite(ptr, &vec![byte; DATA.bytes() as usize]).await
    }

    /// Overwrites all data of a bucket in place, after `begin_overwrite`.
    async fn overwrite(&self, rt: &Handle, ptr: Ptr, byte: u8) {
        let new = rt.pool().copy_of(&vec![byte; DATA.bytes() as usize]);
        let written = self.cache.device.disk().write(ptr.offset(), new, false).await;
        self.cache.data.end_overwrite(ptr, DATA, &written, false);
    }

    /// Makes all data of the volume a hole.
    async fn drop_data(&self) {
        let all = (Sector(16), Sector(1016));
        self.cache.index.change(self.inode, all.0, all.1, None, Durability::Journaled).await.unwrap();
    }

    fn is_reclaimable(&self, ptr: Ptr) -> bool {
        let buckets = Allocator::buckets(&self.cache.alloc);
        buckets.is_reclaimable(buckets.bucket_of(ptr))
    }

    fn sums(&self) -> &Checksums {
        self.cache.data.sums.as_ref().unwrap()
    }

    /// Forgets all checksums. From now on the table has those of one bucket at most.
    fn forget(&self) {
        let (geometry, layout) = (self.cache.geometry, self.sums().layout);
        *self.sums().table.borrow_mut() = SumsTable::with_limit(&geometry, &layout, 1).unwrap();
    }

    fn has_sums(&self, ptr: Ptr) -> bool {
        self.sums().table.borrow_mut().of_ptr(ptr).is_some()
    }

    /// Compares the data of a bucket with its checksums.
    async fn verify(&self, ptr: Ptr, byte: u8) -> Verdict {
        let data = vec![byte; DATA.bytes() as usize];
        self.cache.data.verify(ptr, &data, self.cache.data.read_token()).await
    }

    /// Starts such a comparison. The device has read the footer of the bucket, and has not answered yet.
    async fn verify_late(&self, rt: &Handle, ptr: Ptr, byte: u8) -> io::JoinHandle<Verdict> {
        self.device.disk().answer_late(1);
        let (data, token) = (self.cache.data.clone(), self.cache.data.read_token());
        let verifying = rt.spawn(async move {
            let bytes = vec![byte; DATA.bytes() as usize];
            data.verify(ptr, &bytes, token).await
        });
        self.device.disk().late(1, rt).await;
        verifying
    }
}

/// The data of the bucket is dropped during the write of its footer. The bucket gets no other use before the write has ended,
/// which would otherwise put a footer into a node of the index, for example.
#[test]
fn a_bucket_whose_footer_is_being_written_is_not_reused() {
    run(|rt| async move {
        let f = Fixture::open(&rt).await;
        let ptr = f.write(&rt, 0, Sectors(8), 1).await;
        f.device.disk().hold(true);
        f.cache.alloc.close_all();
        f.device.disk().held(1, &rt).await;
        f.drop_data().await;
        assert!(!f.is_reclaimable(ptr));
        f.device.disk().hold(false);
        rt.sleep(Nanos::from_secs(1)).await;
        assert!(f.is_reclaimable(ptr));
        assert_eq!(f.cache.data.counters().footers_written, 1);
    });
}

#[test]
fn a_bucket_whose_footer_is_being_replaced_is_not_reused() {
    run(|rt| async move {
        let f = Fixture::open(&rt).await;
        let ptr = f.write(&rt, 0, DATA, 1).await;
        rt.sleep(Nanos::from_secs(1)).await;
        assert_eq!(f.cache.data.counters().footers_written, 1);
        f.device.disk().hold(true);
        let (data, began) = (f.cache.data.clone(), f.cache.data.read_token());
        let found = [ReadSum { at: ptr, sum: 77, began }];
        let learning = rt.spawn(async move { data.learn(&found, true).await });
        f.device.disk().held(1, &rt).await;
        f.drop_data().await;
        assert!(!f.is_reclaimable(ptr));
        f.device.disk().hold(false);
        assert_eq!(learning.await.unwrap(), 1);
        assert!(f.is_reclaimable(ptr));
        assert_eq!(f.cache.data.counters().footers_written, 2);
    });
}

/// A footer is read, and replaced by zeros before its reader gets it, because data is overwritten. The table has no room for the
/// checksums meanwhile. Those of the old footer must not count for the new data.
#[test]
fn a_footer_that_was_read_before_it_was_replaced_by_zeros_is_not_used() {
    run(|rt| async move {
        let f = Fixture::open(&rt).await;
        let (one, other) = (f.write(&rt, 0, DATA, 1).await, f.write(&rt, 100, DATA, 2).await);
        rt.sleep(Nanos::from_secs(1)).await;
        assert_eq!(f.cache.data.counters().footers_written, 2);
        f.forget();
        let late = f.verify_late(&rt, one, 1).await;
        assert!(f.begin_overwrite(one, 3).await);
        f.overwrite(&rt, one, 3).await;
        assert_eq!(f.verify(other, 2).await, Verdict::Verified);
        assert!(!f.has_sums(one), "the table has room for one bucket");
        f.device.disk().answer();
        late.await;
        assert_eq!(f.verify(one, 3).await, Verdict::Unverified);
        let counters = f.cache.data.counters();
        assert_eq!((counters.footers_written, counters.footers_read, counters.footers_erased), (2, 4, 1));
    });
}

/// The operator accepts a damaged block while its footer is being read, so the footer on the device gets another checksum.
#[test]
fn a_footer_that_was_read_before_it_was_replaced_is_not_used() {
    run(|rt| async move {
        let f = Fixture::open(&rt).await;
        let (one, other) = (f.write(&rt, 0, DATA, 1).await, f.write(&rt, 100, DATA, 2).await);
        rt.sleep(Nanos::from_secs(1)).await;
        f.forget();
        let late = f.verify_late(&rt, one, 1).await;
        assert_eq!(f.verify(one, 1).await, Verdict::Verified);
        let accepted = [ReadSum { at: one, sum: 77, began: f.cache.data.read_token() }];
        assert_eq!(f.cache.data.learn(&accepted, true).await.unwrap(), 1);
        assert_eq!(f.verify(other, 2).await, Verdict::Verified);
        assert!(!f.has_sums(one), "the table has room for one bucket");
        f.device.disk().answer();
        late.await;
        assert!(matches!(f.verify(one, 1).await, Verdict::Damaged(m) if m.expected == 77));
        assert!(f.cache.data.has_sum(one, 77) && !f.cache.data.has_sum(one, 78));
    });
}

#[test]
fn a_bucket_without_live_data_gets_no_footer() {
    run(|rt| async move {
        let f = Fixture::open(&rt).await;
        let ptr = f.write(&rt, 0, Sectors(8), 1).await;
        f.drop_data().await;
        f.cache.alloc.close_all();
        rt.sleep(Nanos::from_secs(1)).await;
        assert_eq!(f.cache.data.counters().footers_written, 0);
        assert!(!f.has_sums(ptr));
    });
}

/// An overwriting in place replaces the footer by zeros. The next footer is written at the stop, not when the bucket is idle.
#[test]
fn a_bucket_that_was_reopened_gets_its_footer_at_the_stop() {
    run(|rt| async move {
        let f = Fixture::open(&rt).await;
        let ptr = f.write(&rt, 0, DATA, 1).await;
        let bucket = Allocator::buckets(&f.cache.alloc).bucket_of(ptr);
        rt.sleep(Nanos::from_secs(1)).await;
        f.cache.alloc.pin(bucket);
        assert!(f.begin_overwrite(ptr, 3).await);
        f.overwrite(&rt, ptr, 3).await;
        f.cache.alloc.unpin(bucket);
        rt.sleep(Nanos::from_secs(1)).await;
        assert_eq!(f.cache.data.counters().footers_written, 1);
        f.cache.data.write_all_footers().await;
        assert_eq!(f.cache.data.counters().footers_written, 2);
        f.forget();
        assert_eq!(f.verify(ptr, 3).await, Verdict::Verified);
    });
}

/// The key has moved before the overwriting begins. The blocks have their checksums as before.
#[test]
fn an_overwriting_that_was_given_up_is_over() {
    run(|rt| async move {
        let f = Fixture::open(&rt).await;
        let ptr = f.write(&rt, 0, DATA, 1).await;
        rt.sleep(Nanos::from_secs(1)).await;
        assert!(f.begin_overwrite(ptr, 3).await);
        let learn = || {
            let (data, began) = (f.cache.data.clone(), f.cache.data.read_token());
            async move { data.learn(&[ReadSum { at: ptr, sum: 77, began }], true).await.unwrap() }
        };
        assert_eq!(learn().await, 0);
        f.cache.data.give_up_overwrite(ptr, DATA);
        assert_eq!(f.verify(ptr, 1).await, Verdict::Verified);
        f.cache.data.write_all_footers().await;
        assert_eq!(f.cache.data.counters().footers_written, 2);
        assert_eq!(learn().await, 1);
    });
}

/// A read finds damage in the bucket while its footer is replaced by zeros. The data goes to a new place, and the bucket gets a
/// footer again, because a crash would make the damage unknown.
#[test]
fn damage_that_is_found_while_an_overwriting_begins_stays_known() {
    run(|rt| async move {
        let f = Fixture::open(&rt).await;
        let ptr = f.write(&rt, 0, DATA, 1).await;
        rt.sleep(Nanos::from_secs(1)).await;
        let data = f.cache.data.clone();
        f.device.disk().hold(true);
        let beginning = rt.spawn(async move { data.begin_overwrite(ptr, &[3; 512]).await });
        f.device.disk().held(1, &rt).await;
        let place = ptr.advanced(Sectors(8));
        let at = (f.inode, Sector(24));
        assert!(f.cache.data.add_damaged(DamagedBlock { at, size: Sectors(1), ptr: place }));
        f.device.disk().hold(false);
        assert!(!beginning.await);
        f.cache.data.write_footer_of_damaged(ptr).await;
        assert_eq!(f.cache.data.counters().footers_written, 2);
        f.forget();
        assert_eq!(f.verify(ptr, 1).await, Verdict::Verified);
    });
}

/// A bucket that a kernel has filled to its end has neither a footer to read nor one to replace. Its overwritten blocks have
/// checksums in memory.
#[test]
fn a_bucket_without_room_for_a_footer_has_checksums_in_memory() {
    run(|rt| async move {
        let f = Fixture::open(&rt).await;
        let ptr = f.write(&rt, 0, DATA, 1).await;
        rt.sleep(Nanos::from_secs(1)).await;
        f.forget();
        f.cache.alloc.buckets_mut().note_footer_room(ptr, Sectors(16));
        assert_eq!(f.cache.data.coverage().unread_blocks, 15);
        assert_eq!(f.verify(ptr, 1).await, Verdict::Unverified);
        let coverage = f.cache.data.coverage();
        assert_eq!((coverage.unread_blocks, coverage.unverified_blocks), (0, 15));
        f.forget();
        assert!(f.begin_overwrite(ptr, 3).await);
        f.overwrite(&rt, ptr, 3).await;
        assert_eq!(f.verify(ptr, 3).await, Verdict::Verified);
        f.cache.data.write_all_footers().await;
        let counters = f.cache.data.counters();
        assert_eq!((counters.footers_written, counters.footers_read, counters.footers_erased), (1, 0, 0));
        assert_eq!((counters.verified_blocks, counters.unverified_blocks), (15, 15));
    });
}

/// A scrub has read a block without a known checksum. The block is overwritten in place, and the table drops the
/// checksums of the bucket, which the scrub reads again for its next chunk. The checksum of the older data must not be learnt: it
/// would make the data of an answered write unreadable.
#[test]
fn a_checksum_of_older_data_is_not_learnt_after_the_table_has_forgotten_an_overwriting() {
    run(|rt| async move {
        let f = Fixture::open(&rt).await;
        let (one, other) = (f.write(&rt, 0, DATA, 1).await, f.write(&rt, 100, DATA, 2).await);
        rt.sleep(Nanos::from_secs(1)).await;
        f.forget();
        // The bucket is reopened, and then forgotten: no checksum of it is known. So it is after a power loss.
        assert!(f.begin_overwrite(one, 3).await);
        f.overwrite(&rt, one, 3).await;
        assert_eq!(f.verify(other, 2).await, Verdict::Verified);
        assert!(!f.has_sums(one), "the table has room for one bucket");
        // The scrub reads the first chunk of the bucket.
        let began = f.cache.data.read_token();
        assert_eq!(f.verify(one, 3).await, Verdict::Unverified);
        let sum = format::checksum::crc32c(&[3; 512]);
        let found: Vec<ReadSum> =
            (0..15).map(|n| ReadSum { at: one.advanced(Sectors(n)), sum, began }).collect();
        // It pauses. A client overwrites the data, and clients use other buckets.
        assert!(f.begin_overwrite(one, 4).await);
        f.overwrite(&rt, one, 4).await;
        assert_eq!(f.verify(other, 2).await, Verdict::Verified);
        assert!(!f.has_sums(one), "the table has room for one bucket");
        // The next chunk of the scrub, or a read of a client, reads the footer of the bucket.
        assert_eq!(f.verify(one, 4).await, Verdict::Unverified);
        let learnt = f.cache.data.learn(&found, false).await.unwrap();
        assert_eq!(f.verify(one, 4).await, Verdict::Unverified, "sound data counts as damaged");
        assert_eq!(learnt, 0, "the data was overwritten since it was read");
    });
}

/// A block was overwritten in place, the table has forgotten it, and a scrub learns its checksum. The footer must follow
/// a flush, as docs/decisions/034 says: otherwise a power loss keeps the footer and the older data.
#[test]
fn a_footer_with_learnt_checksums_follows_a_flush_of_a_forgotten_overwriting() {
    run(|rt| async move {
        let f = Fixture::open(&rt).await;
        let (one, other) = (f.write(&rt, 0, DATA, 1).await, f.write(&rt, 100, DATA, 2).await);
        rt.sleep(Nanos::from_secs(1)).await;
        f.forget();
        assert!(f.begin_overwrite(one, 3).await);
        f.overwrite(&rt, one, 3).await;
        let flushes = f.cache.device.flush_count();
        assert_eq!(f.verify(other, 2).await, Verdict::Verified);
        assert!(!f.has_sums(one), "the table has room for one bucket");
        let began = f.cache.data.read_token();
        assert_eq!(f.verify(one, 3).await, Verdict::Unverified);
        let sum = format::checksum::crc32c(&[3; 512]);
        let footers = f.cache.data.counters().footers_written;
        assert_eq!(f.cache.data.learn(&[ReadSum { at: one, sum, began }], false).await.unwrap(), 1);
        assert_eq!(f.cache.data.counters().footers_written, footers + 1);
        assert!(
            f.cache.device.flush_count() > flushes,
            "the footer is on the device, and the data may be lost"
        );
    });
}

/// A kernel places blocks of the volume. If its data begins in the middle of a block of the device, a write that is whole
/// blocks of the device is parts of two blocks at the place of the dirty data. Its checksums must not become those of whole blocks.
#[test]
fn parts_of_blocks_are_not_overwritten_with_checksums_of_whole_blocks() {
    run(|rt| async move {
        let mut options = SetOptions::default();
        options.tunables.overwrite_in_place = Overwrite::Always;
        let backing = backing_device_of(&TestDisk::new(8192), &rt, Sectors(8), Sector(20));
        let f = Fixture::of(&rt, (Sectors(8), Sectors(64)), backing, options).await;
        let ptr = f.write(&rt, 4, Sectors(24), 1).await;
        // The key as a kernel makes it: blocks of the volume, which begins at sector 20 of the device.
        let change = async |start, key| {
            let (start, durability) = (Sector(start), Durability::Journaled);
            f.cache.index.change(f.inode, start, start + Sectors(24), key, durability).await.unwrap();
        };
        change(24, None).await;
        change(20, Some((ptr, true))).await;
        f.write(&rt, 4, Sectors(8), 3).await;
        let (buffer, read) = f.volume.read(Sector(0), Sectors(24), rt.pool().take(24 * 512), 0).await;
        read.unwrap();
        assert!(buffer.as_slice()[..4 * 512].iter().all(|b| *b == 1));
    });
}
