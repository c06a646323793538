//! How fast dirty data is written back.
//!
//! Owns the rate of one cached device: the controller that adapts it to the amount of dirty data
//! (semantics section 11.4), the limiter that turns it into delays (semantics section 11.3), the counter by
//! which an idle set is recognised (semantics section 11.5), and the terms that `writeback_rate_debug` shows
//! (semantics section 11.6).
//!
//! *Invariants:* the rate is in `1..=2^31-1` sectors/s; no input overflows: intermediate results are
//! 128 bits wide, stored ones saturate. (The kernel cuts the sum of the terms to 32 bits, so that a
//! very large one turns into the minimum; here it turns into the maximum.) *Must not know:* keys, and
//! when updates are due.

use std::fmt;

use format::{SECTOR_BYTES, Sectors};
use io::Nanos;

use crate::human::Human;

/// Rate before the first update, in sectors/s (semantics section 11.4).
pub const INITIAL_RATE: u32 = 1024;
/// Rate of an idle set, in sectors/s: unlimited in effect (semantics section 11.5).
pub const IDLE_RATE: u32 = i32::MAX as u32;
/// Rate after the first request that ends the idle time, in sectors/s (semantics section 11.5).
const WAKE_RATE: u32 = 1;
/// Upper end of the controller's range, in sectors/s (semantics section 11.4).
const MAX_CONTROLLED_RATE: i64 = 1_000_000_000;
/// Denominator of a device's share of the target (semantics section 11.4).
const SHARE_ONE: u128 = 16384;
/// Used buckets in percent from which fragmentation counts, and from which it counts more and most
/// (semantics section 11.4).
const FRAGMENT_LOW: u8 = 50;
const FRAGMENT_MID: u8 = 57;
const FRAGMENT_HIGH: u8 = 64;
/// Fragmentation (used space over dirty data) up to which it does not count (semantics section 11.4).
const FRAGMENT_TOLERATED: u128 = 3;
/// Writeback that is this much ahead of the limiter or less keeps up with the rate (semantics section 11.4).
const KEEPS_UP: Nanos = Nanos::from_ms(1);
/// The limiter plans at most this far ahead (semantics section 11.3).
const MAX_AHEAD: Nanos = Nanos::from_ms(2500);
/// The limiter makes up for at most this much lost time (semantics section 11.3).
const MAX_BEHIND: Nanos = Nanos::from_secs(2);
/// Rate updates without a request before a set counts as idle, times the square of the number of
/// attached devices (semantics section 11.5).
const IDLE_ROUNDS: u64 = 6;

const NANOS_PER_SECOND: u128 = 1_000_000_000;

/// Delays that keep writing at a rate (semantics section 11.3).
#[derive(Clone, Debug)]
pub struct RateLimiter {
    rate: u32,
    next: Nanos,
}

impl RateLimiter {
    /// A limiter at `rate` sectors/s (0 counts as 1) whose next I/O is due now.
    pub fn new(rate: u32, now: Nanos) -> RateLimiter {
        RateLimiter { rate: rate.max(1), next: now }
    }

    /// The rate in sectors/s.
    pub fn rate(&self) -> u32 {
        self.rate
    }

    /// Changes the rate, in sectors/s (0 counts as 1); what was planned stays.
    pub fn set_rate(&mut self, rate: u32) {
        self.rate = rate.max(1);
    }

    /// When the next I/O is due.
    pub fn next(&self) -> Nanos {
        self.next
    }

    /// Forgets the past: the next I/O is due now.
    pub fn reset(&mut self, now: Nanos) {
        self.next = now;
    }

    /// Accounts for `written` and returns how long to wait before the next group.
    pub fn delay(&mut self, written: Sectors, now: Nanos) -> Nanos {
        let span = u128::from(written.0) * NANOS_PER_SECOND / u128::from(self.rate);
        let next = self.next.after(Nanos(u64::try_from(span).unwrap_or(u64::MAX)));
        self.next = next.min(now.after(MAX_AHEAD)).max(now.since(MAX_BEHIND));
        self.next.since(now)
    }
}

