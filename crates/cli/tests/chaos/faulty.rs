//! A backing device that fails, is slow, stands still or goes away on command: a file of nbdfuse over nbdkit.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use rustix::process::Signal;
use ubcache_cli::nbd_client::Client;

use crate::host;
use crate::load::{Load, Traffic};
use crate::place::*;
use crate::world::*;

const SSD: u64 = 12 << 20;
const HDD: u64 = 24 << 20;

/// The device, and the switch that makes it fail.
struct Faulty {
    fuse: Child,
    /// The process that has the data.
    server: u32,
    /// Requests fail while this file exists.
    errors: PathBuf,
    mount_point: PathBuf,
    file: String,
}

impl Faulty {
    /// Over a file whose contents stay; each request takes at least `delay_ms`.
    fn start(dir: &Dir, image: &str, delay_ms: u64) -> Faulty {
        // Each has its own names: what is left of one must not be taken for the other.
        let own = (0..).map(|n| dir.root().join(format!("faulty-{n}"))).find(|d| !d.exists());
        let own = own.expect("a free number");
        let mount_point = own.join("mnt");
        std::fs::create_dir_all(&mount_point).expect("a mount point");
        let (errors, pid_file) = (own.join("errors"), own.join("nbdkit.pid"));
        let file = mount_point.join("hdd");
        let fuse = Command::new("nbdfuse")
            .arg(&file)
            .args(["--command", "nbdkit", "-s", "--exit-with-parent", "-t", "8", "-P", host::text(&pid_file)])
            .args(["--filter=error", "--filter=delay", "file", image])
            .args([&format!("error-file={}", host::text(&errors)), "error=EIO", "error-rate=100%"])
            .args([&format!("rdelay={delay_ms}ms"), &format!("wdelay={delay_ms}ms")])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("this test needs nbdfuse: install the Debian package libnbd-bin");
        wait_until("the device", || file.exists());
        let pid = || std::fs::read_to_string(&pid_file).ok()?.trim().parse::<u32>().ok();
        wait_until("nbdkit", || pid().is_some());
        let server = pid().expect("seen above");
        let file = host::text(&file).to_owned();
        Faulty { fuse, server, errors, mount_point, file }
    }

    fn fail(&self, on: bool) {
        if on {
            std::fs::write(&self.errors, "").expect("a file");
        } else {
            std::fs::remove_file(&self.errors).expect("our file");
        }
    }
}

impl Faulty {
    fn remove(&mut self) {
        thaw(self.server);
        let _ = Command::new("umount").arg("-l").arg(&self.mount_point).output();
        let _ = self.fuse.kill();
        let _ = self.fuse.wait();
        let gone = || !matches!(process_state(self.server), Some(state) if state != 'Z');
        wait_until("the end of nbdkit", gone);
    }
}

impl Drop for Faulty {
    fn drop(&mut self) {
        self.remove();
    }
}

/// A set whose backing device is faulty. The device goes after everything that uses it.
struct Stage {
    place: Place,
    device: Faulty,
    image: String,
}

impl Stage {
    fn new(delay_ms: u64) -> Stage {
        Stage::with(SSD, delay_ms)
    }

    fn with(ssd_bytes: u64, delay_ms: u64) -> Stage {
        let dir = Dir::new();
        let (ssd, image) = (dir.sparse("ssd", ssd_bytes), dir.sparse("image", HDD));
        let device = Faulty::start(&dir, &image, delay_ms);
        let place = Place::with(dir, ssd, device.file.clone(), &["--writeback"]);
        Stage { place, device, image }
    }

    fn ready() -> bool {
        host::ready(&["unshare", "nbdkit", "nbdfuse"])
    }

    /// The device is made anew over the same data, as after a reboot of the machine that has it.
    fn replace_device(&mut self) {
        self.device.remove();
        self.device = Faulty::start(&self.place.dir, &self.image, 0);
        self.place.hdd = self.device.file.clone();
    }
}

/// A process that stands still until this is dropped.
struct Frozen(u32);

impl Frozen {
    fn new(pid: u32) -> Frozen {
        freeze(pid);
        Frozen(pid)
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        thaw(self.0);
    }
}

/// Load for so many answers; how many were errors, all of them those of a device.
#[track_caller]
fn with_errors(traffic: &mut Traffic, load: &mut Load, up: &Up, answers: u64) -> u64 {
    let mut errors = 0;
    for _ in 0..answers {
        traffic.top_up(load).expect("a server");
        match traffic.answer(load).expect("a server") {
            0 => {}
            5 => errors += 1,
            other => panic!("error {other}: {}", up.said()),
        }
    }
    errors
}

