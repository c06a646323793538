//! Events of the engine as log lines on stderr.
//!
//! Owns the levels and the limit of lines about failing requests. An error is a request or command that failed, a warning
//! is an abnormal condition that the engine handled, and every other event is information. Must not know where lines go.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Instant;

use engine::{CacheSet, Resolution, ScrubReport, SetEvent, Volume};
use format::{counted, form};
use io::Nanos;

use crate::{message, plain};

/// Limit of the lines about failing requests in a [`WINDOW`]; more are only counted. A full disk would fill the log, too.
const MAX_DEVICE_ERRORS: usize = 5;
pub(crate) const WINDOW: Nanos = Nanos::from_secs(10);

/// The names by which an operator finds what an event names.
#[derive(Default)]
pub struct Names {
    /// The set, as an operator types it; empty if there is none.
    pub set: String,
    /// The label and the name of each volume that is registered.
    pub volumes: Vec<(String, String)>,
}

impl Names {
    /// The names of a set and of volumes.
    pub fn of(set: Option<&CacheSet>, volumes: &[Rc<Volume>]) -> Names {
        let set = set.map(|set| (set.status().label, set.uuid().to_string()));
        Names {
            set: set.map(|(label, uuid)| plain::typed(&label, &uuid).to_owned()).unwrap_or_default(),
            volumes: volumes.iter().map(|v| (v.tunables().label, v.name())).collect(),
        }
    }

    /// The name of the registered volume with this label or name.
    fn volume(&self, volume: &str) -> Option<&str> {
        let found = self.volumes.iter().find(|(label, name)| label == volume || name == volume);
        found.map(|(_, name)| name.as_str())
    }
}

/// Logs events.
#[derive(Default)]
pub struct EventLog {
    begin: Cell<Option<Instant>>,
    device_errors: Cell<usize>,
}

impl EventLog {
    /// Logs the events since the last call.
    ///
    /// While [`EventLog::counts`] is true, the caller calls it from time to time, even without events.
    pub fn log(&self, events: &[SetEvent], names: &Names) {
        if self.begin.get().is_some_and(|begin| begin.elapsed().as_nanos() >= u128::from(WINDOW.0)) {
            self.end_window();
        }
        for event in events {
            if event.is_failed_request() {
                if self.begin.get().is_none() {
                    self.begin.set(Some(Instant::now()));
                }
                self.device_errors.set(self.device_errors.get() + 1);
                if self.device_errors.get() > MAX_DEVICE_ERRORS {
                    continue;
                }
            }
            let (level, text) = line(event, names);
            if !text.is_empty() {
                message::message(level, &text);
            }
        }
    }

    /// Whether requests failed recently, so that a line about omitted messages may follow.
    pub fn counts(&self) -> bool {
        self.begin.get().is_some()
    }

    /// Logs how many messages were omitted.
    pub fn end_window(&self) {
        let left_out = self.device_errors.take().saturating_sub(MAX_DEVICE_ERRORS);
        if left_out > 0 {
            message::warn(format!(
                "{} failed, too; their messages are omitted",
                counted(left_out, "more request")
            ));
        }
        self.begin.set(None);
    }
}

/// What is true after the loss of one of two sets.
const ONE_COPY: &str = "its dirty data is on one cache device only";

/// The level and text of an event; the text is empty for an event that is not logged.
fn line(event: &SetEvent, names: &Names) -> (&'static str, String) {
    match event {
        SetEvent::TornBset { bucket, generation, damage } => (
            "warning",
            format!(
                "btree node at bucket {bucket} gen {generation}: its last write was torn by a crash and was \
                 dropped; the journal has its keys ({damage})"
            ),
        ),
        SetEvent::Replayed { keys: 0, .. } => ("", String::new()),
        SetEvent::Replayed { entries, keys } => {
            // A clean stop leaves no keys to replay.
            let (keys, entries) = (counted(keys, "key"), counted(entries, "entry"));
            ("", format!("journal replayed after a crash, or a stop by a kernel: {keys} in {entries}"))
        }
        SetEvent::Initialised => ("", "the cache set was initialised by its first start".into()),
        SetEvent::Failed { why } => ("error", format!("the cache set is disabled: {why}")),
        SetEvent::CrashLogInvalid { why } => (
            "warning",
            format!(
                "the cache device may have lost data of its volatile cache ({why}): until the next start, \
                 acknowledged writes that were not flushed are lost if this process is killed"
            ),
        ),
        SetEvent::DeviceError { error } => ("warning", error.to_string()),
        SetEvent::WritebackFailed { error } => ("warning", format!("writeback: {error}")),
        SetEvent::FlushOverdue { device } => (
            "warning",
            format!(
                "{device}: a flush does not complete: the cache drops clean copies of this device that are not \
                 durable on the cache device yet, so that other devices need not wait"
            ),
        ),
        SetEvent::DamagedData { .. } => damaged_data(event, names),
        SetEvent::DamageResolved { volume, sector, sectors, decision } => {
            let what = match decision {
                Resolution::Accepted => "were accepted: their bytes are valid from now on",
                Resolution::Dropped => "were dropped: reads return the older data of the backing device",
            };
            ("warning", format!("{volume}: {} from {sector} on {what}", counted(sectors, "damaged sector")))
        }
        SetEvent::Scrubbed { report } => scrubbed(report),
        SetEvent::GivenUp { device, errors } => (
            "error",
            format!(
                "{device}: {} failed: every request to it fails until the next start, or until io_disable is 0 (`ubcache set \
                 {device} io_disable=0`; with `up`: `set device.io_disable=0`)",
                counted(errors, "request")
            ),
        ),
        SetEvent::CopyLost { device, cache } => {
            ("warning", format!("{device}: {cache} has no copy any more: {ONE_COPY}"))
        }
        SetEvent::TookOver { device, cache } => {
            ("warning", format!("{device}: {cache} has taken over: {ONE_COPY}"))
        }
        SetEvent::State { device, state } => ("", format!("{device}: {state}")),
    }
}

