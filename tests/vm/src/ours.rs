//! ubcache on the host: a set in image files, made, served over NBD, checked, extracted, flushed, by its command line.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Instant;

use serde_json::Value;

use crate::disk::{Dir, Disk};
use crate::host::built;
use crate::load::{Map, Model, NbdTarget, Plan, run};
use crate::said::{Said, TIMEOUT, kill, run as command, tool};

/// A cache device and its backing devices.
pub struct Set<'a> {
    dir: &'a Dir,
    /// The cache device.
    pub cache: Disk,
    /// The backing devices.
    pub backings: Vec<Disk>,
}

/// Runs the program.
#[track_caller]
pub fn ubcache(args: &[&str]) -> Said {
    command(&built("ubcache"), args)
}

impl<'a> Set<'a> {
    /// A set on these disks, made or still to be made.
    pub fn new(dir: &'a Dir, cache: &Disk, backings: &[&Disk]) -> Set<'a> {
        Set { dir, cache: cache.clone(), backings: backings.iter().map(|d| (*d).clone()).collect() }
    }

    fn devices(&self) -> Vec<&str> {
        let mut args = vec!["-C", self.cache.host()];
        args.extend(self.backings.iter().flat_map(|b| ["-B", b.host()]));
        args
    }

    /// Formats.
    #[track_caller]
    pub fn make(&self, options: &[&str]) {
        ubcache(&[&["make"], &self.devices()[..], options].concat()).ok();
    }

    /// Every structure is right; and both tools say the same of every superblock.
    #[track_caller]
    pub fn check(&self) -> Said {
        self.superblocks_agree();
        let devices = [&self.cache].into_iter().chain(&self.backings).map(Disk::host);
        ubcache(&["check"].into_iter().chain(devices).collect::<Vec<_>>()).ok()
    }

    /// What bcache-super-show prints, `ubcache super` prints.
    #[track_caller]
    pub fn superblocks_agree(&self) {
        for disk in [&self.cache].into_iter().chain(&self.backings) {
            let ours = ubcache(&["super", disk.host()]).ok();
            let theirs = command(&tool("bcache-super-show"), &[disk.host()]);
            // The old tool does not know these; it says so itself.
            if theirs.out.contains("[unknown]") || theirs.err.contains("Unsupported") {
                let version = json(&["super", "--json", disk.host()])["version"].as_u64();
                assert!(matches!(version, Some(5 | 6)), "{theirs}");
                continue;
            }
            assert_eq!(ours.out, theirs.ok().out, "superblock of {}", disk.name);
        }
    }

    /// The superblock of a disk as JSON.
    #[track_caller]
    pub fn superblock(&self, disk: &Disk) -> Value {
        json(&["super", "--json", disk.host()])
    }

    /// The contents of a cached device, without changing anything.
    #[track_caller]
    pub fn extract(&self, backing: usize, tag: u32) -> Map {
        let backing = self.backings.get(backing).expect("a backing device of the set");
        self.extract_of(&["-B", backing.host()], tag)
    }

    /// The contents of a flash-only volume.
    #[track_caller]
    pub fn extract_volume(&self, slot: u32, tag: u32) -> Map {
        self.extract_of(&["--volume", &slot.to_string()], tag)
    }

    fn extract_of(&self, which: &[&str], tag: u32) -> Map {
        let out = self.dir.path("extracted");
        let to = out.to_str().expect("a plain path");
        ubcache(&[&["extract", "-C", self.cache.host()], which, &["-o", to, "--force"]].concat()).ok();
        let bytes = std::fs::read(&out).expect("what was just written");
        let _ = std::fs::remove_file(&out);
        Map::of(&bytes, tag)
    }

    /// Compares every sector of a cached device with the model, by extraction.
    #[track_caller]
    pub fn judge(&self, backing: usize, model: &mut Model) {
        model.judge(&self.extract(backing, model.tag), "extract");
    }

    /// Writes all dirty data back.
    #[track_caller]
    pub fn flush(&self) {
        ubcache(&[&["flush"], &self.devices()[..]].concat()).ok();
    }

    /// Serves all volumes of the set.
    #[track_caller]
    pub fn up(&self, volumes: usize, options: &[&str]) -> Up {
        let socket = self.dir.path("nbd");
        let export = format!("nbd={}", socket.display());
        let everything = ["--set", "sequential_cutoff=0", "--export", &export];
        Up::start(socket.clone(), volumes, &[&self.devices()[..], &everything, options].concat())
    }
}

#[track_caller]
fn json(args: &[&str]) -> Value {
    let said = ubcache(args).ok();
    serde_json::from_str(&said.out).unwrap_or_else(|e| panic!("{e}: {said}"))
}

/// A running `ubcache up` whose volumes are ready.
pub struct Up {
    child: Child,
    /// Ends with the process.
    lines: Receiver<String>,
    messages: PathBuf,
    socket: PathBuf,
    names: Vec<String>,
}

impl Up {
    #[track_caller]
    fn start(socket: PathBuf, volumes: usize, args: &[&str]) -> Up {
        let messages = socket.with_extension("log");
        let mut child = Command::new(built("ubcache"))
            .arg("up")
            .args(args)
            .args(["--json", "--stdin"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(File::create(&messages).expect("a file in the test's directory"))
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
        let mut up = Up { child, lines, messages, socket, names: Vec::new() };
        for _ in 0..volumes {
            let Ok(line) = up.lines.recv_timeout(TIMEOUT) else { panic!("up {args:?}: {}", up.said()) };
            let event: Value = serde_json::from_str(&line).unwrap_or_else(|e| panic!("{line}: {e}"));
            assert_eq!(event["event"], "ready", "{event}");
            up.names
                .push(event["volume"].as_str().unwrap_or_else(|| panic!("{event}: no volume")).to_owned());
        }
        up
    }

    /// Gives a command on its standard input, for example `detach bcache0`; it must succeed.
    #[track_caller]
    pub fn ask(&mut self, line: &str) {
        let stdin = self.child.stdin.as_mut().expect("a pipe");
        writeln!(stdin, "{line}").unwrap_or_else(|e| panic!("{line}: {e}: {}", self.said()));
        let answer =
            self.lines.recv_timeout(TIMEOUT).unwrap_or_else(|e| panic!("{line}: {e}: {}", self.said()));
        let event: Value = serde_json::from_str(&answer).unwrap_or_else(|e| panic!("{answer}: {e}"));
        assert_eq!(event["event"], "done", "{line}: {answer}");
    }

    /// Its stderr so far.
    pub fn said(&self) -> String {
        std::fs::read_to_string(&self.messages).unwrap_or_default()
    }

    /// A connection to a volume by its number.
    ///
    /// # Errors
    /// If the process is gone.
    pub fn connect(&self, volume: usize) -> io::Result<NbdTarget> {
        let (socket, name) = self.address(volume);
        NbdTarget::connect(socket, name)
    }

    fn address(&self, volume: usize) -> (&Path, &str) {
        (&self.socket, self.names.get(volume).map_or("", String::as_str))
    }

    /// Runs a load to its end and tells the model.
    #[track_caller]
    pub fn load(&self, volume: usize, plan: &Plan, model: &mut Model) {
        let size = self.connect(volume).expect("a server").sectors();
        assert_eq!(size, plan.sectors, "size of the volume in sectors");
        let (socket, name) = self.address(volume);
        let result = run::run(plan, |_| NbdTarget::connect(socket, name), |_, _| ());
        result.unwrap_or_else(|e| panic!("{e}: {}", self.said()));
        model.ran(plan);
    }

    /// Runs a load and kills the process when so many requests are flushed, all workers together; tells the model.
    #[track_caller]
    pub fn load_and_kill(self, volume: usize, plan: &Plan, requests: u32, model: &mut Model) {
        let flushed = Mutex::new(vec![0; plan.workers as usize]);
        let pid = self.child.id();
        let report = |worker: u32, requests_flushed: u32| {
            let mut all = flushed.lock().expect("no worker panics in here");
            if let Some(f) = all.get_mut(worker as usize) {
                *f = requests_flushed;
            }
            if all.iter().sum::<u32>() >= requests {
                kill(pid);
            }
        };
        let (socket, name) = self.address(volume);
        let result = run::run(plan, |_| NbdTarget::connect(socket, name), report);
        assert!(result.is_err(), "the load has ended before the process was killed");
        let ended = self.ended();
        let flushed = flushed.into_inner().expect("no worker panics in there");
        assert!(flushed.iter().sum::<u32>() >= requests, "it ended by itself: {result:?}: {ended:?}");
        model.interrupted(plan, &flushed);
    }

    /// Compares every sector with the model.
    #[track_caller]
    pub fn judge(&self, volume: usize, model: &mut Model) {
        let mut target = self.connect(volume).expect("a server");
        let sectors = target.sectors();
        let map = run::read_map(&mut target, sectors, model.tag);
        let map = map.unwrap_or_else(|e| panic!("{e}: {}", self.said()));
        model.judge(&map, "ubcache");
    }

    /// Ends it in order; returns its stderr.
    #[track_caller]
    pub fn stop(self) -> String {
        let pid = i32::try_from(self.child.id()).ok().and_then(rustix::process::Pid::from_raw);
        let signal = rustix::process::Signal::TERM;
        rustix::process::kill_process(pid.expect("a process"), signal).expect("a child of ours");
        let (code, said) = self.ended();
        assert_eq!(code, Some(0), "{said}");
        said
    }

    /// Ends it as a crash does.
    pub fn kill(self) {
        kill(self.child.id());
        self.ended();
    }

    fn ended(mut self) -> (Option<i32>, String) {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left) {
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => panic!("does not end: {}", self.said()),
                Ok(_) => {}
            }
        }
        let status = self.child.wait().expect("a child of ours");
        (status.code(), self.said())
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
