//! What an operator has to do: devices, sets and volumes that are not served as they should be.
//!
//! Owns the list of problems, their order and the command that comes next for each. It reads views only, so a test can make
//! any situation. Must not know how a problem is shown.

mod copies;
mod labels;
mod leftovers;
mod waits;

pub(crate) use labels::shared as shared_labels;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use format::{counted, form};
use serde::Serialize;
use serve::Snapshot;
use serve::exports::{Opens, Way};
use serve::snapshot::{SetFigures, SlotDirty, TunableFigure, VolumeFigures};

pub(crate) use leftovers::{DeadExport, dead_exports};
pub(crate) use waits::{
    CommandUnderWay, commands_that_wait, jobs_that_wait, silent_devices, stops_that_wait,
};

use super::views::{Awaited, Blank, DeviceView, SetView};
use crate::state::{STORED_AGAIN_EVERY, State};

/// A problem, and the command that comes next.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct Problem {
    /// One of the kinds in the order of `KINDS`: `stopping`, `set_failed`, `io_disabled`, `device_failed`, `device_waiting`,
    /// `set_silent`, `device_silent`, `stop_waits`, `command_waits`, `job_waits`, `dead_export`, `damaged`, `one_copy`,
    /// `dirty_without_disk`, `stale`, `not_exported`, `io_errors`, `label_shared`, `state_not_stored` or `state_not_writable`.
    pub(crate) kind: &'static str,
    /// What is wrong, and of what.
    pub(crate) text: String,
    /// The command to run next.
    pub(crate) command: String,
    /// What it is a problem of.
    #[serde(flatten)]
    pub(crate) of: Subject,
}

impl Problem {
    /// A problem whose subject is not known yet.
    fn new(kind: &'static str, text: String, command: String) -> Problem {
        Problem { kind, text, command, of: Subject::default() }
    }
}

/// The set, volume or device that has a problem, as far as it has one.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize)]
pub(crate) struct Subject {
    /// UUID of the set.
    pub(crate) set: Option<String>,
    /// Name of the volume.
    pub(crate) volume: Option<String>,
    /// Path of the device.
    pub(crate) device: Option<PathBuf>,
}

/// The kinds in the order in which they are listed: what stops requests comes first.
const KINDS: [&str; 20] = [
    "stopping",
    "set_failed",
    "io_disabled",
    "device_failed",
    "device_waiting",
    "set_silent",
    "device_silent",
    "stop_waits",
    "command_waits",
    "job_waits",
    "dead_export",
    "damaged",
    "one_copy",
    "dirty_without_disk",
    "stale",
    "not_exported",
    "io_errors",
    "label_shared",
    "state_not_stored",
    "state_not_writable",
];

/// All problems, the worst first.
pub(crate) fn problems(sets: &[SetView], devices: &[DeviceView]) -> Vec<Problem> {
    let mut found = Vec::new();
    for set in sets {
        let before = found.len();
        of_set(set, devices, &mut found);
        for volume in &set.figures.volumes {
            let before = found.len();
            of_volume(set, volume, (sets, devices), &mut found);
            found.iter_mut().skip(before).for_each(|p| p.of.volume = Some(volume.name.clone()));
        }
        let id = set.has_cache.then(|| set.id.clone());
        found.iter_mut().skip(before).for_each(|p| p.of.set.clone_from(&id));
    }
    for device in devices {
        let problem = of_device(device, sets);
        let of = Subject { device: Some(device.path.clone()), set: device.set.clone(), volume: None };
        found.extend(problem.map(|p| Problem { of, ..p }));
    }
    found.extend(labels::shared(sets, devices, |_| true));
    in_order(&mut found);
    found
}

/// Sorts problems, the worst first.
pub(crate) fn in_order(found: &mut [Problem]) {
    let place = |problem: &Problem| KINDS.iter().position(|kind| *kind == problem.kind);
    found.sort_by_key(place);
}

/// The number of problems of each kind, also of kinds without a problem.
pub(crate) fn counts(found: &[Problem]) -> BTreeMap<&'static str, u64> {
    let mut counts = BTreeMap::from(KINDS.map(|kind| (kind, 0)));
    for problem in found {
        *counts.entry(problem.kind).or_default() += 1;
    }
    counts
}

