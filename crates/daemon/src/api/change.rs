//! Handlers of requests that change something or start a job.
//!
//! Owns the parameters and answers of these requests; `resolved` in an answer names the device that a name stands for. Each
//! handler records its action and device for the audit before it acts. Must not know the client.

use std::path::PathBuf;
use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use serve::Failure;

use super::context::{Api, SharedApi};
use crate::answer::{Answered, Refusal, ok, parse, to_the_end};
use crate::audit::Audit;
use crate::components::{
    Attach, By, DeviceView, Ended, Found, NotExported, Problem, SetView, problems, shared_labels,
    volume_title,
};
use crate::jobs::{End, Job, JobView, RunningJob};
use crate::names::Named;
use crate::order::Order;
use crate::why::SharedFailure;
use crate::worker::Worker;

pub(super) type Audited = Extension<Audit>;

/// Resolves a volume and records it in the audit as the target of the request.
pub(super) async fn volume_of(api: &Api, audit: &Audit, name: &str) -> Result<Found, Refusal> {
    let found = api.registry.lookup.find(name).await?;
    audit.on(&found.named);
    Ok(found)
}

/// Resolves a set and records it in the audit as the target of the request.
pub(super) async fn set_of(api: &Api, audit: &Audit, name: &str) -> Result<(Arc<Worker>, Named), Refusal> {
    let worker = api.registry.lookup.set(name).await?;
    let named = api.registry.lookup.named(&worker.plan.id).await?;
    audit.on(&named);
    Ok((worker, named))
}

/// As [`set_of`], for a command that needs a cache device: refuses a backing device that is served without one.
pub(super) async fn cached_set_of(
    api: &Api,
    audit: &Audit,
    name: &str,
) -> Result<(Arc<Worker>, Named), Refusal> {
    let (worker, named) = set_of(api, audit, name).await?;
    if worker.plan.cache.is_none() {
        let text = format!("{named}: expected a set, found a volume that is served without one");
        return Err(Refusal::new(StatusCode::CONFLICT, text));
    }
    Ok((worker, named))
}

/// The answer to a change that the state directory stores: `not_stored` says why it could not. What the next start can do
/// without is no reason.
pub(super) async fn done(api: &Api, mut value: Value) -> Answered {
    let shared = &api.registry.shared;
    let not_stored = shared.not_stored().await;
    value["not_stored"] = json!(not_stored.filter(|_| shared.state().lacks_a_change()));
    ok(value)
}

// ---- devices ----

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Register {
    devices: Vec<PathBuf>,
    /// Stopped flash-only volumes to serve again, by name, label or UUID.
    #[serde(default)]
    volumes: Vec<String>,
    /// Has no effect any more: a device that is registered already is not an error.
    #[serde(default, rename = "quiet")]
    _quiet: bool,
    /// The device replaces the one that is stored for its UUID.
    #[serde(default)]
    accept_replacement: bool,
}

