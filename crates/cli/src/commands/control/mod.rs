//! Commands for the daemon that change something or start a job.
//!
//! Owns the commands and their output. Each command sends its request to the daemon. A long operation is a job: the command
//! waits until the job ends, and the job continues if the command is ended. Must not know how the daemon carries a request
//! out.

mod columns;
mod copies;
mod damaged;
mod flash;
mod get;
mod job;
mod list_names;
mod long_request;
mod offline;
mod setting;
mod show;
mod status;
mod top;
mod unregister;
mod wait;

use std::path::{Path, PathBuf};

use clap::Args;
use engine::tunables::{DeviceTunables, SetTunables, TunableError, nearest};
use serde_json::{Value, json};
use serve::plain;
use serve::tunables::{names, owners};

pub(crate) use damaged::Damaged;
pub(crate) use flash::{Gc, Volume};
pub(crate) use get::Get;
pub(crate) use job::{Cancel, Detach, Drain, Jobs, Scrub, Waiting, Wipe};
pub(crate) use list_names::ListNames;
pub(crate) use show::{Show, Tree};
pub(crate) use status::{Events, Explain, Status};
pub(crate) use top::Top;
pub(crate) use unregister::Unregister;
use unregister::stays_dirty;
pub(crate) use wait::Wait;

use crate::client::{Control, absolute, described, segment};
use crate::failure::Failure;
use crate::{out, size};

/// Prints an answer as JSON, or a shorter text.
pub(crate) fn answer(control: &Control, body: &Value, short: impl FnOnce() -> String) -> Result<(), Failure> {
    if control.json {
        out::print_json(body)?
    } else {
        out::print(&short())?
    }
    match body["not_stored"].as_str() {
        None => Ok(()),
        Some(why) => Err(Failure::NotStored(format!(
            "done, but not stored: {why}; the next start of the daemon may not know of it; make room in this directory or \
             make it writable: the daemon tries again by itself, and `ubcache status` has a problem until the state is stored"
        ))),
    }
}

/// Register devices with the daemon
///
/// Registering a cache device starts its set, and a backing device its volume. A backing device whose cache device is
/// missing waits for it. A device that is registered already stays as it is, and the answer says as what it is served. If a
/// device is refused, the answer says what became of the others. A volume that was stopped can be named by its label. Exit
/// code 1 also if a volume is served but cannot be exported as configured, and if the set of a device is disabled.
#[derive(Args, Debug)]
pub(crate) struct Register {
    /// Cache and backing devices, by path; registered ones, and stopped flash-only volumes, also by label, name or UUID
    #[arg(value_name = "DEV", required = true)]
    devices: Vec<String>,
    /// Has no effect: a device that is registered already is not an error
    #[arg(long, hide = true)]
    quiet: bool,
    /// Serve a device that differs from the one remembered for its UUID, or an older state of it; the differences are printed
    #[arg(long)]
    accept_replacement: bool,
    #[command(flatten)]
    control: Control,
}

/// What a name of `register` stands for.
enum DeviceOrVolume {
    /// Path of a device.
    Device(PathBuf),
    /// Name of a flash-only volume, which has no device of its own.
    Volume(String),
}

