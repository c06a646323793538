//! The stripes of a backing device, and how much of each is dirty.
//!
//! Owns the geometry of stripes (runtime semantics 11.2) and the count of dirty sectors, for the whole
//! device and, where the device says that writing part of a stripe is expensive (RAID 5 and 6), per
//! stripe.
//!
//! All positions are positions on the *backing device*, i.e. including `data_offset`, for that is
//! where its stripes begin. Stripe sizes need not be powers of two. The first and the last stripe may
//! be cut short by the data area; such a stripe is full when all of it that lies in the data area is
//! dirty. (The kernel masks where it should divide, and mixes positions with and without
//! `data_offset`.)
//!
//! Counts are kept for stripes with dirty data only, so a stripe of 1 TiB costs no more than one of
//! 4 MiB, and nothing is kept at all if nobody will ask. This is the one policy that may allocate on
//! the path of a write: when a stripe becomes dirty, on a device with expensive partial stripes.
//!
//! *Invariants:* a stripe that is counted has `1..=its length` dirty sectors; the full ones are those
//! at their length. *Must not know:* the keys that make a sector dirty.

use std::collections::{BTreeMap, BTreeSet};

use format::{Sector, Sectors};

/// Stripe size of a device without an optimal I/O size: 1 TiB (runtime semantics 11.2).
const DEFAULT_STRIPE: u64 = 1 << 31;
/// Smaller stripes are taken several at a time: 4 MiB (runtime semantics 11.2).
const MIN_STRIPE: u64 = 8192;

/// Where the stripes of a backing device lie.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StripeGeometry {
    stripe: u64,
    data_start: u64,
    data_end: u64,
}

impl StripeGeometry {
    /// The stripes of a backing device whose optimal I/O size is `optimal_io` (zero if it has none) and
    /// whose data area is `data` sectors from `data_offset`.
    pub fn new(optimal_io: Sectors, data_offset: Sector, data: Sectors) -> StripeGeometry {
        let stripe = match optimal_io.0 {
            0 => DEFAULT_STRIPE,
            n if n < MIN_STRIPE => n * MIN_STRIPE.div_ceil(n),
            n => n,
        };
        let data_end = data_offset.0.saturating_add(data.0);
        StripeGeometry { stripe, data_start: data_offset.0, data_end }
    }

    /// Size of a stripe.
    pub fn stripe_sectors(&self) -> Sectors {
        Sectors(self.stripe)
    }

    /// Number of the stripe that holds `position`.
    pub fn stripe_of(&self, position: Sector) -> u64 {
        position.0 / self.stripe
    }

    /// The part of stripe `nr` that lies in the data area: where it begins, and its length (zero for
    /// stripes outside).
    pub fn extent(&self, nr: u64) -> (Sector, Sectors) {
        let begin = nr.saturating_mul(self.stripe);
        let end = begin.saturating_add(self.stripe).min(self.data_end);
        let begin = begin.max(self.data_start);
        (Sector(begin), Sectors(end.saturating_sub(begin)))
    }

    /// The stripes that `sectors` from `start` touch, each with the number of sectors in it.
    pub fn pieces(&self, start: Sector, sectors: Sectors) -> impl Iterator<Item = (u64, u64)> + use<> {
        let stripe = self.stripe;
        let end = start.0.saturating_add(sectors.0);
        let mut at = start.0;
        std::iter::from_fn(move || {
            let left = end.checked_sub(at).filter(|&left| left > 0)?;
            let piece = left.min(stripe - at % stripe);
            let nr = at / stripe;
            at += piece;
            Some((nr, piece))
        })
    }
}

/// The dirty sectors of a cached device, per stripe where that matters.
#[derive(Clone, Debug)]
pub struct DirtyStripes {
    geometry: StripeGeometry,
    partial_stripes_expensive: bool,
    dirty: u64,
    counts: BTreeMap<u64, u64>,
    full: BTreeSet<u64>,
}

impl DirtyStripes {
    /// Nothing is dirty yet. `partial_stripes_expensive`: the backing device declares it and has an
    /// optimal I/O size; without it only the sum is kept.
    pub fn new(geometry: StripeGeometry, partial_stripes_expensive: bool) -> DirtyStripes {
        DirtyStripes {
            geometry,
            partial_stripes_expensive,
            dirty: 0,
            counts: BTreeMap::new(),
            full: BTreeSet::new(),
        }
    }

    /// The geometry.
    pub fn geometry(&self) -> &StripeGeometry {
        &self.geometry
    }

    /// Whether stripes are tracked (`partial_stripes_expensive`).
    pub fn partial_stripes_expensive(&self) -> bool {
        self.partial_stripes_expensive
    }

    /// Dirty sectors of the device.
    pub fn dirty(&self) -> Sectors {
        Sectors(self.dirty)
    }

    /// Sectors that were not dirty before are dirty now.
    pub fn add(&mut self, start: Sector, sectors: Sectors) {
        self.dirty = self.dirty.saturating_add(sectors.0);
        if !self.partial_stripes_expensive {
            return;
        }
        for (nr, piece) in self.geometry.pieces(start, sectors) {
            let (_, length) = self.geometry.extent(nr);
            let count = self.counts.entry(nr).or_insert(0);
            *count = count.saturating_add(piece);
            debug_assert!(*count <= length.0, "stripe {nr}: {count} of {length} sectors are dirty");
            if *count >= length.0 {
                self.full.insert(nr);
            }
        }
    }

    /// Sectors that were dirty before no longer are.
    pub fn remove(&mut self, start: Sector, sectors: Sectors) {
        debug_assert!(self.dirty >= sectors.0, "{sectors} of {} dirty sectors cleaned", self.dirty);
        self.dirty = self.dirty.saturating_sub(sectors.0);
        if !self.partial_stripes_expensive {
            return;
        }
        for (nr, piece) in self.geometry.pieces(start, sectors) {
            self.full.remove(&nr);
            let Some(count) = self.counts.get_mut(&nr) else {
                debug_assert!(false, "stripe {nr}: {piece} sectors cleaned, none was dirty");
                continue;
            };
            debug_assert!(*count >= piece, "stripe {nr}: {piece} of {count} dirty sectors cleaned");
            *count = count.saturating_sub(piece);
            if *count == 0 {
                self.counts.remove(&nr);
            }
        }
    }

    /// Whether a stripe that the range touches has dirty data. Always false where partial stripes are
    /// not expensive.
    pub fn touches_dirty_stripe(&self, start: Sector, sectors: Sectors) -> bool {
        if sectors.0 == 0 || self.counts.is_empty() {
            return false;
        }
        let first = self.geometry.stripe_of(start);
        let last = self.geometry.stripe_of(Sector(start.0.saturating_add(sectors.0 - 1)));
        self.counts.range(first..=last).next().is_some()
    }

    /// The completely dirty stripes from the one that holds `from` on, ascending: where each begins in
    /// the data area, and its length there. Empty where partial stripes are not expensive.
    pub fn full_dirty_stripes(&self, from: Sector) -> impl Iterator<Item = (Sector, Sectors)> + '_ {
        self.full.range(self.geometry.stripe_of(from)..).map(|&nr| self.geometry.extent(nr))
    }
}
