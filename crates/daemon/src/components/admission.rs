//! Admission: which device is accepted for a UUID, and which may be attached although no operator has named it.
//!
//! Owns the comparison with the stored identity. A copy of a device has the same superblock and UUID. So a device is served
//! only if it is the one that is stored for its UUID: the same hardware or file, with a superblock that is not older than
//! the last known state. Any other device is refused until the operator accepts it. A device whose hardware reports no
//! identity is known by its UUID and the age of its superblock alone. A served device is never replaced: the operator has
//! to unregister it first.
//!
//! Must not know how a device was found.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serve::amount::human;
use serve::{Failure, message};

use super::devices::{DeviceState, WaitsFor};
use super::inventory::Inventory;
use super::views::SetView;
use crate::hub::Kind;
use crate::identity::Likeness;
use crate::order::KnownSlot;
use crate::probe::{Attachment, Probe, Role, probe_device};
use crate::shared::Shared;
use crate::state::{Known, Mark};
use crate::worker::Worker;

/// Why a device is registered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum By {
    /// The operator has named it.
    Operator {
        /// The device replaces the one that is stored for its UUID.
        accept: bool,
    },
    /// The daemon found the device: scans are permitted, or the device was registered before.
    Search,
}

impl By {
    /// The operator has named the device.
    pub(crate) const NAME: By = By::Operator { accept: false };

    fn accepts(self) -> bool {
        matches!(self, By::Operator { accept: true })
    }

    pub(crate) fn is_operator(self) -> bool {
        self != By::Search
    }
}

/// The command by which the operator accepts a device as the replacement of the stored one.
const ACCEPT: &str = "ubcache register --accept-replacement";

/// Decides which devices may be served.
pub(crate) struct Admission {
    shared: Arc<Shared>,
    inventory: Inventory,
    /// UUIDs of devices that an operator has unregistered, or that were refused when they were plugged in. An uevent of
    /// such a device does not register it again.
    released: Mutex<BTreeSet<String>>,
    /// The devices that commands under way name, by UUID, with the warnings for the answer.
    ordered: Mutex<BTreeMap<String, Vec<String>>>,
}

/// Devices that a command under way names; until this is dropped.
pub(crate) struct Ordered<'a> {
    admission: &'a Admission,
    uuids: Vec<String>,
    /// Whether labels have become free.
    pub(crate) has_freed_labels: bool,
}

impl Ordered<'_> {
    /// What the operator should know about the registration of these devices. The log and the events have it, too.
    pub(crate) fn warnings(&self) -> Vec<String> {
        let ordered = locked(&self.admission.ordered);
        self.uuids.iter().filter_map(|uuid| ordered.get(uuid)).flatten().cloned().collect()
    }
}

impl Drop for Ordered<'_> {
    fn drop(&mut self) {
        locked(&self.admission.ordered).retain(|uuid, _| !self.uuids.contains(uuid));
    }
}

