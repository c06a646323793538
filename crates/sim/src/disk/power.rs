//! Power losses of a disk, and the crash of the process that uses it.
//!
//! Owns the outcome of requests in flight, and the possible contents of the medium. Must not know when the power fails.

use std::rc::Rc;

use format::{Sector, Sectors};
use io::{Op, Rng};

use super::{Moment, Retained, SimDisk, State};
use crate::image::Image;

/// A write of a dead process that has not taken effect.
pub(super) struct Late {
    sector: Sector,
    data: Rc<[u8]>,
    durable: bool,
}

impl SimDisk {
    /// Lets parts of requests in flight take effect by chance, as a power loss can.
    fn touch_running(s: &mut State, rng: &mut Rng, of_eight: u64) {
        let running: Vec<u64> = s.running.keys().copied().collect();
        for op in running {
            if rng.chance(of_eight, 8)
                && let Some(r) = s.running.get_mut(&op)
                && let Some((from, data)) = r.left.take()
            {
                let at = r.request.sector + Sectors(from);
                s.medium.apply(op, at, data);
            }
        }
    }

    /// The contents after a power loss now. The disk does not change.
    pub fn after_power_loss(&self, retained: Retained, rng: &mut Rng) -> Image {
        let s = self.state.borrow();
        let mut medium = s.medium.clone();
        let of_eight = if retained == Retained::Everything { 8 } else { 4 };
        for (op, r) in &s.running {
            if let Some((from, data)) = &r.left
                && rng.chance(of_eight, 8)
            {
                medium.apply(*op, r.request.sector + Sectors(*from), data.clone());
            }
        }
        medium.after_power_loss(retained, rng)
    }

    /// The present state of the device, from which the outcomes of a power loss follow.
    pub fn moment(&self) -> Moment {
        let s = self.state.borrow();
        let unflushed = s.medium.unflushed.iter().map(|u| (u.sector, u.data.clone()));
        let under_way = s.running.values().filter_map(|r| {
            let (from, data) = r.left.as_ref()?;
            Some((r.request.sector + Sectors(*from), data.clone()))
        });
        Moment {
            durable: s.medium.durable.clone(),
            writes: unflushed.chain(under_way).collect(),
            block_sectors: s.medium.block_sectors,
        }
    }

    /// Cuts the power of the device, as the fault model in [`super`] describes.
    pub fn power_loss(&self, retained: Retained) {
        let s = &mut *self.state.borrow_mut();
        let image = self.world.random(|rng| {
            let chance = if retained == Retained::Everything { 8 } else { 4 };
            SimDisk::touch_running(s, rng, chance);
            s.medium.after_power_loss(retained, rng)
        });
        s.medium.restart(image);
        s.late.clear();
        self.forget_requests(s);
    }

    /// Cuts the power of the device alone while the process lives: requests in flight and later requests fail.
    pub(super) fn lose_power(&self, s: &mut State) {
        let Some((_, retained)) = s.pull.take() else { return };
        let image = self.world.random(|rng| {
            let chance = if retained == Retained::Everything { 8 } else { 4 };
            SimDisk::touch_running(s, rng, chance);
            s.medium.after_power_loss(retained, rng)
        });
        s.medium.restart(image);
        for r in s.running.values_mut() {
            (r.fails, r.left) = (true, None);
        }
        s.outage = 0..u64::MAX;
        s.incarnation += 1;
        self.world.log(|| format!("{} is pulled out, {retained:?} stays", self.info.name));
    }

    /// Gives the device another incarnation, because the system can see that it was away.
    pub fn returns_as_another(&self) {
        self.state.borrow_mut().incarnation += 1;
    }

    /// Ends the process. Its requests in flight take effect later, at [`SimDisk::land_late`].
    pub fn kill_late(&self) {
        let s = &mut *self.state.borrow_mut();
        let late = s.running.values_mut().filter_map(|r| {
            let (from, data) = r.left.take()?;
            let sector = r.request.sector + Sectors(from);
            Some(Late { sector, data, durable: r.request.op == (Op::Write { fua: true }) })
        });
        let late: Vec<Late> = late.collect();
        s.late = late;
        self.end_process(s);
    }

    /// Makes the requests in flight of a dead process take effect.
    pub fn land_late(&self) {
        let s = &mut *self.state.borrow_mut();
        for late in std::mem::take(&mut s.late) {
            self.world.log(|| format!("{}: a late write {}", self.info.name, late.sector));
            let op = s.next_op;
            s.next_op += 1;
            s.step += 1;
            s.medium.apply(op, late.sector, late.data);
            s.medium.ended(op, s.step);
            if late.durable {
                s.medium.make_durable(|u| u.op == op);
            }
        }
    }

    /// Ends the process, as the fault model in [`super`] describes.
    pub fn kill(&self) {
        let s = &mut *self.state.borrow_mut();
        self.world.random(|rng| SimDisk::touch_running(s, rng, 4));
        s.late.clear();
        self.end_process(s);
    }

    fn end_process(&self, s: &mut State) {
        s.step += 1;
        let step = s.step;
        for u in &mut s.medium.unflushed {
            u.ended.get_or_insert(step);
        }
        self.forget_requests(s);
    }

    fn forget_requests(&self, s: &mut State) {
        s.running.clear();
        s.holds.clear();
        s.medium.damaged.clear();
        s.faults.clear();
        s.errors_one_in = 0;
        s.outage = 0..0;
        (s.hang, s.lossy_flush, s.pull) = (None, None, None);
    }
}
