//! Groups of two cache devices under a kernel (docs/decisions/037-groups.md): one of them is pulled out under a mounted filesystem,
//! the machine loses power and one of them is gone after that, and the kernel's bcache serves what a group has left.

use ubcache_vm::guest::DEVICE;
use ubcache_vm::guest_load::{begin_files, end_files, files_reported, verify_files};
use ubcache_vm::load::files::SLOTS;
use ubcache_vm::ours::ubcache;
use ubcache_vm::{Dir, Disk, Guest, Kernel, Model, Power, Said, Set, Up, Vm, skipped, wait_until};

const MIB: u64 = 1 << 20;
const WORKERS: usize = 2;

/// Options of `make`.
const USUAL: &[&str] = &["--bucket", "64k", "--block", "512", "--writeback"];

/// A load that verifies what it has written, again and again, and makes it durable after every eighth write.
const FIO: &str = "fio --name=load --directory=/mnt --ioengine=libaio --direct=1 --rw=randrw --bs=4k --size=16m --iodepth=16 \
     --verify=crc32c --verify_backlog=64 --fdatasync=8 --time_based --runtime=3600 --fallocate=none --output=/tmp/fio.out";

/// The line that says that a second cache device has the dirty data. A start with a valid copy says it, too.
const HAS_COPY: &str = "its dirty data is in sets";

/// The filesystem on a group of two cache devices, and what must be in it.
struct Mounted {
    backing: Disk,
    /// The last request of each worker that was reported as durable.
    done: [u32; WORKERS],
    newest: u32,
}

/// A machine with these disks; the group is not served yet.
#[track_caller]
fn boot(label: &str, caches: &[&Disk], backing: &Disk) -> Guest {
    let (first, more) = caches.split_first().expect("a cache device");
    let mut builder = Vm::build(label).tools(&["mkfs.ext4", "e2fsck", "fio"]);
    for disk in more {
        builder = builder.disk(disk);
    }
    Guest::boot(builder, first, backing)
}

/// Runs a script whose `up` serves these cache devices.
#[track_caller]
fn sh(guest: &mut Guest, caches: &[&Disk], script: &str) -> Said {
    let caches: String = caches.iter().map(|c| format!("-C {} ", c.guest())).collect();
    guest.sh(&format!("devices='{caches}-B /dev/disk/backing'\n{script}")).ok()
}

impl Mounted {
    fn new(backing: &Disk) -> Mounted {
        Mounted { backing: backing.clone(), done: [0; WORKERS], newest: 0 }
    }

    /// Makes the group and the filesystem, with a file that stays as it is.
    #[track_caller]
    fn make(&self, guest: &mut Guest, caches: &[&Disk]) {
        let make = format!("ubcache make $devices {}", USUAL.join(" "));
        sh(guest, caches, &make);
        self.serve_both(guest, caches);
        sh(
            guest,
            caches,
            &format!(
                "mkfs.ext4 -q -E lazy_itable_init=0 {DEVICE} && mount -o errors=remount-ro {DEVICE} /mnt && \
                 head -c 3000000 /dev/urandom >/mnt/kept && cd /mnt && md5sum kept >kept.md5 && sync"
            ),
        );
    }

    /// Serves the group, and waits until both cache devices have the dirty data. Writeback is part of the load.
    #[track_caller]
    fn serve_both(&self, guest: &mut Guest, caches: &[&Disk]) {
        sh(guest, caches, "rm -f /tmp/up.err; up --set writeback_delay=1");
        guest.vm.wait_for("a copy", &format!("grep -q '{HAS_COPY}' /tmp/up.err"));
    }

    /// Starts both loads and waits until each of their processes goes on.
    #[track_caller]
    fn begin_load(&mut self, guest: &mut Guest) {
        begin_files(&mut guest.vm, "/mnt", self.newest + 1, WORKERS);
        guest.sh(&format!("({FIO}; echo $? >/tmp/fio.code) >/tmp/fio.log 2>&1 &")).ok();
        self.goes_on(guest);
    }

    /// Waits until both loads have made progress from now on.
    #[track_caller]
    fn goes_on(&self, guest: &mut Guest) {
        let reported = |progress: &str| {
            let mut last = [self.newest; WORKERS];
            files_reported(progress, &mut last);
            last
        };
        let from = reported(&guest.vm.progress());
        guest.sh("each").ok();
        // The worker that was behind at a power loss skips a request, which must not be the newest one of a file.
        let is_enough = |p: &str| reported(p).iter().zip(from).all(|(now, from)| *now > from + SLOTS);
        guest.vm.wait_for_progress("every worker replaces all files", is_enough);
    }

