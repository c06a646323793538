//! The cache as a volume uses it: the components of a running set, and the state that all volumes of the set share.
//!
//! Owns the set's tunables, the statistics of all volumes together, the congestion of the cache device, and the load of
//! each volume. Must not know any volume: a volume reads the [`VolumeLoad`] of the others instead.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use format::{Geometry, Sectors};
use io::Handle;

use crate::alloc::{Aged, Allocator};
use crate::data::CachedData;
use crate::device::{BackingDevice, BackingDevices, CacheDevice};
use crate::gc::Gc;
use crate::index::Index;
use crate::journal::Journal;
use crate::policy::congestion::Congestion;
use crate::policy::cost::{CostModel, Costs};
use crate::policy::replacement::Saving;
use crate::policy::writeback_rate::{IdleCounter, WritebackRate};
use crate::policy::yielding::{BusyShare, Throttle};
use crate::stats::CacheStats;
use crate::tasks::Tasks;
use crate::tunables::SetTunables;
use crate::uuids::UuidTable;

/// The components of a running set, and the state that its volumes share.
pub(crate) struct Cache {
    pub(crate) rt: Handle,
    pub(crate) geometry: Geometry,
    pub(crate) device: Rc<CacheDevice>,
    pub(crate) backings: Rc<BackingDevices>,
    pub(crate) journal: Rc<Journal>,
    pub(crate) alloc: Rc<Allocator>,
    pub(crate) data: Rc<CachedData>,
    pub(crate) index: Rc<Index>,
    pub(crate) uuids: Rc<UuidTable>,
    pub(crate) gc: Rc<Gc>,
    pub(crate) tasks: Rc<Tasks>,
    pub(crate) tunables: RefCell<SetTunables>,
    pub(crate) stats: RefCell<CacheStats>,
    pub(crate) shared: Shared,
}

/// The state that all volumes of a set share, other than the components.
pub(crate) struct Shared {
    congestion: RefCell<Congestion>,
    /// Delays writes while the cache is nearly full.
    pub(crate) throttle: Cell<Throttle>,
    idle: RefCell<IdleCounter>,
    /// Writes that overwrote dirty data in place.
    overwrites: Cell<u64>,
    loads: RefCell<Vec<Rc<VolumeLoad>>>,
}

impl Shared {
    pub(crate) fn new(congestion: Congestion) -> Shared {
        Shared {
            congestion: RefCell::new(congestion),
            throttle: Cell::default(),
            idle: RefCell::default(),
            overwrites: Cell::new(0),
            loads: RefCell::default(),
        }
    }
}

impl Cache {
    /// Adds the load of a volume that became part of the set.
    pub(crate) fn add_load(&self, load: Rc<VolumeLoad>) {
        self.shared.loads.borrow_mut().push(load);
    }

    /// Removes the load of a volume that left the set.
    pub(crate) fn remove_load(&self, load: &Rc<VolumeLoad>) {
        self.shared.loads.borrow_mut().retain(|l| !Rc::ptr_eq(l, load));
    }

    /// The congestion state of the cache device.
    pub(crate) fn congestion(&self) -> std::cell::RefMut<'_, Congestion> {
        self.shared.congestion.borrow_mut()
    }

    /// The counter by which the rate controllers detect that the set is idle.
    pub(crate) fn idle(&self) -> std::cell::RefMut<'_, IdleCounter> {
        self.shared.idle.borrow_mut()
    }

    /// Records a request of a client. It ends the idle state, in which writeback runs at its maximum rate.
    pub(crate) fn foreground_request(&self) {
        if self.shared.idle.borrow_mut().foreground_request() {
            for load in self.shared.loads.borrow().iter() {
                load.with_rate(WritebackRate::leave_idle);
            }
        }
    }

    /// The recent share of the time in which the busiest volume had a request under way.
    pub(crate) fn busiest_share(&self) -> f64 {
        let now = self.rt.turn_time();
        self.shared.loads.borrow().iter().map(|load| load.busy.get().share(now)).fold(0.0, f64::max)
    }

    /// Counts foreground sectors that were not bypassed; they age the priorities (semantics section 7.5).
    pub(crate) fn count_for_aging(&self, sectors: Sectors) {
        if self.alloc.count_for_aging(sectors) == Aged::Observed {
            self.shared.loads.borrow().iter().for_each(|load| load.measure_saving(&self.device));
        }
    }

    /// Counts a write that overwrote dirty data in place.
    pub(crate) fn count_overwrite(&self) {
        self.shared.overwrites.set(self.shared.overwrites.get() + 1);
    }

    /// The number of writes that overwrote dirty data in place.
    pub(crate) fn overwrites(&self) -> u64 {
        self.shared.overwrites.get()
    }
}

