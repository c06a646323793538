//! What a seed stands for.
//!
//! Owns the drawing of options: every run enables a random part of everything that can happen, with random rates, so
//! that rare things are common in some runs. Must not know how anything is carried out.

use format::{CacheMode, Replacement};
use io::{Nanos, Rng};

use crate::disk::{Keep, Speed};
use crate::rig::{BackingLayout, Layout};
use crate::world::Order;

/// Relative frequency of requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Weights {
    /// Reads.
    pub read: u64,
    /// Writes.
    pub write: u64,
    /// Flushes.
    pub flush: u64,
    /// Discards.
    pub discard: u64,
    /// Writes of zeros.
    pub zeroes: u64,
    /// Pauses.
    pub pause: u64,
}

/// What the operator does while the clients work.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Act {
    /// Sets a cache mode.
    Mode,
    /// Sets a tunable of writeback.
    Writeback,
    /// Sets `sequential_cutoff`.
    Sequential,
    /// Walks the index.
    Gc,
    /// Lets the walk move data, or not.
    CopyGc,
    /// Lets the walk rewrite everything, once.
    GcAlwaysRewrite,
    /// Detaches a device, and attaches it again later.
    Detach,
    /// Sets a limit of dirty data.
    Cutoff,
    /// Sets the delay of the journal.
    JournalDelay,
    /// Changes a label.
    Label,
    /// Deletes the flash-only volume and makes a new one.
    Recreate,
}

/// Everything an operator can do.
pub const ACTS: [Act; 11] = [
    Act::Mode,
    Act::Writeback,
    Act::Sequential,
    Act::Gc,
    Act::CopyGc,
    Act::GcAlwaysRewrite,
    Act::Detach,
    Act::Cutoff,
    Act::JournalDelay,
    Act::Label,
    Act::Recreate,
];

/// Which devices lie.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Lying {
    /// The cache device.
    Cache,
    /// The backing devices.
    Backing,
}

/// The options of a run.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Options {
    /// The seed.
    pub seed: u64,
    /// Devices.
    pub layout: Layout,
    /// Size of the flash-only volume; 0 for none.
    pub flash_sectors: u64,
    /// Order of tasks.
    pub order: Order,
    /// Speed of the cache device.
    pub cache_speed: Speed,
    /// Speed of the backing devices.
    pub backing_speed: Speed,
    /// Requests under way at once, for each volume.
    pub depth: u64,
    /// Times that the machine is switched on, at least.
    pub boots: u64,
    /// Requests of all clients, each time.
    pub requests: u64,
    /// Which requests.
    pub weights: Weights,
    /// Most sectors of a request.
    pub max_sectors: u64,
    /// Requests begin and end at multiples of this.
    pub align_sectors: u64,
    /// Percent of requests that go to the hot eighth of a volume.
    pub hot_percent: u64,
    /// Percent of requests that go on where the client's last one ended.
    pub sequential_percent: u64,
    /// Percent of writes with FUA.
    pub fua_percent: u64,
    /// Longest pause.
    pub max_pause: Nanos,
    /// What the operator does.
    pub acts: Vec<Act>,
    /// How often, for each hundred requests.
    pub acts_per_hundred: u64,
    /// Percent of boots that end in a crash.
    pub crash_percent: u64,
    /// Percent of crashes in which only the process dies.
    pub kill_percent: u64,
    /// Effects until a crash, at most.
    pub crash_effects: u64,
    /// What survives.
    pub keep: Keep,
    /// One in so many requests to the cache device fails in some boots; 0 for never.
    pub cache_errors: u64,
    /// The same for backing devices.
    pub backing_errors: u64,
    /// Percent of boots with errors.
    pub error_percent: u64,
    /// Percent of boots with errors in which a device dies for good (until the next boot).
    pub death_percent: u64,
    /// Percent of boots with errors in which a range of the cache device cannot be read.
    pub bad_sectors_percent: u64,
    /// Devices lie about what is durable: never drawn, for testing the simulator.
    pub lying: Option<Lying>,
    /// Percent of boots in which the backing devices are served without the cache.
    pub alone_percent: u64,
    /// Percent of the volumes that is read after a start.
    pub read_back_percent: u64,
    /// Bytes of index in memory.
    pub node_cache_bytes: u64,
    /// `journal_delay_ms`.
    pub journal_delay_ms: u16,
    /// `writeback_delay`.
    pub writeback_delay: u32,
    /// `writeback_percent`.
    pub writeback_percent: u8,
    /// `sequential_cutoff`.
    pub sequential_cutoff: u32,
    /// Congestion is tracked.
    pub congestion: bool,
    /// `writeback_batch_sectors`.
    pub writeback_batch: u32,
    /// `writeback_running`.
    pub writeback_running: bool,
    /// `cutoff_writeback` and `cutoff_writeback_sync`.
    pub cutoffs: (u8, u8),
}

