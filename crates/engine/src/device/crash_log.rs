//! The crash log: keys that no journal entry on the device has yet, in memory that outlives the process.
//!
//! Owns the memory ([`io::CrashLogMemory`]) and its validity. The crash log belongs to one state of the cache device,
//! which the sequence number of the superblock identifies, and is invalid from the first error of the device on. Must
//! not know the meaning of keys.

use std::cell::RefCell;

use format::{Bkey, JournalSeq};
use io::CrashLogRef;

use crate::canary::{Bug, bug};

/// The crash log of a set; it records nothing before [`CrashLog::begin`].
#[derive(Default)]
pub(crate) struct CrashLog(RefCell<Option<CrashLogRef>>);

impl CrashLog {
    /// Begins to record keys in `memory`, where they outlive the process until their journal entries are durable.
    pub(crate) fn begin(&self, memory: CrashLogRef) {
        memory.reset();
        *self.0.borrow_mut() = Some(memory);
    }

    /// Whether keys are recorded.
    #[inline]
    pub(crate) fn is_recording(&self) -> bool {
        self.0.borrow().is_some()
    }

    /// Records a key of the journal entry `seq`.
    pub(crate) fn record(&self, seq: JournalSeq, key: &Bkey) {
        if let Some(memory) = &*self.0.borrow() {
            let words = [key.high, key.low, key.ptr.0];
            memory.record(seq.0, &words[..key.words().min(words.len())]);
        }
    }

    /// Invalidates the crash log: its keys are dropped, and no more are recorded. Returns false if there is no crash
    /// log.
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

    /// Ties the crash log to a device whose superblock has one of these sequence numbers.
    pub(crate) fn tie(&self, superblock_seqs: [u64; 2]) {
        if let Some(memory) = &*self.0.borrow() {
            memory.tie(superblock_seqs);
        }
    }
}
