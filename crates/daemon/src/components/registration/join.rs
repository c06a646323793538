//! Whether a backing device may be attached to a set, and how it leaves the set of a lost cache device.
//!
//! Owns the refusals, which name both sets and the next command.

use serve::amount::human;
use serve::{Failure, message, plain};

use super::{Attach, Registration, failed};
use crate::asked::Asked;
use crate::components::devices::DeviceState;
use crate::components::problems::register_cache;
use crate::names::Named;
use crate::probe::{Attachment, Probe, Role, probe_device};
use crate::why::SharedFailure;

impl Registration {
    /// Refuses a device that a disabled set serves: tasks of that set have the device until its cache device is unregistered.
    pub(super) async fn refuse_of_disabled_set(&self, backing: &str, probe: &Probe) -> Result<(), Failure> {
        let Some((worker, _)) = self.inventory.workers.volume_of(&probe.uuid).await else { return Ok(()) };
        let figures = worker.snapshot().await?;
        let is_disabled = figures.set.as_ref().is_some_and(|set| set.failed.is_some());
        let (Some(cache), true) = (&worker.plan.cache, is_disabled) else { return Ok(()) };
        let (title, cache) = (worker.title(), cache.display());
        let dirty = figures.dirty_of(Some(&probe.uuid)).filter(|bytes| *bytes > 0);
        let next = match dirty {
            Some(bytes) => format!(
                "{} of its dirty data is on {cache} alone; run `ubcache unregister {cache} && ubcache register {cache}`, then \
                 `ubcache detach {backing}` and this command again; if that device does not come back, see the page \
                 dead-ssd-dirty of the guide",
                human(bytes)
            ),
            None => format!(
                "run `ubcache unregister {cache}`, then this command again; see the page dead-ssd-clean of the guide"
            ),
        };
        failed(format!(
            "{backing}: {title} is disabled, and has the device until its cache device is unregistered; {next}"
        ))
    }

    /// Checks that a device may be attached to a set. By force it leaves the set of a lost cache device before.
    pub(super) async fn free_to_join(
        &self,
        set: &str,
        probe: Probe,
        wanted: &Attach,
    ) -> Result<Probe, Failure> {
        let Attach { backing, force, .. } = wanted;
        match &probe.role {
            Role::Cache { .. } => {
                // A disk that is served alone has a thread like a set: the arguments are exchanged.
                let is_disk = self.inventory.workers.get(set).is_some_and(|w| w.plan.cache.is_none());
                let next = match is_disk {
                    true => {
                        format!("; the cache comes first: run `ubcache attach {backing} {}`", wanted.cache)
                    }
                    false => "; give a disk in its place".to_owned(),
                };
                failed(format!("{backing}: expected a backing device, found a cache device{next}"))
            }
            Role::Backing {
                set: Some(other),
                attachment: attachment @ (Attachment::Clean | Attachment::Dirty),
                ..
            } => {
                if other == set {
                    return failed(format!("{backing}: is already attached to cache set {other}"));
                }
                if *force {
                    return Ok(self.leave_set(probe).await?.0);
                }
                let is_dirty = *attachment == Attachment::Dirty;
                failed(self.is_elsewhere(backing, &probe, (other, is_dirty)).await)
            }
            Role::Backing { set: Some(other), attachment: Attachment::Made, .. }
                if other != set && !force =>
            {
                failed(self.was_made_for(wanted, other, set))
            }
            Role::Backing { .. } => Ok(probe),
        }
    }

    /// The refusal to attach a disk to another set than the one that it was made for.
    fn was_made_for(&self, wanted: &Attach, other: &str, set: &str) -> String {
        let title = |id: &str| match self.inventory.workers.serving(id) {
            Some(worker) => worker.title(),
            None => format!("set {id}"),
        };
        let Attach { cache, backing, .. } = wanted;
        let [cache, disk] = [cache, backing].map(|name| plain::in_shell(name).into_owned());
        let own = match self.inventory.workers.serving(other) {
            Some(_) => format!("ubcache register {disk}"),
            None => register_cache(self.lookup.last_path(other).as_deref()),
        };
        format!(
            "{backing}: was made for {}, expected one of {}; to serve it with its own set, run `{own}`; to attach it here, run \
             `ubcache attach --force {cache} {disk}`; see the page orphan of the guide",
            title(other),
            title(set)
        )
    }

