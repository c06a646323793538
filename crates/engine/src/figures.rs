//! All figures of a set and its volumes, copied at one moment.
//!
//! Owns the plain structs from which metrics, explanations and control files are made. They have no reference to the
//! engine and can be sent to other threads. Units are in the names or the types. Must not know how figures are shown.

use std::collections::BTreeMap;
use std::rc::Rc;

use format::{BackingState, Inode, Sectors};
use io::{DeviceFigures, Histogram};

use crate::data::{ChecksumCounters, ChecksumCoverage};
use crate::policy::bypass::BypassReason;
use crate::scrub::ScrubFigures;
use crate::set::{CacheSet, EngineCounters, SetStatus};
use crate::stats::{
    CacheStats, Latencies, OpKind, ReasonCount, RequestCounters, SetCounters, Tallies, View, ViewValues,
    Work, WorkStats,
};
use crate::tunables::{DeviceTunables, SetTunables};
use crate::volume::{Cache, Volume};
pub use crate::writeback::{RateReason, WritebackFigures};

/// Hits, misses and bypasses.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct CacheFigures {
    views: [ViewValues; View::ALL.len()],
    reasons: [ReasonCount; BypassReason::COUNT],
}

impl CacheFigures {
    fn of(stats: &CacheStats) -> CacheFigures {
        CacheFigures {
            views: View::ALL.map(|view| stats.view(view)),
            reasons: BypassReason::ALL.map(|reason| stats.reason(reason)),
        }
    }

    /// The values of a view.
    pub fn view(&self, view: View) -> ViewValues {
        self.views[view as usize]
    }

    /// The requests that were not cached for this reason since the start or `clear_stats`.
    pub fn reason(&self, reason: BypassReason) -> ReasonCount {
        self.reasons[reason.index()]
    }
}

/// The content of the buckets of a cache. Each bucket counts in one of `unused`, `clean`, `dirty` and `metadata`.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct BucketFigures {
    /// All of them.
    pub total: u32,
    /// Without any live data.
    pub unused: u32,
    /// With live data, all of it clean.
    pub clean: u32,
    /// With dirty data.
    pub dirty: u32,
    /// Superblock, journal, btree, priorities.
    pub metadata: u32,
    /// Buckets that are ready for use or can be reused at once.
    pub available: u32,
    /// Mean age of the buckets that have an age, in units of priority.
    pub average_age: u64,
    /// Sectors of the buckets in each part between two quantiles.
    pub sectors_per_quantile: u64,
    /// The ages at the borders of 32 equal parts of the buckets that have an age; empty if none has.
    pub quantiles: Vec<u16>,
}

/// The content of the buckets of a cache, from its begin to its end, in a number of parts of about equal size.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct BucketMap {
    /// All buckets.
    pub total: u32,
    /// Size of a bucket.
    pub bucket_sectors: Sectors,
    /// The parts, in the order of the device.
    pub cells: Vec<BucketCell>,
}

/// The content of a part of the buckets, which are neighbours.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct BucketCell {
    /// Without any live data.
    pub unused: u32,
    /// With live data, all of it clean.
    pub clean: u32,
    /// With dirty data.
    pub dirty: u32,
    /// Superblock, journal, btree, priorities.
    pub metadata: u32,
    /// Live data in them.
    pub live: Sectors,
}

/// The live data of each slot in the cache, clean and dirty.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct CachedFigures {
    /// Slots with live data, in order.
    pub by_slot: Vec<(Inode, Sectors)>,
    /// Whether the whole index was in memory; if not, a slot may have more data than `by_slot` says.
    pub complete: bool,
}

/// The size and fill of the btree.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct BtreeFigures {
    /// Levels above the leaves.
    pub depth: u32,
    /// Extents in memory.
    pub extents: u64,
    /// Mean length of an extent; 0 if there is none.
    pub average_extent: Sectors,
    /// Fill of the root.
    pub root_usage_percent: u64,
    /// Mean fill of all nodes.
    pub used_percent: u64,
    /// Sectors of all nodes.
    pub node_sectors: Sectors,
    /// Sectors of one node.
    pub sectors_per_node: Sectors,
}

