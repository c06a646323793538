//! The client of the daemon's control socket and TCP port.
//!
//! Owns one request and its answer, each over a connection of its own. The protocol is HTTP/1.0, so the client needs no
//! runtime and no library, and an answer ends with its connection. An error names its cause and the next step. Must not
//! know the requests.

use std::borrow::Cow;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use serde_json::Value;
use serve::plain;

use crate::failure::Failure;
use crate::remote::{Remote, Stream, Url, UrlError};

/// Time limit of an answer of the daemon. The daemon has deadlines of its own, which are shorter.
const ANSWER_WITHIN: Duration = Duration::from_secs(200);
/// Limit of the bytes of an answer.
const MOST_BYTES: u64 = 64 << 20;

/// The options of commands for the daemon.
#[derive(Args, Clone, Debug)]
pub(crate) struct Control {
    /// Control socket of the daemon [environment: UBCACHE_SOCKET] [default: /run/ubcache/control.sock]
    #[arg(long, value_name = "PATH", conflicts_with = "api")]
    socket: Option<PathBuf>,
    /// Address of a daemon over TCP: http://HOST:PORT on this host, https://HOST:PORT anywhere [environment: UBCACHE_API]
    #[arg(long, value_name = "URL")]
    api: Option<Url>,
    /// File with the token of that daemon [environment: UBCACHE_TOKEN_FILE]
    #[arg(long, value_name = "FILE", conflicts_with = "socket")]
    token_file: Option<PathBuf>,
    /// CA certificates to verify that daemon with, instead of the system's [environment: UBCACHE_CA]
    #[arg(long, value_name = "FILE", conflicts_with = "socket")]
    ca: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// An answer of the daemon.
pub(crate) struct DaemonReply {
    pub(crate) status: u16,
    pub(crate) body: Value,
}

impl DaemonReply {
    /// The body of a successful answer; else the error.
    pub(crate) fn ok(self) -> Result<Value, Failure> {
        if (200..300).contains(&self.status) {
            return Ok(self.body);
        }
        let mut why =
            self.body["error"].as_str().map_or_else(|| format!("status {}", self.status), str::to_owned);
        if let Some(command) = command_instead(&std::env::args().collect::<Vec<_>>(), &self.body["instead"]) {
            why = then_run(&why, &command);
        }
        Err(if self.status == 400 { Failure::Usage(why) } else { Failure::Failed(why) })
    }
}

/// A message, and the command that comes next; a question has its mark already.
fn then_run(why: &str, command: &str) -> String {
    match why.ends_with('?') {
        true => format!("{why} Run `{command}`"),
        false => format!("{why}; run `{command}`"),
    }
}

/// The command of these arguments with the name or the tunable that the daemon proposes. `None` if it proposes nothing or several
/// names, or the arguments do not have what it is to replace.
fn command_instead(args: &[String], instead: &Value) -> Option<String> {
    let name = instead["name"].as_str()?;
    let only = match instead["names"].as_array()?.as_slice() {
        [] => None,
        [only] => only.as_str(),
        // The operator decides which, and the text of the refusal has all of them.
        _ => return None,
    };
    let key =
        instead["key"].as_array().and_then(|pair| Some((pair.first()?.as_str()?, pair.get(1)?.as_str()?)));
    if only.is_none() && key.is_none() {
        return None;
    }
    let is_name =
        |arg: &str| arg == name || std::path::absolute(arg).is_ok_and(|path| path == Path::new(name));
    let mut is_changed = [only.is_none(), key.is_none()];
    let mut command = vec!["ubcache".to_owned()];
    for arg in args.iter().skip(1) {
        let (before, value) =
            arg.split_once('=').map_or((arg.as_str(), None), |(key, value)| (key, Some(value)));
        command.push(match (only, key) {
            (Some(only), _) if is_name(arg) => {
                is_changed[0] = true;
                only.to_owned()
            }
            (_, Some((wrong, right))) if before == wrong => {
                is_changed[1] = true;
                value.map_or_else(|| right.to_owned(), |value| format!("{right}={value}"))
            }
            _ => arg.clone(),
        });
    }
    is_changed
        .iter()
        .all(|changed| *changed)
        .then(|| command.iter().map(|arg| quoted(arg)).collect::<Vec<_>>().join(" "))
}

/// An argument as a shell takes it.
fn quoted(arg: &str) -> String {
    let is_plain = |c: char| c.is_alphanumeric() || "._+:@-/=,%".contains(c);
    if !arg.is_empty() && arg.chars().all(is_plain) {
        return arg.to_owned();
    }
    format!("'{}'", arg.replace('\'', "'\\''"))
}

/// Encodes a text as one segment of a path.
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

/// The address of the daemon.
enum Endpoint {
    Socket(PathBuf),
    Remote(Remote),
}

impl std::fmt::Display for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Endpoint::Socket(path) => path.display().fmt(f),
            Endpoint::Remote(remote) => remote.url.fmt(f),
        }
    }
}

