//! Writes the superblock of a cache device that no process serves.
//!
//! Owns the place and the durability of that write. Must not know what has changed.

use format::CacheSuper;
use format::superblock::SUPERBLOCK_SECTOR;
use io::Disk;

use crate::failure::Failure;

/// Writes the superblock, durably. The caller has claimed the device.
///
/// # Errors
/// If the device cannot be written.
pub(crate) async fn write_superblock(disk: &Disk, superblock: &CacheSuper) -> Result<(), Failure> {
    let buffer = disk.runtime().pool().copy_of(&superblock.encode());
    disk.write(SUPERBLOCK_SECTOR, buffer, true).await?;
    Ok(disk.flush().await?)
}