/// The level and text of the event that a scrub has ended.
fn scrubbed(report: &ScrubReport) -> (&'static str, String) {
    let ScrubReport { verified_blocks: verified, learnt_blocks: learnt, .. } = report;
    let without = match report.unverified_blocks {
        0 => String::new(),
        n => format!(", {n} {} none still", form(n, "has", "have")),
    };
    let sound = format!(
        "scrub: {} {} verified, {learnt} got a checksum{without}",
        counted(verified, "block"),
        form(*verified, "is", "are")
    );
    if report.problems() == 0 {
        return ("", sound);
    }
    let level = if report.damaged_dirty_blocks > 0 { "error" } else { "warning" };
    let damage = format!(
        "{} of clean data {} damaged and dropped, {} of dirty data {} damaged, {} could not be read",
        counted(report.damaged_clean_blocks, "block"),
        form(report.damaged_clean_blocks, "was", "were"),
        counted(report.damaged_dirty_blocks, "block"),
        form(report.damaged_dirty_blocks, "is", "are"),
        report.unreadable_blocks
    );
    (level, format!("{sound}; {damage}"))
}

/// The level and text of the event that cached data is damaged.
fn damaged_data(event: &SetEvent, names: &Names) -> (&'static str, String) {
    let SetEvent::DamagedData { volume, sector, sectors, at, dirty, expected, found } = event else {
        return ("", String::new());
    };
    let (level, then) = match dirty {
        true => (
            "error",
            format!(
                "no other device has this data, and reads of it fail until it is overwritten, accepted or dropped; see `ubcache \
                 damaged {}`",
                names.volume(volume).map_or(&*names.set, |name| plain::typed(volume, name))
            ),
        ),
        false => ("warning", "the data was dropped and is read from the backing device".to_owned()),
    };
    let place = format!("sector {at} of the cache device");
    // Where the data of a volume begins on its device is not known before the device is registered.
    let of = if names.volume(volume).is_some() { "" } else { " of the device, which is not registered," };
    let why = format!("checksum {expected:#010x}, found {found:#010x}");
    (
        level,
        format!(
            "{volume}: {} from {sector} on{of} {} damaged ({place}, {why}); {then}",
            counted(sectors, "sector"),
            form(sectors.0, "is", "are")
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names() -> Names {
        let volumes =
            vec![("films".to_owned(), "bcache0".to_owned()), ("my films".to_owned(), "bcache1".to_owned())];
        Names { set: "fast".to_owned(), volumes }
    }

    /// `VOLUME` stood in the place of a label with a blank, and the sector of a device in the place of one of its volume.
    #[test]
    fn damaged_data_is_named_as_an_operator_types_it() {
        let said = |volume: &str| {
            let (sector, sectors, at) = (format::Sector(16), format::Sectors(8), format::Sector(99));
            let (volume, dirty, expected, found) = (volume.to_owned(), true, 1, 2);
            line(&SetEvent::DamagedData { volume, sector, sectors, at, dirty, expected, found }, &names()).1
        };
        for (volume, begins, command) in [
            ("films", "films: 8 sectors from 16 on are damaged (", "see `ubcache damaged films`"),
            ("my films", "my films: 8 sectors from 16 on are damaged (", "see `ubcache damaged bcache1`"),
            (
                "gone",
                "gone: 8 sectors from 16 on of the device, which is not registered, are",
                "`ubcache damaged fast`",
            ),
        ] {
            let said = said(volume);
            assert!(said.starts_with(begins) && said.ends_with(command), "{said}");
        }
    }

    #[test]
    fn levels_follow_what_happened() {
        let error = || engine::EngineError::from(engine::Refusal::Cancelled);
        assert_eq!(line(&SetEvent::Failed { why: std::sync::Arc::new(error()) }, &names()).0, "error");
        assert_eq!(line(&SetEvent::DeviceError { error: error() }, &names()).0, "warning");
        let failed = line(&SetEvent::WritebackFailed { error: error() }, &names());
        assert_eq!(failed, ("warning", format!("writeback: {}", error())));
        assert_eq!(line(&SetEvent::Replayed { entries: 1, keys: 0 }, &names()).1, "", "after a clean stop");
        let crashed = line(&SetEvent::Replayed { entries: 2, keys: 3 }, &names()).1;
        assert_eq!(crashed, "journal replayed after a crash, or a stop by a kernel: 3 keys in 2 entries");
        let state = SetEvent::State { device: "/dev/sdb".into(), state: "dirty" };
        assert_eq!(line(&state, &names()), ("", "/dev/sdb: dirty".to_owned()));
    }
}
