//! The cost model of a device: what its requests cost, fitted from the requests that it serves anyway.
//!
//! Owns the model of one device. The *busy time* of the device is `a` for each request, plus `s` for each random
//! request (one that does not begin where the last one ended), plus `b` for each MiB. A device with a limit of requests
//! per second has a large `a`, a rotating disk has a large `s`, memory has neither; `b` gives the bandwidth.
//!
//! The model is fitted to busy times and not to latencies, because with many requests in flight each of them waits for
//! the others. The model counts the requests in flight. A *window* begins with the first of them and ends when none is
//! left, or when the window is long enough. In the time of the window the device has carried out the requests that were
//! answered in it. Each window is one equation, and the model solves all equations by least squares.
//!
//! Older windows count less and less. Their age is measured in busy time with windows of the same kind (small, medium
//! or large requests, sequential or random). So while all requests are large, the costs of small requests are kept;
//! they only count less than newer observations that contradict them. A weak prior, which has the usual costs of such a
//! device, decides what no window has shown: for example, requests of one size do not show the bandwidth.
//!
//! *Invariants:* costs are never negative, and finite; the same observations give the same costs (no transcendental
//! functions, one order of operations). *Must not know:* clocks, devices, and what the costs are used for.

#[cfg(test)]
mod tests;

use format::{Sector, Sectors};
use io::Nanos;

/// A window ends after this time, even if requests are in flight.
const WINDOW: Nanos = Nanos::from_ms(100);
/// A window ends after this number of answers, so that a fast device gives many equations.
const WINDOW_ANSWERS: u32 = 64;
/// The busy time of one kind, in ms, in which the weight of an observation is roughly halved.
const MEMORY_MS: f64 = 2000.0;
/// The number of answers from which the model counts as known. It is more than a throttled device accepts at once after
/// a pause.
const KNOWN_ANSWERS: u64 = 64;
/// The weights of the prior for the three costs.
const PRIOR_WEIGHT: [f64; COSTS] = [0.5, 0.5, 0.2];
/// The smallest weight of windows of a kind that no longer occurs.
const LEAST_WEIGHT: f64 = 1.0 / 64.0;
/// The mean sizes of requests, in MiB, that separate small, medium and large windows.
const KIND_SIZES: [f64; 2] = [1.0 / 16.0, 1.0 / 2.0];
/// The number of kinds: each size, sequential or random.
const KINDS: usize = 2 * (KIND_SIZES.len() + 1);
/// The largest number of rounds of the solver, which converges earlier with three unknowns.
const ROUNDS: usize = 60;
/// The number of new answers, or the new busy time in ms, after which the costs are computed again.
const STALE_ANSWERS: u32 = 16;
const STALE_MS: f64 = 20.0;

/// The number of costs: request, seek, MiB.
const COSTS: usize = 3;

/// The costs of requests to a device, in ms of busy time. The costs of several requests add up.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Costs {
    request_ms: f64,
    seek_ms: f64,
    mib_ms: f64,
    /// See [`Self::per_request`]; computed once, because each write reads it.
    per_request: Nanos,
}

impl Costs {
    fn new(request_ms: f64, seek_ms: f64, mib_ms: f64) -> Costs {
        Costs { request_ms, seek_ms, mib_ms, per_request: nanos(request_ms + seek_ms) }
    }

    /// The usual costs of rotating disks or of other devices, for a device without observations.
    pub fn usual(rotational: bool) -> Costs {
        match rotational {
            true => Costs::new(0.5, 6.0, 7.0),
            false => Costs::new(0.1, 0.0, 2.0),
        }
    }

    /// The busy time of one random request: it does not begin where the last one ended.
    pub fn random(&self, sectors: Sectors) -> Nanos {
        nanos(self.request_ms + self.seek_ms + self.mib_ms * mib(sectors))
    }

    /// The busy time of one sequential request: it begins where the last one ended.
    pub fn sequential(&self, sectors: Sectors) -> Nanos {
        nanos(self.request_ms + self.mib_ms * mib(sectors))
    }

    /// The part of the busy time of a request that depends on its size.
    pub fn transfer(&self, sectors: Sectors) -> Nanos {
        nanos(self.mib_ms * mib(sectors))
    }

    /// The busy time of a random request of no sectors.
    pub fn per_request(&self) -> Nanos {
        self.per_request
    }
}

