//! A budget that limits the memory whose size disks and clients decide.
//!
//! Owns a limit and the count of reserved bytes. All threads of a process share one budget. Code that allocates memory
//! of an untrusted size reserves it here first, so that an excessive size is refused with figures and not allocated.
//!
//! Invariants: the sum of all existing [`Reservation`]s never exceeds the limit; a dropped reservation returns all its
//! bytes. A refusal takes nothing. There is no queue: a caller that waits polls its own condition. Must not know what
//! the memory is for, nor how much memory the host has: the caller chooses the limit.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A budget of memory in bytes that all threads of a process share. A clone is cheap and is the same budget.
#[derive(Clone)]
pub struct MemoryBudget {
    shared: Arc<BudgetState>,
}

struct BudgetState {
    limit: u64,
    used: AtomicU64,
    peak: AtomicU64,
    refusals: AtomicU64,
}

/// A request for memory exceeds the rest of a budget.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{wanted} bytes of memory do not fit: {used} of {limit} bytes are in use")]
pub struct OverBudget {
    /// Bytes that were requested.
    pub wanted: u64,
    /// Bytes that were reserved at that moment.
    pub used: u64,
    /// Bytes that can be reserved in all.
    pub limit: u64,
}

/// The allocator has no memory for a table.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the system has no {bytes} bytes of memory for a table")]
pub struct NoMemory {
    /// Bytes of the table.
    pub bytes: u64,
}

/// Makes a table of `len` entries. `len` may come from a disk: a limit of the system can be lower than the budget, and an
/// allocation that is not checked ends the process.
///
/// # Errors
/// If the allocator has no memory for the table.
pub fn try_table<T>(len: usize, entry: impl FnMut() -> T) -> Result<Vec<T>, NoMemory> {
    let mut table = Vec::new();
    let bytes = (len as u64).saturating_mul(size_of::<T>() as u64);
    table.try_reserve_exact(len).map_err(|_| NoMemory { bytes })?;
    table.resize_with(len, entry);
    Ok(table)
}

/// The figures of a budget at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct MemoryFigures {
    /// Bytes that can be reserved in all.
    pub limit: u64,
    /// Bytes that are reserved.
    pub used: u64,
    /// The most bytes that were ever reserved at a time.
    pub peak: u64,
    /// Reservations that were refused.
    pub refusals: u64,
}

impl MemoryBudget {
    /// A budget of `limit` bytes, of which none are reserved.
    pub fn new(limit: u64) -> MemoryBudget {
        let (used, peak, refusals) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
        MemoryBudget { shared: Arc::new(BudgetState { limit, used, peak, refusals }) }
    }

    /// A budget without a practical limit; it counts reservations too.
    pub fn unlimited() -> MemoryBudget {
        MemoryBudget::new(u64::MAX)
    }

    /// Reserves `bytes`.
    ///
    /// # Errors
    /// If `bytes` exceed the rest of the budget.
    pub fn try_reserve(&self, bytes: u64) -> Result<Reservation, OverBudget> {
        self.shared.take(bytes)?;
        Ok(Reservation { budget: self.clone(), bytes })
    }

    /// Bytes that can be reserved in all.
    pub fn limit(&self) -> u64 {
        self.shared.limit
    }

    /// Bytes that are reserved now.
    pub fn used(&self) -> u64 {
        self.shared.used.load(Ordering::Relaxed)
    }

    /// All figures.
    pub fn figures(&self) -> MemoryFigures {
        MemoryFigures {
            limit: self.shared.limit,
            used: self.used(),
            peak: self.shared.peak.load(Ordering::Relaxed),
            refusals: self.shared.refusals.load(Ordering::Relaxed),
        }
    }
}

impl Default for MemoryBudget {
    fn default() -> Self {
        MemoryBudget::unlimited()
    }
}

impl fmt::Debug for MemoryBudget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.figures().fmt(f)
    }
}

