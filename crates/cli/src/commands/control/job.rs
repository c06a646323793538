//! Commands that start and follow jobs of the daemon.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use format::{counted, form};
use serde_json::{Value, json};
use serve::plain;

use super::{answer, text};
use crate::client::{Control, described, segment};
use crate::commands::drain::OfflineDrain;
use crate::failure::Failure;
use crate::interrupt::{Interrupt, exit_code};
use crate::{out, size};

/// Interval of requests for the progress of a job.
const EVERY: Duration = Duration::from_millis(200);

fn progress_line(job: &Value) -> String {
    let bytes = |key: &str| size::human(job[key].as_u64().unwrap_or(0));
    let percent = job["percent"].as_u64().unwrap_or(0).min(100);
    let full = (percent / 5) as usize;
    let eta = job["eta_seconds"].as_u64().map(|s| format!(", {s} s left")).unwrap_or_default();
    format!(
        "[{}{}] {percent:>3} %, {} of {}{eta}",
        "#".repeat(full),
        "-".repeat(20 - full),
        bytes("done_bytes"),
        bytes("total_bytes")
    )
}

/// The target of a job: the volume or the set, and the device with its UUID.
fn target_of(job: &Value) -> String {
    // A daemon of an older version does not tell the label.
    let label = &job["label"];
    let kind = if plain::is_uuid(text(&job["target"])) { "set" } else { "name" };
    described(&json!({kind: job["target"], "label": label, "device": job["device"], "uuid": job["uuid"]}))
}

/// Why a job was cancelled that no client has cancelled; empty otherwise.
fn why_of(job: &Value) -> String {
    job["error"].as_str().map(|why| format!(": {why}")).unwrap_or_default()
}

/// The jobs that had to end with the service of a device; empty if there are none.
pub(super) fn ended_jobs(jobs: &Value) -> String {
    let jobs = jobs.as_array().into_iter().flatten();
    jobs.map(|job| {
        format!("; job {}, {} {}, was cancelled", job["id"], text(&job["kind"]), text(&job["target"]))
    })
    .collect()
}

/// The result of a wipe as text; empty if there was none.
fn wiped_in_words(wiped: &Value) -> String {
    let number = |key: &str| wiped[key].as_u64();
    let (Some(bytes), Some(whole), Some(shared)) =
        (number("zeroed_bytes"), number("whole_buckets"), number("shared_buckets"))
    else {
        return String::new();
    };
    format!(
        ": {} overwritten with zeros on the cache device: {}, and the unused part of {shared} that {} other data or \
         metadata",
        size::human(bytes),
        counted(whole, "bucket"),
        form(shared, "holds", "hold")
    )
}

/// The result of a scrub as text; empty if there was none.
fn scrubbed_in_words(scrubbed: &Value) -> String {
    let number = |key: &str| scrubbed[key].as_u64().unwrap_or(0);
    if !scrubbed.is_object() {
        return String::new();
    }
    let more = |key: &str, words: &dyn Fn(u64) -> String| match number(key) {
        0 => String::new(),
        n => format!(", {}", words(n)),
    };
    format!(
        ": {} verified{}{}{}",
        counted(number("verified_blocks"), "block"),
        more("learnt_blocks", &|n| format!("{n} got a checksum")),
        more("unverified_blocks", &|n| format!("{n} {} no checksum still", form(n, "has", "have"))),
        more("damaged_clean_blocks", &|n| {
            format!("{n} of clean data {} damaged and dropped", form(n, "was", "were"))
        })
    )
}

/// The devices that have joined or left a group, as text; empty if the job was no change of a group.
fn group_in_words(group: &Value) -> String {
    let added = group["added"].as_str().map(|device| format!("; {} is in the group", plain::escaped(device)));
    let removed = group["removed"].as_str().map(|device| {
        format!(
            "; {} has left the group: it is an empty cache set, and not registered",
            plain::escaped(device)
        )
    });
    added.into_iter().chain(removed).collect()
}

