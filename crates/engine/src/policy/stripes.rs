//! The stripes of a backing device, and the number of dirty sectors in each.
//!
//! Owns the geometry of stripes (semantics section 11.2) and the count of dirty sectors, for the whole device and, on
//! devices on which writing a part of a stripe is expensive (RAID 5 and 6), for each stripe.
//!
//! All positions are positions on the *backing device*, including `data_offset`, because stripes begin at its sector 0.
//! Stripe sizes need not be powers of two. The data area may have only a part of the first and of the last stripe; such
//! a stripe is full when the part in the data area is dirty. (The kernel masks where it should divide, and mixes
//! positions with and without `data_offset`.)
//!
//! Only stripes with dirty data have counts, so stripes of 1 TiB need no more memory than stripes of 4 MiB, and a
//! device without expensive partial stripes has no counts. This is the only policy that may allocate on the path of a
//! write: when a stripe becomes dirty, on a device with expensive partial stripes.
//!
//! *Invariants:* a stripe with a count has at least 1 and at most its length of dirty sectors; the full stripes are
//! those whose count is their length. *Must not know:* the keys that make a sector dirty.

use std::collections::{BTreeMap, BTreeSet};

use format::{Sector, Sectors};

/// Stripe size of a device without an optimal I/O size: 1 TiB (semantics section 11.2).
const DEFAULT_STRIPE: u64 = 1 << 31;
/// The smallest unit, 4 MiB: smaller stripes are counted several at a time (semantics section 11.2).
const MIN_STRIPE: u64 = 8192;

/// The positions of the stripes of a backing device.
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
            n => n * MIN_STRIPE.div_ceil(n),
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

/// The dirty sectors of a cached device, for each stripe if partial stripes are expensive.
#[derive(Clone, Debug)]
pub struct DirtyStripes {
    geometry: StripeGeometry,
    partial_stripes_expensive: bool,
    dirty: u64,
    counts: BTreeMap<u64, u64>,
    full: BTreeSet<u64>,
}

impl DirtyStripes {
    /// Makes the counts of a device without dirty data. `partial_stripes_expensive`: the backing device declares it and
    /// has an optimal I/O size; if it is false, only the sum is counted.
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

    /// Whether each stripe is counted (`partial_stripes_expensive`).
    pub fn partial_stripes_expensive(&self) -> bool {
        self.partial_stripes_expensive
    }

    /// The number of dirty sectors of the device.
    pub fn dirty(&self) -> Sectors {
        Sectors(self.dirty)
    }

    /// Counts sectors that became dirty and were not dirty before.
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

    /// Counts sectors that were dirty and no longer are.
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Stripes of 5 MiB (no power of two) over a data area of 12 MiB from sector 16: stripe 0 lacks 16
    /// sectors in front, stripe 2 is cut at sector 24 592.
    fn raid() -> StripeGeometry {
        StripeGeometry::new(Sectors(10240), Sector(16), Sectors(24576))
    }

    fn full(d: &DirtyStripes, from: u64) -> Vec<(u64, u64)> {
        d.full_dirty_stripes(Sector(from)).map(|(start, sectors)| (start.0, sectors.0)).collect()
    }

    #[test]
    fn stripe_sizes_follow_the_optimal_io_size() {
        let size =
            |optimal| StripeGeometry::new(Sectors(optimal), Sector(16), Sectors(1 << 40)).stripe_sectors().0;
        assert_eq!(size(0), 1 << 31, "1 TiB");
        assert_eq!(size(1024), 8192, "512 KiB: eight of them are 4 MiB");
        assert_eq!(size(6144), 12288, "3 MiB: two of them");
        assert_eq!(size(3072), 9216, "1.5 MiB: three of them");
        assert_eq!(size(8192), 8192);
        assert_eq!(size(10240), 10240, "5 MiB stay");
        assert_eq!(size(1), 8192);
    }

    #[test]
    fn stripes_at_the_ends_are_cut() {
        let g = raid();
        assert_eq!(g.extent(0), (Sector(16), Sectors(10224)));
        assert_eq!(g.extent(1), (Sector(10240), Sectors(10240)));
        assert_eq!(g.extent(2), (Sector(20480), Sectors(4112)));
        assert_eq!(g.extent(3).1, Sectors(0));
        assert_eq!(g.extent(u64::MAX).1, Sectors(0));
        assert_eq!((g.stripe_of(Sector(10239)), g.stripe_of(Sector(10240))), (0, 1));
    }

    #[test]
    fn ranges_are_cut_at_stripes() {
        let pieces = |start, sectors| raid().pieces(Sector(start), Sectors(sectors)).collect::<Vec<_>>();
        assert_eq!(pieces(10230, 10), [(0, 10)]);
        assert_eq!(pieces(10230, 11), [(0, 10), (1, 1)]);
        assert_eq!(pieces(16, 24576), [(0, 10224), (1, 10240), (2, 4112)]);
        assert_eq!(pieces(10240, 0), []);
        assert_eq!(pieces(u64::MAX - 1, 5).len(), 1, "no overflow");
    }

