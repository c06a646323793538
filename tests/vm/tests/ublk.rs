//! Volumes as block devices of the kernel: limits, data, filesystems, the crash of the server, upgrades, refusals.
//!
//! ubcache runs in the guest, on a cache and backing devices that are virtio disks.

use ubcache_vm::{Dir, Disk, Guest, Vm, skipped};

const MIB: u64 = 1 << 20;

/// A load that verifies what it has written, again and again.
const FIO: &str = "fio --name=load --ioengine=libaio --direct=1 --rw=randrw --bs=4k --size=24m --iodepth=16 \
     --verify=crc32c --verify_backlog=64 --time_based --fallocate=none --output=/tmp/fio.out";

/// A machine with a new set of a 64 MiB cache and a backing device.
#[track_caller]
fn boot(label: &str, dir: &Dir, backing_mib: u64, tools: &[&str]) -> Guest {
    boot_on(label, &[dir.disk("cache", 64 * MIB), dir.disk("backing", backing_mib * MIB)], tools)
}

#[track_caller]
fn boot_on(label: &str, [cache, backing]: &[Disk; 2], tools: &[&str]) -> Guest {
    let mut guest = Guest::boot(Vm::build(label).tools(tools), cache, backing);
    guest.sh("ubcache make $devices --bucket 64k --writeback").ok();
    guest
}

#[test]
fn a_device_is_like_its_volume_and_goes_without_a_trace() {
    if skipped("a_device_is_like_its_volume_and_goes_without_a_trace") {
        return;
    }
    let dir = Dir::new();
    let mut guest = boot("ublk-limits", &dir, 256, &[]);
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
        // The buffers of two queues take a sixteenth of the memory at most: 768 MiB here.
        "nr_requests 31",
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
        guest.sh(&format!("up {start}")).ok();
        guest.sh("head -c 3000000 /dev/ublkb[07] | cmp - /tmp/data").ok();
    }
    guest.sh("down").ok();
    guest.no_complaints();
}

/// What a server with a pipe for commands has counted of its only volume.
#[track_caller]
fn statistics(guest: &mut Guest) -> serde_json::Value {
    let lines = "grep -c flushes /tmp/up.out";
    guest
        .sh(&format!(
            "before=$({lines}); echo stats >/tmp/ask; until [ $({lines}) != $before ]; do usleep 10000; done"
        ))
        .ok();
    let said = guest.sh("tail -n 1 /tmp/up.out").ok();
    let stats: serde_json::Value =
        serde_json::from_str(said.line()).unwrap_or_else(|e| panic!("{e}: {said}"));
    stats["volumes"][0].clone()
}

