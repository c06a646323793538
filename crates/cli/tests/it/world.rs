//! What the tests share: the program, devices in files, a server in a process, deadlines.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use serde_json::Value;
use sha2::{Digest, Sha256};
use ubcache_cli::nbd_client::Client;

/// How long anything may take that should be there soon.
pub const DEADLINE: Duration = Duration::from_secs(60);

pub const SECTOR: usize = 512;
/// Where data begins on a backing device.
pub const DATA_OFFSET: u64 = 16 * 512;

pub fn program() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_ubcache"))
}

/// What a run of the program said.
pub struct Said {
    pub code: i32,
    pub out: String,
    pub err: String,
}

impl Said {
    pub fn of(output: Output) -> Said {
        let text = |b: Vec<u8>| String::from_utf8_lossy(&b).into_owned();
        let code = output.status.code().unwrap_or(-1);
        let said = Said { code, out: text(output.stdout), err: text(output.stderr) };
        assert!(!said.err.contains("panicked"), "{said}");
        said
    }

    #[track_caller]
    pub fn ok(self) -> Said {
        assert_eq!(self.code, 0, "{self}");
        self
    }

    /// Exit code 1, a message, and these words in what it said.
    #[track_caller]
    pub fn refused(self, words: &[&str]) -> Said {
        assert_eq!(self.code, 1, "{self}");
        self.says(words)
    }

    #[track_caller]
    pub fn usage(self) -> Said {
        assert_eq!(self.code, 2, "{self}");
        assert_eq!(self.out, "", "{self}");
        assert_ne!(self.err, "", "{self}");
        self
    }

    #[track_caller]
    pub fn says(self, words: &[&str]) -> Said {
        for w in words {
            assert!(self.out.contains(w) || self.err.contains(w), "expected {w:?} in {self}");
        }
        self
    }

    pub fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|e| panic!("{e}: {self}"))
    }
}

impl std::fmt::Display for Said {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "exit code {}\nstdout: {}\nstderr: {}", self.code, self.out, self.err)
    }
}

/// Runs the program; it must end by itself.
pub fn run<S: AsRef<std::ffi::OsStr>>(args: &[S]) -> Said {
    run_as(program(), args)
}

pub fn run_as<S: AsRef<std::ffi::OsStr>>(program: &Path, args: &[S]) -> Said {
    let mut command = Command::new(program);
    command.args(args);
    Said::of(output(command))
}

/// Output of a command that has to end in time.
pub fn output(mut command: Command) -> Output {
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let child = child.unwrap_or_else(|e| panic!("{:?}: {e}", command.get_program()));
    let pid = child.id();
    let (done, ended) = channel();
    let watch = std::thread::spawn(move || {
        if ended.recv_timeout(4 * DEADLINE).is_err() {
            signal(pid, rustix::process::Signal::KILL);
        }
    });
    let output = child.wait_with_output().expect("a child of ours");
    let _ = done.send(());
    watch.join().expect("a thread that cannot fail");
    output
}

pub fn signal(pid: u32, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_raw(pid as i32).expect("a process number");
    // It may have ended already.
    let _ = rustix::process::kill_process(pid, signal);
}

/// A program that the tests need; says which Debian package has it if it is missing.
pub fn tool(name: &str, package: &str) -> Command {
    let path = std::env::var("PATH").unwrap_or_default() + ":/usr/sbin:/sbin";
    let found = path.split(':').map(|d| Path::new(d).join(name)).find(|p| p.is_file());
    Command::new(
        found.unwrap_or_else(|| panic!("this test needs {name}: install the Debian package {package}")),
    )
}

/// Runs a tool that has to succeed; returns what it printed.
#[track_caller]
pub fn succeed(command: Command) -> String {
    let shown = format!("{command:?}");
    let said = Said::of(output(command));
    assert_eq!(said.code, 0, "{shown}: {said}");
    said.out
}

/// Waits for a condition.
#[track_caller]
pub fn wait_until(what: &str, condition: impl FnMut() -> bool) {
    assert!(comes_about(condition), "{what} does not come about");
}

/// Whether a condition comes about in time.
pub fn comes_about(mut condition: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + DEADLINE;
    while !condition() {
        if Instant::now() >= deadline {
            return false;
        }
        std::thread::yield_now();
    }
    true
}

