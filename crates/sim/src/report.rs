//! Counts of the events of runs.

use io::Nanos;

use crate::disk::{Counters, Landmark};

/// The costs of a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Cost {
    /// Requests to the cache device.
    pub cache: Counters,
    /// Requests to the backing devices.
    pub backing: Counters,
    /// When the last boot ended.
    pub ended: Nanos,
}

/// Counts of events in one run or in many.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Report {
    /// Runs.
    pub runs: u64,
    /// Times that the machine was switched on.
    pub boots: u64,
    /// Crashes, of any kind: each is followed by a recovery, or by another crash in it.
    pub crashes: u64,
    /// Crashes while the set was being opened.
    pub in_recovery: u64,
    /// Crashes while the set was being opened after such a crash.
    pub in_second_recovery: u64,
    /// Power cuts of all devices.
    pub power_cuts: u64,
    /// Power cuts of the cache device alone, or the backing devices alone.
    pub partial_cuts: u64,
    /// Deaths of the process.
    pub kills: u64,
    /// Orderly stops.
    pub stops: u64,
    /// Boots without the cache.
    pub alone: u64,
    /// Boots in which a backing device was not there.
    pub absent: u64,
    /// Boots with failing devices.
    pub with_errors: u64,
    /// Boots at whose end the set had failed.
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
    /// Runs of writeback that went over gaps.
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
    /// Crashes at such a moment.
    pub crashes_when_full: u64,
    /// Crashes while no bucket of the journal was free.
    pub crashes_in_full_journal: u64,
    /// Times that a new btree node had to wait for a bucket.
    pub btree_waits: u64,
    /// Buckets whose generation went around.
    pub gen_wraps: u64,
    /// Boots with settings, or a mode, other than those of the boot before.
    pub changed_settings: u64,
    /// Boots with sectors that cannot be read, of the cache device or a backing device.
    pub unreadable: u64,
    /// Boots in which a device goes away, and how many of these see it come back.
    pub outages: u64,
    /// See `outages`.
    pub outages_that_end: u64,
    /// Substituted cache devices.
    pub substitutes: u64,
    /// Deaths of the process after which everything that was answered had to be there.
    pub strict_kills: u64,
    /// Crashes at a landmark.
    pub aimed: u64,
    /// Boots in which a backing device hung, and the others did not wait for it.
    pub hangs: u64,
    /// How often each landmark was reached, in the order of [`Landmark::ALL`].
    pub landmarks: [u64; Landmark::ALL.len()],
    /// Hash of everything that happened; of one run.
    pub hash: u64,
    /// The random number that would have come next; of one run.
    pub next_random: u64,
}

impl Report {
    /// Adds the counts of another run.
    pub fn add(&mut self, other: &Report) {
        self.runs += other.runs;
        self.boots += other.boots;
        self.crashes += other.crashes;
        self.in_recovery += other.in_recovery;
        self.in_second_recovery += other.in_second_recovery;
        self.power_cuts += other.power_cuts;
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
        self.aimed += other.aimed;
        self.hangs += other.hangs;
        for (mine, theirs) in self.landmarks.iter_mut().zip(other.landmarks) {
            *mine += theirs;
        }
        self.hash ^= other.hash;
        self.next_random ^= other.next_random;
    }
}
