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
//!
//! * **Outages.** All requests fail from some moment on, for good or for a while.
//!
//! Each device has its own faults; a cut can take the power of all devices, of the cache device alone or of the backing
//! devices alone, with another share surviving on each (`plan::Cut`). Bits that flip and writes that go astray or are
//! lost are done to images at rest (`rot`). Devices that lie about flushes are no fault that the engine claims to
//! survive: they test the simulator (`tests/canary.rs`).

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use format::{Sector, Sectors};
use io::{Buffer, Completer, Device, DeviceInfo, IoError, Nanos, Op, Request, Rng};
use serde::{Deserialize, Serialize};

use crate::image::Image;
use crate::stamp::{SECTOR, fill_garbage};
use crate::world::World;

const EIO: i32 = 5;

/// How long requests take.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Speed {
    /// At least this.
    #[serde(with = "crate::plan::as_ns")]
    pub base: Nanos,
    /// At most this much more.
    #[serde(with = "crate::plan::as_ns")]
    pub spread: Nanos,
    /// One in so many takes `slow`; 0 for none.
    pub slow_one_in: u64,
    /// See `slow_one_in`.
    #[serde(with = "crate::plan::as_ns")]
    pub slow: Nanos,
}

impl Speed {
    /// All requests take the same time.
    pub const fn even(micros: u64) -> Speed {
        Speed { base: Nanos(micros * 1000), spread: Nanos(0), slow_one_in: 0, slow: Nanos(0) }
    }

    fn draw(&self, rng: &mut Rng) -> Nanos {
        if self.slow_one_in > 0 && rng.chance(1, self.slow_one_in) {
            return self.slow;
        }
        Nanos(self.base.0 + rng.below(self.spread.0 + 1))
    }
}

/// Kinds of requests, for faults and holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Reads.
    Read,
    /// Writes without FUA; zeros.
    Write,
    /// Writes with FUA.
    DurableWrite,
    /// Flushes.
    Flush,
    /// Discards.
    Discard,
}

impl Kind {
    fn of(op: Op) -> Kind {
        match op {
            Op::Read => Kind::Read,
            Op::Write { fua: false } | Op::WriteZeroes => Kind::Write,
            Op::Write { fua: true } => Kind::DurableWrite,
            Op::Flush => Kind::Flush,
            Op::Discard => Kind::Discard,
        }
    }
}

/// Requests of one kind that touch a range (a flush touches every range).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Matching {
    /// The kind.
    pub kind: Kind,
    /// The sectors.
    pub range: Range<u64>,
}

impl Matching {
    /// All requests of a kind.
    pub const fn all(kind: Kind) -> Matching {
        Matching { kind, range: 0..u64::MAX }
    }

    fn matches(&self, r: &Request) -> bool {
        let end = r.sector.0 + r.sectors.0;
        let touches = r.sector.0 < self.range.end && self.range.start < end;
        Kind::of(r.op) == self.kind && (r.op == Op::Flush || touches)
    }
}

/// Requests that fail.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Fault {
    /// Which ones.
    pub matching: Matching,
    /// So many of them succeed first.
    pub skip: u32,
    /// Then so many fail.
    pub count: u32,
}

/// What survives a power cut of what is not durable.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Keep {
    /// Nothing.
    Nothing,
    /// Everything that took effect, and every request under way.
    Everything,
    /// Each block with this chance of eight.
    Some(u64),
}

/// How often what was done.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Counters {
    /// Reads.
    pub reads: u64,
    /// Writes without FUA.
    pub writes: u64,
    /// Writes with FUA.
    pub durable_writes: u64,
    /// Flushes.
    pub flushes: u64,
    /// Discards and zeros.
    pub plain: u64,
    /// Sectors written.
    pub sectors_written: u64,
    /// Requests that were made to fail.
    pub failed: u64,
}

