//! Counts of the events of runs.
//!
//! Owns the counts. Must not know how an event happens.

use io::Nanos;

use crate::disk::{Counters, Landmark};
use crate::session::Counts;

/// The costs of a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Cost {
    /// Requests to the cache device.
    pub cache: Counters,
    /// Requests to the backing devices.
    pub backing: Counters,
    /// Time of the end of the last boot.
    pub ended: Nanos,
}

/// Counts of events in one run or in many.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Report {
    /// Number of runs.
    pub runs: u64,
    /// Number of boots.
    pub boots: u64,
    /// Number of crashes of any kind. Each is followed by a recovery, or by another crash during the recovery.
    pub crashes: u64,
    /// Crashes while the set was being opened.
    pub in_recovery: u64,
    /// Crashes while the set was being opened after such a crash.
    pub in_second_recovery: u64,
    /// Power losses of all devices.
    pub power_losses: u64,
    /// Power losses of the cache device alone, or of the backing devices alone.
    pub partial_cuts: u64,
    /// Process crashes.
    pub kills: u64,
    /// Orderly stops.
    pub stops: u64,
    /// Boots without the cache.
    pub alone: u64,
    /// Boots in which a backing device was absent.
    pub absent: u64,
    /// Boots with failing devices.
    pub with_errors: u64,
    /// Boots at whose end the set was disabled.
    pub set_failures: u64,
    /// Requests of clients.
    pub requests: u64,
    /// Effects of devices.
    pub effects: u64,
    /// Detaches.
    pub detaches: u64,
    /// Walks of the index.
    pub gc_runs: u64,
    /// Extents moved.
    pub moved: u64,
    /// Extents copied to another bucket because they were read.
    pub promoted: u64,
    /// Runs of writeback that bridged gaps.
    pub bridged: u64,
    /// Priority chains written.
    pub prio_writes: u64,
    /// Btree nodes replaced.
    pub rewrites: u64,
    /// Btree nodes read after they had been dropped from memory.
    pub node_reads: u64,
    /// Journal entries written.
    pub journal_entries: u64,
    /// Boots at whose end the index had more than one node.
    pub trees: u64,
    /// Boots at whose end more than 80 % of the cache was in use.
    pub full: u64,
    /// Crashes while more than 80 % of the cache was in use.
    pub crashes_when_full: u64,
    /// Crashes while no bucket of the journal was free.
    pub crashes_in_full_journal: u64,
    /// Times that a new btree node had to wait for a bucket.
    pub btree_waits: u64,
    /// Buckets whose generation wrapped around.
    pub gen_wraps: u64,
    /// Boots with other settings, or another mode, than the boot before.
    pub changed_settings: u64,
    /// Boots with unreadable sectors, of the cache device or of a backing device.
    pub unreadable: u64,
    /// Boots in which a device failed every request for a while.
    pub outages: u64,
    /// Boots in which such a device worked again.
    pub outages_that_end: u64,
    /// Substituted cache devices.
    pub substitutes: u64,
    /// Process crashes after which all acknowledged changes had to be present.
    pub strict_kills: u64,
    /// Those of them in boots with faults.
    pub strict_kills_with_faults: u64,
    /// Crashes at a landmark.
    pub aimed: u64,
    /// Boots in which a backing device hung, and requests to other devices did not wait for it.
    pub hangs: u64,
    /// Writes to the volume of a hung device that may not wait for the device.
    pub free_writes: u64,
    /// Flushes of that volume that may not wait for the device.
    pub free_flushes: u64,
    judged_blocks: u64,
    /// The number of occurrences of each landmark, in the order of [`Landmark::ALL`].
    pub landmarks: [u64; Landmark::ALL.len()],
    /// Hash of all events of one run.
    pub hash: u64,
    /// The next random number after the end of one run, which is equal for equal runs.
    pub next_random: u64,
}

impl Report {
    /// The report of a run that begins.
    pub fn of_one_run() -> Report {
        Report { runs: 1, ..Report::default() }
    }

    /// Counts blocks of cached data that a judge compared with their checksums.
    pub fn add_judged_blocks(&mut self, n: u64) {
        self.judged_blocks += n;
    }

    /// Blocks of cached data that a judge compared with their checksums after a crash or at the end.
    pub fn judged_blocks(&self) -> u64 {
        self.judged_blocks
    }

    /// Adds the counts of a boot.
    pub fn add_boot(&mut self, boot: &Counts) {
        self.requests += boot.requests;
        self.detaches += boot.detaches;
        self.free_writes += boot.free_writes;
        self.free_flushes += boot.free_flushes;
    }

    /// Adds the counts of another run.
    pub fn add(&mut self, other: &Report) {
        self.runs += other.runs;
        self.boots += other.boots;
        self.crashes += other.crashes;
        self.in_recovery += other.in_recovery;
        self.in_second_recovery += other.in_second_recovery;
        self.power_losses += other.power_losses;
        self.partial_cuts += other.partial_cuts;
        self.kills += other.kills;
        self.stops += other.stops;
        self.alone += other.alone;
        self.absent += other.absent;
        self.with_errors += other.with_errors;
        self.set_failures += other.set_failures;
        self.requests += other.requests;
        self.effects += other.effects;
        self.detaches += other.detaches;
        self.gc_runs += other.gc_runs;
        self.moved += other.moved;
        self.promoted += other.promoted;
        self.bridged += other.bridged;
        self.prio_writes += other.prio_writes;
        self.rewrites += other.rewrites;
        self.node_reads += other.node_reads;
        self.journal_entries += other.journal_entries;
        self.trees += other.trees;
        self.full += other.full;
        self.crashes_when_full += other.crashes_when_full;
        self.crashes_in_full_journal += other.crashes_in_full_journal;
        self.btree_waits += other.btree_waits;
        self.gen_wraps += other.gen_wraps;
        self.changed_settings += other.changed_settings;
        self.unreadable += other.unreadable;
        self.outages += other.outages;
        self.outages_that_end += other.outages_that_end;
        self.substitutes += other.substitutes;
        self.strict_kills += other.strict_kills;
        self.strict_kills_with_faults += other.strict_kills_with_faults;
        self.aimed += other.aimed;
        self.hangs += other.hangs;
        self.free_writes += other.free_writes;
        self.free_flushes += other.free_flushes;
        self.judged_blocks += other.judged_blocks;
        for (mine, theirs) in self.landmarks.iter_mut().zip(other.landmarks) {
            *mine += theirs;
        }
        self.hash ^= other.hash;
        self.next_random ^= other.next_random;
    }
}
