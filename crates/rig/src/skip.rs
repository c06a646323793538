//! Tests that need what the machine does not have.
//!
//! Owns the lines that `scripts/test` counts. Must not know what a test needs.

use std::fmt::Display;
use std::io::Write as _;

/// Says that the test that calls this does not run, and why. The test returns then.
pub fn skipped(reason: impl Display) {
    say("skipped", &reason);
}

/// Says that the test that calls this leaves out a part of itself, and why.
pub fn skipped_in_part(reason: impl Display) {
    say("skipped in part", &reason);
}

/// Whether this variable of the environment asks for the test to be skipped; says so.
pub fn skip_requested(variable: &str) -> bool {
    let requested = std::env::var_os(variable).is_some_and(|v| v != "0" && !v.is_empty());
    if requested {
        skipped(format_args!("{variable} is set"));
    }
    requested
}

/// Writes to standard error itself: the test harness keeps what `eprintln!` says in a test that passes.
fn say(what: &str, reason: &dyn Display) {
    let reason = reason.to_string().replace('\n', " ");
    let thread = std::thread::current();
    let line = format!("{what}: {reason} ({})\n", thread.name().unwrap_or("unknown test"));
    let _ = std::io::stderr().write_all(line.as_bytes());
}
