//! The list of extents of one btree leaf in memory.
//!
//! Owns a sorted list of [`Entry`], split into chunks of at most [`CHUNK_ENTRIES`], so that an insertion moves at most
//! 2 KiB. A leaf may have extents of several devices; a chunk has those of one inode. Must not know buckets,
//! generations or disks: it passes replaced entries to the caller, which accounts for them.
//!
//! Invariants: entries are disjoint and ascending by (inode, end); no chunk is empty; `last_end` of a chunk is the
//! end of its last entry.

use format::{Inode, Sector, Sectors};

use super::entry::Entry;

/// The largest number of entries in a chunk.
const CHUNK_ENTRIES: usize = 128;

/// A part of the list, with entries of one inode.
struct Chunk {
    inode: Inode,
    /// Whether an entry may be unwritten; true whenever one is.
    unwritten: bool,
    last_end: Sector,
    entries: Vec<Entry>,
}

/// The position of an entry: the chunk, and the index in it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct EntryPosition {
    chunk: usize,
    index: usize,
}

/// The number of unwritten entries.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Unwritten {
    pub(crate) keys: usize,
    /// The number of unwritten entries that are holes.
    pub(crate) holes: usize,
}

/// A sorted list of extents.
pub(crate) struct Extents {
    /// Extents are joined only inside one bucket of `1 << bucket_shift` sectors, because a key must not cross a bucket
    /// boundary.
    bucket_shift: u32,
    chunks: Vec<Chunk>,
    len: usize,
}

impl Extents {
    /// Makes an empty list for a cache with buckets of this size.
    pub(crate) fn new(bucket_sectors: Sectors) -> Extents {
        Extents { bucket_shift: bucket_sectors.0.trailing_zeros(), chunks: Vec::new(), len: 0 }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The bytes of memory that full chunks would take: cheap to compute, and close enough to limit the memory of
    /// leaves.
    pub(crate) fn memory_bytes_hint(&self) -> usize {
        self.chunks.len() * (CHUNK_ENTRIES * size_of::<Entry>() + size_of::<Chunk>())
    }

    /// The bytes of memory that the list takes.
    #[cfg(test)]
    pub(crate) fn memory_bytes(&self) -> usize {
        self.chunks.capacity() * size_of::<Chunk>()
            + self.chunks.iter().map(|c| c.entries.capacity() * size_of::<Entry>()).sum::<usize>()
    }

    /// The first entry of `inode` that ends behind `position`: it contains the position or follows it.
    pub(crate) fn first_behind(&self, inode: Inode, position: Sector) -> Option<Entry> {
        let at = self.seek(inode, position);
        let chunk = self.chunks.get(at.chunk)?;
        if chunk.inode == inode { chunk.entries.get(at.index).copied() } else { None }
    }

    /// Every entry, ascending.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (Inode, Entry)> + '_ {
        self.chunks.iter().flat_map(|c| c.entries.iter().map(|e| (c.inode, *e)))
    }

