//! The model test: thousands of seeds, each a whole life of a cache set with crashes, errors, detaches and full
//! caches, judged by the oracle of the durability contract and by crate `inspect`.
//!
//! A failing seed prints one command that replays it and one that makes it a short plan. Plans that once found a bug
//! are kept in `plans/`.

use std::collections::BTreeSet;

use sim::disk::Landmark;
use sim::plan::{Plan, Request};
use sim::report::Report;
use sim::run::{run, run_seed};
use sim::world::Order;

fn seeds(seeds: std::ops::Range<u64>) -> Report {
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
fn seeds_from_0_pass() {
    seeds(0..500);
}

#[test]
fn seeds_from_100_000_pass() {
    seeds(100_000..100_500);
}

#[test]
fn seeds_from_200_000_pass() {
    seeds(200_000..200_500);
}

#[test]
fn seeds_from_300_000_pass() {
    seeds(300_000..300_500);
}

/// What can happen does happen in a few hundred seeds: otherwise the rest proves nothing.
#[test]
fn everything_is_exercised() {
    let r = seeds(404_200..404_900);
    let all = [
        ("crashes", r.crashes, 1200),
        ("crashes in a recovery", r.in_recovery, 300),
        ("crashes in the recovery from such a crash", r.in_second_recovery, 100),
        ("power losss", r.power_losses, 600),
        ("power losss of some devices", r.partial_cuts, 150),
        ("process crashes", r.kills, 300),
        ("orderly stops", r.stops, 900),
        ("boots without the cache", r.alone, 100),
        ("boots without a backing device", r.absent, 50),
        ("boots with errors", r.with_errors, 200),
        ("failed sets", r.set_failures, 10),
        ("detaches", r.detaches, 100),
        ("walks of the index", r.gc_runs, 1000),
        ("moved extents", r.moved, 500),
        ("writes over gaps", r.bridged, 60),
        ("priority chains", r.prio_writes, 10_000),
        ("replaced leaves", r.rewrites, 2000),
        ("leaves read again", r.node_reads, 2000),
        ("journal entries", r.journal_entries, 20_000),
        ("indexes of several nodes", r.trees, 60),
        ("full caches", r.full, 5),
        ("crashes with a full cache", r.crashes_when_full, 3),
        ("crashes with a full journal", r.crashes_in_full_journal, 1),
        ("waits for a bucket for a node", r.btree_waits, 1),
        ("generations that went around", r.gen_wraps, 500),
        ("boots with other settings", r.changed_settings, 300),
        ("boots with unreadable sectors", r.unreadable, 8),
        ("devices that went away", r.outages, 100),
        ("devices that came back", r.outages_that_end, 40),
        ("process crashes after which all that was answered is there", r.strict_kills, 100),
        ("such crashes in boots with faults", r.strict_kills_with_faults, 50),
        ("crashes at a landmark", r.aimed, 100),
        ("boots with a device that hangs", r.hangs, 5),
        ("writes that must not wait for a hung device of their volume", r.free_writes, 400),
        ("flushes that must not wait for it", r.free_flushes, 20),
        ("blocks that a judge compared with their checksums", r.judged_blocks(), 10_000),
        ("cache devices that are not what they were", r.substitutes, 20),
    ];
    for (landmark, n) in Landmark::ALL.iter().zip(r.landmarks) {
        assert!(n >= 20, "{landmark:?}: expected at least 20, found {n}");
    }
    for (what, found, at_least) in all {
        assert!(found >= at_least, "{what}: expected at least {at_least}, found {found}; {r:#?}");
    }
}

/// The same seed is the same run: the same events in the same order at the same times, and the same random number that
/// would come next. In one process a run that depended on the order of a hash map or on addresses would differ, too.
#[test]
fn a_seed_is_always_the_same_run() {
    let mut hashes = BTreeSet::new();
    for seed in [1, 12, 123, 1234, 12345, 400_010] {
        let once = run_seed(seed, false).unwrap_or_else(|f| panic!("{f}"));
        let again = run_seed(seed, false).unwrap_or_else(|f| panic!("{f}"));
        assert_eq!(once, again, "seed {seed} ran differently the second time");
        assert!(once.effects > 100, "{once:?}");
        hashes.insert((once.hash, once.next_random));
    }
    assert_eq!(hashes.len(), 6, "other seeds are other runs");
}

/// What tells runs apart sees small things: an order of tasks, a random number, one sector more.
#[test]
fn a_slightly_different_run_has_another_hash() {
    // Long enough for tasks to have to wait for each other, and random, whatever the generator draws.
    let suits = |p: &Plan| {
        let requests = || p.boots.iter().flat_map(|b| &b.requests);
        let long_write = |(_, r): &(_, Request)| matches!(r, Request::Write { sectors, .. } if *sectors > 1);
        p.order == Order::Random
            && p.boots.len() > 2
            && requests().count() > 300
            && requests().any(long_write)
    };
    let plan = (0..1000).map(Plan::from_seed).find(suits).expect("a long random plan");
    let hash = |p: &Plan| run(p, false).unwrap_or_else(|f| panic!("{f}")).hash;
    let order = match plan.order {
        Order::Fifo => Order::Random,
        _ => Order::Fifo,
    };
    let mut longer = plan.clone();
    let sectors = longer.boots.iter_mut().flat_map(|b| &mut b.requests).find_map(|(_, r)| match r {
        Request::Write { sectors, .. } if *sectors > 1 => Some(sectors),
        _ => None,
    });
    *sectors.expect("a write") -= 1;
    let others = [Plan { order, ..plan.clone() }, Plan { seed: plan.seed + 1, ..plan.clone() }, longer];
    let first = hash(&plan);
    for other in &others {
        assert_ne!(hash(other), first, "{:?}", other.order);
    }
}

/// Every plan that once found a bug, which its head describes, is run again, and those of the deliberate bugs without these.
#[test]
fn plans_that_once_failed_pass() {
    let dirs = ["plans", "plans/canaries"].map(|d| format!("{}/{d}", env!("CARGO_MANIFEST_DIR")));
    let list = |dir: &String| std::fs::read_dir(dir).unwrap_or_else(|e| panic!("{dir}: {e}"));
    let files = dirs.iter().flat_map(list).map(|f| f.expect("a plan").path());
    let mut files: Vec<_> = files.filter(|f| f.extension().is_some_and(|e| e == "plan")).collect();
    files.sort();
    assert!(files.len() >= 40, "{} plans in {dirs:?}", files.len());
    for file in files {
        let text = std::fs::read_to_string(&file).expect("a plan");
        assert!(
            text.starts_with("# "),
            "{}: expected a description at its head in lines that begin with `#`",
            file.display()
        );
        let plan = Plan::from_text(&text).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
        if let Err(failure) = run(&plan, false) {
            panic!("{}: {failure}", file.display());
        }
    }
}
