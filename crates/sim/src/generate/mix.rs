//! The weights of a plan.
//!
//! Owns the frequency of each ingredient. Each weight is drawn on its own. A plan may *lean* towards a combination that is too
//! rare by chance: that changes some of the weights, each or not on its own, and never removes an ingredient from all plans.

use format::CacheMode;
use io::{Nanos, Rng};

use super::operator::OperatorAction;
use super::{Life, one_of};
use crate::disk::{Landmark, Retained};
use crate::rig::Layout;

/// Relative frequency of requests.
#[derive(Clone)]
pub(super) struct Weights {
    pub(super) read: u64,
    pub(super) write: u64,
    pub(super) flush: u64,
    pub(super) discard: u64,
    pub(super) zeroes: u64,
    pub(super) pause: u64,
}

/// In how many percent of its faulty boots a plan has a fault.
#[derive(Clone, Copy, Default)]
pub(super) struct FaultMix {
    pub(super) cache_errors: u64,
    pub(super) backing_errors: u64,
    pub(super) one_in: u64,
    pub(super) outage: u64,
    pub(super) unreadable: u64,
    pub(super) lossy_flush: u64,
    pub(super) pull: u64,
    pub(super) hang: u64,
}

/// The weights that all boots of a plan share.
pub(super) struct Mix {
    pub(super) life: Life,
    pub(super) leans: bool,
    pub(super) weights: Weights,
    pub(super) depth: u64,
    pub(super) requests: u64,
    pub(super) max_sectors: u64,
    pub(super) align_sectors: u64,
    pub(super) hot_percent: u64,
    pub(super) sequential_percent: u64,
    pub(super) fua_percent: u64,
    /// Of the requests so many begin a series at one place.
    pub(super) series_percent: u64,
    /// In so many boots all requests go to one volume.
    pub(super) one_volume_percent: u64,
    pub(super) max_pause: Nanos,
    pub(super) operator_actions: Vec<OperatorAction>,
    pub(super) acts_per_hundred: u64,
    pub(super) crash_percent: u64,
    pub(super) crash_effects: u64,
    pub(super) aim_percent: u64,
    pub(super) aims: Vec<Landmark>,
    /// Of the crashes that are aimed at an answer so many come right after the last one of a series.
    pub(super) exact_percent: u64,
    pub(super) kill_percent: u64,
    pub(super) partial_percent: u64,
    pub(super) late_percent: u64,
    pub(super) older_percent: u64,
    pub(super) retained: (Retained, Retained),
    pub(super) faulty_percent: u64,
    pub(super) faults: FaultMix,
    pub(super) alone_percent: u64,
    pub(super) absent_percent: u64,
    pub(super) read_back_percent: u64,
    pub(super) crash_log: bool,
}

const RETAINED: [Retained; 5] =
    [Retained::Nothing, Retained::Everything, Retained::Some(1), Retained::Some(4), Retained::Some(7)];

/// A random part of a list, not empty.
fn some_of<T: Copy>(rng: &mut Rng, of: &[T]) -> Vec<T> {
    let mut some: Vec<T> = of.iter().copied().filter(|_| rng.chance(1, 3)).collect();
    if some.is_empty() {
        some.push(one_of(rng, of));
    }
    some
}

impl Mix {
    pub(super) fn draw(rng: &mut Rng, life: Life, layout: &Layout) -> Mix {
        let weights = Weights {
            read: one_of(rng, &[0, 5, 20, 60]),
            write: one_of(rng, &[10, 40, 80]),
            flush: one_of(rng, &[0, 2, 10]),
            discard: one_of(rng, &[0, 0, 2, 10]),
            zeroes: one_of(rng, &[0, 0, 2, 10]),
            pause: one_of(rng, &[0, 2, 10]),
        };
        let mut mix = Mix {
            life,
            leans: false,
            weights,
            depth: one_of(rng, &[1, 2, 4, 16]),
            requests: 0,
            max_sectors: 0,
            align_sectors: one_of(rng, &[1, 1, layout.block_sectors, 8]),
            hot_percent: one_of(rng, &[0, 50, 90]),
            sequential_percent: one_of(rng, &[0, 20, 80]),
            fua_percent: one_of(rng, &[0, 5, 50]),
            series_percent: one_of(rng, &[0, 0, 10, 30]),
            one_volume_percent: one_of(rng, &[0, 0, 50]),
            max_pause: one_of(rng, &[Nanos::from_ms(1), Nanos::from_ms(200), Nanos::from_secs(40)]),
            operator_actions: OperatorAction::ALL.into_iter().filter(|_| rng.chance(1, 3)).collect(),
            acts_per_hundred: one_of(rng, &[0, 2, 10, 30]),
            crash_percent: 100,
            crash_effects: 0,
            aim_percent: one_of(rng, &[0, 30, 60]),
            aims: some_of(rng, &Landmark::ALL),
            exact_percent: 40,
            kill_percent: one_of(rng, &[0, 0, 50]),
            partial_percent: one_of(rng, &[5, 20, 40]),
            late_percent: one_of(rng, &[0, 0, 30]),
            older_percent: one_of(rng, &[0, 0, 0, 10]),
            retained: Mix::retained(rng),
            faulty_percent: if rng.chance(1, 5) { 60 } else { 0 },
            faults: FaultMix::draw(rng),
            alone_percent: one_of(rng, &[0, 0, 0, 30]),
            absent_percent: one_of(rng, &[0, 0, 0, 30]),
            read_back_percent: one_of(rng, &[100, 100, 20, 0]),
            crash_log: rng.chance(2, 5),
        };
        mix.live(rng);
        mix
    }