impl Register {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        let (mut devices, mut volumes) = (Vec::new(), Vec::new());
        for device in &self.devices {
            match self.path_of(device)? {
                DeviceOrVolume::Device(path) => devices.push(path),
                DeviceOrVolume::Volume(name) => volumes.push(name),
            }
        }
        let mut wanted =
            json!({"devices": devices, "quiet": self.quiet, "accept_replacement": self.accept_replacement});
        if !volumes.is_empty() {
            // A daemon of an older version does not know them.
            wanted["volumes"] = json!(volumes);
        }
        let names = devices.iter().map(|d| d.display().to_string()).chain(volumes);
        // The name of the command in `ubcache status`.
        let replacing = if self.accept_replacement { " as replacement" } else { "" };
        let command = format!("register {}{replacing}", names.collect::<Vec<_>>().join(" "));
        let body = long_request::post(&self.control, &command, "/v1/register", &wanted)?;
        let list = |key: &str| body[key].as_array().map(Vec::as_slice).unwrap_or_default();
        let (not_exported, disabled) = (list("not_exported"), list("disabled"));
        list("warnings").iter().for_each(|warning| out::warn(text(warning)));
        answer(&self.control, &body, || {
            let accepted =
                body["accepted"].as_array().into_iter().flatten().map(|a| format!("{}\n", text(a)));
            let already = body["already"].as_array();
            let lines = body["devices"].as_array().into_iter().flatten().map(|d| {
                let why = d["why"].as_str().map(|w| format!(": {w}")).unwrap_or_default();
                let before = if already.is_some_and(|a| a.contains(&d["path"])) { "already " } else { "" };
                let (path, state, uuid) = (text(&d["path"]), text(&d["state"]), text(&d["uuid"]));
                format!("{path}: {before}{state}{}, UUID {uuid}{why}\n", served_as(d))
            });
            let started = body["volumes"].as_array().into_iter().flatten().map(|v| {
                let before = if v["already"] == true { "already " } else { "" };
                format!("{}: {before}served\n", described(&v["resolved"]))
            });
            let unreached = not_exported.iter().map(|v| {
                let volume = plain::named(text(&v["label"]), text(&v["volume"]));
                format!("{volume}: NOT EXPORTED: {}, then run `ubcache reload`\n", text(&v["why"]))
            });
            let disabled = disabled
                .iter()
                .map(|problem| format!("{}; run `{}`\n", text(&problem["text"]), text(&problem["command"])));
            accepted.chain(lines).chain(started).chain(unreached).chain(disabled).collect()
        })?;
        if not_exported.is_empty() && disabled.is_empty() { Ok(()) } else { Err(Failure::Found) }
    }

    /// A device: a path or a file here, or the path of a registered device with this label, name or UUID. Or a volume
    /// without a device.
    fn path_of(&self, device: &str) -> Result<DeviceOrVolume, Failure> {
        let path = Path::new(device);
        let name = self.control.device_name(device)?;
        if name.contains('/') {
            return Ok(DeviceOrVolume::Device(PathBuf::from(name)));
        }
        if path.exists() && !path.is_dir() {
            return Ok(DeviceOrVolume::Device(absolute(path)?));
        }
        let reply = self.control.ask("GET", &format!("/v1/names/{}", segment(device)), None)?;
        if reply.status == 404 {
            return Err(Failure::Failed(format!(
                "{}: no file of this directory and no registered device has this name; give the path of the device",
                plain::escaped(device)
            )));
        }
        let resolved = &reply.ok()?["resolved"];
        match (resolved["device"].as_str(), resolved["name"].as_str()) {
            (Some(path), _) => Ok(DeviceOrVolume::Device(PathBuf::from(path))),
            (None, Some(name)) => Ok(DeviceOrVolume::Volume(name.to_owned())),
            (None, None) => Err(Failure::Failed(format!("{}: has no device", plain::escaped(device)))),
        }
    }
}

/// As what a device is served: the label and name of its volume, or its set.
fn served_as(device: &Value) -> String {
    let (label, name, set) = (text(&device["label"]), device["name"].as_str(), device["set"].as_str());
    match (device["state"] == "served", device["kind"] == "cache", name) {
        (true, true, _) => set.map_or_else(String::new, |set| match label {
            "" => format!(" as the cache of set {set}"),
            label => format!(" as {}, the cache of set {set}", plain::label(label)),
        }),
        (true, false, Some(name)) if label.is_empty() => format!(" as {name}"),
        (true, false, Some(name)) => format!(" as {} ({name})", plain::label(label)),
        _ => String::new(),
    }
}

/// The text of a value; empty if it is not a string.
pub(crate) fn text(value: &Value) -> &str {
    value.as_str().unwrap_or("")
}

/// Attach a backing device to a cache set
///
/// A backing device that is served alone is served through the cache afterwards; its clients have to connect again.
#[derive(Args, Debug)]
pub(crate) struct Attach {
    /// Cache device or UUID of its set
    cache: String,
    /// Backing device
    backing: String,
    /// The device was made for another set, or belongs to one whose cache device is lost: make it leave that set first; refused
    /// if it has dirty data there
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    control: Control,
}

impl Attach {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        let (cache, backing) =
            (self.control.device_name(&self.cache)?, self.control.device_name(&self.backing)?);
        let mut wanted = json!({"cache": cache, "backing": backing});
        if self.force {
            // A daemon of an older version does not know it.
            wanted["force"] = json!(true);
        }
        let by_force = if self.force { " by force" } else { "" };
        let command = format!("attach {cache} {backing}{by_force}");
        let body = long_request::post(&self.control, &command, "/v1/attach", &wanted)?;
        answer(&self.control, &body, || {
            format!("{}: attached to {}\n", described(&body["resolved"]), described(&body["cache"]))
        })
    }
}

