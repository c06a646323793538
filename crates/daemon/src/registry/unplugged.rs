//! Devices that go away while they are served, and come back.
//!
//! Owns what is said of them, and the change from the one that has gone to the one that came. Of a volume whose backing
//! device has gone, what the cache has is answered, and the rest fails. Once the device is there again, by whatever name, its
//! volume is made anew as soon as nobody uses it: requests of whoever does have failed, and it is not for us to say that this
//! does not matter. A device that has lost what it was asked to keep, or was the cache, has its whole set begin anew.
//!
//! Must not know how one finds out that something has changed.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::{ANSWER_WITHIN, Device, DeviceState, FIGURES_WITHIN, Registry, ask, failed};
use crate::order::Order;
use crate::probe::{Probe, Role, probe_all};
use serve::{Failure, message};

/// How often it is looked whether somebody still uses a volume.
const LOOKS_EVERY: Duration = Duration::from_secs(1);

fn waits_for_users(why: &str) -> DeviceState {
    DeviceState::Replugged(format!("is back, and served again when nobody uses it any more: {why}"))
}

impl Registry {
    /// Says of every served device that has gone what becomes of its volume.
    pub(crate) fn note_unplugged(&self) {
        let unplugged: Vec<Probe> = {
            let devices = self.devices();
            let served = devices
                .values()
                .filter(|d| matches!(d.state, DeviceState::Served | DeviceState::Replugged(_)));
            served.filter_map(|d| d.probe.clone()).filter(Probe::is_unplugged).collect()
        };
        for probe in unplugged {
            let why = match &probe.role {
                Role::Cache { set } => format!(
                    "has gone away, with the cache of set {set}: volumes with dirty data there fail until it is back"
                ),
                Role::Backing { .. } => {
                    "has gone away: what the cache does not have fails until it is back".into()
                }
            };
            self.stand(&probe, DeviceState::Unplugged(why));
        }
    }

    /// Whether any device has gone.
    pub(crate) fn has_unplugged(&self) -> bool {
        self.devices().values().any(|d| matches!(d.state, DeviceState::Unplugged(_)))
    }

    /// Whether this is a device that had gone.
    pub(crate) fn was_unplugged(&self, probe: &Probe) -> bool {
        self.unplugged_as(probe).is_some()
    }

    /// Whether it is the device that had gone, as far as anything tells that: it has the serial number, or the place. With
    /// neither it is taken only where devices are to be looked for.
    pub(crate) fn is_expected(&self, probe: &Probe) -> bool {
        self.is_surely(probe)
            || self.is_unknown(probe)
            || self.unplugged_as(probe).as_ref() == Some(&probe.path)
    }

    /// What it was called before it went.
    fn unplugged_as(&self, probe: &Probe) -> Option<PathBuf> {
        let devices = self.devices();
        let same = devices.iter().find(|(_, d)| {
            matches!(d.state, DeviceState::Unplugged(_))
                && d.probe.as_ref().is_some_and(|s| s.uuid == probe.uuid)
        });
        same.map(|(path, _)| path.clone())
    }

    /// A device that had gone is there again: it is served as soon as nobody uses what it was for. The caller lets nothing
    /// else change.
    pub(super) async fn replugged(self: &Arc<Self>, probe: Probe) -> Result<(), Failure> {
        let Some(before) = self.unplugged_as(&probe) else { return Ok(()) };
        self.devices().remove(&before);
        message::note(format!("{}: is back; it was {}", probe.path.display(), before.display()));
        let remembered = self.remember(&probe);
        if let Some(why) = self.renew(&probe).await {
            self.stand(&probe, waits_for_users(&why));
            let this = self.clone();
            tokio::spawn(async move { this.renew_later(probe).await });
        }
        remembered
    }

    /// The cache device of a set has gone: what it served waits for it, or is served alone if it was detached meanwhile.
    pub(super) async fn orphans(self: &Arc<Self>, set: &str) {
        let served: Vec<PathBuf> = {
            let devices = self.devices();
            let mine = devices.iter().filter(|(_, d)| {
                d.state == DeviceState::Served
                    && d.probe.as_ref().is_some_and(|s| match &s.role {
                        Role::Backing { set: Some(s), .. } => s == set,
                        _ => false,
                    })
            });
            mine.map(|(path, _)| path.clone()).collect()
        };
        for (path, probed) in probe_all(served).await {
            let result = match &probed {
                Ok(probe) => self.place_one(probe).await,
                Err(e) => failed(e.message().unwrap_or_default()),
            };
            if let Err(e) = result {
                let why = e.message().unwrap_or_default().to_owned();
                self.devices().insert(path, Device { probe: probed.ok(), state: DeviceState::Failed(why) });
            }
        }
    }

