//! A simulated disk. The fault model:
//!
//! * **Time.** Every request takes as long as the seed says; completions come in any order. Some take very long.
//! * **Effect.** A write takes effect somewhere between submission and completion, in two parts at most; a read sees
//!   the medium at one moment in between. So requests that overlap in time see each other in any way.
//! * **Volatile cache.** A write is durable once a flush has ended that was submitted after the write's completion,
//!   or at its own completion if it carries FUA. Whatever else was taken may be durable too.
//! * **Power cut.** Of what is not durable any subset of sectors survives (of logical blocks on devices with larger
//!   ones), each with any of the versions it has had since it was last durable; parts of requests under way included.
//! * **Kill.** The process dies and the device does not: what the device holds stays, durable or not; each request
//!   under way is carried out completely or not at all.
//! * **Errors.** Reads, writes and flushes fail on demand or by chance, or all of them from some moment on. A failed write leaves any mixture of old and
//!   new sectors, a failed flush makes nothing durable. Nothing is damaged that was not being written.
//! * **Discards.** A discarded block keeps its contents, or becomes zeros, or garbage; it stays what it became.
//! * **Held requests.** A test can hold requests back and let them go on later.
//! * **Outages.** All requests fail from some moment on, for good or for a while.
//! * **Hangs.** A device takes requests, or flushes alone, and answers none of them until it is released.
//! * **Lossy flushes.** A flush fails, and what was not durable is lost at once; later flushes succeed.
//! * **Pulled devices.** The device alone loses its power while the host stays up: every request fails from then on, and
//!   it comes back in the next boot as another incarnation.
//! * **Late writes.** A write that was under way when the process died takes effect later (`kill_late`).
//!
//! The cache device recognises what the engine writes to it (`probe`), so that a crash can be aimed.
//!
//! Each device has its own faults; a cut can take the power of all devices, of the cache device alone or of the backing
//! devices alone, with another share surviving on each (`plan::Cut`). Bits that flip and writes that go astray or are
//! lost are done to images at rest (`rot`). Devices that lie about flushes are no fault that the engine claims to
//! survive: they test the simulator (`tests/lying_devices.rs`).

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
    /// The step at which it was submitted.
    submitted: u64,
    /// Of a write: the first sector of the request that has not taken effect.
    left: Option<(u64, Rc<[u8]>)>,
    /// Of a read: its data, if the read has taken effect.
    snapshot: Option<Vec<u8>>,
    fails: bool,
    /// It is a flush that fails and loses data.
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
    /// The error of a failing request.
    errno: i32,
    /// One in so many requests fails; 0 for none.
    errors_one_in: u64,
    /// Every request that is submitted in these steps fails.
    outage: Range<u64>,
    /// From this step on requests are held: all, or flushes alone.
    hang: Option<(u64, bool)>,
    /// So many flushes succeed before one fails and loses this.
    lossy_flush: Option<(u64, Retained)>,
    /// At this step the device alone loses its power, and keeps this.
    pull: Option<(u64, Retained)>,
    /// Writes of a dead process that have not taken effect.
    late: Vec<power::Late>,
    /// Changes whenever the system can see that the device was away.
    incarnation: u64,
    probe: Option<Probe>,
    /// Flushes and FUA do nothing. No such device is in the fault model: this tests the simulator.
    lies: bool,
    holds: Vec<Matching>,
    garbage: u64,
    counters: Counters,
}

/// A simulated disk. See the module head.
pub struct SimDisk {
    info: DeviceInfo,
    world: World,
    number: u64,
    state: RefCell<State>,
    /// A request that broke the contract of devices was submitted.
    violation: Cell<bool>,
    this: std::rc::Weak<SimDisk>,
}

impl SimDisk {
    /// A disk of zeros. `number` identifies it in the world.
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

    /// Properties of such a disk: a name, a size, a logical block size.
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

    /// Stores bytes at once and durably, as an earlier format.
    pub fn put(&self, at: Sector, bytes: &[u8]) {
        let s = &mut *self.state.borrow_mut();
        s.medium.live.write(at, bytes);
        s.medium.durable.write(at, bytes);
    }

    /// The medium as it is.
    pub fn medium(&self) -> Medium {
        self.state.borrow().medium.clone()
    }

    /// Puts a medium with these contents, all durable, into the disk. Requests under way are lost.
    pub fn load(&self, image: Image) {
        let s = &mut *self.state.borrow_mut();
        s.medium.restart(image);
        s.late.clear();
        s.running.clear();
    }

    /// Contents as reads see them.
    pub fn image(&self) -> Image {
        self.state.borrow().medium.live.clone()
    }

    /// Sets how long requests take.
    pub fn set_speed(&self, speed: Speed) {
        self.state.borrow_mut().speed = speed;
    }

    /// Makes requests fail; each of these comes true on its own.
    pub fn set_faults(&self, faults: Vec<Fault>) {
        self.state.borrow_mut().faults = faults;
    }

    /// From now on requests fail with this error, instead of `EIO`.
    pub fn fail_with(&self, errno: i32) {
        self.state.borrow_mut().errno = errno;
    }

    /// Lets one in `n` requests fail; 0 for none.
    pub fn set_errors(&self, one_in: u64) {
        self.state.borrow_mut().errors_one_in = one_in;
    }

    /// After so many more requests the device fails all of them.
    pub fn die_after(&self, requests: u64) {
        self.fail_between(requests, None);
    }