/// Something written that is not known to be durable.
#[derive(Clone)]
struct Unflushed {
    op: u64,
    sector: Sector,
    data: Rc<[u8]>,
    /// The step at which its request ended; none while it is under way.
    ended: Option<u64>,
}

impl Unflushed {
    fn overlaps(&self, r: &Range<u64>) -> bool {
        self.range().start < r.end && r.start < self.range().end
    }

    fn range(&self) -> Range<u64> {
        self.sector.0..self.sector.0 + (self.data.len() / SECTOR) as u64
    }
}

struct Running {
    request: Request,
    completer: Completer,
    /// The step at which it was submitted.
    submitted: u64,
    /// Of a write: what has not taken effect yet, from this sector of the request on.
    left: Option<(u64, Rc<[u8]>)>,
    /// Of a read: what it saw, if it has looked already.
    seen: Option<Vec<u8>>,
    fails: bool,
    held: bool,
}

/// The medium with everything on it, durable or not; a power cut can be tried out on a copy.
#[derive(Clone)]
pub struct Medium {
    live: Image,
    durable: Image,
    unflushed: Vec<Unflushed>,
    block_sectors: u64,
}

impl Medium {
    fn zeros(name: &str, sectors: Sectors, block_sectors: u64) -> Medium {
        let image = Image::zeros(name, sectors);
        Medium { live: image.clone(), durable: image, unflushed: Vec::new(), block_sectors }
    }

    /// What reads see.
    pub fn live(&self) -> &Image {
        &self.live
    }

    fn apply(&mut self, op: u64, sector: Sector, data: Rc<[u8]>) {
        self.live.write(sector, &data);
        self.unflushed.push(Unflushed { op, sector, data, ended: None });
    }

    fn ended(&mut self, op: u64, step: u64) {
        for u in self.unflushed.iter_mut().filter(|u| u.op == op) {
            u.ended = Some(step);
        }
    }

    /// What `covered` accepts is durable now, and what lies below it.
    fn make_durable(&mut self, covered: impl Fn(&Unflushed) -> bool) {
        let mut ranges: Vec<Range<u64>> = Vec::new();
        let mut durable = vec![false; self.unflushed.len()];
        for (i, u) in self.unflushed.iter().enumerate().rev() {
            // Older versions below a durable one must not come back.
            durable[i] = covered(u) || ranges.iter().any(|r| u.overlaps(r));
            if durable[i] {
                ranges.push(u.range());
            }
        }
        let mut i = 0;
        let image = &mut self.durable;
        self.unflushed.retain(|u| {
            if durable[i] {
                image.write(u.sector, &u.data);
            }
            i += 1;
            !durable[i - 1]
        });
    }

    /// What is left after a power cut.
    pub fn after_power_cut(&self, keep: Keep, rng: &mut Rng) -> Image {
        let mut image = self.durable.clone();
        let block = self.block_sectors as usize * SECTOR;
        for u in &self.unflushed {
            for (i, bytes) in u.data.chunks(block).enumerate() {
                let kept = match keep {
                    Keep::Nothing => false,
                    Keep::Everything => true,
                    Keep::Some(of_eight) => rng.chance(of_eight, 8),
                };
                if kept {
                    image.write(u.sector + Sectors(i as u64 * self.block_sectors), bytes);
                }
            }
        }
        image
    }
}

/// A device at one moment: what is durable, and what may survive a power cut or not.
#[derive(Clone)]
pub struct Moment {
    durable: Image,
    writes: Vec<(Sector, Rc<[u8]>)>,
    block_sectors: u64,
}

