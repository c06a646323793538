//! Signals; a process of its own, because handlers are the process's.
#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod common;

use blockio::{Signal, Signals, shutdown_signal};
use common::drivers;

fn raise(number: i32) {
    // SAFETY: raise(3) sends a signal to this thread; the handlers under test are installed.
    assert_eq!(unsafe { libc::raise(number) }, 0);
}

#[test]
fn signals_reach_every_waiting_task_once_and_in_order() {
    for driver in drivers() {
        let mut first = Signals::new().unwrap();
        let shutdown = shutdown_signal().unwrap();
        raise(libc::SIGTERM);
        assert_eq!(driver.block_on(first.next()), Signal::Terminate);
        let later = Signals::new().unwrap();
        let rt = driver.handle();
        let waiting = [later, first].map(|mut s| rt.spawn(async move { s.next().await }));
        driver.block_on(rt.yield_now());
        raise(libc::SIGINT);
        for w in waiting {
            assert_eq!(driver.block_on(w), Signal::Interrupt);
        }
        assert_eq!(driver.block_on(shutdown), Signal::Terminate, "the first since it was asked for");
    }
}
