//! The superblock of the cache device.
//!
//! Owns its repair: the one flipped bit, the fields that are right although the checksum is wrong, or a new superblock for the
//! geometry with which the rest of the device can be read.

use std::collections::BTreeSet;

use format::superblock::CacheFormat;
use format::superblock::{SUPERBLOCK_BYTES, SUPERBLOCK_SECTOR};
use format::{
    BackingSuper, BucketNr, CacheSuper, FooterKey, FooterLayout, RawSuperblock, Replacement, Sectors, Uuid,
    counted,
};
use inspect::device::read_superblock_bytes;
use inspect::{DeviceSuper, Invariant, Mode, ReadAt, SetView, Severity, read_superblock};

use crate::bits::{self, Extent};
use crate::overlay::Overlay;
use crate::work::{Doubt, Work};

const STRUCTURE: &str = "cache superblock";

/// Mends the superblock if it is damaged.
pub(crate) fn mend(work: &mut Work<'_>, fresh: Uuid) {
    if work.superblock().is_some() {
        return;
    }
    let device = work.cache.name().to_owned();
    let Ok(bytes) = read_superblock_bytes(&work.cache) else {
        work.refuse(format!("{device}: the {STRUCTURE} cannot be read; a repair cannot undo a change of it"));
        return;
    };
    let size = work.cache.sectors();
    let mut corrected = bytes.clone();
    if bits::correct_bit(&mut corrected[..], Extent::SUPERBLOCK, u64::MAX).is_some()
        && checked(&corrected[..], size).is_some()
    {
        work.cache.write(SUPERBLOCK_SECTOR, &corrected[..]);
        work.step(STRUCTURE, device, "one bit was flipped; it is flipped back".into(), Vec::new());
        return;
    }
    rebuild(work, &bytes, fresh);
}

fn checked(bytes: &[u8], size: Sectors) -> Option<CacheSuper> {
    RawSuperblock::from_prefix(bytes).ok()?.check_cache(size, 0).ok()
}

/// The superblock as it is, with a right checksum, if its fields make sense.
fn as_it_is(bytes: &[u8], size: Sectors) -> Option<CacheSuper> {
    let mut raw = RawSuperblock::from_prefix(bytes).ok()?.clone();
    raw.csum = raw.computed_csum()?.into();
    raw.check_cache(size, 0).ok()
}

/// A superblock that could be the lost one.
struct Candidate {
    superblock: CacheSuper,
    /// Findings of a check with it: fatal ones and errors, then notices about alignment.
    wrong: (u64, u64),
}

fn rebuild(work: &mut Work<'_>, bytes: &[u8; SUPERBLOCK_BYTES], fresh: Uuid) {
    let device = work.cache.name().to_owned();
    let size = work.cache.sectors();
    if let Some(superblock) = as_it_is(&bytes[..], size)
        && judge(&work.cache, &superblock).is_some_and(|wrong| wrong.0 == 0)
    {
        work.cache.write(SUPERBLOCK_SECTOR, &superblock.encode());
        let uncertain = "label, flags, padding and the UUID of the device, which nothing else confirms";
        let action = "its fields fit all other structures; its checksum is written anew";
        work.step(STRUCTURE, device, action.into(), vec![uncertain.into()]);
        work.doubts.push(Doubt::CacheSuperblock);
        return;
    }
    let sets: BTreeSet<Uuid> =
        backings(work).iter().map(BackingSuper::set_uuid).filter(|u| !u.is_nil()).collect();
    if sets.is_empty() {
        work.refuse(format!(
            "{device}: the {STRUCTURE} is destroyed, and no backing device names the set: give an attached backing device \
             with -B; a set that has flash-only volumes alone cannot be rebuilt"
        ));
        return;
    }
    let Some((mut superblock, is_only)) = best(work, &sets, fresh) else {
        work.refuse(format!(
            "{device}: the {STRUCTURE} is destroyed, and with no usual size of buckets a journal entry of the set of the backing \
             devices is found"
        ));
        return;
    };
    let key = footer_key(&work.cache, &superblock);
    superblock.set_checksum_key(key);
    superblock.prepare_write(0);
    work.cache.write(SUPERBLOCK_SECTOR, &superblock.encode());
    let g = *superblock.geometry();
    let action = format!(
        "rebuilt for set {}: {} buckets of {}, blocks of {}, journal in buckets {} to {}, with which all \
         other structures can be read{}",
        superblock.set_uuid(),
        g.nbuckets,
        counted(g.bucket_sectors.0, "sector"),
        counted(g.block_sectors.0, "sector"),
        g.first_bucket,
        g.first_dynamic().0.saturating_sub(1),
        if key.is_some() { "; the key of the checksums follows from the footers" } else { "" },
    );
    let uncertain = vec![
        "the device has a new UUID, no label, the replacement policy lru and no discard".to_owned(),
        "the number of journal buckets is that of a new set of this size".to_owned(),
        "a crash log in /run/ubcache does not count any more, and with it writes of a killed process that were not flushed"
            .to_owned(),
    ];
    work.step(STRUCTURE, device, action, uncertain);
    if !is_only || may_have_newer_entry(work) {
        work.doubts.push(Doubt::CacheSuperblock);
    }
}

