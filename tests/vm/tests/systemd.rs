//! The package's units and rules under a real systemd and udev: readiness, rights, watchdog, mounts that wait for their volume,
//! restarts under a mounted file system, stops, removal; devices that appear, beside the kernel's own driver and its rules.

use ubcache_vm::{Dir, Said, Vm, skipped, systemd};

const MIB: u64 = 1 << 20;

/// Of the file system, so that `/etc/fstab` can name it before it is there.
const UUID: &str = "11111111-2222-3333-4444-555555555555";

/// What scripts use.
const LIBRARY: &str = r#"
show() { systemctl show -P "$1" "$2"; }
mounted() { grep -q ' /data ext4 ' /proc/mounts; }
main() { show MainPID ubcache.service; }
replaced() { # PID: waits until another process is the service's, and ready
    n=0
    until [ "$(main)" != "$1" ] && [ "$(main)" != 0 ] && [ "$(show ActiveState ubcache.service)" = active ]; do
        n=$((n+1)); [ $n -lt 1000 ] || { systemctl status ubcache.service; return 1; } >&2
        usleep 50000
    done
}
writer() { # writes and syncs one file after the other, until there is /run/enough
    n=0
    while [ ! -e /run/enough ]; do
        echo $n >/data/file && sync -d /data/file || { echo failed >/run/written; return; }
        n=$((n+1)); echo $n >/run/written
    done
    echo ended >>/run/written
}
stuck() { # what everybody waits for, for messages
    systemctl list-jobs
    for pid in 1 $(pidof ubcache) $(pidof mount) $(pidof systemd-udevd); do
        for task in /proc/$pid/task/*; do echo "$task $(cat $task/comm)"; cat $task/stack; done
    done
    dmesg | tail -n 30
    return 1
} >&2
writes() { # waits until the writer makes progress
    was=$(cat /run/written); n=0
    until [ "$(cat /run/written)" != "$was" ]; do n=$((n+1)); [ $n -lt 3000 ] || return 1; usleep 20000; done
    [ "$(cat /run/written)" != failed ]
}
"#;

const CONFIG: &str = "devices = [\"/dev/disk/by-id/virtio-cache\", \"/dev/disk/by-id/virtio-backing\"]\n\
    [tunables]\nwriteback_running = 0\n";

/// Ten seconds, as a test cannot wait for a minute.
const DROP_IN: &str = "[Service]\nWatchdogSec=10\n";

fn boot(label: &str, dir: &Dir) -> Vm {
    let disks = ["cache", "backing", "late"].map(|name| dir.disk(name, 64 * MIB));
    let make = |args: &[&str]| ubcache_vm::ours::ubcache(&[&["make"], args].concat()).ok();
    let [cache, backing, late] = disks.each_ref().map(ubcache_vm::Disk::host);
    make(&["-C", cache, "-B", backing, "--bucket", "32k", "--writeback", "--label", "data"]);
    make(&["-B", late, "--label", "late"]);
    let fstab = format!(
        "UUID={UUID} /data ext4 defaults,nofail,x-systemd.requires=ubcache-volume@data.service,\
         x-systemd.device-timeout=300 0 0\n"
    );
    let builder = Vm::build(label)
        .tools(&["mkfs.ext4", "e2fsck"])
        .text(LIBRARY, "/etc/library")
        .text(CONFIG, "/etc/ubcache/ubcache.toml")
        .text(DROP_IN, "/etc/systemd/system/ubcache.service.d/test.conf")
        .text(&fstab, "/etc/fstab")
        .text(include_str!("../../../packaging/debian/postinst"), "/postinst")
        .text(include_str!("../../../packaging/debian/prerm"), "/prerm")
        .text(include_str!("../../../packaging/debian/postrm"), "/postrm")
        .memory_mib(1024)
        .boot_options(&format!("rdinit={} {}", systemd::INIT, systemd::WORDS));
    disks.iter().fold(systemd::userland(builder), |b, disk| b.disk(disk)).boot()
}

/// Has udev look at all devices again.
const OFFER: &str = "udevadm trigger --action=add --settle --subsystem-match=block";

#[track_caller]
fn sh(vm: &mut Vm, script: &str) -> Said {
    vm.sh(&format!(". /etc/library\n{script}")).ok()
}

#[test]
fn units_and_rules_of_the_package() {
    if skipped("units_and_rules_of_the_package") {
        return;
    }
    let dir = Dir::new();
    let vm = &mut boot("systemd", &dir);
    // The mount wants its volume, and the volume wants the daemon: systemd has started it, and it is ready.
    vm.wait_for("the daemon", "[ $(systemctl show -P ActiveState ubcache.service) = active ]");
    vm.wait_for(
        "the volume's unit",
        "[ $(systemctl show -P ActiveState ubcache-volume@data.service) = active ]",
    );
    let said = sh(
        vm,
        "for p in Type StatusText WatchdogUSec Result NRestarts; do echo $p=$(show $p ubcache.service); done",
    );
    for line in ["Type=notify", "WatchdogUSec=10s", "Result=success", "NRestarts=0"] {
        assert!(said.out.contains(line), "{said}");
    }
    // Its rights are those of the unit, and enough for a device of the kernel.
    let said = sh(
        vm,
        "grep -E '^(CapBnd|NoNewPrivs|Seccomp):' /proc/$(main)/status; ubcache wait --timeout 60 data",
    );
    for line in ["NoNewPrivs:\t1", "Seccomp:\t2", "data: /dev/ublkb0"] {
        assert!(said.out.contains(line), "{said}");
    }
    // Threads that serve a device never wait for pages to be written to it (PF_MEMALLOC_NOIO).
    sh(
        vm,
        "for t in /proc/$(main)/task/*; do [ $(( $(awk '{ print $9 }' $t/stat) & 0x80000 )) = 0 ] || exit 0; done; \
         echo no thread is marked >&2; exit 1",
    );

    // A file system appears on it: its mount has waited for that.
    sh(vm, &format!("mkfs.ext4 -q -U {UUID} /dev/ublkb0"));
    vm.wait_for("the mount", "grep -q ' /data ext4 ' /proc/mounts");
    let said = sh(
        vm,
        "echo $(show ActiveEnterTimestampMonotonic ubcache-volume@data.service) \
         $(show ActiveEnterTimestampMonotonic data.mount); show After data.mount",
    );
    let times: Vec<u64> = said.out.split_whitespace().take(2).filter_map(|w| w.parse().ok()).collect();
    assert!(matches!(times[..], [volume, mount] if volume <= mount), "{said}");
    assert!(said.out.contains("ubcache-volume@data.service"), "{said}");

    // udev makes the link by the label, so systemd has a unit for that path. It follows the label.
    vm.wait_for("the link of udev", "udevadm info -q symlink -n /dev/ublkb0 | grep -qw ubcache/data");
    vm.wait_for(
        "the unit of the link",
        "[ $(systemctl show -P ActiveState dev-ubcache-data.device) = active ]",
    );
    sh(vm, "[ $(readlink -f /dev/ubcache/data) = /dev/ublkb0 ] && ubcache set-label data other");
    vm.wait_for(
        "the new link",
        "udevadm info -q symlink -n /dev/ublkb0 | grep -qw ubcache/other && [ ! -e /dev/ubcache/data ]",
    );
    sh(vm, "[ $(readlink -f /dev/ubcache/other) = /dev/ublkb0 ] && mounted && ubcache set-label other data");
    vm.wait_for(
        "the link",
        "udevadm info -q symlink -n /dev/ublkb0 | grep -qw ubcache/data && [ ! -e /dev/ubcache/other ]",
    );

    // Crash, hang, upgrade: another process serves, and who uses the file system only waits.
    sh(vm, "show ActiveEnterTimestampMonotonic data.mount >/run/mounted; (writer &) >/dev/null 2>&1; writes");
    for how in ["kill -9 $pid", "kill -STOP $pid", "sh /postinst configure 0.0.1"] {
        let said = sh(
            vm,
            &format!(
                "pid=$(main); {how} && replaced $pid && writes && \
                 [ $(show ActiveEnterTimestampMonotonic data.mount) = $(cat /run/mounted) ] && \
                 [ $(show ActiveState dev-ubcache-data.device) = active ] && ubcache wait --timeout 1 data"
            ),
        );
        assert_eq!(said.line(), "data: /dev/ublkb0", "{how}");
    }
    assert!(vm.serial_log().contains("Watchdog timeout"), "{}", vm.serial_log());
    sh(vm, "[ $(journalctl -b -o cat | grep -c '/dev/ublkb0: recovered') -ge 3 ]");

    // Devices are left alone until the operator says otherwise.
    sh(vm, &format!("{OFFER}; ! ubcache wait --timeout 0 late"));
    sh(vm, &format!("touch /etc/ubcache/take-devices; {OFFER}"));
    vm.wait_for("the device", "ubcache wait --timeout 60 late");

    // A stop of the volumes unmounts first; what is dirty stays dirty, and the next start has it.
    sh(vm, "touch /run/enough");
    vm.wait_for("the end of the writer", "grep -q ended /run/written");
    sh(vm, "systemctl stop 'ubcache-volume@*.service' ubcache.service && ! mounted && [ ! -e /dev/ublkb0 ]");
    assert!(sh(vm, "ubcache super /dev/disk/backing").out.contains("dirty"));
    sh(vm, "[ $(show Result ubcache.service) = success ] && ubcache check /dev/disk/cache /dev/disk/backing");
    sh(
        vm,
        "{ timeout 60 systemctl start data.mount || stuck; } && mounted && [ $(($(cat /data/file) + 1)) = $(head -n 1 /run/written) ]",
    );

    // The package stays while something uses a volume that no unit ends: its requests would wait for ever.
    let said = sh(
        vm,
        "mkdir -p /by-hand && mount /dev/ublkb0 /by-hand && ! sh /prerm remove 2>&1 && pidof ubcache && ls /by-hand/file && \
         umount /by-hand && systemctl start data.mount && mounted",
    );
    assert!(said.out.contains("/dev/ublkb0 is mounted at /by-hand"), "{said}");

    // The package goes while a file system is mounted: nothing runs any more, the data stays.
    sh(vm, "sh /prerm remove && ! mounted && [ ! -e /dev/ublkb0 ] && ! pidof ubcache");
    sh(
        vm,
        "ubcache check /dev/disk/cache /dev/disk/backing && ubcache super /dev/disk/backing | grep -q dirty",
    );
    sh(vm, "sh /postrm remove && [ -e /var/lib/ubcache ] && sh /postrm purge && [ ! -e /var/lib/ubcache ]");
    fine(vm);
}

#[track_caller]
fn fine(vm: &mut Vm) {
    let log = vm.dmesg();
    for bad in ["I/O error", "EXT4-fs error", "BUG:", "Call Trace"] {
        assert!(!log.contains(bad), "{log}");
    }
}

/// What scripts use about devices that come and go.
const PLUGS: &str = r#"
kernel_has() { ls -d /sys/block/*/bcache 2>/dev/null || ls /sys/fs/bcache | grep -e -; }
ours() { ubcache show --json | grep -q "\"$(readlink -f /dev/disk/by-id/virtio-$1)\""; }
unplug() {
    disk=$(basename "$(readlink -f /dev/disk/by-id/virtio-$1)")
    echo 1 >/sys/block/$disk/device/../remove && udevadm settle && [ ! -e /dev/disk/by-id/virtio-$1 ]
}
plug() { echo 1 >/sys/bus/pci/rescan && udevadm settle && [ -e /dev/disk/by-id/virtio-$1 ]; }
replug() { unplug $1 && plug $1; }
"#;

