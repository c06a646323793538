//! The dashboard's files, and the data it draws.

use std::io::{Read, Write};

use serde_json::Value;

use crate::place::*;
use crate::world::*;

/// A request with these lines in its head; head and body of the answer.
fn ask(daemon: &Daemon, request: &str, lines: &[&str]) -> (String, String) {
    let mut stream = daemon.connect();
    let head: String = lines.iter().map(|l| format!("{l}\r\n")).collect();
    write!(stream, "{request} HTTP/1.0\r\n{head}\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.to_lowercase(), body.to_owned())
}

fn column(answer: &Value, name: &str) -> Vec<Value> {
    answer["columns"][name].as_array().unwrap_or_else(|| panic!("{name}: {answer}")).clone()
}

#[test]
fn the_page_is_part_of_the_program() {
    let place = Place::new();
    let daemon = place.start();
    let (head, page) = ask(&daemon, "GET /", &[]);
    assert!(head.starts_with("http/1.0 200") && head.contains("content-type: text/html"), "{head}");
    assert!(head.contains("content-security-policy: default-src 'none'; script-src 'self'"), "{head}");
    // Everything that the page names is there.
    let named: Vec<&str> = page.split(['"', ' ']).filter(|w| w.starts_with("assets/")).collect();
    assert!(named.len() >= 4, "{page}");
    for name in named {
        let (head, body) = ask(&daemon, &format!("GET /{name}"), &[]);
        assert!(head.starts_with("http/1.0 200") && !body.is_empty(), "{name}: {head}");
        let tag = head.lines().find_map(|l| l.strip_prefix("etag: ")).unwrap().to_owned();
        let (head, body) = ask(&daemon, &format!("GET /{name}"), &[&format!("If-None-Match: {tag}")]);
        assert!(head.starts_with("http/1.0 304") && body.is_empty(), "{name}: {head}");
    }
    assert!(ask(&daemon, "GET /assets/../Cargo.toml", &[]).0.starts_with("http/1.0 404"));
    daemon.stop();
}

#[test]
fn a_page_of_another_origin_is_refused_in_words() {
    let place = Place::new();
    let daemon = place.start();
    let local = "Host: localhost";
    for (lines, status) in [
        (&[][..], "200"),
        (&[local, "Sec-Fetch-Site: same-origin", "Origin: http://localhost"], "200"),
        (&[local, "Sec-Fetch-Site: cross-site"], "403"),
        (&[local, "Origin: http://evil.example"], "403"),
        (&["Host: evil.example", "User-Agent: Mozilla/5.0"], "403"),
        // A token does not make a foreign origin or host acceptable.
        (&["Host: evil.example", "User-Agent: Mozilla/5.0", "Authorization: Bearer x"], "403"),
    ] {
        for path in ["/v1/status", "/metrics"] {
            let (head, body) = ask(&daemon, &format!("GET {path}"), lines);
            assert!(head.starts_with(&format!("http/1.0 {status}")), "{path} {lines:?}: {head}");
            assert_eq!(status == "403", body.contains("\"error\":"), "{body}");
        }
    }
    daemon.stop();
}

#[test]
fn history_has_the_time_before_the_first_page() {
    let place = Place::new();
    let daemon = place.start_registered();
    let mut client = place.client("bcache0");
    let history = |since: u64| {
        let (status, answer) = daemon.http("GET", &format!("/v1/volumes/one/history?since_ms={since}"), "");
        assert_eq!(status, 200, "{answer}");
        answer
    };
    // Requests that fall into the time before the first sample are in none.
    let mut n = 0;
    wait_until("samples of reads and writes", || {
        client.write(n % 64 * 4096, &[1; 4096]).unwrap();
        client.read(n % 64 * 4096, 4096).unwrap();
        n += 1;
        let some = |name: &str| {
            history(0)["columns"][name].as_array().is_some_and(|c| c.iter().any(|v| v.as_f64() > Some(0.0)))
        };
        some("reads") && some("written_bytes") && some("read_p99_us") && some("hits")
    });
    let all = history(0);
    assert_eq!((&all["volume"], &all["every_ms"]), (&"bcache0".into(), &1000.into()));
    let times = column(&all, "time_ms");
    for (name, values) in all["columns"].as_object().unwrap() {
        assert_eq!(values.as_array().unwrap().len(), times.len(), "{name}");
    }
    assert!(column(&all, "dirty_bytes").iter().any(|v| v.as_u64() >= Some(4096)), "{all}");
    assert!(column(&all, "target_bytes")[0].as_u64() > Some(0), "{all}");
    let last = times.last().unwrap().as_u64().unwrap();
    wait_until("a sample that is new", || !column(&history(last), "time_ms").is_empty());
    assert!(column(&history(last), "time_ms")[0].as_u64() > Some(last));

    let set = daemon.json(&["status"])["sets"][0]["id"].as_str().unwrap().to_owned();
    let (status, of_set) = daemon.http("GET", &format!("/v1/sets/{set}/history"), "");
    assert_eq!(status, 200, "{of_set}");
    assert!(column(&of_set, "cache_writes").iter().any(|v| v.as_f64() > Some(0.0)), "{of_set}");
    daemon.stop();
}

#[test]
fn the_disk_trace_and_the_buckets_have_the_requests() {
    let place = Place::new();
    let daemon = place.start_registered();
    let mut client = place.client("bcache0");
    let trace = |since: u64| {
        let (status, answer) = daemon.http("GET", &format!("/v1/volumes/one/disk-trace?since={since}"), "");
        assert_eq!(status, 200, "{answer}");
        answer
    };
    assert_eq!(trace(0)["next"], 0);
    client.write(0, &[1; 8192]).unwrap();
    client.read(1 << 20, 4096).unwrap();
    client.flush().unwrap();
    let begin = trace(0);
    let read = column(&begin, "kind").iter().position(|k| k == "read").unwrap();
    assert_eq!(column(&begin, "sector")[read], 2048 + DATA_OFFSET / 512);
    assert_eq!(begin["size_sectors"], (8 << 20) / 512);
    assert!(!column(&begin, "kind").contains(&"writeback".into()), "{begin}");

    let set = daemon.json(&["status"])["sets"][0]["id"].as_str().unwrap().to_owned();
    let buckets = |query: &str| daemon.http("GET", &format!("/v1/sets/{set}/buckets{query}"), "");
    let (status, map) = buckets("?cells=16");
    let sum = |name: &str| column(&map, name).iter().map(|n| n.as_u64().unwrap()).sum::<u64>();
    assert_eq!((status, column(&map, "dirty").len()), (200, 16));
    assert_eq!(sum("unused") + sum("clean") + sum("dirty") + sum("metadata"), (8 << 20) / 8192);
    assert!(sum("dirty") >= 1 && sum("metadata") > 1, "{map}");
    assert_eq!(map["bucket_bytes"], 8192);
    assert_eq!(column(&buckets("").1, "dirty").len(), 1024);

    daemon.run(&["set", "one", "writeback_running=1"]).ok();
    daemon.run(&["drain", "one"]).ok();
    let next = begin["next"].as_u64().unwrap();
    wait_until("writeback", || column(&trace(next), "kind").contains(&"writeback".into()));
    let after = trace(next);
    assert!(column(&after, "kind").contains(&"flush".into()), "{after}");
    assert_eq!(after["missed"], 0);

    for wrong in ["/v1/volumes/one/disk-trace?since=x", "/v1/volumes/one/history?since=1", "/v1/sets/x?y"] {
        let (status, answer) = daemon.http("GET", wrong, "");
        assert!(status == 400 || status == 404, "{wrong}: {answer}");
    }
    assert_eq!(buckets("?cells=-1").0, 400);
    daemon.http("POST", &format!("/v1/sets/{set}/volumes"), r#"{"size_bytes": 65536, "label": "flash"}"#);
    let (status, answer) = daemon.http("GET", "/v1/volumes/flash/disk-trace", "");
    assert_eq!(status, 409, "{answer}");
    assert!(answer["error"].as_str().unwrap().contains("flash-only"), "{answer}");
    assert_eq!(daemon.http("GET", "/v1/volumes/flash/history", "").0, 200);
    daemon.stop();
}
