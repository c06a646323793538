//! The handle of a set that a thread serves, and its orders.
//!
//! Owns the queue of orders, which is bounded; the thread carries them out concurrently and answers them. [`Worker`] is the handle, with
//! a deadline for each answer. A backing device that cannot be served does not prevent the others from being served. [`thread`] owns
//! the thread.
//!
//! Must not know the senders of orders.

mod state;
mod thread;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use blockio::bridge::{Answer as Awaited, RemoteSender, Reply, TrySendError, channel, oneshot};
use engine::figures::{BucketFigures, BucketMap};
use format::Uuid;
use serve::snapshot::VolumeFigures;
use serve::{Answer, Command, Failure, Snapshot, plain};

use crate::config::Key;
use crate::jobs::{End, Job, Jobs, RunningJob};
use crate::names::Named;
use crate::order::{
    CopyProgress, CreatedVolume, DiskTrace, GroupOrder, Holder, InUse, KnownSlot, NewVolume, Order, Others,
    OwnSet, Plan, Progress, StartedVolume, Stay,
};
use crate::shared::Shared;

pub(crate) use state::Phase;
use state::ThreadState;
use thread::{Guest, SetThread};

/// Capacity of the queue of orders.
const QUEUE: usize = 64;
/// Time limit of a thread to answer with figures.
const FIGURES_WITHIN: Duration = Duration::from_secs(3);
/// Time limit of a thread to answer a short order.
pub(crate) const ANSWER_WITHIN: Duration = Duration::from_secs(60);

/// The handle of a set's thread.
pub(crate) struct Worker {
    pub(crate) plan: Plan,
    state: ThreadState,
    orders: RemoteSender<Order>,
    thread: Arc<SetThread>,
}

/// Starts a thread. The answer comes when the set and all volumes that can be served are ready.
pub(crate) fn start(
    plan: Plan,
    shared: Arc<Shared>,
) -> Result<(Worker, Awaited<Result<(), Failure>>), Failure> {
    let (worker, guest, up) = prepare(plan, shared);
    worker.thread.start(guest)?;
    Ok((worker, up))
}

/// Makes the handle of a set and what its thread gets, with a thread that has not started.
fn prepare(plan: Plan, shared: Arc<Shared>) -> (Worker, Guest, Awaited<Result<(), Failure>>) {
    let (orders, receiver) = channel(QUEUE);
    let (ready, up) = oneshot();
    let state = ThreadState::new(plan.clone(), shared);
    let guest = Guest::new(state.clone(), receiver, ready);
    (Worker { plan, state, orders, thread: Arc::default() }, guest, up)
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

    /// Makes the thread serve this backing device, whose own set is missing, with the copy of its dirty data.
    pub(crate) async fn take_over(&self, path: PathBuf) -> Result<(), Failure> {
        self.ask(ANSWER_WITHIN, |reply| Order::Add(path, OwnSet::Missing, reply)).await
    }

    /// Gives the volumes of the set to the sets of its group that have copies of their dirty data.
    pub(crate) async fn hand_over(&self) -> Result<(), Failure> {
        self.ask(ANSWER_WITHIN, Order::HandOver).await
    }

    /// The group of the set now.
    pub(crate) fn group(&self) -> Option<String> {
        self.state.group.get()
    }

    /// Puts the set into a group, or out of it.
    pub(crate) async fn set_group(&self, group: Option<Uuid>) -> Result<(), Failure> {
        self.ask(ANSWER_WITHIN, |reply| Order::Group(GroupOrder::SetGroup(group, reply))).await?;
        self.state.group.set(group.map(|group| group.to_string()));
        Ok(())
    }

    /// How much of the dirty data of the group is in two sets.
    pub(crate) async fn copies(&self) -> Result<CopyProgress, Failure> {
        self.ask(FIGURES_WITHIN, |reply| Order::Group(GroupOrder::Copies(reply))).await
    }

    /// Refuses if the set cannot leave its group.
    pub(crate) async fn may_leave(&self, others: Others) -> Result<(), Failure> {
        self.ask(FIGURES_WITHIN, |reply| Order::Group(GroupOrder::MayLeave(others, reply))).await
    }

    /// Gives the volumes and the copies of the set to the other sets of the group. There is no deadline: data is copied.
    pub(crate) async fn vacate(&self, job: Arc<Job>, stay: Stay) -> Result<End, Failure> {
        let (reply, answer) = oneshot();
        self.order(Order::Group(GroupOrder::Vacate(job, stay, reply)))?;
        answer.await.unwrap_or_else(|_| Err(self.state.ended(Progress::Running)))
    }

    /// Ends the membership of the set in its group. Returns false if its cache device cannot record that.
    pub(crate) async fn leave_group(&self) -> Result<bool, Failure> {
        let has_recorded =
            self.ask(ANSWER_WITHIN, |reply| Order::Group(GroupOrder::LeaveGroup(reply))).await?;
        self.state.group.set(None);
        Ok(has_recorded)
    }

    /// Makes the thread serve this backing device, too.
    pub(crate) async fn add(&self, path: PathBuf) -> Result<(), Failure> {
        self.ask(ANSWER_WITHIN, |reply| Order::Add(path, OwnSet::Here, reply)).await
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

    /// Serves another set of the same group on the thread of this one, as [`start`] does on a new thread. `None`: that thread is ending.
    pub(crate) fn start_beside(
        &self,
        plan: Plan,
        shared: Arc<Shared>,
    ) -> Option<(Worker, Awaited<Result<(), Failure>>)> {
        let (mut worker, guest, up) = prepare(plan, shared);
        worker.thread = self.thread.clone();
        self.thread.add(guest).then_some((worker, up))
    }

    /// Waits until the thread serves the set no more and its devices are free; several callers may wait. It blocks, so the control
    /// thread must not call it.
    pub(crate) fn join(&self) {
        self.state.ended.wait();
        self.thread.join_if_over();
    }
}

#[cfg(test)]
mod tests;
