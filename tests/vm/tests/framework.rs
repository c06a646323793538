//! The framework itself.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use ubcache_vm::{Dir, Vm, skipped};

#[test]
fn commands_files_and_power_losses() {
    if skipped("commands_files_and_power_losses") {
        return;
    }
    let dir = Dir::new();
    let disk = dir.disk("scratch", 16 << 20);
    std::fs::write(dir.path("note"), "carried in\n").unwrap();
    let mut vm =
        Vm::build("framework").disk(&disk).tools(&["mkfs.ext4"]).file(dir.path("note"), "/etc/note").boot();

    let said = vm.sh("echo out; echo err >&2; exit 7");
    assert_eq!((said.code, said.out.as_str(), said.err.as_str()), (7, "out\n", "err\n"));
    assert_eq!(vm.sh("cat /etc/note").ok().out, "carried in\n");
    assert_eq!(vm.sh("head -c 300000 /dev/zero | tr '\\0' x").ok().bytes, vec![b'x'; 300_000]);
    assert!(vm.dmesg().contains("Linux version"));
    vm.wait_for("a file", "(usleep 1000; echo x >/tmp/there) & test -e /tmp/there");

    vm.sh("mkfs.ext4 -q /dev/disk/scratch && mount /dev/disk/scratch /mnt").ok();
    vm.sh(
        "echo kept >/mnt/a && sync && (while true; do echo tick >/dev/ports/progress; usleep 1000; done) &",
    )
    .ok();
    vm.wait_for_progress("ten ticks", |p| p.lines().count() >= 10);
    let progress = vm.cut_power();
    assert!(progress.lines().count() >= 10 && progress.lines().all(|l| l == "tick"), "{progress:?}");

    let mut vm = Vm::build("framework-2").disk(&disk).boot();
    vm.sh("mount /dev/disk/scratch /mnt").ok();
    assert_eq!(vm.sh("cat /mnt/a").ok().out, "kept\n");
    vm.sh("modprobe bcache && ls /sys/fs/bcache/register && modprobe ublk_drv && ls /dev/ublk-control").ok();
}

/// Who hangs is to be found in the log that is kept of a machine whose test failed.
#[test]
fn a_machine_that_does_not_answer_shows_its_stacks() {
    if skipped("a_machine_that_does_not_answer_shows_its_stacks") {
        return;
    }
    let mut vm = Vm::build("framework-silent").boot();
    let mut silent = || vm.sh_within(Duration::from_millis(100), "exec sleep 1000");
    let said = catch_unwind(AssertUnwindSafe(&mut silent)).map(|_| ()).expect_err("an answer");
    let said = said.downcast_ref::<String>().map_or("", String::as_str);
    assert!(said.contains("no answer to `exec sleep 1000`") && said.contains("console: there"), "{said}");
    let log = vm.serial_log();
    assert!(log.contains("Mem-Info:") && log.contains("task:sleep "), "{log}");
}