/// The problem of a state file that cannot be written, which is the last in the list.
pub(crate) fn state_not_stored(state: &State) -> Option<Problem> {
    let again = STORED_AGAIN_EVERY.as_secs();
    let (kind, text) = match (state.not_stored(), state.refusing()) {
        (Some(why), _) => (
            "state_not_stored",
            format!(
                "{why}; what is served stays served, the next start of the daemon may not know the last changes, and the \
                 daemon tries again every {again} s"
            ),
        ),
        (None, Some(why)) => (
            "state_not_writable",
            format!(
                "{why}; what is served stays served, and all changes are stored; commands that change something are refused \
                 until it can be written, and the daemon looks again every {again} s"
            ),
        ),
        (None, None) => return None,
    };
    Some(Problem::new(kind, text, state.next_command()))
}

/// What an operator calls a device: label, name of the volume, path.
fn title(device: &DeviceView) -> String {
    let path = device.path.display().to_string();
    match (device.label.is_empty(), &device.name) {
        (false, _) => format!("{} ({path})", serve::plain::label(&device.label)),
        (true, Some(name)) => format!("{name} ({path})"),
        (true, None) => path,
    }
}

/// What an operator calls a volume: label, or name.
pub(crate) fn volume_title(volume: &VolumeFigures) -> String {
    title_of(&volume.label, &volume.name)
}

fn title_of(label: &str, name: &str) -> String {
    match label.is_empty() {
        true => name.to_owned(),
        false => format!("{} ({name})", serve::plain::label(label)),
    }
}

/// The state of a device that is not served, and the command that comes next.
fn state_and_command(device: &DeviceView) -> (String, String) {
    let path = device.path.display();
    let mut why = device.why.clone().unwrap_or_else(|| match device.state {
        "stopped" => "it was stopped".to_owned(),
        _ => "it has no volume".to_owned(),
    });
    if device.blank == Some(Blank::Another) {
        why += "; this may be another device than the one that was registered here: look for that one, and register it; if it \
                does not come back, unregister this path";
    }
    let command = match &device.awaits {
        // The volume that is in use is that of the device before it was unplugged.
        Some(Awaited::EndOfUse(command)) => {
            command.clone().unwrap_or_else(|| "journalctl -u ubcache -n 50".to_owned())
        }
        _ if device.blank == Some(Blank::Overwritten) => format!("ubcache unregister {path}"),
        _ if device.blank == Some(Blank::Another) => "lsblk -o PATH,SIZE,MODEL,SERIAL,FSTYPE".to_owned(),
        Some(Awaited::FailedCache) => "ubcache status".to_owned(),
        Some(Awaited::Cache) => register_cache(device.cache_path.as_deref()),
        _ => format!("ubcache register {path}"),
    };
    (why, command)
}

/// The command that registers a cache device with this path; `None` if the daemon has never served it.
pub(crate) fn register_cache(path: Option<&Path>) -> String {
    path.map_or_else(
        || "ubcache register CACHE-DEVICE".to_owned(),
        |path| format!("ubcache register {}", path.display()),
    )
}

/// Why a device is not served, and the command that comes next, in one sentence.
pub(crate) fn next_step(device: &DeviceView) -> String {
    let (why, command) = state_and_command(device);
    format!("{why}; run `{command}`")
}

fn of_device(device: &DeviceView, sets: &[SetView]) -> Option<Problem> {
    let kind = match device.state {
        "failed" => "device_failed",
        "waiting" => "device_waiting",
        _ => return None,
    };
    // The failure of its set is listed once.
    let id = device.set.as_ref().or(device.uuid.as_ref());
    if kind == "device_failed" && sets.iter().any(|s| Some(&s.id) == id && s.state == "failed") {
        return None;
    }
    let (why, command) = state_and_command(device);
    // The reason of a failed registration begins with the path, which the title has.
    let why = why.strip_prefix(&format!("{}: ", device.path.display())).unwrap_or(&why);
    let dirty = if kind == "device_failed" { dirty_of_failed(device) } else { String::new() };
    Some(Problem::new(kind, format!("{} {}: {why}{dirty}", title(device), device.state), command))
}

