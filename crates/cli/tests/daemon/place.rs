//! A daemon in a directory of its own, and the ways to talk to it.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Instant;

use rustix::process::Signal;
use serde_json::Value;
use ubcache_cli::nbd_client::Client;

use crate::world::*;

/// A running daemon.
pub struct Daemon {
    child: Child,
    socket: String,
    log: String,
}

/// A directory with a set: cache, backing device with the label `one`, both of 8 MiB; writeback.
pub struct Place {
    pub dir: Dir,
    pub ssd: String,
    pub hdd: String,
}

impl Place {
    pub fn new() -> Place {
        let dir = Dir::new();
        let (ssd, hdd) = (dir.sparse("ssd", 8 << 20), dir.sparse("hdd", 8 << 20));
        run(&["make", "-C", &ssd, "-B", &hdd, "--bucket", "8k", "--writeback", "--label", "one"]).ok();
        let place = Place { dir, ssd, hdd };
        // Dirty data stays where it is until a test wants it elsewhere.
        place.configure("[tunables]\nwriteback_running = 0\nsequential_cutoff = 0\n");
        place
    }

    /// Writes a configuration: where things are, and `more`.
    pub fn configure(&self, more: &str) {
        let exports = format!("exports = [\"nbd={}/{{volume}}.sock\"]\n", self.dir.root().display());
        std::fs::write(self.dir.path("ubcache.toml"), exports + more).expect("room");
    }

    /// The daemon, started by other programs: this command, to which the rest is added.
    fn command(&self, by: &[&str]) -> (Command, String) {
        let log = self.dir.path("daemon.log");
        let ours = program().to_str().expect("a plain path");
        let words: Vec<&str> = by.iter().copied().chain([ours, "daemon"]).collect();
        let mut command = Command::new(words[0]);
        command
            .args(&words[1..])
            .args(["--config", &self.dir.path("ubcache.toml")])
            .args(["--socket", &self.dir.path("control.sock")])
            .args(["--state-dir", &self.dir.path("state")])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::options().create(true).append(true).open(&log).expect("a file"));
        (command, log)
    }

    /// Starts the daemon and waits until it says that it is ready.
    #[track_caller]
    pub fn start(&self) -> Daemon {
        self.start_by(&[], |_| ())
    }

    /// Starts the daemon, and registers both devices.
    #[track_caller]
    pub fn start_registered(&self) -> Daemon {
        let daemon = self.start();
        daemon.run(&["register", &self.ssd, &self.hdd]).ok();
        daemon
    }

    /// Starts the daemon by the programs `by`, after `change` of its command, and waits until it is ready.
    #[track_caller]
    pub fn start_by(&self, by: &[&str], change: impl FnOnce(&mut Command)) -> Daemon {
        let (mut command, log) = self.command(by);
        change(&mut command);
        let before = std::fs::read_to_string(&log).unwrap_or_default().len();
        let child = command.spawn().expect("the program");
        let daemon = Daemon { child, socket: self.dir.path("control.sock"), log };
        let ready = || daemon.said().get(before..).is_some_and(|said| said.contains("ubcache: ready\n"));
        assert!(comes_about(ready), "{}", daemon.said());
        daemon
    }

    /// A daemon that does not come up, and what it said.
    #[track_caller]
    pub fn refused(&self) -> String {
        let (mut command, log) = self.command(&[]);
        let before = std::fs::read_to_string(&log).unwrap_or_default().len();
        let mut child = command.spawn().expect("the program");
        wait_until("the end of the daemon", || child.try_wait().expect("a child of ours").is_some());
        assert_eq!(child.wait().expect("a child of ours").code(), Some(1));
        std::fs::read_to_string(&log).expect("a log").split_off(before)
    }

    /// A client of the volume of this name.
    #[track_caller]
    pub fn client(&self, volume: &str) -> Client {
        Client::connect(Path::new(&self.dir.path(&format!("{volume}.sock"))), volume).expect("a server")
    }
}

impl Daemon {
    pub fn said(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// A command that talks to it.
    #[track_caller]
    pub fn run(&self, args: &[&str]) -> Said {
        let all: Vec<&str> = args.iter().copied().chain(["--socket", &self.socket]).collect();
        run(&all)
    }

    /// Runs a command with `--json`, and returns what it prints.
    #[track_caller]
    pub fn json(&self, args: &[&str]) -> Value {
        let all: Vec<&str> = args.iter().copied().chain(["--json"]).collect();
        let said = self.run(&all).ok();
        let body = said.json();
        assert_eq!(body["schema_version"], 1, "{said}");
        body
    }

    pub fn socket(&self) -> &str {
        &self.socket
    }

    pub fn connect(&self) -> UnixStream {
        let stream = UnixStream::connect(&self.socket).expect("a daemon");
        stream.set_read_timeout(Some(DEADLINE)).expect("a socket");
        stream.set_write_timeout(Some(DEADLINE)).expect("a socket");
        stream
    }

    /// A request byte by byte; status and body of the answer.
    #[track_caller]
    pub fn http(&self, method: &str, path: &str, body: &str) -> (u16, Value) {
        let mut stream = self.connect();
        let length = body.len();
        write!(stream, "{method} {path} HTTP/1.0\r\nContent-Length: {length}\r\n\r\n{body}")
            .expect("a daemon");
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("an answer");
        let status =
            text.split(' ').nth(1).and_then(|s| s.parse().ok()).unwrap_or_else(|| panic!("{text:?}"));
        let body = text.split_once("\r\n\r\n").map_or("", |(_, body)| body);
        (status, serde_json::from_str(body).unwrap_or_else(|e| panic!("{e}: {text:?}")))
    }

    /// The answer to a request for `/metrics`.
    pub fn metrics(&self) -> String {
        let mut stream = self.connect();
        stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").expect("a daemon");
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("an answer");
        text
    }

    /// The devices and what is said of them.
    pub fn devices(&self) -> Vec<Value> {
        self.json(&["status"])["devices"].as_array().expect("a list").clone()
    }

    /// State of a device.
    #[track_caller]
    pub fn state_of(&self, path: &str) -> String {
        let devices = self.devices();
        let found =
            devices.iter().find(|d| d["path"] == path).unwrap_or_else(|| panic!("{path}: {devices:?}"));
        found["state"].as_str().expect("a text").to_owned()
    }

    /// The figures of a volume.
    #[track_caller]
    pub fn volume(&self, name: &str) -> Value {
        let (status, body) = self.http("GET", &format!("/v1/volumes/{name}"), "");
        assert_eq!(status, 200, "{body}");
        body["volume"].clone()
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    pub fn signal(&self, which: Signal) {
        signal(self.child.id(), which);
    }

    /// Ends it as a crash does.
    pub fn kill(mut self) {
        self.signal(Signal::KILL);
        self.child.wait().expect("a child of ours");
    }

    /// Waits for its end.
    #[track_caller]
    pub fn ended(mut self) -> (ExitStatus, String) {
        let deadline = Instant::now() + DEADLINE;
        loop {
            if let Some(status) = self.child.try_wait().expect("a child of ours") {
                return (status, self.said());
            }
            assert!(Instant::now() < deadline, "does not end: {}", self.said());
            std::thread::yield_now();
        }
    }

    /// Ends it in good order.
    #[track_caller]
    pub fn stop(self) {
        self.signal(Signal::TERM);
        let (status, said) = self.ended();
        assert_eq!(status.code(), Some(0), "{said}");
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
