//! The benchmarks, one file each.

mod alone;
mod drain;
mod files;
mod foreground;
mod hits;
mod nbd;
mod start;
mod sync_writes;

use clap::ValueEnum;

pub use alone::OCF;
pub use nbd::NBDKIT;

use crate::machine::Lab;
use crate::result::Results;
use crate::subject::Subject;

/// A benchmark.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Job {
    /// Random reads that hit
    B1,
    /// Random writes into the cache
    B2,
    /// Synchronous writes, three times the cache, until it is full and beyond
    B3,
    /// Files of a filesystem, random reads and writes, default settings
    B4,
    /// Writing back random dirty blocks
    B5,
    /// Foreground latency while everything is written back
    B6,
    /// The engine alone, counted
    B7,
    /// Start after a kill
    B8,
    /// NBD over a unix socket
    B9,
}

impl Job {
    /// In the order of tables.
    pub const ALL: &[Job] =
        &[Job::B1, Job::B2, Job::B3, Job::B4, Job::B5, Job::B6, Job::B7, Job::B8, Job::B9];

    /// Its name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Job::B1 => "B1",
            Job::B2 => "B2",
            Job::B3 => "B3",
            Job::B4 => "B4",
            Job::B5 => "B5",
            Job::B6 => "B6",
            Job::B7 => "B7",
            Job::B8 => "B8",
            Job::B9 => "B9",
        }
    }

    /// Whether it runs on this machine, without a virtual one; its contenders are others then.
    pub fn is_on_host(self) -> bool {
        matches!(self, Job::B7 | Job::B9)
    }

    /// Whether it says anything about this contender.
    pub fn suits(self, subject: Subject) -> bool {
        match self {
            Job::B1 | Job::B2 | Job::B3 | Job::B4 => true,
            Job::B5 | Job::B6 => subject.caches(),
            Job::B8 => matches!(subject, Subject::Bcache | Subject::Ubcache),
            Job::B7 | Job::B9 => false,
        }
    }

    /// Runs it once, with this contender.
    pub fn run(self, lab: &mut Lab, subject: Subject, results: &mut Results) {
        match self {
            Job::B1 => hits::reads(lab, subject, results),
            Job::B2 => hits::writes(lab, subject, results),
            Job::B3 => sync_writes::run(lab, subject, results),
            Job::B4 => files::run(lab, subject, results),
            Job::B5 => drain::run(lab, subject, results),
            Job::B6 => foreground::run(lab, subject, results),
            Job::B8 => start::run(lab, subject, results),
            Job::B7 | Job::B9 => {}
        }
    }

    /// Runs it once, with all its contenders, on this machine.
    pub fn run_on_host(self, results: &mut Results) {
        match self {
            Job::B7 => alone::run(results),
            Job::B9 => nbd::run(results),
            _ => {}
        }
    }
}
