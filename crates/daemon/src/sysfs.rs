//! The sysfs view: files with the layout of the kernel's sysfs, mounted at the configured directory.
//!
//! Owns the meaning of a write to such a file. A tunable that is set there is not stored, as in the kernel. A detach is
//! started, and the write does not wait for it. Requests arrive on the threads of the view; the control thread answers them
//! within a deadline. Must not know the layout of the files.

use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use engine::figures::BucketFigures;
use export_fuse::{MountBy, Tree};
use format::Uuid;
use serve::{Command, Failure, message};
use sysfs_view::{DeviceOrder, Errno, Order, Owner, SetOrder, Snapshot, SysfsView, VolumeId, Writer};
use tokio::runtime::Handle;

use crate::asked::Asked;
use crate::audit::{self, Peer};
use crate::components::{Attach, By, Found};
use crate::order::{NewVolume, Order as ThreadOrder};
use crate::registry::Registry;
use crate::settings::Of;

/// Time limit of an access to a file.
const ANSWER_WITHIN: Duration = Duration::from_secs(30);

/// Mounts the view if the configuration enables it. A failure is logged, and the daemon serves without the view.
pub(crate) fn mount(registry: &Arc<Registry>, dir: Option<&Path>) -> Option<Tree> {
    let dir = dir?;
    let owner = Control { registry: registry.clone(), runtime: Handle::current() };
    let made = dir.parent().map_or(Ok(()), std::fs::create_dir_all).map_err(Failure::of);
    let mounted = made.and_then(|()| Ok(Tree::mount(dir, SysfsView::new(Arc::new(owner)), MountBy::Auto)?));
    match mounted {
        Ok(tree) => {
            tree.notes().iter().for_each(message::note);
            message::note(format!("the sysfs view is mounted at {}", tree.dir().display()));
            Some(tree)
        }
        Err(why) => {
            message::warn(format!("{}: the sysfs view is not available: {why}", dir.display()));
            None
        }
    }
}

struct Control {
    registry: Arc<Registry>,
    runtime: Handle,
}

impl Control {
    /// Runs `work` on the control thread and waits for its result.
    fn wait<T: Send + 'static>(&self, work: impl Future<Output = T> + Send + 'static) -> Result<T, Errno> {
        let (sender, receiver) = mpsc::sync_channel(1);
        self.runtime.spawn(async move {
            let _ = sender.send(work.await);
        });
        receiver.recv_timeout(ANSWER_WITHIN).map_err(|_| Errno::ETIMEDOUT)
    }
}

impl Owner for Control {
    fn snapshot(&self) -> Result<Snapshot, Errno> {
        let registry = self.registry.clone();
        let figures = self.wait(async move { registry.inventory.workers.engine_figures().await })?;
        Ok(Snapshot { sets: figures.sets, alone: figures.alone })
    }

    fn buckets(&self, set: Uuid) -> Result<BucketFigures, Errno> {
        let registry = self.registry.clone();
        self.wait(async move {
            registry.lookup.set(&set.to_string()).await.map_err(Failure::from)?.buckets().await
        })?
        .map_err(|_: Failure| Errno::EIO)
    }

    fn obey(&self, order: Order, by: Writer) -> Result<(), Errno> {
        let registry = self.registry.clone();
        self.wait(async move { obey(&registry, order, by).await })?
    }
}

/// Logs a failure and returns the error number that the kernel would answer.
fn refused(failure: Failure, errno: Errno) -> Errno {
    let found = "the command found a problem; see the messages before";
    message::warn(format!("sysfs view: {}", failure.message().unwrap_or(found)));
    errno
}

/// Carries out the order of a write and logs it with the process that writes.
async fn obey(registry: &Arc<Registry>, order: Order, by: Writer) -> Result<(), Errno> {
    if matches!(order, Order::Nothing) {
        return Ok(());
    }
    let action = format!("{order:?}");
    let about = match &order {
        Order::Device(id, _) => Some(name_of(id)),
        Order::Set(uuid, _) => Some(uuid.to_string()),
        _ => None,
    };
    let mut on = Vec::new();
    if let Some(about) = about {
        on.extend(registry.lookup.named(&about).await);
    }
    let result = carry_out(registry, order).await;
    let in_words = |e: Errno| std::io::Error::from_raw_os_error(e.0).to_string();
    let outcome = result.map(|()| "done").map_err(in_words);
    let outcome = outcome.as_ref().map(|done| *done).map_err(String::as_str);
    let Writer { uid, gid, pid } = by;
    audit::tell(&registry.shared.hub, Peer::View { uid, gid, pid }, &action, &on, outcome);
    result
}

/// The writing process waits for the end of what it began.
fn asked() -> Asked {
    Asked::inside("a command by the sysfs view")
}

