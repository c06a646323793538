//! What requests cost a device: fitted while it is used, from the requests that it gets anyway.
//!
//! Owns the model of one device: its *busy time* is `a` for each request, plus `s` for each request that does not begin
//! where the one before it ended, plus `b` for each MiB. A disk with a limit of requests a second has a large `a`, a
//! rotating one a large `s`, memory neither; and bandwidth follows from `b`.
//!
//! Latencies say little: with many requests in flight each of them waits for the others. So what is fitted is busy
//! time. The model knows how many requests are in flight. A *window* begins with the first of them and ends when none is
//! left, or when it is long enough; within it the device did what was answered, in the time from its begin to its end.
//! Each window is one equation; least squares solve them. Older ones count less and less, measured in busy time with
//! windows of the same kind (small, middling or large requests, going on or elsewhere): while there are large requests only,
//! what small ones cost is not forgotten, it only counts less than what is seen now, should they contradict each other. What
//! no window ever told is decided by a weak prior, which is what is usual for
//! such a device: with requests of one size only, nobody knows the bandwidth.
//!
//! *Invariants:* costs are never negative, and finite; the same observations give the same costs (no transcendental
//! functions, one order of operations). *Must not know:* clocks, devices, and what the costs are used for.

#[cfg(test)]
mod tests;

use format::{Sector, Sectors};
use io::Nanos;

/// A window ends after this time, whatever is in flight.
const WINDOW: Nanos = Nanos::from_ms(100);
/// It ends after so many answers, too: fast devices give many equations.
const WINDOW_ANSWERS: u32 = 64;
/// Busy time of one kind in which the weight of an observation halves, roughly, in ms.
const MEMORY_MS: f64 = 2000.0;
/// Answers from which the model counts as known: more than what a throttled device lets through at once after a rest.
const KNOWN_ANSWERS: u64 = 64;
/// Weights of the prior, for the three costs.
const PRIOR_WEIGHT: [f64; COSTS] = [0.5, 0.5, 0.2];
/// What was seen of kinds that do not occur any more counts at least so much.
const LEAST_WEIGHT: f64 = 1.0 / 64.0;
/// Mean sizes of requests that tell kinds of windows apart, in MiB: below them, and above the last.
const KIND_SIZES: [f64; 2] = [1.0 / 16.0, 1.0 / 2.0];
/// The same sizes, going on or elsewhere.
const KINDS: usize = 2 * (KIND_SIZES.len() + 1);
/// Rounds of the solver: with three unknowns it stands still long before.
const ROUNDS: usize = 60;
/// New answers, or new busy time in ms, after which costs are computed anew.
const STALE_ANSWERS: u32 = 16;
const STALE_MS: f64 = 20.0;

/// Request, seek, MiB.
const COSTS: usize = 3;

/// What requests cost a device, in ms. Times are busy times: of several requests they add up.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Costs {
    request_ms: f64,
    seek_ms: f64,
    mib_ms: f64,
}

impl Costs {
    /// Before anything is known: what is usual for rotating disks and for others.
    pub fn usual(rotational: bool) -> Costs {
        match rotational {
            true => Costs { request_ms: 0.5, seek_ms: 6.0, mib_ms: 7.0 },
            false => Costs { request_ms: 0.1, seek_ms: 0.0, mib_ms: 2.0 },
        }
    }

    /// Busy time of one request that begins elsewhere than the one before it ended.
    pub fn random(&self, sectors: Sectors) -> Nanos {
        nanos(self.request_ms + self.seek_ms + self.mib_ms * mib(sectors))
    }

    /// Busy time of one request that goes on where the one before it ended.
    pub fn sequential(&self, sectors: Sectors) -> Nanos {
        nanos(self.request_ms + self.mib_ms * mib(sectors))
    }

    /// What a request takes longer because of these sectors.
    pub fn transfer(&self, sectors: Sectors) -> Nanos {
        nanos(self.mib_ms * mib(sectors))
    }

    /// What one request costs more than nothing, however small it is, if it does not go on where another ended.
    pub fn per_request(&self) -> Nanos {
        nanos(self.request_ms + self.seek_ms)
    }
}

fn mib(sectors: Sectors) -> f64 {
    sectors.0 as f64 / 2048.0
}

fn nanos(ms: f64) -> Nanos {
    // Saturates; negative or undefined never happens, and would be zero.
    Nanos((ms * 1_000_000.0) as u64)
}

/// A request under way: give it back to [`CostModel::end`] or [`CostModel::cancel`].
#[derive(Clone, Copy, Debug)]
#[must_use = "the request stays in flight for ever"]
pub struct Observed {
    sectors: Sectors,
    seek: bool,
}

/// What was done in windows of one kind: the normal equations, sums of products of it with itself, and with the time.
#[derive(Clone, Copy, Default, Debug)]
struct Sums {
    squares: [[f64; COSTS]; COSTS],
    times: [f64; COSTS],
    /// Busy time of the device when the last window of this kind ended.
    last_ms: f64,
}

impl Sums {
    /// A window of this kind, in which this was done, took so long.
    fn add(&mut self, done: [f64; COSTS], ms: f64) {
        let decay = MEMORY_MS / (MEMORY_MS + ms);
        for i in 0..COSTS {
            // The products are the same both ways.
            for j in i..COSTS {
                let sum = self.squares[i][j] * decay + done[i] * done[j];
                (self.squares[i][j], self.squares[j][i]) = (sum, sum);
            }
            self.times[i] = self.times[i] * decay + done[i] * ms;
        }
    }

