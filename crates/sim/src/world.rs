//! Virtual time, the events of devices, and the driver that runs an executor on them.
//!
//! Owns the clock, the queue of future events, the random source of a run, the power switch, and a hash of all events. The
//! run depends on the seed alone: two runs of a seed are equal. Must not know the effects of events.
//!
//! *Effects* are the moments at which a device takes or ends a request. They are counted, and the power can be cut at any
//! of them: from then on devices take no requests, end none and change nothing.

use std::cell::{Cell, RefCell};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::rc::Rc;

use io::{Clock, Handle, JoinHandle, Nanos, Rng, Runtime, Schedule};

use crate::landmark::{Aim, Landmark};

/// Number of polls without progress of time that counts as a livelock.
const MAX_POLLS: usize = 3_000_000;

type Event = Box<dyn FnOnce()>;
type Watcher = Rc<dyn Fn()>;
type LossWatcher = Rc<dyn Fn(u64)>;

struct Inner {
    now: Cell<Nanos>,
    next_id: Cell<u64>,
    queue: RefCell<BinaryHeap<Reverse<(Nanos, u64)>>>,
    events: RefCell<BTreeMap<u64, Event>>,
    rng: RefCell<Rng>,
    hash: Cell<u64>,
    effects: Cell<u64>,
    cut_at: Cell<Option<u64>>,
    durable_writes_left: Cell<Option<u64>>,
    off: Cell<bool>,
    verbose: Cell<bool>,
    /// Recorded events since the last call; `None` if events are not recorded.
    tape: RefCell<Option<Vec<String>>>,
    watcher: RefCell<Option<Watcher>>,
    /// Actions, each with the number of the effect before which it happens.
    due: RefCell<Vec<(u64, Event)>>,
    aim: Cell<Option<Aim>>,
    /// Number of occurrences of each landmark.
    landmarks: Cell<[u64; Landmark::ALL.len()]>,
    loss_watcher: RefCell<Option<LossWatcher>>,
}

/// The world of one run, cheap to clone.
#[derive(Clone)]
pub struct World {
    inner: Rc<Inner>,
}

impl World {
    /// A world whose random choices depend on `seed`.
    pub fn new(seed: u64) -> World {
        World {
            inner: Rc::new(Inner {
                now: Cell::new(Nanos(1)),
                next_id: Cell::new(0),
                queue: RefCell::default(),
                events: RefCell::default(),
                rng: RefCell::new(Rng::new(seed)),
                hash: Cell::new(0xcbf2_9ce4_8422_2325),
                effects: Cell::new(0),
                cut_at: Cell::new(None),
                durable_writes_left: Cell::new(None),
                off: Cell::new(false),
                verbose: Cell::new(false),
                tape: RefCell::new(None),
                watcher: RefCell::default(),
                due: RefCell::default(),
                aim: Cell::new(None),
                landmarks: Cell::default(),
                loss_watcher: RefCell::default(),
            }),
        }
    }

    /// Prints events on standard error.
    pub fn set_verbose(&self, verbose: bool) {
        self.inner.verbose.set(verbose);
    }

    /// Prints and records an event, as far as that is enabled.
    pub fn log(&self, what: impl FnOnce() -> String) {
        let (verbose, tape) = (self.inner.verbose.get(), &mut *self.inner.tape.borrow_mut());
        if !verbose && tape.is_none() {
            return;
        }
        let what = what();
        if verbose {
            eprintln!("{:>12} us {:>7}  {what}", self.now().0 / 1000, self.effects());
        }
        if let Some(lines) = tape {
            lines.push(format!("{:>9} us  {what}", self.now().0 / 1000));
        }
    }

    /// Starts to record events, each as a line with the time.
    pub fn begin_tape(&self) {
        *self.inner.tape.borrow_mut() = Some(Vec::new());
    }

    /// Returns the recorded events, and ends the recording.
    pub fn end_tape(&self) -> Vec<String> {
        self.inner.tape.take().unwrap_or_default()
    }

    /// The virtual time.
    pub fn now(&self) -> Nanos {
        self.inner.now.get()
    }

