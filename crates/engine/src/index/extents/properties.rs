//! Compares extents with a plain list: every entry with its flags, and not only the content of sectors.

use format::{Gen, JournalSeq, Ptr};
use proptest::prelude::*;

use super::*;

const BUCKET: Sectors = Sectors(64);
const INODES: u32 = 3;

/// Entries of one device, ascending, without chunks.
#[derive(Clone, Default)]
struct List(Vec<Entry>);

impl List {
    /// See [`Extents::replace`].
    fn replace(&mut self, start: Sector, end: Sector, new: Option<Entry>) -> Vec<Entry> {
        let whole = new.filter(|n| n.start() == start && n.end() == end);
        let same = |e: &&mut Entry| e.start() == start && e.end() == end;
        if let (Some(new), Some(old)) = (whole, self.0.iter_mut().find(same)) {
            return vec![std::mem::replace(old, new)];
        }
        let (mut rest, mut removed, mut at) = (Vec::new(), Vec::new(), 0);
        for e in std::mem::take(&mut self.0) {
            if e.end() <= start || e.start() >= end {
                at += usize::from(e.end() <= start);
                rest.push(e);
                continue;
            }
            removed.push(e.clipped(start, end));
            if e.start() < start {
                rest.push(e.clipped(e.start(), start));
                at += 1;
            }
            if e.end() > end {
                let mut tail = e.clipped(end, e.end());
                if e.start() < start {
                    tail.mark_rewritten();
                }
                rest.push(tail);
            }
        }
        self.0 = rest;
        let Some(new) = new else { return removed };
        let joined =
            at.checked_sub(1).is_some_and(|left| self.0[left].try_join(new, BUCKET.0.trailing_zeros()));
        if !joined {
            self.0.insert(at, new);
        }
        removed
    }
}

#[derive(Clone, Debug)]
enum Step {
    Put {
        inode: u32,
        start: u64,
        size: u64,
        at: u64,
        dirty: bool,
        unwritten: bool,
    },
    /// The next sectors, at the next place in the cache; most of these entries are joined.
    Follow {
        inode: u32,
        size: u64,
    },
    Hole {
        inode: u32,
        start: u64,
        size: u64,
        known: bool,
    },
    MarkWritten,
    /// Removes entries whose end is a multiple of this.
    Retain {
        but: u64,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let (inode, start) = (0..INODES, 0..600u64);
    prop_oneof![
        6 => (inode.clone(), start.clone(), 1..40u64, 0..500u64, any::<bool>(), any::<bool>())
            .prop_map(|(inode, start, size, at, dirty, unwritten)| Step::Put { inode, start, size, at, dirty, unwritten }),
        6 => (inode.clone(), 1..9u64).prop_map(|(inode, size)| Step::Follow { inode, size }),
        3 => (inode, start, 1..80u64, any::<bool>())
            .prop_map(|(inode, start, size, known)| Step::Hole { inode, start, size, known }),
        1 => Just(Step::MarkWritten),
        1 => (2..9u64).prop_map(|but| Step::Retain { but }),
    ]
}

struct ExtentsAndModel {
    extents: Extents,
    lists: [List; INODES as usize],
    /// The last entry of each device: its end, and the end of its data.
    last: [(u64, u64); INODES as usize],
    seq: u64,
}

impl ExtentsAndModel {
    fn new() -> ExtentsAndModel {
        ExtentsAndModel {
            extents: Extents::new(BUCKET),
            lists: Default::default(),
            last: Default::default(),
            seq: 0,
        }
    }

    fn replace(&mut self, inode: u32, (start, end): (u64, u64), new: Option<Entry>) {
        let (start, end) = (Sector(start), Sector(end));
        let mut removed = Vec::new();
        self.extents.replace(Inode(inode), start, end, new, |e| removed.push(e));
        assert_eq!(removed, self.lists[inode as usize].replace(start, end, new));
    }

    fn put(&mut self, inode: u32, start: u64, size: u64, at: u64, (dirty, unwritten): (bool, bool)) {
        let e = Entry::extent(Sector(start + size), Sectors(size), dirty, Ptr::new(0, Sector(at), Gen(1)));
        self.replace(
            inode,
            (start, start + size),
            Some(if unwritten { e.unwritten().journaled() } else { e }),
        );
        self.last[inode as usize] = (start + size, at + size);
    }

