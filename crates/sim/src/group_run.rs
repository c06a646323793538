//! Random lives of a volume with its dirty data in two sets: power losses, the loss of either set, and its return.
//!
//! Owns the choice of what happens in a life, all from one seed. The checks are those of [`crate::group`].

use std::rc::Rc;

use engine::SetOptions;
#[cfg(feature = "canary")]
use engine::canary::Bug;
use engine::tunables::Overwrite;
use format::CacheMode;
use io::{Rng, ZeroFlags};

use crate::client::Client;
use crate::disk::{Retained, SimDisk};
use crate::group::Present;
use crate::hardware::Layout;
use crate::scenario::{Boot, End, Scenario};
use crate::world::Order;

/// The deliberate bugs of the code for two sets. Runs with one set do not find them.
#[cfg(feature = "canary")]
pub const BUGS: &[Bug] = &[
    Bug::AcknowledgedAfterOneCopy,
    Bug::SecondCopyOutlivesFirst,
    Bug::JournalsRunApart,
    Bug::DroppedCopyNotDurable,
    Bug::CleanStateBeforeSecond,
    Bug::DropInFirstSetOnly,
    Bug::OverwriteWithCopy,
    Bug::CopyRangeNotHeld,
    Bug::CopyNamedBeforeDurable,
    Bug::CopyNewerThanPrimary,
    Bug::TakenOverUnrecorded,
    Bug::TakenOverSetBypassed,
    Bug::UnsettledForgotten,
    Bug::CopiesNotSettled,
    Bug::LossNotRecorded,
    Bug::OldCopyTrusted,
    Bug::RestoredCopyTrusted,
    Bug::OtherUseIgnored,
    Bug::CleanCopyOfSecondKept,
    Bug::WritebackBeforeSecondKey,
    Bug::SecondLeafBeforeBacking,
    Bug::IncompleteCopyRead,
    Bug::CleanDataOfLostSetTrusted,
    Bug::SlowSetAwaited,
    Bug::OnlyDataGivenUp,
];

/// Counts of what happened in lives.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct GroupCounts {
    /// Power losses of all devices.
    pub power_losses: u64,
    /// Losses of one cache device while the volume was served.
    pub set_losses: u64,
    /// Of these, losses of the set of the volume.
    pub own_losses: u64,
    /// Starts without one of the cache devices.
    pub starts_alone: u64,
    /// Copies that were complete.
    pub copies: u64,
}

impl GroupCounts {
    /// Adds the counts of another life.
    pub fn add(&mut self, other: &GroupCounts) {
        self.power_losses += other.power_losses;
        self.set_losses += other.set_losses;
        self.own_losses += other.own_losses;
        self.starts_alone += other.starts_alone;
        self.copies += other.copies;
    }
}

/// The events of one boot, chosen before it begins.
#[derive(Clone, Copy)]
struct Chosen {
    present: Present,
    /// Whether the first cache device is lost, after how many of its requests, and what it retains of what is not durable. `None`: it fails
    /// or hangs.
    loss: Option<(bool, u64, Option<Retained>)>,
    seed: u64,
}

/// Runs the life of a seed. `verbose`: prints every event.
///
/// # Panics
/// If a check fails, or a client sees an error.
pub fn run_group(seed: u64, verbose: bool) -> GroupCounts {
    let rng = &mut Rng::new(seed ^ 0x6702);
    let buckets = [136, 160, 256][rng.below(3) as usize];
    let mut layout = Layout::sized(CacheMode::Writeback, buckets, 1024);
    layout.checksums = rng.chance(1, 2);
    if rng.chance(1, 2) {
        // Each device has its dirty data in the set of the other one, too.
        let again = layout.backings.clone();
        layout.backings.extend(again);
    }
    let mut scenario = Scenario::with_second(seed, layout);
    scenario.hardware.world.set_verbose(verbose);
    let mut counts = GroupCounts::default();
    for _ in 0..2 + rng.below(5) {
        boot(&mut scenario, rng, &mut counts);
    }
    scenario.end_with_loss(rng.chance(1, 2));
    counts
}

