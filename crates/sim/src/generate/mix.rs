//! The weights of a plan.
//!
//! Owns the frequency of each ingredient. Each weight is drawn on its own. A plan may favour a combination of
//! ingredients that independent weights rarely produce. That changes some of the weights, each with a probability of its own, and never removes an
//! ingredient from all plans. Must not know how an ingredient is carried out.

use format::CacheMode;
use io::{Nanos, Rng};

use super::operator::{ActionKind, OperatorMix};
use super::requests::{RequestMix, Script};
use super::{Life, one_of};
use crate::disk::{Landmark, Retained};
use crate::hardware::Layout;
use crate::plan::Faults;

/// The percentage of the faulty boots of a plan that have each fault.
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

/// The ends of the boots of a plan that do not end in order.
pub(super) struct CrashMix {
    pub(super) percent: u64,
    pub(super) effects: u64,
    pub(super) aim_percent: u64,
    pub(super) aims: Vec<Landmark>,
    /// Percentage of the crashes aimed at an answer that come right after the last answer of a series.
    pub(super) exact_percent: u64,
    pub(super) kill_percent: u64,
    pub(super) partial_percent: u64,
    pub(super) late_percent: u64,
    pub(super) older_percent: u64,
    pub(super) retained: (Retained, Retained),
}

/// The weights that all boots of a plan share.
pub(super) struct Mix {
    pub(super) life: Life,
    pub(super) leans: bool,
    pub(super) requests: RequestMix,
    pub(super) operator: OperatorMix,
    pub(super) crashes: CrashMix,
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
        let mut mix = Mix {
            life,
            leans: false,
            requests: RequestMix::draw(rng, layout),
            operator: OperatorMix::draw(rng),
            crashes: CrashMix::draw(rng),
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

    /// The number of requests of a boot, and the number of device effects after which it crashes.
    pub(super) fn length(&self, rng: &mut Rng, number: u64, faults: Option<&Faults>) -> (u64, u64) {
        if faults.is_some_and(|f| f.hang.is_some()) {
            // The ring of the journal has to wrap around.
            return (one_of(rng, &[60, 250, 500]), 30_000);
        }
        // The cache that fills up in the first boot stays full. The other boots are for crashes in that state.
        let fills = matches!(self.life, Life::Pressure | Life::Forest);
        match number {
            0 if fills => (self.requests.count, 30_000),
            _ if fills => (self.requests.count / 10, one_of(rng, &[40, 300, 1000])),
            _ => (self.requests.count, self.crashes.effects),
        }
    }

    /// Draws about this many requests of clients, and the operator actions in the boot.
    pub(super) fn script(&self, rng: &mut Rng, requests: u64, sizes: &[u64], absent: &[usize]) -> Script {
        self.requests.script(rng, &self.operator, requests, sizes, absent)
    }

    /// Applies the kind of the plan.
    fn live(&mut self, rng: &mut Rng) {
        match self.life {
            Life::Brief => {
                (self.requests.count, self.requests.max_sectors) =
                    (one_of(rng, &[10, 20, 40, 80]), one_of(rng, &[1, 8, 16, 64]));
                (self.crashes.percent, self.crashes.effects) =
                    (one_of(rng, &[90, 100]), one_of(rng, &[60, 120, 250, 600]));
            }
            Life::Common => {
                (self.requests.count, self.requests.max_sectors) =
                    (one_of(rng, &[20, 60, 150, 400]), one_of(rng, &[1, 8, 16, 64, 512]));
                (self.crashes.percent, self.crashes.effects) =
                    (one_of(rng, &[0, 50, 90, 100]), one_of(rng, &[40, 300, 2000]));
            }
            Life::Pressure => {
                (self.requests.count, self.requests.max_sectors) =
                    (one_of(rng, &[150, 500]), one_of(rng, &[8, 64]));
                (self.crashes.percent, self.crashes.effects) =
                    (one_of(rng, &[90, 100]), one_of(rng, &[40, 300, 2000]));
                self.requests.hot_percent = 0;
            }
            Life::Churn => {
                (self.requests.count, self.requests.max_sectors, self.requests.hot_percent) = (500, 64, 0);
                (self.crashes.percent, self.crashes.effects) = (one_of(rng, &[0, 50, 90, 100]), 30_000);
            }
            Life::Forest => {
                (self.requests.count, self.requests.max_sectors, self.requests.hot_percent) = (6000, 1, 0);
                (self.crashes.percent, self.crashes.effects) = (one_of(rng, &[90, 100]), 30_000);
                (self.requests.align_sectors, self.requests.max_pause) = (1, Nanos::from_ms(1));
            }
        }
    }
}

impl CrashMix {
    fn draw(rng: &mut Rng) -> CrashMix {
        CrashMix {
            percent: 100,
            effects: 0,
            aim_percent: one_of(rng, &[0, 30, 60]),
            aims: some_of(rng, &Landmark::ALL),
            exact_percent: 40,
            kill_percent: one_of(rng, &[0, 0, 50]),
            partial_percent: one_of(rng, &[5, 20, 40]),
            late_percent: one_of(rng, &[0, 0, 30]),
            older_percent: one_of(rng, &[0, 0, 0, 10]),
            retained: CrashMix::retained(rng),
        }
    }

