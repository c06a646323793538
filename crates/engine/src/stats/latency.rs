//! The outcomes and latencies of the requests to a volume.
//!
//! Owns, for each operation and outcome, a histogram of latencies since the start, and counts over the last five
//! minutes. Recording takes a few dozen instructions and never allocates. *Must not know:* why a request took its path,
//! and the readers of the figures.

use format::Sectors;
use io::{Histogram, Nanos};

use crate::policy::bypass::BypassReason;

/// The operation of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OpKind {
    /// A read.
    Read,
    /// A write, or a write of zeros.
    Write,
    /// A flush.
    Flush,
    /// A discard.
    Discard,
}

impl OpKind {
    /// Every operation, in the order of [`OpKind::index`].
    pub const ALL: [OpKind; 4] = [OpKind::Read, OpKind::Write, OpKind::Flush, OpKind::Discard];

    /// Position in [`OpKind::ALL`].
    pub const fn index(self) -> usize {
        self as usize
    }

    /// Name for metrics.
    pub const fn name(self) -> &'static str {
        match self {
            OpKind::Read => "read",
            OpKind::Write => "write",
            OpKind::Flush => "flush",
            OpKind::Discard => "discard",
        }
    }
}

/// The outcome of a request that was answered without an error.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// A read of which the cache had all data.
    Hit,
    /// A read of which the cache had no data.
    Miss,
    /// A read of which the cache had a part of the data.
    Partial,
    /// A write that went to the cache alone.
    Writeback,
    /// A write that went to both devices.
    Writethrough,
    /// A request that was decided to bypass the cache; a read may still have been served from the cache.
    Bypass(BypassReason),
    /// A request to a volume without a cache.
    PassThrough,
    /// A flush, or another request whose outcome does not depend on the cache.
    Done,
}

impl Outcome {
    /// Number of outcomes.
    pub const COUNT: usize = Outcome::WITHOUT_REASON + BypassReason::COUNT;
    const WITHOUT_REASON: usize = 7;

    /// Every outcome, in the order of [`Outcome::index`].
    pub fn all() -> impl Iterator<Item = Outcome> {
        use Outcome::{Done, Hit, Miss, Partial, PassThrough, Writeback, Writethrough};
        let plain = [Hit, Miss, Partial, Writeback, Writethrough, PassThrough, Done];
        plain.into_iter().chain(BypassReason::ALL.into_iter().map(Outcome::Bypass))
    }

    /// Position in [`Outcome::all`].
    pub const fn index(self) -> usize {
        match self {
            Outcome::Hit => 0,
            Outcome::Miss => 1,
            Outcome::Partial => 2,
            Outcome::Writeback => 3,
            Outcome::Writethrough => 4,
            Outcome::PassThrough => 5,
            Outcome::Done => 6,
            Outcome::Bypass(reason) => Outcome::WITHOUT_REASON + reason.index(),
        }
    }

    /// Name for metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Outcome::Hit => "hit",
            Outcome::Miss => "miss",
            Outcome::Partial => "partial",
            Outcome::Writeback => "writeback",
            Outcome::Writethrough => "writethrough",
            Outcome::Bypass(_) => "bypass",
            Outcome::PassThrough => "pass_through",
            Outcome::Done => "done",
        }
    }

    /// The reason for a bypass; empty for other outcomes.
    pub const fn reason(self) -> &'static str {
        match self {
            Outcome::Bypass(reason) => reason.name(),
            _ => "",
        }
    }
}

/// The number of requests, and of their bytes.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Tally {
    /// Requests.
    pub requests: u64,
    /// Bytes.
    pub bytes: u64,
}

impl Tally {
    fn count(&mut self, sectors: Sectors) {
        self.requests = self.requests.saturating_add(1);
        self.bytes = self.bytes.saturating_add(sectors.bytes());
    }

