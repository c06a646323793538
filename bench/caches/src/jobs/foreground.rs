//! B6: the effect of writeback and garbage collection on reads of cached data: latency of random reads that hit,
//! first while nothing else happens, then while all dirty data is written back.

use crate::fio;
use crate::machine::{Backing, Cache, Lab};
use crate::result::Results;
use crate::subject::Subject;

const SECONDS: u32 = 20;
const OPTIONS: &str = "--rw=randread --bs=4k --iodepth=4 --size=200M --norandommap --rate_iops=1500";

/// Runs it once.
pub fn run(lab: &mut Lab, subject: Subject, results: &mut Results) {
    let (cache, backing) = lab.fresh(Cache::Ssd, Backing::Hdd);
    let running = subject.start(&mut lab.vm, &cache, &backing);
    running.cache_everything(&mut lab.vm);
    running.disable_writeback(&mut lab.vm);
    let fill = "--rw=randwrite --bs=64k --iodepth=4 --size=200M";
    fio::run(&mut lab.vm, &running.device, None, fill, false);
    let seconds = lab.seconds(SECONDS);
    let name = subject.name();
    let idle = fio::run(&mut lab.vm, &running.device, Some(seconds), OPTIONS, false);
    results.add("read latency at rest, 99 %", "ms", false, name, idle.p99_ms);
    running.begin_drain(&mut lab.vm);
    let busy = fio::run(&mut lab.vm, &running.device, Some(seconds), OPTIONS, false);
    results.add("read latency during writeback, 99 %", "ms", false, name, busy.p99_ms);
    results.add("read latency during writeback, longest", "ms", false, name, busy.max_ms);
    results.add(
        "99 % during writeback against at rest",
        "ratio",
        false,
        name,
        busy.p99_ms / idle.p99_ms.max(1e-3),
    );
    running.stop(&mut lab.vm);
}
