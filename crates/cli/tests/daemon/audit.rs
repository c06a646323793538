//! Who did what: the line in the log and the event.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::place::*;
use crate::world::*;

/// The lines that say who did something.
fn lines(daemon: &Daemon) -> Vec<String> {
    daemon.said().lines().filter(|l| l.starts_with("ubcache: audit: ")).map(str::to_owned).collect()
}

#[test]
fn every_change_says_who_made_it_and_to_what() {
    let place = Place::new();
    let daemon = place.start();
    let mut listener = daemon.connect();
    listener.write_all(b"GET /v1/events HTTP/1.0\r\n\r\n").unwrap();
    let mut events = BufReader::new(listener).lines();
    // It listens as soon as its answer has begun.
    while !events.next().unwrap().unwrap().is_empty() {}
    let body = serde_json::json!({"devices": [place.ssd, place.hdd]}).to_string();
    assert_eq!(daemon.http("POST", "/v1/register", &body).0, 200);
    let uuid = daemon.volume("bcache0")["backing_uuid"].as_str().unwrap().to_owned();
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    let who = format!("ubcache: audit: uid {uid} gid {gid} pid {}: ", std::process::id());
    let device = format!("one, bcache0 ({}, UUID {uuid})", place.hdd);
    for (method, path, body, status, line) in [
        (
            "PUT",
            "/v1/volumes/one/tunables/writeback_percent",
            r#"{"value": "20"}"#,
            200,
            format!("set writeback_percent=20 on {device}: done"),
        ),
        (
            "DELETE",
            "/v1/volumes/one/tunables/writeback_percent",
            "",
            200,
            format!("reset writeback_percent on {device}: done"),
        ),
        (
            "PUT",
            "/v1/volumes/one/tunables/nothing",
            r#"{"value": "20"}"#,
            400,
            format!("set nothing=20 on {device}: refused: unknown tunable nothing"),
        ),
        (
            "PUT",
            "/v1/volumes/one/tunables/writeback_percent",
            r#"{"value": "101"}"#,
            400,
            format!(
                "set writeback_percent=101 on {device}: refused: writeback_percent: expected 0 to 40 %, found 101"
            ),
        ),
        (
            "PUT",
            "/v1/volumes/two/tunables/writeback_percent",
            r#"{"value": "20"}"#,
            404,
            "set writeback_percent=20 on two: refused: there is no volume or set two".into(),
        ),
        (
            "DELETE",
            "/v1/volumes/two/tunables/writeback_percent",
            "",
            404,
            "reset writeback_percent on two: refused: there is no volume or set two".into(),
        ),
        (
            "PUT",
            "/v1/volumes/two/label",
            r#"{"label": "three"}"#,
            404,
            "set label=three on two: refused: there is no volume or set two".into(),
        ),
        (
            "PUT",
            "/v1/volumes/two/cache-mode",
            r#"{"mode": "writeback"}"#,
            404,
            "set cache_mode=writeback on two: refused: there is no volume or set two".into(),
        ),
        ("POST", "/v1/volumes/one/drain", "", 202, format!("drain one on {device}: begun")),
        (
            "POST",
            "/v1/volumes/two/flush",
            "",
            404,
            "drain two: refused: there is no volume or set two".into(),
        ),
        ("POST", "/v1/volumes/two/stop", "", 404, "stop two: refused: there is no volume or set two".into()),
        ("POST", "/v1/volumes/one/stop", "", 200, format!("stop one on {device}: done")),
        (
            "POST",
            "/v1/unregister",
            r#"{"device": "x\ny"}"#,
            409,
            "unregister x\\ny: refused: there is no volume or set x\\ny".into(),
        ),
        ("POST", "/v1/nothing", "", 404, "POST /v1/nothing: refused: there is no such path".into()),
        ("POST", "/v1/register", "[]", 400, "POST /v1/register: refused: body: ".into()),
    ] {
        assert_eq!(daemon.http(method, path, body).0, status, "{method} {path}");
        let last = lines(&daemon).pop().unwrap();
        assert!(last.starts_with(&format!("{who}{line}")), "{line}: {last}");
    }
    let register = &lines(&daemon)[0];
    assert!(
        register.contains("register ") && register.contains(&uuid) && register.ends_with(": done"),
        "{register}"
    );
    let before = lines(&daemon).len();
    daemon.http("GET", "/v1/status", "");
    assert_eq!(lines(&daemon).len(), before, "who only looks is not written down");

    let mut changes = events.map_while(Result::ok).filter_map(|line| {
        let event: Value = serde_json::from_str(line.strip_prefix("data:")?).unwrap();
        (event["type"] == "audit").then(|| event["change"].clone())
    });
    let set = changes.find(|c| c["action"] == "set writeback_percent=20").unwrap();
    assert_eq!(set["uid"], uid);
    assert_eq!(set["pid"], std::process::id());
    assert_eq!(set["outcome"], "done");
    assert_eq!(set["devices"][0]["uuid"], uuid.as_str());
    assert_eq!(set["devices"][0]["device"], place.hdd.as_str());
    let refused = changes.find(|c| c["outcome"] == "refused").unwrap();
    assert!(refused["why"].as_str().unwrap().contains("unknown tunable"), "{refused}");
    drop(changes);
    daemon.stop();
}