    /// The sum of both.
    #[must_use]
    pub fn plus(self, other: Tally) -> Tally {
        Tally {
            requests: self.requests.saturating_add(other.requests),
            bytes: self.bytes.saturating_add(other.bytes),
        }
    }
}

/// The number of requests for each operation and outcome.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tallies {
    by_op: [[Tally; Outcome::COUNT]; OpKind::ALL.len()],
    /// Parts of requests that were to be cached and for which there was no bucket.
    pub not_cached: Tally,
}

impl Default for Tallies {
    fn default() -> Self {
        let none = [[Tally::default(); Outcome::COUNT]; OpKind::ALL.len()];
        Tallies { by_op: none, not_cached: Tally::default() }
    }
}

impl Tallies {
    /// Requests of `op` with this outcome.
    pub fn of(&self, op: OpKind, outcome: Outcome) -> Tally {
        self.by_op[op.index()][outcome.index()]
    }

    /// Counts a request.
    pub fn count(&mut self, op: OpKind, outcome: Outcome, sectors: Sectors) {
        self.by_op[op.index()][outcome.index()].count(sectors);
    }

    /// Requests of all operations that bypassed for this reason.
    pub fn bypassed(&self, reason: BypassReason) -> Tally {
        let of = |op: OpKind| self.of(op, Outcome::Bypass(reason));
        OpKind::ALL.into_iter().map(of).fold(Tally::default(), Tally::plus)
    }

    /// All requests of `op`.
    pub fn all_of(&self, op: OpKind) -> Tally {
        Outcome::all().map(|outcome| self.of(op, outcome)).fold(Tally::default(), Tally::plus)
    }

    fn add(&mut self, other: &Tallies) {
        let mine = self.by_op.as_flattened_mut().iter_mut().chain([&mut self.not_cached]);
        let theirs = other.by_op.as_flattened().iter().chain([&other.not_cached]);
        for (a, b) in mine.zip(theirs) {
            *a = a.plus(*b);
        }
    }
}

/// The length of a slot of the window.
pub const SLOT: Nanos = Nanos::from_secs(10);
/// The number of complete slots of the window: five minutes.
const SLOTS: usize = 30;
/// The length of the window, including the slot that is being filled.
pub const WINDOW: Nanos = Nanos::from_secs(10 * (SLOTS as u64 + 1));

/// The counts of the last five minutes.
#[derive(Clone, Debug)]
struct LatencyWindow {
    /// The slot that is being filled, and the slots before it, in a ring.
    slots: Box<[Tallies]>,
    current: usize,
    /// The end of the current slot.
    ends: Nanos,
}

impl LatencyWindow {
    fn new(now: Nanos) -> LatencyWindow {
        LatencyWindow { slots: vec![Tallies::default(); SLOTS + 1].into(), current: 0, ends: now.after(SLOT) }
    }

    /// The slot of `now`.
    fn at(&mut self, now: Nanos) -> &mut Tallies {
        if now >= self.ends {
            self.pass(now);
        }
        &mut self.slots[self.current]
    }

    /// Ends the slots before `now`; the counts of slots that leave the window are dropped.
    fn pass(&mut self, now: Nanos) {
        let ended = now.since(self.ends).0 / SLOT.0 + 1;
        for _ in 0..ended.min(self.slots.len() as u64) {
            self.current = (self.current + 1) % self.slots.len();
            self.slots[self.current] = Tallies::default();
        }
        self.ends = self.ends.after(Nanos(ended.saturating_mul(SLOT.0)));
    }

    fn sum(&mut self, now: Nanos) -> Tallies {
        self.at(now);
        let mut sum = Tallies::default();
        for slot in &self.slots {
            sum.add(slot);
        }
        sum
    }
}

/// Latencies by operation and outcome.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Latencies {
    by_op: Box<[[Histogram; Outcome::COUNT]; OpKind::ALL.len()]>,
}

impl Default for Latencies {
    fn default() -> Self {
        Latencies { by_op: Box::new([[Histogram::default(); Outcome::COUNT]; OpKind::ALL.len()]) }
    }
}

