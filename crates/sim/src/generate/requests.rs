//! The requests of clients in a generated plan.
//!
//! Owns requests, their positions, and series: several successive requests to one position, with changes of the mode
//! between them. Must not know how a request is carried out.

use io::{Nanos, Rng};

use super::one_of;
use super::operator::{OperatorMix, series_action};
use crate::hardware::Layout;
use crate::plan::{OperatorAction, Request};

/// The requests and actions of a boot.
#[derive(Default)]
pub(super) struct Script {
    pub(super) requests: Vec<(usize, Request)>,
    pub(super) actions: Vec<(u64, OperatorAction)>,
    /// Number of all requests that are answered when each series ends.
    pub(super) ends: Vec<u64>,
}

/// Size in sectors from which writes of zeros bypass the cache.
const LARGE_ZEROES_SECTORS: u64 = 129;

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

/// The requests of a plan.
pub(super) struct RequestMix {
    pub(super) weights: Weights,
    pub(super) depth: u64,
    /// Number of requests of a boot.
    pub(super) count: u64,
    pub(super) max_sectors: u64,
    pub(super) align_sectors: u64,
    pub(super) hot_percent: u64,
    pub(super) sequential_percent: u64,
    pub(super) fua_percent: u64,
    /// Percentage of the requests that begin a series at one place.
    pub(super) series_percent: u64,
    /// Percentage of the boots in which all requests go to one volume.
    pub(super) one_volume_percent: u64,
    pub(super) max_pause: Nanos,
}

impl RequestMix {
    /// Draws everything but the number and the length of requests, which follow from the kind of the plan.
    pub(super) fn draw(rng: &mut Rng, layout: &Layout) -> RequestMix {
        let weights = Weights {
            read: one_of(rng, &[0, 5, 20, 60]),
            write: one_of(rng, &[10, 40, 80]),
            flush: one_of(rng, &[0, 2, 10]),
            discard: one_of(rng, &[0, 0, 2, 10]),
            zeroes: one_of(rng, &[0, 0, 2, 10]),
            pause: one_of(rng, &[0, 2, 10]),
        };
        RequestMix {
            weights,
            depth: one_of(rng, &[1, 2, 4, 16]),
            count: 0,
            max_sectors: 0,
            align_sectors: one_of(rng, &[1, 1, layout.block_sectors, 8]),
            hot_percent: one_of(rng, &[0, 50, 90]),
            sequential_percent: one_of(rng, &[0, 20, 80]),
            fua_percent: one_of(rng, &[0, 5, 50]),
            series_percent: one_of(rng, &[0, 0, 10, 30]),
            one_volume_percent: one_of(rng, &[0, 0, 50]),
            max_pause: one_of(rng, &[Nanos::from_ms(1), Nanos::from_ms(200), Nanos::from_secs(40)]),
        }
    }

    /// Draws about this many requests of clients, and the operator actions in the boot.
    pub(super) fn script(
        &self,
        rng: &mut Rng,
        operator: &OperatorMix,
        requests: u64,
        sizes: &[u64],
        absent: &[usize],
    ) -> Script {
        let mut script = Script::default();
        let mut last_ends = vec![0; sizes.len()];
        let backings = sizes.len();
        let only = (rng.below(100) < self.one_volume_percent).then(|| rng.below(sizes.len() as u64) as usize);
        let every = 100_u64.checked_div(operator.actions_per_hundred).unwrap_or(u64::MAX);
        let mut next_action = 0;
        while (script.requests.len() as u64) < requests {
            let at = script.requests.len() as u64;
            if at >= next_action && every < u64::MAX {
                next_action = at + every;
                script.actions.extend(operator.action(rng, backings).into_iter().map(|a| (at, a)));
            }
            let volume = only.unwrap_or_else(|| rng.below(sizes.len() as u64) as usize);
            if rng.below(100) < self.series_percent {
                self.series(rng, volume, sizes[volume], &mut script);
            } else {
                let request = self.request(rng, sizes[volume], &mut last_ends[volume]);
                script.requests.push((volume, request));
            }
        }
        for volume in absent {
            if rng.chance(1, 2) {
                script.actions.push((rng.below(requests + 1), OperatorAction::Attach { volume: *volume }));
            }
        }
        script.actions.sort_by_key(|(at, _)| *at);
        script
    }

