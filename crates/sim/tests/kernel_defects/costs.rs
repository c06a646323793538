//! Defects of the kernel's bcache: unnecessary costs, counted.

use crate::stage::{play, roomy};
use format::{CacheMode, Sector, Sectors, Uuid};

/// Limit 11. Every flush of the kernel goes to the backing device as well and writes a journal entry of its own: a
/// data base that commits all the time made the disk seek all the time. Here a flush in writeback mode leaves a
/// backing device alone that no client wrote to, and flushes at the same time share journal entries.
#[test]
fn d11_flushes_stay_in_the_cache_and_share_journal_entries() {
    play(roomy(CacheMode::Writeback), |b| async move {
        b.tune("writeback_running", "0").await;
        b.tune("sequential_cutoff", "0").await;
        b.write(0, 8, 1).await;
        b.flush().await;
        let backing = b.backing().counters();
        let (entries, flushes) = (b.set.status().journal_written.0, b.set.cache_flushes());
        let tasks: Vec<_> = (0..64)
            .map(|i| {
                let b = b.clone();
                b.rt.clone().spawn(async move {
                    b.write(8 + i * 8, 8, 1).await;
                    b.flush().await;
                })
            })
            .collect();
        for t in tasks {
            t.await;
        }
        assert_eq!(b.backing().counters(), backing, "nothing was sent to the backing device");
        let entries = b.set.status().journal_written.0 - entries;
        let flushes = b.set.cache_flushes() - flushes;
        assert!((1..=6).contains(&entries), "{entries} journal entries for 64 flushes");
        assert!(flushes <= 6, "{flushes} flushes of the cache device for 64 flushes");
        // One that finds nothing to do costs nothing at all.
        let before = (b.hardware.cache.counters(), backing);
        b.flush().await;
        assert_eq!((b.hardware.cache.counters(), b.backing().counters()), before);
    });
}

/// Limit 15. Of a read that is missing in several places the kernel caches the first. The same file read again was
/// still half as slow. Here all of it is in the cache the second time.
#[test]
fn d15_every_missing_piece_of_a_read_gets_cached() {
    play(roomy(CacheMode::Writethrough), |b| async move {
        b.tune("sequential_cutoff", "0").await;
        for at in [108, 124, 140] {
            b.versions(at, 8).await;
        }
        b.sleep_ms(5).await;
        assert_eq!(b.versions(100, 60).await, [0; 60]);
        b.sleep_ms(5).await;
        let before = b.backing().counters();
        assert_eq!(b.versions(100, 60).await, [0; 60]);
        assert_eq!(b.backing().counters(), before, "the backing device was asked again");
    });
}

/// Limit 16. The kernel inserts a key for every 32 MiB of a discard, cached or not: making a file system on a large
/// volume filled the journal. Here a discard costs as much as the cache has of its range.
#[test]
fn d16_a_huge_discard_costs_little_where_little_is_cached() {
    play(roomy(CacheMode::Writeback), |b| async move {
        let tib = 1 << 31;
        let volume = b.set.create_volume(Uuid([7; 16]), Sectors(tib), "huge").await.unwrap();
        for i in 0..3 {
            let data = b.rt.pool().zeroed(4096);
            let at = Sector(i << 28);
            volume.write(at, Sectors(8), data, 0, io::WriteFlags::default()).await.unwrap();
        }
        volume.flush().await.unwrap();
        let before = b.set.status().journal_written;
        volume.discard(Sector(0), Sectors(tib)).await.unwrap();
        volume.flush().await.unwrap();
        let after = b.set.status().journal_written;
        assert!(after.0 - before.0 <= 2, "{before:?} {after:?}");
        assert!(after.1 - before.1 <= 2048, "{before:?} {after:?}: 1 TiB would be 32768 keys");
        assert_eq!(b.set.dirty_sectors(volume.inode().unwrap()), Sectors(0));
        // A cached device with nothing in the cache: the journal has nothing to say.
        b.v.discard(Sector(0), Sectors(2048)).await.unwrap();
        b.flush().await;
        assert_eq!(b.set.status().journal_written.0, after.0);
    });
}
