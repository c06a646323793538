//! The thread of a set, or of the sets of a group: driver, sessions, exports.
//!
//! Owns all state that must not leave that thread, and its end: the thread reports how it ended, also after a panic, and no other thread
//! ends with it. A set that fails does not end the other sets of the thread; a panic does.
//!
//! Must not know how an order is carried out.

use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::thread::JoinHandle;

use blockio::bridge::{RemoteReceiver, RemoteSender, Reply, channel};
use blockio::{Driver, DriverOptions};
use serve::message::{self, Voice};
use serve::{Failure, session};

use super::state::{Phase, PhaseCell, ThreadState, lock};
use crate::host::{Host, Members, Tasks};
use crate::hub::Kind;
use crate::order::{Order, Progress};
use crate::why::SharedFailure;

/// Entries of the ring: enough for the requests of several ublk devices.
const RING_ENTRIES: u32 = 4096;
/// Sets of a group that wait for their thread at most.
const QUEUE: usize = 64;

/// A set that a thread serves, or is to serve.
pub(super) struct Guest {
    state: ThreadState,
    orders: RemoteReceiver<Order>,
    ready: Option<Reply<Result<(), Failure>>>,
}

/// A thread that serves a set, or the sets of a group.
#[derive(Default)]
pub(super) struct SetThread {
    inner: Arc<SetsOfThread>,
    handle: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Default)]
struct SetsOfThread {
    /// The sets that the thread serves. It ends when there are none.
    served: Mutex<ServedSets>,
}

#[derive(Default)]
struct ServedSets {
    states: Vec<ThreadState>,
    /// `None`: the thread has not started, or is ending.
    more: Option<RemoteSender<Guest>>,
}

impl SetThread {
    /// Starts the thread with its first set.
    pub(super) fn start(&self, first: Guest) -> Result<(), Failure> {
        let (more, guests) = channel(QUEUE);
        let inner = self.inner.clone();
        *lock(&inner.served) = ServedSets { states: vec![first.state.clone()], more: Some(more) };
        let name = format!("set-{}", first.state.plan.id.get(..8).unwrap_or("alone"));
        let body = move || run(&inner, first, guests);
        let thread = std::thread::Builder::new().name(name).spawn(body);
        *lock(&self.handle) = Some(thread.map_err(|e| Failure::because("cannot start a thread", e))?);
        Ok(())
    }

    /// Gives the thread one more set. Returns false if the thread is ending.
    pub(super) fn add(&self, guest: Guest) -> bool {
        let mut served = lock(&self.inner.served);
        let Some(more) = &served.more else { return false };
        let state = guest.state.clone();
        if more.try_send(guest).is_err() {
            return false;
        }
        served.states.push(state);
        true
    }

    /// Waits for the end of the thread if it serves nothing any more; several callers may wait. It blocks.
    pub(super) fn join_if_over(&self) {
        if !lock(&self.inner.served).states.is_empty() {
            return;
        }
        // The lock is held during the wait, so that the next caller waits as well.
        if let Some(thread) = lock(&self.handle).take() {
            // The thread catches its panics itself, so this cannot fail.
            let _ = thread.join();
        }
    }
}

impl SetsOfThread {
    /// A set has ended. If it was the last one, the thread takes no more sets.
    fn ended(&self, state: &ThreadState) {
        let mut served = lock(&self.served);
        served.states.retain(|s| !s.ended.is(&state.ended));
        if served.states.is_empty() {
            served.more = None;
        }
    }
}

impl Guest {
    pub(super) fn new(
        state: ThreadState,
        orders: RemoteReceiver<Order>,
        ready: Reply<Result<(), Failure>>,
    ) -> Guest {
        Guest { state, orders, ready: Some(ready) }
    }

    /// Reports how the set has ended.
    fn finish(&mut self, end: Phase) {
        let state = &self.state;
        let (level, text) = match &end {
            Phase::Failed(why) => ("error", format!("{} has failed: {why}", state.title())),
            _ => ("", format!("{} has stopped", state.title())),
        };
        state.phase.set(end.clone());
        for order in self.orders.close() {
            order.refuse(state.ended(Progress::Waiting).to_string());
        }
        serve::pressure::give_back_heap();
        // The event is published below: the listener of the set would publish the message a second time.
        Voice::default().during(|| message::message(level, &text));
        // What the other sets of the thread say from now on is not said by this one.
        let hub = state.shared.hub.clone();
        message::listen(move |level, text| hub.publish(Kind::Message, None, level, text));
        message::speak_for("");
        state.shared.hub.publish(Kind::Set, Some(&state.plan.id), level, &text);
        if let (Some(ready), Phase::Failed(why)) = (self.ready.take(), end) {
            ready.send(Err(Failure::of(why)));
        }
    }
}

/// Serves sets until all have ended, and reports the end of those that a panic has ended.
fn run(inner: &Arc<SetsOfThread>, first: Guest, mut guests: RemoteReceiver<Guest>) {
    let lost = Rc::new(Mutex::new(Vec::new()));
    let body = AssertUnwindSafe(|| serve_all(inner, first, &mut guests, &lost));
    let why = match catch_unwind(body) {
        Ok(Ok(())) => None,
        Ok(Err(e)) => Some(e.into()),
        Err(panic) => Some(panicked(&words_of(&*panic))),
    };
    lock(&inner.served).more = None;
    lock(&lost).extend(guests.close());
    // The sets that a panic has ended, or that have not begun.
    for mut guest in std::mem::take(&mut *lock(&lost)) {
        let state: ThreadState = guest.state.clone();
        guest.finish(Phase::Failed(why.clone().unwrap_or_else(|| panicked(""))));
        inner.ended(&state);
        state.ended.set();
    }
}

