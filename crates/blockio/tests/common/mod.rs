//! What the integration tests share.
#![allow(dead_code, reason = "each test binary uses its own part")]

use std::cell::Cell;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::rc::Rc;

use blockio::{Backend, Driver, DriverOptions};
use format::Sectors;
use io::{Clock, Fifo, Handle, Nanos, Runtime};
use tempfile::TempDir;

/// A directory on a disk's file system: the default temporary directory may be a tmpfs.
pub fn dir() -> TempDir {
    TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// A driver of each backend that can be had here.
pub fn drivers() -> Vec<Driver> {
    let pool = DriverOptions { backend: Backend::Pool, ..DriverOptions::default() };
    // A small ring, so that the overflow queue is used.
    let ring = DriverOptions { ring_entries: 32, ..DriverOptions::default() };
    [ring, pool].map(|options| Driver::new(options).unwrap()).into()
}

/// A file full of holes.
pub fn sparse_file(dir: &Path, name: &str, sectors: Sectors) -> PathBuf {
    let path = dir.join(name);
    File::create(&path).unwrap().set_len(sectors.bytes()).unwrap();
    path
}

/// A loop device with direct I/O on a sparse file; detached and removed when dropped.
pub struct LoopDevice {
    /// Its path in `/dev`.
    pub path: PathBuf,
    /// The file that is removed with the device.
    file: Option<PathBuf>,
}

impl LoopDevice {
    /// `None`, and the test is skipped, where this system or user has none to give.
    pub fn new(dir: &Path, name: &str, sectors: Sectors, block_bytes: u32) -> Option<LoopDevice> {
        let file = sparse_file(dir, name, sectors);
        let out = Command::new("losetup")
            .args(["--find", "--show", "--direct-io=on", "--sector-size", &block_bytes.to_string()])
            .arg(&file)
            .output();
        match out {
            Ok(out) if out.status.success() => {
                let path = PathBuf::from(String::from_utf8(out.stdout).unwrap().trim());
                Some(LoopDevice { path, file: Some(file) })
            }
            other => {
                rig::skipped(format_args!("no loop device can be made: {other:?}"));
                None
            }
        }
    }

    /// A loop device on a file or device that exists, with these options of losetup.
    #[allow(dead_code, reason = "not every test program needs it")]
    pub fn on(file: &Path, args: &[&str]) -> Option<LoopDevice> {
        let out = Command::new("losetup").args(["--find", "--show"]).args(args).arg(file).output().ok()?;
        let path = out.status.success().then(|| String::from_utf8(out.stdout).unwrap())?;
        Some(LoopDevice { path: PathBuf::from(path.trim()), file: None })
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.path).status();
        if let Some(file) = &self.file {
            let _ = std::fs::remove_file(file);
        }
    }
}

struct VirtualClock(Rc<Cell<u64>>);

impl Clock for VirtualClock {
    fn now(&self) -> Nanos {
        Nanos(self.0.get())
    }

    fn wall_seconds(&self) -> u64 {
        0
    }
}

/// Runs a task in simulated time: whenever nothing is ready, the clock jumps to the next timer.
pub fn virtual_time<T: 'static, F>(task: impl FnOnce(Handle) -> F) -> T
where
    F: Future<Output = T> + 'static,
{
    let now = Rc::new(Cell::new(0));
    let runtime = Runtime::new(Rc::new(VirtualClock(now.clone())), 1);
    let done = runtime.handle().spawn(task(runtime.handle()));
    loop {
        runtime.run(&mut Fifo, usize::MAX);
        if let Some(value) = done.try_take() {
            return value;
        }
        let next = runtime.next_deadline().expect("a task that waits for nothing never ends");
        now.set(next.0);
        runtime.fire_timers();
    }
}
