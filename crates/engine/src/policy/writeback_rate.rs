//! The rate at which dirty data is written back.
//!
//! Owns the rate of one cached device: the controller that adapts the rate to the amount of dirty data (semantics
//! section 11.4), the limiter that converts it to delays (semantics section 11.3), the counter that detects an idle set
//! (semantics section 11.5), and the terms that `writeback_rate_debug` shows (semantics section 11.6).
//!
//! *Invariants:* the rate is in `1..=2^31-1` sectors/s; no input overflows: intermediate results are
//! 128 bits wide, stored ones saturate. (The kernel cuts the sum of the terms to 32 bits, so that a
//! very large one turns into the minimum; here it turns into the maximum.) *Must not know:* keys, and
//! when updates are due.

use std::fmt;

use format::{SECTOR_BYTES, Sectors};
use io::Nanos;

use crate::human::Human;

/// The rate before the first update, in sectors/s (semantics section 11.4).
pub const INITIAL_RATE: u32 = 1024;
/// The rate of an idle set, in sectors/s, which is unlimited in effect (semantics section 11.5).
pub const IDLE_RATE: u32 = i32::MAX as u32;
/// The rate after the first request that ends the idle state, in sectors/s (semantics section 11.5).
const WAKE_RATE: u32 = 1;
/// Upper end of the controller's range, in sectors/s (semantics section 11.4).
const MAX_CONTROLLED_RATE: i64 = 1_000_000_000;
/// Denominator of a device's share of the target (semantics section 11.4).
const SHARE_ONE: u128 = 16384;
/// The percentages of used buckets above which fragmentation counts, counts more, and counts most (semantics section
/// 11.4).
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

/// Computes delays that keep writes at a rate (semantics section 11.3).
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

    /// The time at which the next I/O is due.
    pub fn next(&self) -> Nanos {
        self.next
    }

    /// Restarts the schedule: the next I/O is due now.
    pub fn reset(&mut self, now: Nanos) {
        self.next = now;
    }

    /// Accounts for `written` and returns the delay before the next group.
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
    /// The percentage of the cache that may be dirty; 0 if the rate is not limited.
    pub percent: u8,
    /// Divisor of the proportional term.
    pub p_term_inverse: u32,
    /// Divisor of the integral term.
    pub i_term_inverse: u32,
    /// Factor of the fragmentation term above 50 % in use.
    pub fp_term_low: u32,
    /// Factor of the fragmentation term above 57 % in use.
    pub fp_term_mid: u32,
    /// Factor of the fragmentation term above 64 % in use.
    pub fp_term_high: u32,
    /// Least rate, sectors/s.
    pub minimum: u32,
    /// Seconds between two updates.
    pub update_seconds: u32,
    /// Whether fragmentation counts.
    pub consider_fragment: bool,
}

/// The inputs of the controller.
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
    /// Whether the device has dirty data.
    pub has_dirty: bool,
    /// Dirty data of this device.
    pub dirty: Sectors,
}

impl RateInputs {
    /// The target for the dirty data of this device, in sectors (semantics section 11.4): its share, by size, of
    /// `percent` of the cache.
    pub fn target(&self, percent: u8) -> u64 {
        // No device has more than 2^55 sectors, so only invalid input saturates.
        let total = self.nbuckets.saturating_mul(self.bucket.0);
        let cache = u128::from(total.saturating_sub(self.volumes_dirty.0));
        let of_cache = cache * u128::from(percent) / 100;
        let all = u128::from(self.all_backing.0).max(1);
        let share = (u128::from(self.backing.0) * SHARE_ONE / all).max(1);
        // A share above 1 is an error of the caller, and must not overflow.
        let target = of_cache * share.min(SHARE_ONE) / SHARE_ONE;
        u64::try_from(target).unwrap_or(u64::MAX)
    }

