//! A read request.
//!
//! Owns the range of a read, the place of its data, and the decision whether it goes through the cache. Must not know how it
//! is carried out.

use format::{Sector, Sectors};

use super::Target;
use crate::policy::bypass::{Decision, RequestKind};

/// A read request, or a part of one. Its buffer is passed beside it, because the answer returns the buffer.
#[derive(Clone, Copy)]
pub(super) struct Read {
    pub(super) start: Sector,
    pub(super) end: Sector,
    /// The position in the buffer at which the data begins.
    pub(super) offset_bytes: usize,
    /// The data is metadata of a file system.
    pub(super) meta: bool,
    /// Whether missing data is put into the cache.
    pub(super) decision: Decision,
    /// False if it is not, whatever the decision says: data that large reads insert can evict what the others read.
    pub(super) inserts: bool,
}

impl Read {
    /// Begins a read of a range and decides whether it goes through the cache.
    pub(super) fn begin(
        target: Target<'_>,
        (start, end): (Sector, Sector),
        offset_bytes: usize,
        meta: bool,
    ) -> Read {
        let Target { volume, cache, .. } = target;
        let decision = volume.decide(cache, RequestKind::Read, start, end - start, meta);
        Read { start, end, offset_bytes, meta, decision, inserts: true }
    }

    pub(super) fn sectors(&self) -> Sectors {
        self.end - self.start
    }

    /// The position in the buffer at which the data ends.
    pub(super) fn end_bytes(&self) -> usize {
        self.offset_bytes + self.sectors().bytes() as usize
    }

    /// The read of a part of the range, whose data has the same place in the buffer.
    pub(super) fn part(&self, start: Sector, end: Sector) -> Read {
        let offset_bytes = self.offset_bytes + (start - self.start).bytes() as usize;
        Read { start, end, offset_bytes, ..*self }
    }
}
