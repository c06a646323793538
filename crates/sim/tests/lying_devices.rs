//! Tests of the simulator: seeds must fail on devices that lie about durability.

use sim::plan::{Lying, Plan};
use sim::run::run;

fn failures(lying: Lying) -> u32 {
    let mut failed = 0;
    for seed in 0..150 {
        let plan = Plan { lying: Some(lying), ..Plan::from_seed(seed) };
        failed += u32::from(run(&plan, false).is_err());
    }
    failed
}

#[test]
fn a_lying_cache_device_is_found_out() {
    let n = failures(Lying::Cache);
    assert!(n > 30, "{n} of 150 seeds noticed it");
}

#[test]
fn a_lying_backing_device_is_found_out() {
    let n = failures(Lying::Backing);
    assert!(n > 10, "{n} of 150 seeds noticed it");
}

/// Memory that outlives the process and is believed although the cache device lost its power shows data that never was.
#[test]
fn a_crash_log_that_is_believed_after_a_loss_of_power_is_found_out() {
    let fails = |seed: &u64| {
        let plan = Plan { lying: Some(Lying::CrashLog), crash_log: true, ..Plan::from_seed(*seed) };
        run(&plan, false).is_err()
    };
    let first = (0..2000).find(fails);
    assert!(first.is_some(), "no seed of 2000 noticed it");
    println!("seed {first:?}");
}
