//! The commands that change which cache devices are in a group, while their volumes are served.
//!
//! Owns the order of the steps: a new device joins and gets its copies before an old one leaves. A step that changes what is registered
//! claims the sets; data is copied without a claim, so other commands do not wait for it. Must not know the client.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use format::Uuid;
use serde_json::json;
use serve::{Failure, message};

use super::admission::By;
use super::changes::Scope;
use super::inventory::Inventory;
use super::lookup::Lookup;
use super::registration::Registration;
use crate::asked::Asked;
use crate::jobs::{End, Job};
use crate::names::Named;
use crate::order::{JoinOrder, Make, MakeOrder, Others, Stay};
use crate::probe::{Role, probe_device};
use crate::worker::{Phase, Worker};

/// Interval at which the copies in a new device are looked at.
const LOOKS_EVERY: Duration = Duration::from_millis(200);

/// Changes groups.
pub(crate) struct Groups {
    inventory: Inventory,
    lookup: Arc<Lookup>,
    registration: Arc<Registration>,
}

/// A device that is to join a group, and what may be overwritten on it.
#[derive(Clone, Debug)]
pub(crate) struct Joining {
    pub(crate) device: PathBuf,
    pub(crate) wipe: bool,
    pub(crate) force: bool,
}

/// A change of a group that was not refused.
pub(crate) struct GroupChange {
    /// The command, for messages.
    pub(crate) what: String,
    /// The set that names the group.
    pub(crate) set: Arc<Worker>,
    pub(crate) joins: Option<Joining>,
    pub(crate) leaves: Option<Named>,
    pub(crate) make: Make,
}

/// A device that has joined a group.
struct Joined {
    named: Named,
    set: String,
}

fn failed<T>(text: impl Into<String>) -> Result<T, Failure> {
    Err(Failure::Failed(text.into()))
}

impl Groups {
    pub(crate) fn new(inventory: Inventory, lookup: Arc<Lookup>, registration: Arc<Registration>) -> Groups {
        Groups { inventory, lookup, registration }
    }

    /// Refuses a device that cannot leave the group of a set. Returns its name.
    pub(crate) async fn may_leave(
        &self,
        set: &Worker,
        device: &str,
        others: Others,
    ) -> Result<Named, Failure> {
        let named = self.lookup.named(device).await?;
        let Some(own) = named.set.clone() else {
            return failed(format!("{named}: expected a cache device, found none; nothing was changed"));
        };
        let Some(worker) = self.inventory.workers.serving(&own).filter(|w| w.phase() == Phase::Serving)
        else {
            return failed(format!(
                "{named}: expected a set that is served; `ubcache unregister` ends the registration of its device; nothing was \
                 changed"
            ));
        };
        let (expected, found) = (set.group(), worker.group());
        let is_plain = others == Others::Join && own == set.plan.id;
        if (found.is_none() || found != expected) && !is_plain {
            let words = |group: Option<String>| group.map_or("none".to_owned(), |group| group.clone());
            return failed(format!(
                "{named}: expected the group of {}, {}, found {}; nothing was changed",
                set.title(),
                words(expected),
                words(found)
            ));
        }
        worker.may_leave(others).await?;
        Ok(named)
    }

    /// What `make` does with a device that joins; a dry run writes nothing.
    ///
    /// # Errors
    /// If the device is refused.
    pub(crate) async fn format(
        &self,
        change: &GroupChange,
        joins: &Joining,
        (group, dry_run): (Uuid, bool),
    ) -> Result<Vec<String>, Failure> {
        let Some(like) = change.set.plan.cache.clone() else {
            return failed(format!("{}: has no cache device", change.set.title()));
        };
        let order = MakeOrder {
            cache: Some(joins.device.clone()),
            wipe: joins.wipe,
            force: joins.force,
            dry_run,
            join: Some(JoinOrder { group, like }),
            ..MakeOrder::default()
        };
        let make = change.make;
        let made = tokio::task::spawn_blocking(move || make(&order)).await;
        Ok(made.map_err(|e| Failure::because("make: internal error", e))??.lines)
    }

    /// Carries a change out. A job that is cancelled before an old device leaves takes a new one out again.
    pub(crate) async fn carry_out(&self, change: &GroupChange, job: &Arc<Job>) -> Result<End, Failure> {
        let joined = match &change.joins {
            Some(joins) => Some(self.join(change, joins).await?),
            None => None,
        };
        if let Some(joined) = &joined {
            job.says(format!("{}: is in the group; the dirty data is copied", joined.named));
            if self.copied(change, joined, job).await? == End::Cancelled {
                return self.take_back(change, joined, job).await;
            }
        }
        if let Some(leaves) = &change.leaves {
            job.says(format!("{leaves}: its volumes and copies go to the other cache devices"));
            let worker = self.worker_of(leaves)?;
            match (worker.vacate(job.clone(), Stay::IfCancelled).await?, &joined) {
                (End::Cancelled, Some(joined)) => return self.take_back(change, joined, job).await,
                (End::Cancelled, None) => return Ok(End::Cancelled),
                _ => {}
            }
            self.leave(change, leaves).await?;
        }
        let path = |named: &Named| named.device.clone();
        let added = joined.as_ref().and_then(|joined| path(&joined.named));
        job.reports(json!({"group": {"added": added, "removed": change.leaves.as_ref().and_then(path)}}));
        Ok(End::Done)
    }