/// The tunables of the controller; the names are the kernel's without `writeback_` and `rate_`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RateParams {
    /// Share of the cache that may be dirty, 0 for unthrottled.
    pub percent: u8,
    /// Divisor of the proportional term.
    pub p_term_inverse: u32,
    /// Divisor of the integral term.
    pub i_term_inverse: u32,
    /// Factor of the fragmentation term above 50 % in use.
    pub fp_term_low: u32,
    /// The same above 57 %.
    pub fp_term_mid: u32,
    /// The same above 64 %.
    pub fp_term_high: u32,
    /// Least rate, sectors/s.
    pub minimum: u32,
    /// Seconds between two updates.
    pub update_seconds: u32,
    /// Whether fragmentation counts.
    pub consider_fragment: bool,
}

/// What the controller looks at.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RateInputs {
    /// Buckets of the cache device.
    pub nbuckets: u64,
    /// Buckets that could be invalidated (semantics section 8.5).
    pub available_buckets: u64,
    /// Bucket size.
    pub bucket: Sectors,
    /// Share of used buckets, see [`super::in_use_percent`].
    pub in_use_percent: u8,
    /// Dirty data of the set's volumes, which is never written back.
    pub volumes_dirty: Sectors,
    /// Size of this backing device.
    pub backing: Sectors,
    /// Sum of the sizes of all attached backing devices.
    pub all_backing: Sectors,
    /// Whether the device counts as dirty: it does until a complete scan found nothing.
    pub has_dirty: bool,
    /// Dirty data of this device.
    pub dirty: Sectors,
}

impl RateInputs {
    /// How much dirty data this device should have, in sectors (semantics section 11.4): its share, by
    /// size, of `percent` of the cache.
    pub fn target(&self, percent: u8) -> u64 {
        // No device has more than 2^55 sectors, so the saturation is for nonsense only.
        let total = self.nbuckets.saturating_mul(self.bucket.0);
        let cache = u128::from(total.saturating_sub(self.volumes_dirty.0));
        let of_cache = cache * u128::from(percent) / 100;
        let all = u128::from(self.all_backing.0).max(1);
        let share = (u128::from(self.backing.0) * SHARE_ONE / all).max(1);
        // Beyond the whole a share is a mistake of the caller; do not let it overflow.
        let target = of_cache * share.min(SHARE_ONE) / SHARE_ONE;
        u64::try_from(target).unwrap_or(u64::MAX)
    }

    /// The term that replaces the proportional one when the dirty data is spread thinly over many
    /// buckets; `None` where fragmentation does not count.
    fn fragmentation_term(&self, params: &RateParams) -> Option<i64> {
        let used = self.nbuckets.saturating_sub(self.available_buckets);
        if !params.consider_fragment || self.in_use_percent <= FRAGMENT_LOW || self.dirty.0 == 0 || used == 0
        {
            return None;
        }
        let fragmentation = u128::from(used) * u128::from(self.bucket.0) / u128::from(self.dirty.0);
        if fragmentation <= FRAGMENT_TOLERATED {
            return None;
        }
        let (factor, from) = if self.in_use_percent <= FRAGMENT_MID {
            (params.fp_term_low, FRAGMENT_LOW)
        } else if self.in_use_percent <= FRAGMENT_HIGH {
            (params.fp_term_mid, FRAGMENT_MID)
        } else {
            (params.fp_term_high, FRAGMENT_HIGH)
        };
        let factor = i128::from(factor) * i128::from(self.in_use_percent - from);
        Some(saturate(i128::from(self.dirty.0 / used) * factor))
    }
}

/// What else of the set an update depends on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IdleInputs {
    /// BackingDevice devices attached to the set.
    pub attached_devices: u32,
    /// `idle_max_writeback_rate`.
    pub enabled: bool,
    /// A garbage collection is running.
    pub gc_running: bool,
}

/// How long a cache set has had nothing to do, in rate updates (semantics section 11.5).
#[derive(Clone, Debug, Default)]
pub struct IdleCounter {
    rounds: u64,
    at_max: bool,
}

impl IdleCounter {
    /// Takes note of a foreground request. True if the rates were at the idle maximum: the caller then
    /// calls [`WritebackRate::leave_idle`] for every device of the set.
    pub fn foreground_request(&mut self) -> bool {
        self.rounds = 0;
        std::mem::take(&mut self.at_max)
    }

    fn exceeded(&self, attached_devices: u32) -> bool {
        let devices = u64::from(attached_devices);
        // The square of a u32 fits; the product may not.
        attached_devices > 0 && self.rounds >= (devices * devices).saturating_mul(IDLE_ROUNDS)
    }
}

