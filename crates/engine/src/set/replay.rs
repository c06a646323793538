//! Replay: applies the keys of the journal to the index in memory.
//!
//! The keys of one leaf are applied in the order of the journal. Keys of two leaves need no order, so the replay goes from
//! leaf to leaf: each leaf is read at most once. While leaves take more memory than the limit, a leaf is taken out of
//! memory again as soon as it has its keys, and keeps only these. The leaves pin the journal entries of their keys.
//!
//! Owns the order in which keys are applied. Must not know how the journal was read.

use format::{Bkey, JournalSeq, Jset, Ptr, Sector};
use io::{Nanos, Reservation};

use crate::alloc::Buckets;
use crate::canary::{Bug, Mark, bug, mark};
use crate::damage::{Flaw, KeyFlaw};
use crate::device::{Reader, Tick};
use crate::error::EngineError;
use crate::index::{LeafChange, MAX_POSITION, Tree, Via, names_data};
use crate::journal::Journal;
use crate::refusal::Refusal;

/// Applies the keys of the journal to the index in memory.
pub(super) struct Replayer<'a> {
    pub(super) tree: &'a mut Tree,
    pub(super) buckets: &'a mut Buckets,
    pub(super) journal: &'a Journal,
    pub(super) reader: &'a Reader<'a>,
    /// The entries to replay, in order.
    pub(super) entries: &'a [Jset],
    /// The limit for the memory of leaves.
    pub(super) limit_bytes: usize,
}

/// A key in one leaf that it changes. The order of these is that in which they are applied.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct LeafKey {
    /// The number of the leaf, in the order of the leaves.
    leaf: u32,
    /// The index of the entry.
    entry: u32,
    /// The index of the key in the entry.
    key: u32,
}

impl Replayer<'_> {
    /// Applies all keys. Adds the memory of their order to `memory`.
    pub(super) async fn apply_all(&mut self, memory: &mut Reservation) -> Result<(), EngineError> {
        if self.entries.iter().all(|e| e.keys.is_empty()) {
            mark(Mark::NothingToReplay);
        }
        let mut keys = self.keys_of_leaves(memory)?;
        keys.sort_unstable();
        let mut keys = keys.as_slice();
        while let Some(first) = keys.first() {
            let (same, rest) = keys.split_at(keys.partition_point(|k| k.leaf == first.leaf));
            self.apply_to_leaf(first.leaf as usize, same).await?;
            keys = rest;
        }
        Ok(())
    }

    /// Every key in each leaf that it changes. A key without sectors changes none.
    fn keys_of_leaves(&self, memory: &mut Reservation) -> Result<Vec<LeafKey>, EngineError> {
        let skipped = usize::from(bug(Bug::ReplayBeginsTooLate));
        let keys = || {
            (0..).zip(self.entries).skip(skipped).flat_map(|(entry, jset)| {
                (0..).zip(&jset.keys).map(move |(key, k)| (entry, jset.seq, key, k))
            })
        };
        let mut count = 0;
        for (_, seq, _, k) in keys() {
            self.check_place(seq, k)?;
            count += self.leaves_of(k).map_or(0, |(first, last)| (last - first) as usize + 1);
        }
        self.weigh(count, memory)?;
        let mut found = Vec::with_capacity(count);
        for (entry, _, key, k) in keys() {
            let Some((first, last)) = self.leaves_of(k) else { continue };
            mark(Mark::Replayed);
            if k.pointer().is_none() {
                mark(Mark::ReplayedHole);
                if bug(Bug::ReplayDropsHoles) {
                    continue;
                }
            } else if k.pointer().is_some_and(|p| !self.buckets.is_current(p)) {
                mark(Mark::ReplayedStale);
            }
            found.extend((first..=last).map(|leaf| LeafKey { leaf, entry, key }));
        }
        Ok(found)
    }

    /// The numbers of the first and the last leaf that a key changes; `None` for a key without sectors.
    fn leaves_of(&self, key: &Bkey) -> Option<(u32, u32)> {
        let start = key.start().filter(|s| *s < key.offset())?;
        let last = Sector(key.offset().0 - 1);
        let number = |position| self.tree.leaf_number(key.inode(), position) as u32;
        Some((number(start), number(last)))
    }

    /// Adds the memory of the order of this many keys to `memory`.
    fn weigh(&self, keys: usize, memory: &mut Reservation) -> Result<(), EngineError> {
        let refused = |source| {
            let device = self.reader.place.device.clone();
            Refusal::JournalMemory { device, sector: self.journal.first_sector(), keys, source }
        };
        Ok(memory.try_grow((keys * size_of::<LeafKey>()) as u64).map_err(refused)?)
    }

    /// Applies all keys of one leaf, in the order of the journal.
    async fn apply_to_leaf(&mut self, number: usize, keys: &[LeafKey]) -> Result<(), EngineError> {
        let Some((lower, leaf)) = self.tree.numbered_leaf(number) else { return Ok(()) };
        self.reader.load_again(self.tree, leaf).await?;
        for k in keys {
            let entry = self.entries.get(k.entry as usize);
            let Some((seq, key)) = entry.and_then(|e| Some((e.seq, e.keys.get(k.key as usize)?))) else {
                continue;
            };
            let Some(first) = key.start() else { continue };
            let start = if lower.0 == key.inode() { first.max(lower.1) } else { first };
            let end = self.tree.node(leaf).clip(key.inode(), key.offset());
            let new = self.checked(seq, key)?.map(|(p, dirty)| (p.advanced(start - first), dirty));
            let journal = self.journal;
            let via = if bug(Bug::ReplayedNotPinned) {
                Via::LeafOnly { data: Tick::default(), direct: None, durable: journal.durable() }
            } else {
                Via::Journal(seq)
            };
            let change = LeafChange { leaf, inode: key.inode(), start, end, new, via, now: Nanos(0) };
            self.tree.change(&change, self.buckets, &mut |seq| journal.pin(seq));
        }
        let over = self.tree.loaded_bytes() > self.limit_bytes && !bug(Bug::ReplayIgnoresLimit);
        if over && !self.tree.node(leaf).leaf().must_rewrite {
            self.tree.unload_changed(leaf);
        }
        Ok(())
    }

    fn bad_key(&self, seq: JournalSeq, key: &Bkey, why: KeyFlaw) -> EngineError {
        let flaw = Flaw::JournalKey { entry: seq, inode: key.inode(), end: key.offset(), why };
        self.reader.place.damage(self.journal.first_sector(), flaw)
    }

    /// Checks that a key lies before the largest position.
    fn check_place(&self, seq: JournalSeq, key: &Bkey) -> Result<(), EngineError> {
        if key.offset() > MAX_POSITION {
            return Err(self.bad_key(seq, key, KeyFlaw::TooFar { most: MAX_POSITION }));
        }
        Ok(())
    }

    /// Checks the pointer of a key. Returns it with the dirty flag, or `None` if the key acts as a hole.
    fn checked(&mut self, seq: JournalSeq, key: &Bkey) -> Result<Option<(Ptr, bool)>, EngineError> {
        // A stale key still replaces older keys: it acts as a hole (format section 4.5).
        let new = key
            .pointer()
            .filter(|p| p.is_available() && self.buckets.is_current(*p))
            .map(|p| (p, key.dirty()));
        if let Some((ptr, _)) = new {
            names_data(self.buckets, ptr, key.size()).map_err(|why| self.bad_key(seq, key, why))?;
            self.buckets.note_footer_room(ptr, key.size());
        }
        Ok(new)
    }
}