/// Prints what a job has said of its steps after the first notes. Returns the number of its notes.
fn say_notes(job: &Value, said: usize, progress: &mut out::Progress) -> usize {
    // A daemon of an older version has none.
    let notes = job["notes"].as_array().map(Vec::as_slice).unwrap_or_default();
    for note in notes.iter().skip(said) {
        progress.clear();
        out::note(text(note));
    }
    notes.len()
}

/// Waits for the end of a job and prints its result. After a signal it says that the job goes on, and ends.
fn watch(
    control: &Control,
    kind: &'static str,
    mut interrupt: Interrupt,
    mut body: Value,
) -> Result<(), Failure> {
    let mut progress = out::Progress::new(kind);
    let id = body["job"]["id"].as_u64().unwrap_or(0);
    let mut said = 0;
    while body["job"]["state"] == "running" {
        if let Some(signal) = interrupt.first() {
            progress.clear();
            let job = format!("job {id}, {} {}", text(&body["job"]["kind"]), target_of(&body["job"]));
            out::note(format!(
                "{job}: goes on in the daemon; `ubcache jobs` shows it, `ubcache cancel {id}` ends it"
            ));
            return Err(Failure::Signalled(exit_code(signal)));
        }
        said = say_notes(&body["job"], said, &mut progress);
        progress.line(|what| format!("{what}: {}", progress_line(&body["job"])));
        std::thread::sleep(EVERY);
        body = control.get(&format!("/v1/jobs/{id}"))?;
    }
    say_notes(&body["job"], said, &mut progress);
    progress.clear();
    let job = &body["job"];
    if control.json {
        out::print_json(&body)?;
    }
    match text(&job["state"]) {
        "done" if control.json => Ok(()),
        "done" => {
            let wiped = wiped_in_words(&job["report"]["wiped"]);
            let scrubbed = scrubbed_in_words(&job["report"]["scrubbed"]);
            let group = group_in_words(&job["report"]["group"]);
            out::print(&format!("{}: {} done{wiped}{scrubbed}{group}\n", target_of(job), text(&job["kind"])))
        }
        "failed" => Err(Failure::Failed(format!("{}: {}", target_of(job), text(&job["error"])))),
        other => Err(Failure::Failed(format!("{}: {other}{}", target_of(job), why_of(job)))),
    }
}

/// The options of commands that start a job.
#[derive(Args, Debug)]
pub(crate) struct Waiting {
    /// Do not wait for the end
    #[arg(long)]
    pub(crate) no_wait: bool,
    #[command(flatten)]
    pub(crate) control: Control,
}

impl Waiting {
    fn begin(&self, kind: &'static str, path: &str) -> Result<(), Failure> {
        self.begin_with(kind, path, &json!({}))
    }

    pub(crate) fn begin_with(&self, kind: &'static str, path: &str, wanted: &Value) -> Result<(), Failure> {
        // A signal during the request must not end the command before it can say that the job goes on.
        let mut interrupt = Interrupt::new()?;
        let body = self.control.post(path, wanted)?;
        if self.no_wait {
            answer(&self.control, &body, || {
                format!("job {}: {}\n", body["job"]["id"], target_of(&body["job"]))
            })?;
            return interrupt.first().map_or(Ok(()), |signal| Err(Failure::Signalled(exit_code(signal))));
        }
        watch(&self.control, kind, interrupt, body)
    }
}

/// Detach a backing device: write its dirty data back and stop caching it
///
/// Its volume is still served, without a cache. Ending this command does not end the detach: `cancel` does.
#[derive(Args, Debug)]
pub(crate) struct Detach {
    /// Volume or backing device
    backing: String,
    /// Then overwrite with zeros all data on the cache device that no volume of the set needs, as `wipe` does
    #[arg(long)]
    wipe: bool,
    /// The cache device is lost: make the device, which waits for it, leave its set; refused if it has dirty data there
    #[arg(long, conflicts_with_all = ["wipe", "no_wait"])]
    force: bool,
    #[command(flatten)]
    waiting: Waiting,
}

