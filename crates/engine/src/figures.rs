//! All figures of a set and its volumes, copied at one moment.
//!
//! Owns the plain structs that metrics, explanations and control files are made of. They hold no reference to the
//! engine and can go to other threads. Units are in the names or the types. Must not know how anything is shown.

use std::rc::Rc;

use format::{BackingState, Inode, Sectors};
use io::{DeviceFigures, Histogram};

use crate::policy::bypass::BypassReason;
use crate::set::{CacheSet, Core, EngineCounters, SetStatus};
use crate::stats::{
    CacheStats, Latencies, OpKind, ReasonCount, RequestCounters, SetCounters, Tallies, View, ViewValues,
    Work, WorkStats,
};
use crate::tunables::{DeviceTunables, SetTunables};
use crate::volume::Volume;
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

    /// What a view shows.
    pub fn view(&self, view: View) -> ViewValues {
        self.views[view as usize]
    }

    /// What was not cached for this reason, since the start or `clear_stats`.
    pub fn reason(&self, reason: BypassReason) -> ReasonCount {
        self.reasons[reason.index()]
    }
}

/// What the buckets of a cache hold; the counts add up to all buckets, but for those that were never in use by anybody.
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
    /// That can be reused at once or are ready for use.
    pub available: u32,
    /// Mean age of the buckets that have one, in units of priority.
    pub average_age: u64,
    /// Sectors of buckets in each of the parts between two quantiles.
    pub sectors_per_quantile: u64,
    /// Ages: the ends of 32 equal parts of the buckets that have an age; empty without any.
    pub quantiles: Vec<u16>,
}

/// What the buckets of a cache hold, from its begin to its end in a number of parts of about equal size.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct BucketMap {
    /// All buckets.
    pub total: u32,
    /// Size of a bucket.
    pub bucket_sectors: Sectors,
    /// The parts, in the order of the device.
    pub cells: Vec<BucketCell>,
}

/// Neighbouring buckets.
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

/// What the btree amounts to.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct BtreeFigures {
    /// Levels above the leaves.
    pub depth: u32,
    /// Extents in memory.
    pub extents: u64,
    /// Mean length of an extent; zero of none.
    pub average_extent: Sectors,
    /// How full the root is.
    pub root_usage_percent: u64,
    /// How full the nodes are on average.
    pub used_percent: u64,
    /// Sectors of all nodes.
    pub node_sectors: Sectors,
    /// Sectors of one node.
    pub sectors_per_node: Sectors,
}

/// Times of the engine's own work.
#[derive(Clone, Debug, Default)]
pub struct TimeFigures {
    /// Whole journal entries, with the flush before.
    pub journal_writes: Histogram,
    /// Slices, walks and batches.
    pub work: WorkStats,
}

/// A set, its cache device, and its volumes.
#[derive(Clone, Debug)]
pub struct SetFigures {
    /// Sizes and state.
    pub status: SetStatus,
    /// Size of a block.
    pub block_sectors: Sectors,
    /// What was written, and more that the kernel counts.
    pub counters: SetCounters,
    /// The engine's own work in counts.
    pub engine: EngineCounters,
    /// The same in times.
    pub times: TimeFigures,
    /// Hits and misses of all volumes together.
    pub cache: CacheFigures,
    /// Requests to the cache device.
    pub device: DeviceFigures,
    /// UUID of the cache device.
    pub device_uuid: format::Uuid,
    /// Errors of the cache device, after decay.
    pub io_errors: u64,
    /// Streams from this length on bypass, for the cache device is congested; `None`: it is not.
    pub congested: Option<Sectors>,
    /// Buckets that can be reused at once or are ready for use.
    pub available_buckets: u32,
    /// Journal entries that are needed for recovery, or will be.
    pub journal_entries_in_use: u64,
    /// The btree.
    pub btree: BtreeFigures,
    /// The moment, by the engine's clock.
    pub now: io::Nanos,
    /// Settings.
    pub tunables: SetTunables,
    /// Its volumes.
    pub volumes: Vec<VolumeFigures>,
}

/// A volume and its backing device.
#[derive(Clone, Debug)]
pub struct VolumeFigures {
    /// Name for clients.
    pub name: String,
    /// Slot in the set, while attached.
    pub inode: Option<Inode>,
    /// Name of the backing device; none for a flash-only volume.
    pub backing_name: Option<String>,
    /// UUID of the backing device.
    pub backing_uuid: Option<format::Uuid>,
    /// State in the backing superblock.
    pub state: Option<BackingState>,
    /// It is being detached.
    pub detaching: bool,
    /// It is being stopped, or has been.
    pub stopping: bool,
    /// Size.
    pub size: Sectors,
    /// Live dirty data.
    pub dirty: Sectors,
    /// Live dirty data is more than so much only for a moment: `writeback_percent` of the cache, or this device's share.
    pub dirty_target: Sectors,
    /// Unit in which stripes are counted.
    pub stripe: Sectors,
    /// Writing a part of a stripe is expensive.
    pub partial_stripes_expensive: bool,
    /// Requests of clients.
    pub requests: RequestCounters,
    /// What became of them, since the start.
    pub total: Tallies,
    /// The same in the last five minutes.
    pub recent: Tallies,
    /// How long they took.
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
    /// Whether the volume lives in the cache alone.
    pub fn is_flash_only(&self) -> bool {
        self.backing_name.is_none()
    }
}

