//! Filesystems and a database on a volume that loses power, again and again.
//!
//! ubcache runs in the guest and serves the volume as a block device of the kernel; cache and backing device are
//! virtio disks. After each power cut its checker goes over the images on the host; then another machine starts
//! ubcache on them, the filesystem is mounted, everything that was reported durable is there, and fsck finds nothing.

use ubcache_vm::bcache::load_program;
use ubcache_vm::{Dir, Disk, Set, Vm, built, skipped};

const MIB: u64 = 1 << 20;
const DEVICE: &str = "/dev/ublkb0";
const WORKERS: usize = 3;

struct World {
    cache: Disk,
    backing: Disk,
    dir: Dir,
    tools: Vec<&'static str>,
    boots: u32,
}

impl World {
    fn new(tools: &[&'static str]) -> World {
        let dir = Dir::new();
        // Less cache than is written, so that writeback and reuse of buckets are part of it.
        let (cache, backing) = (dir.disk("cache", 40 * MIB), dir.disk("backing", 352 * MIB));
        let world = World { cache, backing, dir, tools: tools.to_vec(), boots: 0 };
        world.set().make(&["--bucket", "64k", "--block", "512", "--writeback"]);
        world
    }

    fn set(&self) -> Set<'_> {
        Set::new(&self.dir, &self.cache, &[&self.backing])
    }

    /// A machine that serves the volume.
    #[track_caller]
    fn boot(&mut self, label: &str) -> Vm {
        self.boots += 1;
        let builder = Vm::build(&format!("{label}-{}", self.boots)).disk(&self.cache).disk(&self.backing);
        let mut vm = builder.program(built("ubcache")).program(load_program()).tools(&self.tools).boot();
        vm.sh("modprobe ublk_drv").ok();
        vm.sh("ubcache up -C /dev/disk/cache -B /dev/disk/backing --export ublk --set sequential_cutoff=0 \
               --set writeback_delay=1 >/tmp/up.out 2>/tmp/up.err &")
            .ok();
        vm.wait_for("the volume is served", "grep -q ready /tmp/up.out || { cat /tmp/up.err; false; }");
        vm
    }

    /// The machine goes down without a warning; what it reported is returned. The images must be sound.
    #[track_caller]
    fn cut_power(&self, mut vm: Vm) -> String {
        no_complaints(&mut vm);
        let progress = vm.cut_power();
        self.set().check();
        progress
    }
}

#[track_caller]
fn no_complaints(vm: &mut Vm) {
    let bad =
        ["I/O error", "WARNING", "BUG:", "EXT4-fs error", "Corruption", "BTRFS error", "BTRFS critical"];
    let log = vm.dmesg();
    let lines: Vec<&str> = log.lines().filter(|l| bad.iter().any(|b| l.contains(b))).collect();
    assert!(lines.is_empty(), "the kernel complains:\n{}", lines.join("\n"));
}

/// The last request of each worker that was reported as durable.
fn reported(progress: &str, last: &mut [u32; WORKERS]) {
    // A power cut may have torn the last line.
    let whole = progress.rfind('\n').map_or("", |end| progress.get(..end).unwrap_or_default());
    for line in whole.lines() {
        let mut words = line.split(' ').skip(1).filter_map(|w| w.parse::<u32>().ok());
        if let (Some(worker), Some(request)) = (words.next(), words.next())
            && let Some(l) = last.get_mut(worker as usize)
        {
            *l = request;
        }
    }
}

