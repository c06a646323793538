//! `extract`: where the contents go, and what is said about them. (What they are: `fixtures`, `bad_input`.)

use std::os::unix::fs::MetadataExt;

use crate::world::*;

#[test]
fn into_a_file_with_holes() {
    let dir = Dir::new();
    let [ssd, hdd] = dirty_files(&dir);
    let out = dir.path("out");
    let doc = run(&["extract", "-C", &ssd, "-B", &hdd, "-o", &out, "--json"]).ok().json();
    let [_, _, contents] = dirty_set();
    assert!(&read(&out) == contents);
    assert_eq!(doc["schema_version"], 1);
    assert_eq!(doc["sectors"].as_u64(), Some(SET_SECTORS));
    let parts = ["dirty_sectors", "clean_sectors", "backing_sectors", "zero_sectors"];
    let sum: u64 = parts.iter().map(|p| doc[p].as_u64().unwrap()).sum();
    assert_eq!(sum, SET_SECTORS, "{doc}");
    let meta = std::fs::metadata(&out).unwrap();
    assert!(meta.blocks() * 512 < meta.len(), "zeros take no room");
}

#[test]
fn over_a_file_that_is_there() {
    let dir = Dir::new();
    let [ssd, hdd] = dirty_files(&dir);
    let out = dir.file("out", &[9; 10 << 20]);
    run(&["extract", "-C", &ssd, "-B", &hdd, "-o", &out, "--force"]).ok();
    assert!(read(&out) == dirty_set()[2]);
}

#[test]
fn into_a_pipe_and_nowhere() {
    let dir = Dir::new();
    let [ssd, hdd] = dirty_files(&dir);
    let mut command = std::process::Command::new(program());
    command.args(["extract", "-C", &ssd, "-B", &hdd, "-o", "-"]);
    let output = output(command);
    assert!(output.stdout == dirty_set()[2] && output.status.success());
    run(&["extract", "-C", &ssd, "-B", &hdd, "-o", "/dev/null"]).ok();
    run(&["extract", "-C", &ssd, "-B", &hdd, "-o", "-", "--json"]).usage();
}

/// A reader that has enough is no error worth a message.
#[test]
fn into_a_pipe_that_closes() {
    let dir = Dir::new();
    let [ssd, hdd] = dirty_files(&dir);
    let mut child = std::process::Command::new(program())
        .args(["extract", "-C", &ssd, "-B", &hdd, "-o", "-"])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let said = Said::of(child.wait_with_output().unwrap());
    said.refused(&["Broken pipe"]);
}

#[test]
fn wrong_arguments() {
    let dir = Dir::new();
    let [ssd, hdd] = dirty_files(&dir);
    let out = dir.path("out");
    run(&["extract", "-C", &ssd, "-o", &out]).usage().says(&["--backing"]);
    run(&["extract", "-C", &ssd, "-B", &hdd, "--volume", "0", "-o", &out]).usage();
    run(&["extract", "-C", &ssd, "-B", &hdd]).usage().says(&["--output"]);
    run(&["extract", "-C", &ssd, "--volume", "x", "-o", &out]).usage();
    run(&["extract", "-C", &ssd, "--volume", "5", "-o", &out]).refused(&["slot 5", "found nothing"]);
    run(&["extract", "-C", &ssd, "--volume", "0", "-o", &out]).refused(&["slot 0", "found a cached device"]);
}

/// With the backing device's own data where the cache has the same.
#[test]
fn dirty_data_only() {
    let dir = Dir::new();
    let [ssd, hdd] = dirty_files(&dir);
    let out = dir.path("out");
    let doc = run(&["extract", "-C", &ssd, "-B", &hdd, "-o", &out, "--dirty-only", "--json"]).ok().json();
    assert_eq!(doc["clean_sectors"], 0);
    assert!(read(&out) == dirty_set()[2]);
}
