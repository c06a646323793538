//! Whether writeback also writes the gaps between dirty extents, so that several extents become one request.
//!
//! Owns the rule by which dirty extents become one request. A *run* that bridges a *gap* must also write the gap, with
//! the data that the backing device has there. That data is read first: from the cache if it has a copy, otherwise from
//! the device, in one request for all gaps of the run. Where each request costs much, this is cheaper than one request
//! for each extent. The rule depends on lengths only, not on positions. Must not know the index and the devices.

use format::Sectors;
use io::Nanos;

use super::choices::Bridge;
use super::cost::Costs;

/// Gaps are not bridged where a request costs less than this: the additional writes would wear out a flash device for a
/// small gain.
const WORTH_SAVING: Nanos = Nanos::from_ms(1);

/// The rule for one batch.
#[derive(Clone, Copy, Debug)]
pub struct Bridging {
    mode: Bridge,
    limit: Sectors,
    costs: Costs,
}

/// The lengths in a run.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Shape {
    /// The number of groups of adjacent extents, which is the number of requests without bridging.
    pub groups: u64,
    /// The sectors of dirty data.
    pub dirty: Sectors,
    /// The sectors from the first to the last.
    pub span: Sectors,
    /// The sectors that must be read from the backing device, in one request.
    pub missing: Sectors,
}

impl Bridging {
    /// Makes the rule for one batch. `limit` is the largest gap. `known`: the costs were observed and are not only the
    /// usual ones.
    pub fn new(mode: Bridge, limit: Sectors, costs: Costs, known: bool) -> Bridging {
        let worth_it = match mode {
            Bridge::Always => true,
            Bridge::Auto => known && costs.per_request() >= WORTH_SAVING,
            Bridge::Off => false,
        };
        let mode = if worth_it { mode } else { Bridge::Off };
        Bridging { mode, limit, costs }
    }

    /// Whether a run should bridge `gap` to the next extent of `next` sectors instead of ending. It should if that is
    /// cheaper in a run that reads from the device anyway.
    pub fn goes_over(&self, gap: Sectors, next: Sectors) -> bool {
        if gap > self.limit {
            return false;
        }
        match self.mode {
            Bridge::Off => false,
            Bridge::Always => true,
            Bridge::Auto => {
                let read = self.costs.transfer(gap + next);
                let write = self.costs.transfer(gap);
                read.after(write) < self.costs.per_request()
            }
        }
    }

    /// Whether one read and one write are cheaper than the requests that they replace.
    pub fn pays(&self, shape: &Shape) -> bool {
        match self.mode {
            Bridge::Off => false,
            Bridge::Always => true,
            Bridge::Auto => {
                let read =
                    if shape.missing > Sectors::ZERO { self.costs.random(shape.missing) } else { Nanos(0) };
                let bridged = read.after(self.costs.random(shape.span));
                let requests = Nanos(self.costs.per_request().0.saturating_mul(shape.groups));
                bridged < requests.after(self.costs.transfer(shape.dirty))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: Sectors = Sectors(8);

    /// 6.5 ms for each request, 7 ms for each MiB.
    fn disk(mode: Bridge) -> Bridging {
        Bridging::new(mode, Sectors(2048), Costs::usual(true), true)
    }

    fn shape(groups: u64, gap: u64, missing: u64) -> Shape {
        let span = Sectors(groups * (8 + gap) - gap);
        Shape { groups, dirty: Sectors(groups * 8), span, missing: Sectors(missing) }
    }

    #[test]
    fn a_run_goes_over_gaps_that_take_less_time_than_a_request() {
        let auto = disk(Bridge::Auto);
        assert!(auto.goes_over(Sectors(900), BLOCK));
        assert!(!auto.goes_over(Sectors(960), BLOCK), "twice 960 sectors take longer than 6.5 ms");
        assert!(!auto.goes_over(Sectors(100), Sectors(2000)), "reading a large extent again is not worth it");
        assert!(disk(Bridge::Always).goes_over(Sectors(2048), Sectors(2048)));
        assert!(!disk(Bridge::Always).goes_over(Sectors(2049), BLOCK));
        assert!(!disk(Bridge::Off).goes_over(Sectors(1), BLOCK));
    }

    #[test]
    fn a_read_and_a_write_replace_three_writes_but_not_two() {
        let auto = disk(Bridge::Auto);
        assert!(!auto.pays(&shape(2, 8, 8)));
        assert!(auto.pays(&shape(2, 8, 0)), "the cache has what is missing");
        assert!(auto.pays(&shape(3, 8, 24)));
        assert!(!auto.pays(&shape(3, 900, 1808)), "1.8 MiB more for one request less");
        assert!(disk(Bridge::Always).pays(&shape(2, 8, 8)) && !disk(Bridge::Off).pays(&shape(9, 8, 0)));
    }

    #[test]
    fn nothing_is_gained_where_requests_cost_nothing_or_nothing_is_known() {
        let ssd = Bridging::new(Bridge::Auto, Sectors(2048), Costs::usual(false), true);
        let unknown = Bridging::new(Bridge::Auto, Sectors(2048), Costs::usual(true), false);
        for b in [ssd, unknown] {
            assert!(!b.goes_over(BLOCK, BLOCK) && !b.pays(&shape(100, 8, 0)));
        }
    }

    /// 1 ms for each request, and 1 ms for each MiB of 2048 sectors: each rule where both sides are equal, and beside it.
    #[test]
    fn a_gap_at_equal_cost_is_not_bridged() {
        let at = |request_ms: f64, known| {
            let costs = Costs::of(request_ms, 0.0, 1.0);
            Bridging::new(Bridge::Auto, Sectors(4096), costs, known)
        };
        let b = at(1.0, true);
        // Reading 1536 sectors and writing 512 takes 1 ms.
        assert!(!b.goes_over(Sectors(512), Sectors(1024)));
        assert!(b.goes_over(Sectors(512), Sectors(1016)));
        assert!(b.goes_over(Sectors(504), Sectors(1024)));
        assert!(!at(0.999, true).goes_over(Sectors(8), Sectors(8)), "requests that cost less cost nothing");
        assert!(!at(1.0, false).goes_over(Sectors(8), Sectors(8)));
        // Two groups of 8 sectors: 2 ms and 16 sectors. One write of 2064 sectors takes 1 ms and 2064 sectors.
        let two = |span, missing| Shape {
            groups: 2,
            dirty: Sectors(16),
            span: Sectors(span),
            missing: Sectors(missing),
        };
        assert!(!b.pays(&two(2064, 0)));
        assert!(b.pays(&two(2056, 0)));
        // One write takes a nanosecond less than two, and no gap has to be read.
        let odd = Bridging::new(Bridge::Auto, Sectors(4096), Costs::of(1.000_001_2, 0.0, 1.0), true);
        assert!(odd.pays(&two(2064, 0)));
        // Three groups: the read of 1024 sectors replaces one of the three writes.
        let three = |span, missing| Shape { groups: 3, ..two(span, missing) };
        assert!(!b.pays(&three(1040, 1024)));
        assert!(b.pays(&three(1032, 1024)) && b.pays(&three(1040, 1016)));
        assert!(!b.pays(&three(2056, 8)) && b.pays(&three(2048, 8)));
        assert!(b.goes_over(Sectors(0), Sectors(8)));
        let narrow = Bridging::new(Bridge::Always, Sectors(16), Costs::usual(true), false);
        assert!(narrow.goes_over(Sectors(16), Sectors(9999)) && !narrow.goes_over(Sectors(17), Sectors(1)));
    }
}
