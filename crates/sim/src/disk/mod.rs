//! A simulated disk.
//!
//! The fault model:
//!
//! * **Time.** The seed determines the duration of every request; completions come in any order. Some take very long.
//! * **Effect.** A write takes effect at a moment between submission and completion, in at most two parts. A read returns
//!   the medium at one moment in between. So requests that overlap in time can see each other in any way.
//! * **Volatile cache.** A write is durable once a flush has ended that was submitted after the write's completion, or at
//!   its own completion if it carries FUA. Any other write that was taken may be durable too.
//! * **Power loss.** Of the data that is not durable any subset of sectors survives (of logical blocks on devices with
//!   larger ones), each with any of its versions since it was last durable. Parts of requests in flight may survive, too.
//! * **Kill.** The process dies and the device does not. The device keeps its data, durable or not. Each request in flight
//!   is carried out completely or not at all.
//! * **Errors.** Reads, writes and flushes fail on demand or by chance, or all of them from some moment on. A failed write
//!   leaves any mixture of old and new sectors, and a failed flush makes nothing durable. No data is damaged that was not
//!   being written.
//! * **Discards.** A discarded block keeps its contents, or becomes zeros, or garbage. Then it does not change by itself.
//! * **Held requests.** A test can hold requests back and release them later.
//! * **Outages.** All requests fail from some moment on, for good or for a while.
//! * **Hangs.** A device takes requests, or flushes alone, and answers none of them until it is released.
//! * **Lossy flushes.** A flush fails, and data that is not durable is lost at once; later flushes succeed.
//! * **Pulled devices.** The device alone loses its power while the host stays up: every request fails from then on, and
//!   the device is back in the next boot as another incarnation.
//! * **Damage.** A block is read with other contents than were written, until a part of it is written or the process ends.
//! * **Late writes.** A write that was in flight when the process died takes effect later (`kill_late`).
//!
//! The cache device recognises what the engine writes to it (`probe`), so that a crash can be aimed.
//!
//! Each device has its own faults. A cut can take the power of all devices, of the cache device alone or of the backing
//! devices alone, and each device retains another share (`plan::Cut`). Flipped bits and misdirected or lost writes are
//! applied to images at rest (`rot`). The engine does not claim to survive devices that report false flushes: these test
//! the simulator (`tests/lying_devices.rs`). Must not know the engine.

mod damage;
mod holes;
mod kinds;
mod medium;
mod power;
mod probe;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use format::{Sector, Sectors};
use io::{Buffer, Completer, Device, DeviceInfo, IoError, Nanos, Op, Request, Rng};

pub use crate::landmark::Landmark;
pub use holes::WithHoles;
pub use kinds::{Counters, Fault, Kind, Matching, Retained, Speed};
pub use medium::{Medium, Moment};

use crate::image::Image;
use crate::stamp::{SECTOR, fill_garbage};
use crate::world::World;
use probe::Probe;

const EIO: i32 = 5;

struct Running {
    request: Request,
    completer: Completer,
    /// The step at which the request was submitted.
    submitted: u64,
    /// The part of a write that has not taken effect: its first sector in the request, and its data.
    left: Option<(u64, Rc<[u8]>)>,
    /// The data of a read, once the read has taken effect.
    snapshot: Option<Vec<u8>>,
    fails: bool,
    /// Whether it is a flush that fails and loses data.
    loses: Option<Retained>,
    held: bool,
}

impl Running {
    fn new(request: Request, completer: Completer) -> Running {
        Running {
            request,
            completer,
            submitted: 0,
            left: None,
            snapshot: None,
            fails: false,
            loses: None,
            held: false,
        }
    }
}

struct State {
    medium: Medium,
    step: u64,
    next_op: u64,
    running: BTreeMap<u64, Running>,
    speed: Speed,
    faults: Vec<Fault>,
    /// The error number of failing requests.
    errno: i32,
    /// One in this many requests fails; 0 for none.
    errors_one_in: u64,
    /// Every request that is submitted in these steps fails.
    outage: Range<u64>,
    /// From this step on requests are held: flushes alone, or all requests.
    hang: Option<(u64, bool)>,
    /// Number of flushes that succeed before one fails, and what the device retains then.
    lossy_flush: Option<(u64, Retained)>,
    /// The step at which the device alone loses its power, and what it retains then.
    pull: Option<(u64, Retained)>,
    /// Writes of a dead process that have not taken effect.
    late: Vec<power::Late>,
    /// A number that changes whenever the system can see that the device was away.
    incarnation: u64,
    probe: Option<Probe>,
    /// Whether flushes and FUA have no effect. The fault model has no such device: this tests the simulator.
    lies: bool,
    holds: Vec<Matching>,
    garbage: u64,
    counters: Counters,
}

