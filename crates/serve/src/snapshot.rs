//! All figures of a set and its volumes, as plain values.
//!
//! Owns the names of the figures outside of a set's thread: the control API, the metrics and the sysfs view use this
//! snapshot. Sizes are in bytes, times in the units of their names; [`Command::SetVolume`](crate::Command) accepts the text
//! of tunables unchanged. Must not know how the figures are shown.

mod checksums;
mod copies;
mod tunables;

use std::rc::Rc;

use engine::figures::CachedFigures;
use engine::stats::{CacheStats, OpKind, View, ViewValues};
use engine::{CacheSet, Volume};
use format::{Inode, Sectors};
use serde::Serialize;

use crate::exports::Way;
use crate::session::Session;

pub use checksums::{ChecksumFigures, DamagedFigures, ScrubFigures, Scrubbed};
pub use copies::CopyFigures;
pub use tunables::TunableFigure;

/// A set with its volumes at one moment.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct Snapshot {
    /// The set, unless backing devices run alone.
    pub set: Option<SetFigures>,
    /// The volumes that are served, in the session's order.
    pub volumes: Vec<VolumeFigures>,
    /// The stops that have begun and have not ended, which the owner of the exports fills in.
    #[serde(skip)]
    pub stops: Vec<StopFigures>,
}

/// A stop that has begun and has not ended.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct StopFigures {
    /// Name of the volume that is being stopped; `None` if everything is.
    pub volume: Option<String>,
    /// The time since its begin.
    pub seconds: u64,
    /// Whether all exports have ended, so that they do not come back if the command that began the stop has failed meanwhile.
    pub is_final: bool,
}

/// The names of a set.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct SetNames {
    /// UUID of the set.
    pub uuid: String,
    /// Label of the set; empty if there is none.
    pub label: String,
    /// Name of the cache device.
    pub device: String,
}

/// A set and its cache device.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct SetFigures {
    /// The names of the set.
    #[serde(flatten)]
    pub names: SetNames,
    /// Size of a bucket in bytes.
    pub bucket_bytes: u64,
    /// Number of buckets.
    pub nbuckets: u32,
    /// Size of the cache in bytes: all buckets.
    pub size_bytes: u64,
    /// Percent of buckets that cannot be reclaimed at once.
    pub in_use_percent: u8,
    /// Data of all slots, including slots whose device is missing.
    #[serde(flatten)]
    pub held: HeldFigures,
    /// Dirty data by slot.
    pub dirty_by_slot: Vec<SlotDirty>,
    /// The index.
    #[serde(flatten)]
    pub index: IndexFigures,
    /// The journal.
    #[serde(flatten)]
    pub journal: JournalFigures,
    /// Requests to the cache device.
    #[serde(flatten)]
    pub device: CacheDeviceFigures,
    /// Why the set is disabled, if it is.
    pub failed: Option<String>,
    /// The checksums of cached data; `None` if the set has none.
    pub checksums: Option<ChecksumFigures>,
    /// The background work of the engine.
    pub work: WorkFigures,
    /// Statistics of all volumes together.
    pub stats: StatsFigures,
    /// Tunables of the set.
    pub tunables: Vec<TunableFigure>,
}

/// Data in the cache, of a set or of a volume. Every percentage is a share of the size of the cache.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct HeldFigures {
    /// Data in the cache in bytes, clean and dirty, without that of detached devices; `None` if it is not counted.
    pub cached_bytes: Option<u64>,
    /// This data in percent of the size of the cache.
    pub cached_percent: Option<f64>,
    /// Whether `cached_bytes` is exact; if not, parts of the index are not in memory and there is more data.
    pub cached_is_exact: bool,
    /// The part of this data in bytes that is dirty: the backing device does not have it yet.
    pub dirty_bytes: u64,
    /// The dirty data in percent of the size of the cache; `None` without a cache.
    pub dirty_percent: Option<f64>,
    /// The second copy of the dirty data of a volume; `None` for a set, and if the set of the volume is in no group.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub copy: Option<CopyFigures>,
}

/// `part` in percent of `whole`, with one decimal.
fn share(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| (part as f64 * 1000.0 / whole as f64).round() / 10.0)
}

