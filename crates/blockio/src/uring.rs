//! The ring: submission, completion and the driver's sleep on io_uring.
//!
//! Owns the ring, the entries that did not fit into its submission queue, the permanent read of the wake-up descriptor, and the
//! alarm. The alarm is one timeout that stays armed over many waits: with a timeout for each wait, the kernel would program its
//! clock twice for every request. `user_data` belongs to the reactor, which passes it in and gets it back; the values from
//! [`PRIVATE`] on belong to this module. Invariant: every entry yields exactly one completion. The memory of the entries may be
//! freed only after [`Uring::quiesce`], which waits until no completion is outstanding.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsRawFd;

use io_uring::types::Timespec;
use io_uring::{EnterFlags, IoUring, Probe, opcode, squeue, types};

use ::io::Nanos;

use crate::cmd::Cmd;
use crate::gather::MAX_PIECES;
use crate::transfers::Transfers;
use crate::wake::Wake;

/// `user_data` from here on never names an operation of the reactor.
pub(crate) const PRIVATE: u64 = 0xffff_ffff_0000_0000;
const WAKE_READ: u64 = PRIVATE;
const CANCEL: u64 = PRIVATE + 1;
const ALARM: u64 = PRIVATE + 2;
const ALARM_MOVED: u64 = PRIVATE + 3;

pub(crate) struct Uring {
    ring: IoUring,
    /// Entries in order of arrival that wait for room in the submission queue.
    overflow: VecDeque<squeue::Entry>,
    /// Limits the number of reads and writes of each device that the kernel has at a time.
    transfers: Transfers,
    /// Entries of which the completion has not been reaped, those in `overflow` included.
    outstanding: usize,
    wake_armed: bool,
    /// Destination of the permanent read. Boxed, because its address must not change when this struct moves.
    wake_count: Box<u64>,
    /// Time of the alarm, by the driver's clock. The alarm may end a wait early, for a deadline that was dropped.
    alarm: Option<Nanos>,
    /// The alarm's time, which the kernel copies. Boxed, because its address must not change when this struct moves.
    alarm_spec: Box<Timespec>,
    /// Set-up flags that the kernel granted, for the log.
    pub(crate) granted: &'static str,
    /// Whether the ring can send commands to devices.
    pub(crate) takes_commands: bool,
    /// Number of pieces of memory that can be registered.
    pub(crate) numbers: u16,
}

/// Maximum number of pieces of memory that are registered with a ring.
const NUMBERS: u16 = 1024;

/// Why there is no ring.
#[derive(Debug, thiserror::Error)]
#[error("io_uring cannot be used: {reason}")]
pub(crate) struct Refusal {
    #[source]
    pub(crate) error: io::Error,
    pub(crate) reason: String,
}

impl Uring {
    pub(crate) fn new(entries: u32) -> Result<Uring, Refusal> {
        let (mut ring, granted) =
            set_up(entries).map_err(|error| Refusal { reason: explain(&error), error })?;
        let too_old = |what: &str| Refusal {
            error: io::Error::from_raw_os_error(libc::ENOSYS),
            reason: format!("this kernel's io_uring has no {what} (Linux 5.11 or later is needed)"),
        };
        if !ring.params().is_feature_ext_arg() || !ring.params().is_feature_nodrop() {
            return Err(too_old("timed wait"));
        }
        let mut probe = Probe::new();
        ring.submitter()
            .register_probe(&mut probe)
            .map_err(|error| Refusal { reason: explain(&error), error })?;
        let needed = [
            (opcode::Read::CODE, "read"),
            (opcode::Write::CODE, "write"),
            (opcode::Fsync::CODE, "fsync"),
            (opcode::Fallocate::CODE, "fallocate"),
            (opcode::Accept::CODE, "accept"),
            (opcode::Recv::CODE, "recv"),
            (opcode::SendMsg::CODE, "sendmsg"),
            (opcode::AsyncCancel::CODE, "cancel"),
            (opcode::Timeout::CODE, "timeout"),
        ];
        if let Some((_, name)) = needed.iter().find(|(code, _)| !probe.is_supported(*code)) {
            return Err(too_old(name));
        }
        let takes_commands = probe.is_supported(opcode::UringCmd16::CODE);
        warm_up(&mut ring);
        // Needs Linux 5.19. Without it, the kernel looks up the pages of every request.
        let numbers = ring.submitter().register_buffers_sparse(NUMBERS.into()).map_or(0, |()| NUMBERS);
        Ok(Uring {
            ring,
            overflow: VecDeque::new(),
            transfers: Transfers::default(),
            outstanding: 0,
            wake_armed: false,
            wake_count: Box::new(0),
            alarm: None,
            alarm_spec: Box::new(Timespec::new()),
            granted,
            takes_commands,
            numbers,
        })
    }

