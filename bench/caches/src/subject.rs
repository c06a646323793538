//! The contenders: how each is set up on a pair of devices, drained, and removed.
//!
//! All of them run with their default settings, in writeback mode; each job names the settings that it changes.

use std::time::Duration;

use clap::ValueEnum;
use ubcache_vm::Vm;

/// How long an orderly end may take; a kernel drains before it lets go of a device.
const LONG: Duration = Duration::from_secs(1800);

/// A contender.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
#[value(rename_all = "kebab-case")]
pub enum Subject {
    /// The cache device alone.
    RawCache,
    /// The backing device alone.
    RawBacking,
    /// The kernel's bcache.
    Bcache,
    /// dm-cache with smq.
    DmCache,
    /// dm-writecache.
    DmWritecache,
    /// The cache device as a backing device through ublk, without a cache: what ublk itself costs.
    Ublk,
    /// ubcache over ublk.
    Ubcache,
}

/// A contender on its devices.
pub struct Running {
    subject: Subject,
    /// The device to use.
    pub device: String,
}

impl Subject {
    /// In the order of tables.
    pub const ALL: &[Subject] = &[
        Subject::RawCache,
        Subject::RawBacking,
        Subject::Bcache,
        Subject::DmCache,
        Subject::DmWritecache,
        Subject::Ublk,
        Subject::Ubcache,
    ];

    /// Its name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Subject::RawCache => "raw cache device",
            Subject::RawBacking => "raw backing device",
            Subject::Bcache => "kernel bcache",
            Subject::DmCache => "dm-cache",
            Subject::DmWritecache => "dm-writecache",
            Subject::Ublk => "cache device over ublk",
            Subject::Ubcache => "ubcache",
        }
    }

    /// Whether it is a cache.
    pub fn caches(self) -> bool {
        !matches!(self, Subject::RawCache | Subject::RawBacking | Subject::Ublk)
    }

    /// Puts it onto the devices, which are new.
    pub fn start(self, vm: &mut Vm, cache: &str, backing: &str) -> Running {
        let sectors = |vm: &mut Vm| vm.sh(&format!("blockdev --getsz {backing}")).ok().line().to_owned();
        let device = match self {
            Subject::RawCache => cache.to_owned(),
            Subject::RawBacking => backing.to_owned(),
            Subject::Bcache => {
                vm.sh(&format!("make-bcache --writeback -C {cache} -B {backing} >/dev/null")).ok();
                register(vm, cache, backing)
            }
            Subject::DmCache => {
                let n = sectors(vm);
                let table = format!("0 {n} cache /dev/ram1 {cache} {backing} 64 1 writeback smq 0");
                device_mapper(vm, &table)
            }
            Subject::DmWritecache => {
                let n = sectors(vm);
                device_mapper(vm, &format!("0 {n} writecache s {backing} {cache} 4096 0"))
            }
            Subject::Ublk => {
                vm.sh(&format!("ubcache make -B {cache} >/dev/null")).ok();
                ubcache(vm, &format!("--without-cache -B {cache}"))
            }
            Subject::Ubcache => {
                vm.sh(&format!("ubcache make --writeback -C {cache} -B {backing} >/dev/null")).ok();
                ubcache(vm, &format!("-C {cache} -B {backing}"))
            }
        };
        Running { subject: self, device }
    }

    /// Puts bcache or ubcache onto devices that it was on before; also the milliseconds by the guest's clock until the
    /// first block could be read.
    ///
    /// # Panics
    /// For others.
    pub fn start_again(self, vm: &mut Vm, cache: &str, backing: &str) -> (Running, f64) {
        let device = match self {
            Subject::Bcache => "/dev/bcache0",
            Subject::Ubcache => "/dev/ublkb0",
            _ => panic!("{} is not started again", self.name()),
        };
        let read = format!(
            "until dd if={device} of=/dev/null bs=4k count=1 iflag=direct 2>/dev/null; do usleep 1000; done"
        );
        let now = "awk '{ printf \"%d\", $1 * 1000 }' /proc/uptime";
        let start = match self {
            // After a stop the kernel holds the devices for a while. That is not part of the next start.
            Subject::Bcache => format!(
                "cache=$(readlink -f {cache}); backing=$(readlink -f {backing}); cd /sys/fs/bcache; n=0; \
                 until from=$({now}); echo $cache 2>/dev/null >register; do \
                 n=$((n+1)); [ $n -lt 500 ] || exit 1; usleep 10000; done; echo $backing >register; \
                 until ! grep -q 'no cache' /sys/block/bcache0/bcache/state; do usleep 1000; done"
            ),
            _ => format!("from=$({now}); {}", ubcache_script(&format!("-C {cache} -B {backing}"))),
        };
        let said = vm.sh(&format!("({start}; {read}; echo $(($({now}) - from)))")).ok();
        let ms = said.line().parse().unwrap_or_else(|e| panic!("{said}: {e}"));
        (Running { subject: self, device: device.to_owned() }, ms)
    }
}

fn register(vm: &mut Vm, cache: &str, backing: &str) -> String {
    // The kernel wants the name that it gave itself.
    for device in [cache, backing] {
        vm.sh(&format!("echo $(readlink -f {device}) >/sys/fs/bcache/register")).ok();
    }
    let state = "/sys/block/bcache0/bcache/state";
    vm.wait_for("bcache0", &format!("[ -b /dev/bcache0 ] && ! grep -q 'no cache' {state}"));
    "/dev/bcache0".to_owned()
}

