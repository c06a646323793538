//! The open buckets, to which new data is written.
//!
//! Owns the buckets that are being filled. Each kind of data ([`DataKind`]) has its own buckets, so that dirty data,
//! clean data, flash-only volumes and moved data are reclaimed independently. A write that continues the last piece of
//! an open bucket of its kind goes to that bucket; other writes go to the bucket of their kind that was used last. So
//! data that is written together is stored together (semantics section 7.4).
//!
//! Invariant: an open bucket has one pin, and one more for every place that was handed out, until its key is inserted
//! or the place is released.

use format::{BucketNr, Geometry, Inode, Ptr, Sector, Sectors};

use super::Buckets;

/// The kind of data in a bucket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum DataKind {
    /// Dirty data of cached devices.
    Dirty,
    /// Clean copies.
    Clean,
    /// Promoted data: clean copies that were read again.
    Promoted,
    /// Clean copies of file systems' metadata.
    Meta,
    /// Data of flash-only volumes.
    Volume,
    /// Data packed by the moving garbage collector.
    Moving,
}

/// A piece of data that needs a place.
#[derive(Clone, Copy)]
pub(crate) struct PlaceRequest {
    pub(crate) kind: DataKind,
    /// The position on its device.
    pub(crate) at: (Inode, Sector),
    /// The number of sectors; the place may be shorter.
    pub(crate) want: Sectors,
    /// Pieces with the same hint go to the same bucket, if they can.
    pub(crate) hint: u16,
}

/// A place for data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Placed {
    pub(crate) ptr: Ptr,
    pub(crate) size: Sectors,
}

/// An open bucket.
struct Open {
    bucket: BucketNr,
    kind: DataKind,
    /// Next free sector inside the bucket.
    used: Sectors,
    /// The position on its device at which the last piece ended.
    last: (Inode, Sector),
    hint: u16,
    last_used: u64,
}

/// The open buckets of all kinds of data.
pub(crate) struct OpenBuckets {
    open: Vec<Open>,
    limit: usize,
    bucket_sectors: Sectors,
    block_sectors: Sectors,
    /// The sectors of a bucket that data may use.
    data_sectors: Sectors,
    clock: u64,
    /// Buckets that were closed since the last call of [`Self::take_closed`].
    closed: Vec<BucketNr>,
}

/// Largest piece: the limit of the size field of a key, in whole 4 KiB blocks.
const MAX_PIECE: Sectors = Sectors(65528);

impl OpenBuckets {
    /// Makes the open buckets of a set with this geometry: enough for all kinds of data, and few enough for a fast
    /// search.
    pub(crate) fn of_set(g: &Geometry) -> OpenBuckets {
        let limit = (g.nbuckets / 64).clamp(4, 64) as usize;
        OpenBuckets::new(limit, g.bucket_sectors, g.block_sectors)
    }

    pub(crate) fn new(limit: usize, bucket_sectors: Sectors, block_sectors: Sectors) -> OpenBuckets {
        OpenBuckets {
            open: Vec::with_capacity(limit),
            limit,
            bucket_sectors,
            block_sectors,
            data_sectors: bucket_sectors,
            clock: 0,
            closed: Vec::new(),
        }
    }

    /// Limits the sectors of each bucket that data may use.
    pub(super) fn limit_data(&mut self, data_sectors: Sectors) {
        assert!(data_sectors <= self.bucket_sectors && self.open.is_empty(), "set before data is placed");
        self.data_sectors = data_sectors;
    }

    /// The sectors of a bucket that data may use.
    pub(super) fn data_sectors(&self) -> Sectors {
        self.data_sectors
    }

    /// Whether [`Self::take_closed`] returns a bucket.
    pub(super) fn has_closed(&self) -> bool {
        !self.closed.is_empty()
    }

    /// Takes the buckets that were closed since the last call.
    pub(super) fn take_closed(&mut self) -> Vec<BucketNr> {
        std::mem::take(&mut self.closed)
    }

    /// Closes all buckets.
    pub(super) fn close_all(&mut self, buckets: &mut Buckets) {
        for o in self.open.drain(..) {
            buckets.unpin(o.bucket);
            self.closed.push(o.bucket);
        }
    }

    /// The index of the open bucket that fits a write best.
    fn choose(&self, kind: DataKind, at: (Inode, Sector), hint: u16) -> Option<usize> {
        let mine = || self.open.iter().enumerate().filter(|(_, o)| o.kind == kind);
        let follows = mine().find(|(_, o)| o.last == at);
        let same = || mine().filter(|(_, o)| o.hint == hint).max_by_key(|(_, o)| o.last_used);
        follows.or_else(same).map(|(i, _)| i)
    }

    /// Takes a place for a piece or for its begin. `fresh` supplies a new bucket; returns `None` if there is none.
    pub(crate) fn place(
        &mut self,
        request: PlaceRequest,
        buckets: &mut Buckets,
        fresh: impl FnOnce(&mut Buckets) -> Option<BucketNr>,
    ) -> Option<Placed> {
        let PlaceRequest { kind, at, want, hint } = request;
        let (bucket_sectors, block_sectors) = (self.bucket_sectors, self.block_sectors);
        self.clock += 1;
        let i = match self.choose(kind, at, hint) {
            Some(i) => i,
            None => match fresh(buckets) {
                Some(bucket) => {
                    self.close_coldest(buckets);
                    buckets.pin(bucket);
                    self.open.push(Open {
                        bucket,
                        kind,
                        used: Sectors::ZERO,
                        last: at,
                        hint,
                        last_used: self.clock,
                    });
                    self.open.len() - 1
                }
                // No new bucket is ready: use any open bucket of the kind.
                None => {
                    let shared = self.open.iter().enumerate().filter(|(_, o)| o.kind == kind);
                    shared.max_by_key(|(_, o)| o.last_used)?.0
                }
            },
        };
        let o = &mut self.open[i];
        let size = Sectors(want.0.min((self.data_sectors - o.used).0).min(MAX_PIECE.0));
        let sector = Sector(u64::from(o.bucket.0) * bucket_sectors.0 + o.used.0);
        let ptr = Ptr::new(0, sector, buckets.generation(o.bucket));
        o.used += size;
        o.last = (at.0, at.1 + size);
        o.hint = hint;
        o.last_used = self.clock;
        buckets.pin(o.bucket);
        if self.data_sectors.0 - o.used.0 < block_sectors.0 {
            let full = self.open.swap_remove(i);
            buckets.unpin(full.bucket);
        }
        Some(Placed { ptr, size })
    }

    /// Closes the buckets that a wipe has not finished yet, so that no more data goes there.
    pub(crate) fn close_marked(&mut self, buckets: &mut Buckets) {
        let closed = &mut self.closed;
        self.open.retain(|o| {
            let marked = buckets.is_to_wipe(o.bucket);
            if marked {
                buckets.unpin(o.bucket);
                closed.push(o.bucket);
            }
            !marked
        });
    }

    /// Closes the least recently used bucket if the limit of open buckets is reached.
    fn close_coldest(&mut self, buckets: &mut Buckets) {
        if self.open.len() < self.limit {
            return;
        }
        let coldest = self.open.iter().enumerate().min_by_key(|(_, o)| o.last_used).map(|(i, _)| i);
        if let Some(i) = coldest {
            let o = self.open.swap_remove(i);
            buckets.unpin(o.bucket);
            self.closed.push(o.bucket);
        }
    }
}
