//! Volumes as block devices of the kernel: limits, data, filesystems, the death of the server, upgrades, refusals.
//!
//! ubcache runs in the guest, on a cache and backing devices that are virtio disks.

use std::time::Duration;

use ubcache_vm::{Dir, Disk, Vm, built, skipped};

const MIB: u64 = 1 << 20;

/// Runs `ubcache up` in the background, kills it when told to and knows what it said.
const LIBRARY: &str = r#"
devices="-C /dev/disk/cache -B /dev/disk/backing"
up() { # ARGUMENTS: starts it and waits until it is ready
    rm -f /tmp/up.out
    ubcache up $devices --export ublk --set sequential_cutoff=0 "$@" >/tmp/up.out 2>>/tmp/up.err &
    echo $! >/tmp/up.pid
    ready
}
ready() { # waits for the line that says ready
    n=0
    until grep -q ready /tmp/up.out; do
        n=$((n+1))
        [ $n -lt 3000 ] && kill -0 $(cat /tmp/up.pid) 2>/dev/null || { cat /tmp/up.err >&2; return 1; }
        usleep 10000
    done
}
gone() { # waits until the process has ended, by itself
    n=0
    while kill -0 $(cat /tmp/up.pid) 2>/dev/null; do
        n=$((n+1)); [ $n -lt 6000 ] || { cat /tmp/up.err >&2; return 1; }
        usleep 10000
    done
}
down() { kill -${1:-TERM} $(cat /tmp/up.pid) && gone; }
"#;

struct Guest {
    vm: Vm,
}

impl Guest {
    /// Boots a machine with a new set of a 64 MiB cache and a backing device.
    #[track_caller]
    fn boot(label: &str, dir: &Dir, backing_mib: u64, tools: &[&str]) -> Guest {
        let disks = [dir.disk("cache", 64 * MIB), dir.disk("backing", backing_mib * MIB)];
        Guest::boot_on(label, dir, &disks, tools)
    }

    #[track_caller]
    fn boot_on(label: &str, dir: &Dir, [cache, backing]: &[Disk; 2], tools: &[&str]) -> Guest {
        std::fs::write(dir.path("library"), LIBRARY).unwrap();
        let vm = Vm::build(label)
            .disk(cache)
            .disk(backing)
            .tools(tools)
            .program(built("ubcache"))
            .file(dir.path("library"), "/etc/library")
            .boot();
        let mut guest = Guest { vm };
        guest.sh("modprobe ublk_drv && ubcache make $devices --bucket 64k --writeback").ok();
        guest
    }

    #[track_caller]
    fn sh(&mut self, script: &str) -> ubcache_vm::Said {
        self.vm.sh_within(Duration::from_secs(600), &format!(". /etc/library\n{script}"))
    }

    /// Nothing that the kernel complains of, and no request that failed.
    #[track_caller]
    fn no_complaints(&mut self) {
        let log = self.vm.dmesg();
        for bad in ["I/O error", "WARNING", "BUG", "Call Trace", "EXT4-fs error", "blocked for more than"] {
            assert!(!log.contains(bad), "{bad}: {log}");
        }
    }
}

#[test]
fn a_device_is_like_its_volume_and_goes_without_a_trace() {
    if skipped("a_device_is_like_its_volume_and_goes_without_a_trace") {
        return;
    }
    let dir = Dir::new();
    let mut guest = Guest::boot("ublk-limits", &dir, 256, &[]);
    let said = guest.sh("up --json && cat /tmp/up.out").ok();
    assert!(said.out.contains(r#""address":"/dev/ublkb0","kind":"ublk""#), "{said}");
    let said = guest
        .sh("cd /sys/block/ublkb0/queue; for f in logical_block_size physical_block_size rotational fua write_cache \
             max_hw_sectors_kb discard_granularity discard_max_hw_bytes write_zeroes_max_bytes nr_requests scheduler; \
             do echo $f $(cat $f); done; echo size $(cat ../size) ro $(cat ../ro) queues $(ls ../mq | wc -l)")
        .ok();
    for line in [
        "logical_block_size 512",
        "physical_block_size 512",
        "rotational 0",
        "fua 1",
        "write_cache write back",
        "max_hw_sectors_kb 512",
        "discard_granularity 512",
        "discard_max_hw_bytes 1073741824",
        "write_zeroes_max_bytes 67108864",
        "nr_requests 127",
        "scheduler [none]",
        "ro 0 queues 2",
    ] {
        assert!(said.out.contains(line), "expected {line:?} in {said}");
    }
    assert!(said.out.contains(&format!("size {}", 256 * MIB / 512 - 16)), "{said}");
    // Data, by plain reads and writes.
    guest
        .sh("head -c 3000000 /dev/urandom >/tmp/data && dd if=/tmp/data of=/dev/ublkb0 bs=1M conv=fsync && \
             echo 3 >/proc/sys/vm/drop_caches && head -c 3000000 /dev/ublkb0 | cmp - /tmp/data")
        .ok();
    for (start, stop) in [("--ublk-queues 1 --ublk-depth 8", "INT"), ("--export ublk=7", "TERM")] {
        guest
            .sh(&format!("down {stop} && [ ! -e /dev/ublkb0 ] && [ -z \"$(ls /sys/class/ublk-char)\" ]"))
            .ok();
        guest.sh("ubcache check /dev/disk/cache /dev/disk/backing").ok();
        guest.sh(&format!("up {start}; sed 's/.*: .dev.//' /tmp/up.out")).ok();
        guest.sh("head -c 3000000 /dev/ublkb[07] | cmp - /tmp/data").ok();
    }
    guest.sh("down").ok();
    guest.no_complaints();
}
