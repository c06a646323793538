//! B1 and B2: random 4 KiB requests that the cache answers alone, at depths 1 and 16.

use crate::fio;
use crate::machine::{Backing, Cache, Lab};
use crate::result::Results;
use crate::subject::{Running, Subject};

/// A third of the cache.
const SPAN: &str = "200M";
const SECONDS: u32 = 8;

/// Random reads of data that is in the cache.
pub fn reads(lab: &mut Lab, subject: Subject, results: &mut Results) {
    let running = filled(lab, subject);
    if subject == Subject::DmCache {
        // It takes in what it sees often: it gets its time.
        let seconds = lab.seconds(2 * SECONDS);
        fio::run(&mut lab.vm, &running.device, Some(seconds), &options("randread", 16), false);
    }
    measure(lab, &running, subject, "randread", results);
    running.stop(&mut lab.vm);
}

/// Random writes over data that is in the cache.
pub fn writes(lab: &mut Lab, subject: Subject, results: &mut Results) {
    let running = filled(lab, subject);
    measure(lab, &running, subject, "randwrite", results);
    running.stop(&mut lab.vm);
}

/// On fresh devices, with the span written once.
fn filled(lab: &mut Lab, subject: Subject) -> Running {
    let (cache, backing) = lab.fresh(Cache::Ram, Backing::Fast);
    let running = subject.start(&mut lab.vm, &cache, &backing);
    running.cache_everything(&mut lab.vm);
    let fill = format!("--rw=write --bs=64k --iodepth=4 --size={SPAN}");
    fio::run(&mut lab.vm, &running.device, None, &fill, false);
    running
}

fn options(rw: &str, depth: u32) -> String {
    format!("--rw={rw} --bs=4k --iodepth={depth} --size={SPAN} --norandommap")
}

fn measure(lab: &mut Lab, running: &Running, subject: Subject, rw: &str, results: &mut Results) {
    for depth in [1, 16] {
        let seconds = lab.seconds(SECONDS);
        let found = fio::run(&mut lab.vm, &running.device, Some(seconds), &options(rw, depth), false);
        results.add(&format!("{rw} depth {depth}"), "IOPS", true, subject.name(), found.iops);
    }
}
