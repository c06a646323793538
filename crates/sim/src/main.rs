//! Runs seeds: `ubcache-sim --seeds N` from a first seed on, or one with `--seed S`; or a plan: `--plan FILE`.
//!
//! Continues after a violation. It prints a failing seed with the command that replays it, and at the end the counts of
//! events and the failing seeds. The exit code is 1 if there are any. `--shrink FILE` shortens a failing plan and saves it.
//! With `--jobs` several threads share the seeds; each run stays on one thread.
#![forbid(unsafe_code)]

use std::ops::Range;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use clap::Parser;
use io::Rng;
use sim::damaged_data::{Tally, damage_many};
use sim::group_run::{GroupCounts, run_group};
use sim::plan::Plan;
use sim::report::Report;
use sim::run::run;
use sim::shrink::Shrink;

/// Runs seeds or a plan in the simulator
#[derive(Parser)]
#[command(name = "ubcache-sim", max_term_width = 100, args_override_self = true)]
struct Args {
    /// Runs one seed
    #[arg(long, value_name = "S", conflicts_with_all = ["seeds", "from"])]
    seed: Option<u64>,
    /// Runs N seeds
    #[arg(long, value_name = "N", default_value_t = 1000)]
    seeds: u64,
    /// The first of the seeds
    #[arg(long, value_name = "S", default_value_t = 0)]
    from: u64,
    /// Runs a plan
    #[arg(long, value_name = "FILE")]
    plan: Option<String>,
    /// Also runs N plans like it, with other seeds and other moments of the crashes
    #[arg(long, value_name = "N", default_value_t = 0)]
    like: u64,
    /// Damages the data of N blocks with checksums, in lives with seeds from --from on
    #[arg(long, value_name = "N", conflicts_with_all = ["seed", "seeds", "plan"])]
    damage: Option<u64>,
    /// Runs the seeds as lives of a volume with its dirty data in two sets
    #[arg(long, conflicts_with_all = ["plan", "damage", "print"])]
    groups: bool,
    /// Number of threads
    #[arg(long, value_name = "N", default_value_t = 1)]
    jobs: u64,
    /// Stops at the first failure
    #[arg(long)]
    stop: bool,
    /// Prints every event
    #[arg(long)]
    verbose: bool,
    /// Prints the plan instead of running it
    #[arg(long)]
    print: bool,
    /// If the plan fails, shortens it and saves it to FILE
    #[arg(long, value_name = "FILE")]
    shrink: Option<String>,
    /// Most runs that `--shrink` makes
    #[arg(long, value_name = "N", default_value_t = 20_000)]
    runs: u64,
    /// Runs with this deliberate bug of the engine
    #[cfg(feature = "canary")]
    #[arg(long, value_name = "NAME", value_parser = bug)]
    bug: Option<engine::canary::Bug>,
    /// Prints how many seeds, at most N from --from on, find each bug
    #[cfg(feature = "canary")]
    #[arg(long, value_name = "N")]
    first_seeds: Option<u64>,
    /// Limits --first-seeds to bugs whose names begin with NAME
    #[cfg(feature = "canary")]
    #[arg(long, value_name = "NAME", default_value = "", hide_default_value = true)]
    only: String,
    /// Most minutes that --first-seeds takes for each bug
    #[cfg(feature = "canary")]
    #[arg(long, value_name = "N", default_value_t = 5)]
    minutes: u64,
}

impl Args {
    /// The first seed, and the one after the last.
    fn range(&self) -> Range<u64> {
        let (first, count) = self.seed.map_or((self.from, self.seeds), |seed| (seed, 1));
        first..first.saturating_add(count)
    }
}

#[cfg(feature = "canary")]
fn bug(name: &str) -> Result<engine::canary::Bug, UnknownBug> {
    let bug = engine::canary::Bug::ALL.iter().find(|b| format!("{b:?}") == name);
    bug.copied().ok_or_else(|| UnknownBug { name: name.to_owned() })
}

/// No deliberate bug has this name.
#[cfg(feature = "canary")]
#[derive(Debug, thiserror::Error)]
#[error("unknown bug {name}")]
struct UnknownBug {
    name: String,
}

/// The reason for which the program ends early; a violation is none.
#[derive(Debug, thiserror::Error)]
enum Error {
    /// A file cannot be read or written.
    #[error("{path}: {source}")]
    File { path: String, source: std::io::Error },
    /// A file is no plan.
    #[error("{path}: {source}")]
    Plan { path: String, source: serde_json::Error },
    /// The plan that is to be shortened does not fail.
    #[error("it does not fail")]
    NoFailure,
    /// A thread with damaged sets panicked; the panic has printed the reason.
    #[error("a life failed")]
    Damage,
    /// A thread panicked outside a run.
    #[error("a thread panicked")]
    Panicked,
}

impl Error {
    fn file(path: &str) -> impl Fn(std::io::Error) -> Error {
        move |source| Error::File { path: path.to_owned(), source }
    }
}

