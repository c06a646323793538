//! Decisions of the engine, apart from their execution.
//!
//! Owns the rules by which requests are cached or bypassed, writes and writeback are throttled, and buckets are chosen
//! for eviction. All of it is plain values and functions: the same inputs give the same result. Must not know devices,
//! clocks, the index or the journal: time arrives as [`io::Nanos`], randomness as numbers or a seed of the
//! caller, and facts about the cache as arguments. Nothing on the path of a request allocates, except [`stripes`] for a
//! backing device whose stripes are tracked.

pub mod aging;
pub mod bridging;
pub mod bypass;
pub mod choices;
pub mod congestion;
pub mod cost;
pub mod replacement;
pub mod sequential;
mod splitmix;
pub mod spread;
pub mod stripes;
pub mod writeback_rate;
pub mod yielding;

/// The percentage of buckets with data that cannot be dropped at once, rounded down (semantics section 8.5). A cache
/// without buckets counts as full.
pub fn in_use_percent(nbuckets: u64, available: u64) -> u8 {
    if nbuckets == 0 {
        return 100;
    }
    let used = u128::from(nbuckets.saturating_sub(available));
    // The quotient is at most 100.
    (used * 100 / u128::from(nbuckets)) as u8
}

#[cfg(test)]
mod tests {
    use super::in_use_percent;

    #[test]
    fn in_use_rounds_down_and_stays_in_range() {
        assert_eq!(in_use_percent(1000, 1000), 0);
        assert_eq!(in_use_percent(1000, 991), 0, "0.9 % is shown as 0");
        assert_eq!(in_use_percent(1000, 45), 95);
        assert_eq!(in_use_percent(3, 1), 66);
        assert_eq!(in_use_percent(7, 0), 100);
        assert_eq!(in_use_percent(7, 9), 0, "more available than there are");
        assert_eq!(in_use_percent(0, 0), 100);
        assert_eq!(in_use_percent(u64::MAX, 0), 100);
    }
}