fn one_of<T: Copy>(rng: &mut Rng, of: &[T]) -> T {
    of[rng.below(of.len() as u64) as usize]
}

fn speed(rng: &mut Rng) -> Speed {
    let base = one_of(rng, &[1, 20, 100, 4000]) * 1000;
    let spread = one_of(rng, &[0, 20, 500, 20_000]) * 1000;
    let slow_one_in = one_of(rng, &[0, 0, 7, 100]);
    Speed {
        base: Nanos(base),
        spread: Nanos(spread),
        slow_one_in,
        slow: Nanos::from_ms(one_of(rng, &[10, 300, 3000])),
    }
}

fn mode(rng: &mut Rng) -> CacheMode {
    // Writeback has most to lose.
    let modes = [CacheMode::Writeback, CacheMode::Writethrough, CacheMode::Writearound, CacheMode::None];
    if rng.chance(1, 2) { CacheMode::Writeback } else { one_of(rng, &modes) }
}

fn layout(rng: &mut Rng, pressure: bool) -> Layout {
    let big = rng.chance(1, if pressure { 20 } else { 4 });
    let bucket_sectors = if big { 128 } else { one_of(rng, &[8, 8, 16, 32]) };
    let logical_block_bytes = one_of(rng, &[512, 512, 4096]);
    let block_sectors = if logical_block_bytes == 4096 { 8 } else { one_of(rng, &[1, 1, 2, 8]) };
    let more = if pressure { rng.below(20) } else { rng.below(3) * 64 + rng.below(400) };
    let nbuckets = 128 + if big { rng.below(64) } else { more };
    let backing = |rng: &mut Rng| {
        let logical_block_bytes = if block_sectors == 8 { one_of(rng, &[512, 4096]) } else { 512 };
        let least = block_sectors.max(u64::from(logical_block_bytes) / 512);
        let data_offset = match rng.below(4) {
            0 if logical_block_bytes == 512 => 16 + rng.below(20),
            1 => 64,
            _ => 16,
        };
        let stripe_bytes = if rng.chance(1, 6) { one_of(rng, &[65536, 48 * 1024]) } else { 0 };
        BackingLayout {
            data_sectors: one_of(rng, &[512, 2048, 4096, 8192]) + rng.below(5) * least,
            data_offset,
            block_sectors: least,
            logical_block_bytes,
            mode: if pressure { CacheMode::Writeback } else { mode(rng) },
            stripe_bytes,
            discard: rng.chance(3, 4),
        }
    };
    let backings = (0..1 + u64::from(rng.chance(1, 4))).map(|_| backing(rng)).collect();
    Layout {
        bucket_sectors,
        block_sectors,
        nbuckets,
        logical_block_bytes,
        replacement: one_of(rng, &[Replacement::Lru, Replacement::Fifo, Replacement::Random]),
        discard: rng.chance(1, 5),
        backings,
    }
}

