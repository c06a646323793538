//! The settings of a cache set and its cache device: those of the kernel (semantics section 16.3, semantics section
//! 16.4, semantics section 16.6), and some that the kernel does not have.
//!
//! Owns the defaults and ranges, and keeps `cutoff_writeback` at or below `cutoff_writeback_sync`.

use format::Replacement;

use super::error::TunableError;
use super::tunable::{self, Show, TunableInfo, Unit, choice_of, flag, number};
use crate::policy::choices::{OnError, Overwrite};
use crate::policy::replacement::{InPlaceOfLru, PolicyEntry};
use crate::stats::errors::DECAYS_PER_HALFLIFE;

/// Percentage of used buckets up to which all writes become dirty data (semantics section 16.6).
pub(super) const DEFAULT_CUTOFF_WRITEBACK: u8 = 40;
/// Percentage of used buckets up to which synchronous writes become dirty data (semantics section 16.6).
const DEFAULT_CUTOFF_WRITEBACK_SYNC: u8 = 70;
/// Largest values of these two settings (semantics section 16.6).
pub(super) const MAX_CUTOFF_WRITEBACK: u8 = 70;
const MAX_CUTOFF_WRITEBACK_SYNC: u8 = 90;
/// Largest value of most numbers.
const MAX_U32: u64 = u32::MAX as u64;
/// Default limit for btree nodes in memory: the whole index of a cache of some hundred GiB with extents of 64 KiB.
const DEFAULT_BTREE_CACHE_LIMIT: u64 = 1 << 30;
/// Smallest limit: 64 nodes of 256 KiB, enough for several paths through the tree and for splits.
const MIN_BTREE_CACHE_LIMIT: u64 = 16 << 20;
/// Largest limit: 1 PiB, which is more than any index takes.
const MAX_BTREE_CACHE_LIMIT: u64 = 1 << 50;
/// Default of `writeback_batch_sectors`: 32 MiB, so that the flush of a disk (tens of milliseconds) is short compared
/// to the batch.
const DEFAULT_WRITEBACK_BATCH: u32 = 65536;
/// Largest batch: 1 GiB.
const MAX_WRITEBACK_BATCH: u64 = 2 << 20;

/// Default of `scrub_share`: the device stays responsive to clients that begin during a request of the scrub.
const DEFAULT_SCRUB_SHARE: u8 = 50;
/// Default of `scrub_interval_days`: a month.
const DEFAULT_SCRUB_INTERVAL_DAYS: u16 = 30;
/// Default of `group_timeout_ms`: the watch takes a third longer at most, and then fewer than the 30 s have passed after which the NBD
/// client of the kernel and most initiators give a request up.
const DEFAULT_GROUP_TIMEOUT_MS: u32 = 20_000;
/// Largest timeout: an hour.
const MAX_GROUP_TIMEOUT_MS: u64 = 3_600_000;
/// Largest interval: ten years.
const MAX_SCRUB_INTERVAL_DAYS: u64 = 3650;
/// Largest rate: 1 TiB in a second, which no device reaches.
const MAX_SCRUB_RATE: u64 = 1 << 40;

type SetTunable = tunable::Tunable<SetTunables>;