/// The facts about one volume that the other volumes of the set use.
pub(crate) struct VolumeLoad {
    backing: Option<Rc<BackingDevice>>,
    /// Measures the share of the time in which a request of a client is under way.
    busy: Cell<BusyShare>,
    /// The rate controller of the volume's writeback.
    rate: RefCell<WritebackRate>,
    /// The time that a hit saves.
    saving: Cell<Saving>,
}

impl VolumeLoad {
    pub(crate) fn new(backing: Option<Rc<BackingDevice>>, rate: WritebackRate) -> Rc<VolumeLoad> {
        Rc::new(VolumeLoad {
            backing,
            busy: Cell::default(),
            rate: RefCell::new(rate),
            saving: Cell::default(),
        })
    }

    /// Uses the rate controller of the volume's writeback.
    pub(crate) fn with_rate<R>(&self, use_it: impl FnOnce(&mut WritebackRate) -> R) -> R {
        use_it(&mut self.rate.borrow_mut())
    }

    /// Records that from now on a request is under way (`waiting`), or that none is.
    pub(crate) fn set_busy(&self, waiting: bool, now: io::Nanos) {
        let mut busy = self.busy.get();
        busy.waits(waiting, now);
        self.busy.set(busy);
    }

    /// The time that a hit saves.
    pub(crate) fn saving(&self) -> Saving {
        self.saving.get()
    }

    /// Measures the time that a hit saves: the cost of a request to the backing device minus its cost on the cache
    /// device.
    pub(crate) fn measure_saving(&self, device: &CacheDevice) {
        let Some(b) = &self.backing else { return };
        let known = |m: &CostModel| m.is_known().then(|| m.costs());
        if let (Some(cache), Some(backing)) = (device.model(known), b.model(known)) {
            let more = |cost: &dyn Fn(&Costs) -> io::Nanos| cost(&backing).0.saturating_sub(cost(&cache).0);
            let mib = more(&|c| c.transfer(Sectors(2048)));
            self.saving.set(Saving::new(more(&Costs::per_request), mib));
        }
    }
}

#[cfg(test)]
mod tests {
    use format::Sector;

    use super::*;
    use crate::set::SetOptions;
    use crate::testing::{TestDisk, Watching, backing_device, components, open_set, run};

    /// The time that a hit saves is measured when priorities age, if the policy observes hits.
    #[test]
    fn savings_are_measured_when_priorities_age() {
        run(|rt| async move {
            for (replacement, observes) in [("kernel", false), ("cost_benefit", true)] {
                let set = open_set(&Watching::new(16_384), &rt, (16, false), SetOptions::default()).await;
                let backing = backing_device(&TestDisk::new(4096), &rt);
                let volume = set.attached(backing.clone()).await.unwrap();
                let cache = set.cache().clone();
                cache.tunables.borrow_mut().set("replacement", replacement).unwrap();
                set.tunables_changed();
                // The costs of a device are known after 64 answers.
                let devices =
                    [(cache.device.disk(), cache.device.meter()), (backing.disk(), backing.meter())];
                for (disk, meter) in devices {
                    for _ in 0..64 {
                        let buffer = rt.pool().take(512);
                        meter.read(disk, Sector(0), Sectors(1), buffer, 0).await.result.unwrap();
                    }
                }
                let is_measured = || volume.load().saving() != Saving::default();
                cache.count_for_aging(Sectors::ZERO);
                assert!(!is_measured(), "priorities do not age");
                cache.count_for_aging(Sectors(1));
                assert_eq!(is_measured(), observes, "{replacement}");
                set.stop().await.unwrap();
            }
        });
    }