    #[test]
    fn partial_and_full_stripes_are_known() {
        let mut d = DirtyStripes::new(raid(), true);
        d.add(Sector(10240), Sectors(10239));
        assert!(full(&d, 0).is_empty());
        assert!(d.touches_dirty_stripe(Sector(10000), Sectors(241)), "its last sector is in stripe 1");
        assert!(!d.touches_dirty_stripe(Sector(10000), Sectors(240)));
        assert!(!d.touches_dirty_stripe(Sector(20480), Sectors(8)));
        assert!(d.touches_dirty_stripe(Sector(16), Sectors(24576)));
        assert!(!d.touches_dirty_stripe(Sector(10240), Sectors(0)));
        d.add(Sector(20479), Sectors(4113));
        assert_eq!(full(&d, 0), [(10240, 10240), (20480, 4112)]);
        assert_eq!(full(&d, 20479), [(10240, 10240), (20480, 4112)], "from within a stripe");
        assert_eq!(full(&d, 20480), [(20480, 4112)]);
        d.add(Sector(16), Sectors(10224));
        assert_eq!(full(&d, 0)[0], (16, 10224), "all of stripe 0 that is data");
        d.remove(Sector(12000), Sectors(1));
        assert_eq!(full(&d, 0).len(), 2);
        assert_eq!(d.dirty(), Sectors(24575));
        d.remove(Sector(16), Sectors(11984));
        d.remove(Sector(12001), Sectors(12591));
        assert_eq!(d.dirty(), Sectors(0));
        assert!(!d.touches_dirty_stripe(Sector(0), Sectors(1 << 40)));
        assert!(d.counts.is_empty() && d.full.is_empty(), "nothing is kept for clean stripes");
    }

    #[test]
    fn cheap_partial_stripes_are_not_tracked() {
        let mut d = DirtyStripes::new(StripeGeometry::new(Sectors(0), Sector(16), Sectors(1 << 50)), false);
        d.add(Sector(1 << 45), Sectors(1 << 40));
        assert_eq!(d.dirty(), Sectors(1 << 40));
        assert!(!d.touches_dirty_stripe(Sector(1 << 45), Sectors(8)));
        assert!(full(&d, 0).is_empty() && d.counts.is_empty());
        assert!(!d.partial_stripes_expensive());
        assert_eq!(d.geometry().stripe_sectors(), Sectors(1 << 31));
    }

    /// Optimal I/O sizes around the smallest stripe, and around its parts.
    #[test]
    fn small_stripes_are_taken_several_at_a_time() {
        for (optimal, stripe) in [
            (1, 8192),
            (2, 8192),
            (4095, 12_285),
            (4096, 8192),
            (4097, 8194),
            (8191, 16_382),
            (8192, 8192),
            (8193, 8193),
            (1 << 31, 1 << 31),
        ] {
            let g = StripeGeometry::new(Sectors(optimal), Sector(0), Sectors(1));
            assert_eq!(g.stripe_sectors(), Sectors(stripe), "{optimal}");
        }
    }

    /// Stripes of 8192 sectors over a data area from 16 to 8200: each sum of an `add` and a `remove`.
    #[test]
    fn sums_are_those_of_what_was_added_and_removed() {
        let mut d = DirtyStripes::new(StripeGeometry::new(Sectors(8192), Sector(16), Sectors(8184)), true);
        assert!(d.partial_stripes_expensive());
        assert_eq!(d.dirty(), Sectors(0));
        d.add(Sector(8190), Sectors(4));
        assert_eq!((d.dirty(), d.counts.get(&0), d.counts.get(&1)), (Sectors(4), Some(&2), Some(&2)));
        assert!(d.touches_dirty_stripe(Sector(0), Sectors(1)));
        d.remove(Sector(8191), Sectors(2));
        assert_eq!((d.counts.get(&0), d.counts.get(&1)), (Some(&1), Some(&1)));
        d.remove(Sector(8190), Sectors(1));
        assert!(!d.touches_dirty_stripe(Sector(0), Sectors(8192)));
        assert!(d.touches_dirty_stripe(Sector(0), Sectors(8193)));
        d.add(Sector(8192), Sectors(1));
        d.add(Sector(8194), Sectors(6));
        assert_eq!(full(&d, 0), [(8192, 8)]);
        assert_eq!(d.dirty(), Sectors(8));
    }

    proptest! {
        /// Compares the counts with one flag for each sector, on a small geometry.
        #[test]
        fn agrees_with_a_map_of_sectors(
            stripe in 1u64..40, data_offset in 0u64..50, data in 1u64..200,
            ops in prop::collection::vec((any::<bool>(), any::<u64>(), 1u64..60), 1..60),
        ) {
            let geometry = StripeGeometry { stripe, data_start: data_offset, data_end: data_offset + data };
            let mut d = DirtyStripes::new(geometry, true);
            let mut dirty = vec![false; (data_offset + data) as usize];
            for (add, at, sectors) in ops {
                let start = data_offset + at % data;
                let end = (start + sectors).min(data_offset + data);
                // The index passes only sectors that change.
                for sector in start..end {
                    if dirty[sector as usize] != add {
                        dirty[sector as usize] = add;
                        let change = if add { DirtyStripes::add } else { DirtyStripes::remove };
                        change(&mut d, Sector(sector), Sectors(1));
                    }
                }
                let in_stripe = |nr: u64| {
                    let begin = (nr * stripe).max(data_offset);
                    begin..((nr + 1) * stripe).min(data_offset + data)
                };
                let stripes = data_offset / stripe..=(data_offset + data - 1) / stripe;
                let expected: Vec<(u64, u64)> = stripes
                    .map(in_stripe)
                    .filter(|r| r.clone().all(|s| dirty[s as usize]))
                    .map(|r| (r.start, r.end - r.start))
                    .collect();
                prop_assert_eq!(full(&d, 0), expected);
                prop_assert_eq!(d.dirty().0, dirty.iter().filter(|&&x| x).count() as u64);
                let touches = (start / stripe..=(end - 1) / stripe)
                    .any(|nr| in_stripe(nr).any(|s| dirty[s as usize]));
                prop_assert_eq!(d.touches_dirty_stripe(Sector(start), Sectors(end - start)), touches);
            }
        }
    }
}
