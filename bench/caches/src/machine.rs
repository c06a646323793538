//! The virtual machine and its devices.
//!
//! | name | what |
//! |---|---|
//! | `ram` | a RAM disk of the guest, 600 MiB: a cache device without latency |
//! | `ssd` | 600 MiB, 3000 requests a second |
//! | `hdd` | 2000 MiB, 150 requests and 150 MB a second |
//! | `fast` | 1 GiB, as fast as the host: a backing device that is not in the way |

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;

use ubcache_vm::{Dir, Vm};

use crate::profile;

const MIB: u64 = 1 << 20;
/// Size of the cache devices.
pub const CACHE_MIB: u64 = 600;
/// Size of the slow backing device.
pub const HDD_MIB: u64 = 2000;

/// A device for the cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cache {
    /// The RAM disk.
    Ram,
    /// 3000 requests a second.
    Ssd,
}

/// A device to be cached.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Backing {
    /// 150 requests a second.
    Hdd,
    /// Not in the way.
    Fast,
}

/// Conditions that differ from those of the table.
#[derive(Clone, Copy, Debug)]
pub struct Conditions {
    /// Durations are divided by this.
    pub shorten_by: u32,
    /// Samples are taken of where the time goes.
    pub profile: bool,
    /// Processors never halt.
    pub awake: bool,
}

/// A booted machine with its devices.
pub struct Lab {
    /// The machine.
    pub vm: Vm,
    conditions: Conditions,
    _dir: Dir,
}

impl Lab {
    /// Boots.
    ///
    /// # Panics
    /// If the machine does not come up, or a program is missing.
    pub fn boot(conditions: Conditions) -> Lab {
        let dir = Dir::new();
        let ssd = dir.disk("ssd", CACHE_MIB * MIB).slow(3000);
        let hdd = dir.disk("hdd", HDD_MIB * MIB).slow(150).limited(150_000_000);
        let fast = dir.disk("fast", 1024 * MIB);
        let mut vm = Vm::build("side-by-side")
            .boot_options(if conditions.awake { "idle=poll" } else { "" })
            .disk(&ssd)
            .disk(&hdd)
            .disk(&fast)
            .memory_mib(2600)
            .tools(&["fio", "make-bcache", "dmsetup", "sysbench", "mkfs.ext4"])
            .tools(if conditions.profile { &["perf"] } else { &[] })
            .program(beside("ubcache"))
            .boot();
        vm.sh(
            "modprobe bcache; modprobe ublk_drv; modprobe dm_mod; modprobe dm_cache; modprobe dm_cache_smq; \
               modprobe dm_writecache; modprobe loop",
        )
        .ok();
        Lab { vm, conditions, _dir: dir }
    }

    /// Does some work; if there is to be a profile, where the time went meanwhile.
    pub fn measured(&mut self, work: impl FnOnce(&mut Lab)) -> Option<String> {
        if self.conditions.profile {
            profile::begin(&mut self.vm);
        }
        work(self);
        self.conditions.profile.then(|| profile::end(&mut self.vm))
    }

    /// Seconds of a run that takes `seconds` if it is not shortened.
    pub fn seconds(&self, seconds: u32) -> u32 {
        self.shortened(seconds).max(2)
    }

    /// The amount `all`, divided as `--shorten-by` asks.
    pub fn shortened(&self, all: u32) -> u32 {
        all / self.conditions.shorten_by
    }

    /// Both devices as new; their paths.
    pub fn fresh(&mut self, cache: Cache, backing: Backing) -> (String, String) {
        let cache = match cache {
            Cache::Ram => {
                // Two of them: dm-cache wants a device for its metadata.
                let sectors_kib = CACHE_MIB * 1024;
                self.vm
                    .sh(&format!("rmmod brd 2>/dev/null; modprobe brd rd_nr=2 rd_size={sectors_kib}"))
                    .ok();
                "/dev/ram0"
            }
            Cache::Ssd => "/dev/disk/ssd",
        };
        let backing = match backing {
            Backing::Hdd => "/dev/disk/hdd",
            Backing::Fast => "/dev/disk/fast",
        };
        self.vm.sh("lsmod | grep -q ^brd || modprobe brd rd_nr=2 rd_size=65536").ok();
        for device in [cache, backing, "/dev/ram1"] {
            self.vm.sh(&format!("dd if=/dev/zero of={device} bs=1M count=4 conv=fsync 2>/dev/null")).ok();
        }
        (cache.into(), backing.into())
    }

    /// The description of the machine, for readers of the figures.
    pub fn describe(&mut self) -> BTreeMap<String, String> {
        let mut about = host();
        let mut say = |key: &str, value: String| about.insert(key.to_owned(), value);
        let idle = if self.conditions.awake { " that never halt" } else { "" };
        say("guest", format!("QEMU, 2 processors{idle}, 2600 MiB of memory"));
        say("guest kernel", self.vm.sh("uname -r").ok().line().to_owned());
        say("fio", self.vm.sh("fio --version").ok().line().to_owned());
        about
    }
}

/// Processors of this machine, and the version of ubcache.
pub fn host() -> BTreeMap<String, String> {
    let mut about = BTreeMap::new();
    let mut say = |key: &str, value: String| about.insert(key.to_owned(), value);
    let processors = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = processors.lines().find_map(|l| l.strip_prefix("model name")).unwrap_or("unknown");
    say("host processor", model.trim_start_matches(['\t', ':', ' ']).to_owned());
    say("host processors", std::thread::available_parallelism().map_or(0, usize::from).to_string());
    say("ubcache", said(Command::new(beside("ubcache")).arg("--version")));
    say("commit", commit());
    say("date", said(Command::new("date").args(["-u", "+%F"])));
    about
}

/// What was built, as far as one can tell from here: results and documents, which this program writes, do not count.
fn commit() -> String {
    let what = said(Command::new("git").args(["describe", "--always"]));
    let rest = ["status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench/results", ":!docs"];
    match said(Command::new("git").args(rest)).as_str() {
        "" => what,
        _ => what + "-dirty",
    }
}

/// A program beside this one: they are built together.
///
/// # Panics
/// If it is not there.
pub fn beside(program: &str) -> PathBuf {
    let path = std::env::current_exe().map(|exe| exe.with_file_name(program)).unwrap_or_default();
    assert!(path.is_file(), "{} is not there: `make bench` builds it", path.display());
    path
}

/// The output of a program; `unknown` if it fails.
fn said(command: &mut Command) -> String {
    match command.output() {
        Ok(o) if o.status.success() => String::from_utf8_lossy(&o.stdout).trim().to_owned(),
        _ => "unknown".into(),
    }
}