impl Volume {
    /// All figures at this moment; takes some ten microseconds.
    pub fn figures(self: &Rc<Self>) -> VolumeFigures {
        let now = self.rt.now();
        let served = &mut *self.served.borrow_mut();
        let stripe = self.backing().map(|b| b.disk.info().optimal_io_bytes).unwrap_or_default();
        VolumeFigures {
            name: self.name(),
            inode: self.inode(),
            backing_name: self.backing_name(),
            backing_uuid: self.backing_uuid(),
            state: self.state(),
            detaching: self.is_detaching(),
            stopping: self.is_stopping(),
            size: self.size(),
            dirty: self.dirty_sectors(),
            dirty_target: crate::writeback::dirty_target(self),
            stripe: Sectors::from_bytes_floor(u64::from(stripe)),
            partial_stripes_expensive: self.expensive_stripes().is_some(),
            requests: self.request_counters(),
            total: served.total(),
            recent: served.recent(now),
            latencies: served.latencies().clone(),
            errors: served.errors(),
            cache: self.with_stats(|s| CacheFigures::of(s)),
            device: self.backing().map(|b| b.disk.figures()).unwrap_or_default(),
            io_errors: self.io_errors(),
            writeback: crate::writeback::writeback_figures(self),
            tunables: self.tunables(),
        }
    }
}

impl CacheSet {
    /// All figures at this moment; takes some ten microseconds for each volume.
    pub fn figures(&self) -> SetFigures {
        let core = &self.core;
        let limit = core.cache.congestion().limit(core.cache.rt.now(), 0);
        SetFigures {
            status: self.status(),
            block_sectors: core.cache.geometry.block_sectors,
            counters: self.set_counters(),
            engine: self.counters(),
            times: TimeFigures {
                journal_writes: core.cache.journal.write_times(),
                work: core.cache.tasks.times().borrow().clone(),
            },
            cache: self.with_stats(|s| CacheFigures::of(s)),
            device: core.cache.device.disk().figures(),
            device_uuid: core.cache.device.superblock().uuid(),
            io_errors: core.cache.device.error_count(),
            congested: limit,
            available_buckets: core.cache.alloc.buckets().available(),
            journal_entries_in_use: core
                .cache
                .journal
                .open_seq()
                .0
                .saturating_sub(core.cache.journal.oldest_needed().0)
                + 1,
            btree: btree_figures(core),
            now: core.cache.rt.now(),
            tunables: core.cache.tunables.borrow().clone(),
            volumes: self.volumes().iter().map(Volume::figures).collect(),
        }
    }

    /// What the buckets hold. Looks at each of them: some ten microseconds for each thousand.
    pub fn bucket_figures(&self) -> BucketFigures {
        bucket_figures(&self.core)
    }

    /// What the buckets hold, in at most so many parts (at least one). Looks at each bucket, some at a time, so that
    /// requests need not wait for all of it.
    pub async fn bucket_map(&self, cells: u32) -> BucketMap {
        let core = &self.core;
        let total = core.cache.alloc.buckets().len();
        let cells = u64::from(cells.clamp(1, total.max(1)));
        let mut map =
            BucketMap { total, bucket_sectors: core.cache.geometry.bucket_sectors, cells: Vec::new() };
        // Below 2^64, for both are below 2^32.
        let begin = |cell: u64| (cell * u64::from(total) / cells) as usize;
        let mut seen = 0;
        for n in 0..cells {
            let mut cell = BucketCell::default();
            let mut at = begin(n);
            while at < begin(n + 1) {
                let end = begin(n + 1).min(at + BUCKETS_AT_ONCE - seen);
                core.cache.alloc.buckets().visit_range(at..end, |holds, live| cell.count(holds, live));
                seen += end - at;
                at = end;
                if seen >= BUCKETS_AT_ONCE {
                    seen = 0;
                    core.cache.rt.yield_now().await;
                }
            }
            map.cells.push(cell);
        }
        map
    }
}

fn btree_figures(core: &Core) -> BtreeFigures {
    let tree = core.cache.index.tree();
    let fill = tree.fill();
    let nodes = tree.node_count();
    let node = core.cache.geometry.node_sectors;
    let percent = |words: usize, nodes: usize| {
        (words * 100).checked_div(nodes * core.cache.index.leaf_words()).unwrap_or(0) as u64
    };
    let live = core.cache.alloc.buckets().live_total();
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

/// Buckets that are looked at in one turn: less than a millisecond.
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

/// Parts of the buckets that quantiles divide.
const PARTS: usize = 32;

fn bucket_figures(core: &Core) -> BucketFigures {
    let buckets = core.cache.alloc.buckets();
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
    figures.sectors_per_quantile = ages.len() as u64 * core.cache.geometry.bucket_sectors.0 / PARTS as u64;
    let at = |part: usize| ages.get(ages.len() * part / PARTS).copied();
    figures.quantiles = (1..PARTS).filter_map(at).collect();
    figures
}

impl TimeFigures {
    /// Each kind of work with its slices.
    pub fn slices(&self) -> impl Iterator<Item = (Work, &Histogram)> {
        Work::ALL.into_iter().map(|work| (work, self.work.slices(work)))
    }
}

#[cfg(test)]
mod tests;
