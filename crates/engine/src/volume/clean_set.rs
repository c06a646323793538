//! The set that keeps the clean data of a position: the set of the volume, or its second one (decision 037).
//!
//! Owns the choice for new clean data, and whether that set still belongs to the volume. Must not know how data is inserted or read.

use std::rc::Rc;

use format::{Inode, Sector};

use super::mirror::Mirror;
use super::{Cache, Target, Volume};

/// A set for clean data, and the slot of the volume there.
pub(super) struct CleanSet {
    pub(super) cache: Rc<Cache>,
    pub(super) inode: Inode,
    /// The end of the range of which this set keeps the clean data.
    pub(super) end: Sector,
    /// The link to the second set, if this is that set.
    mirror: Option<Rc<Mirror>>,
}

impl CleanSet {
    /// The set for clean data of the first part of a range.
    pub(super) fn of(target: Target<'_>, (at, end): (Sector, Sector)) -> CleanSet {
        let Target { volume, cache, inode } = target;
        let second = if volume.links.has_second() { volume.mirror() } else { None };
        let Some(mirror) = second else { return CleanSet { cache: cache.clone(), inode, end, mirror: None } };
        let end = mirror.end_of_part((at, end));
        match mirror.keeps_clean(at) {
            true => CleanSet { cache: mirror.cache.clone(), inode: mirror.inode, end, mirror: Some(mirror) },
            false => CleanSet { cache: cache.clone(), inode, end, mirror: None },
        }
    }

    /// The target of a change in this set.
    pub(super) fn target<'a>(&'a self, volume: &'a Rc<Volume>) -> Target<'a> {
        volume.target(&self.cache, self.inode)
    }

    /// Whether the volume still has this set. `target`: the set of the volume when this one was chosen.
    pub(super) fn is_linked(&self, target: Target<'_>) -> bool {
        let Target { volume, cache, inode } = target;
        let is_second = |mirror: &Rc<Mirror>| volume.mirror().is_some_and(|m| Rc::ptr_eq(&m, mirror));
        volume.links.is_as(cache, inode) && self.mirror.as_ref().is_none_or(is_second)
    }
}
