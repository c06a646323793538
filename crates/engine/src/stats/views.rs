//! Hits, misses and bypasses, in total and over the last minutes, hours and days.
//!
//! Owns the cache statistics of one cached device or one set (semantics section 13); the engine counts every event in
//! both. Ticks of 300/22 seconds advance the views five_minute, hour and day: each tick adds the counts since the last
//! tick. The views are scaled by 31/32 at every tick, every 12th tick and every 288th tick. So they do not show the
//! last 13.6 seconds, as in the kernel.
//!
//! The total view is exact and immediate, unlike the kernel's: it is never scaled.
//!
//! *Invariants:* counting never allocates and takes a few additions; ticks are counted by the time that has passed, not
//! by calls. *Must not know:* the definition of a hit.

use format::Sectors;
use io::Nanos;

use crate::policy::bypass::BypassReason;

/// 300/22 seconds (semantics section 13).
pub const TICK: Nanos = Nanos(300_000_000_000 / 22);
/// Views have this many more bits than are shown (semantics section 13).
const FRACTION_BITS: u32 = 16;
/// A view is scaled by 31/32 (semantics section 13).
const DECAY_SHIFT: u32 = 5;
/// After this number of scalings every 64-bit value is 0, because 2^64 · (31/32)^1400 < 1 and each scaling rounds down.
const DECAYS_TO_ZERO: u64 = 1400;

/// A period that statistics are shown for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum View {
    /// Since the start or the last `clear_stats`.
    Total,
    /// The last five minutes or so.
    FiveMinute,
    /// The last hour or so.
    Hour,
    /// The last day or so.
    Day,
}

impl View {
    /// Every view, in the kernel's order.
    pub const ALL: [View; 4] = [View::Total, View::FiveMinute, View::Hour, View::Day];

    /// Name of the view's directory.
    pub const fn name(self) -> &'static str {
        match self {
            View::Total => "stats_total",
            View::FiveMinute => "stats_five_minute",
            View::Hour => "stats_hour",
            View::Day => "stats_day",
        }
    }
}

/// The values of a view.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct ViewValues {
    /// Reads, not bypassed, that were completely served from the cache.
    pub cache_hits: u64,
    /// Reads, not bypassed, with at least one missing piece.
    pub cache_misses: u64,
    /// Bypassed reads that were completely served from the cache.
    pub cache_bypass_hits: u64,
    /// Bypassed reads with at least one missing piece.
    pub cache_bypass_misses: u64,
    /// Misses that were not cached because a write overlapped them.
    pub cache_miss_collisions: u64,
    /// Bytes of bypassed requests.
    pub bypassed_bytes: u64,
}

impl ViewValues {
    /// Hits per reads that were not bypassed, in whole percent; 0 without any.
    pub fn cache_hit_ratio(&self) -> u64 {
        let reads = u128::from(self.cache_hits) + u128::from(self.cache_misses);
        if reads == 0 {
            return 0;
        }
        // The quotient is at most 100.
        (u128::from(self.cache_hits) * 100 / reads) as u64
    }
}

/// Requests that were not cached for one reason.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct ReasonCount {
    /// Requests, or parts of requests.
    pub requests: u64,
    /// Their length in bytes.
    pub bytes: u64,
}

const HITS: usize = 0;
const MISSES: usize = 1;
const BYPASS_HITS: usize = 2;
const BYPASS_MISSES: usize = 3;
const COLLISIONS: usize = 4;
const BYPASSED: usize = 5;
const COUNTERS: usize = 6;

/// One number per counter; `BYPASSED` is in sectors.
type Counts = [u64; COUNTERS];

#[derive(Clone, Debug)]
struct Decaying {
    /// In units of 2^-16.
    scaled: Counts,
    /// Ticks between two scalings.
    period: u64,
}

impl Decaying {
    fn new(period: u64) -> Decaying {
        Decaying { scaled: [0; COUNTERS], period }
    }

    fn add(&mut self, counts: &Counts) {
        for (value, count) in self.scaled.iter_mut().zip(counts) {
            *value = value.saturating_add(count.saturating_mul(1 << FRACTION_BITS));
        }
    }

    /// Scales the view for the ticks number `from + 1` to `from + ticks`.
    fn pass(&mut self, from: u64, ticks: u64) {
        let times = from.saturating_add(ticks) / self.period - from / self.period;
        for _ in 0..times.min(DECAYS_TO_ZERO) {
            for value in &mut self.scaled {
                // value * 31/32 rounded down, without overflow.
                *value -= value.div_ceil(1 << DECAY_SHIFT);
            }
        }
    }

    fn shown(&self) -> Counts {
        self.scaled.map(|value| value >> FRACTION_BITS)
    }
}

/// The cache statistics of a cached device or of a set.
#[derive(Clone, Debug)]
pub struct CacheStats {
    /// Since the last tick.
    recent: Counts,
    total: Counts,
    five_minute: Decaying,
    hour: Decaying,
    day: Decaying,
    reasons: [ReasonCount; BypassReason::COUNT],
    /// Ticks that have passed.
    ticks: u64,
    /// The time of tick number `ticks`.
    last_tick: Nanos,
}

