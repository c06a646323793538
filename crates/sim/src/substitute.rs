//! A substituted cache device: the engine gets another device or an older copy, and must refuse it or lose nothing.
//!
//! Owns the substitute, the expected reaction of the engine, and the boots with the substitute. These run on machines of
//! their own, without faults. An older copy is started several times, at first without the backing devices, because a start
//! must not make it look newer. On the last machine every device is registered and every volume is read. Afterwards the
//! right device is back. Must not know the plan of the boot that follows.

use std::cell::RefCell;
use std::rc::Rc;

use engine::{CacheSet, DeviceRefusal, EngineError, Refusal, SetOptions};
use format::{
    BackingState, BackingSuper, Bkey, BucketNr, Gen, Inode, Ptr, RawSuperblock, Sector, Sectors, UuidEntry,
};
use io::{Disk, Nanos};

use crate::client::Client;
use crate::edit::{Heads, MOST};
use crate::hardware::Hardware;
use crate::image::Image;
use crate::oracle::Oracle;
use crate::plan::Substitute;
use crate::violation::Violation;
use crate::world::{Order, Outcome};

/// Number of starts of an older copy without the backing devices.
const STARTS_ALONE: usize = 2;
/// Number of sectors that are read at once.
const READ_SECTORS: u64 = 128;

/// The expected reaction of the engine to the substitute.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Expected {
    /// The engine refuses the set and changes nothing.
    Refused,
    /// The set opens. The devices are not registered.
    OpenedAlone,
    /// The set opens. Of the devices, the dirty ones are refused.
    Opened(Vec<BackingState>),
}

/// Gives the engine a substitute. Returns false if no such substitute is possible now.
///
/// `copies`: the cache device as it was before earlier boots.
///
/// # Errors
/// If the engine reacts in another way than expected.
pub fn give(
    hardware: &Hardware,
    oracles: &[Rc<RefCell<Oracle>>],
    substitute: Substitute,
    copies: &[Option<Image>],
    limit: Nanos,
) -> Result<bool, Violation> {
    let right = hardware.cache.image();
    let Some(expected) = put(hardware, substitute, copies) else { return Ok(false) };
    hardware.world.log(|| format!("SUBSTITUTE {substitute:?}: {expected:?}"));
    let put = hardware.cache.image();
    let alone = if matches!(expected, Expected::Opened(_)) { STARTS_ALONE } else { 0 };
    let said = (0..=alone).try_for_each(|n| start(hardware, oracles, &expected, n == alone, limit));
    let changed = expected == Expected::Refused && hardware.cache.image() != put;
    hardware.cache.load(right);
    let said = if changed { said.and(Err(Violation::ChangedDespiteRefusal)) } else { said };
    said.map(|()| true).map_err(|e| Violation::Substitute { substitute, source: Box::new(e) })
}

/// Runs one start, with or without the backing devices.
fn start(
    hardware: &Hardware,
    oracles: &[Rc<RefCell<Oracle>>],
    expected: &Expected,
    complete: bool,
    limit: Nanos,
) -> Result<(), Violation> {
    let mut machine = hardware.boot(Order::Fifo);
    let parts = hardware.parts(&machine);
    let clients: Vec<Rc<Client>> = oracles
        .iter()
        .enumerate()
        .map(|(i, o)| Client::new(&hardware.world, machine.handle(), i as u8, o.clone()))
        .collect();
    let (wanted, world) = (expected.clone(), hardware.world.clone());
    let task = machine.handle().spawn(async move {
        match CacheSet::open(parts.cache, SetOptions::default()).await {
            Err(e) if wanted == Expected::Refused => {
                world.log(|| format!("refused: {e}"));
                Ok(())
            }
            Err(e) => Err(Violation::Opening(Box::new(e))),
            Ok(set) => {
                let backings = if complete { &parts.backings[..] } else { &[] };
                let result = use_it(&set, backings, &clients, &wanted).await;
                clients.iter().for_each(|c| c.set_volume(None));
                set.abandon();
                result
            }
        }
    });
    let said = match machine.run(&task, limit) {
        Outcome::Done(said) => said,
        Outcome::PowerLoss => Err(Violation::PowerLoss),
        Outcome::Stuck(why) => Err(Violation::Stuck { why }),
    };
    hardware.kill(machine);
    said
}

