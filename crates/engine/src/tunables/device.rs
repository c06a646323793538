//! The settings of a cached device: those of the kernel (semantics section 16.2), and some that the kernel does not
//! have.
//!
//! Owns the defaults and ranges, and the limits between fields: the three fragmentation factors ascend, and
//! `writeback_percent` is at most the set's `cutoff_writeback`.

use format::CacheMode;

use super::error::TunableError;
use super::set::{DEFAULT_CUTOFF_WRITEBACK, MAX_CUTOFF_WRITEBACK};
use super::tunable::{self, Field, TunableInfo, Unit, choice_of, flag, number};
use crate::policy::choices::{Admission, Bridge, Controller, ReadaheadPolicy, StopWhenFailed};
use crate::policy::writeback_rate::{INITIAL_RATE, RateParams};

/// Most bytes in a label (semantics section 16.2).
const LABEL_BYTES: usize = 32;
/// Default of `writeback_latency_ms`: a few seeks of a disk.
const DEFAULT_LATENCY_MS: u16 = 50;
/// Default of `writeback_bridge_limit`: the size of the largest request of writeback.
const DEFAULT_BRIDGE_LIMIT: u32 = 1 << 20;
/// Largest value of most numbers.
const MAX_U32: u64 = u32::MAX as u64;
/// Largest value of numbers that are signed in the kernel.
const MAX_I32: u64 = i32::MAX as u64;

type DeviceTunable = tunable::Tunable<DeviceTunables>;

/// The settings of a cached device. Names, units, defaults and ranges are the kernel's (semantics section 16.2) where
/// the kernel has them. Values from outside must be set through [`DeviceTunables::set`]; code that writes a field
/// directly must keep to its range.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceTunables {
    /// Name of the device, at most 32 bytes.
    pub label: String,
    /// The cache mode, which determines the path of writes.
    pub cache_mode: CacheMode,
    /// The policy for caching read-ahead and background requests.
    pub readahead_cache_policy: ReadaheadPolicy,
    /// The reaction of the device to a failure of its cache set.
    pub stop_when_cache_set_failed: StopWhenFailed,
    /// Streams from this many bytes on bypass the cache; 0 if no stream does.
    pub sequential_cutoff: u32,
    /// Whether dirty data is written back. The caller must reset this for a device that was never attached.
    pub writeback_running: bool,
    /// Seconds for which dirty data waits before it is written back.
    pub writeback_delay: u32,
    /// Percentage of the cache that may be dirty; 0: write back as fast as possible.
    pub writeback_percent: u8,
    /// Current rate of writeback, in sectors/s. The engine writes this field after every update of the rate, and uses a
    /// value that was set by hand.
    pub writeback_rate: u32,
    /// Seconds between two updates of the rate.
    pub writeback_rate_update_seconds: u8,
    /// Divisor of the integral term.
    pub writeback_rate_i_term_inverse: u32,
    /// Divisor of the proportional term.
    pub writeback_rate_p_term_inverse: u32,
    /// Factor of the fragmentation term above 50 % in use.
    pub writeback_rate_fp_term_low: u32,
    /// Factor of the fragmentation term above 57 % in use.
    pub writeback_rate_fp_term_mid: u32,
    /// Factor of the fragmentation term above 64 % in use.
    pub writeback_rate_fp_term_high: u32,
    /// Least rate, in sectors/s.
    pub writeback_rate_minimum: u32,
    /// Whether fragmentation increases the rate of writeback.
    pub writeback_consider_fragment: bool,
    /// Has no effect, as in the kernel.
    pub writeback_metadata: bool,
    /// The number of errors at which the backing device is disabled.
    pub io_error_limit: u32,
    /// Whether all I/O of the device fails.
    pub io_disable: bool,
    /// The admission policy, which decides which requests are cached. Not in the kernel.
    pub admission: Admission,
    /// The controller of the rate of writeback. Not in the kernel.
    pub writeback_controller: Controller,
    /// Milliseconds that a request may wait for the backing device behind writeback. Not in the kernel.
    pub writeback_latency_ms: u16,
    /// Whether writeback also writes gaps between dirty data. Not in the kernel.
    pub writeback_bridge: Bridge,
    /// The largest gap that writeback also writes, in bytes. Not in the kernel.
    pub writeback_bridge_limit: u32,
    /// The set's cutoff, which limits `writeback_percent`.
    cutoff_writeback: u8,
}

impl Default for DeviceTunables {
    fn default() -> Self {
        DeviceTunables::new(CacheMode::default(), "")
    }
}