impl HeldFigures {
    /// The figures of a cache of this size, or of a part of it.
    pub fn new(cached: Option<u64>, is_exact: bool, dirty_bytes: u64, cache_bytes: u64) -> HeldFigures {
        HeldFigures {
            cached_bytes: cached,
            cached_percent: cached.and_then(|cached| share(cached, cache_bytes)),
            cached_is_exact: is_exact,
            dirty_bytes,
            dirty_percent: share(dirty_bytes, cache_bytes),
            copy: None,
        }
    }
}

/// The index of a set.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct IndexFigures {
    /// Number of btree nodes.
    pub btree_nodes: u64,
    /// Bytes of index in memory.
    pub index_bytes: u64,
}

/// The journal of a set.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct JournalFigures {
    /// Number of free journal buckets.
    pub journal_buckets_free: u64,
    /// Number of journal buckets.
    pub journal_buckets: u64,
    /// Number of journal entries written since the start.
    pub journal_entries_written: u64,
    /// Bytes of the journal entries written since the start.
    pub journal_bytes_written: u64,
}

/// Requests to the cache device.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct CacheDeviceFigures {
    /// Flushes sent to the device.
    pub cache_flushes: u64,
    /// Failed requests for data, after decay; the set is disabled at `io_error_limit`.
    pub io_errors: u64,
}

/// The dirty data of a slot.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct SlotDirty {
    /// Number of the slot.
    pub slot: u32,
    /// UUID of its backing device or flash-only volume.
    pub uuid: Option<String>,
    /// Label of its backing device or flash-only volume; empty if there is none.
    pub label: String,
    /// Its dirty data in bytes.
    pub dirty_bytes: u64,
    /// Whether it is a copy of the dirty data of another set.
    pub is_copy: bool,
}

/// Counters of the engine's background work since the start.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct WorkFigures {
    /// Bytes written to the cache device since the start or `clear_stats`.
    pub written_bytes: u64,
    /// Bytes of the btree written to the cache device since the start or `clear_stats`.
    pub btree_written_bytes: u64,
    /// Bytes of btree, journal, priorities and superblock written since the start or `clear_stats`.
    pub metadata_written_bytes: u64,
    /// Cache reads that were repeated because their bucket was reused meanwhile.
    pub cache_read_races: u64,
    /// Number of extents written back.
    pub writeback_keys_done: u64,
    /// Number of extents whose writeback failed.
    pub writeback_keys_failed: u64,
    /// Times that journal space was reclaimed.
    pub reclaim: u64,
    /// Number of reclaimed journal buckets.
    pub reclaimed_journal_buckets: u64,
    /// Number of journal writes that a flush requested.
    pub flush_write: u64,
    /// Work on the btree.
    #[serde(flatten)]
    pub btree: BtreeWorkFigures,
    /// Number of priority chains written.
    pub prio_writes: u64,
    /// Walks of the index by the garbage collector.
    pub gc_runs: u64,
    /// Extents moved by the moving garbage collector.
    pub moved_extents: u64,
    /// Number of buckets whose generation has wrapped around.
    pub gen_wraps: u64,
}

/// Counters of the work on the btree since the start.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct BtreeWorkFigures {
    /// Btree nodes read after the start.
    pub btree_reads: u64,
    /// Leaves replaced by new nodes.
    pub btree_rewrites: u64,
    /// Times that a new btree node had to wait for a bucket.
    pub btree_waits: u64,
}

/// Hits, misses and bypasses, by the views of the kernel.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct StatsFigures {
    /// Since the start or `clear_stats`.
    pub total: ViewFigures,
    /// About the last five minutes.
    pub five_minute: ViewFigures,
    /// About the last hour.
    pub hour: ViewFigures,
    /// About the last day.
    pub day: ViewFigures,
    /// Requests that were not cached since the start, for every reason.
    pub bypass_reasons: Vec<ReasonFigures>,
}

/// The figures of one period.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct ViewFigures {
    /// Reads, not bypassed, that were completely served from the cache.
    pub cache_hits: u64,
    /// Reads, not bypassed, with at least one missing piece.
    pub cache_misses: u64,
    /// Hits per reads that were not bypassed, in whole percent; 0 without any.
    pub cache_hit_ratio: u64,
    /// Bypassed reads that were completely served from the cache.
    pub cache_bypass_hits: u64,
    /// Bypassed reads with at least one missing piece.
    pub cache_bypass_misses: u64,
    /// Misses that were not cached because of a concurrent write.
    pub cache_miss_collisions: u64,
    /// Bytes of bypassed requests.
    pub bypassed_bytes: u64,
}

