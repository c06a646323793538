//! Problems of devices that do not answer, and of the commands, jobs and stops that wait for them.
//!
//! Owns these problems. Must not know how a command or a job is carried out, nor how a silence is found.

use serde::Serialize;

use super::{DeviceView, Problem, SetView, device_of, set_title, title, volume_title};
use crate::components::silences::Silent;
use crate::jobs::JobView;
use crate::worker::ANSWER_WITHIN;

/// The next command where a device does not answer: the messages of the kernel.
pub(super) const NEXT: &str = "journalctl -k -n 50";
/// Seconds after which a command or a stop is a problem.
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
    let mut problem = Problem::new("command_waits", text, NEXT.to_owned());
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
    let mut problem = Problem::new("job_waits", text, NEXT.to_owned());
    problem.of.device.clone_from(&job.device);
    let device = devices.iter().find(|device| job.uuid.is_some() && device.uuid == job.uuid);
    if let Some(device) = device {
        problem.of.volume.clone_from(&device.name);
        problem.of.set.clone_from(&device.set);
    }
    problem
}

/// The problem of each device that does not answer.
pub(crate) fn silent_devices(silent: &[Silent], sets: &[SetView]) -> Vec<Problem> {
    let problems = silent.iter().map(|one| {
        let until = match one.volume {
            Some(_) => "requests of clients that need the disk wait until it answers",
            None => "requests of clients to the volumes of the set wait until it answers",
        };
        let mut problem =
            Problem::new("device_silent", format!("{}; {until}", one.in_words()), NEXT.to_owned());
        let has_cache = sets.iter().any(|set| set.id == one.thread && set.has_cache);
        problem.of.set = has_cache.then(|| one.thread.clone());
        problem.of.device = Some(one.device.clone().into());
        problem.of.volume.clone_from(&one.volume);
        problem
    });
    problems.collect()
}

/// The problem of each stop that takes long: the command that began it may have failed before its end.
pub(crate) fn stops_that_wait(sets: &[SetView], devices: &[DeviceView], silent: &[Silent]) -> Vec<Problem> {
    let mut found = Vec::new();
    for set in sets {
        // Two stops of the same volume wait for the same.
        let mut named = Vec::new();
        for stop in &set.figures.stops {
            if stop.seconds < LONG_SECONDS || named.contains(&&stop.volume) {
                continue;
            }
            named.push(&stop.volume);
            let volume = set.figures.volumes.iter().find(|v| Some(&v.name) == stop.volume.as_ref());
            let what = volume.map_or_else(|| set_title(set, device_of(set, devices)), volume_title);
            let of_stop = |s: &&Silent| {
                s.thread == set.id
                    && (s.volume.is_none() || volume.is_none_or(|v| s.volume.as_ref() == Some(&v.name)))
            };
            let waits: Vec<String> = silent.iter().filter(of_stop).map(Silent::in_words).collect();
            let waits = match waits.is_empty() {
                true => "requests of clients or a device may not have ended".to_owned(),
                false => waits.join(", "),
            };
            let then = match stop.is_final || stop.seconds < ANSWER_WITHIN.as_secs() {
                true => "the stop ends after that",
                false => {
                    "the command that began it has failed, and what it has ended is exported again after that"
                }
            };
            let text = format!("{what} has been stopping for {} s: {waits}; {then}", stop.seconds);
            let mut problem = Problem::new("stop_waits", text, NEXT.to_owned());
            problem.of.set = set.has_cache.then(|| set.id.clone());
            problem.of.volume.clone_from(&stop.volume);
            found.push(problem);
        }
    }
    found
}
