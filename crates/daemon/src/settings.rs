//! Tunables of running sets and volumes: read, set, reset, and updated from a new configuration.
//!
//! Owns the decision what is stored in the state directory: every value that was set, except values for this run only and
//! values that a superblock stores. Must not know how a client asks.

use std::sync::Arc;

use engine::tunables::number;
use serde::Serialize;
use serve::snapshot::{Snapshot, TunableFigure, VolumeFigures};
use serve::tunables::{Beyond, Owner, Setting, unknown};
use serve::{Command, Failure, plain};

use crate::components::{Found, Lookup};
use crate::config::{Config, Key, Values};
use crate::hub::Kind;
use crate::names::Named;
use crate::shared::Shared;
use crate::worker::Worker;

/// The owner of tunables.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Of<'a> {
    Set(&'a str),
    Volume(&'a str),
}

/// The result of a change.
#[derive(Serialize)]
pub(crate) struct Changed {
    key: String,
    /// The current value.
    value: String,
    /// Whether the value also applies after a restart.
    persistent: bool,
    /// Whether the state directory has a part of the change.
    #[serde(skip)]
    in_state: bool,
    /// The requested and the current number, if they differ: a tunable may take multiples of a number only, and 0 may stand
    /// for a default.
    limited: Option<String>,
    /// Further effects of the change, such as sections of the configuration that a new label selects.
    notes: Vec<String>,
}

/// Whether a number was requested, and has become another one.
fn is_limited(key: &str, asked: &str, now: &str) -> bool {
    number(key, asked).zip(number(key, now)).is_some_and(|(asked, now)| asked != now)
}

impl Changed {
    /// Whether the state directory has a part of the change.
    pub(crate) fn is_in_state(&self) -> bool {
        self.in_state
    }

    /// The current number, if it differs from the requested one.
    pub(crate) fn limited_to(&self) -> Option<&str> {
        self.limited.as_ref().map(|_| &*self.value)
    }
}

/// The running set or volume whose tunables are read or changed.
struct Target {
    worker: Arc<Worker>,
    key: Key,
    name: String,
    tunables: Vec<TunableFigure>,
    /// The failure that disabled the set, if it is disabled and the volume needs it.
    disabled: Option<String>,
}

/// Tunables that are never stored: their value applies to the moment, or is stored elsewhere.
const NOT_REMEMBERED: [&str; 2] = ["writeback_rate", "label"];

impl Target {
    fn figure(&self, key: &str) -> Result<&TunableFigure, Failure> {
        let found = self.tunables.iter().find(|t| t.key == key);
        found.ok_or_else(|| Failure::Usage(unknown(key, self.tunables.iter().map(|t| t.key).collect())))
    }

    /// Refuses a value that a superblock stores while the set is disabled: the other copies cannot be changed.
    fn can_store(&self, key: &str) -> Result<(), Failure> {
        let Some(why) = self.disabled.as_ref().filter(|_| key == "label" || self.is_in_superblock(key))
        else {
            return Ok(());
        };
        let title = self.worker.title();
        Err(Failure::Failed(format!(
            "{title} is disabled: {why}; {key} was not changed, because it is stored on the devices of the set; \
             `ubcache status` has the next step"
        )))
    }

    fn is_in_superblock(&self, key: &str) -> bool {
        self.tunables.iter().any(|t| t.key == key && t.in_superblock)
    }

    /// The set or volume as messages name it.
    fn shown(&self) -> String {
        if self.key.set { self.worker.title() } else { plain::named(&self.key.label, &self.name) }
    }

    fn command(&self, key: &str, value: &str, beyond: Beyond) -> Command {
        let (key, value) = (key.to_owned(), value.to_owned());
        if self.key.set {
            return Command::Set { setting: Setting { owner: Owner::Set, key, value }, beyond };
        }
        Command::SetVolume { volume: self.name.clone(), key, value, beyond }
    }

    /// Sets these values, whose ranges can depend on each other: those that are refused are tried again after the others.
    /// `said` gets the results.
    async fn change(&self, wishes: Vec<(String, String)>, said: &mut Vec<String>) {
        let mut left = wishes;
        loop {
            let (before, mut refused) = (left.len(), Vec::new());
            for (key, value) in left {
                match self.worker.command(self.command(&key, &value, Beyond::Refused)).await {
                    Ok(_) => {
                        let was = self.figure(&key).map(|f| f.value.clone()).unwrap_or_default();
                        let now = self.value_now(&key).await.unwrap_or(value);
                        // The value may have been set before the configuration named it.
                        if was != now {
                            said.push(format!("{}: {key}: {was} → {now}", self.shown()));
                        }
                    }
                    Err(e) => refused.push((key, value, e)),
                }
            }
            if refused.is_empty() || refused.len() == before {
                said.extend(refused.iter().map(|(.., e)| format!("{}: {e}; the value stays", self.shown())));
                return;
            }
            left = refused.into_iter().map(|(key, value, _)| (key, value)).collect();
        }
    }

    /// The volumes of the set whose tunable is changed; none if it is one of a volume.
    async fn volumes_now(&self) -> Vec<VolumeFigures> {
        match self.key.set {
            true => self.worker.snapshot().await.map(|figures| figures.volumes).unwrap_or_default(),
            false => Vec::new(),
        }
    }

    /// The value of a tunable now.
    async fn value_now(&self, key: &str) -> Result<String, Failure> {
        let figures = self.worker.snapshot().await?;
        let mut volumes = figures.volumes.into_iter();
        let tunables = match self.key.set {
            true => figures.set.map(|set| set.tunables),
            false => volumes.find(|v| v.name == self.name).map(|v| v.tunables),
        };
        let found = tunables.into_iter().flatten().find(|t| t.key == key);
        found.map(|t| t.value).ok_or_else(|| {
            Failure::Failed(format!(
                "{}: is no longer served; register its devices again with `ubcache register`",
                self.name
            ))
        })
    }
}

/// What a configuration gives to a running set or volume. It depends on the owners of the labels, which a new configuration
/// can change.
pub(crate) struct Given {
    target: Target,
    values: Values,
    exports: Vec<String>,
}

/// Reads and changes tunables.
pub(crate) struct Settings {
    shared: Arc<Shared>,
    lookup: Arc<Lookup>,
    /// Held while a tunable or a label is set or reset.
    changes: tokio::sync::Mutex<()>,
}

impl Settings {
    pub(crate) fn new(shared: Arc<Shared>, lookup: Arc<Lookup>) -> Settings {
        Settings { shared, lookup, changes: tokio::sync::Mutex::default() }
    }

    async fn target(&self, of: Of<'_>) -> Result<Target, Failure> {
        match of {
            Of::Set(name) => {
                let worker = self.lookup.set(name).await?;
                let set = worker.snapshot().await?.set;
                let set = set.ok_or_else(|| Failure::Failed(format!("{name}: there is no cache set")))?;
                let (key, name) = (worker.key(), worker.plan.id.clone());
                Ok(Target { worker, key, name, tunables: set.tunables, disabled: set.failed })
            }
            Of::Volume(name) => {
                let Found { worker, name, .. } = self.lookup.find(name).await?;
                let figures = worker.snapshot().await?;
                let volume = figures.volumes.into_iter().find(|v| v.name == name);
                let volume = volume.ok_or_else(|| Failure::Failed(format!("there is no volume {name}")))?;
                let key = worker.volume_key(&volume);
                let disabled = figures.set.and_then(|set| set.failed).filter(|_| volume.attached);
                Ok(Target { worker, key, name, tunables: volume.tunables, disabled })
            }
        }
    }

    /// Refuses a label that something else has.
    pub(crate) async fn label_is_free(
        &self,
        label: &str,
        is_own: impl Fn(&Named) -> bool,
    ) -> Result<(), Failure> {
        if label.is_empty() {
            return Ok(());
        }
        match self.lookup.labelled(label).await.into_iter().find(|n| !is_own(n)) {
            None => Ok(()),
            Some(other) => Err(Failure::Failed(format!(
                "label {}: belongs to {other}; a label names one device of the host: choose another one",
                plain::label(label)
            ))),
        }
    }

    /// Sets the label of a set, which its cache device stores.
    pub(crate) async fn label_set(&self, set: &str, label: &str) -> Result<(), Failure> {
        if !label.is_empty() {
            serve::label_is_fit(label)?;
        }
        let _one = self.changes.lock().await;
        let worker = self.lookup.set(set).await?;
        let named = self.lookup.named(&worker.plan.id).await?;
        if worker.plan.cache.is_some() {
            self.target(Of::Set(set)).await?.can_store("label")?;
        }
        self.label_is_free(label, |n| n.set.is_some() && n.set == named.set).await?;
        worker.label(label).await?;
        self.lookup.relabel(&named.uuid.unwrap_or_default(), label);
        self.shared.hub.label(&worker.plan.id, label);
        let text = format!("{}: label is {} now", worker.title(), plain::label(label));
        self.shared.hub.publish(Kind::Configuration, Some(&worker.plan.id), "", &text);
        Ok(())
    }

    /// All tunables.
    pub(crate) async fn tunables(&self, of: Of<'_>) -> Result<Vec<TunableFigure>, Failure> {
        Ok(self.target(of).await?.tunables)
    }

    /// One tunable of a set or volume, with its value.
    pub(crate) async fn tunable(&self, of: Of<'_>, key: &str) -> Result<TunableFigure, Failure> {
        self.target(of).await?.figure(key).cloned()
    }

    /// Sets one; `persistent`: it holds after a restart, too. A number out of range is refused.
    pub(crate) async fn set_tunable(
        &self,
        of: Of<'_>,
        key: &str,
        value: &str,
        persistent: bool,
    ) -> Result<Changed, Failure> {
        self.put(of, key, value, persistent, Beyond::Refused).await
    }

    /// Sets one as the kernel does: a number out of range is clamped, and nothing is stored.
    pub(crate) async fn set_as_kernel(&self, of: Of<'_>, key: &str, value: &str) -> Result<Changed, Failure> {
        self.put(of, key, value, false, Beyond::Clamped).await
    }

    async fn put(
        &self,
        of: Of<'_>,
        key: &str,
        value: &str,
        persistent: bool,
        beyond: Beyond,
    ) -> Result<Changed, Failure> {
        if key == "label" && !value.is_empty() {
            serve::label_is_fit(value)?;
        }
        // Of two that want the same label at the same time one has it.
        let _one = self.changes.lock().await;
        let target = self.target(of).await?;
        if key == "label" {
            self.label_is_free(value, |n| n.name.as_ref() == Some(&target.name)).await?;
        }
        let in_superblock = target.figure(key)?.in_superblock;
        target.can_store(key)?;
        // At the next start the value of the configuration would override that of the superblock.
        let configured = self.shared.configured(&self.shared.config(), &target.key).contains_key(key);
        let remembered = persistent && !NOT_REMEMBERED.contains(&key) && (!in_superblock || configured);
        // A superblock stores a label, and the state the owner of the label and of its addresses.
        let in_state = remembered || key == "label";
        if in_state {
            self.shared.can_store().await?;
        }
        let before = target.volumes_now().await;
        target.worker.command(target.command(key, value, beyond)).await?;
        let now = target.value_now(key).await?;
        let mut notes = followed(&before, &target.volumes_now().await);
        if remembered {
            self.shared.state().set_tunable(&target.key.id, key, Some(&now));
        }
        if key == "label" {
            self.lookup.relabel(&target.key.id, &now);
            if target.worker.plan.alone.is_some() {
                target.worker.labelled(&now);
                let name = if now.is_empty() { &target.name } else { &now };
                self.shared.hub.label(&target.worker.plan.id, name);
            }
            let old_key = self.shared.section_key(&self.shared.config(), &target.key);
            let (id, label) = (target.key.id.clone(), now.clone());
            let relabel = move |shared: &Shared| {
                shared.relabel(&id, &label);
                shared.links.relabel(&id, &label);
            };
            self.shared.blocking(relabel).await?;
            notes = self.follow_label(&target, old_key, &now).await;
        }
        let text = format!("{}: {key} is {now} now", target.shown());
        self.shared.hub.publish(Kind::Configuration, Some(&target.worker.plan.id), "", &text);
        let limited = (!NOT_REMEMBERED.contains(&key) && is_limited(key, value, &now))
            .then(|| format!("{key}={value}: the value is {now} now"));
        let persistent = remembered || in_superblock;
        Ok(Changed { key: key.to_owned(), value: now, persistent, in_state, limited, notes })
    }

    /// Applies the section of the configuration that the new label selects, in place of that of the old label, so that the
    /// next start changes nothing. Returns what has changed.
    async fn follow_label(&self, target: &Target, old: Key, label: &str) -> Vec<String> {
        let config = self.shared.config().clone();
        let mut new = target.key.clone();
        label.clone_into(&mut new.label);
        let new = self.shared.section_key(&config, &new);
        let mut said = Vec::new();
        if config.has_section_of_label(&old) && old.label.to_lowercase() != label.to_lowercase() {
            said.push(format!(
                "[volume.{}] of the configuration no longer applies to {}: name the section by the new label or by \
                 the UUID {}",
                plain::label(&old.label),
                target.name,
                old.id
            ));
        }
        if config.exports(&old, &target.name) != config.exports(&new, &target.name) {
            said.push(format!("{}: other exports take effect when it is served again", target.name));
        }
        let before = self.shared.tunables_by(&config, &old);
        let after = self.shared.tunables_by(&config, &new);
        target.change(differences(&before, &after, &target.tunables), &mut said).await;
        said
    }

    /// Resets a tunable that was set at run time to the value of the configuration, or to the default.
    pub(crate) async fn reset_tunable(&self, of: Of<'_>, key: &str) -> Result<Changed, Failure> {
        let _one = self.changes.lock().await;
        let target = self.target(of).await?;
        let figure = target.figure(key)?;
        let configured = self.shared.configured(&self.shared.config(), &target.key).get(key).cloned();
        let value = match configured {
            Some(value) => value,
            None if figure.in_superblock => {
                return Err(Failure::Usage(format!(
                    "{key} is stored in the superblock, and the configuration does not name it; set it to a value \
                     instead"
                )));
            }
            None => figure.default.clone(),
        };
        let in_state = self.shared.state().tunables(&target.key.id).contains_key(key);
        if in_state {
            self.shared.can_store().await?;
        }
        // A configured value can be out of a range that depends on another tunable; then nothing changes.
        target.worker.command(target.command(key, &value, Beyond::Refused)).await?;
        self.shared.state().set_tunable(&target.key.id, key, None);
        let now = target.value_now(key).await?;
        let (key, notes) = (key.to_owned(), Vec::new());
        Ok(Changed { key, value: now, persistent: true, in_state, limited: None, notes })
    }

    /// What this configuration gives to a set and its volumes, as long as the labels have these owners.
    pub(crate) fn given(&self, worker: &Arc<Worker>, figures: Snapshot, config: &Config) -> Vec<Given> {
        let mut all = Vec::new();
        if let Some(set) = figures.set {
            let (key, name) = (worker.key(), worker.plan.id.clone());
            let values = self.shared.tunables_by(config, &key);
            let worker = worker.clone();
            let target = Target { worker, key, name, tunables: set.tunables, disabled: None };
            all.push(Given { target, values, exports: Vec::new() });
        }
        for volume in figures.volumes {
            let key = worker.volume_key(&volume);
            let values = self.shared.tunables_by(config, &key);
            let exports = self.shared.exports_by(config, &key, &volume.name);
            let (worker, name) = (worker.clone(), volume.name);
            let target = Target { worker, key, name, tunables: volume.tunables, disabled: None };
            all.push(Given { target, values, exports });
        }
        all
    }

    /// Compares what the old configuration gave with what `next` gives, applies the differences, and adds messages to `said`.
    pub(crate) async fn bring_in_line(&self, given: &[Given], next: &Config, said: &mut Vec<String>) {
        for Given { target, exports, .. } in given.iter().filter(|given| !given.target.key.set) {
            if *exports != self.shared.exports_by(next, &target.key, &target.name) {
                said.push(format!("{}: other exports take effect when it is served again", target.shown()));
            }
        }
        for Given { target, values, .. } in given {
            let after = self.shared.tunables_by(next, &target.key);
            target.change(differences(values, &after, &target.tunables), said).await;
        }
    }
}

/// The tunables of volumes that a change of their set has changed, because they are limited by it.
fn followed(before: &[VolumeFigures], now: &[VolumeFigures]) -> Vec<String> {
    let mut notes = Vec::new();
    for volume in now {
        let Some(before) = before.iter().find(|v| v.name == volume.name) else { continue };
        for tunable in volume.tunables.iter().filter(|t| !NOT_REMEMBERED.contains(&t.key)) {
            let was = before.tunables.iter().find(|t| t.key == tunable.key).map(|t| &t.value);
            if let Some(was) = was.filter(|was| **was != tunable.value) {
                let name = plain::named(&volume.label, &volume.name);
                notes.push(format!("{name}: {} is {} now (was {was})", tunable.key, tunable.value));
            }
        }
    }
    notes
}

/// The tunables to set: those that differ, and the defaults of those that are no longer configured.
fn differences(before: &Values, after: &Values, tunables: &[TunableFigure]) -> Vec<(String, String)> {
    let mut changes: Vec<(String, String)> = Vec::new();
    for (key, value) in after {
        if before.get(key) != Some(value) {
            changes.push((key.clone(), value.clone()));
        }
    }
    for key in before.keys().filter(|k| !after.contains_key(*k)) {
        // A value that the superblock stores is not reset to a default.
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
    fn a_number_that_became_another_one_is_told() {
        for (key, asked, now, expected) in [
            ("writeback_percent", "101", "40", true),
            ("writeback_percent", "40", "40", false),
            ("writeback_percent", " +40", "40", false),
            ("sequential_cutoff", "4M", "4194304", false),
            ("sequential_cutoff", "4MiB", "4194304", false),
            ("sequential_cutoff", "4m", "4194304", false),
            ("sequential_cutoff", "1T", "4194304", true),
            ("writeback_delay", "10s", "10", false),
            ("io_error_halflife", "100", "88", true),
            ("cache_mode", "writeback", "writeback", false),
            ("cache_mode", "1", "writeback", false),
            ("writeback_percent", "é", "1", false),
            ("writeback_percent", "", "1", false),
        ] {
            assert_eq!(is_limited(key, asked, now), expected, "{key}: {asked} and {now}");
        }
    }
}
