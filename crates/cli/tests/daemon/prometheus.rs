//! A Prometheus server scrapes a daemon: what arrives there is what the daemon counts, the alert rules that are shipped are
//! evaluated without a complaint, and every query of the dashboard that is shipped finds series.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use serde_json::Value;
use ubcache_cli::nbd_client::{Ask, Client};

use crate::place::*;
use crate::world::*;

/// Series that stand still while no client asks for anything.
const STEADY: &[&str] = &[
    "ubcache_requests_total",
    "ubcache_request_bytes_total",
    "ubcache_request_duration_seconds_count",
    "ubcache_request_errors_total",
    "ubcache_bypassed_requests_total",
    "ubcache_bypassed_bytes_total",
    "ubcache_cache_hits_total",
    "ubcache_cache_misses_total",
    "ubcache_volume_size_bytes",
    "ubcache_volume_state",
    "ubcache_dirty_bytes",
    "ubcache_cache_size_bytes",
    "ubcache_device_error_limit",
    "ubcache_set_failed",
];

/// Values by series: the name, and the labels in their order.
type Series = BTreeMap<(String, BTreeMap<String, String>), f64>;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// A port of this machine behind which is the daemon's socket, for as long as the tests run.
fn bridge(socket: &str) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let socket = socket.to_owned();
    std::thread::spawn(move || {
        for outside in listener.incoming().map_while(Result::ok) {
            // Once the daemon is gone, so is what connects to it.
            let Ok(inside) = UnixStream::connect(&socket) else { continue };
            let (mut from, mut to) = (outside.try_clone().unwrap(), inside.try_clone().unwrap());
            std::thread::spawn(move || std::io::copy(&mut from, &mut to));
            let (mut from, mut to) = (inside, outside);
            std::thread::spawn(move || std::io::copy(&mut from, &mut to));
        }
    });
    port
}

/// A running server.
struct Prometheus {
    child: Child,
    address: String,
}

impl Prometheus {
    /// Starts one that scrapes `port` twice a second, and has the alert rules.
    fn start(dir: &Dir, port: u16) -> Prometheus {
        let found = Command::new(root().join("scripts/prometheus-tools")).output().unwrap();
        assert!(found.status.success(), "{}", String::from_utf8_lossy(&found.stderr));
        let program = Path::new(String::from_utf8_lossy(&found.stdout).trim()).join("prometheus");
        let config = dir.path("prometheus.yml");
        let rules = root().join("packaging/prometheus/ubcache.rules.yml");
        let text = format!(
            "global:\n  scrape_interval: 500ms\n  scrape_timeout: 500ms\n  evaluation_interval: 500ms\n\
             rule_files: [\"{}\"]\n\
             scrape_configs:\n- job_name: ubcache\n  static_configs:\n  - targets: [\"127.0.0.1:{port}\"]\n",
            rules.display()
        );
        std::fs::write(&config, text).unwrap();
        let log = dir.path("prometheus.log");
        let messages = File::create(&log).unwrap();
        let child = Command::new(&program)
            .args([format!("--config.file={config}"), format!("--storage.tsdb.path={}", dir.path("tsdb"))])
            .arg("--web.listen-address=127.0.0.1:0")
            .stdin(Stdio::null())
            .stdout(messages.try_clone().unwrap())
            .stderr(messages)
            .spawn()
            .unwrap_or_else(|e| panic!("{}: {e}", program.display()));
        let mut server = Prometheus { child, address: String::new() };
        let said = || std::fs::read_to_string(&log).unwrap_or_default();
        wait_until("the server's address", || {
            let ended = server.child.try_wait().unwrap();
            assert!(ended.is_none(), "it ended ({ended:?}): {}", said());
            let text = said();
            let line = text.lines().find(|l| l.contains("Listening on"));
            let address = line.and_then(|l| l.split("address=").nth(1)?.split_whitespace().next());
            server.address = address.unwrap_or_default().to_owned();
            address.is_some()
        });
        wait_until("a server that is ready", || server.get("/-/ready").contains(" 200 "));
        server
    }

