//! Requests whose answer can take long, because a device does not answer.
//!
//! Owns the message of what such a command waits for, and the message at a signal. Must not know the command.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use serde_json::Value;
use serve::plain;

use super::text;
use crate::client::Control;
use crate::failure::Failure;
use crate::interrupt::{Interrupt, exit_code};
use crate::out;

/// Time after which a command says what it waits for. The daemon has a problem of the command after 10 s.
const SAYS_AFTER: Duration = Duration::from_secs(11);
/// Interval of looks for a signal.
const EVERY: Duration = Duration::from_millis(100);

/// Sends a request and waits for its answer. `command` is what the daemon calls it in its status.
///
/// # Errors
/// Those of the request. After a signal, the signal: a message says whether the command goes on.
pub(super) fn post(control: &Control, command: &str, path: &str, body: &Value) -> Result<Value, Failure> {
    let mut interrupt = Interrupt::new()?;
    let (send, answer) = channel();
    let (here, to, wanted) = (control.clone(), path.to_owned(), body.clone());
    let asks = move || {
        // After a signal `post` has returned, and the receiver is gone.
        let _ = send.send(here.post(&to, &wanted));
    };
    let spawned = std::thread::Builder::new().name("ubcache-ask".into()).spawn(asks);
    spawned.map_err(|e| Failure::because("cannot start a thread", e))?;
    let mut says_at = Some(Instant::now() + SAYS_AFTER);
    loop {
        match answer.recv_timeout(EVERY) {
            Ok(answered) => return answered,
            Err(RecvTimeoutError::Disconnected) => {
                return Err(Failure::Failed(format!("{command}: internal error: the request has no answer")));
            }
            Err(RecvTimeoutError::Timeout) => {}
        }
        if let Some(signal) = interrupt.first() {
            out::note(at_signal(command, state_of(control, command).as_ref()));
            return Err(Failure::Signalled(exit_code(signal)));
        }
        if says_at.is_some_and(|at| Instant::now() >= at) {
            says_at = None;
            out::note(waits_for(command, state_of(control, command).as_ref()));
        }
    }
}

/// The status of the daemon, if the command is under way there. The status of a daemon that does not answer is not known.
fn state_of(control: &Control, command: &str) -> Option<CommandState> {
    let status = control.get("/v1/status").ok()?;
    let name = plain::escaped(command);
    let commands = status["commands"].as_array()?;
    let is_under_way = commands.iter().any(|one| text(&one["command"]) == name);
    let problems = status["problems"].as_array().into_iter().flatten();
    let start = format!("`{name}` ");
    let mut mine = problems.filter(|p| p["kind"] == "command_waits" && text(&p["text"]).starts_with(&start));
    Some(CommandState { is_under_way, why: mine.next().map(|problem| text(&problem["text"]).to_owned()) })
}

/// What the status of the daemon says of a command.
struct CommandState {
    is_under_way: bool,
    /// What it waits for, if it has been under way for long.
    why: Option<String>,
}

fn waits_for(command: &str, status: Option<&CommandState>) -> String {
    match status {
        Some(CommandState { why: Some(why), .. }) => why.clone(),
        _ => format!("`{command}` has no answer after 11 s; `ubcache status` shows what it waits for"),
    }
}

fn at_signal(command: &str, status: Option<&CommandState>) -> String {
    match status {
        Some(CommandState { is_under_way: true, .. }) => {
            format!("`{command}` goes on in the daemon; `ubcache status` shows it after 10 s")
        }
        // It may wait for another command, or its change may have ended while the daemon stores it.
        _ => format!("`{command}` may go on in the daemon; `ubcache status` shows it after 10 s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_without_an_answer_says_whether_it_has_begun() {
        let status =
            |is_under_way, why: Option<&str>| CommandState { is_under_way, why: why.map(str::to_owned) };
        assert_eq!(waits_for("stop a", Some(&status(true, Some("it waits")))), "it waits");
        assert!(waits_for("stop a", Some(&status(false, None))).contains("no answer after 11 s"));
        assert!(waits_for("stop a", None).contains("no answer after 11 s"));
        assert!(at_signal("stop a", Some(&status(true, None))).contains("goes on in the daemon"));
        assert!(at_signal("stop a", Some(&status(false, None))).contains("may go on"));
        assert!(at_signal("stop a", None).contains("may go on"));
    }
}
