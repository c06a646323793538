//! The daemon with its volumes as block devices of a real kernel: it dies under a mounted file system and comes back; its devices
//! are pulled out and put in again.

use ubcache_vm::{Dir, Guest, Vm, skipped};

const MIB: u64 = 1 << 20;

/// Starts the daemon, waits for volumes; beside the functions of [`Guest`], which know its process as that of `up`.
const LIBRARY: &str = r#"
launch() { # starts it
    ubcache daemon >/dev/null 2>>/tmp/up.err &
    echo $! >/tmp/up.pid
}
served() { # VOLUME...: waits until they are
    for volume; do ubcache wait --timeout 100 "$volume" || { what; return 1; }; done
}
places() { for volume in data other bcache0 bcache1; do ubcache wait --timeout 1 $volume || return 1; done; }
"#;

/// A load that verifies what it has written, again and again.
const FIO: &str = "fio --name=load --ioengine=libaio --direct=1 --rw=randrw --bs=4k --size=24m --iodepth=16 --numjobs=2 \
     --verify=crc32c --verify_backlog=64 --time_based --runtime=3600 --fallocate=none --output=/tmp/fio.out";

#[track_caller]
fn sh(guest: &mut Guest, script: &str) -> ubcache_vm::Said {
    guest.sh(&format!(". /etc/daemon\n{script}")).ok()
}

#[test]
fn requests_wait_over_a_crash_of_the_daemon() {
    if skipped("requests_wait_over_a_crash_of_the_daemon") {
        return;
    }
    let dir = Dir::new();
    let (cache, backing) = (dir.disk("cache", 64 * MIB), dir.disk("backing", 256 * MIB));
    let builder =
        Vm::build("daemon-crash").tools(&["mkfs.ext4", "e2fsck", "fio"]).disk(&dir.disk("other", 32 * MIB));
    let mut guest = Guest::boot(builder.text(LIBRARY, "/etc/daemon"), &cache, &backing);
    let guest = &mut guest;
    sh(
        guest,
        "ubcache make -C /dev/disk/cache -B /dev/disk/backing --bucket 64k --writeback --label data && \
         ubcache make -B /dev/disk/other --label other && mkdir -p /etc/ubcache && \
         echo 'tunables.sequential_cutoff = 0' >/etc/ubcache/ubcache.toml && launch && \
         until ubcache register /dev/disk/cache /dev/disk/backing; do usleep 50000; done && served data && \
         ubcache register /dev/disk/other && ubcache attach /dev/disk/cache other && served other && \
         ubcache set-cachemode other writeback && [ -b /dev/ublkb0 ] && [ -b /dev/ublkb1 ]",
    );
    let before = sh(guest, "places").out;
    assert_eq!(before, "data: /dev/ublkb0\nother: /dev/ublkb1\nbcache0: /dev/ublkb0\nbcache1: /dev/ublkb1\n");
    sh(
        guest,
        "mkfs.ext4 -q /dev/ublkb0 && mount /dev/ublkb0 /mnt && head -c 5000000 /dev/urandom >/mnt/kept && sync",
    );
    sh(
        guest,
        &format!(
            "md5sum /mnt/kept >/tmp/sum; ({FIO} --directory=/mnt; echo $? >/tmp/fio.code) >/tmp/fio.log 2>&1 &"
        ),
    );
    for round in 0..4 {
        // What is answered on the other volume and never flushed has to be there as well.
        let said = sh(
            guest,
            &format!(
                "moves >/dev/null; head -c 401408 /dev/urandom >/tmp/block && \
                 dd if=/tmp/block of=/dev/ublkb1 bs=4096 seek=$(({round} * 100)) oflag=direct 2>/dev/null && \
                 crash && gone && from=$(now_ms) && launch && served data other >/dev/null && \
                 ready=$(($(now_ms) - from)) && moves && echo $ready && echo 3 >/proc/sys/vm/drop_caches && \
                 dd if=/dev/ublkb1 bs=4096 skip=$(({round} * 100)) count=98 2>/dev/null | cmp - /tmp/block"
            ),
        );
        println!("ready after ms: {}", said.out.replace('\n', ", "));
        assert_eq!(sh(guest, "places").out, before);
    }
    let said = sh(guest, "grep -c 'recovered' /tmp/up.err");
    assert!(said.line().parse::<u32>().unwrap() >= 8, "two devices, four times: {said}");
    // Killed again while it comes back, at any moment.
    for pause_ms in [0, 50, 150, 400, 1000] {
        sh(
            guest,
            &format!(
                "crash; gone; launch; usleep {pause_ms}000; crash; gone; launch; served data other; moves"
            ),
        );
    }
    assert_eq!(sh(guest, "places").out, before);
    sh(guest, "each && end_fio && echo 3 >/proc/sys/vm/drop_caches && md5sum -c /tmp/sum");
    // In good order: it waits for the mount to go, and what is dirty stays dirty.
    sh(guest, "kill -TERM $(cat /tmp/up.pid)");
    guest.vm.wait_for("a message", "grep -q 'ublkb0 is mounted at /mnt: waiting' /tmp/up.err");
    sh(
        guest,
        "umount /mnt && gone && [ ! -e /dev/ublkb0 ] && [ ! -e /dev/ublkb1 ] && \
         ubcache check /dev/disk/cache /dev/disk/backing /dev/disk/other && ubcache super /dev/disk/backing | grep -q dirty",
    );
    sh(
        guest,
        "launch && served data other && e2fsck -fn /dev/ublkb0 && mount /dev/ublkb0 /mnt && md5sum -c /tmp/sum",
    );
    sh(guest, "umount /mnt && down && ubcache check /dev/disk/cache /dev/disk/backing /dev/disk/other");
    guest.no_complaints();
}

