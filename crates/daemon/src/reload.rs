//! Reload: applies a changed configuration while the daemon runs.
//!
//! Owns the order: the whole file is read before anything changes, and no volume starts with the old configuration
//! meanwhile. Must not know how a tunable is set, nor how a device is registered.

use std::path::Path;
use std::sync::Arc;

use serve::Failure;

use crate::asked::Asked;
use crate::components::admission::By;
use crate::components::changes::Scope;
use crate::components::exports::Exports;
use crate::components::placement::Placement;
use crate::components::registration::Registration;
use crate::components::workers::Workers;
use crate::config::Config;
use crate::hub::Kind;
use crate::load::{self, Read};
use crate::notify;
use crate::remote::Remote;
use crate::server::Access;
use crate::settings::{Given, Settings};
use crate::shared::Shared;
use crate::worker::{Phase, Worker};

/// The components that a reload changes.
pub(crate) struct Reload {
    pub(crate) shared: Arc<Shared>,
    pub(crate) workers: Arc<Workers>,
    pub(crate) placement: Arc<Placement>,
    pub(crate) registration: Arc<Registration>,
    pub(crate) exports: Arc<Exports>,
    pub(crate) settings: Arc<Settings>,
}

impl Reload {
    /// Follows the disks that another set of their group takes over.
    pub(crate) fn follow_takeovers(&self) -> impl Future<Output = ()> + use<> {
        self.placement.clone().follow_takeovers()
    }

    /// Reads the configuration again and applies the differences. Every export that is not up is tried again.
    ///
    /// # Errors
    /// If the configuration is invalid. Nothing is changed then.
    pub(crate) async fn reload(&self, path: &Path, asked: &Asked) -> Result<Vec<String>, Failure> {
        let _until_it_is_done = notify::Reloading::begin();
        let alone = self.placement.changes().claim(asked, Scope::everything()).await?;
        // The file is read while the claim is held, so of two reloads the later one applies, and a device that starts
        // meanwhile gets one configuration.
        let (read, path) = (path.to_owned(), path.display().to_string());
        let read = tokio::task::spawn_blocking(move || load::read(&read)).await;
        let Read { config: next, remote, nbd } =
            read.map_err(|e| Failure::because(format_args!("{path}: cannot be read"), e))??;
        if let Some(why) = self.exports.conflicts(&next).await {
            return Err(Failure::Failed(format!("{path}: {why}")));
        }
        Access::new(next.group.as_deref()).map_err(|e| Failure::because(&path, e))?;
        let mut said = Vec::new();
        let given = self.given(&mut said).await;
        let old = std::mem::replace(&mut *self.shared.config(), next.clone());
        // A volume whose own section has gone may be the first with its label.
        self.shared.blocking(Shared::claim_labels).await?;
        let of_tcp = Remote::differences(self.shared.remote.borrow().as_deref(), remote.as_deref());
        if !of_tcp.is_empty() {
            self.shared.remote.send_replace(remote);
        }
        said.extend(of_tcp);
        // The contents of the files may have changed although their names have not.
        self.shared.set_nbd_tls(nbd);
        said.extend(of_the_daemon(&old, &next));
        for (worker, given) in given {
            self.settings.bring_in_line(&given, &next, &mut said).await;
            match worker.export_again().await {
                Ok(again) => said.extend(again),
                Err(e) => said.push(e.message().unwrap_or_default().to_owned()),
            }
        }
        drop(alone);
        let added: Vec<_> = next.devices.iter().filter(|d| !old.devices.contains(d)).cloned().collect();
        for device in added {
            said.push(match self.registration.register(vec![device.clone()], By::NAME, asked).await {
                Ok(_) => format!("{}: registered", device.display()),
                Err(e) => e.message().unwrap_or_default().to_owned(),
            });
        }
        for device in old.devices.iter().filter(|d| !next.devices.contains(d)) {
            said.push(format!("{}: stays registered: unregister it to stop it", device.display()));
        }
        said.extend(self.exports.unmatched(&next).await);
        for line in &said {
            self.shared.hub.publish(Kind::Configuration, None, "", line);
            serve::message::note(format!("configuration: {line}"));
        }
        Ok(said)
    }

    /// What the current configuration gives to the served sets. `said` gets the failures of those that do not answer.
    async fn given(&self, said: &mut Vec<String>) -> Vec<(Arc<Worker>, Vec<Given>)> {
        let config = self.shared.config().clone();
        let mut all = Vec::new();
        for worker in self.workers.all().into_iter().filter(|w| w.phase() == Phase::Serving) {
            match worker.snapshot().await {
                Ok(figures) => {
                    let given = self.settings.given(&worker, figures, &config);
                    all.push((worker, given));
                }
                Err(e) => said.push(e.message().unwrap_or_default().to_owned()),
            }
        }
        all
    }
}

/// Messages about changed settings of the daemon itself, with the time when they take effect.
fn of_the_daemon(old: &Config, next: &Config) -> Vec<String> {
    let mut said = Vec::new();
    for (what, same) in [
        ("socket", old.socket == next.socket),
        ("state_dir", old.state_dir == next.state_dir),
        ("links", old.links == next.links),
        ("group", old.group == next.group),
        ("scan", old.scan == next.scan),
        ("scan_on_events", old.scan_on_events == next.scan_on_events),
        ("memory_limit", old.memory_limit == next.memory_limit),
    ] {
        if !same {
            said.push(format!("{what}: takes effect at the next start"));
        }
    }
    if old.nbd != next.nbd {
        said.push("nbd_*: takes effect for exports that start from now on".into());
    }
    if old.busy_poll != next.busy_poll {
        said.push("busy_poll: takes effect for sets that start from now on".into());
    }
    if old.takeover_after_s != next.takeover_after_s {
        said.push("takeover_after_s: takes effect for disks that begin to wait from now on".into());
    }
    if (old.drain_on_stop, old.drain_deadline_s) != (next.drain_on_stop, next.drain_deadline_s) {
        said.push(format!(
            "drain_on_stop: {}, with {} at most",
            next.drain_on_stop,
            format::counted(next.drain_deadline_s, "second")
        ));
    }
    said
}
