//! The UUID table: which device or volume has which slot.
//!
//! Owns its repair. The table has no checksum, so damage shows where it contradicts other structures: an attached backing device has
//! no slot, or keys belong to a slot that was never used. The table is rebuilt from an older copy of itself in another bucket, and
//! from the backing devices.
//!
//! Invariant: data that only the cache has goes to no device that could have no part in it. A device that gets the data of another one
//! is overwritten by it. So a slot is given to a device if clean data confirms it, or if nothing else is left and nothing contradicts.

mod copies;

use std::collections::{BTreeMap, BTreeSet};

use format::superblock::LABEL_BYTES;
use format::uuid_table::{UUID_ENTRY_BYTES, encode_uuid_table, parse_uuid_table};
use format::{BackingState, BackingSuper, Inode, Sector, Uuid, UuidEntry};
use inspect::{DeviceSuper, Invariant, ReadAt, SetView, Severity, read_superblock};

use crate::evidence::Evidence;
use crate::reason::Unrepairable;
use crate::work::{Doubt, Work};
use copies::{Copies, is_plausible, newest_time};

const STRUCTURE: &str = "UUID table";

/// Mends the table if it contradicts other structures.
pub(crate) fn mend(work: &mut Work<'_>) {
    let Some(view) = work.view().filter(|v| v.journal.is_some()) else { return };
    let attached = attached(work, &view);
    let broken = view
        .findings
        .list()
        .iter()
        .any(|f| f.invariant == Invariant::UuidTable && f.severity > Severity::Notice);
    let lost = attached.iter().filter(|a| slot_of(&view, a.uuid()).is_none());
    // A clean device without a slot is legal: it has all its data, and gets a new slot.
    let is_lost = lost.clone().any(Attached::is_dirty)
        || lost.clone().count() > 0 && current(work, &view).is_some_and(|entries| is_damaged(&entries, lost));
    if !is_lost && unknown(&view).is_empty() && !broken {
        return;
    }
    let device = work.cache.name().to_owned();
    match rebuilt(work, &view, &attached) {
        Ok(NewTable { at, bytes, action, uncertain }) => {
            work.cache.write(at, &bytes);
            work.step(STRUCTURE, device, action, uncertain);
            let now = work.view().map(|after| after.slots).unwrap_or_default();
            let same = view.slots.iter().filter(|(inode, slot)| now.get(inode) == Some(slot));
            work.doubts.push(Doubt::Slots(same.map(|(inode, _)| *inode).collect()));
        }
        Err(why) => work.refuse(format!(
            "{device}: the {STRUCTURE} is damaged: {why}; do not serve the set as it is: a start drops data whose slot is not in the \
             table"
        )),
    }
}

/// The slots of the table, whatever became of it; `None` if it cannot be read.
fn current(work: &Work<'_>, view: &SetView) -> Option<Vec<UuidEntry>> {
    let key = view.journal.as_ref()?.replay.last()?.uuid_bucket;
    let mut bytes = vec![0; usize::try_from(key.size().bytes()).ok()?];
    work.cache.read_at(key.pointer()?.offset(), &mut bytes).ok()?;
    parse_uuid_table(&bytes, 1).ok()
}

/// Whether the table cannot be the one that was written, or has the slot of one of these devices with one flipped bit.
fn is_damaged<'d>(entries: &[UuidEntry], lost: impl Iterator<Item = &'d Attached>) -> bool {
    let mut lost = lost.map(Attached::uuid);
    let is_used = entries.iter().any(|entry| !entry.is_free());
    is_used && !is_plausible(entries) || lost.any(|uuid| entries.iter().any(|e| is_one_bit_off(e, uuid)))
}

/// Whether a slot has this UUID, but for one bit.
fn is_one_bit_off(entry: &UuidEntry, uuid: Uuid) -> bool {
    let differing = entry.uuid.0.iter().zip(uuid.0).map(|(a, b)| (a ^ b).count_ones());
    entry.is_live() && differing.sum::<u32>() == 1
}