/// The device was identified by the set of its volume. A volume that was detached is served without its set after a crash: it got
/// another device, and the users of the first one waited for ever.
#[test]
fn a_volume_that_is_detached_in_use_has_its_device_after_a_crash() {
    if skipped("a_volume_that_is_detached_in_use_has_its_device_after_a_crash") {
        return;
    }
    let dir = Dir::new();
    let builder = Vm::build("daemon-detach").tools(&["mkfs.ext4"]).disk(&dir.disk("other", 64 * MIB));
    let builder = builder.text(LIBRARY, "/etc/daemon");
    let mut guest = Guest::boot(builder, &dir.disk("cache", 64 * MIB), &dir.disk("backing", 64 * MIB));
    let guest = &mut guest;
    sh(
        guest,
        "ubcache make -C /dev/disk/cache -B /dev/disk/backing --bucket 64k --writeback --label data && \
         ubcache make -B /dev/disk/other --label other && launch && \
         until ubcache register /dev/disk/cache /dev/disk/backing; do usleep 50000; done && served data && \
         ubcache register /dev/disk/other && ubcache attach /dev/disk/cache other && served other && \
         ubcache set-cachemode other writeback",
    );
    let before = sh(guest, "places").out;
    assert_eq!(before, "data: /dev/ublkb0\nother: /dev/ublkb1\nbcache0: /dev/ublkb0\nbcache1: /dev/ublkb1\n");
    sh(
        guest,
        "mkfs.ext4 -q /dev/ublkb1 && mount /dev/ublkb1 /mnt && head -c 5000000 /dev/urandom >/mnt/kept && sync && \
         md5sum /mnt/kept >/tmp/sum && ubcache detach other && ! ubcache attach /dev/disk/cache other",
    );
    let crash = |guest: &mut Guest| {
        sh(guest, "crash && gone && launch && served data other");
        assert_eq!(sh(guest, "places").out, before);
        sh(
            guest,
            "[ $(ls -d /sys/block/ublkb* | wc -l) = 2 ] && echo 3 >/proc/sys/vm/drop_caches && md5sum -c /tmp/sum && \
             echo new >>/mnt/new && sync",
        );
    };
    // In the thread of the set that it was detached from, then in its own.
    crash(guest);
    crash(guest);
    sh(
        guest,
        "umount /mnt && ubcache attach /dev/disk/cache other && served other && mount /dev/ublkb1 /mnt && md5sum -c /tmp/sum",
    );
    crash(guest);
    let said = sh(guest, "grep -c 'ublkb1: recovered' /tmp/up.err");
    assert_eq!(said.line(), "3", "{said}");
    sh(guest, "umount /mnt && down && ubcache check /dev/disk/cache /dev/disk/backing /dev/disk/other");
    guest.no_complaints();
}

