//! Whole runs: boot after boot with crashes in between, then a last one without faults, then the judges.
//!
//! Owns the life of a run and its report. Every failure, whether the oracle's, the judges' or an assertion of the
//! engine, ends the run with the seed and one command that replays it.

use std::backtrace::{Backtrace, BacktraceStatus};
use std::cell::{Cell, RefCell};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::Once;

use io::{Nanos, Rng};

use crate::client::Client;
use crate::disk::{Fault, Kind, Matching};
use crate::judge;
use crate::options::{Lying, Options};
use crate::oracle::Oracle;
use crate::rig::Rig;
use crate::session::{Plan, Session};
use crate::stamp::{Content, SECTOR};
use crate::world::{Outcome, World};

/// Virtual time for one boot; everything ends long before.
const BOOT_LIMIT: Nanos = Nanos::from_secs(200_000);

/// What happened in a run, or in many.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Report {
    /// Runs.
    pub runs: u64,
    /// Times that the machine was switched on.
    pub boots: u64,
    /// Power cuts.
    pub power_cuts: u64,
    /// Deaths of the process.
    pub kills: u64,
    /// Orderly stops.
    pub stops: u64,
    /// Boots without the cache.
    pub alone: u64,
    /// Boots with failing devices.
    pub with_errors: u64,
    /// Boots at whose end the set had failed.
    pub set_failures: u64,
    /// Requests of clients.
    pub requests: u64,
    /// Effects of devices.
    pub effects: u64,
    /// Detaches.
    pub detaches: u64,
    /// Walks of the index.
    pub gc_runs: u64,
    /// Extents moved.
    pub moved: u64,
    /// Priority chains written.
    pub prio_writes: u64,
    /// Btree nodes replaced.
    pub rewrites: u64,
    /// Btree nodes read after they had been dropped from memory.
    pub node_reads: u64,
    /// Journal entries written.
    pub journal_entries: u64,
    /// Boots at whose end the index had more than one node.
    pub trees: u64,
    /// Boots at whose end more than 80 % of the cache was in use.
    pub full: u64,
    /// Hash of everything that happened; of one run.
    pub hash: u64,
}

impl Report {
    /// Adds what happened in another run.
    pub fn add(&mut self, other: &Report) {
        let Report { runs, boots, power_cuts, kills, stops, alone, with_errors, set_failures, .. } = other;
        self.runs += runs;
        self.boots += boots;
        self.power_cuts += power_cuts;
        self.kills += kills;
        self.stops += stops;
        self.alone += alone;
        self.with_errors += with_errors;
        self.set_failures += set_failures;
        self.requests += other.requests;
        self.effects += other.effects;
        self.detaches += other.detaches;
        self.gc_runs += other.gc_runs;
        self.moved += other.moved;
        self.prio_writes += other.prio_writes;
        self.rewrites += other.rewrites;
        self.node_reads += other.node_reads;
        self.journal_entries += other.journal_entries;
        self.trees += other.trees;
        self.full += other.full;
        self.hash ^= other.hash;
    }
}

/// A run that failed.
#[derive(Clone, Debug)]
pub struct Failure {
    /// Its options.
    pub options: Box<Options>,
    /// What was wrong.
    pub what: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seed = self.options.seed;
        writeln!(f, "seed {seed} failed: {}", self.what)?;
        writeln!(f, "options: {:?}", self.options)?;
        write!(f, "replay: cargo run -p ubcache-sim --release -- --seed {seed} --verbose")
    }
}

/// Runs a seed.
///
/// # Errors
/// If anything is not as it must be.
pub fn run_seed(seed: u64, verbose: bool) -> Result<Report, Failure> {
    run(Options::from_seed(seed), verbose)
}

/// Runs these options.
///
/// # Errors
/// If anything is not as it must be.
pub fn run(options: Options, verbose: bool) -> Result<Report, Failure> {
    let run = AssertUnwindSafe(|| {
        let mut run = Run::new(options.clone(), verbose);
        run.all().map(|()| run.report)
    });
    note_panics();
    PANIC.with(|p| *p.borrow_mut() = Some(String::new()));
    let result = catch_unwind(run);
    let panic = PANIC.with(RefCell::take).unwrap_or_default();
    let what = match result {
        Ok(Ok(report)) => return Ok(report),
        Ok(Err(what)) => what,
        Err(message) => format!("{}{panic}", panic_message(&*message)),
    };
    Err(Failure { options: Box::new(options), what })
}

