//! An entry in plain numbers, and the properties that compare the arithmetic of an entry with it.
//!
//! Owns the properties. Tests call them with boundary and random values (`properties`), the harnesses of a model checker
//! with all values (`proofs`). Must not know the source of the values.

use format::{Gen, JournalSeq, Ptr, Sector, Sectors};

use super::Entry;

/// Sectors of the largest cache.
pub(super) const CACHE_END: u64 = 1 << 43;

/// The place of the data, or the journal entry that made a hole.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum EntryTarget {
    Cache { offset: u64, generation: u8 },
    Hole { seq: u64 },
}

/// An entry in plain numbers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Model {
    pub(super) start: u64,
    pub(super) end: u64,
    is_dirty: bool,
    pub(super) target: EntryTarget,
    is_unwritten: bool,
    may_be_durable: bool,
}

impl Model {
    pub(super) fn of(e: Entry) -> Model {
        let target = match e.is_hole() {
            true => EntryTarget::Hole { seq: e.hole_seq().0 },
            false => EntryTarget::Cache { offset: e.ptr().offset().0, generation: e.generation().0 },
        };
        Model {
            start: e.start().0,
            end: e.end().0,
            is_dirty: e.dirty(),
            target,
            is_unwritten: e.is_unwritten(),
            may_be_durable: e.may_be_durable(),
        }
    }

    pub(super) fn size(&self) -> u64 {
        self.end - self.start
    }

    fn cut_front(mut self, n: u64) -> Model {
        self.start += n;
        if let EntryTarget::Cache { offset, .. } = &mut self.target {
            *offset += n;
        }
        self
    }

    fn cut_back(mut self, n: u64) -> Model {
        self.end -= n;
        self
    }

    /// One entry that stands for both, if there is one.
    fn joined(self, right: Model, bucket_shift: u32) -> Option<Model> {
        let follows = match (self.target, right.target) {
            (EntryTarget::Hole { seq: a }, EntryTarget::Hole { seq: b }) => a == b,
            (
                EntryTarget::Cache { offset: a, generation: g },
                EntryTarget::Cache { offset: b, generation: h },
            ) => a + self.size() == b && g == h && a >> bucket_shift == b >> bucket_shift,
            _ => false,
        };
        let alike = self.is_dirty == right.is_dirty
            && self.is_unwritten == right.is_unwritten
            && self.may_be_durable == right.may_be_durable;
        let fits = self.end == right.start && self.size() + right.size() <= 65535;
        (follows && alike && fits).then_some(Model { end: right.end, ..self })
    }
}

/// The flags of an entry: unwritten, journaled. The second has no meaning without the first.
pub(super) const FLAGS: [(bool, bool); 3] = [(false, false), (true, false), (true, true)];

/// Makes an entry of (end, size, dirty), and checks that it returns what it was made of.
pub(super) fn build(
    model: (u64, u64, bool),
    target: EntryTarget,
    (unwritten, journaled): (bool, bool),
) -> Entry {
    let (end, size, dirty) = (Sector(model.0), Sectors(model.1), model.2);
    let mut e = match target {
        EntryTarget::Cache { offset, generation } => {
            Entry::extent(end, size, dirty, Ptr::new(0, Sector(offset), Gen(generation)))
        }
        EntryTarget::Hole { seq } => Entry::hole(end, size, JournalSeq(seq)),
    };
    if unwritten {
        e = e.unwritten();
    }
    if journaled {
        e = e.journaled();
    }
    let built = Model::of(e);
    assert_eq!(
        (built.start, built.end, built.target),
        (end.0 - size.0, end.0, target),
        "what went in comes out"
    );
    assert_eq!(built.is_unwritten, unwritten);
    assert_eq!(built.may_be_durable, !unwritten || journaled);
    e
}

/// `n` is less than the size of the entry.
pub(super) fn check_cuts(e: Entry, n: u64) {
    let model = Model::of(e);
    let (mut front, mut back) = (e, e);
    front.cut_front(Sectors(n));
    assert_eq!(Model::of(front), model.cut_front(n), "{e:?} without its first {n} sectors");
    back.cut_back(Sectors(n));
    assert_eq!(Model::of(back), model.cut_back(n), "{e:?} without its last {n} sectors");
}

/// `[start, end)` overlaps the entry.
pub(super) fn check_clipped(e: Entry, start: u64, end: u64) {
    let model = Model::of(e);
    let front = start.saturating_sub(model.start);
    let back = model.end.saturating_sub(end);
    let expected = model.cut_front(front).cut_back(back);
    let clipped = e.clipped(Sector(start), Sector(end));
    assert_eq!(Model::of(clipped), expected, "{e:?} inside [{start}, {end})");
}

/// Two entries are joined if one entry can stand for both, and are not changed otherwise.
pub(super) fn check_join(left: Entry, right: Entry, bucket_shift: u32) {
    let expected = Model::of(left).joined(Model::of(right), bucket_shift);
    let mut joined = left;
    let done = joined.try_join(right, bucket_shift);
    assert_eq!(done, expected.is_some(), "{left:?} and {right:?} in buckets of 2^{bucket_shift} sectors");
    assert_eq!(Model::of(joined), expected.unwrap_or(Model::of(left)), "{left:?} and {right:?}");
}

/// The two parts of an entry that is cut behind its first `n` sectors are joined to the same entry, unless a bucket ends between
/// them.
pub(super) fn check_halves(e: Entry, n: u64, bucket_shift: u32) {
    let (mut left, mut right) = (e, e);
    left.cut_back(Sectors(e.size().0 - n));
    right.cut_front(Sectors(n));
    check_join(left, right, bucket_shift);
    check_join(right, left, bucket_shift);
    if left.try_join(right, bucket_shift) {
        assert_eq!(left, e);
    }
}
