//! The refusal of jobs that need the cache device of a set that is disabled.
//!
//! Owns its message: which dirty data only the cache device has, and the next step. Must not know the job.

use std::rc::Rc;

use engine::Volume;
use serve::amount::human;
use serve::{Failure, plain};

use super::{Host, shown};

/// What a job does with the cache device.
pub(super) enum Needs<'a> {
    /// It removes this volume from the set.
    Detach(&'a Rc<Volume>),
    /// It writes the dirty data of this volume back, or of all.
    Drain(Option<&'a Rc<Volume>>),
    /// It reads or writes the cache device alone.
    Cache,
}

impl Needs<'_> {
    /// The data that only the cache device has and that the job concerns. That of a set includes volumes that were stopped and
    /// disks that are not registered; the data of flash-only volumes cannot be drained.
    fn dirty(&self, host: &Host<'_>) -> Vec<String> {
        let volumes = match self {
            Needs::Detach(one) | Needs::Drain(Some(one)) => vec![Rc::clone(one)],
            Needs::Drain(None) | Needs::Cache => host.session.volumes(),
        };
        let counts = |v: &&Rc<Volume>| matches!(self, Needs::Cache) || !v.is_flash_only();
        let of = |bytes: u64, name: &str| format!("{} of {name}", human(bytes));
        let served = volumes.iter().filter(counts).map(|v| (v.dirty_sectors().bytes(), shown(v)));
        let mut dirty: Vec<String> =
            served.filter(|(bytes, _)| *bytes > 0).map(|(bytes, name)| of(bytes, &name)).collect();
        if let (Needs::Drain(None) | Needs::Cache, Some(set)) = (self, &host.session.set) {
            let others = set.dirty_without_volume().into_iter();
            dirty.extend(others.map(|(name, sectors)| of(sectors.bytes(), &plain::label(&name))));
        }
        dirty
    }
}

/// Refuses a job if the set is disabled.
pub(super) fn refuse(host: &Host<'_>, needs: &Needs<'_>) -> Result<(), Failure> {
    let Some(status) = host.session.set.as_ref().map(engine::CacheSet::status) else { return Ok(()) };
    let Some(why) = status.failed else { return Ok(()) };
    let dirty = needs.dirty(host);
    let set = plain::named(&status.label, format!("set {}", status.set_uuid));
    let cache = status.device;
    let again = format!("`ubcache unregister {cache} && ubcache register {cache}`");
    let next = match (needs, dirty.is_empty()) {
        (Needs::Drain(_), true) => return Ok(()),
        (_, false) => format!(
            "dirty data is on {cache} alone ({}), and cannot be written back until that device works again; unmount or close \
             what uses the volumes, run {again}, then this command again; if the device does not come back, see the page \
             dead-ssd-dirty of the guide",
            dirty.join(", ")
        ),
        (Needs::Detach(_), true) => format!(
            "this volume has no dirty data, so nothing is lost; unmount or close what uses the set, then run `ubcache \
             unregister {cache}`, and attach the disk to another cache; see the page dead-ssd-clean of the guide"
        ),
        (Needs::Cache, true) => format!(
            "unmount or close what uses its volumes, run {again}, then this command again; if the device does not come back, \
             see the page dead-ssd-clean of the guide"
        ),
    };
    Err(Failure::Failed(format!("{set} is disabled: {why}; {next}")))
}