fn name_of(id: &VolumeId) -> String {
    id.backing.map_or_else(|| id.name.clone(), |uuid| uuid.to_string())
}

async fn carry_out(registry: &Arc<Registry>, order: Order) -> Result<(), Errno> {
    match order {
        Order::Register { path, quiet } => register(registry, &path, quiet).await,
        Order::ForgetPending => {
            let waiting = registry.views.devices().into_iter().filter(|d| d.state == "waiting");
            for device in waiting.collect::<Vec<_>>() {
                let path = device.path.display().to_string();
                registry
                    .registration
                    .unregister(&path, &asked())
                    .await
                    .map_err(|e| refused(e, Errno::EIO))
                    .map(drop)?;
            }
            Ok(())
        }
        Order::Nothing => Ok(()),
        Order::Device(id, what) => device(registry, &id, what).await,
        Order::Set(uuid, what) => set(registry, &uuid.to_string(), what).await,
    }
}

async fn register(registry: &Arc<Registry>, path: &str, quiet: bool) -> Result<(), Errno> {
    let path = PathBuf::from(path);
    if !path.is_absolute() {
        return Err(Errno::EINVAL);
    }
    if registry.views.devices().iter().any(|d| d.path == path && d.state != "failed") {
        return if quiet { Ok(()) } else { Err(Errno::EBUSY) };
    }
    let registered = registry
        .registration
        .register(vec![path], By::NAME, &asked())
        .await
        .map_err(|e| refused(e, Errno::EINVAL))?;
    let failed = registry.views.devices().into_iter().filter(|d| d.state == "failed");
    if failed.into_iter().any(|d| registered.paths.contains(&d.path)) { Err(Errno::EINVAL) } else { Ok(()) }
}

async fn device(registry: &Arc<Registry>, id: &VolumeId, what: DeviceOrder) -> Result<(), Errno> {
    let name = name_of(id);
    let Found { worker: thread, name: volume, named } =
        registry.lookup.find(&name).await.map_err(|e| refused(e.into(), Errno::ENOENT))?;
    let result = match what {
        DeviceOrder::Tune { key, value } => {
            let changed = registry.settings.set_as_kernel(Of::Volume(&volume), key, &value).await;
            return changed.map(|_| ()).map_err(|e| refused(e, Errno::EINVAL));
        }
        DeviceOrder::Attach(set) => {
            let wanted = Attach { cache: set.to_string(), backing: name, force: false };
            registry.registration.attach(&wanted, &asked()).await.map(drop)
        }
        DeviceOrder::Detach => {
            let order = |job| ThreadOrder::Detach(volume.clone(), false, job);
            thread.begin_job(&registry.jobs, "detach", &volume, Some(&named), order).map(|_| ())
        }
        DeviceOrder::Stop => registry.registration.stop_volume(&volume, &asked()).await.map(drop),
        // Every volume in the tree is served.
        DeviceOrder::Run => return Err(Errno::EBUSY),
        DeviceOrder::ClearStats => {
            thread.command(Command::ClearStats { volume: Some(volume.clone()) }).await.map(|_| ())
        }
        DeviceOrder::Resize(_) | DeviceOrder::Unregister => return Err(Errno::EOPNOTSUPP),
    };
    result.map_err(|e| refused(e, Errno::EINVAL))
}

async fn set(registry: &Arc<Registry>, set: &str, what: SetOrder) -> Result<(), Errno> {
    let thread = registry.lookup.set(set).await.map_err(|e| refused(e.into(), Errno::ENOENT))?;
    let result = match what {
        SetOrder::Tune { key, value } => {
            let changed = registry.settings.set_as_kernel(Of::Set(set), key, &value).await;
            changed.map(|_| ())
        }
        SetOrder::Stop => match &thread.plan.cache {
            Some(cache) => {
                registry.registration.unregister(&cache.display().to_string(), &asked()).await.map(drop)
            }
            None => return Err(Errno::ENOENT),
        },
        SetOrder::CreateVolume(size) => {
            let wanted = NewVolume { sectors: size.0, label: String::new(), dry_run: false };
            match registry.shared.can_store().await {
                Ok(()) => thread.create(wanted).await.map(|_| ()),
                Err(e) => Err(e),
            }
        }
        SetOrder::ClearStats => thread.command(Command::ClearStats { volume: None }).await.map(|_| ()),
        SetOrder::ClearDeviceStats => thread.clear_device_stats().await,
        SetOrder::Gc => thread.command(Command::Gc).await.map(|_| ()),
        SetOrder::Unregister | SetOrder::Prune(_) => return Err(Errno::EOPNOTSUPP),
    };
    result.map_err(|e| refused(e, Errno::EINVAL))
}
