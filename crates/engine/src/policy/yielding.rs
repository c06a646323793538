//! Writeback beside clients: how much of the time it leaves to them, when it must hurry, and how clients are held back where
//! it cannot keep up.
//!
//! Writeback reads the cache device and writes the backing device, which clients wait for as well. While nobody waits it
//! goes at the controller's rate without a break. While clients keep the devices busy it gets the smaller a share of the time
//! the less the cache needs room: data that stays dirty a little longer costs nothing then, and what is overwritten
//! meanwhile need never be written. A cache that fills up needs room in time, and one that is nearly full takes new
//! data as fast as writeback makes room. Decision 016. Owns these measures and rules. Must not know who waits for what.
//!
//! *Invariants:* shares are in `LEAST..=1`: writeback always goes on; where the cache needs room, nobody is spared; no
//! write is held back for longer than its caller says.

use io::Nanos;

/// Writeback's share of the time while clients are always waiting and the cache has room.
const LEAST: f64 = 0.05;
/// How long it takes to forget: what was a second ago counts for little.
const MEMORY: Nanos = Nanos::from_secs(1);
/// Buckets in use from which they count as pressure, and from which there is no more to give: between the two go writes
/// around the cache (decision 011).
const IN_USE: (f64, f64) = (85.0, 95.0);
/// Writeback hurries if what is left to fill lasts for less than this.
const ROOM_FOR_SECONDS: f64 = 12.0;
/// Share of used buckets from which writes that need new room are held back; so many percent above it, they are as fast
/// as writeback, and at most so many times slower than that.
pub const THROTTLE_FROM_PERCENT: u32 = 88;
const THROTTLE_EVEN: f64 = 3.0;
const THROTTLE_MOST: f64 = 2.0;
/// Share of used buckets from which writes begin to go around the cache although they are held back. Each takes from the
/// disk what writes back dozens of blocks, so it is the last resort.
pub const BYPASS_FROM_PERCENT: u8 = 93;
/// The longest pause between two batches.
const LONGEST_PAUSE: Nanos = Nanos::from_secs(5);

/// The share of the time in which somebody waits, of late.
#[derive(Clone, Copy, Debug, Default)]
pub struct Busy {
    waiting: bool,
    since: Nanos,
    share: f64,
}

impl Busy {
    /// From now on somebody waits, or nobody.
    pub fn waits(&mut self, waiting: bool, now: Nanos) {
        self.share = self.share(now);
        self.since = now;
        self.waiting = waiting;
    }

    /// The share as of now, from 0 to 1.
    pub fn share(&self, now: Nanos) -> f64 {
        let span = now.since(self.since).0 as f64;
        let weight = span / (span + MEMORY.0 as f64);
        let towards = if self.waiting { 1.0 } else { 0.0 };
        self.share + (towards - self.share) * weight
    }
}

/// How much the cache needs room.
#[derive(Clone, Copy, Debug)]
pub struct Pressure {
    /// Dirty data in percent of the cache.
    pub dirty_percent: f64,
    /// Buckets that cannot be reused at once, in percent.
    pub in_use_percent: f64,
    /// `cutoff_writeback` and `cutoff_writeback_sync`: up to the middle between them there is room for dirty data, with
    /// more than the second there is none.
    pub cutoffs: (u8, u8),
}

impl Pressure {
    /// From 0, plenty of room, to 1, none.
    fn degree(&self) -> f64 {
        let between = |x: f64, (low, high): (f64, f64)| ((x - low) / (high - low).max(1.0)).clamp(0.0, 1.0);
        let (low, high) = (f64::from(self.cutoffs.0), f64::from(self.cutoffs.1));
        let dirty = between(self.dirty_percent, ((low + high) / 2.0, high));
        dirty.max(between(self.in_use_percent, IN_USE))
    }
}

/// The share of the time that writeback gets. `busy`: the share of the time in which clients wait.
pub fn share(busy: f64, pressure: &Pressure) -> f64 {
    let least = LEAST + (1.0 - LEAST) * pressure.degree();
    1.0 - busy.clamp(0.0, 1.0) * (1.0 - least)
}

/// How long to rest after a batch that took so long, to have no more than a share of the time.
pub fn pause(took: Nanos, share: f64) -> Nanos {
    let rest = took.0 as f64 * (1.0 / share.clamp(LEAST, 1.0) - 1.0);
    // Saturates; negative or undefined never happens.
    Nanos(rest as u64).min(LONGEST_PAUSE)
}

/// How fast something happens of late, from counts that are looked at now and then.
#[derive(Clone, Copy, Debug, Default)]
pub struct RateEstimator {
    count: u64,
    at: Nanos,
    per_second: f64,
}

