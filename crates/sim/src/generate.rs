//! What a seed stands for.
//!
//! Owns the drawing of plans: every run enables a random part of everything that can happen, with random rates, so
//! that rare things are common in some runs. Most runs are brief: crash after crash on small devices, because that is
//! where most mistakes show. Must not know how anything is carried out.

use format::{CacheMode, Replacement};
use io::{Nanos, Rng};

use crate::disk::{Keep, Speed};
use crate::plan::{Act, Boot, Cut, Faults, Outage, Plan, Request, Settings};
use crate::rig::{BackingLayout, Layout};
use crate::world::Order;

/// What kind of life it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Life {
    /// Crash after crash on small devices.
    Brief,
    /// A bit of everything.
    Common,
    /// A cache that is small for what is written, and is not emptied in time.
    Pressure,
    /// The same, until the generations of buckets wrap around.
    Churn,
    /// An index of several levels.
    Forest,
}

/// Relative frequency of requests.
struct Weights {
    read: u64,
    write: u64,
    flush: u64,
    discard: u64,
    zeroes: u64,
    pause: u64,
}

/// What the operator may do.
#[derive(Clone, Copy)]
enum Habit {
    Mode,
    Writeback,
    Sequential,
    Gc,
    CopyGc,
    GcAlwaysRewrite,
    Detach,
    Cutoff,
    JournalDelay,
    Label,
    Recreate,
    Admission,
    Bridge,
}

const HABITS: [Habit; 13] = [
    Habit::Mode,
    Habit::Writeback,
    Habit::Sequential,
    Habit::Gc,
    Habit::CopyGc,
    Habit::GcAlwaysRewrite,
    Habit::Detach,
    Habit::Cutoff,
    Habit::JournalDelay,
    Habit::Label,
    Habit::Recreate,
    Habit::Admission,
    Habit::Bridge,
];

const MODES: [CacheMode; 4] =
    [CacheMode::Writeback, CacheMode::Writethrough, CacheMode::Writearound, CacheMode::None];

const KEEPS: [Keep; 5] = [Keep::Nothing, Keep::Everything, Keep::Some(1), Keep::Some(4), Keep::Some(7)];

/// What a run has in common from boot to boot.
struct Style {
    life: Life,
    /// It dwells on a topic.
    topical: bool,
    weights: Weights,
    requests: u64,
    max_sectors: u64,
    align_sectors: u64,
    hot_percent: u64,
    sequential_percent: u64,
    fua_percent: u64,
    max_pause: Nanos,
    habits: Vec<Habit>,
    acts_per_hundred: u64,
    crash_percent: u64,
    crash_effects: u64,
    kill_percent: u64,
    keeps: (Keep, Keep),
    error_percent: u64,
    errors_one_in: (u64, u64),
    outage_percent: u64,
    unreadable_percent: u64,
    alone_percent: u64,
    absent_percent: u64,
    read_back_percent: u64,
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
        // The last one is as good as stuck.
        slow: Nanos::from_ms(one_of(rng, &[10, 300, 3000, 90_000])),
    }
}

fn mode(rng: &mut Rng) -> CacheMode {
    // Writeback has most to lose.
    if rng.chance(1, 2) { CacheMode::Writeback } else { one_of(rng, &MODES) }
}

fn backing(rng: &mut Rng, life: Life, block_sectors: u64) -> BackingLayout {
    let logical_block_bytes = if block_sectors == 8 { one_of(rng, &[512, 4096]) } else { 512 };
    let least = block_sectors.max(u64::from(logical_block_bytes) / 512);
    let data_offset = match rng.below(4) {
        0 if logical_block_bytes == 512 => 16 + rng.below(20),
        1 => 64,
        _ => 16,
    };
    let stripe_bytes = if rng.chance(1, 6) { one_of(rng, &[65536, 48 * 1024]) } else { 0 };
    let sizes: &[u64] = match life {
        Life::Brief => &[64, 128, 256, 512],
        Life::Pressure | Life::Churn => &[1024, 2048, 4096],
        _ => &[512, 2048, 4096, 8192],
    };
    BackingLayout {
        data_sectors: one_of(rng, sizes) + rng.below(5) * least,
        data_offset,
        block_sectors: least,
        logical_block_bytes,
        mode: if matches!(life, Life::Pressure | Life::Churn) { CacheMode::Writeback } else { mode(rng) },
        stripe_bytes,
        discard: rng.chance(3, 4),
    }
}