    /// Makes a random choice.
    pub fn random<T>(&self, choose: impl FnOnce(&mut Rng) -> T) -> T {
        choose(&mut self.inner.rng.borrow_mut())
    }

    /// Schedules `event` after `delay`.
    pub fn after(&self, delay: Nanos, event: impl FnOnce() + 'static) {
        let id = self.inner.next_id.get();
        self.inner.next_id.set(id + 1);
        self.inner.events.borrow_mut().insert(id, Box::new(event));
        self.inner.queue.borrow_mut().push(Reverse((self.now().after(delay), id)));
    }

    /// Adds an event to the hash of the run.
    pub fn note(&self, what: u64) {
        let h = (self.inner.hash.get() ^ what).wrapping_mul(0x0000_0100_0000_01b3);
        self.inner.hash.set(h ^ (h >> 29));
    }

    /// The hash of all events.
    pub fn hash(&self) -> u64 {
        self.inner.hash.get()
    }

    /// Sets a function that is called before every effect, while nothing is borrowed.
    pub fn set_watcher(&self, watcher: Option<Watcher>) {
        *self.inner.watcher.borrow_mut() = watcher;
    }

    /// Announces that a device is about to call [`World::effect`]. The device must not be borrowed.
    pub fn before_effect(&self) {
        if self.inner.off.get() {
            return;
        }
        let watcher = self.inner.watcher.borrow().clone();
        if let Some(watcher) = watcher {
            watcher();
        }
        if self.inner.due.borrow().is_empty() {
            return;
        }
        let (now, mut happens) = (self.effects(), Vec::new());
        self.inner.due.borrow_mut().retain_mut(|(at, event)| {
            if *at <= now {
                happens.push(std::mem::replace(event, Box::new(|| ())));
            }
            *at > now
        });
        happens.into_iter().for_each(|event| event());
    }

    /// Schedules `event` before the effect with this number, while nothing is borrowed.
    pub fn at_effect(&self, effect: u64, event: impl FnOnce() + 'static) {
        self.inner.due.borrow_mut().push((effect, Box::new(event)));
    }

    /// Sets the landmark at which the crash comes; `None` for no crash.
    pub fn aim(&self, aim: Option<Aim>) {
        self.inner.aim.set(aim);
    }

    /// Reports that a landmark is reached.
    pub fn landmark(&self, landmark: Landmark) {
        if self.inner.off.get() {
            return;
        }
        let mut counts = self.inner.landmarks.get();
        if let Some(n) = counts.get_mut(landmark as usize) {
            *n += 1;
        }
        self.inner.landmarks.set(counts);
        let Some(mut aim) = self.inner.aim.get().filter(|a| a.at == landmark) else { return };
        aim.nth = aim.nth.saturating_sub(1);
        let hit = aim.nth == 0;
        self.inner.aim.set((!hit).then_some(aim));
        if hit && aim.effects == 0 {
            self.cut_power();
        } else if hit {
            let at = self.effects() + aim.effects;
            self.inner.cut_at.set(Some(self.inner.cut_at.get().map_or(at, |old| old.min(at))));
        }
    }

    /// Number of occurrences of each landmark.
    pub fn landmarks(&self) -> [u64; Landmark::ALL.len()] {
        self.inner.landmarks.get()
    }

    /// Sets a function that gets the number of a device that loses data while the process lives.
    pub fn set_loss_watcher(&self, watcher: LossWatcher) {
        *self.inner.loss_watcher.borrow_mut() = Some(watcher);
    }

    /// Reports that a device has lost non-durable data.
    pub fn data_lost(&self, device: u64) {
        let watcher = self.inner.loss_watcher.borrow().clone();
        if let Some(watcher) = watcher {
            watcher(device);
        }
    }

    /// Counts that a device takes or ends a request. Returns false if the power is off.
    pub fn effect(&self) -> bool {
        if self.inner.off.get() {
            return false;
        }
        let n = self.inner.effects.get();
        if self.inner.cut_at.get().is_some_and(|at| n >= at) {
            self.inner.off.set(true);
            return false;
        }
        self.inner.effects.set(n + 1);
        true
    }

