//! The bcache collector of prometheus-node-exporter makes of the view what it makes of a kernel's sysfs.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::kernel::{Entry, entries};
use crate::viewed_set::ViewedSet;

const DEADLINE: Duration = Duration::from_secs(60);

struct Exporter(Child);

impl Drop for Exporter {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn exporter() -> PathBuf {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/prometheus-tools");
    let found = Command::new(script).output().expect("a shell");
    assert!(found.status.success(), "{}", String::from_utf8_lossy(&found.stderr));
    PathBuf::from(String::from_utf8(found.stdout).unwrap().trim()).join("prometheus-node-exporter")
}

fn get(address: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(address)?;
    stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n")?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    Ok(text)
}

/// The series of bcache that are exported for a sysfs: names and labels, without values.
fn series(sysfs: &Path) -> BTreeSet<String> {
    let address = {
        let free = TcpListener::bind("127.0.0.1:0").unwrap();
        free.local_addr().unwrap().to_string()
    };
    let arguments =
        ["--collector.disable-defaults", "--collector.bcache", "--collector.bcache.priorityStats"];
    let started = Command::new(exporter())
        .args(arguments)
        .arg(format!("--path.sysfs={}", sysfs.display()))
        .arg(format!("--web.listen-address={address}"))
        .stdout(Stdio::null())
        .spawn();
    let _exporter = Exporter(started.expect("the exporter"));
    let deadline = Instant::now() + DEADLINE;
    let text = loop {
        match get(&address) {
            Ok(text) => break text,
            Err(e) => assert!(Instant::now() < deadline, "no answer of the exporter: {e}"),
        }
        std::thread::yield_now();
    };
    assert!(text.contains("node_scrape_collector_success{collector=\"bcache\"} 1"), "{text}");
    let ours = text.lines().filter(|l| l.starts_with("node_bcache_"));
    ours.filter_map(|l| l.rsplit_once(' ')).map(|(series, _)| series.to_owned()).collect()
}

/// A directory with what a kernel showed.
fn recorded(root: &Path) {
    for Entry { kind, path, text, .. } in entries() {
        let at = root.join(&path);
        std::fs::create_dir_all(at.parent().unwrap()).unwrap();
        match kind {
            'd' => std::fs::create_dir_all(&at).unwrap(),
            'f' if !at.exists() => std::fs::write(&at, text).unwrap(),
            'l' if path.starts_with("fs/") => {
                let (_, device) = text.split_once("/block/").unwrap();
                std::os::unix::fs::symlink(format!("../../../block/{device}"), &at).unwrap();
            }
            _ => {}
        }
    }
}

#[test]
fn the_same_series_as_for_a_kernel() {
    if rig::skip_requested("UBCACHE_PROMETHEUS_SKIP") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    recorded(dir.path());
    let view = ViewedSet::new();
    view.write(0, 64);
    view.read(65536, 64);
    let (kernel, ours) = (series(dir.path()), series(&view.root()));
    assert!(kernel.len() > 25, "{kernel:?}");
    assert_eq!(ours, kernel);
}