/// A backing device that says that it belongs to the set.
struct Attached {
    /// Its index in the plan.
    index: usize,
    superblock: BackingSuper,
}

impl Attached {
    fn uuid(&self) -> Uuid {
        self.superblock.uuid()
    }

    fn is_dirty(&self) -> bool {
        self.superblock.state() == BackingState::Dirty
    }
}

/// The backing devices that say that they belong to the set.
fn attached(work: &Work<'_>, view: &SetView) -> Vec<Attached> {
    let of_set = |b: &BackingSuper| {
        b.set_uuid() == view.superblock.set_uuid()
            && matches!(b.state(), BackingState::Clean | BackingState::Dirty)
    };
    let each = work.backings.iter().enumerate().filter_map(|(index, b)| match read_superblock(b) {
        Ok(DeviceSuper::Backing(superblock)) => Some(Attached { index, superblock }),
        _ => None,
    });
    each.filter(|a| of_set(&a.superblock)).collect()
}

fn slot_of(view: &SetView, uuid: Uuid) -> Option<Inode> {
    view.slots.iter().find(|(_, slot)| slot.uuid == uuid && slot.is_backing()).map(|(inode, _)| *inode)
}

/// The inodes that have live data.
fn live(view: &SetView) -> BTreeSet<Inode> {
    view.pieces().filter(|(_, _, kind)| kind.is_live()).map(|(inode, _, _)| inode).collect()
}

/// The inodes that have live data and no slot.
fn unknown(view: &SetView) -> BTreeSet<Inode> {
    live(view).into_iter().filter(|inode| !view.slots.contains_key(inode)).collect()
}

/// The table to write.
struct NewTable {
    at: Sector,
    bytes: Vec<u8>,
    action: String,
    uncertain: Vec<String>,
}

/// The slots of the new table as far as they are known.
struct Slots<'a> {
    work: &'a Work<'a>,
    view: &'a SetView,
    copies: Copies,
    slots: BTreeMap<Inode, UuidEntry>,
    /// Where the slots come from.
    from: Vec<String>,
    uncertain: Vec<String>,
}

fn rebuilt(work: &Work<'_>, view: &SetView, attached: &[Attached]) -> Result<NewTable, Unrepairable> {
    let newest = view.journal.as_ref().and_then(|j| j.replay.last()).ok_or("there is no journal entry")?;
    if newest.version == 0 {
        return Err(
            "the newest journal entry has version 0, and the layout of that version is not written".into()
        );
    }
    let key = newest.uuid_bucket;
    let at = key.pointer().map(format::Ptr::offset).ok_or("the journal does not say where it is")?;
    let size = usize::try_from(key.size().bytes()).map_err(|_| "its length is wrong")?;
    let given: BTreeSet<Uuid> = attached.iter().map(Attached::uuid).collect();
    let copies = Copies::find(view, &work.cache, &key, &given).ok_or("its length is wrong")?;
    let mut slots = Slots {
        work,
        view,
        copies,
        slots: BTreeMap::new(),
        from: Vec::new(),
        uncertain: vec![
            "slots of devices that were not given, if they were changed after the older copy; first registration"
                .to_owned(),
        ],
    };
    slots.add_older(attached);
    slots.add_intact(attached);
    slots.check_deleted()?;
    slots.assign(attached)?;
    let last = slots.slots.keys().next_back().map_or(0, |inode| inode.0);
    let entries: Vec<UuidEntry> =
        (0..=last).map(|i| slots.slots.get(&Inode(i)).copied().unwrap_or(UuidEntry::FREE)).collect();
    if entries.len() > size / UUID_ENTRY_BYTES {
        return Err("it has more slots than room".into());
    }
    let mut bytes = vec![0; size];
    encode_uuid_table(&mut bytes, &entries);
    let from = if slots.from.is_empty() { "its intact slots".to_owned() } else { slots.from.join(" and ") };
    Ok(NewTable { at, bytes, action: format!("rebuilt from {from}"), uncertain: slots.uncertain })
}

