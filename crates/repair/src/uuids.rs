//! The UUID table: which device or volume has which slot.
//!
//! Owns its repair. The table has no checksum, so damage shows where it contradicts other structures: an attached backing device has
//! no slot, or keys belong to a slot that was never used. The table is rebuilt from an older copy of itself in another bucket, and
//! from the backing devices.

use std::collections::{BTreeMap, BTreeSet};

use format::superblock::LABEL_BYTES;
use format::uuid_table::{UUID_ENTRY_BYTES, encode_uuid_table, parse_uuid_table};
use format::{
    BackingState, BackingSuper, Bkey, BucketNr, INVALID_UUID, Inode, Sector, Sectors, Uuid, UuidEntry,
};
use inspect::{DeviceSuper, Invariant, ReadAt, SetView, Severity, read_superblock};

use crate::reason::Unrepairable;
use crate::work::{Doubt, Work};

const STRUCTURE: &str = "UUID table";

/// Mends the table if it contradicts other structures.
pub(crate) fn mend(work: &mut Work<'_>) {
    let Some(view) = work.view().filter(|v| v.journal.is_some()) else { return };
    let attached = attached(work, &view);
    let lost: Vec<&BackingSuper> = attached.iter().filter(|b| slot_of(&view, b.uuid()).is_none()).collect();
    let unknown = unknown(&view);
    let broken = view
        .findings
        .list()
        .iter()
        .any(|f| f.invariant == Invariant::UuidTable && f.severity > Severity::Notice);
    if lost.is_empty() && unknown.is_empty() && !broken {
        return;
    }
    let device = work.cache.name().to_owned();
    match rebuilt(work, &view, &attached) {
        Ok((at, bytes, action, uncertain)) => {
            work.cache.write(at, &bytes);
            work.step(STRUCTURE, device, action, uncertain);
            let now = work.view().map(|after| after.slots).unwrap_or_default();
            let same = view.slots.iter().filter(|(inode, slot)| now.get(inode) == Some(slot));
            work.doubts.push(Doubt::Slots(same.map(|(inode, _)| *inode).collect()));
        }
        Err(why) => work.refuse(format!("{device}: the {STRUCTURE} is damaged: {why}")),
    }
}

/// The backing devices that say that they belong to the set.
fn attached(work: &Work<'_>, view: &SetView) -> Vec<BackingSuper> {
    let of_set = |b: &BackingSuper| {
        b.set_uuid() == view.superblock.set_uuid()
            && matches!(b.state(), BackingState::Clean | BackingState::Dirty)
    };
    let each = work.backings.iter().filter_map(|b| match read_superblock(b) {
        Ok(DeviceSuper::Backing(superblock)) => Some(superblock),
        _ => None,
    });
    each.filter(of_set).collect()
}

fn slot_of(view: &SetView, uuid: Uuid) -> Option<Inode> {
    view.slots.iter().find(|(_, slot)| slot.uuid == uuid && slot.is_backing()).map(|(inode, _)| *inode)
}

/// The inodes that have live data and no slot.
fn unknown(view: &SetView) -> BTreeSet<Inode> {
    let live = view.pieces().filter(|(_, _, kind)| kind.is_live());
    live.map(|(inode, _, _)| inode).filter(|inode| !view.slots.contains_key(inode)).collect()
}

type NewTable = (Sector, Vec<u8>, String, Vec<String>);

fn rebuilt(work: &Work<'_>, view: &SetView, attached: &[BackingSuper]) -> Result<NewTable, Unrepairable> {
    let newest = view.journal.as_ref().and_then(|j| j.replay.last()).ok_or("there is no journal entry")?;
    let key = newest.uuid_bucket;
    let at = key.pointer().map(format::Ptr::offset).ok_or("the journal does not say where it is")?;
    let size = usize::try_from(key.size().bytes()).map_err(|_| "its length is wrong")?;
    let live: BTreeSet<Inode> =
        view.pieces().filter(|(_, _, kind)| kind.is_live()).map(|(inode, _, _)| inode).collect();
    let mut slots: BTreeMap<Inode, UuidEntry> = BTreeMap::new();
    let mut from = Vec::new();
    if let Some((bucket, older)) = older_table(work, view, &key, attached, &live) {
        let used = (0..).map(Inode).zip(older).filter(|(_, entry)| !entry.is_free());
        slots.extend(used);
        from.push(format!("an older copy in bucket {bucket}"));
    }
    add_intact(view, work, at, size, &mut slots);
    for backing in attached {
        if slots.values().any(|entry| entry.uuid == backing.uuid()) {
            continue;
        }
        let free: Vec<Inode> = live.iter().copied().filter(|i| !slots.contains_key(i)).collect();
        let inode = match free[..] {
            [inode] => inode,
            [] => (0..).map(Inode).find(|i| !slots.contains_key(i)).unwrap_or_default(),
            _ => {
                return Err(format!(
                    "several slots have data and no device ({}), and it is not known which is that of {}",
                    list(&free),
                    backing.uuid()
                )
                .into());
            }
        };
        slots.insert(inode, entry_of(backing));
        from.push(format!("the superblock of backing device {} for slot {inode}", backing.uuid()));
    }
    let without: Vec<Inode> = live.iter().copied().filter(|i| !slots.contains_key(i)).collect();
    if !without.is_empty() {
        return Err(format!(
            "slots {} have data, and their backing devices were not given; for a flash-only volume its size is lost",
            list(&without)
        )
        .into());
    }
    let last = slots.keys().next_back().map_or(0, |inode| inode.0);
    let entries: Vec<UuidEntry> =
        (0..=last).map(|i| slots.get(&Inode(i)).cloned().unwrap_or(UuidEntry::FREE)).collect();
    if entries.len() > size / UUID_ENTRY_BYTES {
        return Err("it has more slots than room".into());
    }
    let mut bytes = vec![0; size];
    encode_uuid_table(&mut bytes, &entries);
    let action = format!(
        "rebuilt from {}",
        if from.is_empty() { "its intact slots".to_owned() } else { from.join(" and ") }
    );
    let uncertain =
        "slots of devices that were not given, if they were changed after the older copy; first registration"
            .to_owned();
    Ok((at, bytes, action, vec![uncertain]))
}

