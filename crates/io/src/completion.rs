//! Completions, with which a device answers an operation without allocating.
//!
//! Owns the table of operations in flight on one thread. The engine holds an [`IoFuture`] and the device a
//! [`Completer`]; both name a slot of the table. Invariants: a slot is freed exactly once; a completer that
//! is dropped without an answer answers with an error, so no waiter hangs; a future that is dropped early
//! leaves an orphan whose buffer is released when the device answers; so does an operation that is given up: its waiter gets an error at
//! once, and the device keeps the buffer.

use std::cell::RefCell;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use crate::buffer::Buffer;
use crate::clock::TurnClock;
use crate::meter::{InFlight, Measured, Meter};
use crate::request::{IoError, Request};
use crate::timer::Nanos;

/// The outcome of an operation and the buffer of its request.
#[derive(Debug)]
pub struct Completion {
    /// `Ok` if the whole operation succeeded.
    pub result: Result<(), IoError>,
    /// The buffer of the request, if it had one.
    pub buffer: Option<Buffer>,
}

enum Slot {
    Free {
        next: Option<u32>,
    },
    Pending(Option<Waker>),
    /// The waiter is to get an error before the device has answered.
    GivenUp(IoError),
    Orphan,
    Done(Completion),
}

#[derive(Default)]
struct Table {
    slots: Vec<Slot>,
    /// For each slot, the request that is measured.
    measured: Vec<Option<Measured>>,
    free: Option<u32>,
}

impl Table {
    fn insert(&mut self) -> u32 {
        match self.free {
            Some(i) => {
                if let Slot::Free { next } = self.slots[i as usize] {
                    self.free = next;
                }
                self.slots[i as usize] = Slot::Pending(None);
                i
            }
            None => {
                self.slots.push(Slot::Pending(None));
                self.measured.push(None);
                (self.slots.len() - 1) as u32
            }
        }
    }

    fn release(&mut self, i: u32) -> Slot {
        let slot = std::mem::replace(&mut self.slots[i as usize], Slot::Free { next: self.free });
        self.free = Some(i);
        slot
    }
}

struct Operations {
    table: RefCell<Table>,
    clock: Rc<TurnClock>,
}

/// The table of operations in flight. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Completions {
    inner: Rc<Operations>,
}

impl Completions {
    pub(crate) fn new(clock: Rc<TurnClock>) -> Completions {
        Completions { inner: Rc::new(Operations { table: RefCell::default(), clock }) }
    }

    /// Starts an operation whose figures go to `meter`; returns the device's completer and the waiter's future.
    pub(crate) fn start(&self, meter: Rc<Meter>, request: &Request) -> (Completer, IoFuture) {
        let measured = Measured::begin(meter, request, self.inner.clock.turn_time());
        let mut table = self.inner.table.borrow_mut();
        let slot = table.insert();
        if let Some(place) = table.measured.get_mut(slot as usize) {
            *place = Some(measured);
        }
        (
            Completer { table: self.clone(), slot: Some(slot) },
            IoFuture { table: self.clone(), slot: Some(slot) },
        )
    }

    /// The operations of a meter without an answer. It reads the whole table, so that a request has no cost for it.
    pub(crate) fn in_flight(&self, meter: &Rc<Meter>, now: Nanos) -> InFlight {
        let table = self.inner.table.borrow();
        let began = table.measured.iter().flatten().filter_map(|measured| measured.began_at(meter));
        began.fold(InFlight::default(), |all, began| InFlight {
            requests: all.requests + 1,
            oldest: all.oldest.max(now.since(began)),
        })
    }

    /// Answers the operations of a meter with errors in place of the device, whose name is `device`.
    pub(crate) fn give_up(&self, meter: &Rc<Meter>, device: &Arc<str>) {
        let mut wakers: Vec<Waker> = Vec::new();
        {
            let Table { slots, measured, .. } = &mut *self.inner.table.borrow_mut();
            for (slot, measured) in slots.iter_mut().zip(measured) {
                let error = measured.as_ref().and_then(|measured| measured.given_up(meter, device));
                if let (Slot::Pending(waker), Some(error)) = (&mut *slot, error) {
                    wakers.extend(waker.take());
                    *slot = Slot::GivenUp(error);
                }
            }
        }
        wakers.into_iter().for_each(Waker::wake);
    }