/// A simulated disk.
pub struct SimDisk {
    info: DeviceInfo,
    world: World,
    number: u64,
    state: RefCell<State>,
    /// Whether a request was submitted that broke the contract of devices.
    violation: Cell<bool>,
    this: std::rc::Weak<SimDisk>,
}

impl SimDisk {
    /// Makes a disk of zeros. `number` identifies it in the world.
    pub fn new(world: &World, number: u64, info: DeviceInfo) -> Rc<SimDisk> {
        let block_sectors = u64::from(info.logical_block_bytes) / SECTOR as u64;
        let medium = Medium::zeros(&info.name, info.sectors, block_sectors);
        Rc::new_cyclic(|this| SimDisk {
            info,
            world: world.clone(),
            number,
            state: RefCell::new(State {
                medium,
                step: 0,
                next_op: 0,
                running: BTreeMap::new(),
                speed: Speed::even(50),
                faults: Vec::new(),
                errno: EIO,
                errors_one_in: 0,
                outage: 0..0,
                hang: None,
                lossy_flush: None,
                pull: None,
                late: Vec::new(),
                incarnation: 0,
                probe: None,
                lies: false,
                holds: Vec::new(),
                garbage: 0,
                counters: Counters::default(),
            }),
            violation: Cell::new(false),
            this: this.clone(),
        })
    }

    /// The properties of a disk with this name, size and logical block size.
    pub fn describe(name: &str, sectors: u64, logical_block_bytes: u32) -> DeviceInfo {
        DeviceInfo {
            name: Arc::from(name),
            sectors: Sectors(sectors),
            logical_block_bytes,
            physical_block_bytes: logical_block_bytes.max(4096),
            optimal_io_bytes: 0,
            rotational: false,
            discard: true,
            sparse: false,
            partial_stripes_expensive: false,
        }
    }

    /// Stores bytes at once and durably, as a format before the run.
    pub fn put(&self, at: Sector, bytes: &[u8]) {
        let s = &mut *self.state.borrow_mut();
        s.medium.live.write(at, bytes);
        s.medium.durable.write(at, bytes);
    }

    /// Damages a block: reads return `bytes` until a part of the block is written, or the process ends.
    pub fn damage(&self, at: Sector, bytes: &[u8]) {
        self.state.borrow_mut().medium.damaged.add(at, bytes);
        self.world.log(|| format!("{}: {at}+{} is damaged", self.info.name, bytes.len() / SECTOR));
    }

    /// Writes bytes durably, as a command beside the process does. Nothing older can come back.
    pub fn put_durably(&self, at: Sector, bytes: &[u8]) {
        let s = &mut *self.state.borrow_mut();
        let op = s.next_op;
        s.next_op += 1;
        s.medium.apply(op, at, Rc::from(bytes));
        s.medium.make_durable(|u| u.op == op);
    }

    /// A copy of the medium.
    pub fn medium(&self) -> Medium {
        self.state.borrow().medium.clone()
    }

    /// Replaces the contents of the disk, all durable. Requests in flight are lost.
    pub fn load(&self, image: Image) {
        let s = &mut *self.state.borrow_mut();
        s.medium.restart(image);
        s.medium.damaged.clear();
        s.late.clear();
        s.running.clear();
    }

    /// The contents that reads return.
    pub fn image(&self) -> Image {
        self.state.borrow().medium.live.clone()
    }

    /// Sets the duration of requests.
    pub fn set_speed(&self, speed: Speed) {
        self.state.borrow_mut().speed = speed;
    }

    /// Makes requests fail. Each fault counts on its own.
    pub fn set_faults(&self, faults: Vec<Fault>) {
        self.state.borrow_mut().faults = faults;
    }

    /// Sets the error number with which requests fail, instead of `EIO`.
    pub fn fail_with(&self, errno: i32) {
        self.state.borrow_mut().errno = errno;
    }

    /// Makes one in `one_in` requests fail; 0 for none.
    pub fn set_errors(&self, one_in: u64) {
        self.state.borrow_mut().errors_one_in = one_in;
    }

    /// Makes the device fail all requests after this many more.
    pub fn die_after(&self, requests: u64) {
        self.fail_between(requests, None);
    }

