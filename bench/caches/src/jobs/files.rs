//! B4: `sysbench fileio`, random reads and writes with direct I/O on 400 MB of files on ext4, three times half a minute,
//! with default settings: what people measure when they try a cache for the first time.

use std::time::Duration;

use crate::machine::{Backing, Cache, Lab};
use crate::profile::PREFIX;
use crate::result::Results;
use crate::subject::Subject;

const SECONDS: u32 = 30;
const FILES: &str = "--file-num=16 --file-total-size=400M --file-extra-flags=direct";

/// Runs it once.
pub fn run(lab: &mut Lab, subject: Subject, results: &mut Results) {
    let (cache, backing) = lab.fresh(Cache::Ssd, Backing::Hdd);
    let running = subject.start(&mut lab.vm, &cache, &backing);
    let device = &running.device;
    let long = Duration::from_secs(1800);
    lab.vm.sh("modprobe ext4 2>/dev/null; mkdir -p /mnt").ok();
    lab.vm.sh_within(long, &format!("mkfs.ext4 -q -F -E nodiscard {device} && mount {device} /mnt")).ok();
    lab.vm.sh_within(long, &format!("cd /mnt && sysbench fileio {FILES} prepare >/tmp/prepare")).ok();
    let seconds = lab.seconds(SECONDS);
    for round in 1..=3 {
        let script = format!(
            "cd /mnt && {PREFIX} sysbench fileio {FILES} --file-test-mode=rndrw --file-block-size=16384 --time={seconds} \
             --rand-type=uniform run"
        );
        let out = lab.vm.sh_within(long, &script).ok().out;
        let rate = |what: &str| {
            let line = out.lines().find(|l| l.trim_start().starts_with(what));
            let number = line.and_then(|l| l.split_whitespace().last()).and_then(|w| w.parse::<f64>().ok());
            number.unwrap_or_else(|| panic!("sysbench says {out:?}"))
        };
        let total = rate("read, MiB/s:") + rate("written, MiB/s:");
        results.add(&format!("read and written, run {round}"), "MiB/s", true, subject.name(), total);
    }
    lab.vm.sh_within(long, "umount /mnt").ok();
    running.stop(&mut lab.vm);
}
