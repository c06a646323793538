//! Every crash of a scenario: the power fails at every moment of a boot, and every possible outcome of the cut is tried.
//!
//! Owns the moments at which a scenario is interrupted and the outcomes of each. The boot runs once. Before every effect on
//! a device, the contents of the devices and the state of the oracle are saved. Then each outcome is loaded and judged, and
//! a last boot has to succeed. Outcomes with equal contents and an equal oracle are tried once. Must not know the script.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::rc::Rc;

use io::Rng;

use crate::disk::{Moment, Retained, SimDisk};
use crate::image::Image;
use crate::oracle::Oracle;
use crate::scenario::{Boot, End, Scenario};

/// Possible contents of the devices after a crash: a list of outcomes, each with one image per device.
type Outcomes = Vec<Vec<Image>>;

/// The outcomes of a moment, computed when it is tried, and its fingerprint, which is equal for equal moments.
struct Later {
    outcomes: Box<dyn FnOnce() -> Outcomes>,
    fingerprint: u64,
}

struct Crash {
    /// Number of the effect before which the crash is.
    at: u64,
    later: Later,
    oracles: Vec<Oracle>,
}

/// Limit of the outcomes that are tried for one crash.
const COMBINATIONS: usize = 1 << 12;

/// Counts of the tried crashes and outcomes.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Tried {
    /// Moments at which the power failed.
    pub crashes: u64,
    /// Number of the outcomes that were judged and succeeded.
    pub outcomes: u64,
    /// Number of the outcomes that were equal to an earlier one.
    pub alike: u64,
}

/// Runs a boot after a `prologue`, with a power loss before every `step`th effect, and tries some outcomes of each crash.
///
/// Returns the number of crashes.
///
/// # Panics
/// If a check fails; the message has the number of the effect.
pub fn every_crash<P, T>(
    seed: u64,
    make: impl Fn() -> Scenario,
    prologue: impl Fn(Boot) -> P,
    script: impl Fn(Boot) -> T,
    step: u64,
) -> u64
where
    P: Future<Output = ()> + 'static,
    T: Future<Output = ()> + 'static,
{
    let some = move |disks: &[Rc<SimDisk>], at: u64| -> Later {
        let retained = [Retained::Nothing, Retained::Everything, Retained::Some(2), Retained::Some(6)];
        let rng = &mut Rng::new(seed ^ at);
        let tries = [retained[0], retained[1 + rng.below(3) as usize], retained[2 + rng.below(2) as usize]];
        let outcome = |k: &Retained| disks.iter().map(|d| d.after_power_loss(*k, rng)).collect();
        let outcomes: Outcomes = tries.iter().map(outcome).collect();
        let fingerprint = outcomes.iter().flatten().map(Image::fingerprint).fold(0, mix);
        Later { outcomes: Box::new(move || outcomes), fingerprint }
    };
    crash_everywhere(make, prologue, script, step, some).crashes
}

/// Runs a boot after a `prologue`, with a power loss before every effect, and tries every subset of the non-durable writes.
///
/// It tries every subset of up to `most` blocks or writes of a device ([`Moment::outcomes`]) in every combination with the
/// subsets of the other devices. If these are more than `COMBINATIONS`, `most` is lower at that moment.
///
/// # Panics
/// If a check fails; the message has the number of the effect.
pub fn every_outcome<P, T>(
    make: impl Fn() -> Scenario,
    prologue: impl Fn(Boot) -> P,
    script: impl Fn(Boot) -> T,
    most: usize,
) -> Tried
where
    P: Future<Output = ()> + 'static,
    T: Future<Output = ()> + 'static,
{
    let all = move |disks: &[Rc<SimDisk>], _: u64| -> Later {
        let moments: Vec<Moment> = disks.iter().map(|d| d.moment()).collect();
        let fingerprint = moments.iter().map(Moment::fingerprint).fold(0, mix);
        Later { outcomes: Box::new(move || together(&moments, most)), fingerprint }
    };
    crash_everywhere(make, prologue, script, 1, all)
}

