//! The exports of the volumes of one thread.
//!
//! Owns the start of exports, and the second try of those that are not up. Must not know the sender of orders, nor when a
//! volume stops.

use std::path::Path;
use std::rc::Rc;

use engine::Volume;
use serve::exports::{self, Context, Sharing, Spec, Way};
use serve::{Failure, message};

use super::{Host, RunningExport, key, shown};
use crate::config::Key;
use crate::places::{self, Decided};
use crate::shared::Shared;

/// Starts the configured exports of a volume except those that are up, and its link. Returns the started ones, and why
/// some could not be started.
///
/// # Errors
/// If the configuration cannot be parsed.
pub(super) async fn exports_of(
    host: &Host<'_>,
    volume: &Rc<Volume>,
    key: &Key,
    up: &[String],
) -> Result<(Vec<RunningExport>, Option<String>), Failure> {
    let (name, shown) = (volume.name(), shown(volume));
    let (mut started, mut problems) = (Vec::new(), Vec::new());
    let (of, named) = (key.clone(), name.clone());
    let decided = host.elsewhere(move |shared| claim(shared, &of, &named)).await??;
    for (spec, allowed) in decided.into_iter().filter(|(spec, _)| !up.contains(&spec.to_string())) {
        let export = match allowed {
            Ok(sharing) => export(host, spec, sharing, volume).await.map_err(|e| elsewhere(host, key, e)),
            Err(refused) => Err(refused),
        };
        match export {
            Ok(running) => started.push(running),
            Err(e) => {
                let why = e.message().unwrap_or_default().to_owned();
                message::message(
                    "error",
                    &format!("{shown}: cannot be exported: {why}, then run `ubcache reload`"),
                );
                problems.push(why);
            }
        }
    }
    let problem = (!problems.is_empty()).then(|| problems.join("; "));
    let ways: Vec<_> = started.iter().flat_map(|e| e.export.ways(&name)).collect();
    link(host, key, &ways).await;
    match (ways.is_empty(), &problem) {
        (false, _) => message::note(format!("{shown} ready: {}", exports::in_words(&ways))),
        (true, None) => message::note(format!("{shown} is served; the configuration has no exports for it")),
        (true, Some(_)) => {}
    }
    Ok((started, problem))
}

/// Decides which of its addresses a volume may have, and stores that before clients can reach the volume: after a crash, the
/// addresses are still its own. An export that cannot be stored is not refused.
fn claim(shared: &Shared, key: &Key, name: &str) -> Result<Vec<Decided>, Failure> {
    let decided = places::claim(shared, key, name);
    let storing = shared.state().storing();
    // The writer reports it.
    let _why = storing.not_stored();
    decided
}

/// Makes the link of a volume to its block device, if it has one.
async fn link(host: &Host<'_>, key: &Key, ways: &[Way]) {
    if let Some(device) = ways.iter().find(|way| way.is_block_device()) {
        let (key, device) = (key.clone(), device.address.clone());
        let add = move |shared: &Shared| shared.links.add(&key.id, &key.label, Path::new(&device));
        if let Err(e) = host.elsewhere(add).await {
            message::warn(format!("a link cannot be made: {e}"));
        }
    }
}

/// Tries the exports of every volume again that has not all of them. Returns what came of it, by volume.
pub(super) async fn export_what_is_not_up(host: &Host<'_>) -> Vec<String> {
    let mut said = Vec::new();
    for volume in host.session.volumes() {
        said.extend(export_rest(host, &volume).await);
    }
    said
}

/// Tries the exports of a volume again that are not up. Returns what came of it.
pub(super) async fn export_rest(host: &Host<'_>, volume: &Rc<Volume>) -> Vec<String> {
    let up = host.with(volume, |s| {
        let is_due = s.problem.is_some() && !s.stopped;
        is_due.then(|| s.exports.iter().map(|e| e.spec.to_string()).collect::<Vec<_>>())
    });
    let Some(up) = up.flatten() else { return Vec::new() };
    let (mut said, shown) = (Vec::new(), shown(volume));
    let (started, problem) = match exports_of(host, volume, &key(&host.session, volume), &up).await {
        Ok(tried) => tried,
        Err(e) => (Vec::new(), Some(e.message().unwrap_or_default().to_owned())),
    };
    let ways: Vec<_> = started.iter().flat_map(|e| e.export.ways(&volume.name())).collect();
    if !ways.is_empty() {
        said.push(format!("{shown}: exported: {}", exports::in_words(&ways)));
    }
    if let Some(why) = &problem {
        said.push(format!("{shown}: still cannot be exported: {why}, then run `ubcache reload`"));
    }
    host.with(volume, |s| {
        s.exports.extend(started);
        s.problem = problem;
    });
    said
}

/// The failure of an export, with the key of the configuration that gives it another place.
fn elsewhere(host: &Host<'_>, key: &Key, e: Failure) -> Failure {
    let text = format!("{e}; correct this, or change {} of the configuration", host.shared.exports_key(key));
    Failure::caused(text, e)
}

async fn export(
    host: &Host<'_>,
    spec: Spec,
    sharing: Sharing,
    volume: &Rc<Volume>,
) -> Result<RunningExport, Failure> {
    let spec = host.elsewhere(move |_| spec.prepare().map(|()| spec)).await??;
    let nbd = host.shared.nbd();
    spec.check(&nbd)?;
    let volumes = [volume.clone()];
    let context = Context {
        driver: host.driver,
        volumes: &volumes,
        id: host.plan.id.clone(),
        place: volume.name(),
        sharing,
        nbd,
        ublk: None,
    };
    let export = exports::start(&spec, &context).await?;
    Ok(RunningExport { spec, sharing, export })
}

/// Starts exports again that ended before another one turned out to be in use, and makes the links of these volumes again.
pub(super) async fn export_again(
    host: &Host<'_>,
    ended: Vec<(Rc<Volume>, Spec, Sharing)>,
    volumes: &[Rc<Volume>],
) {
    for (volume, spec, sharing) in ended.into_iter().rev() {
        match export(host, spec, sharing, &volume).await {
            Ok(running) => drop(host.with(&volume, |s| s.exports.push(running))),
            Err(e) => {
                let why = elsewhere(host, &key(&host.session, &volume), e).to_string();
                let shown = shown(&volume);
                message::message(
                    "error",
                    &format!("{shown}: cannot be exported: {why}, then run `ubcache reload`"),
                );
                host.with(&volume, |s| s.problem = Some(why));
            }
        }
    }
    for volume in volumes {
        let name = volume.name();
        let ways =
            host.with(volume, |s| s.exports.iter().flat_map(|e| e.export.ways(&name)).collect::<Vec<_>>());
        link(host, &key(&host.session, volume), &ways.unwrap_or_default()).await;
    }
}
