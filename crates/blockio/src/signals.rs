//! Signals that stop the process or make it hand over, for tasks to wait for.
//!
//! Owns the handlers of SIGINT, SIGTERM and SIGUSR2, which only write the signal's number to a pipe, and one
//! thread that reads the pipe and wakes every [`Signals`] in the process, on whatever driver it is.
//! Installed on first use and never removed. What to do with a signal, and with a second one, is the
//! caller's decision.

use std::future::{Future, poll_fn};
use std::io;
use std::io::Read;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Poll, Waker};

use rustix::pipe::{PipeFlags, pipe_with};

/// A request to stop.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Signal {
    /// SIGINT: the keyboard.
    Interrupt,
    /// SIGTERM: the service manager.
    Terminate,
    /// SIGUSR2: the next process, which takes over the devices of this one.
    HandOver,
}

#[derive(Default)]
struct State {
    /// Every signal since the handlers were installed. They are few.
    received: Vec<Signal>,
    waiting: Vec<Waker>,
}

struct Hub {
    state: Mutex<State>,
    /// Keeps the descriptor open that the handlers write to.
    _write_end: OwnedFd,
}

static HUB: OnceLock<Result<Arc<Hub>, i32>> = OnceLock::new();
static WRITE_FD: AtomicI32 = AtomicI32::new(-1);

fn lock(hub: &Hub) -> MutexGuard<'_, State> {
    // Nothing that can panic runs under the lock.
    hub.state.lock().unwrap_or_else(PoisonError::into_inner)
}

extern "C" fn handler(number: libc::c_int) {
    let byte = number as u8;
    // SAFETY: errno is this thread's own; write(2) may be called in a signal handler and reads one byte
    // of a live variable. The descriptor is open for as long as the process lives.
    unsafe {
        let errno = libc::__errno_location();
        let saved = *errno;
        libc::write(WRITE_FD.load(Ordering::Relaxed), (&raw const byte).cast(), 1);
        *errno = saved;
    }
}

fn install() -> io::Result<Arc<Hub>> {
    let (read_end, write_end) = pipe_with(PipeFlags::CLOEXEC)?;
    // A full pipe must not hang a handler: the signals in it are enough.
    rustix::io::ioctl_fionbio(&write_end, true)?;
    WRITE_FD.store(write_end.as_raw_fd(), Ordering::Relaxed);
    let hub = Arc::new(Hub { state: Mutex::default(), _write_end: write_end });
    let theirs = hub.clone();
    std::thread::Builder::new().name("ubcache-signal".into()).spawn(move || {
        let mut pipe = std::fs::File::from(read_end);
        let mut byte = [0u8; 1];
        // The write end is never closed, so this ends with the process.
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
        // SAFETY: all zeros is a value of this C struct; the handler does only what signal handlers may,
        // and the struct lives during the call.
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

/// The signals that came since this value was made.
pub struct Signals {
    hub: Arc<Hub>,
    taken: usize,
}

impl Signals {
    /// Begins to listen; from now on SIGINT, SIGTERM and SIGUSR2 do not end the process by themselves.
    ///
    /// # Errors
    /// If no pipe or thread can be had.
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

/// The first SIGINT or SIGTERM from this call on. For a second one, which often means "at once", use
/// [`Signals`].
///
/// # Errors
/// If the handlers cannot be installed.
pub fn shutdown_signal() -> io::Result<impl Future<Output = Signal>> {
    let mut signals = Signals::new()?;
    Ok(async move { signals.next().await })
}
