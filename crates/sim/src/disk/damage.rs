//! Damaged sectors: a read returns other contents than were written, until the block is written again.
//!
//! Owns the damaged contents of blocks. The medium stores what was written, so an image of the device has no damage. Must not
//! know which client wrote a block.

use std::collections::BTreeMap;
use std::rc::Rc;

use format::Sector;

use crate::stamp::SECTOR;

/// The damaged blocks of a medium.
#[derive(Clone, Default)]
pub(super) struct DamagedBlocks {
    /// The contents of each block by its first sector.
    blocks: BTreeMap<u64, Rc<[u8]>>,
}

fn sectors(bytes: &[u8]) -> u64 {
    (bytes.len() / SECTOR) as u64
}

impl DamagedBlocks {
    fn overlapping(&self, at: Sector, bytes: usize) -> impl Iterator<Item = (u64, &Rc<[u8]>)> {
        let end = at.0 + (bytes / SECTOR) as u64;
        let blocks = self.blocks.range(..end).map(|(start, block)| (*start, block));
        blocks.filter(move |(start, block)| start + sectors(block) > at.0)
    }

    /// Puts the damaged contents into bytes that were read from `at`.
    pub(super) fn read(&self, at: Sector, into: &mut [u8]) {
        for (start, block) in self.overlapping(at, into.len()) {
            let damaged = (start..).zip(block.chunks_exact(SECTOR));
            for (sector, bytes) in damaged.filter(|(sector, _)| *sector >= at.0) {
                let offset = (sector - at.0) as usize * SECTOR;
                if let Some(target) = into.get_mut(offset..offset + SECTOR) {
                    target.copy_from_slice(bytes);
                }
            }
        }
    }

    /// Adds a damaged block.
    pub(super) fn add(&mut self, at: Sector, bytes: &[u8]) {
        self.blocks.insert(at.0, Rc::from(bytes));
    }

    /// Ends the damage of each block of which a part is written.
    pub(super) fn wrote(&mut self, at: Sector, bytes: usize) {
        if self.blocks.is_empty() {
            return;
        }
        let gone: Vec<u64> = self.overlapping(at, bytes).map(|(start, _)| start).collect();
        gone.iter().for_each(|start| drop(self.blocks.remove(start)));
    }

    /// Ends all damage.
    pub(super) fn clear(&mut self) {
        self.blocks.clear();
    }
}