/// The settings of a cache set and its cache device. Names, units, defaults and ranges are the kernel's (semantics
/// section 16) where the kernel has them. Values from outside must be set through [`SetTunables::set`]; code that
/// writes a field directly must keep to its range.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SetTunables {
    /// Whether the index is stored on the cache device (the sync flag of the superblock).
    pub synchronous: bool,
    /// Milliseconds until keys without a waiting flush are written to the journal.
    pub journal_delay_ms: u16,
    /// The reaction to an error that makes the set fail.
    pub errors: OnError,
    /// The number of errors of the cache device at which the set is disabled.
    pub io_error_limit: u32,
    /// The number of I/Os after which an error counts half; 0 for never; a multiple of 88.
    pub io_error_halflife: u32,
    /// Cache reads that take longer count as congestion, in units of 1024 ns; 0 if none do.
    pub congested_read_threshold_us: u32,
    /// Cache writes that take longer count as congestion, in units of 1024 ns; 0 if none do.
    pub congested_write_threshold_us: u32,
    /// Whether garbage collection rewrites every node that it passes.
    pub gc_always_rewrite: bool,
    /// Whether the cache of nodes in memory is not shrunk.
    pub btree_shrinker_disabled: bool,
    /// Whether garbage collection empties sparsely filled buckets.
    pub copy_gc_enabled: bool,
    /// Whether an idle set writes back as fast as possible.
    pub idle_max_writeback_rate: bool,
    /// Whether garbage is collected when all dirty data has been written back.
    pub gc_after_writeback: bool,
    /// Whether all I/O of the set fails.
    pub io_disable: bool,
    /// Whether buckets are discarded before they are reused.
    pub discard: bool,
    /// The policy that chooses buckets for eviction.
    pub cache_replacement_policy: Replacement,
    /// Percentage of used buckets up to which all writes become dirty data.
    pub cutoff_writeback: u8,
    /// Percentage of used buckets up to which synchronous writes become dirty data.
    pub cutoff_writeback_sync: u8,
    /// Whether dirty data is overwritten in place. Not in the kernel.
    pub overwrite_in_place: Overwrite,
    /// The policy that replaces lru. Not in the kernel.
    pub replacement: InPlaceOfLru,
    /// Limit for btree nodes in memory, in bytes. Not in the kernel.
    pub btree_cache_limit: u64,
    /// The largest number of bytes that a scrub reads in a second; 0 for no limit. Not in the kernel.
    pub scrub_rate: u64,
    /// The share of the time that a scrub takes while no client waits, in percent. Not in the kernel.
    pub scrub_share: u8,
    /// Days after which a set with checksums is scrubbed again; 0 for never. Not in the kernel.
    pub scrub_interval_days: u16,
    /// Milliseconds without an answer of the cache device after which another set of its group goes on alone; 0 for never. Not in the
    /// kernel.
    pub group_timeout_ms: u32,
    /// Sectors written back between two flushes of the backing device. Not in the kernel, which does not flush the
    /// backing device during writeback.
    pub writeback_batch_sectors: u32,
}

impl Default for SetTunables {
    fn default() -> Self {
        SetTunables {
            // The defaults are those of semantics section 16.3.
            synchronous: true,
            journal_delay_ms: 100,
            errors: OnError::default(),
            io_error_limit: 8,
            io_error_halflife: 0,
            congested_read_threshold_us: 2000,
            congested_write_threshold_us: 20000,
            gc_always_rewrite: false,
            btree_shrinker_disabled: false,
            copy_gc_enabled: false,
            idle_max_writeback_rate: true,
            gc_after_writeback: false,
            io_disable: false,
            // These defaults are those of semantics section 16.4.
            discard: false,
            cache_replacement_policy: Replacement::default(),
            cutoff_writeback: DEFAULT_CUTOFF_WRITEBACK,
            cutoff_writeback_sync: DEFAULT_CUTOFF_WRITEBACK_SYNC,
            overwrite_in_place: Overwrite::default(),
            replacement: InPlaceOfLru::default(),
            btree_cache_limit: DEFAULT_BTREE_CACHE_LIMIT,
            scrub_rate: 0,
            scrub_share: DEFAULT_SCRUB_SHARE,
            scrub_interval_days: DEFAULT_SCRUB_INTERVAL_DAYS,
            group_timeout_ms: DEFAULT_GROUP_TIMEOUT_MS,
            writeback_batch_sectors: DEFAULT_WRITEBACK_BATCH,
        }
    }
}

