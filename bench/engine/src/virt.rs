//! Slow devices in virtual time: the duration of a workload on throttled disks, without such disks.
//!
//! Owns a clock that jumps to the next event, and disks with limits of requests and bytes per second. After an idle time a
//! disk permits a burst of a tenth of a second's worth, as QEMU does. Contents are stored in pages; a page of one repeated
//! word takes no memory. Nothing here is random, and a run takes only processor time. Must not know the workload.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::Future;
use std::rc::Rc;
use std::sync::Arc;

use format::Sectors;
use io::{Clock, Completer, Device, DeviceInfo, Fifo, Handle, Nanos, Op, Request, Runtime};

const PAGE: u64 = 4096;

struct JumpingClock(Cell<Nanos>);

impl Clock for JumpingClock {
    fn now(&self) -> Nanos {
        self.0.get()
    }

    fn wall_seconds(&self) -> u64 {
        1_000_000 + self.0.get().0 / 1_000_000_000
    }
}

/// Runs a task to its end in virtual time.
///
/// # Panics
/// If the task waits for an event that never happens.
pub fn run<F: Future<Output = ()> + 'static>(task: impl FnOnce(Handle) -> F) {
    let clock = Rc::new(JumpingClock(Cell::new(Nanos(1))));
    let rt = Runtime::new(clock.clone(), 1);
    let done = rt.handle().spawn(task(rt.handle()));
    loop {
        while rt.run(&mut Fifo, 10_000) > 0 {}
        if done.try_take().is_some() {
            return;
        }
        let Some(next) = rt.next_deadline() else { panic!("waits for something that never happens") };
        clock.0.set(next.max(clock.0.get()));
        rt.fire_timers();
    }
}

/// The limits of a disk.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Requests per second, 0 for no limit. Flushes do not count.
    pub iops: u64,
    /// Bytes per second, 0 for no limit.
    pub bytes_per_second: u64,
    /// The duration of every request.
    pub latency: Nanos,
}

/// Memory with a latency of 5 µs.
pub const RAM: Limits = Limits { iops: 0, bytes_per_second: 5_000_000_000, latency: Nanos(5_000) };
/// The SSD of the benchmarks: 3000 requests per second.
pub const SSD: Limits = Limits { iops: 3000, bytes_per_second: 0, latency: Nanos(50_000) };
/// The disk of the benchmarks: 150 requests and 150 MB per second.
pub const HDD: Limits = Limits { iops: 150, bytes_per_second: 150_000_000, latency: Nanos(50_000) };

/// The requests to a disk.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Asked {
    /// Reads.
    pub reads: u64,
    /// Bytes read.
    pub bytes_read: u64,
    /// Writes.
    pub writes: u64,
    /// Bytes written.
    pub bytes_written: u64,
    /// Flushes.
    pub flushes: u64,
}

enum Page {
    /// One word, repeated.
    Word(u64),
    Bytes(Box<[u8]>),
}

/// A disk with limits, in virtual time.
pub struct SlowDisk {
    info: DeviceInfo,
    rt: Handle,
    limits: Limits,
    /// Returns the word of a page that was never written.
    fresh: fn(u64) -> u64,
    pages: RefCell<BTreeMap<u64, Page>>,
    requests_due: Cell<u64>,
    bytes_due: Cell<u64>,
    asked: Cell<Asked>,
    this: std::rc::Weak<SlowDisk>,
}

impl SlowDisk {
    /// Makes a disk whose page `n` consists of the repeated word `fresh(n)`.
    pub fn new(
        rt: &Handle,
        name: &str,
        sectors: Sectors,
        limits: Limits,
        fresh: fn(u64) -> u64,
    ) -> Rc<SlowDisk> {
        let info = DeviceInfo {
            name: Arc::from(name),
            sectors,
            logical_block_bytes: 512,
            physical_block_bytes: 4096,
            optimal_io_bytes: 0,
            rotational: false,
            discard: false,
            sparse: false,
            partial_stripes_expensive: false,
        };
        Rc::new_cyclic(|this| SlowDisk {
            info,
            rt: rt.clone(),
            limits,
            fresh,
            pages: RefCell::default(),
            requests_due: Cell::new(0),
            bytes_due: Cell::new(0),
            asked: Cell::default(),
            this: this.clone(),
        })
    }

    /// The counts of the requests to the disk so far.
    pub fn asked(&self) -> Asked {
        self.asked.get()
    }

    /// The word of which page `n` consists; `None` if it has other contents.
    pub fn word(&self, n: u64) -> Option<u64> {
        match self.pages.borrow().get(&n) {
            None => Some((self.fresh)(n)),
            Some(Page::Word(w)) => Some(*w),
            Some(Page::Bytes(_)) => None,
        }
    }

