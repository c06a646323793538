//! `status`: problems, sets and volumes on one screen; `events`: events as they happen.

use std::cell::Cell;

use clap::Args;
use serde_json::Value;
use serve::plain;

use super::columns::table;
use super::copies;
use super::{text, writeback_rate};
use crate::client::{Control, segment};
use crate::failure::Failure;
use crate::when::{Since, Utc};
use crate::{out, size};

/// Show sets, volumes and problems on one screen
///
/// Problems come first, each with the command to run next. `Cached` is the data of a volume in the cache, clean and dirty.
/// `Dirty` is the part of it that the disk does not have yet. Every percentage is a share of the size of the cache, so those
/// of the volumes add up to that of the set. Volumes that were stopped stay listed.
#[derive(Args, Debug)]
pub(crate) struct Status {
    /// End with exit code 1 if there is a problem
    #[arg(long)]
    check: bool,
    #[command(flatten)]
    control: Control,
}

impl Status {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        let status = self.control.get("/v1/status")?;
        if self.control.json { out::print_json(&status) } else { out::print(&screen(&status)) }?;
        match status["problems"].as_array().map_or(0, Vec::len) {
            0 => Ok(()),
            _ if !self.check => Ok(()),
            1 => Err(Failure::Failed("there is a problem".into())),
            n => Err(Failure::Failed(format!("there are {n} problems"))),
        }
    }
}

