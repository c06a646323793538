//! Groups: several sets whose volumes have their dirty data in two of them (decision 037).
//!
//! Owns the choice of the set and of the second set of each device, and the task that makes missing copies. Must not know exports.

use std::rc::Rc;

use engine::{CacheSet, CopyState, EngineError, MirrorRefusal, Refusal, Volume};
use format::{BackingState, BackingSuper, CacheSuper, Uuid};
use io::Disk;

use crate::failure::Failure;
use crate::{idle, message};

/// Registers a backing device with its set, and with the second set that may have a copy of its dirty data. If its set is missing, one
/// that has a copy takes over.
///
/// # Errors
/// If the device is refused, or its set is missing and no other one has a valid copy.
pub async fn register<'a>(
    sets: impl Iterator<Item = &'a CacheSet>,
    disk: Disk,
    superblock: &BackingSuper,
) -> Result<Rc<Volume>, Failure> {
    let sets: Vec<&CacheSet> = sets.collect();
    let (named, uuid) = (superblock.set_uuid(), superblock.uuid());
    let is_attached = matches!(superblock.state(), BackingState::Clean | BackingState::Dirty);
    let own = match sets.iter().position(|set| set.uuid() == named) {
        Some(own) => own,
        // It belongs to a set that is not here.
        None if is_attached => return take_over(&sets, disk, named).await,
        None => 0,
    };
    let Some(set) = sets.get(own) else { return Err(Failure::Failed("there is no cache set".into())) };
    let volume = match second_of(&sets, own, uuid) {
        Some(second) => set.register_with(second, disk).await?,
        None => set.register(disk).await?,
    };
    Ok(volume)
}

/// The second set of a device of set number `own`: the one that has a copy, or the next one.
fn second_of<'a>(sets: &[&'a CacheSet], own: usize, backing: Uuid) -> Option<&'a CacheSet> {
    let named = sets.get(own)?.second_set_of(backing);
    let named = sets.iter().find(|set| Some(set.uuid()) == named);
    let next = sets.iter().cycle().nth(own + 1).filter(|_| sets.len() > 1);
    named.or(next).copied()
}

/// Registers a device whose set is missing with the one of these sets that has a copy of its dirty data.
///
/// # Errors
/// If none has a valid one.
pub async fn take_over(sets: &[&CacheSet], disk: Disk, missing: Uuid) -> Result<Rc<Volume>, Failure> {
    let name = disk.info().name.clone();
    let mut refused = Failure::Failed(format!("{name}: there is no cache set"));
    for set in sets {
        match set.take_over(disk.clone()).await {
            Ok(volume) => {
                message::warn(format!(
                    "{name}: cache set {missing} is missing: set {} has taken over its dirty data, which has one copy now; what set \
                     {missing} has is out of date",
                    set.uuid()
                ));
                return Ok(volume);
            }
            Err(e) => refused = e.into(),
        }
    }
    Err(refused)
}

/// Says so if only one set of a group is here.
pub fn warn_if_alone(sets: &[CacheSet]) {
    let [set] = sets else { return };
    if let Some(group) = set.group() {
        message::warn(format!(
            "set {} is the only one here of group {group}: dirty data has one copy until another cache device of the group is given, too",
            set.uuid()
        ));
    }
}

/// Whether a set has failed and no volume needs it any more.
pub(crate) fn is_left(set: &CacheSet) -> bool {
    set.status().failed.is_some() && set.volumes().is_empty()
}

/// What makes one more copy: a volume whose dirty data is in one set only, its set and a set that can have the copy.
type Missing = (Rc<Volume>, CacheSet, CacheSet);

/// The copies that are missing and can be made now.
fn missing_copies(sets: &[CacheSet]) -> Vec<Missing> {
    let mut missing = Vec::new();
    let working: Vec<&CacheSet> = sets.iter().filter(|set| set.status().failed.is_none()).collect();
    for (own, set) in working.iter().enumerate() {
        for volume in set.volumes() {
            let is_wanted = !volume.is_flash_only() && volume.copy_state() == CopyState::None;
            let Some(backing) = volume.backing_uuid().filter(|_| is_wanted) else { continue };
            if let Some(second) = second_of(&working, own, backing) {
                missing.push((volume, (*set).clone(), second.clone()));
            }
        }
    }
    missing
}

/// Says of each volume whose dirty data is in two sets which ones they are.
pub fn say_copies(sets: &[CacheSet]) {
    for volume in sets.iter().flat_map(CacheSet::volumes) {
        if let (CopyState::Complete { set }, Some(own)) = (volume.copy_state(), volume.set_uuid()) {
            say_both(&volume, own, set);
        }
    }
}

/// Makes the copies that are missing, one after the other, and says so. `sets` are the sets of the group now: they are asked for before
/// each copy.
///
/// # Errors
/// If a copy cannot be made; the others are.
pub async fn make_copies(sets: impl Fn() -> Vec<CacheSet>) -> Result<(), Failure> {
    let (mut result, mut tried) = (Ok(()), Vec::new());
    loop {
        let is_new = |(volume, ..): &Missing| !tried.iter().any(|other| Rc::ptr_eq(other, volume));
        let next = missing_copies(&sets()).into_iter().find(is_new);
        let Some((volume, set, second)) = next else { return result };
        let name = volume.backing_name().unwrap_or_default();
        match set.mirror(&volume, &second).await {
            Ok(()) => say_both(&volume, set.uuid(), second.uuid()),
            // It is made after the next start.
            Err(EngineError::Refused(why)) if matches!(*why, Refusal::Stopping) => return result,
            // The second set leaves the group, and another one gets the copy.
            Err(e) if is_lost(&e) && !sets().iter().any(|other| other.uuid() == second.uuid()) => continue,
            Err(e) => {
                let e = Failure::because(format_args!("{name}: its dirty data stays in one set"), e);
                message::warn(e.to_string());
                result = result.and(Err(e));
            }
        }
        tried.push(volume);
    }
}

/// Whether a copy has ended before it was complete.
fn is_lost(error: &EngineError) -> bool {
    matches!(error, EngineError::Refused(why) if matches!(**why, Refusal::Mirror { why: MirrorRefusal::Lost, .. }))
}

fn say_both(volume: &Volume, set: Uuid, second: Uuid) {
    let name = volume.backing_name().unwrap_or_default();
    message::note(format!("{name}: its dirty data is in sets {set} and {second}"));
}

/// Writes the group of a set that no process serves to its superblock. The caller has claimed the device.
///
/// # Errors
/// If the device cannot be written.
pub async fn put_into(disk: &Disk, superblock: &mut CacheSuper, group: Uuid) -> Result<(), Failure> {
    superblock.set_group(Some(group));
    idle::write_superblock(disk, superblock).await
}
