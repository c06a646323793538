//! Checksums of cached data: when a set can have them, and how they are switched on.
//!
//! Owns the conditions and the messages. Must not know when a checksum is written or compared.

use std::fmt::Display;

use format::{CacheSuper, FooterKey, FooterLayout, Geometry};
use io::Disk;

use crate::failure::Failure;
use crate::idle;

/// A new random key for the footers of a set.
pub fn new_checksum_key() -> FooterKey {
    FooterKey(crate::session::seed())
}

/// Refuses a set whose buckets have no room for a block of data beside the block with the checksums.
///
/// # Errors
/// If a bucket is too small.
pub fn checksums_fit(device: &dyn Display, geometry: &Geometry) -> Result<(), Failure> {
    if FooterLayout::of(geometry).is_some() {
        return Ok(());
    }
    let (bucket, block) = (geometry.bucket_sectors.bytes(), geometry.block_bytes());
    Err(Failure::Failed(format!(
        "{device}: no room for checksums: expected buckets of at least two blocks, one for data and one for its checksums; \
         found buckets of {bucket} bytes and blocks of {block} bytes, which give {}: use --bucket {} or larger",
        bucket.checked_div(block).unwrap_or(0),
        2 * block
    )))
}

/// Switches the checksums of a set on that was never used: writes a random key to its superblock. A set that has checksums
/// stays as it is.
///
/// # Errors
/// If the set has no checksums and was used: its buckets may have data in the place of the checksums.
pub async fn switch_checksums_on(disk: &Disk, superblock: &mut CacheSuper) -> Result<(), Failure> {
    if superblock.checksum_key().is_some() {
        return Ok(());
    }
    let device = &disk.info().name;
    if superblock.sync() {
        return Err(Failure::Failed(format!(
            "{device}: the set was used without checksums, so its buckets may have data in the place of checksums: drain \
             it, and make it anew with `ubcache make --checksums`"
        )));
    }
    checksums_fit(device, superblock.geometry())?;
    superblock.set_checksum_key(Some(new_checksum_key()));
    idle::write_superblock(disk, superblock).await
}