fn load(file: &str) -> Result<Plan, Error> {
    let text = std::fs::read_to_string(file).map_err(Error::file(file))?;
    Plan::from_text(&text).map_err(|source| Error::Plan { path: file.to_owned(), source })
}

/// Shortens a plan and saves it.
fn shrink(plan: &Plan, file: &str, runs: u64) -> Result<(), Error> {
    let fails = |p: &Plan| run(p, false).err().map(|f| f.violation.to_string());
    let Some(search) = Shrink::new(plan, runs, fails) else { return Err(Error::NoFailure) };
    let (short, what) = search.run();
    let first = what.lines().next().unwrap_or_default();
    std::fs::write(file, short.to_text(first)).map_err(Error::file(file))?;
    println!("{file}: {} steps of {}: {first}", short.len(), plan.len());
    println!("replay: cargo run -p ubcache-sim --release -- --plan {file} --verbose");
    Ok(())
}

/// State that the threads share.
struct Shared<'a> {
    args: &'a Args,
    next: AtomicU64,
    stop: AtomicBool,
    total: Mutex<Total>,
}

#[derive(Default)]
struct Total {
    report: Report,
    failed: Vec<u64>,
    processor_seconds: f64,
    printed_at: Duration,
}

/// Interval at which the totals are printed on standard error.
const PRINT_INTERVAL: Duration = Duration::from_secs(60);

impl Total {
    fn print_progress(&mut self, elapsed: Duration) {
        if elapsed.saturating_sub(self.printed_at) >= PRINT_INTERVAL {
            self.printed_at = elapsed;
            let (r, s) = (&self.report, elapsed.as_secs());
            eprintln!("{s} s: {} seeds, {} crashes, {} failed", r.runs, r.crashes, self.failed.len());
        }
    }
}

/// Runs seeds until none are left.
fn work(shared: &Shared<'_>, began: Instant) -> Result<(), Error> {
    #[cfg(feature = "canary")]
    engine::canary::set_bug(shared.args.bug);
    let end = shared.args.range().end;
    let total = || shared.total.lock().map_err(|_| Error::Panicked);
    while !shared.stop.load(Ordering::Relaxed) {
        let seed = shared.next.fetch_add(1, Ordering::Relaxed);
        if seed >= end {
            break;
        }
        let result = one(shared.args, &Plan::from_seed(seed));
        let mut total = total()?;
        match result? {
            Some(report) => total.report.add(&report),
            None => {
                total.failed.push(seed);
                shared.stop.fetch_or(shared.args.stop, Ordering::Relaxed);
            }
        }
        total.print_progress(began.elapsed());
    }
    total()?.processor_seconds += processor_seconds().unwrap_or_default();
    Ok(())
}

/// Runs a plan; `None` if it fails.
fn one(args: &Args, plan: &Plan) -> Result<Option<Report>, Error> {
    match run(plan, args.verbose) {
        Ok(report) => Ok(Some(report)),
        Err(failure) => {
            println!("{failure}");
            if let Some(file) = &args.shrink {
                shrink(plan, file, args.runs)?;
            }
            Ok(None)
        }
    }
}

/// Measures first seeds, and prints a table.
#[cfg(feature = "canary")]
fn first_seeds(args: &Args, within: u64) -> bool {
    let search = sim::first_seeds::Search {
        from: args.from,
        within,
        jobs: args.jobs as usize,
        most: Duration::from_secs(60 * args.minutes),
        only: args.only.clone(),
    };
    let found = search.run(|f| match &f.first {
        Some((seed, what)) => println!("| {:?} | {seed} | {:.0} s: {what} |", f.bug, f.took.as_secs_f64()),
        None => println!("| {:?} | not within {} | {:.0} s |", f.bug, f.tried, f.took.as_secs_f64()),
    });
    let n = found.iter().filter(|f| f.first.is_some()).count();
    println!("{n} of {} bugs found within {within} seeds from {}", found.len(), args.from);
    n == found.len()
}

/// Damages the data of many blocks, and prints what became of them. A wrong byte ends the program with a panic.
fn damage(args: &Args, wanted: u64) -> Result<bool, Error> {
    let (began, jobs) = (Instant::now(), args.jobs.max(1));
    let each = wanted.div_ceil(jobs);
    let tallies = std::thread::scope(|s| {
        let seeds = |job| (args.from + job..).step_by(jobs as usize);
        let threads: Vec<_> = (0..jobs).map(|job| s.spawn(move || damage_many(each, seeds(job)))).collect();
        let joined = threads.into_iter().map(|t| t.join().map_err(|_| Error::Damage));
        joined.collect::<Result<Vec<_>, _>>()
    })?;
    let mut tally = Tally::default();
    tallies.iter().for_each(|t| tally.add(t));
    let Tally { sets, blocks, flipped, misdirected, lost, reported_dirty, reported_clean } = tally;
    println!(
        "{} of {blocks} blocks in {sets} sets damaged in {:.0} s: {flipped} flipped bits, {misdirected} misdirected writes, \
         {lost} lost writes; {reported_dirty} dirty and {reported_clean} clean blocks reported, each once; no wrong byte was read \
         or written back",
        tally.damaged(),
        began.elapsed().as_secs_f64(),
    );
    Ok(true)
}

