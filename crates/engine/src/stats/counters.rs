//! Counters that grow until they are cleared.
//!
//! Owns the counts of a volume and of a cache set other than hits and misses. The names give the units: requests,
//! bytes, sectors. Counters saturate.

use format::Sectors;

/// The number of requests of one kind, and of their bytes.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct OpCount {
    /// Requests.
    pub requests: u64,
    /// Bytes.
    pub bytes: u64,
}

impl OpCount {
    /// Counts a request for `sectors`.
    pub fn count(&mut self, sectors: Sectors) {
        self.requests = self.requests.saturating_add(1);
        self.bytes = self.bytes.saturating_add(sectors.bytes());
    }
}

/// The requests to a volume, on whatever path they were served.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct RequestCounters {
    /// Reads.
    pub reads: OpCount,
    /// Writes, including writes of zeros.
    pub writes: OpCount,
    /// Discards.
    pub discards: OpCount,
    /// Flushes, whether on their own or with a write.
    pub flushes: u64,
    /// Reads and writes that the client marked as metadata of a file system.
    pub metadata: OpCount,
}

impl RequestCounters {
    /// Counts a read or write of metadata. Such requests are rare, so the function is not inlined.
    #[cold]
    #[inline(never)]
    pub fn count_metadata(&mut self, sectors: Sectors) {
        self.metadata.count(sectors);
    }

    /// Counts a flush.
    pub fn flush(&mut self) {
        self.flushes = self.flushes.saturating_add(1);
    }

    /// Sets everything to zero.
    pub fn clear(&mut self) {
        *self = RequestCounters::default();
    }
}

/// The internal counts of a cache set; the names are the kernel's (semantics section 16.3, semantics section 16.4).
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct SetCounters {
    /// Data written to the cache device.
    pub written: Sectors,
    /// Btree nodes written to the cache device.
    pub btree_written: Sectors,
    /// Btree nodes, journal entries, prio sets and the UUID table written to the cache device.
    pub metadata_written: Sectors,
    /// Reads whose bucket was reused during the read.
    pub cache_read_races: u64,
    /// Keys that became clean by writeback.
    pub writeback_keys_done: u64,
    /// Keys that were overwritten while they were written back.
    pub writeback_keys_failed: u64,
    /// Runs that were written back together with the gaps between their dirty extents.
    pub writeback_bridged_runs: u64,
    /// Data that was read from the backing device for these gaps.
    pub writeback_bridge_read: Sectors,
    /// Data in gaps that was written with these runs.
    pub writeback_bridge_written: Sectors,
    /// Attempts to free space of the journal.
    pub reclaim: u64,
    /// Journal buckets that became free.
    pub reclaimed_journal_buckets: u64,
    /// Btree nodes written because they pinned the journal.
    pub flush_write: u64,
}

impl SetCounters {
    /// Counts data written to the cache device.
    pub fn count_written(&mut self, sectors: Sectors) {
        add(&mut self.written, sectors);
    }

    /// Counts the write of a btree node, which is metadata, too.
    pub fn count_btree_written(&mut self, sectors: Sectors) {
        add(&mut self.btree_written, sectors);
        add(&mut self.metadata_written, sectors);
    }

    /// Counts the write of metadata other than btree nodes.
    pub fn count_metadata_written(&mut self, sectors: Sectors) {
        add(&mut self.metadata_written, sectors);
    }

    /// Counts a run of writeback with gaps: the sectors that were read from the backing device for it, and the sectors
    /// of gaps that were written.
    pub fn count_bridged(&mut self, read: Sectors, gaps: Sectors) {
        self.writeback_bridged_runs = self.writeback_bridged_runs.saturating_add(1);
        add(&mut self.writeback_bridge_read, read);
        add(&mut self.writeback_bridge_written, gaps);
    }

    /// Clears the counts of writeback keys, as `clear_stats` of a set does (semantics section 13).
    pub fn clear_for_set(&mut self) {
        self.writeback_keys_done = 0;
        self.writeback_keys_failed = 0;
    }

    /// Clears the counts of written sectors, as `clear_stats` of a cache device does (semantics section 13).
    pub fn clear_for_cache_device(&mut self) {
        self.written = Sectors::ZERO;
        self.btree_written = Sectors::ZERO;
        self.metadata_written = Sectors::ZERO;
    }
}

fn add(counter: &mut Sectors, sectors: Sectors) {
    counter.0 = counter.0.saturating_add(sectors.0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_and_bytes_are_counted_and_cleared() {
        let mut c = RequestCounters::default();
        c.writes.count(Sectors(8));
        c.writes.count(Sectors(1));
        c.count_metadata(Sectors(1));
        c.flush();
        assert_eq!(c.writes, OpCount { requests: 2, bytes: 4608 });
        assert_eq!(c.metadata, OpCount { requests: 1, bytes: 512 });
        assert_eq!((c.reads, c.flushes), (OpCount::default(), 1));
        c.writes.count(Sectors(u64::MAX));
        assert_eq!(c.writes.bytes, u64::MAX, "saturated");
        c.clear();
        assert_eq!(c, RequestCounters::default());
    }

    #[test]
    fn runs_over_gaps_are_counted() {
        let mut c = SetCounters::default();
        c.count_bridged(Sectors(8), Sectors(24));
        c.count_bridged(Sectors(0), Sectors(3));
        let expected = SetCounters {
            writeback_bridged_runs: 2,
            writeback_bridge_read: Sectors(8),
            writeback_bridge_written: Sectors(27),
            ..SetCounters::default()
        };
        assert_eq!(c, expected);
        c.clear_for_set();
        c.clear_for_cache_device();
        assert_eq!(c, expected, "neither clears these");
        c.count_bridged(Sectors(u64::MAX), Sectors(u64::MAX));
        assert_eq!(
            (c.writeback_bridge_read, c.writeback_bridge_written),
            (Sectors(u64::MAX), Sectors(u64::MAX))
        );
        let mut r = RequestCounters { flushes: u64::MAX, ..RequestCounters::default() };
        r.flush();
        assert_eq!(r.flushes, u64::MAX);
    }

    #[test]
    fn each_clear_has_its_part() {
        let mut c = SetCounters::default();
        c.count_written(Sectors(100));
        c.count_btree_written(Sectors(10));
        c.count_metadata_written(Sectors(1));
        assert_eq!(
            (c.written, c.btree_written, c.metadata_written),
            (Sectors(100), Sectors(10), Sectors(11))
        );
        c.writeback_keys_done = 7;
        c.writeback_keys_failed = 8;
        c.cache_read_races = 9;
        let mut of_set = c;
        of_set.clear_for_set();
        assert_eq!(of_set, SetCounters { writeback_keys_done: 0, writeback_keys_failed: 0, ..c });
        let before = c;
        c.clear_for_cache_device();
        let none = Sectors(0);
        assert_eq!(c, SetCounters { written: none, btree_written: none, metadata_written: none, ..before });
    }
}