    /// The term that replaces the proportional one when the dirty data is spread over many buckets; `None` if
    /// fragmentation does not count.
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

/// The inputs of an update that concern the whole set.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IdleInputs {
    /// The number of backing devices that are attached to the set.
    pub attached_devices: u32,
    /// `idle_max_writeback_rate`.
    pub enabled: bool,
    /// A garbage collection is running.
    pub gc_running: bool,
}

/// Counts the rate updates since the last request to the cache set (semantics section 11.5).
#[derive(Clone, Debug, Default)]
pub struct IdleCounter {
    rounds: u64,
    at_max: bool,
}

impl IdleCounter {
    /// Records a foreground request. Returns true if the rates were at the idle maximum: the caller then calls
    /// [`WritebackRate::leave_idle`] for every device of the set.
    pub fn foreground_request(&mut self) -> bool {
        self.rounds = 0;
        std::mem::take(&mut self.at_max)
    }

    fn exceeded(&self, attached_devices: u32) -> bool {
        let devices = u64::from(attached_devices);
        // The square of a u32 fits into a u64; the product may not.
        attached_devices > 0 && self.rounds >= (devices * devices).saturating_mul(IDLE_ROUNDS)
    }
}

/// The result of an update.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RateUpdate {
    /// The rate is unchanged: there is no dirty data, or the rate is not limited.
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
    /// The result of the last update, and whether it used the fragmentation term.
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

    /// The delay after a group of `written` sectors. `unlimited`: the rate does not apply, so there is no delay and the
    /// group is not accounted for.
    pub fn delay_after(&mut self, written: Sectors, unlimited: bool, now: Nanos) -> Nanos {
        if unlimited { Nanos(0) } else { self.limiter.delay(written, now) }
    }

    /// Restarts the schedule of the limiter, after a pause of the writeback.
    pub fn reset_clock(&mut self, now: Nanos) {
        self.limiter.reset(now);
    }

    /// Ends the idle state of the set: the rate is 1 until the next update.
    pub fn leave_idle(&mut self) {
        self.limiter.set_rate(WAKE_RATE);
    }

    /// Updates the rate; the caller does so every `writeback_rate_update_seconds`.
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
        // The integral term grows only while writeback keeps up with the present rate, so that it does not wind up.
        let keeps_up = now < self.limiter.next().after(KEEPS_UP);
        if (error < 0 && self.integral > 0) || (error > 0 && keeps_up) {
            let step = error.saturating_mul(i64::from(params.update_seconds));
            self.integral = self.integral.saturating_add(step);
        }
        let integral_scaled = self.integral / i64::from(params.i_term_inverse.max(1));
        let wanted = proportional.saturating_add(integral_scaled);
        // If the minimum is above the maximum, the maximum applies, as in the kernel.
        let rate = wanted.max(i64::from(params.minimum.max(1))).min(MAX_CONTROLLED_RATE);
        self.target = target;
        self.proportional = proportional;
        self.integral_scaled = integral_scaled;
        self.change = rate - i64::from(self.limiter.rate());
        self.limiter.set_rate(u32::try_from(rate).unwrap_or(u32::MAX));
    }

    /// The rate and its terms (semantics section 11.6). All but dirty data and target are zero if `writeback_running`
    /// is 0.
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

/// The values of `writeback_rate_debug`; its `Display` is the text of that file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RateDebug {
    /// Rate, bytes/s.
    pub rate: i64,
    /// Dirty data, bytes.
    pub dirty: i64,
    /// Target for the dirty data at the last update, bytes.
    pub target: i64,
    /// Proportional (or fragmentation) term, bytes/s.
    pub proportional: i64,
    /// Integral term, bytes/s.
    pub integral: i64,
    /// Change of the rate by the last update, bytes/s.
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

/// `value`, limited to the range of `i64`.
fn saturate(value: i128) -> i64 {
    i64::try_from(value).unwrap_or(if value < 0 { i64::MIN } else { i64::MAX })
}

fn in_bytes(sectors: i64) -> i64 {
    saturate(i128::from(sectors) * i128::from(SECTOR_BYTES))
}

#[cfg(test)]
mod tests;
