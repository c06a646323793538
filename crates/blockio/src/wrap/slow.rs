//! A disk with a moving head, in front of any device (`--simulate-hdd`).
//!
//! Owns the model of time. The disk serves one request at a time. A request that begins where the last one ended costs only its
//! transfer. If the gap before a request is small, the disk reads over the gap when that is faster than a seek. Any other
//! request costs a seek, which grows with the square root of the distance, and a part of a rotation, drawn from a seeded source.
//! A write costs its time at once, because the model has no write cache. A flush after writes, and a durable write, cost a part
//! of a rotation, as on a disk that writes its cache to the medium.
//!
//! [`Queueing::ShortestSeek`] serves the nearest of the oldest 32 requests, as disks with command queueing do; it passes over
//! no request more than 64 times. [`Queueing::Fifo`] serves requests in order of arrival.
//!
//! The model starts a request on the inner device when its turn comes, and answers it when both the request and its modelled
//! time have ended. While there is work, the model's clock continues from the end of the last request, so that the cost of the
//! simulation does not add up. Time is the runtime's, real or simulated.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

use ::io::{Completer, Device, DeviceInfo, Disk, Handle, Nanos, Op, Request, Rng};

/// Number of requests among which a disk with command queueing chooses.
const WINDOW: usize = 32;

/// Maximum number of times that a request is passed over.
const MAX_PASSED: u32 = 64;

/// The order in which a disk serves waiting requests.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Queueing {
    /// Serves the nearest of the oldest 32 requests.
    #[default]
    ShortestSeek,
    /// First come, first served.
    Fifo,
}

/// The costs of the movements of a disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HddModel {
    /// The shortest seek.
    pub seek_min: Nanos,
    /// A seek over the whole disk.
    pub seek_max: Nanos,
    /// Time of one rotation. A part of it follows each seek.
    pub rotation: Nanos,
    /// Transfer rate, in bytes per second.
    pub bytes_per_second: u64,
    /// The order of service.
    pub queueing: Queueing,
    /// Seed of the random parts of a rotation.
    pub seed: u64,
}

impl Default for HddModel {
    /// Short seeks take 4 ms on average and long ones 8 ms, the part of a rotation included; the transfer rate is 150 MB/s.
    fn default() -> Self {
        HddModel {
            seek_min: Nanos::from_ms(1),
            seek_max: Nanos::from_ms(5),
            rotation: Nanos::from_ms(6),
            bytes_per_second: 150_000_000,
            queueing: Queueing::ShortestSeek,
            seed: 0,
        }
    }
}

/// The cost of a request without movement.
const COMMAND: Nanos = Nanos(100_000);

/// The position of the head, from which the cost of the next request follows.
struct Head {
    model: HddModel,
    disk_sectors: u64,
    /// The sector behind the last one transferred.
    at: u64,
    /// Whether data was written since the last flush.
    unflushed: bool,
    rng: Rng,
}

impl Head {
    fn transfer(&self, sectors: u64) -> Nanos {
        let ns = u128::from(sectors) * 512 * 1_000_000_000 / u128::from(self.model.bytes_per_second.max(1));
        Nanos(u64::try_from(ns).unwrap_or(u64::MAX))
    }

    fn part_of_rotation(&mut self) -> Nanos {
        Nanos(self.rng.below(self.model.rotation.0.max(1)))
    }

    fn seek(&self, sector: u64) -> Nanos {
        let fraction = sector.abs_diff(self.at) as f64 / self.disk_sectors.max(1) as f64;
        let range = self.model.seek_max.since(self.model.seek_min).0 as f64;
        self.model.seek_min.after(Nanos((range * fraction.sqrt()) as u64))
    }

    /// Moves the head through a request and returns the time that this takes.
    fn serve(&mut self, op: Op, sector: u64, sectors: u64) -> Nanos {
        match op {
            Op::Flush if self.unflushed => {
                self.unflushed = false;
                COMMAND.after(self.part_of_rotation())
            }
            Op::Flush | Op::Discard => COMMAND,
            Op::Read | Op::Write { .. } | Op::WriteZeroes { .. } => {
                let access = if sector == self.at {
                    Nanos(0)
                } else {
                    let seek = self.seek(sector).after(self.part_of_rotation());
                    match sector.checked_sub(self.at) {
                        Some(gap) => seek.min(self.transfer(gap)),
                        None => seek,
                    }
                };
                self.at = sector.saturating_add(sectors);
                let durable = match op {
                    Op::Write { fua: true } => self.part_of_rotation(),
                    Op::Write { .. } | Op::WriteZeroes { .. } => {
                        self.unflushed = true;
                        Nanos(0)
                    }
                    _ => Nanos(0),
                };
                access.after(self.transfer(sectors)).after(durable)
            }
        }
    }
}

struct Waiting {
    request: Request,
    completer: Completer,
    passed: u32,
}

struct DiskQueue {
    head: Head,
    queue: VecDeque<Waiting>,
    /// Time at which the model has served all requests so far.
    busy_until: Nanos,
    serving: bool,
}