/// The contents of the volume while disks come and go.
const PLUGS: &str = r#"
volume() { ubcache wait --timeout 100 $1 | sed 's/.*: //'; }
store() { # FILE MIB: puts the file there, with a flush
    dd if=$1 of=$(volume data) bs=64k seek=$(($2 * 16)) oflag=direct conv=fsync 2>/dev/null
}
there() { # FILE MIB: compares
    dd if=$(volume data) bs=64k skip=$(($2 * 16)) count=16 iflag=direct 2>/dev/null | cmp - $1
}
answers() { dd if=$(volume data) of=/dev/null bs=64k skip=$(($1 * 16)) count=1 iflag=direct 2>/dev/null; }
"#;

#[test]
fn devices_are_pulled_out_and_put_in_again() {
    if skipped("devices_are_pulled_out_and_put_in_again") {
        return;
    }
    let dir = Dir::new();
    let (cache, backing) = (dir.disk("cache", 64 * MIB), dir.disk("backing", 256 * MIB));
    let builder =
        Vm::build("unplug").tools(&["mkfs.ext4", "e2fsck", "fio"]).disk(&dir.disk("other", 64 * MIB));
    let builder = builder.text(&format!("{LIBRARY}{PLUGS}"), "/etc/daemon");
    let mut guest = Guest::boot(builder, &cache, &backing);
    let guest = &mut guest;
    sh(
        guest,
        "ubcache make -C $(disk_of cache) -B $(disk_of backing) --bucket 64k --writeback --label data && \
         ubcache make -B $(disk_of other) --label other && mkdir -p /etc/ubcache && \
         echo 'tunables.sequential_cutoff = 0' >/etc/ubcache/ubcache.toml && launch && \
         until ubcache register $(disk_of cache) $(disk_of backing); do usleep 50000; done && served data && \
         ubcache set data writeback_running=0 && ubcache register $(disk_of other) && \
         ubcache attach $(disk_of cache) other && served other",
    );
    // One part is on the disk and in the cache, one in the cache alone; the other volume is used all the time.
    sh(
        guest,
        "for n in clean dirty late again; do head -c 1048576 /dev/urandom >/tmp/$n; done && \
         ubcache set-cachemode data writethrough && store /tmp/clean 0 && \
         ubcache set-cachemode data writeback && store /tmp/dirty 16 && \
         mkfs.ext4 -q $(volume other) && mount $(volume other) /mnt && head -c 1000000 /dev/urandom >/mnt/kept && sync && \
         md5sum /mnt/kept >/tmp/sum",
    );
    sh(guest, &format!("({FIO} --size=8m --directory=/mnt; echo $? >/tmp/fio.code) >/tmp/fio.log 2>&1 &"));

    // Without the disk: what the cache has is there, takes more, and keeps it; the rest fails.
    sh(guest, "each && pull backing");
    guest
        .vm
        .wait_for("a message", "grep -q 'was unplugged: requests that the cache cannot answer' /tmp/up.err");
    sh(
        guest,
        "there /tmp/clean 0 && there /tmp/dirty 16 && ! answers 100 && store /tmp/late 32 && there /tmp/late 32 && \
         ubcache status | grep 'was unplugged' && each",
    );
    sh(guest, "put backing");
    guest.vm.wait_for("the volume", ". /etc/daemon; answers 100");
    sh(
        guest,
        "there /tmp/clean 0 && there /tmp/dirty 16 && there /tmp/late 32 && grep 'is plugged in again; it was' /tmp/up.err && each",
    );
    // Nothing is missing on the disk itself, once everything is written back.
    sh(
        guest,
        "ubcache set data writeback_running=1 && ubcache drain data && ubcache set data writeback_running=0 && \
         for part in clean:0 dirty:16 late:32; do \
             dd if=$(disk_of backing) bs=512 skip=$((16 + ${part#*:} * 2048)) count=2048 2>/dev/null | \
                 cmp - /tmp/${part%:*} || exit 1; \
         done",
    );

    // Without the cache: reads of its dirty data fail instead of returning older data; a volume without dirty data works.
    sh(guest, "store /tmp/again 16 && there /tmp/again 16 && each && pull cache");
    guest.vm.wait_for("a message", "grep -q 'was unplugged; it is the cache device of set' /tmp/up.err");
    sh(guest, "! answers 16 && each");
    sh(guest, "put cache");
    guest.vm.wait_for(
        "a message",
        "grep -q 'as soon as its volume is not in use: .* is mounted at /mnt' /tmp/up.err",
    );
    sh(guest, "each && end_fio && umount /mnt");
    guest.vm.wait_for("the volume", ". /etc/daemon; answers 16");
    sh(guest, "there /tmp/clean 0 && there /tmp/again 16 && there /tmp/late 32");
    sh(
        guest,
        "served other && e2fsck -fn $(volume other) && mount $(volume other) /mnt && md5sum -c /tmp/sum && umount /mnt",
    );
    sh(guest, "down && ubcache check $(disk_of cache) $(disk_of backing) $(disk_of other)");
}

