//! `show` and `tree`: the devices, with the columns that users of bcache know.

use std::collections::BTreeMap;

use clap::Args;
use serde_json::{Value, json};
use serve::plain;

use super::columns::table;
use super::status::{held, problems, without_disk};
use super::{text, writeback_rate};
use crate::client::{Control, segment};
use crate::failure::Failure;
use crate::out;

/// A device with the known state of its volume.
struct DeviceRow<'a> {
    device: &'a Value,
    volume: Option<&'a Value>,
    cache: Option<&'a str>,
    /// What its cache set is in the place of serving.
    outage: Option<&'static str>,
}

fn rows(status: &Value) -> Vec<DeviceRow<'_>> {
    let devices: Vec<&Value> = status["devices"].as_array().into_iter().flatten().collect();
    let mut volumes: BTreeMap<&str, &Value> = BTreeMap::new();
    for set in status["sets"].as_array().into_iter().flatten() {
        for volume in set["volumes"].as_array().into_iter().flatten() {
            volumes.insert(text(&volume["backing_uuid"]), volume);
        }
    }
    let sets = || status["sets"].as_array().into_iter().flatten();
    let outage_of = |set: &Value| sets().find(|s| set.is_string() && s["id"] == *set).and_then(outage);
    let cache_of = |set: &Value| {
        let mut caches =
            devices.iter().filter(|d| d["kind"] == "cache" && d["set"] == *set && set.is_string());
        caches.next().map(|d| text(&d["path"]))
    };
    devices
        .iter()
        .map(|d| DeviceRow {
            device: d,
            volume: volumes.get(text(&d["uuid"])).copied(),
            cache: if d["kind"] == "backing" { cache_of(&d["set"]) } else { None },
            outage: outage_of(&d["set"]),
        })
        .collect()
}

/// Why a set serves less than it should: its cache device has failed, or its thread has ended.
fn outage(set: &Value) -> Option<&'static str> {
    match (set["set"]["failed"].is_string(), set["state"] == "failed") {
        (true, _) => Some("disabled"),
        (false, true) => Some("failed"),
        (false, false) => None,
    }
}

/// Flash-only volumes, which have no device of their own.
fn flash_only_rows(status: &Value) -> Vec<DeviceRow<'_>> {
    let devices = || status["devices"].as_array().into_iter().flatten();
    let mut found = Vec::new();
    for set in status["sets"].as_array().into_iter().flatten() {
        let cache = devices().find(|d| d["kind"] == "cache" && d["set"] == set["id"]);
        let volumes = set["volumes"].as_array().into_iter().flatten();
        found.extend(volumes.filter(|v| v["flash_only"] == true).map(|volume| DeviceRow {
            device: volume,
            volume: Some(volume),
            cache: cache.map(|d| text(&d["path"])),
            outage: outage(set),
        }));
    }
    found
}

impl DeviceRow<'_> {
    fn is_flash_only(&self) -> bool {
        self.device["flash_only"] == true
    }

    fn kind(&self) -> &'static str {
        match text(&self.device["kind"]) {
            _ if self.is_flash_only() => "flash-only",
            "cache" => "3 (cache)",
            "backing" => "1 (data)",
            _ => "?",
        }
    }

    fn state(&self) -> String {
        match (self.volume, text(&self.device["state"])) {
            (Some(_), _) if self.is_flash_only() && self.device["stopped"] == true => "stopped".into(),
            (Some(_), _) if self.is_flash_only() => self.outage.unwrap_or("running").into(),
            (Some(volume), _) => format!("{}({})", text(&volume["state"]), self.outage.unwrap_or("running")),
            (None, "served") => self.outage.unwrap_or("active").into(),
            (None, other) => other.to_owned(),
        }
    }

    /// A field of the device as text; the label is escaped.
    fn text(&self, key: &str) -> String {
        let text = text(&self.device[key]);
        if key == "label" { plain::label(text).into_owned() } else { text.to_owned() }
    }

    /// The path of the device; a flash-only volume has none.
    fn path(&self) -> &str {
        self.device["path"].as_str().unwrap_or("N/A")
    }

    fn name(&self) -> &str {
        self.volume.map(|v| &v["name"]).unwrap_or(&self.device["name"]).as_str().unwrap_or("N/A")
    }

    /// Size, cached data and dirty data of the volume; `N/A` for what is not known.
    fn amounts(&self) -> [String; 3] {
        let none = || "N/A".to_owned();
        match self.volume {
            Some(v) => [
                crate::size::human(v["size_bytes"].as_u64().unwrap_or(0)),
                held(v, "cached"),
                held(v, "dirty"),
            ],
            None => {
                [none(), none(), self.device["dirty_bytes"].as_u64().map_or_else(none, crate::size::human)]
            }
        }
    }

    /// The columns that bcache-tools has.
    fn columns_of_bcache_tools(&self) -> Vec<String> {
        vec![
            self.path().into(),
            self.kind().into(),
            self.state(),
            self.name().into(),
            self.cache.unwrap_or("N/A").into(),
        ]
    }

    /// The columns of `show`: label first, and the amounts of data.
    fn columns(&self) -> Vec<String> {
        let label = self.text("label");
        let label = if label.is_empty() { "N/A".to_owned() } else { label };
        let [size, cached, dirty] = self.amounts();
        vec![
            label,
            self.name().into(),
            self.path().into(),
            self.kind().into(),
            self.state(),
            size,
            cached,
            dirty,
            self.cache.unwrap_or("N/A").into(),
        ]
    }
}

