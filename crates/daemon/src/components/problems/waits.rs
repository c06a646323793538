//! Problems of commands that take long, because a device does not answer.
//!
//! Owns these problems. Must not know how a command is carried out.

use serde::Serialize;

use super::{DeviceView, Problem, title};

/// Seconds after which a command is a problem.
const LONG_SECONDS: u64 = 10;

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