/// Runs lives of a volume with two sets, and prints what happened in them. A failed life prints its seed.
fn groups(args: &Args) -> Result<bool, Error> {
    let (began, next) = (Instant::now(), AtomicU64::new(args.range().start));
    let (end, failed) = (args.range().end, Mutex::new(Vec::new()));
    let work = || {
        #[cfg(feature = "canary")]
        engine::canary::set_bug(args.bug);
        let mut counts = GroupCounts::default();
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= end {
                return Ok(counts);
            }
            match std::panic::catch_unwind(|| run_group(seed, args.verbose)) {
                Ok(life) => counts.add(&life),
                Err(_) => {
                    println!("replay: cargo run -p ubcache-sim --release -- --groups --seed {seed}");
                    failed.lock().map_err(|_| Error::Panicked)?.push(seed);
                    next.fetch_max(if args.stop { end } else { 0 }, Ordering::Relaxed);
                }
            }
        }
    };
    let mut counts = GroupCounts::default();
    std::thread::scope(|s| {
        let threads: Vec<_> = (0..args.jobs.max(1)).map(|_| s.spawn(work)).collect();
        for thread in threads {
            counts.add(&thread.join().map_err(|_| Error::Panicked)??);
        }
        Ok(())
    })?;
    let mut failed = failed.into_inner().map_err(|_| Error::Panicked)?;
    failed.sort_unstable();
    let seconds = began.elapsed().as_secs_f64();
    println!("{counts:#?}\n{} lives from {} in {seconds:.1} s", end - args.range().start, args.range().start);
    println!("{} failed: {failed:?}", failed.len());
    Ok(failed.is_empty())
}

fn go(args: &Args) -> Result<bool, Error> {
    if args.groups {
        return groups(args);
    }
    #[cfg(feature = "canary")]
    if let Some(within) = args.first_seeds {
        return Ok(first_seeds(args, within));
    }
    if let Some(wanted) = args.damage {
        return damage(args, wanted);
    }
    if let Some(file) = &args.plan {
        let plan = load(file)?;
        if args.print {
            print!("{}", plan.to_text(""));
            return Ok(true);
        }
        #[cfg(feature = "canary")]
        engine::canary::set_bug(args.bug);
        let rng = &mut Rng::new(plan.seed);
        let mut failed = 0;
        for n in 0..=args.like {
            let plan = if n == 0 { plan.clone() } else { plan.like(rng) };
            failed += u64::from(one(args, &plan)?.is_none());
            if args.stop && failed > 0 {
                break;
            }
        }
        println!("{failed} of {} runs failed", args.like + 1);
        return Ok(failed == 0);
    }
    if args.print {
        args.range().for_each(|seed| print!("{}", Plan::from_seed(seed).to_text("")));
        return Ok(true);
    }
    seeds(args)
}

fn seeds(args: &Args) -> Result<bool, Error> {
    let began = Instant::now();
    let shared = Shared {
        args,
        next: AtomicU64::new(args.range().start),
        stop: AtomicBool::new(false),
        total: Mutex::default(),
    };
    std::thread::scope(|s| {
        let threads: Vec<_> = (0..args.jobs.max(1)).map(|_| s.spawn(|| work(&shared, began))).collect();
        let joined = threads.into_iter().map(|t| t.join().map_err(|_| Error::Panicked)?);
        joined.collect::<Result<(), Error>>()
    })?;
    let Total { report, mut failed, processor_seconds, .. } =
        shared.total.into_inner().map_err(|_| Error::Panicked)?;
    failed.sort_unstable();
    println!("{report:#?}");
    let (seconds, crashes) = (began.elapsed().as_secs_f64(), report.crashes);
    println!(
        "{} seeds from {} in {seconds:.1} s, {crashes} crash-and-recover cycles ({} power losses of all devices, {} of \
         some, {} process crashes): {:.0} per second, {:.0} per second of processor time",
        report.runs + failed.len() as u64,
        args.range().start,
        report.power_losses,
        report.partial_cuts,
        report.kills,
        crashes as f64 / seconds,
        crashes as f64 / processor_seconds,
    );
    println!("{} failed: {failed:?}", failed.len());
    Ok(failed.is_empty())
}

/// Processor time of this thread in seconds, if the system reports it.
fn processor_seconds() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    let ns: u64 = text.split_whitespace().next()?.parse().ok()?;
    Some(ns as f64 / 1e9)
}

fn main() -> ExitCode {
    match go(&Args::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) => {
            eprintln!("{e}");
            ExitCode::from(2)
        }
    }
}
