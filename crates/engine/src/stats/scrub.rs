//! The report of a scrub.
//!
//! Owns its numbers. Must not know how a scrub reads data.

/// What a scrub has done, in blocks of the set.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct ScrubReport {
    /// Blocks that matched their checksum.
    pub verified_blocks: u64,
    /// Blocks that had no known checksum and have one now.
    pub learnt_blocks: u64,
    /// Blocks that have no checksum still: they were written during the scrub, or their bucket has no room for a footer.
    pub unverified_blocks: u64,
    /// Damaged blocks of clean data, which were invalidated.
    pub damaged_clean_blocks: u64,
    /// Damaged blocks of dirty data, which are listed.
    pub damaged_dirty_blocks: u64,
    /// Blocks that the device could not read.
    pub unreadable_blocks: u64,
}

impl ScrubReport {
    /// The number of damaged and unreadable blocks.
    pub fn problems(&self) -> u64 {
        self.damaged_clean_blocks + self.damaged_dirty_blocks + self.unreadable_blocks
    }
}