impl Latencies {
    /// Latencies of requests of `op` with this outcome.
    pub fn of(&self, op: OpKind, outcome: Outcome) -> &Histogram {
        &self.by_op[op.index()][outcome.index()]
    }

    /// Latencies of all requests of `op`.
    pub fn all_of(&self, op: OpKind) -> Histogram {
        let mut all = Histogram::default();
        for outcome in Outcome::all() {
            all.add(self.of(op, outcome));
        }
        all
    }

    /// The number of the requests of `op`, and the sum of their latencies.
    pub fn total_of(&self, op: OpKind) -> (u64, Nanos) {
        let all = self.by_op[op.index()].iter();
        all.fold((0, Nanos(0)), |(count, sum), h| (count + h.count(), Nanos(sum.0.saturating_add(h.sum().0))))
    }
}

/// The outcomes and latencies of a volume's requests.
#[derive(Clone, Debug)]
pub struct RequestStats {
    latencies: Latencies,
    total: Tallies,
    window: LatencyWindow,
    errors: [u64; OpKind::ALL.len()],
}

impl RequestStats {
    /// Nothing recorded yet.
    pub fn new(now: Nanos) -> RequestStats {
        RequestStats {
            latencies: Latencies::default(),
            total: Tallies::default(),
            window: LatencyWindow::new(now),
            errors: [0; OpKind::ALL.len()],
        }
    }

    /// Records a request that was answered at `now`.
    pub fn record(&mut self, op: OpKind, outcome: Outcome, sectors: Sectors, began: Nanos, now: Nanos) {
        self.latencies.by_op[op.index()][outcome.index()].record(now.since(began));
        self.total.count(op, outcome, sectors);
        self.window.at(now).count(op, outcome, sectors);
    }

    /// Records a part of a request that was to be cached and for which there was no bucket.
    pub fn not_cached(&mut self, sectors: Sectors, now: Nanos) {
        self.total.not_cached.count(sectors);
        self.window.at(now).not_cached.count(sectors);
    }

    /// Records a request that failed.
    pub fn failed(&mut self, op: OpKind) {
        let count = &mut self.errors[op.index()];
        *count = count.saturating_add(1);
    }

    /// Latencies since the start.
    pub fn latencies(&self) -> &Latencies {
        &self.latencies
    }

    /// Requests since the start.
    pub fn total(&self) -> Tallies {
        self.total
    }

    /// Requests of the last five minutes.
    pub fn recent(&mut self, now: Nanos) -> Tallies {
        self.window.sum(now)
    }

