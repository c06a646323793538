//! Memory that outlives the process, but not the machine.
//!
//! A write that was answered and not flushed may be lost with the power, like in the cache of any disk. It must not be
//! lost with the process where clients outlive that and go on as if nothing had happened (ublk's user recovery): to
//! them it would be a disk that forgets while it has power. What the engine knows beyond the devices are the keys of at
//! most two journal entries: the open one, and one being written. It puts them here, and the next process finds them.
//!
//! Invariant of every implementation: what was kept before the process died is there, in order, whatever instruction
//! was the last one. Must not know what the words mean.

use std::fmt;
use std::ops::Deref;
use std::rc::Rc;

/// See the module head.
pub trait CrashLogMemory {
    /// Appends words to the stored part of entry `seq`. The first of them drops entry `seq - 2`.
    fn record(&self, seq: u64, words: &[u64]);

    /// The stored entries, oldest first.
    fn recorded(&self) -> Vec<(u64, Vec<u64>)>;

    /// Forgets everything.
    fn reset(&self);

    /// Ties the contents to a state of the device: they are valid only if one of these two numbers is found.
    fn tie(&self, states: [u64; 2]);

    /// The states to which it is tied.
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

/// How many entries are kept.
pub const RECORDED_ENTRIES: usize = 2;

/// Most words that are kept of an entry: more than the largest journal entry has.
pub const RECORDED_WORDS: usize = 4096 - 2;
