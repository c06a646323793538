//! Golden sentences for chosen situations.

use engine::figures::{RateReason, SetFigures, VolumeFigures};
use engine::policy::bypass::BypassReason;
use engine::stats::{OpKind, Outcome, Tallies};
use format::Sectors;
use ubcache_metrics::{Explanation, explain};

use crate::rig;

const MIB: i64 = 1 << 20;

/// A quiet set, to be changed into a situation.
fn situation(change: impl FnOnce(&mut VolumeFigures, &mut SetFigures)) -> Explanation {
    let mut set = rig::figures(async |_| ());
    let mut volume = set.volumes[0].clone();
    volume.recent = Tallies::default();
    change(&mut volume, &mut set);
    explain(&volume, Some(&set))
}

fn times(t: &mut Tallies, n: u64, op: OpKind, outcome: Outcome, sectors: u64) {
    for _ in 0..n {
        t.count(op, outcome, Sectors(sectors));
    }
}

#[test]
fn nothing_happens() {
    let e = situation(|_, _| ());
    assert_eq!(e.writeback, ["Nothing is dirty: there is nothing to write back."]);
    assert_eq!(e.bypassed, ["There were no requests in the last five minutes."]);
    assert_eq!(e.hits, ["There were no reads through the cache in the last five minutes."]);
}

#[test]
fn the_controller_is_above_its_target() {
    let e = situation(|v, _| {
        v.dirty = Sectors(409_600);
        v.dirty_target = Sectors(204_800);
        v.writeback.rate_reason = RateReason::Controlled;
        v.writeback.rate.rate = 5 * MIB / 2;
        v.writeback.rate.proportional = 2 * MIB;
        v.writeback.rate.integral = MIB / 2;
    });
    assert_eq!(
        e.writeback,
        ["Writeback runs at 2.5 MiB/s: 200.0 MiB are dirty, 100.0 MiB above the target of 100.0 MiB \
             (writeback_percent 10 of the cache, this device's share); the proportional term, the distance \
             divided by 40 (writeback_rate_p_term_inverse), is 2.0 MiB/s, the integral term 512.0 KiB/s. A \
             larger writeback_percent slows it down, a smaller writeback_rate_p_term_inverse speeds it up."]
    );
}

#[test]
fn the_controller_is_below_its_target() {
    let e = situation(|v, _| {
        v.dirty = Sectors(8);
        v.dirty_target = Sectors(204_800);
        v.writeback.rate_reason = RateReason::Controlled;
        v.writeback.rate.rate = 4096;
    });
    assert_eq!(
        e.writeback,
        [
            "Writeback runs at its minimum, 4.0 KiB/s (writeback_rate_minimum): 4.0 KiB are dirty, which is no \
             more than the target of 100.0 MiB (writeback_percent 10 of the cache, this device's share). A \
             smaller writeback_percent, or a larger writeback_rate_minimum, cleans more."
        ]
    );
}

#[test]
fn each_rate_reason_has_its_own_sentence() {
    use RateReason::*;
    let reasons = [
        Never,
        NothingDirty,
        Stopped,
        Detaching,
        Draining,
        CacheStarved,
        Filling,
        Unthrottled,
        Delayed,
        Idle,
        Fragmented,
        Controlled,
    ];
    let mut sentences: Vec<String> = reasons
        .into_iter()
        .map(|reason| {
            situation(|v, _| {
                v.writeback.rate_reason = reason;
                v.dirty = Sectors(2048);
            })
            .writeback
            .remove(0)
        })
        .collect();
    assert_eq!(
        sentences[2],
        "1.0 MiB are dirty and nothing is written back, because writeback_running is 0. Set \
         writeback_running=1 to resume writeback."
    );
    assert_eq!(
        sentences[8],
        "1.0 MiB are dirty and wait: data is written back when it is 30 s old (writeback_delay), so that data \
         which is overwritten soon is written back only once."
    );
    sentences.sort();
    sentences.dedup();
    assert_eq!(sentences.len(), reasons.len());
}

#[test]
fn writeback_that_yields_says_to_whom_and_how_to_stop_it() {
    let yields = |reason, share| {
        let e = situation(|v, _| {
            v.dirty = Sectors(2048);
            v.writeback.rate_reason = reason;
            v.writeback.share = share;
        });
        e.writeback
    };
    assert_eq!(
        yields(RateReason::Controlled, 0.25)[1],
        "Requests keep the devices busy and the cache has room: writeback takes at most 25 % of the time, and \
         more as dirty data grows from 40 to 70 % of the cache (cutoff_writeback, cutoff_writeback_sync). \
         writeback_controller=kernel turns this off."
    );
    assert_eq!(yields(RateReason::Controlled, 1.0).len(), 1);
    assert_eq!(yields(RateReason::Delayed, 0.25).len(), 1, "what rests anyway yields to nobody");
}