impl DiskQueue {
    fn next(&mut self) -> Option<Waiting> {
        let overtaken = self.queue.front().is_some_and(|w| w.passed >= MAX_PASSED);
        let at = match self.head.model.queueing {
            Queueing::ShortestSeek if !overtaken => {
                let here = self.head.at;
                let window = self.queue.iter().take(WINDOW);
                // A flush or discard needs no seek. Of requests at the same distance, the oldest is next.
                let distance = |w: &Waiting| match w.request.op {
                    Op::Flush | Op::Discard => 0,
                    _ => w.request.sector.0.abs_diff(here),
                };
                window.enumerate().min_by_key(|(i, w)| (distance(w), *i)).map_or(0, |(i, _)| i)
            }
            _ => 0,
        };
        for w in self.queue.iter_mut().take(at) {
            w.passed += 1;
        }
        self.queue.remove(at)
    }
}

struct SharedSlowDisk {
    disk: Disk,
    info: DeviceInfo,
    state: RefCell<DiskQueue>,
}

/// A device that is as slow as a disk with a moving head.
pub struct SlowDisk {
    inner: Rc<SharedSlowDisk>,
}

impl SlowDisk {
    /// Slows `device` down as `model` says; `rt` keeps the time.
    pub fn new(device: Rc<dyn Device>, rt: Handle, model: HddModel) -> SlowDisk {
        let info = DeviceInfo { rotational: true, ..device.info().clone() };
        let head =
            Head { model, disk_sectors: info.sectors.0, at: 0, unflushed: false, rng: Rng::new(model.seed) };
        let state = DiskQueue { head, queue: VecDeque::new(), busy_until: Nanos(0), serving: false };
        let disk = Disk::new(device, rt);
        SlowDisk { inner: Rc::new(SharedSlowDisk { disk, info, state: RefCell::new(state) }) }
    }
}

impl Device for SlowDisk {
    fn info(&self) -> &DeviceInfo {
        &self.inner.info
    }

    fn submit(&self, mut request: Request, completer: Completer) {
        if let Err(e) = self.inner.info.check(&mut request) {
            completer.complete(Err(e), request.buffer);
            return;
        }
        let mut state = self.inner.state.borrow_mut();
        state.queue.push_back(Waiting { request, completer, passed: 0 });
        if std::mem::replace(&mut state.serving, true) {
            return;
        }
        drop(state);
        let inner = self.inner.clone();
        self.inner.disk.runtime().spawn(async move { serve(&inner).await });
    }
}

/// Serves one request after the other until none waits.
async fn serve(inner: &SharedSlowDisk) {
    let rt = inner.disk.runtime();
    // The model does not make up for time that passed without work.
    let now = rt.now();
    {
        let mut state = inner.state.borrow_mut();
        state.busy_until = state.busy_until.max(now);
    }
    loop {
        let (waiting, until) = {
            let mut state = inner.state.borrow_mut();
            let Some(w) = state.next() else {
                state.serving = false;
                return;
            };
            let cost = state.head.serve(w.request.op, w.request.sector.0, w.request.sectors.0);
            state.busy_until = state.busy_until.after(cost);
            (w, state.busy_until)
        };
        let Waiting { request, completer, .. } = waiting;
        let started = inner.disk.start(request);
        rt.sleep_until(until).await;
        let done = started.await;
        completer.complete(done.result, done.buffer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(model: HddModel) -> Head {
        Head { model, disk_sectors: 1 << 31, at: 0, unflushed: false, rng: Rng::new(model.seed) }
    }

    const READ: Op = Op::Read;

    #[test]
    fn going_on_costs_the_transfer_alone() {
        let mut h = head(HddModel::default());
        // 150 MB in 1000 pieces take one second.
        let total: u64 = (0..1000).map(|i| h.serve(READ, i * 293, 293).0).sum();
        assert_eq!(total / 1_000_000, 1000 * 293 * 512 / 150_000);
        let gap = h.serve(READ, h.at + 100, 8);
        assert_eq!(gap, h.transfer(100).after(h.transfer(8)), "a small gap passes under the head");
    }

    #[test]
    fn seeks_cost_what_the_default_promises() {
        let average = |distance: u64| {
            let mut h = head(HddModel::default());
            let mut sum = 0;
            for i in 0..2000 {
                h.at = if i % 2 == 0 { distance } else { 0 };
                sum += h.serve(READ, distance - h.at, 8).0;
            }
            sum / 2000 / 1000
        };
        let short = average((1 << 31) / 2000);
        assert!((3800..4500).contains(&short), "short seeks take {short} us on average");
        let long = average((1 << 31) * 9 / 10);
        assert!((7500..8300).contains(&long), "long seeks take {long} us on average");
    }

    #[test]
    fn the_seed_decides() {
        let run = |seed| {
            let mut h = head(HddModel { seed, ..HddModel::default() });
            (1..50).map(|i| h.serve(READ, i * 7_654_321 % (1 << 31), 8)).collect::<Vec<_>>()
        };
        assert_eq!(run(1), run(1));
        assert_ne!(run(1), run(2));
    }

    #[test]
    fn a_flush_behind_writes_waits_for_the_medium_once() {
        let mut h = head(HddModel { seed: 3, ..HddModel::default() });
        h.serve(Op::Write { fua: false }, 0, 8);
        assert!(h.serve(Op::Flush, 0, 0) > COMMAND);
        assert_eq!(h.serve(Op::Flush, 0, 0), COMMAND);
    }
}