/// The elements of a list; none if it is no list.
pub(super) fn each(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn bytes(value: &Value) -> String {
    size::human(value.as_u64().unwrap_or(0))
}

/// An amount of data in the cache, and its share of the size of the cache.
pub(super) fn held(of: &Value, what: &str) -> String {
    let Some(amount) = of[format!("{what}_bytes")].as_u64() else { return "-".into() };
    let more = if what == "cached" && of["cached_is_exact"] == false { "≥ " } else { "" };
    let share = match of[format!("{what}_percent")].as_f64() {
        None => return format!("{more}{}", size::human(amount)),
        Some(share) if share == 0.0 && amount > 0 => "< 0.1 %".to_owned(),
        Some(share) => format!("{share:.1} %"),
    };
    format!("{more}{} ({share})", size::human(amount))
}

/// The problems with the command that comes next for each, one line each.
pub(super) fn problems(status: &Value) -> String {
    let lines: Vec<String> = each(&status["problems"])
        .map(|p| format!("  {}; run `{}`\n", text(&p["text"]), text(&p["command"])))
        .collect();
    match lines.len() {
        0 => "no problems\n".to_owned(),
        1 => format!("1 PROBLEM\n{}", lines.concat()),
        n => format!("{n} PROBLEMS\n{}", lines.concat()),
    }
}

fn screen(status: &Value) -> String {
    let mut said = format!("ubcache {}, up {} s: ", text(&status["version"]), status["uptime_seconds"]);
    said.push_str(&problems(status));
    let mut listed = Vec::new();
    for set in each(&status["sets"]) {
        said.push('\n');
        said.push_str(&heading(set, status));
        said.push_str(&volumes(set, status, &mut listed));
    }
    let rest: Vec<Vec<String>> = each(&status["devices"])
        .filter(|d| d["kind"] != "cache" && d["state"] != "served" && !listed.contains(&text(&d["path"])))
        .map(not_served)
        .collect();
    if !rest.is_empty() {
        said.push_str("\nnot served:\n");
        said.push_str(&table(&[vec![head()], rest].concat()));
    }
    said.push_str(&growth(status));
    for job in each(&status["jobs"]) {
        said.push_str(&format!(
            "\njob {}: {} {}: {} %\n",
            job["id"],
            text(&job["kind"]),
            plain::named(text(&job["label"]), text(&job["target"])),
            job["percent"]
        ));
    }
    let errors: Vec<&Value> = each(&status["last_errors"]).collect();
    if !errors.is_empty() {
        said.push_str("\nlast errors and warnings:\n");
        errors.iter().for_each(|e| {
            said.push_str("  ");
            said.push_str(&line(e));
        });
    }
    said
}

/// The disks that are larger than what is served of them, with what serves all of it. Empty if there are none.
fn growth(status: &Value) -> String {
    let grown = each(&status["devices"]).filter_map(|d| Some((d, d["grown_bytes"].as_u64()?)));
    let lines: Vec<String> = grown
        .map(|(d, more)| {
            let path = text(&d["path"]);
            let name = d["name"].as_str().unwrap_or(path);
            format!(
                "  {} ({path}): {} more; unmount it, then `ubcache stop {} && ubcache register {path}`\n",
                plain::named(text(&d["label"]), name),
                size::human(more),
                plain::typed(text(&d["label"]), name)
            )
        })
        .collect();
    if lines.is_empty() {
        return String::new();
    }
    format!(
        "\ngrown disks, served with their old size (see the page grow-disk of the guide):\n{}",
        lines.concat()
    )
}

/// The lines about a set itself. A disabled set is named so, whatever its thread does.
fn heading(set: &Value, status: &Value) -> String {
    let figures = &set["set"];
    let state = match &figures["failed"] {
        Value::String(_) => "DISABLED",
        _ if set["state"] == "failed" => "FAILED",
        _ if set["why"].is_string() => "DOES NOT ANSWER",
        _ => text(&set["state"]),
    };
    if set["has_cache"] != true {
        let device = each(&status["devices"]).find(|d| d["uuid"] == set["id"]);
        let path = device.map_or(text(&set["id"]), |d| text(&d["path"]));
        return format!("without a cache: {path}: {state}\n");
    }
    let name = format!("set {}", text(&set["id"]));
    let mut said = format!("{}: {state}\n", plain::named(text(&figures["label"]), name));
    if figures.is_object() {
        said.push_str(&format!(
            "  cache {}: {}, {} cached, {} dirty\n",
            text(&figures["device"]),
            bytes(&figures["size_bytes"]),
            held(figures, "cached"),
            held(figures, "dirty")
        ));
        said.push_str(&checksums(&figures["checksums"]));
    }
    said.push_str(&copies::line(set, status));
    said
}

/// The line about checksums; empty for a set without checksums.
fn checksums(of: &Value) -> String {
    if !of.is_object() {
        return String::new();
    }
    let number = |key: &str| of[key].as_u64().unwrap_or(0);
    let size = |key: &str| size::human(number(key).saturating_mul(number("block_bytes")));
    let mut said = "  checksums: on".to_owned();
    if number("unverified_blocks") > 0 {
        said.push_str(&format!(", {} cannot be verified", size("unverified_blocks")));
    }
    if number("unread_blocks") > 0 {
        said.push_str(&format!(", {} not looked at since the start", size("unread_blocks")));
    }
    if number("damaged_dirty_bytes") > 0 {
        said.push_str(&format!(", {} DAMAGED", size::human(number("damaged_dirty_bytes"))));
    }
    let scrub = &of["scrub"];
    match scrub["completed_unix_seconds"].as_u64() {
        _ if scrub["running"] == true => {
            said.push_str(&format!(
                "; scrub: {} of {}",
                bytes(&scrub["done_bytes"]),
                bytes(&scrub["total_bytes"])
            ));
        }
        Some(at) => said.push_str(&format!("; last scrub {}", Utc(at.saturating_mul(1000)))),
        None => said.push_str("; never scrubbed"),
    }
    said + "\n"
}

fn head() -> Vec<String> {
    let head = [
        "  Label",
        "Volume",
        "Disk",
        "Size",
        "Cached",
        "Dirty",
        "Mode",
        "State",
        "Hits",
        "Writeback",
        "Reached by",
    ];
    head.map(str::to_owned).to_vec()
}

fn label(of: &Value) -> String {
    match text(&of["label"]) {
        "" => "  -".to_owned(),
        label => format!("  {}", plain::label(label)),
    }
}

/// The row of a backing device that is not served.
fn not_served(device: &Value) -> Vec<String> {
    let dash = || "-".to_owned();
    let amount = |key: &str| device[key].as_u64().map_or_else(dash, size::human);
    let name = device["name"].as_str().unwrap_or("-").to_owned();
    let (path, state) = (text(&device["path"]).to_owned(), text(&device["state"]).to_owned());
    let (volume, dirty) = (amount("size_bytes"), amount("dirty_bytes"));
    vec![label(device), name, path, volume, dash(), dirty, dash(), state, dash(), dash(), dash()]
}

/// A name by which names are sorted so that a number counts as a number: v2 comes before v10.
fn natural(name: &str) -> Vec<(String, u64)> {
    let mut parts = Vec::new();
    let mut rest = name;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| c.is_ascii_digit()).unwrap_or(rest.len());
        let (word, tail) = rest.split_at(digits);
        let (number, tail) = tail.split_at(tail.find(|c: char| !c.is_ascii_digit()).unwrap_or(tail.len()));
        parts.push((word.to_lowercase(), number.parse().unwrap_or(0)));
        rest = tail;
    }
    parts
}