fn layout(rng: &mut Rng, life: Life) -> Layout {
    let big_one_in = match life {
        Life::Brief | Life::Common => 4,
        _ => 20,
    };
    let big = rng.chance(1, big_one_in);
    let bucket_sectors = if big { 128 } else { one_of(rng, &[8, 8, 16, 32]) };
    let logical_block_bytes = one_of(rng, &[512, 512, 4096]);
    let block_sectors = if logical_block_bytes == 4096 { 8 } else { one_of(rng, &[1, 1, 2, 8]) };
    let more = match life {
        _ if big => rng.below(64),
        Life::Brief => rng.below(60),
        Life::Pressure => rng.below(20),
        _ => rng.below(3) * 64 + rng.below(400),
    };
    let devices = 1 + u64::from(rng.chance(1, 4));
    let mut it = Layout {
        bucket_sectors,
        block_sectors,
        nbuckets: 128 + more,
        logical_block_bytes,
        replacement: one_of(rng, &[Replacement::Lru, Replacement::Fifo, Replacement::Random]),
        discard: rng.chance(1, 5),
        backings: (0..devices).map(|_| backing(rng, life, block_sectors)).collect(),
    };
    if life == Life::Churn {
        (it.bucket_sectors, it.nbuckets) = (8, 128);
    }
    if life == Life::Forest {
        (it.bucket_sectors, it.block_sectors, it.nbuckets) = (8, 1, 2000);
        it.logical_block_bytes = 512;
        it.backings.truncate(1);
        let b = &mut it.backings[0];
        (b.block_sectors, b.logical_block_bytes, b.data_sectors) = (1, 512, 30_000);
    }
    it
}

fn settings(rng: &mut Rng, life: Life) -> Settings {
    let pressure = matches!(life, Life::Pressure | Life::Churn);
    let node_cache_bytes = one_of(rng, &[1, 20_000, 1 << 30]);
    Settings {
        cache_mode: None,
        node_cache_bytes,
        // Told by another choice: no number more is drawn for it.
        replacement: if node_cache_bytes == 20_000 { "kernel" } else { "reuse" }.into(),
        journal_delay_ms: one_of(rng, &[0, 100, 100, 2000, 30_000]),
        writeback_batch: one_of(rng, &[8, 64, 65536]),
        cutoffs: if pressure { (70, 90) } else { one_of(rng, &[(40, 70), (40, 70), (1, 5), (70, 90)]) },
        congestion: rng.chance(1, 4),
        writeback_delay: if pressure { 30 } else { one_of(rng, &[0, 1, 30]) },
        writeback_percent: one_of(rng, &[0, 10, 40]),
        writeback_running: life == Life::Churn || rng.chance(if pressure { 1 } else { 3 }, 4),
        sequential_cutoff: if pressure { 0 } else { one_of(rng, &[0, 0, 4096, 65536, 4 << 20]) },
        admission: one_of(rng, &["kernel", "cost"]).into(),
        overwrite_in_place: one_of(rng, &["off", "auto", "always"]).into(),
        writeback_controller: one_of(rng, &["kernel", "yield"]).into(),
        writeback_bridge: one_of(rng, &["off", "auto", "always", "always"]).into(),
        writeback_bridge_limit: one_of(rng, &[512, 4096, 65536, 1 << 20]),
    }
}