impl Moment {
    /// Equal for equal moments.
    pub fn fingerprint(&self) -> u64 {
        let mut sum = self.durable.fingerprint();
        let mut add = |word: u64| sum = (sum ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(31);
        for (at, data) in &self.writes {
            add(at.0 << 32 | data.len() as u64);
            for bytes in data.chunks_exact(8) {
                add(bytes.iter().fold(0, |word, b| word << 8 | u64::from(*b)));
            }
        }
        sum
    }

    /// What survives or not, as one: block by block if there are at most `most` of them, else write by write.
    fn pieces(&self, most: usize) -> Vec<(Sector, &[u8])> {
        let block_bytes = self.block_sectors as usize * SECTOR;
        let blocks: usize = self.writes.iter().map(|(_, data)| data.len().div_ceil(block_bytes)).sum();
        let unit = if blocks <= most { block_bytes } else { usize::MAX };
        let mut pieces = Vec::new();
        for (at, data) in &self.writes {
            let bytes = data.len().min(unit);
            let place = |i: usize| *at + Sectors((i * bytes / SECTOR) as u64);
            pieces.extend(data.chunks(bytes.max(1)).enumerate().map(|(i, data)| (place(i), data)));
        }
        pieces
    }

    /// How many [`Moment::outcomes`] there are.
    pub fn count(&self, most: usize) -> usize {
        let n = self.pieces(most).len();
        if n <= most { 1 << n } else { 2 + 2 * n }
    }

    /// What may be left if the power fails: every subset of the blocks that are not durable, if there are at most
    /// `most` of them; else every subset of the writes, if there are at most so many; else none, all, each write
    /// alone, and all but one.
    pub fn outcomes(&self, most: usize) -> Vec<Image> {
        let pieces = self.pieces(most);
        let outcome = |kept: &dyn Fn(usize) -> bool| {
            let mut image = self.durable.clone();
            for (_, (at, bytes)) in pieces.iter().enumerate().filter(|(i, _)| kept(*i)) {
                image.write(*at, bytes);
            }
            image
        };
        let n = pieces.len();
        if n <= most {
            return (0..1_u32 << n).map(|set| outcome(&|i| set >> i & 1 == 1)).collect();
        }
        let mut all = vec![outcome(&|_| false), outcome(&|_| true)];
        for one in 0..n {
            all.push(outcome(&|i| i == one));
            all.push(outcome(&|i| i != one));
        }
        all
    }
}

struct State {
    medium: Medium,
    step: u64,
    next_op: u64,
    running: BTreeMap<u64, Running>,
    speed: Speed,
    faults: Vec<Fault>,
    /// One in so many requests fails; 0 for none.
    errors_one_in: u64,
    /// Every request that is submitted in these steps fails.
    outage: Range<u64>,
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
    /// A disk of zeros. `number` tells it from the others of the world.
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
                errors_one_in: 0,
                outage: 0..0,
                lies: false,
                holds: Vec::new(),
                garbage: 0,
                counters: Counters::default(),
            }),
            violation: Cell::new(false),
            this: this.clone(),
        })
    }

    /// What such a disk is like: a name, a size, a logical block size.
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

    /// Stores bytes at once and durably: what a formatter did long ago.
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
        s.medium.live = image.clone();
        s.medium.durable = image;
        s.medium.unflushed.clear();
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

    /// The device says that data is durable when it is not. It breaks every promise; see `tests/canary.rs`.
    pub fn lie(&self) {
        self.state.borrow_mut().lies = true;
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

    /// What was counted.
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

    /// Everything that every request has done so far may be on the medium, or not. Lets parts of requests that did
    /// not take effect yet do so by chance, as a power cut can.
    fn touch_running(s: &mut State, rng: &mut Rng, of_eight: u64) {
        let running: Vec<u64> = s.running.keys().copied().collect();
        for op in running {
            if rng.chance(of_eight, 8)
                && let Some(r) = s.running.get_mut(&op)
                && let Some((from, data)) = r.left.take()
            {
                let at = r.request.sector + Sectors(from);
                s.medium.apply(op, at, data);
            }
        }
    }

    /// What would be left if the power failed now. Nothing changes.
    pub fn after_power_cut(&self, keep: Keep, rng: &mut Rng) -> Image {
        let s = self.state.borrow();
        let mut medium = s.medium.clone();
        let of_eight = if keep == Keep::Everything { 8 } else { 4 };
        for (op, r) in &s.running {
            if let Some((from, data)) = &r.left
                && rng.chance(of_eight, 8)
            {
                medium.apply(*op, r.request.sector + Sectors(*from), data.clone());
            }
        }
        medium.after_power_cut(keep, rng)
    }

    /// The device as it is now, for trying out what a power cut could leave of it.
    pub fn moment(&self) -> Moment {
        let s = self.state.borrow();
        let unflushed = s.medium.unflushed.iter().map(|u| (u.sector, u.data.clone()));
        let under_way = s.running.values().filter_map(|r| {
            let (from, data) = r.left.as_ref()?;
            Some((r.request.sector + Sectors(*from), data.clone()))
        });
        Moment {
            durable: s.medium.durable.clone(),
            writes: unflushed.chain(under_way).collect(),
            block_sectors: s.medium.block_sectors,
        }
    }

    /// The power fails: see the module head.
    pub fn power_cut(&self, keep: Keep) {
        let s = &mut *self.state.borrow_mut();
        let image = self.world.random(|rng| {
            let chance = if keep == Keep::Everything { 8 } else { 4 };
            SimDisk::touch_running(s, rng, chance);
            s.medium.after_power_cut(keep, rng)
        });
        s.medium.live = image.clone();
        s.medium.durable = image;
        s.medium.unflushed.clear();
        self.forget_requests(s);
    }

    /// The process dies: see the module head.
    pub fn kill(&self) {
        let s = &mut *self.state.borrow_mut();
        self.world.random(|rng| SimDisk::touch_running(s, rng, 4));
        s.step += 1;
        let step = s.step;
        for u in &mut s.medium.unflushed {
            u.ended.get_or_insert(step);
        }
        self.forget_requests(s);
    }

    fn forget_requests(&self, s: &mut State) {
        s.running.clear();
        s.holds.clear();
        s.faults.clear();
        s.errors_one_in = 0;
        s.outage = 0..0;
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

    /// What a write-like request puts on the medium.
    fn written(s: &mut State, number: u64, request: &Request, rng: &mut Rng) -> Option<Rc<[u8]>> {
        match request.op {
            Op::Write { .. } => {
                let bytes = request.buffer.as_ref().map(Buffer::as_slice)?;
                Some(Rc::from(&bytes[request.byte_range()]))
            }
            Op::WriteZeroes => Some(Rc::from(vec![0; request.sectors.bytes() as usize])),
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
            Op::Discard | Op::WriteZeroes => c.plain += 1,
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
            let e = IoError::of(&self.info.name, &r.request, EIO);
            r.completer.complete(Err(e), r.request.buffer);
            return;
        }
        match r.request.op {
            Op::Read => {
                let range = r.request.byte_range();
                if let Some(target) = r.request.buffer.as_mut().and_then(Buffer::get_mut) {
                    match &r.seen {
                        Some(bytes) => target[range].copy_from_slice(bytes),
                        None => s.medium.live.read(r.request.sector, &mut target[range]),
                    }
                }
            }
            Op::Flush if s.lies => {}
            Op::Flush => s.medium.make_durable(|u| u.ended.is_some_and(|e| e < r.submitted)),
            Op::Write { .. } | Op::Discard | Op::WriteZeroes => {
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
        let mut r =
            Running { request, completer, submitted: 0, left: None, seen: None, fails: false, held: false };
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
        r.held = s.holds.iter().any(|h| h.matches(&r.request));
        let speed = s.speed;
        let (data, split, looks_now, delay) = self.world.random(|rng| {
            r.fails = SimDisk::fails(s, &r.request, rng);
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
            r.seen = Some(s.medium.live.read_vec(r.request.sector, r.request.sectors));
        }
        let held = r.held;
        if self.number == 0 && r.request.op == (Op::Write { fua: true }) {
            self.world.durable_write();
        }
        s.running.insert(op, r);
        if !held {
            self.end_after(op, delay);
        }
    }
}