/// Stop a volume
///
/// Its device stays registered and is served again by the next start of the daemon, or when it is registered again. So is a
/// flash-only volume, which has no device. Dirty data stays in the cache; the answer says how much, and on which cache device.
#[derive(Args, Debug)]
pub(crate) struct Stop {
    /// Volumes, by name, label or backing device; they are stopped one after the other, each with an answer
    #[arg(required = true)]
    volumes: Vec<String>,
    #[command(flatten)]
    control: Control,
}

impl Stop {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        self.volumes.iter().try_for_each(|volume| self.stop(volume))
    }

    fn stop(&self, volume: &str) -> Result<(), Failure> {
        let volume = self.control.device_name(volume)?;
        let path = format!("/v1/volumes/{}/stop", segment(&volume));
        let body = long_request::post(&self.control, &format!("stop {volume}"), &path, &json!({}))?;
        answer(&self.control, &body, || {
            let stays = stays_dirty(&body["stays_dirty"], false);
            let ended = job::ended_jobs(&body["ended_jobs"]);
            format!("{}: stopped{stays}{ended}\n", described(&body["resolved"]))
        })
    }
}

/// Set the cache mode of a backing device
///
/// In any mode but writeback the cache gets no new dirty data. Dirty data that it has is still written back, and until then
/// the volume needs its cache device; `ubcache drain` waits for that.
#[derive(Args, Debug)]
pub(crate) struct SetCachemode {
    /// Volume or backing device
    backing: String,
    /// New cache mode
    #[arg(value_parser = ["writethrough", "writeback", "writearound", "none"])]
    mode: String,
    #[command(flatten)]
    control: Control,
}

impl SetCachemode {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        let path = format!("/v1/volumes/{}/cache-mode", segment(&self.control.device_name(&self.backing)?));
        let body = self.control.put(&path, &json!({"mode": self.mode}))?;
        let dirty = self.still_dirty(&body["resolved"]);
        answer(&self.control, &body, || format!("{}: {}{dirty}\n", described(&body["resolved"]), self.mode))
    }

    /// What becomes of the dirty data of a volume that gets no new dirty data.
    fn still_dirty(&self, resolved: &Value) -> String {
        if self.mode == "writeback" || self.control.json {
            return String::new();
        }
        let volume = resolved["name"].as_str().map(|name| format!("/v1/volumes/{}", segment(name)));
        let figures = volume.and_then(|path| self.control.get(&path).ok()).unwrap_or_default();
        stays_dirty_for_now(&figures["volume"])
    }
}

/// What becomes of the dirty data of a volume whose cache gets no new dirty data; empty if there is none.
fn stays_dirty_for_now(volume: &Value) -> String {
    let mut tunables = volume["tunables"].as_array().into_iter().flatten();
    let is_stopped = tunables.any(|t| t["key"] == "writeback_running" && t["value"] == "0");
    let name = plain::typed(text(&volume["label"]), text(&volume["name"]));
    let dirty = volume["dirty_bytes"].as_u64().unwrap_or(0);
    match (dirty, size::human(dirty)) {
        (0, _) => String::new(),
        (_, dirty) if is_stopped => format!(
            "; {dirty} of dirty data stay in the cache, because writeback_running is 0, and the volume needs its cache \
             device (`ubcache set {name} writeback_running=1` writes the data back)"
        ),
        (_, dirty) => format!(
            "; {dirty} of dirty data are still written back, and the volume needs its cache device until then (`ubcache \
             drain {name}` waits for it)"
        ),
    }
}

/// Set the label of a volume or of a set
///
/// A label names one device or set of the host. It is stored in the superblock, for a set in that of its cache device. A section
/// of the configuration that the new label of a volume selects applies at once, in place of that of the old label.
#[derive(Args, Debug)]
pub(crate) struct SetLabel {
    /// Volume (name, label or device) or set (UUID, label or cache device)
    #[arg(value_name = "NAME")]
    volume: String,
    /// New label, at most 32 bytes; empty for none
    label: String,
    #[command(flatten)]
    control: Control,
}

impl SetLabel {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        let name = segment(&self.control.device_name(&self.volume)?);
        let there_is = |kind: &str| self.control.ask("GET", &format!("/v1/{kind}/{name}"), None);
        let is_set = there_is("volumes")?.status == 404 && there_is("sets")?.status == 200;
        let path = format!("/v1/{}/{name}/label", if is_set { "sets" } else { "volumes" });
        let body = self.control.put(&path, &json!({"label": self.label}))?;
        notes(&body["changed"]);
        answer(&self.control, &body, || {
            format!("{}: {}\n", described(&body["resolved"]), plain::label(&self.label))
        })
    }
}

