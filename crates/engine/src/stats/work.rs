//! The time that background work takes.
//!
//! Owns, for each kind of background task, a histogram of its *slices*. A slice is the time for which the task kept the
//! thread in one run, and so the longest time for which a request of a client may have waited for it. Must not know
//! what the tasks do.

use std::cell::RefCell;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use io::{Handle, Histogram, Nanos};

use super::time::TimeStats;

/// A kind of background work.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Work {
    /// Writes journal entries.
    Journal,
    /// Writes, replaces and evicts leaves of the index.
    Leaves,
    /// Makes buckets ready for use.
    Allocator,
    /// Walks the index and moves data.
    Gc,
    /// Writes dirty data back.
    Writeback,
}

impl Work {
    /// Every kind.
    pub const ALL: [Work; 5] = [Work::Journal, Work::Leaves, Work::Allocator, Work::Gc, Work::Writeback];

    /// Name for metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Work::Journal => "journal",
            Work::Leaves => "leaves",
            Work::Allocator => "allocator",
            Work::Gc => "gc",
            Work::Writeback => "writeback",
        }
    }
}

/// Times of background work.
#[derive(Clone, Debug, Default)]
pub struct WorkStats {
    slices: [Histogram; Work::ALL.len()],
    /// Averages of whole walks of the index, as the kernel shows them.
    pub gc: TimeStats,
    /// The durations of whole walks of the index.
    pub gc_durations: Histogram,
    /// Averages of the replacements of leaves.
    pub split: TimeStats,
    /// Averages of the reads of btree nodes.
    pub read: TimeStats,
    /// The durations of the writeback batches of all devices.
    pub writeback_batches: Histogram,
}

impl WorkStats {
    pub(crate) fn gc_ended(&mut self, began: Nanos, now: Nanos) {
        self.gc.record(began, now);
        self.gc_durations.record(now.since(began));
    }

    /// The times for which a kind of work kept the thread in each run.
    pub fn slices(&self, work: Work) -> &Histogram {
        &self.slices[work as usize]
    }
}

/// A task whose slices are measured.
pub(crate) struct Sliced<F> {
    task: Pin<Box<F>>,
    work: Work,
    stats: Rc<RefCell<WorkStats>>,
    rt: Handle,
}

impl<F: Future> Sliced<F> {
    pub(crate) fn new(rt: &Handle, stats: &Rc<RefCell<WorkStats>>, work: Work, task: F) -> Sliced<F> {
        Sliced { task: Box::pin(task), work, stats: stats.clone(), rt: rt.clone() }
    }
}

impl<F: Future> Future for Sliced<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let began = self.rt.now();
        let result = self.task.as_mut().poll(cx);
        let took = self.rt.now().since(began);
        self.stats.borrow_mut().slices[self.work as usize].record(took);
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::run;

    /// A task that waits twice has three slices, and its result is unchanged.
    #[test]
    fn each_run_of_a_task_is_a_slice() {
        run(|rt| async move {
            let stats = Rc::new(RefCell::new(WorkStats::default()));
            let other = rt.clone();
            let task = async move {
                other.yield_now().await;
                other.sleep(Nanos::from_ms(7)).await;
                42
            };
            assert_eq!(Sliced::new(&rt, &stats, Work::Allocator, task).await, 42);
            let stats = stats.borrow();
            for work in Work::ALL {
                let slices = stats.slices(work);
                assert_eq!(slices.count(), if work == Work::Allocator { 3 } else { 0 }, "{}", work.name());
                assert_eq!(slices.max(), Nanos(0), "a wait is no work");
            }
        });
    }

    #[test]
    fn walks_are_averaged_and_counted() {
        let mut stats = WorkStats::default();
        stats.gc_ended(Nanos::from_ms(5), Nanos::from_ms(9));
        stats.gc_ended(Nanos::from_ms(20), Nanos::from_ms(32));
        assert_eq!(
            (stats.gc.max_duration(), stats.gc_durations.max()),
            (Nanos::from_ms(12), Nanos::from_ms(12))
        );
        assert_eq!((stats.gc.average_duration(), stats.gc_durations.count()), (Nanos::from_ms(5), 2));
    }

    #[test]
    fn kinds_are_listed_by_their_index() {
        for (i, work) in Work::ALL.into_iter().enumerate() {
            assert_eq!(work as usize, i, "{}", work.name());
        }
    }
}
