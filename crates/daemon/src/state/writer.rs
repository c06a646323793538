//! The writer of the state: the only thread that writes the file.
//!
//! Owns the newest state that waits to be stored, and the result of the last write. Other threads queue a write and read that
//! result under a lock that no thread holds during I/O. A thread can wait until its write has ended, or until the write under way is
//! late ([`LATE_AFTER`]). Must not know what is stored.

use std::io::{Error, ErrorKind};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use serve::{Failure, message};

use super::file::StateFile;
use super::remembered::Remembered;
use super::room;
use crate::hub::{Hub, Kind};

/// Bytes that the file may grow by through one command, for which a test finds out whether there is room.
const GROWTH: usize = 8 << 10;
/// Time after which a write is late. All waits for it end then.
const LATE_AFTER: Duration = Duration::from_secs(5);

/// What the writer does after it has stored the newest state.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum WriteKind {
    /// Nothing.
    Store,
    /// It asks the file system whether a write would fail, and writes if the answer has changed.
    Check,
    /// It writes the state, and room for more.
    Test,
}

/// A state that is to be stored.
struct Write {
    newest: Arc<Remembered>,
    kind: WriteKind,
}

/// What is known of the file.
#[derive(Clone, Default)]
pub(super) struct FileStatus {
    /// Why the file has not the last state that was to be stored; `None` if it has.
    pub(super) not_stored: Option<String>,
    /// Why the last test failed; `None` if it did not.
    pub(super) refusing: Option<String>,
    /// The kind of the last error of a write.
    pub(super) last_error: Option<ErrorKind>,
    /// The state that was last stored; `None` if there was no file.
    pub(super) stored: Option<Arc<Remembered>>,
    /// The error of the last test.
    refused_by: Option<Arc<Error>>,
    /// Whether the file system last said that a write would fail.
    seems_full: bool,
}

/// What is to be written, and what came of it.
#[derive(Default)]
struct Queue {
    next: Option<Write>,
    /// Number of the last write that was asked for, and of the last one that has ended. A write has what all before it have.
    asked: u64,
    done: u64,
    /// Since when the writer works.
    busy_since: Option<Instant>,
    status: FileStatus,
    /// Whether a late write was reported.
    late_is_said: bool,
    closed: bool,
    ended: bool,
}

impl Queue {
    fn late(&self) -> bool {
        self.busy_since.is_some_and(|since| since.elapsed() >= LATE_AFTER)
    }
}

/// What the writer and its clients share.
struct SharedQueue {
    path: PathBuf,
    queue: Mutex<Queue>,
    changed: Condvar,
    hub: OnceLock<Arc<Hub>>,
}

