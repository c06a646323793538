//! The log of events in the state directory, which survives the end of the daemon.
//!
//! Owns two files of one JSON object for each line: `events.jsonl`, which is appended to, and `events.old.jsonl`, which has
//! the events before. When the first is full it replaces the second, so size and number of the stored events are bounded. A
//! thread writes, because a publisher of an event must not wait for a disk, which may be a volume of this daemon. An event is
//! written by one call, so a crash loses the last lines only; an incomplete last line is removed at the next start, and a
//! reader skips lines that are no events. Must not know the meaning of an event.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde_json::Value;
use serve::{Failure, message};

/// Limit of the bytes of a file.
const FILE_BYTES: u64 = 1 << 20;
/// Limit of the events of a file.
const FILE_EVENTS: usize = 4096;
/// Limit of the bytes of a line. A longer event is not stored.
const LINE_BYTES: usize = 64 << 10;
/// Capacity of the queue of the thread that writes. An event that finds it full is not stored.
const LOG_QUEUE: usize = 1024;
/// Mode of the files: only their owner reads and writes them. Events name users and devices.
const LOG_MODE: u32 = 0o600;
/// Time limit for the last lines when the daemon stops.
const CLOSE_WITHIN: Duration = Duration::from_secs(1);

/// The files, which the writer and readers lock while they work.
struct Files {
    dir: PathBuf,
    file: File,
    bytes: u64,
    events: usize,
}

/// The log: stores events and reads them back.
pub(crate) struct EventLog {
    files: Arc<Mutex<Files>>,
    sender: Option<SyncSender<String>>,
    ended: Receiver<()>,
    last_seq: u64,
}

fn current(dir: &Path) -> PathBuf {
    dir.join("events.jsonl")
}

fn old(dir: &Path) -> PathBuf {
    dir.join("events.old.jsonl")
}

fn open(path: &Path) -> std::io::Result<File> {
    File::options().read(true).append(true).create(true).mode(LOG_MODE).open(path)
}

/// The events in these bytes; lines that are no events are skipped.
fn parse(bytes: &[u8]) -> impl Iterator<Item = Value> {
    let events = bytes.split(|b| *b == b'\n').filter_map(|line| serde_json::from_slice::<Value>(line).ok());
    events.filter(|event| event["seq"].is_u64() && event["time_ms"].is_u64())
}

impl Files {
    /// Opens the files, and removes an incomplete last line.
    fn open(dir: &Path) -> Result<(Files, u64), Failure> {
        let path = current(dir);
        let file = open(&path).map_err(|e| Failure::at(&path, "cannot be opened", e))?;
        let text = std::fs::read(&path).map_err(|e| Failure::at(&path, "cannot be read", e))?;
        let complete = text.iter().rposition(|b| *b == b'\n').map_or(0, |at| at + 1);
        let bytes = complete as u64;
        if complete < text.len() {
            file.set_len(bytes).map_err(|e| Failure::at(&path, "cannot be written", e))?;
        }
        let before = std::fs::read(old(dir)).unwrap_or_default();
        let lines = text.get(..complete).unwrap_or_default();
        let seq = parse(&before).chain(parse(lines)).filter_map(|e| e["seq"].as_u64()).max().unwrap_or(0);
        let files = Files { dir: dir.to_owned(), file, bytes, events: parse(lines).count() };
        Ok((files, seq))
    }

    fn append(&mut self, line: &str) -> std::io::Result<()> {
        if self.bytes + line.len() as u64 > FILE_BYTES || self.events >= FILE_EVENTS {
            self.file.sync_data()?;
            std::fs::rename(current(&self.dir), old(&self.dir))?;
            self.file = open(&current(&self.dir))?;
            (self.bytes, self.events) = (0, 0);
        }
        let written = self.file.write_all(line.as_bytes());
        if written.is_err() {
            // A part of the line may be there.
            self.file.set_len(self.bytes)?;
        }
        written?;
        self.bytes += line.len() as u64;
        self.events += 1;
        Ok(())
    }
}

/// Writes lines until all senders are dropped. A failure is reported once until a write succeeds.
fn write(files: &Mutex<Files>, lines: &Receiver<String>) {
    let mut fails = false;
    for line in lines {
        let mut files = files.lock().unwrap_or_else(PoisonError::into_inner);
        let written = files.append(&line);
        if let (Err(e), false) = (&written, fails) {
            let path = current(&files.dir);
            message::warn(format!("{}: events are not stored: {e}", path.display()));
        }
        fails = written.is_err();
    }
}