    /// Both together, the other with the weight that it has after so much busy time.
    fn and(mut self, other: &Sums, busy_ms: f64) -> Sums {
        let recent = MEMORY_MS / (MEMORY_MS + busy_ms - other.last_ms);
        let weight = (recent * recent).max(LEAST_WEIGHT);
        for i in 0..COSTS {
            for j in 0..COSTS {
                self.squares[i][j] += weight * other.squares[i][j];
            }
            self.times[i] += weight * other.times[i];
        }
        self
    }
}

/// The kind of a window in which this was done.
fn kind([requests, seeks, mib]: [f64; COSTS]) -> usize {
    let size = KIND_SIZES.iter().filter(|limit| mib >= **limit * requests).count();
    2 * size + usize::from(seeks * 2.0 >= requests)
}

/// The window that is open.
#[derive(Clone, Default, Debug)]
struct Window {
    began: Nanos,
    /// What was answered in it: requests, seeks, sectors.
    answers: u32,
    seeks: u32,
    sectors: u64,
}

impl Window {
    fn begin(now: Nanos) -> Window {
        Window { began: now, ..Window::default() }
    }

    /// It ends with this answer although requests are in flight.
    fn is_long_enough(&self, now: Nanos) -> bool {
        now.since(self.began) >= WINDOW || self.answers >= WINDOW_ANSWERS
    }
}

/// See the module head.
#[derive(Clone, Debug)]
pub struct CostModel {
    prior: [f64; COSTS],
    in_flight: u32,
    /// Sectors of the requests in flight.
    sectors_in_flight: u64,
    /// Where the last request ended.
    last_end: Sector,
    window: Window,
    kinds: [Sums; KINDS],
    /// All windows together.
    busy_ms: f64,
    answers: u64,
    costs: Costs,
    stale_answers: u32,
    stale_ms: f64,
}

impl CostModel {
    /// Nothing was observed yet.
    pub fn new(prior: Costs) -> CostModel {
        CostModel {
            prior: [prior.request_ms, prior.seek_ms, prior.mib_ms],
            in_flight: 0,
            sectors_in_flight: 0,
            last_end: Sector(0),
            window: Window::default(),
            kinds: [Sums::default(); KINDS],
            busy_ms: 0.0,
            answers: 0,
            costs: prior,
            stale_answers: 0,
            stale_ms: 0.0,
        }
    }

    /// A request is sent to the device. A flush is one for no sectors.
    pub fn begin(&mut self, start: Sector, sectors: Sectors, now: Nanos) -> Observed {
        if self.in_flight == 0 {
            // What is left of a window that ended with a failure.
            self.window = Window::begin(now);
        }
        self.in_flight += 1;
        self.sectors_in_flight = self.sectors_in_flight.saturating_add(sectors.0);
        let seek = start != self.last_end;
        if sectors > Sectors::ZERO {
            self.last_end = Sector(start.0.saturating_add(sectors.0));
        }
        Observed { sectors, seek }
    }

    /// A request was answered.
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

    /// A request failed, or nobody waits for it any more: how long it took says nothing.
    pub fn cancel(&mut self, request: Observed) {
        self.in_flight = self.in_flight.saturating_sub(1);
        self.sectors_in_flight = self.sectors_in_flight.saturating_sub(request.sectors.0);
    }

    fn close_window(&mut self, now: Nanos) {
        let w = std::mem::replace(&mut self.window, Window::begin(now));
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

    /// Least squares without negative costs: one unknown after the other, again and again.
    fn solve(&mut self) {
        let observed = self.kinds.iter().filter(|k| k.last_ms > 0.0);
        let Sums { squares, times, .. } = observed.fold(Sums::default(), |all, k| all.and(k, self.busy_ms));
        let mut x = [self.costs.request_ms, self.costs.seek_ms, self.costs.mib_ms];
        for _ in 0..ROUNDS {
            let before = x;
            for i in 0..COSTS {
                let others: f64 = (0..COSTS).filter(|j| *j != i).map(|j| squares[i][j] * x[j]).sum();
                let target = times[i] - others + PRIOR_WEIGHT[i] * self.prior[i];
                x[i] = (target / (squares[i][i] + PRIOR_WEIGHT[i])).max(0.0);
            }
            // Mostly it begins where the last one ended, and stands still soon.
            if x == before {
                break;
            }
        }
        self.costs = Costs { request_ms: x[0], seek_ms: x[1], mib_ms: x[2] };
    }

    /// The costs as of now.
    pub fn costs(&self) -> Costs {
        self.costs
    }

    /// Enough was observed for decisions that cost something if they are wrong.
    pub fn is_known(&self) -> bool {
        self.answers >= KNOWN_ANSWERS
    }

    /// Requests in flight.
    pub fn in_flight(&self) -> u32 {
        self.in_flight
    }

    /// How long another request would take, behind everything that is in flight.
    pub fn answer_time(&self, sectors: Sectors) -> Nanos {
        let c = &self.costs;
        let requests = f64::from(self.in_flight) + 1.0;
        let size = mib(Sectors(self.sectors_in_flight.saturating_add(sectors.0)));
        nanos((c.request_ms + c.seek_ms) * requests + c.mib_ms * size)
    }
}

/// Whether a stream in requests of this size is faster through one device than through another.
pub fn faster_for_stream(one: &CostModel, other: &CostModel, sectors: Sectors) -> bool {
    one.costs().sequential(sectors) < other.costs().sequential(sectors)
}