pub(super) async fn register(State(api): SharedApi, Extension(audit): Audited, body: Bytes) -> Answered {
    let wanted: Register = parse(&body)?;
    if let Some(relative) = wanted.devices.iter().find(|d| !d.is_absolute()) {
        return Err(Refusal::malformed(format!("{}: expected an absolute path", relative.display())));
    }
    let mut names: Vec<String> = wanted.devices.iter().map(|d| d.display().to_string()).collect();
    names.extend(wanted.volumes.iter().cloned());
    let replacing = if wanted.accept_replacement { " as replacement" } else { "" };
    audit.does(format!("register {}{replacing}", names.join(" ")));
    let by = By::Operator { accept: wanted.accept_replacement };
    let here = api.clone();
    let registered = to_the_end(async move {
        let registered = api.registry.registration.register(wanted.devices, by, &audit.asked()).await?;
        let sets = api.registry.views.sets().await;
        let mut devices = api.registry.views.devices_with(&sets);
        devices.retain(|view| registered.paths.contains(&view.path));
        for view in &devices {
            if let Some(uuid) = &view.uuid
                && let Ok(named) = api.registry.lookup.named(&view.path.to_string_lossy()).await
                && named.uuid.as_ref() == Some(uuid)
            {
                audit.on(&named);
            }
        }
        let mut not_exported = api.registry.exports.not_exported(Some(&devices)).await;
        let volumes = start_volumes(&api, &audit, &wanted.volumes, &mut not_exported).await?;
        Ok((devices, registered, not_exported, volumes))
    });
    let registered = registered.await;
    if registered.is_err() {
        // The devices that were not refused are registered, so they are stored before the answer.
        let _reported = here.registry.shared.not_stored().await;
    }
    let (devices, mut registered, not_exported, volumes) = registered?;
    registered.warnings.extend(labels_of_others(&here, &devices).await);
    let answer = json!({
        "disabled": disabled(&here, &devices).await,
        "devices": devices,
        "accepted": registered.accepted,
        "already": registered.already,
        "warnings": registered.warnings,
        "volumes": volumes,
        "not_exported": not_exported,
    });
    done(&here, answer).await
}

/// The labels of these devices that other volumes or sets have, too.
async fn labels_of_others(api: &Api, devices: &[DeviceView]) -> Vec<String> {
    let (sets, all) = (api.registry.views.sets().await, api.registry.views.devices());
    let of_these = |label: &str| devices.iter().any(|d| d.label == label);
    let found = shared_labels(&sets, &all, of_these);
    found.into_iter().map(|problem| format!("{}; run `{}`", problem.text, problem.command)).collect()
}

/// The problems of the disabled sets of these devices.
async fn disabled(api: &Api, devices: &[DeviceView]) -> Vec<Problem> {
    let mut found = problems(&api.registry.views.sets().await, &api.registry.views.devices());
    found.retain(|p| p.kind == "set_failed" && devices.iter().any(|d| d.set.is_some() && d.set == p.of.set));
    found
}