#[test]
fn a_failing_backing_device() {
    let e = situation(|v, _| {
        v.writeback.rate_reason = RateReason::Controlled;
        v.writeback.failures = 2;
        v.writeback.last_error = Some("sdb: write of 8 sectors at sector 16 failed".into());
    });
    assert_eq!(
        e.writeback[1],
        "The last 2 batches failed: sdb: write of 8 sectors at sector 16 failed. Writeback tries again each \
         second."
    );
}

#[test]
fn bypasses_by_frequency() {
    let e = situation(|v, _| {
        let t = &mut v.recent;
        times(t, 60, OpKind::Read, Outcome::Hit, 8);
        times(t, 30, OpKind::Read, Outcome::Bypass(BypassReason::Sequential), 128);
        times(t, 5, OpKind::Write, Outcome::Bypass(BypassReason::Congested), 8);
        times(t, 5, OpKind::Discard, Outcome::Bypass(BypassReason::Discard), 2048);
    });
    assert_eq!(
        e.bypassed,
        [
            "Of 100 requests in the last five minutes 40 (40 %, 6.9 MiB) bypassed the cache:",
            "30 requests (1.9 MiB, sequential): they were part of sequential streams of 4.0 MiB or more; sequential_cutoff sets \
             this limit, 0 caches all streams.",
            "5 requests (5.0 MiB, discard): they were discards, which are not cached.",
            "5 requests (20.0 KiB, congested): the cache device was slow; congested_read_threshold_us and \
             congested_write_threshold_us set the limits, 0 turns them off.",
        ]
    );
    assert_eq!(
        e.hits,
        [
            "Of 60 reads through the cache in the last five minutes 100 % were hits (60 hits, 0 misses, 0 found a part)."
        ]
    );
}

#[test]
fn misses_of_a_cache_that_is_filling() {
    let e = situation(|v, set| {
        times(&mut v.recent, 1, OpKind::Read, Outcome::Hit, 8);
        times(&mut v.recent, 2, OpKind::Read, Outcome::Miss, 8);
        times(&mut v.recent, 1, OpKind::Read, Outcome::Partial, 8);
        set.status.cached_sectors = Sectors(1 << 13);
    });
    assert_eq!(
        e.hits,
        [
            "Of 4 reads through the cache in the last five minutes 25 % were hits (1 hits, 2 misses, 1 found a part).",
            "The cache is still filling: it holds 4.0 MiB, 25 % of 16.0 MiB. Misses fill it.",
        ]
    );
}

#[test]
fn misses_of_a_cache_that_is_too_small() {
    let e = situation(|v, set| {
        times(&mut v.recent, 10, OpKind::Read, Outcome::Miss, 8);
        times(&mut v.recent, 10, OpKind::Read, Outcome::Bypass(BypassReason::Sequential), 8);
        set.status.cached_sectors = Sectors(1 << 15);
    });
    assert_eq!(
        e.hits,
        [
            "Of 10 reads through the cache in the last five minutes 0 % were hits (0 hits, 10 misses, 0 found a part).",
            "10 reads more bypassed the cache and were not cached: see the reasons above.",
            "The cache is full (16.0 MiB of 16.0 MiB) and evicts data as cache_replacement_policy says (the \
             least recently used by default): the working set is larger than the cache, or data is read only \
             once.",
        ]
    );
}

#[test]
fn every_reason_has_advice() {
    for reason in BypassReason::ALL {
        let e = situation(|v, _| times(&mut v.recent, 1, OpKind::Write, Outcome::Bypass(reason), 8));
        assert!(e.bypassed[1].contains(reason.name()), "{:?}", e.bypassed);
        assert!(!e.bypassed[1].contains("the reason was"), "no advice: {:?}", e.bypassed);
    }
}

#[test]
fn all_of_it_as_text() {
    let text = situation(|_, _| ()).to_string();
    let expected = "Writeback\n  Nothing is dirty: there is nothing to write back.\n\nBypassed\n  There were \
                    no requests in the last five minutes.\n\nHits\n  There were no reads through the cache in \
                    the last five minutes.\n";
    assert_eq!(text, expected);
}

/// Requests had waited for a disk for ten minutes, and the answer was that there were none.
#[test]
fn a_device_does_not_answer() {
    let e = situation(|_, _| ()).waiting_for("/dev/hdd", 2, 600);
    assert_eq!(e.writeback[0], "/dev/hdd has not answered for 600 s: 2 requests to it wait.");
    assert_eq!(e.writeback.len(), 2);
    for said in [e.bypassed, e.hits] {
        assert_eq!(said, ["No such request was answered in the last five minutes."]);
    }
}

#[test]
fn a_device_without_a_cache() {
    let set = rig::figures(async |_| ());
    let e = explain(&set.volumes[0], None);
    let alone = "The device is served without a cache: every request goes to the backing device.";
    assert_eq!(
        e,
        Explanation { writeback: vec![alone.into()], bypassed: vec![alone.into()], hits: vec![alone.into()] }
    );
}