/// Where the dirty data of a disk is that has failed, as the end of a message; empty if it has none.
fn dirty_of_failed(device: &DeviceView) -> String {
    let set = device.set.as_deref().or(device.left_dirty_in.as_deref());
    let (Some(set), amount) = (set, device.dirty_bytes) else { return String::new() };
    match (amount, &device.left_dirty_in, &device.cache_path) {
        (Some(0), ..) | (None, None, _) => String::new(),
        (Some(bytes), ..) => {
            format!("; cache set {set} has {} of dirty data of it", serve::amount::human(bytes))
        }
        (None, Some(set), path) => {
            let path = path.as_ref().map_or_else(String::new, |path| format!(" ({})", path.display()));
            format!(
                "; cache set {set} has dirty data of it, which is on its cache device{path} alone, and that device is not \
                 registered"
            )
        }
    }
}

fn is_on(tunables: &[TunableFigure], key: &str) -> bool {
    tunables.iter().any(|t| t.key == key && t.value == "1")
}

/// The label of a set, as the set says, or as its cache device said when it was probed.
fn label_of<'a>(set: &'a SetView, cache: Option<&'a DeviceView>) -> &'a str {
    match &set.figures.set {
        Some(figures) => &figures.names.label,
        None => cache.filter(|_| set.has_cache).map_or("", |device| &device.label),
    }
}

/// The cache device of a set, or the device that is served alone.
fn device_of<'a>(set: &SetView, devices: &'a [DeviceView]) -> Option<&'a DeviceView> {
    devices.iter().find(|d| match set.has_cache {
        true => d.kind == Some("cache") && d.set.as_ref() == Some(&set.id),
        false => d.uuid.as_ref() == Some(&set.id),
    })
}

/// What an operator calls a set, or a device that is served alone.
fn set_title(set: &SetView, device: Option<&DeviceView>) -> String {
    let path = || device.map_or_else(|| "DEVICE".to_owned(), |d| d.path.display().to_string());
    match (set.has_cache, device) {
        (false, Some(device)) => title(device),
        _ => serve::plain::named(label_of(set, device), format!("cache set {} ({})", set.id, path())),
    }
}

fn of_set(set: &SetView, devices: &[DeviceView], found: &mut Vec<Problem>) {
    let id = &set.id;
    let device = device_of(set, devices);
    let path = device.map_or_else(|| "DEVICE".to_owned(), |d| d.path.display().to_string());
    let what = set_title(set, device);
    let typed = serve::plain::typed(label_of(set, device), id);
    let why = set.why.as_deref().unwrap_or("no reason is known");
    found.extend(set.holders.iter().map(|holder| {
        let text = format!(
            "the daemon is stopping, and waits until {} is not in use: {}; unmount or close it, and the stop continues",
            title_of(&holder.label, &holder.name),
            holder.users
        );
        Problem::new("stopping", text, holder.command.clone())
    }));
    match set.state {
        "failed" => found.push(Problem::new(
            "set_failed",
            format!("{what} has failed: {why}"),
            format!("ubcache register {path}"),
        )),
        "serving" | "stopping" if set.why.is_some() => found.push(Problem::new(
            "set_silent",
            format!("{what} does not answer: {why}"),
            "journalctl -u ubcache".to_owned(),
        )),
        _ => {}
    }
    let Some(figures) = &set.figures.set else { return };
    if let Some(why) = &figures.failed {
        found.push(of_disabled_set(set, devices, why, (&what, &path)));
    }
    if is_on(&figures.tunables, "io_disable") {
        found.push(Problem::new(
            "io_disabled",
            format!("{what} fails every request, because io_disable is 1"),
            format!("ubcache set {typed} io_disable=0"),
        ));
    }
    found.extend(of_cache_errors(figures, &what));
    found.extend(of_damage(figures, (&what, typed)));
    if figures.failed.is_none() {
        // The failure has the dirty data of all disks, and a disk can be registered after it only.
        found.append(&mut of_missing_disks(set, figures, devices));
    }
}

/// A cache device that has failed requests, and whose set is not disabled for it yet.
fn of_cache_errors(figures: &SetFigures, what: &str) -> Option<Problem> {
    let errors = figures.device.io_errors;
    if errors == 0 || figures.failed.is_some() {
        return None;
    }
    let limit = figures.tunables.iter().find(|t| t.key == "io_error_limit").map(|t| &*t.value);
    let limit = limit.map_or_else(String::new, |n| format!("; the set is disabled at {n} (io_error_limit)"));
    Some(Problem::new(
        "io_errors",
        format!("{what}: {} to its cache device failed{limit}", counted(errors, "request")),
        "ubcache events --since 1d".to_owned(),
    ))
}