/// Serves flash-only volumes again that were stopped. `not_exported` gets those that cannot be reached as configured.
async fn start_volumes(
    api: &Api,
    audit: &Audit,
    volumes: &[String],
    not_exported: &mut Vec<NotExported>,
) -> Result<Vec<Value>, Failure> {
    let mut started = Vec::new();
    for volume in volumes {
        let (named, now) = api.registry.registration.start_volume(volume, &audit.asked()).await?;
        audit.on(&named);
        if let Some(why) = now.not_exported {
            let (volume, label) = (named.name.clone().unwrap_or_default(), named.label.clone());
            not_exported.push(NotExported { volume, label, why });
        }
        started.push(json!({"resolved": named, "already": now.already}));
    }
    Ok(started)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Unregister {
    device: String,
}

pub(super) async fn unregister(State(api): SharedApi, Extension(audit): Audited, body: Bytes) -> Answered {
    let wanted: Unregister = parse(&body)?;
    audit.does(format!("unregister {}", wanted.device));
    if let Ok(named) = api.registry.lookup.named(&wanted.device).await {
        audit.on(&named);
    }
    let (asked, here) = (audit.asked(), api.clone());
    let work = async move {
        let unregister = api.registry.registration.unregister(&wanted.device, &asked);
        with_what_stays(&api, unregister).await
    };
    let Stopped { stays, named, stopped, ended_jobs } = to_the_end(work).await?;
    done(
        &here,
        json!({"resolved": named, "stays_dirty": stays, "stopped": stopped, "ended_jobs": ended_jobs}),
    )
    .await
}

/// A device whose service has ended.
struct Stopped {
    named: Named,
    /// Its dirty data that stays in the cache.
    stays: Option<Stays>,
    /// The volumes of a cache device that are not served any more.
    stopped: Vec<String>,
    /// The jobs on it that had to end.
    ended_jobs: Vec<JobView>,
}

/// Ends the service of a device.
async fn with_what_stays(
    api: &Api,
    end: impl Future<Output = Result<Ended, Failure>>,
) -> Result<Stopped, Failure> {
    let jobs = api.registry.jobs.running();
    let Ended { named, sets: before, devices: known } = end.await?;
    let device = known.iter().find(|d| Some(&d.path) == named.device.as_ref() && d.uuid == named.uuid);
    let after = api.registry.views.sets().await;
    let stays = device.and_then(|device| Stays::of(device, &known, [&after, &before]));
    let served = |name: &str| after.iter().flat_map(|set| &set.figures.volumes).any(|v| v.name == name);
    let of_set = before.iter().filter(|set| Some(&set.id) == named.set.as_ref());
    let volumes = of_set.flat_map(|set| &set.figures.volumes);
    let stopped = volumes.filter(|v| !served(&v.name)).map(volume_title).collect();
    let is_ended = |job: &&Arc<Job>| job.is_overtaken() && job.uuid() == named.uuid.as_ref();
    let ended_jobs = jobs.iter().filter(is_ended).map(|job| job.view()).collect();
    Ok(Stopped { named, stays, stopped, ended_jobs })
}

/// The dirty data of a device that is not served any more, and the cache device that has it.
#[derive(Serialize)]
struct Stays {
    /// In bytes; `None` if the set is not served, so that the amount is not known.
    dirty_bytes: Option<u64>,
    /// The part of it that belongs to flash-only volumes, which no backing device has.
    flash_only_bytes: u64,
    /// Path of the cache device; `None` if it is not registered.
    cache_device: Option<PathBuf>,
    set: String,
}

impl Stays {
    /// The dirty data of a device, from the first of these lists of sets that has the amount; `None` if nothing is dirty.
    fn of(device: &DeviceView, known: &[DeviceView], sets: [&[SetView]; 2]) -> Option<Stays> {
        let id = device.set.clone()?;
        let is_cache = |d: &&DeviceView| d.kind == Some("cache") && d.set.as_ref() == Some(&id);
        let cache_device = known.iter().find(is_cache).map(|d| d.path.clone());
        let mut served = sets.into_iter().filter_map(|sets| sets.iter().find(|s| s.id == id && s.has_cache));
        let amounts = served.find_map(|set| match device.kind {
            Some("cache") => {
                let flash_only = set.figures.volumes.iter().filter(|v| v.flash.flash_only);
                let flash_only_bytes = flash_only.map(|v| v.held.dirty_bytes).sum();
                Some((set.figures.set.as_ref()?.held.dirty_bytes, flash_only_bytes))
            }
            _ => Some((set.figures.dirty_of(device.uuid.as_deref())?, 0)),
        });
        let (dirty_bytes, flash_only_bytes) = amounts.map_or((None, 0), |(all, part)| (Some(all), part));
        let is_dirty = dirty_bytes.map_or(device.dirty, |bytes| bytes > 0);
        is_dirty.then_some(Stays { dirty_bytes, flash_only_bytes, cache_device, set: id })
    }
}

pub(super) async fn attach(State(api): SharedApi, Extension(audit): Audited, body: Bytes) -> Answered {
    let wanted: Attach = parse(&body)?;
    let force = if wanted.force { " by force" } else { "" };
    audit.does(format!("attach {} {}{force}", wanted.cache, wanted.backing));
    for name in [&wanted.cache, &wanted.backing] {
        if let Ok(named) = api.registry.lookup.named(name).await {
            audit.on(&named);
        }
    }
    let here = api.clone();
    let attached = to_the_end(async move {
        let named = api.registry.registration.attach(&wanted, &audit.asked()).await?;
        let cache = api.registry.lookup.named(&wanted.cache).await?;
        audit.on(&named);
        Ok((named, cache))
    });
    let (named, cache) = attached.await?;
    done(&here, json!({"resolved": named, "cache": cache})).await
}

pub(super) async fn stop(
    State(api): SharedApi,
    Extension(audit): Audited,
    Path(volume): Path<String>,
) -> Answered {
    audit.does(format!("stop {volume}"));
    let Found { name, .. } = volume_of(&api, &audit, &volume).await?;
    let asked = audit.asked();
    let work =
        async move { with_what_stays(&api, api.registry.registration.stop_volume(&name, &asked)).await };
    let Stopped { stays, named, ended_jobs, .. } = to_the_end(work).await?;
    ok(json!({"resolved": named, "stays_dirty": stays, "ended_jobs": ended_jobs}))
}

pub(super) async fn reload(State(api): SharedApi, Extension(audit): Audited) -> Answered {
    audit.does("reload");
    let (asked, here) = (audit.asked(), api.clone());
    let work = async move { here.registry.reload.reload(&here.config_path, &asked).await };
    let changes = to_the_end(work).await?;
    ok(json!({"changes": changes, "not_exported": api.registry.exports.not_exported(None).await}))
}

// ---- jobs ----

pub(super) fn accepted(job: &Job, named: Option<&Named>) -> Result<Response, Refusal> {
    let body = Json(json!({"schema_version": 1, "job": job.view(), "resolved": named}));
    Ok((StatusCode::ACCEPTED, body).into_response())
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Detach {
    /// Overwrite the device's data on the cache device after the detach.
    #[serde(default)]
    wipe: bool,
    /// The cache device is lost: the device leaves its set without it.
    #[serde(default)]
    force: bool,
}

pub(super) async fn detach(
    State(api): SharedApi,
    Extension(audit): Audited,
    Path(volume): Path<String>,
    body: Bytes,
) -> Result<Response, Refusal> {
    let Detach { wipe, force } = parse(&body)?;
    if force {
        return leave(api, audit, volume).await;
    }
    audit.does(format!("detach {volume}{}", if wipe { " and wipe" } else { "" }));
    let Found { worker, name, named } = volume_of(&api, &audit, &volume).await?;
    let order = |job| Order::Detach(name.clone(), wipe, job);
    let job = worker.begin_job(&api.registry.jobs, "detach", &name, Some(&named), order)?;
    accepted(&job, Some(&named))
}

/// Detaches a device whose cache device is lost. It is no job: nothing is written back.
async fn leave(api: Arc<Api>, audit: Audit, volume: String) -> Result<Response, Refusal> {
    audit.does(format!("detach {volume} by force"));
    if let Ok(named) = api.registry.lookup.named(&volume).await {
        audit.on(&named);
    }
    let asked = audit.asked();
    let here = api.clone();
    let work = async move { api.registry.registration.leave(&volume, &asked).await };
    let (named, set) = to_the_end(work).await?;
    Ok(done(&here, json!({"resolved": named, "left_set": set})).await?.into_response())
}

pub(super) async fn drain(
    State(api): SharedApi,
    Extension(audit): Audited,
    Path(volume): Path<String>,
) -> Result<Response, Refusal> {
    audit.does(format!("drain {volume}"));
    let Found { worker, name, named } = volume_of(&api, &audit, &volume).await?;
    let order = |job| Order::Flush(Some(name.clone()), job);
    let job = worker.begin_job(&api.registry.jobs, "drain", &name, Some(&named), order)?;
    accepted(&job, Some(&named))
}

pub(super) async fn drain_set(
    State(api): SharedApi,
    Extension(audit): Audited,
    Path(set): Path<String>,
) -> Result<Response, Refusal> {
    audit.does(format!("drain {set}"));
    let (worker, named) = set_of(&api, &audit, &set).await?;
    let id = worker.plan.id.clone();
    let job =
        worker.begin_job(&api.registry.jobs, "drain", &id, Some(&named), |job| Order::Flush(None, job))?;
    accepted(&job, Some(&named))
}

pub(super) async fn wipe(
    State(api): SharedApi,
    Extension(audit): Audited,
    Path(set): Path<String>,
) -> Result<Response, Refusal> {
    audit.does(format!("wipe {set}"));
    let (worker, named) = cached_set_of(&api, &audit, &set).await?;
    let id = worker.plan.id.clone();
    let job = worker.begin_job(&api.registry.jobs, "wipe", &id, Some(&named), Order::Wipe)?;
    accepted(&job, Some(&named))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Check {
    devices: Vec<String>,
    #[serde(default)]
    quick: bool,
    /// Check even if another process writes to the devices; the findings may be wrong then.
    #[serde(default)]
    in_use: bool,
}

pub(super) async fn check(
    State(api): SharedApi,
    Extension(audit): Audited,
    body: Bytes,
) -> Result<Response, Refusal> {
    let wanted: Check = parse(&body)?;
    audit.does(format!("check {}", wanted.devices.join(" ")));
    let mut paths = Vec::new();
    for device in &wanted.devices {
        paths.push(api.registry.lookup.device_path(device).await?);
    }
    let Some(job) = api.registry.jobs.begin("check", &wanted.devices.join(" "), None) else {
        return Err(Refusal::new(StatusCode::CONFLICT, "too many jobs are running".into()));
    };
    let running = RunningJob::new(job.clone(), || {
        Failure::Failed("internal error: the check has ended without a result".into())
    });
    tokio::task::spawn_blocking(move || check_now(&paths, wanted.quick, wanted.in_use, &running));
    accepted(&job, None)
}

/// Checks devices on the calling thread. A device that another process writes to is checked only with `in_use`.
fn check_now(paths: &[PathBuf], quick: bool, in_use: bool, job: &RunningJob) {
    let probe = || -> Result<End, Failure> {
        let opener = serve::read_only::ReadOnlyOpener::new(in_use, "\"in_use\": true")?;
        let devices = paths.iter().map(|p| opener.open(p)).collect::<Result<Vec<_>, _>>()?;
        let sources: Vec<&dyn inspect::ReadAt> = devices.iter().map(|d| &d.source as _).collect();
        let options = inspect::CheckOptions { compare_clean: !quick, verify_data: !quick };
        let report = inspect::check(&sources, options, &mut |p| {
            job.0.progress(p.done.bytes(), p.total.bytes());
            if job.0.is_cancelled() {
                std::ops::ControlFlow::Break(())
            } else {
                std::ops::ControlFlow::Continue(())
            }
        });
        job.0.reports(json!(report));
        Ok(match (job.0.is_cancelled(), report.is_ok()) {
            (true, _) => End::Cancelled,
            (false, true) => End::Done,
            (false, false) => End::Failed(SharedFailure::of_words("problems were found: see the report")),
        })
    };
    job.0.ended(probe().unwrap_or_else(|e: Failure| End::Failed(e.into())));
}

pub(super) async fn jobs(State(api): SharedApi) -> Answered {
    ok(json!({"jobs": api.registry.jobs.all()}))
}

fn job_of(api: &Api, id: &str) -> Result<Arc<Job>, Refusal> {
    let found = id.parse().ok().and_then(|id| api.registry.jobs.get(id));
    found.ok_or_else(|| Refusal::new(StatusCode::NOT_FOUND, format!("there is no job {id}")))
}

pub(super) async fn one_job(State(api): SharedApi, Path(id): Path<String>) -> Answered {
    ok(json!({"job": job_of(&api, &id)?.view()}))
}

pub(super) async fn cancel_job(
    State(api): SharedApi,
    Extension(audit): Audited,
    Path(id): Path<String>,
) -> Answered {
    audit.does(format!("cancel job {id}"));
    let job = job_of(&api, &id)?;
    let (what, named) = job.title();
    audit.does(format!("cancel job {id}, {what}"));
    named.iter().for_each(|named| audit.on(named));
    let state = job.view().state;
    if state != "running" {
        return Err(Refusal::new(StatusCode::CONFLICT, format!("job {id} ({what}) has ended: {state}")));
    }
    job.cancel();
    let view: Value = json!(job.view());
    ok(json!({"job": view, "resolved": named}))
}