impl BudgetState {
    // Threads share only the counts through these atomics, and no other data, so relaxed order is enough.
    fn take(&self, bytes: u64) -> Result<(), OverBudget> {
        let mut used = self.used.load(Ordering::Relaxed);
        loop {
            let after = used.checked_add(bytes).filter(|after| *after <= self.limit);
            let Some(after) = after else {
                self.refusals.fetch_add(1, Ordering::Relaxed);
                return Err(OverBudget { wanted: bytes, used, limit: self.limit });
            };
            match self.used.compare_exchange_weak(used, after, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => {
                    // A plain load first: a peak is rarely exceeded, and a shared line is cheap to read.
                    if after > self.peak.load(Ordering::Relaxed) {
                        self.peak.fetch_max(after, Ordering::Relaxed);
                    }
                    return Ok(());
                }
                Err(now) => used = now,
            }
        }
    }

    fn give(&self, bytes: u64) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// Reserved bytes of a budget. Dropping it returns them.
#[must_use = "memory that is not held is given back at once"]
pub struct Reservation {
    budget: MemoryBudget,
    bytes: u64,
}

impl Reservation {
    /// Bytes that are reserved.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Reserves `more` bytes in addition to those that are reserved.
    ///
    /// # Errors
    /// If `more` bytes exceed the rest of the budget. The reservation then stays as it is.
    pub fn try_grow(&mut self, more: u64) -> Result<(), OverBudget> {
        self.budget.shared.take(more)?;
        // The budget's own count did not overflow, and it includes this one.
        self.bytes += more;
        Ok(())
    }

    /// Returns the part of the reservation beyond `bytes`.
    pub fn shrink_to(&mut self, bytes: u64) {
        let excess = self.bytes.saturating_sub(bytes);
        if excess > 0 {
            self.bytes -= excess;
            self.budget.shared.give(excess);
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.budget.shared.give(self.bytes);
    }
}

impl fmt::Debug for Reservation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Reservation({} bytes)", self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reservation_over_the_budget_is_refused_and_takes_nothing() {
        let budget = MemoryBudget::new(100);
        let held = budget.try_reserve(60).unwrap();
        let refused = budget.try_reserve(41).unwrap_err();
        assert_eq!(refused, OverBudget { wanted: 41, used: 60, limit: 100 });
        assert_eq!(refused.to_string(), "41 bytes of memory do not fit: 60 of 100 bytes are in use");
        let rest = budget.try_reserve(40).unwrap();
        assert_eq!(budget.used(), 100);
        drop(held);
        drop(rest);
        assert_eq!(budget.figures(), MemoryFigures { limit: 100, used: 0, peak: 100, refusals: 1 });
    }

    #[test]
    fn a_table_without_memory_is_refused_with_its_size() {
        let mut entries = 0_u16..;
        assert_eq!(try_table(3, || entries.next()).unwrap(), [Some(0), Some(1), Some(2)]);
        let refused = try_table(usize::MAX / 2, || 0_u64).unwrap_err();
        assert_eq!(refused, NoMemory { bytes: u64::MAX });
        let refused = try_table(1 << 60, || 0_u8).unwrap_err();
        assert_eq!(refused.to_string(), "the system has no 1152921504606846976 bytes of memory for a table");
    }

    #[test]
    fn sizes_near_the_end_of_the_number_range_do_not_wrap() {
        let budget = MemoryBudget::unlimited();
        let _held = budget.try_reserve(u64::MAX - 1).unwrap();
        assert!(budget.try_reserve(2).is_err());
        assert!(budget.try_reserve(u64::MAX).is_err());
        assert!(budget.try_reserve(1).is_ok());
    }

    #[test]
    fn a_reservation_grows_and_shrinks_within_the_budget() {
        let budget = MemoryBudget::new(100);
        let mut held = budget.try_reserve(10).unwrap();
        held.try_grow(80).unwrap();
        assert!(held.try_grow(11).is_err());
        assert_eq!((held.bytes(), budget.used()), (90, 90));
        held.shrink_to(30);
        held.shrink_to(50);
        assert_eq!((held.bytes(), budget.used()), (30, 30));
        drop(held);
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn threads_never_exceed_the_limit_together() {
        const LIMIT: u64 = 10;
        let budget = MemoryBudget::new(LIMIT);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for n in 0..10_000u64 {
                        let held = budget.try_reserve(n % 7);
                        assert!(budget.used() <= LIMIT);
                        drop(held);
                    }
                });
            }
        });
        let figures = budget.figures();
        assert_eq!(figures.used, 0);
        assert!(figures.peak <= LIMIT && figures.peak >= 6, "{figures:?}");
    }
}