/// The command of a client that goes away before the answer is carried out or not, depending on when the daemon notices. The line
/// says which. There is no line if the connection ends before the daemon reads the request: then another client sends it.
#[test]
fn a_client_that_goes_away_is_written_down() {
    let place = Place::new();
    let daemon = place.start_registered();
    let send = || {
        let mut client = daemon.connect();
        write!(client, "POST /v1/volumes/one/stop HTTP/1.0\r\nContent-Length: 0\r\n\r\n").unwrap();
    };
    // The line of a request that was refused has the request itself, because its names were not looked up.
    let request = ": POST /v1/volumes/one/stop: refused: the client disconnected";
    let is_it = |line: &String| line.contains(": stop one on ") || line.contains(request);
    let all = || lines(&daemon).into_iter().filter(is_it).collect::<Vec<_>>();
    wait_until("a line", || {
        if all().is_empty() {
            send();
            daemon.http("GET", "/v1/status", "");
        }
        !all().is_empty()
    });
    let is_done = |line: &String| line.ends_with(": done");
    let said = all();
    assert!(said.iter().all(|l| is_done(l) || l.contains(": refused: the client disconnected")), "{said:?}");
    wait_until("the state that the lines say", || {
        let state = if all().iter().any(is_done) { "stopped" } else { "served" };
        daemon.state_of(&place.hdd) == state
    });
    daemon.stop();
}

#[test]
fn refused_users_are_recorded_at_a_limited_rate() {
    if !rustix::process::geteuid().is_root() {
        rig::skipped("only root can run a program as another user");
        return;
    }
    let place = Place::new();
    let copy = place.dir.path("ubcache");
    std::fs::copy(program(), &copy).unwrap();
    std::fs::set_permissions(place.dir.root(), PermissionsExt::from_mode(0o755)).unwrap();
    let daemon = place.start();
    for _ in 0..20 {
        let mut command = Command::new(&copy);
        command.args(["stop", "one", "--socket", daemon.socket()]).uid(65534).gid(65534).stdin(Stdio::null());
        Said::of(output(command)).refused(&["user 65534 may not"]);
    }
    let said = lines(&daemon);
    assert_eq!(said.len(), 10, "{said:?}");
    assert!(said[0].contains("uid 65534 gid 65534 pid ") && said[0].contains(": refused: "), "{}", said[0]);
    daemon.stop();
}

/// The audit records a refused `set` or `reset`. It lacked those that were refused while the name was looked up.
#[test]
fn a_change_of_an_unknown_name_is_written_down() {
    let place = Place::new();
    let daemon = place.start_registered();
    for (command, line) in [
        (
            &["set", "two", "writeback_percent=5"][..],
            ": set writeback_percent=5 on two: refused: there is no volume or set two",
        ),
        (
            &["reset", "two", "writeback_percent"],
            ": reset writeback_percent on two: refused: there is no volume or set two",
        ),
        (&["set-label", "two", "three"], ": set label=three on two: refused: there is no volume or set two"),
        (
            &["set-cachemode", "two", "none"],
            ": set cache_mode=none on two: refused: there is no volume or set two",
        ),
    ] {
        daemon.run(command).refused(&["there is no volume or set two"]);
        let last = lines(&daemon).pop().unwrap();
        assert!(last.contains(line), "{line}: {last}");
    }
    daemon.stop();
}

/// A number that a tunable cannot have exactly is reported.
#[test]
fn a_value_that_became_another_one_is_told() {
    let place = Place::new();
    let daemon = place.start_registered();
    let said = daemon.run(&["set", &place.ssd, "io_error_halflife=1000"]).ok();
    assert!(said.err.contains("io_error_halflife=1000: the value is 968 now"), "{said}");
    let said = daemon.run(&["set", "one", "writeback_percent=33", "sequential_cutoff=4M"]).ok();
    assert!(!said.err.contains("the value is"), "{said}");
    let said = daemon.json(&["set", &place.ssd, "io_error_halflife=1000"]);
    assert!(said["changed"][0]["limited"].as_str().unwrap().ends_with("is 968 now"), "{said}");
    daemon.stop();
}

#[test]
fn an_attachment_names_each_device_once() {
    let place = Place::new();
    let daemon = place.start_registered();
    let uuid = daemon.volume("bcache0")["backing_uuid"].as_str().unwrap().to_owned();
    daemon.run(&["detach", "one"]).ok();
    daemon.run(&["stop", "one"]).ok();
    daemon.run(&["attach", &place.ssd, &place.hdd]).ok();
    let last = lines(&daemon).pop().unwrap();
    assert!(last.contains(": attach ") && last.ends_with(": done"), "{last}");
    assert_eq!(last.matches(&uuid).count(), 1, "{last}");
    daemon.stop();
}
