//! fio in the guest: one job, and its JSON report.

use std::time::Duration;

use serde_json::Value;
use ubcache_vm::Vm;

use crate::profile::PREFIX;

/// The results of a run of fio, reads and writes together.
#[derive(Clone, Debug)]
pub struct Found {
    /// Requests a second.
    pub iops: f64,
    /// Completion latency, the 99th percentile, in milliseconds: of reads if there are any, else of writes.
    pub p99_ms: f64,
    /// The longest completion latency, in milliseconds.
    pub max_ms: f64,
    /// Requests each second, if a log was asked for.
    pub over_time: Vec<(f64, f64)>,
}

/// Runs a job on `device` for `seconds`, or to its end if that is `None`. `options` are words for fio.
///
/// # Panics
/// If fio fails.
pub fn run(vm: &mut Vm, device: &str, seconds: Option<u32>, options: &str, log: bool) -> Found {
    let time = seconds.map_or(String::new(), |s| format!("--time_based --runtime={s}"));
    let logging = if log { "--write_iops_log=/tmp/fio --log_avg_msec=1000" } else { "" };
    let script = format!(
        "rm -f /tmp/fio_iops*; {PREFIX} fio --name=job --filename={device} --ioengine=libaio --direct=1 --randrepeat=0 \
         --output-format=json --output=/tmp/fio.json {time} {options} {logging} >/tmp/fio.log 2>&1 || \
         {{ cat /tmp/fio.log >&2; exit 1; }}; cat /tmp/fio.json"
    );
    let timeout = Duration::from_secs(u64::from(seconds.unwrap_or(0)) + 1800);
    let said = vm.sh_within(timeout, &script).ok();
    // Warnings may come before the document.
    let text = said.out.find('{').map_or("", |at| said.out.get(at..).unwrap_or(""));
    let json: Value = serde_json::from_str(text).unwrap_or_else(|e| panic!("fio says {text:?}: {e}"));
    let over_time = if log { series(&vm.sh("cat /tmp/fio_iops*").ok().out) } else { Vec::new() };
    found(&json, over_time)
}

fn found(json: &Value, over_time: Vec<(f64, f64)>) -> Found {
    let job = &json["jobs"][0];
    let number = |v: &Value| v.as_f64().unwrap_or(0.0);
    let both = |key: &str| number(&job["read"][key]) + number(&job["write"][key]);
    let side = if number(&job["read"]["total_ios"]) > 0.0 { &job["read"] } else { &job["write"] };
    let max = |side: &str| number(&job[side]["clat_ns"]["max"]);
    Found {
        iops: both("iops"),
        p99_ms: number(&side["clat_ns"]["percentile"]["99.000000"]) / 1e6,
        max_ms: max("read").max(max("write")) / 1e6,
        over_time,
    }
}

/// Lines of `milliseconds, value, direction, …`; reads and writes of one second are added.
fn series(text: &str) -> Vec<(f64, f64)> {
    let mut points: Vec<(f64, f64)> = Vec::new();
    for line in text.lines() {
        let mut words = line.split(',').map(|w| w.trim().parse::<f64>());
        let (Some(Ok(ms)), Some(Ok(value))) = (words.next(), words.next()) else { continue };
        let second = (ms / 1000.0).round();
        match points.iter_mut().find(|(s, _)| *s == second) {
            Some(point) => point.1 += value,
            None => points.push((second, value)),
        }
    }
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    points
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logs_of_reads_and_writes_are_added_by_second() {
        let log = "1000, 50, 0, 0, 0\n2001, 7, 0, 0, 0\n1000, 30, 1, 0, 0\nnonsense\n";
        assert_eq!(series(log), [(1.0, 80.0), (2.0, 7.0)]);
    }

    #[test]
    fn figures_of_one_job() {
        let json = serde_json::json!({"jobs": [{
            "read": {"iops": 10.5, "total_ios": 100,
                     "clat_ns": {"max": 3_000_000, "percentile": {"99.000000": 2_000_000}}},
            "write": {"iops": 1.0, "total_ios": 10, "clat_ns": {"max": 9_000_000}}}]});
        let f = found(&json, Vec::new());
        assert_eq!((f.iops, f.p99_ms, f.max_ms), (11.5, 2.0, 9.0));
    }
}