impl SharedQueue {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits while `holds`, but not longer than for a write that is late. Returns whether `holds` is false.
    fn wait_while(&self, holds: impl Fn(&Queue) -> bool) -> bool {
        let began = Instant::now();
        let mut queue = self.lock();
        while holds(&queue) {
            let left = LATE_AFTER.saturating_sub(queue.busy_since.unwrap_or(began).elapsed());
            if left.is_zero() {
                return false;
            }
            queue = self.changed.wait_timeout(queue, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    fn report(&self, level: &'static str, text: &str) {
        message::message(level, text);
        if let Some(hub) = self.hub.get() {
            hub.publish(Kind::State, None, level, text);
        }
    }

    fn late_write(&self) -> String {
        let seconds = LATE_AFTER.as_secs();
        format!("{}: cannot be written: a write has not ended after {seconds} s", self.path.display())
    }
}

/// A write that was asked for. To wait for it blocks: a thread that serves must not.
pub(crate) struct Storing {
    shared: Arc<SharedQueue>,
    number: u64,
}

impl Storing {
    /// Waits until it has ended, or a write is late. Returns why the state is not stored; `None` if it is.
    pub(crate) fn not_stored(&self) -> Option<String> {
        match self.shared.wait_while(|queue| queue.done < self.number) {
            true => self.shared.lock().status.not_stored.clone(),
            false => Some(self.shared.late_write()),
        }
    }

    /// Reports the write under way if it is late. A late write is reported once. The caller must not hold the lock of the state.
    pub(crate) fn say_what_is_late(&self) {
        let mut queue = self.shared.lock();
        let is_new = queue.late() && !std::mem::replace(&mut queue.late_is_said, true);
        drop(queue);
        if is_new {
            let why = self.shared.late_write();
            self.shared.report(
                "error",
                &format!("{why}; the next start of the daemon may not know the last changes"),
            );
        }
    }

    /// Waits until a test has ended, or a write is late.
    ///
    /// # Errors
    /// If the state cannot be written, or there is too little room for what a command adds.
    pub(crate) fn result_of_test(&self) -> Result<(), Failure> {
        const UNCHANGED: &str =
            "nothing was changed, because the next start of the daemon would not know of it";
        if !self.shared.wait_while(|queue| queue.done < self.number) {
            let late = self.shared.late_write();
            let path = self.shared.path.display();
            return Err(Failure::Failed(format!(
                "{late}; {UNCHANGED}; find out what the file system of {path} waits for, then run the command again"
            )));
        }
        let Some(error) = self.shared.lock().status.refused_by.clone() else { return Ok(()) };
        let text = format!(
            "{}: cannot be written: {error}; {UNCHANGED}; make room in this directory or make it writable, then run the command \
             again",
            self.shared.path.display()
        );
        // The error of the test is shared, and a cause is owned.
        let source = match error.raw_os_error() {
            Some(number) => Error::from_raw_os_error(number),
            None => Error::new(error.kind(), error.to_string()),
        };
        Err(Failure::Caused { text, source: Box::new(source) })
    }
}

/// The handle of the writer. It ends the thread when it is dropped.
pub(super) struct Writer(Arc<SharedQueue>);

impl Writer {
    /// Starts the thread. `stored` is the state that the file has.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub(super) fn start(file: StateFile, stored: Option<Arc<Remembered>>) -> Result<Writer, Failure> {
        let status = FileStatus { stored, ..FileStatus::default() };
        let queue = Mutex::new(Queue { status: status.clone(), ..Queue::default() });
        let path = file.path.clone();
        let shared = Arc::new(SharedQueue { path, queue, changed: Condvar::new(), hub: OnceLock::new() });
        let mut thread = WriterThread { file, shared: shared.clone(), status };
        std::thread::Builder::new()
            .name("state-writer".into())
            .spawn(move || {
                thread.work();
                let shared = thread.shared.clone();
                // The locks of the directory end before the owner of the writer goes on.
                drop(thread);
                shared.lock().ended = true;
                shared.changed.notify_all();
            })
            .map_err(|e| Failure::because("the state cannot be stored: a thread cannot be started", e))?;
        Ok(Writer(shared))
    }

    /// Sends events about the file to this hub.
    pub(super) fn report_to(&self, hub: Arc<Hub>) {
        let _is_first = self.0.hub.set(hub);
    }

    /// Asks for a write of this state. It takes the place of an earlier one that is not being stored yet.
    pub(super) fn ask(&self, newest: Arc<Remembered>, kind: WriteKind) -> Storing {
        let queue = &mut *self.0.lock();
        let kind = queue.next.take().map_or(kind, |earlier| earlier.kind.max(kind));
        queue.next = Some(Write { newest, kind });
        queue.asked += 1;
        self.0.changed.notify_all();
        Storing { shared: self.0.clone(), number: queue.asked }
    }

    /// The last write that was asked for.
    pub(super) fn last(&self) -> Storing {
        Storing { shared: self.0.clone(), number: self.0.lock().asked }
    }

    /// What is known of the file now. A write that is late is an error.
    pub(super) fn status(&self) -> FileStatus {
        let queue = self.0.lock();
        let mut status = queue.status.clone();
        if queue.late() {
            status.not_stored = Some(self.0.late_write());
            status.last_error = Some(ErrorKind::TimedOut);
        }
        status
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.0.lock().closed = true;
        self.0.changed.notify_all();
        // A thread that waits for its file system ends with the process.
        self.0.wait_while(|queue| !queue.ended);
    }
}

/// The thread of the writer.
struct WriterThread {
    file: StateFile,
    shared: Arc<SharedQueue>,
    status: FileStatus,
}

impl WriterThread {
    fn work(&mut self) {
        while let Some((write, number)) = self.next() {
            self.carry_out(&write);
            let queue = &mut *self.shared.lock();
            (queue.status, queue.done, queue.busy_since) = (self.status.clone(), number, None);
            self.shared.changed.notify_all();
        }
    }

    /// Waits for a write; `None` after the last one.
    fn next(&self) -> Option<(Write, u64)> {
        let mut queue = self.shared.lock();
        loop {
            if let Some(write) = queue.next.take() {
                queue.busy_since = Some(Instant::now());
                self.shared.changed.notify_all();
                return Some((write, queue.asked));
            }
            if queue.closed {
                return None;
            }
            queue = self.shared.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn carry_out(&mut self, write: &Write) {
        if self.status.not_stored.is_some() || self.status.stored.as_ref() != Some(&write.newest) {
            self.store(&write.newest);
        }
        // The file system has answered, so the test has a time limit of its own.
        self.shared.lock().busy_since = Some(Instant::now());
        match write.kind {
            WriteKind::Store => {}
            WriteKind::Check => self.check_room(&write.newest),
            WriteKind::Test => self.test(&write.newest),
        }
    }

    fn write(&mut self, newest: &Arc<Remembered>, more: usize) -> std::io::Result<()> {
        let mut text = serde_json::to_vec_pretty(&**newest)?;
        // Blanks at the end change no JSON.
        text.resize(text.len() + more, b' ');
        let written = self.file.replace(&text);
        match &written {
            Ok(()) => self.status.stored = Some(newest.clone()),
            Err(e) => self.status.last_error = Some(e.kind()),
        }
        written
    }

    /// Writes the state. A failure is reported once until a write succeeds.
    fn store(&mut self, newest: &Arc<Remembered>) {
        let written = self.write(newest, 0);
        let was_late = std::mem::take(&mut self.shared.lock().late_is_said);
        let failed_before = self.status.not_stored.is_some();
        let path = self.file.path.display();
        self.status.not_stored = written.err().map(|e| format!("{path}: cannot be written: {e}"));
        match &self.status.not_stored {
            None if failed_before || was_late => {
                self.shared.report("", &format!("{path}: is written again, and has all changes"));
            }
            Some(why) if !failed_before => self.shared.report(
                "error",
                &format!("{why}; the daemon tries again, and its next start may not know the last changes"),
            ),
            _ => {}
        }
    }

    /// Writes the state, and room for more.
    fn test(&mut self, newest: &Arc<Remembered>) {
        let tried = self.write(newest, GROWTH);
        let path = self.file.path.display();
        let why = tried.as_ref().err().map(|e| format!("{path}: cannot be written: {e}"));
        let was_refusing = std::mem::replace(&mut self.status.refusing, why.clone()).is_some();
        match why {
            Some(why) if !was_refusing && self.status.not_stored.is_none() => {
                self.shared.report("error", &format!("{why}; commands that change something are refused"));
            }
            None if was_refusing => self.shared.report("", &format!("{path}: can be written again")),
            _ => {}
        }
        self.status.refused_by = tried.err().map(Arc::new);
    }

    /// Asks the file system whether a write would fail, and tests it if the answer has changed.
    fn check_room(&mut self, newest: &Arc<Remembered>) {
        if self.status.not_stored.is_some() {
            return;
        }
        let seems_full = room::refusal(&self.file.path, GROWTH as u64).is_some();
        let changed = std::mem::replace(&mut self.status.seems_full, seems_full) != seems_full;
        if changed || (self.status.refusing.is_some() && !seems_full) {
            self.test(newest);
        }
    }
}