    fn retained(rng: &mut Rng) -> (Retained, Retained) {
        if rng.chance(1, 2) {
            let retained = one_of(rng, &RETAINED);
            return (retained, retained);
        }
        (one_of(rng, &RETAINED), one_of(rng, &RETAINED))
    }

    /// Applies the kind of the plan.
    fn live(&mut self, rng: &mut Rng) {
        match self.life {
            Life::Brief => {
                (self.requests, self.max_sectors) =
                    (one_of(rng, &[10, 20, 40, 80]), one_of(rng, &[1, 8, 16, 64]));
                (self.crash_percent, self.crash_effects) =
                    (one_of(rng, &[90, 100]), one_of(rng, &[60, 120, 250, 600]));
            }
            Life::Common => {
                (self.requests, self.max_sectors) =
                    (one_of(rng, &[20, 60, 150, 400]), one_of(rng, &[1, 8, 16, 64, 512]));
                (self.crash_percent, self.crash_effects) =
                    (one_of(rng, &[0, 50, 90, 100]), one_of(rng, &[40, 300, 2000]));
            }
            Life::Pressure => {
                (self.requests, self.max_sectors) = (one_of(rng, &[150, 500]), one_of(rng, &[8, 64]));
                (self.crash_percent, self.crash_effects) =
                    (one_of(rng, &[90, 100]), one_of(rng, &[40, 300, 2000]));
                self.hot_percent = 0;
            }
            Life::Churn => {
                (self.requests, self.max_sectors, self.hot_percent) = (500, 64, 0);
                (self.crash_percent, self.crash_effects) = (one_of(rng, &[0, 50, 90, 100]), 30_000);
            }
            Life::Forest => {
                (self.requests, self.max_sectors, self.hot_percent) = (6000, 1, 0);
                (self.crash_percent, self.crash_effects) = (one_of(rng, &[90, 100]), 30_000);
                (self.align_sectors, self.max_pause) = (1, Nanos::from_ms(1));
            }
        }
    }
}

impl FaultMix {
    fn draw(rng: &mut Rng) -> FaultMix {
        let mut percent = |of: &[u64]| one_of(rng, of);
        FaultMix {
            cache_errors: percent(&[0, 0, 80]),
            backing_errors: percent(&[0, 0, 80]),
            one_in: percent(&[20, 200, 1000]),
            outage: percent(&[0, 0, 50]),
            unreadable: percent(&[0, 0, 50]),
            lossy_flush: percent(&[0, 0, 50]),
            pull: percent(&[0, 0, 40]),
            hang: percent(&[0, 0, 40]),
        }
    }
}

/// A combination that a plan leans towards.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Lean {
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
    /// Everything happens at one place, one after the other, and the power fails right after an answer.
    Places,
    /// A device hangs while others work.
    Hanging,
    /// The ring of the journal goes around, and the power fails where it does.
    Wrapping,
}

impl Lean {
    const ALL: [Lean; 14] = [
        Lean::Toggling,
        Lean::Failing,
        Lean::Failing,
        Lean::Moving,
        Lean::Evicting,
        Lean::Dying,
        Lean::Discarding,
        Lean::Tearing,
        Lean::Bridging,
        Lean::Places,
        Lean::Places,
        Lean::Places,
        Lean::Hanging,
        Lean::Wrapping,
    ];

    /// None, one or two.
    pub(super) fn draw(rng: &mut Rng, life: Life) -> Vec<Lean> {
        let n = match life {
            Life::Brief => one_of(rng, &[0, 0, 1, 1, 1, 2]),
            Life::Common => one_of(rng, &[0, 0, 1]),
            _ => 0,
        };
        (0..n).map(|_| one_of(rng, &Lean::ALL)).collect()
    }
}

/// Changes a weight, or leaves it.
struct Tilt<'a>(&'a mut Rng);