    fn take(&mut self, step: Step) {
        match step {
            Step::Put { inode, start, size, at, dirty, unwritten } => {
                self.put(inode, start, size, at, (dirty, unwritten));
            }
            Step::Follow { inode, size } => {
                let (start, at) = self.last[inode as usize];
                self.put(inode, start, size, at, (true, true));
            }
            Step::Hole { inode, start, size, known } => {
                self.seq += 1;
                let hole = Entry::hole(Sector(start + size), Sectors(size), JournalSeq(self.seq)).unwritten();
                self.replace(inode, (start, start + size), known.then_some(hole));
            }
            Step::MarkWritten => {
                self.extents.mark_all_written();
                self.lists.iter_mut().flat_map(|l| &mut l.0).for_each(Entry::mark_written);
                assert!(self.extents.chunks.iter().all(|c| !c.unwritten));
            }
            Step::Retain { but } => {
                let stays = |e: &Entry| !e.end().0.is_multiple_of(but);
                self.extents.retain(|_, e| stays(e));
                self.lists.iter_mut().for_each(|l| l.0.retain(stays));
                let is_unwritten = |c: &Chunk| c.entries.iter().any(|e| e.is_unwritten());
                assert!(self.extents.chunks.iter().all(|c| c.unwritten == is_unwritten(c)));
            }
        }
    }

    fn compare(&self) {
        let all = |wanted: fn(&Entry) -> bool| {
            let of = |(inode, list): (u32, &List)| {
                list.0.iter().filter(|e| wanted(e)).map(move |e| (Inode(inode), *e)).collect::<Vec<_>>()
            };
            (0..).zip(&self.lists).flat_map(of).collect::<Vec<_>>()
        };
        let x = &self.extents;
        assert_eq!(x.iter().collect::<Vec<_>>(), all(|_| true));
        assert_eq!(x.iter_unwritten().collect::<Vec<_>>(), all(|e| e.is_unwritten()));
        let n = x.count_unwritten();
        assert_eq!(
            (n.keys, n.holes),
            (all(|e| e.is_unwritten()).len(), all(|e| e.is_unwritten() && e.is_hole()).len())
        );
        assert_eq!(x.len(), all(|_| true).len());
        // Each device with entries has one chunk, because all of its entries fit into one.
        let chunks: Vec<(Inode, Option<Sector>)> =
            x.chunks.iter().map(|c| (c.inode, Some(c.last_end))).collect();
        let ends = (0..).zip(&self.lists).filter(|(_, l)| !l.0.is_empty());
        assert_eq!(chunks, ends.map(|(i, l)| (Inode(i), l.0.last().map(|e| e.end()))).collect::<Vec<_>>());
        let each = CHUNK_ENTRIES * size_of::<Entry>() + size_of::<Chunk>();
        assert_eq!(x.memory_bytes_hint(), chunks.len() * each);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// At most as many entries as fit into a chunk; the list shows which are joined, cut and marked.
    #[test]
    fn entries_agree_with_a_list(steps in prop::collection::vec(step(), 1..90)) {
        let mut both = ExtentsAndModel::new();
        for step in steps {
            both.take(step);
            both.compare();
        }
    }

    /// Loading appends entries of several devices: chunks are filled, and have the same entries as a list.
    #[test]
    fn entries_that_are_appended_fill_chunks(sizes in prop::collection::vec((0..400usize, any::<bool>()), 1..5)) {
        let mut x = Extents::new(BUCKET);
        let mut all = Vec::new();
        for (inode, (count, unwritten)) in (1..).zip(&sizes) {
            for n in 0..*count as u64 {
                let e = Entry::extent(Sector(n * 8 + 8), Sectors(4), false, Ptr::new(0, Sector(n * 64), Gen(0)));
                let e = if *unwritten && n % 50 == 49 { e.unwritten() } else { e };
                x.push_back(Inode(inode), e);
                all.push((Inode(inode), e));
            }
        }
        prop_assert_eq!(x.iter().collect::<Vec<_>>(), all.clone());
        let unwritten: Vec<_> = all.into_iter().filter(|(_, e)| e.is_unwritten()).collect();
        prop_assert_eq!(x.iter_unwritten().collect::<Vec<_>>(), unwritten);
        let chunks = sizes.iter().map(|(count, _)| count.div_ceil(CHUNK_ENTRIES)).sum::<usize>();
        prop_assert_eq!(x.chunks.len(), chunks);
        for (inode, (count, _)) in (1..).zip(&sizes) {
            for n in [0, 63, 127, 128, 200, 399] {
                let next = x.first_behind(Inode(inode), Sector(n * 8 + 3)).map(|e| e.start().0);
                prop_assert_eq!(next, ((n as usize) < *count).then_some(n * 8 + 4));
            }
        }
    }
}
