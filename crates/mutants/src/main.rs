//! Mutation testing of the engine. `scripts/mutants` runs it; docs/decisions/026-mutants.md has the reasons for its design.
//!
//! The engine is rewritten once, with every mutant in it, and built once. Then the simulator and the tests run once for each
//! mutant, with that mutant switched on. This module owns the order of these steps and the command line.
#![forbid(unsafe_code)]

mod blame;
mod build;
mod copy;
mod error;
mod operators;
mod report;
mod results;
mod rewrite;
mod run;
mod suites;
mod table;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use clap::Parser;

use crate::copy::Copy;
use crate::error::Error;
use crate::results::{Fate, Results, Verdict};
use crate::run::Outcome;
use crate::suites::{Baseline, Suite};
use crate::table::{Mutant, Share, hash};

/// List of mutants that are proven to be equivalent, with the proofs.
const EQUIVALENT: &str = "crates/mutants/equivalent.txt";
/// List of functions and files that get no mutants, with the reasons.
const EXCLUDED: &str = "crates/mutants/excluded.txt";

/// Changes the engine in many small ways and lists the changes that no test detects.
#[derive(Parser)]
struct Args {
    /// The K-th of N equal parts of all mutants, drawn by a hash
    #[arg(long, value_parser = Share::parse, value_name = "K/N")]
    share: Option<Share>,
    /// Mutants with this in file, function or change; several may be given
    #[arg(long, value_name = "TEXT")]
    only: Vec<String>,
    /// Mutants at a time
    #[arg(long, default_value_t = 1, value_name = "N")]
    jobs: usize,
    /// Stop after so many minutes; the next run continues
    #[arg(long, value_name = "N")]
    minutes: Option<u64>,
    /// List the chosen mutants, and run none
    #[arg(long)]
    list: bool,
    /// Report the known verdicts of the chosen mutants, and run none
    #[arg(long)]
    report: bool,
    /// Retain the verdicts of killed mutants although sources have changed: valid if only tests were added
    #[arg(long)]
    retain_killed: bool,
    /// Leave out suites that take longer than this without a mutant
    #[arg(long, default_value_t = 3600, value_name = "SECONDS")]
    longest: u64,
    /// Run those again that survived
    #[arg(long)]
    again: bool,
    /// Build and run the unit tests of the engine alone
    #[arg(long)]
    unit: bool,
}

impl Args {
    fn chooses(&self, m: &Mutant) -> bool {
        let named = self.only.is_empty() || self.only.iter().any(|o| m.key.contains(o.as_str()));
        named && self.share.unwrap_or(Share::ALL).has(&m.key)
    }
}

fn main() -> ExitCode {
    match work(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("ubcache-mutants: {e}");
            ExitCode::FAILURE
        }
    }
}

fn work(args: &Args) -> Result<(), Error> {
    let root = std::env::current_dir().map_err(Error::WorkingDirectory)?;
    if !root.join(copy::ENGINE).is_dir() {
        return Err(Error::NotTheRoot(root));
    }
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), |d| root.join(d));
    let dir = target.join("mutants");
    let copy = Copy { from: root.clone(), to: dir.join("src") };
    let equivalent = list(&root.join(EQUIVALENT))?;
    let fingerprint = copy.fingerprint()?;
    let mutants = build_all(&copy, &dir, &fingerprint)?;
    let chosen: Vec<Mutant> = mutants.iter().filter(|m| args.chooses(m)).cloned().collect();
    println!("{} mutants, {} chosen", mutants.len(), chosen.len());
    if args.list {
        for m in &chosen {
            println!("{:>6} {}", m.number, m.describe());
        }
        return Ok(());
    }
    let mut results = Results::open(&dir.join("results.jsonl"), &fingerprint, args.retain_killed)?;
    if !args.report {
        let longest = Duration::from_secs(args.longest);
        // A list of reached mutants has their numbers, and excluded mutants shift numbers. So the list depends on all keys.
        let keys: String = mutants.iter().map(|m| format!("{}\n", m.key)).collect();
        let table = format!("{fingerprint} {:016x}", hash(keys.as_bytes()));
        let suites = prepare(&copy, &dir, &table, longest, args.unit)?;
        let attack = Attack { suites, dir: &dir, results: &results };
        let open = |m: &&Mutant| match results.known.get(&m.key) {
            // No suite can kill an equivalent mutant, so each would run in vain.
            Some(_) if equivalent.contains_key(&m.key) => false,
            Some(v) => args.again && matches!(v.fate, Fate::Survived | Fate::Unreached),
            None => true,
        };
        let todo = in_order(chosen.iter().filter(open).cloned().collect());
        attack.all(todo, args)?;
        results = Results::open(&dir.join("results.jsonl"), &fingerprint, args.retain_killed)?;
    }
    for key in equivalent.keys().filter(|k| !mutants.iter().any(|m| m.key == **k)) {
        println!("{EQUIVALENT} names a mutant that does not exist: {key}");
    }
    let text = report::report(&chosen, &results.known, &equivalent);
    println!("\n{text}");
    let file = dir.join("report.txt");
    fs::write(&file, text).map_err(Error::file(&file))
}

