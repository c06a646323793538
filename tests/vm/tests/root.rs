//! The root file system on a volume: an initramfs of initramfs-tools or dracut with what the package has for it, systemd on an
//! ext4 in the cache, a power loss, and a shutdown.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::path::{Path, PathBuf};

use ubcache_vm::artifacts::artifacts;
use ubcache_vm::load::Target;
use ubcache_vm::ours::{Set, ubcache};
use ubcache_vm::{Dir, Disk, Vm, built, run_within, skipped, systemd, tool};

const MIB: u64 = 1 << 20;
const CONFIG: &str = "UBCACHE_CACHE=/dev/disk/by-id/virtio-cache\nUBCACHE_BACKING=/dev/disk/by-id/virtio-backing\n\
    UBCACHE_OPTIONS='--set sequential_cutoff=0'\n";

/// Files of a machine with systemd, as an ext4 file system with this label.
fn root_file_system(dir: &Dir, label: &str, bytes: u64) -> Vec<u8> {
    let (tree, image) = (dir.path("tree"), dir.path("image"));
    std::fs::create_dir(&tree).unwrap();
    systemd::userland(Vm::build("files").tools(&["e2fsck"])).unpack(&tree);
    std::fs::File::create(&image).and_then(|f| f.set_len(bytes)).unwrap();
    let args =
        ["-q", "-L", label, "-E", "root_owner=0:0", "-d", tree.to_str().unwrap(), image.to_str().unwrap()];
    run_within(ubcache_vm::TIMEOUT, &tool("mkfs.ext4"), &args).ok();
    std::fs::read(&image).unwrap()
}

/// Puts the contents on the volume; much of it is in the cache alone then.
fn fill(set: &Set<'_>, contents: &[u8]) {
    let up = set.up(1, &["--set", "writeback_running=0"]);
    let mut target = up.connect(0).unwrap();
    for (at, piece) in (0..).zip(contents.chunks(256 << 10)) {
        if piece.iter().any(|b| *b != 0) {
            target.write(at * (256 << 10) / 512, piece).unwrap();
        }
    }
    target.flush().unwrap();
    drop(target);
    up.stop();
}

/// The tools that make an initramfs: each with its command, what it has in there of ours, also without a configuration, and what
/// is made with one.
struct Tool {
    name: &'static str,
    command: &'static str,
    always: usize,
    script: &'static str,
    made: &'static [&'static str],
}

/// Its script looks for a configuration.
const INITRAMFS_TOOLS: Tool = Tool {
    name: "initramfs-tools",
    command: "mkinitramfs",
    always: 1,
    script: "scripts/local-block/ubcache",
    made: &["root.initrd"],
};

/// Beside the one where systemd is the first process there is one with scripts alone.
const DRACUT: Tool = Tool {
    name: "dracut",
    command: "dracut",
    always: 0,
    script: "lib/dracut/hooks/initqueue/settled/50-serve-root.sh",
    made: &["root.initrd", "small.initrd"],
};

/// Initramfs that serve the volume; one with the configuration as it is shipped has nothing of ours.
fn initramfs(dir: &Dir, made_by: &Tool) -> Vec<PathBuf> {
    std::fs::write(dir.path("ubcache.conf"), CONFIG).unwrap();
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    let (script, packaging) = (own.join("host/initramfs.sh"), own.join("../../packaging"));
    let root = rustix::process::geteuid().is_root();
    let mut args = vec![if root { "-m" } else { "-rm" }, "sh"];
    tool(made_by.command);
    let program = built("ubcache");
    let paths =
        [script.as_path(), dir.root(), &program, &packaging.canonicalize().unwrap(), &artifacts().modules];
    args.extend(paths.iter().map(|p| p.to_str().unwrap()));
    args.push(made_by.name);
    run_within(2 * ubcache_vm::TIMEOUT, &tool("unshare"), &args).ok();
    let list = |name: &str| std::fs::read_to_string(dir.path(&format!("{name}.list"))).unwrap();
    let ours = |list: &str| list.lines().filter(|l| l.contains("ubcache") || l.contains("ublk")).count();
    assert_eq!(ours(&list("plain.initrd")), made_by.always, "{}", list("plain.initrd"));
    let ours = [
        "usr/bin/ubcache",
        "usr/lib/ubcache/serve-root",
        "etc/ubcache/initramfs.conf",
        "rules.d/68-ubcache.rules",
        "rules.d/69-ubcache-volumes.rules",
        "ublk_drv.ko",
        made_by.script,
    ];
    for name in made_by.made {
        let list = list(name);
        ours.iter().for_each(|file| assert!(list.lines().any(|l| l.ends_with(file)), "{file}: {list}"));
    }
    made_by.made.iter().map(|name| dir.path(name)).collect()
}

