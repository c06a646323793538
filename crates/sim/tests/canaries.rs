//! Tests of the simulator: it must find each deliberate bug of the engine.
//!
//! Run with `cargo test -p ubcache-sim --features canary --test canaries`. Every bug has a short plan in
//! `plans/canaries` that finds it at once, or a scenario (`SCENARIOS`); after changes of the engine a run like the plan
//! may be needed. Random seeds must find every bug that is not in `RARE`. `docs/simulation.md` has the table.

#[allow(dead_code)]
mod checksums;
#[allow(dead_code)]
mod contract;
#[allow(dead_code)]
mod dropped_data;
#[allow(dead_code)]
mod hung_device;
#[allow(dead_code)]
mod older_devices;
#[allow(dead_code)]
mod outlasting;
#[allow(dead_code)]
mod reads_beside_evictions;
#[allow(dead_code)]
mod refused_sets;
#[allow(dead_code)]
mod resized_devices;
#[allow(dead_code)]
mod scrub;

use std::time::Instant;

use engine::canary::{Bug, set_bug};
use io::Rng;
use sim::group_run::BUGS as GROUP_BUGS;
use sim::plan::Plan;
use sim::run::{run, run_seed};

/// Seeds within which the common bugs must be found.
const WITHIN: u64 = 300;

/// Bugs that need more seeds than that, or nearly as many.
const RARE: &[Bug] = &[
    Bug::DirectBeforeDirtyKey,
    Bug::DirtyAfterStale,
    Bug::FailedButNotStale,
    Bug::GenerationsNotAwaited,
    Bug::HoleTakenForDurable,
    Bug::DirtyDroppedBeforeFlush,
    Bug::MovedCleanNotJournaled,
    Bug::TornEntryValid,
    Bug::OpenWithoutFlush,
    Bug::FailedWriteUnnoticed,
    Bug::OverwrittenWhileMoved,
    Bug::OverwriteForgetsKeys,
    Bug::SuperblockInOnePiece,
    Bug::InvalidKeysCounted,
    Bug::JournalHoldersWait,
    Bug::JournalWithoutReserve,
    Bug::ReserveOfHalfARing,
    Bug::CrashLogWithoutReserve,
    Bug::ReadOutlastsDetach,
    Bug::ReleaseOvertakesUpdate,
    Bug::ReclaimLooksOnce,
    Bug::MissOverPendingHole,
    Bug::LateFlushTrusted,
    Bug::ReadAwaitsWriteback,
    Bug::ReadsEvictEachOther,
    Bug::CrashLogAfterError,
    Bug::CrashLogOfNewerState,
    Bug::ShorterLeafBelieved,
    Bug::CopiesBehindEndKept,
    Bug::OwnerlessDataIgnored,
    Bug::OlderCacheBelieved,
    Bug::StartWantsOneMore,
    Bug::LoadIgnoresLimit,
    Bug::EdgesNotDurable,
    Bug::GivenUpUpdateForgotten,
    Bug::RingBucketFreedEarly,
    Bug::OverwrittenInWriteback,
    Bug::StaleGenerationRead,
    Bug::FooterBeforeOverwrite,
    Bug::WipedTakenForDamaged,
    Bug::FooterOverData,
    Bug::WritebackFlushUnknownToCopies,
    Bug::ReleaseFlushesClientsOnly,
    Bug::ChangeDuringLookUpUnnoticed,
    Bug::FlushWithoutWaiterTrusted,
    Bug::MissingFooterTakenForAbsent,
    Bug::MovedUnverified,
    Bug::WrittenBackUnverified,
];

