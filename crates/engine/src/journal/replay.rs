//! Finding the journal at start: which entries are there, which must be replayed, and where the ring goes on.
//!
//! Reads every ring bucket (the exhaustive method, format section 9.3): simple and always right. Must not
//! apply anything.

use format::{
    Bkey, BucketNr, Geometry, JournalSeq, Jset, Replay, ScanStop, Sector, Sectors, SetMagic, parse_bucket,
    select_replay,
};
use io::{Disk, Reservation};

use super::{HEADER_BYTES, Ring};
use crate::canary::{Bug, Mark, bug, mark};
use crate::error::{EngineError, Place};

/// What the ring holds.
pub(crate) struct Found {
    /// Entries to replay, and the roots of the newest.
    pub(crate) replay: Replay,
    /// Where writing goes on.
    pub(crate) ring: Ring,
}

/// Reads the journal ring in `ring_buckets`. `discard`: the device's buckets may have been discarded as soon as
/// nothing in them was needed. What the entries take is added to `memory`.
#[allow(clippy::too_many_arguments)]
pub(crate) async fn scan(
    disk: &Disk,
    place: &Place,
    geometry: &Geometry,
    magic: SetMagic,
    ring_buckets: &[BucketNr],
    discard: bool,
    memory: &mut Reservation,
) -> Result<Found, EngineError> {
    let mut entries = Vec::new();
    let mut newest_in = Vec::with_capacity(ring_buckets.len());
    // Ring index and end of the newest entry.
    let mut newest: Option<(JournalSeq, usize, u64)> = None;
    for (index, bucket) in ring_buckets.iter().enumerate() {
        let start = Sector(u64::from(bucket.0) * geometry.bucket_sectors.0);
        let buffer = disk.runtime().pool().take(geometry.bucket_sectors.bytes() as usize);
        let (buffer, result) = disk.read(start, buffer).await;
        result?;
        let buffer = with_torn_entry_valid(buffer, magic, geometry.block_sectors);
        let found = parse_bucket(buffer.as_slice(), magic, geometry.block_sectors)
            .map_err(|c| place.corrupt(start, &c))?;
        if matches!(&found.why, ScanStop::NoEntry(c) if c.field == "checksum") {
            mark(Mark::TornEntry);
        }
        newest_in.push(found.max_seq().unwrap_or(JournalSeq(0)));
        let mut ends: Vec<usize> = found.entries.iter().skip(1).map(|(at, _)| *at).collect();
        ends.push(found.stopped_at);
        for ((_, jset), end) in found.entries.iter().zip(ends) {
            if newest.is_none_or(|(seq, ..)| jset.seq > seq) {
                newest = Some((jset.seq, index, end as u64));
            }
        }
        let keys: usize = found.entries.iter().map(|(_, jset)| jset.keys.len()).sum();
        let bytes = found.entries.len() * size_of::<Jset>() + keys * size_of::<Bkey>();
        memory.try_grow(bytes as u64).map_err(|e| {
            EngineError::Invalid(format!("{}: sector {start}: {keys} keys of the journal: {e}", place.device))
        })?;
        entries.extend(found.entries.into_iter().map(|(_, jset)| jset));
    }
    let first = ring_buckets.first().map_or(Sector(0), |b| geometry.bucket_start(*b));
    let Some((_, current, end_bytes)) = newest else {
        return Err(place.damage(
            first,
            format!(
                "journal: expected at least one valid entry in {} journal buckets of an initialised set, found none",
                ring_buckets.len()
            ),
        ));
    };
    if end_bytes < geometry.bucket_sectors.bytes() {
        mark(Mark::TailAfterNewest);
    }
    let replay = select_replay(entries, discard).map_err(|c| place.corrupt(first, &c))?;
    let newest_entry =
        replay.newest_entry().ok_or_else(|| place.damage(first, "journal: no newest entry"))?;
    // The place behind the newest entry is free: whatever follows there is older than anything needed, or torn.
    let used = Sectors(end_bytes / format::SECTOR_BYTES);
    let last_seq = newest_entry.last_seq;
    let ring = Ring::new(geometry.bucket_sectors, geometry.block_sectors, newest_in, current, used, last_seq);
    Ok(Found { replay, ring })
}

/// The deliberate bug that takes a torn entry for a whole one: gives the first thing that is none the checksum that it
/// would need. Otherwise the buffer as it is.
fn with_torn_entry_valid(mut buffer: io::Buffer, magic: SetMagic, block: Sectors) -> io::Buffer {
    if !bug(Bug::TornEntryValid) {
        return buffer;
    }
    let end = match parse_bucket(buffer.as_slice(), magic, block) {
        Ok(found) => found.stopped_at,
        Err(_) => return buffer,
    };
    // Checksum, magic, version, sequence number, last needed one, version and number of words (format section 9.1).
    let Some(torn) = buffer.as_mut().get_mut(end..) else { return buffer };
    let words = torn.get(28..32).and_then(|b| b.try_into().ok()).map_or(0, u32::from_le_bytes) as usize;
    if let Some(covered) = torn.get(8..HEADER_BYTES + 8 * words) {
        let sum = format::checksum::crc64(covered);
        if let Some(place) = torn.get_mut(..8) {
            place.copy_from_slice(&sum.to_le_bytes());
        }
    }
    buffer
}

#[cfg(test)]
mod tests;
