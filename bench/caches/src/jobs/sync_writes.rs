//! B3: random 4 KiB writes with fdatasync(2) after every ten, over three times the cache, for a minute: the workload of
//! a database or an object store, while writeback runs. A contender whose writes are slow has not filled its cache after that
//! minute; so as much as the cache holds is written as fast as it can, for a minute at most, and the same measured once more.

use crate::fio;
use crate::machine::{Backing, CACHE_MIB, Cache, Lab};
use crate::result::Results;
use crate::subject::Subject;

const SECONDS: u32 = 60;
/// The second time.
const FULL_SECONDS: u32 = 20;
/// At the beginning and at the end, what is averaged.
const PART_SECONDS: usize = 10;

/// Runs it once.
pub fn run(lab: &mut Lab, subject: Subject, results: &mut Results) {
    let (cache, backing) = lab.fresh(Cache::Ram, Backing::Hdd);
    let running = subject.start(&mut lab.vm, &cache, &backing);
    // A device alone is no larger than the cache; one that is served has a superblock of its own.
    let alone = matches!(subject, Subject::RawCache | Subject::Ublk);
    let span = if alone { CACHE_MIB - 8 } else { CACHE_MIB * 3 };
    let seconds = lab.seconds(SECONDS);
    let writes = format!("--rw=randwrite --bs=4k --size={span}M --norandommap");
    let options = format!("{writes} --iodepth=1 --fdatasync=10");
    let found = fio::run(&mut lab.vm, &running.device, Some(seconds), &options, true);
    let mean = |part: &[(f64, f64)]| part.iter().map(|p| p.1).sum::<f64>() / part.len().max(1) as f64;
    let points = &found.over_time;
    let first = points.get(..PART_SECONDS.min(points.len())).unwrap_or_default();
    let last = points.get(points.len().saturating_sub(PART_SECONDS)..).unwrap_or_default();
    let name = subject.name();
    results.add("writes, the first 10 s", "IOPS", true, name, mean(first));
    results.add("writes, the last 10 s", "IOPS", true, name, mean(last));
    let worst = points.iter().map(|p| p.1).fold(f64::INFINITY, f64::min);
    results.add("writes, the worst second", "IOPS", true, name, if worst.is_finite() { worst } else { 0.0 });
    results.draw("synchronous writes per second", name, found.over_time);
    let fill = format!("{writes} --iodepth=16 --io_size={}M --runtime={seconds}", CACHE_MIB);
    fio::run(&mut lab.vm, &running.device, None, &fill, false);
    let seconds = lab.seconds(FULL_SECONDS);
    let found = fio::run(&mut lab.vm, &running.device, Some(seconds), &options, false);
    results.add("writes, into a cache that was filled before", "IOPS", true, name, found.iops);
    running.stop(&mut lab.vm);
}