fn list(inodes: &[Inode]) -> String {
    inodes.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// The slot of a backing device, as far as its superblock knows it.
fn entry_of(backing: &BackingSuper) -> UuidEntry {
    let label: [u8; LABEL_BYTES] = *backing.label_bytes();
    let mut entry = UuidEntry::backing(backing.uuid(), label, backing.last_mount());
    if let Some(registration) = backing.registration() {
        entry.register(registration, None);
    }
    entry
}

/// Adds the slots of the damaged table that a backing device or an older copy confirms.
fn add_intact(
    view: &SetView,
    work: &Work<'_>,
    at: Sector,
    size: usize,
    slots: &mut BTreeMap<Inode, UuidEntry>,
) {
    let mut bytes = vec![0; size];
    if work.cache.read_at(at, &mut bytes).is_err() {
        return;
    }
    let given: BTreeSet<Uuid> = attached(work, view).iter().map(BackingSuper::uuid).collect();
    let Ok(entries) = parse_uuid_table(&bytes, 1) else { return };
    for (inode, entry) in (0..).map(Inode).zip(entries) {
        let confirmed = given.contains(&entry.uuid) || slots.values().any(|old| old.uuid == entry.uuid);
        if confirmed && entry.uuid != INVALID_UUID && !entry.is_free() {
            slots.retain(|_, old| old.uuid != entry.uuid);
            slots.insert(inode, entry);
        }
    }
}

/// An older copy of the table, whose slots are those of all devices that are known.
///
/// Each change of the table goes to a new bucket. Nothing reuses the old bucket at once.
fn older_table(
    work: &Work<'_>,
    view: &SetView,
    key: &Bkey,
    attached: &[BackingSuper],
    live: &BTreeSet<Inode>,
) -> Option<(BucketNr, Vec<UuidEntry>)> {
    let g = *view.geometry();
    let size = usize::try_from(key.size().bytes()).ok()?;
    let mut bytes = vec![0; size];
    let mut best: Option<(usize, BucketNr, Vec<UuidEntry>)> = None;
    let current = key.pointer().and_then(|ptr| g.bucket_of(ptr.offset()));
    for bucket in (g.first_dynamic().0..g.nbuckets).map(BucketNr).filter(|b| Some(*b) != current) {
        if work.cache.read_at(g.bucket_start(bucket), &mut bytes).is_err() {
            continue;
        }
        let Ok(entries) = parse_uuid_table(&bytes, 1) else { continue };
        let Some(rank) = plausible(&entries, attached, live) else { continue };
        if best.as_ref().is_none_or(|(most, _, _)| rank > *most) {
            best = Some((rank, bucket, entries));
        }
    }
    best.map(|(_, bucket, entries)| (bucket, entries))
}

/// How many slots a table has, if it can be one of this set: at least one given device is in it, and the rest is free.
fn plausible(entries: &[UuidEntry], attached: &[BackingSuper], live: &BTreeSet<Inode>) -> Option<usize> {
    let used: Vec<(Inode, &UuidEntry)> =
        (0..).map(Inode).zip(entries).filter(|(_, entry)| !entry.is_free()).collect();
    let has_given = used.iter().any(|(_, entry)| attached.iter().any(|b| b.uuid() == entry.uuid));
    let fits = |(inode, entry): &(Inode, &UuidEntry)| {
        let is_volume = entry.is_flash_only();
        let sized = is_volume == (entry.sectors != Sectors(0));
        sized && (live.contains(inode) || !is_volume || entry.is_invalidated() || entry.sectors.0 < 1 << 48)
    };
    (has_given && used.len() <= 4096 && used.iter().all(fits)).then_some(used.len())
}
