//! History: samples of each set, of each volume and of the host, for 24 hours, which a restart of the daemon keeps.
//!
//! Owns the series of samples and the tasks that fill and store them. The task gets the figures of the engines once a second;
//! the difference from the figures before is a sample. While no client reads samples, the task asks an idle thread only
//! every 3 s, because waking a sleeping thread is most of the cost of a sample. A thread that does not answer causes a gap,
//! and is asked again only after it has answered. The series of a volume without a sample in 24 hours is dropped. Must not
//! know how samples are shown.

mod series;
mod store;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use blockio::bridge::oneshot;
use engine::figures::{SetFigures, VolumeFigures};
use engine::stats::{Histogram, OpKind, Outcome, Tally, View};
use io::{DeviceFigures, Nanos};
use serde_json::{Map, Value, json};
use serve::message;

use crate::components::silences::Silences;
use crate::components::workers::Workers;
use crate::order::Order;
use crate::worker::Worker;
use crate::{state, wall_clock};

use series::{SPAN_MS, Series, number};

/// Time between samples.
pub(crate) const EVERY: Duration = Duration::from_secs(1);
/// Shortest time between samples of an idle thread while no client asks for them: three ticks, which may come early.
///
/// Charts draw a line across this time.
const AT_REST_EVERY: Nanos = Nanos::from_ms(2500);
/// Time after a request for samples, in ms, during which a client counts as connected. An open page asks every second.
const LOOKS_FOR_MS: u64 = 10_000;
/// Longest time between two samples of one series. After a longer gap the difference is no sample.
const LONGEST_STEP: Nanos = Nanos::from_secs(30);
/// Time between two stores of the history.
const STORES_EVERY: Duration = Duration::from_secs(300);
/// Age up to which a sample of a volume counts for the host: longer than the time between samples of an idle thread.
const CURRENT_MS: u64 = 5_000;
/// Time over which the latencies of a volume are summed up for lists.
const SUMMED_MS: u64 = 60_000;

/// The columns of a sample; a value is `None` if nothing was measured. Charts need at most 24 bits of a value.
type Samples = Vec<(&'static str, Option<f32>)>;

/// Columns of the host that are sums over its volumes, and those that are the value of its slowest volume.
const SUMMED: [&str; 8] =
    ["reads", "writes", "read_bytes", "written_bytes", "hits", "misses", "dirty_bytes", "written_back_bytes"];
const SLOWEST: [&str; 4] = ["read_p50_us", "read_p99_us", "write_p50_us", "write_p99_us"];

/// The series of samples, by set and by volume.
#[derive(Default)]
pub(crate) struct History {
    series: Mutex<store::All>,
    /// Time of the last request for samples, in milliseconds since 1970.
    asked_for_ms: AtomicU64,
}

/// The subject of a series.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum SeriesOf {
    Set,
    Volume,
    /// All volumes together; the name is empty.
    Host,
}

impl SeriesOf {
    /// The number that stands for it in the file.
    fn code(self) -> u8 {
        match self {
            SeriesOf::Set => 0,
            SeriesOf::Volume => 1,
            SeriesOf::Host => 2,
        }
    }

    fn of_code(code: u8) -> Option<SeriesOf> {
        [SeriesOf::Set, SeriesOf::Volume, SeriesOf::Host].into_iter().find(|of| of.code() == code)
    }
}

