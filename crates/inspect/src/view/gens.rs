//! Generations and priorities of all buckets.
//!
//! Owns the rule that stored generations are a lower bound, raised by every pointer found
//! (format section 5). Must not know where pointers come from.

use format::{BucketNr, CacheSuper, Gen, Geometry, Ptr, Sectors};

use crate::sparse::Sparse;

/// The known generation and priority of a bucket.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct BucketState {
    /// Generation and priority in the prio set; `None` if the set could not be read.
    pub stored: Option<(Gen, u16)>,
    /// Newest of the stored generation and the generations of pointers; `None` if there is neither.
    pub effective: Option<Gen>,
}

/// The states of all buckets.
#[derive(Clone, Debug)]
pub struct Gens {
    table: Sparse<BucketState>,
    geometry: Geometry,
    nr_this_dev: u16,
}

impl Gens {
    pub(crate) fn new(superblock: &CacheSuper) -> Gens {
        let geometry = *superblock.geometry();
        let table = Sparse::new(u64::from(geometry.nbuckets));
        Gens { table, geometry, nr_this_dev: superblock.nr_this_dev() }
    }

    /// The bucket that a pointer of `size` sectors points to.
    ///
    /// `None` if the bucket is not on this device, belongs to the superblock area, or does not hold the whole range.
    pub fn bucket_of(&self, ptr: Ptr, size: Sectors) -> Option<BucketNr> {
        let here = ptr.dev() == self.nr_this_dev;
        self.geometry.ptr_bucket(ptr, size).filter(|_| here)
    }

    /// The known generation and priority of `bucket`.
    pub fn state(&self, bucket: BucketNr) -> BucketState {
        self.table.get(bucket)
    }

    /// The generation that pointers into `bucket` must have to be valid.
    pub fn current(&self, bucket: BucketNr) -> Gen {
        self.state(bucket).effective.unwrap_or_default()
    }

    pub(crate) fn store(&mut self, bucket: BucketNr, generation: Gen, prio: u16) {
        if let Some(state) = self.table.get_mut(bucket) {
            *state = BucketState { stored: Some((generation, prio)), effective: Some(generation) };
        }
    }

    /// Raises the generation of the bucket that a pointer of `size` sectors points to, if it points into a bucket.
    pub(crate) fn raise(&mut self, ptr: Ptr, size: Sectors) {
        let Some(bucket) = self.bucket_of(ptr, size).filter(|_| size.0 > 0) else { return };
        if let Some(state) = self.table.get_mut(bucket) {
            let generation = ptr.generation();
            let known = state.effective.map(|g| g.raised_by(generation));
            state.effective = Some(known.unwrap_or(generation));
        }
    }

    /// The number of generations by which the bucket is newer than the pointer; `None` if the pointer points to no bucket.
    ///
    /// A pointer is stale if and only if this is greater than 0.
    pub fn age(&self, ptr: Ptr, size: Sectors) -> Option<u8> {
        let bucket = self.bucket_of(ptr, size)?;
        Some(self.current(bucket).age_of(ptr.generation()))
    }

    /// Number of buckets whose known generation is newer than the stored one.
    pub fn raised(&self) -> u64 {
        let raised = |s: &BucketState| s.stored.is_some_and(|(g, _)| Some(g) != s.effective);
        self.table.iter().filter(|(_, s)| raised(s)).fold(0, |n, _| n + 1)
    }

    /// The states of all buckets with a known generation or priority, in order. Other buckets may be among them.
    pub fn iter(&self) -> impl Iterator<Item = (BucketNr, BucketState)> + '_ {
        self.table.iter()
    }
}
