//! Ingredients of plans that are drawn by a separate generator, each on its own: damaged data, failed writes to backing
//! devices, flushes that are given up, sets that a kernel has filled, and many clients.
//!
//! Owns their drawing. Must not change what the other modules drew. The last boots of a plan, which end well, have none of
//! them.

use io::Rng;

use super::mix::Lean;
use super::one_of;
use crate::plan::{DataDamage, FailedWrites, Faults, NOT_AGAIN, OperatorAction, Plan, Request};

/// Adds the ingredients to the first `boots` boots of a plan with these leanings.
pub(super) fn add(plan: &mut Plan, boots: usize, rng: &mut Rng, leanings: &[Lean]) {
    let end = plan.boots.split_off(boots);
    add_to_all(plan, rng, leanings);
    plan.boots.extend(end);
}

fn add_to_all(plan: &mut Plan, rng: &mut Rng, leanings: &[Lean]) {
    if plan.layout.checksums && rng.chance(1, 4) {
        plan.kernel_boots = 1 + rng.below(plan.boots.len() as u64);
    }
    let moves = leanings.contains(&Lean::Moving);
    if plan.layout.checksums && rng.chance(1, if moves { 2 } else { 3 }) {
        damage(plan, rng);
    }
    if rng.chance(1, 8) {
        failed_writes(plan, rng);
    }
    if rng.chance(1, 6) {
        flushes_given_up(plan, rng);
    }
    if rng.chance(1, 10) {
        losses_at_a_moment(plan, rng);
    }
    if rng.chance(1, 12) {
        releases_for_the_boot(plan, rng);
    }
    if leanings.contains(&Lean::Wrapping) && rng.chance(1, 3) {
        plan.depth = one_of(rng, &[64, 400]);
    }
}

/// Whether the cache device can fail a read. A footer that cannot be read leaves data without a checksum, so no data of
/// the boot may be damaged.
fn may_hide_footers(faults: &Faults) -> bool {
    let fails = faults.cache_one_in > 0 || faults.unreadable.is_some();
    let goes = faults.outage.as_ref().is_some_and(|o| o.device == 0);
    fails || goes || faults.pull.as_ref().is_some_and(|p| p.device == 0)
}

fn damage(plan: &mut Plan, rng: &mut Rng) {
    for boot in &mut plan.boots {
        // A wipe overwrites footers, so data whose footer was not read before has no checksum afterwards.
        let wipes = boot.actions.iter().any(|(_, a)| matches!(a, OperatorAction::Wipe { .. }));
        if rng.chance(1, 2) || wipes || boot.faults.as_ref().is_some_and(may_hide_footers) {
            continue;
        }
        let most = one_of(rng, &[1, 40, 300]);
        let damage = DataDamage { after: rng.below(most), one_in: one_of(rng, &[1, 3, 20]) };
        boot.faults.get_or_insert_default().damage = Some(damage);
    }
}

fn failed_writes(plan: &mut Plan, rng: &mut Rng) {
    let backings = plan.layout.backings.len() as u64;
    for boot in &mut plan.boots {
        if rng.chance(1, 2) {
            continue;
        }
        let device = 1 + rng.below(backings) as usize;
        let (after, count) = (one_of(rng, &[0, 0, 1, 3, 10]), one_of(rng, &[1, 1, 3, 20]));
        boot.faults.get_or_insert_default().failed_writes = Some(FailedWrites { device, after, count });
    }
}

/// Adds devices that lose data in their next flush, and power failures, at any moment between requests.
fn losses_at_a_moment(plan: &mut Plan, rng: &mut Rng) {
    let devices = 1 + plan.layout.backings.len() as u64;
    for boot in &mut plan.boots {
        let at = rng.below(boot.requests.len() as u64 + 1);
        if rng.chance(1, 3) {
            let device = rng.below(devices) as usize;
            boot.actions.push((at, OperatorAction::NextFlushLoses { device }));
            boot.faults.get_or_insert_default();
        }
        if rng.chance(1, 2) {
            let at = at + rng.below(boot.requests.len() as u64 + 1);
            boot.actions.push((at, OperatorAction::PowerFails));
        }
        boot.actions.sort_by_key(|(at, _)| *at);
    }
}

fn releases_for_the_boot(plan: &mut Plan, rng: &mut Rng) {
    let volumes = plan.layout.backings.len() as u64;
    for boot in &mut plan.boots {
        if rng.chance(1, 2) {
            continue;
        }
        let (at, volume) = (rng.below(boot.requests.len() as u64 + 1), rng.below(volumes) as usize);
        boot.actions.push((at, OperatorAction::Release { volume, ns: NOT_AGAIN }));
        boot.actions.sort_by_key(|(at, _)| *at);
    }
}

fn flushes_given_up(plan: &mut Plan, rng: &mut Rng) {
    for (volume, request) in plan.boots.iter_mut().flat_map(|b| &mut b.requests) {
        let is_flush = *request == Request::Flush;
        let is_pause = matches!(request, Request::Pause { .. });
        if *volume < plan.layout.backings.len()
            && (is_flush && rng.chance(1, 2) || is_pause && rng.chance(1, 3))
        {
            let most = one_of(rng, &[1, 10_000, 1_000_000, 100_000_000]);
            *request = Request::FlushGivenUp { ns: rng.below(most) };
        }
    }
}