impl History {
    fn lock(&self) -> MutexGuard<'_, store::All> {
        locked(&self.series)
    }

    fn add(&self, whose: SeriesOf, name: &str, time_ms: u64, values: &Samples) {
        self.lock().entry((whose, name.to_owned())).or_default().add(time_ms, values);
    }

    /// Adds a sample of the host: the sum of the present samples of its volumes.
    fn add_host(&self, time_ms: u64) {
        let values = {
            let all = self.lock();
            let volumes = all.iter().filter(|((of, _), _)| *of == SeriesOf::Volume).map(|(_, series)| series);
            let since_ms = time_ms.saturating_sub(CURRENT_MS);
            let current: Vec<&Series> = volumes.filter(|s| s.last_ms() > Some(since_ms)).collect();
            if current.is_empty() {
                return;
            }
            let newest = |name: &str| -> Vec<f32> {
                current.iter().filter_map(|s| s.recent(name, since_ms).first().copied().flatten()).collect()
            };
            let sums = SUMMED.map(|name| (name, Some(newest(name).iter().sum())));
            let slowest = SLOWEST.map(|name| (name, newest(name).into_iter().reduce(f32::max)));
            sums.into_iter().chain(slowest).collect()
        };
        self.add(SeriesOf::Host, "", time_ms, &values);
    }

    /// Latencies of each volume over the last minute, for lists: the mean of the seconds, by the number of requests in each.
    pub(crate) fn latencies(&self) -> Map<String, Value> {
        let since_ms = wall_clock::now_ms().saturating_sub(SUMMED_MS);
        let of_volume = |series: &Series| {
            let mean = |latency: &str, requests: &str| {
                let pairs =
                    series.recent(latency, since_ms).into_iter().zip(series.recent(requests, since_ms));
                let (sum, n) = pairs
                    .filter_map(|(value, n)| Some((value?, n?)))
                    .fold((0.0, 0.0), |(sum, all), (value, n)| (sum + value * n, all + n));
                number((n > 0.0).then(|| sum / n))
            };
            json!({"read_p99_us": mean("read_p99_us", "reads"), "write_p99_us": mean("write_p99_us", "writes")})
        };
        let all = self.lock();
        let volumes = all.iter().filter(|((of, _), _)| *of == SeriesOf::Volume);
        volumes.map(|((_, name), series)| (name.clone(), of_volume(series))).collect()
    }

    /// Drops series whose last sample is older than the time that a series covers.
    fn forget(&self, now_ms: u64) {
        self.lock()
            .retain(|_, series| series.last_ms().is_some_and(|last| last.saturating_add(SPAN_MS) >= now_ms));
    }

    /// Whether a client has asked for samples in the last [`LOOKS_FOR_MS`].
    fn is_watched(&self, now_ms: u64) -> bool {
        now_ms.abs_diff(self.asked_for_ms.load(Ordering::Relaxed)) < LOOKS_FOR_MS
    }

    /// The samples after `since_ms`, in columns of equal length, one of which is `time_ms`. Empty for an unknown name.
    pub(crate) fn after(&self, whose: SeriesOf, name: &str, since_ms: u64) -> Map<String, Value> {
        self.asked_for_ms.store(wall_clock::now_ms(), Ordering::Relaxed);
        self.lock().get(&(whose, name.to_owned())).map(|series| series.after(since_ms)).unwrap_or_default()
    }

    /// Takes over the history that is stored in a state directory. A damaged file is ignored with a message.
    fn load(&self, state_dir: &Path) {
        let path = state_dir.join(store::NAME);
        match store::read(&path) {
            Ok(stored) => *self.lock() = stored.unwrap_or_default(),
            Err(e) => {
                let why = serve::Failure::at(&path, "history ignored", e);
                message::warn(format!("{}; the charts start empty", why.message().unwrap_or_default()));
            }
        }
    }

    /// Stores the history in a state directory.
    pub(crate) fn store(&self, state_dir: &Path) {
        let path = state_dir.join(store::NAME);
        let bytes = store::encode(&self.lock());
        if let Err(e) = state::replace_file(&path, &bytes) {
            let why = serve::Failure::at(&path, "history cannot be written", e);
            message::warn(why.message().unwrap_or_default());
        }
    }
}

/// Takes over the history of a state directory, and starts the task that stores it every few minutes.
pub(crate) fn load_and_store(history: &Arc<History>, state_dir: &Path) -> tokio::task::JoinHandle<()> {
    history.load(state_dir);
    let (history, state_dir) = (history.clone(), state_dir.to_owned());
    tokio::spawn(async move {
        loop {
            tokio::time::sleep(STORES_EVERY).await;
            let (history, state_dir) = (history.clone(), state_dir.clone());
            // A file system that hangs must not stop the control thread.
            let _ = tokio::task::spawn_blocking(move || history.store(&state_dir)).await;
        }
    })
}

