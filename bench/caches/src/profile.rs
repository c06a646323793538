//! Profiles of the guest while fio or sysbench runs: samples of all its processors by the processor clock, which `perf` of this
//! machine takes there, of kernel and programs.
//!
//! What is to be looked at goes behind [`PREFIX`], which looks for the directory that [`begin`] makes; there is one file of
//! samples for each command. Must not know what ran.

use std::time::Duration;

use ubcache_vm::Vm;

/// Where samples are kept.
const DIR: &str = "/tmp/profile";
/// Before the command whose time is looked at, in the shell of the guest: empty without `--profile`.
pub const PREFIX: &str = "$([ ! -d /tmp/profile ] || echo perf record -q -a -e cpu-clock -F 499 \
                          -o /tmp/profile/$(ls /tmp/profile | wc -l) --)";
/// Less than this share, in percent, is left out.
const LEAST_PERCENT: f64 = 0.2;

/// From here on samples are taken.
pub fn begin(vm: &mut Vm) {
    vm.sh(&format!("rm -rf {DIR}; mkdir {DIR}; echo 0 >/proc/sys/kernel/kptr_restrict")).ok();
}

/// The shares of threads, of programs and libraries in them, and of functions, in each run since.
pub fn end(vm: &mut Vm) -> String {
    let report = format!("perf report --stdio --percent-limit {LEAST_PERCENT}");
    let script = format!(
        "cd {DIR}; for run in $(ls | sort -n); do for by in comm comm,dso comm,dso,symbol; do \
         echo \"run $run by $by\"; {report} --sort $by -i $run 2>/dev/null | grep % | sed 's/[ -]*$//'; done; done; rm -rf {DIR}"
    );
    vm.sh_within(Duration::from_secs(900), &script).ok().out.clone()
}
