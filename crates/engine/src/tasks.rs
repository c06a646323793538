//! The background tasks of a set.
//!
//! Owns the start of tasks, the count of background operations under way, and the times of background work. Must not
//! know what a task does.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use io::Handle;
use io::sync::Event;

use crate::stats::{Sliced, Work, WorkStats};

/// Starts the background tasks of one set, and counts its background operations.
pub(crate) struct Tasks {
    rt: Handle,
    times: Rc<RefCell<WorkStats>>,
    under_way: Cell<usize>,
    /// Bytes of memory that the data of operations under way takes.
    held_bytes: Cell<usize>,
    ended: Event,
}

impl Tasks {
    pub(crate) fn new(rt: Handle) -> Tasks {
        Tasks {
            rt,
            times: Rc::default(),
            under_way: Cell::new(0),
            held_bytes: Cell::new(0),
            ended: Event::default(),
        }
    }

    /// The times of background work.
    pub(crate) fn times(&self) -> &RefCell<WorkStats> {
        &self.times
    }

    /// Starts a background task and measures its slices.
    pub(crate) fn spawn(&self, work: Work, task: impl Future<Output = ()> + 'static) {
        self.rt.spawn(Sliced::new(&self.rt, &self.times, work, task));
    }

    /// Runs a change to its end, also if the future of the caller is dropped: otherwise a part of the change could
    /// stay, and the next change could overtake its requests.
    pub(crate) async fn to_the_end<T: 'static>(&self, change: impl Future<Output = T> + 'static) -> T {
        self.rt.spawn(change).await
    }

    /// Counts a background operation until the guard is dropped. The set does not stop before that.
    pub(crate) fn begin(self: &Rc<Self>) -> UnderWay {
        self.begin_with(0)
    }

    /// Counts a background operation, and the memory that its data takes, until the guard is dropped.
    pub(crate) fn begin_with(self: &Rc<Self>, bytes: usize) -> UnderWay {
        self.under_way.set(self.under_way.get() + 1);
        self.held_bytes.set(self.held_bytes.get() + bytes);
        UnderWay { tasks: self.clone(), bytes }
    }

    /// Bytes of memory that the data of operations under way takes.
    pub(crate) fn held_bytes(&self) -> usize {
        self.held_bytes.get()
    }

    /// The number of background operations under way.
    pub(crate) fn under_way(&self) -> usize {
        self.under_way.get()
    }

    /// Waits until no background operation is under way.
    pub(crate) async fn all_ended(&self) {
        self.ended.wait_until(|| self.under_way.get() == 0).await;
    }
}

/// A background operation; see [`Tasks::begin`].
pub(crate) struct UnderWay {
    tasks: Rc<Tasks>,
    bytes: usize,
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        let tasks = &self.tasks;
        tasks.under_way.set(tasks.under_way.get() - 1);
        tasks.held_bytes.set(tasks.held_bytes.get() - self.bytes);
        tasks.ended.notify_all();
    }
}