fn style(rng: &mut Rng, life: Life, layout: &Layout) -> Style {
    let weights = Weights {
        read: one_of(rng, &[0, 5, 20, 60]),
        write: one_of(rng, &[10, 40, 80]),
        flush: one_of(rng, &[0, 2, 10]),
        discard: one_of(rng, &[0, 0, 2, 10]),
        zeroes: one_of(rng, &[0, 0, 2, 10]),
        pause: one_of(rng, &[0, 2, 10]),
    };
    let habits = HABITS.into_iter().filter(|_| rng.chance(1, 3)).collect();
    let faulty = rng.chance(1, 5);
    let unlikely = |rng: &mut Rng, percent: &[u64]| if faulty { one_of(rng, percent) } else { 0 };
    Style {
        life,
        topical: false,
        weights,
        requests: match life {
            Life::Brief => one_of(rng, &[10, 20, 40, 80]),
            Life::Common => one_of(rng, &[20, 60, 150, 400]),
            Life::Pressure => one_of(rng, &[150, 500]),
            Life::Churn => 500,
            Life::Forest => 6000,
        },
        max_sectors: match life {
            Life::Brief => one_of(rng, &[1, 8, 16, 64]),
            Life::Common => one_of(rng, &[1, 8, 16, 64, 512]),
            Life::Pressure => one_of(rng, &[8, 64]),
            Life::Churn => 64,
            Life::Forest => 1,
        },
        align_sectors: match life {
            Life::Forest => 1,
            _ => one_of(rng, &[1, 1, layout.block_sectors, 8]),
        },
        hot_percent: match life {
            Life::Brief | Life::Common => one_of(rng, &[0, 50, 90]),
            _ => 0,
        },
        sequential_percent: one_of(rng, &[0, 20, 80]),
        fua_percent: one_of(rng, &[0, 5, 50]),
        max_pause: match life {
            Life::Forest => Nanos::from_ms(1),
            _ => one_of(rng, &[Nanos::from_ms(1), Nanos::from_ms(200), Nanos::from_secs(40)]),
        },
        habits,
        acts_per_hundred: one_of(rng, &[0, 2, 10, 30]),
        crash_percent: match life {
            Life::Brief | Life::Pressure | Life::Forest => one_of(rng, &[90, 100]),
            _ => one_of(rng, &[0, 50, 90, 100]),
        },
        crash_effects: match life {
            Life::Brief => one_of(rng, &[60, 120, 250, 600]),
            Life::Churn | Life::Forest => 30_000,
            _ => one_of(rng, &[40, 300, 2000]),
        },
        kill_percent: one_of(rng, &[0, 0, 50]),
        keeps: if rng.chance(1, 2) {
            let keep = one_of(rng, &KEEPS);
            (keep, keep)
        } else {
            (one_of(rng, &KEEPS), one_of(rng, &KEEPS))
        },
        error_percent: unlikely(rng, &[60]),
        errors_one_in: (unlikely(rng, &[0, 20, 200, 1000]), unlikely(rng, &[0, 20, 200, 1000])),
        outage_percent: unlikely(rng, &[0, 50, 100]),
        unreadable_percent: unlikely(rng, &[0, 0, 50]),
        alone_percent: one_of(rng, &[0, 0, 0, 30]),
        absent_percent: one_of(rng, &[0, 0, 0, 30]),
        read_back_percent: one_of(rng, &[100, 100, 20, 0]),
    }
}

/// What a brief run dwells on: combinations that chance alone brings about too rarely.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Topic {
    /// Devices become clean and dirty all the time, and nothing is in a hurry to the journal.
    Toggling,
    /// The same, while devices fail.
    Failing,
    /// Data is moved, and copies are forgotten.
    Moving,
    /// A cache that is much smaller than what is read and written.
    Evicting,
    /// The process dies, and then the power fails.
    Dying,
    /// Copies that are old enough to be durable, under dirty data that is not, under discards.
    Discarding,
    /// Journal entries of several blocks, and the power fails while they are written.
    Tearing,
    /// Writeback goes over gaps that are written to, zeroed and discarded.
    Bridging,
}

fn topic(rng: &mut Rng, life: Life) -> Option<Topic> {
    let all = [
        Topic::Toggling,
        Topic::Failing,
        Topic::Failing,
        Topic::Moving,
        Topic::Evicting,
        Topic::Dying,
        Topic::Tearing,
        Topic::Discarding,
        Topic::Bridging,
    ];
    (life == Life::Brief && rng.chance(1, 2)).then(|| one_of(rng, &all))
}