/// What an update did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RateUpdate {
    /// Nothing: there is no dirty data, or writeback is unthrottled.
    Unchanged,
    /// The controller set the rate.
    Controlled,
    /// The set is idle: the rate is at its maximum.
    Idle,
}

/// The writeback rate of one cached device.
#[derive(Clone, Debug)]
pub struct WritebackRate {
    limiter: RateLimiter,
    /// Sum of error · seconds, in sectors · seconds.
    integral: i64,
    target: u64,
    proportional: i64,
    integral_scaled: i64,
    change: i64,
    /// What the last update did, and whether the fragmentation term decided.
    last: RateUpdate,
    fragmented: bool,
}

impl WritebackRate {
    /// The rate of a device that was just attached.
    pub fn new(now: Nanos) -> WritebackRate {
        WritebackRate {
            limiter: RateLimiter::new(INITIAL_RATE, now),
            integral: 0,
            target: 0,
            proportional: 0,
            integral_scaled: 0,
            change: 0,
            last: RateUpdate::Unchanged,
            fragmented: false,
        }
    }

    /// The rate in sectors/s.
    pub fn rate(&self) -> u32 {
        self.limiter.rate()
    }

    /// Whether the set counted as idle at the last update, and had no request since.
    pub fn is_idle(&self) -> bool {
        self.last == RateUpdate::Idle && self.rate() == IDLE_RATE
    }

    /// Whether the fragmentation term took the place of the proportional one at the last update.
    pub fn is_fragmented(&self) -> bool {
        self.last == RateUpdate::Controlled && self.fragmented
    }

    /// Sets the rate by hand, in sectors/s, until the next update (`1..=2^31-1`, clamped).
    pub fn set_rate(&mut self, rate: u32) {
        self.limiter.set_rate(rate.min(IDLE_RATE));
    }

    /// How long to wait after a group of `written` sectors. `unlimited`: the device is being detached,
    /// or `writeback_percent` is 0; then nothing is accounted for either.
    pub fn delay_after(&mut self, written: Sectors, unlimited: bool, now: Nanos) -> Nanos {
        if unlimited { Nanos(0) } else { self.limiter.delay(written, now) }
    }

    /// Forgets the limiter's past, after a pause of the writeback.
    pub fn reset_clock(&mut self, now: Nanos) {
        self.limiter.reset(now);
    }

    /// A foreground request ended the idle time of the set: the rate is 1 until the next update.
    pub fn leave_idle(&mut self) {
        self.limiter.set_rate(WAKE_RATE);
    }

    /// The update that is due every `writeback_rate_update_seconds`.
    pub fn update(
        &mut self,
        inputs: &RateInputs,
        params: &RateParams,
        idle: &mut IdleCounter,
        set: &IdleInputs,
        now: Nanos,
    ) -> RateUpdate {
        if !inputs.has_dirty || params.percent == 0 {
            self.last = RateUpdate::Unchanged;
            return self.last;
        }
        idle.rounds = idle.rounds.saturating_add(1);
        if set.enabled && !set.gc_running && idle.exceeded(set.attached_devices) {
            idle.at_max = true;
            self.limiter.set_rate(IDLE_RATE);
            self.proportional = 0;
            self.integral_scaled = 0;
            self.change = 0;
            self.last = RateUpdate::Idle;
            return self.last;
        }
        self.control(inputs, params, now);
        self.last = RateUpdate::Controlled;
        self.last
    }

    fn control(&mut self, inputs: &RateInputs, params: &RateParams, now: Nanos) {
        let target = inputs.target(params.percent);
        let error = saturate(i128::from(inputs.dirty.0) - i128::from(target));
        let mut proportional = error / i64::from(params.p_term_inverse.max(1));
        self.fragmented = false;
        if let Some(term) = inputs.fragmentation_term(params).filter(|term| *term > proportional) {
            proportional = term;
            self.fragmented = true;
        }
        // Do not wind up: grow only while writeback keeps up with the rate it has.
        let keeps_up = now < self.limiter.next().after(KEEPS_UP);
        if (error < 0 && self.integral > 0) || (error > 0 && keeps_up) {
            let step = error.saturating_mul(i64::from(params.update_seconds));
            self.integral = self.integral.saturating_add(step);
        }
        let integral_scaled = self.integral / i64::from(params.i_term_inverse.max(1));
        let wanted = proportional.saturating_add(integral_scaled);
        // A minimum above the maximum: the maximum wins, as in the kernel.
        let rate = wanted.max(i64::from(params.minimum.max(1))).min(MAX_CONTROLLED_RATE);
        self.target = target;
        self.proportional = proportional;
        self.integral_scaled = integral_scaled;
        self.change = rate - i64::from(self.limiter.rate());
        self.limiter.set_rate(u32::try_from(rate).unwrap_or(u32::MAX));
    }

