//! A rate limit of messages: lines that clients can cause must not fill the log.
//!
//! Owns the count of lines within a period. Lines beyond the limit are counted instead of written, and the next line has the
//! number. Must not know the contents of lines, nor read a clock.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// A limit of the lines in each period.
pub(crate) struct Quiet {
    most: u32,
    period: Duration,
    began: Cell<Option<Instant>>,
    said: Cell<u32>,
    left_out: Cell<u64>,
}

impl Quiet {
    /// Makes a limit of `most` lines in each `period`.
    pub(crate) const fn new(most: u32, period: Duration) -> Quiet {
        let (began, said, left_out) = (Cell::new(None), Cell::new(0), Cell::new(0));
        Quiet { most, period, began, said, left_out }
    }

    /// Whether a line may be written now; if so, the number of lines that were omitted since the last one.
    pub(crate) fn admit(&self, now: Instant) -> Option<u64> {
        if self.began.get().is_none_or(|began| now.saturating_duration_since(began) >= self.period) {
            self.began.set(Some(now));
            self.said.set(0);
        }
        if self.said.get() == self.most {
            self.left_out.set(self.left_out.get() + 1);
            return None;
        }
        self.said.set(self.said.get() + 1);
        Some(self.left_out.take())
    }

    /// The number of lines that were omitted since the last one that was written.
    pub(crate) fn left_out(&self) -> u64 {
        self.left_out.get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_a_few_lines_and_a_number() {
        let quiet = Quiet::new(2, Duration::from_secs(60));
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        assert_eq!((quiet.admit(at(0)), quiet.admit(at(0))), (Some(0), Some(0)));
        for _ in 0..1000 {
            assert_eq!(quiet.admit(at(59)), None);
        }
        assert_eq!(quiet.left_out(), 1000);
        assert_eq!(
            (quiet.admit(at(60)), quiet.admit(at(61)), quiet.admit(at(62))),
            (Some(1000), Some(0), None)
        );
        assert_eq!((quiet.admit(at(1000)), quiet.left_out()), (Some(1), 0));
    }
}