/// Clients over NBD (a file by `nbdfuse`) and of a file by FUSE.
const CLIENTS: &str = r#"
connect() { # a client that stays connected until `disconnect`
    mkdir -p /tmp/nbd && { nbdfuse /tmp/nbd/data 'nbd+unix:///bcache0?socket=/run/data.sock' >/tmp/nbd.out 2>&1 & } && n=0
    until [ -e /tmp/nbd/data ]; do n=$((n+1)); [ $n -lt 1000 ] || { cat /tmp/nbd.out >&2; return 1; }; usleep 20000; done
}
disconnect() { umount /tmp/nbd && while pidof nbdfuse >/dev/null; do usleep 20000; done; }
put_there() { dd if=$1 of=/tmp/nbd/data bs=64k seek=$(($2 * 16)) conv=notrunc,fsync 2>/dev/null; }
is_there() { dd if=/tmp/nbd/data bs=64k skip=$(($2 * 16)) count=16 2>/dev/null | cmp - $1; }
can_read() { dd if=/tmp/nbd/data of=/dev/null bs=64k skip=$(($1 * 16)) count=1 2>/dev/null; }
loop_of() { volume other | cut -d' ' -f 1; }
other_answers() { dd if=$(loop_of) of=/dev/null bs=4k skip=15000 count=1 iflag=direct 2>/dev/null; }
"#;