impl RateEstimator {
    /// `count` as of now. Returns how much is added to it in a second.
    pub fn observe(&mut self, count: u64, now: Nanos) -> f64 {
        let span = now.since(self.at);
        // Looked at more often, the same counts would be told from each other by chance.
        if span >= Nanos::from_ms(100) {
            let seconds = span.as_seconds();
            let weight = seconds / (seconds + 2.0 * MEMORY.as_seconds());
            let rate = count.saturating_sub(self.count) as f64 / seconds;
            self.per_second += (rate - self.per_second) * weight;
            (self.count, self.at) = (count, now);
        }
        self.per_second
    }
}

/// Whether a cache with so many buckets to spare had better make room now, if so many are filled each second; or
/// because it is so full that filling it has slowed down.
pub fn is_room_urgent(spare: u32, filled_per_second: f64, in_use_percent: u32) -> bool {
    in_use_percent >= THROTTLE_FROM_PERCENT || f64::from(spare) < filled_per_second * ROOM_FOR_SECONDS
}

/// Holds back writes that need new room as much as writeback makes room: a cache that is nearly full answers them at the
/// speed of its writeback, and evenly.
#[derive(Clone, Copy, Debug, Default)]
pub struct Throttle {
    due: Nanos,
}

impl Throttle {
    /// When a write of `sectors` may go on. `cleaned_per_second`: sectors that writeback makes clean in a second.
    pub fn due(
        &mut self,
        now: Nanos,
        sectors: u64,
        cleaned_per_second: f64,
        in_use_percent: u32,
        most: Nanos,
    ) -> Nanos {
        let over = f64::from(in_use_percent.saturating_sub(THROTTLE_FROM_PERCENT));
        if over == 0.0 || cleaned_per_second <= 0.0 {
            return now;
        }
        let span = sectors as f64 / cleaned_per_second * (over / THROTTLE_EVEN).min(THROTTLE_MOST) * 1e9;
        let from = self.due.max(now);
        // Whoever has waited long enough goes on, and others do not have to wait for what was not waited for.
        self.due = from.after(Nanos(span as u64)).min(now.after(most));
        self.due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOM: Pressure = Pressure { dirty_percent: 20.0, in_use_percent: 60.0, cutoffs: (40, 70) };

    #[test]
    fn clients_that_wait_all_the_time_are_busy_and_are_forgotten() {
        let mut b = Busy::default();
        let second = |s: u64| Nanos::from_secs(s);
        assert_eq!(b.share(second(3)), 0.0);
        b.waits(true, second(10));
        assert!(b.share(second(10)) < 0.01);
        assert!(b.share(second(40)) > 0.95);
        b.waits(false, second(40));
        assert!(b.share(second(41)) < 0.6);
        assert!(b.share(second(70)) < 0.05);
    }

    #[test]
    fn a_client_that_waits_half_of_the_time_counts_half() {
        let mut b = Busy::default();
        for ms in 0..5000 {
            b.waits(ms % 2 == 0, Nanos::from_ms(ms));
        }
        assert!((0.4..0.6).contains(&b.share(Nanos::from_ms(5000))), "{b:?}");
    }

    #[test]
    fn nobody_waits_or_no_room_is_no_reason_to_rest() {
        assert_eq!(share(0.0, &ROOM), 1.0);
        assert_eq!(pause(Nanos::from_ms(100), 1.0), Nanos(0));
        for full in [Pressure { dirty_percent: 75.0, ..ROOM }, Pressure { in_use_percent: 96.0, ..ROOM }] {
            assert_eq!(share(1.0, &full), 1.0, "{full:?}");
        }
    }

    #[test]
    fn busy_clients_leave_the_less_the_more_room_there_is() {
        let with = |dirty_percent| share(1.0, &Pressure { dirty_percent, ..ROOM });
        assert!((with(20.0) - LEAST).abs() < 1e-9);
        assert!((with(54.9) - LEAST).abs() < 1e-9);
        assert!((with(62.5) - (1.0 + LEAST) / 2.0).abs() < 1e-9);
        assert!(share(0.5, &ROOM) > 0.5);
        let ms = |n| Nanos::from_ms(n);
        assert!(pause(ms(100), with(20.0)) >= ms(1899) && pause(ms(100), with(20.0)) <= ms(1901));
    }

    #[test]
    fn a_rate_estimator_follows_the_count() {
        let mut p = RateEstimator::default();
        for ms in (0..20_000).step_by(10) {
            p.observe(ms * 3, Nanos::from_ms(ms));
        }
        let rate = p.observe(60_000, Nanos::from_ms(20_000));
        assert!((2900.0..3100.0).contains(&rate), "{rate}");
        let rate = p.observe(60_000, Nanos::from_ms(40_000));
        assert!(rate < 500.0, "{rate}");
        let lasts_for = |seconds: f64| (20.0 * seconds) as u32;
        assert!(is_room_urgent(lasts_for(ROOM_FOR_SECONDS - 1.0), 20.0, 50));
        assert!(!is_room_urgent(lasts_for(ROOM_FOR_SECONDS + 1.0), 20.0, 50));
        assert!(!is_room_urgent(0, 0.0, 50) && is_room_urgent(500, 0.0, 90));
    }

    #[test]
    fn a_cache_that_is_nearly_full_goes_at_the_speed_of_its_writeback() {
        let (mut p, most) = (Throttle::default(), Nanos::from_ms(50));
        let now = Nanos::from_secs(7);
        assert_eq!(p.due(now, 8, 8000.0, 88, most), now);
        assert_eq!(p.due(now, 8, 0.0, 94, most), now);
        // A thousand requests of 8 sectors a second.
        assert_eq!(p.due(now, 8, 8000.0, 91, most), now.after(Nanos::from_ms(1)));
        assert_eq!(p.due(now, 8, 8000.0, 91, most), now.after(Nanos::from_ms(2)));
        assert_eq!(p.due(now, 8, 8000.0, 99, most), now.after(Nanos::from_ms(4)));
        assert_eq!(p.due(now, 8_000_000, 8000.0, 91, most), now.after(most));
    }

    /// Sums by hand, at the ends of each range and within it.
    #[test]
    fn shares_and_pauses_by_hand() {
        let near =
            |found: f64, wanted: f64| assert!((found - wanted).abs() < 1e-9, "{found}, expected {wanted}");
        // From 55 to 70 % dirty, from 85 to 95 % in use.
        for (dirty, in_use, degree) in [
            (55.0, 60.0, 0.0),
            (58.0, 60.0, 0.2),
            (70.0, 60.0, 1.0),
            (20.0, 85.0, 0.0),
            (20.0, 86.0, 0.1),
            (58.0, 94.0, 0.9),
            (67.0, 86.0, 0.8),
        ] {
            let p = Pressure { dirty_percent: dirty, in_use_percent: in_use, cutoffs: (40, 70) };
            near(p.degree(), degree);
            near(share(1.0, &p), 0.05 + 0.95 * degree);
            near(share(0.25, &p), 1.0 - 0.25 * (1.0 - 0.05 - 0.95 * degree));
            near(share(7.0, &p), share(1.0, &p));
        }
        let ms = Nanos::from_ms;
        assert_eq!(pause(ms(100), 0.5), ms(100));
        assert_eq!(pause(ms(100), 0.2), ms(400));
        assert_eq!(pause(ms(100), 0.01), ms(1900), "never less than the least share");
        assert_eq!(pause(ms(300), 0.05), Nanos::from_secs(5), "19 times as long is too long");
        let mut b = Busy::default();
        b.waits(true, ms(1000));
        near(b.share(ms(2000)), 0.5);
        near(b.share(ms(4000)), 0.75);
        b.waits(false, ms(4000));
        near(b.share(ms(6000)), 0.25);
        b.waits(false, ms(6000));
        near(b.share(ms(7000)), 0.125);
    }

    /// Counts are looked at after a tenth of a second at least, and the newest counts by its time.
    #[test]
    fn rate_estimates_by_hand() {
        let near =
            |found: f64, wanted: f64| assert!((found - wanted).abs() < 1e-9, "{found}, expected {wanted}");
        let mut p = RateEstimator::default();
        near(p.observe(500, Nanos::from_ms(99)), 0.0);
        near(p.observe(500, Nanos::from_ms(100)), 5000.0 * 0.1 / 2.1);
        let before = 5000.0 * 0.1 / 2.1;
        near(p.observe(900, Nanos::from_ms(150)), before);
        let after = before + (400.0 / 2.0 - before) * 0.5;
        near(p.observe(900, Nanos::from_ms(2100)), after);
        near(p.observe(0, Nanos::from_ms(4100)), after / 2.0);
        assert!(is_room_urgent(119, 10.0, 50) && !is_room_urgent(120, 10.0, 50));
        assert!(is_room_urgent(1000, 0.0, 88) && !is_room_urgent(1000, 0.0, 87));
    }

    #[test]
    fn odd_cutoffs_and_long_batches_are_harmless() {
        let odd = Pressure { dirty_percent: 50.0, in_use_percent: 0.0, cutoffs: (70, 70) };
        assert!(share(1.0, &odd) > 0.0);
        assert_eq!(pause(Nanos::from_secs(100), 0.0), LONGEST_PAUSE);
        assert_eq!(pause(Nanos(u64::MAX), f64::NAN), Nanos(0));
    }
}