#[test]
fn a_device_is_either_ours_or_the_kernels() {
    if skipped("a_device_is_either_ours_or_the_kernels") {
        return;
    }
    let dir = Dir::new();
    let disks = ["cache", "backing", "late"].map(|name| dir.disk(name, 64 * MIB));
    let [cache, backing, late] = disks.each_ref().map(ubcache_vm::Disk::host);
    let make = |args: &[&str]| ubcache_vm::ours::ubcache(&[&["make"], args].concat()).ok();
    make(&["-C", cache, "-B", backing, "--bucket", "32k", "--writeback", "--label", "data"]);
    make(&["-B", late, "--label", "late"]);
    let builder = Vm::build("udev")
        .text(PLUGS, "/etc/library")
        .text("", "/etc/ubcache/take-devices")
        .file("/usr/lib/udev/rules.d/69-bcache.rules", "/usr/lib/udev/rules.d/69-bcache.rules")
        .at("/lib/udev/bcache-register")
        .at("/lib/udev/probe-bcache")
        .memory_mib(1024)
        .boot_options(&format!("rdinit={} {}", systemd::INIT, systemd::WORDS));
    let vm = &mut disks.iter().fold(systemd::userland(builder), |b, disk| b.disk(disk)).boot();

    // Offered by the rule, whatever is said of them again, and although the kernel's driver is there with its own rule.
    vm.wait_for("the volumes", "ubcache wait --timeout 1 data && ubcache wait --timeout 1 late");
    sh(vm, "modprobe bcache && [ -e /sys/fs/bcache/register ]");
    sh(
        vm,
        &format!(
            "for n in 1 2 3; do {OFFER} && udevadm trigger --action=change --settle --subsystem-match=block || exit 1; \
             done; ! kernel_has && [ $(systemctl show -P NRestarts ubcache.service) = 0 ] && ! systemctl --failed | grep ubcache"
        ),
    );
    // One that was let go stays so until it comes again; what is stopped stays stopped although its devices change.
    sh(
        vm,
        "ubcache unregister late && udevadm trigger --action=change --settle --subsystem-match=block && ! ours late",
    );
    sh(vm, "replug late && ubcache wait --timeout 60 late && ! kernel_has");
    sh(
        vm,
        "systemctl stop ubcache.service && udevadm settle && udevadm trigger --action=change --settle --subsystem-match=block && \
         [ $(systemctl show -P ActiveState ubcache.service) = inactive ] && [ -z \"$(systemctl list-jobs | grep ubcache)\" ] && \
         ! kernel_has",
    );

    // Without the rule the kernel's driver takes what appears, and the daemon leaves that alone, also one that looks around.
    sh(
        vm,
        "rm /etc/ubcache/take-devices && rm -r /var/lib/ubcache && \
         printf 'scan = true\nscan_on_events = true\n' >/etc/ubcache/ubcache.toml && replug late && kernel_has && \
         systemctl start ubcache.service && ubcache wait --timeout 60 data && ! ours late && \
         udevadm trigger --action=change --settle --subsystem-match=block",
    );
    // It is unplugged while that driver has it: if the driver released it by itself, both would take it.
    let pulled = |vm: &mut Vm| {
        sh(vm, "unplug late");
        vm.wait_for("the kernel's driver", "[ ! -e /sys/block/bcache0 ]");
    };
    pulled(vm);
    sh(
        vm,
        "plug late && [ -e /sys/block/bcache0 ] && ! ours late && ours cache && ours backing && \
         ! journalctl -b -u ubcache.service -o cat | grep -i 'cannot be registered'",
    );

    // Where that driver has no rule, the daemon takes what appears.
    sh(vm, "rm /usr/lib/udev/rules.d/69-bcache.rules && udevadm control --reload");
    pulled(vm);
    sh(vm, "plug late && ubcache wait --timeout 60 late && ours late && ! kernel_has");
    sh(
        vm,
        "systemctl stop ubcache.service && ubcache check /dev/disk/by-id/virtio-cache /dev/disk/by-id/virtio-backing \
            /dev/disk/by-id/virtio-late",
    );
    fine(vm);
}