impl Detach {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        let control = &self.waiting.control;
        let path = format!("/v1/volumes/{}/detach", segment(&control.device_name(&self.backing)?));
        if self.force {
            let body = control.post(&path, &json!({"force": true}))?;
            return answer(control, &body, || {
                let (device, set) = (described(&body["resolved"]), text(&body["left_set"]));
                format!("{device}: detached from cache set {set} without its cache device\n")
            });
        }
        self.waiting.begin_with("detaching", &path, &json!({"wipe": self.wipe}))
    }
}

/// Overwrite with zeros all data on a cache device that no volume of its set needs
///
/// Data of detached volumes, and data that was overwritten, discarded or evicted, stays readable on the device until its
/// bucket is reused. The set serves its volumes meanwhile. The command can be run again at any time, also after a crash.
#[derive(Args, Debug)]
pub(crate) struct Wipe {
    /// Set (UUID or cache device)
    cache: String,
    #[command(flatten)]
    waiting: Waiting,
}

impl Wipe {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        let name = segment(&self.waiting.control.device_name(&self.cache)?);
        self.waiting.begin("wiping", &format!("/v1/sets/{name}/wipe"))
    }
}

/// Read all cached data of a set, and compare it with its checksums
///
/// Damaged clean data is dropped from the cache, and read from the disk again. Damaged dirty data is listed by `damaged`, and
/// the exit code is 1. Blocks without a checksum get one. The scrub yields to clients; the tunables scrub_share and
/// scrub_rate limit it. An unfinished scrub continues where it ended, also after a restart. Ending this command does not end
/// the scrub: `cancel` does.
#[derive(Args, Debug)]
#[command(after_help = "Example: ubcache scrub /dev/nvme0n1p4 --rate 100MiB")]
pub(crate) struct Scrub {
    /// Set (UUID or cache device)
    set: String,
    /// Read at most so much in a second, until the next start of the daemon; 0 for no limit
    #[arg(long, value_name = "BYTES", value_parser = size::parse_rate)]
    rate: Option<u64>,
    /// Print how much would be read, and do nothing
    #[arg(long, conflicts_with = "no_wait")]
    dry_run: bool,
    #[command(flatten)]
    waiting: Waiting,
}

impl Scrub {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        let control = &self.waiting.control;
        let path = format!("/v1/sets/{}", segment(&control.device_name(&self.set)?));
        if self.dry_run {
            let body = control.get(&path)?;
            return answer(control, &body, || would_scrub(&body["set"]["set"]));
        }
        if let Some(rate) = self.rate {
            let put = json!({"value": rate.to_string(), "runtime": true});
            control.put(&format!("{path}/tunables/scrub_rate"), &put)?;
        }
        self.waiting.begin("scrubbing", &format!("{path}/scrub"))
    }
}

/// What a scrub of a set would do.
fn would_scrub(set: &Value) -> String {
    let (checksums, amount) = (&set["checksums"], size::human(set["cached_bytes"].as_u64().unwrap_or(0)));
    if !checksums.is_object() {
        return "cached data has no checksums: only `ubcache make --checksums` switches them on\n".to_owned();
    }
    let goes_on =
        if checksums["scrub"]["unfinished"] == true { ", from where the last scrub ended" } else { "" };
    format!("would read {amount} of cached data{goes_on}\n")
}