impl Endpoint {
    fn problem(&self, what: &str, e: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Failure {
        Failure::because(format_args!("{self}: {what}"), e)
    }

    fn connect(&self) -> Result<Stream, Failure> {
        let socket = match self {
            Endpoint::Socket(socket) => socket,
            Endpoint::Remote(remote) => return remote.connect(),
        };
        let connected = UnixStream::connect(socket).map_err(|e| {
            let text = match e.kind() {
                ErrorKind::NotFound | ErrorKind::ConnectionRefused => format!(
                    "no daemon runs at {self}: start one with `systemctl start ubcache` or `ubcache daemon`, name another \
                     socket with --socket or UBCACHE_SOCKET, or serve a set in the foreground with `ubcache up`"
                ),
                ErrorKind::PermissionDenied => format!(
                    "{self}: permission denied: only root and the group in the configuration may control the daemon"
                ),
                _ => return self.problem("cannot connect", e),
            };
            Failure::caused(text, e)
        });
        connected.map(Stream::Unix)
    }
}

/// An answer that is being received.
struct Incoming {
    from: Endpoint,
    reader: BufReader<Stream>,
}

impl Incoming {
    /// Reads the status line, and skips the header.
    fn status(&mut self) -> Result<u16, Failure> {
        let Incoming { from, reader } = self;
        let lost = |e| from.problem("the daemon does not answer", e);
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
        status.ok_or_else(|| {
            let why = match from {
                Endpoint::Socket(_) => {
                    "it may have ended before or after it carried out the command; start it, then `ubcache status` shows the present \
                     state, and `ubcache events --since 10m` lists the last changes"
                }
                Endpoint::Remote(_) => "it has too many clients, or it expects https://",
            };
            Failure::Failed(format!("{from}: the daemon closed the connection before it answered; {why}"))
        })
    }
}

/// The value of an environment variable, unless it is empty.
pub(crate) fn environment(name: &str) -> Option<std::ffi::OsString> {
    std::env::var_os(name).filter(|v| !v.is_empty())
}

impl Control {
    /// The endpoint of the daemon; the command line overrides the environment.
    fn endpoint(&self) -> Result<Endpoint, Failure> {
        if let Some(socket) = &self.socket {
            return Ok(Endpoint::Socket(socket.clone()));
        }
        let from_environment = || {
            let text = environment("UBCACHE_API")?;
            let bad = |e: UrlError| Failure::BadValue { text: format!("UBCACHE_API: {e}"), source: e.into() };
            Some(text.to_string_lossy().parse().map_err(bad))
        };
        let socket = || environment("UBCACHE_SOCKET").map(PathBuf::from);
        if let (None, Some(socket)) = (&self.api, socket()) {
            if environment("UBCACHE_API").is_some() {
                return Err(Failure::Usage(
                    "UBCACHE_SOCKET and UBCACHE_API are both set, and a command asks one daemon: unset one of them, or \
                     pass --socket or --api"
                        .into(),
                ));
            }
            return Ok(Endpoint::Socket(socket));
        }
        let Some(url) = self.api.clone().map(Ok).or_else(from_environment).transpose()? else {
            return Ok(Endpoint::Socket(PathBuf::from(daemon::DEFAULT_SOCKET)));
        };
        let file =
            |given: &Option<PathBuf>, name| given.clone().or_else(|| environment(name).map(PathBuf::from));
        let token_file = file(&self.token_file, "UBCACHE_TOKEN_FILE");
        Ok(Endpoint::Remote(Remote { url, token_file, ca: file(&self.ca, "UBCACHE_CA") }))
    }

