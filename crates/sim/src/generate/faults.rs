//! The failures of boots, and the ways in which boots end.
//!
//! Owns the drawing of both. Must not know how a fault is injected.

use io::Rng;

use super::mix::Mix;
use super::{Life, one_of};
use crate::disk::Landmark;
use crate::hardware::Layout;
use crate::landmark::Aim;
use crate::plan::{BootPlan, Cut, Faults, Hang, Loss, Outage};

/// Limit of slow requests in a boot with a hung device. A request that takes longer waits for that device.
const MAX_SLOW_BESIDE_A_HANG_NS: u64 = 300_000_000;

impl Mix {
    /// Draws the faults of one boot, each on its own.
    pub(super) fn faults(&self, rng: &mut Rng, layout: &Layout, volumes: usize) -> Faults {
        let percent = &self.faults;
        let backings = layout.backings.len() as u64;
        let often = if self.life == Life::Brief { 100 } else { 600 };
        let any = |rng: &mut Rng| if rng.chance(2, 3) { 0 } else { 1 + rng.below(backings) as usize };
        let mut of = |percent: u64| rng.below(100) < percent;
        let (cache, backing) = (of(percent.cache_errors), of(percent.backing_errors));
        let (outage, unreadable) = (of(percent.outage), of(percent.unreadable));
        let (lossy, pull) = (of(percent.lossy_flush), of(percent.pull));
        let hang = volumes > 1 && of(percent.hang);
        let mut f = Faults::default();
        if cache {
            f.cache_one_in = percent.one_in;
        }
        if backing {
            f.backing_one_in = percent.one_in;
        }
        if outage {
            let requests = rng.chance(1, 2).then(|| one_of(rng, &[1, 5, 30]));
            f.outage = Some(Outage { device: any(rng), after: rng.below(often), requests });
        }
        if unreadable {
            let sectors = one_of(rng, &[1, 8, 64]);
            let cache = rng.below(layout.nbuckets * layout.bucket_sectors);
            let backing = layout.backings.first().map_or(0, |b| b.data_offset + rng.below(b.data_sectors));
            let which = one_of(rng, &[(true, false), (true, false), (false, true), (true, true)]);
            f.unreadable = which.0.then_some((cache, sectors));
            f.unreadable_backing = which.1.then_some((backing, sectors));
        }
        if lossy {
            let after = one_of(rng, &[0, 1, 3, 10, 40]);
            f.lossy_flush = Some(Loss { device: any(rng), after, retained: self.crashes.retained.0 });
        }
        if pull {
            f.pull =
                Some(Loss { device: any(rng), after: rng.below(often), retained: self.crashes.retained.0 });
        }
        if hang {
            f.hang = Some(Hang {
                device: 1 + rng.below(backings) as usize,
                after: rng.below(100),
                flushes: rng.chance(1, 2),
                released: rng.chance(1, 2),
            });
        }
        f
    }

    /// Draws the end of a boot that does not end in order.
    pub(super) fn cut(&self, rng: &mut Rng) -> Cut {
        let (cache, backing) = self.crashes.retained;
        if rng.below(100) < self.crashes.kill_percent {
            return Cut::Kill;
        }
        if rng.below(100) < self.crashes.partial_percent {
            return if rng.chance(1, 2) { Cut::Cache(cache) } else { Cut::Backing(backing) };
        }
        Cut::Power(cache, backing)
    }

    /// Draws when a boot crashes, and what survives.
    ///
    /// `effects`: the approximate latest time of the crash. `ends`: numbers of the answers at which a series of requests
    /// ends.
    pub(super) fn crash(
        &self,
        rng: &mut Rng,
        boot: &mut BootPlan,
        (effects, first): (u64, bool),
        ends: &[u64],
    ) {
        boot.cut = self.cut(rng);
        boot.off_seconds = if rng.chance(1, 10) { rng.below(100_000) } else { 0 };
        boot.cut_with_faults = boot.faults.is_some() && rng.chance(1, 2);
        if rng.below(100) < self.crashes.late_percent {
            // The claim of a device waits for these writes, so they never land among the requests of the next process.
            boot.late = Some(0);
        }
        if boot.faults.as_ref().is_some_and(|f| f.hang.is_some()) {
            for s in [&mut boot.cache_speed, &mut boot.backing_speed] {
                s.slow.0 = s.slow.0.min(MAX_SLOW_BESIDE_A_HANG_NS);
            }
        }
        if rng.below(100) >= self.crashes.percent {
            return;
        }
        if rng.below(100) < self.crashes.older_percent {
            boot.older = Some(rng.below(effects.min(400)));
        }
        // One crash in six comes early, most often while the set is being opened.
        let most = if rng.chance(1, 6) { 40 } else { effects };
        boot.crash = Some(1 + rng.below(most));
        if self.life == Life::Brief && rng.chance(1, 4) {
            let most = one_of(rng, &[4, 12, 40]);
            boot.crash_in_durable_write = Some(1 + rng.below(most));
        }
        let fills = first && matches!(self.life, Life::Pressure | Life::Forest | Life::Churn);
        if fills {
            // In the first boot the devices have to fill up first, so the crash is not aimed at a landmark.
            return;
        }
        if first && rng.chance(1, 10) {
            // The crash comes while the set is initialised.
            let at = one_of(rng, &[Landmark::Superblock, Landmark::Superblock, Landmark::Entry]);
            boot.aim = Some(Aim { at, nth: 1, effects: one_of(rng, &[0, 0, 1, 2]) });
        } else if rng.below(100) < self.crashes.aim_percent {
            boot.aim = Some(self.aim(rng, boot.requests.len() as u64, ends));
            // This crash comes late, so that the aimed crash comes first.
            boot.crash = Some(effects + rng.below(effects));
            boot.crash_in_durable_write = None;
        }
    }

    fn aim(&self, rng: &mut Rng, requests: u64, ends: &[u64]) -> Aim {
        let at = one_of(rng, &self.crashes.aims);
        if let (Landmark::Answer, Some(end)) = (at, ends.last())
            && rng.below(100) < self.crashes.exact_percent
        {
            return Aim { at, nth: (*end).max(1), effects: one_of(rng, &[0, 0, 0, 1]) };
        }
        let nth = match at {
            Landmark::Answer if !ends.is_empty() && rng.chance(3, 4) => {
                // The crash is at the last request of a series, or shortly before it.
                one_of(rng, ends).saturating_sub(one_of(rng, &[0, 0, 0, 1, 2])).max(1)
            }
            Landmark::Answer | Landmark::DurableAnswer => 1 + rng.below(requests + 1),
            _ => {
                let most = one_of(rng, &[1, 2, 5, 20]);
                1 + rng.below(most)
            }
        };
        Aim { at, nth, effects: one_of(rng, &[0, 0, 0, 1, 2, 6]) }
    }
}
