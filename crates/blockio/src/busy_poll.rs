//! The poll predictor: decides whether an idle driver polls for completions before it sleeps, and for how long.
//!
//! A thread needs a few microseconds to sleep and to be woken, and about 100 us in a virtual machine without hardware
//! support. For a client that sends one request at a time, this is a large part of each request. Polling costs processor
//! time instead. The predictor bounds both costs. A poll window is a small multiple of the time that waking a thread takes on
//! this machine, which is measured once per process. A client that is woken by an answer and sends its next request at once
//! then finds the driver awake. The predictor selects the window that would have saved the most time on recent waits: waits
//! that end within the window count for it, all other waits count against it. A driver that waits for a disk sleeps at once.
//! Hypervisors poll in the same way before they halt a virtual processor.
//!
//! Owns the measured wake-up time and the estimates of waits. Invariants: no poll is longer than the limit; if another thread
//! interrupts a poll, the driver does not poll for the next 64 waits. Must not know what the driver waits for.

use std::fmt;
use std::num::ParseIntError;
use std::str::FromStr;
use std::sync::{OnceLock, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use ::io::Nanos;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Whether drivers poll for work before they sleep, and for how long.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BusyPoll {
    /// Drivers sleep at once.
    Never,
    /// Drivers poll for a few times the time that waking a thread takes; on a machine with one processor they do not poll.
    Auto,
    /// Drivers poll for at most this time.
    UpTo(Nanos),
}

/// States the longest poll window, for the log.
impl fmt::Display for PollPredictor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let most = self.windows.iter().map(|l| l.window.0).max().unwrap_or(0);
        write!(f, "which is polled for up to {} us before a sleep", most.div_ceil(1000))
    }
}

/// The text is none of the values of [`BusyPoll`].
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("`{found}`: expected auto, never, or microseconds, {MOST_US} at most")]
pub struct BusyPollError {
    /// The text.
    pub found: String,
    /// The reason if it is no number at all.
    pub source: Option<ParseIntError>,
}

impl FromStr for BusyPoll {
    type Err = BusyPollError;

    /// `auto`, `never`, or microseconds.
    fn from_str(text: &str) -> Result<BusyPoll, BusyPollError> {
        let wrong = |source| BusyPollError { found: text.to_owned(), source };
        match text {
            "auto" => Ok(BusyPoll::Auto),
            "never" => Ok(BusyPoll::Never),
            number => match number.parse() {
                Ok(0) => Ok(BusyPoll::Never),
                Ok(us @ 1..=MOST_US) => Ok(BusyPoll::UpTo(Nanos(us * 1000))),
                Ok(_) => Err(wrong(None)),
                Err(e) => Err(wrong(Some(e))),
            },
        }
    }
}

/// Longest poll that can be configured, in microseconds.
const MOST_US: u64 = 10_000;
/// Longest poll that is selected automatically.
const AUTO_MOST: Nanos = Nanos(1_000_000);
/// Lengths of automatic polls, as multiples of the wake-up time. A poll covers the wake-up of the client by the answer and the
/// client's work until its next request. At four times, most requests of a client at queue depth 1 arrive after the poll;
/// twelve times is for devices that answer late (decision 019).
const WAKES: [u64; 3] = [3, 6, 12];
/// Weight of one wait in the estimate of the share of short waits: 1/16, as a shift.
const WEIGHT_SHIFT: u32 = 4;
/// The estimate when all recent waits were short.
const ALL: u64 = 1 << 16;
/// If two checks of a poll are further apart, another thread has taken the processor in between.
const INTERRUPTED: Nanos = Nanos(1_000_000);
/// Number of waits without a poll after an interrupted one.
const LEAVE_ALONE: u32 = 64;

/// The poll predictor of one driver.
#[derive(Debug)]
pub(crate) struct PollPredictor {
    /// The windows to select from, the shortest first; empty if the driver never polls.
    windows: Vec<PollWindow>,
    /// Time that a wake-up takes.
    wake: Nanos,
    leave_alone: u32,
}

/// A possible length of a poll, with its estimate.
#[derive(Debug)]
struct PollWindow {
    window: Nanos,
    /// Share of recent waits that ended within the window, of [`ALL`].
    short: u64,
}

impl PollWindow {
    /// Time that polls of this length would have saved on recent waits, less the time that they would have wasted; `None` if
    /// they would have wasted more.
    fn saves(&self, wake: Nanos) -> Option<u64> {
        (self.short * wake.0).checked_sub((ALL - self.short) * self.window.0)
    }
}

