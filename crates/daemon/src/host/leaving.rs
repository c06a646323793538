//! The group of a set: which of its data has copies, and a set that leaves, whose volumes and copies go to the other sets.
//!
//! Owns the order: a volume goes only to a set that has a copy of all its dirty data, and one after the other, so the data of at most one
//! volume has one copy meanwhile. Must not know the command, nor whether a new set has joined for it.

use std::rc::Rc;

use engine::{CacheSet, CopyState, Volume};
use format::Uuid;
use io::Nanos;
use serve::amount::human;
use serve::{Failure, message, plain};

use super::members::{give_volumes, make_copies};
use super::{Host, shown};
use crate::jobs::{End, Job};
use crate::order::{CopyProgress, GroupOrder, Others, Progress, Stay};

/// Interval at which the copies are looked at.
const TICK: Nanos = Nanos::from_ms(100);

/// Carries out an order about the group of the set.
pub(super) async fn obey(host: &Host<'_>, order: GroupOrder) {
    match order {
        GroupOrder::SetGroup(group, reply) => reply.send(set_group(host, group).await),
        GroupOrder::Copies(reply) => reply.send(copies(host)),
        GroupOrder::MayLeave(others, reply) => reply.send(may_leave(host, others)),
        GroupOrder::Vacate(job, stay, reply) => reply.send(vacate(host, &job, stay).await),
        GroupOrder::LeaveGroup(reply) => reply.send(leave_group(host).await),
    }
}

async fn set_group(host: &Host<'_>, group: Option<Uuid>) -> Result<(), Failure> {
    Ok(host.session.needs_set()?.set_group(group).await?)
}

/// Refuses a set that cannot leave its group without the loss of data or of a volume.
fn may_leave(host: &Host<'_>, others: Others) -> Result<(), Failure> {
    let set = host.session.needs_set()?;
    let status = set.status();
    let cache = plain::named(&status.label, &status.device);
    let refuse = |why: String| Err(Failure::Failed(format!("{cache}: {why}; nothing was changed")));
    let (mut attached, mut dirty) = (Vec::new(), 0);
    for volume in host.session.volumes() {
        let (name, bytes) = (shown(&volume), volume.dirty_sectors().bytes());
        let typed = plain::typed(&volume.tunables().label, &volume.name()).to_owned();
        if volume.is_flash_only() {
            return refuse(format!(
                "expected volumes with a backing device, found {name}, which is flash-only: {} of its data are on this device \
                 alone; copy them, then run `ubcache volume delete {typed}`",
                human(bytes)
            ));
        }
        if volume.inode().is_none() {
            return refuse(format!(
                "expected volumes of the set, found {name}, which was detached while it was in use; unmount or close it, then run \
                 `ubcache stop {typed}`"
            ));
        }
        attached.push(typed);
        dirty += bytes;
    }
    let mut left = set.dirty_without_volume();
    left.extend(set.lone_copies(&host.members.others(set.uuid())));
    if let Some((device, _)) = left.first() {
        let bytes = left.iter().map(|(_, sectors)| sectors.bytes()).sum::<u64>();
        return refuse(format!(
            "expected no dirty data of backing devices that are not registered, found {}; register {}, then run this command again",
            human(bytes),
            plain::label(device)
        ));
    }
    let Some(first) = attached.first() else { return Ok(()) };
    let names = attached.join(", ");
    if let Some(why) = status.failed {
        return refuse(format!(
            "the set is disabled ({why}), and {} of dirty data of {names} are on it alone; see the page dead-ssd-dirty of the guide",
            human(dirty)
        ));
    }
    if others == Others::AreNeeded && host.members.others(set.uuid()).is_empty() {
        return refuse(format!(
            "expected another cache device of the group that works, found none: {} of dirty data of {names} are on this device \
             alone; run `ubcache group add {} NEW-DEVICE`, or `ubcache detach {first}`, which writes the data back first",
            human(dirty),
            plain::typed(&status.label, &set.uuid().to_string())
        ));
    }
    Ok(())
}

/// How much of the dirty data of the group is in two of its sets.
fn copies(host: &Host<'_>) -> Result<CopyProgress, Failure> {
    let set = host.session.needs_set()?;
    let mut progress = progress_without(host, set, None);
    progress.failure = host.members.copy_failure();
    if progress.missing > 0 && !host.members.are_several() {
        progress.failure = Some("no other cache device of the group is served".to_owned());
    }
    Ok(progress)
}