/// Prints further effects of a change as messages.
fn notes(changed: &Value) {
    changed["notes"].as_array().into_iter().flatten().for_each(|note| out::note(text(note)));
}

/// The volume or set whose tunables a command names.
#[derive(Args, Debug)]
struct TunablesOf {
    /// Volume (name, label or device) or set (UUID, label or cache device)
    volume: String,
    /// Take the tunables of the set that serves the volume
    #[arg(long)]
    set_of_volume: bool,
}

impl TunablesOf {
    /// The path of the tunables.
    fn path(&self, control: &Control) -> Result<String, Failure> {
        let name = segment(&control.device_name(&self.volume)?);
        let of_set = |set: &str| format!("/v1/sets/{set}/tunables");
        if self.set_of_volume {
            let body = control.get(&format!("/v1/volumes/{name}"))?;
            let set = body["volume"]["set"].as_str().map(|set| of_set(&segment(set)));
            let shown = plain::escaped(&self.volume);
            return set.ok_or_else(|| Failure::Failed(format!("{shown}: is served without a set")));
        }
        let of_volume = format!("/v1/volumes/{name}/tunables");
        if control.ask("GET", &of_volume, None)?.status == 404
            && control.ask("GET", &of_set(&name), None)?.status == 200
        {
            return Ok(of_set(&name));
        }
        // The next request refuses an unknown name. A refused request that would change something is recorded in the audit.
        Ok(of_volume)
    }
}

/// Whether this is a rate of writeback that does not limit it.
fn is_unlimited(tunable: &Value) -> bool {
    tunable["key"] == "writeback_rate" && text(&tunable["value"]).parse() == Ok(UNLIMITED_SECTORS_PER_S)
}

/// The rate of writeback, in sectors per second, by which a kernel says that the rate is not limited.
const UNLIMITED_SECTORS_PER_S: u64 = i32::MAX as u64;

/// A rate of writeback in bytes per second, as text.
fn writeback_rate(volume: &Value) -> String {
    let rate =
        volume["writeback"]["rate_bytes_per_s"].as_i64().and_then(|r| u64::try_from(r).ok()).unwrap_or(0);
    match rate >= UNLIMITED_SECTORS_PER_S * 512 {
        true => "not limited".to_owned(),
        false => format!("{}/s", size::human(rate)),
    }
}

/// Set tunables of a volume or a set
///
/// The daemon stores the values unless --runtime is given; `reset` undoes a change.
#[derive(Args, Debug)]
pub(crate) struct Set {
    #[command(flatten)]
    of: TunablesOf,
    /// Names and values
    #[arg(value_name = "KEY=VALUE", required = true)]
    settings: Vec<String>,
    /// Do not restore the value when the daemon starts again
    #[arg(long)]
    runtime: bool,
    #[command(flatten)]
    control: Control,
}

impl Set {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        let settings = setting::joined(&self.settings);
        let wanted = settings.iter().map(|s| {
            setting::split(s).ok_or_else(|| {
                Failure::Usage(format!("{s}: expected KEY=VALUE, such as writeback_percent=10"))
            })
        });
        let wanted = wanted.collect::<Result<Vec<_>, _>>()?;
        let path = self.of.path(&self.control)?;
        // The daemon takes one at a time: nothing is to be changed if a later one cannot be right.
        if wanted.len() > 1 {
            wanted
                .iter()
                .try_for_each(|(key, value)| checked(&path, key, value))
                .map_err(Failure::bad_value)?;
        }
        let mut changed = Changed::default();
        for (key, value) in wanted {
            let wish = json!({"value": value, "runtime": self.runtime});
            match self.control.put(&format!("{path}/{}", segment(key)), &wish) {
                Ok(body) => changed.add(body),
                Err(e) => return Err(changed.before(e)),
            }
        }
        changed.show(&self.control)
    }
}

/// Refuses a value that the tunable at this path of the API can never have, and a name that nothing has.
fn checked(path: &str, key: &str, value: &str) -> Result<(), TunableError> {
    let (of_set, of_device) = owners(key);
    match path.starts_with("/v1/sets/") {
        true if of_set => SetTunables::check_alone(key, value),
        false if of_device => DeviceTunables::check_alone(key, value),
        // The daemon refuses the tunable of a set for a volume, and names the command that sets it.
        _ if of_set || of_device => Ok(()),
        _ => Err(TunableError::Unknown { name: key.to_owned(), nearest: nearest(key, names().into_iter()) }),
    }
}