/// Whether and when the operator has named a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Naming {
    Never,
    /// By an earlier command, or in the configuration.
    Before,
    /// By the command that is under way.
    Now,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Admission {
    pub(crate) fn new(shared: Arc<Shared>, inventory: Inventory) -> Admission {
        Admission { shared, inventory, released: Mutex::default(), ordered: Mutex::default() }
    }

    /// The stored devices, by their paths.
    pub(crate) fn remembered(&self) -> BTreeMap<PathBuf, Known> {
        self.shared.state().devices()
    }

    /// Marks a device as named by the operator.
    pub(crate) fn name(&self, uuid: String) {
        self.shared.named().insert(uuid);
    }

    /// Marks devices as named by the operator.
    pub(crate) fn name_all(&self, uuids: impl Iterator<Item = String>) {
        self.shared.named().extend(uuids);
    }

    /// Marks the set of a cache device as named if the device is: the operator has named its flash-only volumes, too.
    pub(crate) fn name_set(&self, device: &Probe) {
        if self.is_named(device) {
            self.name(device.key().to_owned());
        }
    }

    /// Marks devices as named by the operator, with their paths, by a command that is under way until the result is dropped.
    ///
    /// If another device had such a path, it is not expected there any more. Unless it is served or named as well, its volumes
    /// no longer own their addresses and labels.
    pub(crate) fn name_at_paths(&self, probes: &[Probe]) -> Ordered<'_> {
        let uuids: Vec<String> = probes.iter().map(|p| p.uuid.clone()).collect();
        locked(&self.ordered).extend(uuids.iter().map(|uuid| (uuid.clone(), Vec::new())));
        self.name_all(uuids.iter().cloned());
        let known = self.remembered();
        let before = probes.iter().filter_map(|probe| known.get(&probe.path));
        let mut has_freed_labels = false;
        for before in before.filter(|before| !uuids.contains(&before.uuid)) {
            let key = self.shared.state().key_of(&before.uuid);
            if !self.shared.is_served(&key) {
                self.shared.state().forget_places(&key);
                has_freed_labels = true;
            }
        }
        Ordered { admission: self, uuids, has_freed_labels }
    }

    fn naming(&self, device: &Probe) -> Naming {
        match (self.is_named(device), locked(&self.ordered).contains_key(&device.uuid)) {
            (_, true) => Naming::Now,
            (true, false) => Naming::Before,
            (false, false) => Naming::Never,
        }
    }

    /// Whether the operator has named the device.
    fn is_named(&self, device: &Probe) -> bool {
        self.shared.named().contains(&device.uuid)
    }

    /// Keeps a device from being registered because of a later uevent.
    pub(crate) fn refuse(&self, uuid: &str) {
        locked(&self.released).insert(uuid.to_owned());
    }

    /// Removes the mark of a refused or released device, because it has been registered.
    pub(crate) fn welcome(&self, uuid: &str) {
        locked(&self.released).remove(uuid);
    }

    /// Whether the operator has unregistered a device, or the daemon refused it when it was plugged in.
    pub(crate) fn is_released(&self, uuid: &str) -> bool {
        locked(&self.released).contains(uuid)
    }

    /// Gives labels that have no owner any more to volumes that are served.
    ///
    /// # Errors
    /// If that panics.
    pub(crate) async fn claim_freed_labels(&self) -> Result<(), Failure> {
        self.shared.blocking(Shared::claim_labels).await
    }

    /// Releases and forgets the device at a path, which the operator unregisters: its volume, or the volumes of its set, own no
    /// export address and no label any more. The path stays known by the key of the device and by `label`. Returns the key.
    ///
    /// A device that is absent has no probe; its UUID is stored. If the device is a copy of one that is served,
    /// only its path is forgotten.
    pub(crate) fn release(&self, path: &Path, probe: Option<&Probe>, label: &str) -> String {
        let stored = self.remembered().get(path).map(|known| known.uuid.clone());
        let uuid = probe.map(|probe| probe.uuid.clone()).or(stored).unwrap_or_default();
        let key = probe.map_or_else(|| self.shared.state().key_of(&uuid), |probe| probe.key().to_owned());
        let is_copy = self.shared.is_served(&key) || probe.is_some_and(|p| self.served_twin(p).is_some());
        if is_copy {
            self.shared.state().remove_path(path);
            return key;
        }
        self.shared.named().retain(|named| *named != uuid && *named != key);
        if !uuid.is_empty() {
            self.refuse(&uuid);
            self.shared.state().forget_places(&key);
        }
        self.shared.state().remove_device(path, &key, label);
        key
    }

    /// Stores a device with its path.
    pub(crate) fn remember(&self, probe: &Probe) {
        let named = self.is_named(probe);
        self.shared.state().add_device(&probe.path, &probe.uuid, named);
    }

    /// Tests whether the state can be written, before a command acts.
    pub(crate) async fn can_remember(&self) -> Result<(), Failure> {
        self.shared.can_store().await
    }

    /// Tests whether the state can be written, unless all these devices are stored as the operator names them: a command
    /// that was not stored can be undone then.
    pub(crate) async fn can_remember_all(&self, probes: &[Probe]) -> Result<(), Failure> {
        let known = self.remembered();
        let is_known = |p: &Probe| known.get(&p.path).is_some_and(|k| k.uuid == p.uuid && k.named);
        if probes.iter().all(is_known) {
            return Ok(());
        }
        let devices: Vec<(&Path, &str)> = probes.iter().map(|p| (&*p.path, &*p.uuid)).collect();
        let is_stored = self.shared.state().has_stored(&devices);
        if is_stored { Ok(()) } else { self.can_remember().await }
    }

    /// The difference between this device and the one that is stored for its UUID; `None` if they match or none is stored.
    pub(crate) fn difference(&self, probe: &Probe) -> Option<String> {
        let mark = self.shared.state().mark(probe.key())?;
        if let Likeness::Other(why) = mark.identity.compare(&probe.identity) {
            return Some(format!("is not the device that is remembered for {}: {why}", what(probe)));
        }
        (probe.sequence < mark.sequence).then(|| {
            format!(
                "is older than the last known state of {}: sequence number of the superblock: expected {} or \
                 later, found {}",
                what(probe),
                mark.sequence,
                probe.sequence
            )
        })
    }

    /// Whether the hardware or file of the device is the stored one.
    pub(crate) fn is_surely(&self, probe: &Probe) -> bool {
        let mark = self.shared.state().mark(probe.key());
        mark.is_some_and(|m| m.identity.compare(&probe.identity) == Likeness::Same)
    }

    /// Whether the configuration permits scans for devices that no operator has named.
    pub(crate) fn searches(&self) -> bool {
        let config = self.shared.config();
        config.scan || config.scan_on_events
    }

    /// The path of another device with the same UUID that is served.
    fn served_twin(&self, probe: &Probe) -> Option<PathBuf> {
        let devices = self.inventory.devices.all();
        let twin = devices.into_iter().find(|(path, d)| {
            *path != probe.path
                && matches!(d.state, DeviceState::Served | DeviceState::Replugged(..))
                && d.probe.as_ref().is_some_and(|s| {
                    s.key() == probe.key()
                        && !s.is_unplugged()
                        && self.inventory.workers.of_device(s).is_some()
                })
        });
        twin.map(|(path, _)| path)
    }

    /// Checks that a device may be served.
    ///
    /// # Errors
    /// If its UUID is served already, or the device is not the stored one; the message has the difference and what to do.
    pub(crate) fn admit(&self, probe: &Probe) -> Result<(), Failure> {
        let path = probe.path.display();
        if let Some(twin) = self.served_twin(probe) {
            return Err(Failure::Failed(format!(
                "{path}: {} is served already, from {}; one may be a copy of the other; to serve this one, \
                 unregister that one first",
                what(probe),
                twin.display()
            )));
        }
        match self.difference(probe) {
            None => Ok(()),
            Some(why) => Err(Failure::Failed(format!(
                "{path}: {why}; to accept it as the replacement: {ACCEPT} {path}; see the page move of the guide"
            ))),
        }
    }

    /// Refuses devices that may not be served. If the operator accepts them, returns the differences and replaces the
    /// stored identity.
    pub(crate) async fn admit_all(&self, probe: &[Probe], by: By) -> Result<Vec<String>, Failure> {
        for (n, one) in probe.iter().enumerate() {
            if let Some(other) = probe.iter().skip(n + 1).find(|other| other.key() == one.key()) {
                return Err(Failure::Failed(copies(one, &[one, other])));
            }
        }
        let mut accepted = Vec::new();
        for one in probe {
            let refused = self.admit(one);
            match self.difference(one).filter(|_| by.accepts() && self.served_twin(one).is_none()) {
                Some(why) => accepted.push((one, why)),
                None => refused?,
            }
        }
        match accepted.is_empty() {
            true => self.can_remember_all(probe).await?,
            // The next start would refuse a device whose identity is not stored.
            false => self.can_remember().await?,
        }
        for (one, _) in &accepted {
            let mark = Mark {
                identity: one.identity.clone(),
                sequence: one.sequence,
                path: Some(one.path.clone()),
                label: String::new(),
            };
            self.shared.state().set_mark(one.key(), mark);
        }
        Ok(accepted
            .into_iter()
            .map(|(one, why)| format!("{}: accepted: {why}", one.path.display()))
            .collect())
    }

    /// Splits devices that were found at the same time into those that may be served, and the refused ones with the
    /// reasons.
    ///
    /// Of several devices with one UUID, the one with the stored identity is chosen, else the one at the stored path.
    pub(crate) fn sift(
        &self,
        probe: Vec<Probe>,
        known: &BTreeMap<PathBuf, Known>,
    ) -> (Vec<Probe>, Vec<(Probe, Failure)>) {
        let (mut good, mut refused) = (Vec::new(), Vec::new());
        let mut by_key: BTreeMap<String, Vec<Probe>> = BTreeMap::new();
        for one in probe {
            by_key.entry(one.key().to_owned()).or_default().push(one);
        }
        for same in by_key.into_values() {
            let all: Vec<&Probe> = same.iter().collect();
            let only = |wanted: &dyn Fn(&Probe) -> bool| -> Option<PathBuf> {
                let mut found = same.iter().filter(|s| wanted(s));
                found.next().filter(|_| found.next().is_none()).map(|s| s.path.clone())
            };
            let chosen = only(&|_| true)
                .or_else(|| only(&|s| self.is_surely(s)))
                .or_else(|| only(&|s| known.get(&s.path).is_some_and(|k| k.uuid == s.uuid)));
            let many = copies(&same[0], &all);
            for one in same {
                match self.admit(&one) {
                    _ if chosen.as_ref() != Some(&one.path) => {
                        refused.push((one, Failure::Failed(many.clone())));
                    }
                    Ok(()) => good.push(one),
                    Err(e) => refused.push((one, e)),
                }
            }
        }
        (good, refused)
    }

    /// Stores the identity of a served device and the sequence number of its superblock.
    ///
    /// A set increases the sequence number of its cache device when it starts, so the superblock is read again.
    pub(crate) async fn record(&self, probe: &Probe) {
        let mut sequence = probe.sequence;
        if matches!(probe.role, Role::Cache { .. })
            && let Ok(now) = probe_device(&probe.path).await
            && now.uuid == probe.uuid
        {
            sequence = sequence.max(now.sequence);
        }
        let (path, label) = (Some(probe.path.clone()), String::new());
        let mut state = self.shared.state();
        let mark = match state.mark(probe.key()) {
            Some(mark) => {
                let (identity, sequence) = (mark.identity.and(&probe.identity), mark.sequence.max(sequence));
                Mark { identity, sequence, path, label }
            }
            None => Mark { identity: probe.identity.clone(), sequence, path, label },
        };
        state.set_mark(probe.key(), mark);
        state.forget_left_dirty(probe.key());
    }

    /// Stores which registered disks have dirty data in this set, whose cache device the operator unregisters.
    pub(crate) fn remember_dirty(&self, set: &SetView) {
        let known = self.remembered();
        let is_known = |uuid: &String| known.values().any(|k| k.uuid == *uuid);
        let slots = set.figures.set.iter().flat_map(|figures| &figures.dirty_by_slot).filter(|s| !s.is_copy);
        let dirty = slots.filter(|slot| slot.dirty_bytes > 0).filter_map(|slot| slot.uuid.clone());
        let disks = dirty.filter(is_known).collect();
        self.shared.state().set_left_dirty(&set.id, disks);
    }

    /// Why this device may not join a set without a command that names it; `None` if it may.
    ///
    /// The superblock names the set, but a person other than the operator may have written it. The set itself knows which
    /// devices were attached to it: it has a slot for each. A device that was served without its set loses the data that the
    /// set has of it, so it does not join while some of that data is dirty, unless the command under way names it: an earlier
    /// command did not know of the loss.
    ///
    /// # Errors
    /// If the thread of the set does not answer.
    pub(crate) async fn why_to_wait(
        &self,
        probe: &Probe,
        worker: &Worker,
    ) -> Result<Option<String>, Failure> {
        let Role::Backing { attachment, .. } = &probe.role else { return Ok(None) };
        let naming = self.naming(probe);
        let slot = match (attachment, naming) {
            (Attachment::Stale, _) | (Attachment::Clean, Naming::Never) => {
                worker.slot_of(&probe.uuid).await?
            }
            _ => None,
        };
        let lost = slot.map_or(0, |slot| slot.dirty_bytes);
        if (*attachment, naming) == (Attachment::Stale, Naming::Now) && lost > 0 {
            let (title, lost) = (worker.title(), human(lost));
            let text = format!(
                "the disk was used without {title}, so {title} drops its dirty data of the disk ({lost}): it is older"
            );
            self.warn_of(probe, &text);
        }
        Ok(why_to_wait(&worker.plan.id, *attachment, naming, slot))
    }

    fn warn_of(&self, probe: &Probe, text: &str) {
        let text = format!("{}: {text}", probe.path.display());
        message::warn(&text);
        self.shared.hub.publish(Kind::Device, None, "warning", &text);
        if let Some(warnings) = locked(&self.ordered).get_mut(&probe.uuid) {
            warnings.push(text);
        }
    }

    /// Marks a device that may not be attached as waiting for the operator.
    pub(crate) fn wait_for_operator(&self, probe: &Probe, why: String) {
        self.inventory.devices.set(probe, DeviceState::Waiting(WaitsFor::Operator, why));
    }
}