    fn complete(&self, i: u32, completion: Completion) {
        // The waker runs and buffers are dropped after the borrow ends, because both may call this table again.
        let mut table = self.inner.table.borrow_mut();
        if let Some(measured) = table.measured.get_mut(i as usize).and_then(Option::take) {
            measured.end(self.inner.clock.turn_time(), completion.result.is_err());
        }
        match &mut table.slots[i as usize] {
            Slot::Orphan => {
                table.release(i);
                drop(table);
                drop(completion);
            }
            slot @ Slot::Pending(_) => {
                let waker = match slot {
                    Slot::Pending(waker) => waker.take(),
                    _ => None,
                };
                *slot = Slot::Done(completion);
                drop(table);
                if let Some(w) = waker {
                    w.wake();
                }
            }
            // The answer has come after all, before the waiter got its error.
            slot @ Slot::GivenUp(_) => *slot = Slot::Done(completion),
            Slot::Free { .. } | Slot::Done(_) => panic!("operation {i} completed twice"),
        }
    }
}

/// The handle with which a device answers one operation by [`Completer::complete`].
#[must_use]
pub struct Completer {
    table: Completions,
    slot: Option<u32>,
}

impl Completer {
    /// Ends the operation and wakes its waiter.
    pub fn complete(mut self, result: Result<(), IoError>, buffer: Option<Buffer>) {
        if let Some(i) = self.slot.take() {
            self.table.complete(i, Completion { result, buffer });
        }
    }
}

impl Drop for Completer {
    fn drop(&mut self) {
        if let Some(i) = self.slot.take() {
            self.table.complete(i, Completion { result: Err(IoError::dropped()), buffer: None });
        }
    }
}

/// Waits for an operation. If it is dropped early, the operation still runs to its end.
#[must_use = "an operation that nobody waits for has no ordering"]
pub struct IoFuture {
    table: Completions,
    slot: Option<u32>,
}

impl Future for IoFuture {
    type Output = Completion;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Completion> {
        let i = self.slot.expect("polled after it was ready");
        let mut table = self.table.inner.table.borrow_mut();
        match &mut table.slots[i as usize] {
            Slot::Done(_) => {
                let Slot::Done(completion) = table.release(i) else { unreachable!("matched above") };
                drop(table);
                self.slot = None;
                Poll::Ready(completion)
            }
            Slot::GivenUp(error) => {
                let result = Err(error.clone());
                table.slots[i as usize] = Slot::Orphan;
                drop(table);
                self.slot = None;
                Poll::Ready(Completion { result, buffer: None })
            }
            Slot::Pending(waker) => {
                match waker {
                    Some(w) if w.will_wake(cx.waker()) => {}
                    w => *w = Some(cx.waker().clone()),
                }
                Poll::Pending
            }
            Slot::Free { .. } | Slot::Orphan => unreachable!("the future owns its slot"),
        }
    }
}

