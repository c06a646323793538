//! Clients that may not, that make no sense, that do not read; and where there is no daemon at all.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::place::*;
use crate::world::*;

#[test]
fn without_a_daemon_it_is_said_what_to_do() {
    let dir = Dir::new();
    let socket = dir.path("none.sock");
    for args in
        [&["status"][..], &["register", "/dev/null"], &["top"], &["set", "x", "a=b"], &["detach", "x"]]
    {
        let all: Vec<&str> = args.iter().copied().chain(["--socket", &socket]).collect();
        run(&all).refused(&["no daemon runs", &socket, "ubcache daemon", "ubcache up"]);
    }
}

#[test]
fn others_are_refused_in_words() {
    if !rustix::process::geteuid().is_root() {
        rig::skipped("only root can run a program as another user");
        return;
    }
    let place = Place::new();
    // What others may run and reach.
    let copy = place.dir.path("ubcache");
    std::fs::copy(program(), &copy).unwrap();
    std::fs::set_permissions(place.dir.root(), PermissionsExt::from_mode(0o755)).unwrap();
    let daemon = place.start();
    let as_user = |gid: u32| {
        let mut command = Command::new(&copy);
        command.args(["status", "--socket", daemon.socket()]).uid(65534).gid(gid).stdin(Stdio::null());
        Said::of(output(command))
    };
    as_user(65534).refused(&["user 65534 may not control this daemon", "only root"]);
    daemon.run(&["status"]).ok();
    daemon.stop();
    place.configure("group = \"12345\"\n");
    let daemon = place.start();
    let as_user = |gid: u32| {
        let mut command = Command::new(&copy);
        command.args(["status", "--socket", daemon.socket()]).uid(65534).gid(gid).stdin(Stdio::null());
        Said::of(output(command))
    };
    as_user(65534).refused(&["members of group 12345"]);
    as_user(12345).ok();
    daemon.stop();
}

/// Requests that make no sense, each in another way.
pub fn malformed(n: u64) -> Vec<u8> {
    // A generator by multiplication: what it says is the same each time.
    let mut state = n.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let paths =
        ["/v1/status", "/v1/register", "/v1/volumes/bcache0", "/v1/jobs/1", "/v1/sets/%ff/gc", "/", "*"];
    let path = paths[(next() % paths.len() as u64) as usize];
    match n % 8 {
        0 => (0..next() % 200).map(|_| next() as u8).collect(),
        1 => format!("GET {path}").into_bytes(),
        2 => format!("POST {path} HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n").into_bytes(),
        3 => format!("POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n{{{{{{{{{{").into_bytes(),
        4 => format!("BREW {path} HTTP/1.1\r\nHost: x\r\n\r\n").into_bytes(),
        5 => [format!("GET {path} HTTP/1.1\r\n").into_bytes(), b"X: y\r\n".repeat(100), b"\r\n".to_vec()]
            .concat(),
        6 => format!("PUT {path} HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n").into_bytes(),
        _ => [
            format!("GET /{}", "a".repeat((next() % 40000) as usize)).into_bytes(),
            b" HTTP/1.1\r\n\r\n".to_vec(),
        ]
        .concat(),
    }
}