/// Requests that need the device fail while it does; what the cache can answer is answered; then everything is as
/// before, and what is dirty is written back.
#[test]
fn errors_for_a_while() {
    if !Stage::ready() {
        return;
    }
    let stage = Stage::new(1);
    let mut load = stage.place.load(41);
    let args = ["--set=sequential_cutoff=0", "--set=writeback_delay=0", "--set=writeback_percent=0"];
    let mut up = stage.place.up(&[&args[..], &["--set=device.io_error_limit=100000"]].concat());
    let mut traffic = Traffic::connect(&stage.place.socket);
    for _ in 0..3 {
        traffic.run(&mut load, 150);
        stage.device.fail(true);
        let errors = with_errors(&mut traffic, &mut load, &up, 200);
        assert!((1..200).contains(&errors), "{errors} of 200 failed: {}", up.said());
        stage.device.fail(false);
        // Those that were under way may still fail.
        traffic.settle(&mut load);
    }
    traffic.run(&mut load, 100);
    traffic.settle(&mut load);
    wait_until("everything is written back", || dirty_bytes(&mut up) == 0);
    load.judge_served(&stage.place.socket, "after errors");
    up.stop();
    stage.place.check();
    stage.place.finish(&mut load);
}

/// A device that keeps failing is given up. Nothing is lost: the next start has it all.
#[test]
fn errors_without_end() {
    if !Stage::ready() {
        return;
    }
    let stage = Stage::new(0);
    let mut load = stage.place.load(42);
    let up = stage.place.up(&["--set=sequential_cutoff=0", "--set=writeback_delay=0"]);
    let mut traffic = Traffic::connect(&stage.place.socket);
    traffic.run(&mut load, 300);
    stage.device.fail(true);
    wait_until("the device is given up", || {
        let errors = with_errors(&mut traffic, &mut load, &up, 24);
        errors == 24
    });
    stage.device.fail(false);
    traffic.settle(&mut load);
    assert_eq!(with_errors(&mut traffic, &mut load, &up, 24), 24, "given up until the next start");
    wait_until("a message", || up.said().contains("every request to it fails until"));
    up.kill();
    stage.place.check();
    stage.place.finish(&mut load);
}

/// A device that answers nothing for a while holds up only what needs it: what the cache has is read, dirty data is
/// written and flushed.
#[test]
fn a_device_that_hangs_holds_up_only_what_needs_it() {
    if !Stage::ready() {
        return;
    }
    // Nothing has to go past a cache of this size, however slow this machine is.
    let stage = Stage::with(80 << 20, 0);
    let mut load = stage.place.load(43);
    let args = [
        "--set=sequential_cutoff=0",
        "--set=congested_read_threshold_us=0",
        "--set=congested_write_threshold_us=0",
        "--set=writeback_delay=0",
        "--set=writeback_percent=0",
    ];
    let spare = (stage.place.sectors() * SECTOR) as u64;
    for round in 0..4u8 {
        let mut up = stage.place.up(&args);
        let mut traffic = Traffic::connect(&stage.place.socket);
        traffic.run(&mut load, 200);
        let mut frozen = Frozen::new(stage.device.server);
        // The first dirty data would have to be noted on the device.
        while dirty_bytes(&mut up) == 0 {
            drop(frozen);
            traffic.run(&mut load, 20);
            frozen = Frozen::new(stage.device.server);
        }
        traffic.top_up(&mut load).expect("a server");
        let mut client = Client::connect(stage.place.socket.as_ref(), "").expect("a server");
        client.set_timeout(Some(DEADLINE)).expect("a socket");
        client.write(spare, &[round + 1; 4096]).expect("a write to the cache");
        client.flush().expect("a flush of the cache");
        assert_eq!(client.read(spare, 4096).expect("a read of the cache"), [round + 1; 4096]);
        if round % 2 == 0 {
            drop(frozen);
            traffic.run(&mut load, 200);
            up.stop();
        } else {
            // Requests to the device are under way at the process crash.
            signal(up.pid(), Signal::KILL);
            drop(frozen);
            last_words(&mut traffic, &mut load);
            up.ended();
        }
        stage.place.check();
        let up = stage.place.up(&["--set=writeback_running=0"]);
        load.judge_served(&stage.place.socket, &format!("round {round}"));
        up.kill();
    }
    stage.place.finish(&mut load);
}

/// A device that is gone fails requests; it comes back, and everything is there.
#[test]
fn a_device_that_comes_back_has_all_data() {
    if !Stage::ready() {
        return;
    }
    let mut stage = Stage::new(0);
    let mut load = stage.place.load(44);
    let up = stage.place.up(&["--set=sequential_cutoff=0"]);
    let mut traffic = Traffic::connect(&stage.place.socket);
    traffic.run(&mut load, 300);
    signal(stage.device.server, Signal::KILL);
    wait_until("errors", || with_errors(&mut traffic, &mut load, &up, 24) > 0);
    traffic.settle(&mut load);
    // It cannot write everything back, but it ends.
    signal(up.pid(), Signal::TERM);
    up.ended();
    stage.replace_device();
    stage.place.check();
    stage.place.finish(&mut load);
}
