//! Runs one program with a mutant switched on.
//!
//! Owns the process, its limits and its time-out. Must not know the meaning of suites or mutants.

use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use crate::error::Error;

/// Limit of address space, because a mutant may allocate in a loop.
const MEMORY_BYTES: u64 = 4 << 30;
/// Limit of a file's size, because a mutant may write in a loop.
const FILE_BYTES: u64 = 256 << 20;
/// The signal that ends a process after its limit of processor time.
const SIGXCPU: i32 = 24;

/// The program to run.
#[derive(Clone, Debug)]
pub struct Job {
    /// The program.
    pub program: PathBuf,
    /// Arguments of the program.
    pub args: Vec<String>,
    /// Working directory.
    pub directory: PathBuf,
    /// Limit of processor time. The limit of real time is four times as long, because the machine may be busy.
    pub limit: Duration,
}

/// The result of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The program ended with success.
    Passed,
    /// A test failed, or the program ended without success; with the name of the test if there is one.
    Failed(Option<String>),
    /// The program was killed after its time limit.
    TimedOut,
}

enum Line {
    FailedTest(String),
    End,
}

/// Runs the program with `variable` in its environment. The run ends at the first test that fails.
pub fn run(job: &Job, variable: (&str, &str), scratch: &Path) -> Result<Outcome, Error> {
    let deadline = Instant::now() + job.limit * 4;
    let seconds = job.limit.as_secs() + 1;
    std::fs::create_dir_all(scratch).map_err(Error::file(scratch))?;
    let mut child = Command::new("prlimit")
        .args([
            format!("--as={MEMORY_BYTES}"),
            format!("--fsize={FILE_BYTES}"),
            format!("--cpu={seconds}:{}", seconds + 5),
        ])
        .args(["--core=0", "--"])
        .arg(&job.program)
        .args(&job.args)
        .current_dir(&job.directory)
        .env(variable.0, variable.1)
        .env("TMPDIR", scratch)
        .env("RUST_BACKTRACE", "0")
        .env("RUST_TEST_THREADS", "1")
        // Proptest must not store a case that fails with this mutant, because it would run with the next one too.
        .env("PROPTEST_DISABLE_FAILURE_PERSISTENCE", "1")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|source| Error::Process { program: format!("prlimit {}", job.program.display()), source })?;
    let lost = |source| Error::Process { program: job.program.display().to_string(), source };
    let out = child.stdout.take();
    let (send, lines) = channel();
    let reader = std::thread::spawn(move || {
        if let Some(out) = out {
            read(BufReader::new(out), &send);
        }
        let _ = send.send(Line::End);
    });
    let outcome = match lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
        Ok(Line::FailedTest(name)) => Outcome::Failed(Some(name)),
        Ok(Line::End) => ended(&mut child, deadline).map_err(lost)?,
        Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => Outcome::TimedOut,
    };
    // This fails only if the process has ended already.
    let _ = child.kill();
    child.wait().map_err(lost)?;
    let _ = reader.join();
    let _ = std::fs::remove_dir_all(scratch);
    Ok(outcome)
}

fn read(out: impl BufRead, send: &Sender<Line>) {
    for line in out.split(b'\n').map_while(Result::ok) {
        if let Some(name) = failed_test(&String::from_utf8_lossy(&line)) {
            let _ = send.send(Line::FailedTest(name));
            return;
        }
    }
}

/// The name of the test, if the line of the test harness reports that it failed.
fn failed_test(line: &str) -> Option<String> {
    let rest = line.strip_prefix("test ")?;
    let (name, _) = rest.split_once(" ... ")?;
    rest.ends_with("FAILED").then(|| name.to_owned())
}

fn ended(child: &mut Child, deadline: Instant) -> std::io::Result<Outcome> {
    while Instant::now() < deadline {
        if let Some(status) = child.try_wait()? {
            return Ok(match status.signal() {
                Some(SIGXCPU) => Outcome::TimedOut,
                _ if status.success() => Outcome::Passed,
                _ => Outcome::Failed(None),
            });
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(Outcome::TimedOut)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(script: &str, limit: Duration) -> Outcome {
        let job = Job {
            program: "/bin/sh".into(),
            args: vec!["-c".into(), script.into()],
            directory: "/".into(),
            limit,
        };
        let scratch = std::env::temp_dir().join(format!(
            "ubcache-mutants-{}-{:?}",
            std::process::id(),
            std::thread::current().id()
        ));
        run(&job, ("UBCACHE_MUTANT", "7"), &scratch).unwrap()
    }

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn a_run_passes_or_fails_as_its_program_does() {
        assert_eq!(outcome("test $UBCACHE_MUTANT = 7", LONG), Outcome::Passed);
        assert_eq!(outcome("exit 3", LONG), Outcome::Failed(None));
        assert_eq!(outcome("kill -SEGV $$", LONG), Outcome::Failed(None));
    }

    #[test]
    fn the_first_failed_test_ends_it() {
        let script = "echo 'test a::b ... ok'; echo 'test a::c ... FAILED'; exec sleep 1000";
        assert_eq!(outcome(script, LONG), Outcome::Failed(Some("a::c".into())));
    }

    #[test]
    fn time_is_limited() {
        assert_eq!(outcome("exec sleep 1000", Duration::from_millis(50)), Outcome::TimedOut);
        assert_eq!(outcome("while :; do :; done", Duration::from_millis(900)), Outcome::TimedOut);
    }

    #[test]
    fn memory_is_limited() {
        assert_eq!(outcome("test $(ulimit -v) = 4194304", LONG), Outcome::Passed);
    }

    #[test]
    fn only_lines_of_the_harness_name_tests() {
        assert_eq!(failed_test("test x::y ... FAILED"), Some("x::y".into()));
        assert_eq!(failed_test("test x::y - should panic ... FAILED"), Some("x::y - should panic".into()));
        assert_eq!(failed_test("test x::y ... ok"), None);
        assert_eq!(failed_test("test result: FAILED. 1 passed"), None);
    }
}