fn dwell_on(rng: &mut Rng, topic: Topic, s: &mut Settings) {
    match topic {
        Topic::Toggling | Topic::Failing => {
            (s.writeback_percent, s.writeback_running) = (0, true);
            s.writeback_delay = one_of(rng, &[0, 1]);
            let bypass = topic == Topic::Failing && rng.chance(1, 2);
            s.sequential_cutoff = if bypass { 4096 } else { 0 };
            s.journal_delay_ms = one_of(rng, &[100, 30_000]);
            s.cutoffs = (70, 90);
        }
        Topic::Moving => (s.sequential_cutoff, s.congestion) = (0, false),
        Topic::Evicting => s.sequential_cutoff = 0,
        Topic::Tearing => {
            (s.journal_delay_ms, s.writeback_running, s.sequential_cutoff) = (2000, false, 0);
            s.cutoffs = (70, 90);
        }
        Topic::Discarding => {
            (s.journal_delay_ms, s.writeback_running, s.sequential_cutoff) = (30_000, false, 0);
            (s.cutoffs, s.congestion) = ((70, 90), false);
        }
        Topic::Bridging => {
            (s.writeback_bridge, s.writeback_bridge_limit) = ("always".into(), 1 << 20);
            (s.writeback_percent, s.writeback_running, s.cutoffs) = (0, true, (70, 90));
            s.writeback_delay = one_of(rng, &[0, 0, 1]);
        }
        Topic::Dying => {}
    }
}

impl Style {
    fn dwell_on(&mut self, rng: &mut Rng, topic: Topic, layout: &mut Layout) {
        self.topical = true;
        match topic {
            Topic::Toggling | Topic::Failing => {
                layout.backings.iter_mut().for_each(|b| b.mode = CacheMode::Writeback);
                self.weights.pause = 20;
                self.max_pause = Nanos::from_ms(one_of(rng, &[10, 200]));
                self.fua_percent = one_of(rng, &[0, 5]);
                self.weights.discard = one_of(rng, &[0, 10, 20]);
                self.hot_percent = 90;
                self.keeps.0 = one_of(rng, &[Keep::Nothing, Keep::Some(1)]);
                if topic == Topic::Failing {
                    (self.error_percent, self.outage_percent) = (60, 90);
                    self.errors_one_in = (100, 100);
                    // Changes that wait for each other, some of them past the cache.
                    (self.weights.discard, self.weights.read, self.weights.write) = (15, 20, 30);
                    (self.hot_percent, self.max_sectors, self.crash_percent) = (90, 64, 30);
                }
            }
            Topic::Moving => {
                layout.bucket_sectors = layout.bucket_sectors.max(32);
                (self.habits, self.acts_per_hundred) = (vec![Habit::CopyGc, Habit::Gc, Habit::Mode], 10);
                (self.weights.read, self.weights.pause, self.requests) = (40, 5, 100);
                (self.max_sectors, self.max_pause) = (16, Nanos::from_secs(40));
                self.crash_effects = one_of(rng, &[600, 2000]);
            }
            Topic::Evicting => {
                (layout.bucket_sectors, layout.nbuckets) = (8, 128);
                layout.backings.iter_mut().for_each(|b| b.data_sectors += 2048);
                (self.weights.read, self.requests, self.max_sectors) = (60, 150, 64);
                (self.hot_percent, self.read_back_percent) = (0, one_of(rng, &[20, 100]));
                self.crash_effects = one_of(rng, &[600, 2000]);
            }
            Topic::Tearing => {
                (layout.bucket_sectors, layout.block_sectors, layout.logical_block_bytes) = (16, 1, 512);
                for b in &mut layout.backings {
                    (b.mode, b.block_sectors, b.logical_block_bytes) = (CacheMode::Writeback, 1, 512);
                }
                (self.max_sectors, self.align_sectors, self.fua_percent) = (1, 1, 0);
                (self.weights.write, self.weights.flush, self.weights.read) = (80, 2, 5);
                (self.weights.discard, self.weights.zeroes) = (0, 0);
                (self.requests, self.keeps) = (120, (Keep::Some(4), Keep::Some(4)));
            }
            Topic::Discarding => {
                layout.backings.iter_mut().for_each(|b| {
                    (b.mode, b.discard) = (CacheMode::Writeback, true);
                });
                let (read, discard) = (30, 20);
                self.weights = Weights { read, write: 20, flush: 0, discard, zeroes: 0, pause: 10 };
                (self.max_sectors, self.fua_percent, self.hot_percent) = (16, 0, 90);
                (self.max_pause, self.keeps) = (Nanos::from_secs(40), (Keep::Nothing, Keep::Everything));
            }
            Topic::Bridging => {
                layout.backings.iter_mut().for_each(|b| b.mode = CacheMode::Writeback);
                self.weights = Weights { read: 20, write: 40, flush: 2, discard: 10, zeroes: 10, pause: 10 };
                (self.max_sectors, self.hot_percent) = (one_of(rng, &[1, 8, 16]), one_of(rng, &[0, 50]));
                self.max_pause = Nanos::from_ms(one_of(rng, &[10, 200, 2000]));
                self.sequential_percent = 0;
            }
            Topic::Dying => {
                self.kill_percent = 60;
                (self.keeps, self.read_back_percent) = ((Keep::Nothing, Keep::Nothing), 100);
            }
        }
    }

