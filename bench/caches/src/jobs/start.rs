//! B8: from the start to the first answer, with many dirty extents in the cache: ubcache after `kill -9`, the kernel's
//! bcache after an orderly stop that left them dirty, for within one boot nothing else can be had of it. And the engine alone
//! with a million, on this machine (`start` of ubcache-bench).

use std::process::Command;

use crate::fio;
use crate::machine::{Backing, Cache, Lab, beside};
use crate::result::Results;
use crate::subject::Subject;

/// Dirty blocks of 4 KiB.
const BLOCKS: u32 = 50_000;
/// Dirty extents of the engine alone.
const MANY: u32 = 1_000_000;

/// Runs it once.
pub fn run(lab: &mut Lab, subject: Subject, results: &mut Results) {
    let (cache, backing) = lab.fresh(Cache::Ram, Backing::Fast);
    let running = subject.start(&mut lab.vm, &cache, &backing);
    running.disable_writeback(&mut lab.vm);
    let blocks = lab.shortened(BLOCKS);
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
    if subject == Subject::Ubcache {
        many(results);
    }
}

/// Starts with a million, on this machine.
fn many(results: &mut Results) {
    let said = Command::new(beside("start")).arg(MANY.to_string()).output();
    let said = said.unwrap_or_else(|e| panic!("start: {e}"));
    let out = String::from_utf8_lossy(&said.stdout);
    let ms =
        out.split_once("served after ").and_then(|(_, rest)| rest.split_whitespace().next()?.parse().ok());
    let ms = ms.unwrap_or_else(|| panic!("start says {out:?}{}", String::from_utf8_lossy(&said.stderr)));
    let what = format!("start with {MANY} dirty extents, devices in memory");
    results.add(&what, "ms", false, Subject::Ubcache.name(), ms);
}
