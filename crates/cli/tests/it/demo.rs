//! `demo`: it ends by itself with a table, and leaves nothing behind however it ends.

use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::world::*;

fn left(dir: &Dir) -> Vec<std::path::PathBuf> {
    std::fs::read_dir(dir.root()).unwrap().map(|e| e.unwrap().path()).collect()
}

#[test]
fn it_shows_what_a_cache_does() {
    let dir = Dir::new();
    let start = Instant::now();
    let said = run(&["demo", "--dir", dir.root().to_str().unwrap()]).ok();
    assert!(start.elapsed() < Duration::from_secs(120), "{:?}", start.elapsed());
    for words in
        ["HDD alone", "cached, first pass", "cached, second pass", "hit ratio", "p99", "no errors", "Proved:"]
    {
        assert!(said.out.contains(words), "{words}: {said}");
    }
    let row = |name: &str| {
        let line = said.out.lines().find(|l| l.starts_with(name)).expect("a row");
        line[22..].split_whitespace().next().expect("a figure").parse::<f64>().expect("a number")
    };
    assert!(row("cached, second pass") > 3.0 * row("HDD alone"), "{said}");
    assert_eq!(left(&dir), Vec::<std::path::PathBuf>::new());
}

/// Interrupted as a terminal does it: every process of it gets the signal.
#[test]
fn interrupted_it_leaves_nothing() {
    // While the disk alone is measured, and while it is measured with its cache.
    for servers in [1, 2] {
        let dir = Dir::new();
        let log = dir.root().join("log");
        let mut child = Command::new(program())
            .args(["demo", "--dir", dir.root().to_str().unwrap()])
            .stdout(std::fs::File::create(&log).unwrap())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()
            .unwrap();
        let said = || std::fs::read_to_string(&log).unwrap_or_default();
        let in_use = || {
            let demo = left(&dir).into_iter().find(|d| d.is_dir());
            demo.is_some_and(|d| d.join("nbd.sock").exists() || d.join("mnt/load").exists())
        };
        wait_until("the load", || said().matches("$ ubcache up").count() == servers && in_use());
        let group = rustix::process::Pid::from_raw(child.id() as i32).unwrap();
        rustix::process::kill_process_group(group, Signal::INT).unwrap();
        let mut errors = String::new();
        std::io::Read::read_to_string(&mut child.stderr.take().unwrap(), &mut errors).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(1), "{errors}");
        assert!(errors.contains("interrupted"), "{errors}");
        std::fs::remove_file(&log).unwrap();
        assert_eq!(left(&dir), Vec::<std::path::PathBuf>::new(), "{errors}");
        let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
        assert!(!mounts.contains(dir.root().to_str().unwrap()), "{mounts}");
    }
}

/// Killed, it cannot clean up its files, but its server ends by itself.
#[test]
fn killed_its_server_ends() {
    let dir = Dir::new();
    let mut child = Command::new(program())
        .args(["demo", "--dir", dir.root().to_str().unwrap()])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .env("PATH", "")
        .spawn()
        .unwrap();
    let demo = || left(&dir).into_iter().find(|d| d.is_dir());
    let ready = || demo().is_some_and(|d| d.join("volumes/bcache0").exists() || d.join("nbd.sock").exists());
    wait_until("the server", ready);
    child.kill().unwrap();
    child.wait().unwrap();
    let hdd = demo().unwrap().join("hdd").to_str().unwrap().to_owned();
    // In use as long as a process serves it.
    wait_until("the end of the server", || run(&["check", &hdd]).code == 0);
}

#[test]
fn a_directory_that_does_not_exist_is_refused() {
    run(&["demo", "--dir", "/no/such/dir"]).refused(&["/no/such/dir"]);
}
