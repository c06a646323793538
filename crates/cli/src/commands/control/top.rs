//! `top`: the activity of every volume, once a second.
//!
//! Owns the counters of the last update and the rates, which are differences of counters between two updates. On a terminal a
//! screen shows the rates (module `screen`); elsewhere each update prints another table. Must not know keys and columns of the
//! screen, nor the form of histograms (module `latency`).

mod latency;
mod screen;

use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

use clap::Args;
use io::Histogram;
use serde_json::{Value, json};
use serve::plain;

use super::columns::table;
use super::status::without_disk;
use super::{text, writeback_rate};
use crate::client::Control;
use crate::failure::Failure;
use crate::{out, size, when};

/// Show the activity of volumes, updated regularly
///
/// IOPS and bytes are means over the time between two updates. Latencies are those of the reads and writes that were answered
/// in that time: p50 is the latency that half of them did not exceed, p99 the latency that 99 % did not exceed, at most a
/// quarter too large. Hits are the share of the reads, without those that bypassed the cache, that the cache answered.
/// On a terminal the keys in the last line sort the volumes, and q quits: of the letters p and t, the small one is for reads and
/// the capital one for writes; r and R are reads, w and W writes. The table and --json have the mean latencies, too.
#[derive(Args, Debug)]
pub(crate) struct Top {
    /// Seconds between two updates
    #[arg(short = 'i', long = "interval", value_name = "S", default_value_t = 1, value_parser = when::seconds)]
    interval_s: u64,
    /// Number of updates [default: until interrupted]
    #[arg(short = 'n', long, value_name = "N")]
    count: Option<u64>,
    #[command(flatten)]
    control: Control,
}

/// The counters of a volume.
#[derive(Clone, Copy, Default, PartialEq, Debug)]
struct Counts {
    reads: u64,
    read_bytes: u64,
    reads_answered: u64,
    read_us: u64,
    writes: u64,
    written_bytes: u64,
    writes_answered: u64,
    write_us: u64,
    hits: u64,
    misses: u64,
}

impl Counts {
    fn of(volume: &Value) -> Counts {
        let number = |of: &Value, key: &str| of[key].as_u64().unwrap_or(0);
        let (requests, total) = (&volume["requests"], &volume["stats"]["total"]);
        Counts {
            reads: number(requests, "reads"),
            read_bytes: number(requests, "read_bytes"),
            reads_answered: number(requests, "reads_answered"),
            read_us: number(requests, "read_latency_sum_us"),
            writes: number(requests, "writes"),
            written_bytes: number(requests, "written_bytes"),
            writes_answered: number(requests, "writes_answered"),
            write_us: number(requests, "write_latency_sum_us"),
            hits: number(total, "cache_hits"),
            misses: number(total, "cache_misses"),
        }
    }

    /// The difference since `before`. A counter that is smaller now counts from zero, because its volume was restarted.
    fn since(self, before: Counts) -> Counts {
        let past = |now: u64, then: u64| now.checked_sub(then).unwrap_or(now);
        Counts {
            reads: past(self.reads, before.reads),
            read_bytes: past(self.read_bytes, before.read_bytes),
            reads_answered: past(self.reads_answered, before.reads_answered),
            read_us: past(self.read_us, before.read_us),
            writes: past(self.writes, before.writes),
            written_bytes: past(self.written_bytes, before.written_bytes),
            writes_answered: past(self.writes_answered, before.writes_answered),
            write_us: past(self.write_us, before.write_us),
            hits: past(self.hits, before.hits),
            misses: past(self.misses, before.misses),
        }
    }
}

/// The activity of a volume between two updates.
#[derive(Clone, Default, PartialEq, Debug)]
struct Activity {
    label: String,
    name: String,
    state: String,
    /// Reads and writes.
    ops: [OpActivity; 2],
    hits: u64,
    misses: u64,
    dirty_bytes: u64,
    writeback: String,
}

/// The reads or the writes of a volume.
#[derive(Clone, Copy, Default, PartialEq, Debug)]
struct OpActivity {
    per_s: u64,
    bytes_per_s: u64,
    /// Mean latency of the answered ones in milliseconds; `None` without any.
    mean_ms: Option<f64>,
    /// Latency in milliseconds that half of the answered ones did not exceed.
    p50_ms: Option<f64>,
    /// Latency in milliseconds that 99 % of the answered ones did not exceed.
    p99_ms: Option<f64>,
}

