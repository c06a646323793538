//! Signals that stop the process or make it hand over, for tasks to wait for.
//!
//! Owns the handlers of SIGINT, SIGTERM and SIGUSR2, which only write the signal's number to a pipe, and one thread that reads
//! the pipe and wakes every [`Signals`] in the process, on any driver. Both are installed on first use and never removed. Must
//! not know what a caller does on a signal.

use std::future::{Future, poll_fn};
use std::io;
use std::io::Read;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Poll, Waker};

use rustix::pipe::{PipeFlags, pipe_with};

/// A request to stop or to hand over.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Signal {
    /// SIGINT, from the keyboard.
    Interrupt,
    /// SIGTERM, from the service manager.
    Terminate,
    /// SIGUSR2, from the next process, which takes over the devices of this one.
    HandOver,
}

#[derive(Default)]
struct SignalState {
    /// Every signal since the handlers were installed. There are few, so the list stays short.
    received: Vec<Signal>,
    waiting: Vec<Waker>,
}

struct Hub {
    state: Mutex<SignalState>,
    /// Keeps the descriptor open that the handlers write to.
    _write_end: OwnedFd,
}

static HUB: OnceLock<Result<Arc<Hub>, i32>> = OnceLock::new();
static WRITE_FD: AtomicI32 = AtomicI32::new(-1);

fn lock(hub: &Hub) -> MutexGuard<'_, SignalState> {
    // No code that can panic runs under the lock, so the data of a poisoned lock is consistent.
    hub.state.lock().unwrap_or_else(PoisonError::into_inner)
}

extern "C" fn handler(number: libc::c_int) {
    let byte = number as u8;
    // SAFETY: each thread has its own errno. A signal handler may call write(2), which reads one byte of a live variable here.
    // The descriptor stays open until the process ends.
    unsafe {
        let errno = libc::__errno_location();
        let saved = *errno;
        libc::write(WRITE_FD.load(Ordering::Relaxed), (&raw const byte).cast(), 1);
        *errno = saved;
    }
}

fn install() -> io::Result<Arc<Hub>> {
    let (read_end, write_end) = pipe_with(PipeFlags::CLOEXEC)?;
    // A full pipe must not block a handler. The signals in a full pipe suffice.
    rustix::io::ioctl_fionbio(&write_end, true)?;
    WRITE_FD.store(write_end.as_raw_fd(), Ordering::Relaxed);
    let hub = Arc::new(Hub { state: Mutex::default(), _write_end: write_end });
    let theirs = hub.clone();
    std::thread::Builder::new().name("ubcache-signal".into()).spawn(move || {
        let mut pipe = std::fs::File::from(read_end);
        let mut byte = [0u8; 1];
        // The write end is never closed, so the thread ends with the process.
        while pipe.read_exact(&mut byte).is_ok() {
            let signal = match i32::from(byte[0]) {
                libc::SIGINT => Signal::Interrupt,
                libc::SIGUSR2 => Signal::HandOver,
                _ => Signal::Terminate,
            };
            let mut state = lock(&theirs);
            state.received.push(signal);
            let waiting = std::mem::take(&mut state.waiting);
            drop(state);
            waiting.into_iter().for_each(Waker::wake);
        }
    })?;
    for number in [libc::SIGINT, libc::SIGTERM, libc::SIGUSR2] {
        // SAFETY: all zeros is a valid value of this C struct, which lives during the call. The handler only calls what signal
        // handlers may call.
        let result = unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handler as extern "C" fn(libc::c_int) as usize;
            action.sa_flags = libc::SA_RESTART;
            libc::sigaction(number, &raw const action, std::ptr::null_mut())
        };
        if result != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(hub)
}

/// Receives the signals that arrive after this value was made.
pub struct Signals {
    hub: Arc<Hub>,
    taken: usize,
}

impl Signals {
    /// Begins to receive signals. SIGINT, SIGTERM and SIGUSR2 no longer end the process.
    ///
    /// # Errors
    /// If the system refuses a pipe or a thread.
    pub fn new() -> io::Result<Signals> {
        let hub = HUB
            .get_or_init(|| install().map_err(|e| e.raw_os_error().unwrap_or(libc::EIO)))
            .clone()
            .map_err(io::Error::from_raw_os_error)?;
        let taken = lock(&hub).received.len();
        Ok(Signals { hub, taken })
    }

    /// The next signal.
    pub async fn next(&mut self) -> Signal {
        poll_fn(|cx| {
            let mut state = lock(&self.hub);
            if let Some(signal) = state.received.get(self.taken).copied() {
                self.taken += 1;
                return Poll::Ready(signal);
            }
            if !state.waiting.iter().any(|w| w.will_wake(cx.waker())) {
                state.waiting.push(cx.waker().clone());
            }
            Poll::Pending
        })
        .await
    }
}

/// Waits for the first SIGINT or SIGTERM after this call.
///
/// For a second signal, which often means "at once", use [`Signals`].
///
/// # Errors
/// If the handlers cannot be installed.
pub fn shutdown_signal() -> io::Result<impl Future<Output = Signal>> {
    let mut signals = Signals::new()?;
    Ok(async move { signals.next().await })
}