#[test]
fn devices_are_pulled_out_under_clients_of_nbd_and_fuse() {
    if skipped("devices_are_pulled_out_under_clients_of_nbd_and_fuse") {
        return;
    }
    let dir = Dir::new();
    let (cache, backing) = (dir.disk("cache", 64 * MIB), dir.disk("backing", 256 * MIB));
    let builder = Vm::build("unplug-clients")
        .tools(&["mkfs.ext4", "e2fsck", "nbdfuse", "fusermount3"])
        .disk(&dir.disk("other", 64 * MIB))
        .text(&format!("{LIBRARY}{PLUGS}{CLIENTS}"), "/etc/daemon")
        .text(
            "tunables.sequential_cutoff = 0\n[volume.data]\nexports = [\"nbd=/run/data.sock\"]\n\
             [volume.other]\nexports = [\"fuse=/run/other\"]\n",
            "/etc/ubcache/ubcache.toml",
        );
    let mut guest = Guest::boot(builder, &cache, &backing);
    let guest = &mut guest;
    sh(
        guest,
        "modprobe fuse; modprobe loop; \
         ubcache make -C $(disk_of cache) -B $(disk_of backing) --bucket 64k --writeback --label data && \
         ubcache make -B $(disk_of other) --label other && launch && \
         until ubcache register $(disk_of cache) $(disk_of backing); do usleep 50000; done && served data && \
         ubcache set data writeback_running=0 && ubcache register $(disk_of other) && \
         ubcache attach $(disk_of cache) other && served other",
    );
    sh(
        guest,
        "for n in clean dirty late; do head -c 1048576 /dev/urandom >/tmp/$n; done && connect && \
         ubcache set-cachemode data writethrough && put_there /tmp/clean 0 && \
         ubcache set-cachemode data writeback && put_there /tmp/dirty 16 && \
         loop=$(loop_of) && mkfs.ext4 -q $loop && mount $loop /mnt && \
         head -c 1000000 /dev/urandom >/mnt/kept && sync && md5sum /mnt/kept >/tmp/sum",
    );

    // Over NBD: what the cache has is there, the rest fails, and who is connected stays so although the disk is back.
    sh(guest, "pull backing");
    guest
        .vm
        .wait_for("a message", "grep -q 'was unplugged: requests that the cache cannot answer' /tmp/up.err");
    sh(
        guest,
        "is_there /tmp/clean 0 && is_there /tmp/dirty 16 && ! can_read 100 && put_there /tmp/late 32 && put backing",
    );
    guest.vm.wait_for("a message", "grep -q 'is not in use: .* to unix:/run/data.sock' /tmp/up.err");
    sh(guest, "is_there /tmp/dirty 16 && is_there /tmp/late 32 && ! can_read 100 && disconnect");
    guest.vm.wait_for("the volume", "[ $(grep -c 'bcache0 ready: nbd' /tmp/up.err) = 2 ]");
    sh(
        guest,
        "connect && can_read 100 && is_there /tmp/clean 0 && is_there /tmp/dirty 16 && is_there /tmp/late 32",
    );

    // By FUSE: a mounted loop device, then a process that has the file itself open.
    sh(guest, "disconnect && pull other");
    guest.vm.wait_for("a message", "[ $(grep -c 'was unplugged: requests' /tmp/up.err) = 2 ]");
    sh(guest, "put other");
    guest.vm.wait_for(
        "a message",
        "grep -q 'as soon as its volume is not in use: .* is mounted at /mnt' /tmp/up.err",
    );
    sh(guest, "umount /mnt");
    guest.vm.wait_for("the volume", ". /etc/daemon; other_answers");
    sh(
        guest,
        "loop=$(loop_of) && e2fsck -fp $loop; [ $? -le 1 ] && mount $loop /mnt && md5sum -c /tmp/sum && umount /mnt && \
         { sleep 10000 </run/other/bcache1 & } && \
         until [ \"$(readlink /proc/$(pidof sleep)/fd/0)\" = /run/other/bcache1 ]; do usleep 10000; done && \
         pull other && put other",
    );
    guest.vm.wait_for("a message", "grep -q '(sleep) has /run/other/bcache1 open' /tmp/up.err");
    sh(guest, "kill $(pidof sleep)");
    guest.vm.wait_for("the volume", ". /etc/daemon; other_answers");

    // The cache: its whole set waits for the client.
    sh(guest, "connect && pull cache");
    guest.vm.wait_for("a message", "grep -q 'was unplugged; it is the cache device of set' /tmp/up.err");
    sh(guest, "! can_read 16 && put cache");
    guest
        .vm
        .wait_for("a message", "[ $(grep -c 'is not in use: .* to unix:/run/data.sock' /tmp/up.err) = 2 ]");
    sh(guest, "disconnect");
    guest
        .vm
        .wait_for("the volume", ". /etc/daemon; connect && is_there /tmp/dirty 16 || { disconnect; false; }");
    guest.vm.wait_for("the other volume", ". /etc/daemon; other_answers");
    sh(
        guest,
        "is_there /tmp/clean 0 && is_there /tmp/dirty 16 && is_there /tmp/late 32 && disconnect && \
         mount $(loop_of) /mnt && md5sum -c /tmp/sum && umount /mnt && \
         down && ubcache check $(disk_of cache) $(disk_of backing) $(disk_of other)",
    );
}

