//! A thread that writes messages, so that a blocked stderr delays no request.
//!
//! The target of messages may depend on a volume of this process: a log in a file system on the volume, a pipe to a process
//! that is swapped out to the volume. Owns the thread, and the lines that wait for it. A caller waits at most
//! [`LONGEST_WAIT`] until its line is written. After that the thread writes the line later, and no caller waits until the
//! thread has written one more line. Lines for which there is no room are dropped, and their number is written. Must not
//! know the contents of lines.

use std::io::Write;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;
use std::{io, thread};

/// Capacity of the queue of lines.
const LINES: usize = 256;

/// Longest time that a caller waits for its line.
const LONGEST_WAIT: Duration = Duration::from_secs(1);

/// Stack of the thread, which has few nested calls.
const STACK_BYTES: usize = 256 << 10;

struct Line {
    number: u64,
    text: String,
}

#[derive(Default)]
struct Progress {
    /// The number of the last line that was written or whose write failed.
    written: Mutex<u64>,
    changed: Condvar,
    /// Whether a caller has waited for [`LONGEST_WAIT`] and no line was written since.
    stalled: AtomicBool,
    lost: AtomicU64,
}

/// Passes lines to the thread that writes them.
pub(crate) struct LogWriter {
    /// The number of the last line, and the queue of the thread.
    lines: Mutex<(u64, SyncSender<Line>)>,
    progress: Arc<Progress>,
}

impl LogWriter {
    /// Starts the thread that writes.
    pub(crate) fn start(output: impl Write + Send + 'static) -> io::Result<LogWriter> {
        let (sender, receiver) = sync_channel(LINES);
        let progress = Arc::<Progress>::default();
        let theirs = progress.clone();
        let builder = thread::Builder::new().name("ubcache-log".into()).stack_size(STACK_BYTES);
        builder.spawn(move || write_lines(&receiver, output, &theirs))?;
        Ok(LogWriter { lines: Mutex::new((0, sender)), progress })
    }

    /// Writes a line on the thread, and waits at most [`LONGEST_WAIT`] until it is written.
    pub(crate) fn write(&self, text: String) {
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        lines.0 += 1;
        let number = lines.0;
        let sent = lines.1.try_send(Line { number, text });
        drop(lines);
        if sent.is_err() {
            self.progress.lost.fetch_add(1, Ordering::AcqRel);
        } else if !self.progress.stalled.load(Ordering::Acquire) {
            self.wait_for(number);
        }
    }

    fn wait_for(&self, number: u64) {
        let written = self.progress.written.lock().unwrap_or_else(PoisonError::into_inner);
        let waited =
            self.progress.changed.wait_timeout_while(written, LONGEST_WAIT, |written| *written < number);
        let (written, result) = waited.unwrap_or_else(PoisonError::into_inner);
        if result.timed_out() && *written < number {
            // The flag is set under the lock. The thread clears it when it has written its next line.
            self.progress.stalled.store(true, Ordering::Release);
        }
    }
}

fn write_lines(lines: &Receiver<Line>, mut output: impl Write, progress: &Progress) {
    while let Ok(line) = lines.recv() {
        // The error of a write to stderr cannot be reported.
        let _ = output.write_all(line.text.as_bytes());
        let lost = progress.lost.swap(0, Ordering::AcqRel);
        if lost > 0 {
            let _ = writeln!(
                output,
                "ubcache: dropped because standard error did not take them in time: {}",
                format::counted(lost, "message")
            );
        }
        let mut written = progress.written.lock().unwrap_or_else(PoisonError::into_inner);
        *written = line.number;
        progress.stalled.store(false, Ordering::Release);
        drop(written);
        progress.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    /// An output whose writes block while the lock is held.
    #[derive(Clone, Default)]
    struct Place(Arc<Mutex<Vec<u8>>>);

    impl Write for Place {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_line_is_written_when_the_call_returns() {
        let place = Place::default();
        let writer = LogWriter::start(place.clone()).unwrap();
        for line in ["one\n", "two\n"] {
            writer.write(line.into());
        }
        assert_eq!(*place.0.lock().unwrap(), b"one\ntwo\n");
    }

    #[test]
    fn a_place_that_takes_nothing_holds_up_one_line_for_a_moment() {
        let place = Place::default();
        let writer = LogWriter::start(place.clone()).unwrap();
        let held = place.0.lock().unwrap();
        let began = Instant::now();
        for n in 0..LINES + 10 {
            writer.write(format!("{n}\n"));
        }
        // With a wait for each line, the calls would take more than this.
        assert!(began.elapsed() < 20 * LONGEST_WAIT, "{:?}", began.elapsed());
        drop(held);
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let text = String::from_utf8(place.0.lock().unwrap().clone()).unwrap();
            if text.contains("dropped because standard error did not take them in time")
                && text.contains(&format!("\n{}\n", LINES - 1))
            {
                assert!(text.starts_with("0\n"), "{text}");
                break;
            }
            assert!(Instant::now() < deadline, "{text}");
            thread::yield_now();
        }
    }
}