/// Every combination of the outcomes of the devices, with the largest `most` that gives at most [`COMBINATIONS`].
fn together(moments: &[Moment], most: usize) -> Outcomes {
    let count = |most: usize| moments.iter().map(|m| m.count(most)).product::<usize>();
    let most = (0..=most).rev().find(|n| count(*n) <= COMBINATIONS).unwrap_or(0);
    let mut all: Outcomes = vec![Vec::new()];
    for m in moments {
        let of_disk = m.outcomes(most);
        let with = |known: &Vec<Image>, next: &Image| known.iter().chain([next]).cloned().collect();
        all = all.iter().flat_map(|known| of_disk.iter().map(move |i| with(known, i))).collect();
    }
    all
}

fn crash_everywhere<P, T>(
    make: impl Fn() -> Scenario,
    prologue: impl Fn(Boot) -> P,
    script: impl Fn(Boot) -> T,
    step: u64,
    outcomes_of: impl Fn(&[Rc<SimDisk>], u64) -> Later + 'static,
) -> Tried
where
    P: Future<Output = ()> + 'static,
    T: Future<Output = ()> + 'static,
{
    let mut scenario = make();
    scenario.boot_and_stop(&prologue);
    let crashes = remember_crashes(&mut scenario, &script, step, outcomes_of);
    scenario.kill().happy_end();
    let mut tried = Tried { crashes: crashes.len() as u64, ..Tried::default() };
    let (mut known, mut moments) = (BTreeSet::new(), BTreeSet::new());
    for crash in crashes {
        let oracles = crash.oracles.iter().map(Oracle::fingerprint).fold(0, mix);
        if !moments.insert(mix(crash.later.fingerprint, oracles)) {
            continue;
        }
        for (n, images) in (crash.later.outcomes)().into_iter().enumerate() {
            if !known.insert(images.iter().map(Image::fingerprint).fold(oracles, mix)) {
                tried.alike += 1;
                continue;
            }
            tried.outcomes += 1;
            for (disk, image) in scenario.hardware.disks().zip(images) {
                disk.load(image);
            }
            for (o, was) in scenario.oracles.iter().zip(&crash.oracles) {
                *o.borrow_mut() = was.clone();
            }
            let judged = catch_unwind(AssertUnwindSafe(|| scenario.judge().happy_end()));
            if let Err(e) = judged {
                eprintln!("the crash was before effect {} of the scenario, with its outcome {n}", crash.at);
                resume_unwind(e);
            }
        }
    }
    tried
}

/// Runs the script to its end. Returns the state before every `step`th effect and at the end.
fn remember_crashes<T: Future<Output = ()> + 'static>(
    scenario: &mut Scenario,
    script: impl Fn(Boot) -> T,
    step: u64,
    outcomes_of: impl Fn(&[Rc<SimDisk>], u64) -> Later + 'static,
) -> Vec<Crash> {
    let world = scenario.hardware.world.clone();
    let crashes: Rc<RefCell<Vec<Crash>>> = Rc::default();
    let disks: Vec<Rc<SimDisk>> = scenario.hardware.disks().cloned().collect();
    let (before, all, oracles, clock) =
        (world.effects(), crashes.clone(), scenario.oracles.clone(), world.clone());
    let watcher: Rc<dyn Fn()> = Rc::new(move || {
        let at = clock.effects() - before;
        if !at.is_multiple_of(step) {
            return;
        }
        let mut all = all.borrow_mut();
        // If an announced effect did not happen, the state before the effect that happens counts.
        let _ = all.pop_if(|c| c.at == at);
        let crashed = |o: &Rc<RefCell<Oracle>>| {
            let mut oracle = o.borrow().clone();
            oracle.crashed();
            oracle
        };
        let oracles = oracles.iter().map(crashed).collect();
        all.push(Crash { at, later: outcomes_of(&disks, at), oracles });
    });
    world.set_watcher(Some(watcher));
    let end = scenario.begin(&script);
    world.before_effect();
    world.set_watcher(None);
    assert!(matches!(end, End::Finished), "expected the boot to end without a power loss");
    crashes.take()
}

/// Adds a number to a fingerprint.
fn mix(sum: u64, next: u64) -> u64 {
    (sum ^ next).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29)
}