/// Why a device in this relation to a set waits for a command; `None` if it does not. `slot` is the one of the set for it.
fn why_to_wait(set: &str, attachment: Attachment, naming: Naming, slot: Option<KnownSlot>) -> Option<String> {
    match (attachment, slot) {
        (Attachment::Stale, Some(slot)) if slot.dirty_bytes > 0 && naming != Naming::Now => {
            return Some(format!(
                "was used without cache set {set}, which loses {} of dirty data of it if it is attached again; to attach it, name \
                 it in `ubcache register`",
                human(slot.dirty_bytes)
            ));
        }
        _ if naming != Naming::Never => return None,
        // The set itself refuses dirty data that it does not know.
        (Attachment::Free | Attachment::Dirty, _) | (Attachment::Clean | Attachment::Stale, Some(_)) => {
            return None;
        }
        _ => {}
    }
    let what = match attachment {
        Attachment::Made => format!("was made for cache set {set}"),
        _ => format!("says that it was attached to cache set {set}, which has no slot for it"),
    };
    Some(format!("{what}, and no operator has named it"))
}

fn what(probe: &Probe) -> String {
    match &probe.role {
        Role::Cache { set, .. } => format!("cache set {set}"),
        Role::Backing { .. } => format!("UUID {}", probe.uuid),
    }
}

