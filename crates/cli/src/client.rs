//! The other end of the daemon's control socket.
//!
//! Owns one request and its answer, each over a connection of its own (HTTP/1.0: no runtime, no library, and the answer
//! ends with the connection). What is wrong is said in words, with what to do. Must not know what is asked.

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use serde_json::Value;

use crate::failure::Failure;

/// How long the daemon may take to answer. It has deadlines of its own, which are shorter.
const PATIENCE: Duration = Duration::from_secs(200);
/// Most bytes of an answer that are taken in.
const MOST_BYTES: u64 = 64 << 20;

/// What commands for the daemon have in common.
#[derive(Args, Debug)]
pub(crate) struct Control {
    /// Control socket of the daemon
    #[arg(long, value_name = "PATH", default_value = daemon::DEFAULT_SOCKET)]
    socket: PathBuf,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// An answer.
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) body: Value,
}

impl Reply {
    /// The body, if it is good news.
    pub(crate) fn ok(self) -> Result<Value, Failure> {
        if (200..300).contains(&self.status) {
            return Ok(self.body);
        }
        let why =
            self.body["error"].as_str().map_or_else(|| format!("status {}", self.status), str::to_owned);
        Err(if self.status == 400 { Failure::Usage(why) } else { Failure::Failed(why) })
    }
}

/// One segment of a path.
pub(crate) fn segment(text: &str) -> String {
    let mut encoded = String::new();
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => encoded.push(byte.into()),
            other => encoded.push_str(&format!("%{other:02X}")),
        }
    }
    encoded
}

impl Control {
    fn connect(&self) -> Result<UnixStream, Failure> {
        let at = self.socket.display();
        UnixStream::connect(&self.socket).map_err(|e| match e.kind() {
            ErrorKind::NotFound | ErrorKind::ConnectionRefused => Failure::Failed(format!(
                "no daemon runs at {at}: start one with `systemctl start ubcache` or `ubcache daemon`, name another \
                 socket with --socket, or serve a set in the foreground with `ubcache up`"
            )),
            ErrorKind::PermissionDenied => {
                Failure::Failed(format!("{at}: permission denied: only root and the configured group may control the daemon"))
            }
            _ => Failure::Failed(format!("{at}: cannot connect: {e}")),
        })
    }

    fn begin(
        &self,
        method: &str,
        path: &str,
        body: Option<&Value>,
    ) -> Result<BufReader<UnixStream>, Failure> {
        let mut stream = self.connect()?;
        let lost = |e| Failure::at(&self.socket, "the daemon does not listen", e);
        stream.set_read_timeout(Some(PATIENCE)).map_err(lost)?;
        let body = body.map(Value::to_string).unwrap_or_default();
        let request = format!(
            "{method} {path} HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        match stream.write_all(request.as_bytes()) {
            // Who is refused is told so without having been listened to.
            Err(e) if e.kind() != ErrorKind::BrokenPipe => Err(lost(e)),
            _ => Ok(BufReader::new(stream)),
        }
    }

    /// The status line and the header, which is skipped.
    fn status(&self, reader: &mut BufReader<UnixStream>) -> Result<u16, Failure> {
        let lost = |e| Failure::at(&self.socket, "the daemon does not answer", e);
        let mut line = String::new();
        reader.by_ref().take(1 << 10).read_line(&mut line).map_err(lost)?;
        let status = line.split(' ').nth(1).and_then(|s| s.parse().ok());
        loop {
            line.clear();
            let read = reader.by_ref().take(64 << 10).read_line(&mut line).map_err(lost)?;
            if read == 0 || line.trim_end().is_empty() {
                break;
            }
        }
        let strange =
            || Failure::Failed(format!("{}: the daemon broke off: is it too busy?", self.socket.display()));
        status.ok_or_else(strange)
    }

    /// Asks, and waits for the answer.
    pub(crate) fn ask(&self, method: &str, path: &str, body: Option<&Value>) -> Result<Reply, Failure> {
        let mut reader = self.begin(method, path, body)?;
        let status = self.status(&mut reader)?;
        let mut bytes = Vec::new();
        let read = reader.take(MOST_BYTES).read_to_end(&mut bytes);
        read.map_err(|e| Failure::at(&self.socket, "the daemon does not answer", e))?;
        let body = serde_json::from_slice(&bytes).unwrap_or(Value::Null);
        Ok(Reply { status, body })
    }

    pub(crate) fn get(&self, path: &str) -> Result<Value, Failure> {
        self.ask("GET", path, None)?.ok()
    }

    pub(crate) fn post(&self, path: &str, body: &Value) -> Result<Value, Failure> {
        self.ask("POST", path, Some(body))?.ok()
    }

    pub(crate) fn put(&self, path: &str, body: &Value) -> Result<Value, Failure> {
        self.ask("PUT", path, Some(body))?.ok()
    }

    pub(crate) fn delete(&self, path: &str) -> Result<Value, Failure> {
        self.ask("DELETE", path, None)?.ok()
    }

    /// Events, one after another, until the daemon ends or `each` fails.
    pub(crate) fn events(&self, mut each: impl FnMut(&Value) -> Result<(), Failure>) -> Result<(), Failure> {
        let mut reader = self.begin("GET", "/v1/events", None)?;
        let status = self.status(&mut reader)?;
        if status != 200 {
            let mut text = String::new();
            let _ = reader.take(MOST_BYTES).read_to_string(&mut text);
            return Reply { status, body: serde_json::from_str(&text).unwrap_or(Value::Null) }.ok().map(drop);
        }
        for line in reader.lines() {
            let line = line.map_err(|e| Failure::at(&self.socket, "the daemon broke off", e))?;
            if let Some(data) = line.strip_prefix("data:") {
                each(&serde_json::from_str(data.trim()).map_err(Failure::of)?)?;
            }
        }
        Ok(())
    }
}

/// A path as the daemon has to see it, which runs in another directory.
pub(crate) fn absolute(path: &Path) -> Result<PathBuf, Failure> {
    std::path::absolute(path).map_err(|e| Failure::at(path, "cannot be found", e))
}

/// What names a device: a path that is there, made absolute; anything else as it is.
pub(crate) fn device_name(name: &str) -> Result<String, Failure> {
    let path = Path::new(name);
    if !path.exists() {
        return Ok(name.to_owned());
    }
    let found = path.canonicalize().map_err(|e| Failure::at(path, "cannot be found", e))?;
    Ok(found.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_fit_into_paths() {
        assert_eq!(segment("bcache0"), "bcache0");
        assert_eq!(segment("/dev/sd b"), "%2Fdev%2Fsd%20b");
        assert_eq!(segment("a/1?é"), "a%2F1%3F%C3%A9");
    }

    #[test]
    fn bad_news_are_words() {
        let reply = |status, text: &str| Reply { status, body: serde_json::from_str(text).unwrap() };
        assert!(reply(200, "{}").ok().is_ok());
        assert!(matches!(reply(400, r#"{"error": "no"}"#).ok(), Err(Failure::Usage(t)) if t == "no"));
        assert!(matches!(reply(409, r#"{"error": "no"}"#).ok(), Err(Failure::Failed(_))));
        assert!(matches!(reply(500, "null").ok(), Err(Failure::Failed(t)) if t == "status 500"));
    }
}
