//! Whether a driver without work looks for some on its own for a moment before it sleeps.
//!
//! To sleep and to be woken costs a thread a few microseconds, in a virtual machine without hardware support a hundred: for
//! a client that sends one request at a time that is a good part of each of them. Looking again and again instead costs
//! the processor. Both are bounded here: a driver looks for at most a few times as long as waking a thread takes on this
//! machine (measured once a process), so it never wastes more than a small multiple of what sleeping would have cost, and a
//! client that is woken by an answer and sends its next request at once is still met awake. How many times is chosen by the
//! waits seen: those that a longer look would have met, against those that it would have been wasted on; one that waits for a
//! disk sleeps at once. (Polling for a while before one sleeps, adapted to what was seen, is what hypervisors do with halted
//! processors.)
//!
//! Owns the measure of waking and the estimates of waits. *Invariants:* no look is longer than the limit; who was put off
//! the processor while looking leaves it to others for a while. Must not know what is waited for.

use std::fmt;
use std::str::FromStr;
use std::sync::{OnceLock, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use ::io::Nanos;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Whether drivers look for work before they sleep, and for how long.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BusyPoll {
    /// They sleep at once.
    Never,
    /// For a few times the time that waking a thread takes, and not on a machine with one processor.
    Auto,
    /// For at most so long.
    UpTo(Nanos),
}

/// For the log.
impl fmt::Display for Patience {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let most = self.looks.iter().map(|l| l.window.0).max().unwrap_or(0);
        write!(f, "which is polled for up to {} us before a sleep", most.div_ceil(1000))
    }
}

impl FromStr for BusyPoll {
    type Err = String;

    /// `auto`, `never`, or microseconds.
    fn from_str(text: &str) -> Result<BusyPoll, String> {
        match text {
            "auto" => Ok(BusyPoll::Auto),
            "never" => Ok(BusyPoll::Never),
            number => match number.parse() {
                Ok(0) => Ok(BusyPoll::Never),
                Ok(us @ 1..=MOST_US) => Ok(BusyPoll::UpTo(Nanos(us * 1000))),
                _ => Err(format!("`{text}`: expected auto, never, or microseconds, {MOST_US} at most")),
            },
        }
    }
}

/// Longest look that can be asked for, in microseconds.
const MOST_US: u64 = 10_000;
/// Longest look that is chosen automatically: a machine where waking takes longer has other troubles.
const AUTO_MOST: Nanos = Nanos(1_000_000);
/// An automatic look is as long as one of these numbers of wake-ups: that of the client by the answer, and what it does until
/// its next request is here. With four, a client at depth 1 was mostly not met awake; twelve are for devices that answer
/// that late (decision 019).
const WAKES: [u64; 3] = [3, 6, 12];
/// Each wait counts this much in the estimate of how many are short: 1 / 16.
const WEIGHT_SHIFT: u32 = 4;
/// The estimate, when all of the last waits were short.
const ALL: u64 = 1 << 16;
/// A look during which so much time passed between two glances was interrupted by others who want the processor.
const INTERRUPTED: Nanos = Nanos(1_000_000);
/// So many waits are not polled after that.
const LEAVE_ALONE: u32 = 64;

/// Decides for one driver; see the module head.
#[derive(Debug)]
pub(crate) struct Patience {
    /// What can be chosen, the shortest first; nothing means never.
    looks: Vec<Look>,
    /// What a wake-up takes.
    wake: Nanos,
    leave_alone: u32,
}

/// A look of some length.
#[derive(Debug)]
struct Look {
    window: Nanos,
    /// Share of recent waits that ended within the window, of [`ALL`].
    short: u64,
}

impl Look {
    /// What looks of this length would have saved on recent waits, less what they would have wasted, if that is not less
    /// than nothing.
    fn saves(&self, wake: Nanos) -> Option<u64> {
        (self.short * wake.0).checked_sub((ALL - self.short) * self.window.0)
    }
}

impl Patience {
    pub(crate) fn new(wanted: BusyPoll) -> Patience {
        match wanted {
            BusyPoll::Never => Patience::of(&[], Nanos(0)),
            BusyPoll::UpTo(most) => Patience::of(&[most], most),
            BusyPoll::Auto => match wake_cost() {
                Some(wake) => Patience::of(&WAKES.map(|n| AUTO_MOST.min(Nanos(n * wake.0))), wake),
                None => Patience::of(&[], Nanos(0)),
            },
        }
    }

    fn of(windows: &[Nanos], wake: Nanos) -> Patience {
        let looks = windows.iter().map(|window| Look { window: *window, short: 0 }).collect();
        Patience { looks, wake, leave_alone: 0 }
    }

    /// Whether waits are of interest at all.
    pub(crate) fn is_on(&self) -> bool {
        !self.looks.is_empty()
    }

    /// How long to look before sleeping, if that is expected to save more than it wastes.
    pub(crate) fn window(&mut self) -> Option<Nanos> {
        if self.leave_alone > 0 {
            self.leave_alone -= 1;
            return None;
        }
        let worth = self.looks.iter().filter_map(|l| Some((l.saves(self.wake)?, l.window)));
        // Of equals the shortest.
        worth.rev().max_by_key(|(saves, _)| *saves).map(|(_, window)| window)
    }