    /// Makes the device fail all requests after `requests` more; after `then` more requests it works again.
    pub fn fail_between(&self, requests: u64, then: Option<u64>) {
        let s = &mut *self.state.borrow_mut();
        // A request takes two steps.
        let from = s.step + 2 * requests;
        s.outage = from..then.map_or(u64::MAX, |n| from + 2 * n);
    }

    /// Whether the next request fails because of [`SimDisk::fail_between`].
    pub fn is_failing(&self) -> bool {
        let s = self.state.borrow();
        s.outage.contains(&s.step)
    }

    /// Makes the device report data as durable that is not. That violates the contract; see `tests/lying_devices.rs`.
    pub fn lie(&self) {
        self.state.borrow_mut().lies = true;
    }

    /// Makes the device hang after this many more requests, until it is released; with `flushes` only flushes hang.
    pub fn hang_after(&self, requests: u64, flushes: bool) {
        let s = &mut *self.state.borrow_mut();
        s.hang = Some((s.step + 2 * requests, flushes));
    }

    /// Whether a read that touches these sectors is held back.
    pub fn holds_read(&self, range: Range<u64>) -> bool {
        self.holds(Kind::Read, range)
    }

    fn holds(&self, kind: Kind, range: Range<u64>) -> bool {
        let wanted = Matching { kind, range };
        self.state.borrow().running.values().any(|r| r.held && wanted.matches(&r.request))
    }

    /// Makes a flush fail after this many more flushes, and loses data that is not durable then.
    pub fn lose_in_flush(&self, after: u64, retained: Retained) {
        self.state.borrow_mut().lossy_flush = Some((after, retained));
    }

    /// Makes the device alone lose its power after this many more requests. It is back in the next boot.
    pub fn pull_after(&self, requests: u64, retained: Retained) {
        let s = &mut *self.state.borrow_mut();
        s.pull = Some((s.step + 2 * requests, retained));
    }

    /// Makes the disk recognise the metadata of this set from now on.
    pub fn recognise(&self, magic: format::SetMagic, bucket: Sectors) {
        self.state.borrow_mut().probe = Some(Probe::new(magic, bucket));
    }

    /// A number that changes whenever the device was away, as far as the system can see that.
    pub fn incarnation(&self) -> u64 {
        self.state.borrow().incarnation
    }

    /// Holds back matching requests that are submitted from now on.
    pub fn hold(&self, matching: Matching) {
        self.state.borrow_mut().holds.push(matching);
    }

    /// Number of requests that are held back.
    pub fn held(&self) -> usize {
        self.state.borrow().running.values().filter(|r| r.held).count()
    }

    /// Releases all held requests, and holds no further ones.
    pub fn release(&self) {
        let released: Vec<(u64, Nanos)> = {
            let s = &mut *self.state.borrow_mut();
            s.holds.clear();
            s.hang = None;
            let speed = s.speed;
            let held = s.running.iter_mut().filter(|(_, r)| r.held);
            held.map(|(op, r)| {
                r.held = false;
                (*op, self.world.random(|rng| speed.draw(rng)))
            })
            .collect()
        };
        for (op, delay) in released {
            self.end_after(op, delay);
        }
    }

    /// The counts of requests.
    pub fn counters(&self) -> Counters {
        self.state.borrow().counters
    }

    /// Whether a request was submitted that no device accepts, which is a bug of its sender.
    pub fn was_misused(&self) -> bool {
        self.violation.get()
    }

    /// The requests in flight, as text.
    pub fn dump(&self) -> String {
        let s = self.state.borrow();
        let one = |r: &Running| {
            let held = if r.held { " (held)" } else { "" };
            format!("{} {}+{}{held}", r.request.op, r.request.sector, r.request.sectors)
        };
        let all: Vec<String> = s.running.values().map(one).collect();
        format!("{}: {} under way: {}", self.info.name, all.len(), all.join(", "))
    }

    fn end_after(&self, op: u64, delay: Nanos) {
        let this = self.this.clone();
        self.world.after(delay, move || {
            if let Some(disk) = this.upgrade() {
                disk.end(op);
            }
        });
    }

    fn note(&self, what: u64, r: &Request) {
        self.world.note(self.number << 8 | what);
        self.world.note(r.sector.0 << 20 | r.sectors.0);
    }