/// Sorts mutants by the hashes of their keys, so that the finished part of an interrupted run is a random sample.
fn in_order(mut mutants: Vec<Mutant>) -> VecDeque<Mutant> {
    mutants.sort_by_key(|m| hash(m.key.as_bytes()).rotate_left(32));
    mutants.into()
}

fn list(path: &Path) -> Result<BTreeMap<String, String>, Error> {
    let text = fs::read_to_string(path).map_err(Error::file(path))?;
    results::reasons(&text).map_err(|source| Error::List { path: path.to_path_buf(), source })
}

/// Rewrites and builds the copy. The list of refused mutants is valid until a source changes.
fn build_all(copy: &Copy, dir: &Path, fingerprint: &str) -> Result<Vec<Mutant>, Error> {
    let excluded = list(&copy.from.join(EXCLUDED))?;
    let is_excluded = |key: &str| excluded.keys().any(|e| is_of(key, e));
    copy.sync()?;
    let file = dir.join("refused.json");
    let text = fs::read_to_string(&file).unwrap_or_default();
    let (before, mut refused): (String, BTreeSet<String>) = serde_json::from_str(&text).unwrap_or_default();
    if before == fingerprint {
        return copy.rewrite(&|key| !refused.contains(key) && !is_excluded(key));
    }
    let mutants = build::rewrite_until_it_compiles(copy, &dir.join("build"), &mut refused, &is_excluded)?;
    let text = serde_json::to_string(&(fingerprint, &refused)).map_err(Error::json(&file))?;
    fs::write(&file, text).map_err(Error::file(&file))?;
    eprintln!("{} mutants compile, {} do not", mutants.len(), refused.len());
    Ok(mutants)
}

/// Whether a key belongs to a file, or to a file and function: `policy/mod.rs`, `set/mod.rs Set::status`.
fn is_of(key: &str, prefix: &str) -> bool {
    key.strip_prefix(prefix).is_some_and(|rest| rest.starts_with([' ', ':']))
}

/// Builds the programs and measures the suites without a mutant, unless the results are known.
///
/// Suites that take longer than `longest` are left out.
fn prepare(
    copy: &Copy,
    dir: &Path,
    fingerprint: &str,
    longest: Duration,
    unit: bool,
) -> Result<Vec<(Suite, Baseline)>, Error> {
    eprintln!("building");
    let begun = Instant::now();
    let suites = suites::suites(&build::programs(copy, &dir.join("build"), unit)?);
    eprintln!("built in {} s", begun.elapsed().as_secs());
    let file = dir.join("baseline.json");
    let text = fs::read_to_string(&file).unwrap_or_default();
    let (before, mut known): (String, Vec<Baseline>) = serde_json::from_str(&text).unwrap_or_default();
    if before != fingerprint {
        known.clear();
    }
    for suite in &suites {
        if known.iter().any(|b| b.name == suite.name) {
            continue;
        }
        // The whole suite is measured here, and only the tests of one part run with a mutant.
        let limit = if suite.is_of_own_part() { longest * 20 } else { longest };
        let Some(b) = suite.measure(&dir.join("scratch"), limit)? else {
            eprintln!("left out, it takes more than {} s: {}", longest.as_secs(), suite.name);
            continue;
        };
        eprintln!("{:>7} ms, {:>5} mutants reached: {}", b.millis, b.reached.len(), b.name);
        known.push(b);
        let text = serde_json::to_string(&(fingerprint, &known)).map_err(Error::json(&file))?;
        fs::write(&file, text).map_err(Error::file(&file))?;
    }
    let is_short = |s: &Suite, b: &Baseline| s.is_of_own_part() || b.millis <= longest.as_millis() as u64;
    let baseline = |s: &Suite| known.iter().find(|b| b.name == s.name && is_short(s, b)).cloned();
    let mut measured: Vec<(Suite, Baseline)> =
        suites.into_iter().filter_map(|s| baseline(&s).map(|b| (s, b))).collect();
    measured.sort_by_key(|(s, b)| s.order(b));
    Ok(measured)
}