impl Tilt<'_> {
    fn to<T: Copy>(&mut self, weight: &mut T, values: &[T]) {
        if self.0.chance(5, 6) {
            *weight = one_of(self.0, values);
        }
    }
}

impl Mix {
    pub(super) fn lean(&mut self, rng: &mut Rng, lean: Lean, layout: &mut Layout) {
        self.leans = true;
        let writeback = !matches!(lean, Lean::Moving | Lean::Evicting | Lean::Dying | Lean::Hanging);
        if writeback && rng.chance(5, 6) {
            layout.backings.iter_mut().for_each(|b| b.mode = CacheMode::Writeback);
        }
        match lean {
            Lean::Toggling => self.lean_toggling(rng),
            Lean::Failing => {
                self.lean_toggling(rng);
                self.lean_failing(rng);
            }
            Lean::Moving => self.lean_moving(rng, layout),
            Lean::Evicting => self.lean_evicting(rng, layout),
            Lean::Tearing => self.lean_tearing(rng, layout),
            Lean::Discarding => self.lean_discarding(rng, layout),
            Lean::Bridging => self.lean_bridging(rng),
            Lean::Places => self.lean_places(rng, layout),
            Lean::Wrapping => self.lean_wrapping(rng, layout),
            Lean::Dying => {
                let t = &mut Tilt(rng);
                t.to(&mut self.kill_percent, &[60]);
                t.to(&mut self.retained, &[(Retained::Nothing, Retained::Nothing)]);
                t.to(&mut self.read_back_percent, &[100]);
            }
            Lean::Hanging => {
                let t = &mut Tilt(rng);
                t.to(&mut self.faulty_percent, &[30, 60]);
                t.to(&mut self.faults.hang, &[80]);
            }
        }
    }

    fn lean_toggling(&mut self, rng: &mut Rng) {
        let t = &mut Tilt(rng);
        t.to(&mut self.weights.pause, &[20]);
        t.to(&mut self.max_pause, &[Nanos::from_ms(10), Nanos::from_ms(200)]);
        t.to(&mut self.fua_percent, &[0, 5]);
        t.to(&mut self.weights.discard, &[0, 10, 20]);
        t.to(&mut self.hot_percent, &[90]);
        t.to(&mut self.retained.0, &[Retained::Nothing, Retained::Some(1)]);
    }

    fn lean_failing(&mut self, rng: &mut Rng) {
        let t = &mut Tilt(rng);
        t.to(&mut self.faulty_percent, &[60]);
        t.to(&mut self.faults.outage, &[90]);
        t.to(&mut self.faults.cache_errors, &[10]);
        t.to(&mut self.faults.backing_errors, &[10]);
        // Changes that wait for each other, some of them past the cache.
        t.to(&mut self.weights.discard, &[15]);
        t.to(&mut self.weights.read, &[20]);
        t.to(&mut self.weights.write, &[30]);
        t.to(&mut self.hot_percent, &[90]);
        t.to(&mut self.max_sectors, &[64]);
        t.to(&mut self.crash_percent, &[30]);
        t.to(&mut self.depth, &[16]);
    }

    fn lean_moving(&mut self, rng: &mut Rng, layout: &mut Layout) {
        let t = &mut Tilt(rng);
        let larger = layout.bucket_sectors.max(32);
        t.to(&mut layout.bucket_sectors, &[larger]);
        if t.0.chance(5, 6) {
            self.operator_actions
                .extend([OperatorAction::CopyGc, OperatorAction::Gc, OperatorAction::Mode].repeat(3));
        }
        t.to(&mut self.acts_per_hundred, &[10]);
        t.to(&mut self.weights.read, &[40]);
        t.to(&mut self.weights.pause, &[5]);
        t.to(&mut self.requests, &[100]);
        t.to(&mut self.max_sectors, &[16]);
        t.to(&mut self.max_pause, &[Nanos::from_secs(40)]);
        t.to(&mut self.crash_effects, &[600, 2000]);
    }

    fn lean_evicting(&mut self, rng: &mut Rng, layout: &mut Layout) {
        let t = &mut Tilt(rng);
        (layout.bucket_sectors, layout.nbuckets) = (8, 128);
        layout.backings.iter_mut().for_each(|b| b.data_sectors += 2048);
        t.to(&mut self.weights.read, &[60]);
        t.to(&mut self.requests, &[150]);
        t.to(&mut self.max_sectors, &[64]);
        t.to(&mut self.hot_percent, &[0]);
        t.to(&mut self.read_back_percent, &[20, 100]);
        t.to(&mut self.crash_effects, &[600, 2000]);
    }

