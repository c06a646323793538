//! Scrubs: what has no checksum gets one, damage is found without a client, and nothing else counts as damaged. The operator
//! accepts or drops damaged dirty data.
#![allow(clippy::unwrap_used)]

use engine::tunables::Overwrite;
use engine::{Resolution, ScrubReport, SetEvent, SetOptions};
use format::{CacheMode, FooterKey, RawSuperblock, Sector, Sectors};
use io::Rng;
use sim::damaged_data::flip;
use sim::disk::Retained;
use sim::hardware::Layout;
use sim::scenario::{Boot, Scenario};
use sim::stamp::{Content, SECTOR, decode};

async fn open(b: &Boot, overwrite: Overwrite) {
    let mut options = SetOptions::default();
    options.tunables.overwrite_in_place = overwrite;
    options.tunables.scrub_share = 100;
    b.open_with(options).await;
    b.stay_dirty(0).await;
}

fn events(b: &Boot) -> Vec<String> {
    let shown = |e: SetEvent| match e {
        SetEvent::DamagedData { sector, dirty, .. } => Some(format!("{} dirty={dirty}", sector.0)),
        SetEvent::DamageResolved { sector, sectors, decision, .. } => {
            Some(format!("{}+{} {decision:?}", sector.0, sectors.0))
        }
        SetEvent::Scrubbed { report } => Some(format!("scrubbed: {} problems", report.problems())),
        _ => None,
    };
    b.set().take_events().into_iter().filter_map(shown).collect()
}

/// A power loss leaves buckets without a footer. A scrub gives them one, and after the next power loss every block is verified.
#[test]
fn a_scrub_gives_checksums_to_blocks_that_have_none() {
    let mut scenario = Scenario::new(1, Layout::with_checksums(CacheMode::Writeback), 0);
    for round in 0..3 {
        scenario.boot(move |b| async move {
            open(&b, Overwrite::Off).await;
            match round {
                0 => {
                    for at in 0..70 {
                        assert!(b.clients[0].write(at * 3, 1, false).await);
                    }
                    assert!(b.clients[0].flush().await);
                    // The last bucket is open, and has no footer.
                    assert!(b.clients[0].write(500, 3, true).await);
                }
                1 => {
                    assert_eq!(b.set().checksum_coverage().unread_blocks, 73);
                    let report = b.set().scrub().await.unwrap();
                    assert!(report.learnt_blocks > 0, "{report:?}");
                    assert_eq!(report.verified_blocks + report.learnt_blocks, 73, "{report:?}");
                    assert_eq!((report.unverified_blocks, report.problems()), (0, 0));
                    let coverage = b.set().checksum_coverage();
                    assert_eq!((coverage.unread_blocks, coverage.unverified_blocks), (0, 0));
                    assert_eq!(b.set().checksum_counters().learnt_blocks, report.learnt_blocks);
                    assert!(b.clients[0].flush().await);
                    assert_eq!(events(&b), ["scrubbed: 0 problems"]);
                    assert!(b.set().scrub_figures().completed_unix_seconds.is_some());
                }
                _ => {
                    let report = b.set().scrub().await.unwrap();
                    assert_eq!(report, ScrubReport { verified_blocks: 73, ..ScrubReport::default() });
                }
            }
        });
        scenario.power_loss(Retained::Nothing);
    }
    scenario.judge().happy_end();
}

