//! Whole runs: boot after boot with crashes in between, then a last boot without faults, then the judges.
//!
//! Owns the course of a run and its report. Every failure, whether of the oracle, the judges or an assertion of the engine,
//! ends the run with the seed and one command that replays it. Must not know the events inside a boot.

use std::backtrace::{Backtrace, BacktraceStatus};
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::Once;

use io::{Nanos, Rng};

use crate::client::{Client, DamagedSectors};
use crate::crash_log::Memory;
use crate::disk::Counters;
use crate::faults;
use crate::hardware::{Hardware, Layout};
use crate::image::Image;
use crate::judge;
use crate::oracle::Oracle;
use crate::plan::{BootPlan, Cut, Faults, Lying, Plan, Settings, Substitute};
use crate::report::{Cost, Report};
use crate::session::{Given, Session};
use crate::stamp::{Content, SECTOR};
use crate::substitute;
use crate::violation::Violation;
use crate::world::{Machine, Outcome, World};

/// Limit of the virtual time of one boot, which is much longer than any boot takes.
const BOOT_LIMIT: Nanos = Nanos::from_secs(1_000_000);

/// A run that failed.
#[derive(Debug)]
pub struct Failure {
    /// The plan of the run.
    pub plan: Box<Plan>,
    /// The check that failed.
    pub violation: Box<Violation>,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seed = self.plan.seed;
        writeln!(f, "seed {seed} failed: {}", self.violation)?;
        writeln!(f, "replay: cargo run -p ubcache-sim --release -- --seed {seed} --verbose")?;
        write!(f, "shrink: cargo run -p ubcache-sim --release -- --seed {seed} --shrink {seed}.plan")
    }
}

impl std::error::Error for Failure {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&*self.violation)
    }
}

/// Runs a seed.
///
/// # Errors
/// If a check fails.
pub fn run_seed(seed: u64, verbose: bool) -> Result<Report, Failure> {
    run(&Plan::from_seed(seed), verbose)
}

/// Runs a plan.
///
/// # Errors
/// If a check fails.
pub fn run(plan: &Plan, verbose: bool) -> Result<Report, Failure> {
    run_and_count(plan, verbose).map(|(report, _)| report)
}

/// Runs a plan, and returns its costs.
///
/// # Errors
/// If a check fails.
pub fn run_and_count(plan: &Plan, verbose: bool) -> Result<(Report, Cost), Failure> {
    let run = AssertUnwindSafe(|| {
        let mut run = Run::new(plan, verbose);
        run.all().map(|()| (run.report, run.cost()))
    });
    note_panics();
    PANIC.with(|p| *p.borrow_mut() = Some(String::new()));
    let result = catch_unwind(run);
    let panic = PANIC.with(RefCell::take).unwrap_or_default();
    let violation = match result {
        Ok(Ok(report)) => return Ok(report),
        Ok(Err(violation)) => violation,
        Err(message) => Violation::Panicked { message: format!("{}{panic}", panic_message(&*message)) },
    };
    Err(Failure { plan: Box::new(plan.clone()), violation: Box::new(violation) })
}

thread_local! {
    /// The message and place of the panic in this thread's run; `None` while no run is active.
    static PANIC: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// From now on stores a panic in a run for the report, instead of printing it.
fn note_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let print = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let in_run = PANIC.with(|p| match &mut *p.borrow_mut() {
                Some(place) => {
                    let at = info.location().map(|l| format!(" at {}:{}", l.file(), l.line()));
                    place.push_str(&at.unwrap_or_default());
                    let trace = Backtrace::capture();
                    if trace.status() == BacktraceStatus::Captured {
                        place.push_str(&format!("\n{trace}"));
                    }
                    true
                }
                None => false,
            });
            if !in_run {
                print(info);
            }
        }));
    });
}

fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic without a message").to_owned()
}