    /// The terms behind the rate (semantics section 11.6). All but dirty data and target are zero if
    /// `writeback_running` is 0.
    pub fn debug(&self, dirty: Sectors, running: bool, now: Nanos) -> RateDebug {
        let shown = |sectors: i64| if running { in_bytes(sectors) } else { 0 };
        let ms = saturate((i128::from(self.limiter.next().0) - i128::from(now.0)) / 1_000_000);
        RateDebug {
            rate: shown(i64::from(self.rate())),
            dirty: in_bytes(i64::try_from(dirty.0).unwrap_or(i64::MAX)),
            target: in_bytes(i64::try_from(self.target).unwrap_or(i64::MAX)),
            proportional: shown(self.proportional),
            integral: shown(self.integral_scaled),
            change: shown(self.change),
            next_io_ms: if running { ms } else { 0 },
        }
    }
}

/// What `writeback_rate_debug` shows; its `Display` is the text of that file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RateDebug {
    /// Rate, bytes/s.
    pub rate: i64,
    /// Dirty data, bytes.
    pub dirty: i64,
    /// How much dirty data there should be, bytes; as of the last update.
    pub target: i64,
    /// Proportional (or fragmentation) term, bytes/s.
    pub proportional: i64,
    /// Integral term, bytes/s.
    pub integral: i64,
    /// What the last update added to the rate, bytes/s.
    pub change: i64,
    /// Milliseconds until the next I/O is due; negative if it is late.
    pub next_io_ms: i64,
}

impl fmt::Display for RateDebug {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "rate:\t\t{}/sec", Human(self.rate))?;
        writeln!(f, "dirty:\t\t{}", Human(self.dirty))?;
        writeln!(f, "target:\t\t{}", Human(self.target))?;
        writeln!(f, "proportional:\t{}", Human(self.proportional))?;
        writeln!(f, "integral:\t{}", Human(self.integral))?;
        writeln!(f, "change:\t\t{}/sec", Human(self.change))?;
        writeln!(f, "next io:\t{}ms", self.next_io_ms)
    }
}

/// `value`, or the end of the range it is beyond.
fn saturate(value: i128) -> i64 {
    i64::try_from(value).unwrap_or(if value < 0 { i64::MIN } else { i64::MAX })
}