#[test]
fn ten_thousand_malformed_requests_disturb_nobody() {
    const REQUESTS: u64 = 10_000;
    let place = Place::new();
    let daemon = place.start_registered();
    let mut client = place.client("bcache0");
    // One that asks much and reads nothing, and one that listens to events and reads nothing.
    let mut deaf = daemon.connect();
    deaf.set_nonblocking(true).unwrap();
    while deaf.write_all(b"GET /v1/status HTTP/1.1\r\nHost: x\r\n\r\n").is_ok() {}
    let mut deaf_to_events = daemon.connect();
    deaf_to_events.write_all(b"GET /v1/events HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();

    std::thread::scope(|scope| {
        for part in 0..4 {
            let daemon = &daemon;
            scope.spawn(move || {
                for n in (part..REQUESTS).step_by(4) {
                    let mut stream = daemon.connect();
                    // It may hang up before all of it was said.
                    let _ = stream.write_all(&malformed(n));
                    let _ = stream.shutdown(std::net::Shutdown::Write);
                    let mut answer = Vec::new();
                    let _ = stream.read_to_end(&mut answer);
                    let said = String::from_utf8_lossy(&answer);
                    assert!(!said.starts_with("HTTP/1.1 5"), "{n}: {said}");
                }
            });
        }
        for n in 0..50u8 {
            client.write(u64::from(n) * 4096, &[n; 4096]).unwrap();
            assert_eq!(client.read(u64::from(n) * 4096, 4096).unwrap(), [n; 4096]);
        }
    });
    // More events than a client reads.
    for n in 0..400 {
        let body = format!(r#"{{"value": "{}", "runtime": true}}"#, n % 40);
        assert_eq!(daemon.http("PUT", "/v1/volumes/one/tunables/writeback_percent", &body).0, 200);
    }
    daemon.run(&["status"]).ok().says(&["bcache0"]);
    assert!(!daemon.said().contains("panicked"), "{}", daemon.said());
    drop((deaf, deaf_to_events));
    daemon.stop();
}

#[test]
fn errors_are_json_with_a_status() {
    let place = Place::new();
    let daemon = place.start();
    for (method, path, body, status) in [
        ("GET", "/v2/status", "", 404),
        ("GET", "/v1/volumes/none", "", 404),
        ("GET", "/v1/sets/none", "", 404),
        ("DELETE", "/v1/status", "", 405),
        ("POST", "/v1/register", "", 400),
        ("POST", "/v1/register", "[]", 400),
        ("POST", "/v1/register", r#"{"devices": ["relative"]}"#, 400),
        ("POST", "/v1/register", r#"{"devices": [], "more": 1}"#, 400),
        ("POST", "/v1/register", r#"{"devices": ["/dev/null"]}"#, 409),
        ("POST", "/v1/register", &"x".repeat(70_000), 413),
        ("POST", "/v1/unregister", r#"{"device": "none"}"#, 409),
        ("GET", "/v1/jobs/x", "", 404),
    ] {
        let (found, answer) = daemon.http(method, path, body);
        let shown = body.get(..40).unwrap_or(body);
        assert_eq!(found, status, "{method} {path} {shown}: {answer}");
        assert!(answer["error"].as_str().is_some_and(|e| !e.is_empty()), "{method} {path} {shown}: {answer}");
        assert_eq!(answer["schema_version"], 1);
    }
    let (status, document) = daemon.http("GET", "/v1/openapi.json", "");
    assert_eq!((status, &document["openapi"]), (200, &"3.1.0".into()));
    daemon.stop();
}

#[test]
fn events_come_as_they_happen() {
    let place = Place::new();
    let daemon = place.start();
    let mut child = Command::new(program())
        .args(["events", "--json", "--socket", daemon.socket()])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    // Events before it listens are lost to it, so events are made until one arrives.
    let wanted = std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut numbers = Vec::new();
            loop {
                let event: Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
                numbers.push(event["seq"].as_u64().unwrap());
                if event["type"] == "set" && event["text"].as_str().unwrap().contains("is served") {
                    return (event, numbers);
                }
            }
        });
        wait_until("the event", || {
            daemon.run(&["register", &place.ssd]).ok();
            daemon.run(&["unregister", &place.ssd]).ok();
            reader.is_finished()
        });
        reader.join().unwrap()
    });
    assert!(wanted.0["set"].is_string() && wanted.0["level"] == "info", "{wanted:?}");
    assert!(wanted.1.is_sorted(), "{wanted:?}");
    daemon.stop();
    // It ends with the daemon.
    wait_until("the end", || child.try_wait().unwrap().is_some());
}

/// The history of events ended with the daemon, also with its crash.
#[test]
fn events_of_the_past_outlive_the_daemon() {
    let place = Place::new();
    let daemon = place.start();
    daemon.run(&["register", &place.ssd]).ok();
    let past = |daemon: &Daemon, since: &str| {
        let said = daemon.run(&["events", "--since", since, "--json"]).ok();
        said.out.lines().map(|l| serde_json::from_str(l).unwrap()).collect::<Vec<Value>>()
    };
    let served = |e: &Value| e["type"] == "set" && e["text"].as_str().unwrap().contains("is served");
    let before = past(&daemon, "1h");
    assert!(before.iter().any(served), "{before:?}");
    // A thread writes the events to the file; the kill must not come before it.
    let log = place.dir.path("state/events.jsonl");
    let stored = || std::fs::read_to_string(&log).unwrap_or_default().lines().count();
    wait_until("the file", || stored() >= before.len());
    daemon.kill();
    let mut torn = std::fs::OpenOptions::new().append(true).open(&log).unwrap();
    std::io::Write::write_all(&mut torn, b"{\"seq\": 1000, \"time_ms\":").unwrap();
    let daemon = place.start();
    let after = past(&daemon, "1970-01-01");
    assert!(after.len() > before.len() && after[..before.len()] == before[..], "{after:?}");
    let numbers: Vec<u64> = after.iter().map(|e| e["seq"].as_u64().unwrap()).collect();
    assert!(numbers.windows(2).all(|w| w[0] < w[1]), "{numbers:?}");
    assert!(past(&daemon, "9999-01-01").is_empty());
    daemon.run(&["events", "--since", "1h"]).ok().says(&["Z ", "is served"]);
    daemon.run(&["events", "--since", "yesterday"]).usage().says(&["expected a time in UTC"]);
    daemon.stop();
}
