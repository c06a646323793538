//! What the engine tells, as log lines on stderr.
//!
//! Levels say what the operator should do: an error is something that was asked for and did not happen, a warning is
//! abnormal and was survived, everything else is for information.

use engine::SetEvent;

use crate::out;

/// Lines about failing devices per batch; more are counted only.
const MAX_DEVICE_ERRORS: usize = 5;

/// Logs events.
pub(crate) fn log(events: &[SetEvent]) {
    let mut device_errors = 0;
    for event in events {
        if matches!(event, SetEvent::DeviceError { .. }) {
            device_errors += 1;
            if device_errors > MAX_DEVICE_ERRORS {
                continue;
            }
        }
        let (level, text) = line(event);
        if !text.is_empty() {
            out::message(level, &text);
        }
    }
    if device_errors > MAX_DEVICE_ERRORS {
        out::warn(format!("{} more requests failed", device_errors - MAX_DEVICE_ERRORS));
    }
}

/// Level and text; no text for what is not worth a line.
fn line(event: &SetEvent) -> (&'static str, String) {
    match event {
        SetEvent::TornSet { bucket, generation, what } => (
            "warning",
            format!(
                "btree node at bucket {bucket} gen {generation}: its last write was torn by a crash and has been \
                 dropped; the journal has its keys ({what})"
            ),
        ),
        SetEvent::Replayed { keys: 0, .. } => ("", String::new()),
        SetEvent::Replayed { entries, keys } => {
            ("", format!("journal replayed: {keys} keys in {entries} entries"))
        }
        SetEvent::Initialised => {
            ("", "the cache was used for the first time and has been initialised".into())
        }
        SetEvent::Failed { why } => ("error", format!("the cache set is disabled: {why}")),
        SetEvent::DeviceError { what } => ("warning", what.clone()),
        SetEvent::State { device, state } => ("", format!("{device}: {state}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_follow_what_happened() {
        assert_eq!(line(&SetEvent::Failed { why: "x".into() }).0, "error");
        assert_eq!(line(&SetEvent::DeviceError { what: "x".into() }).0, "warning");
        assert_eq!(line(&SetEvent::Replayed { entries: 1, keys: 0 }).1, "");
        let state = SetEvent::State { device: "/dev/sdb".into(), state: "dirty" };
        assert_eq!(line(&state), ("", "/dev/sdb: dirty".to_owned()));
    }
}