impl PollPredictor {
    pub(crate) fn new(wanted: BusyPoll) -> PollPredictor {
        match wanted {
            BusyPoll::Never => PollPredictor::of(&[], Nanos(0)),
            BusyPoll::UpTo(most) => PollPredictor::of(&[most], most),
            BusyPoll::Auto => match wake_cost() {
                Some(wake) => PollPredictor::of(&WAKES.map(|n| AUTO_MOST.min(Nanos(n * wake.0))), wake),
                None => PollPredictor::of(&[], Nanos(0)),
            },
        }
    }

    fn of(windows: &[Nanos], wake: Nanos) -> PollPredictor {
        let windows = windows.iter().map(|window| PollWindow { window: *window, short: 0 }).collect();
        PollPredictor { windows, wake, leave_alone: 0 }
    }

    /// Whether the driver polls at all.
    pub(crate) fn is_on(&self) -> bool {
        !self.windows.is_empty()
    }

    /// How long to poll before the next sleep; `None` if a poll is expected to waste more than it saves.
    pub(crate) fn window(&mut self) -> Option<Nanos> {
        if self.leave_alone > 0 {
            self.leave_alone -= 1;
            return None;
        }
        let worth = self.windows.iter().filter_map(|l| Some((l.saves(self.wake)?, l.window)));
        // Of windows that save the same, the shortest.
        worth.rev().max_by_key(|(saves, _)| *saves).map(|(_, window)| window)
    }

    /// Records a wait of length `time`, which includes the wake-up if the driver `slept`.
    pub(crate) fn waited(&mut self, time: Nanos, slept: bool) {
        for w in &mut self.windows {
            let limit = if slept { Nanos(w.window.0 + self.wake.0) } else { w.window };
            let sample = if time <= limit { ALL } else { 0 };
            w.short = w.short - (w.short >> WEIGHT_SHIFT) + (sample >> WEIGHT_SHIFT);
        }
    }

    /// Records the time between two checks of a poll.
    pub(crate) fn checked(&mut self, apart: Nanos) {
        if apart > INTERRUPTED {
            self.leave_alone = LEAVE_ALONE;
        }
    }
}

/// Time that waking a thread takes, measured once per process.
///
/// `None` on a machine with one processor: no other thread can make work there while the driver polls.
fn wake_cost() -> Option<Nanos> {
    static COST: OnceLock<Option<Nanos>> = OnceLock::new();
    *COST.get_or_init(measure)
}

/// Measures the time from the call that wakes a thread on another processor until that thread runs.
///
/// The result is the lower quartile of 15 rounds, because another thread may have delayed the slower ones. The other
/// processor is idle for 400 us before each round: a hypervisor keeps polling for up to 200 us before it halts a processor
/// (`halt_poll_ns`). A longer pause could lead to deeper sleep states than those under load.
fn measure() -> Option<Nanos> {
    const ROUNDS: usize = 15;
    const IDLE: Duration = Duration::from_micros(400);
    let [here, elsewhere] = two_processors()?;
    let (calls, called) = mpsc::channel::<Instant>();
    // Each thread is bound to one processor. The scheduler tends to put threads that wake each other on the same processor,
    // where a wake-up is only a switch between threads.
    let caller = on(here, move || {
        for _ in 0..ROUNDS {
            thread::sleep(IDLE);
            calls.send(Instant::now()).ok()?;
        }
        Some(())
    })?;
    let sleeper = on(elsewhere, move || called.iter().map(|at| at.elapsed()).collect::<Vec<Duration>>())?;
    caller.join().ok()??;
    let mut took = sleeper.join().ok()?;
    took.sort_unstable();
    let wake = *took.get(ROUNDS / 4)?;
    Some(Nanos(u64::try_from(wake.as_nanos()).unwrap_or(u64::MAX).max(1)))
}

/// Starts a thread that stays on the processors in `cpu`.
fn on<T: Send + 'static>(
    cpu: CpuSet,
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<thread::JoinHandle<T>> {
    let stay = move || {
        // If this fails, the measurement is less exact.
        let _ = sched_setaffinity(None, &cpu);
        work()
    };
    thread::Builder::new().name("wake cost".into()).spawn(stay).ok()
}