    /// The refusal to attach a device that another set has: how much of it is dirty, on which cache device, and the next step.
    async fn is_elsewhere(&self, backing: &str, probe: &Probe, (set, is_dirty): (&str, bool)) -> String {
        let cache = self.lookup.last_path(set);
        let then = if is_dirty { ", which writes it back, then this command" } else { ", then this command" };
        let Some(worker) = self.inventory.workers.serving(set) else {
            let on =
                cache.as_ref().map_or_else(|| "its cache device".to_owned(), |p| p.display().to_string());
            let (what, page) = match is_dirty {
                true => (
                    format!("has dirty data in cache set {set}, which is not served: {on} alone has it"),
                    "the page dead-ssd-dirty of the guide",
                ),
                false => (
                    format!("is attached to cache set {set}, which is not served"),
                    "the page dead-ssd-clean of the guide",
                ),
            };
            // Only a disk that waits for its cache device is served with it.
            let disk = match self.inventory.devices.get(&probe.path).map(|device| device.state) {
                Some(DeviceState::Waiting(..)) => String::new(),
                _ => format!(" {}", plain::in_shell(&probe.path.to_string_lossy())),
            };
            return format!(
                "{backing}: {what}; run `{}{disk}`, then `ubcache detach {backing}`{then}; if the cache device of that set is \
                 lost, see {page}",
                register_cache(cache.as_deref())
            );
        };
        let place = cache.map_or_else(String::new, |path| format!(" on {}", path.display()));
        let of_set = format!("{}{place}", worker.title());
        let dirty = worker.snapshot().await.ok().and_then(|figures| figures.dirty_of(Some(&probe.uuid)));
        let what = match (is_dirty, dirty) {
            (true, Some(bytes)) => format!("has {} of dirty data in {of_set}", human(bytes)),
            (true, None) => format!("has dirty data in {of_set}"),
            (false, _) => format!("is attached to {of_set}"),
        };
        // A disk whose volume is not served cannot be detached.
        let register = match self.inventory.serves(probe).await {
            true => String::new(),
            false => format!("ubcache register {} && ", probe.path.display()),
        };
        format!(
            "{backing}: {what}; run `{register}ubcache detach {backing}`{then}; see the page move of the guide"
        )
    }

    /// Makes a backing device leave the set of a lost cache device, and serves it alone. Returns the device and the set.
    ///
    /// # Errors
    /// If the device has dirty data in the cache or is served, among others; it is not changed then.
    pub(crate) async fn leave(&self, backing: &str, asked: &Asked) -> Result<(Named, String), Failure> {
        let find = || async {
            let probe = probe_device(&self.lookup.device_path(backing).await?).await?;
            let scope = self.scope_of(std::slice::from_ref(&probe));
            Ok((probe, scope))
        };
        let (_claim, probe) = self.claim(asked, find).await?;
        self.admission.admit(&probe)?;
        self.admission.can_remember().await?;
        let (probe, set) = self.leave_set(probe).await?;
        self.admission.name(probe.uuid.clone());
        if let Err(e) = self.placement.place_one(&probe).await {
            let why = SharedFailure::from(e);
            self.inventory.devices.set(&probe, DeviceState::Failed(why.clone()));
            return Err(Failure::of(why));
        }
        self.admission.remember(&probe);
        Ok((self.lookup.named(&probe.uuid).await?, set))
    }

    /// Makes a clean backing device leave its set, whose cache device is not registered. Returns the device as it is then,
    /// and the UUID of the set.
    async fn leave_set(&self, probe: Probe) -> Result<(Probe, String), Failure> {
        let path = probe.path.display();
        let Role::Backing {
            set: Some(set),
            attachment: attachment @ (Attachment::Made | Attachment::Clean | Attachment::Dirty),
            ..
        } = &probe.role
        else {
            return failed(format!("{path}: is attached to no cache set"));
        };
        if self.inventory.devices.get(&probe.path).is_some_and(|d| d.state.has_thread()) {
            return failed(format!("{path}: is served: detach it without --force"));
        }
        if self.inventory.workers.serving(set).is_some() {
            return failed(format!(
                "{path}: cache set {set} is served: register the device, then detach it without --force"
            ));
        }
        if *attachment == Attachment::Dirty {
            return failed(format!(
                "{path}: has dirty data in cache set {set}, which only the cache device has; a detach without that device \
                 would lose it; see the page dead-ssd-dirty of the guide"
            ));
        }
        let at = probe.path.clone();
        let left = tokio::task::spawn_blocking(move || serve::session::leave_set(&at));
        left.await.map_err(|e| Failure::at(&probe.path, "cannot leave its set", e))??;
        message::note(format!(
            "{path}: has left cache set {set}: what the cache device has of it is invalid"
        ));
        Ok((probe_device(&probe.path).await?, set.clone()))
    }
}