/// The settings of the kernel, then the others.
static TUNABLES: &[SetTunable] = &[
    SetTunable::new("synchronous", Unit::None, "the index is stored on the cache device", flag!(synchronous))
        .in_superblock(),
    SetTunable::new(
        "journal_delay_ms",
        Unit::Millis,
        "time until keys without a waiting flush are journaled",
        number!(journal_delay_ms: u16, 0, u16::MAX as u64),
    ),
    SetTunable::new(
        "errors",
        Unit::None,
        "reaction to an error that makes the set fail",
        choice_of!(errors: OnError),
    ),
    SetTunable::new(
        "io_error_limit",
        Unit::None,
        "errors of the cache device at which the set is disabled",
        number!(io_error_limit: u32, 0, MAX_U32),
    ),
    SetTunable::new(
        "io_error_halflife",
        Unit::Ios,
        "I/Os after which an error counts half; 0 for never; multiples of 88",
        tunable::Field::Number {
            get: |t| u64::from(t.io_error_halflife),
            put: |t, value| {
                let value = u32::try_from(value).unwrap_or(u32::MAX);
                t.io_error_halflife = value - value % DECAYS_PER_HALFLIFE;
            },
            range: |_| (0, MAX_U32),
            show: Show::Plain,
        },
    ),
    SetTunable::new(
        "congested_read_threshold_us",
        Unit::Micros,
        "cache reads that take longer count as congestion; 0 for none",
        number!(congested_read_threshold_us: u32, 0, MAX_U32),
    ),
    SetTunable::new(
        "congested_write_threshold_us",
        Unit::Micros,
        "cache writes that take longer count as congestion; 0 for none",
        number!(congested_write_threshold_us: u32, 0, MAX_U32),
    ),
    SetTunable::new(
        "gc_always_rewrite",
        Unit::None,
        "garbage collection rewrites every node",
        flag!(gc_always_rewrite),
    ),
    SetTunable::new(
        "btree_shrinker_disabled",
        Unit::None,
        "the cache of btree nodes in memory is not shrunk",
        flag!(btree_shrinker_disabled),
    ),
    SetTunable::new(
        "copy_gc_enabled",
        Unit::None,
        "garbage collection empties sparsely filled buckets",
        flag!(copy_gc_enabled),
    ),
    SetTunable::new(
        "idle_max_writeback_rate",
        Unit::None,
        "an idle set writes back as fast as possible",
        flag!(idle_max_writeback_rate),
    ),
    SetTunable::new(
        "gc_after_writeback",
        Unit::None,
        "garbage is collected when all dirty data is written back",
        flag!(gc_after_writeback),
    ),
    SetTunable::new("io_disable", Unit::None, "all I/O of the set fails", flag!(io_disable)),
    SetTunable::new("discard", Unit::None, "buckets are discarded before they are reused", flag!(discard))
        .in_superblock(),
    SetTunable::new(
        "cache_replacement_policy",
        Unit::None,
        "policy that chooses buckets for eviction",
        choice_of!(cache_replacement_policy: Replacement),
    )
    .in_superblock(),
    SetTunable::new(
        "cutoff_writeback",
        Unit::Percent,
        "used buckets up to which all writes become dirty data; 0 for the default",
        tunable::Field::Number {
            get: |t| u64::from(t.cutoff_writeback),
            put: |t, value| {
                // If `cutoff_writeback_sync` is lower, it also limits the default.
                let value = or_default(value, DEFAULT_CUTOFF_WRITEBACK);
                t.cutoff_writeback = value.min(t.cutoff_writeback_sync);
            },
            range: |t| (0, u64::from(MAX_CUTOFF_WRITEBACK.min(t.cutoff_writeback_sync))),
            show: Show::Plain,
        },
    ),
    SetTunable::new(
        "cutoff_writeback_sync",
        Unit::Percent,
        "used buckets up to which synchronous writes become dirty data; 0 for the default",
        tunable::Field::Number {
            get: |t| u64::from(t.cutoff_writeback_sync),
            put: |t, value| {
                t.cutoff_writeback_sync = or_default(value, DEFAULT_CUTOFF_WRITEBACK_SYNC);
                t.cutoff_writeback = t.cutoff_writeback.min(t.cutoff_writeback_sync);
            },
            range: |_| (0, MAX_CUTOFF_WRITEBACK_SYNC as u64),
            show: Show::Plain,
        },
    ),
    SetTunable::new(
        "overwrite_in_place",
        Unit::None,
        "whether dirty data is overwritten in place instead of written to a new place",
        choice_of!(overwrite_in_place: Overwrite),
    )
    .not_in_kernel(),
    SetTunable::new(
        "replacement",
        Unit::None,
        "what takes the place of the policy lru: the kernel's rule, or the time that hits save",
        choice_of!(replacement: InPlaceOfLru),
    )
    .not_in_kernel(),
    SetTunable::new(
        "btree_cache_limit",
        Unit::Bytes,
        "btree nodes in memory",
        number!(btree_cache_limit: u64, MIN_BTREE_CACHE_LIMIT, MAX_BTREE_CACHE_LIMIT, as Bytes),
    )
    .not_in_kernel(),
    SetTunable::new(
        "scrub_rate",
        Unit::BytesPerSecond,
        "rate at which a scrub reads; 0 for no limit",
        number!(scrub_rate: u64, 0, MAX_SCRUB_RATE),
    )
    .not_in_kernel(),
    SetTunable::new(
        "scrub_share",
        Unit::Percent,
        "share of the time that a scrub takes while no client waits; less while clients wait",
        number!(scrub_share: u8, 1, 100),
    )
    .not_in_kernel(),
    SetTunable::new(
        "scrub_interval_days",
        Unit::None,
        "days after which a set with checksums is scrubbed again; 0 for never",
        number!(scrub_interval_days: u16, 0, MAX_SCRUB_INTERVAL_DAYS),
    )
    .not_in_kernel(),
    SetTunable::new(
        "group_timeout_ms",
        Unit::Millis,
        "time without an answer of the cache device after which another set of its group goes on alone; 0 for never",
        number!(group_timeout_ms: u32, 0, MAX_GROUP_TIMEOUT_MS),
    )
    .not_in_kernel(),
    SetTunable::new(
        "writeback_batch_sectors",
        Unit::Sectors,
        "data written back between two flushes of the backing device",
        number!(writeback_batch_sectors: u32, 8, MAX_WRITEBACK_BATCH),
    )
    .not_in_kernel(),
];

