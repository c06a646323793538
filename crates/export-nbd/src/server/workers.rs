//! The workers of a connection: long-lived tasks that carry out jobs.
//!
//! Owns the hand-over of jobs. No task is started for each request: a job goes to an idle worker, or to a new one if the limit
//! permits, or waits. The worker that became idle last gets the next job, because its memory is in the processor cache. Must
//! not know what a job is.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::future::poll_fn;
use std::task::{Poll, Waker};

struct Worker<J> {
    job: Option<J>,
    waker: Option<Waker>,
    idle: bool,
}

struct WorkerQueue<J> {
    workers: Vec<Worker<J>>,
    idle: Vec<usize>,
    backlog: VecDeque<J>,
    closed: bool,
}

/// The workers of a connection, and the jobs that wait for one.
pub(super) struct Workers<J> {
    inner: RefCell<WorkerQueue<J>>,
    limit: usize,
}

impl<J> Workers<J> {
    /// Creates the list of workers, which is empty and never has more than `limit`.
    pub(super) fn new(limit: usize) -> Workers<J> {
        let inner =
            WorkerQueue { workers: Vec::new(), idle: Vec::new(), backlog: VecDeque::new(), closed: false };
        Workers { inner: RefCell::new(inner), limit: limit.max(1) }
    }

    /// Hands `job` over. If this returns a number, the caller must start a task for the worker of that number.
    #[must_use]
    pub(super) fn submit(&self, job: J) -> Option<usize> {
        let inner = &mut *self.inner.borrow_mut();
        if let Some(id) = inner.idle.pop() {
            let worker = &mut inner.workers[id];
            worker.job = Some(job);
            worker.idle = false;
            if let Some(w) = &worker.waker {
                w.wake_by_ref();
            }
            return None;
        }
        if inner.workers.len() == self.limit {
            inner.backlog.push_back(job);
            return None;
        }
        inner.workers.push(Worker { job: Some(job), waker: None, idle: false });
        Some(inner.workers.len() - 1)
    }

    /// The next job of worker `id`; `None` after [`Workers::close`] when no job waits.
    pub(super) async fn next(&self, id: usize) -> Option<J> {
        poll_fn(|cx| {
            let inner = &mut *self.inner.borrow_mut();
            let worker = &mut inner.workers[id];
            let job = worker.job.take().or_else(|| inner.backlog.pop_front());
            if job.is_some() {
                return Poll::Ready(job);
            }
            if inner.closed {
                return Poll::Ready(None);
            }
            if !worker.idle {
                worker.idle = true;
                inner.idle.push(id);
            }
            match &worker.waker {
                Some(w) if w.will_wake(cx.waker()) => {}
                _ => worker.waker = Some(cx.waker().clone()),
            }
            Poll::Pending
        })
        .await
    }

    /// Closes the list: no more jobs are submitted, and idle workers end.
    pub(super) fn close(&self) {
        let mut inner = self.inner.borrow_mut();
        inner.closed = true;
        let wakers: Vec<Waker> = inner.workers.iter_mut().filter_map(|w| w.waker.take()).collect();
        drop(inner);
        wakers.into_iter().for_each(Waker::wake);
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::pin;
    use std::task::Context;

    use super::*;

    fn next(workers: &Workers<u32>, id: usize) -> Poll<Option<u32>> {
        pin!(workers.next(id)).poll(&mut Context::from_waker(Waker::noop()))
    }

    #[test]
    fn jobs_go_to_idle_workers_then_to_new_ones_then_wait() {
        let workers = Workers::new(2);
        assert_eq!(workers.submit(1), Some(0));
        assert_eq!(workers.submit(2), Some(1));
        assert_eq!(workers.submit(3), None, "waits");
        assert_eq!(next(&workers, 1), Poll::Ready(Some(2)));
        assert_eq!(next(&workers, 1), Poll::Ready(Some(3)));
        assert_eq!(next(&workers, 1), Poll::Pending);
        assert_eq!(next(&workers, 1), Poll::Pending, "idle once, however often it is polled");
        assert_eq!(workers.submit(4), None);
        assert_eq!(workers.submit(5), None, "the other worker is busy, so this waits");
        assert_eq!(next(&workers, 0), Poll::Ready(Some(1)));
        workers.close();
        assert_eq!(next(&workers, 1), Poll::Ready(Some(4)));
        assert_eq!(next(&workers, 0), Poll::Ready(Some(5)));
        assert_eq!(next(&workers, 0), Poll::Ready(None));
        assert_eq!(next(&workers, 1), Poll::Ready(None));
    }
}