/// A directory for one test.
pub struct Dir {
    dir: tempfile::TempDir,
}

impl Dir {
    pub fn new() -> Dir {
        Dir { dir: tempfile::tempdir().expect("a directory") }
    }

    pub fn root(&self) -> &Path {
        self.dir.path()
    }

    pub fn path(&self, name: &str) -> String {
        self.dir.path().join(name).to_str().expect("a plain path").to_owned()
    }

    pub fn sparse(&self, name: &str, bytes: u64) -> String {
        let path = self.path(name);
        File::create_new(&path).expect("a new file").set_len(bytes).expect("room");
        path
    }

    /// A file with this content, whose zeros are holes.
    pub fn file(&self, name: &str, bytes: &[u8]) -> String {
        let path = self.path(name);
        let file = File::create(&path).expect("a file");
        file.set_len(bytes.len() as u64).expect("room");
        for (i, block) in bytes.chunks(4096).enumerate() {
            if block.iter().any(|b| *b != 0) {
                file.write_all_at(block, i as u64 * 4096).expect("room");
            }
        }
        path
    }
}

/// The warning about a set without a crash log.
pub const NO_CRASH_LOG: &str =
    "if this process is killed, the last writes that were not flushed are lost: there is no crash log: ";

/// Whether the set of this UUID, which is served now, has a crash log. Hosts differ in where one can be.
pub fn has_crash_log(set: &str) -> bool {
    let user = std::env::var_os("XDG_RUNTIME_DIR").map(|dir| PathBuf::from(dir).join("ubcache"));
    let own = std::env::temp_dir().join(format!("ubcache-{}", rustix::process::geteuid().as_raw()));
    let dirs = [Some(PathBuf::from("/run/ubcache")), user, Some(own)];
    let files =
        dirs.into_iter().flatten().flat_map(|dir| std::fs::read_dir(dir).into_iter().flatten().flatten());
    files.map(|e| e.file_name()).any(|name| name.to_string_lossy().starts_with(set))
}

pub fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

pub fn read(path: &str) -> Vec<u8> {
    std::fs::read(path).unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// Fills a range of a file with zeros.
pub fn destroy(path: &str, range: std::ops::Range<usize>) {
    let mut bytes = read(path);
    bytes[range].fill(0);
    std::fs::write(path, bytes).unwrap_or_else(|e| panic!("{path}: {e}"));
}

/// A running `ubcache up`, which has said that its volumes are ready.
pub struct Up {
    child: Child,
    lines: Receiver<String>,
    messages: PathBuf,
    /// The events that said so.
    pub ready: Vec<Value>,
}

impl Up {
    /// Starts with these arguments, and waits for this many volumes.
    #[track_caller]
    pub fn start(dir: &Dir, volumes: usize, args: &[&str]) -> Up {
        match Up::try_start(dir, volumes, args) {
            Ok(up) => up,
            Err(said) => panic!("up {args:?}: {said}"),
        }
    }

    /// One that may end instead of getting ready; then what it said.
    pub fn try_start(dir: &Dir, volumes: usize, args: &[&str]) -> Result<Up, String> {
        Up::try_start_by(&[], dir, volumes, args)
    }

    /// One that is started by other programs: this command, to which the rest is added.
    pub fn try_start_by(by: &[&str], dir: &Dir, volumes: usize, args: &[&str]) -> Result<Up, String> {
        let messages =
            dir.root().join(format!("up-{}.log", NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed)));
        let ours = program().to_str().expect("a plain path");
        let words: Vec<&str> = by.iter().copied().chain([ours, "up"]).collect();
        let mut child = Command::new(words[0])
            .args(&words[1..])
            .args(args)
            .args(["--json", "--stdin"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(File::create(&messages).expect("a file"))
            .spawn()
            .expect("the program");
        let (sender, lines) = channel();
        let stdout = child.stdout.take().expect("a pipe");
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        let mut up = Up { child, lines, messages, ready: Vec::new() };
        for _ in 0..volumes {
            match up.lines.recv_timeout(DEADLINE) {
                Ok(line) => {
                    let event: Value = serde_json::from_str(&line).unwrap_or_else(|e| panic!("{line}: {e}"));
                    assert_eq!(event["event"], "ready", "{event}");
                    assert_eq!(event["schema_version"], 1);
                    up.ready.push(event);
                }
                Err(_) => {
                    let said = up.said();
                    return Err(said);
                }
            }
        }
        Ok(up)
    }

    /// What it said on stderr so far.
    pub fn said(&self) -> String {
        std::fs::read_to_string(&self.messages).unwrap_or_default()
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The address of a volume by its first export.
    pub fn uri(&self, volume: usize) -> String {
        self.ready[volume]["exports"][0]["address"].as_str().expect("a text").to_owned()
    }

    pub fn stats(&mut self) -> Value {
        self.ask("stats")
    }

    /// One command on its standard input, and the answer.
    #[track_caller]
    pub fn ask(&mut self, command: &str) -> Value {
        let line = format!("{command}\n");
        self.child.stdin.as_mut().expect("a pipe").write_all(line.as_bytes()).expect("it runs");
        let line = self.lines.recv_timeout(DEADLINE).unwrap_or_else(|_| panic!("no answer: {}", self.said()));
        serde_json::from_str(&line).unwrap_or_else(|e| panic!("{line}: {e}"))
    }

    /// Ends it in good order.
    #[track_caller]
    pub fn stop(self) -> String {
        let pid = self.child.id();
        signal(pid, rustix::process::Signal::TERM);
        let (status, said) = self.ended();
        assert_eq!(status.code(), Some(0), "{said}");
        said
    }

    /// Ends it as a crash does.
    pub fn kill(self) {
        signal(self.child.id(), rustix::process::Signal::KILL);
        self.ended();
    }

    /// Waits for its end.
    #[track_caller]
    pub fn ended(mut self) -> (ExitStatus, String) {
        let deadline = Instant::now() + DEADLINE;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "does not end: {}", self.said());
            if self.lines.recv_timeout(left) == Err(std::sync::mpsc::RecvTimeoutError::Disconnected) {
                break;
            }
        }
        let status = self.child.wait().expect("a child of ours");
        (status, self.said())
    }
}

static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);