impl SetTunables {
    /// The replacement policy that these settings name.
    pub(crate) fn policy(&self) -> &'static PolicyEntry {
        self.replacement.policy(self.cache_replacement_policy)
    }

    /// The value of a setting as the kernel shows it.
    pub fn get(&self, name: &str) -> Result<String, TunableError> {
        Ok(tunable::find(TUNABLES, name)?.show(self))
    }

    /// The value of a setting in the form that [`SetTunables::set`] accepts.
    pub fn raw(&self, name: &str) -> Result<String, TunableError> {
        Ok(tunable::find(TUNABLES, name)?.raw(self))
    }

    /// Changes a setting. Numbers out of range are clamped; any other invalid value is refused and changes nothing.
    /// After a change of `cutoff_writeback` or `cutoff_writeback_sync` the caller updates the devices
    /// ([`super::DeviceTunables::set_cutoff_writeback`]).
    pub fn set(&mut self, name: &str, value: &str) -> Result<(), TunableError> {
        tunable::find(TUNABLES, name)?.set(self, value)
    }

    /// Refuses a value that is not valid, or that [`SetTunables::set`] would clamp.
    pub fn check(&self, name: &str, value: &str) -> Result<(), TunableError> {
        tunable::find(TUNABLES, name)?.check(self, value)
    }

    /// Refuses a value that is possible with no values of the other settings.
    pub fn check_alone(name: &str, value: &str) -> Result<(), TunableError> {
        tunable::find(TUNABLES, name)?.check(
            &SetTunables { cutoff_writeback_sync: MAX_CUTOFF_WRITEBACK_SYNC, ..SetTunables::default() },
            value,
        )
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
        let defaults = SetTunables::default();
        TUNABLES.iter().map(move |tunable| tunable.info(self, &defaults))
    }
}

/// The value of a cutoff, or its default for 0 (semantics section 16.6).
fn or_default(value: u64, default: u8) -> u8 {
    match u8::try_from(value) {
        Ok(0) | Err(_) => default,
        Ok(value) => value,
    }
}

/// The number that a text stands for, in the unit of the setting `name` of the set.
pub(super) fn number(name: &str, text: &str) -> Option<u64> {
    tunable::find(TUNABLES, name).ok()?.number(text)
}