/// Times of the engine's own work.
#[derive(Clone, Debug, Default)]
pub struct TimeFigures {
    /// Writes of whole journal entries, with the flush before each.
    pub journal_writes: Histogram,
    /// Slices, walks and batches.
    pub work: WorkStats,
}

/// The checksums of a set that has them.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct ChecksumState {
    /// Counts since the start.
    pub counters: ChecksumCounters,
    /// How much of the live data can be verified.
    pub coverage: ChecksumCoverage,
    /// Dirty data that is damaged now.
    pub damaged_dirty: Sectors,
    /// The scrub under way, and the last ones.
    pub scrub: ScrubFigures,
}

/// The figures of a set, its cache device, and its volumes.
#[derive(Clone, Debug)]
pub struct SetFigures {
    /// Sizes and state.
    pub status: SetStatus,
    /// Size of a block.
    pub block_sectors: Sectors,
    /// Counts of written sectors, and other counts of the kernel.
    pub counters: SetCounters,
    /// Counts of the engine's own work.
    pub engine: EngineCounters,
    /// Times of the engine's own work.
    pub times: TimeFigures,
    /// Hits and misses of all volumes together.
    pub cache: CacheFigures,
    /// Requests to the cache device.
    pub device: DeviceFigures,
    /// UUID of the cache device.
    pub device_uuid: format::Uuid,
    /// Errors of the cache device, after decay.
    pub io_errors: u64,
    /// The stream length from which requests bypass the congested cache device; `None` if it is not congested.
    pub congested: Option<Sectors>,
    /// Buckets that can be reused at once or are ready for use.
    pub available_buckets: u32,
    /// Journal entries that recovery needs or will need.
    pub journal_entries_in_use: u64,
    /// The btree.
    pub btree: BtreeFigures,
    /// The time of the copy, by the engine's clock.
    pub now: io::Nanos,
    /// The checksums of cached data; `None` if the set has none.
    pub checksums: Option<ChecksumState>,
    /// Settings.
    pub tunables: SetTunables,
    /// The volumes of the set.
    pub volumes: Vec<VolumeFigures>,
}

/// The figures of a volume and its backing device.
#[derive(Clone, Debug)]
pub struct VolumeFigures {
    /// Name for clients.
    pub name: String,
    /// Slot in the set, while the volume is attached.
    pub inode: Option<Inode>,
    /// Name of the backing device; none for a flash-only volume.
    pub backing_name: Option<String>,
    /// UUID of the backing device.
    pub backing_uuid: Option<format::Uuid>,
    /// State in the backing superblock.
    pub state: Option<BackingState>,
    /// Whether it is being detached.
    pub detaching: bool,
    /// Whether it is being stopped, or has been.
    pub stopping: bool,
    /// Size.
    pub size: Sectors,
    /// Live dirty data.
    pub dirty: Sectors,
    /// The target for the dirty data: the share of this device of `writeback_percent` of the cache.
    pub dirty_target: Sectors,
    /// Unit in which stripes are counted.
    pub stripe: Sectors,
    /// Whether writing a part of a stripe is expensive.
    pub partial_stripes_expensive: bool,
    /// Requests of clients.
    pub requests: RequestCounters,
    /// The outcomes of the requests since the start.
    pub total: Tallies,
    /// The outcomes of the requests of the last five minutes.
    pub recent: Tallies,
    /// The latencies of the requests.
    pub latencies: Latencies,
    /// Failed requests, in the order of [`OpKind::ALL`].
    pub errors: [u64; OpKind::ALL.len()],
    /// Hits and misses.
    pub cache: CacheFigures,
    /// Requests to the backing device.
    pub device: DeviceFigures,
    /// Errors of the backing device.
    pub io_errors: u64,
    /// Writeback.
    pub writeback: WritebackFigures,
    /// Settings.
    pub tunables: DeviceTunables,
}