impl Options {
    /// The options that a seed stands for.
    pub fn from_seed(seed: u64) -> Options {
        let rng = &mut Rng::new(seed ^ 0x6f70_7469_6f6e_7321);
        // A cache that is small for what is written, and is not emptied in time.
        let pressure = rng.chance(1, 4);
        let mut layout = layout(rng, pressure);
        // An index of several levels.
        let forest = !pressure && rng.chance(1, 60);
        // Every bucket is reused until its generation wraps around.
        let churn = pressure && rng.chance(1, 20);
        if churn {
            (layout.bucket_sectors, layout.nbuckets) = (8, 128);
        }
        if forest {
            (layout.bucket_sectors, layout.block_sectors, layout.nbuckets) = (8, 1, 2000);
            layout.logical_block_bytes = 512;
            layout.backings.truncate(1);
            let b = &mut layout.backings[0];
            (b.block_sectors, b.logical_block_bytes, b.data_sectors) = (1, 512, 30_000);
        }
        let weights = Weights {
            read: one_of(rng, &[0, 5, 20, 60]),
            write: one_of(rng, &[10, 40, 80]),
            flush: one_of(rng, &[0, 2, 10]),
            discard: one_of(rng, &[0, 0, 2, 10]),
            zeroes: one_of(rng, &[0, 0, 2, 10]),
            pause: one_of(rng, &[0, 2, 10]),
        };
        let mut acts: Vec<Act> = Vec::new();
        for act in ACTS {
            if rng.chance(1, 3) {
                acts.push(act);
            }
        }
        let cache_sectors = layout.nbuckets * layout.bucket_sectors;
        let flash = rng.chance(1, 4);
        let flash_parts = if pressure { one_of(rng, &[8, 10, 12]) } else { one_of(rng, &[1, 2, 5]) };
        let faulty = rng.chance(1, 5);
        Options {
            seed,
            flash_sectors: if flash { cache_sectors * flash_parts / 80 * 8 } else { 0 },
            order: one_of(rng, &[Order::Fifo, Order::Lifo, Order::Random, Order::Random]),
            cache_speed: speed(rng),
            backing_speed: speed(rng),
            depth: one_of(rng, &[1, 2, 4, 16]),
            boots: 1 + rng.below(4),
            requests: if forest {
                6000
            } else if pressure {
                500
            } else {
                one_of(rng, &[20, 60, 150, 400])
            },
            weights,
            max_sectors: if churn {
                64
            } else if forest {
                1
            } else if pressure {
                one_of(rng, &[8, 64])
            } else {
                one_of(rng, &[1, 8, 16, 64, 512])
            },
            align_sectors: if forest { 1 } else { one_of(rng, &[1, 1, layout.block_sectors, 8]) },
            hot_percent: if pressure || forest { 0 } else { one_of(rng, &[0, 50, 90]) },
            sequential_percent: one_of(rng, &[0, 20, 80]),
            fua_percent: one_of(rng, &[0, 5, 50]),
            max_pause: one_of(rng, &[Nanos::from_ms(1), Nanos::from_ms(200), Nanos::from_secs(40)]),
            acts,
            acts_per_hundred: one_of(rng, &[0, 2, 10, 30]),
            crash_percent: one_of(rng, &[0, 50, 90, 100]),
            kill_percent: one_of(rng, &[0, 0, 50]),
            crash_effects: if forest || churn { 30_000 } else { one_of(rng, &[40, 300, 2000]) },
            keep: one_of(
                rng,
                &[Keep::Nothing, Keep::Everything, Keep::Some(1), Keep::Some(4), Keep::Some(7)],
            ),
            cache_errors: if faulty { one_of(rng, &[0, 20, 200, 1000]) } else { 0 },
            backing_errors: if faulty { one_of(rng, &[0, 20, 200, 1000]) } else { 0 },
            error_percent: if faulty { 60 } else { 0 },
            death_percent: if faulty { one_of(rng, &[0, 50, 100]) } else { 0 },
            bad_sectors_percent: if faulty { one_of(rng, &[0, 0, 50]) } else { 0 },
            lying: None,
            alone_percent: one_of(rng, &[0, 0, 0, 30]),
            read_back_percent: one_of(rng, &[100, 100, 20, 0]),
            node_cache_bytes: one_of(rng, &[1, 20_000, 1 << 30]),
            journal_delay_ms: one_of(rng, &[0, 100, 100, 2000]),
            writeback_delay: if pressure { 30 } else { one_of(rng, &[0, 1, 30]) },
            writeback_percent: one_of(rng, &[0, 10, 40]),
            writeback_running: churn || rng.chance(if pressure { 1 } else { 3 }, 4),
            cutoffs: if pressure { (70, 90) } else { one_of(rng, &[(40, 70), (40, 70), (1, 5), (70, 90)]) },
            sequential_cutoff: if pressure { 0 } else { one_of(rng, &[0, 4096, 65536, 4 << 20]) },
            congestion: rng.chance(1, 4),
            writeback_batch: one_of(rng, &[8, 64, 65536]),
            layout,
        }
    }
}
