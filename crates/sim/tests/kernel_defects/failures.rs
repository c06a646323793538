//! Defects of the kernel's bcache with failing devices, which ubcache does not have.

use format::{BackingState, CacheMode};
use sim::disk::{Fault, Kind, Matching};
use sim::hardware::Layout;
use sim::world::Order;

use crate::stage::{boot, new_hardware, on_backing, play};

/// Every request of these kinds fails from now on.
fn all_of(kinds: &[Kind]) -> Vec<Fault> {
    let one = |k: &Kind| Fault { matching: Matching::all(*k), skip: 0, count: u32::MAX };
    kinds.iter().map(one).collect()
}

const EVERYTHING: [Kind; 4] = [Kind::Read, Kind::Write, Kind::DurableWrite, Kind::Flush];

/// Defect 1. When a cache fails whose device is clean, the kernel serves the device without it but leaves its superblock
/// attached and clean. A user's SSD dropped off the bus and came back at the next boot: reads returned data from
/// before everything written in between. Here the superblock says "stale" before the device is served alone, and the
/// cache comes back empty for it.
#[test]
fn d01_a_cache_that_was_away_comes_back_empty() {
    let hardware = new_hardware(3, Layout::small(CacheMode::Writethrough));
    let (mut m, b) = boot(&hardware, Order::Fifo);
    let b = m.block_on(async move {
        b.tune("sequential_cutoff", "0").await;
        b.write(100, 16, 1).await;
        b.flush().await;
        b.sleep_ms(5).await;
        // The clean copies are in a leaf on the medium: the cache will find them again.
        let b = b.restart().await;
        b.tune("sequential_cutoff", "0").await;
        let before = b.backing().counters().reads;
        b.versions(100, 16).await;
        assert_eq!(b.backing().counters().reads, before, "the cache has it");
        b.sleep_ms(500).await;
        b.hardware.cache.set_faults(all_of(&EVERYTHING));
        // The first write to notice: the cache cannot forget its copy durably.
        b.write(100, 8, 2).await;
        b.write(104, 8, 3).await;
        b.flush().await;
        assert!(b.set.failure().is_some());
        assert_eq!(b.v.state(), Some(BackingState::Stale));
        assert_eq!(b.versions(100, 16).await, [[2; 4], [3; 4], [3; 4], [1; 4]].concat());
        b
    });
    drop(m);
    b.end();
    hardware.disks().for_each(|d| d.kill());
    let (mut m, b) = boot(&hardware, Order::Fifo);
    let theirs = b.clone();
    m.block_on(async move {
        assert_eq!(theirs.v.state(), Some(BackingState::Clean), "attached anew");
        assert_eq!(theirs.versions(100, 16).await, [[2; 4], [3; 4], [3; 4], [1; 4]].concat());
    });
    b.end();
}

/// Limit 9. The kernel reports an error of the cache device to the client that wrote, although the backing device could have
/// taken the data. Here it does.
#[test]
fn d09_a_write_that_the_cache_fails_goes_to_the_backing_device() {
    play(Layout::small(CacheMode::Writeback), |b| async move {
        b.tune("writeback_running", "0").await;
        b.write(500, 8, 1).await;
        b.flush().await;
        b.sleep_ms(500).await;
        // What the cache is asked to write next is the data.
        let once = Fault { matching: Matching::all(Kind::Write), skip: 0, count: 1 };
        b.hardware.cache.set_faults(vec![once]);
        b.try_write(100, 8, 2, false).await.unwrap();
        assert_eq!(b.hardware.cache.counters().failed, 1);
        assert_eq!(on_backing(&b.hardware, 100, 8), [2; 8]);
        assert_eq!(b.versions(100, 8).await, [2; 8]);
        // Over dirty data too, and still by the rules of durability.
        let once = Fault { matching: Matching::all(Kind::Write), skip: 0, count: 1 };
        b.hardware.cache.set_faults(vec![once]);
        b.try_write(500, 8, 3, true).await.unwrap();
        assert_eq!(b.hardware.cache.counters().failed, 2);
        assert_eq!(b.versions(500, 8).await, [3; 8]);
        assert!(b.set.failure().is_none());
    });
}

