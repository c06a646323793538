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
    export="--export ublk"
    case "$*" in *--export*) export= ;; esac
    ubcache up $devices $export --set sequential_cutoff=0 "$@" <${input:-/dev/null} >/tmp/up.out 2>>/tmp/up.err &
    echo $! >/tmp/up.pid
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
"#;

/// A load that verifies what it has written, again and again.
const FIO: &str = "fio --name=load --ioengine=libaio --direct=1 --rw=randrw --bs=4k --size=24m --iodepth=16 \
     --verify=crc32c --verify_backlog=64 --time_based --fallocate=none --output=/tmp/fio.out";

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
        std::fs::write(dir.path("library"), LIBRARY).expect("room for a file");
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
        guest.sh(&format!("up {start}")).ok();
        guest.sh("head -c 3000000 /dev/ublkb[07] | cmp - /tmp/data").ok();
    }
    guest.sh("down").ok();
    guest.no_complaints();
}

#[test]
fn requests_of_every_kind() {
    if skipped("requests_of_every_kind") {
        return;
    }
    let dir = Dir::new();
    let mut guest = Guest::boot("ublk-requests", &dir, 256, &["fio", "blkdiscard"]);
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
    guest.sh("echo stats >/tmp/ask; until grep -q flushes /tmp/up.out; do usleep 10000; done").ok();
    let said = guest.sh("tail -n 1 /tmp/up.out").ok();
    let stats: serde_json::Value = serde_json::from_str(said.line()).unwrap();
    let volume = &stats["volumes"][0];
    for counter in ["flushes", "reads", "writes", "cache_hits"] {
        assert!(volume[counter].as_u64().unwrap() > 0, "{counter}: {stats}");
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
    let mut guest = Guest::boot("ublk-ext4", &dir, 256, &["mkfs.ext4", "e2fsck"]);
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

#[test]
fn the_death_of_the_server_is_a_pause() {
    if skipped("the_death_of_the_server_is_a_pause") {
        return;
    }
    let dir = Dir::new();
    let mut guest = Guest::boot("ublk-death", &dir, 256, &["mkfs.ext4", "e2fsck", "fio"]);
    guest.sh("up && mkfs.ext4 -q /dev/ublkb0 && mount /dev/ublkb0 /mnt").ok();
    guest
        .sh(&format!(
            "({FIO} --directory=/mnt --runtime=3600 --numjobs=2; echo $? >/tmp/fio.code) >/tmp/fio.log 2>&1 &"
        ))
        .ok();
    for round in 0..3 {
        guest.sh("moves").ok();
        let said =
            guest.sh("crash; from=$(now_ms); up && echo ready after $(($(now_ms) - from)) ms && moves").ok();
        println!("round {round}: {}", said.out.replace('\n', ", "));
        // A second is the aim; an emulated machine beside others gets five.
        let moves = said.out.split("moves after ").nth(1).and_then(|t| t.split(' ').next()).unwrap();
        assert!(moves.parse::<u32>().unwrap() < 5000, "{said}");
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
    guest.sh("[ ! -e /tmp/fio.code ] || { cat /tmp/fio.log /tmp/fio.out; exit 1; }").ok();
    guest.sh("killall -INT fio; n=0; until [ -e /tmp/fio.code ]; do usleep 10000; done; grep -q 'err= 0' /tmp/fio.out || { cat /tmp/fio.log /tmp/fio.out; exit 1; }").ok();
    guest.sh("umount /mnt && e2fsck -fn /dev/ublkb0 && down && ubcache check /dev/disk/cache /dev/disk/backing").ok();
    guest.no_complaints();
}

#[test]
fn death_with_every_tag_under_way_is_noticed_at_once() {
    if skipped("death_with_every_tag_under_way_is_noticed_at_once") {
        return;
    }
    let dir = Dir::new();
    let disks = [dir.disk("cache", 64 * MIB), dir.disk("backing", 256 * MIB).slow(150)];
    let mut guest = Guest::boot_on("ublk-full", &dir, &disks, &["fio"]);
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
    guest.sh("[ ! -e /tmp/fio.code ] && killall -INT fio; until [ -e /tmp/fio.code ]; do usleep 10000; done; grep -q 'err= 0' /tmp/fio.out && down").ok();
    guest.no_complaints();
}

#[test]
fn another_process_takes_over_under_a_mounted_filesystem() {
    if skipped("another_process_takes_over_under_a_mounted_filesystem") {
        return;
    }
    let dir = Dir::new();
    let mut guest = Guest::boot("ublk-takeover", &dir, 256, &["mkfs.ext4", "e2fsck", "fio"]);
    // Nobody to take over from: it starts as usual.
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
    guest.sh("killall -INT fio; until [ -e /tmp/fio.code ]; do usleep 10000; done; grep -q 'err= 0' /tmp/fio.out || { cat /tmp/fio.log /tmp/fio.out; exit 1; }").ok();
    guest.sh("umount /mnt && e2fsck -fn /dev/ublkb0 && down && ubcache check /dev/disk/cache /dev/disk/backing").ok();
    guest.no_complaints();
}

#[test]
fn what_cannot_be_is_refused_and_changes_nothing() {
    if skipped("what_cannot_be_is_refused_and_changes_nothing") {
        return;
    }
    let dir = Dir::new();
    let disks = [dir.disk("cache", 64 * MIB), dir.disk("backing", 64 * MIB)];
    let mut guest = Guest::boot_on("ublk-refused", &dir, &disks, &["setpriv"]);
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
    // The driver is loaded when it is needed.
    guest.sh("mv /lib/away /lib/modules && up --export auto && grep -q 'export: ublk' /tmp/up.err").ok();
    // Another set wants the same number.
    guest
        .sh("truncate -s 70M /tmp/c2 && truncate -s 64M /tmp/b2 && ubcache make -C /tmp/c2 -B /tmp/b2 --bucket 64k && \
             ubcache up -C /tmp/c2 -B /tmp/b2 --export ublk=0")
        .refused(&["/dev/ublkb0 is taken by process", "choose another number"]);
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
    let mut guest = Guest::boot("ublk-user", &dir, 64, &["setpriv"]);
    // What a rule of udev would do: the nodes belong to whoever made the device.
    guest
        .sh("chmod 666 /dev/ublk-control; (while true; do chown 65534 /dev/ublkc* /dev/ublkb* 2>/dev/null; usleep 5000; done) &")
        .ok();
    guest
        .sh("mkdir /tmp/user && cd /tmp/user && truncate -s 70M c && truncate -s 64M b && \
             ubcache make -C c -B b --bucket 64k --writeback && chown -R 65534 /tmp/user")
        .ok();
    guest
        .sh("cd /tmp/user; export XDG_RUNTIME_DIR=/tmp/user
             /usr/bin/setpriv --reuid 65534 --regid 65534 --clear-groups ubcache up -C c -B b --export ublk \
             >/tmp/up.out 2>/tmp/up.err &
             echo $! >/tmp/up.pid; usleep 10000; ready")
        .ok();
    guest
        .sh("head -c 1000000 /dev/urandom >/tmp/data && dd if=/tmp/data of=/dev/ublkb0 bs=64k conv=fsync && \
             echo 3 >/proc/sys/vm/drop_caches && head -c 1000000 /dev/ublkb0 | cmp - /tmp/data")
        .ok();
    guest.sh("down && [ ! -e /dev/ublkb0 ] && ubcache check /tmp/user/c /tmp/user/b").ok();
    guest.no_complaints();
}
