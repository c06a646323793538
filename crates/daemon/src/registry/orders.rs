//! What the threads of sets are told, and asked for.
//!
//! Owns the deadlines of these questions. A thread that does not answer is left out, and said. Must not know who asks.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use engine::figures::{BucketFigures, BucketMap};
use serve::{Answer, Command, Failure, Snapshot};

use super::{ANSWER_WITHIN, FIGURES_WITHIN, Found, Registry, ask, failed};
use crate::jobs::{Job, Running};
use crate::names::Named;
use crate::order::{DiskTrace, Order};
use crate::worker::{Phase, Worker};

impl Registry {
    /// Has a thread carry out a command.
    pub(crate) async fn command(&self, worker: &Worker, command: Command) -> Result<Answer, Failure> {
        ask(worker, ANSWER_WITHIN, |reply| Order::Do(command, reply)).await
    }

    /// Begins a job on a set's thread.
    pub(crate) fn begin_job(
        &self,
        worker: &Worker,
        kind: &'static str,
        target: &str,
        on: Option<&Named>,
        order: impl FnOnce(Running) -> Order,
    ) -> Result<Arc<Job>, Failure> {
        let Some(job) = self.jobs.begin(kind, target, on) else {
            return failed("too many jobs are running: wait for one to end, or cancel one");
        };
        match worker.order(order(Running(job.clone()))) {
            Ok(()) => Ok(job),
            Err(e) => Err(e),
        }
    }

    /// Makes a flash-only volume.
    pub(crate) async fn create(
        self: &Arc<Self>,
        set: &str,
        sectors: u64,
        label: String,
    ) -> Result<(), Failure> {
        let worker = self.set(set).await?;
        ask(&worker, ANSWER_WITHIN, |reply| Order::Create(sectors, label, reply)).await
    }

    /// What the buckets of a set hold.
    pub(crate) async fn buckets(self: &Arc<Self>, set: &str) -> Result<BucketFigures, Failure> {
        let worker = self.set(set).await?;
        ask(&worker, FIGURES_WITHIN, Order::Buckets).await
    }

    /// The same, part by part of the device.
    pub(crate) async fn bucket_map(&self, worker: &Worker, cells: u32) -> Result<BucketMap, Failure> {
        ask(worker, FIGURES_WITHIN, |reply| Order::BucketMap(cells, reply)).await
    }

    /// What reached the backing device of a volume since the request of this number.
    pub(crate) async fn disk_trace(
        &self,
        worker: &Worker,
        volume: &str,
        since: u64,
    ) -> Result<DiskTrace, Failure> {
        let name = volume.to_owned();
        ask(worker, FIGURES_WITHIN, |reply| Order::DiskTrace(name, since, reply)).await
    }

    /// What a set's cache device counts begins anew.
    pub(crate) async fn clear_device_stats(self: &Arc<Self>, set: &str) -> Result<(), Failure> {
        let worker = self.set(set).await?;
        ask(&worker, ANSWER_WITHIN, Order::ClearDeviceStats).await
    }

    /// The figures of one thread.
    pub(crate) async fn figures_of(&self, worker: &Worker) -> Result<Snapshot, Failure> {
        match ask(worker, FIGURES_WITHIN, |reply| Order::Do(Command::Stats, reply)).await? {
            Answer::Stats(figures) => Ok(*figures),
            Answer::Done | Answer::Wiped(_) => failed("expected figures"),
        }
    }

    /// What the engines of all threads count. A thread that does not answer is left out, and said.
    pub(crate) async fn engine_figures(&self) -> metrics::Figures {
        let mut all = metrics::Figures::default();
        for worker in self.all_workers() {
            if worker.phase() != Phase::Serving {
                continue;
            }
            match ask(&worker, FIGURES_WITHIN, Order::Figures).await {
                Ok(figures) => {
                    all.sets.extend(figures.sets);
                    all.alone.extend(figures.alone);
                }
                Err(e) => {
                    let why = e.message().unwrap_or_default();
                    self.shared.hub.publish("set", Some(&worker.plan.id), "warning", why);
                }
            }
        }
        all
    }

    /// Why a volume does what it does.
    pub(crate) async fn explain(self: &Arc<Self>, volume: &str) -> Result<metrics::Explanation, Failure> {
        let Found { worker, name, .. } = self.find(volume).await?;
        let figures = ask(&worker, FIGURES_WITHIN, Order::Figures).await?;
        for set in &figures.sets {
            if let Some(volume) = set.volumes.iter().find(|v| v.name == name) {
                return Ok(metrics::explain(volume, Some(set)));
            }
        }
        match figures.alone.iter().find(|v| v.name == name) {
            Some(volume) => Ok(metrics::explain(volume, None)),
            None => failed(format!("there is no volume {volume}")),
        }
    }

    /// Tells every thread to stop and waits until all have. `force` may be called later from elsewhere.
    pub(crate) async fn stop_all(&self) -> Result<(), Failure> {
        let workers: Vec<_> = {
            let workers = self.workers();
            self.stopping.store(true, Ordering::SeqCst);
            workers.values().cloned().collect()
        };
        for worker in &workers {
            // One that is gone has nothing to stop.
            let _ = worker.order(Order::Stop);
        }
        let mut result = Ok(());
        for worker in workers {
            let joined = worker.clone();
            let _ = tokio::task::spawn_blocking(move || joined.join()).await;
            if let Phase::Failed(why) = worker.phase() {
                result = failed(format!("set {}: {why}", worker.plan.id));
            }
        }
        result
    }

    /// Nobody is waited for any more.
    pub(crate) fn force(&self) {
        for worker in self.all_workers() {
            let _ = worker.order(Order::Force);
        }
    }
}
