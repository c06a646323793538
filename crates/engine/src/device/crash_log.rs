//! The crash log: keys that no journal entry on the device has yet, in memory that outlives the process.
//!
//! Owns the memory ([`io::CrashLogMemory`]) and whether it counts. It belongs to one state of the cache device, named by the
//! sequence number of the superblock, and is invalid from the first error of the device on. Must not know what keys mean.

use std::cell::RefCell;

use format::{Bkey, JournalSeq};
use io::CrashLogRef;

use crate::canary::{Bug, bug};

/// The crash log of a set; it holds nothing until [`CrashLog::begin`].
#[derive(Default)]
pub(crate) struct CrashLog(RefCell<Option<CrashLogRef>>);

impl CrashLog {
    /// From now on keys outlive the process in `memory` until their journal entries are durable.
    pub(crate) fn begin(&self, memory: CrashLogRef) {
        memory.reset();
        *self.0.borrow_mut() = Some(memory);
    }

    /// Records a key of the journal entry `seq`.
    pub(crate) fn record(&self, seq: JournalSeq, key: &Bkey) {
        if let Some(memory) = &*self.0.borrow() {
            let words = [key.high, key.low, key.ptr.0];
            memory.record(seq.0, &words[..key.words().min(words.len())]);
        }
    }

    /// What is recorded does not count any more, nor does what comes. False if there is no crash log.
    pub(crate) fn invalidate(&self) -> bool {
        match self.0.take() {
            Some(_) if bug(Bug::CrashLogAfterError) => false,
            Some(memory) => {
                memory.reset();
                true
            }
            None => false,
        }
    }

    /// What is recorded belongs to a device whose superblock has one of these sequence numbers.
    pub(crate) fn tie(&self, superblock_seqs: [u64; 2]) {
        if let Some(memory) = &*self.0.borrow() {
            memory.tie(superblock_seqs);
        }
    }
}
