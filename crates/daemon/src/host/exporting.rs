//! The exports of the volumes of one thread.
//!
//! Owns the start of exports, and the second try of those that are not up. Must not know the sender of orders, nor when a
//! volume stops.

use std::path::Path;
use std::rc::Rc;

use engine::Volume;
use serve::exports::{self, Context, Sharing, Spec};
use serve::{Failure, message};

use super::{Host, RunningExport, key, shown};
use crate::config::Key;
use crate::places;

impl Host<'_> {
    /// Starts the configured exports of a volume except those that are up, and its link. Returns the started ones, and why
    /// one could not be started.
    ///
    /// # Errors
    /// If the configuration cannot be parsed.
    pub(super) async fn exports_of(
        &self,
        volume: &Rc<Volume>,
        key: &Key,
        up: &[String],
    ) -> Result<(Vec<RunningExport>, Option<String>), Failure> {
        let (name, shown) = (volume.name(), shown(volume));
        let (mut started, mut problem) = (Vec::new(), None);
        let decided = places::claim(self.shared, key, &name)?;
        for (spec, allowed) in decided.into_iter().filter(|(spec, _)| !up.contains(&spec.to_string())) {
            let export = match allowed {
                Ok(sharing) => self.export(spec, sharing, volume).await,
                Err(refused) => Err(refused),
            };
            match export {
                Ok(running) => started.push(running),
                Err(e) => {
                    let why = e.message().unwrap_or_default().to_owned();
                    message::message("error", &format!("{shown}: cannot be exported: {why}"));
                    problem = Some(why);
                }
            }
        }
        let ways: Vec<_> = started.iter().flat_map(|e| e.export.ways(&name)).collect();
        if let Some(device) = ways.iter().find(|way| way.is_block_device()) {
            self.shared.links.add(&key.id, &key.label, Path::new(&device.address));
        }
        match (ways.is_empty(), &problem) {
            (false, _) => message::note(format!("{shown} ready: {}", exports::in_words(&ways))),
            (true, None) => {
                message::note(format!("{shown} is served; the configuration has no exports for it"))
            }
            (true, Some(_)) => {}
        }
        Ok((started, problem))
    }

    /// Tries the exports of every volume again that has not all of them. Returns what came of it, by volume.
    pub(super) async fn export_what_is_not_up(&self) -> Vec<String> {
        let mut said = Vec::new();
        for volume in self.session.volumes() {
            let up = self.with(&volume, |s| {
                let is_due = s.problem.is_some() && !s.stopped;
                is_due.then(|| s.exports.iter().map(|e| e.spec.to_string()).collect::<Vec<_>>())
            });
            let Some(up) = up.flatten() else { continue };
            let shown = shown(&volume);
            let (started, problem) = match self.exports_of(&volume, &key(&self.session, &volume), &up).await {
                Ok(tried) => tried,
                Err(e) => (Vec::new(), Some(e.message().unwrap_or_default().to_owned())),
            };
            let ways: Vec<_> = started.iter().flat_map(|e| e.export.ways(&volume.name())).collect();
            if !ways.is_empty() {
                said.push(format!("{shown}: exported: {}", exports::in_words(&ways)));
            }
            if let Some(why) = &problem {
                said.push(format!("{shown}: still cannot be exported: {why}"));
            }
            self.with(&volume, |s| {
                s.exports.extend(started);
                s.problem = problem;
            });
        }
        said
    }

    pub(super) async fn export(
        &self,
        spec: Spec,
        sharing: Sharing,
        volume: &Rc<Volume>,
    ) -> Result<RunningExport, Failure> {
        spec.prepare()?;
        let nbd = self.shared.nbd();
        spec.check(&nbd)?;
        let volumes = [volume.clone()];
        let context = Context {
            driver: self.driver,
            volumes: &volumes,
            id: self.plan.id.clone(),
            place: volume.name(),
            sharing,
            nbd,
            ublk: serve::pressure::ublk_shape(),
        };
        let export = exports::start(&spec, &context).await?;
        Ok(RunningExport { spec, sharing, export })
    }

    /// Starts exports again that ended before another one turned out to be in use.
    pub(super) async fn export_again(&self, ended: Vec<(Rc<Volume>, Spec, Sharing)>) {
        for (volume, spec, sharing) in ended.into_iter().rev() {
            match self.export(spec, sharing, &volume).await {
                Ok(running) => drop(self.with(&volume, |s| s.exports.push(running))),
                Err(e) => {
                    let why = e.message().unwrap_or_default().to_owned();
                    message::message("error", &format!("{}: cannot be exported: {why}", shown(&volume)));
                    self.with(&volume, |s| s.problem = Some(why));
                }
            }
        }
    }
}
