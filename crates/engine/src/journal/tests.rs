//! Tests of the journal alone, on a disk in memory: its waits and its counts.

use std::sync::Arc;

use format::{Gen, Inode, Ptr};
use io::{Disk, Handle, MemoryBudget};

use super::*;
use crate::device::Reader;
use crate::error::Place;
use crate::journal::ring::RingSlot;
use crate::refusal::Refusal;
use crate::testing::{TestDisk, cache_device, geometry, run};

mod writer;

const BUCKET: Sectors = Sectors(64);
/// A delay that is longer than any test that does not wait for it.
const HOUR: Nanos = Nanos::from_secs(3600);

fn buckets() -> Vec<BucketNr> {
    (4..8).map(BucketNr).collect()
}

/// A journal of four buckets whose newest entry, 1, has filled the last bucket. It writes no entry by itself within an
/// hour.
fn journal(disk: &Rc<TestDisk>, rt: &Handle) -> Rc<Journal> {
    let layout =
        Layout { buckets: buckets(), bucket_sectors: BUCKET, magic: SetMagic(7), block_sectors: Sectors(1) };
    let one = JournalSeq(1);
    let newest_in = vec![JournalSeq(0), JournalSeq(0), JournalSeq(0), one];
    let ring = Ring::new(BUCKET, Sectors(1), newest_in, RingSlot { bucket: 3, offset: BUCKET }, one);
    let entries =
        DurableEntries { newest: one, oldest: one, roots: JsetRoots::default(), replays_keys: false };
    let j = Journal::new(cache_device(disk, rt, BUCKET), layout, ring, entries);
    j.set_delay(HOUR);
    Rc::new(j)
}

fn start(j: &Rc<Journal>, rt: &Handle) -> io::JoinHandle<Result<(), EngineError>> {
    let j = j.clone();
    rt.spawn(async move { j.run().await })
}

fn extent(end: u64) -> Bkey {
    Bkey::extent(Inode(3), Sector(end), Sectors(8), true, Ptr::new(0, Sector(end + 1000), Gen(2)))
}

fn hole(end: u64) -> Bkey {
    Bkey::hole(Inode(3), Sector(end), Sectors(8))
}

/// Writes entries until there is no room for a key, because leaves pin the first entry.
async fn fill_journal(j: &Rc<Journal>, rt: &Handle) {
    start(j, rt);
    for _ in 0..61 {
        j.pin(JournalSeq(2));
    }
    loop {
        let mut last = None;
        while let Some(seq) = j.try_add(&extent(8), rt.now()) {
            last = Some(seq);
        }
        let Some(seq) = last else { return };
        j.commit(seq).await.unwrap();
    }
}

async fn some_turns(rt: &Handle) {
    for _ in 0..20 {
        rt.yield_now().await;
    }
}

/// A caller that commits an entry does not wait for the journal's delay.
#[test]
fn a_commit_does_not_wait_for_the_delay() {
    run(|rt| async move {
        let j = journal(&TestDisk::new(8192), &rt);
        start(&j, &rt);
        let began = rt.now();
        let seq = j.try_add(&extent(8), rt.now()).unwrap();
        some_turns(&rt).await;
        assert!(j.durable() < seq, "the entry waits for the delay");
        j.commit(seq).await.unwrap();
        assert_eq!(j.durable(), seq);
        assert!(rt.now().since(began) < HOUR);
    });
}

/// While an entry is being written and the open one is empty, the newest keys are in the former.
#[test]
fn keys_of_an_entry_on_its_way_are_waited_for() {
    run(|rt| async move {
        let disk = TestDisk::new(8192);
        let j = journal(&disk, &rt);
        start(&j, &rt);
        disk.hold(true);
        let seq = j.try_add(&extent(8), rt.now()).unwrap();
        let first = j.clone();
        let first = rt.spawn(async move { first.commit(seq).await });
        disk.held(1, &rt).await;
        assert_eq!(j.newest_keys(), seq);
        let all = j.clone();
        let all = rt.spawn(async move { all.commit_keys().await });
        some_turns(&rt).await;
        assert!(all.try_take().is_none(), "the entry is not durable");
        disk.hold(false);
        first.await.unwrap();
        all.await.unwrap();
        assert_eq!(j.durable(), seq);
    });
}

/// A failure of the set ends a wait for room.
#[test]
fn a_failure_ends_the_wait_for_room() {
    run(|rt| async move {
        let j = journal(&TestDisk::new(8192), &rt);
        while j.try_add(&extent(8), rt.now()).is_some() {}
        let waiting = j.clone();
        let waiting = rt.spawn(async move { waiting.wait_room().await });
        some_turns(&rt).await;
        assert!(waiting.try_take().is_none());
        assert!(j.is_pressed() && j.is_refusing());
        j.fail(Refusal::SetFailed.into());
        assert!(waiting.await.is_err());
        assert!(!j.is_refusing());
    });
}

/// A full entry is written as soon as a task waits for room, and not only after the delay.
#[test]
fn a_full_entry_is_written_for_tasks_that_wait() {
    run(|rt| async move {
        let j = journal(&TestDisk::new(8192), &rt);
        start(&j, &rt);
        let began = rt.now();
        while j.try_add(&extent(8), rt.now()).is_some() {}
        j.wait_room().await.unwrap();
        assert!(j.try_add(&extent(8), rt.now()).is_some());
        assert!(rt.now().since(began) < HOUR);
    });
}

