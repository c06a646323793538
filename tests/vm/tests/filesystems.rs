//! Filesystems and a database on a volume that loses power, again and again.
//!
//! ubcache runs in the guest and serves the volume as a block device of the kernel; cache and backing device are
//! virtio disks with volatile caches, which lose what was not flushed. After each power loss its checker goes over the
//! images on the host; then another machine starts ubcache on them, the filesystem is mounted, everything that was
//! reported durable is there, and fsck finds nothing.

use ubcache_vm::guest::DEVICE;
use ubcache_vm::guest_load::{begin_files, files_reported, verify_files};
use ubcache_vm::{Dir, Disk, Guest, Power, Set, Vm, skipped};

const MIB: u64 = 1 << 20;
const WORKERS: usize = 3;

/// Everything a filesystem can do, all over one directory: data in files and files in directories come and go.
const STRESS: &str = "mkdir -p /mnt/stress && (nice -n 19 stress-ng --temp-path /mnt/stress --quiet --timeout 3600 \
    --hdd 1 --hdd-bytes 6m --hdd-write-size 64k --fallocate 1 --fallocate-bytes 8m --dentry 1 --dentries 256 --dir 1 \
    --dir-dirs 256 --rename 1 --link 1 --symlink 1 $MORE >/tmp/stress.log 2>&1; echo $? >/tmp/stress.code) &";

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
        let power = Power::new(tools.len() as u64);
        let [cache, backing] =
            [("cache", 40), ("backing", 352)].map(|(name, mib)| dir.disk(name, mib * MIB).volatile(&power));
        let world = World { cache, backing, dir, tools: tools.to_vec(), boots: 0 };
        world.set().make(&["--bucket", "64k", "--block", "512", "--writeback"]);
        world
    }

    fn set(&self) -> Set<'_> {
        Set::new(&self.dir, &self.cache, &[&self.backing])
    }

    /// A machine that serves the volume.
    #[track_caller]
    fn boot(&mut self, label: &str) -> Guest {
        self.boots += 1;
        let builder = Vm::build(&format!("{label}-{}", self.boots)).tools(&self.tools);
        let mut guest = Guest::boot(builder, &self.cache, &self.backing);
        guest.up(&["--set", "writeback_delay=1"]);
        guest
    }

    /// The machine goes down without a warning; what it reported is returned. The images must be sound.
    #[track_caller]
    fn cut_power(&self, guest: Guest) -> String {
        let progress = guest.cut_power();
        self.set().check();
        progress
    }
}

struct Filesystem {
    label: &'static str,
    tools: &'static [&'static str],
    make: &'static str,
    mount: &'static str,
    check: &'static str,
    /// What else the load may do.
    stress: &'static str,
}

fn filesystem(f: &Filesystem) {
    let Filesystem { label, tools, make, mount, check, stress } = *f;
    if skipped(label) {
        return;
    }
    let mut w = World::new(&[tools, &["stress-ng", "nice"]].concat());
    let mut done = [0; WORKERS];
    let mut newest = 0;
    for round in 0..3 {
        let mut guest = w.boot(label);
        if round == 0 {
            guest.vm.sh(&format!("{make} {DEVICE}")).ok();
        }
        guest.vm.sh(&format!("{mount} {DEVICE} /mnt")).ok();
        if round > 0 {
            newest = verify_files(&mut guest.vm, "/mnt", &done).max(newest);
            guest.vm.sh("umount /mnt").ok();
            guest.vm.sh(&format!("{check} {DEVICE}")).ok();
            guest.vm.sh(&format!("{mount} {DEVICE} /mnt && rm -rf /mnt/stress")).ok();
        }
        let first = newest + 1;
        guest.vm.sh(&format!("MORE='{stress}'; {STRESS}")).ok();
        begin_files(&mut guest.vm, "/mnt", first, WORKERS);
        let enough = |p: &str| p.lines().count() >= 150;
        guest.vm.wait_for_progress("150 files are replaced", enough);
        guest.vm.sh("[ ! -e /tmp/stress.code ] || { cat /tmp/stress.log; false; }").ok();
        let progress = w.cut_power(guest);
        files_reported(&progress, &mut done);
        assert!(done.iter().all(|d| *d >= first), "{done:?}");
    }
    // In the end it is stopped in good order, and the backing device alone is the filesystem.
    let mut guest = w.boot(label);
    guest.vm.sh(&format!("{mount} {DEVICE} /mnt")).ok();
    verify_files(&mut guest.vm, "/mnt", &done);
    guest.vm.sh("umount /mnt").ok();
    guest.down();
    guest.vm.sh("ubcache flush -C /dev/disk/cache -B /dev/disk/backing").ok();
    guest
        .vm
        .sh(&format!("modprobe loop; losetup -o 8192 /dev/loop0 /dev/disk/backing && {check} /dev/loop0"))
        .ok();
    w.cut_power(guest);
}

