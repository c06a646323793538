//! The sets of a group on one thread, and volumes that go from one of them to another.
//!
//! Owns both lists. A volume belongs to the host of the set that serves it; if another set takes the volume over, the host of that set
//! gets it with its exports, which do not notice that.

use std::cell::{Cell, RefCell};
use std::path::Path;
use std::pin::pin;
use std::rc::Rc;

use engine::{CacheSet, CopyState};
use format::Uuid;
use io::sync::{Event, Mutex, select};
use io::{Handle, Nanos};
use serve::session::{OpenBacking, Simulation, open_backing};
use serve::{Failure, group};

use super::{Host, Served};
use crate::order::OwnSet;

/// Time after which copies that could not be made are made again.
const AGAIN_AFTER: Nanos = Nanos::from_secs(600);

/// The sets of a group that one thread serves.
#[derive(Default)]
pub(crate) struct Members {
    sets: RefCell<Vec<CacheSet>>,
    /// Volumes on their way, each with the set that serves it now.
    moving: RefCell<Vec<(Uuid, Served)>>,
    /// Notified when a volume may have to move.
    pub(super) moved: Event,
    /// Held while copies are made.
    copying: Mutex,
    /// Whether a task waits to make copies.
    wants_copies: Cell<bool>,
    /// Why the last attempt has not made every copy.
    copy_failure: RefCell<Option<String>>,
    /// Notified when a set joins.
    changed: Event,
    /// The number of sets whose volumes may have clients.
    exporting: Cell<usize>,
    ended: Event,
}

/// A set that is a member until this is dropped.
pub(super) struct Member {
    members: Rc<Members>,
    set: Uuid,
    is_exporting: Cell<bool>,
    /// The number of volumes of the set without a copy, when that was last looked at.
    without_copy: Cell<usize>,
}

impl Member {
    /// No more volumes and copies come to the set, because it is about to stop.
    pub(super) fn leave(&self) {
        self.members.sets.borrow_mut().retain(|set| set.uuid() != self.set);
    }

    /// The set stays, because its stop was refused.
    pub(super) fn stay(&self, set: &CacheSet) {
        self.leave();
        self.members.sets.borrow_mut().push(set.clone());
        self.members.try_again();
    }

    /// The volumes of the set have no clients any more.
    pub(super) fn exports_ended(&self) {
        if self.is_exporting.replace(false) {
            self.members.exporting.set(self.members.exporting.get() - 1);
            self.members.ended.notify_all();
        }
    }

    /// Waits until no volume of any set of the thread has clients: a set that stops ends the writes to its copies.
    pub(super) async fn all_exports_ended(&self) {
        self.members.ended.wait_until(|| self.members.exporting.get() == 0).await;
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.exports_ended();
        self.leave();
    }
}

impl Members {
    /// Adds a set.
    pub(super) fn join(self: &Rc<Self>, set: &CacheSet) -> Member {
        self.sets.borrow_mut().push(set.clone());
        self.try_again();
        self.exporting.set(self.exporting.get() + 1);
        Member {
            members: self.clone(),
            set: set.uuid(),
            is_exporting: Cell::new(true),
            without_copy: Cell::new(0),
        }
    }

    /// Makes the copies that are missing; see [`group::make_copies`].
    async fn make_copies(self: Rc<Self>, rt: Handle) {
        let _one = self.copying.lock().await;
        self.wants_copies.set(false);
        self.copy_failure.take();
        if let Err(e) = group::make_copies(|| self.sets.borrow().clone()).await {
            *self.copy_failure.borrow_mut() = Some(e.to_string());
            // The failure is reported. Each attempt copies all dirty data, so the next one waits.
            select(pin!(self.changed.changed()), rt.sleep(AGAIN_AFTER)).await;
        }
    }

    /// The next attempt to make copies does not wait any more.
    pub(super) fn try_again(&self) {
        self.copy_failure.take();
        self.changed.notify_all();
    }

    /// Why the last attempt has not made every copy; `None` if another one has begun.
    pub(super) fn copy_failure(&self) -> Option<String> {
        self.copy_failure.borrow().clone()
    }

    /// The sets that work, without this one.
    pub(super) fn others(&self, own: Uuid) -> Vec<CacheSet> {
        let sets = self.sets.borrow();
        let others = sets.iter().filter(|set| set.uuid() != own && set.status().failed.is_none());
        others.cloned().collect()
    }

