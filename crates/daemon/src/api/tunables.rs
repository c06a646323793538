//! Handlers of requests that read or change tunables and labels of sets and volumes.
//!
//! Owns the refusal of a tunable that belongs to something else: it names the tunable, and the set or volume that has it. Must not
//! know how a tunable is applied.

use std::sync::Arc;

use axum::Extension;
use axum::body::Bytes;
use axum::extract::{Path, State};
use serde::Deserialize;
use serde_json::json;
use serve::plain;
use serve::tunables::{Meant, Owner, meant};

use super::change::{Audited, cached_set_of, done, set_of, volume_of};
use super::context::{Api, SharedApi};
use crate::answer::{Answered, Instead, Refusal, ok, parse, to_the_end};
use crate::audit::Audit;
use crate::components::Found;
use crate::names::Named;
use crate::settings::Of;
use crate::worker::Worker;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Put {
    value: String,
    #[serde(default)]
    runtime: bool,
}

/// The owner of the tunables, for work that continues after its request has ended.
#[derive(Clone)]
enum Whose {
    Set(String),
    Volume(String),
}

impl Whose {
    fn of(&self) -> Of<'_> {
        match self {
            Whose::Set(name) => Of::Set(name),
            Whose::Volume(name) => Of::Volume(name),
        }
    }

    /// The name in the request.
    fn name(&self) -> &str {
        match self {
            Whose::Set(name) | Whose::Volume(name) => name,
        }
    }

    /// Resolves the target of the request, and returns it with its description.
    async fn resolved(self, api: &Api, audit: &Audit) -> Result<Addressed, Refusal> {
        let asked = self.name().to_owned();
        match self {
            Whose::Set(name) => {
                let (worker, named) = cached_set_of(api, audit, &name).await?;
                Ok(Addressed { asked, whose: Whose::Set(worker.plan.id.clone()), worker, named })
            }
            Whose::Volume(name) => {
                let Found { worker, name, named } = volume_of(api, audit, &name).await?;
                Ok(Addressed { asked, whose: Whose::Volume(name), worker, named })
            }
        }
    }
}

/// The set or volume that a name stands for.
struct Addressed {
    /// The name in the request.
    asked: String,
    whose: Whose,
    worker: Arc<Worker>,
    named: Named,
}

impl Addressed {
    /// Refuses a tunable that the set or volume does not have: names the one that is spelled nearly so, and whose it is.
    async fn has(&self, api: &Api, key: &str) -> Result<(), Refusal> {
        let own = match self.whose {
            Whose::Set(_) => Owner::Set,
            Whose::Volume(_) => Owner::Device,
        };
        match meant(key, own) {
            Meant::Own | Meant::Unknown => Ok(()),
            Meant::Near(near) => {
                let text = format!("unknown tunable {key}; did you mean {near}?");
                Err(self.refused(text, Vec::new(), Some((key.to_owned(), near.to_owned()))))
            }
            Meant::Other if own == Owner::Set && key == "label" => {
                let (named, set) = (&self.named, self.worker.typed());
                let text =
                    format!("{named}: its label is no tunable: `ubcache set-label {set} LABEL` sets it");
                Err(Refusal::malformed(text))
            }
            Meant::Other => {
                let text = self.of_other(api, key).await;
                Err(self.refused(text, self.others(api).await, None))
            }
            Meant::NearOfOther(near) => {
                let whose = self.of_other(api, near).await;
                let text = format!("unknown tunable {key}; did you mean {near}? {whose}");
                Err(self.refused(text, self.others(api).await, Some((key.to_owned(), near.to_owned()))))
            }
        }
    }

    /// A refusal with the names and the tunable that would be right, if there are any.
    fn refused(&self, text: String, names: Vec<String>, key: Option<(String, String)>) -> Refusal {
        let helps = !names.is_empty() || key.is_some();
        let instead = helps.then(|| Box::new(Instead { name: self.asked.clone(), names, key }));
        Refusal { instead, ..Refusal::malformed(text) }
    }

    /// The names of the volumes of a set, or of the set of a volume.
    async fn others(&self, api: &Api) -> Vec<String> {
        match &self.whose {
            Whose::Set(set) => api.registry.lookup.volumes_of(set).await,
            Whose::Volume(_) => self.worker.plan.cache.iter().map(|_| self.worker.typed()).collect(),
        }
    }

    /// Whose tunable this is that the set or volume does not have.
    async fn of_other(&self, api: &Api, key: &str) -> String {
        let title = self.worker.title();
        match &self.whose {
            Whose::Set(set) => {
                let volumes = api.registry.lookup.volumes_of(set).await;
                let has = if volumes.is_empty() { "none is served".to_owned() } else { volumes.join(", ") };
                format!("{key} is a tunable of volumes, not of {title}; its volumes: {has}")
            }
            Whose::Volume(name) => {
                let shown = plain::named(&self.named.label, name);
                match self.worker.plan.cache {
                    Some(_) => format!("{key} is a tunable of sets, not of {shown}, a volume of {title}"),
                    None => format!("{key} is a tunable of sets, and {shown} is served without one"),
                }
            }
        }
    }
}

/// A change of a tunable, or its reset to the configured value if `put` is `None`.
struct TunableChange {
    whose: Whose,
    key: String,
    put: Option<Put>,
}