    /// Claims these sets and devices for a step.
    async fn claim(
        &self,
        change: &GroupChange,
        alone: &[&str],
    ) -> Result<super::changes::Claim<'_>, Failure> {
        let asked = Asked::inside(change.what.clone());
        let scope = || Scope { alone: alone.iter().map(|id| (*id).to_owned()).collect(), ..Scope::default() };
        let (claim, ()) = self.registration.claim(&asked, || async { Ok(((), scope())) }).await?;
        Ok(claim)
    }

    /// Formats a device and serves it in the group, which it makes if there is none.
    async fn join(&self, change: &GroupChange, joins: &Joining) -> Result<Joined, Failure> {
        let set = &change.set;
        let _claim = self.claim(change, &[&set.plan.id]).await?;
        let before = set.group();
        let group: Uuid = match &before {
            Some(group) => group.parse().map_err(Failure::of)?,
            None => serve::session::new_uuid(),
        };
        self.format(change, joins, (group, false)).await?;
        let served = self.serve(change, joins, group).await;
        if served.is_err() && before.is_none() {
            self.dissolve(&group.to_string()).await;
        }
        served.map_err(|e| {
            let text = format!(
                "{e}; the device has been formatted, and is not in the group: to try again, pass --wipe"
            );
            Failure::caused(text, e)
        })
    }

    async fn serve(&self, change: &GroupChange, joins: &Joining, group: Uuid) -> Result<Joined, Failure> {
        let set = &change.set;
        if set.group().is_none() {
            set.set_group(Some(group)).await?;
            self.inventory.devices.set_group(&set.plan.id, Some(&group.to_string()));
        }
        let probe = probe_device(&joins.device).await?;
        let Role::Cache { set: joined, .. } = &probe.role else {
            return failed(format!(
                "{}: expected a cache device, found a backing device",
                probe.path.display()
            ));
        };
        let (joined, path) = (joined.clone(), probe.path.display().to_string());
        self.registration.register_claimed(vec![probe], By::NAME).await?;
        Ok(Joined { named: self.lookup.named(&path).await?, set: joined })
    }

    /// Waits until all dirty data of the group is on two devices.
    async fn copied(&self, change: &GroupChange, joined: &Joined, job: &Job) -> Result<End, Failure> {
        loop {
            if job.is_cancelled() {
                return Ok(End::Cancelled);
            }
            let stays = "; the new device stays in the group, and its copies are made when that is possible";
            let Some(worker) = self.inventory.workers.serving(&joined.set) else {
                return failed(format!("{}: is not served any more", joined.named));
            };
            let copies = worker.copies().await?;
            if let Some(why) = copies.failure {
                let next = match &change.leaves {
                    Some(leaves) => format!(
                        "{leaves} stays, too: run `ubcache group remove` with one of the two when `ubcache status` has no problems"
                    ),
                    None => "`ubcache status` shows what is missing".to_owned(),
                };
                return failed(format!("{why}{stays}; {next}"));
            }
            job.progress(copies.copied_bytes, copies.total_bytes);
            if copies.missing == 0 {
                return Ok(End::Done);
            }
            tokio::time::sleep(LOOKS_EVERY).await;
        }
    }

    /// Takes a device out again whose command was cancelled.
    async fn take_back(&self, change: &GroupChange, joined: &Joined, job: &Arc<Job>) -> Result<End, Failure> {
        job.says(format!("{}: leaves the group again", joined.named));
        let worker = self.worker_of(&joined.named)?;
        let left = match worker.vacate(job.clone(), Stay::Never).await {
            Ok(_) => self.leave(change, &joined.named).await,
            Err(e) => Err(e),
        };
        match left {
            Ok(()) => Ok(End::Cancelled),
            Err(e) => {
                let text = format!("cancelled, but {} has not left the group again: {e}", joined.named);
                Err(Failure::caused(text, e))
            }
        }
    }

    fn worker_of(&self, cache: &Named) -> Result<Arc<Worker>, Failure> {
        let worker = cache.set.as_ref().and_then(|set| self.inventory.workers.serving(set));
        worker.map_or_else(|| failed(format!("{cache}: is not served any more")), Ok)
    }

    /// Ends the membership of a set without volumes, and its registration.
    async fn leave(&self, change: &GroupChange, leaves: &Named) -> Result<(), Failure> {
        let scope = self.registration.scope_of_named(leaves);
        let alone: Vec<&str> = scope.alone.iter().map(String::as_str).collect();
        let _claim = self.claim(change, &alone).await?;
        let worker = self.worker_of(leaves)?;
        let group = worker.group();
        if !worker.leave_group().await? {
            message::warn(format!(
                "{leaves}: the superblock of its cache device cannot be written and still names the group: before another use, \
                 format the device by `ubcache make --wipe`"
            ));
        }
        self.inventory.devices.set_group(&worker.plan.id, None);
        self.registration.unregister_claimed(leaves.clone()).await?;
        if let Some(group) = group {
            self.dissolve(&group).await;
        }
        Ok(())
    }

    /// Ends a group that has one set only, and no other device that is registered. Otherwise its dirty data would count as in danger.
    async fn dissolve(&self, group: &str) {
        let is_of = |found: &Option<String>| found.as_deref() == Some(group);
        let workers = self.inventory.workers.all();
        let members: Vec<_> = workers.iter().filter(|w| is_of(&w.group()) && !w.phase().is_over()).collect();
        let [last] = members.as_slice() else { return };
        let devices = self.inventory.devices.all();
        let may_be_other =
            devices.values().any(|device| match device.probe.as_ref().map(|probe| &probe.role) {
                Some(Role::Cache { set, group, .. }) => is_of(group) && *set != last.plan.id,
                Some(Role::Backing { .. }) => false,
                // What it is cannot be read now.
                None => true,
            });
        if may_be_other {
            return;
        }
        match last.set_group(None).await {
            Ok(()) => self.inventory.devices.set_group(&last.plan.id, None),
            Err(e) => message::warn(format!("{}: stays in a group of one: {e}", last.title())),
        }
    }
}
