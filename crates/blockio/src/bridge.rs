//! The bridge between other threads and the tasks of a driver's thread.
//!
//! Owns a bounded queue ([`channel`]), by which threads hand requests to a task, and a one-time answer ([`oneshot`]), which works
//! in both directions: a thread waits for a task's answer by [`Answer::wait`], and a task awaits a thread's answer. Requests and
//! answers are `Send`. Buffers, devices and volumes of a driver's thread do not cross this border. A wake-up goes through the
//! task's waker, which ends the driver's sleep.
//!
//! Invariants: a request whose send returns `Ok` is received or, if the receiver is dropped, dropped as well, which its `Reply`
//! reports to the waiter; no thread and no task waits for a side that was dropped.
//! `tests/bridge_interleavings.rs` compiles this file with loom's locks and tries every interleaving, so locks come from
//! `super::sync`, and nothing else here synchronises.

use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::PoisonError;
use std::task::{Context, Poll, Waker};

use super::sync::{Arc, Condvar, Mutex, MutexGuard};

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No code that can panic runs under these locks, so the data of a poisoned lock is consistent.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The other side was dropped. For a request that could not be sent, it has the request.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the other side of the channel was dropped")]
pub struct Disconnected<T = ()>(pub T);

/// Why [`RemoteSender::try_send`] gave a request back.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum TrySendError<T> {
    /// The queue is full.
    #[error("the queue is full")]
    Full(T),
    /// The receiver was dropped.
    #[error("the other side of the channel was dropped")]
    Disconnected(T),
}

struct Queue<T> {
    items: VecDeque<T>,
    capacity: usize,
    senders: usize,
    receiver_dropped: bool,
    waker: Option<Waker>,
}

struct Channel<T> {
    queue: Mutex<Queue<T>>,
    room: Condvar,
}

/// The threads' end of a [`channel`].
pub struct RemoteSender<T> {
    channel: Arc<Channel<T>>,
}

/// The task's end of a [`channel`].
pub struct RemoteReceiver<T> {
    channel: Arc<Channel<T>>,
}

/// Makes a queue of at most `capacity` requests from any threads to one task.
pub fn channel<T: Send>(capacity: usize) -> (RemoteSender<T>, RemoteReceiver<T>) {
    let queue = Queue {
        items: VecDeque::new(),
        capacity: capacity.max(1),
        senders: 1,
        receiver_dropped: false,
        waker: None,
    };
    let channel = Arc::new(Channel { queue: Mutex::new(queue), room: Condvar::new() });
    (RemoteSender { channel: channel.clone() }, RemoteReceiver { channel })
}

impl<T: Send> RemoteSender<T> {
    /// Hands `item` over. Blocks this thread while the queue is full, so the driver's own thread must not call it.
    ///
    /// # Errors
    /// Returns the item if the receiver was dropped.
    pub fn send(&self, item: T) -> Result<(), Disconnected<T>> {
        let mut queue = lock(&self.channel.queue);
        while queue.items.len() >= queue.capacity && !queue.receiver_dropped {
            queue = self.channel.room.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
        if queue.receiver_dropped {
            return Err(Disconnected(item));
        }
        Self::push(queue, item);
        Ok(())
    }

    /// Hands over `item` if there is room now.
    ///
    /// # Errors
    /// Returns the item if the queue is full or the receiver was dropped.
    pub fn try_send(&self, item: T) -> Result<(), TrySendError<T>> {
        let queue = lock(&self.channel.queue);
        if queue.receiver_dropped {
            return Err(TrySendError::Disconnected(item));
        }
        if queue.items.len() >= queue.capacity {
            return Err(TrySendError::Full(item));
        }
        Self::push(queue, item);
        Ok(())
    }

    fn push(mut queue: MutexGuard<'_, Queue<T>>, item: T) {
        queue.items.push_back(item);
        let waker = queue.waker.take();
        drop(queue);
        if let Some(w) = waker {
            w.wake();
        }
    }

    /// Sends the request that `make` builds around a [`Reply`] and blocks until it is answered.
    ///
    /// # Errors
    /// If the receiver was dropped, or dropped the request without an answer.
    pub fn call<A: Send>(&self, make: impl FnOnce(Reply<A>) -> T) -> Result<A, Disconnected> {
        let (reply, answer) = oneshot();
        self.send(make(reply)).map_err(|Disconnected(_)| Disconnected(()))?;
        answer.wait()
    }
}

impl<T> Clone for RemoteSender<T> {
    fn clone(&self) -> Self {
        lock(&self.channel.queue).senders += 1;
        RemoteSender { channel: self.channel.clone() }
    }
}

impl<T> Drop for RemoteSender<T> {
    fn drop(&mut self) {
        let mut queue = lock(&self.channel.queue);
        queue.senders -= 1;
        let waker = if queue.senders == 0 { queue.waker.take() } else { None };
        drop(queue);
        if let Some(w) = waker {
            w.wake();
        }
    }
}

impl<T> RemoteReceiver<T> {
    /// The next request; `None` once every sender is dropped and the queue is empty.
    pub async fn recv(&mut self) -> Option<T> {
        poll_fn(|cx| {
            let mut queue = lock(&self.channel.queue);
            if let Some(item) = queue.items.pop_front() {
                drop(queue);
                self.channel.room.notify_one();
                return Poll::Ready(Some(item));
            }
            if queue.senders == 0 {
                return Poll::Ready(None);
            }
            let old = queue.waker.replace(cx.waker().clone());
            drop(queue);
            drop(old);
            Poll::Pending
        })
        .await
    }