/// The superblock with which the least is wrong, and whether it is the only one with which nothing is.
fn best(work: &Work<'_>, sets: &BTreeSet<Uuid>, fresh: Uuid) -> Option<(CacheSuper, bool)> {
    let mut best: Option<Candidate> = None;
    let mut fitting = 0u32;
    for superblock in candidates(work, sets, fresh) {
        let Some(wrong) = judge(&work.cache, &superblock) else { continue };
        fitting += u32::from(wrong.0 == 0);
        if best.as_ref().is_none_or(|b| wrong < b.wrong) {
            best = Some(Candidate { superblock, wrong });
        }
    }
    best.map(|best| (best.superblock, fitting == 1))
}

/// Whether a journal entry can be at a place where the rebuilt superblock has none: the number of journal buckets and the size of blocks
/// are assumed.
fn may_have_newer_entry(work: &Work<'_>) -> bool {
    let Some(view) = work.view() else { return true };
    let Some(newest) = view.journal.as_ref().map(|journal| journal.newest) else { return true };
    let g = *view.geometry();
    let magic = view.superblock.set_magic().jset().to_le_bytes();
    let is_entry = |sector: &[u8]| sector.get(8..16) == Some(&magic[..]);
    let is_newer = |sector: &[u8]| {
        let seq =
            sector.get(16..).and_then(|rest| rest.first_chunk::<8>()).map(|seq| u64::from_le_bytes(*seq));
        is_entry(sector) && seq.is_none_or(|seq| seq > newest.0)
    };
    let mut bucket_bytes = vec![0; usize::try_from(g.bucket_sectors.bytes()).unwrap_or(0)];
    let ring = (g.first_bucket.0..g.first_dynamic().0).map(BucketNr).any(|bucket| {
        work.cache.read_at(g.bucket_start(bucket), &mut bucket_bytes).is_err()
            || bucket_bytes.chunks(512).any(is_newer)
    });
    let mut first = [0; 512];
    ring || (g.first_dynamic().0..g.nbuckets)
        .map(BucketNr)
        .any(|bucket| work.cache.read_at(g.bucket_start(bucket), &mut first).is_err() || is_entry(&first))
}

/// The backing superblocks that are valid.
fn backings(work: &Work<'_>) -> Vec<BackingSuper> {
    let each = work.backings.iter().filter_map(|b| match read_superblock(b) {
        Ok(DeviceSuper::Backing(superblock)) => Some(superblock),
        _ => None,
    });
    each.collect()
}