/// Damage is found without a read of a client: clean data is dropped, dirty data is listed once.
#[test]
fn a_scrub_finds_damage() {
    let mut scenario = Scenario::new(1, Layout::with_checksums(CacheMode::Writeback), 0);
    scenario.boot(|b| async move {
        open(&b, Overwrite::Off).await;
        assert!(b.clients[0].read(200, 50).await.is_some());
        assert!(b.clients[0].write(100, 50, true).await);
        b.sleep_ms(1000).await;
        assert_eq!(flip(&b, 110..113), 3);
        assert_eq!(flip(&b, 220..222), 2);
        for round in 0..2 {
            let report = b.set().scrub().await.unwrap();
            assert_eq!(report.damaged_dirty_blocks, 3, "{report:?}");
            assert_eq!(report.damaged_clean_blocks, if round == 0 { 2 } else { 0 }, "{report:?}");
            let mut said = events(&b);
            assert_eq!(said.pop().unwrap(), format!("scrubbed: {} problems", if round == 0 { 5 } else { 3 }));
            said.sort();
            let all =
                ["110 dirty=true", "111 dirty=true", "112 dirty=true", "220 dirty=false", "221 dirty=false"];
            assert_eq!(said, if round == 0 { &all[..] } else { &[] }, "each block is reported once");
        }
        let damaged = b.set().damaged();
        assert_eq!(damaged.len(), 1);
        assert_eq!((damaged[0].sector, damaged[0].sectors), (Sector(110), Sectors(3)));
        assert!(damaged[0].is_registered);
        assert!(b.clients[0].read(200, 50).await.is_some());
        assert!(b.clients[0].write(110, 3, true).await);
        assert_eq!(b.set().damaged(), []);
        assert_eq!(b.set().scrub().await.unwrap().problems(), 0);
    });
    scenario.power_loss(Retained::Nothing).judge().happy_end();
}

/// What sector `at` of the volume has: the bytes of the client with one bit flipped, or a sector that was never written.
async fn content(b: &Boot, at: u64) -> Option<Content> {
    let buffer = b.rt.pool().take(SECTOR);
    let (buffer, result) = b.volume(0).read(Sector(at), Sectors(1), buffer, 0).await;
    result.ok().map(|()| decode(buffer.as_slice()))
}

/// Accepted bytes are valid: they are read, also after a power loss, and written back. Dropped blocks have the content of the
/// backing device, also after a power loss.
#[test]
fn damaged_data_is_accepted_or_dropped_for_good() {
    for (how, closed, seed) in [
        (Resolution::Accepted, true, 1),
        (Resolution::Accepted, false, 2),
        (Resolution::Dropped, true, 3),
        (Resolution::Dropped, false, 4),
    ] {
        let mut scenario = Scenario::new(seed, Layout::with_checksums(CacheMode::Writeback), 0);
        if closed {
            scenario.boot_and_stop(|b| async move {
                open(&b, Overwrite::Off).await;
                assert!(b.clients[0].write(100, 50, true).await);
                b.stop().await;
            });
        }
        for round in 0..2 {
            scenario.boot(move |b| async move {
                open(&b, Overwrite::Off).await;
                b.clients[0].set_tolerant(true);
                if round == 0 {
                    if !closed {
                        assert!(b.clients[0].write(100, 50, true).await);
                    }
                    assert!(flip(&b, 110..113) >= 3);
                    assert_eq!(b.set().scrub().await.unwrap().damaged_dirty_blocks, 3);
                    drop(events(&b));
                    let inode = b.volume(0).inode();
                    let one = Some((Sector(111), Sectors(1)));
                    let resolved = b.set().resolve_damaged(inode, one, how).await.unwrap();
                    assert_eq!(resolved, Sectors(1));
                    assert_eq!(b.set().damaged().len(), 2, "the sectors before and behind it");
                    assert_eq!(events(&b), [format!("111+1 {how:?}")]);
                    assert_eq!(b.set().resolve_damaged(None, None, how).await.unwrap(), Sectors(2));
                    assert_eq!(b.set().damaged(), []);
                    assert_eq!(b.set().resolve_damaged(None, None, how).await.unwrap(), Sectors(0));
                }
                for at in 110..113 {
                    let found = content(&b, at).await;
                    let written = matches!(found, Some(Content::Data { volume: 0, write, .. }) if write > 0);
                    match how {
                        Resolution::Accepted => assert!(found.is_some(), "{at}: {found:?}"),
                        Resolution::Dropped => assert!(found.is_some() && !written, "{at}: {found:?}"),
                    }
                }
                assert_eq!(b.set().scrub().await.unwrap().problems(), 0);
                if round == 1 {
                    b.volume(0).drained().await.unwrap();
                    assert!(b.clients[0].write(110, 3, true).await);
                    assert!(b.clients[0].read(100, 50).await.is_some());
                }
            });
            scenario.power_loss(Retained::Nothing);
        }
        scenario.judge().happy_end();
    }
}

