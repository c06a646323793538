//! Commands for the daemon that change something or start a job.
//!
//! Owns the commands and their output. Each command sends its request to the daemon. A long operation is a job: the command
//! waits until the job ends, and the job continues if the command is ended. Must not know how the daemon carries a request
//! out.

mod flash;
mod job;
mod list_names;
mod show;
mod status;
mod top;
mod wait;

use std::path::PathBuf;

use clap::Args;
use engine::tunables::{DeviceTunables, SetTunables, TunableError, nearest};
use serde_json::{Value, json};
use serve::plain;
use serve::tunables::{names, owners};

pub(crate) use flash::{Gc, Volume};
pub(crate) use job::{Cancel, Detach, Drain, Jobs, Wipe};
pub(crate) use list_names::ListNames;
pub(crate) use show::{Show, Tree};
pub(crate) use status::{Events, Explain, Status};
pub(crate) use top::Top;
pub(crate) use wait::Wait;

use crate::client::{Control, absolute, described, segment};
use crate::failure::Failure;
use crate::out;

/// Prints an answer as JSON, or a shorter text.
fn answer(control: &Control, body: &Value, short: impl FnOnce() -> String) -> Result<(), Failure> {
    if control.json { out::print_json(body) } else { out::print(&short()) }
}

/// Register devices with the daemon
///
/// Registering a cache device starts its set, and a backing device its volume. A backing device whose cache device is
/// missing waits for it. Exit status 1 also if a volume is served but cannot be exported as configured.
#[derive(Args, Debug)]
pub(crate) struct Register {
    /// Cache and backing devices
    #[arg(value_name = "DEV", required = true)]
    devices: Vec<PathBuf>,
    /// Accept devices that are registered already
    #[arg(long)]
    quiet: bool,
    /// Serve a device that differs from the one remembered for its UUID, or an older state of it; the differences are printed
    #[arg(long)]
    accept_replacement: bool,
    #[command(flatten)]
    control: Control,
}

impl Register {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        let devices = self.devices.iter().map(|d| absolute(d)).collect::<Result<Vec<_>, _>>()?;
        let wanted =
            json!({"devices": devices, "quiet": self.quiet, "accept_replacement": self.accept_replacement});
        let body = self.control.post("/v1/register", &wanted)?;
        let not_exported: Vec<&Value> = body["not_exported"].as_array().into_iter().flatten().collect();
        answer(&self.control, &body, || {
            let accepted =
                body["accepted"].as_array().into_iter().flatten().map(|a| format!("{}\n", text(a)));
            let lines = body["devices"].as_array().into_iter().flatten().map(|d| {
                let why = d["why"].as_str().map(|w| format!(": {w}")).unwrap_or_default();
                format!("{}: {}, UUID {}{why}\n", text(&d["path"]), text(&d["state"]), text(&d["uuid"]))
            });
            let unreached = not_exported
                .iter()
                .map(|v| format!("{}: NOT EXPORTED: {}\n", text(&v["volume"]), text(&v["why"])));
            accepted.chain(lines).chain(unreached).collect()
        })?;
        if not_exported.is_empty() { Ok(()) } else { Err(Failure::Found) }
    }
}

/// The text of a value; empty if it is not a string.
pub(crate) fn text(value: &Value) -> &str {
    value.as_str().unwrap_or("")
}

/// Unregister a device
///
/// Unregistering a cache device stops its set; dirty data stays in the cache. Unregistering a backing device stops
/// its volume.
#[derive(Args, Debug)]
pub(crate) struct Unregister {
    /// Device, by path, UUID or label
    #[arg(value_name = "DEV")]
    device: String,
    #[command(flatten)]
    control: Control,
}

impl Unregister {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        let device = self.control.device_name(&self.device)?;
        let body = self.control.post("/v1/unregister", &json!({"device": device}))?;
        answer(&self.control, &body, || format!("{}: unregistered\n", described(&body["resolved"])))
    }
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
    #[command(flatten)]
    control: Control,
}

impl Attach {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        let wanted = json!({"cache": self.control.device_name(&self.cache)?, "backing": self.control.device_name(&self.backing)?});
        let body = self.control.post("/v1/attach", &wanted)?;
        answer(&self.control, &body, || {
            format!("{}: attached to {}\n", described(&body["resolved"]), described(&body["cache"]))
        })
    }
}

