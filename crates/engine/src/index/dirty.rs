//! The number of dirty sectors of each device, and of each stripe where partial stripes are expensive.
//!
//! Owns the exact count of live dirty sectors for each inode, which the tree updates with every change. For a device on
//! which partial stripes are expensive it can also count each stripe. That count starts when the device is attached,
//! after the index was read: a walk counts leaf after leaf, and a change is counted only in the part that the walk has
//! passed, so that nothing is counted twice. Must not know buckets or generations.
//!
//! Invariant: the count of stripes has exactly the live dirty sectors before `Counted::until`.

use std::collections::BTreeMap;

use format::{Inode, JournalSeq, Sector, Sectors};

use crate::policy::stripes::{DirtyStripes, StripeGeometry};

/// The dirty sectors of all devices.
#[derive(Default)]
pub(crate) struct DirtyDevices {
    devices: BTreeMap<Inode, DirtyDevice>,
}

/// The dirty sectors of one device.
#[derive(Default)]
pub(crate) struct DirtyDevice {
    sectors: u64,
    /// The newest journal entry by which sectors ceased to be dirty.
    cleaned: JournalSeq,
    stripes: Option<Counted>,
}

/// The dirty stripes of a device, as far as the walk has counted them.
struct Counted {
    stripes: DirtyStripes,
    /// The position up to which the walk has counted.
    until: Sector,
}

impl DirtyDevices {
    /// The counts of one device, for a change.
    pub(crate) fn device_mut(&mut self, inode: Inode) -> &mut DirtyDevice {
        self.devices.entry(inode).or_default()
    }

    /// The number of live dirty sectors of a device.
    pub(crate) fn sectors(&self, inode: Inode) -> Sectors {
        Sectors(self.devices.get(&inode).map_or(0, |d| d.sectors))
    }

    /// The newest journal entry by which sectors of a device ceased to be dirty.
    pub(crate) fn cleaned(&self, inode: Inode) -> JournalSeq {
        self.devices.get(&inode).map_or(JournalSeq(0), |d| d.cleaned)
    }

    /// Every device that has had dirty sectors, with their present number.
    pub(crate) fn all(&self) -> impl Iterator<Item = (Inode, Sectors)> + '_ {
        self.devices.iter().map(|(inode, d)| (*inode, Sectors(d.sectors)))
    }

    /// The dirty stripes of a device, as far as the walk has counted them.
    pub(crate) fn stripes(&self, inode: Inode) -> Option<&DirtyStripes> {
        self.devices.get(&inode).and_then(|d| d.stripes.as_ref()).map(|c| &c.stripes)
    }
}

impl DirtyDevice {
    /// Counts sectors that became dirty and were not dirty before.
    pub(crate) fn add(&mut self, start: Sector, sectors: Sectors) {
        self.sectors += sectors.0;
        if let Some(c) = &mut self.stripes {
            c.stripes.add(start, c.part(start, sectors));
        }
    }

    /// Counts sectors that are no longer dirty when journal entry `by` is durable.
    pub(crate) fn remove(&mut self, start: Sector, sectors: Sectors, by: JournalSeq) {
        self.cleaned = self.cleaned.max(by);
        self.sectors -= sectors.0;
        if let Some(c) = &mut self.stripes {
            c.stripes.remove(start, c.part(start, sectors));
        }
    }

    /// Begins to count stripes; nothing is counted yet.
    pub(crate) fn begin_stripes(&mut self, geometry: StripeGeometry) {
        self.stripes = Some(Counted { stripes: DirtyStripes::new(geometry, true), until: Sector(0) });
    }

    /// Records that the walk has reached `until` and found these dirty extents since the last call.
    pub(crate) fn count_stripes(&mut self, until: Sector, found: impl Iterator<Item = (Sector, Sectors)>) {
        let Some(c) = &mut self.stripes else { return };
        let from = c.until;
        for (start, sectors) in found {
            let first = start.max(from);
            let last = (start + sectors).min(until);
            if first < last {
                c.stripes.add(first, last - first);
            }
        }
        c.until = until;
    }

    /// Ends the count of stripes.
    pub(crate) fn drop_stripes(&mut self) {
        self.stripes = None;
    }
}

impl Counted {
    /// The part of an extent that the walk has passed.
    fn part(&self, start: Sector, sectors: Sectors) -> Sectors {
        let end = (start + sectors).min(self.until);
        if start < end { end - start } else { Sectors::ZERO }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: Inode = Inode(1);

    fn stripes_of_4_mib() -> StripeGeometry {
        StripeGeometry::new(Sectors(8192), Sector(0), Sectors(8192 * 4))
    }

    fn full(d: &DirtyDevices) -> Vec<u64> {
        d.stripes(ONE).map_or(Vec::new(), |s| s.full_dirty_stripes(Sector(0)).map(|(s, _)| s.0).collect())
    }

    /// Half of a stripe is dirty when the walk begins; changes come before and behind it.
    #[test]
    fn changes_before_and_behind_the_walk_are_counted_once() {
        let mut d = DirtyDevices::default();
        d.device_mut(ONE).add(Sector(0), Sectors(4096));
        d.device_mut(ONE).add(Sector(8192), Sectors(8192));
        d.device_mut(ONE).begin_stripes(stripes_of_4_mib());
        // The walk has not reached these sectors, so it will find them itself.
        d.device_mut(ONE).add(Sector(4096), Sectors(4096));
        d.device_mut(ONE).remove(Sector(8192), Sectors(8), JournalSeq(0));
        assert!(full(&d).is_empty());
        // The walk's leaf ends in the middle of an extent of the next stripe.
        let found =
            [(Sector(0), Sectors(4096)), (Sector(4096), Sectors(4096)), (Sector(8200), Sectors(8184))];
        d.device_mut(ONE).count_stripes(Sector(10000), found.into_iter());
        assert_eq!(full(&d), [0]);
        // The change crosses the position of the walk.
        d.device_mut(ONE).remove(Sector(9996), Sectors(8), JournalSeq(0));
        d.device_mut(ONE).add(Sector(9996), Sectors(8));
        d.device_mut(ONE).add(Sector(8192), Sectors(8));
        d.device_mut(ONE).count_stripes(Sector(u64::MAX), [(Sector(8192), Sectors(8192))].into_iter());
        assert_eq!(full(&d), [0, 8192]);
        assert_eq!(d.sectors(ONE), Sectors(16384));
        d.device_mut(ONE).remove(Sector(8), Sectors(8), JournalSeq(0));
        assert_eq!(full(&d), [8192]);
        d.device_mut(ONE).drop_stripes();
        assert!(full(&d).is_empty());
        assert_eq!(d.sectors(ONE), Sectors(16376));
    }
}