/// A stop writes the pending keys at once, ends the writer task, and ends waits for room to spare.
#[test]
fn a_stop_writes_what_is_there_and_ends_waits() {
    run(|rt| async move {
        let j = journal(&TestDisk::new(8192), &rt);
        let writer = start(&j, &rt);
        let began = rt.now();
        let seq = j.try_add(&extent(8), rt.now()).unwrap();
        some_turns(&rt).await;
        j.stop();
        writer.await.unwrap();
        assert_eq!(j.durable(), seq);
        assert!(rt.now().since(began) < HOUR);
    });
    run(|rt| async move {
        let j = journal(&TestDisk::new(8192), &rt);
        fill_journal(&j, &rt).await;
        let waiting = j.clone();
        let waiting = rt.spawn(async move { waiting.wait_room_to_spare(|| false).await });
        some_turns(&rt).await;
        assert!(waiting.try_take().is_none());
        j.stop();
        waiting.await.unwrap();
    });
}

/// The condition of a wait may depend on state outside of the journal.
#[test]
fn a_recheck_ends_a_wait_for_room() {
    run(|rt| async move {
        let j = journal(&TestDisk::new(8192), &rt);
        fill_journal(&j, &rt).await;
        let urgent = Rc::new(Cell::new(false));
        let (waiting, says) = (j.clone(), urgent.clone());
        let waiting = rt.spawn(async move { waiting.wait_room_to_spare(|| says.get()).await });
        some_turns(&rt).await;
        urgent.set(true);
        some_turns(&rt).await;
        assert!(waiting.try_take().is_none(), "nobody said that something changed");
        j.recheck();
        waiting.await.unwrap();
    });
}

/// Holes of 16 bytes fill an entry to its last byte.
#[test]
fn an_entry_takes_keys_to_its_last_byte() {
    run(|rt| async move {
        let j = journal(&TestDisk::new(8192), &rt);
        let mut keys = 0;
        while j.try_add(&hole(8), rt.now()).is_some() {
            keys += 1;
        }
        assert_eq!(keys, (MAX_ENTRY_BYTES - HEADER_BYTES) / 16);
    });
}

/// Keys leave a block for a new root and one for priorities for each pinned leaf, also if that is more than a small ring has.
/// Roots that can wait leave half of that reserve.
#[test]
fn keys_leave_room_in_the_ring_for_roots_and_priorities() {
    run(|rt| async move {
        let j = journal(&TestDisk::new(8192), &rt);
        let mut pinned = 0;
        for (pins, of_keys, of_roots) in
            [(0, 6, 2), (20, 46, 22), (61, 128, 63), (200, 406, 202), (509, 1024, 511), (900, 1024, 512)]
        {
            while pinned < pins {
                j.pin(JournalSeq(2));
                pinned += 1;
            }
            let s = j.state.borrow();
            assert_eq!((s.reserve_of_keys(), s.reserve_of_roots()), (of_keys, of_roots), "{pins} pins");
        }
        // Leaves that wait for buckets may wait for keys that make data clean.
        let waits = [j.begin_bucket_wait(), j.begin_bucket_wait()];
        assert_eq!((j.state.borrow().reserve_of_keys(), j.state.borrow().reserve_of_roots()), (128, 64));
        drop(waits);
        assert_eq!(j.state.borrow().reserve_of_keys(), 1024);
    });
}

/// Written entries are counted, the entry that frees a bucket is found, and a journal with enough room is not pressed.
#[test]
fn entries_are_counted() {
    run(|rt| async move {
        let j = journal(&TestDisk::new(8192), &rt);
        start(&j, &rt);
        assert_eq!(j.written(), (0, 0));
        let seq = j.try_add(&extent(8), rt.now()).unwrap();
        j.pin(seq);
        j.commit(seq).await.unwrap();
        assert_eq!(j.written(), (1, 512));
        assert_eq!(j.write_times().count(), 1);
        assert_eq!(j.reclaim_target(), seq);
        assert!(!j.is_pressed() && !j.is_refusing());
        assert!(!j.can_advance(), "the bucket that the pinned entry is in is not free without it");
        let more: Vec<_> = (0..20).map(|i| j.try_add(&extent(8 * i + 8), rt.now()).unwrap()).collect();
        j.commit(more[19]).await.unwrap();
        assert_eq!(j.written(), (2, 512 + 1024));
        assert_eq!(j.write_times().count(), 2);
    });
}

/// The memory for the entries at the start is reserved, as much as the device demands.
#[test]
fn a_scan_reserves_what_the_entries_take() {
    run(|rt| async move {
        let disk = TestDisk::new(8192);
        let j = journal(&disk, &rt);
        start(&j, &rt);
        for i in 1..=3 {
            let mut seq = JournalSeq(0);
            for k in 0..40 {
                seq = j.try_add(&extent(1000 * i + 8 * k), rt.now()).unwrap();
            }
            j.commit(seq).await.unwrap();
        }
        let place = Place { device: Arc::from("test disk"), set: "a set".into() };
        let disk = Disk::new(disk, rt.clone());
        let geometry = geometry(BUCKET, 1024, 4);
        let reader = Reader { disk: &disk, place: &place, geometry: &geometry, magic: SetMagic(7) };
        let budget = MemoryBudget::unlimited();
        let mut memory = budget.try_reserve(0).unwrap();
        let found = scan(&reader, &buckets(), false, &mut memory).await.unwrap();
        assert_eq!(found.replay.newest_entry().unwrap().seq, JournalSeq(4));
        assert_eq!(memory.bytes(), (3 * size_of::<format::Jset>() + 120 * size_of::<Bkey>()) as u64);
        let small = MemoryBudget::new(memory.bytes() - 1);
        let mut memory = small.try_reserve(0).unwrap();
        let refused = scan(&reader, &buckets(), false, &mut memory).await;
        assert!(refused.is_err());
    });
}