    /// A wait took so long, with the wake-up if it `slept`.
    pub(crate) fn waited(&mut self, time: Nanos, slept: bool) {
        for look in &mut self.looks {
            let limit = if slept { Nanos(look.window.0 + self.wake.0) } else { look.window };
            let seen = if time <= limit { ALL } else { 0 };
            look.short = look.short - (look.short >> WEIGHT_SHIFT) + (seen >> WEIGHT_SHIFT);
        }
    }

    /// Between two glances so much time passed.
    pub(crate) fn glanced(&mut self, apart: Nanos) {
        if apart > INTERRUPTED {
            self.leave_alone = LEAVE_ALONE;
        }
    }
}

/// What it takes to wake a thread that sleeps, measured once; `None` where there is one processor alone, and nobody could
/// bring work to a thread that keeps it.
fn wake_cost() -> Option<Nanos> {
    static COST: OnceLock<Option<Nanos>> = OnceLock::new();
    *COST.get_or_init(measure)
}

/// From the call that wakes a thread on another processor until it runs, the lower quartile of some (the others may have had
/// to wait until somebody else was done). Before each the processor had nothing to do for a moment: one that was just busy is
/// mostly kept awake for a while (hypervisors wait up to 200 us before they halt one, `halt_poll_ns`). Much longer, and it could
/// fall into states of sleep that nothing under load knows.
fn measure() -> Option<Nanos> {
    const ROUNDS: usize = 15;
    const IDLE: Duration = Duration::from_micros(400);
    let [here, elsewhere] = two_processors()?;
    let (calls, called) = mpsc::channel::<Instant>();
    // Both stay where they are: on one processor a hand-over is a switch between threads, and the scheduler likes to
    // bring together who wakes each other.
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

/// A thread that stays on one processor.
fn on<T: Send + 'static>(
    cpu: CpuSet,
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<thread::JoinHandle<T>> {
    let stay = move || {
        // Where it is refused, the measure is as good as it can be.
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

    fn patience() -> Patience {
        Patience::of(&[Nanos(10 * US)], Nanos(5 * US))
    }

    #[test]
    fn waking_takes_some_time() {
        match (measure(), two_processors()) {
            (Some(took), Some(_)) => assert!(took.0 > 100, "no thread wakes in {} ns", took.0),
            (took, other) => assert!(took.is_none() && other.is_none(), "{took:?}, {other:?}"),
        }
    }

    /// A caller that was not tied to its processor was often moved to the sleeper's by the scheduler. That measured a switch
    /// between threads, 3 us where a wake-up took 40, in half of the starts; their looks never met a client.
    #[test]
    fn the_threads_of_the_measure_stay_apart() {
        let Some(cpus) = two_processors() else { return };
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
        let mut p = patience();
        for _ in 0..100 {
            assert_eq!(p.window(), None);
            p.waited(Nanos(100 * US), true);
        }
    }

    #[test]
    fn short_waits_are_polled_until_they_become_long() {
        let mut p = patience();
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

    /// Enough waits must be short: else what is wasted on the others costs more than is saved.
    #[test]
    fn what_it_wastes_is_less_than_what_it_saves() {
        for (short_of_ten, expected) in [(2, false), (5, false), (8, true), (10, true)] {
            let (mut p, mut polled) = (patience(), 0);
            for n in 0..1000 {
                polled += u32::from(p.window().is_some());
                p.waited(Nanos(if n % 10 < short_of_ten { US } else { 1000 * US }), false);
            }
            assert_eq!(polled > 500, expected, "{short_of_ten} of ten: {polled} of 1000 were polled");
        }
    }

    /// A client that is back after 40 us is met by no shorter look; one that is back at once needs no longer one; and where
    /// one wait in five is much longer than all of them, the long look is not worth what it wastes then.
    #[test]
    fn the_length_follows_the_waits() {
        let mut p = Patience::of(&[3, 6, 12].map(|n| Nanos(n * 5 * US)), Nanos(5 * US));
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
    fn who_was_interrupted_leaves_the_processor_to_others() {
        let mut p = patience();
        for _ in 0..40 {
            p.waited(Nanos(US), false);
        }
        assert!(p.window().is_some());
        p.glanced(Nanos(100));
        assert!(p.window().is_some());
        p.glanced(Nanos(4_000_000));
        let asleep = (0..200).filter(|_| p.window().is_none()).count();
        assert_eq!(asleep, 64);
    }

    #[test]
    fn what_can_be_asked_for() {
        assert_eq!("auto".parse(), Ok(BusyPoll::Auto));
        assert_eq!("never".parse(), Ok(BusyPoll::Never));
        assert_eq!("0".parse(), Ok(BusyPoll::Never));
        assert_eq!("50".parse(), Ok(BusyPoll::UpTo(Nanos(50_000))));
        for bad in ["", "10001", "-1", "50us", "Auto"] {
            let said = bad.parse::<BusyPoll>().unwrap_err();
            assert!(said.contains(&format!("`{bad}`")) && said.contains("10000"), "{said}");
        }
    }

    #[test]
    fn never_is_never() {
        let mut p = Patience::new(BusyPoll::Never);
        for _ in 0..40 {
            p.waited(Nanos(0), false);
            assert_eq!(p.window(), None);
        }
        assert!(!p.is_on());
    }
}