/// Registers every device, and reads all served volumes.
async fn use_it(
    set: &CacheSet,
    backings: &[Disk],
    clients: &[Rc<Client>],
    expected: &Expected,
) -> Result<(), Violation> {
    let states = match expected {
        Expected::Opened(states) => states,
        Expected::OpenedAlone => return Ok(()),
        Expected::Refused => return Err(Violation::NotRefused),
    };
    for ((disk, client), state) in backings.iter().zip(clients).zip(states) {
        let device = disk.info().name.clone();
        match set.register(disk.clone()).await {
            Ok(_) if *state == BackingState::Dirty => {
                return Err(Violation::DirtyRegistered { device });
            }
            Ok(volume) => client.set_volume(Some(volume)),
            Err(e) if *state == BackingState::Dirty && blames_a_copy(&e) => continue,
            Err(e) => return Err(Violation::NotRegistered { device, source: Box::new(e) }),
        }
        let size = client.size();
        for at in (0..size).step_by(READ_SECTORS as usize) {
            client.read(at, READ_SECTORS.min(size - at)).await;
        }
    }
    Ok(())
}

/// Whether the engine refuses a device because the cache device, or this one, is an older copy.
fn blames_a_copy(error: &EngineError) -> bool {
    let EngineError::Refused(refusal) = error else { return false };
    let Refusal::Device { why, .. } = &**refusal else { return false };
    matches!(why, DeviceRefusal::DirtyInOtherState { .. } | DeviceRefusal::DirtyInOtherCache { .. })
}

/// Puts the substitute in the place of the cache device.
///
/// `None` if the substitute is not possible, or the engine cannot notice it by design.
fn put(hardware: &Hardware, substitute: Substitute, copies: &[Option<Image>]) -> Option<Expected> {
    match substitute {
        Substitute::Copy(n) => {
            let copy = copies.get(n)?.as_ref()?;
            let right = hardware.cache.image();
            hardware.cache.load(copy.clone());
            let slots = Heads::find(&hardware.cache).map(|heads| heads.uuids(&hardware.cache));
            let states = slots.and_then(|slots| states_after(hardware, &slots));
            if states.is_none() {
                hardware.cache.load(right);
            }
            Some(Expected::Opened(states?))
        }
        Substitute::LargeVolume => {
            Heads::find(&hardware.cache)?.enlarge_volume(&hardware.cache).then_some(Expected::Refused)
        }
        Substitute::Full => {
            let mut heads = Heads::find(&hardware.cache)?;
            let left = heads.superblock.geometry().prio_buckets as usize;
            heads.fill(&hardware.cache, left).then_some(Expected::OpenedAlone)
        }
        Substitute::FarKey => {
            let heads = Heads::find(&hardware.cache)?;
            if heads.newest.btree_level > 0 {
                return None;
            }
            let g = heads.superblock.geometry();
            let at = g.bucket_start(BucketNr(g.nbuckets - 1));
            let far = Bkey::extent(Inode(0), Sector(MOST + 8), Sectors(8), true, Ptr::new(0, at, Gen(0)));
            heads.replace_root(&hardware.cache, &[far]);
            Some(Expected::Refused)
        }
    }
}

/// The states of the backing devices, if the engine can detect for each of them that the copy is older.
///
/// `None` if a device has not registered since its slot was like this, or was served without the cache: only the newest
/// cache device records what such a device missed.
fn states_after(hardware: &Hardware, slots: &[UuidEntry]) -> Option<Vec<BackingState>> {
    let state = |image: &Image| {
        let superblock = backing_super(image)?;
        let tells = matches!(superblock.state(), BackingState::Clean | BackingState::Dirty);
        let says =
            |n: &[Option<_>; 2]| n.contains(&superblock.registration()) || n.iter().all(Option::is_none);
        let knows = |s: &UuidEntry| s.uuid == superblock.uuid() && says(&s.registrations());
        (tells && !slots.iter().any(knows)).then_some(superblock.state())
    };
    hardware.backings.iter().map(|b| state(&b.image())).collect()
}

fn backing_super(image: &Image) -> Option<BackingSuper> {
    let head = image.read_vec(Sector(8), Sectors(8));
    RawSuperblock::from_prefix(&head).and_then(|raw| raw.check_backing(image.size(), 512)).ok()
}