#[test]
fn ext4() {
    filesystem(&Filesystem {
        label: "ext4",
        tools: &["mkfs.ext4", "e2fsck"],
        make: "mkfs.ext4 -q",
        mount: "mount -t ext4",
        check: "e2fsck -fn",
        stress: "--xattr 1",
    });
}

#[test]
fn xfs() {
    filesystem(&Filesystem {
        label: "xfs",
        tools: &["mkfs.xfs", "xfs_repair"],
        make: "mkfs.xfs -q",
        mount: "modprobe xfs && mount -t xfs",
        check: "xfs_repair -n",
        // An attribute that is half set when the power goes stays so, marked as incomplete, on any disk; the filesystem
        // hides it, and its checker does not like it.
        stress: "",
    });
}

#[test]
fn btrfs() {
    filesystem(&Filesystem {
        label: "btrfs",
        tools: &["mkfs.btrfs", "btrfs"],
        make: "mkfs.btrfs -q",
        mount: "modprobe btrfs && mount -t btrfs",
        check: "btrfs check --readonly",
        stress: "--xattr 1",
    });
}

/// Rows are inserted one by one, each in a transaction of its own; those that were committed are there after each
/// power loss, with either kind of journal.
#[test]
fn sqlite() {
    if skipped("sqlite") {
        return;
    }
    let mut w = World::new(&["mkfs.ext4", "e2fsck", "sqlite3"]);
    let mut committed = 0;
    for (round, journal) in ["delete", "wal", "wal", "truncate"].into_iter().enumerate() {
        let mut guest = w.boot("sqlite");
        let vm = &mut guest.vm;
        if round == 0 {
            vm.sh(&format!("mkfs.ext4 -q {DEVICE}")).ok();
        }
        vm.sh(&format!("mount {DEVICE} /mnt")).ok();
        if round == 0 {
            vm.sh("sqlite3 /mnt/db 'create table t (id integer primary key, body blob)' && sync").ok();
        } else {
            committed = rows_are_there(vm, committed);
        }
        // `.once` opens and closes the port, so that the number of a row is on its way when its commit is done.
        let script = format!(
            "(echo '.bail on'; echo 'pragma journal_mode={journal};'; echo 'pragma synchronous=extra;'; i={committed}; \
             while true; do i=$((i+1)); echo \"insert into t values ($i, randomblob(1 + $i % 7000));\"; \
             echo '.once /dev/ports/progress'; echo \"select 'row ' || $i;\"; done) | sqlite3 /mnt/db >/tmp/sql 2>&1 &"
        );
        vm.sh(&script).ok();
        let from = committed;
        vm.wait_for_progress("120 rows are committed", |p| last_row(p) >= from + 120);
        committed = last_row(&w.cut_power(guest)).max(committed);
    }
    let mut guest = w.boot("sqlite");
    guest.vm.sh(&format!("mount {DEVICE} /mnt")).ok();
    rows_are_there(&mut guest.vm, committed);
    guest.vm.sh(&format!("umount /mnt && e2fsck -fn {DEVICE}")).ok();
    w.cut_power(guest);
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
