//! The suites that try to kill a mutant, the cheapest first.
//!
//! Owns the list of suites, and for each suite its duration and the mutants that it reaches, measured with no mutant switched
//! on. Invariant: a suite that fails without a mutant ends the whole run, because it would kill every mutant.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::build::Program;
use crate::error::Error;
use crate::run::{Job, Outcome, run};
use crate::table::Mutant;

/// Tests that are not used, because they test deliberate bugs or the generator and not the engine.
const NOT_USED: &[&str] = &["canaries", "ingredient_pairs"];
/// Seeds of the simulator: name of the suite, first seed, number of seeds.
const SEEDS: &[(&str, u64, u64)] = &[("seeds 0 to 19", 0, 20), ("seeds 20 to 319", 20, 300)];
/// Plans that find deliberate bugs. They run with no bug switched on, because they reach the places of such bugs.
const PLANS: &str = "plans/canaries";
/// Number of runs for each plan, with other seeds and other moments of crashes.
const LIKE: &str = "10";
/// Shortest time limit of a suite.
const SHORTEST_LIMIT: Duration = Duration::from_secs(10);
/// Time limit of a suite, as a multiple of its duration without a mutant.
const TIMEOUT_FACTOR: u32 = 5;

/// One suite.
#[derive(Clone, Debug)]
pub struct Suite {
    /// Name of the suite in reports.
    pub name: String,
    /// The jobs of the suite, which run one after the other.
    jobs: Vec<Job>,
    /// Whether only the tests of the mutant's part of the engine run. They are short, so they run first.
    own_part: bool,
}

/// The result of a suite without a mutant.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Baseline {
    /// Name of the suite.
    pub name: String,
    /// Duration in milliseconds.
    pub millis: u64,
    /// Numbers of the mutants that the suite reaches.
    pub reached: BTreeSet<u32>,
}

/// Makes suites of the built programs.
pub fn suites(programs: &[Program]) -> Vec<Suite> {
    let mut found = Vec::new();
    for p in programs {
        let job = |args: &[&str]| Job {
            program: p.path.clone(),
            args: args.iter().map(|a| (*a).to_owned()).collect(),
            directory: p.directory.clone(),
            limit: Duration::from_secs(3600),
        };
        match p.kind.as_str() {
            "bin" if p.name == "ubcache-sim" => {
                for (name, from, count) in SEEDS {
                    let (from, count) = (from.to_string(), count.to_string());
                    let job = job(&["--from", &from, "--seeds", &count, "--stop"]);
                    found.push(Suite { name: (*name).to_owned(), jobs: vec![job], own_part: false });
                }
                let plan = |p: &String| job(&["--plan", p, "--like", LIKE, "--stop"]);
                let jobs = plans(&p.directory).iter().map(plan).collect();
                found.push(Suite { name: "plans of deliberate bugs".into(), jobs, own_part: false });
            }
            "test" if NOT_USED.contains(&p.name.as_str()) => {}
            "test" if p.name == "model" => {
                // The other tests of this program are further seeds.
                found.push(Suite {
                    name: "sim/tests/plans that once failed".into(),
                    jobs: vec![job(&["plans_that_once_failed"])],
                    own_part: false,
                });
                found.push(Suite { name: "sim/tests/model".into(), jobs: vec![job(&[])], own_part: false });
            }
            "test" => found.push(Suite {
                name: format!("{}/tests/{}", p.package, p.name),
                jobs: vec![job(&[])],
                own_part: false,
            }),
            "lib" if p.package == "engine" => {
                for (name, own_part) in [("engine (unit, own part)", true), ("engine (unit)", false)] {
                    found.push(Suite { name: name.into(), jobs: vec![job(&[])], own_part });
                }
            }
            "lib" => found.push(Suite {
                name: format!("{} (unit)", p.package),
                jobs: vec![job(&[])],
                own_part: false,
            }),
            _ => {}
        }
    }
    found
}

fn plans(package: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(package.join(PLANS)) else { return Vec::new() };
    let mut paths: Vec<String> = entries.flatten().map(|e| e.path().to_string_lossy().into_owned()).collect();
    paths.retain(|p| p.ends_with(".plan"));
    paths.sort();
    paths
}

impl Suite {
    /// Runs the suite without a mutant; `None` if it takes longer than `longest`.
    pub fn measure(&self, scratch: &Path, longest: Duration) -> Result<Option<Baseline>, Error> {
        let file = scratch.with_extension("reached");
        let _ = fs::remove_file(&file);
        let begun = Instant::now();
        for job in &self.jobs {
            let left = longest.saturating_sub(begun.elapsed());
            let job = Job { limit: left, ..job.clone() };
            match run(&job, ("UBCACHE_MUTANTS_REACHED", &file.to_string_lossy()), scratch)? {
                Outcome::Passed => {}
                Outcome::TimedOut => return Ok(None),
                outcome => {
                    return Err(Error::SuiteFails {
                        suite: self.name.clone(),
                        outcome: format!("{outcome:?}"),
                        job: format!("{job:?}"),
                    });
                }
            }
        }
        let text = fs::read_to_string(&file).unwrap_or_default();
        Ok(Some(Baseline {
            name: self.name.clone(),
            millis: begun.elapsed().as_millis() as u64,
            reached: text.lines().filter_map(|l| l.parse().ok()).collect(),
        }))
    }

    /// Whether the suite runs only the tests of one part of the engine.
    pub fn is_of_own_part(&self) -> bool {
        self.own_part
    }

    /// The sort key of the suite among all suites.
    pub fn order(&self, baseline: &Baseline) -> (bool, u64) {
        (!self.own_part, baseline.millis)
    }

    /// Runs the suite with a mutant.
    pub fn attack(&self, mutant: &Mutant, baseline: &Baseline, scratch: &Path) -> Result<Outcome, Error> {
        let limit = limit(Duration::from_millis(baseline.millis));
        for job in &self.jobs {
            let mut job = Job { limit, ..job.clone() };
            if self.own_part {
                job.args.push(format!("{}::", mutant.part()));
            }
            let outcome = run(&job, ("UBCACHE_MUTANT", &mutant.number.to_string()), scratch)?;
            if outcome != Outcome::Passed {
                return Ok(outcome);
            }
        }
        Ok(Outcome::Passed)
    }
}

fn limit(time: Duration) -> Duration {
    (time * TIMEOUT_FACTOR).max(SHORTEST_LIMIT)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn program(name: &str, kind: &str, package: &str) -> Program {
        let (name, kind, package) = (name.to_owned(), kind.to_owned(), package.to_owned());
        Program { name, kind, package, directory: "/".into(), path: "/bin/true".into() }
    }

    #[test]
    fn programs_become_suites() {
        let programs = [
            program("ubcache-sim", "bin", "sim"),
            program("canaries", "test", "sim"),
            program("contract", "test", "sim"),
            program("engine", "lib", "engine"),
        ];
        let found = suites(&programs);
        let names: Vec<&str> = found.iter().map(|s| s.name.as_str()).collect();
        assert_eq!(
            names,
            [
                "seeds 0 to 19",
                "seeds 20 to 319",
                "plans of deliberate bugs",
                "sim/tests/contract",
                "engine (unit, own part)",
                "engine (unit)"
            ]
        );
        assert_eq!(found[1].jobs[0].args, ["--from", "20", "--seeds", "300", "--stop"]);
    }

    #[test]
    fn time_outs_have_a_floor() {
        assert_eq!(limit(Duration::from_secs(1)), Duration::from_secs(10));
        assert_eq!(limit(Duration::from_secs(7)), Duration::from_secs(35));
    }
}