fn in_bytes(sectors: i64) -> i64 {
    saturate(i128::from(sectors) * i128::from(SECTOR_BYTES))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::tunables::DeviceTunables;

    const T0: Nanos = Nanos::from_secs(100);

    fn params() -> RateParams {
        DeviceTunables::default().rate_params()
    }

    /// A cache of 1 GiB (2 097 152 sectors) in front of one device, 30 % in use.
    fn inputs(dirty: u64) -> RateInputs {
        RateInputs {
            nbuckets: 2048,
            available_buckets: 1434,
            bucket: Sectors(1024),
            in_use_percent: 30,
            volumes_dirty: Sectors(0),
            backing: Sectors(1 << 30),
            all_backing: Sectors(1 << 30),
            has_dirty: true,
            dirty: Sectors(dirty),
        }
    }

    fn set() -> IdleInputs {
        IdleInputs { attached_devices: 1, enabled: true, gc_running: false }
    }

    /// An update of a set that is not idle.
    fn update(rate: &mut WritebackRate, inputs: &RateInputs, now: Nanos) {
        let update = rate.update(inputs, &params(), &mut IdleCounter::default(), &set(), now);
        assert_eq!(update, RateUpdate::Controlled);
    }

    #[test]
    fn the_target_is_a_share_of_the_cache() {
        assert_eq!(inputs(0).target(10), 209_715, "a tenth of 2 097 152");
        assert_eq!(RateInputs { volumes_dirty: Sectors(97_152), ..inputs(0) }.target(10), 200_000);
        // 1000 of 3000: 5461 / 16384 of 209 715 = 69 900.7.
        let third = RateInputs { backing: Sectors(1000), all_backing: Sectors(3000), ..inputs(0) };
        assert_eq!(third.target(10), 69_900);
        // A tiny device gets 1 / 16384.
        assert_eq!(RateInputs { backing: Sectors(1), ..inputs(0) }.target(10), 12);
        assert_eq!(RateInputs { volumes_dirty: Sectors(u64::MAX), ..inputs(0) }.target(10), 0);
    }

    #[test]
    fn proportional_and_integral_terms_add_up() {
        let mut rate = WritebackRate::new(T0);
        assert_eq!(rate.rate(), 1024);
        // error 200 000: P = 5000; integral 1 000 000: I = 100.
        update(&mut rate, &inputs(409_715), T0);
        assert_eq!((rate.rate(), rate.change), (5100, 4076));
        update(&mut rate, &inputs(409_715), T0);
        assert_eq!((rate.rate(), rate.change), (5200, 100));
        // More than 1 ms behind the limiter: the integral rests.
        update(&mut rate, &inputs(409_715), T0.after(Nanos(1_000_000)));
        assert_eq!(rate.rate(), 5200);
        // error -209 715: P = -5242; integral 2 000 000 - 1 048 575 = 951 425: I = 95; minimum 8.
        update(&mut rate, &inputs(0), T0.after(Nanos::from_secs(1)));
        assert_eq!((rate.proportional, rate.integral_scaled, rate.rate()), (-5242, 95, 8));
        update(&mut rate, &inputs(0), T0);
        assert_eq!(rate.integral, -97_150);
        update(&mut rate, &inputs(0), T0);
        assert_eq!(rate.integral, -97_150, "it does not wind up below zero");
    }

    #[test]
    fn fragmentation_takes_over_from_the_proportional_term() {
        // 1229 buckets used; 122 900 dirty: 10 times as much space as data, 100 sectors per bucket.
        let case =
            |in_use_percent, dirty| RateInputs { available_buckets: 819, in_use_percent, ..inputs(dirty) };
        for (in_use, term) in [
            (50, None),
            (51, Some(100)),
            (57, Some(700)),
            (58, Some(1000)),
            (60, Some(3000)),
            (64, Some(7000)),
            (65, Some(100_000)),
            (100, Some(3_600_000)),
        ] {
            assert_eq!(case(in_use, 122_900).fragmentation_term(&params()), term, "{in_use} %");
        }
        assert_eq!(case(60, 400_000).fragmentation_term(&params()), None, "1 258 496 / 400 000 is 3");
        assert_eq!(case(60, 0).fragmentation_term(&params()), None);
        let off = RateParams { consider_fragment: false, ..params() };
        assert_eq!(case(60, 122_900).fragmentation_term(&off), None);

        let mut rate = WritebackRate::new(T0);
        update(&mut rate, &case(60, 122_900), T0);
        assert_eq!(rate.rate(), 3000, "P would be -2170");
        // More dirty data than the target: P = (300 000 - 209 715) / 40 = 2257 and 244 · 30 = 7320.
        update(&mut rate, &case(60, 300_000), T0);
        assert_eq!(rate.proportional, 7320);
        update(&mut rate, &case(51, 300_000), T0);
        assert_eq!(rate.proportional, 2257, "244 · 1 is less");
    }

    #[test]
    fn the_rate_is_clamped() {
        let mut rate = WritebackRate::new(T0);
        update(&mut rate, &inputs(u64::MAX), T0);
        assert_eq!(rate.rate(), 1_000_000_000);
        let minimum = RateParams { minimum: u32::MAX, ..params() };
        rate.update(&inputs(0), &minimum, &mut IdleCounter::default(), &set(), T0);
        assert_eq!(rate.rate(), 1_000_000_000, "the upper end wins");
        rate.set_rate(0);
        assert_eq!(rate.rate(), 1);
        rate.set_rate(u32::MAX);
        assert_eq!(rate.rate(), 2_147_483_647);
    }

    #[test]
    fn nothing_changes_without_dirty_data_or_throttling() {
        let mut rate = WritebackRate::new(T0);
        let mut idle = IdleCounter::default();
        let clean = RateInputs { has_dirty: false, ..inputs(0) };
        let unthrottled = RateParams { percent: 0, ..params() };
        for _ in 0..10 {
            assert_eq!(rate.update(&clean, &params(), &mut idle, &set(), T0), RateUpdate::Unchanged);
            let update = rate.update(&inputs(9), &unthrottled, &mut idle, &set(), T0);
            assert_eq!(update, RateUpdate::Unchanged);
        }
        assert_eq!((rate.rate(), idle.rounds), (1024, 0));
    }

    #[test]
    fn an_idle_set_writes_back_without_limit() {
        let mut rate = WritebackRate::new(T0);
        let mut idle = IdleCounter::default();
        let due = inputs(409_715);
        for _ in 0..5 {
            let update = rate.update(&due, &params(), &mut idle, &set(), T0);
            assert_eq!(update, RateUpdate::Controlled);
        }
        assert!(!idle.foreground_request());
        for _ in 0..5 {
            rate.update(&due, &params(), &mut idle, &set(), T0);
        }
        let gc = IdleInputs { gc_running: true, ..set() };
        assert_eq!(rate.update(&due, &params(), &mut idle, &gc, T0), RateUpdate::Controlled);
        assert_eq!(rate.update(&due, &params(), &mut idle, &set(), T0), RateUpdate::Idle);
        assert_eq!(rate.rate(), 2_147_483_647);
        let debug = rate.debug(Sectors(409_715), true, T0);
        assert_eq!((debug.proportional, debug.integral, debug.change), (0, 0, 0));
        assert!(idle.foreground_request(), "somebody has to slow the devices down");
        assert!(!idle.foreground_request(), "once");
        rate.leave_idle();
        assert_eq!(rate.rate(), 1);
        assert_eq!(rate.update(&due, &params(), &mut idle, &set(), T0), RateUpdate::Controlled);
    }

    #[test]
    fn idleness_takes_six_rounds_per_device_squared() {
        let disabled = IdleInputs { enabled: false, ..set() };
        for (devices, rounds) in [(1, 6), (2, 24), (3, 54)] {
            let mut idle = IdleCounter::default();
            let mut rate = WritebackRate::new(T0);
            let set = IdleInputs { attached_devices: devices, ..set() };
            let mut n = 1;
            while rate.update(&inputs(1), &params(), &mut idle, &set, T0) != RateUpdate::Idle {
                n += 1;
            }
            assert_eq!(n, rounds);
            assert_eq!(rate.update(&inputs(1), &params(), &mut idle, &disabled, T0), RateUpdate::Controlled);
        }
        let counter = IdleCounter { rounds: u64::MAX, at_max: false };
        assert!(!counter.exceeded(0));
        assert!(counter.exceeded(u32::MAX));
    }

    #[test]
    fn the_limiter_spaces_groups_out() {
        let mut limiter = RateLimiter::new(1024, T0);
        assert_eq!(limiter.delay(Sectors(512), T0), Nanos::from_ms(500));
        assert_eq!(limiter.delay(Sectors(512), T0), Nanos::from_ms(1000), "it had not waited");
        assert_eq!(limiter.delay(Sectors(1 << 40), T0), Nanos::from_ms(2500), "not further ahead");
        // An hour later: two seconds may be made up for, i.e. 2048 sectors.
        let later = T0.after(Nanos::from_secs(3600));
        assert_eq!(limiter.delay(Sectors(0), later), Nanos(0));
        assert_eq!(limiter.next(), later.since(Nanos::from_secs(2)));
        assert_eq!(limiter.delay(Sectors(2048), later), Nanos(0));
        assert_eq!(limiter.delay(Sectors(1024), later), Nanos::from_secs(1));
        limiter.reset(later);
        assert_eq!(limiter.next(), later);
        let mut fresh = RateLimiter::new(1, Nanos(0));
        assert_eq!(fresh.delay(Sectors(0), Nanos(0)), Nanos(0), "before two seconds have passed");
    }

    #[test]
    fn unlimited_writeback_is_not_accounted_for() {
        let mut rate = WritebackRate::new(T0);
        assert_eq!(rate.delay_after(Sectors(1 << 30), true, T0), Nanos(0));
        assert_eq!(rate.delay_after(Sectors(1024), false, T0), Nanos::from_secs(1));
        rate.reset_clock(T0);
        assert_eq!(rate.delay_after(Sectors(1024), false, T0), Nanos::from_secs(1));
    }

    #[test]
    fn the_debug_text_is_the_kernels() {
        let mut rate = WritebackRate::new(T0);
        update(&mut rate, &inputs(409_715), T0);
        rate.delay_after(Sectors(5100), false, T0);
        let shown = rate.debug(Sectors(409_715), true, T0.after(Nanos::from_ms(1500)));
        assert_eq!(
            shown.to_string(),
            "rate:\t\t2.4M/sec\n\
             dirty:\t\t200.0M\n\
             target:\t\t102.3M\n\
             proportional:\t2.4M\n\
             integral:\t50.0k\n\
             change:\t\t1.9M/sec\n\
             next io:\t-500ms\n"
        );
        let stopped = rate.debug(Sectors(409_715), false, T0);
        assert_eq!((stopped.rate, stopped.proportional, stopped.next_io_ms), (0, 0, 0));
        assert_eq!((stopped.dirty, stopped.target), (409_715 * 512, 209_715 * 512));
    }

    fn any_inputs() -> impl Strategy<Value = RateInputs> {
        let number = || (any::<u64>(), 0u32..64).prop_map(|(n, shift)| n >> shift);
        let sectors = move || number().prop_map(Sectors);
        (number(), number(), sectors(), 0u8..=100, sectors(), sectors(), sectors(), sectors()).prop_map(
            |(nbuckets, available, bucket, in_use, volumes_dirty, backing, all_backing, dirty)| RateInputs {
                nbuckets,
                available_buckets: available,
                bucket,
                in_use_percent: in_use,
                volumes_dirty,
                backing,
                all_backing,
                has_dirty: true,
                dirty,
            },
        )
    }

    proptest! {
        #[test]
        fn nothing_overflows(
            steps in prop::collection::vec((any_inputs(), any::<u64>(), any::<u64>()), 1..20),
            p in any::<u32>(), i in any::<u32>(), fp in any::<[u32; 3]>(), minimum in any::<u32>(),
            seconds in any::<u32>(), percent in 1u8..=100,
        ) {
            let params = RateParams {
                percent, p_term_inverse: p, i_term_inverse: i,
                fp_term_low: fp[0], fp_term_mid: fp[1], fp_term_high: fp[2],
                minimum, update_seconds: seconds, consider_fragment: true,
            };
            let mut rate = WritebackRate::new(T0);
            let mut idle = IdleCounter::default();
            for (inputs, now, written) in steps {
                rate.update(&inputs, &params, &mut idle, &set(), Nanos(now));
                prop_assert!((1..=IDLE_RATE).contains(&rate.rate()));
                let delay = rate.delay_after(Sectors(written), false, Nanos(now));
                prop_assert!(delay <= MAX_AHEAD);
                let _ = rate.debug(inputs.dirty, true, Nanos(now)).to_string();
            }
        }

        /// On ordinary numbers the controller is the formula (semantics section 11.4).
        #[test]
        fn agrees_with_the_formula(
            dirty in prop::collection::vec(0u64..4_000_000, 1..30), used in 1u64..=2048, late in any::<bool>(),
        ) {
            let now = if late { T0.after(Nanos::from_secs(1)) } else { T0 };
            let mut rate = WritebackRate::new(T0);
            let mut integral = 0i64;
            for dirty in dirty {
                let in_use = (used * 100 / 2048) as u8;
                let case = RateInputs {
                    available_buckets: 2048 - used, in_use_percent: in_use, ..inputs(dirty)
                };
                update(&mut rate, &case, now);

                let error = dirty as i64 - 209_715;
                let mut p = error / 40;
                if in_use > 50 && dirty > 0 {
                    let frag = used * 1024 / dirty;
                    let fp = match in_use {
                        51..=57 => i64::from(in_use) - 50,
                        58..=64 => 10 * (i64::from(in_use) - 57),
                        _ => 1000 * (i64::from(in_use) - 64),
                    };
                    let fps = (dirty / used) as i64 * fp;
                    if frag > 3 && fps > p {
                        p = fps;
                    }
                }
                if (error < 0 && integral > 0) || (error > 0 && !late) {
                    integral += error * 5;
                }
                let expected = (p + integral / 10000).clamp(8, 1_000_000_000);
                prop_assert_eq!(i64::from(rate.rate()), expected);
            }
        }
    }
}