/// Runs mutants against the suites.
struct Attack<'a> {
    suites: Vec<(Suite, Baseline)>,
    dir: &'a Path,
    results: &'a Results,
}

struct Progress {
    todo: VecDeque<Mutant>,
    done: usize,
    of: usize,
}

impl Attack<'_> {
    fn all(&self, todo: VecDeque<Mutant>, args: &Args) -> Result<(), Error> {
        let begun = Instant::now();
        let deadline = args.minutes.map(|m| begun + Duration::from_secs(60 * m));
        let progress = Mutex::new(Progress { done: 0, of: todo.len(), todo });
        std::thread::scope(|scope| {
            let workers: Vec<_> = (0..args.jobs.max(1))
                .map(|n| {
                    let scratch = self.dir.join(format!("scratch-{n}"));
                    let progress = &progress;
                    scope.spawn(move || self.work(progress, begun, deadline, scratch))
                })
                .collect();
            let panicked = |_| Err(Error::WorkerPanicked);
            workers.into_iter().try_for_each(|w| w.join().unwrap_or_else(panicked))
        })
    }

    fn work(
        &self,
        progress: &Mutex<Progress>,
        begun: Instant,
        deadline: Option<Instant>,
        scratch: PathBuf,
    ) -> Result<(), Error> {
        loop {
            if deadline.is_some_and(|d| Instant::now() >= d) {
                return Ok(());
            }
            let next = progress.lock().map_err(|_| Error::WorkerPanicked)?.todo.pop_front();
            let Some(mutant) = next else { return Ok(()) };
            let verdict = self.judge(&mutant, &scratch)?;
            self.results.append(&verdict)?;
            let mut p = progress.lock().map_err(|_| Error::WorkerPanicked)?;
            p.done += 1;
            let left = begun.elapsed().as_secs() * (p.of - p.done) as u64 / p.done as u64;
            println!(
                "[{}/{}, {} min left] {:?} by {} in {} ms: {}",
                p.done,
                p.of,
                left.div_ceil(60),
                verdict.fate,
                verdict.by,
                verdict.millis,
                mutant.describe()
            );
        }
    }

    /// Runs suites against a mutant, the cheapest first, until one fails.
    fn judge(&self, mutant: &Mutant, scratch: &Path) -> Result<Verdict, Error> {
        let begun = Instant::now();
        let verdict = |fate, by: String| Verdict {
            key: mutant.key.clone(),
            fate,
            by,
            millis: begun.elapsed().as_millis() as u64,
        };
        let mut reached = 0;
        for (suite, baseline) in self.suites.iter().filter(|(_, b)| b.reached.contains(&mutant.number)) {
            reached += 1;
            match suite.attack(mutant, baseline, scratch)? {
                Outcome::Passed => {}
                Outcome::Failed(None) => return Ok(verdict(Fate::Killed, suite.name.clone())),
                Outcome::Failed(Some(test)) => {
                    return Ok(verdict(Fate::Killed, format!("{}: {test}", suite.name)));
                }
                Outcome::TimedOut => return Ok(verdict(Fate::TimedOut, suite.name.clone())),
            }
        }
        let fate = if reached == 0 { Fate::Unreached } else { Fate::Survived };
        Ok(verdict(fate, format!("{reached} suites")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes_are_of_whole_names() {
        let key = "set/mod.rs Set::status: delete `x.y()`";
        assert!(is_of(key, "set/mod.rs"));
        assert!(is_of(key, "set/mod.rs Set::status"));
        assert!(!is_of(key, "set/mod.rs Set::stat"));
        assert!(!is_of(key, "set/mo"));
    }

    #[test]
    fn the_written_lists_can_be_read() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        list(&root.join(EQUIVALENT)).unwrap();
        list(&root.join(EXCLUDED)).unwrap();
    }
}