    /// Entries of `inode` that end behind `start`, ascending.
    pub(crate) fn iter_from(&self, inode: Inode, start: Sector) -> impl Iterator<Item = Entry> + '_ {
        let at = self.seek(inode, start);
        let first = self.chunks.get(at.chunk).filter(|c| c.inode == inode);
        let head = first.map_or(&[][..], |c| c.entries.get(at.index..).unwrap_or(&[]));
        let rest = self.chunks.get(at.chunk + 1..).unwrap_or(&[]);
        head.iter()
            .copied()
            .chain(rest.iter().take_while(move |c| c.inode == inode).flat_map(|c| c.entries.iter().copied()))
    }

    /// Every unwritten entry, ascending.
    pub(crate) fn iter_unwritten(&self) -> impl Iterator<Item = (Inode, Entry)> + '_ {
        self.chunks
            .iter()
            .filter(|c| c.unwritten)
            .flat_map(|c| c.entries.iter().map(|e| (c.inode, *e)))
            .filter(|(_, e)| e.is_unwritten())
    }

    /// The number of unwritten entries.
    pub(crate) fn count_unwritten(&self) -> Unwritten {
        let mut n = Unwritten::default();
        for e in self.chunks.iter().filter(|c| c.unwritten).flat_map(|c| c.entries.as_slice()) {
            let (keys, holes) = e.count_unwritten();
            n.keys += keys;
            n.holes += holes;
        }
        n
    }

    /// Marks every entry as written, after all of them went into a bset.
    pub(crate) fn mark_all_written(&mut self) {
        for chunk in self.chunks.iter_mut().filter(|c| c.unwritten) {
            chunk.entries.iter_mut().for_each(Entry::mark_written);
            chunk.unwritten = false;
        }
    }

    /// Removes the entries for which `wanted` is false. `wanted` may change an entry, but not its start and end.
    pub(crate) fn retain(&mut self, mut wanted: impl FnMut(Inode, &mut Entry) -> bool) {
        self.chunks.retain_mut(|chunk| {
            let inode = chunk.inode;
            chunk.entries.retain_mut(|e| wanted(inode, e));
            chunk.unwritten = chunk.entries.iter().any(|e| e.is_unwritten());
            if let Some(last) = chunk.entries.last() {
                chunk.last_end = last.end();
            }
            !chunk.entries.is_empty()
        });
        self.len = self.chunks.iter().map(|c| c.entries.len()).sum();
    }

    /// Adds an entry behind all others, for loading and splitting.
    pub(crate) fn push_back(&mut self, inode: Inode, entry: Entry) {
        self.len += 1;
        if let Some(chunk) = self.chunks.last_mut() {
            debug_assert!((chunk.inode, chunk.last_end) < (inode, entry.end()));
            if chunk.inode == inode && chunk.entries.len() < CHUNK_ENTRIES {
                chunk.entries.push(entry);
                chunk.last_end = entry.end();
                chunk.unwritten |= entry.is_unwritten();
                return;
            }
        }
        self.chunks.push(Chunk::of(inode, entry));
    }

    /// Makes `[start, end)` of `inode` a hole and then, if `new` is given, inserts it there; `new` must lie inside the
    /// range. Calls `removed` with each old entry, clipped to the range.
    pub(crate) fn replace(
        &mut self,
        inode: Inode,
        start: Sector,
        end: Sector,
        new: Option<Entry>,
        mut removed: impl FnMut(Entry),
    ) {
        debug_assert!(start < end);
        debug_assert!(new.is_none_or(|n| n.start() >= start && n.end() <= end));
        let at = self.seek(inode, start);
        // The most common case: a write of the same blocks as before.
        if let (Some(new), Some(chunk)) = (new, self.chunks.get_mut(at.chunk))
            && chunk.inode == inode
            && let Some(old) = chunk.entries.get_mut(at.index)
            && old.end() == new.end()
            && old.size() == new.size()
            && new.start() == start
            && new.end() == end
        {
            removed(*old);
            *old = new;
            chunk.unwritten |= new.is_unwritten();
            return;
        }
        let at = self.clear(at, inode, start, end, &mut removed);
        if let Some(new) = new {
            self.insert_at(at, inode, new);
        }
    }

    /// Makes `[start, end)` a hole; `at` is the place of the first entry behind `start`. Returns the place of a new
    /// entry for the range.
    fn clear(
        &mut self,
        mut at: EntryPosition,
        inode: Inode,
        start: Sector,
        end: Sector,
        removed: &mut impl FnMut(Entry),
    ) -> EntryPosition {
        loop {
            let Some(chunk) = self.chunks.get_mut(at.chunk).filter(|c| c.inode == inode) else { return at };
            let Some(first) = chunk.entries.get(at.index).copied() else {
                // The place is behind the last entry of this chunk; the next chunk may begin inside the range.
                let next = EntryPosition { chunk: at.chunk + 1, index: 0 };
                match self.chunks.get(next.chunk).filter(|c| c.inode == inode) {
                    Some(c) if c.entries.first().is_some_and(|e| e.start() < end) => at = next,
                    _ => return at,
                }
                continue;
            };
            if first.start() >= end {
                return at;
            }
            if first.start() < start {
                return self.clear_inside(at, first, start, end, removed);
            }
            // Removes whole entries up to the first one that reaches beyond the range.
            let covered =
                chunk.entries.get(at.index..).unwrap_or(&[]).iter().take_while(|e| e.end() <= end).count();
            for e in chunk.entries.drain(at.index..at.index + covered) {
                removed(e);
            }
            self.len -= covered;
            if let Some(e) = chunk.entries.get_mut(at.index) {
                if e.start() < end {
                    removed(e.clipped(start, end));
                    e.cut_front(end - e.start());
                }
                chunk.fix_last_end();
                return at;
            }
            if chunk.entries.is_empty() {
                self.chunks.remove(at.chunk);
                at.index = 0;
                // A new entry for the range goes to the end of the chunk before, or into a new chunk.
                if self.chunks.get(at.chunk).is_none_or(|c| c.inode != inode)
                    && let Some(before) = at.chunk.checked_sub(1)
                    && let Some(c) = self.chunks.get(before).filter(|c| c.inode == inode)
                {
                    return EntryPosition { chunk: before, index: c.entries.len() };
                }
            } else {
                chunk.fix_last_end();
            }
        }
    }

    /// Clears the range where the first overlapping entry begins before it: the head of that entry stays, and its tail
    /// if it has one.
    fn clear_inside(
        &mut self,
        at: EntryPosition,
        first: Entry,
        start: Sector,
        end: Sector,
        removed: &mut impl FnMut(Entry),
    ) -> EntryPosition {
        removed(first.clipped(start, end));
        let next = EntryPosition { chunk: at.chunk, index: at.index + 1 };
        let chunk = &mut self.chunks[at.chunk];
        let inode = chunk.inode;
        chunk.entries[at.index].cut_back(first.end() - start);
        if first.end() > end {
            let mut tail = first;
            tail.cut_front(end - first.start());
            // The tail goes into the next bset, too, because the merged bsets could have more keys than the bsets
            // themselves (see `merged`).
            tail.mark_rewritten();
            return self.insert_behind(next, inode, tail);
        }
        chunk.fix_last_end();
        self.clear(next, inode, start, end, removed)
    }

    /// Inserts an entry and returns its place.
    fn insert_behind(&mut self, at: EntryPosition, inode: Inode, entry: Entry) -> EntryPosition {
        self.insert_plain(at, inode, entry);
        self.seek(inode, entry.start())
    }

    fn insert_at(&mut self, at: EntryPosition, inode: Inode, entry: Entry) {
        if let Some(chunk) = self.chunks.get_mut(at.chunk).filter(|c| c.inode == inode)
            && let Some(left) = at.index.checked_sub(1).and_then(|i| chunk.entries.get_mut(i))
            && left.try_join(entry, self.bucket_shift)
        {
            chunk.fix_last_end();
            return;
        }
        self.insert_plain(at, inode, entry);
    }

    fn insert_plain(&mut self, at: EntryPosition, inode: Inode, entry: Entry) {
        self.len += 1;
        let in_chunk = self.chunks.get(at.chunk).is_some_and(|c| c.inode == inode);
        if !in_chunk {
            // If the place is in no chunk of the inode, the inode has no chunk.
            debug_assert!(self.chunks.iter().all(|c| c.inode != inode));
            self.chunks.insert(at.chunk, Chunk::of(inode, entry));
            return;
        }
        let chunk = &mut self.chunks[at.chunk];
        if chunk.entries.len() < CHUNK_ENTRIES {
            chunk.insert(at.index, entry);
            return;
        }
        // A full chunk is split in the middle, but at its end for an ascending write, so that ascending writes fill
        // chunks completely.
        let half = if at.index == CHUNK_ENTRIES { CHUNK_ENTRIES } else { CHUNK_ENTRIES / 2 };
        let mut right = Vec::with_capacity(CHUNK_ENTRIES);
        right.extend(chunk.entries.drain(half..));
        let mut right = Chunk { inode, unwritten: chunk.unwritten, last_end: chunk.last_end, entries: right };
        if at.index >= half {
            right.insert(at.index - half, entry);
        } else {
            chunk.insert(at.index, entry);
        }
        chunk.fix_last_end();
        self.chunks.insert(at.chunk + 1, right);
    }

    /// The place of the first entry of `inode` that ends behind `position`, or where it would be.
    fn seek(&self, inode: Inode, position: Sector) -> EntryPosition {
        let wanted = order(inode, position);
        let chunk = self.chunks.partition_point(|c| order(c.inode, c.last_end) <= wanted);
        match self.chunks.get(chunk) {
            Some(c) if c.inode == inode => {
                EntryPosition { chunk, index: c.entries.partition_point(|e| e.end() <= position) }
            }
            // The position is behind the last entry of the inode: the place is the end of its last chunk.
            _ => match chunk.checked_sub(1).and_then(|i| self.chunks.get(i)) {
                Some(c) if c.inode == inode => EntryPosition { chunk: chunk - 1, index: c.entries.len() },
                _ => EntryPosition { chunk, index: 0 },
            },
        }
    }
}

