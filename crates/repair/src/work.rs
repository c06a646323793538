//! The devices of a set under repair, with the changes so far, and the steps.
//!
//! Owns what the structures share while a plan is made, and what it could not find out with certainty. Must not know any structure.

use std::collections::BTreeSet;

use format::{BucketNr, CacheSuper, Inode, JournalSeq};
use inspect::{DeviceSuper, Mode, SetView, read_superblock};
use serde::Serialize;

use crate::overlay::Overlay;

/// A structure that a plan mends.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Step {
    /// The structure.
    pub structure: &'static str,
    /// Name of the device.
    pub device: String,
    /// What is done, and from which knowledge.
    pub action: String,
    /// What may be wrong or lost afterwards; empty if the structure is certainly what it was.
    pub uncertain: Vec<String>,
}

/// What a step had to guess or give up. [`Salvage`](crate::Salvage) derives from it which sectors are certain.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Doubt {
    /// The cache superblock is rebuilt.
    CacheSuperblock,
    /// The superblock of the backing device with this index is rebuilt, and with it the first sector of the data.
    BackingSuperblock(usize),
    /// The keys of journal entries are lost; this is the newest of them.
    Entries(JournalSeq),
    /// The root is rebuilt from leaves, one of which may be free.
    Root,
    /// The generations of the buckets from this one on come from keys.
    Generations(BucketNr),
    /// The UUID table is rebuilt. These slots have the entry that they had before.
    Slots(BTreeSet<Inode>),
}

/// A repair in the making.
pub(crate) struct Work<'a> {
    /// The cache device, with the changes.
    pub(crate) cache: Overlay<'a>,
    /// The backing devices, with the changes.
    pub(crate) backings: Vec<Overlay<'a>>,
    pub(crate) steps: Vec<Step>,
    pub(crate) refused: Vec<String>,
    pub(crate) doubts: Vec<Doubt>,
}

impl Work<'_> {
    /// The checked superblock of the cache device, with the changes so far.
    pub(crate) fn superblock(&self) -> Option<CacheSuper> {
        match read_superblock(&self.cache) {
            Ok(DeviceSuper::Cache(superblock)) => Some(superblock),
            _ => None,
        }
    }

    /// The set with the changes so far, as far as it can be read.
    pub(crate) fn view(&self) -> Option<SetView> {
        SetView::open(&self.cache, Mode::BestEffort).ok()
    }

    pub(crate) fn step(
        &mut self,
        structure: &'static str,
        device: String,
        action: String,
        uncertain: Vec<String>,
    ) {
        self.steps.push(Step { structure, device, action, uncertain });
    }

    pub(crate) fn refuse(&mut self, what: String) {
        self.refused.push(what);
    }
}