/// Clients overwrite data in place while a scrub takes checksums of it. Nothing counts as damaged, neither at once nor after a
/// power loss.
#[test]
pub fn a_scrub_beside_overwriting_in_place_raises_no_alarm() {
    for seed in 0..12 {
        let mut scenario = Scenario::new(seed, Layout::with_checksums(CacheMode::Writeback), 0);
        for round in 0..4 {
            scenario.boot(move |b| async move {
                open(&b, Overwrite::Always).await;
                let rng = &mut Rng::new(seed * 7 + round);
                let client = b.clients[0].clone();
                if round == 0 {
                    assert!(client.write(0, 64, true).await);
                }
                let scrubs = b.rt.spawn({
                    let set = b.set();
                    async move {
                        for _ in 0..12 {
                            set.scrub().await.unwrap();
                        }
                    }
                });
                for _ in 0..60 {
                    assert!(client.write(rng.below(60), 1 + rng.below(4), rng.chance(1, 6)).await);
                    if rng.chance(1, 10) {
                        assert!(client.flush().await);
                    }
                }
                scrubs.await;
                b.read_all(0).await;
                let counters = b.set().checksum_counters();
                assert_eq!(counters.damaged_blocks, 0, "{counters:?}");
                assert!(round == 0 || counters.learnt_blocks > 0, "{counters:?}");
            });
            scenario.power_loss(if round % 2 == 0 { Retained::Some(seed) } else { Retained::Nothing });
        }
        scenario.judge().happy_end();
    }
}

/// A kernel fills buckets to their end. No footer is written over such data, and none is replaced by zeros.
#[test]
pub fn a_footer_is_not_written_over_data_of_a_kernel() {
    let without = Layout::small(CacheMode::Writeback);
    let mut scenario = Scenario::new(1, without, 0);
    scenario.boot_and_stop(|b| async move {
        open(&b, Overwrite::Off).await;
        assert!(b.clients[0].write(0, 120, true).await);
    });
    // The kernel preserves the key, so its set has one.
    let cache = scenario.hardware.cache.clone();
    let mut bytes = vec![0; 4096];
    cache.image().read(Sector(8), &mut bytes);
    let raw = RawSuperblock::from_prefix(&bytes).unwrap();
    let mut superblock = raw.check_cache(Sectors(1 << 20), 512).unwrap();
    superblock.set_checksum_key(Some(FooterKey(7)));
    cache.put(Sector(8), &superblock.encode());
    for round in 0..2 {
        scenario.boot_and_stop(move |b| async move {
            open(&b, Overwrite::Always).await;
            for at in (round..110).step_by(5) {
                assert!(b.clients[0].write(at, 1, false).await);
            }
            b.set().scrub().await.unwrap();
            b.read_all(0).await;
            for at in (round..110).step_by(7) {
                assert!(b.clients[0].write(at, 1, false).await);
            }
            assert!(b.set().counters().overwrites > 30, "{:?}", b.set().counters());
            b.stop().await;
        });
    }
    scenario.boot(|b| async move {
        open(&b, Overwrite::Off).await;
        b.read_all(0).await;
        assert_eq!(b.set().checksum_counters().damaged_blocks, 0);
    });
    scenario.power_loss(Retained::Nothing).judge().happy_end();
}