/// Requests that were not cached for one reason.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct ReasonFigures {
    /// Name of the reason.
    pub reason: &'static str,
    /// Requests, or parts of requests.
    pub requests: u64,
    /// Bytes of these requests.
    pub bytes: u64,
}

/// One volume.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct VolumeFigures {
    /// Name for clients.
    pub name: String,
    /// Label; empty if there is none.
    pub label: String,
    /// Slot in the set, while attached.
    pub slot: Option<u32>,
    /// Name of the backing device; `None` for a flash-only volume.
    pub backing_device: Option<String>,
    /// UUID of the backing device.
    pub backing_uuid: Option<String>,
    /// State in the backing superblock: `no cache`, `clean`, `dirty` or `inconsistent`.
    pub state: Option<&'static str>,
    /// Whether it is flash-only, and what only such a volume has.
    #[serde(flatten)]
    pub flash: FlashFigures,
    /// Whether it is served through the set; false for a backing device that is served alone.
    pub attached: bool,
    /// The cache mode: how writes are handled.
    pub cache_mode: String,
    /// Size in bytes.
    pub size_bytes: u64,
    /// Logical block size in bytes.
    pub block_bytes: u32,
    /// Data of the volume in the cache. The owner of the exports fills in what is cached.
    #[serde(flatten)]
    pub held: HeldFigures,
    /// Failed requests to the backing device.
    pub io_errors: u64,
    /// Flushes sent to the backing device.
    pub backing_flushes: u64,
    /// Requests of clients.
    pub requests: RequestFigures,
    /// Hits, misses and bypasses.
    pub stats: StatsFigures,
    /// The terms behind the writeback rate.
    pub writeback: WritebackFigures,
    /// Tunables of the device.
    pub tunables: Vec<TunableFigure>,
    /// The ways to reach the volume, which the owner of the exports fills in.
    pub exports: Vec<Way>,
    /// Why the volume is not exported as configured, which the owner of the exports fills in.
    pub problem: Option<String>,
}

/// What distinguishes a flash-only volume.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct FlashFigures {
    /// Whether the volume's data is in the cache alone.
    pub flash_only: bool,
    /// UUID of a flash-only volume, which the set stores.
    pub flash_uuid: Option<String>,
    /// Whether a flash-only volume was stopped, so that nothing exports it; the owner of the exports fills this in.
    pub stopped: bool,
}

/// Requests of clients since the start.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct RequestFigures {
    /// Reads.
    pub reads: u64,
    /// Bytes of the reads.
    pub read_bytes: u64,
    /// Writes.
    pub writes: u64,
    /// Bytes of the writes.
    pub written_bytes: u64,
    /// Discards.
    pub discards: u64,
    /// Bytes of the discards.
    pub discarded_bytes: u64,
    /// Flushes.
    pub flushes: u64,
    /// Number of reads and writes that carry the hint that they are for metadata of a file system.
    pub metadata_requests: u64,
    /// Bytes of these requests.
    pub metadata_bytes: u64,
    /// Reads and writes that were answered, with their latencies.
    #[serde(flatten)]
    pub answered: AnsweredFigures,
}

/// Reads and writes that were answered since the start. A mean latency is a sum divided by the number of requests.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct AnsweredFigures {
    /// Number of reads.
    pub reads_answered: u64,
    /// Sum of the latencies of the reads in microseconds.
    pub read_latency_sum_us: u64,
    /// Number of writes.
    pub writes_answered: u64,
    /// Sum of the latencies of the writes in microseconds.
    pub write_latency_sum_us: u64,
}

impl AnsweredFigures {
    fn of(volume: &Volume) -> AnsweredFigures {
        let (reads, read_time) = volume.latency_of(OpKind::Read);
        let (writes, write_time) = volume.latency_of(OpKind::Write);
        AnsweredFigures {
            reads_answered: reads,
            read_latency_sum_us: read_time.0 / 1000,
            writes_answered: writes,
            write_latency_sum_us: write_time.0 / 1000,
        }
    }
}

/// The values of `writeback_rate_debug`, as numbers.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct WritebackFigures {
    /// Rate of writeback in bytes per second.
    pub rate_bytes_per_s: i64,
    /// Dirty data in bytes, as the controller counts it.
    pub dirty_bytes: i64,
    /// Target of the amount of dirty data, at the last update.
    pub target_bytes: i64,
    /// Proportional (or fragmentation) term of the rate.
    pub proportional_bytes_per_s: i64,
    /// Integral term of the rate.
    pub integral_bytes_per_s: i64,
    /// Change of the rate at the last update.
    pub change_bytes_per_s: i64,
    /// Time until the next writeback is due, in milliseconds; negative if it is late.
    pub next_io_ms: i64,
    /// These values as the kernel's `writeback_rate_debug` shows them.
    pub debug: String,
}