impl VolumeFigures {
    /// Copies all figures of the volume; takes some ten microseconds.
    pub fn of(volume: &Rc<Volume>) -> VolumeFigures {
        let now = volume.rt().now();
        let served = &mut *volume.served();
        let stripe = volume.backing().map(|b| b.disk().info().optimal_io_bytes).unwrap_or_default();
        VolumeFigures {
            name: volume.name(),
            inode: volume.inode(),
            backing_name: volume.backing_name(),
            backing_uuid: volume.backing_uuid(),
            state: volume.state(),
            detaching: volume.is_detaching(),
            stopping: volume.is_stopping(),
            size: volume.size(),
            dirty: volume.dirty_sectors(),
            dirty_target: crate::writeback::dirty_target(volume),
            stripe: Sectors::from_bytes_floor(u64::from(stripe)),
            partial_stripes_expensive: volume.expensive_stripes().is_some(),
            requests: volume.request_counters(),
            total: served.total(),
            recent: served.recent(now),
            latencies: served.latencies().clone(),
            errors: served.errors(),
            cache: volume.with_stats(|s| CacheFigures::of(s)),
            device: volume.backing().map(|b| b.disk().figures()).unwrap_or_default(),
            io_errors: volume.io_errors(),
            writeback: crate::writeback::writeback_figures(volume),
            tunables: volume.tunables(),
        }
    }

    /// Whether all data of the volume is in the cache: it has no backing device.
    pub fn is_flash_only(&self) -> bool {
        self.backing_name.is_none()
    }
}

impl CacheSet {
    /// Copies all figures of the set; takes some ten microseconds for each volume.
    pub fn figures(&self) -> SetFigures {
        let cache = self.cache();
        let limit = cache.congestion().limit(cache.rt.now(), 0);
        SetFigures {
            status: self.status(),
            block_sectors: cache.geometry.block_sectors,
            counters: self.set_counters(),
            engine: self.counters(),
            times: TimeFigures {
                journal_writes: cache.journal.write_times(),
                work: cache.tasks.times().borrow().clone(),
            },
            cache: self.with_stats(|s| CacheFigures::of(s)),
            device: cache.device.disk().figures(),
            device_uuid: cache.device.superblock().uuid(),
            io_errors: cache.device.error_count(),
            congested: limit,
            available_buckets: cache.alloc.buckets().available(),
            journal_entries_in_use: cache
                .journal
                .open_seq()
                .0
                .saturating_sub(cache.journal.oldest_needed().0)
                + 1,
            btree: btree_figures(cache),
            now: cache.rt.now(),
            checksums: self.has_checksums().then(|| ChecksumState {
                counters: self.checksum_counters(),
                coverage: self.checksum_coverage(),
                damaged_dirty: self.damaged().iter().fold(Sectors::ZERO, |sum, d| sum + d.sectors),
                scrub: self.scrub_figures(),
            }),
            tunables: cache.tunables.borrow().clone(),
            volumes: self.volumes().iter().map(VolumeFigures::of).collect(),
        }
    }

    /// Counts the content of all buckets; takes some ten microseconds for each thousand.
    pub fn bucket_figures(&self) -> BucketFigures {
        bucket_figures(self.cache())
    }

    /// Counts the content of all buckets in at most `cells` parts (at least one). It yields between groups of buckets,
    /// so that requests do not wait for the whole count.
    pub async fn bucket_map(&self, cells: u32) -> BucketMap {
        let cache = self.cache();
        let total = cache.alloc.buckets().len();
        let cells = u64::from(cells.clamp(1, total.max(1)));
        let mut map = BucketMap { total, bucket_sectors: cache.geometry.bucket_sectors, cells: Vec::new() };
        // The product is below 2^64, because both factors are below 2^32.
        let begin = |cell: u64| (cell * u64::from(total) / cells) as usize;
        let mut seen = 0;
        for n in 0..cells {
            let mut cell = BucketCell::default();
            let mut at = begin(n);
            while at < begin(n + 1) {
                let end = begin(n + 1).min(at + BUCKETS_AT_ONCE - seen);
                cache.alloc.buckets().visit_range(at..end, |holds, live| cell.count(holds, live));
                seen += end - at;
                at = end;
                if seen >= BUCKETS_AT_ONCE {
                    seen = 0;
                    cache.rt.yield_now().await;
                }
            }
            map.cells.push(cell);
        }
        map
    }