    /// The time at which a request that is sent now ends.
    fn ends(&self, request: &Request) -> Nanos {
        const BURST: u64 = 100_000_000;
        let now = self.rt.now().0;
        if !request.op.has_buffer() {
            return Nanos(now + self.limits.latency.0);
        }
        let cost = |per_second: u64, n: u64| (n * 1_000_000_000).checked_div(per_second).unwrap_or(0);
        let begins = self.requests_due.get().max(self.bytes_due.get()).max(now);
        let later = |due: &Cell<u64>, cost| due.set(due.get().max(now.saturating_sub(BURST)) + cost);
        later(&self.requests_due, cost(self.limits.iops, 1));
        later(&self.bytes_due, cost(self.limits.bytes_per_second, request.sectors.bytes()));
        Nanos(begins + self.limits.latency.0)
    }

    fn carry_out(&self, request: &mut Request) {
        let range = request.byte_range();
        let (op, first) = (request.op, request.sector.bytes());
        let Some(buffer) = &mut request.buffer else { return };
        let pages = &mut *self.pages.borrow_mut();
        let mut at = 0;
        while at < range.len() {
            let byte = first + at as u64;
            let (nr, skip) = (byte / PAGE, (byte % PAGE) as usize);
            let n = (PAGE as usize - skip).min(range.len() - at);
            let piece = range.start + at..range.start + at + n;
            let page = pages.entry(nr).or_insert_with(|| Page::Word((self.fresh)(nr)));
            match op {
                Op::Read => load(page, skip, &mut buffer.as_mut()[piece]),
                _ => store(page, skip, &buffer.as_slice()[piece]),
            }
            at += n;
        }
    }

    fn count(&self, request: &Request) {
        let mut a = self.asked.get();
        let bytes = request.sectors.bytes();
        match request.op {
            Op::Read => (a.reads, a.bytes_read) = (a.reads + 1, a.bytes_read + bytes),
            Op::Flush => a.flushes += 1,
            _ => (a.writes, a.bytes_written) = (a.writes + 1, a.bytes_written + bytes),
        }
        self.asked.set(a);
    }
}

fn words(bytes: &[u8]) -> impl Iterator<Item = u64> + '_ {
    bytes.chunks_exact(8).map(|w| w.iter().rev().fold(0, |n, b| n << 8 | u64::from(*b)))
}

fn load(page: &Page, skip: usize, target: &mut [u8]) {
    match page {
        Page::Bytes(bytes) => target.copy_from_slice(&bytes[skip..skip + target.len()]),
        Page::Word(word) => fill(target, *word),
    }
}

fn store(page: &mut Page, skip: usize, source: &[u8]) {
    if source.len() == PAGE as usize {
        let first = words(source).next().unwrap_or(0);
        *page = match words(source).all(|w| w == first) {
            true => Page::Word(first),
            false => Page::Bytes(source.into()),
        };
        return;
    }
    let mut whole = vec![0; PAGE as usize].into_boxed_slice();
    load(page, 0, &mut whole);
    whole[skip..skip + source.len()].copy_from_slice(source);
    *page = Page::Bytes(whole);
}

/// Fills a buffer with a repeated word.
pub fn fill(target: &mut [u8], word: u64) {
    target.chunks_exact_mut(8).for_each(|w| w.copy_from_slice(&word.to_le_bytes()));
}

impl Device for SlowDisk {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn submit(&self, mut request: Request, completer: Completer) {
        if let Err(e) = self.info.check(&mut request) {
            return completer.complete(Err(e), request.buffer);
        }
        self.count(&request);
        let ends = self.ends(&request);
        let this = self.this.clone();
        let rt = self.rt.clone();
        self.rt.spawn(async move {
            rt.sleep_until(ends).await;
            if let Some(disk) = this.upgrade() {
                disk.carry_out(&mut request);
            }
            completer.complete(Ok(()), request.buffer);
        });
    }
}

/// A cached device in virtual time: a set in writeback mode with default settings.
pub struct SlowRig {
    /// The set.
    pub set: engine::CacheSet,
    /// The cached device of the set.
    pub volume: Rc<engine::Volume>,
    /// The cache device.
    pub cache: Rc<SlowDisk>,
    /// The backing device.
    pub backing: Rc<SlowDisk>,
}

pub use rig::DATA_OFFSET;

/// Formats two disks and opens them as a set.
///
/// # Panics
/// If the set cannot be opened.
pub async fn slow_rig(
    rt: &Handle,
    (cache_sectors, cache_limits): (Sectors, Limits),
    (backing_sectors, backing_limits): (Sectors, Limits),
    fresh: fn(u64) -> u64,
) -> SlowRig {
    let cache = SlowDisk::new(rt, "cache", cache_sectors, cache_limits, |_| 0);
    let backing = SlowDisk::new(rt, "backing", backing_sectors, backing_limits, fresh);
    let disks = (io::Disk::new(cache.clone(), rt.clone()), io::Disk::new(backing.clone(), rt.clone()));
    rig::format(&disks.0, &disks.1, Sectors(8), crate::BUCKET).await;
    let options = engine::SetOptions::default();
    let set = engine::CacheSet::open(disks.0, options).await.unwrap_or_else(|e| panic!("{e}"));
    let volume = set.register(disks.1).await.unwrap_or_else(|e| panic!("{e}"));
    SlowRig { set, volume, cache, backing }
}