/// One boot, which ends with a stop, a power loss or a process crash.
fn boot(scenario: &mut Scenario, rng: &mut Rng, counts: &mut GroupCounts) {
    let spared = [true, false].map(|first| scenario.can_spare(first));
    let present = match rng.below(8) {
        0 if spared[1] => Present::First,
        1 if spared[0] => Present::Second,
        _ => Present::Both,
    };
    counts.starts_alone += u64::from(present != Present::Both);
    let first = if rng.chance(1, 2) { spared[0] } else { !spared[1] };
    let may_lose = present == Present::Both && (spared[0] || spared[1]) && rng.chance(1, 2);
    let serves = (0..scenario.hardware.backings.len()).any(|i| scenario.copy_of(i).0 != first);
    let retained = [None, Some(Retained::Nothing), Some(Retained::Some(3))][rng.below(3) as usize];
    let after = rng.below(120);
    let loss = may_lose.then_some((first, after, retained));
    let chosen = Chosen { present, loss, seed: rng.next_u64() };
    let lost = loss.map(|(first, ..)| scenario.cache_device(first).clone());
    let world = scenario.hardware.world.clone();
    let cut = rng.chance(2, 3).then(|| world.effects() + 1 + rng.below(400));
    world.cut_power_at(cut);
    scenario.set_order([Order::Fifo, Order::Lifo, Order::Random][rng.below(3) as usize]);
    let stops = loss.is_none() && rng.chance(1, 2);
    let end = scenario.begin(|b| async move { serve(b, chosen, stops).await });
    world.cut_power_at(None);
    let has_lost = lost.is_some_and(|d: Rc<SimDisk>| {
        let has_hung = d.held() > 0;
        d.release();
        has_hung || d.is_failing()
    });
    counts.set_losses += u64::from(has_lost);
    counts.own_losses += u64::from(has_lost && serves);
    match end {
        End::Cut => {
            let retained =
                [Retained::Nothing, Retained::Everything, Retained::Some(4)][rng.below(3) as usize];
            scenario.power_loss(retained);
            counts.power_losses += 1;
        }
        End::Finished if stops => {
            scenario.stopped();
            scenario.power_loss(Retained::Nothing);
        }
        End::Finished => {
            scenario.kill();
        }
    }
    scenario.judge();
    counts.copies += scenario.copies();
}

/// Serves clients beside a task that changes the tunables and one that makes a copy.
async fn serve(b: Boot, chosen: Chosen, stops: bool) {
    let rng = &mut Rng::new(chosen.seed);
    let mut options = SetOptions::default();
    options.tunables.overwrite_in_place = Overwrite::Always;
    b.open_group(chosen.present, options).await;
    for i in 0..b.backings.len() {
        b.tune(i, "sequential_cutoff", "0").await;
        b.tune(i, "writeback_percent", "0").await;
        b.tune(i, "writeback_delay", "0").await;
    }
    if let Some((first, after, retained)) = chosen.loss {
        let lost = if first { b.cache.clone() } else { b.second.clone().expect("a second cache device") };
        match retained {
            None if chosen.seed.is_multiple_of(2) => lost.hang_after(after, false),
            None => lost.die_after(after),
            Some(retained) => lost.pull_after(after, retained),
        }
    }
    let mut tasks = Vec::new();
    for i in 0..b.backings.len() {
        if chosen.present == Present::Both && rng.chance(3, 4) {
            tasks.push(b.rt.spawn(copy_later(b.clone(), i, rng.below(20))));
        }
        for _ in 0..1 + rng.below(3) {
            let (client, rng) = (b.clients[i].clone(), Rng::new(rng.next_u64()));
            tasks.push(b.rt.spawn(requests(client, rng)));
        }
    }
    tune(&b, rng).await;
    for task in tasks {
        task.await;
    }
    if rng.chance(1, 2) {
        // A drain ends with an error when the set of the volume fails.
        let _ = b.volume(0).drained().await;
    }
    if stops {
        b.stop().await;
    }
}

/// Makes a copy of the dirty data of a volume after a while.
async fn copy_later(b: Boot, i: usize, wait_ms: u64) {
    b.sleep_ms(wait_ms).await;
    // There may be a copy, or a set may be lost meanwhile.
    let _ = b.make_copy(i).await;
}

/// Random requests of one client.
async fn requests(client: Rc<Client>, mut rng: Rng) {
    let size = client.size();
    for _ in 0..5 + rng.below(30) {
        // Most requests meet in a small part of the volume.
        let within = if rng.chance(3, 4) { 64 } else { size };
        let start = rng.below(within);
        let most = if rng.chance(1, 4) { 64 } else { 12 };
        let sectors = (1 + rng.below(most)).min(size - start);
        let fine = match rng.below(12) {
            0..=5 => client.write(start, sectors, rng.chance(1, 4)).await,
            6 | 7 => client.read(start, sectors).await.is_some(),
            8 | 9 => client.flush().await,
            10 => client.discard(start, sectors).await,
            _ => {
                let flags = ZeroFlags { may_unmap: rng.chance(1, 2), fua: rng.chance(1, 4) };
                client.write_zeroes(start, sectors, flags).await
            }
        };
        if !fine {
            return;
        }
    }
}

/// Changes the mode and lets writeback run or not, at random moments.
async fn tune(b: &Boot, rng: &mut Rng) {
    for _ in 0..rng.below(6) {
        let (name, value) = match rng.below(5) {
            0 => ("cache_mode", "writethrough"),
            1 => ("cache_mode", "writearound"),
            2 => ("writeback_running", "0"),
            3 => ("writeback_running", "1"),
            _ => ("cache_mode", "writeback"),
        };
        // The mode is in the superblock of the device, whose set may fail now.
        let i = rng.below(b.backings.len() as u64) as usize;
        let _ = b.volume(i).set(name, value).await;
        b.sleep_ms(rng.below(30)).await;
    }
}
