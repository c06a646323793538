//! Tunables of what is running: read, set, taken back, and brought in line with a new configuration.
//!
//! Owns what is kept in the state directory: whatever was set, unless it was for this run only, or the superblock keeps
//! it. Must not know how a client asks.

use std::path::Path;
use std::sync::Arc;

use serde::Serialize;
use serve::snapshot::{Snapshot, TunableFigure, VolumeFigures};
use serve::{Command, Failure};

use crate::config::{Config, Key, Values};
use crate::registry::{By, Found, Registry};
use crate::remote::Remote;
use crate::worker::{Phase, Worker};

/// Whose tunables.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Of<'a> {
    Set(&'a str),
    Volume(&'a str),
}

/// What a change came to.
#[derive(Serialize)]
pub(crate) struct Changed {
    key: String,
    /// As it is now: what was out of range is cut off.
    value: String,
    /// It holds after a restart, too.
    persistent: bool,
    /// What was asked for was out of range: what the range is, and what it was limited to.
    limited: Option<String>,
}

/// The number that a text asks for, where it is one.
fn number(text: &str) -> Option<u128> {
    let shift = match text.as_bytes().last()?.to_ascii_lowercase() {
        b'k' => 10,
        b'm' => 20,
        b'g' => 30,
        b't' => 40,
        _ => 0,
    };
    let digits = if shift == 0 { text } else { &text[..text.len() - 1] };
    digits.parse::<u64>().ok().map(|n| u128::from(n) << shift)
}

/// Whether a number was asked for, and has become another one.
fn is_limited(asked: &str, now: &str) -> bool {
    number(asked.trim()).zip(number(now)).is_some_and(|(asked, now)| asked != now)
}

impl Changed {
    /// What it was limited to, if that is not what was asked for.
    pub(crate) fn limited_to(&self) -> Option<&str> {
        self.limited.as_ref().map(|_| &*self.value)
    }
}

/// One that is running.
struct Target {
    worker: Arc<Worker>,
    key: Key,
    name: String,
    tunables: Vec<TunableFigure>,
}

/// Tunables that are of the moment.
const NOT_REMEMBERED: [&str; 2] = ["writeback_rate", "label"];

pub(crate) fn key_of(worker: &Worker, volume: &VolumeFigures) -> Key {
    let slot = || format!("{}/{}", worker.plan.id, volume.slot.unwrap_or(0));
    let id = volume.backing_uuid.clone().unwrap_or_else(slot);
    Key { id, label: volume.label.clone(), set: false }
}

pub(crate) fn set_key(worker: &Worker) -> Key {
    Key { id: worker.plan.id.clone(), label: String::new(), set: true }
}

impl Target {
    fn figure(&self, key: &str) -> Result<&TunableFigure, Failure> {
        let found = self.tunables.iter().find(|t| t.key == key);
        found.ok_or_else(|| {
            let known: Vec<&str> = self.tunables.iter().map(|t| t.key).collect();
            Failure::Usage(format!("{key}: no such tunable of {}; known are {}", self.name, known.join(", ")))
        })
    }

    fn command(&self, key: &str, value: &str) -> Result<Command, Failure> {
        if self.key.set {
            let setting = format!("set.{key}={value}").parse().map_err(Failure::Usage)?;
            return Ok(Command::Set { setting });
        }
        Ok(Command::SetVolume { volume: self.name.clone(), key: key.to_owned(), value: value.to_owned() })
    }
}

impl Registry {
    async fn target(self: &Arc<Self>, of: Of<'_>) -> Result<Target, Failure> {
        match of {
            Of::Set(name) => {
                let worker = self.set(name).await?;
                let set = self.figures_of(&worker).await?.set;
                let set = set.ok_or_else(|| Failure::Failed(format!("{name}: there is no cache set")))?;
                let (key, name) = (set_key(&worker), worker.plan.id.clone());
                Ok(Target { worker, key, name, tunables: set.tunables })
            }
            Of::Volume(name) => {
                let Found { worker, name, .. } = self.find(name).await?;
                let figures = self.figures_of(&worker).await?;
                let volume = figures.volumes.into_iter().find(|v| v.name == name);
                let volume = volume.ok_or_else(|| Failure::Failed(format!("there is no volume {name}")))?;
                let key = key_of(&worker, &volume);
                Ok(Target { worker, key, name, tunables: volume.tunables })
            }
        }
    }

    /// All tunables.
    pub(crate) async fn tunables(self: &Arc<Self>, of: Of<'_>) -> Result<Vec<TunableFigure>, Failure> {
        Ok(self.target(of).await?.tunables)
    }

    /// One tunable.
    pub(crate) async fn tunable(self: &Arc<Self>, of: Of<'_>, key: &str) -> Result<TunableFigure, Failure> {
        self.target(of).await?.figure(key).cloned()
    }

    /// Sets one; `persistent`: it holds after a restart, too.
    pub(crate) async fn set_tunable(
        self: &Arc<Self>,
        of: Of<'_>,
        key: &str,
        value: &str,
        persistent: bool,
    ) -> Result<Changed, Failure> {
        if key == "label" && !value.is_empty() {
            label_is_fit(value)?;
        }
        let target = self.target(of).await?;
        let (in_superblock, range) = target.figure(key).map(|f| (f.in_superblock, f.range.clone()))?;
        let command = target.command(key, value)?;
        self.command(&target.worker, command).await?;
        let now = self.tunable(of_same(&target), key).await?.value;
        // What the configuration says would come back over what the superblock keeps.
        let configured = self.shared.config().tunables(&target.key).contains_key(key);
        let remembered = persistent && !NOT_REMEMBERED.contains(&key) && (!in_superblock || configured);
        if remembered {
            self.shared.state().set_tunable(&target.key.id, key, Some(&now))?;
        }
        if key == "label" {
            self.shared.state().relabel(&target.key.id, &now)?;
        }
        let text = format!("{}: {key} is {now} now", target.name);
        self.shared.hub.publish("configuration", Some(&target.worker.plan.id), "", &text);
        let limited = (!NOT_REMEMBERED.contains(&key) && is_limited(value, &now))
            .then(|| format!("{key}={value}: {range}: limited to {now}"));
        Ok(Changed { key: key.to_owned(), value: now, persistent: remembered || in_superblock, limited })
    }

    /// Takes back what was set at run time: the configuration or the default holds again.
    pub(crate) async fn reset_tunable(self: &Arc<Self>, of: Of<'_>, key: &str) -> Result<Changed, Failure> {
        let target = self.target(of).await?;
        let figure = target.figure(key)?;
        let configured = self.shared.config().tunables(&target.key).get(key).cloned();
        let value = match configured {
            Some(value) => value,
            None if figure.in_superblock => {
                return Err(Failure::Usage(format!(
                    "{key} is kept in the superblock, and the configuration says nothing of it: set it to what it is to be"
                )));
            }
            None => figure.default.clone(),
        };
        let command = target.command(key, &value)?;
        self.shared.state().set_tunable(&target.key.id, key, None)?;
        self.command(&target.worker, command).await?;
        let now = self.tunable(of_same(&target), key).await?.value;
        Ok(Changed { key: key.to_owned(), value: now, persistent: true, limited: None })
    }

    /// Reads the configuration again, and changes what is different in it.
    ///
    /// # Errors
    /// If it cannot be used; everything stays as it is then.
    pub(crate) async fn reload(self: &Arc<Self>, path: &Path) -> Result<Vec<String>, Failure> {
        let _until_it_is_done = crate::notify::Reloading::begin();
        // Read with it held: of two reloads the one that read later counts. And what comes up meanwhile comes up by one
        // configuration, not by two.
        let alone = self.nothing_changes().await;
        let (read, path) = (path.to_owned(), path.display().to_string());
        let read = tokio::task::spawn_blocking(move || crate::load::read(&read)).await;
        let crate::load::Read { config: next, remote, nbd } =
            read.map_err(|e| Failure::Failed(format!("{path}: cannot be read: {e}")))??;
        if let Some(why) = self.conflicts(&next).await {
            return Err(Failure::Failed(format!("{path}: {why}")));
        }
        let old = std::mem::replace(&mut *self.shared.config(), next.clone());
        let mut said = Remote::differences(self.shared.remote.borrow().as_deref(), remote.as_deref());
        if !said.is_empty() {
            self.shared.remote.send_replace(remote);
        }
        // The files may have changed under the same names.
        self.shared.set_nbd_tls(nbd);
        said.extend(of_the_daemon(&old, &next));
        for worker in self.all_workers() {
            if worker.phase() == Phase::Serving {
                match self.figures_of(&worker).await {
                    Ok(figures) => self.bring_in_line(&worker, figures, &old, &next, &mut said).await,
                    Err(e) => said.push(e.message().unwrap_or_default().to_owned()),
                }
            }
        }
        drop(alone);
        let added: Vec<_> = next.devices.iter().filter(|d| !old.devices.contains(d)).cloned().collect();
        for device in added {
            said.push(match self.register(vec![device.clone()], By::QUIET).await {
                Ok(_) => format!("{}: registered", device.display()),
                Err(e) => e.message().unwrap_or_default().to_owned(),
            });
        }
        for device in old.devices.iter().filter(|d| !next.devices.contains(d)) {
            said.push(format!("{}: stays registered: unregister it to stop it", device.display()));
        }
        said.extend(self.unmatched(&next).await);
        for line in &said {
            self.shared.hub.publish("configuration", None, "", line);
            serve::message::note(format!("configuration: {line}"));
        }
        Ok(said)
    }

    async fn bring_in_line(
        &self,
        worker: &Arc<Worker>,
        figures: Snapshot,
        old: &Config,
        next: &Config,
        said: &mut Vec<String>,
    ) {
        let mut targets = Vec::new();
        if let Some(set) = figures.set {
            let (key, name) = (set_key(worker), worker.plan.id.clone());
            targets.push(Target { worker: worker.clone(), key, name, tunables: set.tunables });
        }
        for volume in figures.volumes {
            let key = key_of(worker, &volume);
            if old.exports(&key, &volume.name) != next.exports(&key, &volume.name) {
                said.push(format!("{}: other exports take effect when it is served again", volume.name));
            }
            let (worker, name) = (worker.clone(), volume.name);
            targets.push(Target { worker, key, name, tunables: volume.tunables });
        }
        for target in targets {
            let before = self.shared.tunables_by(old, &target.key);
            let after = self.shared.tunables_by(next, &target.key);
            for (key, value) in differences(&before, &after, &target.tunables) {
                let was = target.figure(&key).map(|f| f.value.clone()).unwrap_or_default();
                let result = match target.command(&key, &value) {
                    Ok(command) => self.command(worker, command).await.map(drop),
                    Err(e) => Err(e),
                };
                said.push(match result {
                    Ok(()) => format!("{}: {key}: {was} → {value}", target.name),
                    Err(e) => format!("{}: {key}: {}", target.name, e.message().unwrap_or_default()),
                });
            }
        }
    }
}

/// What has changed in the settings of the daemon itself, and when that counts.
fn of_the_daemon(old: &Config, next: &Config) -> Vec<String> {
    let mut said = Vec::new();
    for (what, same) in [
        ("socket", old.socket == next.socket),
        ("state_dir", old.state_dir == next.state_dir),
        ("group", old.group == next.group),
        ("scan", old.scan == next.scan),
        ("scan_on_events", old.scan_on_events == next.scan_on_events),
    ] {
        if !same {
            said.push(format!("{what}: takes effect at the next start"));
        }
    }
    if old.nbd != next.nbd {
        said.push("nbd_*: takes effect for exports that are started from now on".into());
    }
    if old.busy_poll != next.busy_poll {
        said.push("busy_poll: takes effect for sets that are started from now on".into());
    }
    if (old.drain_on_stop, old.drain_deadline_s) != (next.drain_on_stop, next.drain_deadline_s) {
        said.push(format!(
            "drain_on_stop: {}, with {} seconds at most",
            next.drain_on_stop, next.drain_deadline_s
        ));
    }
    said
}

/// Refuses a label that could not be used as a name.
pub(crate) fn label_is_fit(label: &str) -> Result<(), Failure> {
    if serve::plain::is_word(label) {
        return Ok(());
    }
    Err(Failure::Usage(format!(
        "label: expected a word that is neither a path nor a volume's name, without control characters or quotes, \
         found {label:?}"
    )))
}

fn of_same(target: &Target) -> Of<'_> {
    if target.key.set { Of::Set(&target.name) } else { Of::Volume(&target.name) }
}

/// What is to be set: what is other than before, and the default of what is said no more.
fn differences(before: &Values, after: &Values, tunables: &[TunableFigure]) -> Vec<(String, String)> {
    let mut changes: Vec<(String, String)> = Vec::new();
    for (key, value) in after {
        if before.get(key) != Some(value) {
            changes.push((key.clone(), value.clone()));
        }
    }
    for key in before.keys().filter(|k| !after.contains_key(*k)) {
        // What the superblock keeps has no default that would be better than what it is.
        if let Some(figure) = tunables.iter().find(|t| t.key == key && !t.in_superblock) {
            changes.push((key.clone(), figure.default.clone()));
        }
    }
    changes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_that_became_another_one_was_limited() {
        for (asked, now, expected) in [
            ("101", "40", true),
            ("40", "40", false),
            (" +40", "40", false),
            ("4M", "4194304", false),
            ("4m", "4194304", false),
            ("1T", "4194304", true),
            ("writeback", "writeback", false),
            ("1", "writeback", false),
            ("é", "1", false),
            ("", "1", false),
        ] {
            assert_eq!(is_limited(asked, now), expected, "{asked} and {now}");
        }
    }
}
