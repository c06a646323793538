//! Handlers for scrubs and damaged dirty data.
//!
//! Owns the parameters and answers of these requests. Must not know how data is verified.

use std::sync::Arc;

use axum::Extension;
use axum::body::Bytes;
use axum::extract::{Path, State};
use axum::response::Response;
use serde::Deserialize;
use serde_json::json;
use serve::snapshot::DamagedFigures;
use serve::{Answer, Command, Failure, Resolve};

use super::change::{Audited, accepted, cached_set_of, volume_of};
use super::context::SharedApi;
use crate::answer::{Answered, Refusal, ok, parse, to_the_end};
use crate::components::Found;
use crate::names::Named;
use crate::order::Order;
use crate::worker::Worker;

pub(super) async fn scrub(
    State(api): SharedApi,
    Extension(audit): Audited,
    Path(set): Path<String>,
) -> Result<Response, Refusal> {
    audit.does(format!("scrub {set}"));
    let (worker, named) = cached_set_of(&api, &audit, &set).await?;
    let id = worker.plan.id.clone();
    let job = worker.begin_job(&api.registry.jobs, "scrub", &id, Some(&named), Order::Scrub)?;
    accepted(&job, Some(&named))
}

/// The damaged dirty data of a set, or of one of its volumes.
async fn list(worker: &Worker, volume: Option<&str>) -> Result<Vec<DamagedFigures>, Failure> {
    let wanted = Command::Damaged { volume: volume.map(str::to_owned) };
    match worker.command(wanted).await? {
        Answer::Damaged(ranges) => Ok(ranges),
        _ => Err(Failure::Failed("expected damaged ranges".into())),
    }
}

/// The answer with the damaged dirty data, and whether damage can be found at all.
async fn listed(worker: &Worker, volume: Option<&str>, named: Named) -> Answered {
    let damaged = list(worker, volume).await?;
    let checksums = worker.snapshot().await?.set.is_some_and(|set| set.checksums.is_some());
    ok(json!({"damaged": damaged, "resolved": named, "set": worker.typed(), "checksums": checksums}))
}

pub(super) async fn set_damaged(State(api): SharedApi, Path(set): Path<String>) -> Answered {
    let worker = api.registry.lookup.set(&set).await?;
    let named = api.registry.lookup.named(&worker.plan.id).await?;
    listed(&worker, None, named).await
}

pub(super) async fn volume_damaged(State(api): SharedApi, Path(volume): Path<String>) -> Answered {
    let Found { worker, name, named } = api.registry.lookup.find(&volume).await?;
    listed(&worker, Some(&name), named).await
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Decision {
    action: Resolve,
    /// All damaged data; otherwise the blocks that overlap the range.
    #[serde(default)]
    all: bool,
    range: Option<Range>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Range {
    sector: u64,
    sectors: u64,
}

impl Decision {
    /// The range in sectors; none for all data.
    fn range(&self) -> Result<Option<(u64, u64)>, Refusal> {
        match (self.all, &self.range) {
            (true, None) => Ok(None),
            (false, Some(range)) if range.sectors > 0 => Ok(Some((range.sector, range.sectors))),
            _ => Err(Refusal::malformed(
                "expected either \"all\": true, or a range of at least one sector".into(),
            )),
        }
    }
}

/// Carries a decision out.
async fn decide(worker: Arc<Worker>, volume: Option<String>, decision: Decision, named: Named) -> Answered {
    let (action, range) = (decision.action, decision.range()?);
    let command = Command::ResolveDamaged { volume: volume.clone(), range, decision: action };
    let work = async move {
        let answer = worker.command(command).await?;
        Ok((answer, list(&worker, volume.as_deref()).await?))
    };
    let (answer, left) = to_the_end(work).await?;
    let sectors = match answer {
        Answer::Resolved { sectors } => sectors,
        _ => 0,
    };
    ok(json!({"sectors": sectors, "bytes": sectors * 512, "damaged": left, "resolved": named}))
}

pub(super) async fn set_decide(
    State(api): SharedApi,
    Extension(audit): Audited,
    Path(set): Path<String>,
    body: Bytes,
) -> Answered {
    let decision: Decision = parse(&body)?;
    audit.does(format!("{} of {set}", in_words(&decision)));
    let (worker, named) = cached_set_of(&api, &audit, &set).await?;
    decide(worker, None, decision, named).await
}

pub(super) async fn volume_decide(
    State(api): SharedApi,
    Extension(audit): Audited,
    Path(volume): Path<String>,
    body: Bytes,
) -> Answered {
    let decision: Decision = parse(&body)?;
    audit.does(format!("{} of {volume}", in_words(&decision)));
    let Found { worker, name, named } = volume_of(&api, &audit, &volume).await?;
    decide(worker, Some(name), decision, named).await
}

/// A decision as the audit names it.
fn in_words(decision: &Decision) -> String {
    let range = match &decision.range {
        Some(range) => format!("sectors {}+{}", range.sector, range.sectors),
        None => "all".to_owned(),
    };
    format!("{} damaged data ({range})", decision.action.name())
}
