//! The bridge between threads in every interleaving of its locks and wake-ups, with two or three threads.
//!
//! loom's locks take the place of the standard library's: this program compiles `bridge.rs` by itself. An interleaving in which
//! all threads wait is reported as a deadlock, so a lost wake-up fails the test. The driver's own waker (an eventfd) is no part of
//! this: a task here is a thread that parks.

#[allow(dead_code, reason = "the driver uses the rest")]
#[path = "../src/bridge.rs"]
mod bridge;

mod sync {
    pub(crate) use loom::sync::{Arc, Condvar, Mutex, MutexGuard};
}

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Wake, Waker};

use bridge::{Disconnected, RemoteReceiver, Reply, TrySendError, channel, oneshot};
use loom::thread;

struct Unpark(thread::Thread);

impl Wake for Unpark {
    fn wake(self: std::sync::Arc<Self>) {
        self.0.unpark();
    }
}

/// Runs a task to its end on this thread, which sleeps while it has nothing to do.
fn block_on<F: Future>(task: F) -> F::Output {
    let waker = Waker::from(std::sync::Arc::new(Unpark(thread::current())));
    let mut context = Context::from_waker(&waker);
    let mut task = pin!(task);
    loop {
        if let Poll::Ready(done) = task.as_mut().poll(&mut context) {
            return done;
        }
        thread::park();
    }
}

/// Every interleaving with at most three changes of thread where none is needed: such bugs need one or two.
fn explore(run: impl Fn() + Sync + Send + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(run);
}

fn all<T: Send>(mut receiver: RemoteReceiver<T>) -> Vec<T> {
    block_on(async {
        let mut got = Vec::new();
        while let Some(item) = receiver.recv().await {
            got.push(item);
        }
        got
    })
}

#[test]
fn every_request_arrives_once_and_the_receiver_sees_the_last_sender_go() {
    explore(|| {
        let (sender, receiver) = channel(1);
        let other = sender.clone();
        let first = thread::spawn(move || other.send(1));
        let second = thread::spawn(move || sender.send(2));
        let mut got = all(receiver);
        got.sort_unstable();
        assert_eq!(got, [1, 2]);
        assert_eq!((first.join().unwrap(), second.join().unwrap()), (Ok(()), Ok(())));
    });
}

#[test]
fn one_thread_s_requests_arrive_in_order_through_a_queue_of_one() {
    explore(|| {
        let (sender, receiver) = channel(1);
        let thread = thread::spawn(move || (1..=3).try_for_each(|n| sender.send(n)));
        assert_eq!(all(receiver), [1, 2, 3]);
        assert_eq!(thread.join().unwrap(), Ok(()));
    });
}

/// Two senders wait for room when the receiver ends: both get an error.
#[test]
fn a_receiver_that_goes_ends_every_wait_for_room() {
    for receives in [false, true] {
        explore(move || {
            let (sender, mut receiver) = channel(1);
            sender.send(0).unwrap();
            let other = sender.clone();
            let first = thread::spawn(move || other.send(1));
            let second = thread::spawn(move || sender.send(2));
            if receives {
                assert_eq!(block_on(receiver.recv()), Some(0));
            }
            drop(receiver);
            let sent = [first.join().unwrap(), second.join().unwrap()];
            assert!(sent[0] == Ok(()) || sent[0] == Err(Disconnected(1)), "{sent:?}");
            assert!(sent[1] == Ok(()) || sent[1] == Err(Disconnected(2)), "{sent:?}");
            let taken = sent.iter().filter(|s| s.is_ok()).count();
            assert!(taken <= usize::from(receives), "there was room for {}: {sent:?}", usize::from(receives));
        });
    }
}

#[test]
fn a_call_is_answered_or_told_that_the_task_is_gone() {
    explore(|| {
        let (sender, mut receiver) = channel::<(u8, Reply<u8>)>(1);
        let caller = thread::spawn(move || {
            let first = sender.call(|reply| (1, reply));
            let second = sender.call(|reply| (2, reply));
            (first, second)
        });
        let (n, reply) = block_on(receiver.recv()).unwrap();
        reply.send(n + 10);
        // The second request finds the receiver gone, or is dropped with the queue.
        drop(receiver);
        assert_eq!(caller.join().unwrap(), (Ok(11), Err(Disconnected(()))));
    });
}

#[test]
fn a_request_that_the_task_drops_unanswered_ends_its_call() {
    explore(|| {
        let (sender, mut receiver) = channel::<Reply<u8>>(1);
        let caller = thread::spawn(move || sender.call(|reply| reply));
        drop(block_on(receiver.recv()));
        assert_eq!(caller.join().unwrap(), Err(Disconnected(())));
    });
}

#[test]
fn a_task_gets_the_answer_of_a_thread_or_sees_it_go() {
    for answers in [true, false] {
        explore(move || {
            let (reply, answer) = oneshot();
            let thread = thread::spawn(move || match answers {
                true => reply.send(7),
                false => drop(reply),
            });
            let expected = if answers { Ok(7) } else { Err(Disconnected(())) };
            assert_eq!(block_on(answer), expected);
            thread.join().unwrap();
        });
    }
}

#[test]
fn an_answer_that_is_not_awaited_any_more_is_dropped() {
    explore(|| {
        let (reply, answer) = oneshot();
        let held = loom::sync::Arc::new(());
        let value = held.clone();
        let thread = thread::spawn(move || reply.send(value));
        drop(answer);
        thread.join().unwrap();
        assert_eq!(loom::sync::Arc::strong_count(&held), 1);
    });
}

/// A sender that does not wait beside one that does: what is refused comes back, what is taken arrives.
#[test]
fn a_sender_that_does_not_wait_loses_nothing() {
    explore(|| {
        let (sender, receiver) = channel(1);
        let other = sender.clone();
        let waits = thread::spawn(move || other.send(1));
        let tries = thread::spawn(move || sender.try_send(2));
        let mut got = all(receiver);
        got.sort_unstable();
        assert_eq!(waits.join().unwrap(), Ok(()));
        match tries.join().unwrap() {
            Ok(()) => assert_eq!(got, [1, 2]),
            Err(e) => assert_eq!((e, got), (TrySendError::Full(2), vec![1])),
        }
    });
}
