//! Liveness: no request waits for a device that it does not need.
//!
//! Owns the time limit of requests while a backing device hangs: requests to other volumes, and those requests to the volume
//! of the hung device that do not need the device. Must not know how a device hangs.
//!
//! A read of that volume needs the device if the device holds a read of the same sectors back, or if it may wait for a change of
//! these sectors. For a write and a flush the rule decides when they are issued ([`OwnVolume`]), because a write under way does not
//! show which path it takes.

use std::cell::Cell;
use std::rc::{Rc, Weak};

use engine::Volume;
use format::{BackingState, CacheMode, Sector, Sectors};
use io::sync::{Either, select};
use io::{JoinHandle, Nanos};

use super::Session;
use crate::client::{RequestKind, UnderWay, without_room};
use crate::disk::{SimDisk, Speed};
use crate::plan::{BootPlan, Faults, Hang, OperatorAction};
use crate::violation::Violation;

/// Time limit of a request that does not need the hung device.
///
/// It is longer than the engine waits for a device that it can do without, and longer than the other waits of a request.
/// Slow requests to devices extend it.
const REQUEST_DEADLINE: Nanos = Nanos::from_secs(900);

/// Limit of the slow device requests for which one request may wait in turn.
const SLOW_ON_THE_WAY: u64 = 100;

/// Interval between checks of the requests in flight.
const CHECK_INTERVAL: Nanos = Nanos::from_secs(60);

/// A backing device that hangs in a boot, and the rules for requests meanwhile.
pub(super) struct HungDevice {
    session: Rc<Session>,
    hang: Hang,
}

impl HungDevice {
    /// The device that hangs in this boot; `None` if no device does.
    pub(super) fn of(session: &Rc<Session>) -> Option<HungDevice> {
        let hang = session.boot.faults.as_ref()?.hang.clone()?;
        let exists = (1..=session.given.backings.len()).contains(&hang.device);
        exists.then(|| HungDevice { session: session.clone(), hang })
    }

    /// The number of the device's volume.
    pub(super) fn volume(&self) -> usize {
        self.hang.device - 1
    }

    /// Whether the plan releases the device.
    pub(super) fn is_released(&self) -> bool {
        self.hang.released
    }

    /// Makes the device hang from the step on that the plan has.
    pub(super) fn begin(&self) {
        self.disk().hang_after(self.hang.after, self.hang.flushes);
        if OwnVolume::is_left_alone(&self.session.boot, self.volume()) {
            let own = OwnVolume {
                session: Rc::downgrade(&self.session),
                number: self.volume(),
                only_dirty: Cell::new(true),
            };
            let rule =
                move |volume: &Volume, r: &UnderWay, beside: bool| own.needs_no_device(volume, r, beside);
            self.session.given.clients[self.volume()].set_rule(Box::new(rule));
        }
    }

    /// Waits for the clients of the volumes whose devices answer, and releases the hung device if the plan says so.
    pub(super) async fn outlive(&self, others: Vec<(usize, JoinHandle<()>)>) -> Result<(), Violation> {
        let work = async {
            for (_, t) in others {
                t.await;
            }
            self.own_requests_ended().await;
        };
        let watch = async {
            loop {
                self.session.rt.sleep(CHECK_INTERVAL).await;
                if let Some(waits) = self.request_that_waits() {
                    return waits;
                }
            }
        };
        match select(std::pin::pin!(work), std::pin::pin!(watch)).await {
            Either::Left(()) => {}
            Either::Right(waits) => return Err(waits),
        }
        if self.hang.released {
            self.session.given.world.log(|| "the device that hung answers".into());
            self.disk().release();
        }
        Ok(())
    }

    /// Waits until all requests under way to the volume of the hung device need the device, and no others come.
    async fn own_requests_ended(&self) {
        let session = &self.session;
        let client = &session.given.clients[self.volume()];
        let mut before = None;
        loop {
            let issued = session.issued.get();
            let waits = client.under_way().iter().any(|r| !self.needs(self.volume(), r));
            if !waits && before.replace(issued) == Some(issued) {
                return;
            }
            session.rt.sleep(CHECK_INTERVAL).await;
        }
    }

    /// Whether a request to a volume may wait for the hung device.
    fn needs(&self, volume: usize, r: &UnderWay) -> bool {
        if volume != self.volume() {
            return false;
        }
        // When the set has failed, the device must get the state stale before its volume is served without the cache.
        if self.session.set().is_some_and(|s| s.failure().is_some()) {
            return true;
        }
        if r.kind != RequestKind::Read {
            return !r.needs_no_device || self.had_no_room_since(r);
        }
        let at = self.session.offsets[volume] + r.start;
        self.disk().holds_read(at..at + r.sectors) || self.awaits_change(r)
    }

    /// Whether a read may wait for a change that the hung device holds up. After a failed flush of the device in this boot, a read
    /// waits for the changes under way in the parts of which the cache has no dirty data: those of clients, with the blocks around
    /// them, and the runs of writeback, which hold the gaps between their extents, too.
    fn awaits_change(&self, read: &UnderWay) -> bool {
        let (session, number) = (&self.session, self.volume());
        if self.disk().counters().failed_flushes == session.failed_flushes[number] {
            return false;
        }
        let client = &session.given.clients[number];
        let Some(volume) = client.volume() else { return true };
        let whole = (Sector(read.start), Sectors(read.sectors));
        let parts = volume.parts_without_dirty_data(whole.0, whole.1).unwrap_or_else(|| vec![whole]);
        parts.into_iter().any(|(start, sectors)| {
            let part = start.0..(start + sectors).0;
            client.under_way().iter().any(|r| r.changes_near(&part)) || volume.is_written_back(start, sectors)
        })
    }