impl EventLog {
    /// Opens the log in the state directory, and starts its thread.
    ///
    /// # Errors
    /// If a file cannot be opened.
    pub(crate) fn open(dir: &Path) -> Result<EventLog, Failure> {
        let (files, last_seq) = Files::open(dir)?;
        let files = Arc::new(Mutex::new(files));
        let (sender, lines) = sync_channel(LOG_QUEUE);
        let (end, ended) = sync_channel(1);
        let mine = files.clone();
        let writer = move || {
            write(&mine, &lines);
            drop(end);
        };
        std::thread::Builder::new()
            .name("event-log".into())
            .spawn(writer)
            .map_err(|e| Failure::because("events are not stored: a thread cannot be started", e))?;
        Ok(EventLog { files, sender: Some(sender), ended, last_seq })
    }

    /// The number of the last stored event when the log was opened; 0 if there was none.
    pub(crate) fn last_seq(&self) -> u64 {
        self.last_seq
    }

    /// Stores an event; never blocks.
    pub(crate) fn store(&self, event: &impl serde::Serialize) {
        let Ok(mut line) = serde_json::to_string(event) else { return };
        line.push('\n');
        if let Some(sender) = self.sender.as_ref().filter(|_| line.len() <= LINE_BYTES) {
            // A full queue means that the disk does not keep up.
            let _ = sender.try_send(line);
        }
    }

    /// A reader of the stored events, which does not need the log.
    pub(crate) fn reader(&self) -> Reader {
        Reader(self.files.clone())
    }

    /// Waits until the last events are written, but not for a disk that hangs.
    pub(crate) fn close(mut self) {
        self.sender = None;
        if self.ended.recv_timeout(CLOSE_WITHIN) == Err(RecvTimeoutError::Timeout) {
            message::warn("the last events could not be stored");
        }
    }
}

/// Reads stored events.
pub(crate) struct Reader(Arc<Mutex<Files>>);

impl Reader {
    /// The stored events since this time (milliseconds since 1970), the oldest first. Waits for the disk.
    pub(crate) fn since(&self, time_ms: u64) -> Vec<Value> {
        let files = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let read = |path: PathBuf| std::fs::read(path).unwrap_or_default();
        let (before, now) = (read(old(&files.dir)), read(current(&files.dir)));
        drop(files);
        let events = parse(&before).chain(parse(&now));
        events.filter(|e| e["time_ms"].as_u64().is_some_and(|t| t >= time_ms)).collect()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn event(seq: u64, text: &str) -> Value {
        json!({"seq": seq, "time_ms": seq * 10, "text": text})
    }

    fn numbers(events: &[Value]) -> Vec<u64> {
        events.iter().map(|e| e["seq"].as_u64().unwrap()).collect()
    }

    /// A crash leaves an incomplete line, or a file system leaves zeros: everything before and after is read.
    #[test]
    fn a_torn_line_costs_only_itself() {
        let dir = tempfile::tempdir().unwrap();
        for (torn, kept) in [("{\"seq\": 3, \"ti", 2), ("\0\0\0\0", 2), ("\0\0\n", 2), ("{\"seq\": 3}\n", 2)]
        {
            let good = format!("{}\n{}\n", event(1, "a"), event(2, "b"));
            std::fs::write(current(dir.path()), format!("{good}{torn}")).unwrap();
            let log = EventLog::open(dir.path()).unwrap();
            assert_eq!(log.last_seq(), kept, "{torn:?}");
            log.store(&event(4, "c"));
            let reader = log.reader();
            log.close();
            assert_eq!(numbers(&reader.since(0)), [1, 2, 4], "{torn:?}");
            assert_eq!(numbers(&reader.since(20)), [2, 4], "{torn:?}");
        }
    }

    #[test]
    fn size_and_number_are_bounded_and_the_newest_stay() {
        let dir = tempfile::tempdir().unwrap();
        let size = |path: PathBuf| std::fs::metadata(path).map_or(0, |m| m.len());
        let (mut files, _) = Files::open(dir.path()).unwrap();
        let most = 3 * FILE_EVENTS as u64;
        for seq in 1..=most {
            files.append(&format!("{}\n", event(seq, "x"))).unwrap();
        }
        let log = EventLog::open(dir.path()).unwrap();
        assert_eq!(log.last_seq(), most);
        let found = numbers(&log.reader().since(0));
        assert!(found.is_sorted() && found.last() == Some(&most), "{found:?}");
        assert_eq!(found.len(), 2 * FILE_EVENTS);
        let long = "x".repeat(LINE_BYTES / 2);
        for seq in 0..100 {
            files.append(&format!("{}\n", event(most + seq, &long))).unwrap();
        }
        assert!(size(current(dir.path())) <= FILE_BYTES && size(old(dir.path())) <= FILE_BYTES);
    }

    /// Events have the names of users and devices.
    #[test]
    fn only_the_owner_reads_it_and_a_long_event_is_left_out() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let log = EventLog::open(dir.path()).unwrap();
        log.store(&event(1, &"x".repeat(LINE_BYTES)));
        log.store(&event(2, "y"));
        let reader = log.reader();
        log.close();
        assert_eq!(numbers(&reader.since(0)), [2]);
        let mode = std::fs::metadata(current(dir.path())).unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, 0o600);
    }
}