    fn begin(&self, method: &str, path: &str, body: Option<&Value>) -> Result<Incoming, Failure> {
        let from = self.endpoint()?;
        let authorization = match &from {
            Endpoint::Socket(_) => String::new(),
            Endpoint::Remote(remote) => remote.authorization()?,
        };
        let mut stream = from.connect()?;
        stream.set_read_timeout(ANSWER_WITHIN).map_err(|e| from.problem("cannot send to the daemon", e))?;
        let body = body.map(Value::to_string).unwrap_or_default();
        let request = format!(
            "{method} {path} HTTP/1.0\r\n{authorization}Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        match stream.write_all(request.as_bytes()).and_then(|()| stream.flush()) {
            // A client without permission gets the answer before its request is read.
            Err(e) if e.kind() != ErrorKind::BrokenPipe => Err(from.problem("cannot send to the daemon", e)),
            _ => Ok(Incoming { from, reader: BufReader::new(stream) }),
        }
    }

    /// Sends a request and waits for the answer.
    pub(crate) fn ask(&self, method: &str, path: &str, body: Option<&Value>) -> Result<DaemonReply, Failure> {
        let mut answer = self.begin(method, path, body)?;
        let status = answer.status()?;
        let mut bytes = Vec::new();
        let read = answer.reader.take(MOST_BYTES).read_to_end(&mut bytes);
        read.map_err(|e| answer.from.problem("the daemon does not answer", e))?;
        let mut body = serde_json::from_slice(&bytes).unwrap_or(Value::Null);
        self.made_fit(&mut body);
        Ok(DaemonReply { status, body })
    }

    /// Turns what the operator wrote into the name of a device for the daemon.
    ///
    /// A text with a slash is a path, which is made absolute. A word is a UUID, a name or a label. If a file or block
    /// device of the present directory has that name too, the word denotes that file or device, unless the daemon knows
    /// something else under the name: then the word is ambiguous and refused. A directory is no device, because volumes are
    /// often called like their mount points. For a daemon on another host, files of this host do not count.
    ///
    /// # Errors
    /// If the name is ambiguous, or a relative path is given for another host.
    pub(crate) fn device_name(&self, name: &str) -> Result<String, Failure> {
        let path = Path::new(name);
        let remote = matches!(self.endpoint()?, Endpoint::Remote(_));
        if name.contains('/') && !(remote && path.is_absolute()) {
            if remote {
                return Err(Failure::Usage(format!(
                    "{}: expected an absolute path of the daemon's host",
                    plain::escaped(name)
                )));
            }
            return Ok(absolute(path)?.to_string_lossy().into_owned());
        }
        let is_device = |m: std::fs::Metadata| m.is_file() || m.file_type().is_block_device();
        if remote || name.contains('/') || !std::fs::metadata(path).is_ok_and(is_device) {
            return Ok(name.to_owned());
        }
        let here = path.canonicalize().map_err(|e| Failure::at(path, "cannot be found", e))?;
        let here = here.to_string_lossy().into_owned();
        let reply = self.ask("GET", &format!("/v1/names/{}", segment(name)), None)?;
        let resolved = &reply.body["resolved"];
        if reply.status == 404 || reply.status == 200 && resolved["device"] == here.as_str() {
            return Ok(here);
        }
        let other = match reply.status {
            200 => described(resolved),
            _ => reply.ok().err().and_then(|e| e.message().map(str::to_owned)).unwrap_or_default(),
        };
        Err(Failure::Usage(format!(
            "{}: ambiguous: it is the file {here} here, and {other} in the daemon; write ./{} for the file, or \
             give the UUID",
            plain::escaped(name),
            plain::escaped(name)
        )))
    }

