//! Jobs, which are long operations: their progress and their cancellation.
//!
//! Owns the list of running and ended jobs; newer jobs replace the oldest ended ones. The holder of a [`RunningJob`] carries
//! the job out. Progress is a number of bytes. Must not know what a job does.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;
use serve::{Failure, plain};

use crate::hub::{Hub, Kind};
use crate::names::Named;
use crate::why::SharedFailure;

/// Number of jobs that the list holds.
const REMEMBERED: usize = 100;
/// Limit of the jobs that run at a time.
const MOST_RUNNING: usize = 32;

/// The result of a job.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum End {
    Done,
    Cancelled,
    /// Another command ended the job; the text says which, and what that means for its data.
    Overtaken(String),
    Failed(SharedFailure),
}

/// One job.
pub(crate) struct Job {
    pub(crate) id: u64,
    kind: &'static str,
    target: String,
    on: Option<Named>,
    began: Instant,
    /// Milliseconds from the beginning to the last progress.
    advanced_ms: AtomicU64,
    done: AtomicU64,
    total: AtomicU64,
    cancel: AtomicBool,
    end: Mutex<Option<(End, Instant)>>,
    report: Mutex<Option<serde_json::Value>>,
    notes: Mutex<Vec<String>>,
    hub: Arc<Hub>,
}

/// A job as clients see it.
#[derive(Serialize)]
pub(crate) struct JobView {
    pub(crate) id: u64,
    kind: &'static str,
    target: String,
    /// Label of the volume or set that the job works on; empty if there is none.
    label: String,
    /// Path of the device that the job works on, if it works on one.
    pub(crate) device: Option<PathBuf>,
    pub(crate) uuid: Option<String>,
    /// `running`, `done`, `cancelled` or `failed`.
    pub(crate) state: &'static str,
    done_bytes: u64,
    total_bytes: u64,
    percent: u64,
    seconds: u64,
    /// The time without progress.
    pub(crate) idle_seconds: u64,
    eta_seconds: Option<u64>,
    error: Option<String>,
    /// What the job has said of its steps.
    notes: Vec<String>,
    /// The findings of a check, if the job is one.
    report: Option<serde_json::Value>,
}

impl JobView {
    pub(crate) fn is_running(&self) -> bool {
        self.state == "running"
    }

    /// The kind of the job and its target, as messages name them.
    pub(crate) fn title(&self) -> String {
        format!("{} {}", self.kind, plain::named(&self.label, &self.target))
    }
}

impl Job {
    fn end_now(&self) -> MutexGuard<'_, Option<(End, Instant)>> {
        self.end.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the progress: `done` of `total` bytes.
    pub(crate) fn progress(&self, done: u64, total: u64) {
        self.total.store(total, Ordering::Relaxed);
        let done = done.min(total);
        if self.done.swap(done, Ordering::Relaxed) != done {
            let elapsed_ms = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
            self.advanced_ms.store(elapsed_ms, Ordering::Relaxed);
        }
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.cancel.load(Ordering::Relaxed)
    }

