//! Tests of the start with journals of many lengths.

use std::rc::Rc;
use std::sync::Arc;

use format::{Bkey, Geometry, Inode, JsetRoots};
use io::{Disk, Handle, MemoryBudget};

use super::*;
use crate::error::Place;
use crate::journal::{DurableEntries, Journal, Layout};
use crate::testing::{TestDisk, cache_device, run};

const BUCKET: u64 = 64;
/// The number of blocks in the ring of four buckets.
const RING: u64 = 4 * BUCKET;

fn buckets() -> Vec<BucketNr> {
    // The ring is not in the order of the buckets on the device.
    [6, 4, 7, 5].map(BucketNr).to_vec()
}

async fn scan_of(disk: &Disk, ring: &[BucketNr]) -> Result<ScannedRing, EngineError> {
    let geometry = Geometry::new(Sectors(BUCKET), Sectors(1), 1024, 4, 4).unwrap();
    let place = Place { device: Arc::from("test disk"), set: "a set".into() };
    let mut memory = MemoryBudget::unlimited().try_reserve(0).unwrap();
    let reader = Reader { disk, place: &place, geometry: &geometry, magic: SetMagic(7) };
    scan(&reader, ring, false, &mut memory).await
}

/// A disk whose journal has this many entries of one block. The first entry has number 2; entries from `needed` on are
/// needed.
async fn written(rt: &Handle, entries: u64, needed: u64) -> Disk {
    let disk = TestDisk::new(8192);
    let device = cache_device(&disk, rt, Sectors(BUCKET));
    let disk = Disk::new(disk, rt.clone());
    let layout = Layout {
        buckets: buckets(),
        bucket_sectors: Sectors(BUCKET),
        magic: SetMagic(7),
        block_sectors: Sectors(1),
    };
    let one = JournalSeq(1);
    let ring = Ring::new(
        Sectors(BUCKET),
        Sectors(1),
        vec![JournalSeq(0), JournalSeq(0), JournalSeq(0), one],
        RingSlot { bucket: 3, offset: Sectors(BUCKET) },
        one,
    );
    let durable =
        DurableEntries { newest: one, oldest: one, roots: JsetRoots::default(), replays_keys: false };
    let j = Rc::new(Journal::new(device, layout, ring, durable));
    let writer = j.clone();
    rt.spawn(async move { writer.run().await });
    for n in 0..entries {
        let seq = j.try_add(&Bkey::hole(Inode(3), Sector(8 * n + 8), Sectors(8)), rt.now()).unwrap();
        assert_eq!(seq, JournalSeq(n + 2));
        if seq.0 == needed {
            j.pin(seq);
        }
        j.commit(seq).await.unwrap();
    }
    j.stop();
    disk
}

/// The number of the newest entry of a bucket after this many entries.
fn newest_in(bucket: u64, entries: u64) -> u64 {
    let last = (0..entries).rfind(|n| n / BUCKET % 4 == bucket);
    last.map_or(0, |n| n + 2)
}

#[test]
fn writing_goes_on_behind_the_newest_entry() {
    run(|rt| async move {
        for entries in [1, 2, 63, 64, 65, 128, 200, RING, RING + 1, RING + 44, 2 * RING + 64] {
            let last = entries + 1;
            let disk = written(&rt, entries, last).await;
            let mut found = scan_of(&disk, &buckets()).await.unwrap();
            assert_eq!((found.replay.newest, found.replay.oldest), (JournalSeq(last), JournalSeq(last)));
            assert_eq!(found.replay.entries.len(), 1, "{entries}");
            for bucket in 0..4 {
                let newest = newest_in(bucket, entries);
                let beside = found.ring.newest_beside(JournalSeq(newest));
                assert_eq!(beside, JournalSeq(newest), "{entries}: bucket {bucket}");
                if newest > 0 {
                    let one_more = found.ring.newest_beside(JournalSeq(newest + 1));
                    assert_ne!(one_more, JournalSeq(newest), "{entries}: bucket {bucket}");
                }
            }
            let used = (entries - 1) % BUCKET + 1;
            // Three other buckets are free: none of their entries is needed.
            assert_eq!(found.ring.left(), (Sectors(RING - used), Sectors(RING)), "{entries}");
            let slot = found.ring.take(512, JournalSeq(last + 1));
            let next =
                RingSlot { bucket: (entries / BUCKET % 4) as usize, offset: Sectors(entries % BUCKET) };
            assert_eq!(slot, next, "{entries}");
        }
    });
}

#[test]
fn needed_entries_are_replayed_in_their_order() {
    run(|rt| async move {
        for (entries, needed) in [(10, 4), (70, 60), (100, 2), (RING + 10, RING - 5)] {
            let disk = written(&rt, entries, needed).await;
            let found = scan_of(&disk, &buckets()).await.unwrap();
            let seqs: Vec<u64> = found.replay.entries.iter().map(|e| e.seq.0).collect();
            assert_eq!(seqs, (needed..entries + 2).collect::<Vec<_>>(), "{entries}");
            for e in &found.replay.entries {
                assert_eq!(e.keys, [Bkey::hole(Inode(3), Sector(8 * (e.seq.0 - 2) + 8), Sectors(8))]);
            }
            let (free, total) = found.ring.free();
            let buckets_needed = (entries - 1) / BUCKET - (needed - 2) / BUCKET + 1;
            assert_eq!((free as u64, total), (4 - buckets_needed, 4), "{entries}");
        }
    });
}

/// The tenth entry of a bucket was not written to its end, or not at all: the ninth is the newest.
#[test]
fn a_torn_entry_is_none() {
    run(|rt| async move {
        for torn in [false, true] {
            let disk = written(&rt, 10, 11).await;
            let at = Sector(6 * BUCKET + 9);
            let (mut buffer, _) = disk.read(at, rt.pool().take(512)).await;
            buffer.as_mut()[if torn { 100.. } else { 0.. }].fill(0x55);
            disk.write(at, buffer, true).await.unwrap();
            let mut found = scan_of(&disk, &buckets()).await.unwrap();
            assert_eq!(found.replay.newest, JournalSeq(10));
            let slot = found.ring.take(512, JournalSeq(11));
            assert_eq!(slot, RingSlot { bucket: 0, offset: Sectors(9) });
        }
    });
}

#[test]
fn a_journal_without_an_entry_is_damage() {
    run(|rt| async move {
        let disk = Disk::new(TestDisk::new(8192), rt.clone());
        for (ring, place) in [
            (buckets(), "sector 384: journal: expected at least one valid entry in 4 journal"),
            (Vec::new(), "sector 0: journal"),
        ] {
            let refused = scan_of(&disk, &ring).await.map(|f| f.replay).unwrap_err().to_string();
            assert!(refused.contains(place) && refused.contains("test disk"), "{refused}");
        }
    });
}