/// Write all dirty data of a volume or a set back
///
/// With -C it works offline, on a set that no process serves: it opens the set, writes the dirty data of the given backing
/// devices to them (without -B: of all that it finds among the block devices and, if the cache is a file, beside it), and
/// stops. Exit code 1 if dirty data is left because its backing device is missing.
#[derive(Args, Debug)]
pub(crate) struct Drain {
    /// Volume (name, label or device) or set (UUID or cache device) of the daemon
    #[arg(required_unless_present = "cache", conflicts_with = "cache")]
    volume: Option<String>,
    /// Offline: cache device
    #[arg(short = 'C', long = "cache", value_name = "DEV", conflicts_with = "no_wait")]
    cache: Option<PathBuf>,
    /// Offline: backing device; without one, all that are found
    #[arg(short = 'B', long = "backing", value_name = "DEV", requires = "cache")]
    backing: Vec<PathBuf>,
    #[command(flatten)]
    waiting: Waiting,
}

impl Drain {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        if let Some(cache) = &self.cache {
            return OfflineDrain::new(cache, &self.backing, self.waiting.control.json).run();
        }
        let volume = self.volume.as_deref().unwrap_or_default();
        let name = segment(&self.waiting.control.device_name(volume)?);
        let there_is = |kind: &str| self.waiting.control.ask("GET", &format!("/v1/{kind}/{name}"), None);
        let of_volume = there_is("volumes")?;
        let is_set = of_volume.status == 404 && there_is("sets")?.status == 200;
        let kind = if is_set { "sets" } else { "volumes" };
        self.waiting.begin("writing back", &format!("/v1/{kind}/{name}/drain"))
    }
}

/// List jobs of the daemon
#[derive(Args, Debug)]
pub(crate) struct Jobs {
    #[command(flatten)]
    control: Control,
}

impl Jobs {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        let body = self.control.get("/v1/jobs")?;
        answer(&self.control, &body, || {
            let lines = body["jobs"].as_array().into_iter().flatten().map(|j| {
                let state = match text(&j["state"]) {
                    "running" => progress_line(j),
                    "failed" => format!("failed: {}", text(&j["error"])),
                    other => format!("{other}{}", why_of(j)),
                };
                let target = plain::named(text(&j["label"]), text(&j["target"]));
                format!("{} {} {target}: {state}\n", j["id"], text(&j["kind"]))
            });
            lines.collect()
        })
    }
}

/// Cancel a job of the daemon; the work done so far stays done, but a device that joins a group leaves it again
#[derive(Args, Debug)]
pub(crate) struct Cancel {
    /// Number of the job
    job: u64,
    #[command(flatten)]
    control: Control,
}

impl Cancel {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        let body = self.control.delete(&format!("/v1/jobs/{}", self.job))?;
        answer(&self.control, &body, || format!("job {}: cancelled: {}\n", self.job, target_of(&body["job"])))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_of_a_set_names_it_as_other_commands_do() {
        let id = "2ed6caaa-85ca-42b5-9974-bfbea253b04d";
        let job = json!({"target": id, "label": "", "device": "/dev/ssd", "uuid": "u"});
        assert_eq!(target_of(&job), format!("set {id} (/dev/ssd, UUID u)"));
        let job = json!({"target": "bcache0", "label": "data", "device": "/dev/hdd", "uuid": "u"});
        assert_eq!(target_of(&job), "data, bcache0 (/dev/hdd, UUID u)");
    }

    #[test]
    fn a_bar_is_as_full_as_the_job() {
        let job = json!({"percent": 50, "done_bytes": 512, "total_bytes": 1024, "eta_seconds": 3});
        assert_eq!(progress_line(&job), "[##########----------]  50 %, 512 B of 1.0 KiB, 3 s left");
        let wiped = json!({"zeroed_bytes": 1 << 20, "whole_buckets": 3, "shared_buckets": 2});
        assert!(wiped_in_words(&wiped).starts_with(": 1.0 MiB overwritten with zeros"));
        assert_eq!(wiped_in_words(&Value::Null), "");
        let job = json!({"percent": 100, "done_bytes": 0, "total_bytes": 0});
        assert_eq!(progress_line(&job), "[####################] 100 %, 0 B of 0 B");
    }
}
