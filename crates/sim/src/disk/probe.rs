//! Recognises what the engine writes to the cache device.
//!
//! Owns the landmarks at which a crash can be aimed. Reads headers of the format by their offsets (format section 8.2,
//! format section 9.1) and trusts them: it determines when a crash comes, never whether contents are correct. Must not
//! know the engine.

use std::collections::BTreeSet;

use format::{Sector, Sectors, SetMagic};

use crate::landmark::Landmark;

/// Limit of the landmarks of one write.
const MOST: usize = 6;

/// The place of every superblock.
const SUPERBLOCK: Sector = Sector(8);

/// The state from which the landmarks of a write follow.
pub(super) struct Probe {
    magic: SetMagic,
    bucket: u64,
    /// Bucket of the newest journal entry.
    newest: Option<u64>,
    /// Buckets of the ring that were written to.
    used: BTreeSet<u64>,
    roots: Option<Roots>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
struct Roots {
    table: u64,
    root: u64,
    chain: u64,
}

/// The word of 8 bytes at an offset.
fn word(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

impl Probe {
    pub(super) fn new(magic: SetMagic, bucket: Sectors) -> Probe {
        Probe { magic, bucket: bucket.0, newest: None, used: BTreeSet::new(), roots: None }
    }

    /// The landmarks of a write.
    pub(super) fn see(&mut self, at: Sector, bytes: &[u8]) -> [Option<Landmark>; MOST] {
        let mut landmarks = [None; MOST];
        if at == SUPERBLOCK {
            landmarks[0] = Some(Landmark::Superblock);
            return landmarks;
        }
        match word(bytes, 8) {
            Some(m) if m == self.magic.jset() => self.entry(at, bytes, &mut landmarks),
            Some(m) if m == self.magic.pset() => landmarks[0] = Some(Landmark::PrioWrite),
            Some(m) if m == self.magic.bset() && at.0.is_multiple_of(self.bucket) => {
                landmarks[0] = Some(Landmark::NodeWrite);
            }
            Some(m) if m == self.magic.bset() => landmarks[0] = Some(Landmark::LeafAppend),
            _ => {}
        }
        landmarks
    }

    fn entry(&mut self, at: Sector, bytes: &[u8], landmarks: &mut [Option<Landmark>; MOST]) {
        let bucket = at.0 / self.bucket;
        let step = self.newest.replace(bucket).is_some_and(|newest| newest != bucket);
        let reuse = !self.used.insert(bucket) && step;
        // Each pointer is after the two words of its key.
        let roots = Roots {
            table: word(bytes, 56).unwrap_or_default(),
            root: word(bytes, 120).unwrap_or_default(),
            chain: word(bytes, 176).unwrap_or_default(),
        };
        let old = self.roots.replace(roots).unwrap_or(roots);
        let all = [
            (true, Landmark::Entry),
            (step, Landmark::RingStep),
            (reuse, Landmark::RingOverwrite),
            (old.chain != roots.chain, Landmark::ChainSwitch),
            (old.root != roots.root, Landmark::RootSwitch),
            (old.table != roots.table, Landmark::TableSwitch),
        ];
        for (slot, (is, landmark)) in landmarks.iter_mut().zip(all) {
            *slot = is.then_some(landmark);
        }
    }
}