    fn retained(rng: &mut Rng) -> (Retained, Retained) {
        if rng.chance(1, 2) {
            let retained = one_of(rng, &RETAINED);
            return (retained, retained);
        }
        (one_of(rng, &RETAINED), one_of(rng, &RETAINED))
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
    /// Devices change between clean and dirty all the time, and no request makes the journal urgent.
    Toggling,
    /// Devices change between clean and dirty all the time, while devices fail.
    Failing,
    /// Data is moved, and clean copies are invalidated.
    Moving,
    /// The cache is much smaller than the data that is read and written.
    Evicting,
    /// The process dies, and then the power fails.
    Dying,
    /// Copies that are old enough to be durable lie under dirty data that is not durable, and under discards.
    Discarding,
    /// Journal entries have several blocks, and the power fails while they are written.
    Tearing,
    /// Writeback bridges gaps that are written to, zeroed and discarded.
    Bridging,
    /// All requests go to one place, one after the other, and the power fails right after an answer.
    Places,
    /// A device hangs while other devices work.
    Hanging,
    /// The ring of the journal wraps around, and the power fails at that point.
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

    /// Draws no, one or two leanings.
    pub(super) fn draw(rng: &mut Rng, life: Life) -> Vec<Lean> {
        let n = match life {
            Life::Brief => one_of(rng, &[0, 0, 1, 1, 1, 2]),
            Life::Common => one_of(rng, &[0, 0, 1]),
            _ => 0,
        };
        (0..n).map(|_| one_of(rng, &Lean::ALL)).collect()
    }
}

/// Changes weights, each by chance.
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
                t.to(&mut self.crashes.kill_percent, &[60]);
                t.to(&mut self.crashes.retained, &[(Retained::Nothing, Retained::Nothing)]);
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
        t.to(&mut self.requests.weights.pause, &[20]);
        t.to(&mut self.requests.max_pause, &[Nanos::from_ms(10), Nanos::from_ms(200)]);
        t.to(&mut self.requests.fua_percent, &[0, 5]);
        t.to(&mut self.requests.weights.discard, &[0, 10, 20]);
        t.to(&mut self.requests.hot_percent, &[90]);
        t.to(&mut self.crashes.retained.0, &[Retained::Nothing, Retained::Some(1)]);
    }

    fn lean_failing(&mut self, rng: &mut Rng) {
        let t = &mut Tilt(rng);
        t.to(&mut self.faulty_percent, &[60]);
        t.to(&mut self.faults.outage, &[90]);
        t.to(&mut self.faults.cache_errors, &[10]);
        t.to(&mut self.faults.backing_errors, &[10]);
        // Changes wait for each other, and some of them bypass the cache.
        t.to(&mut self.requests.weights.discard, &[15]);
        t.to(&mut self.requests.weights.read, &[20]);
        t.to(&mut self.requests.weights.write, &[30]);
        t.to(&mut self.requests.hot_percent, &[90]);
        t.to(&mut self.requests.max_sectors, &[64]);
        t.to(&mut self.crashes.percent, &[30]);
        t.to(&mut self.requests.depth, &[16]);
    }

    fn lean_moving(&mut self, rng: &mut Rng, layout: &mut Layout) {
        let t = &mut Tilt(rng);
        let larger = layout.bucket_sectors.max(32);
        t.to(&mut layout.bucket_sectors, &[larger]);
        if t.0.chance(5, 6) {
            self.operator.actions.extend([ActionKind::CopyGc, ActionKind::Gc, ActionKind::Mode].repeat(3));
        }
        t.to(&mut self.operator.actions_per_hundred, &[10]);
        t.to(&mut self.requests.weights.read, &[40]);
        t.to(&mut self.requests.weights.pause, &[5]);
        t.to(&mut self.requests.count, &[100]);
        t.to(&mut self.requests.max_sectors, &[16]);
        t.to(&mut self.requests.max_pause, &[Nanos::from_secs(40)]);
        t.to(&mut self.crashes.effects, &[600, 2000]);
    }

    fn lean_evicting(&mut self, rng: &mut Rng, layout: &mut Layout) {
        let t = &mut Tilt(rng);
        (layout.bucket_sectors, layout.nbuckets) = (8, 128);
        layout.backings.iter_mut().for_each(|b| b.data_sectors += 2048);
        t.to(&mut self.requests.weights.read, &[60]);
        t.to(&mut self.requests.count, &[150]);
        t.to(&mut self.requests.max_sectors, &[64]);
        t.to(&mut self.requests.hot_percent, &[0]);
        t.to(&mut self.read_back_percent, &[20, 100]);
        t.to(&mut self.crashes.effects, &[600, 2000]);
    }