impl Slots<'_> {
    /// Adds the slots of the newest copy, without those that the devices contradict.
    ///
    /// A slot of a device that was detached can have been given to another one after the copy was made.
    fn add_older(&mut self, attached: &[Attached]) {
        let Some((bucket, slots)) = self.copies.newest() else { return };
        let mut slots = slots.clone();
        slots.retain(|inode, entry| {
            let device = attached.iter().find(|a| a.uuid() == entry.uuid);
            device.is_none_or(|a| self.evidence(*inode, a).contradiction(&a.superblock).is_none())
        });
        self.from.push(format!("an older copy in bucket {bucket}"));
        self.slots = slots;
    }

    /// Adds the slots of the damaged table: all if it is well formed and no older than the copy, or else those that a backing device or
    /// the copy confirms.
    fn add_intact(&mut self, attached: &[Attached]) {
        let Some(mut entries) = current(self.work, self.view) else { return };
        for (n, entry) in entries.iter_mut().enumerate() {
            if let Some(device) = attached.iter().find(|a| is_one_bit_off(entry, a.uuid())) {
                entry.uuid = device.uuid();
                self.from.push(format!("slot {n}, of which one bit is flipped back"));
            }
        }
        let is_given = |entry: &UuidEntry| attached.iter().any(|a| a.uuid() == entry.uuid);
        let is_whole = is_plausible(&entries)
            && entries.iter().any(is_given)
            && newest_time(&entries) >= self.copies.time();
        for (inode, entry) in (0..).map(Inode).zip(&entries).filter(|(_, entry)| !entry.is_free()) {
            if entry.is_invalidated() {
                if is_whole {
                    self.slots.insert(inode, *entry);
                }
            } else if is_whole || is_given(entry) || self.slots.values().any(|old| old.uuid == entry.uuid) {
                self.slots.retain(|_, old| old.uuid != entry.uuid);
                self.slots.insert(inode, *entry);
            }
        }
    }

    /// Refuses an invalid slot with dirty data: after the copy was made, the slot can have been given to a new volume or device. Its
    /// data would be dropped.
    fn check_deleted(&self) -> Result<(), Unrepairable> {
        let invalid = self.slots.iter().filter(|(_, entry)| entry.is_invalidated());
        for (inode, _) in invalid {
            let dirty = self.view.totals_of(*inode).dirty_sectors;
            if dirty > 0 {
                return Err(format!(
                    "slot {inode} has {dirty} dirty sectors, and was free according to an older copy; the copy may be older than \
                     the device or volume that has this data"
                )
                .into());
            }
        }
        Ok(())
    }

    fn evidence(&self, inode: Inode, device: &Attached) -> Evidence {
        let backing = self.work.backings.get(device.index);
        backing.map(|b| Evidence::of(self.view, &self.work.cache, b, inode)).unwrap_or_default()
    }

    /// The inodes that have live data, and no slot yet.
    fn inodes_without_slot(&self) -> Vec<Inode> {
        live(self.view).into_iter().filter(|inode| !self.slots.contains_key(inode)).collect()
    }

    /// The devices that have no slot yet.
    fn devices_without_slot<'d>(&self, attached: &'d [Attached]) -> Vec<&'d Attached> {
        let has_slot = |a: &Attached| self.slots.values().any(|entry| entry.uuid == a.uuid());
        attached.iter().filter(|a| !has_slot(a)).collect()
    }

    /// Gives each device a slot, and finds a device for all data.
    fn assign(&mut self, attached: &[Attached]) -> Result<(), Unrepairable> {
        self.assign_confirmed(attached)?;
        match (&self.inodes_without_slot()[..], &self.devices_without_slot(attached)[..]) {
            ([], devices) => devices.iter().try_for_each(|device| self.assign_unused(device)),
            ([inode], [device]) => self.assign_last(*inode, device),
            (inodes, []) => Err(format!(
                "slots {} have data, and their backing devices were not given; for a flash-only volume its size is lost",
                list(inodes)
            )
            .into()),
            (inodes, [device, ..]) => Err(format!(
                "several slots or devices are left ({}), and it is not known which is that of {}",
                list(inodes),
                device.uuid()
            )
            .into()),
        }
    }

    /// Gives slots to the devices that have their clean data.
    fn assign_confirmed(&mut self, attached: &[Attached]) -> Result<(), Unrepairable> {
        let (inodes, devices) = (self.inodes_without_slot(), self.devices_without_slot(attached));
        let pairs = inodes.iter().flat_map(|inode| devices.iter().map(move |device| (*inode, *device)));
        let found: Vec<(Inode, &Attached, Evidence)> = pairs
            .map(|(inode, device)| (inode, device, self.evidence(inode, device)))
            .filter(|(_, _, evidence)| evidence.is_confirmed())
            .collect();
        for (inode, device, evidence) in &found {
            let clashes = found.iter().filter(|(i, d, _)| i == inode || d.index == device.index).count() > 1;
            if clashes {
                let why = format!(
                    "clean data fits several slots or devices, among them slot {inode} and {}",
                    device.uuid()
                );
                return Err(why.into());
            }
            if let Some(why) = evidence.contradiction(&device.superblock) {
                return Err(format!(
                    "slot {inode} has clean data that is on backing device {}, but {why}",
                    device.uuid()
                )
                .into());
            }
            self.insert(*inode, device);
        }
        Ok(())
    }

    /// Gives a device without data in the cache a slot that has no keys.
    fn assign_unused(&mut self, device: &Attached) -> Result<(), Unrepairable> {
        let uuid = device.uuid();
        if device.is_dirty() {
            return Err(format!(
                "the state of backing device {uuid} is dirty, and no slot with data is left for it: its newest data is lost, or \
                 counts as that of another device or volume"
            )
            .into());
        }
        self.refuse_lost_keys(uuid)?;
        let has_keys = |inode| self.view.extents.of_inode(inode).next().is_some();
        let is_taken = |inode: &Inode| {
            self.slots.contains_key(inode) || has_keys(*inode) || self.copies.names_volume(*inode)
        };
        let inode = (0..).map(Inode).find(|inode| !is_taken(inode)).unwrap_or_default();
        self.insert(inode, device);
        Ok(())
    }

    /// Gives the last slot without a device to the last device without a slot, if no evidence contradicts it.
    fn assign_last(&mut self, inode: Inode, device: &Attached) -> Result<(), Unrepairable> {
        let evidence = self.evidence(inode, device);
        let uuid = device.uuid();
        let why = match evidence.contradiction(&device.superblock) {
            Some(why) => why,
            None if self.copies.names_volume(inode) => {
                "a copy of the table says that it is that of a flash-only volume".to_owned()
            }
            None if evidence.is_on_device() => {
                self.insert(inode, device);
                return Ok(());
            }
            None if device.is_dirty() => {
                self.refuse_lost_keys(uuid)?;
                self.insert(inode, device);
                self.uncertain.push(format!(
                    "no clean data confirms that the data of slot {inode} is that of backing device {uuid}: the state of the device \
                     is dirty, and no other slot or device is left"
                ));
                return Ok(());
            }
            None => "the state of the device is clean, and no clean data confirms it".to_owned(),
        };
        Err(format!(
            "slot {inode} has data and no device, and it is not given to backing device {uuid}: {why}; give all backing devices of \
             the set with -B; if the data is that of a flash-only volume, its size is lost; `ubcache salvage` copies the backing \
             devices without it"
        )
        .into())
    }

    /// Refuses to conclude from what is left if keys are lost, which could be those of the device.
    fn refuse_lost_keys(&self, uuid: Uuid) -> Result<(), Unrepairable> {
        let entries = self.work.doubts.iter().any(|doubt| matches!(doubt, Doubt::Entries(_)));
        if self.view.btree.missing > 0 || entries {
            return Err(format!(
                "nodes of the btree or journal entries are lost, so it is not known which slot is that of backing device {uuid}"
            )
            .into());
        }
        Ok(())
    }

    fn insert(&mut self, inode: Inode, device: &Attached) {
        self.slots.insert(inode, entry_of(&device.superblock));
        self.from.push(format!("the superblock of backing device {} for slot {inode}", device.uuid()));
    }
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
