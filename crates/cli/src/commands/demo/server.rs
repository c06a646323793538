//! `ubcache up` as a process of the demonstration.
//!
//! Owns the process. The process ends with its input, so it also ends when the demonstration is killed. Must not know the
//! load.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::{Place, program, say, short};
use crate::failure::Failure;
use crate::out;

/// Time limit of the server to start, to answer, and to stop.
const ANSWER_WITHIN: Duration = Duration::from_secs(20);

/// A running server.
pub(super) struct Server {
    child: Child,
    lines: Receiver<String>,
    messages: PathBuf,
    ready: Value,
}

/// Figures of the running set.
#[derive(Clone, Copy, Default)]
pub(super) struct Stats {
    pub(super) hits: u64,
    pub(super) misses: u64,
    pub(super) dirty_bytes: u64,
}

impl Server {
    /// Starts `ubcache up` and waits until its volume is ready.
    pub(super) fn start(place: &Place, args: &[&str], export: &str) -> Result<Server, Failure> {
        let export = format!("--export={export}");
        say(&format!("$ ubcache up {}", short(place, &[args, &[&export]].concat())))?;
        let messages = place.path("up.log");
        let log = File::create(&messages).map_err(|e| Failure::at(&messages, "cannot be created", e))?;
        let mut child = Command::new(program()?)
            .arg("up")
            .args(args)
            .args([&export, "--json", "--stdin"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .map_err(Failure::of)?;
        let (sender, lines) = channel();
        if let Some(stdout) = child.stdout.take() {
            // The thread ends with the output of the child.
            std::thread::spawn(move || {
                for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                    if sender.send(line).is_err() {
                        return;
                    }
                }
            });
        }
        let mut server = Server { child, lines, messages, ready: Value::Null };
        server.ready = server.event("ready")?;
        Ok(server)
    }

    /// The next event of the server, which must be of this kind.
    fn event(&self, kind: &str) -> Result<Value, Failure> {
        let event = self.next_event(kind);
        if event.is_err() {
            let said = std::fs::read_to_string(&self.messages).unwrap_or_default();
            said.lines().for_each(out::note);
        }
        event
    }

    fn next_event(&self, kind: &str) -> Result<Value, Failure> {
        let line = self.lines.recv_timeout(ANSWER_WITHIN).map_err(|e| {
            Failure::caused(format!("ubcache up: expected {kind} on standard output, found nothing"), e)
        })?;
        let event: Value = serde_json::from_str(&line)
            .map_err(|e| Failure::because(format_args!("ubcache up: {line:?}"), e))?;
        if event["event"] == kind {
            return Ok(event);
        }
        Err(Failure::Failed(format!("ubcache up: expected {kind}, found {line}")))
    }

    /// The block device that is the volume.
    pub(super) fn block_device(&self) -> Result<String, Failure> {
        let ways = self.ready["exports"].as_array().into_iter().flatten();
        let mut addresses = ways.filter_map(|w| w["address"].as_str());
        let device = addresses.find(|address| address.starts_with("/dev/"));
        device.map(str::to_owned).ok_or_else(|| Failure::Failed("ubcache up offers no block device".into()))
    }

    pub(super) fn stats(&mut self) -> Result<Stats, Failure> {
        let asked = self.child.stdin.as_mut().map(|s| s.write_all(b"stats\n").and_then(|()| s.flush()));
        asked.transpose().map_err(Failure::of)?;
        let event = self.event("stats")?;
        let number = |v: &Value| v.as_u64().unwrap_or(0);
        let volume = &event["volumes"][0];
        Ok(Stats {
            hits: number(&volume["cache_hits"]),
            misses: number(&volume["cache_misses"]),
            dirty_bytes: number(&volume["dirty_bytes"]),
        })
    }

    /// Stops the server and waits for its end.
    pub(super) fn stop(mut self) -> Result<(), Failure> {
        drop(self.child.stdin.take());
        match self.ended() {
            Some(status) if status.success() => Ok(()),
            Some(status) => {
                let said = std::fs::read_to_string(&self.messages).unwrap_or_default();
                said.lines().for_each(out::note);
                Err(Failure::Failed(format!("ubcache up: {status}")))
            }
            None => Err(Failure::Failed("ubcache up does not stop".into())),
        }
    }

    /// Waits for the end of the process, until a deadline.
    fn ended(&mut self) -> Option<std::process::ExitStatus> {
        // The output of the process ends with the process. No other output is expected here.
        let deadline = Instant::now() + ANSWER_WITHIN;
        while let Some(left) = deadline.checked_duration_since(Instant::now()) {
            if self.lines.recv_timeout(left).is_err() {
                break;
            }
        }
        if Instant::now() >= deadline {
            return None;
        }
        self.child.wait().ok()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        if self.ended().is_none() {
            // The process may have ended by itself.
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}