static TUNABLES: &[DeviceTunable] = &[
    DeviceTunable::new(
        "label",
        Unit::None,
        "name of the device",
        Field::Text { max_bytes: LABEL_BYTES, get: |t| &t.label, put: |t, text| t.label = text.to_owned() },
    )
    .in_superblock(),
    DeviceTunable::new("cache_mode", Unit::None, "what happens to writes", choice_of!(cache_mode: CacheMode))
        .in_superblock(),
    DeviceTunable::new(
        "readahead_cache_policy",
        Unit::None,
        "which read-ahead and background requests are cached",
        choice_of!(readahead_cache_policy: ReadaheadPolicy),
    ),
    DeviceTunable::new(
        "stop_when_cache_set_failed",
        Unit::None,
        "whether a device without dirty data is stopped when its cache set fails",
        choice_of!(stop_when_cache_set_failed: StopWhenFailed),
    ),
    DeviceTunable::new(
        "sequential_cutoff",
        Unit::Bytes,
        "streams of this length bypass the cache; 0 for none",
        number!(sequential_cutoff: u32, 0, MAX_U32, as Bytes),
    ),
    DeviceTunable::new(
        "writeback_running",
        Unit::None,
        "dirty data is written back",
        flag!(writeback_running),
    ),
    DeviceTunable::new(
        "writeback_delay",
        Unit::Seconds,
        "time for which dirty data waits before it is written back",
        number!(writeback_delay: u32, 0, MAX_U32),
    ),
    DeviceTunable::new(
        "writeback_percent",
        Unit::Percent,
        "share of the cache that may be dirty; 0 to write back as fast as possible",
        number!(writeback_percent: u8, in |t| (0, u64::from(t.cutoff_writeback))),
    ),
    DeviceTunable::new(
        "writeback_rate",
        Unit::SectorsPerSecond,
        "current rate of writeback; holds until its next update unless writeback_percent is 0",
        number!(writeback_rate: u32, 1, MAX_I32, as Sectors),
    ),
    DeviceTunable::new(
        "writeback_rate_update_seconds",
        Unit::Seconds,
        "time between two updates of the rate",
        number!(writeback_rate_update_seconds: u8, 1, 60),
    ),
    DeviceTunable::new(
        "writeback_rate_i_term_inverse",
        Unit::None,
        "divisor of the rate's integral term",
        number!(writeback_rate_i_term_inverse: u32, 1, MAX_U32),
    ),
    DeviceTunable::new(
        "writeback_rate_p_term_inverse",
        Unit::None,
        "divisor of the rate's proportional term",
        number!(writeback_rate_p_term_inverse: u32, 1, MAX_U32),
    ),
    DeviceTunable::new(
        "writeback_rate_fp_term_low",
        Unit::None,
        "factor of the rate's fragmentation term above 50 % in use",
        number!(
            writeback_rate_fp_term_low: u32, in |t| (1, u64::from(t.writeback_rate_fp_term_mid).saturating_sub(1))
        ),
    ),
    DeviceTunable::new(
        "writeback_rate_fp_term_mid",
        Unit::None,
        "factor of the rate's fragmentation term above 57 % in use",
        number!(
            writeback_rate_fp_term_mid: u32, in |t| (
                u64::from(t.writeback_rate_fp_term_low) + 1,
                u64::from(t.writeback_rate_fp_term_high).saturating_sub(1)
            )
        ),
    ),
    DeviceTunable::new(
        "writeback_rate_fp_term_high",
        Unit::None,
        "factor of the rate's fragmentation term above 64 % in use",
        number!(
            writeback_rate_fp_term_high: u32, in |t| (u64::from(t.writeback_rate_fp_term_mid) + 1, MAX_U32)
        ),
    ),
    DeviceTunable::new(
        "writeback_rate_minimum",
        Unit::SectorsPerSecond,
        "least rate of writeback",
        number!(writeback_rate_minimum: u32, 1, MAX_U32),
    ),
    DeviceTunable::new(
        "writeback_consider_fragment",
        Unit::None,
        "fragmentation increases the rate of writeback",
        flag!(writeback_consider_fragment),
    ),
    DeviceTunable::new("writeback_metadata", Unit::None, "no effect", flag!(writeback_metadata)),
    DeviceTunable::new(
        "io_error_limit",
        Unit::None,
        "errors of the backing device at which it is disabled",
        number!(io_error_limit: u32, 0, MAX_I32),
    ),
    DeviceTunable::new("io_disable", Unit::None, "all I/O on the device fails", flag!(io_disable)),
    DeviceTunable::new(
        "admission",
        Unit::None,
        "which requests are cached: by the kernel's rules, or by what they cost the devices",
        choice_of!(admission: Admission),
    )
    .not_in_kernel(),
    DeviceTunable::new(
        "writeback_controller",
        Unit::None,
        "controller of the writeback rate: the kernel's, or one that also yields to clients that wait",
        choice_of!(writeback_controller: Controller),
    )
    .not_in_kernel(),
    DeviceTunable::new(
        "writeback_latency_ms",
        Unit::Millis,
        "time that a request may wait for the backing device behind writeback",
        number!(writeback_latency_ms: u16, 1, 10_000),
    )
    .not_in_kernel(),
    DeviceTunable::new(
        "writeback_bridge",
        Unit::None,
        "whether writeback reads gaps between dirty data to write them in one request",
        choice_of!(writeback_bridge: Bridge),
    )
    .not_in_kernel(),
    DeviceTunable::new(
        "writeback_bridge_limit",
        Unit::Bytes,
        "largest gap between dirty data that is written back in one request",
        number!(writeback_bridge_limit: u32, 0, MAX_U32, as Bytes),
    )
    .not_in_kernel(),
];