    /// Registers `memory` with the kernel under `number`, which must be free; false if the kernel refuses.
    ///
    /// Module `registered` ensures that the number is used for this memory alone, and that the number is unregistered when the
    /// memory is freed.
    pub(crate) fn register(&mut self, number: u16, memory: &mut [u8]) -> bool {
        let iovec = libc::iovec { iov_base: memory.as_mut_ptr().cast(), iov_len: memory.len() };
        // SAFETY: the kernel pins the pages of `memory`, which is live. It uses them only for entries with this number, and such
        // entries are made only from buffers that own exactly this memory.
        unsafe { self.ring.submitter().register_buffers_update(number.into(), &[iovec], None) }.is_ok()
    }

    /// Ends the registration of `number`: the kernel unpins its memory.
    pub(crate) fn unregister(&mut self, number: u16) {
        let none = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        // SAFETY: the call passes no memory to the kernel. The kernel keeps the pages of entries under way until they end.
        let result = unsafe { self.ring.submitter().register_buffers_update(number.into(), &[none], None) };
        assert!(result.is_ok(), "io_uring keeps memory number {number}: {result:?}");
    }

    /// Queues a command under `user_data`; false if io_uring has no such operation.
    pub(crate) fn push_cmd(&mut self, user_data: u64, cmd: Cmd) -> bool {
        let Some(entry) = cmd.entry() else { return false };
        let entry = entry.user_data(user_data);
        if !cmd.is_transfer() {
            self.push(entry);
        } else if let Some(entry) = self.transfers.begin(cmd.fd(), user_data, entry) {
            self.push(entry);
        }
        true
    }

    /// Asks the kernel to cancel the command of `user_data`. The command completes in any case.
    pub(crate) fn cancel(&mut self, user_data: u64) {
        self.push(opcode::AsyncCancel::new(user_data).build().user_data(CANCEL));
    }

    fn push(&mut self, entry: squeue::Entry) {
        self.outstanding += 1;
        if !self.overflow.is_empty() {
            self.overflow.push_back(entry);
            return;
        }
        // SAFETY: the operation in the reactor's slot owns the memory and the file that the entry names (module `cmd`).
        // `wake_count` and `alarm_spec` own the memory of the permanent read and of the alarm. All of these are valid until the
        // completion is reaped.
        if unsafe { self.ring.submission().push(&entry) }.is_err() {
            self.overflow.push_back(entry);
        }
    }

    fn arm_wake(&mut self, wake: &Wake) {
        if !self.wake_armed {
            self.wake_armed = true;
            let ptr: *mut u64 = &raw mut *self.wake_count;
            let read = opcode::Read::new(types::Fd(wake.raw_fd()), ptr.cast(), 8).build();
            self.push(read.user_data(WAKE_READ));
        }
    }

