//! Checks of superblocks before a device is used, with errors that name the cause.
//!
//! Owns the rules of these checks. A session checks every superblock before it writes the first one, so a mistake in the
//! arguments changes no device. Must not write.

use std::path::Path;

use blockio::probe_signature;
use format::superblock::{SUPERBLOCK_BYTES, SUPERBLOCK_SECTOR};
use format::{BackingState, BackingSuper, CacheSuper, Identity, RawSuperblock, Sectors, Uuid, identify};
use io::Disk;

use crate::failure::Failure;

/// Number of sectors up to the end of a superblock.
pub const HEAD: Sectors = Sectors(SUPERBLOCK_SECTOR.0 + SUPERBLOCK_BYTES as u64 / 512);

/// Refuses a device that is too small for a superblock.
pub fn has_room(source: &dyn inspect::ReadAt) -> Result<(), Failure> {
    room(source.name(), source.sectors())
}

fn room(name: &str, sectors: Sectors) -> Result<(), Failure> {
    if sectors >= HEAD {
        return Ok(());
    }
    Err(Failure::Failed(format!(
        "{name}: expected at least {HEAD} sectors for a superblock, found {sectors}"
    )))
}

/// Reads the bytes at the place of the superblock.
pub async fn read_bytes(disk: &Disk) -> Result<Vec<u8>, Failure> {
    let info = disk.info();
    room(&info.name, info.sectors)?;
    let (buffer, result) = disk.read(SUPERBLOCK_SECTOR, disk.runtime().pool().take(SUPERBLOCK_BYTES)).await;
    result?;
    Ok(buffer.as_slice().to_vec())
}

fn raw(disk: &Disk, bytes: &[u8]) -> Result<RawSuperblock, Failure> {
    RawSuperblock::from_prefix(bytes).cloned().map_err(|e| corrupt(disk, e))
}

fn corrupt(disk: &Disk, e: format::Corrupt) -> Failure {
    Failure::because(format_args!("{}: sector {SUPERBLOCK_SECTOR}", disk.info().name), e)
}

fn refused(disk: &Disk, what: impl std::fmt::Display) -> Failure {
    Failure::Failed(format!("{}: sector {SUPERBLOCK_SECTOR}: {what}", disk.info().name))
}

fn not_bcache(disk: &Disk, path: &Path, wanted: &str) -> Failure {
    let found = match probe_signature(path) {
        Ok(Some(signature)) => signature.to_string(),
        _ => "no bcache superblock".to_owned(),
    };
    refused(disk, format!("expected {wanted} of bcache, found {found}"))
}

/// Reads and checks the superblock of a cache device.
pub async fn cache(disk: &Disk, path: &Path) -> Result<CacheSuper, Failure> {
    cache_in(disk, path, &read_bytes(disk).await?)
}

/// Checks the superblock of a cache device in bytes that were read from the device.
pub fn cache_in(disk: &Disk, path: &Path, bytes: &[u8]) -> Result<CacheSuper, Failure> {
    match identify(bytes) {
        Identity::NotBcache => Err(not_bcache(disk, path, "a cache device")),
        Identity::Backing => {
            Err(refused(disk, "expected a cache device, found a backing device (are -C and -B swapped?)"))
        }
        Identity::Cache | Identity::UnknownVersion(_) => {
            let info = disk.info();
            raw(disk, bytes)?
                .check_cache(info.sectors, info.logical_block_bytes)
                .map_err(|e| corrupt(disk, e))
        }
    }
}

/// Reads and checks the superblock of a backing device.
pub async fn backing(disk: &Disk, path: &Path) -> Result<BackingSuper, Failure> {
    let bytes = read_bytes(disk).await?;
    match identify(&bytes) {
        Identity::NotBcache => Err(not_bcache(disk, path, "a backing device")),
        Identity::Cache => {
            Err(refused(disk, "expected a backing device, found a cache device (are -C and -B swapped?)"))
        }
        Identity::Backing | Identity::UnknownVersion(_) => {
            let info = disk.info();
            raw(disk, &bytes)?
                .check_backing(info.sectors, info.logical_block_bytes)
                .map_err(|e| corrupt(disk, e))
        }
    }
}