fn filesystem(label: &str, tools: &[&'static str], make: &str, mount: &str, check: &str) {
    if skipped(label) {
        return;
    }
    let mut w = World::new(tools);
    let mut done = [0; WORKERS];
    let mut newest = 0;
    for round in 0..3 {
        let mut vm = w.boot(label);
        if round == 0 {
            vm.sh(&format!("{make} {DEVICE}")).ok();
        }
        vm.sh(&format!("{mount} {DEVICE} /mnt")).ok();
        if round > 0 {
            let said =
                vm.sh(&format!("ubcache-vm-load verify /mnt {}", done.map(|d| d.to_string()).join(" "))).ok();
            newest = said.line().parse::<u32>().expect("a number").max(newest);
            vm.sh("umount /mnt").ok();
            vm.sh(&format!("{check} {DEVICE}")).ok();
            vm.sh(&format!("{mount} {DEVICE} /mnt")).ok();
        }
        let first = newest + 1;
        vm.sh(&format!("ubcache-vm-load files /mnt {first} 1000000 {WORKERS} >/tmp/load 2>&1 &")).ok();
        let enough = |p: &str| p.lines().count() >= 250;
        vm.wait_for_progress("250 files are replaced", enough);
        let progress = w.cut_power(vm);
        reported(&progress, &mut done);
        assert!(done.iter().all(|d| *d >= first), "{done:?}");
    }
    // In the end it is stopped in good order, and the backing device alone is the filesystem.
    let mut vm = w.boot(label);
    vm.sh(&format!("{mount} {DEVICE} /mnt")).ok();
    vm.sh(&format!("ubcache-vm-load verify /mnt {}", done.map(|d| d.to_string()).join(" "))).ok();
    vm.sh("umount /mnt && kill $(pidof ubcache)").ok();
    vm.wait_for("ubcache ends", "! pidof ubcache");
    no_complaints(&mut vm);
    vm.sh("ubcache flush -C /dev/disk/cache -B /dev/disk/backing").ok();
    vm.sh(&format!("modprobe loop; losetup -o 8192 /dev/loop0 /dev/disk/backing && {check} /dev/loop0")).ok();
    w.cut_power(vm);
}

#[test]
fn ext4() {
    filesystem("ext4", &["mkfs.ext4", "e2fsck"], "mkfs.ext4 -q", "mount -t ext4", "e2fsck -fn");
}

#[test]
fn xfs() {
    let mount = "modprobe xfs && mount -t xfs";
    filesystem("xfs", &["mkfs.xfs", "xfs_repair"], "mkfs.xfs -q", mount, "xfs_repair -n");
}

#[test]
fn btrfs() {
    let mount = "modprobe btrfs && mount -t btrfs";
    filesystem("btrfs", &["mkfs.btrfs", "btrfs"], "mkfs.btrfs -q", mount, "btrfs check --readonly");
}

/// Rows are inserted one by one, each in a transaction of its own; those that were committed are there after each
/// power cut, with either kind of journal.
#[test]
fn sqlite() {
    if skipped("sqlite") {
        return;
    }
    let mut w = World::new(&["mkfs.ext4", "e2fsck", "sqlite3"]);
    let mut committed = 0;
    for (round, journal) in ["delete", "wal", "wal", "truncate"].into_iter().enumerate() {
        let mut vm = w.boot("sqlite");
        if round == 0 {
            vm.sh(&format!("mkfs.ext4 -q {DEVICE}")).ok();
        }
        vm.sh(&format!("mount {DEVICE} /mnt")).ok();
        if round == 0 {
            vm.sh("sqlite3 /mnt/db 'create table t (id integer primary key, body blob)' && sync").ok();
        } else {
            committed = rows_are_there(&mut vm, committed);
        }
        // `.once` opens and closes the port, so that the number of a row is on its way when its commit is done.
        let script = format!(
            "(echo '.bail on'; echo 'pragma journal_mode={journal};'; echo 'pragma synchronous=full;'; i={committed}; \
             while true; do i=$((i+1)); echo \"insert into t values ($i, randomblob(1 + $i % 7000));\"; \
             echo '.once /dev/ports/progress'; echo \"select 'row ' || $i;\"; done) | sqlite3 /mnt/db >/tmp/sql 2>&1 &"
        );
        vm.sh(&script).ok();
        let from = committed;
        vm.wait_for_progress("120 rows are committed", |p| last_row(p) >= from + 120);
        committed = last_row(&w.cut_power(vm)).max(committed);
    }
    let mut vm = w.boot("sqlite");
    vm.sh(&format!("mount {DEVICE} /mnt")).ok();
    rows_are_there(&mut vm, committed);
    vm.sh(&format!("umount /mnt && e2fsck -fn {DEVICE}")).ok();
    w.cut_power(vm);
}

fn last_row(progress: &str) -> u32 {
    let whole = progress.rfind('\n').map_or("", |end| progress.get(..end).unwrap_or_default());
    let number = |l: &str| l.strip_prefix("row ").and_then(|n| n.trim().parse().ok());
    whole.lines().rev().find_map(number).unwrap_or(0)
}

/// The database is sound and has every row up to `committed`, whole, and at most one more. Returns how many it has.
#[track_caller]
fn rows_are_there(vm: &mut Vm, committed: u32) -> u32 {
    assert_eq!(vm.sh("sqlite3 /mnt/db 'pragma integrity_check'").ok().line(), "ok");
    let query = "select count(*), max(id), sum(length(body) != 1 + id % 7000) from t";
    let said = vm.sh(&format!("sqlite3 /mnt/db '{query}'")).ok();
    let numbers: Vec<u32> = said.line().split('|').filter_map(|n| n.parse().ok()).collect();
    let [count, max, wrong] = numbers[..] else { panic!("{said}") };
    assert_eq!((count, wrong), (max, 0), "{said}");
    assert!(max == committed || max == committed + 1, "{committed} rows are committed, found {max}");
    max
}
