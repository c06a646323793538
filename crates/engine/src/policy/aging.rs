//! When priorities are lowered (semantics section 7.5).
//!
//! Owns the count of sectors between two agings. Must not know buckets.

/// Part of the cache that is used between two agings (semantics section 7.5).
const AGING_PART: u64 = 1024;

/// When priorities are to be lowered (semantics section 7.5).
#[derive(Clone, Debug, Default)]
pub struct Aging {
    /// Sectors of requests until the next aging; negative when it is due.
    left: i64,
}

impl Aging {
    /// A new counter: the first cached request makes aging due.
    pub fn new() -> Aging {
        Aging::default()
    }

    /// Counts a request of `sectors` that was not bypassed; true if all priorities are to be lowered now. `cache_sectors` is the size of the cache in sectors.
    pub fn count(&mut self, sectors: u64, cache_sectors: u64) -> bool {
        self.left = self.left.saturating_sub(i64::try_from(sectors).unwrap_or(i64::MAX));
        if self.left >= 0 {
            return false;
        }
        let period = i64::try_from(cache_sectors / AGING_PART).unwrap_or(i64::MAX);
        self.left = self.left.saturating_add(period);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn aging_is_due_once_per_1024th_of_the_cache() {
        let mut aging = Aging::new();
        // 1 GiB is 2 097 152 sectors, so a period has 2048.
        assert!(aging.count(8, 2_097_152), "the counter starts at 0");
        // 2040 sectors are left. 255 requests of 8 sectors bring the counter to 0, and the next one below 0.
        let due = (0..256).filter(|_| aging.count(8, 2_097_152)).count();
        assert_eq!(due, 1);
        assert!(aging.count(u64::MAX, 2_097_152));
        assert!(aging.count(0, u64::MAX), "still in arrears");
    }

    /// The request that uses up the period is the one after it is used up exactly.
    #[test]
    fn aging_is_due_when_more_than_the_period_was_used() {
        let due = |requests: &[u64]| {
            let mut aging = Aging::new();
            requests.iter().map(|sectors| aging.count(*sectors, 10 * 1024)).collect::<Vec<_>>()
        };
        assert_eq!(due(&[0, 0]), [false, false], "nothing was used");
        assert_eq!(due(&[1, 9, 1, 9, 1]), [true, false, true, false, true]);
        assert_eq!(due(&[1, 10, 9, 1]), [true, true, false, true]);
        assert_eq!(due(&[25, 0, 0, 0]), [true, true, true, false]);
    }
}
