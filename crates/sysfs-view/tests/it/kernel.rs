//! Compared with what a real kernel (6.12) shows and answers. The data is recorded, and watched, by `tests/vm`.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::viewed_set::{SET, ViewedSet, write};

const LISTING: &str = include_str!("../data/listing.txt");
const PROBES: &str = include_str!("../data/probes.txt");

/// A line of the listing.
pub struct Entry {
    pub kind: char,
    mode: u32,
    pub path: String,
    /// Target or contents.
    pub text: String,
}

pub fn entries() -> Vec<Entry> {
    LISTING
        .lines()
        .map(|line| {
            let mut words = line.split(' ');
            let mut next = || words.next().unwrap_or_default();
            let (kind, mode, path, hex) = (next(), next(), next(), next());
            let byte = |at: usize| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
            let bytes: Vec<u8> = (0..hex.len()).step_by(2).map(byte).collect();
            Entry {
                kind: kind.chars().next().unwrap(),
                mode: u32::from_str_radix(mode, 8).unwrap(),
                path: path.replace("SET", SET),
                text: String::from_utf8(bytes)
                    .unwrap()
                    .trim_end_matches(if kind == "l" { "\n" } else { "\0" })
                    .to_owned(),
            }
        })
        .collect()
}

#[test]
fn every_file_of_the_kernel_is_there_with_its_permissions_and_no_other() {
    let view = ViewedSet::new();
    let mut names: BTreeMap<PathBuf, Vec<String>> = BTreeMap::new();
    for e in entries() {
        let path = view.path(&e.path);
        let meta = path.symlink_metadata().unwrap_or_else(|error| panic!("{}: {error}", e.path));
        let kind = match meta.file_type() {
            t if t.is_symlink() => 'l',
            t if t.is_dir() => 'd',
            _ => 'f',
        };
        assert_eq!(kind, e.kind, "{}", e.path);
        assert_eq!(meta.permissions().mode() & 0o777, e.mode, "{}", e.path);
        let (dir, name) = (Path::new(&e.path).parent().unwrap(), path.file_name().unwrap());
        names.entry(dir.to_owned()).or_default().push(name.to_str().unwrap().to_owned());
        if kind == 'l' {
            // Devices have other places here; the end of the way is the same.
            let ours = std::fs::read_link(&path).unwrap();
            let end = |target: &Path| {
                let name = target.file_name().unwrap().to_str().unwrap().to_owned();
                if name.len() == 36 && name.matches('-').count() == 4 { "a set".to_owned() } else { name }
            };
            assert_eq!(end(&ours), end(Path::new(&e.text)), "{}", e.path);
        }
    }
    for (dir, mut wanted) in names {
        let mut found: Vec<String> = std::fs::read_dir(view.path(dir.to_str().unwrap()))
            .unwrap()
            .map(|e| e.unwrap().file_name().to_str().unwrap().to_owned())
            .collect();
        found.sort();
        wanted.sort();
        wanted.dedup();
        assert_eq!(found, wanted, "{}", dir.display());
    }
}

/// What a text looks like when its numbers do not matter: digits are one 9, units one k, a choice has no brackets.
fn shape(text: &str) -> String {
    let mut shape = String::new();
    let mut last = ' ';
    for c in text.chars() {
        let c = match c {
            '0'..='9' => '9',
            'k' | 'M' | 'G' | 'T' if last == '9' => 'k',
            c => c,
        };
        // Of a negative number only the digits.
        let skip =
            (c == '9' && last == '9') || c == '-' || ((c == '[' || c == ']') && !text.contains("Quantiles"));
        if !skip {
            shape.push(c);
        }
        if c != '-' {
            last = c;
        }
    }
    shape
}

#[test]
fn files_look_like_those_of_the_kernel() {
    let view = ViewedSet::new();
    view.put("block/bcache0/bcache/label", "a label").unwrap();
    view.put("block/bcache0/bcache/writeback_running", "0").unwrap();
    view.write(0, 2048);
    view.read(65536, 64);
    let mut seen = 0;
    for e in entries().into_iter().filter(|e| e.kind == 'f' && e.mode & 0o400 != 0) {
        let ours =
            std::fs::read_to_string(view.path(&e.path)).unwrap_or_else(|error| panic!("{}: {error}", e.path));
        seen += 1;
        match e.path.rsplit('/').next().unwrap() {
            "state" => assert!(["no cache\n", "clean\n", "dirty\n", "inconsistent\n"].contains(&&*ours)),
            "backing_dev_uuid" => {
                assert_eq!(ours.len(), e.text.len());
                assert_eq!(ours.matches('-').count(), 4);
            }
            _ => assert_eq!(shape(&ours), shape(&e.text), "{}: {ours:?} for {:?}", e.path, e.text),
        }
    }
    assert!(seen > 150, "{seen}");
}

/// Where this view answers otherwise, and why.
fn differs(path: &str, value: &str) -> Option<&'static str> {
    let _ = value;
    match path {
        "GLOBAL/register" | "GLOBAL/register_quiet" => Some("the answer is the owner's"),
        "DEV/attach" => Some("the answer is the owner's"),
        "SET/cache_available_percent" => Some("a figure"),
        "DEV/writeback_rate" => Some("the kernel's changes by itself"),
        _ => None,
    }
}

/// As the shell of the kernel's machine called an error.
fn words(errno: i32) -> &'static str {
    match errno {
        13 => "Permission denied",
        16 => "Device or resource busy",
        22 => "Invalid argument",
        34 => "Numerical result out of range",
        _ => "something else",
    }
}

#[test]
fn writes_are_answered_as_by_the_kernel() {
    let view = ViewedSet::new();
    let mut wrong = Vec::new();
    let mut compared = 0;
    for line in PROBES.lines() {
        let parts: Vec<&str> = line.split('|').collect();
        let [place, value, error, after] = parts[..] else { panic!("{line}") };
        if differs(place, value).is_some() {
            continue;
        }
        let (owner, name) = place.split_once('/').unwrap();
        let path = match owner {
            "DEV" => format!("block/bcache0/bcache/{name}"),
            "SET" => format!("fs/bcache/{SET}/{name}"),
            "CACHE" => format!("fs/bcache/{SET}/cache0/{name}"),
            _ => format!("fs/bcache/{name}"),
        };
        let path = view.path(&path);
        let said = write(&path, &format!("{value}\n")).err().map_or("", words);
        let text = std::fs::read_to_string(&path).unwrap_or_default();
        let now = text.lines().next().unwrap_or_default();
        compared += 1;
        if (said, now) != (error, after) {
            wrong.push(format!("{place} {value:?}: kernel {error:?} {after:?}, here {said:?} {now:?}"));
        }
    }
    assert!(wrong.is_empty(), "{} of {compared}:\n{}", wrong.len(), wrong.join("\n"));
    assert!(compared > 400, "{compared}");
}
