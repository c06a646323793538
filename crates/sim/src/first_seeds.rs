//! First seeds: the number of random plans until each deliberate bug of the engine is found.
//!
//! Owns the measurement and its table. For each bug, seeds run with the bug switched on until a run fails. Threads share
//! the bugs, and one thread measures a bug. Needs the feature `canary`. Must not know the bugs.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use engine::canary::{Bug, set_bug};

use crate::plan::Plan;
use crate::run::run;

/// Parameters of the measurement.
#[derive(Clone, Debug)]
pub struct Search {
    /// The first seed.
    pub from: u64,
    /// Limit of the seeds for each bug.
    pub within: u64,
    /// Number of threads.
    pub jobs: usize,
    /// Time limit of each bug.
    pub most: Duration,
    /// Prefix of the names of the bugs; empty for all bugs.
    pub only: String,
}

/// The result of one bug.
#[derive(Clone, Debug)]
pub struct Found {
    /// The bug.
    pub bug: Bug,
    /// Number of the first failing seed, counted from the first one, and the failure.
    pub first: Option<(u64, String)>,
    /// Number of seeds that were tried.
    pub tried: u64,
    /// Duration of the measurement.
    pub took: Duration,
}

impl Search {
    /// Measures every bug, and passes each result to `tell` as soon as it is known.
    pub fn run(&self, tell: impl Fn(&Found) + Sync) -> Vec<Found> {
        let bugs: Vec<Bug> =
            Bug::ALL.iter().copied().filter(|b| format!("{b:?}").starts_with(&self.only)).collect();
        let (next, all) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
        std::thread::scope(|s| {
            for _ in 0..self.jobs.max(1) {
                s.spawn(|| {
                    while let Some(bug) = bugs.get(next.fetch_add(1, Ordering::Relaxed)) {
                        let found = self.one(*bug);
                        tell(&found);
                        if let Ok(mut all) = all.lock() {
                            all.push(found);
                        }
                    }
                });
            }
        });
        let mut all = all.into_inner().unwrap_or_default();
        all.sort_by_key(|f| f.bug);
        all
    }

    fn one(&self, bug: Bug) -> Found {
        let began = Instant::now();
        let mut found = Found { bug, first: None, tried: 0, took: Duration::ZERO };
        for n in 0..self.within {
            if began.elapsed() > self.most {
                break;
            }
            let plan = Plan::from_seed(self.from + n);
            set_bug(Some(bug));
            let result = run(&plan, false);
            set_bug(None);
            found.tried = n + 1;
            if let Err(failure) = result {
                // A plan that fails without the bug, too, says nothing about the bug.
                if run(&plan, false).is_ok() {
                    found.first = Some((n, failure.violation.first_line(90)));
                    break;
                }
            }
        }
        found.took = began.elapsed();
        found
    }
}
