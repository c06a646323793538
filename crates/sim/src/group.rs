//! Scenarios whose volume has its dirty data in two sets (decision 037).
//!
//! Owns the boots with two sets, and the check after them: every set that the devices name as one with all dirty data is right, alone with
//! the backing device. Must not use the rules of the engine for that.

use std::rc::Rc;

use engine::tunables::Overwrite;
use engine::{CacheSet, EngineError, SetOptions, Volume};
use format::{BackingState, BackingSuper, CopyNr, RawSuperblock, RegistrationNr, Sector, Sectors, SlotRole};

use crate::disk::{Retained, SimDisk};
use crate::hardware::{SECOND_SET_UUID, SET_UUID};
use crate::image::Image;
use crate::scenario::{Boot, Scenario, judge_images};

/// Which of the two cache devices of a scenario are there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Present {
    /// Both.
    Both,
    /// Only that of the first set.
    First,
    /// Only that of the second set.
    Second,
}

/// The superblock of a backing device.
///
/// # Panics
/// If it is damaged.
pub fn superblock_of(backing: &Image) -> BackingSuper {
    let head = backing.read_vec(Sector(8), Sectors(8));
    let checked = RawSuperblock::from_prefix(&head).and_then(|raw| raw.check_backing(backing.size(), 512));
    checked.unwrap_or_else(|e| panic!("the superblock of a backing device: {e}"))
}

impl Boot {
    /// Opens the sets that are there and registers all devices, each with the set that its superblock names if that one is there. Of
    /// two new devices, the second one goes to the second set.
    ///
    /// # Panics
    /// If the engine refuses.
    pub async fn open_group(&self, present: Present, options: SetOptions) {
        let second = self.parts.second.clone().expect("the scenario has a second cache device");
        let open = async |wanted: bool, disk, options| match wanted {
            true => Some(CacheSet::open(disk, options).await.expect("a set opens")),
            false => None,
        };
        let one = open(present != Present::Second, self.parts.cache.clone(), options.clone()).await;
        let two = open(present != Present::First, second, options).await;
        self.set_sets(one.clone(), two.clone());
        for (i, disk) in self.parts.backings.iter().enumerate() {
            let (own, other) =
                if names_second(i, &self.backings[i].image()) { (&two, &one) } else { (&one, &two) };
            let registered = match (own, other) {
                (Some(own), Some(other)) => own.register_with(other, disk.clone()).await,
                (Some(own), None) => own.register(disk.clone()).await,
                (None, Some(other)) if superblock_of(&self.backings[i].image()).set_uuid().is_nil() => {
                    other.register(disk.clone()).await
                }
                (None, Some(other)) => other.take_over(disk.clone()).await,
                (None, None) => return,
            };
            self.clients[i].set_volume(Some(registered.expect("the device is registered")));
        }
    }

    /// Opens both sets; dirty data stays in them until the script says otherwise.
    ///
    /// # Panics
    /// If the engine refuses.
    pub async fn open_both(&self) {
        let mut options = SetOptions::default();
        options.tunables.overwrite_in_place = Overwrite::Always;
        self.open_group(Present::Both, options).await;
        for i in 0..self.backings.len() {
            self.stay_dirty(i).await;
        }
    }

    /// Makes one of the cache devices fail for ever after some more requests; every second time it loses its power, too.
    ///
    /// # Panics
    /// If the scenario has no second one.
    pub fn lose(&self, first: bool, after: u64) {
        let second = self.second.as_ref().expect("a second cache device");
        let lost = if first { &self.cache } else { second };
        if after.is_multiple_of(2) {
            lost.die_after(after)
        } else {
            lost.pull_after(after, Retained::Some(2))
        }
    }

    /// The sets of the volume: that with its dirty data, and the other one.
    ///
    /// # Panics
    /// If not both are open.
    pub fn sets_of(&self, volume: &Rc<Volume>) -> (CacheSet, CacheSet) {
        let (one, two) = self.both_sets();
        let has = |set: &CacheSet| set.volumes().iter().any(|v| Rc::ptr_eq(v, volume));
        if has(&one) { (one, two) } else { (two, one) }
    }

    /// Makes a copy of the dirty data of a volume in the other set.
    ///
    /// # Errors
    /// If the engine cannot.
    pub async fn make_copy(&self, i: usize) -> Result<(), EngineError> {
        let volume = self.volume(i);
        let (own, other) = self.sets_of(&volume);
        own.mirror(&volume, &other).await
    }
}

/// What the slot of the device in a set says: its role, and the numbers of its registrations.
fn slot(cache: &Image, backing: &BackingSuper) -> Option<(Option<SlotRole>, [Option<RegistrationNr>; 2])> {
    let view =
        inspect::SetView::open(cache, inspect::Mode::BestEffort).ok().filter(|v| v.is_initialised())?;
    let slot = view.slots.values().find(|s| s.is_backing() && s.uuid == backing.uuid())?;
    Some((slot.role, slot.registrations))
}