async fn change(api: Arc<Api>, audit: Audit, change: TunableChange) -> Answered {
    let TunableChange { whose, key, put } = change;
    let action = match &put {
        Some(put) => format!("set {key}={}", put.value),
        None => format!("reset {key}"),
    };
    // The audit has the name of the request until the name is resolved.
    audit.does(format!("{action} on {}", whose.name()));
    let target = whose.resolved(&api, &audit).await?;
    audit.does(&action);
    target.has(&api, &key).await?;
    let Addressed { whose, named, .. } = target;
    let here = api.clone();
    let work = async move {
        let changed = match put {
            Some(put) => {
                api.registry.settings.set_tunable(whose.of(), &key, &put.value, !put.runtime).await?
            }
            None => api.registry.settings.reset_tunable(whose.of(), &key).await?,
        };
        if let Some(value) = changed.limited_to() {
            audit.does(format!("{action} (the value is {value} now)"));
        }
        Ok(changed)
    };
    let changed = to_the_end(work).await?;
    let in_state = changed.is_in_state();
    let answer = json!({"changed": changed, "resolved": named});
    if in_state { done(&here, answer).await } else { ok(answer) }
}

pub(super) async fn set_tunables(State(api): SharedApi, Path(set): Path<String>) -> Answered {
    api.registry.lookup.set(&set).await?;
    ok(json!({"tunables": api.registry.settings.tunables(Of::Set(&set)).await?}))
}

pub(super) async fn set_tunable(State(api): SharedApi, Path((set, key)): Path<(String, String)>) -> Answered {
    // The record of the audit is of a change alone.
    Whose::Set(set.clone()).resolved(&api, &Audit::default()).await?.has(&api, &key).await?;
    ok(json!({"tunable": api.registry.settings.tunable(Of::Set(&set), &key).await?}))
}

pub(super) async fn change_set_tunable(
    State(api): SharedApi,
    Extension(audit): Audited,
    Path((set, key)): Path<(String, String)>,
    body: Bytes,
) -> Answered {
    change(api, audit, TunableChange { whose: Whose::Set(set), key, put: Some(parse(&body)?) }).await
}

pub(super) async fn reset_set_tunable(
    State(api): SharedApi,
    Extension(audit): Audited,
    Path((set, key)): Path<(String, String)>,
) -> Answered {
    change(api, audit, TunableChange { whose: Whose::Set(set), key, put: None }).await
}

pub(super) async fn volume_tunables(State(api): SharedApi, Path(volume): Path<String>) -> Answered {
    let Found { name, .. } = api.registry.lookup.find(&volume).await?;
    ok(json!({"tunables": api.registry.settings.tunables(Of::Volume(&name)).await?}))
}

pub(super) async fn volume_tunable(
    State(api): SharedApi,
    Path((volume, key)): Path<(String, String)>,
) -> Answered {
    let target = Whose::Volume(volume).resolved(&api, &Audit::default()).await?;
    target.has(&api, &key).await?;
    let name = target.whose.name();
    ok(json!({"tunable": api.registry.settings.tunable(Of::Volume(name), &key).await?}))
}

pub(super) async fn change_volume_tunable(
    State(api): SharedApi,
    Extension(audit): Audited,
    Path((volume, key)): Path<(String, String)>,
    body: Bytes,
) -> Answered {
    change(api, audit, TunableChange { whose: Whose::Volume(volume), key, put: Some(parse(&body)?) }).await
}

pub(super) async fn reset_volume_tunable(
    State(api): SharedApi,
    Extension(audit): Audited,
    Path((volume, key)): Path<(String, String)>,
) -> Answered {
    change(api, audit, TunableChange { whose: Whose::Volume(volume), key, put: None }).await
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Mode {
    mode: String,
}

pub(super) async fn cache_mode(
    State(api): SharedApi,
    Extension(audit): Audited,
    Path(volume): Path<String>,
    body: Bytes,
) -> Answered {
    let Mode { mode } = parse(&body)?;
    let put = Some(Put { value: mode, runtime: false });
    change(api, audit, TunableChange { whose: Whose::Volume(volume), key: "cache_mode".into(), put }).await
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Label {
    label: String,
}

pub(super) async fn label(
    State(api): SharedApi,
    Extension(audit): Audited,
    Path(volume): Path<String>,
    body: Bytes,
) -> Answered {
    let Label { label } = parse(&body)?;
    let put = Some(Put { value: label, runtime: false });
    change(api, audit, TunableChange { whose: Whose::Volume(volume), key: "label".into(), put }).await
}

pub(super) async fn set_label(
    State(api): SharedApi,
    Extension(audit): Audited,
    Path(set): Path<String>,
    body: Bytes,
) -> Answered {
    let Label { label } = parse(&body)?;
    audit.does(format!("set label={label} on set {set}"));
    let (worker, _) = set_of(&api, &audit, &set).await?;
    let id = worker.plan.id.clone();
    let relabelled = api.clone();
    to_the_end(async move { relabelled.registry.settings.label_set(&id, &label).await }).await?;
    ok(json!({"resolved": api.registry.lookup.named(&worker.plan.id).await?}))
}