/// What `mapped` is: nearly all of a disk that comes late.
const MAPPED: &str = "0 122880 linear /dev/disk/by-id/virtio-late 2048";

/// Rules of packages beside udev's own, for devices of the device mapper and of md.
const STACKED_RULES: &[&str] = &[
    "55-dm.rules",
    "60-persistent-storage-dm.rules",
    "63-md-raid-arrays.rules",
    "64-md-raid-assembly.rules",
    "95-dm-notify.rules",
];

#[test]
fn devices_of_dm_and_md_appear() {
    if skipped("devices_of_dm_and_md_appear") {
        return;
    }
    let dir = Dir::new();
    let disks = ["one", "two", "late"].map(|name| dir.disk(name, 64 * MIB));
    let mut builder = Vm::build("stacked")
        .text(PLUGS, "/etc/library")
        .text("scan = true\nscan_on_events = true\n", "/etc/ubcache/ubcache.toml")
        // Arrays are assembled by the test alone.
        .text("AUTO -all\n", "/etc/mdadm/mdadm.conf")
        .at("/sbin/mdadm")
        .at("/sbin/dmsetup")
        .memory_mib(1024)
        .boot_options(&format!("rdinit={} {}", systemd::INIT, systemd::WORDS));
    for rules in STACKED_RULES {
        let path = format!("/usr/lib/udev/rules.d/{rules}");
        builder = builder.file(&path, &path);
    }
    let vm = &mut disks.iter().fold(systemd::userland(builder), |b, disk| b.disk(disk)).boot();
    // An array whose members look like devices of bcache: its own superblock is at their end.
    let table = format!("--table '{MAPPED}'");
    let map = format!("dmsetup create mapped {table}");
    sh(
        vm,
        "modprobe raid1; modprobe dm_mod; mirror='/dev/disk/by-id/virtio-one /dev/disk/by-id/virtio-two' && \
         mdadm --create /dev/md0 --run --level=1 --raid-devices=2 --metadata=1.0 --assume-clean $mirror && \
         ubcache make -B /dev/md0 --label mirrored && mdadm --stop /dev/md0 && ubcache super /dev/disk/by-id/virtio-one",
    );
    sh(
        vm,
        &format!(
            "{map} && ubcache make -B /dev/mapper/mapped --label mapped && dmsetup remove --retry mapped && \
             udevadm settle && udevadm trigger --action=change --settle --subsystem-match=block"
        ),
    );
    sh(
        vm,
        "systemctl start ubcache.service && ! ubcache show --json | grep virtio && ! ubcache wait --timeout 0 mirrored",
    );
    sh(
        vm,
        "mdadm --assemble /dev/md0 /dev/disk/by-id/virtio-one /dev/disk/by-id/virtio-two && \
         ubcache wait --timeout 60 mirrored && ! mdadm --stop /dev/md0",
    );
    sh(vm, &format!("{map} && ubcache wait --timeout 60 mapped && ! dmsetup remove mapped"));
    // A member of the array goes: the volume does not notice. What a mapped device is on goes: requests fail until there is a
    // table with what came.
    sh(vm, "unplug two && dd if=/dev/ublkb0 of=/dev/null bs=1M count=8 iflag=direct");
    sh(
        vm,
        &format!(
            "unplug late && ! dd if=/dev/ublkb1 of=/dev/null bs=1M count=8 iflag=direct && plug late && \
             dmsetup suspend mapped && dmsetup load mapped {table} && dmsetup resume mapped && \
             dd if=/dev/ublkb1 of=/dev/null bs=1M count=8 iflag=direct"
        ),
    );
    // Let go, removed and made again, it has come again.
    sh(vm, "ubcache unregister mapped && dmsetup remove --retry mapped && udevadm settle");
    sh(vm, &format!("{map} && ubcache wait --timeout 60 mapped"));
    sh(vm, "systemctl stop ubcache.service && ubcache check /dev/md0 /dev/mapper/mapped");
}
