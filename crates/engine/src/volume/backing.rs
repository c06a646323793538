//! Reads of a volume's backing device.
//!
//! A backing device that fails a flush may drop data that it had acknowledged and not flushed. A later read then returns the
//! older data. The dropped data must not come back after that read, but three operations still have it in memory or in the
//! cache: a write that has read the blocks around its data, writeback that has read gaps, and a clean copy. So after a
//! failed flush a read waits until the operations under way in its range have ended, and does not use clean copies of
//! which no leaf on the cache device has a key. A read during which a flush failed starts again.
//!
//! Owns these rules, and the widening of a read to whole blocks of a device. Must not know the cache device.

use format::{Sector, Sectors};
use io::{Buffer, Disk, VolumeError};

use super::{Blocks, Volume};
use crate::canary::{Bug, bug};
use crate::device::{BackingDevice, MeteredIo};
use crate::index::Kind;

/// Whether a flush of the backing device has failed. This never ends while the device is open.
pub(super) fn flush_has_failed(volume: &Volume) -> bool {
    volume.backing.as_ref().is_some_and(|b| b.flush_has_failed())
}

/// Whether the data of this extent may be taken from the cache: after a failed flush of the backing device clean copies may
/// be of data that the device has dropped, unless a leaf on the cache device has their keys.
pub(crate) fn is_usable(volume: &Volume, kind: Kind) -> bool {
    let may_be_dropped = matches!(kind, Kind::Hit { dirty: false, may_be_durable: false, .. });
    !may_be_dropped || !flush_has_failed(volume) || bug(Bug::FailedFlushIgnoredByReads)
}

/// Starts a read of a range of the backing device, widened to its whole blocks; returns the number of bytes to skip in the
/// buffer.
pub(super) fn start_aligned(backing: &BackingDevice, sector: Sector, sectors: Sectors) -> (MeteredIo, usize) {
    let disk = backing.disk();
    let start = |first, span, buffer| backing.read_data(first, span, buffer, 0);
    start_around(Blocks::of_disk(disk), disk, sector, sectors, start)
}

/// Starts a read of a range of a device, widened to whole `blocks`, with `start`; returns the number of bytes to skip in the
/// buffer.
pub(super) fn start_around(
    blocks: Blocks,
    disk: &Disk,
    sector: Sector,
    sectors: Sectors,
    start: impl FnOnce(Sector, Sectors, Buffer) -> MeteredIo,
) -> (MeteredIo, usize) {
    let (first, last) = blocks.around((sector, sector + sectors));
    let span = last - first;
    let buffer = disk.runtime().pool().take(span.bytes() as usize);
    (start(first, span, buffer), (sector - first).bytes() as usize)
}

/// Reads from the backing device into the caller's buffer.
pub(super) async fn read_directly(
    volume: &Volume,
    start: Sector,
    sectors: Sectors,
    mut buffer: Buffer,
    offset_bytes: usize,
) -> (Buffer, Result<(), VolumeError>) {
    let Some(backing) = volume.backing() else {
        return (buffer, Err(VolumeError::Stopped(volume.name())));
    };
    if Blocks::of_disk(backing.disk()).are_whole(start, sectors) {
        let spare = buffer.len();
        let done = backing.read_data(start, sectors, buffer, offset_bytes).await;
        if let Err(e) = &done.result {
            backing.failed(e, volume.tunables.borrow().io_error_limit);
        }
        let buffer = done.buffer.unwrap_or_else(|| volume.rt.pool().take(spare));
        return (buffer, done.result.map_err(VolumeError::from));
    }
    let (future, skip) = start_aligned(&backing, start, sectors);
    let done = future.await;
    let len = sectors.bytes() as usize;
    let result = match (done.result, done.buffer) {
        (Ok(()), Some(b)) => {
            let target = &mut buffer.as_mut()[offset_bytes..offset_bytes + len];
            target.copy_from_slice(&b.as_slice()[skip..skip + len]);
            Ok(())
        }
        (Err(e), _) => {
            backing.failed(&e, volume.tunables.borrow().io_error_limit);
            Err(e.into())
        }
        (Ok(()), None) => Err(VolumeError::Stopped(volume.name())),
    };
    (buffer, result)
}

/// Reads from the backing device alone. After a failed flush it waits for the operations under way, and a read during which a
/// flush failed is repeated; see the head of the module.
pub(super) async fn read_settled(
    volume: &Volume,
    start: Sector,
    sectors: Sectors,
    mut buffer: Buffer,
    offset_bytes: usize,
) -> (Buffer, Result<(), VolumeError>) {
    loop {
        let flush_failed = flush_has_failed(volume);
        if flush_failed {
            volume.ranges.present_ended(start, start + sectors).await;
        }
        let (b, result) = read_directly(volume, start, sectors, buffer, offset_bytes).await;
        buffer = b;
        if flush_has_failed(volume) == flush_failed || result.is_err() {
            return (buffer, result);
        }
    }
}