impl CacheStats {
    /// Nothing counted yet; the first tick is due a period after `now`.
    pub fn new(now: Nanos) -> CacheStats {
        CacheStats {
            recent: [0; COUNTERS],
            total: [0; COUNTERS],
            five_minute: Decaying::new(1),
            hour: Decaying::new(12),
            day: Decaying::new(288),
            reasons: [ReasonCount::default(); BypassReason::COUNT],
            ticks: 0,
            last_tick: now,
        }
    }

    /// Counts a read. `hit`: it was completely served from the cache; `bypassed`: it was decided to
    /// bypass. Its bytes are counted by [`CacheStats::bypassed`].
    pub fn read(&mut self, hit: bool, bypassed: bool) {
        let counter = match (bypassed, hit) {
            (false, true) => HITS,
            (false, false) => MISSES,
            (true, true) => BYPASS_HITS,
            (true, false) => BYPASS_MISSES,
        };
        self.count(counter, 1);
    }

    /// Counts a miss that was not cached because a write overlapped it.
    pub fn miss_collision(&mut self) {
        self.count(COLLISIONS, 1);
    }

    /// Counts a request (read, write or discard) that was decided to bypass.
    pub fn bypassed(&mut self, reason: BypassReason, sectors: Sectors) {
        self.count(BYPASSED, sectors.0);
        self.not_cached(reason, sectors);
    }

    /// Counts a part of a request that was to be cached and was not, because no bucket was free or the set is stopping.
    /// Only the counters of the reason show it.
    pub fn not_cached(&mut self, reason: BypassReason, sectors: Sectors) {
        let count = &mut self.reasons[reason.index()];
        count.requests = count.requests.saturating_add(1);
        count.bytes = count.bytes.saturating_add(sectors.bytes());
    }

    /// Carries out the ticks that are due at `now`; returns the time of the next call. Calls in between do nothing.
    /// After a late call all counts belong to the first of the due ticks.
    pub fn tick(&mut self, now: Nanos) -> Nanos {
        let due = now.since(self.last_tick).0 / TICK.0;
        if due > 0 {
            let recent = std::mem::take(&mut self.recent);
            for view in [&mut self.five_minute, &mut self.hour, &mut self.day] {
                view.add(&recent);
                view.pass(self.ticks, due);
            }
            self.ticks = self.ticks.saturating_add(due);
            self.last_tick = self.last_tick.after(Nanos(due.saturating_mul(TICK.0)));
        }
        self.last_tick.after(TICK)
    }

    /// The values of a view.
    pub fn view(&self, view: View) -> ViewValues {
        let counts = match view {
            View::Total => self.total,
            View::FiveMinute => self.five_minute.shown(),
            View::Hour => self.hour.shown(),
            View::Day => self.day.shown(),
        };
        ViewValues {
            cache_hits: counts[HITS],
            cache_misses: counts[MISSES],
            cache_bypass_hits: counts[BYPASS_HITS],
            cache_bypass_misses: counts[BYPASS_MISSES],
            cache_miss_collisions: counts[COLLISIONS],
            bypassed_bytes: Sectors(counts[BYPASSED]).bytes(),
        }
    }

    /// The requests that were not cached for `reason` since the start or the last `clear_total`.
    pub fn reason(&self, reason: BypassReason) -> ReasonCount {
        self.reasons[reason.index()]
    }

    /// Clears the total view, as `clear_stats` does; the other views continue (semantics section 13).
    pub fn clear_total(&mut self) {
        self.total = [0; COUNTERS];
        self.reasons = [ReasonCount::default(); BypassReason::COUNT];
    }