    /// Arms the alarm so that it ends a wait at `deadline` at the latest.
    fn arm_alarm(&mut self, deadline: Nanos, now: Nanos) {
        if self.alarm.is_some_and(|at| at <= deadline) {
            return;
        }
        let left = deadline.since(now);
        // The kernel copies the time when the entry is submitted, and that happens before the next call of this function.
        *self.alarm_spec = Timespec::new().sec(left.0 / 1_000_000_000).nsec((left.0 % 1_000_000_000) as u32);
        let spec: *const Timespec = &raw const *self.alarm_spec;
        if self.alarm.replace(deadline).is_none() {
            self.push(opcode::Timeout::new(spec).build().user_data(ALARM));
        } else {
            // If the alarm expires before the update, its completion ends the wait.
            self.push(opcode::TimeoutUpdate::new(ALARM, spec).build().user_data(ALARM_MOVED));
        }
    }

    /// Whether entries wait to be submitted, or the kernel has completions ready that need a call.
    pub(crate) fn wants_call(&mut self) -> bool {
        let sq = self.ring.submission();
        !sq.is_empty() || sq.taskrun() || sq.cq_overflow() || !self.overflow.is_empty()
    }

    /// Submits all queued entries without waiting, and collects the completions that are ready.
    ///
    /// A request that the device answers at once is among them.
    pub(crate) fn submit(&mut self) {
        loop {
            let before = self.ring.submission().len();
            let result = self.enter(before);
            let stuck = match check(result) {
                Outcome::Progress => self.ring.submission().len() >= before && before > 0,
                Outcome::Busy => true,
            };
            self.refill();
            // If the queues are empty, the work is done. Without progress, completions have to be reaped first.
            if stuck || self.overflow.is_empty() && self.ring.submission().is_empty() {
                return;
            }
        }
    }

    /// Submits the first `entries` of the queue and runs deferred work of the kernel, in one call.
    ///
    /// The crate's own `submit` runs deferred work only when it waits. Requests that a device answers during the submission
    /// would then need a second call.
    fn enter(&self, entries: usize) -> io::Result<usize> {
        let flags = EnterFlags::GETEVENTS.bits();
        let entries = u32::try_from(entries).expect("a queue has fewer than 2^32 entries");
        // SAFETY: the call passes no memory; `push` states who owns what the entries name.
        unsafe { self.ring.submitter().enter::<libc::sigset_t>(entries, 0, flags, None) }
    }

    fn refill(&mut self) {
        let mut sq = self.ring.submission();
        while let Some(entry) = self.overflow.front() {
            // SAFETY: the operation that owns what the entry names stays in its slot until the completion (see `push`).
            if unsafe { sq.push(entry) }.is_err() {
                return;
            }
            self.overflow.pop_front();
        }
    }

    /// Ensures that a wake-up and the deadline each cause a completion.
    pub(crate) fn arm(&mut self, wake: &Wake, deadline: Option<Nanos>, now: Nanos) {
        self.arm_wake(wake);
        if let Some(deadline) = deadline {
            self.arm_alarm(deadline, now);
        }
    }

    /// Whether completions wait to be reaped.
    pub(crate) fn has_completions(&mut self) -> bool {
        !self.ring.completion().is_empty()
    }

    /// Submits all queued entries and waits for a completion. Call [`Self::arm`] first.
    pub(crate) fn wait(&mut self) {
        if !self.overflow.is_empty() {
            self.submit();
        }
        let want = usize::from(self.ring.completion().is_empty());
        check(self.ring.submit_and_wait(want));
    }

    /// Moves completions to `out` as (`user_data`, result).
    pub(crate) fn reap(&mut self, out: &mut Vec<(u64, i32)>) {
        for cqe in self.ring.completion() {
            self.outstanding -= 1;
            match cqe.user_data() {
                WAKE_READ => self.wake_armed = false,
                ALARM => self.alarm = None,
                CANCEL | ALARM_MOVED => {}
                user_data => {
                    self.transfers.ended(user_data);
                    out.push((user_data, cqe.result()));
                }
            }
        }
        while let Some(entry) = self.transfers.next() {
            self.push(entry);
        }
    }