    fn fails(s: &mut State, request: &Request, rng: &mut Rng) -> bool {
        for f in s.faults.iter_mut().filter(|f| f.count > 0 && f.matching.matches(request)) {
            if f.skip > 0 {
                f.skip -= 1;
            } else {
                if f.count < u32::MAX {
                    f.count -= 1;
                }
                return true;
            }
        }
        if s.outage.contains(&s.step) {
            return true;
        }
        s.errors_one_in > 0 && request.op != Op::Discard && rng.chance(1, s.errors_one_in)
    }

    /// The bytes that a write, a write of zeros or a discard puts on the medium.
    fn written(s: &mut State, number: u64, request: &Request, rng: &mut Rng) -> Option<Rc<[u8]>> {
        match request.op {
            Op::Write { .. } => {
                let bytes = request.buffer.as_ref().map(Buffer::as_slice)?;
                Some(Rc::from(&bytes[request.byte_range()]))
            }
            Op::WriteZeroes { .. } => Some(Rc::from(vec![0; request.sectors.bytes() as usize])),
            Op::Discard => {
                let mut bytes = s.medium.live.read_vec(request.sector, request.sectors);
                let contents = rng.below(4);
                for block in bytes.chunks_mut(s.medium.block_sectors as usize * SECTOR) {
                    match if contents == 3 { rng.below(3) } else { contents } {
                        0 => {}
                        1 => block.fill(0),
                        _ => {
                            for sector in block.chunks_mut(SECTOR) {
                                s.garbage += 1;
                                fill_garbage(sector, number << 48 | s.garbage);
                            }
                        }
                    }
                }
                Some(Rc::from(bytes))
            }
            Op::Read | Op::Flush => None,
        }
    }

    fn count(s: &mut State, request: &Request) {
        let c = &mut s.counters;
        match request.op {
            Op::Read => c.reads += 1,
            Op::Write { fua: true } => c.durable_writes += 1,
            Op::Write { fua: false } => c.writes += 1,
            Op::Flush => c.flushes += 1,
            Op::Discard | Op::WriteZeroes { .. } => c.plain += 1,
        }
        if let Op::Write { .. } = request.op {
            c.sectors_written += request.sectors.0;
        }
    }

    fn end(&self, op: u64) {
        self.world.before_effect();
        let s = &mut *self.state.borrow_mut();
        if !s.running.contains_key(&op) || !self.world.effect() {
            return;
        }
        let Some(mut r) = s.running.remove(&op) else { return };
        s.step += 1;
        let step = s.step;
        self.note(if r.fails { 2 } else { 1 }, &r.request);
        self.world.log(|| {
            let (i, r) = (&r.request, &r);
            let failed = if r.fails { " FAILED" } else { "" };
            format!("{} end {} {}+{}{failed}", self.info.name, i.op, i.sector, i.sectors)
        });
        if r.fails {
            self.leave_a_mixture(&mut s.medium, op, &mut r);
            s.medium.ended(op, step);
            s.counters.failed += 1;
            s.counters.failed_flushes += u64::from(r.request.op == Op::Flush);
            if let Some(retained) = r.loses {
                self.world.random(|rng| s.medium.lose(retained, rng));
                self.world.data_lost(self.number);
            }
            let e = IoError::of(&self.info.name, &r.request, s.errno);
            r.completer.complete(Err(e), r.request.buffer);
            return;
        }
        match r.request.op {
            Op::Read => {
                let range = r.request.byte_range();
                if let Some(target) = r.request.buffer.as_mut().and_then(Buffer::get_mut) {
                    match &r.snapshot {
                        Some(bytes) => target[range].copy_from_slice(bytes),
                        None => s.medium.read(r.request.sector, &mut target[range]),
                    }
                }
            }
            Op::Flush if s.lies => {}
            Op::Flush => s.medium.make_durable(|u| u.ended.is_some_and(|e| e < r.submitted)),
            Op::Write { .. } | Op::Discard | Op::WriteZeroes { .. } => {
                if let Some((from, data)) = r.left.take() {
                    s.medium.apply(op, r.request.sector + Sectors(from), data);
                }
                s.medium.ended(op, step);
                if r.request.op == (Op::Write { fua: true }) && !s.lies {
                    s.medium.make_durable(|u| u.op == op);
                }
            }
        }
        r.completer.complete(Ok(()), r.request.buffer);
    }