/// Loads of 24 volumes, eight over each export.
const LOADS: &str = r#"
all() { seq 0 23; }
names() { all | sed s/^/bcache/; }
disks() { all | sed s,^,/tmp/disks/,; }
file_of() { # VOLUME: the file through which its load goes
    if [ $1 -lt 8 ]; then echo /dev/ublkb$1
    elif [ $1 -lt 16 ]; then echo /tmp/nbd/$1/data
    else echo /run/fuse/bcache$1/bcache$1; fi
}
connect_nbd() { # VOLUME: a client of NBD that stays connected
    mkdir -p /tmp/nbd/$1; n=0
    nbdfuse /tmp/nbd/$1/data "nbd+unix:///bcache$1?socket=/run/all.sock" >/dev/null 2>/tmp/nbd.$1.err &
    until [ -e /tmp/nbd/$1/data ]; do n=$((n+1)); [ $n -lt 1000 ] || { cat /tmp/nbd.$1.err >&2; return 1; }; usleep 20000; done
}
load() { # VOLUME: writes, flushes, reads and compares, until its file /run/enough.VOLUME is there
    to=$(file_of $1); k=0; in= out=
    [ $1 -ge 8 ] || { in=iflag=direct; out=oflag=direct; }
    until [ -e /run/enough.$1 ]; do
        { echo volume $1 round $k; cat /tmp/seed; } | head -c 65536 >/tmp/block.$1
        dd if=/tmp/block.$1 of=$to bs=64k seek=$((k % 16)) conv=notrunc,fsync $out 2>/tmp/dd.$1.err && \
            dd if=$to bs=64k skip=$((k % 16)) count=1 $in 2>/tmp/dd.$1.err | cmp - /tmp/block.$1 || \
            { echo failed in round $k >/run/done.$1; return; }
        k=$((k+1)); echo $k >/run/new.$1 && mv /run/new.$1 /run/done.$1
    done
    echo ended $k >/run/done.$1
}
ended() { # VOLUME...: ends their loads
    for v; do touch /run/enough.$v; done; n=0
    for v; do
        until grep -q '[ef]' /run/done.$v; do n=$((n+1)); [ $n -lt 3000 ] || { echo load $v; what; return 1; }; usleep 20000; done
        grep -q ended /run/done.$v || { cat /run/done.$v /tmp/dd.$v.err >&2; return 1; }
    done
}
go_on() { # waits until each load has made progress
    was=
    for v in $(all); do k=none; [ ! -e /run/done.$v ] || read k </run/done.$v; was="$was $k"; done
    set -- $was; n=0
    for v in $(all); do
        until [ -e /run/enough.$v ] || { [ -e /run/done.$v ] && read k </run/done.$v && [ "$k" != "$1" ]; }; do
            n=$((n+1)); [ $n -lt 3000 ] || { echo load $v stands still >&2; what; return 1; }; usleep 20000
        done
        case "$k" in failed*) cat /run/done.$v /tmp/dd.$v.err >&2; return 1 ;; esac
        shift
    done
}
prompt() { # ARGUMENTS: a command, which answers within 30 s
    timeout 30 ubcache "$@" >/tmp/answer || { echo "ubcache $*: $?" >&2; cat /tmp/answer >&2; what; return 1; }
}
resident() { awk '/^VmRSS/ { print $2 }' /proc/$(cat /tmp/up.pid)/status; }
same() { # VOLUME: its last block is there over every export
    at=$((($(sed 's/ended //' /run/done.$1) - 1) % 16))
    dd if=/dev/ublkb$1 bs=64k skip=$at count=1 iflag=direct 2>/dev/null | cmp - /tmp/block.$1 && \
        dd if=/run/fuse/bcache$1/bcache$1 bs=64k skip=$at count=1 2>/dev/null | cmp - /tmp/block.$1 && \
        nbdcopy "nbd+unix:///bcache$1?socket=/run/all.sock" /tmp/copy && \
        dd if=/tmp/copy bs=64k skip=$at count=1 2>/dev/null | cmp - /tmp/block.$1
}
"#;

