//! Open buckets: where new data goes.
//!
//! Owns the buckets that are being filled, one list for each kind of data, so that dirty data, clean data, volumes
//! and moved data do not share buckets and are reclaimed independently. Inside a kind, a stream continues in the
//! bucket that it used last, and a write that follows the last one of some bucket goes there: what is written
//! together lies together (semantics section 7.4).
//!
//! Invariant: an open bucket holds one pin, and every piece handed out holds another until its key is inserted or
//! given up.

use format::{BucketNr, Inode, Ptr, Sector, Sectors};

use super::Buckets;

/// What kind of data a bucket is filled with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Stream {
    /// Dirty data of cached devices.
    Dirty,
    /// Clean copies.
    Clean,
    /// Clean copies that were read before.
    Promoted,
    /// Clean copies of file systems' metadata.
    Meta,
    /// Flash-only volumes.
    Volume,
    /// Data packed by the moving garbage collector.
    Moving,
}

/// A place for data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Placed {
    pub(crate) ptr: Ptr,
    pub(crate) size: Sectors,
}

struct Open {
    bucket: BucketNr,
    stream: Stream,
    /// Next free sector inside the bucket.
    used: Sectors,
    /// Where the last piece ended on its device.
    last: (Inode, Sector),
    hint: u16,
    last_used: u64,
}

pub(crate) struct OpenBuckets {
    open: Vec<Open>,
    limit: usize,
    clock: u64,
}

/// Largest piece: the size field of a key, in whole 4 KiB blocks.
const MAX_PIECE: Sectors = Sectors(65528);

impl OpenBuckets {
    /// As many of a set with so many buckets as streams can use, and few enough to be found quickly.
    pub(crate) fn of_set(nbuckets: u32) -> OpenBuckets {
        OpenBuckets::new((nbuckets / 64).clamp(4, 64) as usize)
    }

    pub(crate) fn new(limit: usize) -> OpenBuckets {
        OpenBuckets { open: Vec::with_capacity(limit), limit, clock: 0 }
    }

    /// The open bucket that suits a write best, by index.
    fn choose(&self, stream: Stream, at: (Inode, Sector), hint: u16) -> Option<usize> {
        let mine = || self.open.iter().enumerate().filter(|(_, o)| o.stream == stream);
        let follows = mine().find(|(_, o)| o.last == at);
        let same = || mine().filter(|(_, o)| o.hint == hint).max_by_key(|(_, o)| o.last_used);
        follows.or_else(same).map(|(i, _)| i)
    }

    /// Places up to `want` sectors for `at` of the volume; `fresh` supplies a new bucket. `None`: no bucket is ready.
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn place(
        &mut self,
        stream: Stream,
        at: (Inode, Sector),
        want: Sectors,
        hint: u16,
        bucket_sectors: Sectors,
        block_sectors: Sectors,
        buckets: &mut Buckets,
        fresh: impl FnOnce(&mut Buckets) -> Option<BucketNr>,
    ) -> Option<Placed> {
        self.clock += 1;
        let i = match self.choose(stream, at, hint) {
            Some(i) => i,
            None => match fresh(buckets) {
                Some(bucket) => {
                    self.close_coldest(buckets);
                    buckets.pin(bucket);
                    self.open.push(Open {
                        bucket,
                        stream,
                        used: Sectors::ZERO,
                        last: at,
                        hint,
                        last_used: self.clock,
                    });
                    self.open.len() - 1
                }
                // No bucket: share one with another stream rather than fail.
                None => {
                    let shared = self.open.iter().enumerate().filter(|(_, o)| o.stream == stream);
                    shared.max_by_key(|(_, o)| o.last_used)?.0
                }
            },
        };
        let o = &mut self.open[i];
        let size = Sectors(want.0.min((bucket_sectors - o.used).0).min(MAX_PIECE.0));
        let sector = Sector(u64::from(o.bucket.0) * bucket_sectors.0 + o.used.0);
        let ptr = Ptr::new(0, sector, buckets.generation(o.bucket));
        o.used += size;
        o.last = (at.0, at.1 + size);
        o.hint = hint;
        o.last_used = self.clock;
        buckets.pin(o.bucket);
        if bucket_sectors.0 - o.used.0 < block_sectors.0 {
            let full = self.open.swap_remove(i);
            buckets.unpin(full.bucket);
        }
        Some(Placed { ptr, size })
    }

    /// Closes those buckets that a wipe has before it: nothing more goes there.
    pub(crate) fn close_marked(&mut self, buckets: &mut Buckets) {
        self.open.retain(|o| {
            let marked = buckets.is_to_wipe(o.bucket);
            if marked {
                buckets.unpin(o.bucket);
            }
            !marked
        });
    }

    /// Makes room for one more, if as many are open as may be.
    fn close_coldest(&mut self, buckets: &mut Buckets) {
        if self.open.len() < self.limit {
            return;
        }
        let coldest = self.open.iter().enumerate().min_by_key(|(_, o)| o.last_used).map(|(i, _)| i);
        if let Some(i) = coldest {
            let o = self.open.swap_remove(i);
            buckets.unpin(o.bucket);
        }
    }
}