    async fn renew_later(self: &Arc<Self>, probe: Probe) {
        loop {
            tokio::time::sleep(LOOKS_EVERY).await;
            let _one = self.nothing_changes().await;
            let still = self.devices().get(&probe.path).is_some_and(|d| {
                matches!(d.state, DeviceState::Replugged(_)) && d.probe.as_ref() == Some(&probe)
            });
            if !still {
                return;
            }
            let Some(why) = self.renew(&probe).await else { return };
            // Others may be in the way now. That is shown to who asks, but said once: users come and go.
            if let Some(Device { state: state @ DeviceState::Replugged(_), .. }) =
                self.devices().get_mut(&probe.path)
            {
                *state = waits_for_users(&why);
            }
        }
    }

    /// Serves a device anew that has come back; else why that has to wait.
    async fn renew(self: &Arc<Self>, probe: &Probe) -> Option<String> {
        let in_words = |e: Failure| e.message().unwrap_or_default().to_owned();
        let Some(worker) = self.worker_of(probe) else {
            self.settled(probe, self.place_one(probe).await);
            return None;
        };
        let users = |of: Option<String>| ask(&worker, FIGURES_WITHIN, |reply| Order::Users(of, reply));
        let in_the_way =
            |answer: Result<Option<String>, Failure>| answer.unwrap_or_else(|e| Some(in_words(e)));
        let mut refused = None;
        if matches!(probe.role, Role::Backing { .. }) && worker.plan.alone.is_none() {
            let volume = self.volume_of(&probe.uuid).await;
            let mut stopped = Ok(());
            if let Some((_, name)) = volume {
                if let Some(why) = in_the_way(users(Some(name.clone())).await) {
                    return Some(why);
                }
                stopped = ask(&worker, ANSWER_WITHIN, |reply| Order::StopVolume(name, reply)).await;
            }
            let placed = match stopped {
                Ok(()) => self.place_one(probe).await,
                Err(e) => Err(e),
            };
            let Err(e) = placed else { return None };
            refused = Some(e);
        }
        if let Some(why) = in_the_way(users(None).await) {
            return Some(why);
        }
        // What it was asked to keep may be lost, as by a power cut: only a start of the set makes that good.
        if let Some(e) = refused {
            message::warn(format!("{}: its set begins anew: {}", probe.path.display(), in_words(e)));
        }
        self.begin_anew(&worker.plan.id, probe).await.err().map(in_words)
    }

    fn settled(&self, probe: &Probe, result: Result<(), Failure>) {
        if let Err(e) = result {
            self.stand(probe, DeviceState::Failed(e.message().unwrap_or_default().to_owned()));
        }
    }

    /// Stops a thread, whatever it says to that, and serves its devices anew, with this one among them.
    async fn begin_anew(self: &Arc<Self>, id: &str, back: &Probe) -> Result<(), Failure> {
        let stopped = self.stop_worker(id).await;
        if self.serving(id).is_some() {
            return stopped;
        }
        let mut paths: Vec<PathBuf> = {
            let devices = self.devices();
            let mine = devices.iter().filter(|(_, d)| {
                let of_set = d.probe.as_ref().is_some_and(|s| match &s.role {
                    Role::Cache { set } => set == id,
                    Role::Backing { set, .. } => s.uuid == id || set.as_deref() == Some(id),
                });
                of_set
                    && matches!(
                        d.state,
                        DeviceState::Served | DeviceState::Waiting(_) | DeviceState::Replugged(_)
                    )
            });
            mine.map(|(path, _)| path.clone()).collect()
        };
        paths.retain(|path| *path != back.path);
        paths.push(back.path.clone());
        let mut probe = Vec::new();
        for (path, probed) in probe_all(paths).await {
            match probed {
                Ok(probed) => probe.push(probed),
                Err(e) => {
                    let why = e.message().unwrap_or_default().to_owned();
                    if let Some(device) = self.devices().get_mut(&path) {
                        device.state = DeviceState::Failed(why);
                    }
                }
            }
        }
        for (probe, result) in self.place(probe).await {
            self.settled(&probe, result);
        }
        Ok(())
    }
}