/// Dirty data in the cache that is damaged.
fn of_damage(figures: &SetFigures, (what, id): (&str, &str)) -> Option<Problem> {
    let checksums = figures.checksums.as_ref().filter(|c| c.damaged_dirty_bytes > 0)?;
    let blocks = checksums.damaged_dirty_bytes.div_ceil(checksums.block_bytes.max(1));
    let first = checksums.damaged.first().map_or_else(String::new, |d| {
        let is_there = if d.registered { "" } else { ", a disk that is not registered" };
        format!(", the first at sector {} of {}{is_there}", d.sector, serve::plain::label(&d.volume))
    });
    Some(Problem::new(
        "damaged",
        format!(
            "{} of dirty data {} damaged on {what}{first}: no other device has {}, and reads of {} fail; see the page bit-rot \
             of the guide",
            counted(blocks, "block"),
            form(blocks, "is", "are"),
            form(blocks, "it", "them"),
            form(blocks, "it", "them")
        ),
        format!("ubcache damaged {id}"),
    ))
}

/// The dirty data of slots whose volumes are not served, because they were stopped or their disks are not registered.
fn dirty_of_others<'a>(
    figures: &'a Snapshot,
    devices: &'a [DeviceView],
) -> impl Iterator<Item = (&'a SlotDirty, Option<&'a DeviceView>)> {
    let slots = figures.set.iter().flat_map(|set| &set.dirty_by_slot);
    let is_served = |slot: &SlotDirty| figures.volumes.iter().any(|v| v.slot == Some(slot.slot));
    // Another set of the group may have taken the disk over.
    let own = figures.set.as_ref().map(|set| &set.names.uuid);
    let is_of_another = move |slot: &SlotDirty| {
        let device = devices.iter().find(|d| d.uuid.is_some() && d.uuid == slot.uuid);
        slot.is_copy || device.is_some_and(|d| d.set.is_some() && d.set.as_ref() != own)
    };
    let others = slots.filter(move |slot| slot.dirty_bytes > 0 && !is_served(slot) && !is_of_another(slot));
    others.map(|slot| (slot, devices.iter().find(|d| d.uuid.is_some() && d.uuid == slot.uuid)))
}

/// The dirty data of a set by volume: of served ones, then of others. Each with its amount.
fn dirty_by_volume(figures: &Snapshot, devices: &[DeviceView]) -> (Vec<String>, Vec<String>) {
    use serve::amount::human;

    let is_dirty = |v: &&VolumeFigures| v.held.dirty_bytes > 0;
    let served = figures.volumes.iter().filter(is_dirty);
    let served = served.map(|v| format!("{} of {}", human(v.held.dirty_bytes), volume_title(v)));
    let others = dirty_of_others(figures, devices).map(|(slot, device)| {
        let (amount, uuid) = (human(slot.dirty_bytes), slot.uuid.as_deref().unwrap_or("unknown"));
        let (name, why) = match device {
            Some(device) => (title_of(&slot.label, device.name.as_deref().unwrap_or(uuid)), device.state),
            None => (title_of(&slot.label, uuid), "not registered"),
        };
        format!("{amount} of {name}: {why}")
    });
    (served.collect(), others.collect())
}

/// What the daemon does by itself with the set of a cache device that is plugged in again.
const STARTS_AGAIN: &str = "the set starts again as soon as its volumes are not in use";

/// The cache device of a set, if it is plugged in again and waits until the volumes of the set are not in use.
fn replugged<'a>(set: &SetView, devices: &'a [DeviceView]) -> Option<&'a DeviceView> {
    device_of(set, devices).filter(|device| matches!(device.awaits, Some(Awaited::EndOfUse(_))))
}