    fn count(&mut self, counter: usize, n: u64) {
        for counts in [&mut self.recent, &mut self.total] {
            counts[counter] = counts[counter].saturating_add(n);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ticks(n: u64) -> Nanos {
        Nanos(n * TICK.0)
    }

    fn hits(stats: &CacheStats) -> [u64; 4] {
        View::ALL.map(|view| stats.view(view).cache_hits)
    }

    #[test]
    fn a_tick_is_300_by_22_seconds() {
        assert_eq!(TICK, Nanos(13_636_363_636));
    }

    #[test]
    fn every_event_has_its_counter() {
        let mut s = CacheStats::new(Nanos(0));
        for (hit, bypassed, times) in [(true, false, 4), (false, false, 3), (true, true, 2), (false, true, 1)]
        {
            for _ in 0..times {
                s.read(hit, bypassed);
            }
        }
        s.miss_collision();
        s.bypassed(BypassReason::Sequential, Sectors(8));
        s.bypassed(BypassReason::Discard, Sectors(2));
        s.not_cached(BypassReason::NoBucket, Sectors(100));
        let total = s.view(View::Total);
        let expected = ViewValues {
            cache_hits: 4,
            cache_misses: 3,
            cache_bypass_hits: 2,
            cache_bypass_misses: 1,
            cache_miss_collisions: 1,
            bypassed_bytes: 5120,
        };
        assert_eq!(total, expected);
        assert_eq!(total.cache_hit_ratio(), 57, "4 of 7");
        assert_eq!(ViewValues::default().cache_hit_ratio(), 0);
        for (cache_hits, cache_misses, percent) in
            [(1, 0, 100), (0, 1, 0), (1, 99, 1), (1, 100, 0), (99, 1, 99), (999, 1, 99), (7, 7, 50)]
        {
            let v = ViewValues { cache_hits, cache_misses, ..ViewValues::default() };
            assert_eq!(v.cache_hit_ratio(), percent, "{cache_hits} of {cache_misses} more");
        }
        let all = ViewValues { cache_hits: u64::MAX, cache_misses: u64::MAX, ..expected };
        assert_eq!(all.cache_hit_ratio(), 50);
        assert_eq!(s.reason(BypassReason::Sequential), ReasonCount { requests: 1, bytes: 4096 });
        assert_eq!(s.reason(BypassReason::NoBucket), ReasonCount { requests: 1, bytes: 51200 });
        assert_eq!(s.reason(BypassReason::Congested), ReasonCount::default());
    }

    #[test]
    fn each_view_decays_at_its_rate() {
        let mut s = CacheStats::new(Nanos(5));
        for _ in 0..100 {
            s.read(true, false);
        }
        let next = s.tick(Nanos(5).after(Nanos(TICK.0 - 1)));
        assert_eq!((next, hits(&s)), (Nanos(5).after(TICK), [100, 0, 0, 0]), "not due yet");
        assert_eq!(s.tick(next), Nanos(5).after(ticks(2)));
        assert_eq!(hits(&s), [100, 96, 100, 100], "100 * 31/32 = 96.9");
        s.tick(Nanos(5).after(ticks(11)));
        // 100 * (31/32)^11 = 70.5
        assert_eq!(hits(&s), [100, 70, 100, 100]);
        s.tick(Nanos(5).after(ticks(12)));
        assert_eq!(hits(&s), [100, 68, 96, 100]);
        s.tick(Nanos(5).after(ticks(288)));
        // 100 * (31/32)^24 = 46.7
        assert_eq!(hits(&s), [100, 0, 46, 96]);
    }

    #[test]
    fn more_than_65535_events_per_tick_are_not_lost() {
        // The kernel reports 8 MiB for this.
        let mut s = CacheStats::new(Nanos(0));
        for _ in 0..40 {
            s.bypassed(BypassReason::Sequential, Sectors(2048));
        }
        s.tick(ticks(1));
        assert_eq!(s.view(View::Total).bypassed_bytes, 40 << 20);
        assert_eq!(s.view(View::Hour).bypassed_bytes, 40 << 20);
        assert_eq!(s.view(View::FiveMinute).bypassed_bytes, (40 << 20) / 32 * 31);
    }

    #[test]
    fn clearing_leaves_the_other_views() {
        let mut s = CacheStats::new(Nanos(0));
        s.read(true, false);
        s.bypassed(BypassReason::Sequential, Sectors(8));
        s.clear_total();
        assert_eq!(s.view(View::Total), ViewValues::default());
        assert_eq!(s.reason(BypassReason::Sequential), ReasonCount::default());
        s.tick(ticks(1));
        assert_eq!(hits(&s), [0, 0, 1, 1]);
    }

    #[test]
    fn everything_saturates_and_fades() {
        let mut s = CacheStats::new(Nanos(0));
        s.bypassed(BypassReason::Sequential, Sectors(u64::MAX));
        s.bypassed(BypassReason::Sequential, Sectors(u64::MAX));
        s.tick(ticks(1));
        assert_eq!(s.view(View::Total).bypassed_bytes, u64::MAX);
        assert_eq!(s.view(View::Day).bypassed_bytes, ((1 << 48) - 1) * 512);
        // The time is about five centuries later.
        assert!(s.tick(Nanos(u64::MAX)) > Nanos(u64::MAX - TICK.0));
        assert_eq!(s.view(View::Day).bypassed_bytes, 0);
        assert_eq!(s.day.scaled, [0; COUNTERS]);
    }

    proptest! {
        /// Sleeping through many ticks is the same as waking at each.
        #[test]
        fn late_ticks_are_made_up_for(
            events in prop::collection::vec((0u64..2000, 0u64..1_000_000_000), 1..8)
        ) {
            let (mut late, mut punctual) = (CacheStats::new(Nanos(0)), CacheStats::new(Nanos(0)));
            let mut at = 0;
            for (pause, sectors) in events {
                for s in [&mut late, &mut punctual] {
                    s.bypassed(BypassReason::Congested, Sectors(sectors));
                    s.read(true, false);
                }
                for _ in 0..pause {
                    at += 1;
                    punctual.tick(ticks(at));
                }
                late.tick(ticks(at));
                for view in View::ALL {
                    prop_assert_eq!(late.view(view), punctual.view(view));
                }
            }
        }
    }
}