impl Activity {
    /// The activity of a volume in the past, with the latencies of its reads and writes; `seconds` is `None` at the first
    /// update, which has no earlier counters.
    fn of(volume: &Value, past: Counts, times: [Histogram; 2], seconds: Option<f64>) -> Activity {
        let op = |requests, bytes, answered: u64, us: u64, times: &Histogram| OpActivity {
            per_s: per_second(requests, seconds),
            bytes_per_s: per_second(bytes, seconds),
            mean_ms: (answered > 0).then(|| us as f64 / answered as f64 / 1000.0),
            p50_ms: latency::quantile_ms(times, 0.5),
            p99_ms: latency::quantile_ms(times, 0.99),
        };
        let [reads, writes] = &times;
        Activity {
            label: plain::label(text(&volume["label"])).into_owned(),
            name: text(&volume["name"]).to_owned(),
            state: without_disk(volume).unwrap_or_else(|| text(&volume["state"])).to_owned(),
            ops: [
                op(past.reads, past.read_bytes, past.reads_answered, past.read_us, reads),
                op(past.writes, past.written_bytes, past.writes_answered, past.write_us, writes),
            ],
            hits: past.hits,
            misses: past.misses,
            dirty_bytes: volume["dirty_bytes"].as_u64().unwrap_or(0),
            writeback: writeback_rate(volume),
        }
    }

    fn hit_percent(&self) -> Option<u64> {
        (self.hits * 100).checked_div(self.hits + self.misses)
    }
}

/// One update: the status, and the activity of all volumes since the update before.
struct Update {
    status: Value,
    seconds: Option<f64>,
    volumes: Vec<Activity>,
}

/// Asks for updates.
struct Sampler<'a> {
    control: &'a Control,
    before: BTreeMap<String, Counts>,
    latencies: latency::Latencies,
    looked: Option<Instant>,
}

impl Sampler<'_> {
    fn update(&mut self) -> Result<Update, Failure> {
        let status = self.control.get("/v1/status")?;
        let latencies = latency::Latencies::ask(self.control)?;
        let now = Instant::now();
        let seconds = self.looked.map(|l| now.duration_since(l).as_secs_f64());
        let mut counts = BTreeMap::new();
        let mut activities = Vec::new();
        for volume in volumes(&status) {
            let (name, now) = (text(&volume["name"]).to_owned(), Counts::of(volume));
            let past = now.since(self.before.get(&name).copied().unwrap_or(now));
            activities.push(Activity::of(volume, past, latencies.since(&self.latencies, &name), seconds));
            counts.insert(name, now);
        }
        (self.before, self.latencies, self.looked) = (counts, latencies, Some(now));
        Ok(Update { status, seconds, volumes: activities })
    }
}

fn volumes(status: &Value) -> impl Iterator<Item = &Value> {
    let sets = status["sets"].as_array().into_iter().flatten();
    sets.flat_map(|s| s["volumes"].as_array().into_iter().flatten())
}

impl Top {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        let latencies = latency::Latencies::default();
        let mut sampler =
            Sampler { control: &self.control, before: BTreeMap::new(), latencies, looked: None };
        let dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb" || term.is_empty());
        let terminal = std::io::stdout().is_terminal() && std::io::stdin().is_terminal() && !dumb;
        if terminal && !self.control.json {
            return screen::run(Duration::from_secs(self.interval_s), self.count, || sampler.update());
        }
        let mut left = self.count;
        loop {
            let update = sampler.update()?;
            if self.control.json {
                out::print_json_line(&as_json(&update))?;
            } else {
                out::print(&plain_table(&update))?;
            }
            if let Some(left) = &mut left {
                *left = left.saturating_sub(1);
                if *left == 0 {
                    return Ok(());
                }
            }
            std::thread::sleep(Duration::from_secs(self.interval_s));
        }
    }
}

fn per_second(n: u64, seconds: Option<f64>) -> u64 {
    seconds.map_or(0, |s| (n as f64 / s.max(0.001)).round() as u64)
}

fn as_json(update: &Update) -> Value {
    let each = update.volumes.iter().map(|v| {
        let [reads, writes] = v.ops;
        json!({
            "label": v.label,
            "name": v.name,
            "reads_per_s": reads.per_s,
            "read_bytes_per_s": reads.bytes_per_s,
            "read_latency_mean_ms": reads.mean_ms,
            "read_latency_p50_ms": reads.p50_ms,
            "read_latency_p99_ms": reads.p99_ms,
            "writes_per_s": writes.per_s,
            "written_bytes_per_s": writes.bytes_per_s,
            "write_latency_mean_ms": writes.mean_ms,
            "write_latency_p50_ms": writes.p50_ms,
            "write_latency_p99_ms": writes.p99_ms,
            "hits": v.hits,
            "misses": v.misses,
            "dirty_bytes": v.dirty_bytes,
        })
    });
    json!({"schema_version": 1, "seconds": update.seconds, "volumes": each.collect::<Vec<_>>()})
}

/// The first line of an update: the daemon, and whether there are problems.
fn title(status: &Value) -> String {
    let problems = status["problems"].as_array().map_or(0, Vec::len);
    let problems = match problems {
        0 => String::new(),
        1 => "; 1 PROBLEM, see `ubcache status`".to_owned(),
        n => format!("; {n} PROBLEMS, see `ubcache status`"),
    };
    format!("ubcache {}, up {} s{problems}", text(&status["version"]), status["uptime_seconds"])
}