/// The volumes of a set, sorted by name, and its backing devices that are not served; `listed` gets the paths of the latter.
fn volumes<'a>(set: &'a Value, status: &'a Value, listed: &mut Vec<&'a str>) -> String {
    let mut served: Vec<&Value> = each(&set["volumes"]).collect();
    served.sort_by_key(|v| {
        natural(v["label"].as_str().filter(|l| !l.is_empty()).unwrap_or_else(|| text(&v["name"])))
    });
    let mut rows: Vec<Vec<String>> = served.into_iter().map(volume).collect();
    let is_member = |d: &&Value| d["kind"] == "backing" && d["set"] == set["id"] && d["state"] != "served";
    for device in each(&status["devices"]).filter(is_member) {
        rows.push(not_served(device));
        listed.push(text(&device["path"]));
    }
    if rows.is_empty() {
        return String::new();
    }
    rows.insert(0, head());
    table(&rows)
}

/// The state of a volume without a backing device.
pub(super) fn without_disk(volume: &Value) -> Option<&'static str> {
    let state = if volume["stopped"] == true { "stopped" } else { "flash-only" };
    volume["state"].is_null().then_some(state)
}

fn volume(v: &Value) -> Vec<String> {
    let ways: Vec<&str> = each(&v["exports"]).map(|w| text(&w["address"])).collect();
    let reached = match (v["problem"].as_str(), ways.is_empty()) {
        (Some(problem), true) => format!("NOT EXPORTED: {problem}"),
        (Some(problem), false) => format!("{}; NOT EXPORTED: {problem}", ways.join(", ")),
        (None, true) if v["stopped"] == true => "-".to_owned(),
        (None, true) => "not exported".to_owned(),
        (None, false) => ways.join(", "),
    };
    let total = &v["stats"]["total"];
    let seen = total["cache_hits"].as_u64().unwrap_or(0) + total["cache_misses"].as_u64().unwrap_or(0);
    vec![
        label(v),
        text(&v["name"]).to_owned(),
        v["backing_device"].as_str().unwrap_or("-").to_owned(),
        bytes(&v["size_bytes"]),
        held(v, "cached"),
        held(v, "dirty"),
        text(&v["cache_mode"]).to_owned(),
        without_disk(v).unwrap_or_else(|| text(&v["state"])).to_owned(),
        if seen == 0 { "-".into() } else { format!("{} %", total["cache_hit_ratio"]) },
        writeback_rate(v),
        reached,
    ]
}

/// Explain writeback, bypassed requests and the hit ratio of a volume
#[derive(Args, Debug)]
pub(crate) struct Explain {
    /// Volume, by name, label or backing device
    volume: String,
    #[command(flatten)]
    control: Control,
}

impl Explain {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        let body = self
            .control
            .get(&format!("/v1/volumes/{}/explain", segment(&self.control.device_name(&self.volume)?)))?;
        if self.control.json {
            return out::print_json(&body);
        }
        let parts = [("writeback", "Writeback"), ("bypassed", "Bypassed"), ("hits", "Hits")];
        let parts = parts.map(|(key, title)| {
            let sentences: String = each(&body[key]).map(|s| format!("  {}\n", text(s))).collect();
            format!("{title}\n{sentences}")
        });
        out::print(&parts.join("\n"))
    }
}