    /// The next request, if there is one now.
    pub fn try_recv(&mut self) -> Option<T> {
        let item = lock(&self.channel.queue).items.pop_front()?;
        self.channel.room.notify_one();
        Some(item)
    }

    /// Refuses all further requests, and returns those that wait.
    pub fn close(&mut self) -> VecDeque<T> {
        let mut queue = lock(&self.channel.queue);
        queue.receiver_dropped = true;
        let items = std::mem::take(&mut queue.items);
        drop(queue);
        self.channel.room.notify_all();
        items
    }
}

impl<T> Drop for RemoteReceiver<T> {
    fn drop(&mut self) {
        drop(self.close());
    }
}

struct Once<T> {
    value: Option<T>,
    reply_dropped: bool,
    waker: Option<Waker>,
}

struct OnceCell<T> {
    state: Mutex<Once<T>>,
    there: Condvar,
}

/// The answering end of a [`oneshot`]. If it is dropped without an answer, the waiter gets an error.
#[must_use = "somebody waits for the answer"]
pub struct Reply<T> {
    cell: Arc<OnceCell<T>>,
}

/// The waiting end of a [`oneshot`]: block on it ([`Answer::wait`]) or await it.
#[must_use = "an answer that nobody waits for is lost"]
pub struct Answer<T> {
    cell: Arc<OnceCell<T>>,
}

/// Makes a channel that passes one value between any two threads, once.
pub fn oneshot<T: Send>() -> (Reply<T>, Answer<T>) {
    let state = Once { value: None, reply_dropped: false, waker: None };
    let cell = Arc::new(OnceCell { state: Mutex::new(state), there: Condvar::new() });
    (Reply { cell: cell.clone() }, Answer { cell })
}

impl<T> Reply<T> {
    /// Sends the answer. It is dropped if the waiter was dropped.
    pub fn send(self, value: T) {
        lock(&self.cell.state).value = Some(value);
        // Dropping `self` wakes the waiter.
    }

    /// Whether the waiter still waits.
    pub fn is_awaited(&self) -> bool {
        Arc::strong_count(&self.cell) > 1
    }
}

impl<T> Drop for Reply<T> {
    fn drop(&mut self) {
        let mut state = lock(&self.cell.state);
        state.reply_dropped = true;
        let waker = state.waker.take();
        drop(state);
        self.cell.there.notify_all();
        if let Some(w) = waker {
            w.wake();
        }
    }
}

impl<T> Answer<T> {
    /// Blocks this thread until the answer has arrived. The driver's own thread must not call it.
    ///
    /// # Errors
    /// If the other side was dropped without an answer.
    pub fn wait(self) -> Result<T, Disconnected> {
        let mut state = lock(&self.cell.state);
        loop {
            if let Some(value) = state.value.take() {
                return Ok(value);
            }
            if state.reply_dropped {
                return Err(Disconnected(()));
            }
            state = self.cell.there.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl<T> Future for Answer<T> {
    type Output = Result<T, Disconnected>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = lock(&self.cell.state);
        if let Some(value) = state.value.take() {
            return Poll::Ready(Ok(value));
        }
        if state.reply_dropped {
            return Poll::Ready(Err(Disconnected(())));
        }
        let old = state.waker.replace(cx.waker().clone());
        drop(state);
        drop(old);
        Poll::Pending
    }
}
