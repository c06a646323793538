//! Flash-only volumes of a served set: their room, and how they are made, stopped, served again and deleted.
//!
//! A stopped one stays in the set and in the session without exports, so its size and its label count. The rule for the room
//! is in `serve::room`. Must not know the client.

use std::rc::Rc;

use engine::{CacheSet, Volume};
use format::Sectors;
use serve::room::Room;
use serve::{Failure, plain};

use super::disabled::{self, Needs};
use super::exporting::{export_rest, exports_of};
use super::{Host, key, shown, stops};
use crate::order::{CreatedVolume, NewVolume, StartedVolume};

/// The room of the set now.
pub(super) fn room(set: &CacheSet) -> Room {
    let status = set.status();
    let flash_only = set.volumes().into_iter().filter(|v| v.is_flash_only());
    let taken = Sectors(flash_only.map(|v| v.size().0).sum());
    Room::new(status.nbuckets, status.bucket_sectors, set.tunables().cutoff_writeback_sync, taken)
}

/// The refusal of what needs a served volume.
pub(super) fn is_stopped(volume: &Volume) -> Failure {
    let (label, name) = (volume.tunables().label, volume.name());
    let typed = plain::typed(&label, &name);
    Failure::Failed(format!(
        "{}: is not served: it was stopped; run `ubcache register {typed}`",
        shown(volume)
    ))
}

pub(super) async fn create(host: &Host<'_>, wanted: &NewVolume) -> Result<CreatedVolume, Failure> {
    let set = host.session.needs_set()?;
    disabled::refuse(host, &Needs::Cache)?;
    let (room, sectors) = (room(set), format::Sectors(wanted.sectors));
    room.check(set.uuid(), sectors.bytes())?;
    if wanted.dry_run {
        return Ok(CreatedVolume { name: None, not_exported: None, room });
    }
    let volume = set.create_volume(serve::session::new_uuid(), sectors, &wanted.label).await?;
    host.admit(volume.clone()).await?;
    let not_exported = host.with(&volume, |s| s.problem.clone()).flatten();
    Ok(CreatedVolume { name: Some(volume.name()), not_exported, room })
}

pub(super) async fn delete(host: &Host<'_>, name: &str, is_wanted: impl Fn() -> bool) -> Result<(), Failure> {
    let (set, volume) = (host.session.needs_set()?, host.session.volume(name)?);
    let Some(inode) = volume.inode().filter(|_| volume.is_flash_only()) else {
        return Err(Failure::Failed(format!("{}: is not a flash-only volume", shown(&volume))));
    };
    let key = key(&host.session, &volume);
    let stop = host.stops.begin(Some(volume.name()), host.driver.handle().now());
    stops::release(host, &stop, Some(&volume), is_wanted).await?;
    host.served.borrow_mut().retain(|s| !Rc::ptr_eq(&s.volume, &volume));
    let deleted = set.delete_volume(inode).await;
    host.session.log_events();
    deleted?;
    host.session.forget(&volume);
    host.shared.state().forget_volume(&key.id);
    Ok(())
}

/// Marks a flash-only volume as stopped, and flushes it. The caller has ended its exports. If the flush fails, the volume
/// stays stopped, and the caller gets the error.
pub(super) async fn stop(host: &Host<'_>, volume: &Rc<Volume>) -> Result<(), Failure> {
    host.with(volume, |s| (s.stopped, s.problem) = (true, None));
    volume.flush().await?;
    Ok(())
}

/// Serves a stopped volume again. Of a served one it tries the exports again that are not up.
pub(super) async fn start(host: &Host<'_>, name: &str) -> Result<StartedVolume, Failure> {
    let volume = host.session.volume(name)?;
    let already = host.with(&volume, |s| !s.stopped) != Some(false);
    let key = key(&host.session, &volume);
    if already {
        export_rest(host, &volume).await;
    } else {
        let (started, problem) = exports_of(host, &volume, &key, &[]).await?;
        host.with(&volume, |s| {
            (s.exports, s.problem, s.stopped) = (started, problem, false);
            s.ended.clear();
        });
    }
    let not_exported = host.with(&volume, |s| s.problem.clone()).flatten();
    Ok(StartedVolume { already, not_exported })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A volume of any size could be made, whose writes fail when the cache is full.
    #[test]
    fn a_volume_that_does_not_fit_is_refused_with_figures() {
        rig::Shape::default().run(async |rig| {
            let before = room(&rig.set);
            assert_eq!(before.taken_bytes, 0);
            before.check(rig.set.uuid(), before.most_bytes).expect("it fits exactly");
            let said =
                before.check(rig.set.uuid(), before.most_bytes + 512).expect_err("too large").to_string();
            assert!(said.contains("70 % of the cache") && said.contains("does not fit"), "{said}");
            let made = rig.set.create_volume(format::Uuid([3; 16]), Sectors(64), "").await;
            made.expect("a volume");
            assert_eq!(room(&rig.set), Room { taken_bytes: Sectors(64).bytes(), ..before });
        });
    }
}
