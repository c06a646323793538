//! The fallback without io_uring: sockets by poll(2), everything else on helper threads.
//!
//! Owns the socket commands that wait for their peer, and the driver's sleep in poll(2). A socket command is tried once when it
//! arrives and again each time its socket is ready. The reactor's slots own the memory and the descriptors that commands name
//! (module `cmd`). Must not know operations.

use ::io::Nanos;

use crate::cmd::Cmd;
use crate::wake::Wake;

#[derive(Default)]
pub(crate) struct Polled {
    waiting: Vec<(u64, Cmd)>,
    done: Vec<(u64, i32)>,
    /// The list for poll(2). It is kept between two waits, like `places`, for its storage.
    fds: Vec<libc::pollfd>,
    /// For each waiting command, the index of its socket in `fds`.
    places: Vec<usize>,
}

impl Polled {
    /// Tries a socket command, or keeps it until its socket is ready.
    pub(crate) fn push_socket(&mut self, user_data: u64, cmd: Cmd) {
        match cmd.call() {
            e if e == -libc::EAGAIN => self.waiting.push((user_data, cmd)),
            result => self.done.push((user_data, result)),
        }
    }

    /// Cancels a socket command that still waits.
    pub(crate) fn cancel(&mut self, user_data: u64) {
        if let Some(at) = self.waiting.iter().position(|(u, _)| *u == user_data) {
            self.waiting.swap_remove(at);
            self.done.push((user_data, -libc::ECANCELED));
        }
    }

    /// Whether results wait to be taken.
    pub(crate) fn has_done(&self) -> bool {
        !self.done.is_empty()
    }

    /// Moves results to `out`.
    pub(crate) fn take_done(&mut self, out: &mut Vec<(u64, i32)>) {
        out.append(&mut self.done);
    }

    /// Fills `fds` and `places`. With `shared`, all commands of a socket use one entry of `fds`.
    fn list(&mut self, wake: &Wake, shared: bool) {
        self.fds.clear();
        self.places.clear();
        self.fds.push(libc::pollfd { fd: wake.raw_fd(), events: libc::POLLIN, revents: 0 });
        for (_, cmd) in &self.waiting {
            let (fd, events) = cmd.readiness();
            let known = if shared { self.fds.iter().position(|p| p.fd == fd) } else { None };
            match known.and_then(|at| self.fds.get_mut(at)) {
                Some(place) => place.events |= events,
                None => self.fds.push(libc::pollfd { fd, events, revents: 0 }),
            }
            self.places.push(known.unwrap_or(self.fds.len() - 1));
        }
    }

    fn poll(&mut self, timeout: Option<Nanos>) -> i32 {
        let spec = timeout.map(|t| libc::timespec {
            tv_sec: i64::try_from(t.0 / 1_000_000_000).unwrap_or(i64::MAX),
            tv_nsec: (t.0 % 1_000_000_000) as i64,
        });
        let spec_ptr = spec.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        // SAFETY: `fds` is a live array of the given length. `spec_ptr` is null or points to `spec`, which lives during the call.
        // A null signal mask is allowed.
        let ready = unsafe {
            libc::ppoll(self.fds.as_mut_ptr(), self.fds.len() as libc::nfds_t, spec_ptr, std::ptr::null())
        };
        if ready < 0 { -std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO) } else { ready }
    }

    /// Waits until a socket is ready, a wake-up comes or `timeout` is over; then tries the commands of ready sockets.
    pub(crate) fn wait(&mut self, wake: &Wake, timeout: Option<Nanos>) {
        self.list(wake, false);
        let mut ready = self.poll(timeout);
        if ready == -libc::EINVAL {
            // poll(2) allows as many entries as the process may have descriptors. A socket with a receive and a send has two
            // entries, so the commands of a socket now share one.
            self.list(wake, true);
            ready = self.poll(timeout);
        }
        if ready <= 0 {
            // The timeout or a signal ended the wait. The driver checks for work and waits again.
            return;
        }
        if self.fds[0].revents != 0 {
            let mut count = [0u8; 8];
            // This fails only if the counter is zero already, which is the wanted state.
            let _ = rustix::io::read(wake.fd(), &mut count);
        }
        // From the back, so that a removal does not move the entries that are not checked yet.
        for at in (0..self.waiting.len()).rev() {
            if self.fds[self.places[at]].revents == 0 {
                continue;
            }
            let (user_data, cmd) = self.waiting[at];
            let result = cmd.call();
            if result != -libc::EAGAIN {
                self.waiting.swap_remove(at);
                self.done.push((user_data, result));
            }
        }
    }
}