/// The last figures of a thread.
struct Last {
    at: Nanos,
    figures: metrics::Figures,
    /// Whether the thread had done nothing since the figures before.
    at_rest: bool,
}

/// Whether a thread is to be asked at this tick: an idle thread is asked less often while no client asks for samples.
fn is_due(last: Option<&Last>, now: Nanos, watched: bool) -> bool {
    last.is_none_or(|last| watched || !last.at_rest || now.since(last.at) >= AT_REST_EVERY)
}

/// A number that grows with every request of a client and of a device.
fn work(figures: &metrics::Figures) -> u64 {
    let device = |d: &DeviceFigures| d.reads.latency.count() + d.writes.latency.count();
    let of_volume = |v: &VolumeFigures| {
        let requests = OpKind::ALL.into_iter().map(|op| v.total.all_of(op).requests).sum::<u64>();
        requests + device(&v.device)
    };
    let of_volumes = figures.volumes().map(|(_, v)| of_volume(v)).sum::<u64>();
    of_volumes + figures.sets.iter().map(|s| device(&s.device)).sum::<u64>()
}

/// Takes samples until the future is dropped. `silences` gets the requests of the devices, also of threads that stop.
pub(crate) async fn record(workers: Arc<Workers>, history: Arc<History>, silences: Arc<Silences>) {
    let began = std::time::Instant::now();
    let before: Arc<Mutex<BTreeMap<String, Last>>> = Arc::default();
    let asked: Arc<Mutex<BTreeSet<String>>> = Arc::default();
    let mut ticks = tokio::time::interval(EVERY);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let since_start = move || Nanos(u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX));
    loop {
        ticks.tick().await;
        let all = workers.all();
        locked(&before).retain(|id, _| all.iter().any(|w| w.plan.id == *id));
        silences.retain(|id| all.iter().any(|w| w.plan.id == id && !w.phase().is_over()));
        history.forget(wall_clock::now_ms());
        history.add_host(wall_clock::now_ms());
        let watched = history.is_watched(wall_clock::now_ms());
        for worker in all {
            let id = worker.plan.id.clone();
            let is_due = is_due(locked(&before).get(&id), since_start(), watched);
            if !is_due || !worker.phase().has_figures() || !locked(&asked).insert(id.clone()) {
                continue;
            }
            let (history, before, asked) = (history.clone(), before.clone(), asked.clone());
            let silences = silences.clone();
            tokio::spawn(async move {
                if let Some(figures) = figures_of(&worker).await {
                    silences.take(&id, &figures.load, std::time::Instant::now());
                    let at = since_start();
                    let then = locked(&before).remove(&id);
                    let at_rest = then.as_ref().is_some_and(|then| work(&then.figures) == work(&figures));
                    if let Some(then) = then {
                        take(&history, &figures, &then.figures, at.since(then.at));
                    }
                    locked(&before).insert(id.clone(), Last { at, figures, at_rest });
                }
                locked(&asked).remove(&id);
            });
        }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Asks a thread for its figures; `None` if the thread has ended or cannot answer.
async fn figures_of(worker: &Worker) -> Option<metrics::Figures> {
    let (reply, answer) = oneshot();
    worker.order(Order::Figures(reply)).ok()?;
    answer.await.ok()?.ok()
}

/// Adds samples of what a thread counted in `step`.
fn take(history: &History, now: &metrics::Figures, then: &metrics::Figures, step: Nanos) {
    if step == Nanos(0) || step > LONGEST_STEP {
        return;
    }
    let (time, seconds) = (wall_clock::now_ms(), step.as_seconds());
    for set in &now.sets {
        let name = set.status.set_uuid.to_string();
        if let Some(before) = then.sets.iter().find(|s| s.status.set_uuid == set.status.set_uuid) {
            history.add(SeriesOf::Set, &name, time, &of_set(set, before, seconds));
        }
    }
    for (_, volume) in now.volumes() {
        let before = then.volumes().map(|(_, v)| v).find(|v| v.name == volume.name);
        if let Some(before) = before {
            history.add(SeriesOf::Volume, &volume.name, time, &of_volume(volume, before, seconds));
        }
    }
}

fn per_second(now: u64, then: u64, seconds: f64) -> Option<f32> {
    Some((now.saturating_sub(then) as f64 / seconds) as f32)
}

fn bytes(value: u64) -> Option<f32> {
    Some(value as f32)
}

/// A quantile in microseconds; `None` without measurements.
fn quantile(times: &Histogram, share: f64) -> Option<f32> {
    (!times.is_empty()).then(|| (times.quantile(share).0 as f64 / 1000.0) as f32)
}

fn bypassed(v: &VolumeFigures, op: OpKind) -> u64 {
    let reasons = Outcome::all().filter(|o| matches!(o, Outcome::Bypass(_) | Outcome::PassThrough));
    reasons.map(|o| v.total.of(op, o)).fold(Tally::default(), Tally::plus).requests
}

fn of_volume(now: &VolumeFigures, then: &VolumeFigures, seconds: f64) -> Samples {
    let rate = |of: &dyn Fn(&VolumeFigures) -> u64| per_second(of(now), of(then), seconds);
    let times = |op: OpKind| now.latencies.all_of(op).since(&then.latencies.all_of(op));
    let (reads, writes) = (times(OpKind::Read), times(OpKind::Write));
    let (disk_reads, disk_writes) = (
        now.device.reads.latency.since(&then.device.reads.latency),
        now.device.writes.latency.since(&then.device.writes.latency),
    );
    let terms = &now.writeback.rate;
    vec![
        ("reads", rate(&|v| v.total.all_of(OpKind::Read).requests)),
        ("writes", rate(&|v| v.total.all_of(OpKind::Write).requests)),
        ("flushes", rate(&|v| v.total.all_of(OpKind::Flush).requests)),
        ("discards", rate(&|v| v.total.all_of(OpKind::Discard).requests)),
        ("read_bytes", rate(&|v| v.total.all_of(OpKind::Read).bytes)),
        ("written_bytes", rate(&|v| v.total.all_of(OpKind::Write).bytes)),
        ("read_p50_us", quantile(&reads, 0.5)),
        ("read_p95_us", quantile(&reads, 0.95)),
        ("read_p99_us", quantile(&reads, 0.99)),
        ("write_p50_us", quantile(&writes, 0.5)),
        ("write_p95_us", quantile(&writes, 0.95)),
        ("write_p99_us", quantile(&writes, 0.99)),
        ("hits", rate(&|v| v.cache.view(View::Total).cache_hits)),
        ("misses", rate(&|v| v.cache.view(View::Total).cache_misses)),
        ("bypassed_reads", rate(&|v| bypassed(v, OpKind::Read))),
        ("bypassed_writes", rate(&|v| bypassed(v, OpKind::Write))),
        ("errors", rate(&|v| v.errors.iter().sum())),
        ("dirty_bytes", bytes(now.dirty.bytes())),
        ("target_bytes", bytes(now.dirty_target.bytes())),
        ("rate_bytes_per_s", Some(terms.rate as f32)),
        ("proportional_bytes_per_s", Some(terms.proportional as f32)),
        ("integral_bytes_per_s", Some(terms.integral as f32)),
        ("written_back_bytes", rate(&|v| v.writeback.written.bytes())),
        ("disk_reads", per_second(disk_reads.count(), 0, seconds)),
        ("disk_writes", per_second(disk_writes.count(), 0, seconds)),
        ("disk_read_bytes", rate(&|v| v.device.reads.bytes)),
        ("disk_written_bytes", rate(&|v| v.device.writes.bytes)),
    ]
}

fn of_set(now: &SetFigures, then: &SetFigures, seconds: f64) -> Samples {
    let rate = |of: &dyn Fn(&SetFigures) -> u64| per_second(of(now), of(then), seconds);
    let requests = |s: &SetFigures, op: OpKind| {
        s.volumes.iter().map(|v| v.total.all_of(op)).fold(Tally::default(), Tally::plus)
    };
    let reads = now.device.reads.latency.since(&then.device.reads.latency);
    let writes = now.device.writes.latency.since(&then.device.writes.latency);
    let journal = now.times.journal_writes.since(&then.times.journal_writes);
    vec![
        ("reads", rate(&|s| requests(s, OpKind::Read).requests)),
        ("writes", rate(&|s| requests(s, OpKind::Write).requests)),
        ("read_bytes", rate(&|s| requests(s, OpKind::Read).bytes)),
        ("written_bytes", rate(&|s| requests(s, OpKind::Write).bytes)),
        ("hits", rate(&|s| s.cache.view(View::Total).cache_hits)),
        ("misses", rate(&|s| s.cache.view(View::Total).cache_misses)),
        ("cached_bytes", bytes(now.status.cached_sectors.bytes())),
        ("dirty_bytes", bytes(now.status.dirty.iter().map(|(_, n)| n.bytes()).sum())),
        ("in_use_percent", Some(f32::from(now.status.in_use_percent))),
        ("available_buckets", bytes(u64::from(now.available_buckets))),
        ("cache_reads", per_second(reads.count(), 0, seconds)),
        ("cache_writes", per_second(writes.count(), 0, seconds)),
        ("cache_read_bytes", rate(&|s| s.device.reads.bytes)),
        ("cache_written_bytes", rate(&|s| s.device.writes.bytes)),
        ("cache_read_p50_us", quantile(&reads, 0.5)),
        ("cache_read_p99_us", quantile(&reads, 0.99)),
        ("cache_write_p50_us", quantile(&writes, 0.5)),
        ("cache_write_p99_us", quantile(&writes, 0.99)),
        ("journal_writes", per_second(journal.count(), 0, seconds)),
        ("journal_p99_us", quantile(&journal, 0.99)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(n: f32) -> Samples {
        vec![("reads", Some(n)), ("read_p50_us", None)]
    }

    #[test]
    fn a_series_is_dropped_a_day_after_its_last_sample() {
        let history = History::default();
        assert!(history.after(SeriesOf::Volume, "a", 0).is_empty());
        history.add(SeriesOf::Volume, "a", 1000, &one(2.5));
        assert_eq!(history.after(SeriesOf::Volume, "a", 0)["reads"], json!([2.5]));
        assert!(history.after(SeriesOf::Set, "a", 0).is_empty(), "a set is no volume");
        history.forget(1000 + SPAN_MS);
        assert!(!history.after(SeriesOf::Volume, "a", 0).is_empty());
        history.forget(1001 + SPAN_MS);
        assert!(history.after(SeriesOf::Volume, "a", 0).is_empty());
    }

    /// A restart of the daemon must not lose the time before it, which is what an operator looks for after a problem.
    #[test]
    fn a_restart_keeps_the_history() {
        let dir = tempfile::tempdir().unwrap();
        let history = History::default();
        history.load(dir.path());
        let begin = wall_clock::now_ms() - 3_000_000;
        for n in 0..3000 {
            history.add(SeriesOf::Volume, "bcache0", begin + n * 1000, &one(n as f32));
        }
        history.store(dir.path());
        let next = History::default();
        next.load(dir.path());
        let (before, after) =
            (history.after(SeriesOf::Volume, "bcache0", 0), next.after(SeriesOf::Volume, "bcache0", 0));
        assert!(before == after && before["time_ms"].as_array().unwrap().len() > 800);
        next.add(SeriesOf::Volume, "bcache0", begin + 3_000_000, &one(1.0));
        assert_eq!(next.after(SeriesOf::Volume, "bcache0", begin + 2_998_500)["reads"], json!([2999, 1]));
    }

    /// A power loss or a bad sector may leave anything in the file. The daemon must start, with empty charts.
    #[test]
    fn a_damaged_file_is_ignored() {
        let dir = tempfile::tempdir().unwrap();
        let history = History::default();
        history.add(SeriesOf::Volume, "a", wall_clock::now_ms(), &one(1.0));
        history.store(dir.path());
        let path = dir.path().join(store::NAME);
        let whole = std::fs::read(&path).unwrap();
        for damaged in [&[][..], b"{}", &whole[..whole.len() / 2], &[whole.as_slice(), b"x"].concat()] {
            std::fs::write(&path, damaged).unwrap();
            let next = History::default();
            next.load(dir.path());
            assert!(next.after(SeriesOf::Volume, "a", 0).is_empty());
        }
    }

    #[test]
    fn the_host_is_the_sum_of_its_volumes_and_as_slow_as_the_slowest() {
        let history = History::default();
        history.add_host(9_000);
        assert!(history.after(SeriesOf::Host, "", 0).is_empty(), "there are no volumes");
        for (name, time_ms, reads) in [("old", 1_000, 100.0), ("a", 9_500, 2.0), ("b", 9_900, 3.0)] {
            let slow = reads * 10.0;
            let sample = vec![("reads", Some(reads)), ("read_p99_us", Some(slow)), ("write_p99_us", None)];
            history.add(SeriesOf::Volume, name, time_ms, &sample);
        }
        history.add_host(10_000);
        let host = history.after(SeriesOf::Host, "", 0);
        assert_eq!((&host["reads"], &host["read_p99_us"]), (&json!([5]), &json!([30])));
        assert_eq!((&host["write_p99_us"], &host["misses"]), (&json!([null]), &json!([0])));
    }

    #[test]
    fn latencies_of_a_minute_weigh_each_second_by_its_requests() {
        let history = History::default();
        let now = wall_clock::now_ms();
        let sample = |reads, latency| vec![("reads", Some(reads)), ("read_p99_us", Some(latency))];
        history.add(SeriesOf::Volume, "a", now - 2 * SUMMED_MS, &sample(1000.0, 9000.0));
        history.add(SeriesOf::Volume, "a", now - 2000, &sample(3.0, 100.0));
        history.add(SeriesOf::Volume, "a", now - 1000, &sample(1.0, 500.0));
        assert_eq!(history.latencies()["a"], json!({"read_p99_us": 200, "write_p99_us": null}));
    }

    #[test]
    fn sets_at_rest_are_sampled_less_often_without_viewers() {
        let at = |seconds: u64, at_rest| {
            Some(Last { at: Nanos::from_secs(seconds), figures: metrics::Figures::default(), at_rest })
        };
        let due =
            |last: Option<Last>, now_s: u64, watched| is_due(last.as_ref(), Nanos::from_secs(now_s), watched);
        assert!(due(None, 1, false) && due(at(1, false), 2, false) && due(at(1, true), 2, true));
        assert!(!due(at(1, true), 2, false) && !due(at(1, true), 3, false) && due(at(1, true), 4, false));
        let history = History::default();
        assert!(!history.is_watched(wall_clock::now_ms()));
        history.after(SeriesOf::Volume, "a", 0);
        assert!(
            history.is_watched(wall_clock::now_ms())
                && !history.is_watched(wall_clock::now_ms() + LOOKS_FOR_MS + 1000)
        );
    }

    #[test]
    fn rates_are_per_second_and_never_negative() {
        assert_eq!(per_second(30, 10, 2.0), Some(10.0));
        assert_eq!(per_second(3, 10, 1.0), Some(0.0), "counts that began anew");
        assert_eq!(quantile(&Histogram::default(), 0.5), None);
        let mut times = Histogram::default();
        times.record(Nanos::from_us(100));
        assert_eq!(quantile(&times, 0.99), Some(100.0));
    }
}