struct Run<'a> {
    plan: &'a Plan,
    world: World,
    hardware: Hardware,
    oracles: Vec<Rc<RefCell<Oracle>>>,
    flash_made: Rc<Cell<bool>>,
    initialised: bool,
    /// Number of successive boots that ended before the set was open.
    cut_short: u64,
    /// The settings of the last boot.
    settings: Option<Settings>,
    /// The last boot that opened the set stopped it, and no device loses data that it has acknowledged.
    was_stopped: bool,
    /// The memory that outlives the process, if the plan has it.
    memory: Option<Rc<Memory>>,
    /// The incarnation of the cache device to which `memory` belongs.
    memory_of: u64,
    /// Whether the engine may know more than the devices have, because its memory outlived the process.
    knows_more: bool,
    /// The cache device before each earlier boot, if a later boot needs it.
    copies: Vec<Option<Image>>,
    /// Number of the effect of the next boot before which writes of the last process take effect.
    late: Option<u64>,
    /// The devices that have failed a flush and lost data in the present boot while the process lives.
    lost: Rc<RefCell<BTreeSet<u64>>>,
    /// The incarnations of all devices at the begin of the present boot.
    incarnations: Vec<u64>,
    /// Number of failed requests to the cache device before the present boot.
    cache_failures: u64,
    report: Report,
}

/// All devices and oracles at one moment, to which a run can return.
struct Older {
    images: Vec<Image>,
    oracles: Vec<Oracle>,
    flash_made: bool,
}