    /// Ends both loads: no request has failed, and the filesystem is still writable and has everything.
    #[track_caller]
    fn end_load(&mut self, guest: &mut Guest) {
        guest.sh("end_fio").ok();
        end_files(&mut guest.vm);
        guest.sh("grep -q ' /mnt ext4 rw' /proc/mounts || { cat /proc/mounts >&2; exit 1; }").ok();
        files_reported(&guest.vm.progress(), &mut self.done);
        assert!(self.done.iter().all(|d| *d > 0), "{:?}", self.done);
        self.verify(guest);
    }

    /// The power goes in the middle of the loads.
    #[track_caller]
    fn cut_power(&mut self, guest: Guest) {
        let progress = guest.cut_power();
        files_reported(&progress, &mut self.done);
        assert!(self.done.iter().all(|d| *d > self.newest), "{:?} after {}", self.done, self.newest);
    }

    /// The filesystem is mounted and has everything that was durable.
    #[track_caller]
    fn verify(&mut self, guest: &mut Guest) {
        guest.vm.sh("echo 3 >/proc/sys/vm/drop_caches; cd /mnt && md5sum -c kept.md5").ok();
        self.newest = verify_files(&mut guest.vm, "/mnt", &self.done).max(self.newest);
    }

    /// Mounts a block device, looks whether everything is there, and whether the filesystem is sound.
    #[track_caller]
    fn judge(&mut self, guest: &mut Guest) {
        // The mount replays the journal of the filesystem.
        guest.vm.sh(&format!("mount -o errors=remount-ro {DEVICE} /mnt")).ok();
        self.verify(guest);
        guest.vm.sh(&format!("umount /mnt && e2fsck -fn {DEVICE}")).ok();
    }

    /// The kernel's bcache serves the only cache device that is left, and the filesystem is sound and has everything.
    #[track_caller]
    fn judge_by_kernel(&self, label: &str, cache: &Disk) {
        let builder = Vm::build(label).cpus(1).tools(&["e2fsck"]);
        let mut kernel = Kernel::boot_with(builder, &[cache, &self.backing]);
        kernel.register(&[cache, &self.backing]);
        assert_eq!(kernel.get(&self.backing, "state"), "dirty");
        let device = kernel.device(&self.backing);
        kernel
            .vm
            .sh(&format!("e2fsck -fn {device} && mount {device} /mnt && cd /mnt && md5sum -c kept.md5"))
            .ok();
        verify_files(&mut kernel.vm, "/mnt", &self.done);
        kernel.vm.sh("umount /mnt").ok();
        kernel.stop();
    }
}

/// Pulls one of two cache devices out of the bus under a mounted filesystem and a load.
fn pulled_out(label: &str, lost: usize, message: &str) {
    let dir = Dir::new();
    let disks = [dir.disk("cache", 64 * MIB), dir.disk("second", 64 * MIB)];
    let both = [&disks[0], &disks[1]];
    let (lost, left) = (both[lost], both[1 - lost]);
    let mut world = Mounted::new(&dir.disk("backing", 256 * MIB));
    let mut guest = boot(label, &both, &world.backing);
    world.make(&mut guest, &both);
    world.begin_load(&mut guest);
    let node = guest.sh(&format!("disk_of {}", lost.name)).ok().line().replace("/dev/", "");
    guest.sh(&format!("pull {}", lost.name)).ok();
    guest.vm.wait_for("the loss of the set", &format!("grep '{message}' /tmp/up.err"));
    world.goes_on(&mut guest);
    world.end_load(&mut guest);
    guest.sh("umount /mnt && down").ok();

    // The other cache device has everything by itself.
    sh(&mut guest, &[left], "rm /tmp/up.err; up --set writeback_running=0");
    world.judge(&mut guest);
    let check = format!("down && ubcache check {} /dev/disk/backing", left.guest());
    guest.sh(&check).ok();
    guest.no_complaints_but_of(&[&node]);
    guest.vm.cut_power();
    world.judge_by_kernel(&format!("{label}-kernel"), left);
}

/// The primary is unplugged under a mounted ext4 and a load that verifies its data: no client sees an error, the filesystem
/// stays writable, everything is there while the secondary serves it, and the secondary alone has everything after a stop, also for
/// the kernel's bcache.
#[test]
fn the_primary_is_pulled_out_under_a_mounted_filesystem() {
    if skipped("the_primary_is_pulled_out_under_a_mounted_filesystem") {
        return;
    }
    pulled_out("groups-primary", 0, "has taken over: its dirty data is on one cache device only");
}