/// Bugs that a scenario finds; they need no plan.
const SCENARIOS: &[(Bug, fn())] = &[
    (Bug::FooterBeforeOverwrite, checksums::a_footer_waits_for_data_that_was_overwritten_in_place),
    (Bug::FooterLeftAtOverwrite, checksums::data_that_is_overwritten_in_place_does_not_count_as_damaged),
    (Bug::FooterBeforeGeneration, checksums::data_of_a_kernel_does_not_count_as_damaged),
    (Bug::FooterOverData, scrub::a_footer_is_not_written_over_data_of_a_kernel),
    (
        Bug::MissingFooterTakenForAbsent,
        checksums::a_footer_that_a_wipe_has_overwritten_does_not_come_back_over_other_data,
    ),
    (Bug::MovedUnverified, checksums::damaged_data_is_not_packed),
    (Bug::WrittenBackUnverified, checksums::damaged_dirty_data_is_neither_served_nor_written_back),
    (Bug::MissOverPendingHole, contract::a_durable_write_past_the_cache_waits_for_the_hole_below_a_copy),
    (
        Bug::FailedWritebackNotFlushed,
        contract::a_copy_of_what_a_failed_writeback_has_written_waits_for_a_flush,
    ),
    (Bug::WritebackFlushUnknownToCopies, contract::after_a_failed_flush_of_writeback_no_copies_are_made),
    (
        Bug::DroppedCopyBridged,
        dropped_data::writeback_does_not_fill_a_gap_with_data_that_the_device_has_dropped,
    ),
    (Bug::ReleaseFlushesClientsOnly, dropped_data::a_release_flushes_what_a_failed_writeback_has_written),
    (
        Bug::ChangeDuringLookUpUnnoticed,
        dropped_data::a_change_while_a_read_looks_its_pieces_up_keeps_the_miss_out_of_the_cache,
    ),
    (Bug::LateFlushTrusted, hung_device::a_flush_that_hangs_does_not_fill_the_journal),
    (Bug::HungFlushAwaited, hung_device::a_flush_that_hangs_does_not_fill_the_journal),
    (Bug::WriteAwaitsWriteback, hung_device::dirty_data_is_written_and_flushed_while_its_device_hangs),
    (Bug::CrashLogAfterError, older_devices::a_crash_log_does_not_count_after_the_device_failed),
    (Bug::ShorterLeafBelieved, dropped_data::a_leaf_that_has_lost_a_bset_is_damage),
    (Bug::CrashLogOfNewerState, older_devices::a_crash_log_is_not_replayed_onto_an_older_copy),
    (
        Bug::FlushWithoutWaiterTrusted,
        older_devices::a_crash_log_does_not_count_after_a_flush_failed_for_which_no_task_waits,
    ),
    (
        Bug::ReadOutlastsDetach,
        outlasting::a_read_does_not_return_the_zeros_of_a_wipe_after_its_volume_was_detached,
    ),
    (Bug::ReadsEvictEachOther, reads_beside_evictions::two_reads_that_are_larger_than_the_cache_end),
    (Bug::ReleaseOvertakesUpdate, outlasting::a_release_waits_for_the_update_of_the_superblock),
    (Bug::EdgesNotDurable, contract::durable_zeros_of_a_flash_only_volume_wait_for_their_edges),
    (Bug::CopiesBehindEndKept, resized_devices::copies_behind_the_end_of_a_truncated_device_are_gone),
    (Bug::OwnerlessDataIgnored, refused_sets::dirty_data_without_an_owner),
    (Bug::FarKeyLeftOut, refused_sets::a_leaf_with_a_key_beyond_the_largest_position),
    (Bug::LargeVolumeBelieved, refused_sets::a_flash_only_volume_beyond_the_largest_position),
    (Bug::LoadIgnoresLimit, refused_sets::a_start_keeps_no_more_of_the_index_than_it_may),
    (Bug::ReplayIgnoresLimit, refused_sets::a_replay_keeps_no_more_of_the_index_than_it_may),
    (Bug::UnloadedKeysForgotten, refused_sets::a_replay_keeps_no_more_of_the_index_than_it_may),
    (Bug::StartWantsOneMore, refused_sets::as_many_free_buckets_as_priorities_need_are_enough),
    (Bug::OlderCacheBelieved, older_devices::an_older_cache_is_refused_by_a_dirty_device),
];

/// Runs like its plan within which a bug must be found.
const LIKE_ITS_PLAN: u64 = 400;

/// What a bug makes of a run; nothing if it is not found.
fn found_by(bug: Bug, plan: &Plan) -> Option<String> {
    set_bug(Some(bug));
    let result = run(plan, false);
    set_bug(None);
    Some(result.err()?.violation.first_line(110))
}

fn plan_of(bug: Bug) -> Plan {
    let file = format!("{}/plans/canaries/{bug:?}.plan", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(&file).unwrap_or_else(|e| panic!("{file}: {e}"));
    Plan::from_text(&text).unwrap_or_else(|e| panic!("{file}: {e}"))
}

/// Several tests share the table, so that they run side by side.
fn plans(part: usize, of: usize) {
    let mut missed = Vec::new();
    let has_scenario = |bug: &Bug| GROUP_BUGS.contains(bug) || SCENARIOS.iter().any(|(b, _)| b == bug);
    for bug in Bug::ALL.iter().filter(|b| !has_scenario(b)).skip(part).step_by(of) {
        let plan = plan_of(*bug);
        if let Err(failure) = run(&plan, false) {
            panic!("the plan of {bug:?} fails without it: {failure}");
        }
        let rng = &mut Rng::new(plan.seed);
        let found = (0..LIKE_ITS_PLAN).find_map(|n| {
            let plan = if n == 0 { plan.clone() } else { plan.like(rng) };
            found_by(*bug, &plan).map(|what| (n, what))
        });
        match found {
            Some((n, what)) => println!("| {bug:?} | {} steps, run {n} | {what} |", plan.len()),
            None => missed.push(bug),
        }
    }
    assert!(missed.is_empty(), "not found by {LIKE_ITS_PLAN} runs like their plans: {missed:?}");
}

#[test]
fn the_plan_of_every_bug_finds_it_1() {
    plans(0, 2);
}

#[test]
fn the_plan_of_every_bug_finds_it_2() {
    plans(1, 2);
}

#[test]
fn the_scenario_of_every_other_bug_finds_it() {
    for (bug, scenario) in SCENARIOS {
        set_bug(Some(*bug));
        let found = std::panic::catch_unwind(scenario);
        set_bug(None);
        assert!(found.is_err(), "the scenario does not find {bug:?}");
    }
}

fn chance(part: usize, of: usize) {
    let mut missed = Vec::new();
    let needs_no_chance = |bug: &Bug| RARE.contains(bug) || GROUP_BUGS.contains(bug);
    for bug in Bug::ALL.iter().filter(|b| !needs_no_chance(b)).skip(part).step_by(of) {
        let began = Instant::now();
        let found = (0..WITHIN).find_map(|seed| Some((seed, found_by(*bug, &Plan::from_seed(seed))?)));
        match found {
            Some((seed, what)) => {
                println!("| {bug:?} | seed {seed} | {:.1} s | {what} |", began.elapsed().as_secs_f64());
            }
            None => missed.push(bug),
        }
    }
    assert!(missed.is_empty(), "not found within {WITHIN} seeds: {missed:?}");
}

#[test]
fn chance_finds_most_of_them_1() {
    chance(0, 2);
}

#[test]
fn chance_finds_most_of_them_2() {
    chance(1, 2);
}

#[test]
fn without_a_bug_nothing_is_found() {
    for seed in 0..60 {
        if let Err(failure) = run_seed(seed, false) {
            panic!("{failure}");
        }
    }
    assert!(Bug::ALL.len() >= 40 && engine::CANARIES);
}