    /// The sets, with this one first.
    pub(super) fn beginning_with(&self, own: &CacheSet) -> Vec<CacheSet> {
        let all = self.sets.borrow();
        let others = all.iter().filter(|set| set.uuid() != own.uuid());
        std::iter::once(own).chain(others).cloned().collect()
    }

    /// Whether there are several sets.
    pub(super) fn are_several(&self) -> bool {
        self.sets.borrow().len() > 1
    }

    /// Whether there is no set.
    pub(super) fn is_empty(&self) -> bool {
        self.sets.borrow().is_empty()
    }

    fn has(&self, set: Uuid) -> bool {
        self.sets.borrow().iter().any(|member| member.uuid() == set)
    }
}

/// Begins to copy the dirty data of the volumes of a group that has one copy only.
pub(super) fn make_copies(host: &Host<'_>) {
    if host.members.are_several() && !host.members.wants_copies.replace(true) {
        let rt = host.driver.handle();
        drop(rt.spawn(host.members.clone().make_copies(rt.clone())));
    }
}

/// Serves a backing device, too.
pub(super) async fn add(host: &Host<'_>, path: &Path, own: OwnSet) -> Result<(), Failure> {
    let set = host.session.needs_set()?;
    let OpenBacking { disk, superblock } =
        open_backing(host.driver, path, Simulation::default(), &[]).await?;
    let sets = host.members.beginning_with(set);
    let volume = match own {
        OwnSet::Here if sets.len() > 1 => group::register(sets.iter(), disk, &superblock).await?,
        OwnSet::Here => set.register(disk).await?,
        OwnSet::Missing => group::take_over(&[set], disk, superblock.set_uuid()).await?,
    };
    make_copies(host);
    let served = host.admit(volume.clone()).await;
    if served.is_err() {
        // The device is free again after this, so another attempt is possible.
        let _ = host.let_go(volume).await;
    }
    served
}

/// Gives every volume whose dirty data is in a second set to that one.
pub(super) async fn hand_over(host: &Host<'_>) -> Result<(), Failure> {
    let set = host.session.needs_set()?;
    if let Some(member) = &host.member {
        member.leave();
    }
    for volume in host.session.volumes() {
        if matches!(volume.copy_state(), CopyState::Complete { .. }) {
            set.hand_over(&volume).await?;
        }
    }
    give_volumes(host, set.uuid());
    Ok(())
}

/// Gives volumes that another set of the thread has taken over to its host, and takes those that the set of this host has taken over.
/// `has_events`: the set of this host has events, so the other hosts look, too.
pub(super) fn move_volumes(host: &Host<'_>, has_events: bool) {
    let Some(set) = &host.session.set else { return };
    if has_events && host.members.exporting.get() > 1 {
        host.members.moved.notify_all();
    }
    give_volumes(host, set.uuid());
    if take_volumes(host, set.uuid()) || has_lost_copy(host) {
        make_copies(host);
    }
}

/// Whether more volumes are without a copy than before.
fn has_lost_copy(host: &Host<'_>) -> bool {
    let Some(member) = &host.member else { return false };
    let volumes = host.session.volumes();
    let without = volumes.iter().filter(|v| !v.is_flash_only() && v.copy_state() == CopyState::None).count();
    member.without_copy.replace(without) < without
}

/// Gives volumes that another set of the thread has taken over to its host.
pub(super) fn give_volumes(host: &Host<'_>, own: Uuid) {
    let members = &host.members;
    let gone: Vec<Served> = {
        let mut served = host.served.borrow_mut();
        let is_gone =
            |one: &mut Served| one.volume.set_uuid().is_some_and(|now| now != own && members.has(now));
        served.extract_if(.., is_gone).collect()
    };
    let has_given = !gone.is_empty();
    for one in gone {
        host.session.forget(&one.volume);
        let now = one.volume.set_uuid().unwrap_or(own);
        members.moving.borrow_mut().push((now, one));
    }
    if has_given {
        members.moved.notify_all();
    }
}

/// Returns whether it took one.
fn take_volumes(host: &Host<'_>, own: Uuid) -> bool {
    let members = &host.members;
    let mut has_taken = false;
    loop {
        let next = {
            let mut moving = members.moving.borrow_mut();
            let at = moving.iter().position(|(now, _)| *now == own);
            at.map(|at| moving.remove(at).1)
        };
        let Some(one) = next else { return has_taken };
        host.session.add(one.volume.clone());
        if let Some(device) = one.volume.backing_uuid() {
            host.shared.took_over(device.to_string(), own.to_string());
        }
        host.served.borrow_mut().push(one);
        has_taken = true;
    }
}