/// The secondary is unplugged under a mounted ext4 and a load that verifies its data: no client sees an error, and the primary has
/// everything, also for the kernel's bcache.
#[test]
fn the_secondary_is_pulled_out_under_a_mounted_filesystem() {
    if skipped("the_secondary_is_pulled_out_under_a_mounted_filesystem") {
        return;
    }
    pulled_out("groups-secondary", 1, "has no copy any more: its dirty data is on one cache device only");
}

/// The machine loses power under a load while both cache devices have the dirty data, and what their volatile caches had is lost. The
/// next start has both of them, the one after another power loss only the second one, which has everything that was flushed. A new
/// cache device takes the empty place, and after a third power loss it is the only one.
#[test]
fn power_is_lost_and_only_the_second_cache_device_comes_back() {
    if skipped("power_is_lost_and_only_the_second_cache_device_comes_back") {
        return;
    }
    let dir = Dir::new();
    let power = Power::new(37);
    let disk = |name: &str, mib| dir.disk(name, mib * MIB).volatile(&power);
    let caches = ["cache", "second", "third"].map(|name| disk(name, 64));
    let [first, second, third] = caches.each_ref();
    let mut world = Mounted::new(&disk("backing", 256));
    let backing = world.backing.clone();
    let both = [first, second];
    let state = || Set::new(&dir, second, &[&backing]).superblock(&backing)["backing"]["state_name"].clone();

    let mut guest = boot("groups-power", &both, &backing);
    world.make(&mut guest, &both);
    world.begin_load(&mut guest);
    world.cut_power(guest);
    assert_eq!(state(), "dirty");

    let mut guest = boot("groups-power-both", &both, &backing);
    world.serve_both(&mut guest, &both);
    world.judge(&mut guest);
    guest.vm.sh(&format!("mount {DEVICE} /mnt && rm /mnt/load*")).ok();
    world.begin_load(&mut guest);
    world.cut_power(guest);
    assert_eq!(state(), "dirty");

    let mut guest = boot("groups-power-second", &[second, third], &backing);
    sh(
        &mut guest,
        &[second],
        "up --set writeback_running=0 && grep 'has taken over its dirty data' /tmp/up.err",
    );
    world.judge(&mut guest);
    guest.sh("down && ubcache check /dev/disk/second /dev/disk/backing").ok();
    guest.sh("ubcache group add -C /dev/disk/second /dev/disk/third").ok();
    world.serve_both(&mut guest, &[second, third]);
    guest.vm.sh(&format!("mount {DEVICE} /mnt && rm /mnt/load*")).ok();
    world.begin_load(&mut guest);
    world.cut_power(guest);

    let mut guest = boot("groups-power-third", &[third], &backing);
    sh(&mut guest, &[third], "up && grep 'has taken over its dirty data' /tmp/up.err");
    world.judge(&mut guest);
    guest.sh("down && ubcache check /dev/disk/third /dev/disk/backing").ok();
    guest.cut_power();
}

/// A group on the host, which kernels in machines serve in turns with ubcache.
struct Group {
    dir: Dir,
    caches: [Disk; 2],
    backing: Disk,
    model: Model,
}

/// Keeps all dirty data in the caches, and all writes.
const DIRTY: &[&str] = &[
    "--set",
    "writeback_running=0",
    "--set",
    "congested_read_threshold_us=0",
    "--set",
    "congested_write_threshold_us=0",
];

impl Group {
    fn make() -> Group {
        let dir = Dir::new();
        let caches = ["a", "b"].map(|name| dir.disk(name, 64 * MIB));
        let backing = dir.disk("backing", 48 * MIB);
        let group = Group { caches, backing, model: Model::new(1, 48 * MIB / 512 - 16), dir };
        group.alone(0).make(&[&["-C", group.caches[1].host()], USUAL].concat());
        group
    }

