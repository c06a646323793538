//! How much of the ring is left free for the entries that free it.
//!
//! Before the pin of a leaf is released, the leaf may need an entry with a new root and one with new priorities. Owns the
//! sizes of the reserves. Must not know where entries are placed.

use super::JournalState;
use crate::canary::{Bug, bug};

/// The reserve of a large ring is at most half of it: most writes of large nodes are appends, which need no entry. The
/// reserve of a small ring, whose nodes are small too, may exceed half: keys then wait until leaves are written.
const MOST_RESERVED_BLOCKS: u64 = 1024;

impl JournalState {
    /// The number of blocks that keys leave free.
    pub(super) fn reserve_of_keys(&self) -> u64 {
        if bug(Bug::JournalWithoutReserve) {
            return 0;
        }
        self.wanted_by_leaves().min(self.most_reserved(self.ring.blocks() / 2, MOST_RESERVED_BLOCKS))
    }

    /// The number of blocks that roots leave free if they can wait.
    pub(super) fn reserve_of_roots(&self) -> u64 {
        let quarter = self.ring.blocks() / 4;
        let most = self.most_reserved(quarter, MOST_RESERVED_BLOCKS / 2);
        (2.min(quarter) + self.pins.total()).min(most)
    }

    /// The number of blocks that must be free before a leaf is replaced that does not hold the oldest entry.
    pub(super) fn reserve_of_holders(&self) -> u64 {
        self.wanted_by_leaves().min(self.ring.blocks() / 2)
    }

    /// The number of blocks that the writes of all pinned leaves may take, each for a new root and for new priorities, and a
    /// few more. These few leave room for a key in a ring of two buckets without a pinned leaf.
    fn wanted_by_leaves(&self) -> u64 {
        6.min((self.ring.blocks() / 2).saturating_sub(1)) + 2 * self.pins.total()
    }

    /// The limit of a reserve: `share` of the ring, or `small` blocks in a small ring. A leaf that waits for a bucket may wait
    /// for keys that make data clean, so these keys must not wait until leaves are written.
    fn most_reserved(&self, share: u64, small: u64) -> u64 {
        if self.bucket_waits > 0 || bug(Bug::ReserveOfHalfARing) { share } else { share.max(small) }
    }
}