fn copies(one: &Probe, all: &[&Probe]) -> String {
    let places: Vec<String> = all.iter().map(|s| s.path.display().to_string()).collect();
    let places = places.join(" and at ");
    format!("{} is at {places}; one may be a copy of the other; register the right device", what(one))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A disk that an earlier command had named was attached by the next start, and the set dropped dirty data.
    #[test]
    fn a_stale_disk_with_dirty_data_waits_for_a_command_that_names_it_now() {
        let slot = |dirty_bytes| Some(KnownSlot { dirty_bytes });
        for naming in [Naming::Never, Naming::Before] {
            let said = why_to_wait("s", Attachment::Stale, naming, slot(2 << 20)).expect("it waits");
            assert!(said.contains("loses 2.0 MiB of dirty data of it"), "{said}");
            assert!(!said.contains("no operator has named it"), "that is not the reason: {said}");
        }
        assert_eq!(why_to_wait("s", Attachment::Stale, Naming::Now, slot(2 << 20)), None);
        assert_eq!(why_to_wait("s", Attachment::Stale, Naming::Never, slot(0)), None, "nothing is lost");
        assert_eq!(why_to_wait("s", Attachment::Clean, Naming::Never, slot(9)), None, "nothing is lost");
        for attachment in [Attachment::Made, Attachment::Clean, Attachment::Stale] {
            assert!(why_to_wait("s", attachment, Naming::Never, None).is_some(), "{attachment:?}");
            assert_eq!(why_to_wait("s", attachment, Naming::Before, None), None, "{attachment:?}");
        }
        for attachment in [Attachment::Free, Attachment::Dirty] {
            assert_eq!(why_to_wait("s", attachment, Naming::Never, None), None, "{attachment:?}");
        }
    }
}
