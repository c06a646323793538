//! The figures of checksums: what was verified, what cannot be, what is damaged, and the scrub.
//!
//! Owns the names of these figures. Must not know when data is verified.

use engine::{CacheSet, DamagedRange, ScrubFigures as EngineScrub, ScrubReport as EngineReport};
use serde::Serialize;

/// The checksums of a set that has them.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct ChecksumFigures {
    /// Size of a block, each of which has a checksum.
    pub block_bytes: u64,
    /// Blocks that matched their checksum when they were read, since the start.
    pub verified_blocks: u64,
    /// Blocks that were read without a known checksum, since the start.
    pub read_unverified_blocks: u64,
    /// Damaged blocks that were found since the start, clean and dirty.
    pub damaged_blocks: u64,
    /// Blocks that did not match, and matched when they were read a second time, since the start.
    pub corrected_blocks: u64,
    /// Blocks that got a checksum from a scrub, since the start.
    pub learnt_blocks: u64,
    /// Blocks of live data without a known checksum, in buckets whose footer was read or written since the start.
    pub unverified_blocks: u64,
    /// Blocks of live data in buckets whose footer was neither read nor written since the start.
    pub unread_blocks: u64,
    /// Dirty data that is damaged now, in bytes.
    pub damaged_dirty_bytes: u64,
    /// The first of these ranges, at most `MOST_RANGES`.
    pub damaged: Vec<DamagedFigures>,
    /// The scrub.
    pub scrub: ScrubFigures,
}

/// The number of damaged ranges in the figures of a set; `ubcache damaged` lists all.
pub const MOST_RANGES: usize = 16;

/// Damaged dirty data without a gap.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct DamagedFigures {
    /// Label or name of the volume. Of a device that is not registered: its label or UUID.
    pub volume: String,
    /// Slot in the set.
    pub slot: u32,
    /// Whether the device is registered. If not, `sector` is the position on the device itself.
    pub registered: bool,
    /// The first damaged sector of the volume.
    pub sector: u64,
    /// Number of sectors.
    pub sectors: u64,
}

impl From<DamagedRange> for DamagedFigures {
    fn from(r: DamagedRange) -> DamagedFigures {
        DamagedFigures {
            volume: r.device,
            slot: r.inode.0,
            registered: r.is_registered,
            sector: r.sector.0,
            sectors: r.sectors.0,
        }
    }
}

/// The scrub under way, and the last ones.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct ScrubFigures {
    /// Whether a scrub is under way.
    pub running: bool,
    /// Live data that it has passed, in bytes.
    pub done_bytes: u64,
    /// Live data at its begin, in bytes.
    pub total_bytes: u64,
    /// Unix time at which the last complete scrub ended; `None` if there was none.
    pub completed_unix_seconds: Option<u64>,
    /// Whether an unfinished scrub is to continue.
    pub unfinished: bool,
    /// What the scrub under way, or the last one since the start, has found.
    pub report: Scrubbed,
}

impl From<EngineScrub> for ScrubFigures {
    fn from(s: EngineScrub) -> ScrubFigures {
        ScrubFigures {
            running: s.running,
            done_bytes: s.done.bytes(),
            total_bytes: s.total.bytes(),
            completed_unix_seconds: s.completed_unix_seconds,
            unfinished: s.is_unfinished,
            report: s.report.into(),
        }
    }
}

/// The result of a scrub, in blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Scrubbed {
    /// Blocks that matched their checksum.
    pub verified_blocks: u64,
    /// Blocks that had no checksum and have one now.
    pub learnt_blocks: u64,
    /// Blocks that have no checksum still.
    pub unverified_blocks: u64,
    /// Damaged blocks of clean data, which were dropped from the cache.
    pub damaged_clean_blocks: u64,
    /// Damaged blocks of dirty data.
    pub damaged_dirty_blocks: u64,
    /// Blocks that the cache device could not read.
    pub unreadable_blocks: u64,
}

impl From<EngineReport> for Scrubbed {
    fn from(r: EngineReport) -> Scrubbed {
        Scrubbed {
            verified_blocks: r.verified_blocks,
            learnt_blocks: r.learnt_blocks,
            unverified_blocks: r.unverified_blocks,
            damaged_clean_blocks: r.damaged_clean_blocks,
            damaged_dirty_blocks: r.damaged_dirty_blocks,
            unreadable_blocks: r.unreadable_blocks,
        }
    }
}

impl ChecksumFigures {
    /// The figures of a set; `None` if its data has no checksums.
    pub(super) fn of(set: &CacheSet) -> Option<ChecksumFigures> {
        if !set.has_checksums() {
            return None;
        }
        let (counters, coverage) = (set.checksum_counters(), set.checksum_coverage());
        let damaged = set.damaged();
        Some(ChecksumFigures {
            block_bytes: set.block_sectors().bytes(),
            verified_blocks: counters.verified_blocks,
            read_unverified_blocks: counters.unverified_blocks,
            damaged_blocks: counters.damaged_blocks,
            corrected_blocks: counters.corrected_blocks,
            learnt_blocks: counters.learnt_blocks,
            unverified_blocks: coverage.unverified_blocks,
            unread_blocks: coverage.unread_blocks,
            damaged_dirty_bytes: damaged.iter().map(|d| d.sectors.bytes()).sum(),
            damaged: damaged.into_iter().take(MOST_RANGES).map(DamagedFigures::from).collect(),
            scrub: set.scrub_figures().into(),
        })
    }
}
