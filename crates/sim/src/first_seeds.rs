//! First seeds: how soon random plans find each deliberate bug of the engine.
//!
//! Owns the measurement and its table. Seeds from a beginning on are run with one bug switched on, until a run fails.
//! Threads share the bugs, rarest work last: a bug is one thread's. Needs the feature `canary`.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use engine::canary::{Bug, set_bug};

use crate::plan::Plan;
use crate::run::run;

/// Parameters of the measurement.
#[derive(Clone, Debug)]
pub struct Search {
    /// The first seed that is tried.
    pub from: u64,
    /// So many seeds are tried for each bug.
    pub within: u64,
    /// Threads.
    pub jobs: usize,
    /// No bug is tried for longer.
    pub most: Duration,
    /// Bugs whose names begin with this; all if it is empty.
    pub only: String,
}

/// The result of one bug.
#[derive(Clone, Debug)]
pub struct Found {
    /// The bug.
    pub bug: Bug,
    /// Which seed failed first, counted from the beginning, and how.
    pub first: Option<(u64, String)>,
    /// Seeds that were tried.
    pub tried: u64,
    /// How long it took.
    pub took: Duration,
}

impl Search {
    /// Measures every bug, and prints each result as soon as it is known.
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
                // What fails without the bug, too, says nothing about it.
                if run(&plan, false).is_ok() {
                    let what = failure.what.lines().next().unwrap_or_default().chars().take(90).collect();
                    found.first = Some((n, what));
                    break;
                }
            }
        }
        found.took = began.elapsed();
        found
    }
}