/// Each of 24 devices of one process has its own data, also after a crash of the process and after a clean start.
#[test]
fn twenty_four_volumes_have_a_device_each() {
    if skipped("twenty_four_volumes_have_a_device_each") {
        return;
    }
    const VOLUMES: u64 = 24;
    let dir = Dir::new();
    // One disk holds all backing devices, as files of a file system.
    let builder = Vm::build("ublk-many").tools(&["mkfs.ext4"]).memory_mib(1024);
    let mut guest = Guest::boot(builder, &dir.disk("cache", 64 * MIB), &dir.disk("backing", 512 * MIB));
    let each = |script: &str| format!("for n in $(seq 0 {}); do {script} || exit 1; done", VOLUMES - 1);
    guest
        .sh(&format!(
            "mkfs.ext4 -q /dev/disk/backing && mkdir /tmp/disks && mount /dev/disk/backing /tmp/disks && {} && \
             ubcache make -C /dev/disk/cache $(for n in $(seq 0 {}); do echo -B /tmp/disks/$n; done) --bucket 64k --writeback",
            each("truncate -s 16M /tmp/disks/$n"),
            VOLUMES - 1
        ))
        .ok();
    let up = format!(
        "devices=\"-C /dev/disk/cache $(for n in $(seq 0 {}); do echo -B /tmp/disks/$n; done)\"; up",
        VOLUMES - 1
    );
    guest.sh(&up).ok();
    guest.sh(&format!("[ $(ls -d /sys/block/ublkb* | wc -l) = {VOLUMES} ]")).ok();
    // The same place of each device, with data of its own; all at the same time.
    let data = "{ echo volume $n; head -c 1000000 /tmp/seed; }";
    guest
        .sh(&format!(
            "head -c 1000000 /dev/urandom >/tmp/seed; pids=; for n in $(seq 0 {}); do \
                 {data} | dd of=/dev/ublkb$n bs=64k iflag=fullblock conv=fsync & pids=\"$pids $!\"; done; \
             for pid in $pids; do wait $pid || exit 1; done",
            VOLUMES - 1
        ))
        .ok();
    let verify = each(&format!("{data} | cmp -n 1000000 - /dev/ublkb$n"));
    let drop_caches = "echo 3 >/proc/sys/vm/drop_caches";
    guest.sh(&format!("{drop_caches}; {verify}")).ok();
    guest.sh("crash && gone").ok();
    guest.sh(&format!("{up}; {drop_caches}; {verify}")).ok();
    guest.sh("down && [ -z \"$(ls -d /sys/block/ublkb* 2>/dev/null)\" ]").ok();
    guest.sh(&format!("{up}; {drop_caches}; {verify}; down")).ok();
    guest
        .sh(&format!(
            "ubcache check /dev/disk/cache $(for n in $(seq 0 {}); do echo /tmp/disks/$n; done)",
            VOLUMES - 1
        ))
        .ok();
    guest.no_complaints();
}

#[test]
fn requests_of_every_kind() {
    if skipped("requests_of_every_kind") {
        return;
    }
    let dir = Dir::new();
    let mut guest = boot("ublk-requests", &dir, 256, &["fio", "blkdiscard", "mkfs.ext4"]);
    guest.sh("mkfifo /tmp/ask; sleep 10000 >/tmp/ask & input=/tmp/ask; up --stdin --json").ok();
    guest
        .sh(&format!(
            "{FIO} --filename=/dev/ublkb0 --runtime=10 --rw=randwrite --numjobs=2 --offset_increment=24m"
        ))
        .ok();
    guest.sh(&format!("{FIO} --filename=/dev/ublkb0 --runtime=5 --bsrange=512-600k --fdatasync=8")).ok();
    // Zeros, with and without taking up space; a discard; a write that is durable by itself; a flush.
    guest
        .sh("tr '\\0' x </dev/zero | dd of=/dev/ublkb0 bs=1M count=8 oflag=direct iflag=fullblock && \
             /usr/bin/blkdiscard -z -o 1048576 -l 3145728 /dev/ublkb0 && \
             /usr/bin/blkdiscard -o 6291456 -l 1048576 /dev/ublkb0 && \
             head -c 4096 /dev/urandom >/tmp/block && \
             fio --name=f --filename=/dev/ublkb0 --rw=write --direct=1 --sync=dsync --bs=4k --offset=8m --size=64k \
             --output=/tmp/fio.out && dd if=/tmp/block of=/dev/ublkb0 bs=4096 seek=512 conv=fsync && \
             dd if=/dev/ublkb0 bs=1M skip=1 count=1 iflag=direct | cmp -n 1048576 - /dev/zero && \
             dd if=/dev/ublkb0 bs=4096 skip=512 count=1 iflag=direct | cmp - /tmp/block && \
             dd if=/dev/ublkb0 bs=1M count=1 iflag=direct | tr -d x | wc -c | grep -qx 0")
        .ok();
    let volume = statistics(&mut guest);
    for counter in ["flushes", "reads", "writes", "cache_hits"] {
        assert!(volume[counter].as_u64().unwrap() > 0, "{counter}: {volume}");
    }
    assert_eq!(volume["metadata_requests"], 0, "there was no file system");

    // One comes, and what it reads and writes of its own has the kernel's mark.
    guest
        .sh("mkfs.ext4 -q /dev/ublkb0 && mount /dev/ublkb0 /mnt && mkdir -p /mnt/a/b/c /mnt/d && cp /tmp/block /mnt/a/b/c && \
             umount /mnt && mount /dev/ublkb0 /mnt && cmp /tmp/block /mnt/a/b/c/block && umount /mnt")
        .ok();
    let volume = statistics(&mut guest);
    let [marked, all] = ["metadata_requests", "reads"].map(|c| volume[c].as_u64().unwrap());
    assert!(marked > 0 && marked < all + volume["writes"].as_u64().unwrap(), "{volume}");
    guest.sh("down && ubcache check /dev/disk/cache /dev/disk/backing").ok();
    guest.no_complaints();
}

