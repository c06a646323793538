//! The damaged blocks of dirty data: blocks that did not match their checksum, and that no other device has.
//!
//! Owns the list. Must not know the index: an entry can be obsolete because the data was overwritten meanwhile.

use std::collections::BTreeMap;
use std::ops::Bound::{Excluded, Unbounded};

use format::{Inode, Ptr, Sector, Sectors};

/// A damaged block of dirty data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct DamagedBlock {
    /// The device whose data it is, and the position on it.
    pub(crate) at: (Inode, Sector),
    pub(crate) size: Sectors,
    /// The place on the cache device.
    pub(crate) ptr: Ptr,
}

/// Damaged blocks by their place on the cache device.
#[derive(Default)]
pub(super) struct DamagedBlocks {
    blocks: BTreeMap<Sector, DamagedBlock>,
}

/// The first part of an extent: how many sectors it has, and whether they are damaged.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Part {
    pub(crate) sectors: Sectors,
    pub(crate) is_damaged: bool,
}

impl DamagedBlocks {
    /// Adds a block; returns whether it is new.
    pub(super) fn add(&mut self, block: DamagedBlock) -> bool {
        self.blocks.insert(block.ptr.offset(), block) != Some(block)
    }

    pub(super) fn remove(&mut self, block: &DamagedBlock) {
        if self.blocks.get(&block.ptr.offset()) == Some(block) {
            self.blocks.remove(&block.ptr.offset());
        }
    }

    /// Removes the blocks that were overwritten in their place.
    pub(super) fn overwrote(&mut self, at: Ptr, sectors: Sectors) {
        let end = at.offset() + sectors;
        self.blocks.retain(|_, b| {
            let is_other = b.ptr.generation() != at.generation();
            is_other || b.ptr.offset() >= end || b.ptr.offset() + b.size <= at.offset()
        });
    }

    /// Whether a block in `[start, end)` is damaged that is not a part of `[but.0, but.1)`.
    pub(super) fn has_other(&self, (start, end): (Sector, Sector), but: (Sector, Sector)) -> bool {
        let is_other = |b: &DamagedBlock| b.ptr.offset() < but.0 || b.ptr.offset() + b.size > but.1;
        self.blocks.range(start..end).any(|(_, b)| is_other(b))
    }

    pub(super) fn all(&self) -> Vec<DamagedBlock> {
        self.blocks.values().copied().collect()
    }

    /// The first part of the extent at `ptr` that is damaged, or that is not, as a whole.
    pub(super) fn first_part(&self, ptr: Ptr, size: Sectors) -> Part {
        let (start, end) = (ptr.offset(), ptr.offset() + size);
        let is_same = |b: &&DamagedBlock| b.ptr.generation() == ptr.generation();
        let before = self.blocks.range(..=start).next_back().map(|(_, b)| b).filter(is_same);
        if let Some(b) = before.filter(|b| b.ptr.offset() + b.size > start) {
            let sectors = (b.ptr.offset() + b.size).min(end) - start;
            return Part { sectors, is_damaged: true };
        }
        let mut behind = self.blocks.range((Excluded(start), Unbounded)).map(|(_, b)| b);
        let next = behind.find(is_same).map_or(end, |b| b.ptr.offset().min(end));
        Part { sectors: next - start, is_damaged: false }
    }
}

#[cfg(test)]
mod tests {
    use format::Gen;

    use super::*;

    fn block(at: u64, generation: u8) -> DamagedBlock {
        let ptr = Ptr::new(0, Sector(at), Gen(generation));
        DamagedBlock { at: (Inode(1), Sector(1000 + at)), size: Sectors(8), ptr }
    }

    #[test]
    fn other_damaged_blocks_of_a_bucket() {
        let mut blocks = DamagedBlocks::default();
        blocks.add(block(16, 1));
        let other =
            |but: (u64, u64)| blocks.has_other((Sector(0), Sector(64)), (Sector(but.0), Sector(but.1)));
        assert!(other((0, 8)) && other((24, 32)) && other((16, 20)));
        assert!(!other((16, 24)) && !other((8, 32)));
        assert!(!blocks.has_other((Sector(64), Sector(128)), (Sector(64), Sector(72))));
    }

    #[test]
    fn an_extent_is_cut_at_damaged_blocks() {
        let mut blocks = DamagedBlocks::default();
        assert!(blocks.add(block(16, 3)) && blocks.add(block(24, 3)) && blocks.add(block(48, 3)));
        assert!(!blocks.add(block(16, 3)), "it is known");
        let parts = |start: u64, size: u64, generation| {
            let (mut at, mut left, mut parts) = (start, size, Vec::new());
            while left > 0 {
                let ptr = Ptr::new(0, Sector(at), Gen(generation));
                let part = blocks.first_part(ptr, Sectors(left));
                parts.push((part.sectors.0, part.is_damaged));
                (at, left) = (at + part.sectors.0, left - part.sectors.0);
            }
            parts
        };
        assert_eq!(parts(0, 16, 3), [(16, false)]);
        assert_eq!(parts(0, 64, 3), [(16, false), (8, true), (8, true), (16, false), (8, true), (8, false)]);
        assert_eq!(parts(20, 8, 3), [(4, true), (4, true)]);
        assert_eq!(parts(32, 17, 3), [(16, false), (1, true)]);
        assert_eq!(parts(0, 64, 4), [(64, false)], "the bucket was reused");
        blocks.remove(&block(24, 3));
        blocks.remove(&DamagedBlock { size: Sectors(4), ..block(16, 3) });
        assert_eq!(blocks.all(), [block(16, 3), block(48, 3)]);
    }

    #[test]
    fn an_overwritten_block_counts_as_damaged_no_longer() {
        let overwritten = |at: u64, sectors, generation| {
            let mut blocks = DamagedBlocks::default();
            for start in [16, 24, 48] {
                blocks.add(block(start, 3));
            }
            blocks.overwrote(Ptr::new(0, Sector(at), Gen(generation)), Sectors(sectors));
            blocks.all().iter().map(|b| b.ptr.offset().0).collect::<Vec<_>>()
        };
        assert_eq!(overwritten(24, 8, 3), [16, 48]);
        assert_eq!(overwritten(23, 2, 3), [48]);
        assert_eq!(overwritten(32, 16, 3), [16, 24, 48], "between them");
        assert_eq!(overwritten(31, 18, 3), [16]);
        assert_eq!(overwritten(0, 64, 4), [16, 24, 48], "another generation");
    }
}
