//! Reading superblocks and checking them against the size of the device. Errors name the device.

use format::{BackingSuper, CacheSuper, Corrupt, RawSuperblock, Sector, Sectors};
use io::{DeviceInfo, Disk};

use crate::canary::{Mark, mark};
use crate::error::EngineError;
use crate::refusal::DeviceRefusal;

/// The sector of the superblock (format section 2).
pub(crate) const SUPERBLOCK_SECTOR: Sector = Sector(8);

/// Reads and checks the superblock of a cache device.
pub(crate) async fn read_cache(disk: &Disk) -> Result<CacheSuper, EngineError> {
    let raw = read_superblock(disk).await?;
    let info = disk.info();
    raw.check_cache(info.sectors, info.logical_block_bytes)
        .inspect_err(|_| mark(Mark::NoSuperblock))
        .map_err(|c| refused(info, c))
}

/// Reads and checks the superblock of a backing device.
pub(crate) async fn read_backing(disk: &Disk) -> Result<BackingSuper, EngineError> {
    let raw = read_superblock(disk).await?;
    let info = disk.info();
    raw.check_backing(info.sectors, info.logical_block_bytes)
        .inspect_err(|_| mark(Mark::RefusedSuperblock))
        .map_err(|c| refused(info, c))
}

fn refused(info: &DeviceInfo, source: Corrupt) -> EngineError {
    EngineError::Superblock { device: info.name.clone(), sector: SUPERBLOCK_SECTOR, source }
}

async fn read_superblock(disk: &Disk) -> Result<RawSuperblock, EngineError> {
    let info = disk.info();
    if info.sectors < Sectors(16) {
        return Err(DeviceRefusal::TooSmall { sectors: info.sectors }.of(&info.name).into());
    }
    let (buffer, result) = disk.read(SUPERBLOCK_SECTOR, disk.runtime().pool().take(4096)).await;
    result?;
    RawSuperblock::from_prefix(buffer.as_slice()).cloned().map_err(|c| refused(info, c))
}