/// Every volume has all three exports. The buffers of the devices of ublk took all memory of a host with 1 GiB, and the kernel
/// ended the daemon at each start.
#[test]
fn twenty_four_volumes_are_served_over_every_export() {
    if skipped("twenty_four_volumes_are_served_over_every_export") {
        return;
    }
    let dir = Dir::new();
    // One disk holds all backing devices, as files of a file system.
    let builder = Vm::build("daemon-many")
        .tools(&["mkfs.ext4", "nbdcopy", "nbdfuse", "fusermount3"])
        .memory_mib(1024)
        .text(&format!("{LIBRARY}{LOADS}"), "/etc/daemon")
        .text(
            "exports = [\"ublk\", \"nbd=/run/all.sock\", \"fuse=/run/fuse/{volume}\"]\ntunables.sequential_cutoff = 0\n",
            "/etc/ubcache/ubcache.toml",
        );
    let mut guest = Guest::boot(builder, &dir.disk("cache", 64 * MIB), &dir.disk("backing", 512 * MIB));
    let guest = &mut guest;
    sh(
        guest,
        "modprobe fuse; mkfs.ext4 -q /dev/disk/backing && mkdir -p /tmp/disks /run/fuse && mount /dev/disk/backing /tmp/disks && \
         for disk in $(disks); do truncate -s 8M $disk; done && \
         ubcache make -C /dev/disk/cache $(for disk in $(disks); do echo -B $disk; done) --bucket 64k --writeback && launch",
    );
    guest.vm.wait_for("the daemon", "ubcache status");
    sh(guest, "ubcache register /dev/disk/cache $(disks) || { what; exit 1; }; served $(names)");
    sh(
        guest,
        "[ $(ls -d /sys/block/ublkb* | wc -l) = 24 ] && ! ubcache status --json | grep -q NOT_EXPORTED",
    );
    let is_small = |guest: &mut Guest| {
        let resident_kib: u64 = sh(guest, "resident").line().parse().expect("a number");
        assert!(resident_kib < 640 << 10, "{resident_kib} KiB of 1 GiB");
    };
    is_small(guest);

    // All at the same time; each command answers in time, and the loads of all volumes go on.
    sh(
        guest,
        "head -c 65536 /dev/urandom >/tmp/seed; for v in $(seq 8 15); do connect_nbd $v || exit 1; done; \
         for v in $(all); do load $v >/tmp/load.$v 2>&1 & done; go_on && go_on",
    );
    sh(
        guest,
        "prompt status --json && prompt set-label bcache3 films && prompt set-cachemode bcache11 writethrough && \
         prompt detach bcache5 && prompt detach bcache12 && prompt detach bcache21 && prompt drain bcache18 && go_on",
    );
    sh(
        guest,
        "for v in 7 15 23; do ended $v && prompt stop bcache$v && ! ubcache wait --timeout 0 bcache$v || exit 1; done; \
         go_on && prompt status",
    );
    sh(
        guest,
        "ended $(all) && for v in $(seq 8 15); do umount /tmp/nbd/$v; done; ! ubcache status --json | grep OVERDUE",
    );

    // What a flush was answered for is there over every export.
    let served = "$(all | grep -vx -e 7 -e 15 -e 23)";
    sh(guest, &format!("for v in {served}; do same $v || {{ echo $v >&2; what; exit 1; }}; done"));
    is_small(guest);
    let attached = "$(disks | grep -v -e '/5$' -e '/12$' -e '/21$')";
    sh(guest, &format!("down && ubcache check /dev/disk/cache {attached}"));
    guest.no_complaints();
}
