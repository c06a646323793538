//! The journal entries that are still needed.
//!
//! Owns a count for each entry from the oldest needed one to the open one: the number of btree leaves with keys of that
//! entry that are in no durable node yet. Must not know the leaves.
//!
//! Invariant: `oldest` never passes an entry whose count is above zero, nor the open entry.

use std::collections::VecDeque;

use format::JournalSeq;

/// The counts of pins of the journal entries that are still needed.
pub(crate) struct Pins {
    base: JournalSeq,
    counts: VecDeque<u32>,
    total: u64,
}

impl Pins {
    /// Makes the pins of the entries from `base` on; none is pinned yet.
    pub(crate) fn new(base: JournalSeq) -> Pins {
        Pins { base, counts: VecDeque::new(), total: 0 }
    }

    fn index(&self, seq: JournalSeq) -> usize {
        let i = seq.0.checked_sub(self.base.0);
        i.unwrap_or_else(|| panic!("journal entry {seq} was given up, the oldest is {}", self.base)) as usize
    }

    pub(crate) fn pin(&mut self, seq: JournalSeq) {
        let i = self.index(seq);
        if i >= self.counts.len() {
            self.counts.resize(i + 1, 0);
        }
        self.counts[i] += 1;
        self.total += 1;
    }

    pub(crate) fn unpin(&mut self, seq: JournalSeq) {
        let i = self.index(seq);
        let count = self.counts.get_mut(i).filter(|c| **c > 0);
        *count.unwrap_or_else(|| panic!("journal entry {seq} is not pinned")) -= 1;
        self.total -= 1;
    }

    /// The number of pins.
    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    /// The oldest entry that is needed, at most `open`. Entries before it can no longer be pinned.
    pub(crate) fn oldest(&mut self, open: JournalSeq) -> JournalSeq {
        while self.base < open {
            match self.counts.front() {
                Some(0) => {
                    self.counts.pop_front();
                }
                Some(_) => break,
                // No entry is pinned.
                None => {
                    self.base = open;
                    break;
                }
            }
            self.base = self.base.next();
        }
        self.base
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Compares the pins with a map of counts of all entries that were ever pinned.
        #[test]
        fn agrees_with_a_map_of_counts(steps in prop::collection::vec((0u8..4, 0u64..6), 1..200)) {
            let (mut pins, mut naive) = (Pins::new(JournalSeq(5)), BTreeMap::<u64, u32>::new());
            let (mut base, mut open) = (5, 5);
            for (what, n) in steps {
                match what {
                    0 => {
                        let seq = base + n % (open - base + 1);
                        pins.pin(JournalSeq(seq));
                        *naive.entry(seq).or_default() += 1;
                    }
                    1 if !naive.is_empty() => {
                        let seq = *naive.keys().nth(n as usize % naive.len()).unwrap();
                        pins.unpin(JournalSeq(seq));
                        let count = naive.get_mut(&seq).unwrap();
                        *count -= 1;
                        if *count == 0 {
                            naive.remove(&seq);
                        }
                    }
                    2 => open += n,
                    _ => {
                        // Entries without pins can no longer be pinned, except the open entry.
                        base = naive.keys().next().copied().unwrap_or(open);
                        prop_assert_eq!(pins.oldest(JournalSeq(open)), JournalSeq(base));
                    }
                }
                prop_assert_eq!(pins.total(), u64::from(naive.values().sum::<u32>()));
            }
        }
    }

    #[test]
    #[should_panic(expected = "journal entry 6 is not pinned")]
    fn an_entry_is_unpinned_as_often_as_pinned() {
        let mut p = Pins::new(JournalSeq(5));
        p.pin(JournalSeq(6));
        p.unpin(JournalSeq(6));
        p.unpin(JournalSeq(6));
    }

    #[test]
    #[should_panic(expected = "journal entry 4 was given up, the oldest is 5")]
    fn a_released_entry_cannot_be_pinned() {
        Pins::new(JournalSeq(5)).pin(JournalSeq(4));
    }

    #[test]
    fn the_oldest_pinned_entry_holds_the_rest() {
        let mut p = Pins::new(JournalSeq(5));
        p.pin(JournalSeq(6));
        p.pin(JournalSeq(9));
        assert_eq!(p.total(), 2);
        assert_eq!(p.oldest(JournalSeq(12)), JournalSeq(6));
        p.unpin(JournalSeq(6));
        assert_eq!(p.oldest(JournalSeq(12)), JournalSeq(9));
        p.unpin(JournalSeq(9));
        assert_eq!(p.total(), 0);
        assert_eq!(p.oldest(JournalSeq(12)), JournalSeq(12));
        p.pin(JournalSeq(12));
        assert_eq!(p.oldest(JournalSeq(13)), JournalSeq(12));
    }

    /// The open entry may be pinned again after its last pin was released.
    #[test]
    fn the_open_entry_stays_pinnable() {
        let mut p = Pins::new(JournalSeq(5));
        p.pin(JournalSeq(7));
        p.unpin(JournalSeq(7));
        for _ in 0..2 {
            assert_eq!(p.oldest(JournalSeq(7)), JournalSeq(7));
        }
        p.pin(JournalSeq(7));
        assert_eq!(p.oldest(JournalSeq(9)), JournalSeq(7));
    }
}