impl<'a> Run<'a> {
    fn new(plan: &'a Plan, verbose: bool) -> Run<'a> {
        let mut rng = Rng::new(plan.seed);
        let world = World::new(rng.next_u64());
        world.set_verbose(verbose);
        let checksums = plan.layout.checksums && plan.kernel_boots == 0;
        let hardware = Hardware::new(&world, Layout { checksums, ..plan.layout.clone() });
        let mut oracles = Vec::new();
        for (i, b) in plan.layout.backings.iter().enumerate() {
            let size = b.data_sectors / b.block_sectors * b.block_sectors;
            oracles.push(Rc::new(RefCell::new(Oracle::new(i as u8, size, false))));
        }
        if plan.flash_sectors > 0 {
            let i = oracles.len() as u8;
            oracles.push(Rc::new(RefCell::new(Oracle::new(i, plan.flash_sectors, true))));
        }
        let report = Report::of_one_run();
        let flash_made = Rc::default();
        Run {
            plan,
            world,
            hardware,
            oracles,
            flash_made,
            initialised: false,
            cut_short: 0,
            settings: None,
            was_stopped: false,
            memory: plan.crash_log.then(Rc::default),
            memory_of: 0,
            knows_more: false,
            copies: Vec::new(),
            late: None,
            lost: Rc::default(),
            incarnations: Vec::new(),
            cache_failures: 0,
            report,
        }
    }

    fn all(&mut self) -> Result<(), Violation> {
        if self.plan.first_gen > 0 {
            self.hardware.age(self.plan.first_gen);
        }
        let mut drained = false;
        for boot in &self.plan.boots {
            let in_order = self.boot(boot)?;
            drained = in_order && boot.drain && !boot.alone && boot.absent.is_empty();
        }
        self.judge_crashed()?;
        if drained {
            self.judge_clean()?;
        }
        self.report.effects = self.world.effects();
        self.report.landmarks = self.world.landmarks();
        self.report.hash = self.world.hash();
        self.report.next_random = self.world.random(Rng::next_u64);
        Ok(())
    }

    fn cost(&self) -> Cost {
        let mut backing = Counters::default();
        self.hardware.backings.iter().for_each(|b| backing.add(&b.counters()));
        Cost { cache: self.hardware.cache.counters(), backing, ended: self.world.now() }
    }

    /// Runs one boot. Returns whether everything was stopped in order.
    fn boot(&mut self, boot: &BootPlan) -> Result<bool, Violation> {
        self.report.boots += 1;
        self.report.alone += u64::from(boot.alone);
        self.report.absent += u64::from(!boot.absent.is_empty());
        self.count_faults(boot);
        let judged = self.judge_crashed()?;
        self.substitute(boot)?;
        self.end_of_kernel();
        let mut machine = self.hardware.boot(self.plan.order);
        self.forget_other_device();
        let late = self.late.take();
        let older = self.prepare(boot, late);
        let damaged = DamagedSectors::default();
        if let Some(damage) = boot.faults.as_ref().and_then(|f| f.damage.as_ref()) {
            faults::damage_later(&self.hardware, damage, &damaged);
        }
        let clients: Vec<Rc<Client>> = self
            .oracles
            .iter()
            .enumerate()
            .map(|(i, o)| {
                let (rt, damaged) = (machine.handle(), damaged.clone());
                Client::with_damage(&self.world, rt, i as u8, o.clone(), damaged)
            })
            .collect();
        let given = Given {
            world: self.world.clone(),
            parts: self.hardware.parts(&machine),
            cache: self.hardware.cache.clone(),
            backings: self.hardware.backings.clone(),
            clients,
            judged: if self.knows_more || late.is_some() { Vec::new() } else { judged },
            flash_made: self.flash_made.clone(),
            was_stopped: self.was_stopped,
            memory: self.memory.clone(),
        };
        let session = Session::new(self.plan, boot.clone(), given);
        let theirs = session.clone();
        let task = machine.handle().spawn(async move { theirs.run().await });
        let outcome = machine.run(&task, BOOT_LIMIT);
        self.observe(&session, matches!(outcome, Outcome::PowerLoss));
        let in_order = self.end_of(outcome, &session)?;
        // A boot without the cache device leaves the set as it was.
        if !boot.alone {
            self.was_stopped = in_order && self.plan.lying.is_none();
        }
        self.world.pass(Nanos::from_secs(boot.off_seconds));
        self.end_boot(machine, &session, boot, in_order);
        if let Some(older) = older.take().filter(|_| !in_order) {
            self.go_back(older);
        }
        Ok(in_order)
    }

    /// Whether the session has stopped everything in order.
    fn end_of(
        &self,
        outcome: Outcome<Result<bool, Violation>>,
        session: &Session,
    ) -> Result<bool, Violation> {
        if let Some(d) = self.hardware.disks().find(|d| d.was_misused()) {
            return Err(Violation::Misuse { disk: d.dump() });
        }
        match outcome {
            Outcome::Done(result) => result,
            Outcome::PowerLoss => Ok(false),
            Outcome::Stuck(why) => Err(Violation::Stuck { why: format!("{why}; {}", self.dump(session)) }),
        }
    }

    /// Turns checksums on in the superblock, if kernels have used the set so far and do not use it any more.
    fn end_of_kernel(&self) {
        let boots = self.plan.kernel_boots;
        if self.plan.layout.checksums && boots > 0 && self.report.boots > boots {
            self.hardware.turn_checksums_on();
        }
    }

    /// Gives the engine a substitute of the cache device, if the boot has one.
    fn substitute(&mut self, boot: &BootPlan) -> Result<(), Violation> {
        let number = self.copies.len();
        let is_wanted = |b: &BootPlan| b.substitute == Some(Substitute::Copy(number));
        let wanted = self.initialised && self.plan.boots.iter().any(is_wanted);
        self.copies.push(wanted.then(|| self.hardware.cache.image()));
        // There is no substitute while writes of the last process are in flight, or if devices report false durability.
        let free = self.initialised && self.late.is_none() && self.plan.lying.is_none();
        let Some(substitute) = boot.substitute.filter(|_| free) else { return Ok(()) };
        let given = substitute::give(&self.hardware, &self.oracles, substitute, &self.copies, BOOT_LIMIT)?;
        self.report.substitutes += u64::from(given);
        Ok(())
    }

    /// Prepares the faults and events of a boot.
    ///
    /// The returned cell gets the state to which the devices return after the boot, if the boot has such a state.
    fn prepare(&mut self, boot: &BootPlan, late: Option<u64>) -> Rc<RefCell<Option<Older>>> {
        self.hardware.cache.set_speed(boot.cache_speed);
        self.hardware.backings.iter().for_each(|b| b.set_speed(boot.backing_speed));
        if let Some(faults) = &boot.faults {
            faults::inject(&self.hardware, faults);
        }
        match self.plan.lying {
            Some(Lying::Cache) => self.hardware.cache.lie(),
            Some(Lying::Backing) => self.hardware.backings.iter().for_each(|b| b.lie()),
            Some(Lying::CrashLog) | None => {}
        }
        let now = self.world.effects();
        self.world.cut_power_at(boot.crash.map(|n| now + n));
        self.world.cut_power_in_durable_write(boot.crash_in_durable_write);
        self.world.aim(boot.aim);
        let (oracles, lost) = (self.oracles.clone(), self.lost.clone());
        lost.borrow_mut().clear();
        self.incarnations = self.hardware.disks().map(|d| d.incarnation()).collect();
        self.cache_failures = self.hardware.cache.counters().failed;
        self.world.set_loss_watcher(Rc::new(move |device| {
            for (i, oracle) in oracles.iter().enumerate() {
                if device == 0 || device == i as u64 + 1 {
                    oracle.borrow_mut().device_lost();
                }
            }
            lost.borrow_mut().insert(device);
        }));
        if let Some(effects) = late {
            let disks: Vec<_> = self.hardware.disks().cloned().collect();
            self.world.at_effect(now + effects, move || disks.iter().for_each(|d| d.land_late()));
        }
        let older = Rc::new(RefCell::new(None));
        if let Some(n) = boot.older {
            let (disks, oracles): (Vec<_>, _) =
                (self.hardware.disks().cloned().collect(), self.oracles.clone());
            let (made, older) = (self.flash_made.clone(), older.clone());
            self.world.at_effect(now + n, move || {
                let crashed = |o: &Rc<RefCell<Oracle>>| {
                    let mut o = o.borrow().clone();
                    o.crashed();
                    o
                };
                let images = disks.iter().map(|d| d.image()).collect();
                let oracles = oracles.iter().map(crashed).collect();
                *older.borrow_mut() = Some(Older { images, oracles, flash_made: made.get() });
            });
        }
        let boots = self.report.boots;
        self.world.log(|| format!("BOOT {boots}, crash after {:?}, {:?}", boot.crash, boot.aim));
        older
    }

    /// Returns all devices to an older state.
    fn go_back(&mut self, older: Older) {
        self.world.log(|| "the devices come back older".into());
        for (disk, image) in self.hardware.disks().zip(older.images) {
            disk.load(image);
            disk.returns_as_another();
        }
        for (oracle, then) in self.oracles.iter().zip(older.oracles) {
            oracle.borrow_mut().go_back(then);
        }
        self.flash_made.set(older.flash_made);
        self.initialised = false;
        self.knows_more = false;
    }

    fn count_faults(&mut self, boot: &BootPlan) {
        let settings = self.settings.replace(boot.settings.clone());
        let r = &mut self.report;
        r.changed_settings += u64::from(settings.is_some_and(|s| s != boot.settings));
        let Some(f) = &boot.faults else { return };
        r.with_errors += 1;
        r.unreadable += u64::from(f.unreadable.is_some() || f.unreadable_backing.is_some());
        r.outages += u64::from(f.outage.is_some());
        r.outages_that_end += u64::from(f.outage.as_ref().is_some_and(|o| o.requests.is_some()));
    }

    fn end_boot(&mut self, machine: Machine, session: &Rc<Session>, boot: &BootPlan, in_order: bool) {
        self.check_no_damage(session, boot);
        if in_order {
            self.report.stops += 1;
            self.cut_short = 0;
            for (oracle, client) in self.oracles.iter().zip(&session.given.clients) {
                // A volume that was not served was not stopped, and its device loses its power all the same.
                match client.volume() {
                    Some(_) => oracle.borrow_mut().stopped(),
                    None => oracle.borrow_mut().crashed(),
                }
            }
            self.initialised |= session.set().is_some();
            session.give_up();
            // The devices lose their power, so the judges see whether the stop has made all data durable.
            self.hardware.power_loss(machine, crate::disk::Retained::Nothing);
            self.end_of_host();
            return;
        }
        // A failed device retains its data only while it has power, so the process dies unless the plan says more.
        let spared = boot.faults.is_some() && !boot.cut_with_faults;
        let killed = !self.world.is_off() || spared;
        let cut = if killed { Cut::Kill } else { boot.cut };
        self.report.aimed += u64::from(boot.aim.is_some() && self.world.is_off());
        self.report.hangs += u64::from(boot.faults.as_ref().is_some_and(|f| f.hang.is_some()));
        self.note_crash(cut, boot, session);
        self.late = boot.late.filter(|_| cut == Cut::Kill);
        match self.late {
            Some(_) => self.hardware.kill_late(machine),
            None => self.hardware.cut(machine, cut),
        }
        match cut {
            Cut::Power(..) => self.end_of_host(),
            Cut::Cache(_) => self.hardware.cache.returns_as_another(),
            Cut::Backing(_) => self.hardware.backings.iter().for_each(|b| b.returns_as_another()),
            Cut::Kill => {}
        }
        session.give_up();
    }

    /// Checks that no data was taken for damaged, unless a device of the plan loses data that it has acknowledged.
    fn check_no_damage(&self, session: &Session, boot: &BootPlan) {
        let loses = |f: &Faults| f.pull.is_some() || f.damage.is_some();
        if self.plan.lying.is_none()
            && !boot.faults.as_ref().is_some_and(loses)
            && !boot.loses_in_flush()
            && let Some(set) = session.set()
        {
            let damaged = set.checksum_counters().damaged_blocks;
            assert!(
                damaged == 0,
                "checksums: {damaged} blocks count as damaged, and no device damages any: {:?}",
                set.take_events()
            );
        }
    }

    /// Drops memory that belongs to another incarnation of the cache device, as crate `serve` does.
    fn forget_other_device(&mut self) {
        let now = self.hardware.cache.incarnation();
        let other = std::mem::replace(&mut self.memory_of, now) != now;
        if other && self.plan.lying != Some(Lying::CrashLog) {
            self.end_of_host();
        }
    }

    /// Drops the memory of the host.
    fn end_of_host(&mut self) {
        self.memory = self.plan.crash_log.then(Rc::default);
        self.knows_more = false;
    }

    /// Whether the end of the process loses no acknowledged change: there is memory that outlives the process, and the engine must
    /// not have invalidated it (`docs/simulation.md` has the reasons for the exceptions).
    fn crash_log_counts(&self) -> bool {
        let failed = self.hardware.cache.counters().failed > self.cache_failures;
        self.memory.is_some() && !failed && !self.has_lost_data(0)
    }

    /// Whether a device has lost data in the present boot while the process lives: in a flush that failed, or because it was
    /// unplugged.
    fn has_lost_data(&self, device: usize) -> bool {
        let now = self.hardware.disks().nth(device).map(|d| d.incarnation());
        self.lost.borrow().contains(&(device as u64)) || now != self.incarnations.get(device).copied()
    }

    /// Reports a crash to the oracles, and counts it.
    fn note_crash(&mut self, cut: Cut, boot: &BootPlan, session: &Session) {
        let mut strict = false;
        for (i, oracle) in self.oracles.iter().enumerate() {
            if cut == Cut::Kill && self.crash_log_counts() && !self.has_lost_data(i + 1) {
                oracle.borrow_mut().killed();
                strict = true;
            } else {
                oracle.borrow_mut().crashed();
            }
        }
        self.knows_more |= self.memory.is_some();
        self.report.strict_kills += u64::from(strict);
        self.report.strict_kills_with_faults += u64::from(strict && boot.faults.is_some());
        self.report.crashes += 1;
        self.cut_short = if session.was_opened() { 0 } else { self.cut_short + 1 };
        self.report.in_recovery += u64::from(self.cut_short > 0);
        self.report.in_second_recovery += u64::from(self.cut_short > 1);
        match cut {
            Cut::Power(..) => self.report.power_losses += 1,
            Cut::Cache(_) | Cut::Backing(_) => self.report.partial_cuts += 1,
            Cut::Kill => self.report.kills += 1,
        }
    }

    fn observe(&mut self, session: &Session, crash: bool) {
        self.report.add_boot(&session.counts());
        let Some(set) = session.set() else { return };
        let (c, s) = (set.counters(), set.status());
        self.report.gc_runs += c.gc_runs;
        self.report.moved += c.moved_extents;
        self.report.promoted += c.promoted_extents;
        self.report.bridged += set.set_counters().writeback_bridged_runs;
        self.report.prio_writes += c.prio_writes;
        self.report.rewrites += c.btree_rewrites;
        self.report.node_reads += c.btree_reads;
        self.report.journal_entries += s.journal_written.0;
        self.report.trees += u64::from(s.btree_nodes > 1);
        self.report.full += u64::from(s.in_use_percent > 80);
        self.report.crashes_when_full += u64::from(crash && s.in_use_percent > 80);
        self.report.crashes_in_full_journal += u64::from(crash && s.journal_free.0 == 0);
        self.report.btree_waits += c.btree_waits;
        self.report.gen_wraps += c.gen_wraps;
        self.report.set_failures += u64::from(s.failed.is_some());
    }

    fn dump(&self, session: &Session) -> String {
        let mut text = String::new();
        for d in self.hardware.disks() {
            text += &format!("{}; ", d.dump());
        }
        for c in &session.given.clients {
            text += &format!("client {}: {} requests ended; ", c.number, c.oracle.borrow().requests_ended());
        }
        if let Some(set) = session.set() {
            text += &format!("{:?}; {:?}; {:?}", set.status(), set.counters(), set.take_events());
        }
        text
    }

    /// Checks the images before a start: the structures are valid, and the oracle allows the contents.
    fn judge_crashed(&mut self) -> Result<Vec<Option<Vec<Content>>>, Violation> {
        if !self.initialised {
            self.initialised = self.is_initialised();
        }
        if !self.initialised {
            return Ok(Vec::new());
        }
        let cache = self.hardware.cache.image();
        let backings: Vec<_> = self.hardware.backings.iter().map(|b| b.image()).collect();
        self.report.add_judged_blocks(judge::check(&cache, &backings)?);
        let mut judged = Vec::new();
        for (i, oracle) in self.oracles.iter().enumerate() {
            let what = backings.get(i).map_or(judge::ExtractedVolume::Flash, judge::ExtractedVolume::Cached);
            let Some(bytes) = judge::extract(&cache, &what)? else {
                judged.push(None);
                continue;
            };
            let oracle = oracle.borrow();
            let mut contents = Vec::with_capacity(oracle.size() as usize);
            for (sector, s) in bytes.chunks_exact(SECTOR).take(oracle.size() as usize).enumerate() {
                contents.push(oracle.check_sector(sector as u64, s)?);
            }
            judged.push(Some(contents));
        }
        Ok(judged)
    }

    fn is_initialised(&self) -> bool {
        let view = inspect::SetView::open(&self.hardware.cache.image(), inspect::Mode::Strict);
        view.is_ok_and(|v| v.is_initialised())
    }

    /// Checks that the backing devices have all data after a drain.
    fn judge_clean(&mut self) -> Result<(), Violation> {
        for (i, b) in self.plan.layout.backings.iter().enumerate() {
            let (image, oracle) = (self.hardware.backings[i].image(), self.oracles[i].borrow());
            for sector in 0..oracle.size() {
                let bytes = image.read_vec(format::Sector(b.data_offset + sector), format::Sectors(1));
                oracle.check_sector(sector, &bytes).map_err(Violation::BackingAlone)?;
            }
        }
        Ok(())
    }
}