/// Print events: as they happen, or of the past with --since
///
/// The daemon stores the last events in its state directory (at most 8192 and at most 2 MiB), so that they outlive it.
/// Times are in UTC. With --json each event is one line.
#[derive(Args, Debug)]
#[command(after_help = "Example: ubcache events --since 2h --follow")]
pub(crate) struct Events {
    /// Print the stored events from this time on: 2026-11-25T14:05:00Z (UTC), 2026-11-25, or 15m, 2h, 7d before now
    #[arg(long, value_name = "TIME|DURATION")]
    since: Option<Since>,
    /// Then print events as they happen; without --since this is the default
    #[arg(long)]
    follow: bool,
    #[command(flatten)]
    control: Control,
}

impl Events {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        let Some(since) = self.since else { return self.control.events(|| Ok(()), |e| self.print(e)) };
        let last = Cell::new(0);
        let print_past = || {
            let query = match since {
                Since::Moment(ms) => format!("since_ms={ms}"),
                Since::Before(ms) => format!("within_ms={ms}"),
            };
            let past = self.control.get(&format!("/v1/events/history?{query}"))?;
            each(&past["events"]).try_for_each(|event| {
                last.set(event["seq"].as_u64().unwrap_or(0));
                self.print(event)
            })
        };
        if !self.follow {
            return print_past();
        }
        // An event of the time between is in both.
        let is_new = |event: &Value| event["seq"].as_u64().is_none_or(|seq| seq > last.get());
        self.control.events(print_past, |event| if is_new(event) { self.print(event) } else { Ok(()) })
    }

    fn print(&self, event: &Value) -> Result<(), Failure> {
        if self.control.json { out::print_json_line(event) } else { out::print(&line(event)) }
    }
}

