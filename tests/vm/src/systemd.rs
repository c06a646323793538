//! A guest whose first process is systemd: that of the host, with udev, the units it takes to get to a prompt, and the units
//! and rules of this workspace's package where the package puts them.
//!
//! Owns the list of files. The agent (`guest/init`) is a service there. Must not know what a test does with it.

use std::fs;
use std::path::{Path, PathBuf};

use crate::host::built;
use crate::said::find;
use crate::vm::Builder;

/// The first process.
pub const INIT: &str = "/lib/systemd/systemd";

/// Words for the kernel's command line: messages to the console, where a failed test finds them.
pub const WORDS: &str = "systemd.log_target=kmsg printk.devkmsg=on systemd.show_status=0 systemd.journald.forward_to_kmsg=1 \
    selinux=0 apparmor=0";

/// Programs in the directory of systemd; those of newer versions may be missing.
const PROGRAMS: &[&str] = &[
    "systemd",
    "systemd-executor",
    "systemd-journald",
    "systemd-udevd",
    "systemd-shutdown",
    "system-generators/systemd-fstab-generator",
];
const TOOLS: &[&str] = &["systemctl", "udevadm", "journalctl", "mount", "umount"];
const UNITS: &[&str] = &[
    "basic.target",
    "emergency.target",
    "final.target",
    "local-fs-pre.target",
    "local-fs.target",
    "multi-user.target",
    "paths.target",
    "poweroff.target",
    "shutdown.target",
    "slices.target",
    "sockets.target",
    "swap.target",
    "sysinit.target",
    "systemd-journald.service",
    "systemd-journald.socket",
    "systemd-journald-dev-log.socket",
    "systemd-poweroff.service",
    "systemd-udev-trigger.service",
    "systemd-udevd.service",
    "systemd-udevd-control.socket",
    "systemd-udevd-kernel.socket",
    "timers.target",
    "umount.target",
];
/// The units to start, and the targets that want them.
const WANTED: &[(&str, &str)] = &[
    ("sysinit.target", "systemd-journald.service"),
    ("sysinit.target", "systemd-udevd.service"),
    ("sysinit.target", "systemd-udev-trigger.service"),
    ("sockets.target", "systemd-journald.socket"),
    ("sockets.target", "systemd-journald-dev-log.socket"),
    ("sockets.target", "systemd-udevd-control.socket"),
    ("sockets.target", "systemd-udevd-kernel.socket"),
];
const AGENT: &str = "[Unit]\nDescription=Commands from the host\nDefaultDependencies=no\nAfter=systemd-udevd.service\n\
    [Service]\nExecStart=/bin/sh /init\nStandardInput=null\nTimeoutStopSec=2\n";
/// Without it there are no disks; no other program of the guest loads modules for hotplugged devices.
const DISKS: &str = "[Unit]\nDescription=Driver of the disks\nDefaultDependencies=no\nBefore=systemd-udev-trigger.service\n\
    [Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=/sbin/modprobe virtio_blk\n";
/// Owners of devices, by the rules of udev.
const GROUPS: &[&str] = &[
    "audio", "cdrom", "dialout", "disk", "input", "kmem", "kvm", "lp", "render", "sgx", "tape", "tty",
    "video",
];

/// Makes a machine described so far one with systemd; the kernel is to start [`INIT`].
///
/// # Panics
/// If the host has no systemd or no udev.
#[track_caller]
pub fn userland(mut builder: Builder) -> Builder {
    let own = Path::new("/lib/systemd");
    for name in PROGRAMS {
        let path = own.join(name);
        if path.is_file() {
            builder = builder.at(path);
        } else {
            let newer = *name == "systemd-executor";
            assert!(newer, "{} is missing: run `scripts/deps vm`", path.display());
        }
    }
    for name in TOOLS {
        assert!(find(name).is_some(), "{name} is missing: run `scripts/deps vm`");
        builder = builder.at(Path::new("/bin").join(name));
    }
    for unit in UNITS {
        let path = own.join("system").join(unit);
        if path.is_file() {
            builder = builder.file(&path, &format!("/lib/systemd/system/{unit}"));
        }
    }
    for (by, what) in WANTED {
        let link = format!("/etc/systemd/system/{by}.wants/{what}");
        builder = builder.link(&link, &format!("/lib/systemd/system/{what}"));
    }
    for rules in files(Path::new("/usr/lib/udev/rules.d")) {
        let name = rules.file_name().and_then(|n| n.to_str()).unwrap_or_default().to_owned();
        if ["50-udev", "60-block", "60-persistent-storage.", "99-systemd"].iter().any(|n| name.starts_with(n))
        {
            builder = builder.file(&rules, &format!("/usr/lib/udev/rules.d/{name}"));
        }
    }
    let groups: String = (1..).zip(GROUPS).map(|(id, name)| format!("{name}:x:{id}:\n")).collect();
    let builder = builder
        .text("0123456789abcdef0123456789abcdef\n", "/etc/machine-id")
        .text("ID=guest\nNAME=guest\n", "/etc/os-release")
        .text(&format!("root:x:0:\n{groups}"), "/etc/group")
        .text(DISKS, "/etc/systemd/system/disks.service")
        .link("/etc/systemd/system/sysinit.target.wants/disks.service", "../disks.service")
        .text(AGENT, "/etc/systemd/system/agent.service")
        .link("/etc/systemd/system/multi-user.target.wants/agent.service", "../agent.service")
        .link("/etc/systemd/system/default.target", "/lib/systemd/system/multi-user.target")
        .link("/sbin/init", INIT);
    packaged(builder).program(built("ubcache"))
}

/// The files of this workspace's package for systemd and udev.
fn packaged(mut builder: Builder) -> Builder {
    let packaging = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging");
    for (from, to) in [("systemd", "/usr/lib/systemd/system"), ("udev", "/usr/lib/udev/rules.d")] {
        for file in files(&packaging.join(from)) {
            let name = file.file_name().and_then(|n| n.to_str()).unwrap_or_default().to_owned();
            builder = builder.file(file, &format!("{to}/{name}"));
        }
    }
    builder
}

fn files(dir: &Path) -> Vec<PathBuf> {
    let entries =
        fs::read_dir(dir).unwrap_or_else(|e| panic!("{}: {e}: run `scripts/deps vm`", dir.display()));
    let mut files: Vec<_> = entries.flatten().map(|e| e.path()).filter(|p| p.is_file()).collect();
    files.sort();
    files
}
