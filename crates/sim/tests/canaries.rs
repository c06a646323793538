//! The tester is tested: each deliberate bug of the engine must be found, or the simulator proves nothing.
//!
//! Run with `cargo test -p ubcache-sim --features canary --test canaries`. Seeds that are found here are those of the
//! model test; `docs/simulation.md` has the table of which seed found what.

#[path = "contract.rs"]
mod contract;

use engine::canary::{Bug, set_bug};
use sim::run::run_seed;

/// Seeds within which each bug must be found.
const WITHIN: u64 = 4000;

/// Bugs that a story finds, because random plans need too many seeds for them.
const BY_STORY: [Bug; 1] = [Bug::DirectBeforeDirtyKey];

/// Whether a story finds a bug.
fn story_finds(bug: Bug) -> bool {
    set_bug(Some(bug));
    let told = std::panic::catch_unwind(contract::direct_changes_wait_until_the_dirty_keys_are_durable);
    set_bug(None);
    told.is_err()
}

#[test]
fn stories_find_what_seeds_do_not() {
    for bug in BY_STORY {
        assert!(story_finds(bug), "{bug:?}");
    }
}

/// The first seed that finds a bug, and what it says.
fn find(bug: Bug) -> Option<(u64, String)> {
    set_bug(Some(bug));
    let found = (0..WITHIN).find_map(|seed| run_seed(seed, false).err().map(|f| (seed, f.what)));
    set_bug(None);
    found
}

/// Several tests share the table, so that they run side by side.
fn share(part: usize, of: usize) {
    let mut missed = Vec::new();
    for bug in Bug::ALL.iter().filter(|b| !BY_STORY.contains(b)).skip(part).step_by(of) {
        let began = std::time::Instant::now();
        match find(*bug) {
            Some((seed, what)) => {
                let line: String = what.lines().next().unwrap_or_default().chars().take(100).collect();
                println!("| {bug:?} | {seed} | {:.1} s | {line} |", began.elapsed().as_secs_f64());
            }
            None => missed.push(bug),
        }
    }
    assert!(missed.is_empty(), "not found within {WITHIN} seeds: {missed:?}");
}

#[test]
fn every_bug_is_found_1() {
    share(0, 4);
}

#[test]
fn every_bug_is_found_2() {
    share(1, 4);
}

#[test]
fn every_bug_is_found_3() {
    share(2, 4);
}

#[test]
fn every_bug_is_found_4() {
    share(3, 4);
}

#[test]
fn without_a_bug_nothing_is_found() {
    set_bug(None);
    for seed in 0..60 {
        if let Err(failure) = run_seed(seed, false) {
            panic!("{failure}");
        }
    }
    assert!(Bug::ALL.len() >= 30 && engine::CANARIES);
}
