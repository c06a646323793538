//! Tests of a whole set on a device in memory: what a new set has on the device, and what a stopped set leaves.

use std::rc::Weak;
use std::sync::Arc;

use format::{Bkey, BucketNr, BucketPrio, Gen, JournalSeq, Jset, Ptr};
use io::sync::{Either, select};
use io::{Handle, Nanos};

use super::*;
use crate::alloc::{Allocator, load_prios};
use crate::device::Reader;
use crate::refusal::Refusal;
use crate::testing::{TestDisk, Watching, backing_device, open_set, run};

const MINUTE: Nanos = Nanos::from_secs(60);
/// Within this time a stopped set has released its cache device. Where other sets are on the thread, a task that slept for 10 s kept it,
/// and `register` of the device said `in use by this process`.
const AT_ONCE: Nanos = Nanos::from_ms(100);

/// The buckets of the priorities, of the UUID table and of the root have the generation of the pointers to them, and the
/// highest priority. All other buckets have never been used.
#[test]
fn a_new_set_has_priorities_of_its_metadata() {
    run(|rt| async move {
        for (nbuckets, bucket_sectors) in [(1024, 16), (3000, 8)] {
            let device = Watching::new(nbuckets * bucket_sectors);
            let set = open_set(&device, &rt, (bucket_sectors, false), SetOptions::default()).await;
            let cache = set.cache();
            let (g, first) = (&cache.geometry, cache.geometry.first_dynamic());
            let (disk, place) = (cache.device.disk(), cache.device.place());
            let reader = Reader { disk, place, geometry: g, magic: cache.device.magic() };
            let found = load_prios(&reader, first.0.into()).await.unwrap();
            let chain: Vec<BucketNr> = (0..g.prio_buckets).map(|n| BucketNr(first.0 + n)).collect();
            assert_eq!((found.chain, found.seq), (chain, 1));
            let metadata = first.0..first.0 + g.prio_buckets + 2;
            for (b, prio) in (0..).zip(found.prios) {
                let wanted = match metadata.contains(&b) {
                    true => BucketPrio { prio: u16::MAX, generation: Gen(1) },
                    false => BucketPrio { prio: 0, generation: Gen(0) },
                };
                assert_eq!(prio, wanted, "bucket {b} of {nbuckets}");
            }
            set.stop().await.unwrap();
        }
    });
}

/// The first journal entry is in the second bucket of the ring (format section 9.2). It names the metadata behind the ring
/// and no prio set of another cache device.
#[test]
fn a_new_set_has_one_journal_entry_that_names_its_metadata() {
    run(|rt| async move {
        let set = open_set(&Watching::new(16_384), &rt, (16, false), SetOptions::default()).await;
        let cache = set.cache();
        let (g, disk) = (&cache.geometry, cache.device.disk());
        let first = g.first_dynamic().0;
        let ptr = |bucket| Ptr::new(0, g.bucket_start(BucketNr(bucket)), Gen(1));
        for (index, wanted) in [0, 1, 0].into_iter().enumerate() {
            let bucket = g.journal_bucket(index as u32).unwrap();
            let buffer = rt.pool().take(g.bucket_sectors.bytes() as usize);
            let (buffer, result) = disk.read(g.bucket_start(bucket), buffer).await;
            result.unwrap();
            let scan =
                format::parse_bucket(buffer.as_slice(), cache.device.magic(), g.block_sectors).unwrap();
            assert_eq!(scan.entries.len(), wanted, "ring bucket {index}");
            for (at, entry) in scan.entries {
                let mut prio_bucket = [0; 8];
                prio_bucket[0] = u64::from(first);
                let metadata = first + g.prio_buckets;
                let wanted = Jset {
                    seq: JournalSeq(1),
                    last_seq: JournalSeq(1),
                    version: 1,
                    uuid_bucket: Bkey::uuid_bucket(g.meta_sectors, ptr(metadata)),
                    btree_root: Bkey::root(g.node_sectors, ptr(metadata + 1)),
                    btree_level: 0,
                    prio_bucket,
                    keys: Vec::new(),
                };
                assert_eq!((at, entry), (0, wanted));
            }
        }
        set.stop().await.unwrap();
    });
}

#[test]
fn a_caller_waits_for_the_next_event_of_a_set() {
    run(|rt| async move {
        let set = open_set(&Watching::new(16_384), &rt, (16, false), SetOptions::default()).await;
        set.take_events();
        let arrived = std::pin::pin!(set.events_arrived());
        assert!(matches!(select(arrived, rt.sleep(MINUTE)).await, Either::Right(())), "there is no event");
        set.cache().device.emit(SetEvent::Initialised);
        set.events_arrived().await;
        assert_eq!(set.take_events().len(), 1);
    });
}

