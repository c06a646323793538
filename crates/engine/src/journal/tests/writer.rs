//! Tests of the times at which entries are written, and of the waits that they end.

use std::cell::RefCell;

use io::CrashLogMemory;

use super::*;
use crate::refusal::Refusal;

const SECOND: Nanos = Nanos::from_secs(1);

fn spawn_commit_roots(
    j: &Rc<Journal>,
    rt: &Handle,
    urgency: Urgency,
    level: u16,
) -> io::JoinHandle<Result<(), EngineError>> {
    let j = j.clone();
    rt.spawn(async move { j.commit_roots(|| urgency, |r| r.btree_level = level).await })
}

/// An entry is written one delay after its first key, whatever keys arrive later.
#[test]
fn the_first_key_of_an_entry_starts_the_delay() {
    run(|rt| async move {
        let j = journal(&TestDisk::new(8192), &rt);
        j.set_delay(SECOND);
        start(&j, &rt);
        rt.sleep(SECOND).await;
        for round in 1..=2 {
            let began = rt.now();
            let seq = j.try_add(&extent(8), rt.now()).unwrap();
            rt.sleep(Nanos::from_ms(600)).await;
            assert_eq!(j.try_add(&extent(16), rt.now()), Some(seq));
            rt.sleep_until(began.after(Nanos::from_ms(999))).await;
            some_turns(&rt).await;
            assert!(j.durable() < seq);
            rt.sleep_until(began.after(Nanos::from_ms(1000))).await;
            some_turns(&rt).await;
            assert_eq!((j.durable(), j.written().0), (seq, round));
        }
        rt.sleep(HOUR).await;
        assert_eq!(j.written().0, 2, "nothing is written without a reason");
    });
}

/// New roots are written once, in an entry without keys or together with keys.
#[test]
fn roots_go_out_with_the_next_entry() {
    run(|rt| async move {
        let disk = TestDisk::new(8192);
        let j = journal(&disk, &rt);
        start(&j, &rt);
        assert_eq!(j.newest_keys(), JournalSeq(1));
        disk.hold(true);
        let one = spawn_commit_roots(&j, &rt, Urgency::CanWait, 3);
        disk.held(1, &rt).await;
        assert_eq!((j.newest_keys(), j.open_seq()), (JournalSeq(2), JournalSeq(3)));
        let two = spawn_commit_roots(&j, &rt, Urgency::CanWait, 4);
        some_turns(&rt).await;
        assert_eq!(j.newest_keys(), JournalSeq(3), "an entry that carries roots counts");
        j.try_add(&extent(8), rt.now()).unwrap();
        disk.hold(false);
        one.await.unwrap();
        two.await.unwrap();
        assert_eq!((j.written().0, j.durable(), j.roots().btree_level), (2, JournalSeq(3), 4));
        rt.sleep(HOUR).await;
        rt.sleep(HOUR).await;
        assert_eq!(j.written().0, 2);
        let place = Place { device: Arc::from("test disk"), set: "a set".into() };
        let mut memory = MemoryBudget::unlimited().try_reserve(0).unwrap();
        let disk = Disk::new(disk, rt.clone());
        let geometry = geometry(BUCKET, 1024, 4);
        let reader = Reader { disk: &disk, place: &place, geometry: &geometry, magic: SetMagic(7) };
        let found = scan(&reader, &buckets(), false, &mut memory).await.unwrap();
        // The second entry says that the first is no longer needed.
        let levels: Vec<_> =
            found.replay.entries.iter().map(|e| (e.seq.0, e.btree_level, e.keys.len())).collect();
        assert_eq!(levels, [(3, 4, 1)]);
    });
}

/// In a full ring, roots that can wait do so until they become urgent. Roots that free the ring, and roots in an entry
/// with keys, are written at once.
#[test]
fn roots_wait_while_the_ring_is_full() {
    run(|rt| async move {
        let j = journal(&TestDisk::new(8192), &rt);
        fill_journal(&j, &rt).await;
        // Roots have more room than keys, so the test fills the room that is left for them.
        while j.has_root_room(Urgency::CanWait) {
            spawn_commit_roots(&j, &rt, Urgency::CanWait, 1).await.unwrap();
        }
        let (written, urgent) = (j.written().0, Rc::new(Cell::new(Urgency::CanWait)));
        let (waits, says) = (j.clone(), urgent.clone());
        let waits = rt.spawn(async move { waits.commit_roots(|| says.get(), |r| r.btree_level = 7).await });
        some_turns(&rt).await;
        assert!(waits.try_take().is_none() && j.is_refusing() && j.roots().btree_level == 1);
        spawn_commit_roots(&j, &rt, Urgency::Frees, 2).await.unwrap();
        assert_eq!((j.written().0, j.roots().btree_level), (written + 1, 2));
        assert!(waits.try_take().is_none());
        urgent.set(Urgency::Frees);
        j.recheck();
        waits.await.unwrap();
        assert_eq!((j.written().0, j.roots().btree_level), (written + 2, 7));
        assert!(!j.is_refusing());
    });
}