/// An event as one line of text.
fn line(event: &Value) -> String {
    let time = Utc(event["time_ms"].as_u64().unwrap_or(0));
    let what = text(&event["text"]);
    let what = match (text(&event["label"]), event["set"].as_str()) {
        ("", Some(set)) if !what.contains(set) => format!("set {set}: {what}"),
        (label, _) => plain::about(label, what),
    };
    let level = match text(&event["level"]) {
        "info" => String::new(),
        other => format!("{other}: "),
    };
    format!("{time} {level}{what}\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_event_is_a_line_with_its_time() {
        let event =
            json!({"seq": 7, "time_ms": 1_795_615_500_000_u64, "level": "error", "set": "s", "text": "oh"});
        assert_eq!(line(&event), "2026-11-25T14:05:00Z error: set s: oh\n");
        let labelled =
            json!({"time_ms": 0, "level": "info", "set": "s", "label": "fast", "text": "scrub done"});
        assert_eq!(line(&labelled), "1970-01-01T00:00:00Z fast: scrub done\n");
        // The line began with the UUID in quotes, also if it was in the text.
        let uuid = "11111111-1111-1111-1111-111111111111";
        let of_set = |text: &str| line(&json!({"time_ms": 0, "level": "info", "set": uuid, "text": text}));
        assert_eq!(of_set("gc done"), format!("1970-01-01T00:00:00Z set {uuid}: gc done\n"));
        let named = format!("set {uuid} is served");
        assert_eq!(of_set(&named), format!("1970-01-01T00:00:00Z {named}\n"));
    }

    /// Volumes were listed in the order of their start, which was another one after each restart.
    #[test]
    fn volumes_are_sorted_by_name() {
        let names = ["v10", "", "V1", "v2"];
        let volumes: Vec<Value> =
            names.iter().map(|label| json!({"name": "bcache7", "label": label, "state": "clean"})).collect();
        let set = json!({"id": "s", "volumes": volumes});
        let table = volumes_of(&set);
        let at = |label: &str| table.find(label).unwrap_or_default();
        assert!(at("bcache7") < at("V1") && at("V1") < at("v2") && at("v2") < at("v10"), "{table}");
    }

    fn volumes_of(set: &Value) -> String {
        volumes(set, &json!({}), &mut Vec::new())
    }

    fn one_set() -> Value {
        json!({
            "version": "1", "uptime_seconds": 5,
            "problems": [{"kind": "not_exported", "text": "one is NOT EXPORTED: no socket", "command": "ubcache reload"}],
            "sets": [{"id": "s", "has_cache": true, "state": "serving", "why": null,
                "set": {"device": "/dev/c", "size_bytes": 8192, "cached_bytes": 4096, "cached_percent": 50.0,
                    "dirty_bytes": 2, "dirty_percent": 0.0, "in_use_percent": 7, "failed": "broken"},
                "volumes": [{"name": "bcache0", "label": "one", "backing_device": "/dev/b", "size_bytes": 1024,
                    "cache_mode": "writeback", "state": "dirty", "cached_bytes": 4096, "cached_percent": 50.0,
                    "cached_is_exact": true, "dirty_bytes": 512, "dirty_percent": 6.3, "exports": [], "problem": "no socket",
                    "stats": {"total": {"cache_hits": 1, "cache_misses": 1, "cache_hit_ratio": 50}},
                    "requests": {"read_bytes": 1, "written_bytes": 2}, "writeback": {"rate_bytes_per_s": 4096}}]}],
            "devices": [
                {"path": "/dev/w", "kind": "backing", "label": "", "set": "t", "state": "waiting", "why": "for its cache"},
                {"path": "/dev/x", "kind": "backing", "label": "two", "name": "bcache1", "set": "s", "state": "stopped",
                    "size_bytes": 2048, "dirty_bytes": 1024}],
            "jobs": [{"id": 3, "kind": "detach", "target": "bcache0", "percent": 9}],
            "last_errors": [{"time_ms": 1_795_615_500_000_u64, "level": "error", "set": "s", "text": "oh"}],
        })
    }

    /// A set that is disabled was `serving`, and a stopped volume was not listed.
    #[test]
    fn one_screen_says_what_is_wrong() {
        let said = screen(&one_set());
        for words in [
            "up 5 s: 1 PROBLEM\n  one is NOT EXPORTED: no socket; run `ubcache reload`\n",
            "set s: DISABLED\n  cache /dev/c: 8.0 KiB, 4.0 KiB (50.0 %) cached, 2 B (< 0.1 %) dirty\n",
            "NOT EXPORTED: no socket",
            "50 %",
            "4.0 KiB/s",
            "job 3: detach bcache0: 9 %",
            // It had no time.
            "  2026-11-25T14:05:00Z error: set s: oh\n",
        ] {
            assert!(said.contains(words), "{words}: {said}");
        }
        let lines: Vec<Vec<&str>> = said.lines().map(|l| l.split_whitespace().collect()).collect();
        let line = |first: &str| lines.iter().find(|l| l.first() == Some(&first)).expect(first);
        assert_eq!(
            lines.iter().find(|l| l.get(1) == Some(&"bcache0")).unwrap()[..6],
            ["one", "bcache0", "/dev/b", "1.0", "KiB", "4.0"]
        );
        // Its size was left out.
        let stopped =
            ["two", "bcache1", "/dev/x", "2.0", "KiB", "-", "1.0", "KiB", "-", "stopped", "-", "-", "-"];
        assert_eq!(*line("two"), stopped);
        assert_eq!(lines.iter().filter(|l| l.first() == Some(&"two")).count(), 1, "{said}");
        assert_eq!(line("-")[2], "/dev/w", "in a list of its own");
        assert!(said.find("not served:") > said.find("bcache1"), "{said}");
    }

    /// A rate of 1024 GiB/s was shown for a rate that is not limited.
    #[test]
    fn a_rate_without_a_limit_is_called_so() {
        let mut status = one_set();
        for (rate, shown) in
            [(i64::from(i32::MAX) * 512, "not limited"), (1 << 20, "1.0 MiB/s"), (-1, "0 B/s")]
        {
            status["sets"][0]["volumes"][0]["writeback"]["rate_bytes_per_s"] = rate.into();
            let said = screen(&status);
            assert!(said.contains(shown), "{shown}: {said}");
        }
    }

    #[test]
    fn parts_of_the_index_that_are_not_in_memory_are_said() {
        let of = json!({"cached_bytes": 1024, "cached_percent": 12.5, "cached_is_exact": false});
        assert_eq!(held(&of, "cached"), "≥ 1.0 KiB (12.5 %)");
        assert_eq!(held(&of, "dirty"), "-");
    }
}