    /// Whether the cache had no room for a part of a request of the volume since this write was issued, which then went to the
    /// device.
    fn had_no_room_since(&self, write: &UnderWay) -> bool {
        let volume = self.session.given.clients[self.volume()].volume();
        volume.is_some_and(|v| without_room(&v) > write.without_room_before)
    }

    fn disk(&self) -> &Rc<SimDisk> {
        &self.session.given.backings[self.volume()]
    }

    fn deadline(&self) -> Nanos {
        let boot = &self.session.boot;
        let slow = |s: &Speed| if s.slow_one_in > 0 { s.slow.0 } else { 0 };
        let slowest = slow(&boot.cache_speed).max(slow(&boot.backing_speed));
        Nanos(REQUEST_DEADLINE.0 + SLOW_ON_THE_WAY * slowest)
    }

    /// A request that waits although every device that it needs answers; `None` if there is none.
    fn request_that_waits(&self) -> Option<Violation> {
        let session = &self.session;
        let (now, deadline) = (session.rt.now(), self.deadline());
        let hung = self.disk();
        for (i, client) in session.given.clients.iter().enumerate() {
            let old = |r: &UnderWay| now.since(r.since) > deadline && !self.needs(i, r);
            if let Some(r) = client.under_way().into_iter().find(old) {
                let s = now.since(r.since).as_ms() / 1000;
                let status = session.set().map(|s| format!("{:?}", s.status())).unwrap_or_default();
                return Some(Violation::WaitsInVain {
                    volume: i,
                    request: format!("{r:?}"),
                    seconds: s,
                    device: self.hang.device,
                    state: format!("{}; {status}", hung.dump()),
                });
            }
        }
        None
    }
}

/// The volume of the hung device, if its cache mode is writeback: the rule which of its writes and flushes do not need the
/// device.
///
/// A write does not if the device has the state dirty already, and the write certainly becomes dirty data: whole blocks, no
/// change under way beside it, no reason to bypass the cache, no look-up before the path, and room below every limit. A flush
/// does not if all changes since the start became dirty data.
struct OwnVolume {
    session: Weak<Session>,
    number: usize,
    /// Whether all changes so far became dirty data.
    only_dirty: Cell<bool>,
}

impl OwnVolume {
    /// Whether the boot has nothing but the hung device that changes the path of writes to the volume.
    fn is_left_alone(boot: &BootPlan, number: usize) -> bool {
        let only_hangs = |f: &Faults| Faults { hang: None, ..f.clone() } == Faults::default();
        let s = &boot.settings;
        let caches_all = s.sequential_cutoff == 0 && !s.congestion;
        let there = !boot.alone && !boot.absent.contains(&number);
        let disturbs = |action: &OperatorAction| match action {
            OperatorAction::Tune { volume, name, .. } => {
                *volume == number && ["cache_mode", "sequential_cutoff"].contains(&name.as_str())
            }
            OperatorAction::TuneSet { name, .. } => name.starts_with("cutoff"),
            OperatorAction::Detach { volume, .. }
            | OperatorAction::Release { volume, .. }
            | OperatorAction::GiveUpDetach { volume, .. }
            | OperatorAction::Drain { volume, .. }
            | OperatorAction::Attach { volume } => *volume == number,
            OperatorAction::NextFlushLoses { .. } => true,
            _ => false,
        };
        let disturbed = boot.actions.iter().any(|(_, a)| disturbs(a));
        boot.faults.as_ref().is_some_and(only_hangs) && caches_all && there && !disturbed
    }

    fn needs_no_device(&self, volume: &Volume, r: &UnderWay, beside: bool) -> bool {
        let needs_none = match r.kind {
            RequestKind::Read => false,
            RequestKind::Flush => self.only_dirty.get(),
            RequestKind::Write if !beside && self.becomes_dirty(volume, r) => {
                volume.state() == Some(BackingState::Dirty)
            }
            RequestKind::Write | RequestKind::Other => {
                self.only_dirty.set(false);
                false
            }
        };
        if let Some(session) = self.session.upgrade().filter(|_| needs_none) {
            session.count(|c| match r.kind {
                RequestKind::Flush => c.free_flushes += 1,
                _ => c.free_writes += 1,
            });
        }
        needs_none
    }

    /// Whether a write that is issued now certainly becomes dirty data.
    fn becomes_dirty(&self, volume: &Volume, r: &UnderWay) -> bool {
        let Some(session) = self.session.upgrade() else { return false };
        let Some(set) = session.set() else { return false };
        let Some(block) = session.blocks[self.number] else { return false };
        let start = session.offsets[self.number] + r.start;
        let whole = start.is_multiple_of(block) && r.sectors.is_multiple_of(block);
        let room = set.status().in_use_percent <= session.boot.settings.cutoffs.0;
        whole && room && volume.inode().is_some() && volume.tunables().cache_mode == CacheMode::Writeback
    }
}
