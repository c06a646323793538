//! Whole blocks around and inside a range of sectors.
//!
//! A device accesses whole blocks, and the cache keeps whole blocks. So a request is widened to the blocks around it, or
//! reduced to the blocks inside it. Owns this arithmetic. Must not know what a path does with the blocks.
//!
//! A range is a pair of its first sector and the sector after its last one. It is not empty.

use format::{Geometry, Sector, Sectors};
use io::Disk;

use super::{Cache, Volume};

/// A size of blocks, in sectors; at least 1.
#[derive(Clone, Copy)]
pub(crate) struct Blocks(u64);

/// A range divided at block boundaries.
pub(super) struct Split {
    /// The whole blocks inside the range, if there is one.
    pub(super) whole: Option<(Sector, Sector)>,
    /// The parts before and behind the whole blocks; one of them is the range itself if it has no whole block.
    edges: [(Sector, Sector); 2],
}

impl Split {
    /// The parts of the range that are not whole blocks, from its begin to its end.
    pub(super) fn edges(&self) -> impl Iterator<Item = (Sector, Sector)> + use<> {
        self.edges.into_iter().filter(|(start, end)| start < end)
    }
}

impl Blocks {
    /// Blocks of this size. A device that states no size has blocks of one sector.
    pub(crate) fn of_size(block: Sectors) -> Blocks {
        Blocks(block.0.max(1))
    }

    /// The blocks in which a cache device keeps data.
    pub(crate) fn of(geometry: &Geometry) -> Blocks {
        Blocks::of_size(geometry.block_sectors)
    }

    /// The logical blocks of a device, the smallest that it accesses.
    pub(crate) fn of_disk(disk: &Disk) -> Blocks {
        Blocks::of_size(Sectors::from_bytes_floor(u64::from(disk.info().logical_block_bytes)))
    }

    /// The larger of both sizes. Whole blocks of it are whole blocks of both, because sizes are powers of two.
    pub(super) fn max(self, other: Blocks) -> Blocks {
        Blocks(self.0.max(other.0))
    }

    /// The part of a size that is whole blocks.
    pub(crate) fn whole(self, size: Sectors) -> Sectors {
        Sectors(size.0 / self.0 * self.0)
    }

    /// Whether a range is whole blocks.
    pub(crate) fn are_whole(self, start: Sector, sectors: Sectors) -> bool {
        start.0.is_multiple_of(self.0) && sectors.0.is_multiple_of(self.0)
    }

    /// The whole blocks around a range.
    pub(crate) fn around(self, (start, end): (Sector, Sector)) -> (Sector, Sector) {
        (Sector(start.0 / self.0 * self.0), Sector(end.0.next_multiple_of(self.0)))
    }

    /// The whole blocks inside a range, if there is one.
    pub(super) fn inside(self, (start, end): (Sector, Sector)) -> Option<(Sector, Sector)> {
        let (first, last) = (Sector(start.0.next_multiple_of(self.0)), Sector(end.0 / self.0 * self.0));
        (first < last).then_some((first, last))
    }

    /// The whole blocks inside a range, and its other parts.
    pub(super) fn split(self, (start, end): (Sector, Sector)) -> Split {
        let whole = self.inside((start, end));
        let edges = match whole {
            Some((first, last)) => [(start, first), (last, end)],
            None => [(start, end), (end, end)],
        };
        Split { whole, edges }
    }
}

/// The range of a request, widened to whole blocks of the cache and of both devices, but not beyond the volume.
pub(super) fn widened(volume: &Volume, cache: &Cache, range: (Sector, Sector)) -> (Sector, Sector) {
    let backing = volume.backing.as_ref().map_or(Blocks(1), |b| Blocks::of_disk(b.disk()));
    let blocks = Blocks::of(&cache.geometry).max(Blocks::of_disk(cache.device.disk())).max(backing);
    let (first, last) = blocks.around(range);
    (first.max(volume.offset), last.min(volume.offset + volume.size()).max(range.1))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// More sectors than a range of the tests has, rounded up to every size of blocks.
    const SECTORS: u64 = 256;

    fn sectors_of((start, end): (Sector, Sector)) -> Vec<u64> {
        (start.0..end.0).collect()
    }

    /// The sectors of the blocks of which `wanted` returns true. It gets the sectors of a block.
    fn blocks_where(block: u64, wanted: impl Fn(&[u64]) -> bool) -> Vec<u64> {
        let sectors: Vec<u64> = (0..SECTORS / block * block).collect();
        sectors.chunks(block as usize).filter(|b| wanted(b)).flatten().copied().collect()
    }

    proptest! {
        /// Compares each result with the blocks of a small device, block by block.
        #[test]
        fn blocks_are_those_that_a_list_of_all_blocks_has(
            block in prop::sample::select(vec![1u64, 2, 3, 4, 8, 16]),
            start in 0u64..200,
            size in 1u64..40,
        ) {
            let (blocks, range) = (Blocks::of_size(Sectors(block)), (Sector(start), Sector(start + size)));
            let has = |s: &u64| (start..start + size).contains(s);
            let touched = blocks_where(block, |b| b.iter().any(has));
            let covered = blocks_where(block, |b| b.iter().all(has));

            prop_assert_eq!(sectors_of(blocks.around(range)), touched.clone());
            prop_assert_eq!(blocks.inside(range).map_or(Vec::new(), sectors_of), covered.clone());
            prop_assert_eq!(blocks.inside(range).is_some(), !covered.is_empty());
            prop_assert_eq!(blocks.are_whole(range.0, Sectors(size)), touched == covered);
            prop_assert_eq!(blocks.whole(Sectors(size)).0, (0..=size).rev().find(|s| s % block == 0).unwrap());

            let split = blocks.split(range);
            prop_assert_eq!(split.whole, blocks.inside(range));
            let edges: Vec<u64> = split.edges().flat_map(sectors_of).collect();
            let rest: Vec<u64> = sectors_of(range).into_iter().filter(|s| !covered.contains(s)).collect();
            prop_assert_eq!(edges, rest);
            prop_assert!(split.edges().all(|(a, b)| a < b));
        }

        /// The larger of two sizes fits both, so that one request is whole blocks of two devices.
        #[test]
        fn whole_blocks_of_the_larger_size_are_whole_blocks_of_both(
            a in 0u32..5, b in 0u32..5, start in 0u64..200, size in 1u64..40,
        ) {
            let [a, b] = [a, b].map(|exponent| Blocks::of_size(Sectors(1 << exponent)));
            let (first, last) = a.max(b).around((Sector(start), Sector(start + size)));
            prop_assert!(a.are_whole(first, last - first) && b.are_whole(first, last - first));
        }
    }

    #[test]
    fn a_device_that_states_no_size_has_blocks_of_one_sector() {
        let (blocks, range) = (Blocks::of_size(Sectors::ZERO), (Sector(3), Sector(5)));
        assert_eq!((blocks.around(range), blocks.inside(range)), (range, Some(range)));
        assert!(blocks.are_whole(Sector(3), Sectors(2)));
    }
}
