//! The scenario whose every request fails once: clients in every mode, commands of an operator, a stop.

use std::cell::RefCell;
use std::fmt::Display;
use std::rc::Rc;

use format::Sectors;
use io::ZeroFlags;
use io::sync::Event;
use sim::disk::Counters;
use sim::hardware::uuid_of;
use sim::scenario::Boot;

/// What became of the steps of a scenario.
#[derive(Clone, Default)]
pub struct Steps(Rc<RefCell<String>>, Rc<Event>);

impl Steps {
    /// Waits until there were so many.
    pub async fn reach(&self, steps: usize) {
        self.1.wait_until(|| self.0.borrow().len() >= steps).await;
    }

    /// A mark for each.
    pub fn marks(&self) -> String {
        self.0.borrow().clone()
    }

    fn done(&self, ok: bool) {
        self.0.borrow_mut().push(if ok { '.' } else { 'x' });
        self.1.notify_all();
    }

    fn result<T, E: Display>(&self, b: &Boot, result: Result<T, E>) -> Option<T> {
        self.done(result.is_ok());
        result.map_err(|e| b.world.log(|| format!("step failed: {e}"))).ok()
    }
}

async fn set(b: &Boot, steps: &Steps, i: usize, name: &str, value: &str) {
    let Some(v) = b.clients[i].volume() else { return steps.done(false) };
    steps.result(b, v.set(name, value).await);
}

/// Requests of all kinds, in every mode.
pub async fn requests(b: &Boot, steps: &Steps) {
    let [first, second, flash] = &b.clients[..] else { panic!("two devices and a volume") };
    steps.done(first.write(0, 16, false).await);
    steps.done(first.write(100, 8, true).await);
    steps.done(second.write(0, 8, false).await);
    steps.done(second.read(64, 16).await.is_some());
    steps.done(flash.write(0, 24, false).await);
    steps.done(flash.flush().await);
    b.sleep_ms(10).await;
    for (start, sectors) in [(0, 8), (96, 16)] {
        steps.done(first.read(start, sectors).await.is_some());
    }
    steps.done(second.read(60, 24).await.is_some());
    steps.done(flash.read(0, 32).await.is_some());
    steps.done(first.write(4, 2, false).await);
    steps.done(second.write(64, 8, true).await);
    steps.done(first.flush().await);
    set(b, steps, 0, "cache_mode", "writearound").await;
    for (start, fua) in [(2, false), (14, true), (200, false), (300, true)] {
        steps.done(first.write(start, 4, fua).await);
    }
    steps.done(first.discard(96, 16).await);
    steps.done(first.write_zeroes(3, 140, ZeroFlags { fua: true, may_unmap: true }).await);
    steps.done(flash.write_zeroes(4, 8, ZeroFlags::default()).await);
    steps.done(second.flush().await);
    set(b, steps, 0, "cache_mode", "writeback").await;
    for n in 0..6 {
        steps.done(first.write(n * 20, 6, false).await);
    }
}

/// What the operator does.
pub async fn commands(b: &Boot, steps: &Steps) {
    let s = b.set();
    steps.result(b, s.gc().await);
    let v = b.volume(0);
    steps.result(b, v.drained().await);
    steps.done(b.clients[0].write(40, 12, false).await);
    steps.result(b, s.detach(&v).await);
    steps.done(b.clients[0].write(44, 4, true).await);
    steps.done(b.clients[0].read(40, 12).await.is_some());
    if v.inode().is_none() {
        b.clients[0].pause().await;
        if steps.result(b, v.stop().await).is_none() {
            b.clients[0].loss_reported();
        }
        if let Some(v) = steps.result(b, s.register(b.parts.backings[0].clone()).await) {
            b.clients[0].set_volume(Some(v));
        }
        b.clients[0].resume();
    }
    steps.done(b.clients[0].write(48, 4, false).await);
    steps.result(b, s.wipe().await);
    set(b, steps, 1, "label", "a name").await;
    steps.result(b, s.set("cache_replacement_policy", "fifo").await);
    let made = steps.result(b, s.create_volume(uuid_of(7), Sectors(32), "another").await);
    if let Some(inode) = made.and_then(|v| v.inode()) {
        steps.result(b, s.delete_volume(inode).await);
    }
    b.sleep_ms(45_000).await;
    steps.done(b.clients[1].read(0, 16).await.is_some());
    let v = b.volume(1);
    if steps.result(b, s.release(&v).await).is_none() {
        b.clients[1].loss_reported();
    }
}

/// What the set says at the end, and how it stops.
pub async fn end(b: &Boot, steps: &Steps) -> String {
    let states: Vec<String> = b
        .clients
        .iter()
        .filter_map(|c| c.volume())
        .map(|v| format!("{:?}/{}/{}", v.state(), v.dirty_sectors(), v.io_errors()))
        .collect();
    let s = b.set();
    let failed = s.status().failed.is_some();
    for v in b.clients.iter().filter_map(|c| c.volume()) {
        steps.result(b, v.stop().await);
    }
    steps.result(b, s.stop().await);
    let events = s.take_events().len();
    let theirs: usize = b.clients.iter().filter_map(|c| c.volume()).map(|v| v.take_events().len()).sum();
    b.clients.iter().for_each(|c| c.loss_reported());
    format!("{}, {}, {events} and {theirs} events", if failed { "failed" } else { "runs" }, states.join(" "))
}

pub fn counts(c: Counters) -> String {
    format!("{}r {}w {}d {}f {}p", c.reads, c.writes, c.durable_writes, c.flushes, c.plain)
}
