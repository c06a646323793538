//! B8: from the start to the first answer, with many dirty extents in the cache: ubcache after `kill -9`, the kernel's
//! bcache after an orderly stop that left them dirty, for within one boot nothing else can be had of it. (With a million
//! extents: `cargo run --release -p ubcache-bench --bin start`.)

use crate::fio;
use crate::machine::{Backing, Cache, Lab};
use crate::result::Results;
use crate::subject::Subject;

/// Dirty blocks of 4 KiB.
const BLOCKS: u32 = 50_000;

/// Runs it once.
pub fn run(lab: &mut Lab, subject: Subject, results: &mut Results) {
    let (cache, backing) = lab.fresh(Cache::Ram, Backing::Fast);
    let running = subject.start(&mut lab.vm, &cache, &backing);
    running.keep_dirty(&mut lab.vm);
    let blocks = BLOCKS / lab.hurry;
    let options =
        format!("--rw=randwrite --bs=4k --iodepth=16 --size=900M --number_ios={blocks} --end_fsync=1");
    fio::run(&mut lab.vm, &running.device, None, &options, false);
    running.crash(&mut lab.vm);
    let (running, ms) = subject.start_again(&mut lab.vm, &cache, &backing);
    results.add(
        &format!("start with {BLOCKS} dirty extents to the first read"),
        "ms",
        false,
        subject.name(),
        ms,
    );
    running.stop(&mut lab.vm);
}