/// Refuses to attach a backing device that was made for, or once attached to, another set than that of this cache device.
///
/// # Errors
/// Names both sets, and says how to attach it.
pub fn made_for_another(
    backing: &Disk,
    superblock: &BackingSuper,
    cache: (&Disk, &CacheSuper),
) -> Result<(), Failure> {
    let (theirs, ours) = (superblock.set_uuid(), cache.1.set_uuid());
    if theirs == Uuid::NIL || theirs == ours {
        return Ok(());
    }
    let (name, cache) = (&backing.info().name, &cache.0.info().name);
    Err(Failure::Failed(format!(
        "{name}: belongs to cache set {theirs}, and {cache} is the cache device of set {ours}; nothing was changed; give \
         the cache device of its own set with -C, or attach it to set {ours} with --attach"
    )))
}

/// Refuses several cache devices that are not of one group.
///
/// # Errors
/// Names two devices that are not, with their groups.
pub(crate) fn are_one_group(sets: &[(Disk, CacheSuper)]) -> Result<(), Failure> {
    let Some(((first, one), others)) = sets.split_first() else { return Ok(()) };
    let name_of = |group: Option<Uuid>| group.map_or("none".to_owned(), |group| group.to_string());
    for (disk, set) in others {
        if one.group().is_none() || one.group() != set.group() {
            return Err(Failure::Failed(format!(
                "{}: expected the same group as that of {} ({}), found {}; nothing was changed; serve sets that are not in one group \
                 in processes of their own, or make one of them anew with `ubcache group add`",
                disk.info().name,
                first.info().name,
                name_of(one.group()),
                name_of(set.group())
            )));
        }
    }
    for (i, (disk, set)) in sets.iter().enumerate() {
        if let Some((twin, _)) = sets.iter().take(i).find(|(_, other)| other.set_uuid() == set.set_uuid()) {
            return Err(Failure::Failed(format!(
                "{} and {} are cache devices of the same set {}: is one a copy of the other?",
                twin.info().name,
                disk.info().name,
                set.set_uuid()
            )));
        }
    }
    Ok(())
}

/// Refuses a backing device that is attached to none of these sets; see [`is_of_one`].
pub(crate) fn belongs_to_one(
    name: &str,
    superblock: &BackingSuper,
    sets: &[(Disk, CacheSuper)],
) -> Result<(), Failure> {
    let all: Vec<&CacheSuper> = sets.iter().map(|(_, set)| set).collect();
    match all.first() {
        Some(first) if !is_of_one(superblock, &all) => belongs(name, superblock, first.set_uuid()),
        _ => Ok(()),
    }
}

/// Whether a backing device belongs to one of these sets, or one of them may have a copy of its dirty data: only the engine knows that.
pub(crate) fn is_of_one(superblock: &BackingSuper, sets: &[&CacheSuper]) -> bool {
    let is_named = sets.iter().any(|set| set.set_uuid() == superblock.set_uuid());
    is_named || superblock.copy().is_some() && sets.iter().any(|set| set.group().is_some())
}

/// Refuses a backing device that is attached to another set than `set`.
pub fn belongs(name: &str, superblock: &BackingSuper, set: Uuid) -> Result<(), Failure> {
    let attached = matches!(superblock.state(), BackingState::Clean | BackingState::Dirty);
    if attached && superblock.set_uuid() != set {
        return Err(Failure::Failed(format!(
            "{name}: is {} and attached to another cache set: expected set {set}, found {}; give the cache device of its \
             own set, or detach it from that set first (`ubcache detach`)",
            superblock.state().name(),
            superblock.set_uuid()
        )));
    }
    Ok(())
}