/// A set whose cache device has failed. Where its dirty data is, and what has to end before the device is registered again.
fn of_disabled_set(set: &SetView, devices: &[DeviceView], why: &str, (what, path): (&str, &str)) -> Problem {
    let figures = &set.figures;
    let problem = |text: String| {
        let text = format!("{what} is disabled: {why}; {text}");
        Problem::new("set_failed", text, format!("ubcache unregister {path} && ubcache register {path}"))
    };
    let (served, others) = dirty_by_volume(figures, devices);
    let is_clean = served.is_empty() && others.is_empty();
    let until = match (served.is_empty(), others.is_empty()) {
        (false, true) => ", and these volumes fail every request until the device works again",
        (false, false) => ", and its volumes fail every request until the device works again",
        (true, _) => ", and cannot be read until the device works again",
    };
    let dirty =
        format!("dirty data is on this cache device alone ({})", [served, others].concat().join(", "));
    match replugged(set, devices) {
        // To unregister the device would end what the daemon does by itself.
        Some(device) => {
            let dirty = if is_clean { "its volumes have no dirty data" } else { &dirty };
            let text = format!("{dirty}; the device is plugged in again, and {STARTS_AGAIN}");
            Problem { command: state_and_command(device).1, ..problem(text) }
        }
        None if set.group.is_some() && figures.volumes.is_empty() => Problem::new(
            "set_failed",
            format!(
                "{what} is disabled: {why}; no disk is served by it any more; if the device does not come back, see the page two-ssds of \
                 the guide"
            ),
            format!("ubcache unregister {path}"),
        ),
        None if is_clean => problem(
            "its volumes have no dirty data, so nothing is lost; if the device does not come back, see the page \
             dead-ssd-clean of the guide"
                .into(),
        ),
        None => problem(format!(
            "{dirty}{until}{}; if it never does, see the page dead-ssd-dirty of the guide",
            end_of_use(&figures.volumes)
        )),
    }
}

/// What has to end before the set of these volumes can be unregistered; empty if that is nothing.
fn end_of_use(volumes: &[VolumeFigures]) -> String {
    // Clients of NBD connect again by themselves.
    let is_mounted = |way: &&Way| way.kind.opens != Opens::Connection;
    let ways = volumes.iter().flat_map(|v| &v.exports).filter(is_mounted);
    let used: Vec<&str> = ways.map(|way| &*way.address).collect();
    match used.is_empty() {
        true => String::new(),
        false => format!("; first unmount or close what uses {}, then run the command", used.join(", ")),
    }
}

/// Dirty data of disks that are not served. A disk whose volume was stopped is no problem.
fn of_missing_disks(set: &SetView, figures: &SetFigures, devices: &[DeviceView]) -> Vec<Problem> {
    dirty_of_others(&set.figures, devices)
        .filter(|(_, device)| device.is_none())
        .map(|(slot, _)| {
            let uuid = slot.uuid.as_deref().unwrap_or("unknown");
            let label = match slot.label.is_empty() {
                true => String::new(),
                false => format!("{}, ", serve::plain::label(&slot.label)),
            };
            let path = slot.uuid.as_ref().and_then(|uuid| set.disks.get(uuid));
            // A device that cannot be found has neither a UUID nor other contents.
            let is_other = |d: &&DeviceView| d.uuid.is_some() || d.blank.is_some();
            let other = path.and_then(|path| devices.iter().find(|d| &d.path == path).filter(is_other));
            let (more, command) = match (other, path) {
                (Some(other), _) => (formatted(other), format!("ubcache super {}", other.path.display())),
                (None, Some(path)) => (String::new(), format!("ubcache register {}", path.display())),
                (None, None) => (String::new(), "ubcache register DISK".to_owned()),
            };
            let text = format!(
                "{} of dirty data in {} belong to a disk that is not registered ({label}UUID {uuid}){more}",
                serve::amount::human(slot.dirty_bytes),
                serve::plain::named(&figures.names.label, format!("cache set {}", set.id))
            );
            Problem::new("dirty_without_disk", text, command)
        })
        .collect()
}

/// What became of a disk at whose path there is another one now.
fn formatted(other: &DeviceView) -> String {
    format!(
        "; {} has UUID {} now: it was formatted, or another disk has this path; if the disk is gone for good, no command \
         drops this data alone: detach the other disks of the set, unregister its cache device, and format it with `ubcache \
         make -C DEVICE --wipe-dirty`",
        other.path.display(),
        other.uuid.as_deref().unwrap_or("unknown")
    )
}