/// Defect 10. In writeback mode the kernel forgets the result of the flush that it sends to the backing device. An
/// application's fsync succeeded while the disk had reported that it lost the data. Here the flush fails, and goes
/// on failing: the disk may say yes the next time although the data is gone.
#[test]
fn d10_a_flush_that_the_backing_device_fails_is_reported() {
    play(Layout::small(CacheMode::Writearound), |b| async move {
        b.write(100, 8, 1).await;
        b.tune("cache_mode", "writeback").await;
        b.write(200, 8, 1).await;
        let once = Fault { matching: Matching::all(Kind::Flush), skip: 0, count: 1 };
        b.backing().set_faults(vec![once]);
        assert!(b.v.flush().await.is_err());
        assert!(b.v.flush().await.is_err(), "the data may be gone although the device says yes now");
    });
}

/// Limit 18. While the kernel takes a failed cache away, requests to its devices fail, clean ones too: file systems
/// went read-only because of a cache that nothing depended on. Here every request in the meantime is answered, and
/// right.
#[test]
fn d18_a_clean_device_answers_every_request_while_its_cache_fails() {
    // Which request notices depends on what fails.
    for kinds in [&EVERYTHING[..], &[Kind::Read], &[Kind::Write], &[Kind::Flush]] {
        let kinds = kinds.to_vec();
        play(Layout::small(CacheMode::Writethrough), |b| async move {
            b.tune("sequential_cutoff", "0").await;
            b.versions(0, 256).await;
            b.sleep_ms(5).await;
            let b = b.restart().await;
            b.tune("sequential_cutoff", "0").await;
            b.hardware.cache.set_faults(all_of(&kinds));
            let tasks: Vec<_> = (0..48u64)
                .map(|i| {
                    let (b, at) = (b.clone(), i % 24 * 8);
                    b.rt.clone().spawn(async move {
                        b.sleep_ms(i / 8).await;
                        if i % 3 == 0 {
                            b.try_write(at, 8, i as u32 + 1, i % 2 == 0).await?;
                        }
                        if i % 7 == 0 {
                            b.v.flush().await?;
                        }
                        b.try_read(at, 8).await
                    })
                })
                .collect();
            for (i, t) in tasks.into_iter().enumerate() {
                let answer = t.await;
                assert!(answer.is_ok(), "{kinds:?}: client {i}: {answer:?}");
            }
            let found = b.versions(0, 256).await;
            assert_eq!(found, on_backing(&b.hardware, 0, 256));
            let newest =
                |at: u64| (0..48).rev().find(|i| i % 3 == 0 && i % 24 == at / 8).map_or(0, |i| i + 1);
            for at in 0..256 {
                assert_eq!(u64::from(found[at as usize]), newest(at), "{kinds:?}: sector {at}");
            }
        });
    }
}

/// What belongs to 18: an operator who sets `stop_when_cache_set_failed` gets a device that fails with its cache,
/// and its superblock still names the cache.
#[test]
fn d18_a_device_that_is_to_stop_with_its_cache_does() {
    play(Layout::small(CacheMode::Writethrough), |b| async move {
        b.tune("stop_when_cache_set_failed", "always").await;
        b.write(100, 8, 1).await;
        b.flush().await;
        b.hardware.cache.set_faults(all_of(&EVERYTHING));
        b.sleep_ms(500).await;
        let mut failed = false;
        for i in 0..64 {
            failed |= b.try_read(i * 8, 8).await.is_err();
        }
        assert!(failed && b.set.failure().is_some());
        assert!(b.try_read(100, 8).await.is_err() && b.try_write(100, 8, 2, false).await.is_err());
        assert_eq!(b.v.state(), Some(BackingState::Clean));
        assert_eq!(on_backing(&b.hardware, 100, 8), [1; 8]);
    });
}
