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
    /// It writes the dirty data of these volumes back.
    Drain(&'a [Rc<Volume>]),
    /// It reads or writes the cache device alone.
    Cache,
}

/// Refuses a job if the set is disabled.
pub(super) fn refuse(host: &Host<'_>, needs: Needs<'_>) -> Result<(), Failure> {
    let Some(status) = host.session.set.as_ref().map(engine::CacheSet::status) else { return Ok(()) };
    let Some(why) = status.failed else { return Ok(()) };
    let volumes = match needs {
        Needs::Detach(volume) => std::slice::from_ref(volume),
        Needs::Drain(volumes) => volumes,
        Needs::Cache => &[],
    };
    let is_dirty = |v: &&Rc<Volume>| !v.is_flash_only() && v.dirty_sectors().bytes() > 0;
    let dirty: Vec<String> = volumes
        .iter()
        .filter(is_dirty)
        .map(|v| format!("{} of {}", human(v.dirty_sectors().bytes()), shown(v)))
        .collect();
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