    /// Asks the job to end. Finished work is not undone.
    pub(crate) fn cancel(&self) {
        self.cancel.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_running(&self) -> bool {
        self.end_now().is_none()
    }

    /// Marks the job as ended; only the first end counts.
    pub(crate) fn ended(&self, end: End) {
        {
            let now = &mut *self.end_now();
            if now.is_some() {
                return;
            }
            *now = Some((end.clone(), Instant::now()));
        }
        let (level, how) = match end {
            End::Done => ("info", "done".to_owned()),
            End::Cancelled => ("info", "cancelled".to_owned()),
            End::Overtaken(why) => ("info", format!("cancelled: {why}")),
            End::Failed(why) => ("error", format!("failed: {why}")),
        };
        self.hub.publish(
            Kind::Job,
            None,
            level,
            &format!("job {}: {} {}: {how}", self.id, self.kind, self.shown()),
        );
    }

    fn label(&self) -> &str {
        self.on.as_ref().map_or("", |n| &n.label)
    }

    /// The target of the job as messages name it.
    fn shown(&self) -> String {
        plain::named(self.label(), &self.target)
    }

    pub(crate) fn view(&self) -> JobView {
        let end = self.end_now().clone();
        let (mut done, total) = (self.done.load(Ordering::Relaxed), self.total.load(Ordering::Relaxed));
        let until = end.as_ref().map_or_else(Instant::now, |(_, at)| *at);
        let elapsed = until.duration_since(self.began);
        let (state, error) = match end.map(|(end, _)| end) {
            None => ("running", None),
            Some(End::Done) => {
                done = total;
                ("done", None)
            }
            Some(End::Cancelled) => ("cancelled", None),
            Some(End::Overtaken(why)) => ("cancelled", Some(why)),
            Some(End::Failed(why)) => ("failed", Some(why.text())),
        };
        JobView {
            id: self.id,
            kind: self.kind,
            target: self.target.clone(),
            label: self.label().to_owned(),
            device: self.on.as_ref().and_then(|n| n.device.clone()),
            uuid: self.on.as_ref().and_then(|n| n.uuid.clone()),
            state,
            done_bytes: done,
            total_bytes: total,
            percent: percent(done, total),
            seconds: elapsed.as_secs(),
            idle_seconds: {
                let advanced = Duration::from_millis(self.advanced_ms.load(Ordering::Relaxed));
                elapsed.saturating_sub(advanced).as_secs()
            },
            eta_seconds: if state == "running" { eta(done, total, elapsed.as_secs_f64()) } else { None },
            error,
            notes: self.notes.lock().unwrap_or_else(PoisonError::into_inner).clone(),
            report: self.report.lock().unwrap_or_else(PoisonError::into_inner).clone(),
        }
    }

    /// Whether another command ended the job.
    pub(crate) fn is_overtaken(&self) -> bool {
        matches!(&*self.end_now(), Some((End::Overtaken(_), _)))
    }

    /// The UUID of the device that the job works on.
    pub(crate) fn uuid(&self) -> Option<&String> {
        self.on.as_ref().and_then(|named| named.uuid.as_ref())
    }

    /// The failure, if the job failed.
    pub(crate) fn problem(&self) -> Option<String> {
        match &*self.end_now() {
            Some((End::Failed(why), _)) => Some(format!("{} {}: {why}", self.kind, self.shown())),
            _ => None,
        }
    }

    /// The progress of the job as one line for a log.
    pub(crate) fn in_words(&self) -> String {
        let v = self.view();
        let eta = v.eta_seconds.map(|s| format!(", {s} s left")).unwrap_or_default();
        format!(
            "{} {}: {} %, {} of {} bytes{eta}",
            v.kind,
            self.shown(),
            v.percent,
            v.done_bytes,
            v.total_bytes
        )
    }

    /// The kind of the job and its target as text, and the device it works on.
    pub(crate) fn title(&self) -> (String, Option<&Named>) {
        (format!("{} {}", self.kind, self.target), self.on.as_ref())
    }

    /// Says something of a step. The number of notes is limited by that of the volumes.
    pub(crate) fn says(&self, note: String) {
        self.notes.lock().unwrap_or_else(PoisonError::into_inner).push(note);
    }

    /// Stores the findings of a check.
    pub(crate) fn reports(&self, found: serde_json::Value) {
        *self.report.lock().unwrap_or_else(PoisonError::into_inner) = Some(found);
    }
}

fn percent(done: u64, total: u64) -> u64 {
    u64::try_from(u128::from(done) * 100 / u128::from(total.max(1))).unwrap_or(100)
}

/// Estimated seconds until the end, from the progress so far; `None` at the beginning.
fn eta(done: u64, total: u64, elapsed: f64) -> Option<u64> {
    if done == 0 || elapsed < 0.5 {
        return None;
    }
    Some((elapsed * (total.saturating_sub(done)) as f64 / done as f64).ceil() as u64)
}

/// A job that is being carried out. If it is dropped without an end, the job has failed.
pub(crate) struct RunningJob(pub(crate) Arc<Job>, WhyDropped);

/// Says why a job was dropped without an end.
type WhyDropped = Box<dyn Fn() -> Failure + Send + Sync>;

impl RunningJob {
    /// `why_dropped` says why the job was dropped without an end.
    pub(crate) fn new(
        job: Arc<Job>,
        why_dropped: impl Fn() -> Failure + Send + Sync + 'static,
    ) -> RunningJob {
        RunningJob(job, Box::new(why_dropped))
    }
}

impl Drop for RunningJob {
    fn drop(&mut self) {
        if self.0.is_running() {
            self.0.ended(End::Failed((self.1)().into()));
        }
    }
}

/// The running and the last ended jobs.
pub(crate) struct Jobs {
    list: Mutex<(u64, VecDeque<Arc<Job>>)>,
    hub: Arc<Hub>,
}

impl Jobs {
    pub(crate) fn new(hub: Arc<Hub>) -> Jobs {
        Jobs { list: Mutex::default(), hub }
    }