fn mib(sectors: Sectors) -> f64 {
    sectors.0 as f64 / 2048.0
}

fn nanos(ms: f64) -> Nanos {
    // The conversion saturates; the value is never negative or undefined.
    Nanos((ms * 1_000_000.0) as u64)
}

/// A request in flight; the caller passes it to [`CostModel::end`] or [`CostModel::cancel`].
#[derive(Clone, Copy, Debug)]
#[must_use = "the request stays in flight for ever"]
pub struct Observed {
    sectors: Sectors,
    seek: bool,
}

/// The pairs of factors whose products the normal equations need. Factors 0 to 2 are the counts, factor 3 is the time. The first
/// six pairs are the upper triangle of the symmetric matrix of counts, row by row.
const PAIRS: [(usize, usize); 9] = [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2), (0, 3), (1, 3), (2, 3)];

/// The normal equations of the windows of one kind: sums of the products of [`PAIRS`].
#[derive(Clone, Copy, Default, Debug)]
struct Sums {
    products: [f64; PAIRS.len()],
    /// The busy time of the device at the end of the last window of this kind.
    last_ms: f64,
}

impl Sums {
    /// Adds a window with the counts `done` that took `ms`.
    fn add(&mut self, done: [f64; COSTS], ms: f64) {
        let decay = MEMORY_MS / (MEMORY_MS + ms);
        let factors = [done[0], done[1], done[2], ms];
        for (sum, (i, j)) in self.products.iter_mut().zip(PAIRS) {
            *sum = *sum * decay + factors[i] * factors[j];
        }
    }

    /// The sum of the products of two counts.
    fn square(&self, i: usize, j: usize) -> f64 {
        let (i, j) = (i.min(j), i.max(j));
        // Rows of the upper triangle have three, two and one entries.
        self.products[i * (5 - i) / 2 + j]
    }

    /// The sum of the products of a count with the time.
    fn time(&self, i: usize) -> f64 {
        self.products[2 * COSTS + i]
    }

    /// Adds `other` with the weight that it has at `busy_ms`.
    fn and(mut self, other: &Sums, busy_ms: f64) -> Sums {
        let recent = MEMORY_MS / (MEMORY_MS + busy_ms - other.last_ms);
        let weight = (recent * recent).max(LEAST_WEIGHT);
        for (sum, product) in self.products.iter_mut().zip(other.products) {
            *sum += weight * product;
        }
        self
    }
}

/// The kind of a window with these counts.
fn kind([requests, seeks, mib]: [f64; COSTS]) -> usize {
    let size = KIND_SIZES.iter().filter(|limit| mib >= **limit * requests).count();
    2 * size + usize::from(seeks * 2.0 >= requests)
}

/// The open window.
#[derive(Clone, Default, Debug)]
struct CostWindow {
    began: Nanos,
    /// The requests that were answered in the window, with their seeks and sectors.
    answers: u32,
    seeks: u32,
    sectors: u64,
}

impl CostWindow {
    fn begin(now: Nanos) -> CostWindow {
        CostWindow { began: now, ..CostWindow::default() }
    }

    /// Whether the window ends with this answer, even if requests are in flight.
    fn is_long_enough(&self, now: Nanos) -> bool {
        now.since(self.began) >= WINDOW || self.answers >= WINDOW_ANSWERS
    }
}

/// The cost model of one device.
#[derive(Clone, Debug)]
pub struct CostModel {
    prior: [f64; COSTS],
    in_flight: u32,
    /// The number of sectors of the requests in flight.
    sectors_in_flight: u64,
    /// The end of the last request.
    last_end: Sector,
    window: CostWindow,
    kinds: [Sums; KINDS],
    /// The busy time of all windows.
    busy_ms: f64,
    answers: u64,
    costs: Costs,
    stale_answers: u32,
    stale_ms: f64,
}

impl CostModel {
    /// Makes a model without observations.
    pub fn new(prior: Costs) -> CostModel {
        CostModel {
            prior: [prior.request_ms, prior.seek_ms, prior.mib_ms],
            in_flight: 0,
            sectors_in_flight: 0,
            last_end: Sector(0),
            window: CostWindow::default(),
            kinds: [Sums::default(); KINDS],
            busy_ms: 0.0,
            answers: 0,
            costs: prior,
            stale_answers: 0,
            stale_ms: 0.0,
        }
    }