/// Serves the first set and those that join it, until all have ended. A panic leaves the sets that it ends in `lost`.
fn serve_all(
    inner: &Arc<SetsOfThread>,
    first: Guest,
    guests: &mut RemoteReceiver<Guest>,
    lost: &Rc<Mutex<Vec<Guest>>>,
) -> Result<(), Failure> {
    let first = Present { guest: Some(first), lost: lost.clone() };
    let (seed, busy_poll) = (session::seed(), first.busy_poll());
    serve::pressure::prepare_this_thread();
    let options = DriverOptions { seed, ring_entries: RING_ENTRIES, busy_poll, ..DriverOptions::default() };
    let driver = Driver::new(options).map_err(|e| Failure::because("cannot start", e))?;
    let members = Rc::new(Members::default());
    driver.block_on(async {
        let mut running: Vec<Pin<Box<dyn Future<Output = ()> + '_>>> =
            vec![Box::pin(serve_one(&driver, inner, &members, first))];
        loop {
            let next = {
                let mut more = pin!(guests.recv());
                poll_fn(|cx| {
                    running.retain_mut(|guest| guest.as_mut().poll(cx).is_pending());
                    match more.as_mut().poll(cx) {
                        Poll::Ready(Some(guest)) => Poll::Ready(Some(guest)),
                        // A set that was accepted is in the queue, so no more can come.
                        _ if running.is_empty() => Poll::Ready(None),
                        _ => Poll::Pending,
                    }
                })
                .await
            };
            let Some(guest) = next else { return Ok(()) };
            let guest = Present { guest: Some(guest), lost: lost.clone() };
            let (mut voice, mut serving) =
                (Voice::default(), Box::pin(serve_one(&driver, inner, &members, guest)));
            // The messages of the other tasks of the thread are those of the first set.
            running.push(Box::pin(poll_fn(move |cx| voice.during(|| serving.as_mut().poll(cx)))));
        }
    })
}

/// A set that is being served. If a panic drops it, it is left for the report.
struct Present {
    guest: Option<Guest>,
    lost: Rc<Mutex<Vec<Guest>>>,
}

impl Present {
    fn busy_poll(&self) -> blockio::BusyPoll {
        let guest = self.guest.as_ref();
        guest.map_or(blockio::BusyPoll::Auto, |guest| guest.state.shared.config().busy_poll)
    }

    fn end(&mut self, inner: &SetsOfThread, result: Result<(), Failure>) {
        let Some(mut guest) = self.guest.take() else { return };
        guest.finish(match result {
            Ok(()) => Phase::Stopped,
            Err(e) => Phase::Failed(e.into()),
        });
        inner.ended(&guest.state);
        guest.state.ended.set();
    }
}

impl Drop for Present {
    fn drop(&mut self) {
        lock(&self.lost).extend(self.guest.take());
    }
}

/// Serves one set to its end.
async fn serve_one(driver: &Driver, inner: &SetsOfThread, members: &Rc<Members>, mut present: Present) {
    let result = match &mut present.guest {
        Some(guest) => serve(driver, members, guest).await,
        None => Ok(()),
    };
    present.end(inner, result);
}

async fn serve(driver: &Driver, members: &Rc<Members>, guest: &mut Guest) -> Result<(), Failure> {
    let Guest { state, orders, ready } = guest;
    let ThreadState { plan, phase, label, shared, .. } = &*state;
    let (hub, id) = (shared.hub.clone(), plan.id.clone());
    message::listen(move |level, text| hub.publish(Kind::Message, Some(&id), level, text));
    let host = Host::start(driver, plan, shared, members).await?;
    label.set(&host.label());
    shared.hub.label(&plan.id, &host.called());
    phase.set(Phase::Serving);
    shared.hub.publish(Kind::Set, Some(&plan.id), "", &format!("{} is served", label.title(plan)));
    if let Some(ready) = ready.take() {
        ready.send(Ok(()));
    }
    let mut tasks = Tasks::default();
    // Dropped before the tasks.
    let _failed_by_panic = FailedByPanic(phase);
    host.obey(orders, &mut tasks).await;
    phase.set(Phase::Stopping);
    let stopped = host.stop(orders, &mut tasks).await;
    drop(tasks);
    host.let_device_go().await;
    stopped
}

/// Sets the phase when the thread panics, before the commands under way are dropped. Otherwise
/// their failures would say that the set was stopped.
struct FailedByPanic<'a>(&'a PhaseCell);

impl Drop for FailedByPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.set(Phase::Failed(panicked("")));
        }
    }
}

/// The failure of a thread that has panicked. The text of the panic is all that is known.
fn panicked(words: &str) -> SharedFailure {
    let words = if words.is_empty() { String::new() } else { format!(": {words}") };
    SharedFailure::of_words(format!(
        "internal error{words}; flushed data is safe, and its block devices wait until it is served again"
    ))
}

fn words_of(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|s| (*s).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "a panic".into())
}