    /// Waits until the kernel has ended every entry, and appends the reaped completions to `out`.
    ///
    /// The caller must have cancelled every operation that waits for a peer.
    pub(crate) fn quiesce(&mut self, out: &mut Vec<(u64, i32)>) {
        if self.wake_armed {
            self.cancel(WAKE_READ);
        }
        if self.alarm.is_some() {
            self.cancel(ALARM);
        }
        while self.outstanding > 0 {
            self.submit();
            if self.ring.completion().is_empty() {
                check(self.ring.submit_and_wait(1));
            }
            self.reap(out);
        }
    }
}

enum Outcome {
    Progress,
    /// The kernel takes no entry before completions are reaped or memory is free.
    Busy,
}

fn check(result: io::Result<usize>) -> Outcome {
    match result {
        Ok(_) => Outcome::Progress,
        Err(e) => match e.raw_os_error() {
            Some(libc::EINTR | libc::ETIME) => Outcome::Progress,
            Some(libc::EBUSY | libc::EAGAIN) => Outcome::Busy,
            // This module made the ring and its arguments, so any other error is a bug from which it cannot recover.
            _ => panic!("io_uring_enter failed: {e}"),
        },
    }
}

/// Makes the kernel allocate memory for a full submission queue of writes with [`MAX_PIECES`] pieces each.
///
/// The kernel keeps this memory until the ring is closed. If the kernel allocated it while memory is short, a device with
/// swap on it would wait for the memory, and the memory for the device.
///
/// The requests are linked reads of zero bytes: none begins before all are submitted. A failure is ignored, because requests
/// also work without this memory.
fn warm_up(ring: &mut IoUring) {
    let Ok(null) = std::fs::File::open("/dev/null") else { return };
    let nothing = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; MAX_PIECES];
    let read =
        || opcode::Readv::new(types::Fd(null.as_raw_fd()), nothing.as_ptr(), nothing.len() as u32).build();
    let room = ring.submission().capacity();
    for n in 1..=room {
        let entry = if n < room { read().flags(squeue::Flags::IO_LINK) } else { read() };
        // SAFETY: the entry names a file and a list of pieces without memory. Both live until all entries have completed.
        if unsafe { ring.submission().push(&entry) }.is_err() {
            break;
        }
    }
    let mut left = ring.submission().len();
    while left > 0 {
        check(ring.submit_and_wait(1));
        left -= ring.completion().count().min(left);
    }
}

/// Creates the ring with the fastest set-up that the kernel supports.
fn set_up(entries: u32) -> io::Result<(IoUring, &'static str)> {
    let cq = entries.saturating_mul(4);
    let common = || {
        let mut b = IoUring::builder();
        b.dontfork().setup_clamp().setup_cqsize(cq);
        b
    };
    let attempts: [(&'static str, io_uring::Builder); 3] = [
        ("single issuer, deferred task work", {
            let mut b = common();
            b.setup_submit_all().setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag();
            b
        }),
        ("cooperative task work", {
            let mut b = common();
            b.setup_submit_all().setup_coop_taskrun().setup_taskrun_flag();
            b
        }),
        ("no flags", common()),
    ];
    let mut last = io::Error::from_raw_os_error(libc::EINVAL);
    for (granted, builder) in attempts {
        match builder.build(entries) {
            Ok(ring) => return Ok((ring, granted)),
            // An older kernel does not support a flag of this set-up.
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => last = e,
            Err(e) => return Err(e),
        }
    }
    Err(last)
}

fn explain(error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(libc::EPERM) => match std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled") {
            Ok(v) if v.trim() != "0" => {
                format!("kernel.io_uring_disabled is {} (sysctl): 0 permits it", v.trim())
            }
            _ => "the kernel refuses it to this process (seccomp filter of a container?)".into(),
        },
        Some(libc::ENOSYS) => "the kernel has none, or a seccomp filter hides it".into(),
        Some(libc::ENOMEM) => {
            "not enough locked memory is allowed (ulimit -l, or LimitMEMLOCK= of the service)".into()
        }
        _ => error.to_string(),
    }
}
