//! The output of the program: data to stdout, messages to stderr, progress to a terminal.
//!
//! Data and messages have no colour and no cursor movement, so `NO_COLOR` has no effect. Must not know the commands.

use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

use serde::Serialize;
pub(crate) use serve::message::{message, note, warn};
use serve::plain;

use crate::failure::Failure;
use crate::size;

/// Writes data to stdout and flushes it.
///
/// # Errors
/// If the write fails. A reader that has ended (`ubcache … | head`) ends the command without a message.
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    let mut stdout = io::stdout().lock();
    let written = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
    written.map_err(|e| match e.kind() {
        io::ErrorKind::BrokenPipe => Failure::Found,
        _ => Failure::because("standard output", e),
    })
}

/// Writes that the command was called in a wrong way. The parser says in several lines what would be right.
pub(crate) fn wrong_usage(text: &str) {
    let (first, rest) = text.split_once('\n').unwrap_or((text, ""));
    message("error", first);
    // If a write to stderr fails, the failure cannot be reported.
    rest.lines().for_each(|line| drop(writeln!(io::stderr().lock(), "{}", plain::escaped(line))));
}

/// Prints a document as JSON or as text.
pub(crate) fn document(json: bool, doc: &(impl Serialize + std::fmt::Display)) -> Result<(), Failure> {
    if json { print_json(doc) } else { print(&doc.to_string()) }
}

/// Prints a document as indented JSON.
pub(crate) fn print_json(doc: &impl Serialize) -> Result<(), Failure> {
    let text = serde_json::to_string_pretty(doc).map_err(Failure::of)?;
    print(&format!("{}\n", plain::escaped_json(&text)))
}

/// Prints an event as one line of JSON.
pub(crate) fn print_json_line(event: &serde_json::Value) -> Result<(), Failure> {
    print(&format!("{}\n", plain::escaped_json(&event.to_string())))
}

/// A line on the terminal with the progress of a command. Prints nothing if stderr is not a terminal.
pub(crate) struct Progress {
    what: &'static str,
    shown: bool,
    last: Instant,
    terminal: bool,
}

/// Shortest time between two changes of the line.
const EVERY: Duration = Duration::from_millis(100);

impl Progress {
    pub(crate) fn new(what: &'static str) -> Progress {
        Progress { what, shown: false, last: Instant::now(), terminal: io::stderr().is_terminal() }
    }

    /// Shows that `done` of `total` bytes are done.
    pub(crate) fn bytes(&mut self, done: u64, total: u64) {
        let percent = done.saturating_mul(100).checked_div(total).unwrap_or(100);
        self.line(|what| format!("{what}: {percent:>3} %, {} of {}", size::human(done), size::human(total)));
    }

    /// Shows a line, unless the last one is too recent.
    pub(crate) fn line(&mut self, text: impl FnOnce(&str) -> String) {
        if !self.terminal || (self.shown && self.last.elapsed() < EVERY) {
            return;
        }
        self.shown = true;
        self.last = Instant::now();
        let _ = write!(io::stderr().lock(), "\r\x1b[K{}", text(self.what));
    }

    /// Removes the line before other output is printed.
    pub(crate) fn clear(&mut self) {
        if std::mem::take(&mut self.shown) {
            let _ = write!(io::stderr().lock(), "\r\x1b[K");
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.clear();
    }
}
