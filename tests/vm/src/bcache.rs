//! The kernel's bcache in a guest: registration, settings, load, an orderly stop, and its messages.
//!
//! Owns what the guest's sysfs looks like. A device is named by its disk; a flash-only volume by its slot.

use crate::disk::Disk;
use crate::guest_load;
use crate::load::{Map, Model, Plan};
use crate::said::Said;
use crate::vm::{Builder, Vm};

/// A machine whose kernel has bcache.
pub struct Kernel {
    /// The machine.
    pub vm: Vm,
    disks: Vec<Disk>,
}

/// The normal messages of bcache. All others are complaints.
const GOOD_WORDS: &[&str] = &[
    "registered cache device",
    "registered backing device",
    "Caching vd",
    "Caching disabled for",
    // A device that is attached while it is served without a cache.
    "is running already",
    "Cache set",
    "stopped",
    "journal replay done",
    // Only for sets that were never used, and tests of those ask for it.
    "invalidating existing data",
];

/// Messages of a kernel with bad disks or without memory.
const BAD_WORDS: &[&str] = &["BUG:", "BUG at", "WARNING:", "Oops", "I/O error", "blocked for more than"];

/// A warning of the kernel that says nothing about us: a cached device that is stopped right after it was read may go
/// before the copies of its misses are in the cache, and their requests with it.
const LATE_MISSES: &[&str] = &["__kmem_cache_shutdown", "kmem_cache_destroy"];

/// A way to speak of a cached device or volume of bcache.
#[derive(Clone, Copy, Debug)]
pub enum Served<'a> {
    /// That of this backing device.
    Of(&'a Disk),
    /// The flash-only volume in this slot.
    Volume(u32),
}

impl<'a> From<&'a Disk> for Served<'a> {
    fn from(disk: &'a Disk) -> Served<'a> {
        Served::Of(disk)
    }
}

impl Kernel {
    /// Boots a machine with these disks, and loads bcache. One processor: what the kernel makes of the devices does not
    /// depend on more, and the emulation of several now and then fails a kernel that changes its own code.
    #[track_caller]
    pub fn boot(label: &str, disks: &[&Disk]) -> Kernel {
        Kernel::boot_with(Vm::build(label).cpus(1), disks)
    }

    /// Boots the machine that `builder` describes, with these disks and the kernel's driver.
    #[track_caller]
    pub fn boot_with(mut builder: Builder, disks: &[&Disk]) -> Kernel {
        for disk in disks {
            builder = builder.disk(disk);
        }
        let mut vm = builder.program(guest_load::program()).tools(&["make-bcache"]).boot();
        vm.new_messages();
        vm.sh("modprobe bcache").ok();
        Kernel { vm, disks: disks.iter().map(|d| (*d).clone()).collect() }
    }

    /// Formats with the tool of old; the disks must be empty.
    #[track_caller]
    pub fn make(&mut self, args: &str) -> Said {
        self.vm.sh(&format!("make-bcache {args}")).ok()
    }

    /// Registers disks, one after the other, and waits until each backing device has its volume.
    #[track_caller]
    pub fn register(&mut self, disks: &[&Disk]) {
        for disk in disks {
            self.vm.sh(&format!("echo $(readlink -f {}) > /sys/fs/bcache/register", disk.guest())).ok();
        }
        for disk in disks {
            let dir = self.sysfs(disk);
            let there = format!("test -e {dir}/dev || test -e {dir}/set");
            self.vm.wait_for(&format!("{} is registered", disk.name), &there);
        }
        self.tune();
    }

    /// Everything through the cache: no bypass of what looks sequential or because of slow devices.
    #[track_caller]
    fn tune(&mut self) {
        self.vm.sh(
            "for f in /sys/block/vd*/bcache/sequential_cutoff; do [ ! -e $f ] || echo 0 >$f || exit 1; done
             for f in /sys/fs/bcache/*-*/congested_*_threshold_us; do [ ! -e $f ] || echo 0 >$f || exit 1; done",
        )
        .ok();
    }

