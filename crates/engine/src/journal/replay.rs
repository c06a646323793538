//! Reading the journal at the start: finds its entries, the entries to replay, and the place of the next entry.
//!
//! Reads every ring bucket (the exhaustive method, format section 9.3), which needs no search. Must not apply keys.

use format::{
    Bkey, BucketNr, JournalSeq, Jset, Replay, ScanStop, Sector, Sectors, SetMagic, parse_bucket,
    select_replay,
};
use io::Reservation;

use super::ring::RingSlot;
use super::{HEADER_BYTES, Ring};
use crate::canary::{Bug, Mark, bug, mark};
use crate::damage::Flaw;
use crate::device::Reader;
use crate::error::EngineError;
use crate::refusal::Refusal;

/// The result of reading the ring.
pub(crate) struct ScannedRing {
    /// The entries to replay, and the roots in the newest one.
    pub(crate) replay: Replay,
    /// The ring, with the place of the next entry.
    pub(crate) ring: Ring,
}

/// Reads the journal ring in `ring_buckets`. `discard`: ring buckets may have been discarded when none of their entries
/// was needed. The memory that the entries take is added to `memory`.
pub(crate) async fn scan(
    reader: &Reader<'_>,
    ring_buckets: &[BucketNr],
    discard: bool,
    memory: &mut Reservation,
) -> Result<ScannedRing, EngineError> {
    let Reader { disk, place, geometry, magic } = *reader;
    let mut entries = Vec::new();
    let mut newest_in = Vec::with_capacity(ring_buckets.len());
    // Sequence number, ring index and end of the newest entry.
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
        let (device, sector) = (place.device.clone(), start);
        let too_many = |source| Refusal::JournalMemory { device, sector, keys, source };
        memory.try_grow(bytes as u64).map_err(too_many)?;
        entries.extend(found.entries.into_iter().map(|(_, jset)| jset));
    }
    let first = ring_buckets.first().map_or(Sector(0), |b| geometry.bucket_start(*b));
    let Some((_, current, end_bytes)) = newest else {
        return Err(place.damage(first, Flaw::NoEntry { buckets: ring_buckets.len() }));
    };
    if end_bytes < geometry.bucket_sectors.bytes() {
        mark(Mark::TailAfterNewest);
    }
    let replay = select_replay(entries, discard).map_err(|c| place.corrupt(first, &c))?;
    let newest_entry = replay.newest_entry().ok_or_else(|| place.damage(first, Flaw::NoNewestEntry))?;
    // The place behind the newest entry is free: an entry there is older than all needed entries, or torn.
    let next = RingSlot { bucket: current, offset: Sectors(end_bytes / format::SECTOR_BYTES) };
    let last_seq = newest_entry.last_seq;
    let ring = Ring::new(geometry.bucket_sectors, geometry.block_sectors, newest_in, next, last_seq);
    Ok(ScannedRing { replay, ring })
}

/// Returns the buffer unchanged. With the deliberate bug `TornEntryValid`, it first gives the torn entry at the end a
/// valid checksum.
fn with_torn_entry_valid(mut buffer: io::Buffer, magic: SetMagic, block: Sectors) -> io::Buffer {
    if !bug(Bug::TornEntryValid) {
        return buffer;
    }
    let end = match parse_bucket(buffer.as_slice(), magic, block) {
        Ok(found) => found.stopped_at,
        Err(_) => return buffer,
    };
    // The number of words is at byte 28 of the header (format section 9.1).
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