    /// After so many more requests the device fails all of them; after `then` more it is back.
    pub fn fail_between(&self, requests: u64, then: Option<u64>) {
        let s = &mut *self.state.borrow_mut();
        // A request takes two steps.
        let from = s.step + 2 * requests;
        s.outage = from..then.map_or(u64::MAX, |n| from + 2 * n);
    }

    /// The device reports data as durable that is not. It violates the contract; see `tests/lying_devices.rs`.
    pub fn lie(&self) {
        self.state.borrow_mut().lies = true;
    }

    /// After so many more requests the device answers none any more, or no flush (`flushes`), until it is released.
    pub fn hang_after(&self, requests: u64, flushes: bool) {
        let s = &mut *self.state.borrow_mut();
        s.hang = Some((s.step + 2 * requests, flushes));
    }

    /// Whether a read that touches these sectors is held back.
    pub fn holds_read(&self, range: Range<u64>) -> bool {
        let reads = Matching { kind: Kind::Read, range };
        self.state.borrow().running.values().any(|r| r.held && reads.matches(&r.request))
    }

    /// After so many more flushes one fails, and what is not durable then is lost.
    pub fn lose_in_flush(&self, after: u64, retained: Retained) {
        self.state.borrow_mut().lossy_flush = Some((after, retained));
    }

    /// After so many more requests the device alone loses its power. It is back in the next boot.
    pub fn pull_after(&self, requests: u64, retained: Retained) {
        let s = &mut *self.state.borrow_mut();
        s.pull = Some((s.step + 2 * requests, retained));
    }

    /// Recognises the metadata of this set from now on.
    pub fn recognise(&self, magic: format::SetMagic, bucket: Sectors) {
        self.state.borrow_mut().probe = Some(Probe::new(magic, bucket));
    }

    /// Tells the device from what it was before it was away, as far as the system can see that.
    pub fn incarnation(&self) -> u64 {
        self.state.borrow().incarnation
    }

    /// Holds back requests that are submitted from now on and match.
    pub fn hold(&self, matching: Matching) {
        self.state.borrow_mut().holds.push(matching);
    }

    /// Requests held back now.
    pub fn held(&self) -> usize {
        self.state.borrow().running.values().filter(|r| r.held).count()
    }

    /// Lets everything that is held back go on, and holds nothing any more.
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

    /// The counters.
    pub fn counters(&self) -> Counters {
        self.state.borrow().counters
    }

    /// Whether a request was submitted that no device accepts. Such a request is a bug of its sender.
    pub fn was_misused(&self) -> bool {
        self.violation.get()
    }

    /// Requests under way, for a person to read.
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

    /// The bytes that a write-like request puts on the medium.
    fn written(s: &mut State, number: u64, request: &Request, rng: &mut Rng) -> Option<Rc<[u8]>> {
        match request.op {
            Op::Write { .. } => {
                let bytes = request.buffer.as_ref().map(Buffer::as_slice)?;
                Some(Rc::from(&bytes[request.byte_range()]))
            }
            Op::WriteZeroes { .. } => Some(Rc::from(vec![0; request.sectors.bytes() as usize])),
            Op::Discard => {
                let mut bytes = s.medium.live.read_vec(request.sector, request.sectors);
                let habit = rng.below(4);
                for block in bytes.chunks_mut(s.medium.block_sectors as usize * SECTOR) {
                    match if habit == 3 { rng.below(3) } else { habit } {
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
            if let Some((from, data)) = r.left.take() {
                // Any mixture of old and new blocks.
                let block = s.medium.block_sectors as usize * SECTOR;
                for (i, bytes) in data.chunks(block).enumerate() {
                    if self.world.random(|rng| rng.chance(1, 2)) {
                        let at = r.request.sector + Sectors(from + i as u64 * s.medium.block_sectors);
                        s.medium.apply(op, at, Rc::from(bytes));
                    }
                }
            }
            s.medium.ended(op, step);
            s.counters.failed += 1;
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
                        None => s.medium.live.read(r.request.sector, &mut target[range]),
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

    /// Marks the request as held, or as a flush that fails and loses data, where the faults of the device say so.
    fn mark_faults(s: &mut State, r: &mut Running) {
        let hangs =
            s.hang.is_some_and(|(at, flushes)| s.step >= at && (!flushes || r.request.op == Op::Flush));
        r.held = hangs || s.holds.iter().any(|h| h.matches(&r.request));
        if let Some((left, retained)) = s.lossy_flush.filter(|_| r.request.op == Op::Flush) {
            r.loses = (left == 0).then_some(retained);
            s.lossy_flush = left.checked_sub(1).map(|left| (left, retained));
        }
    }

    /// Draws what happens to the request, and lets the part of it take effect that does so at once. Returns how long it takes.
    fn begin(&self, s: &mut State, op: u64, r: &mut Running) -> Nanos {
        let speed = s.speed;
        let (data, split, looks_now, delay) = self.world.random(|rng| {
            r.fails = SimDisk::fails(s, &r.request, rng) || r.loses.is_some();
            let data = SimDisk::written(s, self.number, &r.request, rng);
            let blocks = r.request.sectors.0 / s.medium.block_sectors;
            // Nothing at once, or everything, or a part.
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
            r.snapshot = Some(s.medium.live.read_vec(r.request.sector, r.request.sectors));
        }
        delay
    }

    /// Tells the world what is written; how much longer it takes, if it does.
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
            // Never reached the device, and is never answered.
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