    /// Where a request goes.
    fn range(&self, rng: &mut Rng, size: u64, last_end: u64) -> (u64, u64) {
        let align = self.align_sectors.max(1);
        let most = self.max_sectors.min(size).max(align);
        // Small ones more often than large ones.
        let log = rng.below(u64::from(most.ilog2()) + 1);
        let sectors = (1 + rng.below(1 << log) + rng.below(1 << log)).min(most).next_multiple_of(align);
        let space = if rng.below(100) < self.hot_percent { (size / 8).max(align) } else { size };
        let mut start = rng.below(space) / align * align;
        if rng.below(100) < self.sequential_percent && last_end < size {
            start = last_end / align * align;
        }
        (start, sectors.min(size - start))
    }

    fn request(&self, rng: &mut Rng, size: u64, last_end: &mut u64) -> Request {
        let (start, sectors) = self.range(rng, size, *last_end);
        // Discards and zeros are often much larger than writes.
        let larger = (sectors * one_of(rng, &[1, 1, 8, 64])).min(size - start);
        let fua = rng.below(100) < self.fua_percent;
        let w = &self.weights;
        let mut n = rng.below(w.read + w.write + w.flush + w.discard + w.zeroes + w.pause);
        let mut is = |weight: u64| {
            let hit = n < weight;
            n = n.wrapping_sub(weight);
            hit
        };
        if is(w.read) {
            *last_end = start + sectors;
            Request::Read { start, sectors }
        } else if is(w.write) {
            *last_end = start + sectors;
            Request::Write { start, sectors, fua }
        } else if is(w.flush) {
            Request::Flush
        } else if is(w.discard) {
            Request::Discard { start, sectors: larger }
        } else if is(w.zeroes) {
            Request::Zeroes { start, sectors: larger, fua, may_unmap: rng.chance(1, 2) }
        } else {
            Request::Pause { ns: rng.below(self.max_pause.0 + 1) }
        }
    }

    fn act(&self, rng: &mut Rng, devices: usize) -> Vec<Act> {
        let volume = rng.below(devices as u64) as usize;
        let tune = |name: &str, value: String| Act::Tune { volume, name: name.into(), value };
        let tune_set = |name: &str, value: String| Act::TuneSet { name: name.into(), value };
        if self.habits.is_empty() {
            return Vec::new();
        }
        match one_of(rng, &self.habits) {
            Habit::Mode => {
                let modes = ["writeback", "writeback", "writethrough", "writearound", "none"];
                vec![tune("cache_mode", one_of(rng, &modes).into())]
            }
            Habit::Writeback => {
                let (name, values): (_, &[_]) = match rng.below(4) {
                    0 => ("writeback_percent", &["0", "10", "40"]),
                    1 => ("writeback_delay", &["0", "1", "30"]),
                    2 => ("writeback_running", &["0", "1", "1"]),
                    _ => ("writeback_rate", &["1", "1000", "1000000"]),
                };
                vec![tune(name, one_of(rng, values).into())]
            }
            Habit::Sequential => {
                vec![tune("sequential_cutoff", one_of(rng, &["0", "4096", "65536", "4194304"]).into())]
            }
            Habit::Admission => vec![tune("admission", one_of(rng, &["kernel", "cost"]).into())],
            Habit::Bridge => vec![tune("writeback_bridge", one_of(rng, &["off", "always", "always"]).into())],
            Habit::Gc => vec![Act::Gc],
            Habit::CopyGc => {
                vec![tune_set("copy_gc_enabled", one_of(rng, &["0", "1", "1"]).into()), Act::Gc]
            }
            Habit::GcAlwaysRewrite => vec![
                tune_set("gc_always_rewrite", "1".into()),
                Act::Gc,
                tune_set("gc_always_rewrite", "0".into()),
            ],
            Habit::Cutoff => vec![
                tune_set("cutoff_writeback_sync", one_of(rng, &["5", "70", "90"]).into()),
                tune_set("cutoff_writeback", one_of(rng, &["1", "40", "70"]).into()),
            ],
            Habit::JournalDelay => {
                vec![tune_set("journal_delay_ms", one_of(rng, &["0", "10", "100", "5000"]).into())]
            }
            Habit::Label => vec![tune("label", one_of(rng, &["", "a", "some other name"]).into())],
            Habit::Detach => vec![Act::Detach { volume, ns: rng.below(3_000_000_000) }],
            Habit::Recreate => vec![Act::Recreate],
        }
    }

