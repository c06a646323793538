//! The devices of a set under repair, with the changes so far, and the steps.
//!
//! Owns what the structures share while a plan is made. Must not know any structure.

use format::CacheSuper;
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

/// A repair in the making.
pub(crate) struct Work<'a> {
    /// The cache device, with the changes.
    pub(crate) cache: Overlay<'a>,
    /// The backing devices, with the changes.
    pub(crate) backings: Vec<Overlay<'a>>,
    pub(crate) steps: Vec<Step>,
    pub(crate) refused: Vec<String>,
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