    /// Number of effects so far.
    pub fn effects(&self) -> u64 {
        self.inner.effects.get()
    }

    /// Sets the number of the effect before which the power fails; `None` for no failure.
    pub fn cut_power_at(&self, effect: Option<u64>) {
        self.inner.cut_at.set(effect);
    }

    /// Makes the power fail when this many more durable writes were submitted; `None` for no failure.
    pub fn cut_power_in_durable_write(&self, n: Option<u64>) {
        self.inner.durable_writes_left.set(n);
    }

    /// Counts the submission of a durable write.
    pub fn durable_write(&self) {
        let left = self.inner.durable_writes_left.get().map(|n| n.saturating_sub(1));
        self.inner.durable_writes_left.set(left);
        if left == Some(0) {
            self.cut_power();
        }
    }

    /// Cuts the power now.
    pub fn cut_power(&self) {
        self.inner.off.set(true);
    }

    /// Whether the power is off.
    pub fn is_off(&self) -> bool {
        self.inner.off.get()
    }

    /// Switches the power on. All requests that were in flight are dropped.
    pub fn power_on(&self) {
        self.inner.off.set(false);
        self.inner.cut_at.set(None);
        self.inner.durable_writes_left.set(None);
        self.inner.aim.set(None);
        self.inner.due.borrow_mut().clear();
        let gone = std::mem::take(&mut *self.inner.events.borrow_mut());
        self.inner.queue.borrow_mut().clear();
        drop(gone);
    }

    fn next_event(&self) -> Option<Nanos> {
        self.inner.queue.borrow().peek().map(|Reverse((at, _))| *at)
    }

    /// Number of scheduled events.
    pub fn pending_events(&self) -> usize {
        self.inner.queue.borrow().len()
    }

    fn advance_to(&self, at: Nanos) {
        self.inner.now.set(at.max(self.now()));
    }

    /// Advances the time while the machine is off.
    pub fn pass(&self, span: Nanos) {
        self.advance_to(self.now().after(span));
    }

    fn run_event(&self) -> bool {
        let due = {
            let mut queue = self.inner.queue.borrow_mut();
            match queue.peek() {
                Some(Reverse((at, _))) if *at <= self.now() => queue.pop(),
                _ => None,
            }
        };
        let Some(Reverse((_, id))) = due else { return false };
        let event = self.inner.events.borrow_mut().remove(&id);
        if let Some(event) = event {
            event();
        }
        true
    }
}

struct WorldClock(World);

impl Clock for WorldClock {
    fn now(&self) -> Nanos {
        self.0.now()
    }

    fn wall_seconds(&self) -> u64 {
        1_700_000_000 + self.0.now().0 / 1_000_000_000
    }
}

/// The order in which ready tasks run.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub enum Order {
    /// First come, first served, as in production.
    Fifo,
    /// The newest first: a task that became ready early waits longest.
    Lifo,
    /// A random order.
    Random,
}

struct SeededSchedule {
    order: Order,
    rng: Rng,
    world: World,
}

impl Schedule for SeededSchedule {
    fn pick(&mut self, ready: usize) -> usize {
        let at = match self.order {
            _ if ready == 1 => 0,
            Order::Fifo => 0,
            // Sometimes another task runs, or a task that yields would keep the others from running for ever.
            Order::Lifo if self.rng.chance(7, 8) => ready - 1,
            Order::Lifo | Order::Random => self.rng.below(ready as u64) as usize,
        };
        self.world.note(at as u64);
        at
    }
}

/// The end of a task under the driver.
#[derive(Debug)]
pub enum Outcome<T> {
    /// The task ended with this result.
    Done(T),
    /// The power failed before the task ended.
    PowerLoss,
    /// The task cannot end; the text describes the state.
    Stuck(String),
}

impl<T> Outcome<T> {
    /// The result of the task.
    ///
    /// # Panics
    /// If the task has none.
    #[track_caller]
    pub fn done(self) -> T {
        match self {
            Outcome::Done(v) => v,
            Outcome::PowerLoss => panic!("the power was cut, expected the task to end"),
            Outcome::Stuck(why) => panic!("expected the task to end: {why}"),
        }
    }
}