/// One line for each job.
fn jobs(status: &Value) -> Vec<String> {
    let jobs = status["jobs"].as_array().into_iter().flatten();
    jobs.map(|job| {
        format!("job {}: {} {}: {} %", job["id"], text(&job["kind"]), text(&job["target"]), job["percent"])
    })
    .collect()
}

/// A latency in milliseconds.
fn milliseconds(latency: Option<f64>) -> String {
    latency
        .map_or_else(|| "-".to_owned(), |ms| if ms < 10.0 { format!("{ms:.2}") } else { format!("{ms:.0}") })
}

/// The text, or a dash for an empty one.
fn dash(text: &str) -> String {
    if text.is_empty() { "-".to_owned() } else { text.to_owned() }
}

fn plain_table(update: &Update) -> String {
    let head = [
        "Label",
        "Volume",
        "Reads/s",
        "Read bytes/s",
        "Read mean ms",
        "Read p50 ms",
        "Read p99 ms",
        "Writes/s",
        "Written bytes/s",
        "Write mean ms",
        "Write p50 ms",
        "Write p99 ms",
        "Hits",
        "Dirty",
        "Writeback",
        "State",
    ];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    for v in &update.volumes {
        let [reads, writes] = v.ops;
        rows.push(vec![
            dash(&v.label),
            v.name.clone(),
            reads.per_s.to_string(),
            size::human(reads.bytes_per_s),
            milliseconds(reads.mean_ms),
            milliseconds(reads.p50_ms),
            milliseconds(reads.p99_ms),
            writes.per_s.to_string(),
            size::human(writes.bytes_per_s),
            milliseconds(writes.mean_ms),
            milliseconds(writes.p50_ms),
            milliseconds(writes.p99_ms),
            v.hit_percent().map_or_else(|| "-".into(), |r| format!("{r} %")),
            size::human(v.dirty_bytes),
            v.writeback.clone(),
            v.state.clone(),
        ]);
    }
    let mut said = format!("{}\n{}", title(&update.status), table(&rows));
    jobs(&update.status).iter().for_each(|job| said.push_str(&format!("{job}\n")));
    said
}

#[cfg(test)]
mod tests {
    use io::Nanos;

    use super::*;

    #[test]
    fn rates_are_differences() {
        let volume = |reads: u64, bytes: u64| {
            json!({"name": "bcache0", "label": "one",
                "requests": {"reads": reads, "read_bytes": bytes, "writes": 0, "written_bytes": 0,
                    "reads_answered": reads, "read_latency_sum_us": reads * 1500},
                "stats": {"total": {"cache_hits": reads, "cache_misses": 0}}, "dirty_bytes": 0, "state": "clean"})
        };
        let past = Counts::of(&volume(110, 9096)).since(Counts::of(&volume(10, 904)));
        assert_eq!((past.reads, past.read_bytes, past.hits), (100, 8192, 100));
        assert_eq!(Counts::of(&volume(5, 0)).since(past).reads, 5, "began anew");
        let status = json!({"version": "1", "uptime_seconds": 1, "sets": [{"volumes": [volume(1, 1)]}], "jobs": [],
            "problems": [{}, {}]});
        let mut reads = Histogram::default();
        (0..98).for_each(|_| reads.record(Nanos::from_us(1000)));
        (0..2).for_each(|_| reads.record(Nanos::from_us(26_000)));
        let volumes = vec![Activity::of(&volume(1, 1), past, [reads, Histogram::default()], Some(2.0))];
        let update = Update { status, seconds: Some(2.0), volumes };
        let said = plain_table(&update);
        assert!(
            said.contains("one    bcache0  50       4.0 KiB       1.50          1.05         26"),
            "{said}"
        );
        assert!(said.starts_with("ubcache 1, up 1 s; 2 PROBLEMS, see `ubcache status`\n"), "{said}");
        let as_json = as_json(&update);
        assert_eq!(as_json["volumes"][0]["reads_per_s"], 50);
        assert_eq!(as_json["volumes"][0]["read_latency_mean_ms"], 1.5);
        assert_eq!(as_json["volumes"][0]["read_latency_p50_ms"], 1.048_576);
        assert_eq!(as_json["volumes"][0]["read_latency_p99_ms"], 26.0);
        for key in ["write_latency_mean_ms", "write_latency_p50_ms", "write_latency_p99_ms"] {
            assert_eq!(as_json["volumes"][0][key], Value::Null, "{key}");
        }
    }

    #[test]
    fn short_latencies_have_decimals() {
        assert_eq!(
            [Some(0.042), Some(9.5), Some(123.4), None].map(milliseconds),
            ["0.04", "9.50", "123", "-"]
        );
    }
}