/// List devices and flash-only volumes
///
/// Problems come first, each with the command to run next. `Cached` is the data of a volume in the cache, clean and dirty;
/// `Dirty` is the part of it that the disk does not have yet. The percentages are shares of the size of the cache.
#[derive(Args, Debug)]
pub(crate) struct Show {
    /// Show everything about one device
    #[arg(short = 'd', long = "device", value_name = "DEV")]
    device: Option<String>,
    /// More columns
    #[arg(short = 'm', long = "more")]
    more: bool,
    /// Print the columns of `bcache show`
    #[arg(long, hide = true, conflicts_with = "device")]
    as_bcache_tools: bool,
    #[command(flatten)]
    control: Control,
}

const HEAD_OF_BCACHE_TOOLS: [&str; 5] = ["Name", "Type", "State", "Bname", "AttachToDev"];
const HEAD: [&str; 9] = ["Label", "Bname", "Name", "Type", "State", "Size", "Cached", "Dirty", "AttachToDev"];

impl Show {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        let status = self.control.get("/v1/status")?;
        let mut rows = rows(&status);
        if !self.as_bcache_tools {
            rows.extend(flash_only_rows(&status));
        }
        if let Some(wanted) = &self.device {
            let name = self.control.device_name(wanted)?;
            let resolved = self.control.get(&format!("/v1/names/{}", segment(&name)))?["resolved"].clone();
            rows.retain(|r| match r.is_flash_only() {
                true => r.device["name"] == resolved["name"],
                false => r.device["path"] == resolved["device"] && r.device["uuid"] == resolved["uuid"],
            });
            if rows.is_empty() {
                return Err(Failure::Failed(format!("{wanted}: is not registered")));
            }
        }
        if self.control.json {
            let devices: Vec<Value> = rows
                .iter()
                .map(|r| json!({"device": (!r.is_flash_only()).then_some(r.device), "state": r.state(), "volume": r.volume, "attached_to": r.cache}))
                .collect();
            let problems = &status["problems"];
            return out::print_json(&json!({"schema_version": 1, "problems": problems, "devices": devices}));
        }
        if self.device.is_some() {
            return out::print(&rows.iter().map(details).collect::<String>());
        }
        if self.as_bcache_tools {
            return out::print(
                &self.lines(&rows, &HEAD_OF_BCACHE_TOOLS, |row| row.columns_of_bcache_tools()),
            );
        }
        let lines = self.lines(&rows, &HEAD, |row| row.columns());
        match status["problems"].as_array().is_some_and(|p| !p.is_empty()) {
            true => out::print(&format!("{}\n{lines}", problems(&status))),
            false => out::print(&lines),
        }
    }

    /// The table of these rows.
    fn lines(
        &self,
        rows: &[DeviceRow<'_>],
        head: &[&str],
        columns: impl Fn(&DeviceRow<'_>) -> Vec<String>,
    ) -> String {
        let more: &[&str] = if self.more { &["UUID", "Set", "Why"] } else { &[] };
        let mut lines = vec![head.iter().chain(more).map(|s| (*s).to_owned()).collect::<Vec<_>>()];
        for row in rows {
            let mut line = columns(row);
            line.extend(more.iter().map(|key| {
                let text = row.text(&key.to_lowercase());
                if text.is_empty() { "N/A".to_owned() } else { text }
            }));
            lines.push(line);
        }
        table(&lines)
    }
}

fn details(row: &DeviceRow<'_>) -> String {
    let mut lines: Vec<Vec<String>> = Vec::new();
    let mut add = |key: &str, value: String| {
        if !value.is_empty() {
            lines.push(vec![key.to_owned(), value]);
        }
    };
    add("label", row.text("label"));
    add("device", text(&row.device["path"]).into());
    add("type", row.kind().into());
    add("state", row.state());
    for key in ["uuid", "set", "why"] {
        add(key, row.text(key));
    }
    if let Some(volume) = row.volume {
        add("volume", row.name().into());
        add("attached to", row.cache.unwrap_or("N/A").into());
        add("cache mode", text(&volume["cache_mode"]).into());
        add("size", crate::size::human(volume["size_bytes"].as_u64().unwrap_or(0)));
        add("cached", held(volume, "cached"));
        add("dirty", held(volume, "dirty"));
        add("writeback", writeback_rate(volume));
        for way in volume["exports"].as_array().into_iter().flatten() {
            add("reached by", text(&way["address"]).into());
        }
        add("problem", text(&volume["problem"]).into());
    }
    table(&lines)
}

/// Show sets with their volumes
#[derive(Args, Debug)]
pub(crate) struct Tree {
    #[command(flatten)]
    control: Control,
}

impl Tree {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        let status = self.control.get("/v1/status")?;
        if self.control.json {
            let part = json!({"schema_version": 1, "sets": status["sets"], "devices": status["devices"]});
            return out::print_json(&part);
        }
        out::print(&tree(&status))
    }
}

