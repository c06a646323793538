//! Handlers for flash-only volumes and for garbage collection.
//!
//! Owns the parameters and answers of these requests, and the rule that a volume is destroyed by force only. Must not know the
//! client.

use axum::Extension;
use axum::body::Bytes;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use format::superblock::{LABEL_BYTES, label_bytes};
use serde::Deserialize;
use serde_json::json;
use serve::Command;

use super::change::{Audited, cached_set_of, done, volume_of};
use super::context::SharedApi;
use crate::answer::{Answered, Refusal, ok, parse, to_the_end};
use crate::components::Found;
use crate::order::NewVolume;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Create {
    size_bytes: u64,
    #[serde(default)]
    label: String,
    #[serde(default)]
    dry_run: bool,
}

pub(super) async fn create(
    State(api): SharedApi,
    Extension(audit): Audited,
    Path(set): Path<String>,
    body: Bytes,
) -> Answered {
    let wanted: Create = parse(&body)?;
    audit.does(format!("create a volume of {} bytes in {set}", wanted.size_bytes));
    if wanted.size_bytes == 0 || !wanted.size_bytes.is_multiple_of(512) {
        let text = format!("size_bytes: expected a multiple of 512, found {}", wanted.size_bytes);
        return Err(Refusal::malformed(text));
    }
    if !wanted.label.is_empty() {
        serve::label_is_fit(&wanted.label)?;
        if label_bytes(&wanted.label).is_none() {
            let text = format!("label: expected at most {LABEL_BYTES} bytes, found {}", wanted.label.len());
            return Err(Refusal::malformed(text));
        }
        api.registry.settings.label_is_free(&wanted.label, |_| false).await?;
    }
    let (worker, named) = cached_set_of(&api, &audit, &set).await?;
    let (sectors, size_bytes) = (wanted.size_bytes / 512, wanted.size_bytes);
    let order = NewVolume { sectors, label: wanted.label, dry_run: wanted.dry_run };
    if !wanted.dry_run {
        api.registry.shared.can_store().await?;
    }
    let created = to_the_end(async move { worker.create(order).await }).await?;
    let answer = json!({
        "resolved": named,
        "volume": created.name,
        "not_exported": created.not_exported,
        "size_bytes": size_bytes,
        "room": created.room,
        "dry_run": wanted.dry_run,
    });
    if wanted.dry_run { ok(answer) } else { done(&api, answer).await }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Delete {
    /// Destroy the data of the volume.
    #[serde(default)]
    force: bool,
    #[serde(default)]
    dry_run: bool,
}

pub(super) async fn delete_volume(
    State(api): SharedApi,
    Extension(audit): Audited,
    Path(volume): Path<String>,
    body: Bytes,
) -> Answered {
    let Delete { force, dry_run } = parse(&body)?;
    audit.does(format!("delete volume {volume}"));
    let Found { worker, name, named } = volume_of(&api, &audit, &volume).await?;
    let figures = worker.snapshot().await?;
    let Some(found) = figures.volumes.into_iter().find(|v| v.name == name) else {
        return Err(Refusal::new(StatusCode::NOT_FOUND, format!("there is no volume {volume}")));
    };
    if !found.flash.flash_only {
        let text = format!(
            "{named}: is not a flash-only volume: `ubcache detach` ends its caching, and its data is on its backing \
             device"
        );
        return Err(Refusal::new(StatusCode::CONFLICT, text));
    }
    let destroys = json!({
        "volume": found.name,
        "label": found.label,
        "size_bytes": found.size_bytes,
        "data_bytes": found.held.dirty_bytes,
    });
    if !force && !dry_run {
        let text = format!(
            "{named}: has {} of data, which exist nowhere else and would be destroyed; to destroy them, add --force",
            serve::amount::human(found.held.dirty_bytes)
        );
        return Err(Refusal::new(StatusCode::CONFLICT, text));
    }
    if !dry_run {
        let (asked, here) = (audit.asked(), api.clone());
        to_the_end(async move { here.registry.registration.delete_volume(&name, &asked).await }).await?;
        return done(&api, json!({"resolved": named, "destroys": destroys, "dry_run": dry_run})).await;
    }
    ok(json!({"resolved": named, "destroys": destroys, "dry_run": dry_run}))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Gc {
    #[serde(default)]
    dry_run: bool,
}

/// Walks the index of a set once, and answers how many more buckets are available afterwards.
pub(super) async fn gc(
    State(api): SharedApi,
    Extension(audit): Audited,
    Path(set): Path<String>,
    body: Bytes,
) -> Answered {
    let Gc { dry_run } = parse(&body)?;
    audit.does(format!("gc {set}"));
    let (worker, named) = cached_set_of(&api, &audit, &set).await?;
    let walk = async move {
        let before = worker.figures().await?;
        if !dry_run {
            worker.command(Command::Gc).await?;
        }
        Ok((before, worker.figures().await?))
    };
    let (before, after) = to_the_end(walk).await?;
    let Some((before, after)) = before.sets.first().zip(after.sets.first()) else {
        return Err(Refusal::new(StatusCode::CONFLICT, format!("{set}: there is no cache set")));
    };
    let freed = after.available_buckets.saturating_sub(before.available_buckets);
    let gc = json!({
        "buckets_freed": freed,
        "freed_bytes": u64::from(freed).saturating_mul(after.status.bucket_sectors.bytes()),
        "buckets_available": after.available_buckets,
        "buckets": after.status.nbuckets,
        "btree_nodes": after.status.btree_nodes,
    });
    ok(json!({"resolved": named, "gc": gc, "dry_run": dry_run}))
}
