//! Every deliberate bug of the code for two sets must be found.
//!
//! Run with `cargo test -p ubcache-sim --features canary --test group_canaries`. Lives from random seeds find most of them; the others
//! need a life that was found by a longer search, or a scenario.

#[allow(dead_code)]
mod clean_in_both_sets;
#[allow(dead_code)]
mod old_copies;
#[allow(dead_code)]
mod slow_sets;

use engine::canary::{Bug, set_bug};
use sim::group_run::{BUGS, run_group};

/// Lives within which a bug must be found that is not in `OTHERS`.
const WITHIN: u64 = 400;

/// Bugs that need something special to happen.
const OTHERS: &[(Bug, fn())] = &[
    (Bug::DroppedCopyNotDurable, || life(7253)),
    (Bug::CleanStateBeforeSecond, || life(24570)),
    (Bug::CopyNewerThanPrimary, || life(9364)),
    (Bug::JournalsRunApart, || life(616)),
    (Bug::TakenOverSetBypassed, || life(414)),
    (Bug::WritebackBeforeSecondKey, clean_in_both_sets::a_crash_at_any_moment_of_writeback_over_clean_data),
    (Bug::IncompleteCopyRead, clean_in_both_sets::an_incomplete_copy_has_no_clean_data),
    (Bug::CleanDataOfLostSetTrusted, clean_in_both_sets::a_start_without_the_first_set_trusts_no_clean_data),
    (Bug::SlowSetAwaited, slow_sets::a_cache_device_hangs_at_any_request),
    (Bug::OnlyDataGivenUp, slow_sets::a_set_with_the_only_dirty_data_of_a_volume_is_not_given_up),
    (Bug::OldCopyTrusted, old_copies::a_set_that_was_lost_does_not_take_over),
    (Bug::RestoredCopyTrusted, old_copies::a_copy_that_was_restored_from_a_backup_does_not_take_over),
    (Bug::OtherUseIgnored, old_copies::a_copy_is_void_after_another_program_has_used_the_first_set),
];

fn life(seed: u64) {
    run_group(seed, false);
}

fn is_found(bug: Bug, check: impl Fn() + std::panic::UnwindSafe) -> bool {
    set_bug(Some(bug));
    let found = std::panic::catch_unwind(check);
    set_bug(None);
    found.is_err()
}

#[test]
fn lives_find_most_bugs() {
    for bug in BUGS.iter().filter(|bug| !OTHERS.iter().any(|(other, _)| other == *bug)) {
        let found = (0..WITHIN).find(|seed| is_found(*bug, || life(*seed)));
        assert!(found.is_some(), "{bug:?} is not found within {WITHIN} lives");
    }
}

#[test]
fn every_other_bug_is_found_where_it_matters() {
    for (bug, check) in OTHERS {
        check();
        assert!(is_found(*bug, check), "{bug:?} is not found");
    }
}

#[test]
fn without_a_bug_nothing_is_found() {
    (0..WITHIN).for_each(life);
    assert!(BUGS.len() >= 15);
}