    fn lock(&self) -> MutexGuard<'_, (u64, VecDeque<Arc<Job>>)> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a new job; `None` if too many jobs are running.
    pub(crate) fn begin(&self, kind: &'static str, target: &str, on: Option<&Named>) -> Option<Arc<Job>> {
        let (last, list) = &mut *self.lock();
        if list.iter().filter(|j| j.is_running()).count() >= MOST_RUNNING {
            return None;
        }
        while list.len() >= REMEMBERED {
            let oldest = list.iter().position(|j| !j.is_running()).unwrap_or(0);
            list.remove(oldest);
        }
        *last += 1;
        let job = Arc::new(Job {
            id: *last,
            kind,
            target: target.to_owned(),
            on: on.cloned(),
            began: Instant::now(),
            advanced_ms: AtomicU64::new(0),
            done: AtomicU64::new(0),
            total: AtomicU64::new(0),
            cancel: AtomicBool::new(false),
            end: Mutex::new(None),
            report: Mutex::new(None),
            notes: Mutex::default(),
            hub: self.hub.clone(),
        });
        list.push_back(job.clone());
        Some(job)
    }

    pub(crate) fn get(&self, id: u64) -> Option<Arc<Job>> {
        self.lock().1.iter().find(|j| j.id == id).cloned()
    }

    /// The jobs that run now.
    pub(crate) fn running(&self) -> Vec<Arc<Job>> {
        self.lock().1.iter().filter(|job| job.is_running()).cloned().collect()
    }

    pub(crate) fn all(&self) -> Vec<JobView> {
        let jobs: Vec<_> = self.lock().1.iter().cloned().collect();
        jobs.iter().map(|j| j.view()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn running(job: Arc<Job>) -> RunningJob {
        RunningJob::new(job, || Failure::Failed("it was dropped".into()))
    }

    #[test]
    fn jobs_end_once() {
        let jobs = Jobs::new(Arc::default());
        let job = jobs.begin("detach", "bcache0", None).unwrap();
        job.progress(30, 100);
        assert_eq!((job.view().state, job.view().percent), ("running", 30));
        {
            let running = running(job.clone());
            running.0.ended(End::Done);
        }
        assert_eq!((job.view().state, job.view().percent), ("done", 100));
        drop(running(jobs.begin("flush", "x", None).unwrap()));
        assert_eq!(jobs.get(2).unwrap().problem().unwrap(), "flush x: it was dropped");
        assert_eq!(jobs.all().len(), 2);
    }

    #[test]
    fn progress_ends_the_time_without_progress() {
        let jobs = Jobs::new(Arc::default());
        let job = jobs.begin("drain", "bcache0", None).unwrap();
        let advanced = || job.advanced_ms.load(Ordering::Relaxed);
        job.progress(0, 100);
        assert_eq!(advanced(), 0, "nothing was done");
        while job.began.elapsed() < Duration::from_millis(2) {
            std::thread::yield_now();
        }
        job.progress(30, 100);
        let at = advanced();
        assert!(at >= 2);
        job.progress(30, 100);
        assert_eq!((advanced(), job.view().idle_seconds), (at, 0));
    }

    #[test]
    fn jobs_are_limited() {
        let jobs = Jobs::new(Arc::default());
        for _ in 0..3 * REMEMBERED {
            jobs.begin("flush", "x", None).unwrap().ended(End::Cancelled);
        }
        assert_eq!(jobs.all().len(), REMEMBERED);
        (0..MOST_RUNNING).for_each(|_| drop(jobs.begin("flush", "x", None).unwrap()));
        assert!(jobs.begin("flush", "x", None).is_none());
    }

    #[test]
    fn the_rest_takes_as_long_as_the_beginning_did() {
        assert_eq!(eta(25, 100, 10.0), Some(30));
        assert_eq!(eta(0, 100, 10.0), None);
        assert_eq!(percent(0, 0), 0);
        assert_eq!(percent(u64::MAX, u64::MAX), 100);
    }
}