/// As [`copies`], where data in the set that leaves does not count, and one remaining set is enough if there are not two.
fn progress_without(host: &Host<'_>, own: &CacheSet, leaving: Option<Uuid>) -> CopyProgress {
    let sets = host.members.beginning_with(own);
    let is_enough = leaving.is_some() && host.members.others(own.uuid()).len() == 1;
    let mut all = CopyProgress::default();
    for (set, volume) in sets.iter().flat_map(|set| set.volumes().into_iter().map(move |v| (set, v))) {
        if volume.is_flash_only() {
            continue;
        }
        let dirty = volume.dirty_sectors().bytes();
        let is_primary_left = leaving == Some(set.uuid());
        let in_second = |second: Uuid| {
            let slot = |set: &CacheSet| {
                set.slot_of(volume.backing_uuid()?).map(|slot| set.dirty_sectors(slot).bytes())
            };
            sets.iter().find(|set| set.uuid() == second).and_then(slot).unwrap_or(0).min(dirty)
        };
        let (copied, is_complete) = match volume.copy_state() {
            CopyState::Complete { set } if leaving != Some(set) => (dirty, true),
            CopyState::Making { set, .. } if leaving != Some(set) => (in_second(set), false),
            _ => (0, false),
        };
        let (copied, is_complete) = match (is_primary_left, is_enough) {
            (true, false) => (0, false),
            (false, true) => (dirty, true),
            _ => (copied, is_complete),
        };
        all.total_bytes += dirty;
        all.copied_bytes += copied;
        all.missing += usize::from(!is_complete);
    }
    all
}

/// Gives all volumes and copies of the set of this host to the other sets of the group. The set stays in the group if that is cancelled
/// or fails; volumes that have moved stay where they are.
async fn vacate(host: &Host<'_>, job: &Job, stay: Stay) -> Result<End, Failure> {
    let set = host.session.needs_set()?;
    may_leave(host, Others::AreNeeded)?;
    host.members.try_again();
    let moved = Leaving { host, set, job, stay }.move_all().await;
    if !matches!(moved, Ok(End::Done)) {
        if let Some(member) = &host.member {
            member.stay(set);
        }
        make_copies(host);
    }
    moved
}

/// Ends the membership of the set, which has no volumes any more. Returns false if its cache device has failed, and cannot record that.
async fn leave_group(host: &Host<'_>) -> Result<bool, Failure> {
    let set = host.session.needs_set()?;
    may_leave(host, Others::AreNeeded)?;
    if set.status().failed.is_some() {
        return Ok(false);
    }
    if let Some(member) = &host.member {
        member.leave();
    }
    set.leave_group(&host.members.others(set.uuid())).await?;
    Ok(true)
}

/// A set that leaves its group.
struct Leaving<'a> {
    host: &'a Host<'a>,
    set: &'a CacheSet,
    job: &'a Job,
    stay: Stay,
}

impl Leaving<'_> {
    async fn move_all(&self) -> Result<End, Failure> {
        let Leaving { host, set, .. } = self;
        // Until it leaves the list of members, its volumes get the copies that they lack.
        make_copies(host);
        let lacks = |volume: &Rc<Volume>| !matches!(volume.copy_state(), CopyState::Complete { .. });
        if let Some(end) = self.until(|| !set.volumes().iter().any(lacks)).await? {
            return Ok(end);
        }
        if let Some(member) = &host.member {
            member.leave();
        }
        while let Some(volume) = self.next() {
            self.say_one_copy(&volume);
            if volume.set_uuid() == Some(set.uuid()) {
                set.hand_over(&volume).await?;
                give_volumes(host, set.uuid());
            } else {
                set.give_up_copy(&volume).await?;
            }
            make_copies(host);
            let is_moved = || {
                let is_alone = host.members.others(set.uuid()).len() < 2;
                is_alone || !lacks(&volume) || volume.inode().is_none()
            };
            if let Some(end) = self.until(is_moved).await? {
                return Ok(end);
            }
        }
        Ok(End::Done)
    }

    /// The next volume with data in the set: one of the set itself, or one that has its copy there.
    fn next(&self) -> Option<Rc<Volume>> {
        let own = self.set.uuid();
        let has_copy_here = |volume: &Rc<Volume>| match volume.copy_state() {
            CopyState::Complete { set } | CopyState::Making { set, .. } => set == own,
            CopyState::None => false,
        };
        let others = self.host.members.others(own);
        let copies = others.iter().flat_map(CacheSet::volumes).filter(has_copy_here);
        self.set.volumes().into_iter().chain(copies).next()
    }

    /// Says that the dirty data of a volume is about to have one copy only.
    fn say_one_copy(&self, volume: &Volume) {
        let until = match self.host.members.others(self.set.uuid()).len() {
            0 | 1 => "from now on: the group has one cache device left".to_owned(),
            _ => "until it is copied to another cache device".to_owned(),
        };
        let dirty = human(volume.dirty_sectors().bytes());
        let text = format!("{}: {dirty} of dirty data have one copy {until}", shown(volume));
        message::warn(&text);
        self.job.says(text);
    }

    /// Waits for a condition, and reports the progress. `Some`: the job was cancelled.
    async fn until(&self, condition: impl Fn() -> bool) -> Result<Option<End>, Failure> {
        let Leaving { host, set, job, stay } = self;
        while !condition() {
            if *stay == Stay::IfCancelled && job.is_cancelled() {
                return Ok(Some(End::Cancelled));
            }
            if host.stopping.get() {
                return Err(Failure::Failed(host.ends_before(Progress::Running)));
            }
            if let Some(why) = host.members.copy_failure() {
                return Err(Failure::Failed(format!("{why}; the cache device stays in the group")));
            }
            let progress = progress_without(host, set, Some(set.uuid()));
            job.progress(progress.copied_bytes, progress.total_bytes);
            host.driver.handle().sleep(TICK).await;
        }
        Ok(None)
    }
}
