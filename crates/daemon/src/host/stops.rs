//! Stops of volumes, which may wait for a device that does not answer.
//!
//! Owns the end of exports at a stop, and what clients see of a stop that has not ended: its age, and the exports that it has
//! ended already. Must not know the sender of the order.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use blockio::users;
use engine::Volume;
use io::Nanos;
use metrics::DeviceLoad;
use serve::Failure;
use serve::exports::Occupied;
use serve::snapshot::StopFigures;

use super::{Host, RunningExport, exporting, key, shown};

/// The stops that have begun and have not ended.
#[derive(Default)]
pub(super) struct Stops {
    under_way: RefCell<Vec<Rc<Stop>>>,
}

struct Stop {
    /// Name of the volume; `None` if everything is being stopped.
    volume: Option<String>,
    began: Nanos,
    is_final: Cell<bool>,
}

/// A stop, until this is dropped.
pub(super) struct StopGuard<'a> {
    stops: &'a Stops,
    stop: Rc<Stop>,
}

impl Drop for StopGuard<'_> {
    fn drop(&mut self) {
        self.stops.under_way.borrow_mut().retain(|stop| !Rc::ptr_eq(stop, &self.stop));
    }
}

impl Stops {
    /// Notes the begin of the stop of the volume with this name, or of everything.
    pub(super) fn begin(&self, volume: Option<String>, now: Nanos) -> StopGuard<'_> {
        let stop = Rc::new(Stop { volume, began: now, is_final: Cell::new(false) });
        self.under_way.borrow_mut().push(stop.clone());
        StopGuard { stops: self, stop }
    }

    /// Notes the begin of the stop of everything, after which the thread ends.
    pub(super) fn begin_final(&self, now: Nanos) -> StopGuard<'_> {
        let guard = self.begin(None, now);
        guard.stop.is_final.set(true);
        guard
    }

    /// The stops for clients.
    pub(super) fn figures(&self, now: Nanos) -> Vec<StopFigures> {
        let stops = self.under_way.borrow();
        let figures = stops.iter().map(|stop| StopFigures {
            volume: stop.volume.clone(),
            seconds: seconds(now.since(stop.began)),
            is_final: stop.is_final.get(),
        });
        figures.collect()
    }

    /// The age of the oldest stop of the volume with this name, or of everything.
    fn age(&self, volume: &str, now: Nanos) -> Option<Nanos> {
        let stops = self.under_way.borrow();
        let of_it = stops.iter().filter(|stop| stop.volume.as_ref().is_none_or(|name| name == volume));
        of_it.map(|stop| now.since(stop.began)).max()
    }
}

fn seconds(time: Nanos) -> u64 {
    time.0 / Nanos::from_secs(1).0
}

/// Why a volume cannot be reached as it should: an export could not be started, or a stop that has not ended has ended one.
///
/// While the daemon stops, the second is no problem: no export comes back.
pub(super) fn problem_of(host: &Host<'_>, volume: &Rc<Volume>) -> Option<String> {
    let known = host.with(volume, |s| (s.problem.clone(), s.ended.join(", "), s.stopped));
    let (problem, ended, is_stopped) = known.unwrap_or_default();
    let age = host.stops.age(&volume.name(), host.driver.handle().now());
    let age = age.filter(|_| !is_stopped && !host.shared.is_stopping()).map(seconds);
    // A volume that is not in the list has no export any more.
    let is_listed = host.with(volume, |_| ()).is_some();
    match (problem, age) {
        (None, Some(age)) if !ended.is_empty() => {
            Some(format!("a stop that began {age} s ago has ended {ended}, and is not done"))
        }
        (None, Some(age)) if !is_listed => Some(format!("a stop that began {age} s ago is not done")),
        (problem, _) => problem,
    }
}

/// The requests to the cache device and to each backing device.
pub(super) fn load_of(host: &Host<'_>, figures: &metrics::Figures) -> Vec<DeviceLoad> {
    let caches = figures.sets.iter().zip(&host.session.set);
    let caches = caches.map(|(figures, set)| DeviceLoad::of_cache(figures, set.cache_in_flight()));
    let volumes = host.session.volumes();
    let disks = figures.volumes().filter_map(|(_, figures)| {
        let volume = volumes.iter().find(|volume| volume.name() == figures.name)?;
        DeviceLoad::of_backing(figures, volume.backing_in_flight())
    });
    caches.chain(disks).collect()
}