impl Snapshot {
    /// The figures of a session at this moment. It is called on the thread of the session, and takes microseconds.
    pub fn of(session: &Session) -> Snapshot {
        Snapshot {
            set: session.set.as_ref().map(SetFigures::of),
            volumes: session.volumes().iter().map(|v| VolumeFigures::of(v, session.set.as_ref())).collect(),
            stops: Vec::new(),
        }
    }

    /// The dirty data in the cache of the device with this UUID, in bytes; `None` without a cache.
    pub fn dirty_of(&self, uuid: Option<&str>) -> Option<u64> {
        let slots = &self.set.as_ref()?.dirty_by_slot;
        let found = slots.iter().find(|slot| slot.uuid.is_some() && slot.uuid.as_deref() == uuid);
        Some(found.map_or(0, |slot| slot.dirty_bytes))
    }

    /// Adds what is cached of each volume, and of the set the sum. The count of the dirty data is newer.
    pub fn add_cached(&mut self, cached: &CachedFigures) {
        let Some((size, set)) = self.set.as_mut().map(|set| (set.size_bytes, set)) else { return };
        let held = |bytes: u64, of: &HeldFigures| {
            let bytes = Some(bytes.max(of.dirty_bytes));
            let held = HeldFigures::new(bytes, cached.complete, of.dirty_bytes, size);
            HeldFigures { copy: of.copy.clone(), ..held }
        };
        set.held = held(cached.by_slot.iter().map(|(_, n)| n.bytes()).sum(), &set.held);
        for volume in self.volumes.iter_mut().filter(|v| v.slot.is_some()) {
            let found = cached.by_slot.iter().find(|(inode, _)| Some(inode.0) == volume.slot);
            volume.held = held(found.map_or(0, |(_, n)| n.bytes()), &volume.held);
        }
    }
}

impl SetFigures {
    fn of(set: &CacheSet) -> SetFigures {
        let s = set.status();
        let size_bytes = s.bucket_sectors.bytes().saturating_mul(u64::from(s.nbuckets));
        let dirty_bytes = s.dirty.iter().map(|(_, n)| n.bytes()).sum();
        SetFigures {
            names: SetNames { uuid: s.set_uuid.to_string(), label: s.label, device: s.device },
            bucket_bytes: s.bucket_sectors.bytes(),
            nbuckets: s.nbuckets,
            in_use_percent: s.in_use_percent,
            size_bytes,
            held: HeldFigures::new(Some(s.cached_sectors.bytes()), true, dirty_bytes, size_bytes),
            dirty_by_slot: s.dirty.iter().map(|(inode, n)| SlotDirty::of(set, *inode, *n)).collect(),
            index: IndexFigures { btree_nodes: s.btree_nodes as u64, index_bytes: s.index_bytes as u64 },
            journal: JournalFigures {
                journal_buckets_free: s.journal_free.0 as u64,
                journal_buckets: s.journal_free.1 as u64,
                journal_entries_written: s.journal_written.0,
                journal_bytes_written: s.journal_written.1,
            },
            device: CacheDeviceFigures { cache_flushes: set.cache_flushes(), io_errors: s.io_errors },
            failed: s.failed,
            checksums: ChecksumFigures::of(set),
            work: WorkFigures::of(set),
            stats: set.with_stats(|s| StatsFigures::of(s)),
            tunables: set.tunables().iter().map(TunableFigure::from).collect(),
        }
    }
}

impl SlotDirty {
    fn of(set: &CacheSet, inode: Inode, dirty: Sectors) -> SlotDirty {
        let (uuid, label) = set.slot(inode).unzip();
        SlotDirty {
            slot: inode.0,
            uuid: uuid.map(|uuid| uuid.to_string()),
            label: label.unwrap_or_default(),
            dirty_bytes: dirty.bytes(),
            is_copy: set.has_copy_in(inode),
        }
    }
}

