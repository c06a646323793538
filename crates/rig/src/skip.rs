//! Messages of tests that need a facility which the machine does not have.
//!
//! Owns the syntax of the lines that `scripts/test` counts. Must not know what a test needs.

use std::fmt::Display;
use std::io::Write as _;

/// Reports that the calling test does not run, and the reason. The test must then return.
pub fn skipped(reason: impl Display) {
    say("skipped", &reason);
}

/// Reports that the calling test leaves out a part of itself, and the reason.
pub fn skipped_in_part(reason: impl Display) {
    say("skipped in part", &reason);
}

/// Whether this environment variable requests that the test is skipped. If so, this reports it.
pub fn skip_requested(variable: &str) -> bool {
    let requested = std::env::var_os(variable).is_some_and(|v| v != "0" && !v.is_empty());
    if requested {
        skipped(format_args!("{variable} is set"));
    }
    requested
}

/// Writes directly to standard error, because the test harness captures the output of `eprintln!` in a test that passes.
fn say(what: &str, reason: &dyn Display) {
    let reason = reason.to_string().replace('\n', " ");
    let thread = std::thread::current();
    let line = format!("{what}: {reason} ({})\n", thread.name().unwrap_or("unknown test"));
    let _ = std::io::stderr().write_all(line.as_bytes());
}
