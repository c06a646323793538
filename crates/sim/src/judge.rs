//! Independent judgement of the contents of disks, by crate `inspect`, which shares no code with the engine.
//!
//! Owns the check of the structures and the extraction of contents from images. Works on images of any moment, because the
//! engine promises that each of them is valid. Must not know the engine.

use std::io;

use format::{BucketNr, FooterId, FooterLayout, Gen, RawSuperblock, Sector, Sectors, parse_footer};
use inspect::extract::Extracted;
use inspect::{
    CheckOptions, ExtractError, ExtractOptions, Extraction, Finding, Invariant, Mode, ReadAt, SetView,
    Severity, Sink, Target,
};

use crate::image::Image;
use crate::stamp::SECTOR;
use crate::violation::Violation;

/// Checks the structures of a set.
///
/// Any finding worse than a notice is an error. So is clean data that differs from the backing device (durability contract
/// 9), dirty data of a device whose superblock says clean (6), any data that does not have the checksum of a footer, and a
/// footer whose generation is newer than the stored one of its bucket (`check_footers`).
///
/// One finding is permitted, because the format has no protection against it: a power loss may tear the last bset of a btree
/// node. Then no data may be lost without that bset, and the contents are judged without it.
///
/// Returns the number of blocks whose data has the checksum of a footer.
///
/// # Errors
/// The result of the check, if it fails.
pub fn check(cache: &Image, backings: &[Image]) -> Result<u64, Violation> {
    let sources: Vec<&dyn ReadAt> = backings.iter().map(|b| b as &dyn ReadAt).collect();
    let report = inspect::check_set(cache, &sources, CheckOptions::default());
    let differing = report
        .summary
        .iter()
        .flat_map(|s| &s.devices)
        .filter_map(|d| d.clean_extents_differing_from_backing)
        .sum::<u64>();
    let torn = report.findings.iter().filter(|f| is_torn_bset(f)).count() as u64;
    // Damage of clean data is a notice. No run that is judged has damaged any.
    let damaged = report.count_of(Invariant::DataChecksum);
    if report.errors > torn || differing > 0 || damaged > 0 {
        return Err(Violation::Structures { differing, damaged, report: Box::new(report) });
    }
    // Contract 6: clean in the superblock means that durably no dirty key is left.
    let slots = report.summary.iter().flat_map(|s| &s.devices);
    for d in slots.filter(|d| d.kind == "cached" && d.dirty_sectors > 0) {
        if d.backing.as_ref().is_some_and(|b| b.state == "clean") {
            let sectors = d.dirty_sectors;
            return Err(Violation::DirtyButClean { sectors, report: Box::new(report) });
        }
    }
    check_footers(cache)?;
    let slots = report.summary.iter().flat_map(|s| &s.devices);
    Ok(slots.filter_map(|d| d.data.as_ref()).map(|data| data.verified_blocks).sum())
}

/// Checks that no valid footer has a generation that is newer than the stored one of its bucket.
///
/// Keys do not count: a bucket that loses them has the stored generation again. A kernel, which ignores footers, could then use
/// the bucket with the generation of the footer.
fn check_footers(cache: &Image) -> Result<(), Violation> {
    let head = cache.read_vec(Sector(8), Sectors(8));
    let checked = RawSuperblock::from_prefix(&head).and_then(|raw| raw.check_cache(cache.size(), 512));
    let Ok(superblock) = checked else { return Ok(()) };
    let g = superblock.geometry();
    let (Some(key), Some(layout)) = (superblock.checksum_key(), FooterLayout::of(g)) else { return Ok(()) };
    let view = SetView::open(cache, Mode::BestEffort).map_err(Box::new)?;
    for bucket in (g.first_dynamic().0..g.nbuckets).map(BucketNr) {
        let (at, size) = layout.place(g.bucket_start(bucket));
        let bytes = cache.read_vec(at, size);
        let id = FooterId { set_uuid: superblock.set_uuid(), bucket, generation: Gen(bytes[40]) };
        let stored = view.gens.state(bucket).stored.map(|(generation, _)| generation);
        if let Some(stored) = stored.filter(|s| id.generation.age_of(*s) > 0)
            && parse_footer(&layout, key, id, &bytes).is_ok()
        {
            return Err(Violation::FooterAhead { bucket, footer: id.generation, stored });
        }
    }
    Ok(())
}

fn is_torn_bset(f: &Finding) -> bool {
    f.invariant == Invariant::NodeReadable && f.to_string().contains("in the last bset of the node")
}

/// The target of an extraction.
pub enum ExtractedVolume<'a> {
    /// A cached device.
    Cached(&'a Image),
    /// The flash-only volume.
    Flash,
}

struct Collect(Vec<u8>);

impl Sink for Collect {
    fn begin(&mut self, total: Sectors) -> io::Result<()> {
        self.0.reserve(total.bytes() as usize);
        Ok(())
    }

    fn data(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.0.extend_from_slice(bytes);
        Ok(())
    }

    fn zeros(&mut self, n: Sectors) -> io::Result<()> {
        self.0.resize(self.0.len() + n.0 as usize * SECTOR, 0);
        Ok(())
    }

    fn finish(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Extracts the contents of a volume.
///
/// `None` if the image has none: the set was never initialised, there is no such volume, or the device was served without
/// the cache.
///
/// # Errors
/// If the contents cannot be right.
pub fn extract(cache: &Image, what: &ExtractedVolume<'_>) -> Result<Option<Vec<u8>>, Violation> {
    let view = SetView::open(cache, Mode::BestEffort).map_err(Box::new)?;
    let mut bad = view.findings.list().iter().filter(|f| f.severity > Severity::Notice && !is_torn_bset(f));
    if let Some(f) = bad.next() {
        return Err(Violation::Damaged(Box::new(f.clone())));
    }
    let best_effort = view.findings.list().iter().any(is_torn_bset);
    let target = match what {
        ExtractedVolume::Cached(backing) => Target::Cached(*backing),
        ExtractedVolume::Flash => {
            let volume = view.volumes().next();
            match volume {
                Some((inode, _)) => Target::Volume(inode),
                None => return Ok(None),
            }
        }
    };
    let extraction = match Extraction::new(
        &view,
        cache,
        target,
        ExtractOptions { best_effort, ..ExtractOptions::default() },
    ) {
        Ok(e) => e,
        Err(ExtractError::InvalidSlot { .. }) => return Ok(None),
        Err(e) => return Err(Violation::NotExtracted(Box::new(e))),
    };
    let mut to = Collect(Vec::new());
    let done: Result<Extracted, ExtractError> =
        extraction.run(&mut to, &mut |_| std::ops::ControlFlow::Continue(()));
    let done = done.map_err(Box::new)?;
    if done.lost_sectors > 0 {
        let (sectors, lost) = (done.lost_sectors, done.lost);
        return Err(Violation::LostInExtraction { sectors, lost });
    }
    Ok(Some(to.0))
}