fn boot(label: &str, initrd: &Path, disks: [&Disk; 2]) -> Vm {
    let builder = Vm::build(label).initrd(initrd).memory_mib(1024).timeout(3 * ubcache_vm::TIMEOUT);
    let words = format!("root=LABEL=ubroot rw init={} {}", systemd::INIT, systemd::WORDS);
    disks.iter().fold(builder, |b, disk| b.disk(disk)).boot_options(&words).boot()
}

fn fine(log: &str) {
    for bad in ["I/O error", "EXT4-fs error", "BUG:", "Call Trace", "blocked for more than"] {
        assert!(!log.contains(bad), "{log}");
    }
}

#[test]
fn a_machine_runs_from_a_volume() {
    if !skipped("a_machine_runs_from_a_volume") {
        runs_from_a_volume(&INITRAMFS_TOOLS);
    }
}

#[test]
fn a_machine_with_dracut_runs_from_a_volume() {
    if !skipped("a_machine_with_dracut_runs_from_a_volume") {
        runs_from_a_volume(&DRACUT);
    }
}

#[track_caller]
fn runs_from_a_volume(by: &Tool) {
    let dir = Dir::new();
    let (cache, backing) = (dir.disk("cache", 192 * MIB), dir.disk("backing", 256 * MIB));
    let set = Set::new(&dir, &cache, &[&backing]);
    set.make(&["--bucket", "64k", "--writeback", "--label", "root"]);
    fill(&set, &root_file_system(&dir, "ubroot", 240 * MIB));
    ubcache(&["super", backing.host()])
        .ok()
        .out
        .contains("dirty")
        .then_some(())
        .expect("dirty data in the cache");
    let made = initramfs(&dir, by);
    let (first, last) = (made.first().unwrap(), made.last().unwrap());

    let mut vm = boot(&format!("{}-1", by.name), first, [&cache, &backing]);
    vm.sh("grep -qE '^/dev/(ublkb0|disk/by-label/ubroot) / ext4 rw' /proc/mounts && [ ! -e /dev/bcache0 ] && [ \"$(cat /proc/1/comm)\" = systemd ]").ok();
    // The process of the initramfs is there, under the name that keeps it alive, and its files are where it had them.
    vm.sh("pid=$(cat /run/ubcache/root.pid) && tr '\\0' ' ' </proc/$pid/cmdline | grep -q '^@ubcache up --root-storage' && \
           [ $(cat /proc/$pid/oom_score_adj) = -1000 ] && grep -q 'ready: /dev/ublkb0' /run/ubcache/root.out")
        .ok();
    // The daemon is another process, and leaves that set alone.
    vm.sh("systemctl start ubcache.service && ! ubcache register /dev/disk/by-id/virtio-cache 2>/run/refused && \
           grep -q 'in use' /run/refused")
        .ok();
    vm.sh("head -c 3000000 /dev/urandom >/kept && md5sum /kept >/kept.sum && sync && echo lost >/unsynced")
        .ok();
    fine(&vm.dmesg());
    vm.cut_power();

    // What was synced is there, and the file system makes good what was under way.
    let mut vm = boot(&format!("{}-2", by.name), last, [&cache, &backing]);
    vm.sh("md5sum -c /kept.sum").ok();
    let log = vm.dmesg();
    fine(&log);
    assert!(log.contains("(ublkb0): mounted filesystem") && log.contains("recovery complete"), "{log}");
    vm.sh("mkdir /many && cd /many && for n in $(seq 500); do echo $n >$n; done").ok();
    fine(&vm.ends_by("systemctl poweroff"));
    set.check();

    // Data without a sync before the shutdown is there as well, and the file system was left in good order.
    let whole = dir.path("whole");
    ubcache(&["extract", "-C", cache.host(), "-B", backing.host(), "-o", whole.to_str().unwrap()]).ok();
    let said = run_within(ubcache_vm::TIMEOUT, &tool("e2fsck"), &["-fn", whole.to_str().unwrap()]).ok();
    assert!(!said.out.contains("journal"), "{said}");
    let last =
        run_within(ubcache_vm::TIMEOUT, &tool("debugfs"), &["-R", "cat /many/500", whole.to_str().unwrap()])
            .ok();
    assert_eq!(last.line(), "500", "{last}");
}
