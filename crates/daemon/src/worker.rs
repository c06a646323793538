//! The thread of one set: driver, session, exports, and its orders.
//!
//! Owns all state that must not leave that thread, and its end: the thread reports how it ended, also after a panic, and no
//! other thread ends with it. Orders come through a bounded queue; they are carried out concurrently and answered.
//! [`Worker`] is the handle of the thread, with a deadline for each answer. A backing device that cannot be served does not
//! prevent the others from being served.
//!
//! Must not know the senders of orders.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use blockio::bridge::{
    Answer as Awaited, RemoteReceiver, RemoteSender, Reply, TrySendError, channel, oneshot,
};
use blockio::{Driver, DriverOptions};
use engine::figures::{BucketFigures, BucketMap};
use serve::snapshot::VolumeFigures;
use serve::{Answer, Command, Failure, Snapshot, message, plain, session};

use crate::config::Key;
use crate::host::{Host, Tasks};
use crate::hub::Kind;
use crate::jobs::{Job, Jobs, RunningJob};
use crate::names::Named;
use crate::order::{
    CreatedVolume, DiskTrace, Holder, InUse, KnownSlot, NewVolume, Order, Plan, Progress, StartedVolume,
};
use crate::shared::Shared;
use crate::why::SharedFailure;

/// Capacity of the queue of orders.
const QUEUE: usize = 64;
/// Time limit of a thread to answer with figures.
const FIGURES_WITHIN: Duration = Duration::from_secs(3);
/// Time limit of a thread to answer a short order.
pub(crate) const ANSWER_WITHIN: Duration = Duration::from_secs(60);
/// Entries of the ring: enough for the requests of several ublk devices.
const RING_ENTRIES: u32 = 4096;

/// The phase of the thread of a set.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Phase {
    Starting,
    Serving,
    Stopping,
    Stopped,
    Failed(SharedFailure),
}

impl Phase {
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Phase::Starting => "starting",
            Phase::Serving => "serving",
            Phase::Stopping => "stopping",
            Phase::Stopped => "stopped",
            Phase::Failed(_) => "failed",
        }
    }

    /// There are volumes, also while they are being stopped.
    pub(crate) fn has_figures(&self) -> bool {
        matches!(self, Phase::Serving | Phase::Stopping)
    }

    /// The thread serves no device.
    pub(crate) fn is_over(&self) -> bool {
        matches!(self, Phase::Stopped | Phase::Failed(_))
    }
}

/// The phase of a thread, which the thread sets and others read.
#[derive(Clone)]
pub(crate) struct PhaseCell(Arc<Mutex<Phase>>);

impl PhaseCell {
    pub(crate) fn get(&self) -> Phase {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn set(&self, phase: Phase) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = phase;
    }
}

/// The label of the set of a thread, or of the device that is served alone, for messages. It is empty until it is known.
#[derive(Clone, Default)]
struct LabelCell(Arc<Mutex<String>>);

