//! The contents of a backing device without a cache.
//!
//! Owns the copying if the cache device has no set that can be opened.

use std::ops::ControlFlow;

use format::{Sector, Sectors};
use inspect::{ExtractError, Progress, ReadAt, Remark, Sink};

/// Sectors that are read at a time.
const CHUNK: u64 = 2048;
/// Sectors of a retry after a larger read failed.
const RETRY: u64 = 8;
/// Zero sectors that are written between two checks for cancellation.
const ZEROS: u64 = 1 << 21;

/// Copies `total` sectors of a device, from `first` on.
pub(super) fn copy(
    device: &dyn ReadAt,
    first: Sector,
    total: Sectors,
    sink: &mut dyn Sink,
    progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
) -> Result<(), ExtractError> {
    sink.begin(total).map_err(ExtractError::Output)?;
    let mut buffer = Vec::new();
    let mut done = Sectors(0);
    while done < total {
        let at = Sector(first.0.saturating_add(done.0));
        let left = total.0 - done.0;
        let hole = device.next_data(at).0.saturating_sub(at.0).min(left).min(ZEROS);
        let n = if hole > 0 {
            sink.zeros(Sectors(hole)).map_err(ExtractError::Output)?;
            hole
        } else {
            let n = left.min(CHUNK);
            part(device, at, (done, Sectors(n)), sink, &mut buffer)?;
            n
        };
        done.0 += n;
        if progress(Progress { done, total }).is_break() {
            return Err(ExtractError::Cancelled { done, total });
        }
    }
    sink.finish().map_err(ExtractError::Output)
}

/// Copies one part; what cannot be read is zeros.
fn part(
    device: &dyn ReadAt,
    at: Sector,
    (done, len): (Sectors, Sectors),
    sink: &mut dyn Sink,
    buffer: &mut Vec<u8>,
) -> Result<(), ExtractError> {
    buffer.resize(usize::try_from(len.bytes()).unwrap_or(0), 0);
    if device.read_at(at, buffer).is_ok() {
        return sink.data(buffer).map_err(ExtractError::Output);
    }
    let mut from = 0;
    while from < len.0 {
        let n = Sectors((len.0 - from).min(RETRY));
        buffer.resize(usize::try_from(n.bytes()).unwrap_or(0), 0);
        if device.read_at(Sector(at.0.saturating_add(from)), buffer).is_ok() {
            sink.data(buffer).map_err(ExtractError::Output)?;
        } else {
            sink.remark(Sectors(done.0 + from), n, Remark::Unreadable);
            sink.zeros(n).map_err(ExtractError::Output)?;
        }
        from += n.0;
    }
    Ok(())
}
