//! The ways in which zeros get to the medium.
//!
//! Owns the order in which the ways are tried. A request that may free the space of its range punches a hole first; any
//! other keeps the space allocated where it can. Invariant: the last way, which writes zeros as data, always remains.

/// A way to make a range read as zeros.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Zeroing {
    /// `FALLOC_FL_ZERO_RANGE`: the space stays allocated.
    ZeroRange,
    /// `FALLOC_FL_PUNCH_HOLE`: the space is freed.
    PunchHole,
    /// Zeros are written as data.
    Write,
}

/// The ways that the kernel has not refused for a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ZeroWays {
    zero_range: bool,
    punch_hole: bool,
}

impl ZeroWays {
    /// All ways, before the kernel has refused one.
    pub(crate) const ALL: ZeroWays = ZeroWays { zero_range: true, punch_hole: true };

    /// The ways without one. Zeros can always be written as data.
    pub(crate) fn without(mut self, way: Zeroing) -> ZeroWays {
        match way {
            Zeroing::ZeroRange => self.zero_range = false,
            Zeroing::PunchHole => self.punch_hole = false,
            Zeroing::Write => {}
        }
        self
    }

    /// The best way that is left. On a block device, which has no space to give back unless it may unmap, a hole is not
    /// tried for zeros that stay allocated.
    pub(crate) fn best(self, may_unmap: bool, is_block: bool) -> Zeroing {
        match (self.zero_range, self.punch_hole) {
            (_, true) if may_unmap => Zeroing::PunchHole,
            (true, _) => Zeroing::ZeroRange,
            (false, true) if !is_block => Zeroing::PunchHole,
            _ => Zeroing::Write,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The ways in the order in which they are tried, each after the kernel has refused the ones before.
    fn order(may_unmap: bool, is_block: bool) -> Vec<Zeroing> {
        let mut ways = ZeroWays::ALL;
        let mut order = Vec::new();
        loop {
            let way = ways.best(may_unmap, is_block);
            order.push(way);
            if way == Zeroing::Write {
                return order;
            }
            ways = ways.without(way);
        }
    }

    #[test]
    fn space_is_freed_first_where_it_may_be_and_last_where_not() {
        use Zeroing::{PunchHole, Write, ZeroRange};
        assert_eq!(order(true, false), [PunchHole, ZeroRange, Write]);
        assert_eq!(order(true, true), [PunchHole, ZeroRange, Write]);
        assert_eq!(order(false, false), [ZeroRange, PunchHole, Write]);
        assert_eq!(order(false, true), [ZeroRange, Write]);
    }
}
