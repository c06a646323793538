//! The evidence that the cached data of a slot is that of a backing device.
//!
//! Owns the comparison of a slot with a device: clean data is on both, and keys lie in the data area. Must not know the UUID table.

use format::{BackingState, BackingSuper, Inode, Sector};
use inspect::{PieceKind, ReadAt, SetView};

/// Most extents that are compared.
const COMPARED: usize = 4096;

/// The cached data of one inode, compared with one device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Evidence {
    /// Clean extents that have the bytes of the device, and are not zeros: zeros are on every device.
    pub(crate) same: u64,
    /// Clean extents that do not have the bytes of the device.
    pub(crate) differing: u64,
    /// Clean extents that were compared.
    compared: usize,
    /// Sectors of dirty data.
    pub(crate) dirty: u64,
    /// First sector of a key; `None` if there is no key.
    first: Option<Sector>,
    /// End of the last live extent.
    end: Sector,
}

impl Evidence {
    /// Compares an inode with a device.
    pub(crate) fn of(view: &SetView, cache: &dyn ReadAt, backing: &dyn ReadAt, inode: Inode) -> Evidence {
        let mut evidence = Evidence {
            dirty: view.totals_of(inode).dirty_sectors,
            first: view.extents.of_inode(inode).map(|piece| piece.start).min(),
            end: view.live(inode).map(|(piece, _)| piece.end()).max().unwrap_or_default(),
            ..Evidence::default()
        };
        let clean = view.live(inode).filter(|(_, kind)| *kind == PieceKind::Clean).take(COMPARED);
        for (piece, _) in clean {
            let Some(ptr) = piece.ptr else { continue };
            evidence.compared += 1;
            let bytes = usize::try_from(piece.len.bytes()).unwrap_or(0);
            let (mut a, mut b) = (vec![0; bytes], vec![0; bytes]);
            if cache.read_at(ptr.offset(), &mut a).is_err() || backing.read_at(piece.start, &mut b).is_err() {
                evidence.differing += 1;
            } else if a == b {
                evidence.same += u64::from(a.iter().any(|byte| *byte != 0));
            } else {
                evidence.differing += 1;
            }
        }
        evidence
    }

    /// Whether the clean data does not contradict the device. After a crash some clean extents may differ.
    pub(crate) fn fits(&self) -> bool {
        self.differing.saturating_mul(10) <= self.same || self.same + self.differing == 0
    }

    /// Whether clean data confirms the device.
    pub(crate) fn is_confirmed(&self) -> bool {
        self.same > 0 && self.fits()
    }

    /// Whether it does not matter to whom the data belongs: all of it is clean, and the device has the same bytes.
    pub(crate) fn is_on_device(&self) -> bool {
        self.dirty == 0 && self.differing == 0 && self.compared < COMPARED
    }

    /// Why the data cannot be that of this device; `None` if it can.
    pub(crate) fn contradiction(&self, device: &BackingSuper) -> Option<String> {
        if self.dirty > 0 && device.state() == BackingState::Clean {
            return Some(format!(
                "{} of its data {} dirty, and the state of the device is clean",
                format::counted(self.dirty, "sector"),
                format::form(self.dirty, "is", "are")
            ));
        }
        let offset = device.data_offset();
        if let Some(first) = self.first.filter(|first| *first < offset) {
            return Some(format!("it begins at sector {first}, and the data of the device at {offset}"));
        }
        let end = Sector(offset.0.saturating_add(device.data_sectors().0));
        if self.end > end {
            return Some(format!("it reaches to sector {}, and the device to {end}", self.end));
        }
        (!self.fits()).then(|| {
            format!(
                "{} of {} clean extents have other bytes than the device",
                self.differing,
                self.same + self.differing
            )
        })
    }
}