/// A discard once allocated the whole file below it, over FUSE and over NBD.
#[test]
fn discards_free_space_in_the_file_of_the_backing_device() {
    use std::os::unix::fs::MetadataExt;
    if skipped("discards_free_space_in_the_file_of_the_backing_device") {
        return;
    }
    let dir = Dir::new();
    let disks = [dir.disk("cache", 64 * MIB), dir.disk("backing", 256 * MIB)];
    let mut guest = boot_on("ublk-discards", &disks, &["blkdiscard"]);
    let allocated = || std::fs::metadata(&disks[1].path).expect("our file").blocks() * 512;
    // Every write reaches the backing device.
    guest.sh("up --set cache_mode=writethrough").ok();
    let empty = allocated();
    let rest = 64 * 512;
    guest.sh("/usr/bin/blkdiscard /dev/ublkb0").ok();
    assert!(allocated() <= empty + rest, "{} bytes after a discard of all, {empty} before", allocated());
    guest
        .sh("tr '\\0' x </dev/zero | dd of=/dev/ublkb0 bs=1M count=16 seek=1 oflag=direct iflag=fullblock conv=fsync")
        .ok();
    assert!(allocated() >= empty + 16 * MIB, "{} bytes with data, {empty} before", allocated());
    guest.sh("/usr/bin/blkdiscard -o 1048576 -l 16777216 /dev/ublkb0").ok();
    assert!(allocated() <= empty + rest, "{} bytes after a discard of the data, {empty} before", allocated());
    guest.sh("down && ubcache check /dev/disk/cache /dev/disk/backing").ok();
    guest.no_complaints();
}

/// The kernel drops flushes of a device without a write cache, so ubcache does not send them. An operator may bring such a cache
/// back while the device is in use: what is acknowledged from then on must be flushed again.
#[test]
fn flushes_reach_a_device_while_it_has_a_write_cache() {
    if skipped("flushes_reach_a_device_while_it_has_a_write_cache") {
        return;
    }
    const SYNCS: u64 = 10;
    let dir = Dir::new();
    let mut guest = boot("ublk-flushes", &dir, 256, &[]);
    guest.sh("up").ok();
    for (says, flushed) in [("write back", true), ("write through", false), ("write back", true)] {
        let said = guest
            .sh(&format!(
                "cd /sys/block/$(basename $(readlink -f /dev/disk/cache)); echo {says} >queue/write_cache; \
                 before=$(awk '{{ print $16 }}' stat); for n in $(seq {SYNCS}); do \
                 dd if=/dev/urandom of=/dev/ublkb0 bs=4k count=1 seek=$n oflag=direct conv=fsync 2>/dev/null || exit 1; done; \
                 echo $(($(awk '{{ print $16 }}' stat) - before))"
            ))
            .ok();
        let flushes: u64 = said.line().parse().unwrap_or_else(|e| panic!("{e}: {said}"));
        let as_expected = if flushed { flushes >= SYNCS } else { flushes == 0 };
        assert!(as_expected, "{says}: {flushes} flushes for {SYNCS} syncs");
    }
    guest.sh("down && ubcache check /dev/disk/cache /dev/disk/backing").ok();
    guest.no_complaints();
}

