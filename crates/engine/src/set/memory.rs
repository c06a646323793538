//! The memory that a cache set takes according to its superblock, reserved before any of it is allocated.
//!
//! A small superblock can name two thousand million buckets, each of which needs a place in tables, or buckets of many
//! gigabytes, which are read as a whole. The sizes are reserved in the memory budget of the process first, and refused
//! with an error that names them: an allocation that fails would end the process with all its other sets.
//!
//! Owns the sizes of the structures. Must not know how much memory there is.

use format::{FooterLayout, Geometry};
use io::{MemoryBudget, Reservation};

use crate::alloc::Buckets;
use crate::data::SumsTable;
use crate::error::{EngineError, Place};
use crate::index::READ_AHEAD;
use crate::policy::replacement::most_bytes_each;
use crate::refusal::{DeviceRefusal, MemoryLimit};

/// Bytes for the priority and generation of a bucket: once as read, once as written.
const PRIORITIES: u64 = 2 * size_of::<format::BucketPrio>() as u64;
/// Bytes for the generations of a bucket that a walk of the index compares.
const GENERATIONS: u64 = 2;

/// A set takes at most one part in this many of the budget, so that a large set leaves memory for others.
const SHARE_OF_A_SET: u64 = 2;

/// Reserves the memory for the tables of a set and for the largest buffers of its recovery. `footers`: the layout of the
/// footers if data has checksums.
///
/// # Errors
/// If that is more than a set may take, or more than the budget has left.
pub(crate) fn reserve(
    budget: &MemoryBudget,
    geometry: &Geometry,
    footers: Option<&FooterLayout>,
    place: &Place,
) -> Result<Reservation, EngineError> {
    let each = Buckets::BYTES_EACH + most_bytes_each() + PRIORITIES + GENERATIONS;
    let tables = u64::from(geometry.nbuckets).saturating_mul(each);
    let nodes = geometry.node_sectors.bytes().saturating_mul(READ_AHEAD as u64);
    let buffers = geometry.bucket_sectors.bytes().max(nodes);
    let sums = footers.map_or(0, |layout| SumsTable::most_bytes(geometry, layout));
    let wanted_bytes = tables.saturating_add(buffers).saturating_add(sums);
    let most_bytes = budget.limit() / SHARE_OF_A_SET;
    let refused = |source: MemoryLimit| -> EngineError {
        let Geometry { nbuckets: buckets, bucket_sectors, .. } = *geometry;
        DeviceRefusal::Memory { buckets, bucket_sectors, wanted_bytes, source }.of(&place.device).into()
    };
    if wanted_bytes > most_bytes {
        return Err(refused(MemoryLimit::Set { bytes: most_bytes }));
    }
    budget.try_reserve(wanted_bytes).map_err(|e| refused(e.into()))
}

#[cfg(test)]
mod tests {
    use format::{BucketNr, Sectors};

    use super::*;

    fn sizes(nbuckets: u32, bucket_sectors: u64) -> Geometry {
        Geometry {
            nbuckets,
            bucket_sectors: Sectors(bucket_sectors),
            block_sectors: Sectors(8),
            first_bucket: BucketNr(3),
            njournal: 8,
            meta_sectors: Sectors(8),
            node_sectors: Sectors(8),
            prios_per_bucket: 1352,
            prio_buckets: nbuckets.div_ceil(1352),
            nr_uuids: 32,
        }
    }

    #[test]
    fn a_set_takes_its_share_and_gives_it_back() {
        let budget = MemoryBudget::new(8 << 30);
        let place = Place { device: "ssd".into(), set: String::new() };
        // A device of 1 TiB with buckets of 512 KiB.
        let one = reserve(&budget, &sizes(2 << 20, 1024), None, &place).unwrap();
        assert!(one.bytes() > 2 << 20 && one.bytes() < 200 << 20, "{}", one.bytes());
        drop(one);
        assert_eq!(budget.used(), 0);
        // One more bucket takes one more place in each table.
        let bytes =
            |nbuckets| reserve(&budget, &sizes(nbuckets, 1024), None, &place).map(|r| r.bytes()).unwrap();
        let priority = size_of::<format::BucketPrio>() as u64;
        let each = [Buckets::BYTES_EACH, most_bytes_each(), priority, priority, 1, 1];
        assert_eq!(bytes(1001) - bytes(1000), each.iter().sum::<u64>());
        // The largest buffer is added: a bucket, or the nodes that are read ahead.
        let buffer = (1024 * 512).max(8 * 512 * READ_AHEAD as u64);
        assert_eq!(bytes(1000), 1000 * each.iter().sum::<u64>() + buffer);
        // A budget of twice the size is enough, and one byte less is not.
        let wanted = bytes(1000);
        let within = |limit| reserve(&MemoryBudget::new(limit), &sizes(1000, 1024), None, &place).is_ok();
        assert!(within(2 * wanted) && !within(2 * wanted - 1));
        let g = sizes(1000, 1024);
        let layout = FooterLayout::of(&g).unwrap();
        let with_sums = reserve(&budget, &g, Some(&layout), &place).unwrap().bytes();
        assert_eq!(with_sums - wanted, SumsTable::most_bytes(&g, &layout));
        assert!(SumsTable::most_bytes(&g, &layout) > 1000 * 127 * 4, "a checksum for each block");
        for hostile in [sizes(1 << 31, 8), sizes(128, 1 << 40)] {
            let error = reserve(&budget, &hostile, None, &place).unwrap_err().to_string();
            assert!(error.contains("ssd") && error.contains("4294967296 bytes here"), "{error}");
        }
    }
}