/// Superblocks of a new device with every possible size of buckets and blocks, larger blocks first.
fn candidates(work: &Work<'_>, sets: &BTreeSet<Uuid>, fresh: Uuid) -> Vec<CacheSuper> {
    let most = backings(work).iter().map(|b| b.block_sectors().0).min().unwrap_or(8).min(8);
    let least = u64::from(work.cache.logical_block_bytes().unwrap_or(512) / 512).max(1);
    let mut all = Vec::new();
    for set_uuid in sets {
        for bucket in (3..=31).map(|shift| 1 << shift) {
            for block in [8, 4, 2, 1].into_iter().filter(|b| (least..=most).contains(b)) {
                let want = CacheFormat {
                    uuid: fresh,
                    set_uuid: *set_uuid,
                    device_sectors: work.cache.sectors(),
                    block_sectors: Sectors(block),
                    bucket_sectors: Sectors(bucket),
                    replacement: Replacement::Lru,
                    discard: false,
                };
                let Ok(mut superblock) = CacheSuper::format(&want) else { continue };
                if superblock.set_journal_buckets(superblock.default_journal_buckets()).is_ok() {
                    superblock.set_sync(true);
                    all.push(superblock);
                }
            }
        }
    }
    all
}

/// How much is wrong with the device if this is its superblock; `None` if no journal entry is found with it.
fn judge(cache: &Overlay<'_>, superblock: &CacheSuper) -> Option<(u64, u64)> {
    let mut trial = Overlay::new(cache);
    trial.write(SUPERBLOCK_SECTOR, &superblock.encode());
    let view = SetView::open(&trial, Mode::BestEffort).ok()?;
    view.journal.as_ref()?;
    let errors = view.findings.count(Severity::Error) + view.findings.count(Severity::Fatal);
    let block = superblock.geometry().block_sectors.0.max(1);
    let live = view.pieces().filter(|(_, _, kind)| kind.is_live());
    let unaligned = live.filter(|(_, piece, _)| piece.ptr.is_some_and(|p| p.offset().0 % block != 0)).count();
    let notices = view.findings.counts().get(&(Invariant::Alignment, Severity::Notice)).copied().unwrap_or(0);
    Some((errors, notices + u64::try_from(unaligned).unwrap_or(u64::MAX)))
}

/// Number of footers that must agree about the key.
const AGREEING: usize = 3;

/// The key from which the checksums of the footers start; `None` if there are no footers.
///
/// A footer names its set and bucket in plain bytes. Its checksum then determines the key, and the footers of other buckets
/// confirm it.
fn footer_key(cache: &Overlay<'_>, superblock: &CacheSuper) -> Option<FooterKey> {
    let g = *superblock.geometry();
    let layout = FooterLayout::of(&g)?;
    let magic = superblock.set_magic().footer().to_le_bytes();
    let blocks = layout.blocks();
    let len =
        48usize.checked_add(blocks.div_ceil(64).checked_mul(8)?)?.checked_add(blocks.checked_mul(4)?)?;
    let mut found: Vec<u64> = Vec::new();
    for bucket in (g.first_dynamic().0..g.nbuckets).map(BucketNr) {
        let (at, size) = layout.place(g.bucket_start(bucket));
        let mut bytes = vec![0; usize::try_from(size.bytes()).ok()?];
        if cache.read_at(at, &mut bytes).is_err()
            || bytes.get(8..16) != Some(&magic[..])
            || bytes.get(20..24) != Some(&bucket.0.to_le_bytes()[..])
            || bytes.get(24..40) != Some(&superblock.set_uuid().0[..])
        {
            continue;
        }
        let stored = u64::from_le_bytes(*bytes.first_chunk()?);
        let key = bits::seed_of(stored, bytes.get(8..len)?);
        found.push(key);
        if found.iter().filter(|k| **k == key).count() >= AGREEING {
            return Some(FooterKey(key));
        }
    }
    // Fewer footers than that: all of them must agree.
    let first = *found.first()?;
    (found.len() > 1 && found.iter().all(|k| *k == first)).then_some(FooterKey(first))
}
