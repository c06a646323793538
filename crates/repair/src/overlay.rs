//! A device with changes that are not written yet.
//!
//! Owns the changed sectors. Crate `inspect` reads an overlay as it reads a device, so the result of a repair is checked before
//! anything is written.

use std::collections::BTreeMap;

use format::{Sector, Sectors};
use inspect::{ReadAt, ReadError};

const SECTOR: usize = 512;

/// A device with changes.
pub struct Overlay<'a> {
    base: &'a dyn ReadAt,
    changed: BTreeMap<u64, [u8; SECTOR]>,
}

/// Adjacent sectors that change.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Change {
    /// First sector.
    pub at: Sector,
    /// The bytes on the device.
    pub before: Vec<u8>,
    /// The bytes to write.
    pub after: Vec<u8>,
}

impl<'a> Overlay<'a> {
    /// A device without changes.
    pub fn new(base: &'a dyn ReadAt) -> Overlay<'a> {
        Overlay { base, changed: BTreeMap::new() }
    }

    /// Changes whole sectors from `at` on. A rest that is no whole sector is ignored.
    pub(crate) fn write(&mut self, at: Sector, bytes: &[u8]) {
        for (sector, new) in (at.0..).zip(bytes.chunks_exact(SECTOR)) {
            let mut to = [0; SECTOR];
            to.copy_from_slice(new);
            let mut old = [0; SECTOR];
            let same = self.base.read_at(Sector(sector), &mut old).is_ok() && old == to;
            if same {
                self.changed.remove(&sector);
            } else {
                self.changed.insert(sector, to);
            }
        }
    }

    /// Whether anything changes.
    pub fn is_changed(&self) -> bool {
        !self.changed.is_empty()
    }

    /// The changes in order, adjacent sectors joined.
    ///
    /// # Errors
    /// If a sector that changes cannot be read, so that the change could not be undone.
    pub fn changes(&self) -> Result<Vec<Change>, ReadError> {
        let mut changes: Vec<Change> = Vec::new();
        for (&sector, new) in &self.changed {
            let mut old = [0; SECTOR];
            self.base.read_at(Sector(sector), &mut old)?;
            match changes.last_mut() {
                Some(last) if last.at.0 + Sectors::from_bytes_floor(last.after.len() as u64).0 == sector => {
                    last.before.extend_from_slice(&old);
                    last.after.extend_from_slice(new);
                }
                _ => changes.push(Change { at: Sector(sector), before: old.to_vec(), after: new.to_vec() }),
            }
        }
        Ok(changes)
    }
}

impl ReadAt for Overlay<'_> {
    fn read_at(&self, at: Sector, into: &mut [u8]) -> Result<(), ReadError> {
        self.base.read_at(at, into)?;
        let end = at.0.saturating_add(Sectors::from_bytes_ceil(into.len() as u64).0);
        for (sector, new) in self.changed.range(at.0..end) {
            let from = usize::try_from(Sectors(sector - at.0).bytes()).unwrap_or(usize::MAX);
            if let Some(place) = into.get_mut(from..) {
                let n = place.len().min(SECTOR);
                if let (Some(to), Some(new)) = (place.get_mut(..n), new.get(..n)) {
                    to.copy_from_slice(new);
                }
            }
        }
        Ok(())
    }

    fn sectors(&self) -> Sectors {
        self.base.sectors()
    }

    fn next_data(&self, from: Sector) -> Sector {
        let changed = self.changed.range(from.0..).next().map(|(sector, _)| Sector(*sector));
        let data = self.base.next_data(from);
        changed.map_or(data, |changed| data.min(changed))
    }

    fn name(&self) -> &str {
        self.base.name()
    }

    fn logical_block_bytes(&self) -> Option<u32> {
        self.base.logical_block_bytes()
    }
}
