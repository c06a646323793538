//! A server on a thread of its own, real sockets, and the programs that talk to it.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::thread::JoinHandle;
use std::time::Duration;

use blockio::{Backend, Driver, DriverOptions};
use export_nbd::{Endpoint, Exports, Reach, Server, ServerOptions, TlsConfig, uri};

use rig::{RamDisk, RamVolume};

/// A volume to make on the server's thread.
pub struct Spec {
    pub name: &'static str,
    pub bytes: u64,
    pub read_only: bool,
    /// Where it has data at the beginning.
    pub filled: Vec<(usize, Vec<u8>)>,
}

impl Spec {
    pub fn new(name: &'static str, bytes: u64) -> Spec {
        Spec { name, bytes, read_only: false, filled: Vec::new() }
    }
}

/// A running server; stops in good order when dropped.
pub struct Running {
    stop: Option<blockio::bridge::RemoteSender<()>>,
    thread: Option<JoinHandle<()>>,
    pub uris: Vec<String>,
    pub dir: tempfile::TempDir,
}

impl Running {
    pub fn unix(specs: Vec<Spec>) -> Running {
        Self::start("nbd.sock", Backend::Auto, specs, None)
    }

    /// Without io_uring.
    pub fn plain(specs: Vec<Spec>) -> Running {
        Self::start("nbd.sock", Backend::Pool, specs, None)
    }

    pub fn tcp(specs: Vec<Spec>) -> Running {
        Self::start("127.0.0.1:0", Backend::Auto, specs, None)
    }

    /// Under TLS, over TCP.
    pub fn tls(specs: Vec<Spec>, tls: TlsConfig) -> Running {
        Self::start("127.0.0.1:0", Backend::Auto, specs, Some(tls))
    }

    fn start(endpoint: &str, backend: Backend, specs: Vec<Spec>, tls: Option<TlsConfig>) -> Running {
        let dir = tempfile::tempdir().expect("a directory");
        let endpoint = match endpoint.parse().expect("an endpoint") {
            Endpoint::Unix(name) => Endpoint::Unix(dir.path().join(name)),
            tcp @ Endpoint::Tcp { .. } => tcp,
        };
        let (stop, stopped) = blockio::bridge::channel::<()>(1);
        let (ready, wait) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            let driver = Driver::new(DriverOptions { backend, ..Default::default() }).expect("a driver");
            let exports = Exports::new();
            let mut names = Vec::new();
            for spec in specs {
                let mut disk = RamDisk::new(spec.name, spec.bytes);
                if spec.read_only {
                    disk = disk.with_read_only();
                }
                for (at, bytes) in &spec.filled {
                    disk.fill(*at, bytes);
                }
                exports.add(RamVolume::on(disk.shared()).shared()).expect("names differ");
                names.push(spec.name);
            }
            let server = Server::new(driver.handle(), exports, ServerOptions::default());
            let listener = endpoint.bind(driver.reactor(), Reach::Loopback).expect("an endpoint of our own");
            let encrypted = tls.is_some();
            let uris: Vec<String> = names.iter().map(|n| uri(listener.address(), n, encrypted)).collect();
            match tls {
                Some(tls) => server.serve_listener_with_tls(listener, tls),
                None => server.serve_listener(listener),
            }
            ready.send(uris).expect("the test waits");
            driver.block_on(async {
                let mut stopped = stopped;
                // An item or the end of the channel: both mean stop.
                let _ = stopped.recv().await;
                server.stop().await;
            });
            assert_eq!(server.connections(), 0, "nothing stays behind");
        });
        let uris = wait.recv_timeout(Duration::from_secs(60)).expect("the server starts");
        Running { stop: Some(stop), thread: Some(thread), uris, dir }
    }

    pub fn uri(&self) -> &str {
        &self.uris[0]
    }

    /// The URI without the export's name.
    pub fn default_uri(&self) -> String {
        match self.uri().split_once("?socket=") {
            Some((_, socket)) => format!("nbd+unix:///?socket={socket}"),
            None => self.uri().rsplit_once('/').expect("a path").0.to_string() + "/",
        }
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("nbd.sock")
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.stop.take());
        let ended = self.thread.take().map(JoinHandle::join);
        // A panic within a panic would hide the first one.
        if !std::thread::panicking() {
            ended.expect("started").expect("the server's thread ends well");
        }
    }
}

/// Runs a program; fails with the name of the Debian package if it is not there.
pub fn run(package: &str, program: &str, args: &[&str]) -> Output {
    match Command::new(program).args(args).output() {
        Ok(output) => output,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            panic!("this test needs {program}: install the Debian package {package}")
        }
        Err(e) => panic!("{program}: {e}"),
    }
}

/// Runs a program that has to succeed; its standard output.
pub fn run_ok(package: &str, program: &str, args: &[&str]) -> String {
    let output = run(package, program, args);
    assert!(
        output.status.success(),
        "{program} {args:?}: {}\n{}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).expect("UTF-8")
}

/// Bytes that look random and depend on `seed`.
pub fn noise(bytes: usize, seed: u64) -> Vec<u8> {
    let mut rng = io::Rng::new(seed);
    let mut out = Vec::with_capacity(bytes + 8);
    while out.len() < bytes {
        out.extend(rng.next_u64().to_le_bytes());
    }
    out.truncate(bytes);
    out
}

pub fn write_file(path: &Path, pieces: &[(u64, &[u8])], bytes: u64) {
    use std::io::Seek;
    let mut file = std::fs::File::create(path).expect("a file");
    file.set_len(bytes).expect("room");
    for (at, piece) in pieces {
        file.seek(std::io::SeekFrom::Start(*at)).expect("seek");
        file.write_all(piece).expect("write");
    }
}