impl Drop for IoFuture {
    fn drop(&mut self) {
        let Some(i) = self.slot.take() else { return };
        let mut table = self.table.inner.table.borrow_mut();
        let released = match &mut table.slots[i as usize] {
            slot @ (Slot::Pending(_) | Slot::GivenUp(_)) => Some(std::mem::replace(slot, Slot::Orphan)),
            Slot::Done(_) => Some(table.release(i)),
            _ => None,
        };
        drop(table);
        drop(released);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer::BufferPool;
    use crate::testing::{Bench, bench};

    fn answer() -> Completion {
        Completion { result: Ok(()), buffer: Some(BufferPool::default().take(512)) }
    }

    fn operations() -> (Completions, impl Fn(&Completions) -> (Completer, IoFuture)) {
        let clock: Rc<dyn crate::Clock> = Rc::new(Still);
        let request = Request {
            op: crate::Op::Flush,
            sector: format::Sector(0),
            sectors: format::Sectors(0),
            buffer: None,
            buffer_offset_bytes: 0,
        };
        let start = move |c: &Completions| c.start(Rc::default(), &request);
        (Completions::new(Rc::new(TurnClock::new(clock))), start)
    }

    struct Still;

    impl crate::Clock for Still {
        fn now(&self) -> crate::Nanos {
            crate::Nanos(0)
        }

        fn wall_seconds(&self) -> u64 {
            0
        }
    }

    fn poll(future: &mut IoFuture) -> Poll<Completion> {
        Pin::new(future).poll(&mut Context::from_waker(Waker::noop()))
    }

    #[test]
    fn an_answer_before_the_first_poll_and_one_after() {
        let (table, start) = operations();
        let (completer, mut future) = start(&table);
        completer.complete(Ok(()), answer().buffer);
        assert!(matches!(poll(&mut future), Poll::Ready(Completion { result: Ok(()), buffer: Some(_) })));

        let Bench { rt, step, .. } = &bench();
        let (completer, future) = start(&table);
        let task = rt.spawn(async move { future.await.result });
        step();
        assert!(task.try_take().is_none());
        completer.complete(Ok(()), None);
        step();
        assert_eq!(task.try_take(), Some(Ok(())));
    }

    #[test]
    fn a_completer_that_is_dropped_answers_with_an_error() {
        let (table, start) = operations();
        let (completer, mut future) = start(&table);
        drop(completer);
        let Poll::Ready(done) = poll(&mut future) else { panic!("the waiter hangs") };
        assert_eq!(done.result.unwrap_err().errno, 125, "ECANCELED");
        assert!(done.buffer.is_none());
    }

    #[test]
    fn slots_are_used_again_whoever_went_first() {
        let (table, start) = operations();
        for round in 0..100 {
            let (completer, mut future) = start(&table);
            match round % 4 {
                0 => {
                    completer.complete(Ok(()), None);
                    assert!(poll(&mut future).is_ready());
                }
                1 => {
                    drop(future);
                    completer.complete(Ok(()), answer().buffer);
                }
                2 => {
                    completer.complete(Ok(()), answer().buffer);
                    drop(future);
                }
                _ => {
                    assert!(poll(&mut future).is_pending());
                    drop(future);
                    drop(completer);
                }
            }
        }
        assert_eq!(table.inner.table.borrow().slots.len(), 1);
    }

    #[test]
    fn requests_in_flight_are_counted_by_device_until_their_answer() {
        let Bench { rt, now, .. } = &bench();
        let (meter, other): (Rc<Meter>, Rc<Meter>) = Default::default();
        let request = |sector| Request {
            op: crate::Op::Read,
            sector: format::Sector(sector),
            sectors: format::Sectors(1),
            buffer: None,
            buffer_offset_bytes: 0,
        };
        let table = rt.completions();
        let waits = |meter: &Rc<Meter>| {
            let InFlight { requests, oldest } = table.in_flight(meter, rt.now());
            (requests, oldest.0)
        };
        let (first, _first) = table.start(meter.clone(), &request(0));
        now.set(30);
        let (_second, abandoned) = table.start(meter.clone(), &request(8));
        drop(abandoned);
        assert_eq!((waits(&meter), waits(&other)), ((2, 30), (0, 0)));
        first.complete(Ok(()), None);
        assert_eq!(waits(&meter).0, 1, "a request whose future was dropped is still in flight");
    }

    /// A device hangs. The waiters of its operations get errors, those of another device do not, and buffers stay with the device.
    #[test]
    fn operations_that_are_given_up_answer_at_once_and_keep_their_buffers() {
        let (table, _) = operations();
        let (meter, other): (Rc<Meter>, Rc<Meter>) = Default::default();
        let (sector, sectors) = (format::Sector(8), format::Sectors(1));
        let request = Request { op: crate::Op::Read, sector, sectors, buffer: None, buffer_offset_bytes: 0 };
        let pool = BufferPool::default();
        let buffer = pool.take(512);
        let held = buffer.clone();
        let (hung, mut waits) = table.start(meter.clone(), &request);
        let (answered, mut gets_it) = table.start(meter.clone(), &request);
        let (gone, dropped) = table.start(meter.clone(), &request);
        let (unrelated, mut unaffected) = table.start(other, &request);
        assert!(poll(&mut waits).is_pending() && poll(&mut gets_it).is_pending());
        table.give_up(&meter, &"disk".into());
        let Poll::Ready(done) = poll(&mut waits) else { panic!("the waiter hangs") };
        let error = done.result.unwrap_err();
        assert_eq!((&*error.device, error.errno, error.sector), ("disk", 110, sector));
        assert!(done.buffer.is_none() && poll(&mut unaffected).is_pending());
        answered.complete(Ok(()), None);
        assert!(matches!(poll(&mut gets_it), Poll::Ready(Completion { result: Ok(()), .. })));
        drop(dropped);
        gone.complete(Ok(()), None);
        assert!(held.is_shared(), "the device still has it");
        hung.complete(Ok(()), Some(buffer));
        assert!(!held.is_shared());
        unrelated.complete(Ok(()), None);
        assert!(poll(&mut unaffected).is_ready());
        assert_eq!(table.inner.table.borrow().slots.len(), 4);
        for _ in 0..4 {
            drop(table.start(meter.clone(), &request));
        }
        assert_eq!(table.inner.table.borrow().slots.len(), 4, "every slot is free again");
    }

    #[test]
    fn the_buffer_of_an_abandoned_operation_is_kept_until_the_answer() {
        let (table, start) = operations();
        let pool = BufferPool::default();
        let buffer = pool.take(512);
        let other = buffer.clone();
        let (completer, future) = start(&table);
        drop(future);
        assert!(other.is_shared(), "the device still has it");
        completer.complete(Ok(()), Some(buffer));
        assert!(!other.is_shared());
    }
}