/// Two processors that this thread may use.
fn two_processors() -> Option<[CpuSet; 2]> {
    let allowed = sched_getaffinity(None).ok()?;
    let mut found = (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu)).map(|cpu| {
        let mut set = CpuSet::new();
        set.set(cpu);
        set
    });
    Some([found.next()?, found.next()?])
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: u64 = 1000;

    fn predictor() -> PollPredictor {
        PollPredictor::of(&[Nanos(10 * US)], Nanos(5 * US))
    }

    #[test]
    fn waking_takes_some_time() {
        match (measure(), two_processors()) {
            (Some(took), Some(_)) => assert!(took.0 > 100, "no thread wakes in {} ns", took.0),
            (took, other) => assert!(took.is_none() && other.is_none(), "{took:?}, {other:?}"),
        }
    }

    /// The two threads of the measurement run on different processors.
    ///
    /// Without the binding, the scheduler often moved the caller to the sleeper's processor. The measurement then gave a
    /// switch between threads: 3 us where a wake-up took 40 us, in half of the starts. Such short polls found no request.
    #[test]
    fn the_threads_of_the_measure_stay_apart() {
        let Some(cpus) = two_processors() else {
            return rig::skipped("the process may use one processor only");
        };
        let are_on = cpus.map(|cpu| {
            let thread = on(cpu, || {
                thread::sleep(Duration::from_micros(400));
                rustix::thread::sched_getcpu()
            });
            let is_on = thread.expect("a thread").join().expect("its processor");
            assert!(cpu.is_set(is_on), "on processor {is_on}");
            is_on
        });
        assert_ne!(are_on[0], are_on[1]);
    }

    #[test]
    fn without_short_waits_it_sleeps() {
        let mut p = predictor();
        for _ in 0..100 {
            assert_eq!(p.window(), None);
            p.waited(Nanos(100 * US), true);
        }
    }

    #[test]
    fn short_waits_are_polled_until_they_become_long() {
        let mut p = predictor();
        for _ in 0..40 {
            p.waited(Nanos(14 * US), true);
        }
        assert_eq!(p.window(), Some(Nanos(10 * US)), "without the wake-up they would have been short enough");
        let mut polled = 0;
        while p.window().is_some() {
            p.waited(Nanos(14 * US), false);
            polled += 1;
        }
        assert!((1..=8).contains(&polled), "gave up after {polled}");
    }

    /// The driver polls only if enough waits are short: otherwise polls waste more time than they save.
    #[test]
    fn polling_wastes_less_time_than_it_saves() {
        for (short_of_ten, expected) in [(2, false), (5, false), (8, true), (10, true)] {
            let (mut p, mut polled) = (predictor(), 0);
            for n in 0..1000 {
                polled += u32::from(p.window().is_some());
                p.waited(Nanos(if n % 10 < short_of_ten { US } else { 1000 * US }), false);
            }
            assert_eq!(polled > 500, expected, "{short_of_ten} of ten: {polled} of 1000 were polled");
        }
    }

    /// A client that returns after 40 us needs the long window; one that returns at once needs the short window. If one wait
    /// in five is much longer than all windows, the long window wastes more time than it saves.
    #[test]
    fn the_length_follows_the_waits() {
        let mut p = PollPredictor::of(&[3, 6, 12].map(|n| Nanos(n * 5 * US)), Nanos(5 * US));
        for (wait_us, one_in_five_us, expected_us) in [
            (40, 40, Some(60)),
            (10, 10, Some(15)),
            (25, 25, Some(30)),
            (10, 1000, Some(15)),
            (40, 1000, None),
        ] {
            let mut chosen = None;
            for n in 0..1000 {
                chosen = p.window();
                p.waited(Nanos(if n % 5 == 4 { one_in_five_us } else { wait_us } * US), false);
            }
            assert_eq!(chosen, expected_us.map(|us| Nanos(us * US)), "{wait_us} and {one_in_five_us} us");
        }
    }

    #[test]
    fn an_interrupted_poll_is_followed_by_waits_without_polls() {
        let mut p = predictor();
        for _ in 0..40 {
            p.waited(Nanos(US), false);
        }
        assert!(p.window().is_some());
        p.checked(Nanos(100));
        assert!(p.window().is_some());
        p.checked(Nanos(4_000_000));
        let asleep = (0..200).filter(|_| p.window().is_none()).count();
        assert_eq!(asleep, 64);
    }

    #[test]
    fn values_of_busy_poll_are_parsed() {
        assert_eq!("auto".parse(), Ok(BusyPoll::Auto));
        assert_eq!("never".parse(), Ok(BusyPoll::Never));
        assert_eq!("0".parse(), Ok(BusyPoll::Never));
        assert_eq!("50".parse(), Ok(BusyPoll::UpTo(Nanos(50_000))));
        for bad in ["", "10001", "-1", "50us", "Auto"] {
            let said = bad.parse::<BusyPoll>().unwrap_err().to_string();
            assert!(said.contains(&format!("`{bad}`")) && said.contains("10000"), "{said}");
        }
    }

    #[test]
    fn never_is_never() {
        let mut p = PollPredictor::new(BusyPoll::Never);
        for _ in 0..40 {
            p.waited(Nanos(0), false);
            assert_eq!(p.window(), None);
        }
        assert!(!p.is_on());
    }
}