/// A wait for room does not write an empty entry, which would only fill the ring. Released pins end the wait.
#[test]
fn a_full_ring_is_left_alone_until_pins_are_released() {
    run(|rt| async move {
        let j = journal(&TestDisk::new(8192), &rt);
        fill_journal(&j, &rt).await;
        let written = j.written();
        let waiting = j.clone();
        let waiting = rt.spawn(async move { waiting.wait_room().await });
        rt.sleep(HOUR).await;
        assert!(waiting.try_take().is_none() && !j.has_room_to_spare());
        assert_eq!(j.written(), written);
        (0..61).for_each(|_| j.unpin(JournalSeq(2)));
        some_turns(&rt).await;
        assert!(waiting.try_take().is_none(), "no task was woken");
        j.pins_released();
        waiting.await.unwrap();
        assert!(j.has_room_to_spare() && j.try_add(&extent(8), rt.now()).is_some());
    });
}

/// Of 256 blocks, each entry takes one. Leaves should be written as soon as less than half of the blocks are free.
#[test]
fn a_ring_that_is_more_than_half_full_presses() {
    run(|rt| async move {
        let j = journal(&TestDisk::new(8192), &rt);
        start(&j, &rt);
        j.pin(JournalSeq(2));
        let pressed = j.clone();
        let pressed = rt.spawn(async move { pressed.wait_pressed(|| false).await });
        for n in 1..=140 {
            let seq = j.try_add(&extent(8), rt.now()).unwrap();
            j.commit(seq).await.unwrap();
            some_turns(&rt).await;
            assert_eq!(
                (j.is_pressed(), pressed.try_take().is_some() || n > 129),
                (n > 128, n > 128),
                "{n} entries"
            );
            assert!(!j.can_advance());
            // The bucket of the oldest entry was full after entry 65.
            assert_eq!(j.reclaim_target(), JournalSeq((n + 1).min(65)));
            assert_eq!(j.oldest_needed(), JournalSeq(2));
        }
        assert_eq!(j.free_buckets(), (1, 4));
        j.unpin(JournalSeq(2));
        j.pin(JournalSeq(66));
        assert!(j.can_advance());
        assert_eq!((j.oldest_needed(), j.reclaim_target()), (JournalSeq(66), JournalSeq(129)));
        spawn_commit_roots(&j, &rt, Urgency::Frees, 0).await.unwrap();
        assert!(!j.can_advance() && !j.is_pressed());
        assert_eq!(j.free_buckets(), (2, 4));
    });
}

/// After a failure no task waits, no entry is written, and durable entries stay durable.
#[test]
fn a_failure_ends_every_wait() {
    run(|rt| async move {
        let disk = TestDisk::new(8192);
        let j = journal(&disk, &rt);
        let writer = start(&j, &rt);
        let seq = j.try_add(&extent(8), rt.now()).unwrap();
        j.commit(seq).await.unwrap();
        j.device.wrote();
        disk.fail_flushes(1);
        let next = j.try_add(&extent(8), rt.now()).unwrap();
        assert!(j.commit(next).await.is_err());
        assert!(writer.await.is_err());
        assert_eq!((j.durable(), j.written().0), (seq, 1));
        j.commit(seq).await.unwrap();
        assert!(j.wait_room().await.is_err() && j.wait_room_to_spare(|| false).await.is_err());
        assert!(spawn_commit_roots(&j, &rt, Urgency::CanWait, 9).await.is_err());
        assert_eq!(j.roots().btree_level, 0);
        j.changed().await;
        j.fail(Refusal::Cancelled.into());
        assert!(!j.check_failed().unwrap_err().to_string().contains("another"), "the first reason counts");
        // A writer that starts later does not write either.
        assert!(start(&j, &rt).await.is_err());
    });
}

