//! Handlers of the requests that change groups.
//!
//! Owns the parameters and answers of these requests, and the job of each. A request is refused before its job begins if the command
//! cannot be carried out. Must not know the steps.

use std::path::{Path as FilePath, PathBuf};
use std::sync::Arc;

use axum::Extension;
use axum::body::Bytes;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::json;
use serve::Failure;

use super::change::{Audited, accepted, cached_set_of};
use super::context::{Api, SharedApi};
use super::make::{is_for, not_registered};
use crate::answer::{Refusal, ok, parse};
use crate::audit::{Audit, Peer};
use crate::components::{GroupChange, Joining};
use crate::jobs::{End, RunningJob};
use crate::names::Named;
use crate::order::Others;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Add {
    device: PathBuf,
    #[serde(default)]
    wipe: bool,
    #[serde(default)]
    force: bool,
    #[serde(default)]
    dry_run: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Remove {
    /// Cache device, or the label or UUID of its set.
    device: String,
    #[serde(default)]
    dry_run: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Replace {
    /// Cache device, or the label or UUID of its set.
    old: String,
    new: PathBuf,
    #[serde(default)]
    wipe: bool,
    #[serde(default)]
    force: bool,
    #[serde(default)]
    dry_run: bool,
}

/// A request that changes a group.
pub(super) struct Wanted {
    kind: &'static str,
    joins: Option<Joining>,
    leaves: Option<String>,
    dry_run: bool,
}

impl From<Add> for Wanted {
    fn from(Add { device, wipe, force, dry_run }: Add) -> Wanted {
        Wanted { kind: "group add", joins: Some(Joining { device, wipe, force }), leaves: None, dry_run }
    }
}

impl From<Remove> for Wanted {
    fn from(Remove { device, dry_run }: Remove) -> Wanted {
        Wanted { kind: "group remove", joins: None, leaves: Some(device), dry_run }
    }
}

impl From<Replace> for Wanted {
    fn from(Replace { old, new, wipe, force, dry_run }: Replace) -> Wanted {
        let joins = Some(Joining { device: new, wipe, force });
        Wanted { kind: "group replace", joins, leaves: Some(old), dry_run }
    }
}

/// Handles a request with the body `B`.
pub(super) async fn change_group<B: DeserializeOwned + Into<Wanted>>(
    State(api): SharedApi,
    Extension(audit): Audited,
    Extension(peer): Extension<Peer>,
    Path(set): Path<String>,
    body: Bytes,
) -> Result<Response, Refusal> {
    begin(api, (audit, peer), set, parse::<B>(&body)?.into()).await
}

/// Checks a request, and begins its job unless it is a dry run.
async fn begin(
    api: Arc<Api>,
    (audit, peer): (Audit, Peer),
    set: String,
    wanted: Wanted,
) -> Result<Response, Refusal> {
    let Wanted { kind, joins, leaves, dry_run } = wanted;
    let new = joins.as_ref().map(|joins| joins.device.display().to_string());
    let devices: Vec<&str> = leaves.iter().chain(&new).map(String::as_str).collect();
    let what = format!("{kind} {set} {}", devices.join(" "));
    audit.does(what.clone());
    let (worker, named) = cached_set_of(&api, &audit, &set).await?;
    let groups = &api.groups;
    let leaves = match leaves {
        Some(device) => {
            let others = if joins.is_some() { Others::Join } else { Others::AreNeeded };
            Some(groups.may_leave(&worker, &device, others).await?)
        }
        None => None,
    };
    leaves.iter().for_each(|leaves| audit.on(leaves));
    let change = GroupChange { what, set: worker, joins, leaves, make: api.make };
    let mut lines = may_join(&api, &change, peer).await?;
    if dry_run {
        lines.extend(
            change.leaves.iter().map(|leaves| format!("{leaves}: would leave the group, without data")),
        );
        return Ok(ok(json!({"dry_run": true, "lines": lines, "resolved": named}))?.into_response());
    }
    start(api, kind, change, &named)
}

/// Refuses a device that cannot join. Returns what `make` would do.
async fn may_join(api: &Api, change: &GroupChange, peer: Peer) -> Result<Vec<String>, Refusal> {
    let Some(joins) = &change.joins else { return Ok(Vec::new()) };
    if !joins.device.is_absolute() {
        return Err(Refusal::malformed(format!("{}: expected an absolute path", joins.device.display())));
    }
    not_registered(api, std::slice::from_ref(&joins.device))?;
    let device = joins.device.clone();
    let checked = tokio::task::spawn_blocking(move || is_for(peer, FilePath::new(&device))).await;
    checked.map_err(|e| Failure::because("internal error", e))??;
    // The group of a dry run is not written.
    let group = serve::session::new_uuid();
    Ok(api.groups.format(change, joins, (group, true)).await?)
}

/// Starts the job.
fn start(api: Arc<Api>, kind: &'static str, change: GroupChange, named: &Named) -> Result<Response, Refusal> {
    let Some(job) = api.registry.jobs.begin(kind, &change.set.plan.id, Some(named)) else {
        return Err(Refusal::new(StatusCode::CONFLICT, "too many jobs are running".into()));
    };
    let what = change.what.clone();
    let running = RunningJob::new(job.clone(), move || {
        Failure::Failed(format!(
            "the daemon stopped before `{what}` was done, and a part of it may be done: `ubcache status` shows the cache devices"
        ))
    });
    let answer = accepted(&job, Some(named));
    tokio::spawn(async move {
        let end = api.groups.carry_out(&change, &running.0).await;
        // What has joined or left is stored before clients see the end.
        let _reported = api.registry.shared.not_stored().await;
        running.0.ended(end.unwrap_or_else(|e| End::Failed(e.into())));
    });
    answer
}