    /// Counts the live data of each slot, as far as the index is in memory. It yields between groups of extents, so that
    /// requests do not wait for the whole count.
    pub async fn cached_figures(&self) -> CachedFigures {
        let cache = self.cache();
        let mut cached: BTreeMap<Inode, Sectors> = BTreeMap::new();
        let (mut complete, mut passed, mut seen) = (true, None, 0);
        // The index has keys of detached devices until a walk has removed them.
        let invalid = cache.index.invalid_slots();
        loop {
            {
                let tree = cache.index.tree();
                let Some(id) = tree.next_leaf(passed) else { break };
                let buckets = cache.alloc.buckets();
                complete &= tree.node(id).leaf().extents.is_some();
                let live = tree.live_extents(id, &buckets);
                for (inode, _, sectors, ..) in live.filter(|(inode, ..)| !invalid.contains(inode)) {
                    let sum = cached.entry(inode).or_default();
                    *sum += sectors;
                    seen += 1;
                }
                passed = Some(tree.node(id).bound);
                seen += 1;
            }
            if seen >= BUCKETS_AT_ONCE {
                seen = 0;
                cache.rt.yield_now().await;
            }
        }
        CachedFigures { by_slot: cached.into_iter().collect(), complete }
    }
}

fn btree_figures(cache: &Cache) -> BtreeFigures {
    let tree = cache.index.tree();
    let fill = tree.fill();
    let nodes = tree.node_count();
    let node = cache.geometry.node_sectors;
    let percent = |words: usize, nodes: usize| {
        (words * 100).checked_div(nodes * cache.index.leaf_words()).unwrap_or(0) as u64
    };
    let live = cache.alloc.buckets().live_total();
    BtreeFigures {
        depth: tree.depth(),
        extents: fill.extents as u64,
        average_extent: Sectors(live.0.checked_div(fill.extents as u64).unwrap_or(0)),
        root_usage_percent: percent(fill.root_words, 1),
        used_percent: percent(fill.words, nodes),
        node_sectors: Sectors(node.0 * nodes as u64),
        sectors_per_node: node,
    }
}

/// The number of buckets that are counted in one turn of the driver: less than a millisecond.
const BUCKETS_AT_ONCE: usize = 1 << 15;

impl BucketCell {
    fn count(&mut self, holds: crate::alloc::Holds, live: Sectors) {
        use crate::alloc::Holds;
        let kind = match holds {
            Holds::Nothing => &mut self.unused,
            Holds::Clean => &mut self.clean,
            Holds::Dirty => &mut self.dirty,
            Holds::Metadata => &mut self.metadata,
        };
        *kind += 1;
        self.live += live;
    }
}

/// The number of parts into which quantiles divide the buckets.
const PARTS: usize = 32;

fn bucket_figures(cache: &Cache) -> BucketFigures {
    let buckets = cache.alloc.buckets();
    let mut figures =
        BucketFigures { total: buckets.len(), available: buckets.available(), ..BucketFigures::default() };
    let mut ages = Vec::with_capacity(buckets.len() as usize);
    buckets.visit_all(|kind, age| {
        match kind {
            crate::alloc::Holds::Nothing => figures.unused += 1,
            crate::alloc::Holds::Clean => figures.clean += 1,
            crate::alloc::Holds::Dirty => figures.dirty += 1,
            crate::alloc::Holds::Metadata => figures.metadata += 1,
        }
        ages.extend(age);
    });
    if ages.is_empty() {
        return figures;
    }
    ages.sort_unstable();
    let sum: u64 = ages.iter().map(|age| u64::from(*age)).sum();
    figures.average_age = sum / ages.len() as u64;
    figures.sectors_per_quantile = ages.len() as u64 * cache.geometry.bucket_sectors.0 / PARTS as u64;
    let at = |part: usize| ages.get(ages.len() * part / PARTS).copied();
    figures.quantiles = (1..PARTS).filter_map(at).collect();
    figures
}

impl TimeFigures {
    /// Each kind of work with the histogram of its slices.
    pub fn slices(&self) -> impl Iterator<Item = (Work, &Histogram)> {
        Work::ALL.into_iter().map(|work| (work, self.work.slices(work)))
    }
}

#[cfg(test)]
mod tests;
