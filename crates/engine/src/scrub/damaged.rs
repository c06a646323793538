//! The damaged dirty data of a set, for the operator: the list, and the decisions about it.
//!
//! Owns the ranges that the operator sees. Must not know how a block is accepted or dropped.

use std::collections::BTreeSet;
use std::rc::Rc;

use format::{BucketNr, Inode, Sector, Sectors};

use super::Scrubber;
use crate::data::DamagedBlock;
use crate::error::EngineError;
use crate::events::Resolution;
use crate::refusal::Refusal;
use crate::volume::{Owner, Volume, accept, drop_damaged, is_still_damaged};

/// Damaged dirty data of one volume, without a gap.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DamagedRange {
    /// The slot.
    pub inode: Inode,
    /// Label or name of the volume. Of a device that is not registered: its label or UUID.
    pub device: String,
    /// Whether the device is registered. If not, `sector` is the position on the device itself.
    pub is_registered: bool,
    /// The first damaged sector, as clients of the volume count them.
    pub sector: Sector,
    /// The number of sectors.
    pub sectors: Sectors,
}

/// The damaged blocks of a slot or of all slots that were not replaced meanwhile, with their volumes.
fn blocks_of(scrubber: &Scrubber, of: Option<Inode>) -> Vec<(DamagedBlock, Option<Rc<Volume>>)> {
    let wanted = scrubber.cache.data.damaged().into_iter().filter(|b| of.is_none_or(|inode| b.at.0 == inode));
    let (still, replaced): (Vec<_>, Vec<_>) = wanted.partition(|b| is_still_damaged(&scrubber.cache, b));
    replaced.iter().for_each(|b| scrubber.cache.data.remove_damaged(b));
    let with_volume = |b: DamagedBlock| (b, scrubber.volume_of(b.at.0));
    let mut found: Vec<_> = still.into_iter().map(with_volume).collect();
    found.sort_unstable_by_key(|(b, _)| b.at);
    found
}

/// The buckets with damaged dirty data, ascending.
pub(crate) fn damaged_buckets(scrubber: &Scrubber) -> Vec<BucketNr> {
    let table = scrubber.cache.alloc.buckets();
    let blocks = blocks_of(scrubber, None);
    let buckets: BTreeSet<BucketNr> = blocks.iter().map(|(b, _)| table.bucket_of(b.ptr)).collect();
    buckets.into_iter().collect()
}

/// The damaged dirty data of the set.
pub(crate) fn damaged_ranges(scrubber: &Scrubber) -> Vec<DamagedRange> {
    let mut ranges: Vec<DamagedRange> = Vec::new();
    for (block, volume) in blocks_of(scrubber, None) {
        let owner = Owner { volume: volume.as_ref(), cache: &scrubber.cache, inode: block.at.0 };
        let sector = owner.position(block.at.1);
        match ranges.last_mut() {
            Some(last) if last.inode == block.at.0 && last.sector + last.sectors == sector => {
                last.sectors += block.size;
            }
            _ => ranges.push(DamagedRange {
                inode: block.at.0,
                device: owner.name(),
                is_registered: volume.is_some(),
                sector,
                sectors: block.size,
            }),
        }
    }
    ranges
}

/// Accepts or drops the damaged blocks of a slot, or of all slots, that overlap `range`, or all of them. Returns the number of
/// sectors.
pub(crate) async fn resolve(
    scrubber: &Rc<Scrubber>,
    of: Option<Inode>,
    range: Option<(Sector, Sectors)>,
    decision: Resolution,
) -> Result<Sectors, EngineError> {
    let mut done = Sectors::ZERO;
    for (block, volume) in blocks_of(scrubber, of) {
        scrubber.cache.device.check()?;
        let owner = Owner { volume: volume.as_ref(), cache: &scrubber.cache, inode: block.at.0 };
        let at = owner.position(block.at.1);
        let is_wanted = |(start, sectors): (Sector, Sectors)| at < start + sectors && start < at + block.size;
        if !range.is_none_or(is_wanted) {
            continue;
        }
        done += match (decision, &volume) {
            (Resolution::Accepted, _) => accept(owner, &block).await?,
            (Resolution::Dropped, Some(v)) => {
                drop_damaged(v.target(&scrubber.cache, block.at.0), &block).await?
            }
            (Resolution::Dropped, None) => {
                return Err(Refusal::DropNeedsDevice { device: owner.name() }.into());
            }
        };
    }
    Ok(done)
}