    fn sysfs(&self, disk: &Disk) -> String {
        format!("/sys/block/$(basename $(readlink -f {}))/bcache", disk.guest())
    }

    /// The directory of a volume in sysfs.
    fn directory(&self, served: Served<'_>) -> String {
        match served {
            Served::Of(disk) => self.sysfs(disk),
            Served::Volume(slot) => format!("/sys/fs/bcache/*-*/volume{slot}"),
        }
    }

    /// The block device, as the shell of the guest finds it.
    pub fn device<'a>(&self, served: impl Into<Served<'a>>) -> String {
        let served = served.into();
        let dir = self.directory(served);
        match served {
            Served::Of(_) => format!("/dev/$(basename $(readlink -f {dir}/dev))"),
            // Its directory is that of its block device.
            Served::Volume(_) => format!("/dev/$(basename $(dirname $(readlink -f {dir})))"),
        }
    }

    /// A setting or state of a volume, for example `state`, `label`, `dirty_data`.
    #[track_caller]
    pub fn get<'a>(&mut self, served: impl Into<Served<'a>>, key: &str) -> String {
        let dir = self.directory(served.into());
        self.vm.sh(&format!("cat {dir}/{key}")).ok().line().to_owned()
    }

    /// Sets something of a volume.
    #[track_caller]
    pub fn set<'a>(&mut self, served: impl Into<Served<'a>>, key: &str, value: &str) {
        let dir = self.directory(served.into());
        self.vm.sh(&format!("echo '{value}' > {dir}/{key}")).ok();
    }

    /// Something of the (only) set.
    #[track_caller]
    pub fn get_of_set(&mut self, key: &str) -> String {
        self.vm.sh(&format!("cat /sys/fs/bcache/*-*/{key}")).ok().line().to_owned()
    }

    /// Sets something of the (only) set.
    #[track_caller]
    pub fn set_of_set(&mut self, key: &str, value: &str) {
        self.vm.sh(&format!("echo '{value}' > $(echo /sys/fs/bcache/*-*/{key})")).ok();
    }

    /// The UUID of the (only) set.
    #[track_caller]
    pub fn set_uuid(&mut self) -> String {
        self.vm.sh("basename /sys/fs/bcache/*-*").ok().line().to_owned()
    }

    /// The cache mode, as chosen among the others.
    #[track_caller]
    pub fn cache_mode(&mut self, backing: &Disk) -> String {
        let all = self.get(backing, "cache_mode");
        all.split(['[', ']']).nth(1).unwrap_or_default().to_owned()
    }

    /// Attaches a device that is registered to the (only) set.
    #[track_caller]
    pub fn attach(&mut self, backing: &Disk) {
        let uuid = self.set_uuid();
        self.set(backing, "attach", &uuid);
        self.tune();
    }

    /// Detaches, which writes dirty data back first.
    #[track_caller]
    pub fn detach(&mut self, backing: &Disk) {
        self.set(backing, "detach", "1");
        let dir = self.sysfs(backing);
        self.vm.wait_for("it is detached", &format!("grep -q 'no cache' {dir}/state"));
    }

    /// Waits until everything is written back.
    #[track_caller]
    pub fn write_back(&mut self, backing: &Disk) {
        self.set(backing, "writeback_percent", "0");
        self.set(backing, "writeback_delay", "0");
        self.set(backing, "writeback_running", "1");
        let dir = self.sysfs(backing);
        self.vm.wait_for("all is written back", &format!("grep -q clean {dir}/state"));
    }

    /// Turns writeback off: dirty data stays in the cache.
    #[track_caller]
    pub fn disable_writeback(&mut self, backing: &Disk) {
        self.set(backing, "writeback_running", "0");
    }

    /// Creates a flash-only volume in the (only) set; returns its slot.
    #[track_caller]
    pub fn create_volume(&mut self, slot: u32, size: &str) {
        self.set_of_set("flash_vol_create", size);
        self.vm.wait_for("a volume", &format!("test -e /sys/fs/bcache/*-*/volume{slot}/size"));
        self.tune();
    }

    /// Runs a load to its end and tells the model.
    #[track_caller]
    pub fn load<'a>(&mut self, served: impl Into<Served<'a>>, plan: &Plan, model: &mut Model) {
        let device = self.device(served);
        guest_load::run(&mut self.vm, &device, plan);
        model.ran(plan);
    }

    /// Starts a load.
    #[track_caller]
    pub fn begin_load<'a>(&mut self, served: impl Into<Served<'a>>, plan: &Plan) {
        let device = self.device(served);
        guest_load::begin(&mut self.vm, &device, plan);
    }

    /// Waits until a load that was started has made this many requests, all workers together, flushed.
    #[track_caller]
    pub fn wait_for_load(&mut self, plan: &Plan, requests: u32) {
        guest_load::wait(&mut self.vm, plan, requests);
    }

    /// The contents of the volume.
    #[track_caller]
    pub fn map<'a>(&mut self, served: impl Into<Served<'a>>, tag: u32) -> Map {
        let device = self.device(served);
        guest_load::map(&mut self.vm, &device, tag).unwrap_or_else(|said| panic!("{said}"))
    }

    /// Compares every sector of a volume with the model.
    #[track_caller]
    pub fn judge<'a>(&mut self, served: impl Into<Served<'a>>, model: &mut Model) {
        let map = self.map(served, model.tag);
        model.judge(&map, "the kernel");
    }

    /// Stops volumes and set in good order, looks for complaints, and switches off, before which disks are flushed as a
    /// machine that is shut down does.
    #[track_caller]
    pub fn stop(mut self) {
        self.stop_set();
        self.no_complaints();
        self.vm.sh("for d in /dev/disk/*; do dd if=/dev/null of=$d conv=notrunc,fsync || exit 1; done").ok();
        self.vm.cut_power();
    }

    /// Stops volumes and set, and waits until the kernel has let go of all disks.
    #[track_caller]
    pub fn stop_set(&mut self) {
        self.vm
            .sh("for f in /sys/block/bcache*/bcache/stop; do [ ! -e $f ] || echo 1 >$f; done
             for f in /sys/fs/bcache/*-*/stop; do [ ! -e $f ] || echo 1 >$f; done")
            .ok();
        self.vm.wait_for(
            "everything is stopped",
            "! ls -d /sys/block/bcache* /sys/fs/bcache/*-* /sys/block/vd*/bcache",
        );
    }

    /// Looks for complaints, cuts the power in the middle of the load, and returns the progress.
    #[track_caller]
    pub fn cut_power(mut self) -> String {
        self.no_complaints();
        self.vm.cut_power()
    }

    /// Checks that the kernel has printed only normal messages since the last call.
    #[track_caller]
    pub fn no_complaints(&mut self) {
        let bad = self.complaints();
        assert!(bad.is_empty(), "the kernel complains:\n{}", bad.join("\n"));
    }

    /// The complaints of the kernel since the last call.
    #[track_caller]
    pub fn complaints(&mut self) -> Vec<String> {
        let mut lines = self.vm.new_messages();
        // While a journal is replayed, buckets are known to be reused by keys that do not stand in the leaves yet.
        if let Some(replayed) = lines.iter().rposition(|l| l.contains("journal replay done")) {
            let mut n = 0;
            lines.retain(|l| {
                n += 1;
                n > replayed || !l.contains("stale dirty pointer")
            });
        }
        let bad = |line: &String| {
            let of_bcache = line.contains("bcache:") && !GOOD_WORDS.iter().any(|w| line.contains(w));
            let late = LATE_MISSES.iter().any(|w| line.contains(w));
            of_bcache || (BAD_WORDS.iter().any(|w| line.contains(w)) && !late)
        };
        lines.into_iter().filter(bad).collect()
    }

    /// The disks it has.
    pub fn disks(&self) -> &[Disk] {
        &self.disks
    }
}
