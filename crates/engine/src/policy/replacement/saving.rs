//! The time that a hit saves.
//!
//! Owns the unit in which policies get the worth of a hit. Must not know devices: the caller has measured them.

use format::Sectors;

/// Worth of a hit while nothing is known about the devices.
pub(super) const UNKNOWN_WORTH: u32 = 16;
/// A hit of a file system's metadata is worth so many others.
const METADATA_WORTH: u32 = 4;

/// What a hit saves, as the sum of a part for the request and one for each sector, in units of 10 us.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Saving {
    request: u32,
    mib: u32,
}

impl Default for Saving {
    fn default() -> Saving {
        Saving { request: UNKNOWN_WORTH, mib: 0 }
    }
}

impl Saving {
    /// From what one request and one MiB more cost the backing device beyond what they cost the cache device, in
    /// nanoseconds.
    pub fn new(request_ns: u64, mib_ns: u64) -> Saving {
        let units = |ns: u64| u32::try_from(ns / 10_000).unwrap_or(u32::MAX).min(1 << 20);
        Saving { request: units(request_ns), mib: units(mib_ns) }
    }

    /// What a hit of a file system's metadata saves: other requests wait for it.
    pub fn of_metadata(self) -> Saving {
        let more = |n: u32| n.saturating_mul(METADATA_WORTH).min(1 << 20);
        Saving { request: more(self.request), mib: more(self.mib) }
    }

    /// The worth of a hit of this size: at least 1.
    pub fn of(self, sectors: Sectors) -> u32 {
        let moved = (u64::from(self.mib) * sectors.0.min(1 << 20)) >> 11;
        self.request.saturating_add(u32::try_from(moved).unwrap_or(u32::MAX)).clamp(1, 1 << 20)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_hit_is_worth_something_and_more_if_it_is_larger(request: u64, mib: u64, sectors: u64) {
            let saving = Saving::new(request, mib);
            let worth = saving.of(Sectors(sectors));
            prop_assert!((1..=1 << 20).contains(&worth));
            prop_assert!(saving.of(Sectors(sectors / 2)) <= worth);
        }
    }

    /// 1 ms a request and 8 ms a MiB, in units of 10 us.
    #[test]
    fn a_hit_is_worth_what_the_request_would_take() {
        let saving = Saving::new(1_000_000, 8_000_000);
        for (sectors, units) in [(0, 100), (8, 103), (1024, 500), (2048, 900), (1 << 18, 100 + 800 * 128)] {
            assert_eq!(saving.of(Sectors(sectors)), units, "{sectors} sectors");
            assert_eq!(saving.of_metadata().of(Sectors(sectors)) / 4, units, "{sectors} sectors of metadata");
        }
        for sectors in [1 << 20, 1 << 30, u64::MAX] {
            assert_eq!(saving.of(Sectors(sectors)), 100 + 800 * 512, "half a GiB is the most that counts");
            assert_eq!(saving.of_metadata().of(Sectors(sectors)), 1 << 20);
        }
        assert_eq!(Saving::new(9_999, 9_999).of(Sectors(8)), 1, "nothing is worth nothing");
        assert_eq!(Saving::new(u64::MAX, 0).of(Sectors(8)), 1 << 20);
        assert_eq!(Saving::default().of(Sectors(2048)), UNKNOWN_WORTH);
    }

    /// The most that counts of each part, and the least.
    #[test]
    fn savings_have_a_most() {
        let most = 1 << 20;
        // A unit is 10 us; of the saving of a MiB, a sector has a 2048th.
        assert_eq!(Saving::new(10_000, 0).of(Sectors(0)), 1);
        assert_eq!(Saving::new(29_999, 0).of(Sectors(0)), 2);
        assert_eq!(Saving::new(30_000, 0).of(Sectors(0)), 3);
        assert_eq!(Saving::new(0, u64::MAX).of(Sectors(1)), 512, "2^20 units a MiB");
        assert_eq!(Saving::new(0, u64::MAX).of_metadata().of(Sectors(1)), 512);
        assert_eq!(
            Saving::new(0, 10_000 << 18).of_metadata().of(Sectors(1)),
            512,
            "four times 2^18 are 2^20"
        );
        assert_eq!(Saving::new(0, 10_000 << 17).of_metadata().of(Sectors(1)), 256);
        assert_eq!(Saving::new(10_000 << 20, 0).of(Sectors(8)), most);
        assert_eq!(Saving::new(10_000 * ((1 << 20) - 1), 0).of(Sectors(8)), most - 1);
        assert_eq!(
            Saving::new(10_000 * ((1 << 20) - 1), 10_000 * 2048).of(Sectors(5)),
            most,
            "and five more"
        );
        assert_eq!(Saving::default().of(Sectors(1 << 30)), UNKNOWN_WORTH, "no more for more sectors");
    }
}