/// Counts the references to a component that is left.
type References = Box<dyn Fn() -> usize>;

fn references(set: &CacheSet) -> Vec<(&'static str, References)> {
    fn of<T: 'static>(component: &Rc<T>) -> References {
        let weak: Weak<T> = Rc::downgrade(component);
        Box::new(move || weak.strong_count())
    }
    let cache = set.cache();
    vec![
        ("set", of(&set.components)),
        ("cache", of(cache)),
        ("device", of(&cache.device)),
        ("journal", of(&cache.journal)),
        ("allocator", of(&cache.alloc)),
        ("index", of(&cache.index)),
        ("garbage collector", of(&cache.gc)),
    ]
}

fn assert_nothing_is_left(components: Vec<(&'static str, References)>) {
    for (name, references) in components {
        assert_eq!(references(), 0, "a task keeps the {name}");
    }
}

#[test]
fn no_task_outlives_a_stop() {
    run(|rt| async move {
        let set = open_set(&Watching::new(16_384), &rt, (16, false), SetOptions::default()).await;
        drop(set.create_volume(Uuid([9; 16]), Sectors(800), "flash").await.unwrap());
        rt.sleep(MINUTE).await;
        let components = references(&set);
        set.stop().await.unwrap();
        drop(set);
        rt.sleep(AT_ONCE).await;
        assert_nothing_is_left(components);
    });
}

/// A volume that was opened after its set's `cutoff_writeback` was raised had the limit of the default. At a start of the
/// daemon its stored `writeback_percent` above 40 was refused and lost.
#[test]
fn a_volume_that_is_opened_later_has_the_cutoff_of_its_set() {
    run(|rt| async move {
        let set = open_set(&Watching::new(16_384), &rt, (16, false), SetOptions::default()).await;
        set.set("cutoff_writeback", "60").await.unwrap();
        let volume = set.create_volume(Uuid([9; 16]), Sectors(800), "flash").await.unwrap();
        volume.tunables().check("writeback_percent", "50").unwrap();
        volume.set("writeback_percent", "50").await.unwrap();
        assert_eq!(volume.tunables().writeback_percent, 50);
        assert!(volume.tunables().check("writeback_percent", "61").is_err());
        set.stop().await.unwrap();
    });
}

/// The label of a set is in the superblock of its cache device, where the kernel leaves it alone.
#[test]
fn the_label_of_a_set_is_written_to_its_superblock() {
    run(|rt| async move {
        let disk = Watching::new(16_384);
        let set = open_set(&disk, &rt, (16, false), SetOptions::default()).await;
        assert_eq!(set.status().label, "");
        disk.requests.take();
        set.set_label("fast").await.unwrap();
        let is_superblock =
            |r: &(io::Op, format::Sector, Sectors)| matches!(r.0, io::Op::Write { .. }) && r.1.0 == 8;
        assert!(disk.requests.take().iter().any(is_superblock));
        let sector = set.cache().device.superblock().encode();
        let raw = format::superblock::RawSuperblock::from_prefix(&sector).unwrap();
        assert_eq!(raw.check_cache(Sectors(16_384), 512).unwrap().label(), "fast");
        assert!(set.set_label(&"x".repeat(33)).await.is_err());
        assert_eq!(set.status().label, "fast");
        set.stop().await.unwrap();
    });
}

/// A label that a disabled set refused was in the superblock of the disk, and the next start served it.
#[test]
fn a_failed_set_changes_no_superblock() {
    run(|rt| async move {
        let (disk, hdd) = (Watching::new(16_384), TestDisk::new(2048));
        let set = open_set(&disk, &rt, (16, false), SetOptions::default()).await;
        let backing = backing_device(&hdd, &rt);
        let volume = attach::attach(&set.components, backing.clone(), None).await.unwrap();
        volume.set("label", "old").await.unwrap();
        let superblock = || (backing.label(), backing.cache_mode());
        let before = superblock();
        // The cache device is gone, and the set notices it when it writes its table.
        disk.refuses.set(|_| Some(5));
        volume.set("label", "new").await.unwrap_err();
        assert!(superblock() == before, "the label is put back");
        assert!(set.status().failed.is_some());
        for (name, value) in [("label", "other"), ("cache_mode", "writearound")] {
            let stored = volume.get(name);
            volume.set(name, value).await.unwrap_err();
            assert_eq!(volume.get(name), stored);
            assert!(superblock() == before, "{name}");
        }
        disk.refuses.set(|_| None);
        set.set_label("fast").await.unwrap_err();
        set.set("discard", "1").await.unwrap_err();
        assert_eq!(set.status().label, "");
        set.abandon();
    });
}

#[test]
fn no_task_outlives_a_failure() {
    run(|rt| async move {
        let set = open_set(&Watching::new(16_384), &rt, (16, false), SetOptions::default()).await;
        rt.sleep(MINUTE).await;
        let components = references(&set);
        let why = EngineError::from(Refusal::SetFailed);
        set.cache().device.fail(EngineError::Disabled { set: "a set".into(), why: Arc::new(why) });
        rt.sleep(AT_ONCE).await;
        set.abandon();
        assert_nothing_is_left(components);
    });
}

/// A setting that is stored takes effect although its caller has given up.
#[test]
fn a_policy_whose_caller_has_given_up_is_used() {
    run(|rt| async move {
        let device = Watching::new(16_384);
        let set = open_set(&device, &rt, (16, false), SetOptions::default()).await;
        set.set("replacement", "cost_benefit").await.unwrap();
        let observes = || set.cache().alloc.eviction().observes();
        assert!(observes(), "it takes the place of lru");
        device.disk().hold(true);
        let storing = std::pin::pin!(set.set("cache_replacement_policy", "fifo"));
        let given_up = select(storing, rt.sleep(Nanos::from_ms(1))).await;
        assert!(matches!(given_up, Either::Right(())));
        device.disk().hold(false);
        rt.sleep(Nanos::from_secs(1)).await;
        assert!(!observes());
        set.stop().await.unwrap();
    });
}

/// Takes every bucket that becomes ready for metadata.
async fn take_all_buckets(alloc: &Allocator, rt: &Handle) -> Vec<BucketNr> {
    let mut taken = Vec::new();
    let mut before = usize::MAX;
    while before != taken.len() {
        before = taken.len();
        taken.extend(std::iter::from_fn(|| alloc.try_take_btree_bucket()));
        rt.sleep(MINUTE).await;
    }
    taken
}

/// A change of the UUID table waited for a bucket under the lock that the registration of a device with dirty data needs:
/// in a full cache, only the writeback of that data would have made a bucket free.
#[test]
fn a_device_is_registered_while_a_change_of_the_table_waits_for_a_bucket() {
    run(|rt| async move {
        let set = open_set(&Watching::new(2048), &rt, (16, false), SetOptions::default()).await;
        let backing = backing_device(&TestDisk::new(8192), &rt);
        let known = set.attached(backing.clone()).await.unwrap();
        set.release(&known).await.unwrap();
        let alloc = set.cache().alloc.clone();
        let taken = take_all_buckets(&alloc, &rt).await;
        let theirs = set.clone();
        let create = async move { theirs.create_volume(format::Uuid([7; 16]), Sectors(64), "new").await };
        let mut created = rt.spawn(create);
        assert!(
            matches!(select(&mut created, rt.sleep(MINUTE)).await, Either::Right(())),
            "no bucket is free"
        );

        let theirs = set.clone();
        let mut attached = rt.spawn(async move { theirs.attached(backing).await });
        match select(&mut attached, rt.sleep(MINUTE)).await {
            Either::Left(again) => assert_eq!(again.unwrap().inode(), Some(format::Inode(0))),
            Either::Right(()) => panic!("the registration waits for the change of the table"),
        }

        alloc.give_back(&taken);
        assert_eq!(created.await.unwrap().label_or_name(), "new");
        set.stop().await.unwrap();
    });
}

/// A copy of a device would be served with the data in the slot of the device while a detach waits for the bucket of the
/// table without this slot. A stop ends the wait.
#[test]
fn a_copy_of_a_device_is_refused_while_the_device_is_detached() {
    run(|rt| async move {
        let set = open_set(&Watching::new(2048), &rt, (16, false), SetOptions::default()).await;
        let volume = set.attached(backing_device(&TestDisk::new(8192), &rt)).await.unwrap();
        let alloc = set.cache().alloc.clone();
        let _taken = take_all_buckets(&alloc, &rt).await;
        let theirs = set.clone();
        let mut detached = rt.spawn(async move { theirs.detach(&volume).await });
        assert!(
            matches!(select(&mut detached, rt.sleep(MINUTE)).await, Either::Right(())),
            "no bucket is free"
        );
        assert!(set.volumes().is_empty());

        let copy = backing_device(&TestDisk::new(8192), &rt);
        let refused = set.attached(copy).await.err().unwrap().to_string();
        assert!(refused.contains("is being attached to or detached from set"), "{refused}");

        set.stop().await.unwrap();
        assert_eq!(detached.await.unwrap_err().to_string(), "the set is being stopped");
    });
}
