//! Boots in which one backing device hangs until the ring of the journal has gone around.
//!
//! The other boots with a hung device are too short for that, or crash before. In two thirds of these boots the index has clean
//! copies of the device; most such devices hang only in flushes. In the others the device hangs while its dirty data is written
//! back and overwritten. Owns the drawing of these boots, from a source of its own. Of a plan with such a boot it may also change the
//! number of clients, which all boots share. Must not change plans without a hung device.

use format::CacheMode;
use io::Rng;

use super::one_of;
use crate::plan::{BootPlan, Faults, OperatorAction, Plan, Request};

/// The least number of blocks in the ring of a journal.
const LEAST_RING_BLOCKS: u64 = 64;

/// The longest ring that a boot goes around, in blocks.
const MOST_RING_BLOCKS: u64 = 600;

/// The largest number of clients that the mixes of requests draw; larger numbers are drawn on purpose.
const MOST_USUAL_DEPTH: u64 = 16;

/// The part of a volume that the writes go to, in sectors.
const HOT_SECTORS: u64 = 64;

/// The boot that goes around the ring.
struct Ring<'a> {
    /// The volume whose device hangs.
    hung: usize,
    /// Another volume, whose writes fill the ring.
    other: usize,
    /// The sizes of all volumes, in sectors.
    sizes: &'a [u64],
    /// The size of a write, in sectors.
    block: u64,
    /// The number of writes to the other volume.
    count: u64,
    /// Whether clients write to the volume whose device hangs, and flush it.
    own: bool,
}

/// Makes some of the first `boots` boots with a hung device long enough for the ring of the journal to go around.
pub(super) fn add(plan: &mut Plan, boots: usize, rng: &mut Rng, sizes: &[u64]) {
    let l = &plan.layout;
    let bucket_blocks = l.bucket_sectors / l.block_sectors;
    let ring = ((l.nbuckets / 128).max(2) * bucket_blocks).max(LEAST_RING_BLOCKS);
    let mut any = false;
    for boot in plan.boots.iter_mut().take(boots) {
        let hung = boot.faults.as_ref().and_then(|f| f.hang.as_ref()).map(|h| h.device - 1);
        let Some(hung) = hung.filter(|_| ring <= MOST_RING_BLOCKS && rng.chance(2, 3)) else { continue };
        let others: Vec<usize> = (0..sizes.len()).filter(|v| *v != hung).collect();
        let other = one_of(rng, &others);
        let own = rng.chance(1, 3);
        clear(boot, rng, own);
        match own {
            true => write_back_at_once(boot, rng),
            false => modes(boot, hung, other, plan.layout.backings.len()),
        }
        let count = ring * one_of(rng, &[2, 3]);
        let block = plan.layout.largest_block(&plan.layout.backings[hung]);
        go_around(boot, rng, &Ring { hung, other, sizes, block, count, own });
        any = true;
    }
    // Clients that write at the same time share entries, so the ring goes around more slowly. A plan of many clients keeps them.
    if any && plan.depth <= MOST_USUAL_DEPTH && rng.chance(3, 4) {
        plan.depth = one_of(rng, &[1, 2]);
    }
}

/// Clears what ends the boot before the ring has gone around, and most often the other faults. `own`: the device of the volume
/// that is written to hangs, which may happen at any request.
fn clear(boot: &mut BootPlan, rng: &mut Rng, own: bool) {
    (boot.alone, boot.substitute, boot.crash_in_durable_write, boot.aim) = (false, None, None, None);
    boot.absent.clear();
    // The process dies, or the power fails, while the device hangs, or the boot continues after it.
    boot.crash = boot.crash.filter(|_| rng.chance(1, 3)).map(|_| 5000 + rng.below(30_000));
    boot.actions.retain(|(_, a)| !matches!(a, OperatorAction::PowerFails));
    if own || rng.chance(1, 2) {
        boot.actions.clear();
    }
    let s = &mut boot.settings;
    (s.sequential_cutoff, s.congestion, s.cutoffs) = (0, false, (70, 90));
    s.cache_mode = None;
    let only = rng.chance(3, 4);
    let Some(faults) = &mut boot.faults else { return };
    if only {
        *faults = Faults { hang: faults.hang.take(), ..Faults::default() };
    }
    if let Some(hang) = &mut faults.hang {
        hang.flushes |= !own && rng.chance(3, 4);
        hang.after = one_of(rng, if own { &[1, 3, 8, 20] } else { &[0, 0, 1, 5, 20] });
    }
}

/// Makes dirty data of the device that hangs, which is written back soon.
fn write_back_at_once(boot: &mut BootPlan, rng: &mut Rng) {
    let s = &mut boot.settings;
    s.cache_mode = Some(CacheMode::Writeback.name().to_owned());
    (s.writeback_running, s.writeback_percent, s.writeback_delay) = (true, 0, one_of(rng, &[0, 1]));
}

/// Makes clean copies of the device that hangs, and journal entries of another.
fn modes(boot: &mut BootPlan, hung: usize, other: usize, backings: usize) {
    let mode = |volume, mode: CacheMode| {
        let action =
            OperatorAction::Tune { volume, name: "cache_mode".into(), value: mode.name().to_owned() };
        (0, action)
    };
    boot.actions.insert(0, mode(hung, CacheMode::Writethrough));
    if other < backings {
        boot.actions.insert(0, mode(other, CacheMode::Writeback));
    }
}

/// Adds writes to the volume of the device that hangs, and then durable writes to another volume. With `own` there are flushes
/// and durable writes to the first volume, too.
fn go_around(boot: &mut BootPlan, rng: &mut Rng, ring: &Ring<'_>) {
    let Ring { hung, other, sizes, block, count, own } = *ring;
    let write = |rng: &mut Rng, volume: usize, fua: bool| {
        let blocks = (sizes[volume].min(HOT_SECTORS.max(8 * block)) / block).max(1);
        (volume, Request::Write { start: rng.below(blocks) * block, sectors: block, fua })
    };
    let mut requests = Vec::new();
    for _ in 0..one_of(rng, &[2, 8, 32]) {
        requests.push(write(rng, hung, false));
        requests.push(write(rng, other, true));
    }
    for _ in 0..count {
        requests.push(write(rng, other, true));
        if rng.chance(1, if own { 2 } else { 16 }) {
            let fua = own && rng.chance(1, 4);
            requests.push(write(rng, hung, fua));
        }
        if own && rng.chance(1, 8) {
            requests.push((hung, Request::Flush));
        }
    }
    requests.append(&mut boot.requests);
    boot.requests = requests;
}