    /// Draws the range of a request.
    fn range(&self, rng: &mut Rng, size: u64, last_end: u64) -> (u64, u64) {
        let align = self.align_sectors.max(1);
        let most = self.max_sectors.min(size).max(align);
        // Small requests are more frequent than large ones.
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

    /// Draws several requests to one place.
    fn series(&self, rng: &mut Rng, volume: usize, size: u64, script: &mut Script) {
        let align = self.align_sectors.max(1);
        let start = rng.below(size) / align * align;
        let sectors = one_of(rng, &[1_u64, 4, 8, 16]).next_multiple_of(align).min(size - start);
        // The range of the series, or a range that exceeds it on either side.
        let near = |rng: &mut Rng| match rng.below(4) {
            0 => {
                let first = start.saturating_sub(rng.below(9)) / align * align;
                let last = (start + sectors + rng.below(9)).next_multiple_of(align).min(size);
                (first, last - first)
            }
            _ => (start, sectors),
        };
        let large = |rng: &mut Rng| {
            let first = (start + sectors).saturating_sub(LARGE_ZEROES_SECTORS).min(start) / align * align;
            let first = if rng.chance(1, 2) { first } else { start };
            (first, LARGE_ZEROES_SECTORS.next_multiple_of(8).min(size - first))
        };
        for kind in self.kinds(rng) {
            let (near, large) = (near(rng), large(rng));
            let steps = self.step(rng, kind, near, large);
            let at = script.requests.len() as u64;
            if kind == Step::Other {
                script.actions.extend(series_action(rng, volume).into_iter().map(|a| (at, a)));
            }
            script.requests.extend(steps.into_iter().map(|r| (volume, r)));
        }
        // Reads and pauses are no answers at which a crash is aimed.
        let counts = |(_, r): &&(usize, Request)| !matches!(r, Request::Read { .. } | Request::Pause { .. });
        script.ends.push(script.requests.iter().filter(counts).count() as u64);
    }
    /// Draws the steps of a series: any steps, or some different ones, in any order.
    fn kinds(&self, rng: &mut Rng) -> Vec<Step> {
        if rng.chance(1, 3) {
            let n = 3 + rng.below(8);
            return (0..n).map(|_| one_of(rng, &Step::ALL)).collect();
        }
        let mut deck = if rng.chance(2, 3) { Step::DURABLE.to_vec() } else { Step::ALL.to_vec() };
        let n = (3 + rng.below(4)).min(deck.len() as u64);
        (0..n).map(|_| deck.swap_remove(rng.below(deck.len() as u64) as usize)).collect()
    }

    /// Draws a step of a series: a request near the place, or a large one around it.
    fn step(&self, rng: &mut Rng, kind: Step, near: (u64, u64), large: (u64, u64)) -> Vec<Request> {
        let pause = |rng: &mut Rng| Request::Pause { ns: rng.below(self.max_pause.0 + 1) };
        let (start, sectors) = near;
        match kind {
            Step::Write => vec![Request::Write { start, sectors, fua: false }],
            Step::DurableWrite | Step::AgainDurable => vec![Request::Write { start, sectors, fua: true }],
            // The data of a read takes a while to enter the cache.
            Step::Read => vec![Request::Read { start, sectors }, pause(rng)],
            Step::Discard => vec![Request::Discard { start, sectors }],
            Step::Zeroes | Step::DurableZeroes => {
                let (start, sectors) = if rng.chance(2, 3) { large } else { near };
                let fua = kind == Step::DurableZeroes;
                vec![Request::Zeroes { start, sectors, fua, may_unmap: rng.chance(1, 2) }]
            }
            Step::Flush => vec![Request::Flush],
            Step::Other | Step::Pause => vec![pause(rng)],
        }
    }
}

/// A step of a series.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Step {
    Write,
    DurableWrite,
    AgainDurable,
    Read,
    Discard,
    Zeroes,
    DurableZeroes,
    Flush,
    /// An operator action, most often on the mode.
    Other,
    Pause,
}

impl Step {
    const ALL: [Step; 10] = [
        Step::Write,
        Step::DurableWrite,
        Step::AgainDurable,
        Step::Read,
        Step::Discard,
        Step::Zeroes,
        Step::DurableZeroes,
        Step::Flush,
        Step::Other,
        Step::Pause,
    ];

    /// Steps that each promise durability, or may take it back.
    const DURABLE: [Step; 6] =
        [Step::DurableWrite, Step::AgainDurable, Step::Read, Step::Discard, Step::DurableZeroes, Step::Other];
}
