//! `demo`: it ends by itself with a table, and leaves nothing behind however it ends.

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

#[test]
fn interrupted_it_leaves_nothing() {
    let dir = Dir::new();
    let mut child = Command::new(program())
        .args(["demo", "--dir", dir.root().to_str().unwrap()])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    wait_until("the server", || left(&dir).first().is_some_and(|d| d.join("nbd.sock").exists()));
    signal(child.id(), Signal::INT);
    let mut said = String::new();
    std::io::Read::read_to_string(&mut child.stderr.take().unwrap(), &mut said).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(1), "{said}");
    assert!(said.contains("interrupted"), "{said}");
    assert_eq!(left(&dir), Vec::<std::path::PathBuf>::new());
}

#[test]
fn no_room() {
    run(&["demo", "--dir", "/no/such/dir"]).refused(&["/no/such/dir"]);
}