impl DeviceTunables {
    /// The defaults, with cache mode and label from the superblock of the backing device.
    pub fn new(cache_mode: CacheMode, label: &str) -> DeviceTunables {
        DeviceTunables {
            label: label.to_owned(),
            cache_mode,
            readahead_cache_policy: ReadaheadPolicy::default(),
            stop_when_cache_set_failed: StopWhenFailed::default(),
            // The defaults are those of semantics section 16.2.
            sequential_cutoff: 4 << 20,
            writeback_running: true,
            writeback_delay: 30,
            writeback_percent: 10,
            writeback_rate: INITIAL_RATE,
            writeback_rate_update_seconds: 5,
            writeback_rate_i_term_inverse: 10000,
            writeback_rate_p_term_inverse: 40,
            writeback_rate_fp_term_low: 1,
            writeback_rate_fp_term_mid: 10,
            writeback_rate_fp_term_high: 1000,
            writeback_rate_minimum: 8,
            writeback_consider_fragment: true,
            writeback_metadata: true,
            io_error_limit: 64,
            io_disable: false,
            admission: Admission::default(),
            writeback_controller: Controller::default(),
            writeback_latency_ms: DEFAULT_LATENCY_MS,
            writeback_bridge: Bridge::default(),
            writeback_bridge_limit: DEFAULT_BRIDGE_LIMIT,
            cutoff_writeback: DEFAULT_CUTOFF_WRITEBACK,
        }
    }

    /// Sets the limit of `writeback_percent` to the set's `cutoff_writeback`, and lowers `writeback_percent` to it if
    /// necessary.
    pub fn set_cutoff_writeback(&mut self, percent: u8) {
        self.cutoff_writeback = percent;
        self.writeback_percent = self.writeback_percent.min(percent);
    }

    /// The parameters of the rate controller.
    pub fn rate_params(&self) -> RateParams {
        RateParams {
            percent: self.writeback_percent,
            p_term_inverse: self.writeback_rate_p_term_inverse,
            i_term_inverse: self.writeback_rate_i_term_inverse,
            fp_term_low: self.writeback_rate_fp_term_low,
            fp_term_mid: self.writeback_rate_fp_term_mid,
            fp_term_high: self.writeback_rate_fp_term_high,
            minimum: self.writeback_rate_minimum,
            update_seconds: u32::from(self.writeback_rate_update_seconds),
            consider_fragment: self.writeback_consider_fragment,
        }
    }

    /// The value of a setting as the kernel shows it.
    pub fn get(&self, name: &str) -> Result<String, TunableError> {
        Ok(tunable::find(TUNABLES, name)?.show(self))
    }

    /// The value of a setting in the form that [`DeviceTunables::set`] accepts.
    pub fn raw(&self, name: &str) -> Result<String, TunableError> {
        Ok(tunable::find(TUNABLES, name)?.raw(self))
    }

    /// Changes a setting. Numbers out of range are clamped; any other invalid value is refused and changes nothing.
    pub fn set(&mut self, name: &str, value: &str) -> Result<(), TunableError> {
        tunable::find(TUNABLES, name)?.set(self, value)
    }

    /// Refuses a value that is not valid, or that [`DeviceTunables::set`] would clamp.
    pub fn check(&self, name: &str, value: &str) -> Result<(), TunableError> {
        tunable::find(TUNABLES, name)?.check(self, value)
    }

    /// Refuses a value that is possible with no values of the other settings.
    pub fn check_alone(name: &str, value: &str) -> Result<(), TunableError> {
        tunable::find(TUNABLES, name)?.check(&DeviceTunables::widest_for(name), value)
    }

    /// Settings that leave the setting `name` its widest range.
    fn widest_for(name: &str) -> DeviceTunables {
        let is_lowest = name == "writeback_rate_fp_term_low";
        DeviceTunables {
            writeback_rate_fp_term_low: 1,
            writeback_rate_fp_term_mid: if is_lowest { u32::MAX - 1 } else { 2 },
            writeback_rate_fp_term_high: u32::MAX,
            cutoff_writeback: MAX_CUTOFF_WRITEBACK,
            ..DeviceTunables::default()
        }
    }

    /// Changes several settings, all or (after an error) none. Their order does not matter: settings that limit each
    /// other are not clamped if the final values fit together.
    pub fn set_all<'a>(
        &mut self,
        settings: impl Iterator<Item = (&'a str, &'a str)> + Clone,
    ) -> Result<(), TunableError> {
        tunable::set_all(TUNABLES, self, settings)
    }

    /// All settings: those of the kernel in its order, then the others.
    pub fn iter(&self) -> impl Iterator<Item = TunableInfo> + '_ {
        let defaults = DeviceTunables::default();
        TUNABLES.iter().map(move |tunable| tunable.info(self, &defaults))
    }
}

/// The number that a text stands for, in the unit of the setting `name` of the devices.
pub(super) fn number(name: &str, text: &str) -> Option<u64> {
    tunable::find(TUNABLES, name).ok()?.number(text)
}