    /// One of the cache devices and the backing device.
    fn alone(&self, cache: usize) -> Set<'_> {
        Set::new(&self.dir, &self.caches[cache], &[&self.backing])
    }

    /// Serves both, and waits until both have the dirty data.
    #[track_caller]
    fn up_with_both(&self) -> Up {
        let up = self.alone(0).up(1, &[&["-C", self.caches[1].host()], DIRTY].concat());
        wait_until("a copy", || up.said().contains(HAS_COPY));
        up
    }

    /// What `group show` says of both.
    #[track_caller]
    fn show(&self) -> Said {
        let [a, b] = self.caches.each_ref().map(Disk::host);
        ubcache(&["group", "show", "-C", a, "-C", b, "-B", self.backing.host()])
    }

    /// We find everything, run a load, and find everything again. Returns what the server has said.
    #[track_caller]
    fn our_turn(&mut self, up: Up, seed: u64) -> String {
        let plan = self.model.plan(seed);
        up.judge(0, &mut self.model);
        up.load(0, &plan, &mut self.model);
        up.judge(0, &mut self.model);
        up.stop()
    }

    /// Both serve, and both have all dirty data in the end.
    #[track_caller]
    fn turn_of_both(&mut self, seed: u64) {
        let up = self.up_with_both();
        assert!(!up.said().contains("has taken over"), "{}", up.said());
        let said = self.our_turn(up, seed);
        let shown = self.show();
        assert_eq!(shown.code, 0, "{shown}\nafter:\n{said}");
    }

    /// A kernel finds everything with one of the cache devices, runs a load, and stops with dirty data. If `writes_back`, it has
    /// written all older dirty data back before.
    #[track_caller]
    fn kernels_turn(&mut self, label: &str, cache: usize, seed: u64, writes_back: bool) {
        let disks = [&self.caches[cache], &self.backing];
        let mut kernel = Kernel::boot(label, &disks);
        kernel.register(&disks);
        assert_eq!(kernel.get(&self.backing, "state"), "dirty");
        kernel.judge(&self.backing, &mut self.model);
        if writes_back {
            kernel.write_back(&self.backing);
        }
        kernel.disable_writeback(&self.backing);
        let plan = self.model.plan(seed);
        kernel.load(&self.backing, &plan, &mut self.model);
        kernel.judge(&self.backing, &mut self.model);
        assert_eq!(kernel.get(&self.backing, "state"), "dirty");
        kernel.stop();
        self.alone(cache).check();
        let extracted = self.alone(cache).extract(0, self.model.tag);
        self.model.judge(&extracted, "extract");
    }

    /// The kernel has used the set of the device alone, so the other cache device has an older state. With both there is the data of
    /// the kernel, and a new copy is made.
    #[track_caller]
    fn is_copied_again(&mut self, seed: u64) {
        self.show().refused(&["of dirty data has one copy only"]);
        self.turn_of_both(seed);
    }

    /// One cache device is gone: the other one takes over and has everything, and so it has for the kernel.
    #[track_caller]
    fn is_taken_over(&mut self, label: &str, left: usize, seed: u64) {
        let up = self.alone(left).up(1, DIRTY);
        assert!(up.said().contains("has taken over its dirty data"), "{}", up.said());
        self.our_turn(up, seed);
        self.kernels_turn(label, left, seed + 1, false);
    }
}

/// After a clean stop of a group the kernel's bcache serves the primary with everything. Its writes leave the state dirty, so the
/// superblock of the backing device does not show them; even so the copy on the other cache device is not used again. The next start
/// makes a new one, which has everything when the first cache device is gone, for ubcache and for the kernel. So it is when the first
/// one comes back, and the other one goes.
#[test]
fn a_kernel_writes_to_one_cache_device_and_leaves_it_dirty() {
    if skipped("a_kernel_writes_to_one_cache_device_and_leaves_it_dirty") {
        return;
    }
    let mut group = Group::make();
    group.turn_of_both(1);
    group.kernels_turn("groups-dirty", 0, 2, false);
    group.is_copied_again(3);
    group.is_taken_over("groups-dirty-second", 1, 4);
    group.is_copied_again(6);
    group.is_taken_over("groups-dirty-first", 0, 7);
}

/// After a clean stop of a group the kernel's bcache serves the primary, writes everything back, and has other dirty data in the end.
/// The other cache device alone is refused from then on, and both of them have the data of the kernel.
#[test]
fn a_kernel_writes_the_dirty_data_back() {
    if skipped("a_kernel_writes_the_dirty_data_back") {
        return;
    }
    let mut group = Group::make();
    group.turn_of_both(1);
    group.kernels_turn("groups-back", 0, 2, true);
    let [b, backing] = [group.caches[1].host(), group.backing.host()];
    let socket = group.dir.path("refused");
    let export = format!("--export=nbd={}", socket.display());
    ubcache(&["up", "-C", b, "-B", backing, &export]).refused(&["attached to another cache set"]);
    group.is_copied_again(3);
    group.is_taken_over("groups-back-second", 1, 4);
}

/// A group that is stopped after a load has its dirty data in both sets. A task of the set that was stopped first found its journal
/// ended, which counted as a loss of that set, so the other one took over.
#[test]
fn a_clean_stop_is_no_loss_of_a_set() {
    if skipped("a_clean_stop_is_no_loss_of_a_set") {
        return;
    }
    for seed in 0..8 {
        Group::make().turn_of_both(seed);
    }
}