    fn lean_tearing(&mut self, rng: &mut Rng, layout: &mut Layout) {
        let t = &mut Tilt(rng);
        (layout.bucket_sectors, layout.block_sectors, layout.logical_block_bytes) = (16, 1, 512);
        for b in &mut layout.backings {
            (b.block_sectors, b.logical_block_bytes) = (1, 512);
        }
        t.to(&mut self.max_sectors, &[1]);
        t.to(&mut self.align_sectors, &[1]);
        t.to(&mut self.fua_percent, &[0]);
        t.to(&mut self.weights.write, &[80]);
        t.to(&mut self.weights.flush, &[2]);
        t.to(&mut self.weights.read, &[5]);
        t.to(&mut self.weights.discard, &[0]);
        t.to(&mut self.weights.zeroes, &[0]);
        t.to(&mut self.requests, &[120]);
        t.to(&mut self.retained, &[(Retained::Some(4), Retained::Some(4))]);
        t.to(&mut self.depth, &[16]);
    }

    fn lean_discarding(&mut self, rng: &mut Rng, layout: &mut Layout) {
        let t = &mut Tilt(rng);
        if t.0.chance(5, 6) {
            layout.backings.iter_mut().for_each(|b| b.discard = true);
        }
        t.to(&mut self.weights.read, &[30]);
        t.to(&mut self.weights.write, &[20]);
        t.to(&mut self.weights.flush, &[0]);
        t.to(&mut self.weights.discard, &[20]);
        t.to(&mut self.weights.pause, &[10]);
        t.to(&mut self.max_sectors, &[16]);
        t.to(&mut self.fua_percent, &[0, 0, 20]);
        t.to(&mut self.hot_percent, &[90]);
        t.to(&mut self.max_pause, &[Nanos::from_secs(40)]);
        t.to(&mut self.retained, &[(Retained::Nothing, Retained::Everything)]);
    }

    fn lean_bridging(&mut self, rng: &mut Rng) {
        let t = &mut Tilt(rng);
        t.to(&mut self.weights.read, &[20]);
        t.to(&mut self.weights.write, &[40]);
        t.to(&mut self.weights.flush, &[2]);
        t.to(&mut self.weights.discard, &[10]);
        t.to(&mut self.weights.zeroes, &[10]);
        t.to(&mut self.weights.pause, &[10]);
        t.to(&mut self.max_sectors, &[1, 8, 16]);
        t.to(&mut self.hot_percent, &[0, 50]);
        t.to(&mut self.max_pause, &[10, 200, 2000].map(Nanos::from_ms));
        t.to(&mut self.sequential_percent, &[0]);
        t.to(&mut self.depth, &[16]);
    }

    fn lean_places(&mut self, rng: &mut Rng, layout: &mut Layout) {
        let t = &mut Tilt(rng);
        for b in &mut layout.backings {
            // Room for what is large enough to go past the cache.
            let larger = b.data_sectors + 512;
            t.to(&mut b.data_sectors, &[larger]);
        }
        t.to(&mut self.depth, &[1]);
        t.to(&mut self.series_percent, &[100]);
        t.to(&mut self.one_volume_percent, &[90]);
        // One series, or some.
        t.to(&mut self.requests, &[1, 1, 1, 20]);
        t.to(&mut self.max_pause, &[Nanos::from_ms(20), Nanos::from_ms(200)]);
        t.to(&mut self.aim_percent, &[90]);
        t.to(&mut self.exact_percent, &[90]);
        t.to(&mut self.crash_effects, &[1000]);
        t.to(&mut self.kill_percent, &[0, 20]);
        if t.0.chance(5, 6) {
            self.aims = vec![Landmark::Answer];
        }
    }

    fn lean_wrapping(&mut self, rng: &mut Rng, layout: &mut Layout) {
        let t = &mut Tilt(rng);
        (layout.block_sectors, layout.logical_block_bytes) = (1, 512);
        t.to(&mut layout.bucket_sectors, &[16, 32, 128, 128]);
        for b in &mut layout.backings {
            (b.block_sectors, b.logical_block_bytes) = (1, 512);
        }
        t.to(&mut self.max_sectors, &[1, 8]);
        t.to(&mut self.align_sectors, &[1]);
        t.to(&mut self.fua_percent, &[0, 5, 50]);
        t.to(&mut self.weights.write, &[80]);
        t.to(&mut self.weights.flush, &[5, 20]);
        t.to(&mut self.requests, &[200, 400]);
        t.to(&mut self.hot_percent, &[0]);
        t.to(&mut self.depth, &[4, 16]);
        t.to(&mut self.retained.0, &[Retained::Some(4), Retained::Some(1)]);
        t.to(&mut self.aim_percent, &[80]);
        t.to(&mut self.crash_effects, &[3000]);
        if t.0.chance(5, 6) {
            self.aims = vec![
                Landmark::RingOverwrite,
                Landmark::RingOverwrite,
                Landmark::RingStep,
                Landmark::ChainSwitch,
            ];
        }
    }
}