/// A wait for any change ends with an entry, a stop or a failure.
#[test]
fn changes_wake_waiting_tasks() {
    run(|rt| async move {
        for what in 0..4 {
            let j = journal(&TestDisk::new(8192), &rt);
            start(&j, &rt);
            let watched = j.clone();
            let change = rt.spawn(async move { watched.changed().await });
            some_turns(&rt).await;
            assert!(change.try_take().is_none());
            match what {
                0 => {
                    let seq = j.try_add(&extent(8), rt.now()).unwrap();
                    j.commit(seq).await.unwrap();
                }
                1 => j.stop(),
                2 => j.fail(Refusal::SetFailed.into()),
                _ => j.pins_released(),
            }
            change.await;
            if what == 1 {
                j.changed().await;
            }
        }
    });
}

#[derive(Default)]
struct Memory {
    words: RefCell<Vec<(u64, Vec<u64>)>>,
    resets: Cell<u32>,
    tied: Cell<[u64; 2]>,
}

impl CrashLogMemory for Memory {
    fn record(&self, seq: u64, words: &[u64]) {
        self.words.borrow_mut().push((seq, words.to_vec()));
    }

    fn recorded(&self) -> Vec<(u64, Vec<u64>)> {
        self.words.borrow().clone()
    }

    fn reset(&self) {
        self.resets.set(self.resets.get() + 1);
        self.words.borrow_mut().clear();
    }

    fn tie(&self, states: [u64; 2]) {
        self.tied.set(states);
    }

    fn tied(&self) -> [u64; 2] {
        self.tied.get()
    }
}

/// Keys of the crash log are durable before other keys. New keys are recorded with the number of their entry while the
/// crash log is valid.
#[test]
fn keys_survive() {
    run(|rt| async move {
        let j = journal(&TestDisk::new(8192), &rt);
        j.adopt(&[extent(8), hole(16)]).await.unwrap();
        assert_eq!((j.durable(), j.written()), (JournalSeq(2), (1, 512)));
        assert!(!j.device.crash_log().invalidate(), "nothing survives yet");
        let memory = Rc::new(Memory::default());
        j.device.crash_log().tie([1, 2]);
        j.device.crash_log().begin(io::CrashLogRef(memory.clone()));
        j.device.crash_log().tie([4, 5]);
        assert_eq!((memory.resets.get(), memory.tied.get()), (1, [4, 5]));
        start(&j, &rt);
        let seq = j.try_add(&extent(24), rt.now()).unwrap();
        let key = extent(24);
        assert_eq!(*memory.words.borrow(), [(seq.0, vec![key.high, key.low, key.ptr.0])]);
        j.commit(seq).await.unwrap();
        assert_eq!(j.written(), (2, 1024));
        j.try_add(&hole(24), rt.now()).unwrap();
        let lengths: Vec<_> = memory.words.borrow().iter().map(|(seq, words)| (*seq, words.len())).collect();
        assert_eq!(lengths, [(3, 3), (4, 2)]);
        assert!(j.device.crash_log().invalidate() && !j.device.crash_log().invalidate());
        j.try_add(&hole(32), rt.now()).unwrap();
        assert_eq!((memory.resets.get(), memory.words.borrow().len()), (2, 0));
    });
}

/// Room that an entry frees counts for its own keys, but not while a crash log records them: the next process writes the
/// keys without freeing that room, and needs the reserve to free the ring.
#[test]
fn keys_of_a_crash_log_leave_the_reserve_without_their_entry() {
    run(|rt| async move {
        let j = journal(&TestDisk::new(8192), &rt);
        fill_journal(&j, &rt).await;
        j.device.crash_log().begin(io::CrashLogRef(Rc::new(Memory::default())));
        // The leaves that held the first entry are written. The reserve for others stays.
        for _ in 0..61 {
            j.pin(j.open_seq());
            j.unpin(JournalSeq(2));
        }
        j.pins_released();
        assert!(j.can_advance());
        assert_eq!(j.try_add(&extent(8), rt.now()), None, "no durable entry has freed the ring");
        assert!(!j.has_room_to_spare());
        let waiting = j.clone();
        let waiting = rt.spawn(async move { waiting.wait_room().await });
        some_turns(&rt).await;
        assert!(waiting.try_take().is_none());
        spawn_commit_roots(&j, &rt, Urgency::Frees, 1).await.unwrap();
        waiting.await.unwrap();
        assert!(j.try_add(&extent(8), rt.now()).is_some() && j.has_room_to_spare());
    });
}
