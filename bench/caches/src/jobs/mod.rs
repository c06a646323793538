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

/// How a benchmark runs once.
pub enum Work {
    /// In the virtual machine, with one contender.
    InMachine(fn(&mut Lab, Subject, &mut Results)),
    /// On this machine; its contenders are others, and all of them take part.
    OnHost(fn(&mut Results)),
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

    /// Whether it says anything about this contender of those in the virtual machine.
    pub fn suits(self, subject: Subject) -> bool {
        match self {
            Job::B1 | Job::B2 | Job::B3 | Job::B4 => true,
            Job::B5 | Job::B6 => subject.caches(),
            Job::B8 => matches!(subject, Subject::Bcache | Subject::Ubcache),
            Job::B7 | Job::B9 => false,
        }
    }

    /// What to do.
    pub fn work(self) -> Work {
        match self {
            Job::B1 => Work::InMachine(hits::reads),
            Job::B2 => Work::InMachine(hits::writes),
            Job::B3 => Work::InMachine(sync_writes::run),
            Job::B4 => Work::InMachine(files::run),
            Job::B5 => Work::InMachine(drain::run),
            Job::B6 => Work::InMachine(foreground::run),
            Job::B7 => Work::OnHost(alone::run),
            Job::B8 => Work::InMachine(start::run),
            Job::B9 => Work::OnHost(nbd::run),
        }
    }
}
