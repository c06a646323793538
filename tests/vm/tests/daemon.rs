//! The daemon with its volumes as block devices of a real kernel: it dies under a mounted file system and comes back.

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
fn the_death_of_the_daemon_is_a_pause_and_volumes_keep_their_places() {
    if skipped("the_death_of_the_daemon_is_a_pause_and_volumes_keep_their_places") {
        return;
    }
    let dir = Dir::new();
    let (cache, backing) = (dir.disk("cache", 64 * MIB), dir.disk("backing", 256 * MIB));
    let builder =
        Vm::build("daemon-death").tools(&["mkfs.ext4", "e2fsck", "fio"]).disk(&dir.disk("other", 32 * MIB));
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