fn tree(status: &Value) -> String {
    let rows = rows(status);
    let mut text_of = String::from(".\n");
    let mut alone: Vec<&DeviceRow<'_>> = Vec::new();
    let line = |row: &DeviceRow<'_>| {
        let label = row.text("label");
        let label = if label.is_empty() { label } else { format!("{label}  ") };
        format!("{label}{}  {}  {}", text(&row.device["path"]), row.name(), row.state())
    };
    for cache in rows.iter().filter(|r| r.device["kind"] == "cache") {
        let label = cache.text("label");
        let label = if label.is_empty() { label } else { format!("{label}  ") };
        text_of.push_str(&format!(
            "`-- {label}{}  set {}\n",
            text(&cache.device["path"]),
            text(&cache.device["set"])
        ));
        for row in rows.iter().filter(|r| r.cache == Some(text(&cache.device["path"]))) {
            text_of.push_str(&format!("    `-- {}\n", line(row)));
        }
        for set in status["sets"].as_array().into_iter().flatten().filter(|s| s["id"] == cache.device["set"])
        {
            for volume in set["volumes"].as_array().into_iter().flatten().filter(|v| v["flash_only"] == true)
            {
                let label = plain::label(text(&volume["label"]));
                let label = if label.is_empty() { String::new() } else { format!("{label}  ") };
                let state = without_disk(volume).unwrap_or("flash-only");
                text_of.push_str(&format!("    `-- {label}{}  {state}\n", text(&volume["name"])));
            }
        }
    }
    alone.extend(rows.iter().filter(|r| r.device["kind"] != "cache" && r.cache.is_none()));
    for row in alone {
        text_of.push_str(&format!("`-- {}\n", line(row)));
    }
    text_of
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_straight() {
        let rows = [vec!["a".to_owned(), "bb".into()], vec!["ccc".into(), "d".into()]];
        assert_eq!(table(&rows), "a    bb\nccc  d\n");
    }

    /// A cache device whose set was disabled was `active`, and its volumes were `running`.
    #[test]
    fn devices_of_a_disabled_set_do_not_look_healthy() {
        let status = json!({
            "sets": [{"id": "s", "state": "serving", "set": {"failed": "broken"}, "volumes": [
                {"name": "bcache0", "backing_uuid": "u1", "state": "dirty"}]}],
            "devices": [
                {"path": "/dev/c", "kind": "cache", "uuid": "u0", "set": "s", "state": "served"},
                {"path": "/dev/b", "kind": "backing", "uuid": "u1", "set": "s", "state": "served"}],
        });
        let states: Vec<String> = rows(&status).iter().map(DeviceRow::state).collect();
        assert_eq!(states, ["disabled", "dirty(disabled)"]);
    }

    /// Flash-only volumes were in no list but `tree` and `status`.
    #[test]
    fn flash_only_volumes_have_rows() {
        let volume = |name: &str, stopped: bool| {
            json!({"name": name, "label": "tmp", "flash_only": true, "stopped": stopped, "size_bytes": 4096, "cached_bytes": 0,
                "dirty_bytes": 4096})
        };
        let status = json!({
            "sets": [{"id": "s", "state": "serving", "volumes": [volume("bcache2", false), volume("bcache3", true)]}],
            "devices": [{"path": "/dev/c", "kind": "cache", "uuid": "u0", "set": "s", "state": "served"}],
        });
        assert_eq!(rows(&status).len(), 1);
        let columns: Vec<Vec<String>> = flash_only_rows(&status).iter().map(DeviceRow::columns).collect();
        assert_eq!(columns[0][..6], ["tmp", "bcache2", "N/A", "flash-only", "running", "4.0 KiB"]);
        assert_eq!((&*columns[1][4], &*columns[1][8]), ("stopped", "/dev/c"));
    }

    #[test]
    fn devices_hang_below_their_cache() {
        let status = json!({
            "sets": [{"id": "s", "volumes": [
                {"name": "bcache0", "backing_uuid": "u1", "state": "dirty", "flash_only": false},
                {"name": "bcache2", "label": "tmp", "backing_uuid": null, "state": null, "flash_only": true}]}],
            "devices": [
                {"path": "/dev/c", "kind": "cache", "label": "fast", "uuid": "u0", "set": "s", "state": "served"},
                {"path": "/dev/b", "kind": "backing", "label": "data", "uuid": "u1", "set": "s", "state": "served"},
                {"path": "/dev/w", "kind": "backing", "uuid": "u2", "set": "other", "state": "waiting"}],
        });
        assert_eq!(
            tree(&status),
            ".\n`-- fast  /dev/c  set s\n    `-- data  /dev/b  bcache0  dirty(running)\n    `-- tmp  bcache2  flash-only\n\
             `-- /dev/w  N/A  waiting\n"
        );
    }
}
