//! Loads in a guest: started, waited for, and what a device or a filesystem holds in the end. By the path of the device or directory.

use std::time::Duration;

use crate::load::{Map, Plan};
use crate::said::Said;
use crate::vm::Vm;

/// How long a load, or reading a whole volume, may take.
pub const LOAD: Duration = Duration::from_secs(300);

/// The program that runs in guests; every function here needs it on board.
pub fn program() -> std::path::PathBuf {
    crate::host::beside_tests("ubcache-vm-load")
}

/// Runs a load to its end.
#[track_caller]
pub fn run(vm: &mut Vm, device: &str, plan: &Plan) {
    vm.sh_within(LOAD, &format!("ubcache-vm-load run {device} {plan}")).ok();
}

/// Starts a load.
#[track_caller]
pub fn begin(vm: &mut Vm, device: &str, plan: &Plan) {
    let seed = plan.seed;
    vm.sh(&format!(
        "(ubcache-vm-load run {device} {plan}; echo $? >/tmp/load-{seed}.code) >/tmp/load-{seed} 2>&1 &"
    ))
    .ok();
}

/// Waits until a load that was started has made this many requests, all workers together, flushed.
#[track_caller]
pub fn wait(vm: &mut Vm, plan: &Plan, requests: u32) {
    let enough = |progress: &str| flushed(plan, progress).iter().sum::<u32>() >= requests;
    vm.wait_for_progress(&format!("{requests} requests of load {}", plan.seed), enough);
}

/// Waits for the end of a load that was started; it must have gone well.
#[track_caller]
pub fn end(vm: &mut Vm, plan: &Plan) {
    let file = format!("/tmp/load-{}", plan.seed);
    vm.wait_for("a load ends", &format!("test -e {file}.code"));
    vm.sh(&format!("cat {file}; exit $(cat {file}.code)")).ok();
}

/// The contents of a device, or why it cannot be read.
#[track_caller]
pub fn map(vm: &mut Vm, device: &str, tag: u32) -> Result<Map, Said> {
    let said = vm.sh_within(LOAD, &format!("ubcache-vm-load map {device} {tag}"));
    if said.code != 0 {
        return Err(said);
    }
    if !said.err.is_empty() {
        eprintln!("{}", said.err);
    }
    Ok(Map::from_bytes(&said.bytes))
}

/// For each worker how many requests are flushed for sure, by the progress of a machine.
pub fn flushed(plan: &Plan, progress: &str) -> Vec<u32> {
    let mut flushed = vec![0; plan.workers as usize];
    // A power loss may have torn the last line.
    let whole = progress.rfind('\n').map_or("", |end| progress.get(..end).unwrap_or_default());
    for line in whole.lines() {
        let numbers: Vec<u64> = line.split(' ').filter_map(|w| w.parse().ok()).collect();
        let [seed, worker, requests] = numbers[..] else { continue };
        if seed == plan.seed
            && let Some(f) = flushed.get_mut(worker as usize)
        {
            *f = requests as u32;
        }
    }
    flushed
}

/// Starts workers that replace files in a directory, from request `first` on; see [`crate::load::files`].
#[track_caller]
pub fn begin_files(vm: &mut Vm, dir: &str, first: u32, workers: usize) {
    let run = format!("ubcache-vm-load files {dir} {first} 1000000 {workers}");
    vm.sh(&format!("{run} >/tmp/files.log 2>&1 & echo $! >/tmp/files.pid")).ok();
}

/// Ends the workers of [`begin_files`]; none of their requests has failed.
#[track_caller]
pub fn end_files(vm: &mut Vm) {
    vm.sh("kill $(cat /tmp/files.pid) && [ ! -s /tmp/files.log ] || { cat /tmp/files.log >&2; exit 1; }")
        .ok();
    vm.wait_for("the workers end", "! kill -0 $(cat /tmp/files.pid)");
}

/// Puts the last request of each worker that a machine has reported as durable into `last`.
pub fn files_reported(progress: &str, last: &mut [u32]) {
    // A power loss may have torn the last line.
    let whole = progress.rfind('\n').map_or("", |end| progress.get(..end).unwrap_or_default());
    for line in whole.lines().filter(|l| l.starts_with("files ")) {
        let mut words = line.split(' ').skip(1).filter_map(|w| w.parse::<u32>().ok());
        if let (Some(worker), Some(request)) = (words.next(), words.next())
            && let Some(l) = last.get_mut(worker as usize)
        {
            *l = request;
        }
    }
}

/// Every file that was reported durable is there, or a later version of it; returns the newest version found.
#[track_caller]
pub fn verify_files(vm: &mut Vm, dir: &str, last: &[u32]) -> u32 {
    let last: Vec<String> = last.iter().map(u32::to_string).collect();
    let said = vm.sh(&format!("ubcache-vm-load verify {dir} {}", last.join(" "))).ok();
    said.line().parse().expect("a number")
}
