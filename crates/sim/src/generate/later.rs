//! Later additions to plans, drawn by a separate generator.
//!
//! The older parts of a plan stay the same, so seeds that found a bug still find it. Owns the additions of requests, actions
//! and settings. Must not change what the other modules drew.

use io::{Nanos, Rng};

use super::mix::Lean;
use super::one_of;
use crate::disk::{Landmark, Retained};
use crate::landmark::Aim;
use crate::plan::{BootPlan, Cut, OperatorAction, Plan, Request, Substitute};

/// Adds the later additions to a plan with these leanings.
pub(super) fn add(plan: &mut Plan, rng: &mut Rng, leanings: &[Lean]) {
    let wraps = leanings.contains(&Lean::Wrapping);
    if rng.chance(1, if wraps { 2 } else { 40 }) {
        let nodes = Nanos::from_ms(one_of(rng, &[20, 200, 3000]));
        plan.boots.iter_mut().for_each(|b| b.cache_speed.nodes = nodes);
    }
    if rng.chance(1, 6) {
        plan.boots.iter_mut().for_each(|b| wipe(rng, b));
    }
    let substitutes = rng.chance(1, 6);
    for n in (1..plan.boots.len()).filter(|_| substitutes) {
        let flash = plan.flash_sectors > 0;
        plan.boots[n].substitute = match rng.below(8) {
            0 | 1 if !flash => Some(Substitute::Copy(rng.below(n as u64) as usize)),
            0 | 1 => Some(Substitute::LargeVolume),
            2 => Some(Substitute::FarKey),
            3 | 4 => Some(Substitute::Full),
            _ => None,
        };
    }
    if rng.chance(1, 2) {
        plan.boots.iter_mut().for_each(|b| b.stops_set_alone = rng.chance(1, 2));
    }
    if rng.chance(1, 8) {
        let volumes = plan.layout.backings.len() as u64;
        plan.boots.iter_mut().for_each(|b| drain(rng, b, volumes));
    }
    if plan.flash_sectors > 0 && plan.layout.block_sectors > 1 && rng.chance(1, 4) {
        let (flash, sectors, block) =
            (plan.layout.backings.len(), plan.flash_sectors, plan.layout.block_sectors);
        plan.boots.iter_mut().for_each(|b| edges(rng, b, flash, sectors / block, block));
        if rng.chance(1, 2) {
            plan.depth = 1;
        }
    }
    if rng.chance(1, 8) {
        lose_what_was_left(plan, rng);
    }
}

/// Adds power losses soon after a process died while it wrote an entry.
///
/// The next start reads the entry from the device's cache, and the power loss loses the entry unless that start made it
/// durable.
fn lose_what_was_left(plan: &mut Plan, rng: &mut Rng) {
    for n in 1..plan.boots.len() {
        if !rng.chance(1, 2) {
            continue;
        }
        let retained =
            one_of(rng, &[Retained::Nothing, Retained::Nothing, Retained::Some(1), Retained::Some(4)]);
        let (many, few) = (1 + rng.below(20), 1 + rng.below(4));
        let dying = &mut plan.boots[n - 1];
        dying.cut = Cut::Kill;
        dying.aim = Some(Aim { at: Landmark::Entry, nth: many, effects: one_of(rng, &[0, 1, 1, 2]) });
        dying.crash.get_or_insert(400 + rng.below(400));
        // A write that lands later would be durable.
        dying.late = None;
        let next = &mut plan.boots[n];
        next.aim = Some(Aim { at: Landmark::Entry, nth: few, effects: one_of(rng, &[1, 2, 6]) });
        (next.cut, next.substitute, next.crash_in_durable_write) =
            (Cut::Power(retained, retained), None, None);
        next.crash.get_or_insert(40 + rng.below(400));
    }
}

/// Adds drains that are cancelled.
fn drain(rng: &mut Rng, boot: &mut BootPlan, volumes: u64) {
    for _ in 0..rng.below(4) {
        let at = rng.below(boot.requests.len() as u64 + 1);
        let ns = one_of(rng, &[0, 1_000_000, 1_000_000_000]);
        boot.actions.push((at, OperatorAction::Drain { volume: rng.below(volumes) as usize, ns }));
    }
    boot.actions.sort_by_key(|(at, _)| *at);
}

/// Adds durable zeros over a hole of the flash-only volume and over parts of the adjacent blocks, which have dirty data.
fn edges(rng: &mut Rng, boot: &mut BootPlan, flash: usize, blocks: u64, block: u64) {
    // A shorter range is written as zeros, with keys.
    let wanted = 128 / block + 3;
    if blocks < wanted || boot.alone {
        return;
    }
    for _ in 0..rng.below(16) {
        let start = rng.below(blocks - wanted + 1) * block;
        let (last, end) = (start + (wanted - 1) * block, start + wanted * block);
        let requests = [
            Request::Zeroes { start, sectors: end - start, fua: false, may_unmap: true },
            Request::Write { start, sectors: block, fua: false },
            Request::Write { start: last, sectors: block, fua: false },
            Request::Flush,
            Request::Pause { ns: one_of(rng, &[0, 1_000_000, 1_000_000_000]) },
            Request::Zeroes { start: start + 1, sectors: end - start - 2, fua: true, may_unmap: true },
        ];
        let at = rng.below(boot.requests.len() as u64 + 1) as usize;
        boot.requests.splice(at..at, requests.map(|r| (flash, r)));
    }
    boot.settings.overwrite_in_place = one_of(rng, &["always", "always", "auto"]).into();
}

/// Adds scrubs to a plan of a set with checksums, drawn from a source of their own.
pub(super) fn scrubs(plan: &mut Plan, rng: &mut Rng) {
    if !plan.layout.checksums || rng.chance(1, 2) {
        return;
    }
    for boot in &mut plan.boots {
        for _ in 0..rng.below(4) {
            let at = rng.below(boot.requests.len() as u64 + 1);
            let ns = one_of(rng, &[0, 0, 1_000_000, 1_000_000_000]);
            boot.actions.push((at, OperatorAction::Scrub { ns }));
        }
        boot.actions.sort_by_key(|(at, _)| *at);
    }
}

/// Adds some wipes; before some of them a walk, which leaves more to be wiped.
fn wipe(rng: &mut Rng, boot: &mut BootPlan) {
    for _ in 0..rng.below(4) {
        let at = rng.below(boot.requests.len() as u64 + 1);
        let ns = one_of(rng, &[0, 0, 1_000_000, 1_000_000_000]);
        if rng.chance(1, 2) {
            boot.actions.push((at, OperatorAction::Gc));
        }
        boot.actions.push((at, OperatorAction::Wipe { ns }));
    }
    boot.actions.sort_by_key(|(at, _)| *at);
}
