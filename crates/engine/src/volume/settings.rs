//! Setting the tunables of a volume, and storing those that the superblock has.
//!
//! Owns the order: a tunable that cannot be stored keeps its old value. Must not know the values that are valid;
//! `crate::tunables` does.

use format::{Inode, Uuid};

use super::{Cache, Volume};
use crate::error::EngineError;
use crate::refusal::Refusal;
use crate::tunables::Admission;

/// Sets a tunable and stores it; see [`Volume::set`].
pub(super) async fn set(volume: &Volume, name: &str, value: &str) -> Result<(), EngineError> {
    if let ("cache_mode" | "label", Some((cache, _))) = (name, volume.attached()) {
        // What is stored must not change if the set cannot follow: the next start would serve the refused value.
        cache.device.check()?;
    }
    let (before, now) = {
        let t = &mut *volume.tunables.borrow_mut();
        let before = t.clone();
        t.set(name, value).map_err(Refusal::from)?;
        (before, t.clone())
    };
    let stored = match (name, &volume.backing) {
        ("cache_mode", Some(b)) => b.update(|sb| sb.set_cache_mode(now.cache_mode)).await,
        ("label", _) => write_label(volume, &now.label).await,
        _ => Ok(()),
    };
    if let Err(e) = stored {
        let t = &mut *volume.tunables.borrow_mut();
        match name {
            "cache_mode" => t.cache_mode = before.cache_mode,
            _ => t.label = before.label,
        }
        return Err(e);
    }
    match (name, &volume.backing) {
        ("writeback_rate", _) => volume.writeback.set_rate(now.writeback_rate),
        ("io_disable", Some(b)) => b.set_disabled(now.io_disable),
        ("admission", Some(b)) => b.set_admits_by_cost(now.admission == Admission::Cost),
        _ => {}
    }
    volume.writeback.wake();
    Ok(())
}

/// Writes the label to the backing superblock, then to the slot of the volume in the UUID table. If the table cannot be written, the
/// superblock gets the old label back, unless the caller has given up or the volume was released meanwhile.
async fn write_label(volume: &Volume, label: &str) -> Result<(), EngineError> {
    let Some(bytes) = format::superblock::label_bytes(label) else {
        return Err(Refusal::LabelTooLong { bytes: label.len() }.into());
    };
    let before = volume.backing.as_ref().map(|b| b.label_bytes());
    if let Some(b) = &volume.backing {
        b.update(|sb| sb.set_label(bytes)).await?;
    }
    let Some((cache, inode)) = volume.attached() else { return Ok(()) };
    let (theirs, uuid) = (cache.clone(), cache.uuids.uuid_of(inode));
    let listed = async move { write_label_of_slot(&theirs, inode, uuid, bytes).await };
    let listed = cache.tasks.to_the_end(listed).await;
    if let (Err(_), Some(b), Some(before)) = (&listed, &volume.backing, before)
        && volume.links.is_as(&cache, inode)
    {
        b.update(|sb| sb.set_label(before)).await?;
    }
    listed
}

/// Writes the label of a slot, if the slot is still that of this device or volume.
async fn write_label_of_slot(
    cache: &Cache,
    inode: Inode,
    uuid: Option<Uuid>,
    label: [u8; 32],
) -> Result<(), EngineError> {
    let mut table = cache.uuids.begin_change().await?;
    if cache.uuids.uuid_of(inode) != uuid {
        return Ok(());
    }
    table.apply(|u| u[inode.0 as usize].label = label).await
}