    /// Leaves any mixture of old and new blocks of a failed write.
    fn leave_a_mixture(&self, medium: &mut Medium, op: u64, write: &mut Running) {
        let Some((from, data)) = write.left.take() else { return };
        let block_sectors = medium.block_sectors;
        for (i, bytes) in data.chunks(block_sectors as usize * SECTOR).enumerate() {
            if self.world.random(|rng| rng.chance(1, 2)) {
                let at = write.request.sector + Sectors(from + i as u64 * block_sectors);
                medium.apply(op, at, Rc::from(bytes));
            }
        }
    }

    /// Marks a request as held, or as a flush that fails and loses data, if the faults of the device say so.
    fn mark_faults(s: &mut State, r: &mut Running) {
        let hangs =
            s.hang.is_some_and(|(at, flushes)| s.step >= at && (!flushes || r.request.op == Op::Flush));
        r.held = hangs || s.holds.iter().any(|h| h.matches(&r.request));
        if let Some((left, retained)) = s.lossy_flush.filter(|_| r.request.op == Op::Flush) {
            r.loses = (left == 0).then_some(retained);
            s.lossy_flush = left.checked_sub(1).map(|left| (left, retained));
        }
    }

    /// Draws what happens to a request, and applies the part of it that takes effect at once. Returns the duration.
    fn begin(&self, s: &mut State, op: u64, r: &mut Running) -> Nanos {
        let speed = s.speed;
        let (data, split, looks_now, delay) = self.world.random(|rng| {
            r.fails = SimDisk::fails(s, &r.request, rng) || r.loses.is_some();
            let data = SimDisk::written(s, self.number, &r.request, rng);
            let blocks = r.request.sectors.0 / s.medium.block_sectors;
            // At once nothing takes effect, or the whole write, or a part of it.
            let split = match rng.below(4) {
                0 => rng.below(blocks + 1) * s.medium.block_sectors,
                1 => r.request.sectors.0,
                _ => 0,
            };
            (data, split, rng.chance(1, 2), speed.draw(rng))
        });
        if let Some(data) = data {
            let split = if r.fails || r.held { 0 } else { split };
            let (now, later) = data.split_at(split as usize * SECTOR);
            if !now.is_empty() {
                s.medium.apply(op, r.request.sector, Rc::from(now));
            }
            if !later.is_empty() {
                r.left = Some((split, Rc::from(later)));
            }
        }
        if r.request.op == Op::Read && looks_now && !r.held {
            let mut bytes = vec![0; r.request.sectors.bytes() as usize];
            s.medium.read(r.request.sector, &mut bytes);
            r.snapshot = Some(bytes);
        }
        delay
    }

    /// Reports the landmarks of a write to the world. Returns the additional duration of a write to a node.
    fn recognised(&self, s: &mut State, request: &Request) -> Option<Nanos> {
        let (Some(probe), Op::Write { .. }, Some(b)) = (&mut s.probe, request.op, &request.buffer) else {
            return None;
        };
        let landmarks = probe.see(request.sector, &b.as_slice()[request.byte_range()]);
        landmarks.into_iter().flatten().for_each(|l| self.world.landmark(l));
        let is_node = |l: &Landmark| matches!(l, Landmark::LeafAppend | Landmark::NodeWrite);
        landmarks.iter().flatten().any(is_node).then_some(s.speed.nodes)
    }
}

impl Device for SimDisk {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn submit(&self, mut request: Request, completer: Completer) {
        if let Err(e) = self.info.check(&mut request) {
            self.violation.set(true);
            self.world.log(|| format!("REFUSED {e}"));
            return completer.complete(Err(e), request.buffer);
        }
        self.world.before_effect();
        let s = &mut *self.state.borrow_mut();
        let op = s.next_op;
        s.next_op += 1;
        let mut r = Running::new(request, completer);
        if !self.world.effect() {
            // The request does not reach the device, and is never answered.
            s.running.insert(op, r);
            return;
        }
        self.note(0, &r.request);
        self.world.log(|| {
            let i = &r.request;
            format!("{} {} {}+{}", self.info.name, i.op, i.sector, i.sectors)
        });
        SimDisk::count(s, &r.request);
        s.step += 1;
        r.submitted = s.step;
        if s.pull.is_some_and(|(at, _)| s.step >= at) {
            self.lose_power(s);
        }
        SimDisk::mark_faults(s, &mut r);
        let delay = self.begin(s, op, &mut r);
        let held = r.held;
        let delay = self.recognised(s, &r.request).map_or(delay, |more| delay.after(more));
        if self.number == 0 && r.request.op == (Op::Write { fua: true }) {
            self.world.durable_write();
        }
        s.running.insert(op, r);
        if !held {
            self.end_after(op, delay);
        }
    }
}
