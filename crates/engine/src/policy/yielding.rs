//! Writeback beside clients: the share of the time that writeback takes, when it is urgent, and how writes are
//! throttled when it cannot keep up.
//!
//! Writeback reads the cache device and writes the backing device, for which clients wait, too. While no client waits,
//! writeback runs at the rate of the controller without pauses. While clients keep the devices busy, it gets
//! less time, and more time as the cache fills. In a cache with room, data that stays dirty longer costs nothing, and
//! data that is overwritten meanwhile need not be written. A cache that fills up needs room in time, and a nearly full cache takes
//! new data at the rate at which writeback makes room (decision 016).
//!
//! Owns these measures and rules. Must not know requests or devices.
//!
//! *Invariants:* shares are in `LEAST..=1`, so writeback never stops; a cache without room gives writeback all of the
//! time; no write is delayed for longer than its caller allows.

use io::Nanos;

/// The share of the time for writeback while clients always wait and the cache has room.
const LEAST: f64 = 0.05;
/// The time after which a measurement has half of its weight.
const MEMORY: Nanos = Nanos::from_secs(1);
/// The percentages of buckets in use at which pressure begins, and at which it is greatest. Between the two, more and
/// more writes bypass the cache (decision 011).
const IN_USE: (f64, f64) = (85.0, 95.0);
/// Room is urgent if the buckets that are left last for less than this time.
const ROOM_FOR_SECONDS: f64 = 12.0;
/// The percentage of used buckets above which writes that need new room are throttled. `THROTTLE_EVEN` percent above
/// it, they are as fast as writeback; they are at most `THROTTLE_MOST` times slower than writeback.
pub const THROTTLE_FROM_PERCENT: u32 = 88;
const THROTTLE_EVEN: f64 = 3.0;
const THROTTLE_MOST: f64 = 2.0;
/// The percentage of used buckets above which throttled writes begin to bypass the cache. A write past the cache takes
/// as much time of the disk as writing back dozens of blocks, so it is the last resort.
pub const BYPASS_FROM_PERCENT: u8 = 93;
/// The longest pause between two batches.
const LONGEST_PAUSE: Nanos = Nanos::from_secs(5);

/// Measures the recent share of the time in which a client waits.
#[derive(Clone, Copy, Debug, Default)]
pub struct BusyShare {
    waiting: bool,
    since: Nanos,
    share: f64,
}

impl BusyShare {
    /// Records that from now on a client waits (`waiting`), or that none does.
    pub fn waits(&mut self, waiting: bool, now: Nanos) {
        self.share = self.share(now);
        self.since = now;
        self.waiting = waiting;
    }

    /// The share at `now`, from 0 to 1.
    pub fn share(&self, now: Nanos) -> f64 {
        // Most requests on a fast cache device begin and end in one turn of the driver: no time has passed.
        if now == self.since {
            return self.share;
        }
        let span = now.since(self.since).0 as f64;
        let weight = span / (span + MEMORY.0 as f64);
        let towards = if self.waiting { 1.0 } else { 0.0 };
        self.share + (towards - self.share) * weight
    }
}

/// The state of the cache that determines how much it needs room.
#[derive(Clone, Copy, Debug)]
pub struct Pressure {
    /// The percentage of the cache that is dirty data.
    pub dirty_percent: f64,
    /// The percentage of buckets that cannot be reused at once.
    pub in_use_percent: f64,
    /// `cutoff_writeback` and `cutoff_writeback_sync`: up to the middle between them dirty data causes no pressure, and
    /// above the second the pressure is greatest.
    pub cutoffs: (u8, u8),
}

impl Pressure {
    /// The pressure, from 0 (enough room) to 1 (no room).
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

/// The pause after a batch that took the time `took`, so that batches take only `share` of the time.
pub fn pause(took: Nanos, share: f64) -> Nanos {
    let rest = took.0 as f64 * (1.0 / share.clamp(LEAST, 1.0) - 1.0);
    // The conversion saturates; the value is never negative or undefined.
    Nanos(rest as u64).min(LONGEST_PAUSE)
}

/// Estimates the recent rate of events from a count that is read from time to time.
#[derive(Clone, Copy, Debug, Default)]
pub struct RateEstimator {
    count: u64,
    at: Nanos,
    per_second: f64,
}

impl RateEstimator {
    /// Records the value of the count at `now`; returns its rate per second.
    pub fn observe(&mut self, count: u64, now: Nanos) -> f64 {
        let span = now.since(self.at);
        // Shorter spans have too few events for an estimate.
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

/// Whether the cache must make room now: either the `spare` buckets last too short a time at `filled_per_second`, or
/// the cache is so full that writes are throttled and the rate says little.
pub fn is_room_urgent(spare: u32, filled_per_second: f64, in_use_percent: u32) -> bool {
    in_use_percent >= THROTTLE_FROM_PERCENT || f64::from(spare) < filled_per_second * ROOM_FOR_SECONDS
}

/// Throttles writes that need new room to the rate at which writeback makes room, so that a nearly full cache answers
/// them evenly at that rate.
#[derive(Clone, Copy, Debug, Default)]
pub struct Throttle {
    due: Nanos,
}

impl Throttle {
    /// The time until which a write of `sectors` is delayed, at most `most` from now. `cleaned_per_second`: the number
    /// of sectors that writeback makes clean in a second.
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
        // A write is delayed by at most `most`, and later writes do not wait for the part that was cut off.
        self.due = from.after(Nanos(span as u64)).min(now.after(most));
        self.due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOM: Pressure = Pressure { dirty_percent: 20.0, in_use_percent: 60.0, cutoffs: (40, 70) };

    #[test]
    fn busy_clients_count_less_after_they_stop() {
        let mut b = BusyShare::default();
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
        let mut b = BusyShare::default();
        for ms in 0..5000 {
            b.waits(ms % 2 == 0, Nanos::from_ms(ms));
        }
        assert!((0.4..0.6).contains(&b.share(Nanos::from_ms(5000))), "{b:?}");
    }

    #[test]
    fn without_clients_or_without_room_there_is_no_pause() {
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
        // Writeback cleans a thousand requests of 8 sectors per second.
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
        // The degree grows from 55 % to 70 % dirty data, and from 85 % to 95 % of the cache in use.
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
        let mut b = BusyShare::default();
        b.waits(true, ms(1000));
        near(b.share(ms(2000)), 0.5);
        near(b.share(ms(4000)), 0.75);
        b.waits(false, ms(4000));
        near(b.share(ms(6000)), 0.25);
        b.waits(false, ms(6000));
        near(b.share(ms(7000)), 0.125);
    }

    /// A count is used only after at least 0.1 s, and its weight depends on the time since the last one.
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