    /// A volume is busy from the first of its requests under way to the end of the last.
    #[test]
    fn a_volume_is_busy_while_a_request_is_under_way() {
        run(|rt| async move {
            let set = open_set(&Watching::new(16_384), &rt, (16, false), SetOptions::default()).await;
            let disk = TestDisk::new(4096);
            let volume = set.attached(backing_device(&disk, &rt)).await.unwrap();
            let cache = components(set, &rt);
            let minute = io::Nanos::from_secs(60);
            rt.sleep(minute).await;
            assert_eq!(cache.busiest_share(), 0.0);
            let read = |at| {
                let (volume, buffer) = (volume.clone(), rt.pool().take(512));
                rt.spawn(async move { volume.read(Sector(at), Sectors(1), buffer, 0).await.1 })
            };
            for requests in [1, 2, 3] {
                disk.hold(true);
                let reads: Vec<_> = (0..requests).map(|n| read(requests * 100 + n * 8)).collect();
                disk.held(requests as usize, &rt).await;
                rt.sleep(minute).await;
                assert!(cache.busiest_share() > 0.9, "{requests} requests are under way");
                disk.hold(false);
                for read in reads {
                    read.await.unwrap();
                }
                rt.sleep(minute).await;
                assert!(cache.busiest_share() < 0.1, "no request is under way");
            }
        });
    }

    /// The cache is used as long as the costs of either device are unknown.
    #[test]
    fn unknown_costs_favour_the_cache() {
        run(|rt| async move {
            let set = open_set(&Watching::new(16_384), &rt, (16, false), SetOptions::default()).await;
            let backing = backing_device(&TestDisk::new(4096), &rt);
            let volume = set.attached(backing.clone()).await.unwrap();
            let cache = components(set, &rt);
            let favours = || {
                let found = volume.compare(&cache, Sectors(8));
                (found.streams_faster, found.answers_first)
            };
            assert_eq!(favours(), (true, true));
            for _ in 0..64 {
                let buffer = rt.pool().take(512);
                backing.meter().read(backing.disk(), Sector(0), Sectors(1), buffer, 0).await.result.unwrap();
            }
            assert!(backing.model(CostModel::is_known));
            assert_eq!(favours(), (true, true), "the costs of the cache device are unknown");
        });
    }
    /// The cost model of a cache device learnt the time of the disk: requests to both devices were polled one after the other.
    /// Then the cache seemed to be as slow as the disk.
    #[test]
    fn a_request_to_the_cache_device_ends_before_the_one_to_a_slow_disk() {
        run(|rt| async move {
            let ssd = Watching::new(16_384);
            let set = open_set(&ssd, &rt, (16, false), SetOptions::default()).await;
            let disk = TestDisk::new(4096);
            let volume = set.attached(backing_device(&disk, &rt)).await.unwrap();
            let cache = components(set, &rt);
            volume.settings_mut().cache_mode = format::CacheMode::Writethrough;
            let buffer = |bytes| rt.pool().zeroed(bytes);
            volume.read(Sector(0), Sectors(8), buffer(4096), 0).await.1.unwrap();
            while cache.tasks.under_way() > 0 {
                rt.yield_now().await;
            }
            let requests = || cache.device.model(CostModel::in_flight);
            for writes in [false, true] {
                let before = ssd.requests.borrow().len();
                disk.hold(true);
                let (volume, data) = (volume.clone(), buffer(8192));
                let request = rt.spawn(async move {
                    match writes {
                        true => {
                            volume.write(Sector(0), Sectors(16), data, 0, io::WriteFlags::default()).await
                        }
                        false => volume.read(Sector(0), Sectors(16), data, 0).await.1,
                    }
                });
                disk.held(1, &rt).await;
                for _ in 0..3 {
                    rt.yield_now().await;
                }
                assert!(ssd.requests.borrow().len() > before, "writes: {writes}");
                assert_eq!(requests(), 0, "writes: {writes}");
                disk.hold(false);
                request.await.unwrap();
            }
        });
    }
}
