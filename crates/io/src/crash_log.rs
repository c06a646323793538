//! The crash log: memory that survives a crash of the process, but not a power loss.
//!
//! A power loss may lose a write that was acknowledged and not flushed, as with the cache of any disk. A process crash must
//! not lose it if clients continue after the crash (ublk's user recovery): a disk with power keeps its data. Only the
//! keys of at most two journal entries are not on the devices: the open entry, and one being written. The engine
//! records them here, and the next process reads them.
//!
//! Invariant of every implementation: after a crash of the process at any instruction, the log has every complete record,
//! in the order of writing. Must not know the meaning of the words.

use std::fmt;
use std::ops::Deref;
use std::rc::Rc;

/// Memory for journal entries that survives a crash of the process.
pub trait CrashLogMemory {
    /// Appends words to the stored part of entry `seq`. The first words of an entry drop entry `seq - 2`.
    fn record(&self, seq: u64, words: &[u64]);

    /// The stored entries, oldest first.
    fn recorded(&self) -> Vec<(u64, Vec<u64>)>;

    /// Removes all entries.
    fn reset(&self);

    /// Attaches two state numbers; the contents are valid only for a device whose state is one of them.
    fn tie(&self, states: [u64; 2]);

    /// The state numbers that were set with [`CrashLogMemory::tie`].
    fn tied(&self) -> [u64; 2];
}

/// A shared [`CrashLogMemory`].
#[derive(Clone)]
pub struct CrashLogRef(pub Rc<dyn CrashLogMemory>);

impl Deref for CrashLogRef {
    type Target = dyn CrashLogMemory;

    fn deref(&self) -> &Self::Target {
        &*self.0
    }
}

impl fmt::Debug for CrashLogRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CrashLogRef(tied to {:?})", self.tied())
    }
}

/// How many entries are stored.
pub const RECORDED_ENTRIES: usize = 2;

/// Most words that are stored of an entry. The largest journal entry has fewer.
pub const RECORDED_WORDS: usize = 4096 - 2;