#[test]
fn ext4_is_made_mounted_filled_and_clean() {
    if skipped("ext4_is_made_mounted_filled_and_clean") {
        return;
    }
    let dir = Dir::new();
    let mut guest = boot("ublk-ext4", &dir, 256, &["mkfs.ext4", "e2fsck"]);
    guest.sh("up && mkfs.ext4 -q /dev/ublkb0 && mount -o discard /dev/ublkb0 /mnt").ok();
    guest
        .sh("mkdir /mnt/a && cp -r /bin /lib /mnt/a 2>/dev/null; sync; rm -rf /mnt/a/lib && \
             head -c 40000000 /dev/urandom >/mnt/large && sync && cd /mnt && find . -type f | sort | xargs md5sum >/tmp/sums")
        .ok();
    // In use: a stop waits until it is not.
    guest.sh("kill -TERM $(cat /tmp/up.pid)").ok();
    guest.vm.wait_for("a message", "grep -q 'ublkb0 is mounted at /mnt: waiting' /tmp/up.err");
    guest.sh("md5sum -c /tmp/sums >/dev/null 2>&1 || (cd /mnt && md5sum -c /tmp/sums | grep -v OK); umount /mnt && gone").ok();
    guest.sh("up && e2fsck -fn /dev/ublkb0 && mount /dev/ublkb0 /mnt && cd /mnt && md5sum -c /tmp/sums >/dev/null && cd / && umount /mnt && down").ok();
    guest.sh("ubcache check /dev/disk/cache /dev/disk/backing").ok();
    guest.no_complaints();
    // By force: the device goes under the mounted filesystem.
    guest.sh("up && mount /dev/ublkb0 /mnt && kill -TERM $(cat /tmp/up.pid)").ok();
    guest.vm.wait_for("a message", "[ $(grep -c 'ublkb0 is mounted at /mnt: waiting' /tmp/up.err) = 2 ]");
    guest.sh("kill -TERM $(cat /tmp/up.pid) && gone && [ ! -e /dev/ublkb0 ] && [ -z \"$(ls /sys/class/ublk-char)\" ]").ok();
    guest.sh("umount /mnt; up && e2fsck -fp /dev/ublkb0; e2fsck -fn /dev/ublkb0 && down").ok();
}

/// The longest time from the start of the new process to the first answer to a client that waits. It is far above what the
/// program needs, because an emulated machine is many times slower.
const RESUMED_WITHIN_US: u32 = 20_000_000;

#[test]
fn a_crash_of_the_server_is_a_pause() {
    if skipped("a_crash_of_the_server_is_a_pause") {
        return;
    }
    let dir = Dir::new();
    let mut guest = boot("ublk-crash", &dir, 256, &["mkfs.ext4", "e2fsck", "fio"]);
    guest.sh("up && mkfs.ext4 -q /dev/ublkb0 && mount /dev/ublkb0 /mnt").ok();
    guest
        .sh(&format!(
            "({FIO} --directory=/mnt --runtime=3600 --numjobs=2; echo $? >/tmp/fio.code) >/tmp/fio.log 2>&1 &"
        ))
        .ok();
    for _ in 0..5 {
        guest.sh("moves").ok();
        let said = guest.sh("crash; gone; resume").ok();
        let numbers: Vec<u32> = said.line().split(' ').filter_map(|w| w.parse().ok()).collect();
        let [ready, moves] = numbers[..] else { panic!("{said}") };
        println!("ready after {ready} us, the first request is answered after {moves} us");
        assert!(moves < RESUMED_WITHIN_US, "{moves} us");
        let said = guest.sh("tail -n 5 /tmp/up.err").ok();
        assert!(said.out.contains("/dev/ublkb0: recovered"), "{said}");
    }
    // Killed again while it recovers, at any moment.
    for pause_ms in [0, 20, 60, 120, 200, 300, 500] {
        guest
            .sh(&format!(
                "crash; ubcache up $devices --export ublk >/tmp/up.out 2>>/tmp/up.err & pid=$!; usleep {pause_ms}000; \
                 kill -9 $pid; wait $pid; true"
            ))
            .ok();
        guest.sh("up && moves").ok();
    }
    guest.sh("each && end_fio").ok();
    guest.sh("umount /mnt && e2fsck -fn /dev/ublkb0 && down && ubcache check /dev/disk/cache /dev/disk/backing").ok();
    guest.no_complaints();
}

