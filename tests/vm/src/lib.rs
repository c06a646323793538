//! A kernel in a virtual machine as judge of what ubcache writes, and as its client.
//!
//! Owns machines, disks, and what guests run; tests are in `tests/`, need the feature `vm`, and are run by
//! `make vm-test`. Must not know how the engine works: it judges from outside.
//!
//! ```no_run
//! use ubcache_vm::*;
//!
//! let dir = Dir::new();                                   // gone at the end of the test
//! let disk = dir.disk("backing", 64 << 20);               // sparse file here, /dev/disk/backing there
//! let mut vm = Vm::build("my test")
//!     .disk(&disk)                                        // or disk.slow(150): a hard disk
//!     .tools(&["fio", "mkfs.xfs"])                        // programs of the host, with their libraries
//!     .program(built("ubcache"))                          // a program of this workspace
//!     .boot();                                            // 3 to 6 seconds
//! vm.sh("modprobe xfs && mkfs.xfs /dev/disk/backing && mount /dev/disk/backing /mnt").ok();
//! vm.sh("(fio --name=x --directory=/mnt --size=8M --rw=randwrite; echo done >/dev/ports/progress) >/tmp/log 2>&1 &").ok();
//! vm.wait_for_progress("fio ends", |p| p.contains("done")); // or vm.wait_for("a mount", "grep ' /mnt ' /proc/mounts")
//! let said = vm.sh("df /mnt; exit 3");                    // said.code, said.out, said.err; .ok() demands 0
//! assert_eq!(said.code, 3);
//! vm.cut_power();                                         // kills QEMU; then boot another Vm on the same disks
//! ```
//!
//! * The guest is Debian's cloud kernel 6.12 with busybox; modules of `initramfs::MODULES` are on board, `modprobe`
//!   loads them. There is no udev. Root is a ramdisk: nothing of it survives.
//! * `systemd::userland` makes it a guest with systemd and udev of the host; then there are the package's units and rules, too.
//! * **Power losses**: requests that the guest saw completed are kept, flushed or not (they are in the host's memory);
//!   requests under way are lost or kept in part. The guest sees disks with volatile write caches and flushes them.
//!   `disk.volatile(&power)` has such a cache: a cut loses any part of what was answered and not flushed, and
//!   `power.stop_after(n)` chooses the moment by the number of writes and flushes.
//! * A test that fails leaves the console's log in `<target>/vm-logs`, and with `UBCACHE_VM_KEEP=1` its images.
//! * Two processors, 768 MiB, emulated (`UBCACHE_VM_ACCEL=kvm` where the host can do that): an instruction takes about
//!   ten times as long as usual. `UBCACHE_VM_SKIP=1` skips all tests, loudly.

pub mod artifacts;
pub mod bcache;
mod cpio;
pub mod disk;
pub mod guest;
pub mod guest_load;
pub mod host;
pub mod initramfs;
pub mod load;
pub mod ours;
pub mod power;
pub mod said;
pub mod systemd;
pub mod vm;

use std::io::Write as _;

pub use bcache::Kernel;
pub use disk::{Dir, Disk};
pub use guest::Guest;
pub use host::built;
pub use load::{Map, Model, Plan};
pub use ours::{Set, Up};
pub use power::Power;
pub use said::{Said, TIMEOUT, run, run_within, tool, wait_until};
pub use vm::Vm;

/// Whether the user asked to skip these tests; says so. Every test that boots a machine asks first.
pub fn skipped(test: &str) -> bool {
    let skip = std::env::var_os("UBCACHE_VM_SKIP").is_some_and(|v| v != "0" && !v.is_empty());
    if skip {
        // Not `eprintln!`: the test harness keeps what it says in a test that passes. `scripts/test` counts these lines.
        let line = format!("skipped: UBCACHE_VM_SKIP is set ({test})\n");
        let _ = std::io::stderr().write_all(line.as_bytes());
    }
    skip
}