/// The set to which a volume can be attached, as an operator types it: its own, or the only one that is served.
fn set_for(set: &SetView, volume: &VolumeFigures, sets: &[SetView]) -> String {
    let typed = |set: &SetView| serve::plain::typed(label_of(set, None), &set.id).to_owned();
    let failed = |s: &SetView| s.figures.set.as_ref().is_some_and(|set| set.failed.is_some());
    let mut served = sets.iter().filter(|s| s.has_cache && s.state == "serving" && !failed(s));
    match (volume.attached, served.next(), served.next()) {
        (true, ..) => typed(set),
        (false, Some(only), None) => typed(only),
        _ => "CACHE-DEVICE".to_owned(),
    }
}

/// A volume as an operator types it: by its label, unless several volumes have it.
fn typed<'a>(volume: &'a VolumeFigures, sets: &[SetView]) -> &'a str {
    let all = sets.iter().flat_map(|s| &s.figures.volumes);
    match all.filter(|v| v.label == volume.label).count() {
        1 => serve::plain::typed(&volume.label, &volume.name),
        _ => &volume.name,
    }
}

fn of_volume(
    set: &SetView,
    volume: &VolumeFigures,
    (sets, devices): (&[SetView], &[DeviceView]),
    found: &mut Vec<Problem>,
) {
    let (what, name) = (volume_title(volume), typed(volume, sets));
    let device = volume.backing_device.as_deref();
    if let Some(why) = &volume.problem {
        let ways: Vec<&str> = volume.exports.iter().map(|way| &*way.address).collect();
        let text = match ways.is_empty() {
            true => format!("{what} is NOT EXPORTED: {why}"),
            false => {
                format!("{what} is reached by {} only, NOT EXPORTED as configured: {why}", ways.join(", "))
            }
        };
        let stops = set.figures.stops.iter().any(|s| s.volume.as_ref().is_none_or(|of| *of == volume.name));
        // No reload exports what a stop has ended.
        let command = if stops { waits::NEXT } else { "ubcache reload" };
        found.push(Problem::new("not_exported", text, command.to_owned()));
    }
    if is_on(&volume.tunables, "io_disable") {
        let errors = match volume.io_errors {
            0 => String::new(),
            n => format!(", after {} to its disk", counted(n, "failed request")),
        };
        found.push(Problem::new(
            "io_disabled",
            format!("{what} fails every request, because io_disable is 1{errors}"),
            format!("ubcache set {name} io_disable=0"),
        ));
    } else if volume.io_errors > 0 {
        let path = device.unwrap_or("its disk");
        found.push(Problem::new(
            "io_errors",
            format!("{what}: {} to {path} failed", counted(volume.io_errors, "request")),
            format!("ubcache explain {name}"),
        ));
    }
    found.extend(copies::of_one_copy(set, volume, sets));
    if volume.state == Some("inconsistent") {
        found.push(of_stale(set, volume, (sets, devices)));
    }
}

/// A disk that was used without its cache.
fn of_stale(set: &SetView, volume: &VolumeFigures, (sets, devices): (&[SetView], &[DeviceView])) -> Problem {
    let path = volume.backing_device.as_deref().unwrap_or("DISK");
    let text = format!(
        "{} was used without its cache: the data that the cache has of it is stale",
        volume_title(volume)
    );
    let disabled = set.figures.set.as_ref().filter(|figures| figures.failed.is_some());
    let (text, command) = match (disabled, replugged(set, devices)) {
        (Some(_), Some(device)) => {
            let text = format!("{text}; its cache device is plugged in again, and {STARTS_AGAIN}");
            (text, state_and_command(device).1)
        }
        // A disabled set has the disk until its cache device is unregistered.
        (Some(figures), None) => {
            let cache = &figures.names.device;
            let end = end_of_use(&set.figures.volumes);
            let text = format!(
                "{text}; its set is disabled{end}; if the cache device does not come back, see the page dead-ssd-clean \
                 of the guide"
            );
            (text, format!("ubcache unregister {cache} && ubcache register {cache} {path}"))
        }
        (None, _) => (text, format!("ubcache attach {} {path}", set_for(set, volume, sets))),
    };
    Problem::new("stale", text, command)
}

#[cfg(test)]
mod tests;
