//! Problems of commands that take long, and of jobs without progress, because a device does not answer.
//!
//! Owns these problems. Must not know how a command or a job is carried out.

use serde::Serialize;

use super::{DeviceView, Problem, title};
use crate::jobs::JobView;

/// Seconds after which a command is a problem.
const LONG_SECONDS: u64 = 10;
/// Seconds without progress after which a job is a problem. Requests to a healthy device that is busy end sooner.
const IDLE_SECONDS: u64 = 60;

/// A command that is being carried out.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct CommandUnderWay {
    /// The command with its parameters.
    pub(crate) command: String,
    /// The time since its begin.
    pub(crate) seconds: u64,
    /// The devices and sets that it changes, by UUID.
    #[serde(skip)]
    pub(crate) changes: Vec<String>,
}

/// The problem of each command that has been under way for long.
pub(crate) fn commands_that_wait(commands: &[CommandUnderWay], devices: &[DeviceView]) -> Vec<Problem> {
    let long = commands.iter().filter(|command| command.seconds >= LONG_SECONDS);
    long.map(|command| of_one(command, devices)).collect()
}

fn of_one(waiting: &CommandUnderWay, devices: &[DeviceView]) -> Problem {
    let has = |id: &Option<String>| id.as_ref().is_some_and(|id| waiting.changes.contains(id));
    let on: Vec<&DeviceView> = devices.iter().filter(|d| has(&d.uuid) || has(&d.set)).collect();
    let names: Vec<String> = on.iter().map(|device| title(device)).collect();
    let of = match names.is_empty() {
        true => "one of its devices".to_owned(),
        false => names.join(" or "),
    };
    let text = format!(
        "`{}` has been under way for {} s, and goes on: {of} may not answer; until it ends, other commands for the same device \
         or set are refused",
        waiting.command, waiting.seconds
    );
    let mut problem = Problem::new("command_waits", text, "journalctl -k -n 50".to_owned());
    if let [only] = on.as_slice() {
        problem.of.device = Some(only.path.clone());
        problem.of.volume.clone_from(&only.name);
        problem.of.set.clone_from(&only.set);
    }
    problem
}

/// The problem of each running job that has made no progress for long.
pub(crate) fn jobs_that_wait(jobs: &[JobView], devices: &[DeviceView]) -> Vec<Problem> {
    let idle = jobs.iter().filter(|job| job.is_running() && job.idle_seconds >= IDLE_SECONDS);
    idle.map(|job| of_job(job, devices)).collect()
}

fn of_job(job: &JobView, devices: &[DeviceView]) -> Problem {
    let text = format!(
        "job {} ({}) has made no progress for {} s: a device may not answer, or clients write as fast as data is written back; \
         `ubcache cancel {}` ends the job",
        job.id,
        job.title(),
        job.idle_seconds,
        job.id
    );
    let mut problem = Problem::new("job_waits", text, "journalctl -k -n 50".to_owned());
    problem.of.device.clone_from(&job.device);
    let device = devices.iter().find(|device| job.uuid.is_some() && device.uuid == job.uuid);
    if let Some(device) = device {
        problem.of.volume.clone_from(&device.name);
        problem.of.set.clone_from(&device.set);
    }
    problem
}
