//! Replug: devices that were unplugged while they were served, and are plugged in again.
//!
//! Owns the change from the unplugged device to the new one. While the backing device of a volume is unplugged, requests
//! that the cache can answer succeed, and all other requests fail. When the device is plugged in again, under any name, its
//! volume is started again as soon as it is not in use: requests of its users have failed, and the users have to notice
//! that. After a replug of a cache device, or of a device that may have lost acknowledged writes, the whole set is started
//! again.
//!
//! Must not know how changes are detected.

use std::sync::Arc;
use std::time::Duration;

use serve::{Failure, message};

use super::admission::Admission;
use super::changes::Scope;
use super::devices::DeviceState;
use super::inventory::Inventory;
use super::placement::Placement;
use crate::order::InUse;
use crate::probe::{Probe, Role, probe_all};

/// Time between two checks whether a volume is still in use.
const LOOKS_EVERY: Duration = Duration::from_secs(1);

/// Serves devices that are plugged in again.
pub(crate) struct Replug {
    inventory: Inventory,
    admission: Arc<Admission>,
    placement: Arc<Placement>,
}

fn waits_for_users(why: InUse) -> DeviceState {
    let text =
        format!("is plugged in again, and is served as soon as its volume is not in use: {}", why.users);
    DeviceState::Replugged(text, why.command)
}

impl Replug {
    pub(crate) fn new(inventory: Inventory, admission: Arc<Admission>, placement: Arc<Placement>) -> Replug {
        Replug { inventory, admission, placement }
    }

    /// Serves a device that was unplugged and is plugged in again, as soon as its volume is not in use.
    ///
    /// The caller has claimed the device and its set.
    pub(crate) async fn replugged(self: &Arc<Self>, probe: Probe) -> Result<(), Failure> {
        let Some(before) = self.inventory.devices.unplugged_as(&probe) else { return Ok(()) };
        self.inventory.devices.remove(&before);
        message::note(format!("{}: is plugged in again; it was {}", probe.path.display(), before.display()));
        self.admission.remember(&probe);
        if let Some(why) = self.renew(&probe).await {
            self.inventory.devices.set(&probe, waits_for_users(why));
            let this = self.clone();
            tokio::spawn(async move { this.renew_later(probe).await });
        }
        Ok(())
    }

    /// What the start of such a device may change: its whole set.
    pub(crate) fn scope(&self, probe: &Probe) -> Scope {
        let set = match &probe.role {
            Role::Cache { set, .. } => Some(set),
            Role::Backing { set, .. } => set.as_ref(),
        };
        let served_by = self.inventory.workers.of_device(probe).map(|w| w.plan.id.clone());
        let alone = [Some(probe.key().to_owned()), set.cloned(), served_by].into_iter().flatten().collect();
        Scope { alone, ..Scope::default() }
    }

    async fn renew_later(self: &Arc<Self>, probe: Probe) {
        loop {
            tokio::time::sleep(LOOKS_EVERY).await;
            let what = format!("the start of {}, which was plugged in again", probe.path.display());
            let _claim = self.placement.changes().wait(&what, &self.scope(&probe)).await;
            let still = self.inventory.devices.get(&probe.path).is_some_and(|d| {
                matches!(d.state, DeviceState::Replugged(..)) && d.probe.as_ref() == Some(&probe)
            });
            if !still {
                return;
            }
            let Some(why) = self.renew(&probe).await else { return };
            // The users can change. The status shows the present users; the log has only the first ones.
            self.inventory.devices.change(&probe.path, |state| *state = waits_for_users(why));
        }
    }

    /// Serves a device that is plugged in again. Returns why that has to wait, if it has to.
    async fn renew(self: &Arc<Self>, probe: &Probe) -> Option<InUse> {
        let in_words = |e: Failure| e.message().unwrap_or_default().to_owned();
        let failed = |e: Failure| InUse { users: in_words(e), command: None };
        let Some(worker) = self.inventory.workers.of_device(probe) else {
            self.placement.settle(probe, self.placement.place_one(probe).await);
            return None;
        };
        let users = |of: Option<String>| worker.users(of);
        let in_the_way = |answer: Result<Option<InUse>, Failure>| answer.unwrap_or_else(|e| Some(failed(e)));
        let mut refused = None;
        if matches!(probe.role, Role::Backing { .. }) && worker.plan.alone.is_none() {
            let volume = self.inventory.workers.volume_of(&probe.uuid).await;
            let mut stopped = Ok(());
            if let Some((_, name)) = volume {
                if let Some(why) = in_the_way(users(Some(name.clone())).await) {
                    return Some(why);
                }
                stopped = worker.stop_volume(name).await;
            }
            let placed = match stopped {
                Ok(()) => self.placement.place_one(probe).await,
                Err(e) => Err(e),
            };
            let Err(e) = placed else { return None };
            refused = Some(e);
        }
        if let Some(why) = in_the_way(users(None).await) {
            return Some(why);
        }
        // The device may have lost its volatile cache, as after a power loss. Only a start of the set recovers from that.
        if let Some(e) = refused {
            message::warn(format!("{}: its set is started again: {}", probe.path.display(), in_words(e)));
        }
        self.begin_anew(&worker.plan.id, probe).await.err().map(failed)
    }

    /// Stops a thread, and serves its devices again together with the replugged device. The error of the stop is dropped if
    /// the thread has ended.
    async fn begin_anew(self: &Arc<Self>, id: &str, back: &Probe) -> Result<(), Failure> {
        let stopped = self.inventory.workers.stop(id).await;
        if self.inventory.workers.serving(id).is_some() {
            return stopped;
        }
        let mut paths = self.inventory.devices.paths(|d| {
            let of_set = d.probe.as_ref().is_some_and(|p| match &p.role {
                Role::Cache { set, .. } => set == id,
                Role::Backing { set, .. } => p.uuid == id || set.as_deref() == Some(id),
            });
            of_set
                && matches!(
                    d.state,
                    DeviceState::Served | DeviceState::Waiting(..) | DeviceState::Replugged(..)
                )
        });
        paths.retain(|path| *path != back.path);
        paths.push(back.path.clone());
        let mut probe = Vec::new();
        for (path, probed) in probe_all(paths).await {
            match probed {
                Ok(probed) => probe.push(probed),
                Err(e) => {
                    self.inventory.devices.change(&path, |state| *state = DeviceState::Failed(e.into()));
                }
            }
        }
        for (probe, result) in self.placement.place(probe).await {
            self.placement.settle(&probe, result);
        }
        Ok(())
    }
}