/// Whether a set has a copy of all dirty data of a device, by what is on the devices.
fn has_copy(cache: &Image, backing: &BackingSuper) -> bool {
    let number: Option<CopyNr> = backing.copy();
    let is_newest = |role| matches!(role, Some(SlotRole::Secondary { copy, .. }) if Some(copy) == number);
    slot(cache, backing)
        .is_some_and(|(role, numbers)| is_newest(role) && numbers.contains(&backing.registration()))
}

/// Whether the second set is that of a device.
fn names_second(i: usize, backing: &Image) -> bool {
    let set = superblock_of(backing).set_uuid();
    set == SECOND_SET_UUID || set.is_nil() && i == 1
}

/// A backing device as it is after the loss of its set.
fn renamed(backing: &Image, mut superblock: BackingSuper, names_second: bool) -> Image {
    let mut image = backing.clone();
    superblock.set_set_uuid(if names_second { SET_UUID } else { SECOND_SET_UUID });
    superblock.set_copy(None);
    image.write(Sector(8), &superblock.encode());
    image
}

impl Scenario {
    /// Whether the superblock of a device names the second set, and whether the other set has a copy.
    pub(crate) fn copy_of(&self, i: usize) -> (bool, bool) {
        let image = self.hardware.backings[i].image();
        let (backing, names_second) = (superblock_of(&image), names_second(i, &image));
        (names_second, has_copy(&self.cache_device(names_second).image(), &backing))
    }

    /// The number of devices whose dirty data is in both sets.
    pub(crate) fn copies(&self) -> u64 {
        (0..self.hardware.backings.len()).filter(|i| self.copy_of(*i).1).count() as u64
    }

    /// Whether no dirty data is lost with the first or the second set.
    pub(crate) fn can_spare(&self, first: bool) -> bool {
        (0..self.hardware.backings.len()).all(|i| {
            let (names_second, has_copy) = self.copy_of(i);
            names_second == first || has_copy
        })
    }

    /// The first or the second cache device.
    pub(crate) fn cache_device(&self, first: bool) -> &Rc<SimDisk> {
        let second = self.hardware.second.as_ref().expect("a second cache device");
        if first { &self.hardware.cache } else { second }
    }

    /// Judges each set, alone with the devices whose dirty data it has.
    ///
    /// # Panics
    /// If a check fails.
    #[track_caller]
    pub(crate) fn judge_group(&mut self) {
        for first in [true, false] {
            let (mut backings, mut oracles, mut is_own) = (Vec::new(), Vec::new(), true);
            for (i, disk) in self.hardware.backings.iter().enumerate() {
                let (names_second, has_copy) = self.copy_of(i);
                let (image, own) = (disk.image(), names_second != first);
                let superblock = superblock_of(&image);
                if own {
                    backings.push(image);
                } else if has_copy && superblock.state() != BackingState::None {
                    backings.push(renamed(&image, superblock, names_second));
                    is_own = false;
                } else {
                    continue;
                }
                oracles.push(self.oracles[i].clone());
            }
            let which = if first { "first" } else { "second" };
            let what = if is_own { "the set of its devices" } else { "a set with a copy" };
            judge_images(&self.cache_device(first).image(), &backings, &oracles)
                .unwrap_or_else(|e| panic!("the {which} set, {what}, alone: {e}"));
        }
    }

    /// Boots with both sets, reads and flushes; then one of them is lost, and a last boot with the other one reads, drains and stops. The
    /// first set is lost if `first`, unless only it has some dirty data.
    ///
    /// # Panics
    /// If a check fails.
    #[track_caller]
    pub fn end_with_loss(&mut self, first: bool) {
        let devices = self.hardware.backings.len();
        self.boot(|b| async move {
            b.open_group(Present::Both, SetOptions::default()).await;
            for i in 0..devices {
                b.tune(i, "writeback_running", "0").await;
                b.read_all(i).await;
                assert!(b.clients[i].flush().await);
            }
        });
        self.power_loss(Retained::Nothing).judge();
        let present = match (self.can_spare(first), self.can_spare(!first)) {
            (true, _) if first => Present::Second,
            (true, _) => Present::First,
            (false, true) if first => Present::First,
            (false, true) => Present::Second,
            (false, false) => Present::Both,
        };
        self.boot_and_stop(|b| async move {
            b.open_group(present, SetOptions::default()).await;
            for i in 0..devices {
                b.read_all(i).await;
                b.volume(i).drained().await.expect("everything is written back");
            }
            b.stop().await;
        });
        self.judge_backings();
    }
}
