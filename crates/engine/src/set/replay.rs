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

/// The part of a key that lies in one leaf. The order of parts is that in which they are applied.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Part {
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
        let mut parts = self.parts(memory)?;
        parts.sort_unstable();
        let mut parts = parts.as_slice();
        while let Some(first) = parts.first() {
            let (same, rest) = parts.split_at(parts.partition_point(|p| p.leaf == first.leaf));
            self.apply_to_leaf(first.leaf as usize, same).await?;
            parts = rest;
        }
        Ok(())
    }

    /// The parts of all keys. A key without sectors has none.
    fn parts(&self, memory: &mut Reservation) -> Result<Vec<Part>, EngineError> {
        let mut parts = Vec::new();
        let skipped = usize::from(bug(Bug::ReplayBeginsTooLate));
        for (entry, jset) in (0..).zip(self.entries).skip(skipped) {
            let before = parts.len();
            for (key, k) in (0..).zip(&jset.keys) {
                let Some(start) = k.start().filter(|s| *s < k.offset()) else { continue };
                mark(Mark::Replayed);
                if k.pointer().is_none() {
                    mark(Mark::ReplayedHole);
                    if bug(Bug::ReplayDropsHoles) {
                        continue;
                    }
                } else if k.pointer().is_some_and(|p| !self.buckets.is_current(p)) {
                    mark(Mark::ReplayedStale);
                }
                let first = self.tree.leaf_number(k.inode(), start);
                // The leaf that covers the last sector.
                let last = self.tree.leaf_number(k.inode(), Sector(k.offset().0 - 1));
                parts.extend((first as u32..=last as u32).map(|leaf| Part { leaf, entry, key }));
            }
            self.weigh(jset, parts.len() - before, memory)?;
        }
        Ok(parts)
    }

    /// Adds the memory of the parts of an entry to `memory`.
    fn weigh(&self, jset: &Jset, parts: usize, memory: &mut Reservation) -> Result<(), EngineError> {
        let keys = jset.keys.len();
        let refused = |source| {
            let device = self.reader.place.device.clone();
            Refusal::JournalMemory { device, sector: Sector(0), keys, source }
        };
        Ok(memory.try_grow((parts * size_of::<Part>()) as u64).map_err(refused)?)
    }

    /// Applies all keys of one leaf, in the order of the journal.
    async fn apply_to_leaf(&mut self, number: usize, parts: &[Part]) -> Result<(), EngineError> {
        let Some((lower, leaf)) = self.tree.numbered_leaf(number) else { return Ok(()) };
        self.reader.load_again(self.tree, leaf).await?;
        for part in parts {
            let entry = self.entries.get(part.entry as usize);
            let Some((seq, key)) = entry.and_then(|e| Some((e.seq, e.keys.get(part.key as usize)?))) else {
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

    /// Checks a key. Returns its pointer and its dirty flag, or `None` if it acts as a hole.
    fn checked(&mut self, seq: JournalSeq, key: &Bkey) -> Result<Option<(Ptr, bool)>, EngineError> {
        let (place, end) = (self.reader.place, key.offset());
        let bad = |why| {
            let flaw = Flaw::JournalKey { entry: seq, inode: key.inode(), end, why };
            place.damage(Sector(0), flaw)
        };
        if end > MAX_POSITION {
            return Err(bad(KeyFlaw::TooFar { most: MAX_POSITION }));
        }
        // A stale key still replaces older keys: it acts as a hole (format section 4.5).
        let new = key
            .pointer()
            .filter(|p| p.is_available() && self.buckets.is_current(*p))
            .map(|p| (p, key.dirty()));
        if let Some((ptr, _)) = new {
            names_data(self.buckets, ptr, key.size()).map_err(bad)?;
            self.buckets.note_footer_room(ptr, key.size());
        }
        Ok(new)
    }
}