impl Drop for Up {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Sectors of the data of the set of [`dirty_set`].
pub const SET_SECTORS: u64 = (8 << 20) / 512 - 16;

/// A small set in writeback mode with dirty and clean data all over the backing device: the contents of the cache
/// device, of the backing device, and what the volume holds.
pub fn dirty_set() -> &'static [Vec<u8>; 3] {
    static SET: OnceLock<[Vec<u8>; 3]> = OnceLock::new();
    SET.get_or_init(|| {
        let dir = Dir::new();
        let (ssd, hdd) = (dir.sparse("ssd", 8 << 20), dir.sparse("hdd", 8 << 20));
        run(&["make", "-C", &ssd, "-B", &hdd, "--bucket", "8k", "--writeback", "--label", "disk one"]).ok();
        let socket = dir.path("s");
        let export = format!("--export=nbd={socket}");
        let args =
            ["-C", &ssd, "-B", &hdd, &export, "--set=sequential_cutoff=0", "--set=writeback_running=0"];
        let up = Up::start(&dir, 1, &args);
        let mut client = Client::connect(Path::new(&socket), "bcache0").expect("a server");
        assert_eq!(client.size_bytes(), SET_SECTORS * 512);
        let mut contents = vec![0; (SET_SECTORS * 512) as usize];
        for i in 0..200u64 {
            let sector = i * 79 % (SET_SECTORS - 16);
            let at = sector as usize * SECTOR;
            for (j, b) in contents[at..at + 4096].iter_mut().enumerate() {
                *b = (i + j as u64 * 7) as u8 | 1;
            }
            client.write(sector * 512, &contents[at..at + 4096]).expect("a write");
        }
        client.read(0, 1 << 20).expect("a read");
        client.flush().expect("a flush");
        drop(client);
        up.stop();
        run(&["check", &ssd, &hdd]).ok();
        [read(&ssd), read(&hdd), contents]
    })
}

/// The set of [`dirty_set`] in files: cache and backing device.
pub fn dirty_files(dir: &Dir) -> [String; 2] {
    let [ssd, hdd, _] = dirty_set();
    [dir.file("ssd", ssd), dir.file("hdd", hdd)]
}