    /// Failed requests by operation, in the order of [`OpKind::ALL`].
    pub fn errors(&self) -> [u64; OpKind::ALL.len()] {
        self.errors
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SEQUENTIAL: Outcome = Outcome::Bypass(BypassReason::Sequential);

    fn recent(s: &mut RequestStats, seconds: u64, op: OpKind, outcome: Outcome) -> u64 {
        s.recent(Nanos::from_secs(seconds)).of(op, outcome).requests
    }

    #[test]
    fn outcomes_are_listed_by_their_index_and_differ() {
        let mut names = Vec::new();
        for (i, outcome) in Outcome::all().enumerate() {
            assert_eq!(outcome.index(), i);
            names.push((outcome.name(), outcome.reason()));
        }
        assert_eq!(names.len(), Outcome::COUNT);
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), Outcome::COUNT);
        for (i, op) in OpKind::ALL.into_iter().enumerate() {
            assert_eq!(op.index(), i);
        }
    }

    #[test]
    fn each_request_is_found_where_it_belongs() {
        let mut s = RequestStats::new(Nanos(0));
        let at = Nanos::from_ms(5);
        s.record(OpKind::Read, Outcome::Hit, Sectors(8), Nanos::from_ms(3), at);
        s.record(OpKind::Write, SEQUENTIAL, Sectors(16), Nanos(0), at);
        s.record(OpKind::Read, SEQUENTIAL, Sectors(16), Nanos(0), at);
        s.not_cached(Sectors(1), at);
        s.failed(OpKind::Flush);
        assert_eq!(s.latencies().of(OpKind::Read, Outcome::Hit).max(), Nanos::from_ms(2));
        assert_eq!(s.latencies().all_of(OpKind::Read).count(), 2);
        assert!(s.latencies().of(OpKind::Write, Outcome::Hit).is_empty());
        let total = s.total();
        assert_eq!(total.bypassed(BypassReason::Sequential), Tally { requests: 2, bytes: 16384 });
        assert_eq!(total.all_of(OpKind::Read), Tally { requests: 2, bytes: 12288 });
        assert_eq!(total.not_cached, Tally { requests: 1, bytes: 512 });
        assert_eq!(total, s.recent(at));
        assert_eq!(s.errors(), [0, 0, 1, 0]);
    }

    #[test]
    fn the_window_forgets_after_five_minutes() {
        let mut s = RequestStats::new(Nanos(0));
        let read = |s: &mut RequestStats, seconds| {
            let now = Nanos::from_secs(seconds);
            s.record(OpKind::Read, Outcome::Miss, Sectors(8), now, now);
        };
        for seconds in [0, 9, 10, 299, 300] {
            read(&mut s, seconds);
        }
        let misses = |s: &mut RequestStats, seconds| recent(s, seconds, OpKind::Read, Outcome::Miss);
        assert_eq!(misses(&mut s, 309), 5);
        assert_eq!(misses(&mut s, 310), 3, "the slot from 0 to 10 s has fallen out");
        assert_eq!(misses(&mut s, 320), 2);
        assert_eq!(misses(&mut s, 599), 2);
        assert_eq!(misses(&mut s, 605), 1);
        read(&mut s, 605);
        assert_eq!(misses(&mut s, 100_000), 0, "after a long sleep");
        read(&mut s, u64::MAX / 1_000_000_000);
        assert_eq!(misses(&mut s, u64::MAX), 1);
        assert_eq!(s.total().of(OpKind::Read, Outcome::Miss).requests, 7, "the total stays");
    }

    proptest! {
        /// The window against a list of all requests: a request counts in its slot of ten seconds and in the next thirty.
        #[test]
        fn the_window_agrees_with_a_list(
            began_ms in 0_u64..20_000,
            steps in prop::collection::vec((0_u64..60_000, 0..3, 0_usize..4, 1_u64..9), 1..80),
        ) {
            let began = Nanos::from_ms(began_ms);
            let mut s = RequestStats::new(began);
            let (mut now, mut list) = (began, Vec::new());
            for (pause_ms, kind, op, sectors) in steps {
                // Some pauses are none, and some are longer than the window.
                let ms = if pause_ms > 59_000 { (pause_ms - 59_000) * 1000 } else { pause_ms.saturating_sub(20_000) };
                now = now.after(Nanos::from_ms(ms));
                let op = OpKind::ALL[op];
                match kind {
                    0 => s.record(op, Outcome::Hit, Sectors(sectors), now, now),
                    1 => s.record(op, SEQUENTIAL, Sectors(sectors), now, now),
                    _ => s.not_cached(Sectors(sectors), now),
                }
                let slot = |at: Nanos| at.since(began).0 / SLOT.0;
                list.push((slot(now), kind, op, sectors));
                let mut expected = Tallies::default();
                for (_, kind, op, sectors) in list.iter().filter(|r| r.0 + SLOTS as u64 >= slot(now)) {
                    match kind {
                        0 => expected.count(*op, Outcome::Hit, Sectors(*sectors)),
                        1 => expected.count(*op, SEQUENTIAL, Sectors(*sectors)),
                        _ => expected.not_cached.count(Sectors(*sectors)),
                    }
                }
                prop_assert_eq!(s.recent(now), expected);
            }
        }
    }
}