    fn faults(&self, rng: &mut Rng, layout: &Layout) -> Faults {
        if rng.below(100) < self.outage_percent {
            let device = if rng.chance(2, 3) { 0 } else { 1 + rng.below(layout.backings.len() as u64) };
            let outage = Outage {
                device: device as usize,
                after: rng.below(if self.life == Life::Brief { 100 } else { 600 }),
                requests: rng.chance(1, 2).then(|| one_of(rng, &[1, 5, 30])),
            };
            return Faults { outage: Some(outage), ..Faults::default() };
        }
        if rng.below(100) < self.unreadable_percent {
            let sectors = one_of(rng, &[1, 8, 64]);
            let cache = rng.below(layout.nbuckets * layout.bucket_sectors);
            let backing = layout.backings.first().map_or(0, |b| b.data_offset + rng.below(b.data_sectors));
            let (of_cache, of_backing) =
                one_of(rng, &[(true, false), (true, false), (false, true), (true, true)]);
            return Faults {
                unreadable: of_cache.then_some((cache, sectors)),
                unreadable_backing: of_backing.then_some((backing, sectors)),
                ..Faults::default()
            };
        }
        let (cache_one_in, backing_one_in) = self.errors_one_in;
        Faults { cache_one_in, backing_one_in, ..Faults::default() }
    }

    fn cut(&self, rng: &mut Rng) -> Cut {
        let (cache, backing) = self.keeps;
        if rng.below(100) < self.kill_percent {
            return Cut::Kill;
        }
        match rng.below(10) {
            0 => Cut::Cache(cache),
            1 => Cut::Backing(backing),
            _ => Cut::Power(cache, backing),
        }
    }

    fn boot(&self, rng: &mut Rng, layout: &Layout, sizes: &[u64], like: &Boot, number: u64) -> Boot {
        let mut boot = like.clone();
        // What has filled up in the first boot stays full: the others are for crashes in that state.
        let fills = matches!(self.life, Life::Pressure | Life::Forest);
        let (requests, crash_effects) = match number {
            0 if fills => (self.requests, 30_000),
            _ if fills => (self.requests / 10, one_of(rng, &[40, 300, 1000])),
            _ => (self.requests, self.crash_effects),
        };
        if rng.chance(1, if self.topical { 10 } else { 3 }) {
            boot.settings = settings(rng, self.life);
            if self.life == Life::Common || self.life == Life::Brief {
                boot.settings.cache_mode = rng.chance(1, 2).then(|| mode(rng).name().to_owned());
            }
        }
        if rng.chance(1, 5) {
            (boot.cache_speed, boot.backing_speed) = (speed(rng), speed(rng));
        }
        boot.alone = rng.below(100) < self.alone_percent;
        let absent = rng.below(100) < self.absent_percent;
        boot.absent = (0..layout.backings.len()).filter(|_| absent && rng.chance(1, 2)).collect();
        boot.faults = (rng.below(100) < self.error_percent).then(|| self.faults(rng, layout));
        boot.crash = (rng.below(100) < self.crash_percent).then(|| {
            // Often while the set is being opened.
            let most = if rng.chance(1, 6) { 40 } else { crash_effects };
            1 + rng.below(most)
        });
        boot.crash_in_durable_write = None;
        if boot.crash.is_some() && self.life == Life::Brief && rng.chance(1, 3) {
            let most = one_of(rng, &[4, 12, 40]);
            boot.crash_in_durable_write = Some(1 + rng.below(most));
        }
        boot.cut = self.cut(rng);
        boot.off_seconds = if rng.chance(1, 10) { rng.below(100_000) } else { 0 };
        let mut last_ends = vec![0; sizes.len()];
        boot.requests = (0..requests)
            .map(|_| {
                let volume = rng.below(sizes.len() as u64) as usize;
                (volume, self.request(rng, sizes[volume], &mut last_ends[volume]))
            })
            .collect();
        boot.acts = Vec::new();
        if let Some(every) = 100_u64.checked_div(self.acts_per_hundred) {
            for at in (0..requests).step_by(every as usize) {
                boot.acts.extend(self.act(rng, layout.backings.len()).into_iter().map(|a| (at, a)));
            }
        }
        boot
    }
}