/// Releases all volumes. If nothing is in use, the thread stops.
pub(super) async fn release_all(host: &Host<'_>, is_wanted: impl Fn() -> bool) -> Result<(), Failure> {
    let stop = host.stops.begin(None, host.driver.handle().now());
    let released = release(host, &stop, None, is_wanted).await;
    host.stopping.set(host.stopping.get() || released.is_ok());
    released
}

/// Ends the exports and the link of a volume, or of all, if none is in use, and if that is still wanted in the end; else
/// every one of them serves on.
pub(super) async fn release(
    host: &Host<'_>,
    stop: &StopGuard<'_>,
    only: Option<&Rc<Volume>>,
    is_wanted: impl Fn() -> bool,
) -> Result<(), Failure> {
    let served = host.session.volumes();
    let volumes: Vec<_> =
        served.into_iter().filter(|v| only.is_none_or(|only| Rc::ptr_eq(only, v))).collect();
    for volume in &volumes {
        let name = volume.name();
        let ways = host.with(volume, |s| s.exports.iter().flat_map(|e| e.export.ways(&name)).collect());
        let users = host.users_of(ways.unwrap_or_default()).await;
        if !users.is_empty() {
            return Err(in_use(volume, is_left(host, volume), &users::in_words(&users)));
        }
    }
    // udev must not find the label when it handles the event of a device that ends: it would make the link again.
    let ids: Vec<String> = volumes.iter().map(|volume| key(&host.session, volume).id).collect();
    host.elsewhere(move |shared| ids.iter().for_each(|id| shared.links.remove(id))).await?;
    let ended = end_exports(host, &volumes, is_wanted).await;
    if ended.is_ok() {
        stop.stop.is_final.set(true);
        return ended;
    }
    for volume in &volumes {
        host.with(volume, |s| s.ended.clear());
    }
    ended
}

async fn end_exports(
    host: &Host<'_>,
    volumes: &[Rc<Volume>],
    is_wanted: impl Fn() -> bool,
) -> Result<(), Failure> {
    let mut ended = Vec::new();
    for volume in volumes {
        let name = volume.name();
        while let Some(Some(running)) = host.with(volume, |s| s.exports.pop()) {
            let RunningExport { spec, sharing, export } = running;
            let addresses: Vec<String> = export.ways(&name).into_iter().map(|way| way.address).collect();
            host.with(volume, |s| s.ended.extend(addresses));
            if let Err(Occupied { export, why }) = export.stop_if_free().await {
                host.with(volume, |s| s.exports.push(RunningExport { spec, sharing, export }));
                exporting::export_again(host, ended, volumes).await;
                let users = why.message().unwrap_or_default();
                return Err(in_use(volume, is_left(host, volume), users));
            }
            ended.push((volume.clone(), spec, sharing));
        }
    }
    if !is_wanted() {
        // The stop took so long that its command has ended.
        exporting::export_again(host, ended, volumes).await;
        return Err(Failure::Failed(
            "the command ended before its stop was done; the volume is served".into(),
        ));
    }
    Ok(())
}

/// Whether a volume is served by the thread of its former set: it was detached.
fn is_left(host: &Host<'_>, volume: &Volume) -> bool {
    host.session.set.is_some() && volume.inode().is_none()
}

/// The refusal of a stop, with the page of the guide: of a volume that the set has only because it was detached in use, or of
/// one whose users an upgrade does not disturb.
fn in_use(volume: &Volume, is_left: bool, users: &str) -> Failure {
    let page = match is_left {
        true => "it was detached while it was in use, see the page give-up of the guide",
        false => "to upgrade the program without unmounting, see the page upgrade of the guide",
    };
    Failure::Failed(format!(
        "{} is in use and stays served: {users}; unmount or close it, then try again; {page}",
        shown(volume)
    ))
}