/// The device was identified by the set of its volume: a process that served the disk without its set, or with it again, did not
/// recover the device of the process before it.
#[test]
fn a_device_is_recovered_with_and_without_its_set() {
    if skipped("a_device_is_recovered_with_and_without_its_set") {
        return;
    }
    let dir = Dir::new();
    let mut guest = boot("ublk-detach", &dir, 64, &["mkfs.ext4"]);
    let alone = "devices='--without-cache -B /dev/disk/backing'; up";
    let crash = |guest: &mut Guest, next: &str| {
        guest
            .sh(&format!("crash && gone && {next} && grep -q 'bcache0 ready: /dev/ublkb0$' /tmp/up.out"))
            .ok();
        guest
            .sh("[ $(ls -d /sys/block/ublkb* | wc -l) = 1 ] && echo 3 >/proc/sys/vm/drop_caches && md5sum -c /tmp/sum && \
                 echo new >>/mnt/new && sync")
            .ok();
    };
    guest
        .sh(&format!(
            "{alone} && mkfs.ext4 -q /dev/ublkb0 && mount /dev/ublkb0 /mnt && head -c 5000000 /dev/urandom >/mnt/kept && sync && \
             md5sum /mnt/kept >/tmp/sum"
        ))
        .ok();
    crash(&mut guest, "mkfifo /tmp/ask && { sleep 10000 >/tmp/ask & } && input=/tmp/ask && up --stdin");
    guest.sh("echo detach bcache0 >/tmp/ask").ok();
    guest.vm.wait_for("a detached disk", "ubcache super /dev/disk/backing | grep -q 'detached'");
    crash(&mut guest, alone);
    crash(&mut guest, "up");
    let said = guest.sh("grep -c 'ublkb0: recovered' /tmp/up.err").ok();
    assert_eq!(said.line(), "3", "{said}");
    guest.sh("umount /mnt && down && ubcache check /dev/disk/cache /dev/disk/backing").ok();
    guest.no_complaints();
}

#[test]
fn a_crash_with_every_tag_under_way_is_noticed_at_once() {
    if skipped("a_crash_with_every_tag_under_way_is_noticed_at_once") {
        return;
    }
    let dir = Dir::new();
    let disks = [dir.disk("cache", 64 * MIB), dir.disk("backing", 256 * MIB).slow(150)];
    let mut guest = boot_on("ublk-full", &disks, &["fio"]);
    // Reads of what is not cached: every tag waits for the slow disk.
    guest.sh("up --ublk-depth 8 --ublk-queues 1").ok();
    guest
        .sh("(fio --name=load --filename=/dev/ublkb0 --ioengine=libaio --direct=1 --rw=randread --bs=4k --iodepth=64 \
             --time_based --runtime=3600 --output=/tmp/fio.out; echo $? >/tmp/fio.code) >/tmp/fio.log 2>&1 &")
        .ok();
    guest.vm.wait_for("a full queue", "[ $(awk '{ print $1 + $2 }' /sys/block/ublkb0/inflight) -ge 7 ]");
    let said = guest.sh("crash; from=$(now_ms); up && echo $(($(now_ms) - from))").ok();
    println!("ready after {} ms", said.line());
    assert!(said.line().parse::<u64>().unwrap() < 20_000, "{said}");
    guest.sh("end_fio && down").ok();
    guest.no_complaints();
}