    /// Escapes control characters in an answer that is printed as text.
    ///
    /// An answer has foreign text, such as labels, which must not act upon the terminal. In JSON the escapes of JSON are
    /// enough.
    fn made_fit(&self, body: &mut Value) {
        if !self.json {
            escape_all(body);
        }
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

    /// Passes events to `each`, until the daemon ends or `each` fails. `begun` runs when the daemon has begun to send: no
    /// event after it is missed.
    pub(crate) fn events(
        &self,
        begun: impl FnOnce() -> Result<(), Failure>,
        mut each: impl FnMut(&Value) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let mut answer = self.begin("GET", "/v1/events", None)?;
        let status = answer.status()?;
        if status != 200 {
            let mut text = String::new();
            let _ = answer.reader.take(MOST_BYTES).read_to_string(&mut text);
            return DaemonReply { status, body: serde_json::from_str(&text).unwrap_or(Value::Null) }
                .ok()
                .map(drop);
        }
        begun()?;
        for line in answer.reader.lines() {
            let line = line.map_err(|e| {
                answer.from.problem(
                    "the daemon closed the connection before the \
                                                             answer ended",
                    e,
                )
            })?;
            if let Some(data) = line.strip_prefix("data:") {
                let mut event = serde_json::from_str(data.trim()).map_err(Failure::of)?;
                self.made_fit(&mut event);
                each(&event)?;
            }
        }
        Ok(())
    }
}

fn escape_all(value: &mut Value) {
    match value {
        Value::String(text) => {
            if let Cow::Owned(safe) = plain::escaped(text) {
                *text = safe;
            }
        }
        Value::Array(values) => values.iter_mut().for_each(escape_all),
        Value::Object(map) => map.values_mut().for_each(escape_all),
        _ => {}
    }
}

/// Describes the resolution of a name: label and name of the volume, path and UUID of the device.
pub(crate) fn described(resolved: &Value) -> String {
    let text = |key: &str| resolved[key].as_str().map(str::to_owned);
    let set = text("set").map(|set| format!("set {set}"));
    let uuid = text("uuid").map(|uuid| format!("UUID {uuid}"));
    let mut all = [text("name").or(set), text("device"), uuid].into_iter().flatten();
    let first = all.next().unwrap_or_default();
    let rest: Vec<String> = all.collect();
    let more = if rest.is_empty() { String::new() } else { format!(" ({})", rest.join(", ")) };
    plain::named(&text("label").unwrap_or_default(), first + &more)
}

/// Makes a path absolute, because the daemon runs in another directory.
pub(crate) fn absolute(path: &Path) -> Result<PathBuf, Failure> {
    std::path::absolute(path).map_err(|e| Failure::at(path, "cannot be found", e))
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

    /// The message for a daemon that was killed spoke of too many clients and of https.
    #[test]
    fn a_daemon_that_ends_before_its_answer_may_have_acted() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("socket");
        let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let control = Control { socket: Some(socket), api: None, token_file: None, ca: None, json: false };
        let ends = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let _bytes = stream.read(&mut [0; 16]).unwrap();
        });
        let said = control.get("/v1/status").unwrap_err().message().unwrap().to_owned();
        ends.join().unwrap();
        let is_reset = said.contains("the daemon does not answer");
        assert!(is_reset || said.contains("may have carried the command out"), "{said}");
        assert!(!said.contains("https"), "{said}");
    }

    #[test]
    fn a_slash_makes_a_path_and_a_directory_is_no_device() {
        let dir = tempfile::tempdir().unwrap();
        let control = Control {
            socket: Some(dir.path().join("socket")),
            api: None,
            token_file: None,
            ca: None,
            json: false,
        };
        let here = std::env::current_dir().unwrap();
        let said = |name: &str| control.device_name(name).unwrap();
        assert_eq!(said("/dev/none"), "/dev/none");
        assert_eq!(said("./none"), here.join("none").to_str().unwrap());
        assert_eq!(said("none"), "none");
        assert_eq!(said("src"), "src", "a directory of this crate");
        // The name of a file in the present directory: only the daemon knows whether the name is ambiguous.
        assert!(control.device_name("Cargo.toml").unwrap_err().message().unwrap().contains("no daemon runs"));
        let far =
            Control { socket: None, api: Some("https://storage.example:1".parse().unwrap()), ..control };
        assert_eq!(far.device_name("/dev/sdb").unwrap(), "/dev/sdb");
        assert_eq!(far.device_name("Cargo.toml").unwrap(), "Cargo.toml");
        assert!(
            far.device_name("./sdb").unwrap_err().message().unwrap().contains("expected an absolute path")
        );
    }

    #[test]
    fn a_named_object_is_described_with_its_device_and_uuid() {
        let of = |text: &str| described(&serde_json::from_str(text).unwrap());
        assert_eq!(of(r#"{"name": "bcache0", "device": "/dev/b", "uuid": "u"}"#), "bcache0 (/dev/b, UUID u)");
        let labelled = of(r#"{"name": "bcache0", "label": "one", "device": "/dev/b", "uuid": "u"}"#);
        assert_eq!(labelled, "one, bcache0 (/dev/b, UUID u)");
        assert_eq!(
            of(r#"{"name": null, "device": "/dev/c", "uuid": "u", "set": "s"}"#),
            "set s (/dev/c, UUID u)"
        );
        assert_eq!(of(r#"{"name": "bcache1", "device": null, "uuid": null}"#), "bcache1");
        assert_eq!(of(r#"{"name": null, "device": "/dev/b", "uuid": "u"}"#), "/dev/b (UUID u)");
    }

    /// A refused name was answered without the command that works.
    #[test]
    fn the_command_that_works_is_the_one_that_was_typed_with_another_name() {
        let command = |typed: &str, instead: &str| {
            let args: Vec<String> = typed.split(' ').map(str::to_owned).collect();
            command_instead(&args, &serde_json::from_str(instead).unwrap())
        };
        let detach = r#"{"name": "fast", "names": ["backup"], "key": null}"#;
        assert_eq!(command("ubcache detach fast --wipe", detach).unwrap(), "ubcache detach backup --wipe");
        assert_eq!(command("ubcache detach other", detach), None);
        let several = r#"{"name": "fast", "names": ["backup", "films"], "key": null}"#;
        assert_eq!(command("ubcache detach fast", several), None, "no volume is chosen for the operator");
        let path = r#"{"name": "/dev/ssd", "names": ["my_data"]}"#;
        assert_eq!(command("x detach /dev/ssd", path).unwrap(), "ubcache detach my_data");
        let key =
            r#"{"name": "fast", "names": ["backup"], "key": ["writeback_precent", "writeback_percent"]}"#;
        let right = "ubcache set backup writeback_percent=5";
        assert_eq!(command("ubcache set fast writeback_precent=5", key).unwrap(), right);
        let key = r#"{"name": "fast", "names": [], "key": ["a", "b"]}"#;
        assert_eq!(command("ubcache get fast a", key).unwrap(), "ubcache get fast b");
        assert_eq!(command("ubcache get fast", "null"), None);
        assert_eq!(quoted("it's"), "'it'\\''s'");
    }

    /// A question ended with `?;`.
    #[test]
    fn a_question_has_one_mark() {
        assert_eq!(then_run("did you mean b?", "ubcache get b"), "did you mean b? Run `ubcache get b`");
        assert_eq!(then_run("it is not", "ubcache get b"), "it is not; run `ubcache get b`");
    }

    #[test]
    fn bad_news_are_words() {
        let reply = |status, text: &str| DaemonReply { status, body: serde_json::from_str(text).unwrap() };
        assert!(reply(200, "{}").ok().is_ok());
        assert!(matches!(reply(400, r#"{"error": "no"}"#).ok(), Err(Failure::Usage(t)) if t == "no"));
        assert!(matches!(reply(409, r#"{"error": "no"}"#).ok(), Err(Failure::Failed(_))));
        assert!(matches!(reply(500, "null").ok(), Err(Failure::Failed(t)) if t == "status 500"));
    }
}
