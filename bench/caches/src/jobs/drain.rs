//! B5: writing back 40 960 dirty random 4 KiB blocks, spread over 400 MiB (where they are dense) and over 1900 MiB.

use std::time::{Duration, Instant};

use crate::fio;
use crate::machine::{Backing, Cache, Lab};
use crate::result::Results;
use crate::subject::Subject;

const BLOCKS: u32 = 40_960;
const TIMEOUT: Duration = Duration::from_secs(1500);

/// Runs it once.
pub fn run(lab: &mut Lab, subject: Subject, results: &mut Results) {
    for (part, span_mib) in [("a", 400), ("b", 1900)] {
        one(lab, subject, results, part, span_mib);
    }
}

fn one(lab: &mut Lab, subject: Subject, results: &mut Results, part: &str, span_mib: u32) {
    let (cache, backing) = lab.fresh(Cache::Ram, Backing::Hdd);
    let running = subject.start(&mut lab.vm, &cache, &backing);
    running.disable_writeback(&mut lab.vm);
    let blocks = lab.shortened(BLOCKS);
    // Every block once: a map of what was written, and a fixed order.
    let options = format!(
        "--rw=randwrite --bs=4k --iodepth=16 --size={span_mib}M --number_ios={blocks} --randseed=7 --allrandrepeat=1"
    );
    fio::run(&mut lab.vm, &running.device, None, &options, false);
    lab.vm.sh("sync").ok();
    let sectors_before = written(lab, &backing);
    let begun = Instant::now();
    running.begin_drain(&mut lab.vm);
    let mut points = vec![(0.0, 1.0)];
    let mut last = sectors_before;
    loop {
        let done = lab.vm.sh(running.drained()).code == 0;
        let now = begun.elapsed().as_secs_f64();
        let sectors = written(lab, &backing);
        let before = points.last().map_or(0.0, |p| p.0);
        if done || now - before >= 1.0 {
            let rate = (sectors.1 - last.1) as f64 / 8.0 / (now - before).max(0.001);
            points.push((now, rate.max(1.0)));
            last = sectors;
        }
        if done {
            break;
        }
        assert!(begun.elapsed() < TIMEOUT, "{} does not finish to write back", subject.name());
        // The guest waits, so that asking does not cost it more than what it is asked about.
        lab.vm.sh("sleep 0.3").ok();
    }
    let seconds = begun.elapsed().as_secs_f64();
    let end = written(lab, &backing);
    let name = subject.name();
    results.add(&format!("({part}) over {span_mib} MiB"), "s", false, name, seconds);
    let requests = (end.0 - sectors_before.0) as f64;
    results.add(&format!("({part}) requests to the disk"), "requests", false, name, requests);
    results.draw(&format!("({part}) blocks written back per second"), name, points);
    running.stop(&mut lab.vm);
}

/// Writes that a disk has completed so far, and their sectors.
fn written(lab: &mut Lab, device: &str) -> (u64, u64) {
    let said = lab.vm.sh(&format!("cat /sys/block/$(basename $(readlink -f {device}))/stat")).ok();
    let numbers: Vec<u64> = said.out.split_whitespace().filter_map(|w| w.parse().ok()).collect();
    (numbers.get(4).copied().unwrap_or(0), numbers.get(6).copied().unwrap_or(0))
}