#[test]
fn another_process_takes_over_under_a_mounted_filesystem() {
    if skipped("another_process_takes_over_under_a_mounted_filesystem") {
        return;
    }
    let dir = Dir::new();
    let mut guest = boot("ublk-takeover", &dir, 256, &["mkfs.ext4", "e2fsck", "fio"]);
    // No earlier process to take over from: it starts as usual.
    guest.sh("up --takeover && grep -q 'nothing to take over' /tmp/up.err").ok();
    guest.sh("mkfs.ext4 -q /dev/ublkb0 && mount /dev/ublkb0 /mnt").ok();
    guest
        .sh(&format!("({FIO} --directory=/mnt --runtime=3600; echo $? >/tmp/fio.code) >/tmp/fio.log 2>&1 &"))
        .ok();
    for _ in 0..3 {
        guest.sh("moves").ok();
        let said = guest
            .sh("old=$(cat /tmp/up.pid); from=$(now_ms); up --takeover && [ $old != $(cat /tmp/up.pid) ] && \
                 echo ready after $(($(now_ms) - from)) ms && moves && ! kill -0 $old 2>/dev/null")
            .ok();
        println!("{}", said.out.replace('\n', ", "));
    }
    let said = guest.sh("cat /tmp/up.err").ok();
    assert!(
        said.out.contains("another process takes over") && said.out.contains("/dev/ublkb0: recovered"),
        "{said}"
    );
    guest.sh("each && end_fio").ok();
    guest.sh("umount /mnt && e2fsck -fn /dev/ublkb0 && down && ubcache check /dev/disk/cache /dev/disk/backing").ok();
    guest.no_complaints();
}

#[test]
fn impossible_options_are_refused_and_change_nothing() {
    if skipped("impossible_options_are_refused_and_change_nothing") {
        return;
    }
    let dir = Dir::new();
    let disks = [dir.disk("cache", 64 * MIB), dir.disk("backing", 64 * MIB)];
    let mut guest = boot_on("ublk-refused", &disks, &["setpriv"]);
    guest.sh("sync").ok();
    let contents = || disks.each_ref().map(|d| std::fs::read(&d.path).unwrap());
    let before = contents();
    guest.sh("ubcache up $devices --export ublk --ublk-depth 4097").refused(&["4097", "8..=4096"]);
    guest.sh("ubcache up $devices --export ublk --ublk-queues 0").refused(&["--ublk-queues"]);
    guest.sh("ubcache up $devices --export ublk --export ublk=7").refused(&["one"]);
    guest.sh("ubcache up $devices --export fuse=/mnt --takeover").refused(&["--export ublk"]);
    // No permission, and then no driver at all.
    guest
        .sh("/usr/bin/setpriv --reuid 65534 --regid 65534 --clear-groups ubcache up $devices --export ublk")
        .refused(&["permission denied", "run as root"]);
    guest.sh("rmmod ublk_drv && mv /lib/modules /lib/away").ok();
    guest
        .sh("ubcache up $devices --export ublk")
        .refused(&["/dev/ublk-control is missing", "modprobe ublk_drv"]);
    assert!(contents() == before, "something was written");
    guest
        .sh("up --export auto && grep 'export: NBD' /tmp/up.err | grep 'ublk-control is missing' && down")
        .ok();
    // With FUSE and loop devices there can be block devices all the same.
    guest
        .sh(
            "mv /lib/away /lib/modules && mv $(find /lib/modules -name ublk_drv.ko) /lib && modprobe loop && \
             up --export auto && grep 'export: FUSE and loop devices' /tmp/up.err | \
             grep 'ublk-control is missing' && grep -q 'ready: /dev/loop0' /tmp/up.out && \
             dd if=/dev/loop0 of=/dev/null bs=64k count=4 && down",
        )
        .ok();
    // The driver is loaded when it is needed.
    guest
        .sh("mv /lib/ublk_drv.ko $(find /lib/modules -name block -path '*drivers*') && up --export auto && \
             grep -q 'export: ublk' /tmp/up.err")
        .ok();
    // Another set wants the same number.
    guest
        .sh("truncate -s 70M /tmp/c2 && truncate -s 64M /tmp/b2 && ubcache make -C /tmp/c2 -B /tmp/b2 --bucket 64k && \
             ubcache up -C /tmp/c2 -B /tmp/b2 --export ublk=0")
        .refused(&["/dev/ublkb0 is in use by process", "choose another number"]);
    guest.sh("ubcache check /tmp/c2 /tmp/b2").ok();
    // Another export of the same command cannot be had: the device goes again.
    guest
        .sh("ubcache up -C /tmp/c2 -B /tmp/b2 --export ublk=9 --export nbd=/no/such/dir/socket")
        .refused(&["/no/such/dir"]);
    guest.sh("[ ! -e /dev/ublkb9 ] && [ ! -e /dev/ublkc9 ] && [ -e /dev/ublkb0 ]").ok();
    // The same set is served already.
    guest.sh("ubcache up $devices --export ublk").refused(&["in use"]);
    guest.sh("down").ok();
    guest.no_complaints();
}