thread_local! {
    /// Where the run of this thread panicked; `None` while there is no run.
    static PANIC: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// From now on a panic in a run is kept for its report instead of being printed.
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

struct Run {
    options: Rc<Options>,
    rng: Rng,
    world: World,
    rig: Rig,
    oracles: Vec<Rc<RefCell<Oracle>>>,
    flash_made: Rc<Cell<bool>>,
    initialised: bool,
    report: Report,
}

impl Run {
    fn new(options: Options, verbose: bool) -> Run {
        let options = Rc::new(options);
        let mut rng = Rng::new(options.seed);
        let world = World::new(rng.next_u64());
        world.set_verbose(verbose);
        let rig = Rig::new(&world, options.layout.clone());
        let mut oracles = Vec::new();
        for (i, b) in options.layout.backings.iter().enumerate() {
            let size = b.data_sectors / b.block_sectors * b.block_sectors;
            oracles.push(Rc::new(RefCell::new(Oracle::new(i as u8, size, false))));
        }
        if options.flash_sectors > 0 {
            let i = oracles.len() as u8;
            oracles.push(Rc::new(RefCell::new(Oracle::new(i, options.flash_sectors, true))));
        }
        let report = Report { runs: 1, ..Report::default() };
        let flash_made = Rc::default();
        Run { options, rng, world, rig, oracles, flash_made, initialised: false, report }
    }

    fn all(&mut self) -> Result<(), String> {
        for _ in 0..self.options.boots {
            self.any_boot()?;
        }
        self.last_boots()?;
        self.judge_clean()?;
        self.report.effects = self.world.effects();
        self.report.hash = self.world.hash();
        Ok(())
    }

    fn any_boot(&mut self) -> Result<(), String> {
        let o = self.options.clone();
        let rng = &mut self.rng;
        let errors = rng.below(100) < o.error_percent;
        let alone = rng.below(100) < o.alone_percent;
        let crash = (rng.below(100) < o.crash_percent).then(|| {
            // Often while the set is being opened.
            let most = if rng.chance(1, 4) { 40 } else { o.crash_effects };
            1 + rng.below(most)
        });
        let plan = Plan { alone, errors, requests: o.requests, drain: false, read_all: false };
        self.boot(plan, crash)
    }

    /// Faults are off: what is left must work out.
    fn last_boots(&mut self) -> Result<(), String> {
        let plan = |drain, read_all| Plan { alone: false, errors: false, requests: 10, drain, read_all };
        self.boot(plan(true, true), None)?;
        if self.rng.chance(1, 2) {
            self.boot(plan(false, true), None)?;
            self.boot(plan(true, true), None)?;
        }
        Ok(())
    }

    fn boot(&mut self, plan: Plan, crash: Option<u64>) -> Result<(), String> {
        self.report.boots += 1;
        let errors = plan.errors;
        self.report.alone += u64::from(plan.alone);
        self.report.with_errors += u64::from(errors);
        let judged = self.judge_crashed()?;
        let o = self.options.clone();
        let mut machine = self.rig.boot(o.order);
        self.rig.cache.set_speed(o.cache_speed);
        self.rig.backings.iter().for_each(|b| b.set_speed(o.backing_speed));
        if errors {
            self.inject_errors(&o);
        }
        match o.lying {
            Some(Lying::Cache) => self.rig.cache.lie(),
            Some(Lying::Backing) => self.rig.backings.iter().for_each(|b| b.lie()),
            None => {}
        }
        self.world.cut_power_at(crash.map(|n| self.world.effects() + n));
        self.world.log(|| format!("BOOT, crash after {crash:?}, errors {errors}, alone {}", plan.alone));
        let clients: Vec<Rc<Client>> = self
            .oracles
            .iter()
            .enumerate()
            .map(|(i, o)| Client::new(&self.world, machine.handle(), i as u8, o.clone()))
            .collect();
        let parts = self.rig.parts(&machine);
        let session = Session::new(
            o.clone(),
            plan,
            self.world.clone(),
            parts,
            clients,
            judged,
            self.flash_made.clone(),
        );
        let theirs = session.clone();
        let task = machine.handle().spawn(async move { theirs.run().await });
        let outcome = machine.run(&task, BOOT_LIMIT);
        self.observe(&session);
        if let Some(d) = self.rig.disks().find(|d| d.was_misused()) {
            return Err(format!("a request broke the contract of devices: {}", d.dump()));
        }
        let in_order = match outcome {
            Outcome::Done(result) => result?,
            Outcome::PowerCut => false,
            Outcome::Stuck(why) => return Err(format!("{why}; {}", self.dump(&session))),
        };
        if self.rng.below(100) < 10 {
            self.world.pass(Nanos::from_secs(self.rng.below(100_000)));
        }
        self.end_boot(machine, &session, in_order, errors);
        Ok(())
    }

    fn inject_errors(&mut self, o: &Options) {
        let rng = &mut self.rng;
        if rng.below(100) < o.death_percent {
            let after = rng.below(600);
            let backing = &self.rig.backings[rng.below(self.rig.backings.len() as u64) as usize];
            if rng.chance(2, 3) { &self.rig.cache } else { backing }.die_after(after);
        } else if rng.below(100) < o.bad_sectors_percent {
            let at = rng.below(o.layout.nbuckets * o.layout.bucket_sectors);
            let range = at..at + [1, 8, 64][rng.below(3) as usize];
            let matching = Matching { kind: Kind::Read, range };
            self.rig.cache.set_faults(vec![Fault { matching, skip: 0, count: u32::MAX }]);
        } else {
            self.rig.cache.set_errors(o.cache_errors);
            self.rig.backings.iter().for_each(|b| b.set_errors(o.backing_errors));
        }
    }

    fn end_boot(
        &mut self,
        machine: crate::world::Machine,
        session: &Rc<Session>,
        in_order: bool,
        errors: bool,
    ) {
        if in_order {
            self.report.stops += 1;
            for (oracle, client) in self.oracles.iter().zip(&session.clients) {
                // What was not served was not stopped either.
                if client.volume().is_some() {
                    oracle.borrow_mut().stopped();
                }
            }
            self.initialised |= session.set().is_some();
            session.give_up();
            // The devices lose their power, too: a stop must have made everything durable.
            self.rig.power_cut(machine, self.options.keep);
            return;
        }
        let kill = !self.world.is_off() || errors || self.rng.below(100) < self.options.kill_percent;
        for oracle in &self.oracles {
            oracle.borrow_mut().crashed();
        }
        if kill {
            self.report.kills += 1;
            self.rig.kill(machine);
        } else {
            self.report.power_cuts += 1;
            self.rig.power_cut(machine, self.options.keep);
        }
        session.give_up();
    }

    fn observe(&mut self, session: &Session) {
        let (requests, detaches) = session.counts();
        self.report.requests += requests;
        self.report.detaches += detaches;
        let Some(set) = session.set() else { return };
        let (c, s) = (set.counters(), set.status());
        self.report.gc_runs += c.gc_runs;
        self.report.moved += c.moved_extents;
        self.report.prio_writes += c.prio_writes;
        self.report.rewrites += c.btree_rewrites;
        self.report.node_reads += c.btree_reads;
        self.report.journal_entries += s.journal_written.0;
        self.report.trees += u64::from(s.btree_nodes > 1);
        self.report.full += u64::from(s.in_use_percent > 80);
        self.report.set_failures += u64::from(s.failed.is_some());
    }

    fn dump(&self, session: &Session) -> String {
        let mut text = String::new();
        for d in self.rig.disks() {
            text += &format!("{}; ", d.dump());
        }
        for c in &session.clients {
            text += &format!("client {}: {} requests ended; ", c.number, c.oracle.borrow().requests_ended());
        }
        if let Some(set) = session.set() {
            text += &format!("{:?}; {:?}; {:?}", set.status(), set.counters(), set.take_events());
        }
        text
    }

    /// The image as it is before a start: sound, and with contents that are allowed.
    fn judge_crashed(&mut self) -> Result<Vec<Option<Vec<Content>>>, String> {
        if !self.initialised {
            self.initialised = self.is_initialised();
        }
        if !self.initialised {
            return Ok(Vec::new());
        }
        let cache = self.rig.cache.image();
        let backings: Vec<_> = self.rig.backings.iter().map(|b| b.image()).collect();
        judge::check(&cache, &backings)?;
        let mut judged = Vec::new();
        for (i, oracle) in self.oracles.iter().enumerate() {
            let what = backings.get(i).map_or(judge::What::Flash, judge::What::Cached);
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
        let view = inspect::SetView::open(&self.rig.cache.image(), inspect::Mode::Strict);
        view.is_ok_and(|v| v.is_initialised())
    }

    /// Everything was written back: the backing devices have it all.
    fn judge_clean(&mut self) -> Result<(), String> {
        self.judge_crashed()?;
        for (i, b) in self.options.layout.backings.iter().enumerate() {
            let (image, oracle) = (self.rig.backings[i].image(), self.oracles[i].borrow());
            for sector in 0..oracle.size() {
                let bytes = image.read_vec(format::Sector(b.data_offset + sector), format::Sectors(1));
                oracle.check_sector(sector, &bytes).map_err(|e| format!("backing device alone: {e}"))?;
            }
        }
        Ok(())
    }
}