impl LabelCell {
    fn set(&self, label: &str) {
        label.clone_into(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
    }

    fn get(&self) -> String {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The set or device as messages name it.
    fn title(&self, plan: &Plan) -> String {
        plain::named(&self.get(), plan.title())
    }
}

/// The handle of a set's thread.
pub(crate) struct Worker {
    pub(crate) plan: Plan,
    state: ThreadState,
    orders: RemoteSender<Order>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// Starts a thread. The answer comes when the set and all volumes that can be served are ready.
pub(crate) fn start(
    plan: Plan,
    shared: Arc<Shared>,
) -> Result<(Worker, Awaited<Result<(), Failure>>), Failure> {
    let (orders, receiver) = channel(QUEUE);
    let (ready, up) = oneshot();
    let state = ThreadState::new(plan.clone(), shared);
    let of_thread = state.clone();
    let body = move || run(&of_thread, receiver, ready);
    let name = format!("set-{}", plan.id.get(..8).unwrap_or("alone"));
    let thread = std::thread::Builder::new().name(name).spawn(body);
    let thread = thread.map_err(|e| Failure::because("cannot start a thread", e))?;
    Ok((Worker { plan, state, orders, thread: Mutex::new(Some(thread)) }, up))
}

impl Worker {
    pub(crate) fn phase(&self) -> Phase {
        self.state.phase.get()
    }

    /// The set or device that the thread serves, as messages name it.
    pub(crate) fn title(&self) -> String {
        self.state.title()
    }

    /// The set or device, as an operator types it.
    pub(crate) fn typed(&self) -> String {
        plain::typed(&self.state.label.get(), &self.plan.id).to_owned()
    }

    /// The label of the set, or of the device that is served alone, has changed.
    pub(crate) fn labelled(&self, label: &str) {
        self.state.label.set(label);
    }

    /// Sends an order; never blocks. An order that cannot be sent is refused, also the job that it has.
    pub(crate) fn order(&self, order: Order) -> Result<(), Failure> {
        let (order, why) = match self.orders.try_send(order) {
            Ok(()) => return Ok(()),
            Err(TrySendError::Full(order)) => {
                let title = self.title();
                (order, Failure::Failed(format!("{title}: too many commands are queued; try again later")))
            }
            Err(TrySendError::Disconnected(order)) => (order, self.state.ended(Progress::Waiting)),
        };
        order.refuse(why.to_string());
        Err(why)
    }

    /// Waits for an answer of the thread, until a deadline.
    pub(crate) async fn within<T: Send>(
        &self,
        deadline: Duration,
        answer: Awaited<Result<T, Failure>>,
    ) -> Result<T, Failure> {
        let late = || format!("{} did not answer within {} seconds", self.title(), deadline.as_secs());
        self.within_or(deadline, answer, late).await
    }

    /// As [`Worker::within`], with the words for an answer that does not come in time.
    async fn within_or<T: Send>(
        &self,
        deadline: Duration,
        answer: Awaited<Result<T, Failure>>,
        late: impl Fn() -> String,
    ) -> Result<T, Failure> {
        match tokio::time::timeout(deadline, answer).await {
            Ok(Ok(result)) => result,
            Ok(Err(_)) => Err(self.state.ended(Progress::Running)),
            Err(_) => Err(Failure::Failed(late())),
        }
    }

    /// Sends the order to stop something, which waits for requests of clients, and waits for the answer.
    async fn stops(
        &self,
        what: &str,
        order: Order,
        answer: Awaited<Result<(), Failure>>,
    ) -> Result<(), Failure> {
        self.order(order)?;
        let late = || {
            format!(
                "{what} has not stopped within {} seconds: a device may not answer; `ubcache status` shows what waits, and for \
                 how long",
                ANSWER_WITHIN.as_secs()
            )
        };
        self.within_or(ANSWER_WITHIN, answer, late).await
    }

    /// The key of the set in the configuration.
    pub(crate) fn key(&self) -> Key {
        Key { id: self.plan.id.clone(), label: String::new(), set: true }
    }

    /// The key of a volume of the set in the configuration.
    pub(crate) fn volume_key(&self, volume: &VolumeFigures) -> Key {
        let slot = || format!("{}/{}", self.plan.id, volume.slot.unwrap_or(0));
        let id = volume.backing_uuid.clone().unwrap_or_else(slot);
        Key { id, label: volume.label.clone(), set: false }
    }

    /// Sends an order with a channel for its answer, and waits for the answer.
    async fn ask<T: Send>(
        &self,
        deadline: Duration,
        order: impl FnOnce(Reply<Result<T, Failure>>) -> Order,
    ) -> Result<T, Failure> {
        let (reply, answer) = oneshot();
        self.order(order(reply))?;
        self.within(deadline, answer).await
    }

    /// Makes the thread carry out a command.
    pub(crate) async fn command(&self, command: Command) -> Result<Answer, Failure> {
        self.ask(ANSWER_WITHIN, |reply| Order::Do(command, reply)).await
    }

    /// Makes the thread serve this backing device, too.
    pub(crate) async fn add(&self, path: PathBuf) -> Result<(), Failure> {
        self.ask(ANSWER_WITHIN, |reply| Order::Add(path, reply)).await
    }

    /// The slot that the set has for the backing device with this UUID.
    pub(crate) async fn slot_of(&self, uuid: &str) -> Result<Option<KnownSlot>, Failure> {
        self.ask(ANSWER_WITHIN, |reply| Order::Slot(uuid.to_owned(), reply)).await
    }

    /// Begins the stop of the thread. If a volume is in use, nothing is stopped.
    pub(crate) async fn stop_if_free(&self) -> Result<(), Failure> {
        let (reply, answer) = oneshot();
        self.stops(&self.title(), Order::StopIfFree(reply), answer).await
    }

    /// Stops a volume that is not in use. Its dirty data stays in the cache.
    pub(crate) async fn stop_volume(&self, name: String) -> Result<(), Failure> {
        let (reply, answer) = oneshot();
        self.stops(&name.clone(), Order::StopVolume(name, reply), answer).await
    }

    /// Makes a flash-only volume.
    pub(crate) async fn create(&self, wanted: NewVolume) -> Result<CreatedVolume, Failure> {
        self.ask(ANSWER_WITHIN, |reply| Order::Create(wanted, reply)).await
    }

    /// Serves a stopped flash-only volume again.
    pub(crate) async fn start_volume(&self, name: String) -> Result<StartedVolume, Failure> {
        self.ask(ANSWER_WITHIN, |reply| Order::StartVolume(name, reply)).await
    }

    /// Tries every export again that is not up. Returns what came of it.
    pub(crate) async fn export_again(&self) -> Result<Vec<String>, Failure> {
        self.ask(ANSWER_WITHIN, Order::ExportAgain).await
    }

    /// Destroys a flash-only volume that is not in use.
    pub(crate) async fn delete_volume(&self, name: String) -> Result<(), Failure> {
        self.ask(ANSWER_WITHIN, |reply| Order::DeleteVolume(name, reply)).await
    }

    /// The users of the block device of one volume, or of all; `None` if there are none.
    pub(crate) async fn users(&self, of: Option<String>) -> Result<Option<InUse>, Failure> {
        self.ask(FIGURES_WITHIN, |reply| Order::Users(of, reply)).await
    }

    /// The users that the stop of the thread waits for.
    pub(crate) async fn holders(&self) -> Result<Vec<Holder>, Failure> {
        self.ask(FIGURES_WITHIN, Order::Holders).await
    }

    /// The figures of the set and its volumes, for the status.
    pub(crate) async fn snapshot(&self) -> Result<Snapshot, Failure> {
        match self.ask(FIGURES_WITHIN, |reply| Order::Do(Command::Stats, reply)).await? {
            Answer::Stats(figures) => Ok(*figures),
            _ => Err(Failure::Failed("expected figures".into())),
        }
    }

    /// Every figure that the engine counts.
    pub(crate) async fn figures(&self) -> Result<metrics::Figures, Failure> {
        self.ask(FIGURES_WITHIN, Order::Figures).await
    }

    /// The contents of the buckets of the set.
    pub(crate) async fn buckets(&self) -> Result<BucketFigures, Failure> {
        self.ask(FIGURES_WITHIN, Order::Buckets).await
    }

    /// The contents of the buckets, for this many parts of the device.
    pub(crate) async fn bucket_map(&self, cells: u32) -> Result<BucketMap, Failure> {
        self.ask(FIGURES_WITHIN, |reply| Order::BucketMap(cells, reply)).await
    }

    /// The recorded requests to the backing device of a volume since this number.
    pub(crate) async fn disk_trace(&self, volume: &str, since: u64) -> Result<DiskTrace, Failure> {
        let name = volume.to_owned();
        self.ask(FIGURES_WITHIN, |reply| Order::DiskTrace(name, since, reply)).await
    }

    /// Writes the label of the set to its cache device.
    pub(crate) async fn label(&self, label: &str) -> Result<(), Failure> {
        self.ask(ANSWER_WITHIN, |reply| Order::Label(label.to_owned(), reply)).await?;
        self.labelled(label);
        Ok(())
    }

    /// Resets the counters of the cache device.
    pub(crate) async fn clear_device_stats(&self) -> Result<(), Failure> {
        self.ask(ANSWER_WITHIN, Order::ClearDeviceStats).await
    }

    /// Begins a job on the thread.
    pub(crate) fn begin_job(
        &self,
        jobs: &Jobs,
        kind: &'static str,
        target: &str,
        on: Option<&Named>,
        order: impl FnOnce(RunningJob) -> Order,
    ) -> Result<Arc<Job>, Failure> {
        let Some(job) = jobs.begin(kind, target, on) else {
            return Err(Failure::Failed(
                "too many jobs are running: wait for one to end, or cancel one".into(),
            ));
        };
        let state = self.state.clone();
        self.order(order(RunningJob::new(job.clone(), move || state.ended(Progress::Running))))?;
        Ok(job)
    }

    /// Waits for the end of the thread; several callers may wait. It blocks, so the control thread must not call it.
    pub(crate) fn join(&self) {
        // The lock is held during the wait, so that the next caller waits as well.
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(thread) = thread.take() {
            // The thread catches its panics itself, so this cannot fail.
            let _ = thread.join();
        }
    }
}

/// What a thread and its handle share.
#[derive(Clone)]
struct ThreadState {
    plan: Plan,
    phase: PhaseCell,
    label: LabelCell,
    shared: Arc<Shared>,
}

impl ThreadState {
    fn new(plan: Plan, shared: Arc<Shared>) -> ThreadState {
        let phase = PhaseCell(Arc::new(Mutex::new(Phase::Starting)));
        ThreadState { plan, phase, label: LabelCell::default(), shared }
    }

    /// The set or device as messages name it.
    fn title(&self) -> String {
        self.label.title(&self.plan)
    }

    /// The failure of a command that the thread has not carried out to its end, because the thread has ended or is ending.
    fn ended(&self, command: Progress) -> Failure {
        let title = self.title();
        match self.phase.get() {
            Phase::Failed(why) => Failure::because(format_args!("{title} has failed"), why),
            _ => Failure::Failed(self.plan.ends_before(&title, command, self.shared.is_stopping())),
        }
    }
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

fn run(state: &ThreadState, mut orders: RemoteReceiver<Order>, ready: Reply<Result<(), Failure>>) {
    let ThreadState { plan, phase, shared, .. } = state;
    let (hub, id) = (shared.hub.clone(), plan.id.clone());
    message::listen(move |level, text| hub.publish(Kind::Message, Some(&id), level, text));
    let mut ready = Some(ready);
    let body = AssertUnwindSafe(|| serve(state, &mut orders, &mut ready));
    let end = match catch_unwind(body) {
        Ok(Ok(())) => Phase::Stopped,
        Ok(Err(e)) => Phase::Failed(e.into()),
        Err(panic) => Phase::Failed(panicked(&words_of(&*panic))),
    };
    let title = state.title();
    let (level, text) = match &end {
        Phase::Failed(why) => ("error", format!("{title} has failed: {why}")),
        _ => ("", format!("{title} has stopped")),
    };
    phase.set(end.clone());
    for order in orders.close() {
        order.refuse(state.ended(Progress::Waiting).to_string());
    }
    serve::pressure::give_back_heap();
    // The event is published below; without this, the message would be published a second time.
    message::listen(|_, _| ());
    message::speak_for("");
    message::message(level, &text);
    shared.hub.publish(Kind::Set, Some(&plan.id), level, &text);
    if let (Some(ready), Phase::Failed(why)) = (ready, end) {
        ready.send(Err(Failure::of(why)));
    }
}

fn words_of(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|s| (*s).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "a panic".into())
}

fn serve(
    state: &ThreadState,
    orders: &mut RemoteReceiver<Order>,
    ready: &mut Option<Reply<Result<(), Failure>>>,
) -> Result<(), Failure> {
    let ThreadState { plan, phase, label, shared } = state;
    let (seed, busy_poll) = (session::seed(), shared.config().busy_poll);
    serve::pressure::prepare_this_thread();
    let options = DriverOptions { seed, ring_entries: RING_ENTRIES, busy_poll, ..DriverOptions::default() };
    let driver = Driver::new(options).map_err(|e| Failure::because("cannot start", e))?;
    driver.block_on(async {
        let host = Host::start(&driver, plan, shared).await?;
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
        host.stop(orders, &mut tasks).await
    })
}

#[cfg(test)]
mod tests;