#[test]
fn users_without_privileges_have_devices_too() {
    if skipped("users_without_privileges_have_devices_too") {
        return;
    }
    let dir = Dir::new();
    let mut guest = boot("ublk-user", &dir, 64, &["setpriv"]);
    guest
        .sh("mkdir /tmp/user && cd /tmp/user && truncate -s 70M c && truncate -s 64M b && \
             ubcache make -C c -B b --bucket 64k --writeback && chown -R 65534 /tmp/user")
        .ok();
    // As long as they may not use the driver, they get the reason, and a socket if they leave the choice.
    let user = "cd /tmp/user; export XDG_RUNTIME_DIR=/tmp/user
        as_user() { /usr/bin/setpriv --reuid 65534 --regid 65534 --clear-groups \"$@\"; }";
    guest
        .sh(&format!("{user}; as_user ubcache up -C c -B b --export ublk"))
        .refused(&["permission denied", "run as root"]);
    guest
        .sh(&format!(
            "{user}; (as_user ubcache up -C c -B b >/tmp/up.out 2>/tmp/up.err) & usleep 10000
            pid() {{ pidof ubcache >/tmp/up.pid; }}; until pid; do usleep 10000; done
            ready && grep 'export: NBD' /tmp/up.err | grep 'permission denied' && down"
        ))
        .ok();
    // What a rule of udev would do: the nodes belong to the user that made the device.
    guest
        .sh("chmod 666 /dev/ublk-control; (while true; do chown 65534 /dev/ublkc* /dev/ublkb* 2>/dev/null; usleep 5000; done) &")
        .ok();
    guest
        .sh(&format!(
            "{user}; (as_user ubcache up -C c -B b --export ublk >/tmp/up.out 2>/tmp/up.err) & usleep 10000
            pid() {{ pidof ubcache >/tmp/up.pid; }}; until pid; do usleep 10000; done
            ready"
        ))
        .ok();
    guest
        .sh("head -c 1000000 /dev/urandom >/tmp/data && dd if=/tmp/data of=/dev/ublkb0 bs=64k conv=fsync && \
             echo 3 >/proc/sys/vm/drop_caches && head -c 1000000 /dev/ublkb0 | cmp - /tmp/data")
        .ok();
    guest.sh("down && [ ! -e /dev/ublkb0 ] && ubcache check /tmp/user/c /tmp/user/b").ok();
    guest.no_complaints();
}

/// Memory runs out while swap is on the volume: to get memory, the kernel writes pages to the very process that asks for it.
/// A thread that waits for that waits for ever.
#[test]
fn swap_on_a_volume_while_memory_is_short() {
    if skipped("swap_on_a_volume_while_memory_is_short") {
        return;
    }
    const NOIO: &str = "524288"; // PF_MEMALLOC_NOIO, which PR_SET_IO_FLUSHER sets
    let dir = Dir::new();
    let mut guest = boot("ublk-swap", &dir, 1536, &["stress-ng"]);
    guest.sh("up").ok();
    // Those that serve are marked, their rings' workers too, and what they touch stays in memory.
    let marked = format!(
        "for task in /proc/$(cat /tmp/up.pid)/task/*; do \
             case $(cat $task/comm) in ubcache-log|ubcache-heap|ubcache-stdin) continue;; esac; \
             flags=$(sed 's/.*) //' $task/stat | cut -d' ' -f7); \
             [ $((flags & {NOIO})) -ne 0 ] || {{ echo $(cat $task/comm) $flags >&2; exit 1; }}; \
         done; \
         [ $(awk '/^VmLck/ {{ print $2 }}' /proc/$(cat /tmp/up.pid)/status) -gt 1000 ]"
    );
    guest.sh(&marked).ok();
    // None is made later, when there may be no memory for it.
    let threads = |guest: &mut Guest| {
        let said =
            guest.sh("cd /proc/$(cat /tmp/up.pid)/task && for n in *; do echo $n $(cat $n/comm); done").ok();
        said.out.lines().map(str::to_owned).collect::<Vec<_>>()
    };
    let threads_before = threads(&mut guest);
    // Of all threads but the one that fills the heap up, so that the others find their memory there.
    let faults = |guest: &mut Guest| -> u64 {
        let said = guest
            .sh("cd /proc/$(cat /tmp/up.pid)/task && for n in *; do \
                 [ $(cat $n/comm) = ubcache-heap ] || sed 's/.*) //' $n/stat; done | \
                 awk '{ n += $8 } END { print n }'")
            .ok();
        said.line().trim().parse().unwrap_or_else(|e| panic!("{e}: {said}"))
    };
    let before = faults(&mut guest);
    guest.sh("mkswap /dev/ublkb0 && swapon /dev/ublkb0 && echo 100 >/proc/sys/vm/swappiness").ok();
    // Memory of processes, and files in memory: a third of both has to go to the volume. The oldest are read again.
    guest
        .sh("stress-ng --vm 2 --vm-bytes 900M --vm-keep --vm-method rand-set --verify --timeout 20s >/tmp/stress 2>&1 || \
             { cat /tmp/stress /proc/meminfo >&2; exit 1; }")
        .ok();
    guest
        .sh("mkdir /tmp/files && mount -t tmpfs -o size=2g files /tmp/files && cd /tmp/files && \
             head -c 33554432 /dev/urandom >/tmp/one && \
             copies() { for n in 1 2 3 4 5 6 7 8 9 10 11 12; do cat /tmp/one >$1.$n || exit 1; done; } && \
             { copies a & copies b && wait $! && cmp a.1 b.1 && cmp a.12 b.12; } && cd / && umount /tmp/files")
        .ok();
    let faults = faults(&mut guest) - before;
    let said = guest.sh("awk '/^pswp(in|out)/ { print $2 }' /proc/vmstat").ok();
    let pages: Vec<u64> = said.out.lines().filter_map(|line| line.parse().ok()).collect();
    assert!(
        matches!(pages[..], [read, written] if read > 10_000 && written > 50_000),
        "swapped in and out: {said}"
    );
    // The index grows by what was written, and finds that memory in the reserve.
    assert!(faults < 1000, "{faults} page faults; swapped in and out: {said}");
    let mut new = threads(&mut guest);
    new.retain(|thread| !threads_before.contains(thread));
    assert!(new.is_empty(), "{new:?} beside {threads_before:?}");
    guest.sh("swapoff /dev/ublkb0 && down && ubcache check /dev/disk/cache /dev/disk/backing").ok();
    guest.no_complaints();
}
