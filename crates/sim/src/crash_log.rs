//! A crash log in the memory of a simulated machine, which outlives the process.
//!
//! Owns the entries. Must not know when the machine ends.

use std::cell::RefCell;
use std::collections::BTreeMap;

use io::CrashLogMemory;

/// A crash log in memory. It retains the newest two entries, because the engine needs no more.
#[derive(Default)]
pub struct Memory {
    entries: RefCell<BTreeMap<u64, Vec<u64>>>,
    tied: RefCell<[u64; 2]>,
}

impl CrashLogMemory for Memory {
    fn record(&self, seq: u64, words: &[u64]) {
        let mut entries = self.entries.borrow_mut();
        entries.entry(seq).or_default().extend_from_slice(words);
        entries.retain(|s, _| s + 2 > seq);
    }

    fn recorded(&self) -> Vec<(u64, Vec<u64>)> {
        self.entries.borrow().clone().into_iter().collect()
    }

    fn reset(&self) {
        self.entries.borrow_mut().clear();
    }

    fn tie(&self, states: [u64; 2]) {
        *self.tied.borrow_mut() = states;
    }

    fn tied(&self) -> [u64; 2] {
        *self.tied.borrow()
    }
}