/// A number by which positions of all devices are ordered; comparing two of them needs no branch.
pub(super) fn order(inode: Inode, position: Sector) -> u128 {
    u128::from(inode.0) << 64 | u128::from(position.0)
}

impl Chunk {
    fn of(inode: Inode, entry: Entry) -> Chunk {
        let mut entries = Vec::with_capacity(CHUNK_ENTRIES);
        entries.push(entry);
        Chunk { inode, unwritten: entry.is_unwritten(), last_end: entry.end(), entries }
    }

    fn insert(&mut self, index: usize, entry: Entry) {
        self.entries.insert(index, entry);
        self.unwritten |= entry.is_unwritten();
        self.fix_last_end();
    }

    fn fix_last_end(&mut self) {
        if let Some(last) = self.entries.last() {
            self.last_end = last.end();
        }
    }
}

#[cfg(test)]
mod properties;

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use format::{Gen, Ptr};
    use proptest::prelude::*;

    use super::*;

    /// The expected content of every sector of every inode: the cache sector and the dirty flag.
    type Naive = BTreeMap<(u32, u64), (u64, bool)>;

    #[derive(Clone, Debug)]
    struct Step {
        inode: u32,
        start: u64,
        size: u64,
        target: Option<(u64, bool)>,
    }

    fn step() -> impl Strategy<Value = Step> {
        (
            0..3u32,
            0..2000u64,
            prop_oneof![1..4u64, 8..9u64, 1..400u64],
            any::<bool>(),
            0..1_000_000u64,
            any::<bool>(),
        )
            .prop_map(|(inode, start, size, hole, target, dirty)| Step {
                inode,
                start,
                size,
                target: (!hole).then_some((target, dirty)),
            })
    }

    fn entry(s: &Step) -> Option<Entry> {
        s.target.map(|(at, dirty)| {
            Entry::extent(Sector(s.start + s.size), Sectors(s.size), dirty, Ptr::new(0, Sector(at), Gen(1)))
        })
    }

    fn sectors_of(inode: u32, e: Entry) -> impl Iterator<Item = ((u32, u64), (u64, bool))> {
        (0..e.size().0).map(move |i| ((inode, e.start().0 + i), (e.ptr().offset().0 + i, e.dirty())))
    }

    fn check(extents: &Extents, naive: &Naive) {
        let all: Naive = extents.iter().flat_map(|(inode, e)| sectors_of(inode.0, e)).collect();
        assert_eq!(&all, naive);
        let mut last = (Inode(0), Sector(0));
        for (inode, e) in extents.iter() {
            assert!(last <= (inode, e.start()), "{e:?} after {last:?}");
            last = (inode, e.end());
        }
        assert_eq!(extents.iter().count(), extents.len());
        for c in &extents.chunks {
            assert_eq!(Some(c.last_end), c.entries.last().map(|e| e.end()));
            assert!(c.entries.len() <= CHUNK_ENTRIES);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]
        #[test]
        fn replace_agrees_with_a_map_of_sectors(steps in prop::collection::vec(step(), 1..400)) {
            let mut extents = Extents::new(Sectors(64));
            let mut naive = Naive::new();
            for s in &steps {
                let mut removed = Naive::new();
                let (start, end) = (Sector(s.start), Sector(s.start + s.size));
                extents.replace(Inode(s.inode), start, end, entry(s), |e| {
                    removed.extend(sectors_of(s.inode, e));
                });
                let mut expected = Naive::new();
                for p in s.start..s.start + s.size {
                    if let Some(old) = naive.remove(&(s.inode, p)) {
                        expected.insert((s.inode, p), old);
                    }
                    if let Some((at, dirty)) = s.target {
                        naive.insert((s.inode, p), (at + p - s.start, dirty));
                    }
                }
                prop_assert_eq!(removed, expected);
                let found = extents.first_behind(Inode(s.inode), start);
                let want = naive.range((s.inode, s.start)..(s.inode + 1, 0)).next().map(|(k, _)| k.1);
                prop_assert_eq!(found.map(|e| e.start().0.max(s.start)), want);
                let walked: Vec<u64> = extents.iter_from(Inode(s.inode), start).map(|e| e.end().0).collect();
                let all: Vec<u64> = extents
                    .iter()
                    .filter(|(i, e)| i.0 == s.inode && e.end() > start)
                    .map(|(_, e)| e.end().0)
                    .collect();
                prop_assert_eq!(walked, all);
            }
            check(&extents, &naive);
        }
    }

    /// Adds an entry of 8 sectors that cannot be joined with another.
    fn add(x: &mut Extents, inode: u32, slot: u64) {
        let ptr = Ptr::new(0, Sector(slot * 32), Gen(0));
        let e = Entry::extent(Sector(slot * 16 + 8), Sectors(8), true, ptr);
        x.replace(Inode(inode), e.start(), e.end(), Some(e), |_| {});
    }

    fn chunks(x: &Extents) -> Vec<(u32, usize)> {
        x.chunks.iter().map(|c| (c.inode.0, c.entries.len())).collect()
    }

    /// A full chunk is split at its end for an entry behind all others, and in its middle for any other entry.
    #[test]
    fn chunks_are_filled_before_there_are_others() {
        let mut x = Extents::new(Sectors(64));
        (0..128).for_each(|n| add(&mut x, 1, 2 * n));
        add(&mut x, 0, 7);
        add(&mut x, 2, 7);
        assert_eq!(chunks(&x), [(0, 1), (1, 128), (2, 1)]);
        add(&mut x, 1, 256);
        assert_eq!(chunks(&x), [(0, 1), (1, 128), (1, 1), (2, 1)]);
        add(&mut x, 1, 257);
        assert_eq!(chunks(&x), [(0, 1), (1, 128), (1, 2), (2, 1)]);
        // The first half of the full chunk ends with slot 126.
        add(&mut x, 1, 127);
        assert_eq!(chunks(&x), [(0, 1), (1, 64), (1, 65), (1, 2), (2, 1)]);
        add(&mut x, 1, 125);
        assert_eq!(chunks(&x), [(0, 1), (1, 65), (1, 65), (1, 2), (2, 1)]);
        assert_eq!(x.len(), 134);
        let mut y = Extents::new(Sectors(64));
        (5..133).for_each(|n| add(&mut y, 1, n));
        add(&mut y, 1, 3);
        assert_eq!(chunks(&y), [(1, 65), (1, 64)]);
    }

    /// An entry between two chunks goes to the first of them, where it may be joined with the last entry.
    #[test]
    fn an_entry_joins_the_end_of_a_full_chunk() {
        let mut x = Extents::new(Sectors(64));
        (0..129).for_each(|n| add(&mut x, 1, n));
        assert_eq!(chunks(&x), [(1, 128), (1, 1)]);
        // Slot 127 ends at sector 2040, and slot 128 begins at 2048. The new entry goes from the middle of slot 127 to slot
        // 128.
        let e = Entry::extent(Sector(2048), Sectors(12), true, Ptr::new(0, Sector(127 * 32 + 4), Gen(0)));
        x.replace(Inode(1), e.start(), e.end(), Some(e), |_| {});
        assert_eq!(chunks(&x), [(1, 128), (1, 1)]);
        assert_eq!(x.first_behind(Inode(1), Sector(2032)).map(|e| e.size()), Some(Sectors(16)));
    }

    /// The last chunk of an inode has one entry. An entry that replaces it goes to the end of the chunk before.
    #[test]
    fn an_entry_in_the_place_of_a_chunk_goes_to_the_chunk_before() {
        let shorter = |slot: u64| {
            let ptr = Ptr::new(0, Sector(slot * 32), Gen(0));
            Entry::extent(Sector(slot * 16 + 4), Sectors(4), true, ptr)
        };
        for with_other in [false, true] {
            let with = |of_one: &[usize]| -> Vec<(u32, usize)> {
                let of_one = of_one.iter().map(|n| (1, *n));
                of_one.chain(with_other.then_some((2, 1))).collect()
            };
            let mut x = Extents::new(Sectors(64));
            if with_other {
                add(&mut x, 2, 0);
            }
            (0..257).for_each(|slot| add(&mut x, 1, slot));
            assert_eq!(chunks(&x), with(&[128, 128, 1]));
            // The chunk before has no room.
            x.replace(Inode(1), Sector(4096), Sector(4104), Some(shorter(256)), |_| {});
            assert_eq!(chunks(&x), with(&[128, 128, 1]));
            // The chunk before has room.
            x.replace(Inode(1), Sector(4080), Sector(4088), None, |_| {});
            x.replace(Inode(1), Sector(4096), Sector(4104), Some(shorter(256)), |_| {});
            x.replace(Inode(1), Sector(4090), Sector(4104), Some(shorter(256)), |_| {});
            assert_eq!(chunks(&x), with(&[128, 128]));
            // There is one chunk before.
            x.replace(Inode(1), Sector(2048), Sector(4104), None, |_| {});
            x.replace(Inode(1), Sector(0), Sector(8), None, |_| {});
            add(&mut x, 1, 128);
            add(&mut x, 1, 129);
            assert_eq!(chunks(&x), with(&[128, 1]));
            x.replace(Inode(1), Sector(0), Sector(24), None, |_| {});
            x.replace(Inode(1), Sector(2060), Sector(2072), Some(shorter(129)), |_| {});
            assert_eq!(chunks(&x), with(&[128]));
            let starts: Vec<u64> = x.iter().filter(|(i, _)| i.0 == 1).map(|(_, e)| e.start().0).collect();
            assert!(starts.is_sorted(), "{starts:?}");
        }
    }

    #[test]
    fn unwritten_entries_are_found_until_marked() {
        let mut x = Extents::new(Sectors(64));
        for i in 0..1000u64 {
            let e = Entry::extent(Sector(i * 16 + 8), Sectors(8), true, Ptr::new(0, Sector(i * 8), Gen(0)));
            let e = if i % 3 == 0 { e.unwritten() } else { e };
            x.replace(Inode(1), e.start(), e.end(), Some(e), |_| {});
        }
        assert_eq!(x.iter_unwritten().count(), 334);
        x.mark_all_written();
        assert_eq!(x.iter_unwritten().count(), 0);
        assert_eq!(x.len(), 1000);
    }

    #[test]
    fn memory_stays_below_32_bytes_for_each_extent() {
        let mut x = Extents::new(Sectors(64));
        let mut rng = io::Rng::new(1);
        let mut order: Vec<u64> = (0..20_000).collect();
        for i in (1..order.len()).rev() {
            order.swap(i, rng.below(i as u64 + 1) as usize);
        }
        for i in order {
            // The entries are never joined, because their cache sectors are not adjacent.
            let e = Entry::extent(Sector(i * 8 + 8), Sectors(8), true, Ptr::new(0, Sector(i * 16), Gen(0)));
            x.replace(Inode(0), e.start(), e.end(), Some(e), |_| {});
        }
        assert!(x.memory_bytes() <= 32 * x.len(), "{} bytes for {} extents", x.memory_bytes(), x.len());
    }
}