fn device_mapper(vm: &mut Vm, table: &str) -> String {
    let script = format!(
        "dmsetup create --noudevsync subject --table '{table}' && dmsetup info -c --noheadings -o minor subject"
    );
    format!("/dev/dm-{}", vm.sh(&script).ok().line().trim())
}

/// Starts `ubcache up` in the background with a pipe for commands.
fn ubcache_script(arguments: &str) -> String {
    format!(
        "rm -f /tmp/in /tmp/up; mkfifo /tmp/in; \
         (exec 4<>/tmp/in; exec ubcache up {arguments} --export ublk --json --stdin <&4 >/tmp/up 2>/tmp/up.err 3>&-) & true"
    )
}

/// Starts `ubcache up`; the device.
fn ubcache(vm: &mut Vm, arguments: &str) -> String {
    vm.sh(&ubcache_script(arguments)).ok();
    vm.wait_for("ubcache", "cat /tmp/up.err; grep -q ready /tmp/up");
    let find = "sed -n 's/.*\"address\":\"\\([^\"]*\\)\".*/\\1/p' /tmp/up | head -1";
    vm.sh(find).ok().line().to_owned()
}

/// A command for the running ubcache.
fn tell_ubcache(vm: &mut Vm, command: &str) {
    vm.sh(&format!("echo '{command}' >/tmp/in")).ok();
    vm.wait_for(command, &format!("grep -F 'done' /tmp/up | grep -qF '{command}'"));
}

impl Running {
    /// Sequential requests are cached too: for filling a cache with data that a job will hit.
    pub fn cache_everything(&self, vm: &mut Vm) {
        match self.subject {
            Subject::Bcache => {
                vm.sh("echo 0 >/sys/block/bcache0/bcache/sequential_cutoff").ok();
            }
            Subject::Ubcache => tell_ubcache(vm, "set sequential_cutoff=0"),
            _ => {}
        }
    }

    /// Turns writeback off: dirty data stays in the cache as long as there is room.
    pub fn disable_writeback(&self, vm: &mut Vm) {
        match self.subject {
            Subject::Bcache => {
                vm.sh("echo 0 >/sys/block/bcache0/bcache/writeback_running").ok();
            }
            Subject::Ubcache => tell_ubcache(vm, "set writeback_running=0"),
            _ => {}
        }
    }

    /// Begins to write everything back, as fast as it can.
    pub fn begin_drain(&self, vm: &mut Vm) {
        match self.subject {
            Subject::Bcache => {
                vm.sh("cd /sys/block/bcache0/bcache; echo 0 >writeback_percent; echo 0 >writeback_delay; \
                       echo 1 >writeback_running")
                    .ok();
            }
            Subject::DmCache => {
                let script = "t=$(dmsetup table subject | sed 's/ smq .*/ cleaner 0/'); dmsetup suspend subject; \
                              dmsetup reload subject --table \"$t\"; dmsetup resume --noudevsync subject";
                vm.sh_within(LONG, script).ok();
            }
            Subject::DmWritecache => {
                vm.sh("(dmsetup message subject 0 flush; echo >/tmp/flushed) >/tmp/flush 2>&1 &").ok();
            }
            Subject::Ubcache => {
                for setting in ["writeback_percent=0", "writeback_delay=0", "writeback_running=1"] {
                    tell_ubcache(vm, &format!("set {setting}"));
                }
            }
            _ => {}
        }
    }

    /// A condition of the guest's shell: everything is written back.
    pub fn drained(&self) -> &'static str {
        match self.subject {
            Subject::Bcache => "grep -q clean /sys/block/bcache0/bcache/state",
            // Word 14 of the status is the number of dirty blocks.
            Subject::DmCache => "[ \"$(dmsetup status subject | awk '{ print $14 }')\" = 0 ]",
            Subject::DmWritecache => "[ -e /tmp/flushed ]",
            Subject::Ubcache => {
                "echo stats >/tmp/in; sleep 0.2; tail -1 /tmp/up | grep -q '\"dirty_bytes\":0,.*\"state\":\"clean\"'"
            }
            _ => "true",
        }
    }

    /// Takes it off the devices as roughly as the contender allows within one boot: `kill -9`, or a stop.
    pub fn crash(self, vm: &mut Vm) {
        if self.subject == Subject::Ubcache {
            vm.sh("kill -9 $(pidof ubcache)").ok();
            vm.wait_for("ubcache dies", "! pidof ubcache");
        } else {
            self.stop(vm);
        }
    }

    /// Takes it off the devices. Dirty data may stay behind.
    pub fn stop(self, vm: &mut Vm) {
        match self.subject {
            Subject::RawCache | Subject::RawBacking => {}
            Subject::Bcache => {
                vm.sh("rm -f /tmp/flushed; echo 1 >/sys/block/bcache0/bcache/stop; \
                       for s in /sys/fs/bcache/*-*; do echo 1 >$s/stop; done")
                    .ok();
                vm.wait_for("bcache stops", "[ ! -e /sys/block/bcache0 ] && ! ls -d /sys/fs/bcache/*-*");
            }
            Subject::DmCache | Subject::DmWritecache => {
                vm.sh_within(LONG, "rm -f /tmp/flushed; dmsetup remove --noudevsync --force subject").ok();
            }
            Subject::Ublk | Subject::Ubcache => {
                vm.sh("kill -TERM $(pidof ubcache)").ok();
                vm.wait_for("ubcache stops", "! pidof ubcache");
            }
        }
    }
}