/// Tunables that were changed, and whose they are.
#[derive(Default)]
struct Changed {
    list: Vec<Value>,
    resolved: Value,
    /// Why the daemon could not store the changes; null if it has.
    not_stored: Value,
}

impl Changed {
    fn add(&mut self, body: Value) {
        self.list.push(body["changed"].clone());
        self.resolved = body["resolved"].clone();
        self.not_stored = body["not_stored"].clone();
    }

    /// Adds to the failure of a setting the settings that the command has changed before it.
    fn before(&self, failure: Failure) -> Failure {
        let before: Vec<String> =
            self.list.iter().map(|c| format!("{} = {}", text(&c["key"]), text(&c["value"]))).collect();
        if before.is_empty() {
            return failure;
        }
        let message = format!("{failure}; changed before: {}", before.join(", "));
        // Not the exit code of wrong usage: something was done.
        Failure::Caused { text: message, source: Box::new(failure) }
    }

    fn show(&self, control: &Control) -> Result<(), Failure> {
        let Changed { list, resolved, not_stored } = self;
        list.iter().for_each(notes);
        for limited in list.iter().filter_map(|c| c["limited"].as_str()) {
            out::warn(format!("{}: {limited}", described(resolved)));
        }
        let mut body = json!({"schema_version": 1, "changed": list, "resolved": resolved});
        if !not_stored.is_null() {
            body["not_stored"] = not_stored.clone();
        }
        answer(control, &body, || {
            let whose = described(resolved);
            list.iter().map(|c| format!("{whose}: {} = {}\n", text(&c["key"]), text(&c["value"]))).collect()
        })
    }
}

/// Undo `set`: the configuration or the default applies again
#[derive(Args, Debug)]
pub(crate) struct Reset {
    #[command(flatten)]
    of: TunablesOf,
    /// Names
    #[arg(required = true)]
    keys: Vec<String>,
    #[command(flatten)]
    control: Control,
}

impl Reset {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        let path = self.of.path(&self.control)?;
        let mut changed = Changed::default();
        for key in &self.keys {
            changed.add(self.control.delete(&format!("{path}/{}", segment(key)))?);
        }
        changed.show(&self.control)
    }
}

/// Reload the configuration and print the changes; exports that are not up are tried again
///
/// Exit code 1 also if an export is still not up afterwards.
#[derive(Args, Debug)]
pub(crate) struct Reload {
    #[command(flatten)]
    control: Control,
}

impl Reload {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        let body = self.control.post("/v1/reload", &json!({}))?;
        answer(&self.control, &body, || {
            let lines: String =
                body["changes"].as_array().into_iter().flatten().map(|l| format!("{}\n", text(l))).collect();
            if lines.is_empty() { "nothing has changed\n".into() } else { lines }
        })?;
        // The changes have the reasons.
        let is_down = body["not_exported"].as_array().is_some_and(|down| !down.is_empty());
        if is_down { Err(Failure::Found) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dirty_data_is_written_back_or_stays() {
        let volume = |dirty: u64, running: &str| {
            stays_dirty_for_now(&json!({"name": "bcache0", "dirty_bytes": dirty,
                "tunables": [{"key": "writeback_running", "value": running}]}))
        };
        assert_eq!(volume(0, "0"), "");
        assert!(volume(4096, "0").starts_with("; 4.0 KiB of dirty data stay in the cache, because"));
        assert!(volume(4096, "1").starts_with("; 4.0 KiB of dirty data are still written back, and"));
    }

    #[test]
    fn a_device_says_as_what_it_is_served() {
        let device = |more: Value| {
            let mut device = json!({"kind": "backing", "state": "served", "label": "", "set": "s"});
            more.as_object().into_iter().flatten().for_each(|(key, value)| device[key] = value.clone());
            served_as(&device)
        };
        assert_eq!(device(json!({"name": "bcache0"})), " as bcache0");
        assert_eq!(device(json!({"name": "bcache0", "label": "one"})), " as one (bcache0)");
        assert_eq!(device(json!({"kind": "cache"})), " as the cache of set s");
        assert_eq!(device(json!({"kind": "cache", "label": "fast"})), " as fast, the cache of set s");
        assert_eq!(device(json!({"name": "bcache0", "state": "waiting"})), "");
    }
}
