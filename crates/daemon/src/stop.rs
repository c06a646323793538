//! The stop of the daemon: volumes and sets are stopped, after a drain if the configuration asks for one.
//!
//! Owns the deadlines of the drain and of the stop, and their messages. Dirty data that remains is safe in the cache. A
//! drain that leaves dirty data is a failure, whose message has the number of bytes. A second signal ends the drain. Must
//! not know how data is written back.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serve::amount::human;
use serve::{Failure, message, plain};

use crate::hub::Kind;
use crate::jobs::Job;
use crate::notify;
use crate::order::Order;
use crate::registry::Registry;
use crate::signals::Signals;
use crate::worker::Phase;

/// Time limit for users of volumes after a second signal.
const GRACE: Duration = Duration::from_secs(3);
/// Interval between progress messages of a drain.
const SAYS_EVERY: Duration = Duration::from_secs(5);
/// Time until the first progress message: a shorter drain has none.
const FIRST_AFTER: Duration = Duration::from_millis(300);
/// Time that each notification asks the service manager to wait.
const ASKS_FOR: Duration = Duration::from_secs(60);
/// Interval at which the jobs are checked.
const LOOKS_EVERY: Duration = Duration::from_millis(100);

/// Time limit for the cancellation of jobs: the thread of a set may hang.
const GIVE_UP_WITHIN: Duration = Duration::from_secs(2);

/// A drain: its jobs, and the problems of jobs that could not be started.
struct Drain {
    jobs: Vec<Arc<Job>>,
    problems: Vec<String>,
}

/// Stops all volumes and sets.
pub(crate) async fn stop(signals: &mut Signals, registry: &Arc<Registry>) -> Result<(), Failure> {
    let (wanted, seconds) = {
        let config = registry.shared.config();
        (config.drain_on_stop, config.drain_deadline_s)
    };
    let mut dirty_bytes = None;
    if wanted {
        let drain = Drain::begin(registry);
        let (problems, signal) = tokio::select! {
            problems = drain.ended(Duration::from_secs(seconds)) => (problems, None),
            name = signals.stop() => (Vec::new(), Some(name)),
        };
        drain.give_up().await;
        if let Some(name) = signal {
            message::warn(format!("{name}: stopping without the drain; dirty data stays in the cache"));
        } else if !problems.is_empty() {
            dirty_bytes = Some(log_dirty_data_that_stays(registry, &problems).await);
        }
    }
    down(signals, registry).await?;
    dirty_bytes.map_or(Ok(()), |bytes| {
        Err(Failure::Failed(format!("stopped before the drain ended: up to {} stay dirty", human(bytes))))
    })
}

async fn down(signals: &mut Signals, registry: &Arc<Registry>) -> Result<(), Failure> {
    tokio::select! {
        result = registry.inventory.workers.stop_all() => return result,
        _ = signals.stop() => {}
    }
    message::warn("second signal: stopping without waiting for the users of volumes; flushed data is safe");
    registry.inventory.workers.force();
    let deadline = tokio::time::timeout(GRACE, registry.inventory.workers.stop_all());
    deadline.await.unwrap_or_else(|_| Err(Failure::Failed("ended while volumes were in use".into())))
}

impl Drain {
    fn begin(registry: &Arc<Registry>) -> Drain {
        let mut drain = Drain { jobs: Vec::new(), problems: Vec::new() };
        for worker in registry.inventory.workers.all() {
            if worker.plan.cache.is_none() || worker.phase() != Phase::Serving {
                continue;
            }
            let id = worker.plan.id.clone();
            match worker.begin_job(&registry.jobs, "drain", &id, None, |job| Order::Flush(None, job)) {
                Ok(job) => drain.jobs.push(job),
                Err(e) => drain.problems.push(e.message().unwrap_or_default().to_owned()),
            }
        }
        drain
    }

    /// Cancels the jobs and waits for their end, so that no data is written back after the next message.
    async fn give_up(&self) {
        self.jobs.iter().for_each(|job| job.cancel());
        let began = Instant::now();
        while self.jobs.iter().any(|job| job.is_running()) && began.elapsed() < GIVE_UP_WITHIN {
            tokio::time::sleep(LOOKS_EVERY / 10).await;
        }
    }

    /// Waits until no data is dirty or `deadline` has passed. Returns why data stays dirty.
    async fn ended(&self, deadline: Duration) -> Vec<String> {
        let began = Instant::now();
        let mut said = None;
        while self.jobs.iter().any(|j| j.is_running()) {
            if began.elapsed() >= deadline {
                let mut problems = self.problems.clone();
                problems.extend(self.jobs.iter().filter_map(|j| j.problem()));
                problems.push(format!(
                    "the drain did not end within {}",
                    format::counted(deadline.as_secs(), "second")
                ));
                return problems;
            }
            if said.is_none_or(|at: Instant| at.elapsed() >= SAYS_EVERY) && began.elapsed() >= FIRST_AFTER {
                said = Some(Instant::now());
                notify::say(&format!("EXTEND_TIMEOUT_USEC={}", ASKS_FOR.as_micros()));
                for job in self.jobs.iter().filter(|j| j.is_running()) {
                    message::note(job.in_words());
                    notify::say(&format!("STATUS={}", job.in_words()));
                }
            }
            tokio::time::sleep(LOOKS_EVERY).await;
        }
        self.problems.iter().cloned().chain(self.jobs.iter().filter_map(|j| j.problem())).collect()
    }
}

/// Logs how much stays dirty, and why. Returns the number of bytes.
async fn log_dirty_data_that_stays(registry: &Arc<Registry>, problems: &[String]) -> u64 {
    let mut bytes = 0;
    let mut volumes = Vec::new();
    for set in registry.views.sets().await {
        let cached = set.figures.volumes.into_iter();
        for volume in cached.filter(|v| v.attached && !v.flash.flash_only && v.held.dirty_bytes > 0) {
            bytes += volume.held.dirty_bytes;
            volumes.push(plain::named(&volume.label, volume.name));
        }
    }
    let text = format!(
        "not everything was written back: {}; {} stay dirty in the cache ({}), and are safe there",
        problems.join("; "),
        human(bytes),
        volumes.join(", ")
    );
    message::message("error", &text);
    registry.shared.hub.publish(Kind::Message, None, "error", &text);
    bytes
}