impl WorkFigures {
    fn of(set: &CacheSet) -> WorkFigures {
        let (s, c) = (set.set_counters(), set.counters());
        WorkFigures {
            written_bytes: s.written.bytes(),
            btree_written_bytes: s.btree_written.bytes(),
            metadata_written_bytes: s.metadata_written.bytes(),
            cache_read_races: s.cache_read_races,
            writeback_keys_done: s.writeback_keys_done,
            writeback_keys_failed: s.writeback_keys_failed,
            reclaim: s.reclaim,
            reclaimed_journal_buckets: s.reclaimed_journal_buckets,
            flush_write: s.flush_write,
            btree: BtreeWorkFigures {
                btree_reads: c.btree_reads,
                btree_rewrites: c.btree_rewrites,
                btree_waits: c.btree_waits,
            },
            prio_writes: c.prio_writes,
            gc_runs: c.gc_runs,
            moved_extents: c.moved_extents,
            gen_wraps: c.gen_wraps,
        }
    }
}

impl StatsFigures {
    fn of(stats: &CacheStats) -> StatsFigures {
        use engine::policy::bypass::BypassReason;
        let reasons = BypassReason::ALL.iter().map(|&reason| {
            let count = stats.reason(reason);
            ReasonFigures { reason: reason.name(), requests: count.requests, bytes: count.bytes }
        });
        StatsFigures {
            total: stats.view(View::Total).into(),
            five_minute: stats.view(View::FiveMinute).into(),
            hour: stats.view(View::Hour).into(),
            day: stats.view(View::Day).into(),
            bypass_reasons: reasons.collect(),
        }
    }
}

impl From<ViewValues> for ViewFigures {
    fn from(v: ViewValues) -> ViewFigures {
        ViewFigures {
            cache_hits: v.cache_hits,
            cache_misses: v.cache_misses,
            cache_hit_ratio: v.cache_hit_ratio(),
            cache_bypass_hits: v.cache_bypass_hits,
            cache_bypass_misses: v.cache_bypass_misses,
            cache_miss_collisions: v.cache_miss_collisions,
            bypassed_bytes: v.bypassed_bytes,
        }
    }
}

impl VolumeFigures {
    fn of(volume: &Rc<Volume>, set: Option<&CacheSet>) -> VolumeFigures {
        let slot = volume.inode().filter(|_| volume.is_flash_only());
        let flash_uuid = slot.zip(set).and_then(|(inode, set)| set.slot(inode)).map(|(uuid, _)| uuid);
        let tunables = volume.tunables();
        let requests = volume.request_counters();
        let rate = volume.writeback_debug();
        VolumeFigures {
            name: volume.name(),
            label: tunables.label.clone(),
            slot: volume.inode().map(|i| i.0),
            backing_device: volume.backing_name(),
            backing_uuid: volume.backing_uuid().map(|u| u.to_string()),
            state: volume.state().map(|s| s.name()),
            flash: FlashFigures {
                flash_only: volume.is_flash_only(),
                flash_uuid: flash_uuid.map(|uuid| uuid.to_string()),
                stopped: false,
            },
            attached: volume.inode().is_some(),
            cache_mode: tunables.raw("cache_mode").unwrap_or_default(),
            size_bytes: volume.size().bytes(),
            block_bytes: volume.block_bytes(),
            held: HeldFigures {
                copy: CopyFigures::of(volume, set),
                ..HeldFigures::new(None, false, Sectors::bytes(volume.dirty_sectors()), 0)
            },
            io_errors: volume.io_errors(),
            backing_flushes: volume.backing_flushes(),
            requests: RequestFigures {
                reads: requests.reads.requests,
                read_bytes: requests.reads.bytes,
                writes: requests.writes.requests,
                written_bytes: requests.writes.bytes,
                discards: requests.discards.requests,
                discarded_bytes: requests.discards.bytes,
                flushes: requests.flushes,
                metadata_requests: requests.metadata.requests,
                metadata_bytes: requests.metadata.bytes,
                answered: AnsweredFigures::of(volume),
            },
            stats: volume.with_stats(|s| StatsFigures::of(s)),
            writeback: WritebackFigures {
                rate_bytes_per_s: rate.rate,
                dirty_bytes: rate.dirty,
                target_bytes: rate.target,
                proportional_bytes_per_s: rate.proportional,
                integral_bytes_per_s: rate.integral,
                change_bytes_per_s: rate.change,
                next_io_ms: rate.next_io_ms,
                debug: rate.to_string(),
            },
            tunables: tunables.iter().map(TunableFigure::from).collect(),
            exports: Vec::new(),
            problem: None,
        }
    }
}