/// A set that fails ends its scrub at once, also while the scrub pauses for days because of its rate.
#[test]
fn a_scrub_that_pauses_ends_when_the_set_fails() {
    let mut scenario = Scenario::new(1, Layout::with_checksums(CacheMode::Writeback), 0);
    scenario.boot(|b| async move {
        open(&b, Overwrite::Off).await;
        assert!(b.clients[0].write(0, 8, false).await && b.clients[0].flush().await);
        b.set().set("scrub_rate", "1").await.unwrap();
        let set = b.set();
        let scrub = b.rt.spawn(async move { set.scrub().await });
        b.sleep_ms(1000).await;
        assert!(b.set().scrub_figures().running);
        b.clients[0].set_tolerant(true);
        assert!(b.clients[0].write(64, 8, false).await);
        b.cache.die_after(0);
        // The journal cannot be written.
        b.clients[0].flush().await;
        b.sleep_ms(1000).await;
        assert!(b.set().failure().is_some());
        assert!(scrub.try_take().is_some_and(|ended| ended.is_err()), "the scrub still pauses");
    });
}

/// A scrub that was cancelled continues behind the buckets that it has read, also after a restart. Its rate is limited.
#[test]
fn a_scrub_goes_on_where_it_was_cancelled() {
    let mut scenario = Scenario::new(1, Layout::with_checksums(CacheMode::Writeback), 0);
    for round in 0..2 {
        scenario.boot(move |b| async move {
            open(&b, Overwrite::Off).await;
            if round == 0 {
                for at in 0..140 {
                    assert!(b.clients[0].write(at * 3, 1, false).await);
                }
                // Ten blocks in a second.
                b.set().set("scrub_rate", "5120").await.unwrap();
                let set = b.set();
                let scrub = b.rt.spawn(async move { set.scrub().await });
                b.sleep_ms(8000).await;
                let figures = b.set().scrub_figures();
                assert!(figures.running && (60..100).contains(&figures.done.0), "{figures:?}");
                // The stop ends it.
                b.stop().await;
                assert!(scrub.await.is_err());
            } else {
                let figures = b.set().scrub_figures();
                assert!(
                    figures.is_unfinished && !figures.running && figures.completed_unix_seconds.is_none()
                );
                let report = b.set().scrub().await.unwrap();
                assert!((20..100).contains(&report.verified_blocks), "{report:?}");
                assert!(!b.set().scrub_figures().is_unfinished);
                assert_eq!(b.set().scrub().await.unwrap().verified_blocks, 140);
                b.stop().await;
            }
        });
        scenario.power_loss(Retained::Nothing);
    }
    scenario.judge().happy_end();
}

/// A scrub of a set without checksums is refused, and one that is due begins by itself.
#[test]
fn a_scrub_begins_when_it_is_due() {
    let mut scenario = Scenario::new(1, Layout::small(CacheMode::Writeback), 0);
    scenario.boot_and_stop(|b| async move {
        open(&b, Overwrite::Off).await;
        let refused = b.set().scrub().await.unwrap_err().to_string();
        assert!(refused.contains("no checksums"), "{refused}");
    });
    for (interval, wanted) in [("0", false), ("1", true)] {
        let mut scenario = Scenario::new(1, Layout::with_checksums(CacheMode::Writeback), 0);
        scenario.boot_and_stop(move |b| async move {
            open(&b, Overwrite::Off).await;
            b.set().set("scrub_interval_days", interval).await.unwrap();
            assert!(b.clients[0].write(0, 30, true).await);
            b.sleep_ms(700_000).await;
            let done = || b.set().scrub_figures().completed_unix_seconds;
            assert_eq!(done().is_some(), wanted);
            let first = done();
            b.sleep_ms(70_000_000).await;
            assert_eq!(done(), first, "not yet");
            b.sleep_ms(22_000_000).await;
            assert_eq!(done() > first, wanted);
        });
        scenario.judge().happy_end();
    }
}