/// Stop a volume
///
/// Its device stays registered and is served again by the next start of the daemon, or when it is registered again.
#[derive(Args, Debug)]
pub(crate) struct Stop {
    /// Volume, by name, label or backing device
    volume: String,
    #[command(flatten)]
    control: Control,
}

impl Stop {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        let path = format!("/v1/volumes/{}/stop", segment(&self.control.device_name(&self.volume)?));
        let body = self.control.post(&path, &json!({}))?;
        answer(&self.control, &body, || format!("{}: stopped\n", described(&body["resolved"])))
    }
}

/// Set the cache mode of a backing device
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
        answer(&self.control, &body, || format!("{}: {}\n", described(&body["resolved"]), self.mode))
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

/// The path of the tunables of a volume or a set.
fn tunables_path(control: &Control, name: &str) -> Result<String, Failure> {
    let name = segment(&control.device_name(name)?);
    let of_volume = format!("/v1/volumes/{name}/tunables");
    if control.ask("GET", &of_volume, None)?.status == 404 {
        let of_set = format!("/v1/sets/{name}/tunables");
        if control.ask("GET", &of_set, None)?.status == 200 {
            return Ok(of_set);
        }
    }
    // The next request refuses an unknown name. A refused request that would change something is recorded in the audit.
    Ok(of_volume)
}

/// Show tunables of a volume or a set
#[derive(Args, Debug)]
pub(crate) struct Get {
    /// Volume (name, label or device) or set (UUID or cache device)
    volume: String,
    /// Name of a tunable; all of them if none is given
    key: Option<String>,
    #[command(flatten)]
    control: Control,
}

impl Get {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        let path = tunables_path(&self.control, &self.volume)?;
        match &self.key {
            Some(key) => {
                let body = self.control.get(&format!("{path}/{}", segment(key)))?;
                answer(&self.control, &body, || format!("{}\n", text(&body["tunable"]["value"])))
            }
            None => {
                let body = self.control.get(&path)?;
                answer(&self.control, &body, || {
                    let lines = body["tunables"].as_array().into_iter().flatten().map(|t| {
                        let unit = text(&t["unit"]);
                        let changed = if t["value"] == t["default"] || t["in_superblock"] == true {
                            String::new()
                        } else {
                            format!(" (default {})", text(&t["default"]))
                        };
                        let blank = if unit.is_empty() { "" } else { " " };
                        format!("{} = {}{blank}{unit}{changed}\n", text(&t["key"]), text(&t["value"]))
                    });
                    lines.collect()
                })
            }
        }
    }
}

/// Set tunables of a volume or a set
///
/// The daemon stores the values unless --runtime is given; `reset` undoes a change.
#[derive(Args, Debug)]
pub(crate) struct Set {
    /// Volume (name, label or device) or set (UUID or cache device)
    volume: String,
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
        let wanted = self
            .settings
            .iter()
            .map(|s| s.split_once('=').ok_or_else(|| Failure::Usage(format!("{s}: expected KEY=VALUE"))));
        let wanted = wanted.collect::<Result<Vec<_>, _>>()?;
        let path = tunables_path(&self.control, &self.volume)?;
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
}

impl Changed {
    fn add(&mut self, body: Value) {
        self.list.push(body["changed"].clone());
        self.resolved = body["resolved"].clone();
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
        let Changed { list, resolved } = self;
        list.iter().for_each(notes);
        for limited in list.iter().filter_map(|c| c["limited"].as_str()) {
            out::warn(format!("{}: {limited}", described(resolved)));
        }
        answer(control, &json!({"schema_version": 1, "changed": list, "resolved": resolved}), || {
            let whose = described(resolved);
            list.iter().map(|c| format!("{whose}: {} = {}\n", text(&c["key"]), text(&c["value"]))).collect()
        })
    }
}

/// Undo `set`: the configuration or the default applies again
#[derive(Args, Debug)]
pub(crate) struct Reset {
    /// Volume (name, label or device) or set (UUID or cache device)
    volume: String,
    /// Names
    #[arg(required = true)]
    keys: Vec<String>,
    #[command(flatten)]
    control: Control,
}

impl Reset {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        let path = tunables_path(&self.control, &self.volume)?;
        let mut changed = Changed::default();
        for key in &self.keys {
            changed.add(self.control.delete(&format!("{path}/{}", segment(key)))?);
        }
        changed.show(&self.control)
    }
}

/// Reload the configuration and print the changes
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
        })
    }
}
