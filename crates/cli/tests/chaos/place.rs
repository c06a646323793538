//! A set in files, and servers of it that are started and killed.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::process::Signal;
use tempfile::TempDir;

use crate::load::{Load, Traffic};
use crate::world::*;

/// The time for which an idle server is observed.
const QUIET: Duration = Duration::from_millis(120);

/// Sectors at the end of a volume that loads do not use.
pub const SPARE_SECTORS: usize = 128;

/// Devices, a socket, and memory that outlives servers.
pub struct Place {
    pub dir: Dir,
    pub ssd: String,
    pub hdd: String,
    pub socket: String,
    /// The directory in the place of `/run/ubcache`; in memory, as that is on most hosts.
    run: TempDir,
}

impl Place {
    /// Makes the set. The devices may be anywhere.
    pub fn with(dir: Dir, ssd: String, hdd: String, options: &[&str]) -> Place {
        run(&[&["make", "-C", &ssd, "-B", &hdd, "--bucket", "16k"], options].concat()).ok();
        let socket = dir.path("sock");
        std::fs::create_dir_all("/run/ubcache").expect("root");
        let run = TempDir::new_in("/dev/shm").expect("a directory in memory");
        Place { dir, ssd, hdd, socket, run }
    }

    pub fn new(ssd_bytes: u64, hdd_bytes: u64) -> Place {
        let dir = Dir::new();
        let (ssd, hdd) = (dir.sparse("ssd", ssd_bytes), dir.sparse("hdd", hdd_bytes));
        Place::with(dir, ssd, hdd, &["--writeback"])
    }

    /// Sectors of the volume that loads use; behind them are [`SPARE_SECTORS`].
    pub fn sectors(&self) -> usize {
        let bytes = std::fs::metadata(&self.hdd).expect("our file").len() - DATA_OFFSET;
        bytes as usize / SECTOR - SPARE_SECTORS
    }

    /// A load for the volume, of this seed or another that was asked for.
    pub fn load(&self, seed: u64) -> Load {
        let seed = crate::load::number("UBCACHE_CHAOS_SEED", seed);
        println!("UBCACHE_CHAOS_SEED={seed}");
        Load::new(seed, self.sectors()).answers_survive()
    }

    /// What a server is started by: a namespace of its own, so that neither the host's directory nor other tests are
    /// touched, and these programs.
    fn by<'a>(&'a self, by: &[&'a str]) -> Vec<&'a str> {
        let run = self.run.path().to_str().expect("a plain path");
        let script = "mount --bind \"$0\" /run/ubcache && exec \"$@\"";
        let namespace = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, run];
        [&namespace, by].concat()
    }

    /// Starts a server by these programs, with these arguments besides devices and export.
    pub fn try_up(&self, by: &[&str], args: &[&str]) -> Result<Up, String> {
        let export = format!("--export=nbd={}", self.socket);
        let devices = ["-C", &self.ssd, "-B", &self.hdd, &export];
        Up::try_start_by(&self.by(by), &self.dir, 1, &[&devices, args].concat())
    }

    /// Starts a server and kills it some way into its start.
    pub fn killed_while_starting(&self, args: &[&str], spins: u64) {
        let words = self.by(&[program().to_str().expect("a plain path"), "up"]);
        let export = format!("--export=nbd={}", self.socket);
        let mut child = Command::new(words[0])
            .args(&words[1..])
            .args(["-C", &self.ssd, "-B", &self.hdd, &export])
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("a program");
        for _ in 0..spins {
            std::hint::spin_loop();
        }
        child.kill().expect("a child of ours");
        child.wait().expect("a child of ours");
    }

    #[track_caller]
    pub fn up_by(&self, by: &[&str], args: &[&str]) -> Up {
        self.try_up(by, args).unwrap_or_else(|said| panic!("up {args:?}: {said}"))
    }

    #[track_caller]
    pub fn up(&self, args: &[&str]) -> Up {
        self.up_by(&[], args)
    }

    #[track_caller]
    pub fn check(&self) {
        run(&["check", &self.ssd, &self.hdd]).ok();
    }

    /// Keeps the memory that outlived a server open until the returned value is dropped.
    pub fn hide_crash_log(&self) -> File {
        let mut files = std::fs::read_dir(self.run.path()).expect("our directory").flatten();
        let kept = files.find(|f| f.path().extension().is_some_and(|e| e == "kept")).expect("a file");
        let file = File::open(kept.path()).expect("root");
        rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive).expect("nobody else has it");
        file
    }

    /// Writes everything back offline, where servers run.
    #[track_caller]
    pub fn flush(&self) -> Said {
        let words = self.by(&[program().to_str().expect("a plain path"), "flush"]);
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).args(["-C", &self.ssd, "-B", &self.hdd]);
        Said::of(output(command))
    }

    /// Whatever came before, it ends in good order: everything is on the backing device alone.
    #[track_caller]
    pub fn finish(&self, load: &mut Load) {
        let up = self.up(&["--set=writeback_running=0"]);
        load.judge_served(&self.socket, "served in the end");
        up.stop();
        self.flush().ok();
        self.check();
        let alone = &read(&self.hdd)[DATA_OFFSET as usize..][..load.oracle.sectors() * SECTOR];
        load.oracle.judge(alone, "the backing device alone");
    }
}

/// Dirty data of the volume.
pub fn dirty_bytes(up: &mut Up) -> u64 {
    up.stats()["volumes"][0]["dirty_bytes"].as_u64().expect("a number")
}

/// Stops a process and waits until nothing of it runs.
pub fn freeze(pid: u32) {
    signal(pid, Signal::STOP);
    wait_until("the stop", || process_state(pid) == Some('T'));
}

pub fn thaw(pid: u32) {
    signal(pid, Signal::CONT);
}

/// The state of a process, as the letter in `/proc`.
pub fn process_state(pid: u32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.chars().next()
}

/// For a while no server greets the clients of this socket.
#[track_caller]
pub fn no_server_answers(socket: &str) {
    let mut stream = UnixStream::connect(Path::new(socket)).expect("a socket that somebody has");
    stream.set_read_timeout(Some(QUIET)).expect("a socket");
    let said = stream.read(&mut [0; 1]);
    let silent = matches!(&said, Err(e) if e.kind() == ErrorKind::WouldBlock);
    assert!(silent, "a server that is stopped says {said:?}");
}

/// The replies to requests under way, until the server closes the connection.
pub fn last_words(traffic: &mut Traffic, load: &mut Load) {
    while traffic.answer(load).is_ok() {}
}