fn life(rng: &mut Rng) -> Life {
    match rng.below(1000) {
        0..600 => Life::Brief,
        600..840 => Life::Common,
        840..844 => Life::Forest,
        844..848 => Life::Churn,
        _ => Life::Pressure,
    }
}

impl Plan {
    /// The plan that a seed stands for. In the end everything that is left is written back, without faults.
    pub fn from_seed(seed: u64) -> Plan {
        let rng = &mut Rng::new(seed ^ 0x6f70_7469_6f6e_7321);
        let life = life(rng);
        let mut layout = layout(rng, life);
        let mut style = style(rng, life, &layout);
        let topic = topic(rng, life);
        if let Some(topic) = topic {
            style.dwell_on(rng, topic, &mut layout);
        }
        let cache_sectors = layout.nbuckets * layout.bucket_sectors;
        let flash_parts = match life {
            Life::Brief => 1,
            Life::Pressure | Life::Churn => one_of(rng, &[8, 10, 12]),
            _ => one_of(rng, &[1, 2, 5]),
        };
        let flash = rng.chance(1, 4) || topic == Some(Topic::Failing);
        let flash_sectors = if flash { cache_sectors * flash_parts / 80 * 8 } else { 0 };
        let mut sizes: Vec<u64> =
            layout.backings.iter().map(|b| b.data_sectors / b.block_sectors * b.block_sectors).collect();
        if flash_sectors > 0 {
            sizes.push(flash_sectors);
        }
        let mut like = Boot {
            cache_speed: speed(rng),
            backing_speed: speed(rng),
            settings: settings(rng, life),
            alone: false,
            absent: Vec::new(),
            faults: None,
            read_back_percent: style.read_back_percent,
            requests: Vec::new(),
            acts: Vec::new(),
            drain: false,
            crash: None,
            crash_in_durable_write: None,
            cut: Cut::Kill,
            off_seconds: 0,
        };
        if let Some(topic) = topic {
            dwell_on(rng, topic, &mut like.settings);
        }
        let boots = match life {
            Life::Brief => 4 + rng.below(10),
            Life::Pressure | Life::Forest => 3 + rng.below(10),
            Life::Common => 1 + rng.below(6),
            Life::Churn => 1 + rng.below(4),
        };
        let mut plan = Plan {
            seed,
            flash_sectors,
            order: one_of(rng, &[Order::Fifo, Order::Lifo, Order::Random, Order::Random]),
            depth: match topic {
                Some(Topic::Failing | Topic::Tearing | Topic::Bridging) => 16,
                _ => one_of(rng, &[1, 2, 4, 16]),
            },
            first_gen: if rng.chance(1, 5) { one_of(rng, &[250, 254, 255]) } else { 0 },
            lying: None,
            boots: (0..boots).map(|n| style.boot(rng, &layout, &sizes, &like, n)).collect(),
            layout,
        };
        plan.end_well(rng, &style, &sizes, &like);
        plan
    }

    /// Faults are off: what is left must work out.
    fn end_well(&mut self, rng: &mut Rng, style: &Style, sizes: &[u64], like: &Boot) {
        let mut last = Boot { read_back_percent: 100, cut: style.cut(rng), ..like.clone() };
        let drains: &[bool] = if rng.chance(1, 2) { &[true] } else { &[true, false, true] };
        for drain in drains {
            last.drain = *drain;
            last.requests = (0..10)
                .map(|_| {
                    let volume = rng.below(sizes.len() as u64) as usize;
                    (volume, style.request(rng, sizes[volume], &mut 0))
                })
                .collect();
            self.boots.push(last.clone());
        }
    }
}
