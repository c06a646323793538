//! ubcache in a guest, serving a volume as a block device of the guest's kernel.
//!
//! Owns the shell functions that start it and wait for it (`LIBRARY`). The disks are `/dev/disk/cache` and
//! `/dev/disk/backing`.

use std::time::Duration;

use crate::disk::Disk;
use crate::guest_load;
use crate::host::built;
use crate::load::{Map, Model, Plan};
use crate::said::Said;
use crate::vm::{Builder, Vm};

/// The block device of the volume.
pub const DEVICE: &str = "/dev/ublkb0";

/// Starts `ubcache up` in the background, waits for it, ends it.
const LIBRARY: &str = r#"
devices="-C /dev/disk/cache -B /dev/disk/backing"
begin() { # ARGUMENTS: starts it
    rm -f /tmp/up.out
    export="--export ublk"
    case "$*" in *--export*) export= ;; esac
    ubcache up $devices $export --set sequential_cutoff=0 "$@" <${input:-/dev/null} >/tmp/up.out 2>>/tmp/up.err &
    echo $! >/tmp/up.pid
}
up() { # ARGUMENTS: starts it and waits until it is ready
    begin "$@"
    ready
}
ready() { # waits for the line that says ready
    n=0
    until grep -q ready /tmp/up.out; do
        n=$((n+1))
        [ $n -lt 3000 ] && kill -0 $(cat /tmp/up.pid) 2>/dev/null || { what; return 1; }
        usleep 10000
    done
}
what() { # what happened, for messages
    tail -n 20 /tmp/up.err
    for task in /proc/$(cat /tmp/up.pid)/task/*; do cat $task/comm $task/stack; done
    dmesg | tail -n 20
} >&2
gone() { # waits until the process has ended, by itself
    n=0
    while kill -0 $(cat /tmp/up.pid) 2>/dev/null; do
        n=$((n+1)); [ $n -lt 6000 ] || { what; return 1; }
        usleep 10000
    done
}
down() { kill -${1:-TERM} $(cat /tmp/up.pid) && gone; }
crash() { kill -9 $(cat /tmp/up.pid); }
now_ms() { awk '{ printf "%d", $1 * 1000 }' /proc/uptime; }
written() { awk '{ print $5 }' /sys/block/ublkb0/stat; }
moves() { # waits until requests to the device are done again; says after how many milliseconds
    from=$(now_ms); was=$(written); n=0
    until [ "$(written)" != "$was" ]; do
        n=$((n+1)); [ $n -lt 3000 ] || return 1
        usleep 5000
    done
    echo "moves after $(($(now_ms) - from)) ms"
}
each() { # waits until every job of fio makes progress: each has moved more bytes than it can have under way
    jobs=$(pidof fio) && main=$(fio_main) || return 1
    for job in $jobs; do
        [ $job != $main ] || continue
        from=$(through $job); n=0
        until [ $(($(through $job) - from)) -ge 1048576 ]; do
            n=$((n+1)); [ $n -lt 3000 ] || { cat /proc/$job/stack /sys/block/ublkb0/inflight >&2; what; return 1; }
            usleep 10000
        done
    done
}
fio_main() { # the process that started the others
    for p in $(pidof fio); do
        case " $(pidof fio) " in *" $(awk '{ print $4 }' /proc/$p/stat) "*) ;; *) echo $p; return;; esac
    done
    return 1
}
through() { awk '/^(read|write)_bytes/ { n += $2 } END { print n }' /proc/$1/io; }
end_fio() { # ends the fio whose code goes to /tmp/fio.code, and no request of it has failed
    [ ! -e /tmp/fio.code ] || { cat /tmp/fio.log /tmp/fio.out >&2; return 1; }
    # Its first process alone: a job whose io_getevents a signal interrupts halfway waits for ever (fio 3.33).
    kill -INT $(fio_main); n=0
    until [ -e /tmp/fio.code ]; do
        n=$((n+1)); [ $n -lt 6000 ] || { what; return 1; }
        usleep 10000
    done
    grep -q 'err= 0' /tmp/fio.out && ! grep 'err=' /tmp/fio.out | grep -v 'err= 0' || { cat /tmp/fio.log /tmp/fio.out >&2; return 1; }
}
disk_of() { for d in /sys/block/vd*; do [ "$(cat $d/serial)" != "$1" ] || echo /dev/${d##*/}; done; } # NAME
pull() { disk=$(disk_of $1) && echo 1 >/sys/block/${disk##*/}/device/../remove && [ -z "$(disk_of $1)" ]; } # NAME: out of the bus
put() { echo 1 >/sys/bus/pci/rescan && [ -n "$(disk_of $1)" ]; } # NAME: into the bus again
resume() { # starts it with clients waiting; says after how many microseconds it is ready and the first has its answer
    set -- $(ubcache-vm-load resume ublkb0 /tmp/up.out /tmp/up.err ubcache up $devices --export ublk \
        --set sequential_cutoff=0) && echo $1 >/tmp/up.pid && echo "ready $2 moves $3"
}
"#;

/// Messages of a kernel with bad disks or without memory.
const BAD_WORDS: &[&str] = &[
    "I/O error",
    "WARNING",
    "BUG",
    "Call Trace",
    "EXT4-fs error",
    "Corruption",
    "BTRFS error",
    "BTRFS critical",
    "blocked for more than",
];

/// A machine that has ubcache on board.
pub struct Guest {
    /// The machine.
    pub vm: Vm,
}

impl Guest {
    /// Boots a machine with these disks; nothing is served yet.
    #[track_caller]
    pub fn boot(builder: Builder, cache: &Disk, backing: &Disk) -> Guest {
        let builder = builder.disk(cache).disk(backing).text(LIBRARY, "/etc/library");
        let mut vm = builder.program(built("ubcache")).program(guest_load::program()).boot();
        vm.sh("modprobe ublk_drv").ok();
        Guest { vm }
    }

    /// Runs a script that knows the functions above.
    #[track_caller]
    pub fn sh(&mut self, script: &str) -> Said {
        self.vm.sh_within(Duration::from_secs(600), &format!(". /etc/library\n{script}"))
    }

    /// Starts it and waits until it serves.
    #[track_caller]
    pub fn up(&mut self, options: &[&str]) {
        self.sh(&format!("up {}", options.join(" "))).ok();
    }

    /// Starts it.
    #[track_caller]
    pub fn begin(&mut self, options: &[&str]) {
        self.sh(&format!("begin {}", options.join(" "))).ok();
    }

    /// Whether the process that was started last has said that it serves.
    #[track_caller]
    pub fn is_ready(&mut self) -> bool {
        self.sh("grep -q ready /tmp/up.out").code == 0
    }

    /// Ends it as a crash does.
    #[track_caller]
    pub fn kill(&mut self) {
        self.sh("crash").ok();
    }

    /// Ends it in good order.
    #[track_caller]
    pub fn down(&mut self) {
        self.sh("down").ok();
    }

    /// Runs a load to its end and tells the model.
    #[track_caller]
    pub fn load(&mut self, plan: &Plan, model: &mut Model) {
        guest_load::run(&mut self.vm, DEVICE, plan);
        model.ran(plan);
    }

    /// Compares every sector with the model.
    #[track_caller]
    pub fn judge(&mut self, model: &mut Model) {
        let map: Map =
            guest_load::map(&mut self.vm, DEVICE, model.tag).unwrap_or_else(|said| panic!("{said}"));
        model.judge(&map, "ubcache in the guest");
    }

    /// The kernel must not have complained, and no request failed.
    #[track_caller]
    pub fn no_complaints(&mut self) {
        self.no_complaints_but_of(&[]);
    }

    /// The kernel must not have complained, except about these disks (`vda`), which were pulled out.
    #[track_caller]
    pub fn no_complaints_but_of(&mut self, disks: &[&str]) {
        let log = self.vm.dmesg();
        let is_of = |line: &str| disks.iter().any(|d| line.contains(&format!("dev {d},")));
        let is_bad = |line: &&str| BAD_WORDS.iter().any(|w| line.contains(w)) && !is_of(line);
        let bad: Vec<&str> = log.lines().filter(is_bad).collect();
        assert!(bad.is_empty(), "the kernel complains:\n{}\n--- of ---\n{log}", bad.join("\n"));
    }

    /// Looks for complaints, cuts the power, and returns the progress.
    #[track_caller]
    pub fn cut_power(mut self) -> String {
        self.no_complaints();
        self.vm.cut_power()
    }
}