    /// Records that a request is sent to the device. A flush is a request for no sectors.
    pub fn begin(&mut self, start: Sector, sectors: Sectors, now: Nanos) -> Observed {
        if self.in_flight == 0 {
            // The old window may have counts if its last request failed.
            self.window = CostWindow::begin(now);
        }
        self.in_flight += 1;
        self.sectors_in_flight = self.sectors_in_flight.saturating_add(sectors.0);
        let seek = start != self.last_end;
        if sectors > Sectors::ZERO {
            self.last_end = Sector(start.0.saturating_add(sectors.0));
        }
        Observed { sectors, seek }
    }

    /// Records that a request was answered.
    pub fn end(&mut self, request: Observed, now: Nanos) {
        self.cancel(request);
        if request.sectors > Sectors::ZERO {
            let w = &mut self.window;
            w.answers += 1;
            w.seeks += u32::from(request.seek);
            w.sectors = w.sectors.saturating_add(request.sectors.0);
            self.answers = self.answers.saturating_add(1);
        }
        if self.in_flight == 0 || self.window.is_long_enough(now) {
            self.close_window(now);
        }
    }

    /// Records the end of a request that failed or was dropped; its time is not used.
    pub fn cancel(&mut self, request: Observed) {
        self.in_flight = self.in_flight.saturating_sub(1);
        self.sectors_in_flight = self.sectors_in_flight.saturating_sub(request.sectors.0);
    }

    fn close_window(&mut self, now: Nanos) {
        let w = std::mem::replace(&mut self.window, CostWindow::begin(now));
        let ms = now.since(w.began).0 as f64 / 1_000_000.0;
        let done = [f64::from(w.answers), f64::from(w.seeks), mib(Sectors(w.sectors))];
        self.busy_ms += ms;
        if let Some(sums) = self.kinds.get_mut(kind(done)) {
            sums.add(done, ms);
            sums.last_ms = self.busy_ms;
        }
        self.stale_answers = self.stale_answers.saturating_add(w.answers);
        self.stale_ms += ms;
        if self.stale_answers >= STALE_ANSWERS || self.stale_ms >= STALE_MS {
            (self.stale_answers, self.stale_ms) = (0, 0.0);
            self.solve();
        }
    }

    /// Solves the least squares problem without negative costs by coordinate descent: adjusts one cost after the other,
    /// in rounds.
    fn solve(&mut self) {
        let observed = self.kinds.iter().filter(|k| k.last_ms > 0.0);
        let sums = observed.fold(Sums::default(), |all, k| all.and(k, self.busy_ms));
        let mut x = [self.costs.request_ms, self.costs.seek_ms, self.costs.mib_ms];
        for _ in 0..ROUNDS {
            let before = x;
            for i in 0..COSTS {
                let others: f64 = (0..COSTS).filter(|j| *j != i).map(|j| sums.square(i, j) * x[j]).sum();
                let target = sums.time(i) - others + PRIOR_WEIGHT[i] * self.prior[i];
                x[i] = (target / (sums.square(i, i) + PRIOR_WEIGHT[i])).max(0.0);
            }
            // The search begins with the last costs, so it usually converges after few rounds.
            if x == before {
                break;
            }
        }
        self.costs = Costs::new(x[0], x[1], x[2]);
    }

    /// The present costs.
    pub fn costs(&self) -> Costs {
        self.costs
    }

    /// Whether there are enough observations to base decisions on the costs.
    pub fn is_known(&self) -> bool {
        self.answers >= KNOWN_ANSWERS
    }

    /// The number of requests in flight.
    pub fn in_flight(&self) -> u32 {
        self.in_flight
    }

    /// The time in which the device would answer another request, after all requests in flight.
    pub fn answer_time(&self, sectors: Sectors) -> Nanos {
        let c = &self.costs;
        let requests = f64::from(self.in_flight) + 1.0;
        let size = mib(Sectors(self.sectors_in_flight.saturating_add(sectors.0)));
        nanos((c.request_ms + c.seek_ms) * requests + c.mib_ms * size)
    }
}

/// Whether a stream of requests of this size is faster on one device than on the other.
pub fn faster_for_stream(one: &CostModel, other: &CostModel, sectors: Sectors) -> bool {
    one.costs().sequential(sectors) < other.costs().sequential(sectors)
}
