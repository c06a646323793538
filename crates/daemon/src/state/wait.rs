//! A note about a state directory that does not answer at the start of the daemon.
//!
//! Owns a thread that prints the note while the start reads the directory. A system call that waits for a file system cannot be
//! interrupted, so the start continues only when the directory answers. Must not know what is read.

use std::path::Path;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use serve::message;

/// Time after which the start says that it waits.
const LATE_AFTER: Duration = Duration::from_secs(5);

/// Runs `work`, which reads the state directory, and says so if it has not ended in time.
pub(crate) fn say_if_late<T>(dir: &Path, work: impl FnOnce() -> T) -> T {
    let say = || {
        message::warn(format!(
            "{}: the state directory has not answered for {} s; the daemon serves nothing until it does",
            dir.display(),
            LATE_AFTER.as_secs()
        ));
    };
    run(LATE_AFTER, say, work)
}

/// Runs `work`, and `late` beside it if it has not ended after this time.
fn run<T>(limit: Duration, late: impl FnOnce() + Send, work: impl FnOnce() -> T) -> T {
    let (running, ended) = channel::<()>();
    std::thread::scope(|threads| {
        threads.spawn(move || {
            if ended.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
                late();
            }
        });
        let result = work();
        drop(running);
        result
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn late_work_is_reported_while_it_runs() {
        let (said, heard) = channel();
        let late = move || said.send(()).unwrap();
        let wait = || heard.recv_timeout(Duration::from_secs(60));
        assert_eq!(run(Duration::ZERO, late, wait), Ok(()));
    }

    #[test]
    fn work_that_ends_in_time_is_not_reported() {
        let late = || panic!("it has ended");
        assert_eq!(run(Duration::from_secs(3600), late, || 7), 7);
    }
}
