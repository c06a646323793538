//! The model test: thousands of seeds, each a whole life of a cache set with crashes, errors, detaches and full
//! caches, judged by the oracle of the durability contract and by crate `inspect`.
//!
//! A failing seed prints one command that replays it and one that makes it a short plan. Plans that once found a bug
//! are kept in `plans/`.

use sim::plan::Plan;
use sim::run::{Report, run_seed};

fn run(seeds: std::ops::Range<u64>) -> Report {
    let mut total = Report::default();
    for seed in seeds {
        match run_seed(seed, false) {
            Ok(report) => total.add(&report),
            Err(failure) => panic!("{failure}"),
        }
    }
    total
}

#[test]
fn seeds_1() {
    run(0..500);
}

#[test]
fn seeds_2() {
    run(100_000..100_500);
}

#[test]
fn seeds_3() {
    run(200_000..200_500);
}

#[test]
fn seeds_4() {
    run(300_000..300_500);
}

/// What can happen does happen in a few hundred seeds: otherwise the rest proves nothing.
#[test]
fn everything_is_exercised() {
    let r = run(400_000..400_400);
    let all = [
        ("crashes", r.crashes, 1200),
        ("crashes in a recovery", r.in_recovery, 300),
        ("crashes in the recovery from such a crash", r.in_second_recovery, 100),
        ("power cuts", r.power_cuts, 600),
        ("power cuts of some devices", r.partial_cuts, 150),
        ("deaths of the process", r.kills, 300),
        ("orderly stops", r.stops, 900),
        ("boots without the cache", r.alone, 100),
        ("boots without a backing device", r.absent, 50),
        ("boots with errors", r.with_errors, 200),
        ("failed sets", r.set_failures, 10),
        ("detaches", r.detaches, 100),
        ("walks of the index", r.gc_runs, 1000),
        ("moved extents", r.moved, 500),
        ("priority chains", r.prio_writes, 10_000),
        ("replaced leaves", r.rewrites, 2000),
        ("leaves read again", r.node_reads, 2000),
        ("journal entries", r.journal_entries, 20_000),
        ("indexes of several nodes", r.trees, 60),
        ("full caches", r.full, 5),
    ];
    for (what, found, at_least) in all {
        assert!(found >= at_least, "{what}: expected at least {at_least}, found {found}; {r:#?}");
    }
}

/// The same seed is the same run, to the last event.
#[test]
fn a_seed_is_always_the_same_run() {
    for seed in [1, 12, 123, 1234, 12345, 400_010] {
        let hash = |verbose| run_seed(seed, verbose).map(|r| (r.hash, r.effects, r.requests)).ok();
        assert!(hash(false).is_some(), "seed {seed} fails");
        assert_eq!(hash(false), hash(false), "seed {seed} ran differently the second time");
    }
}

/// Every plan that once found a bug, told in its head, is run again.
#[test]
fn regressions() {
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/plans");
    let mut files: Vec<_> = std::fs::read_dir(dir).expect(dir).map(|f| f.expect(dir).path()).collect();
    files.sort();
    assert!(files.len() >= 3, "{} plans in {dir}", files.len());
    for file in files {
        let text = std::fs::read_to_string(&file).expect("a plan");
        assert!(text.starts_with("# "), "{}: no story at its head", file.display());
        let plan = Plan::from_text(&text).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
        if let Err(failure) = sim::run::run(&plan, false) {
            panic!("{}: {failure}", file.display());
        }
    }
}
