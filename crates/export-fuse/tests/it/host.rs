//! What the tests need of the host, and what they give back to it whatever happens.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Whether this test can run: false only if it was asked to be left out. What is missing is an error,
/// because a test that quietly does nothing looks like one that passes.
pub fn ready(programs: &[&str]) -> bool {
    if rig::skip_requested("UBCACHE_SKIP_ROOT_TESTS") {
        return false;
    }
    let host = export_fuse::probe();
    let hint = "(set UBCACHE_SKIP_ROOT_TESTS=1 to leave these tests out)";
    assert!(host.fuse.is_ok(), "this test needs FUSE {hint}: {:?}", host.fuse);
    assert!(host.loop_device.is_ok(), "this test needs root and loop devices {hint}: {:?}", host.loop_device);
    for program in programs {
        let found =
            Command::new("sh").args(["-c", &format!("command -v {program}")]).env("PATH", path()).output();
        assert!(
            found.expect("a shell").status.success(),
            "this test needs the program {program} (Debian: e2fsprogs, util-linux, fio, fuse3) {hint}"
        );
    }
    true
}

/// Runs a program that must succeed; its standard output.
pub fn run(program: &str, arguments: &[&str]) -> String {
    let output = outcome(program, arguments);
    assert!(
        output.status.success(),
        "{program} {arguments:?}: {}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Runs a program, which may fail. None is given for ever.
pub fn outcome(program: &str, arguments: &[&str]) -> Output {
    let mut command = Command::new("timeout");
    command.args(["-k", "5", "120", program]).args(arguments).env("PATH", path());
    command.output().unwrap_or_else(|e| panic!("{program}: {e}"))
}

/// Where programs are looked for: tools for disks are not on the path of all users.
fn path() -> String {
    std::env::var("PATH").unwrap_or_default() + ":/usr/sbin:/sbin"
}

pub fn text(path: &Path) -> &str {
    path.to_str().expect("a path of the test")
}

/// A mounted file system; dropping it unmounts it, lazily if it stays in use.
pub struct Mounted {
    pub at: PathBuf,
    done: bool,
}

impl Mounted {
    pub fn new(device: &Path, at: &Path) -> Mounted {
        std::fs::create_dir_all(at).expect("a mount point");
        run("mount", &[text(device), text(at)]);
        Mounted { at: at.to_path_buf(), done: false }
    }

    pub fn unmount(mut self) {
        run("umount", &[text(&self.at)]);
        self.done = true;
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if !self.done {
            let _ = Command::new("umount").arg("-l").arg(&self.at).output();
        }
    }
}

/// Takes away what a server that was killed left at a directory.
pub struct Debris(pub PathBuf);

impl Drop for Debris {
    fn drop(&mut self) {
        let devices = Command::new("losetup").args(["-l", "-n", "-O", "NAME,BACK-FILE"]).output();
        let list = devices.map(|o| String::from_utf8_lossy(&o.stdout).into_owned()).unwrap_or_default();
        for line in list.lines().filter(|l| l.contains(text(&self.0))) {
            if let Some(device) = line.split_whitespace().next() {
                let _ = Command::new("losetup").args(["-d", device]).output();
            }
        }
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        for _ in mounts.lines().filter(|l| l.split(' ').nth(4) == self.0.to_str()) {
            let _ = Command::new("umount").arg("-l").arg(&self.0).output();
        }
    }
}

/// The loop devices over files in `dir`.
pub fn loops_over(dir: &Path) -> Vec<String> {
    let list = run("losetup", &["-l", "-n", "-O", "NAME,BACK-FILE"]);
    list.lines().filter(|l| l.contains(text(dir))).map(str::to_string).collect()
}

pub fn is_mount_point(dir: &Path) -> bool {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").expect("the table of mounts");
    mounts.lines().any(|l| l.split(' ').nth(4) == dir.to_str())
}

/// The file system by which connections are ended. Most hosts have it mounted already.
pub fn fuse_control() -> Option<Mounted> {
    let at = Path::new("/sys/fs/fuse/connections");
    if is_mount_point(at) {
        return None;
    }
    run("mount", &["-t", "fusectl", "fusectl", text(at)]);
    Some(Mounted { at: at.to_path_buf(), done: false })
}

/// Waits for something that has to happen soon.
pub fn soon(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while !condition() {
        assert!(std::time::Instant::now() < deadline, "{what}: not within a minute");
        std::thread::yield_now();
    }
}
