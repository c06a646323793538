//! Comparison of cached data with the footers of its buckets (format section 16).
//!
//! Owns [`Verifier`], which reads footers and compares blocks. A block whose bucket has no valid footer of its generation is
//! unverified, which is no damage. Must not know which data is read, or what a mismatch means.
//!
//! Invariant: memory is bounded, whatever the footers say.

use std::collections::BTreeMap;

use format::checksum::crc32c;
use format::{
    BlockSums, BucketNr, FooterId, FooterKey, FooterLayout, Gen, Geometry, Ptr, Sector, Sectors, Uuid,
    parse_footer,
};

use crate::source::{ReadAt, ReadError};
use crate::view::SetView;

/// Number of buckets whose footers are in memory.
const MAX_FOOTERS: usize = 1024;

/// A block that does not have the checksum of its footer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct DamagedBlock {
    /// Distance of the damaged part from the start of the compared data.
    pub(crate) from: Sectors,
    /// Length of the part of the block that belongs to the compared data.
    pub(crate) sectors: Sectors,
    /// The checksum in the footer.
    pub(crate) expected: u32,
    /// The checksum of the data.
    pub(crate) found: u32,
}

/// The result of a comparison.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Verdict {
    /// Blocks with the checksum of their footer.
    pub(crate) verified: u64,
    /// Blocks without a known checksum.
    pub(crate) unverified: u64,
    /// The other blocks, in order.
    pub(crate) damaged: Vec<DamagedBlock>,
}

/// Compares data of a cache device with the footers of its buckets.
pub(crate) struct Verifier<'a> {
    source: &'a dyn ReadAt,
    geometry: Geometry,
    layout: FooterLayout,
    key: FooterKey,
    set_uuid: Uuid,
    /// The sums of some generations of buckets; `None` for a bucket without a valid footer.
    footers: BTreeMap<(BucketNr, u8), Option<BlockSums>>,
}

/// A part of the compared data that lies in one block.
struct Part {
    block: usize,
    /// First sector of the block on the device.
    block_start: Sector,
    /// First sector of the part.
    start: Sector,
    sectors: Sectors,
}

impl<'a> Verifier<'a> {
    /// The verifier of a set; `None` if its data has no checksums. `source` is the cache device of the view.
    pub(crate) fn of(view: &SetView, source: &'a dyn ReadAt) -> Option<Verifier<'a>> {
        let geometry = *view.geometry();
        Some(Verifier {
            source,
            geometry,
            layout: FooterLayout::of(&geometry)?,
            key: view.superblock.checksum_key()?,
            set_uuid: view.superblock.set_uuid(),
            footers: BTreeMap::new(),
        })
    }

    /// The size of a block.
    pub(crate) fn block_sectors(&self) -> Sectors {
        Sectors(self.geometry.block_sectors.0.max(1))
    }

    /// Whether the bucket of a pointer has a valid footer.
    pub(crate) fn has_sums(&mut self, ptr: Ptr) -> bool {
        self.sums(ptr).is_some()
    }

    /// The number of blocks of which data at `at` has a part.
    pub(crate) fn blocks_of(&self, at: Sector, len: Sectors) -> u64 {
        let block = self.block_sectors().0;
        let end = at.0.saturating_add(len.0);
        (end.div_ceil(block)).saturating_sub(at.0 / block)
    }

    /// Compares `data`, which was read from the place of `ptr`, block by block.
    ///
    /// # Errors
    /// If the rest of a block that belongs to the data in part cannot be read.
    pub(crate) fn compare(&mut self, ptr: Ptr, data: &[u8]) -> Result<Verdict, ReadError> {
        let mut verdict = Verdict::default();
        let len = Sectors::from_bytes_floor(u64::try_from(data.len()).unwrap_or(0));
        let at = ptr.offset();
        if !self.has_sums(ptr) {
            verdict.unverified = self.blocks_of(at, len);
            return Ok(verdict);
        }
        let mut done = Sectors(0);
        while done < len {
            let part = self.part(Sector(at.0 + done.0), Sectors(len.0 - done.0));
            let bytes = bytes_of(data, done, part.sectors);
            let expected = self.sums(ptr).and_then(|sums| sums.get(part.block));
            match expected {
                None => verdict.unverified += 1,
                Some(expected) => {
                    let found = self.checksum(&part, bytes)?;
                    if found == expected {
                        verdict.verified += 1;
                    } else {
                        let (from, sectors) = (done, part.sectors);
                        verdict.damaged.push(DamagedBlock { from, sectors, expected, found });
                    }
                }
            }
            done.0 += part.sectors.0;
        }
        Ok(verdict)
    }

    /// The front of `[at, at + len)` that lies in one block.
    fn part(&self, at: Sector, len: Sectors) -> Part {
        let block_sectors = self.block_sectors().0;
        let inside = self.geometry.offset_in_bucket(at).0;
        let block = inside / block_sectors;
        let block_start = Sector(at.0.saturating_sub(inside % block_sectors));
        let end = block_start.0.saturating_add(block_sectors);
        Part {
            block: usize::try_from(block).unwrap_or(usize::MAX),
            block_start,
            start: at,
            sectors: Sectors(len.0.min(end.saturating_sub(at.0)).max(1)),
        }
    }

    /// The checksum of the block of which `bytes` are the part.
    fn checksum(&self, part: &Part, bytes: &[u8]) -> Result<u32, ReadError> {
        if part.sectors == self.block_sectors() {
            return Ok(crc32c(bytes));
        }
        let size = usize::try_from(self.block_sectors().bytes()).unwrap_or(0);
        let mut block = vec![0; size];
        self.source.read_at(part.block_start, &mut block)?;
        let from = usize::try_from(Sectors(part.start.0 - part.block_start.0).bytes()).unwrap_or(usize::MAX);
        if let Some(place) = block.get_mut(from..).and_then(|b| b.get_mut(..bytes.len())) {
            place.copy_from_slice(bytes);
        }
        Ok(crc32c(&block))
    }

    /// The sums of the bucket and generation of a pointer. A footer that cannot be read is none.
    fn sums(&mut self, ptr: Ptr) -> Option<&BlockSums> {
        let bucket = self.geometry.bucket_of(ptr.offset())?;
        let name = (bucket, ptr.generation().0);
        if !self.footers.contains_key(&name) {
            if self.footers.len() >= MAX_FOOTERS {
                self.footers.clear();
            }
            let sums = self.read_footer(bucket, ptr.generation());
            self.footers.insert(name, sums);
        }
        self.footers.get(&name)?.as_ref()
    }

    fn read_footer(&self, bucket: BucketNr, generation: Gen) -> Option<BlockSums> {
        let (at, size) = self.layout.place(self.geometry.bucket_start(bucket));
        let mut bytes = vec![0; usize::try_from(size.bytes()).ok()?];
        self.source.read_at(at, &mut bytes).ok()?;
        let id = FooterId { set_uuid: self.set_uuid, bucket, generation };
        parse_footer(&self.layout, self.key, id, &bytes).ok()
    }
}

/// The part of `data` from a distance on.
fn bytes_of(data: &[u8], from: Sectors, len: Sectors) -> &[u8] {
    let from = usize::try_from(from.bytes()).unwrap_or(usize::MAX);
    let len = usize::try_from(len.bytes()).unwrap_or(usize::MAX);
    data.get(from..).and_then(|d| d.get(..len)).unwrap_or_default()
}
