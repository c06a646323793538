//! Every crash of a story: the power fails at every moment of a boot, and everything that a cut could leave is tried.
//!
//! Owns the moments at which a story is interrupted and the outcomes that each may have. The boot is told once; before
//! every effect of a device, the devices and what the oracle allows are remembered. Then each outcome is loaded, judged
//! and must have a happy end. Outcomes that are equal, contents and oracle, are tried once.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::rc::Rc;

use io::Rng;

use crate::disk::{Keep, Moment, SimDisk};
use crate::image::Image;
use crate::oracle::Oracle;
use crate::story::{Boot, End, Story};

/// What may be left of a crash, on each device.
type Outcomes = Vec<Vec<Image>>;

/// What a moment leaves to be tried, worked out when its turn comes, and what is equal for equal moments.
struct Later {
    outcomes: Box<dyn FnOnce() -> Outcomes>,
    fingerprint: u64,
}

struct Crash {
    /// It is before this effect of the tale.
    at: u64,
    later: Later,
    oracles: Vec<Oracle>,
}

/// Outcomes of one crash that are tried at most.
const COMBINATIONS: usize = 1 << 12;

/// How much was tried.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Tried {
    /// Moments at which the power failed.
    pub crashes: u64,
    /// Outcomes that were judged and had a happy end.
    pub outcomes: u64,
    /// Outcomes that were like an earlier one.
    pub alike: u64,
}

/// Tells a boot after a `prologue` and cuts the power before every `step`th effect; of each crash several outcomes are
/// tried. Returns how many crashes there were.
///
/// # Panics
/// If anything is not as it must be; the message says at which effect.
pub fn every_crash<P, T>(
    seed: u64,
    make: impl Fn() -> Story,
    prologue: impl Fn(Boot) -> P,
    tale: impl Fn(Boot) -> T,
    step: u64,
) -> u64
where
    P: Future<Output = ()> + 'static,
    T: Future<Output = ()> + 'static,
{
    let some = move |disks: &[Rc<SimDisk>], at: u64| -> Later {
        let keeps = [Keep::Nothing, Keep::Everything, Keep::Some(2), Keep::Some(6)];
        let rng = &mut Rng::new(seed ^ at);
        let tries = [keeps[0], keeps[1 + rng.below(3) as usize], keeps[2 + rng.below(2) as usize]];
        let outcome = |k: &Keep| disks.iter().map(|d| d.after_power_cut(*k, rng)).collect();
        let outcomes: Outcomes = tries.iter().map(outcome).collect();
        let fingerprint = outcomes.iter().flatten().map(Image::fingerprint).fold(0, mix);
        Later { outcomes: Box::new(move || outcomes), fingerprint }
    };
    crash_everywhere(make, prologue, tale, step, some).crashes
}

/// The same before every single effect, with every subset of what is not durable, as long as a device has at most
/// `most` blocks or writes of that kind ([`Moment::outcomes`]), and every combination of the devices' subsets, as long
/// as these are at most `COMBINATIONS`: else `most` is less at that moment.
///
/// # Panics
/// If anything is not as it must be; the message says at which effect.
pub fn every_outcome<P, T>(
    make: impl Fn() -> Story,
    prologue: impl Fn(Boot) -> P,
    tale: impl Fn(Boot) -> T,
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
    crash_everywhere(make, prologue, tale, 1, all)
}

/// Every combination of what the devices may have left: of every subset for as many writes as leave at most
/// [`COMBINATIONS`].
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
    make: impl Fn() -> Story,
    prologue: impl Fn(Boot) -> P,
    tale: impl Fn(Boot) -> T,
    step: u64,
    outcomes_of: impl Fn(&[Rc<SimDisk>], u64) -> Later + 'static,
) -> Tried
where
    P: Future<Output = ()> + 'static,
    T: Future<Output = ()> + 'static,
{
    let mut story = make();
    story.boot_and_stop(&prologue);
    let crashes = remember_crashes(&mut story, &tale, step, outcomes_of);
    story.kill().happy_end();
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
            for (disk, image) in story.rig.disks().zip(images) {
                disk.load(image);
            }
            for (o, was) in story.oracles.iter().zip(&crash.oracles) {
                *o.borrow_mut() = was.clone();
            }
            let told = catch_unwind(AssertUnwindSafe(|| story.judge().happy_end()));
            if let Err(e) = told {
                eprintln!("the crash was before effect {} of the tale, with its outcome {n}", crash.at);
                resume_unwind(e);
            }
        }
    }
    tried
}

/// Tells the tale to its end and remembers the state before every `step`th effect, and at the end.
fn remember_crashes<T: Future<Output = ()> + 'static>(
    story: &mut Story,
    tale: impl Fn(Boot) -> T,
    step: u64,
    outcomes_of: impl Fn(&[Rc<SimDisk>], u64) -> Later + 'static,
) -> Vec<Crash> {
    let world = story.rig.world.clone();
    let crashes: Rc<RefCell<Vec<Crash>>> = Rc::default();
    let disks: Vec<Rc<SimDisk>> = story.rig.disks().cloned().collect();
    let (before, all, oracles, clock) =
        (world.effects(), crashes.clone(), story.oracles.clone(), world.clone());
    let watcher: Rc<dyn Fn()> = Rc::new(move || {
        let at = clock.effects() - before;
        if !at.is_multiple_of(step) {
            return;
        }
        let mut all = all.borrow_mut();
        // Somebody asked for this effect and did not get it: what counts is the state when it happens.
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
    let end = story.begin(&tale);
    world.before_effect();
    world.set_watcher(None);
    assert!(matches!(end, End::Told), "nobody cut the power");
    crashes.take()
}

/// Adds to a fingerprint.
fn mix(sum: u64, next: u64) -> u64 {
    (sum ^ next).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29)
}
