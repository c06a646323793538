//! A table indexed by bucket number that needs memory only for stored entries.
//!
//! Owns the table's chunks. The number of buckets comes from a superblock, which may claim any size that a sparse file can
//! have. Invariant: memory grows with the number of entries that were found on the device.

use format::BucketNr;

const CHUNK: usize = 1024;

/// One `T` per bucket; [`Default`] for buckets without a stored entry.
#[derive(Clone, Debug)]
pub(crate) struct Sparse<T> {
    chunks: Vec<Option<Box<[T; CHUNK]>>>,
    len: u64,
}

impl<T: Copy + Default> Sparse<T> {
    /// A table for buckets `0..len`. Entries of other buckets are not stored.
    pub(crate) fn new(len: u64) -> Sparse<T> {
        Sparse { chunks: Vec::new(), len }
    }

    fn split(bucket: BucketNr) -> (usize, usize) {
        let n = usize::try_from(bucket.0).unwrap_or(usize::MAX);
        (n / CHUNK, n % CHUNK)
    }

    /// The entry of `bucket`.
    pub(crate) fn get(&self, bucket: BucketNr) -> T {
        let (chunk, at) = Self::split(bucket);
        let chunk = self.chunks.get(chunk).and_then(|c| c.as_deref());
        chunk.and_then(|c| c.get(at)).copied().unwrap_or_default()
    }

    /// The entry of `bucket`, mutable; `None` if the bucket does not exist.
    pub(crate) fn get_mut(&mut self, bucket: BucketNr) -> Option<&mut T> {
        if u64::from(bucket.0) >= self.len {
            return None;
        }
        let (chunk, at) = Self::split(bucket);
        if chunk >= self.chunks.len() {
            self.chunks.resize_with(chunk.checked_add(1)?, || None);
        }
        let slot = self.chunks.get_mut(chunk)?;
        slot.get_or_insert_with(|| Box::new([T::default(); CHUNK])).get_mut(at)
    }

    /// The stored entries in order. Some of them may have the default value.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (BucketNr, T)> + '_ {
        let len = self.len;
        let entries = self.chunks.iter().enumerate().filter_map(|(i, c)| Some((i, c.as_deref()?)));
        entries
            .flat_map(|(i, c)| c.iter().enumerate().map(move |(j, &v)| (i * CHUNK + j, v)))
            .filter_map(|(n, v)| Some((BucketNr(u32::try_from(n).ok()?), v)))
            .take_while(move |(n, _)| u64::from(n.0) < len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stores_only_what_exists() {
        let mut t: Sparse<u16> = Sparse::new(u64::from(u32::MAX));
        *t.get_mut(BucketNr(5)).unwrap() = 7;
        *t.get_mut(BucketNr(3_000_000_000)).unwrap() = 9;
        assert!(t.get_mut(BucketNr(u32::MAX)).is_none());
        assert_eq!((t.get(BucketNr(5)), t.get(BucketNr(6)), t.get(BucketNr(3_000_000_000))), (7, 0, 9));
        assert_eq!(t.chunks.iter().flatten().count(), 2);
        assert_eq!(
            t.iter().filter(|e| e.1 != 0).collect::<Vec<_>>(),
            [(BucketNr(5), 7), (BucketNr(3_000_000_000), 9)]
        );

        let mut t: Sparse<u8> = Sparse::new(10);
        *t.get_mut(BucketNr(9)).unwrap() = 1;
        assert_eq!(t.iter().count(), 10);
    }
}