    /// The whole answer, with its head.
    fn get(&self, path: &str) -> String {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        write!(stream, "GET {path} HTTP/1.0\r\n\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    }

    /// What its API says.
    #[track_caller]
    fn api(&self, path: &str) -> Value {
        let text = self.get(&format!("/api/v1/{path}"));
        let body = text.split_once("\r\n\r\n").map_or("", |(_, body)| body);
        let body: Value = serde_json::from_str(body).unwrap_or_else(|e| panic!("{path}: {e}: {text}"));
        assert_eq!(body["status"], "success", "{path}: {body}");
        body["data"].clone()
    }

    /// The result of a query at this moment.
    #[track_caller]
    fn query(&self, query: &str) -> Vec<Value> {
        let encoded: String = query.bytes().map(|b| format!("%{b:02X}")).collect();
        self.api(&format!("query?query={encoded}"))["result"].as_array().unwrap().clone()
    }

    /// Every series it has of the daemon, without the labels that it has added.
    fn series(&self) -> Series {
        let all = self.query(r#"{job="ubcache", __name__=~"ubcache_.*"}"#);
        let series = all.iter().map(|one| {
            let mut labels: BTreeMap<String, String> = serde_json::from_value(one["metric"].clone()).unwrap();
            let name = labels.remove("__name__").unwrap();
            labels.retain(|label, _| label != "job" && label != "instance");
            ((name, labels), one["value"][1].as_str().unwrap().parse().unwrap())
        });
        series.collect()
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What the daemon itself says.
fn counted(daemon: &Daemon) -> Series {
    let mut stream = daemon.connect();
    stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let (_, body) = text.split_once("\r\n\r\n").unwrap();
    let samples = body.lines().filter(|l| !l.starts_with('#') && !l.is_empty());
    let series = samples.map(|line| {
        let (series, value) = line.rsplit_once(' ').unwrap();
        let (name, labels) = series.split_once('{').unwrap_or((series, ""));
        let labels = labels.trim_end_matches('}').split("\",");
        let labels = labels.filter(|l| !l.is_empty()).map(|l| {
            let (label, value) = l.split_once("=\"").unwrap();
            (label.to_owned(), value.trim_end_matches('"').to_owned())
        });
        // A label without a value is none.
        let labels = labels.filter(|(_, value)| !value.is_empty()).collect();
        ((name.to_owned(), labels), value.parse().unwrap())
    });
    series.collect()
}

fn steady(mut series: Series) -> Series {
    series.retain(|(name, _), _| STEADY.contains(&name.as_str()));
    series
}

/// Some of everything that requests can be.
fn some_load(client: &mut Client, round: u64) {
    for n in 0..8u64 {
        let at = (round * 8 + n) % 512 * 8192;
        client.write(at, &[n as u8; 4096]).unwrap();
        client.read(at, 4096).unwrap();
        client.read(at + 4096, 4096).unwrap();
    }
    client.flush().unwrap();
    client.ask(Ask::Trim(4096), 6 << 20, 1).unwrap();
    client.send().unwrap();
    assert_eq!(client.receive().unwrap().error, 0);
}

/// The queries of the dashboard, with its variables as they are for "all".
fn dashboard() -> Vec<String> {
    let text = std::fs::read_to_string(root().join("packaging/grafana/ubcache.json")).unwrap();
    let dashboard: Value = serde_json::from_str(&text).unwrap();
    let panels = dashboard["panels"].as_array().unwrap().iter();
    let targets = panels.flat_map(|panel| panel["targets"].as_array().into_iter().flatten());
    let queries = targets.map(|target| {
        let query = target["expr"].as_str().unwrap().replace("$__rate_interval", "1m");
        query.replace("$set", ".*").replace("$volume", ".*")
    });
    let queries: Vec<String> = queries.collect();
    assert!(queries.len() > 20 && queries.iter().all(|q| !q.contains('$')), "{queries:?}");
    queries
}

#[test]
fn a_server_has_what_the_daemon_counts_and_rules_and_dashboard_work_on_it() {
    if rig::skip_requested("UBCACHE_PROMETHEUS_SKIP") {
        return;
    }
    let place = Place::new();
    let daemon = place.start_registered();
    let mut client = place.client("bcache0");
    let server = Prometheus::start(&place.dir, bridge(daemon.socket()));
    wait_until("a scrape", || {
        server.query("up{job=\"ubcache\"} == 1").len() == 1
            && server.query("scrape_samples_scraped > 100").len() == 1
    });

    // The dashboard, while there is something to be seen.
    let mut round = 0;
    for query in dashboard() {
        wait_until(&query, || {
            round += 1;
            some_load(&mut client, round);
            !server.query(&query).is_empty()
        });
    }

    // What has arrived.
    let (counts, volume) = (steady(counted(&daemon)), daemon.volume("bcache0"));
    assert!(counts.len() > 40, "{counts:?}");
    wait_until("the last scrape", || steady(server.series()) == counts);
    let one = |query: &str| {
        let found = server.query(query);
        assert_eq!(found.len(), 1, "{query}: {found:?}");
        found[0]["value"][1].as_str().unwrap().parse::<u64>().unwrap()
    };
    assert_eq!(one("sum(ubcache_requests_total{op=\"write\"})"), 8 * round);
    assert_eq!(one("sum(ubcache_request_bytes_total{op=\"read\"})"), 2 * 8 * 4096 * round);
    assert_eq!(one("sum(ubcache_request_duration_seconds_bucket{op=\"flush\", le=\"+Inf\"})"), round);
    assert_eq!(one("sum(ubcache_bypassed_requests_total{reason=\"discard\"})"), round);
    assert_eq!(one("ubcache_dirty_bytes"), volume["dirty_bytes"].as_u64().unwrap());
    assert_eq!(one("ubcache_volume_size_bytes"), (8 << 20) - DATA_OFFSET);
    assert_eq!(one("ubcache_volume_info{label=\"one\"} * on (set) group_left ubcache_set_failed"), 0);
    assert_eq!(one("sum(ubcache_devices_waiting) + sum(ubcache_volumes_not_exported)"), 0);
    assert_eq!(one("ubcache_devices{state=\"served\"}"), 2);
    assert_eq!(one("process_open_fds > bool 3") + one("process_resident_memory_bytes > bool 1e6"), 2);
    assert_eq!(one("abs(time() - process_start_time_seconds) < bool 3600"), 1);
    assert_eq!(one("ubcache_build_info"), 1);

    // The rules: each is evaluated, and the one that has a reason says so.
    let rules = || {
        let groups = server.api("rules")["groups"].as_array().unwrap().clone();
        groups.iter().flat_map(|g| g["rules"].as_array().unwrap().clone()).collect::<Vec<Value>>()
    };
    wait_until("rules that were evaluated", || rules().iter().all(|rule| rule["health"] != "unknown"));
    let rules = rules();
    assert!(rules.len() >= 8, "{rules:?}");
    for rule in &rules {
        assert_eq!(rule["health"], "ok", "{rule}");
        // Writeback is off here, and has been for less than a day.
        match rule["name"].as_str().unwrap() {
            "UbcacheWritebackStopped" => assert_eq!(rule["state"], "pending", "{rule}"),
            _ => assert_ne!(rule["state"], "firing", "{rule}"),
        }
    }
    drop(client);
    daemon.stop();
}
