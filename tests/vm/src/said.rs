//! The result of a command, on the host or in the guest, and commands of the host with a time limit.

use std::ffi::OsStr;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Time limit of whatever should happen soon: the guest is emulated, and other processes use the machine too.
pub const TIMEOUT: Duration = Duration::from_secs(120);

/// Exit code and output of a command.
pub struct Said {
    /// The command, for messages.
    pub command: String,
    /// Exit code; −1 if a signal ended it.
    pub code: i32,
    /// Standard output, as it came.
    pub bytes: Vec<u8>,
    /// Standard output as text.
    pub out: String,
    /// Standard error as text.
    pub err: String,
}

impl Said {
    /// Puts the parts together.
    pub fn new(command: String, code: i32, bytes: Vec<u8>, err: &[u8]) -> Said {
        let out = String::from_utf8_lossy(&bytes).into_owned();
        Said { command, code, bytes, out, err: String::from_utf8_lossy(err).into_owned() }
    }

    /// It must have succeeded.
    #[track_caller]
    pub fn ok(self) -> Said {
        assert_eq!(self.code, 0, "{self}");
        self
    }

    /// It must have failed, with these words in what it said.
    #[track_caller]
    pub fn refused(self, words: &[&str]) -> Said {
        assert_ne!(self.code, 0, "{self}");
        for w in words {
            assert!(self.out.contains(w) || self.err.contains(w), "expected {w:?} in {self}");
        }
        self
    }

    /// Standard output without the white space around it.
    pub fn line(&self) -> &str {
        self.out.trim()
    }
}

impl fmt::Display for Said {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let short = |s: &str| s.chars().take(4000).collect::<String>();
        write!(f, "`{}` ended with {}\n{}{}", self.command, self.code, short(&self.out), short(&self.err))
    }
}

/// Runs a command of the host that has to end within `deadline`.
#[track_caller]
pub fn run_within<S: AsRef<OsStr>>(deadline: Duration, program: &Path, args: &[S]) -> Said {
    let mut command = Command::new(program);
    command.args(args);
    let shown = format!("{command:?}");
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let child = child.unwrap_or_else(|e| panic!("{shown}: {e}"));
    let pid = child.id();
    let (done, ended) = std::sync::mpsc::channel::<()>();
    let watch = std::thread::spawn(move || {
        if ended.recv_timeout(deadline) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
            kill(pid);
        }
    });
    let output: Output = child.wait_with_output().expect("a child of ours");
    drop(done);
    watch.join().expect("a thread that cannot fail");
    Said::new(shown, output.status.code().unwrap_or(-1), output.stdout, &output.stderr)
}

/// Runs a command of the host.
#[track_caller]
pub fn run<S: AsRef<OsStr>>(program: &Path, args: &[S]) -> Said {
    run_within(TIMEOUT, program, args)
}

/// Ends a process of ours as a crash does.
pub fn kill(pid: u32) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw) {
        // It may have ended already.
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
    }
}

/// Where a program of the host is; also looks where only root has its programs.
pub fn find(name: &str) -> Option<PathBuf> {
    let path = std::env::var("PATH").unwrap_or_default() + ":/usr/sbin:/sbin";
    path.split(':').map(|d| Path::new(d).join(name)).find(|p| p.is_file())
}

/// A program that the tests need.
#[track_caller]
pub fn tool(name: &str) -> PathBuf {
    find(name).unwrap_or_else(|| panic!("{name} is missing: run `scripts/deps vm`"))
}

/// Waits for a condition on the host.
#[track_caller]
pub fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + TIMEOUT;
    while !condition() {
        assert!(Instant::now() < deadline, "{what} does not come about within {TIMEOUT:?}");
        std::thread::sleep(Duration::from_millis(2));
    }
}
