//! Which journal entries are still needed.
//!
//! Owns a count for each entry from the oldest needed one to the open one: how many btree leaves hold keys of that
//! entry that no durable node has yet. Must not know the leaves. Invariant: `oldest` never passes an entry with a
//! count above zero, nor the open entry.

use std::collections::VecDeque;

use format::JournalSeq;

pub(crate) struct Pins {
    base: JournalSeq,
    counts: VecDeque<u32>,
    total: u64,
}

impl Pins {
    /// Entries from `base` on may get pins.
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

    /// How many pins there are.
    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    /// The oldest entry that is needed, at most `open`; everything before it is forgotten.
    pub(crate) fn oldest(&mut self, open: JournalSeq) -> JournalSeq {
        while self.base < open {
            match self.counts.front() {
                Some(0) => {
                    self.counts.pop_front();
                }
                Some(_) => break,
                // Nothing is pinned at all.
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
    use super::*;

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

    /// The open entry may be pinned again after nothing pinned it.
    #[test]
    fn the_open_entry_is_not_forgotten() {
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
