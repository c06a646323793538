//! Settings of a simulated disk: the duration of requests, failures, and what survives a power loss.
//!
//! Owns the types. Must not know the behaviour of a disk.

use std::ops::Range;

use io::{Nanos, Op, Request, Rng};
use serde::{Deserialize, Serialize};

/// The duration of requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Speed {
    /// Shortest duration.
    #[serde(with = "crate::nanos")]
    pub base: Nanos,
    /// Range of the random addition.
    #[serde(with = "crate::nanos")]
    pub spread: Nanos,
    /// One in this many requests takes `slow`; 0 for none.
    pub slow_one_in: u64,
    /// Duration of a slow request.
    #[serde(with = "crate::nanos")]
    pub slow: Nanos,
    /// Additional duration of writes to btree nodes, with which the journal fills up.
    #[serde(default, with = "crate::nanos")]
    pub nodes: Nanos,
}

impl Speed {
    /// All requests have the same duration.
    pub const fn even(micros: u64) -> Speed {
        Speed {
            base: Nanos(micros * 1000),
            spread: Nanos(0),
            slow_one_in: 0,
            slow: Nanos(0),
            nodes: Nanos(0),
        }
    }

    pub(super) fn draw(&self, rng: &mut Rng) -> Nanos {
        if self.slow_one_in > 0 && rng.chance(1, self.slow_one_in) {
            return self.slow;
        }
        Nanos(self.base.0 + rng.below(self.spread.0 + 1))
    }
}

/// Kinds of requests, for faults and holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Reads.
    Read,
    /// Writes without FUA, and writes of zeros.
    Write,
    /// Writes with FUA.
    DurableWrite,
    /// Flushes.
    Flush,
    /// Discards.
    Discard,
}

impl Kind {
    fn of(op: Op) -> Kind {
        match op {
            Op::Read => Kind::Read,
            Op::Write { fua: false } | Op::WriteZeroes { .. } => Kind::Write,
            Op::Write { fua: true } => Kind::DurableWrite,
            Op::Flush => Kind::Flush,
            Op::Discard => Kind::Discard,
        }
    }
}

/// Requests of one kind that touch a range. A flush touches every range.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Matching {
    /// The kind.
    pub kind: Kind,
    /// The sectors.
    pub range: Range<u64>,
}

impl Matching {
    /// Matches all requests of a kind.
    pub const fn all(kind: Kind) -> Matching {
        Matching { kind, range: 0..u64::MAX }
    }

    pub(super) fn matches(&self, r: &Request) -> bool {
        let end = r.sector.0 + r.sectors.0;
        let touches = r.sector.0 < self.range.end && self.range.start < end;
        Kind::of(r.op) == self.kind && (r.op == Op::Flush || touches)
    }
}

/// A fault: requests that fail.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Fault {
    /// The requests that count.
    pub matching: Matching,
    /// Number of the requests that succeed first.
    pub skip: u32,
    /// Number of the requests that fail after that.
    pub count: u32,
}

/// What a disk retains of data that is not durable when its power fails.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Retained {
    /// The disk retains nothing.
    Nothing,
    /// The disk retains all data that took effect, and every request in flight.
    Everything,
    /// The disk retains each block with a probability of this number in eight.
    Some(u64),
}

/// Counts of requests.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Counters {
    /// Number of reads.
    pub reads: u64,
    /// Number of writes without FUA.
    pub writes: u64,
    /// Number of writes with FUA.
    pub durable_writes: u64,
    /// Number of flushes.
    pub flushes: u64,
    /// Number of discards and writes of zeros.
    pub plain: u64,
    /// Number of sectors written.
    pub sectors_written: u64,
    /// Number of requests that failed by a fault.
    pub failed: u64,
    /// Number of flushes among them.
    pub failed_flushes: u64,
}

impl Counters {
    /// Adds the counts of another disk.
    pub fn add(&mut self, other: &Counters) {
        self.reads += other.reads;
        self.writes += other.writes;
        self.durable_writes += other.durable_writes;
        self.flushes += other.flushes;
        self.plain += other.plain;
        self.sectors_written += other.sectors_written;
        self.failed += other.failed;
        self.failed_flushes += other.failed_flushes;
    }
}