/// An executor on virtual time: one boot of the machine.
pub struct Machine {
    world: World,
    runtime: Runtime,
    schedule: SeededSchedule,
}

impl Machine {
    /// A machine that has just been switched on.
    pub fn boot(world: &World, order: Order) -> Machine {
        let (seed, rng) = world.random(|r| (r.next_u64(), r.fork()));
        let runtime = Runtime::new(Rc::new(WorldClock(world.clone())), seed);
        let schedule = SeededSchedule { order, rng, world: world.clone() };
        Machine { world: world.clone(), runtime, schedule }
    }

    /// A handle to start tasks.
    pub fn handle(&self) -> Handle {
        self.runtime.handle()
    }

    /// Runs all tasks until `task` ends, for at most `limit` of virtual time.
    pub fn run<T>(&mut self, task: &JoinHandle<T>, limit: Nanos) -> Outcome<T> {
        let deadline = self.world.now().after(limit);
        let mut polls = 0;
        loop {
            loop {
                let n = self.runtime.run(&mut self.schedule, 16);
                if self.world.is_off() {
                    return Outcome::PowerLoss;
                }
                polls += n;
                if n == 0 {
                    break;
                }
                if polls > MAX_POLLS {
                    return Outcome::Stuck(format!("{polls} polls without any time passing"));
                }
            }
            if let Some(value) = task.try_take() {
                return Outcome::Done(value);
            }
            let next = match (self.world.next_event(), self.runtime.next_deadline()) {
                (Some(a), Some(b)) => a.min(b),
                (Some(a), None) => a,
                (None, Some(b)) => b,
                (None, None) => {
                    return Outcome::Stuck(format!(
                        "nothing is ready, no request is under way, no timer is set; {} tasks wait",
                        self.runtime.live_tasks()
                    ));
                }
            };
            if next > deadline {
                return Outcome::Stuck(format!("not done after {} ms of virtual time", limit.as_ms()));
            }
            if next > self.world.now() {
                polls = 0;
                self.world.advance_to(next);
                self.world.note(next.0);
            }
            // One event at a time: the tasks that it wakes may run before the next event of the same moment.
            if !self.world.run_event() {
                self.runtime.fire_timers();
            }
        }
    }

    /// Runs `future` to its end; the power stays on.
    ///
    /// # Panics
    /// If it does not end within an hour of virtual time.
    #[track_caller]
    pub fn block_on<T: 'static>(&mut self, future: impl Future<Output = T> + 'static) -> T {
        let task = self.handle().spawn(future);
        self.run(&task, Nanos::from_secs(3600)).done()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_goes_from_event_to_event_and_a_task_that_waits_for_nothing_is_found() {
        let world = World::new(1);
        let mut m = Machine::boot(&world, Order::Random);
        let (rt, w) = (m.handle(), world.clone());
        let seen = m.block_on(async move {
            let hits = Rc::new(RefCell::new(Vec::new()));
            for ms in [30, 10, 20] {
                let (hits, w2) = (hits.clone(), w.clone());
                w.after(Nanos::from_ms(ms), move || hits.borrow_mut().push(w2.now().as_ms()));
            }
            rt.sleep(Nanos::from_ms(25)).await;
            let early = hits.borrow().clone();
            rt.sleep(Nanos::from_ms(25)).await;
            (early, hits.borrow().clone())
        });
        assert_eq!(seen, (vec![10, 20], vec![10, 20, 30]));
        let never = m.handle().spawn(std::future::pending::<()>());
        assert!(matches!(m.run(&never, Nanos::from_secs(1)), Outcome::Stuck(_)));
    }

    #[test]
    fn the_power_fails_at_the_effect_that_was_chosen() {
        let world = World::new(1);
        world.cut_power_at(Some(2));
        assert!(world.effect() && world.effect() && !world.effect());
        assert!(world.is_off());
        world.power_on();
        assert!(world.effect());
        assert_eq!(world.effects(), 3);
    }
}