    fn lean_tearing(&mut self, rng: &mut Rng, layout: &mut Layout) {
        let t = &mut Tilt(rng);
        (layout.bucket_sectors, layout.block_sectors, layout.logical_block_bytes) = (16, 1, 512);
        for b in &mut layout.backings {
            (b.block_sectors, b.logical_block_bytes) = (1, 512);
        }
        t.to(&mut self.requests.max_sectors, &[1]);
        t.to(&mut self.requests.align_sectors, &[1]);
        t.to(&mut self.requests.fua_percent, &[0]);
        t.to(&mut self.requests.weights.write, &[80]);
        t.to(&mut self.requests.weights.flush, &[2]);
        t.to(&mut self.requests.weights.read, &[5]);
        t.to(&mut self.requests.weights.discard, &[0]);
        t.to(&mut self.requests.weights.zeroes, &[0]);
        t.to(&mut self.requests.count, &[120]);
        t.to(&mut self.crashes.retained, &[(Retained::Some(4), Retained::Some(4))]);
        t.to(&mut self.requests.depth, &[16]);
    }

    fn lean_discarding(&mut self, rng: &mut Rng, layout: &mut Layout) {
        let t = &mut Tilt(rng);
        if t.0.chance(5, 6) {
            layout.backings.iter_mut().for_each(|b| b.discard = true);
        }
        t.to(&mut self.requests.weights.read, &[30]);
        t.to(&mut self.requests.weights.write, &[20]);
        t.to(&mut self.requests.weights.flush, &[0]);
        t.to(&mut self.requests.weights.discard, &[20]);
        t.to(&mut self.requests.weights.pause, &[10]);
        t.to(&mut self.requests.max_sectors, &[16]);
        t.to(&mut self.requests.fua_percent, &[0, 0, 20]);
        t.to(&mut self.requests.hot_percent, &[90]);
        t.to(&mut self.requests.max_pause, &[Nanos::from_secs(40)]);
        t.to(&mut self.crashes.retained, &[(Retained::Nothing, Retained::Everything)]);
    }

    fn lean_bridging(&mut self, rng: &mut Rng) {
        let t = &mut Tilt(rng);
        t.to(&mut self.requests.weights.read, &[20]);
        t.to(&mut self.requests.weights.write, &[40]);
        t.to(&mut self.requests.weights.flush, &[2]);
        t.to(&mut self.requests.weights.discard, &[10]);
        t.to(&mut self.requests.weights.zeroes, &[10]);
        t.to(&mut self.requests.weights.pause, &[10]);
        t.to(&mut self.requests.max_sectors, &[1, 8, 16]);
        t.to(&mut self.requests.hot_percent, &[0, 50]);
        t.to(&mut self.requests.max_pause, &[10, 200, 2000].map(Nanos::from_ms));
        t.to(&mut self.requests.sequential_percent, &[0]);
        t.to(&mut self.requests.depth, &[16]);
    }

    fn lean_places(&mut self, rng: &mut Rng, layout: &mut Layout) {
        let t = &mut Tilt(rng);
        for b in &mut layout.backings {
            // The device has room for requests that are large enough to bypass the cache.
            let larger = b.data_sectors + 512;
            t.to(&mut b.data_sectors, &[larger]);
        }
        t.to(&mut self.requests.depth, &[1]);
        t.to(&mut self.requests.series_percent, &[100]);
        t.to(&mut self.requests.one_volume_percent, &[90]);
        // A boot has one series, or some.
        t.to(&mut self.requests.count, &[1, 1, 1, 20]);
        t.to(&mut self.requests.max_pause, &[Nanos::from_ms(20), Nanos::from_ms(200)]);
        t.to(&mut self.crashes.aim_percent, &[90]);
        t.to(&mut self.crashes.exact_percent, &[90]);
        t.to(&mut self.crashes.effects, &[1000]);
        t.to(&mut self.crashes.kill_percent, &[0, 20]);
        if t.0.chance(5, 6) {
            self.crashes.aims = vec![Landmark::Answer];
        }
    }

    fn lean_wrapping(&mut self, rng: &mut Rng, layout: &mut Layout) {
        let t = &mut Tilt(rng);
        (layout.block_sectors, layout.logical_block_bytes) = (1, 512);
        t.to(&mut layout.bucket_sectors, &[16, 32, 128, 128]);
        for b in &mut layout.backings {
            (b.block_sectors, b.logical_block_bytes) = (1, 512);
        }
        t.to(&mut self.requests.max_sectors, &[1, 8]);
        t.to(&mut self.requests.align_sectors, &[1]);
        t.to(&mut self.requests.fua_percent, &[0, 5, 50]);
        t.to(&mut self.requests.weights.write, &[80]);
        t.to(&mut self.requests.weights.flush, &[5, 20]);
        t.to(&mut self.requests.count, &[200, 400]);
        t.to(&mut self.requests.hot_percent, &[0]);
        t.to(&mut self.requests.depth, &[4, 16]);
        t.to(&mut self.crashes.retained.0, &[Retained::Some(4), Retained::Some(1)]);
        t.to(&mut self.crashes.aim_percent, &[80]);
        t.to(&mut self.crashes.effects, &[3000]);
        if t.0.chance(5, 6) {
            self.crashes.aims = vec![
                Landmark::RingOverwrite,
                Landmark::RingOverwrite,
                Landmark::RingStep,
                Landmark::ChainSwitch,
            ];
        }
    }
}
