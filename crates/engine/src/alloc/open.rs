//! The open buckets, to which new data is written.
//!
//! Owns the buckets that are being filled. Each kind of data ([`DataKind`]) has its own buckets, so that dirty data,
//! clean data, flash-only volumes and moved data are reclaimed independently. At most one bucket of each kind is open, so
//! data that is written together is stored together. The kernel has more open buckets, one for each writing task
//! (semantics section 7.4); a block server has no such tasks.
//!
//! Invariant: an open bucket has one pin, and one more for every place that was handed out, until its key is inserted
//! or the place is released.

use format::{BucketNr, Geometry, Ptr, Sector, Sectors};

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

impl DataKind {
    /// The number of kinds; `Moving` is the last one.
    pub(super) const COUNT: u32 = DataKind::Moving as u32 + 1;
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
    /// Makes the open buckets of a set with this geometry. Small caches have fewer than one for each kind of data.
    pub(crate) fn of_set(g: &Geometry) -> OpenBuckets {
        let limit = (g.nbuckets / 64).clamp(4, DataKind::COUNT) as usize;
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

    /// The index of the open bucket of a kind, if there is one.
    fn open_bucket(&self, kind: DataKind) -> Option<usize> {
        self.open.iter().position(|o| o.kind == kind)
    }

    /// Takes a place for `want` sectors of this kind of data; the place may be shorter. `fresh` supplies a new bucket;
    /// returns `None` if there is none.
    pub(crate) fn place(
        &mut self,
        kind: DataKind,
        want: Sectors,
        buckets: &mut Buckets,
        fresh: impl FnOnce(&mut Buckets) -> Option<BucketNr>,
    ) -> Option<Placed> {
        let (bucket_sectors, block_sectors) = (self.bucket_sectors, self.block_sectors);
        self.clock += 1;
        let i = match self.open_bucket(kind) {
            Some(i) => i,
            None => {
                let bucket = fresh(buckets)?;
                self.close_coldest(buckets);
                buckets.pin(bucket);
                self.open.push(Open { bucket, kind, used: Sectors::ZERO, last_used: self.clock });
                self.open.len() - 1
            }
        };
        let o = &mut self.open[i];
        let size = Sectors(want.0.min((self.data_sectors - o.used).0).min(MAX_PIECE.0));
        let sector = Sector(u64::from(o.bucket.0) * bucket_sectors.0 + o.used.0);
        let ptr = Ptr::new(0, sector, buckets.generation(o.bucket));
        o.used += size;
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
