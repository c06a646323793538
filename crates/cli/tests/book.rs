//! The operator's guide is true: its commands are commands, those that can be tried are tried, its links lead somewhere, and it
//! has every tunable.
//!
//! Blocks marked `sh run` are run in their order, those of a page in one directory; the commands of all other `sh` blocks are
//! parsed.
#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use engine::tunables::{DeviceTunables, SetTunables};

fn book() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap().join("docs/book/src")
}

fn pages() -> Vec<PathBuf> {
    let mut pages = Vec::new();
    for dir in [book(), book().join("recipes")] {
        let entries = std::fs::read_dir(&dir).unwrap().map(|e| e.unwrap().path());
        pages.extend(entries.filter(|p| p.extension().is_some_and(|e| e == "md")));
    }
    pages.sort();
    assert!(pages.len() > 10, "{pages:?}");
    pages
}

/// Fenced blocks of a page: what they are, and their text.
fn blocks(text: &str) -> Vec<(String, String)> {
    let mut blocks = Vec::new();
    let mut open: Option<(String, String)> = None;
    for line in text.lines() {
        match (line.strip_prefix("```"), open.take()) {
            (Some(what), None) => open = Some((what.to_owned(), String::new())),
            (Some(_), Some(block)) => blocks.push(block),
            (None, Some((what, text))) => open = Some((what, text + line + "\n")),
            (None, None) => {}
        }
    }
    assert!(open.is_none(), "a block does not end");
    blocks
}

#[test]
fn every_command_is_one() {
    let mut seen = 0;
    for page in pages() {
        for (what, text) in blocks(&std::fs::read_to_string(&page).unwrap()) {
            if !what.starts_with("sh") {
                continue;
            }
            for line in text.lines().filter(|l| l.starts_with("ubcache ")) {
                let end = line.find([';', '|', '>', '&', '#']).unwrap_or(line.len());
                let words = line[..end].split_whitespace().map(|w| w.trim_matches(['"', '\'']));
                let parsed = ubcache_cli::command().try_get_matches_from(words);
                assert!(parsed.is_ok(), "{}: {line}\n{}", page.display(), parsed.unwrap_err());
                seen += 1;
            }
        }
    }
    assert!(seen > 40, "{seen} commands");
}

#[test]
fn what_can_be_tried_works() {
    let program = Path::new(env!("CARGO_BIN_EXE_ubcache"));
    let path = format!("{}:{}", program.parent().unwrap().display(), std::env::var("PATH").unwrap());
    let mut tried = 0;
    for page in pages() {
        let all = blocks(&std::fs::read_to_string(&page).unwrap());
        let script: String =
            all.iter().filter(|(what, _)| what == "sh run").map(|(_, text)| &**text).collect();
        if script.is_empty() {
            continue;
        }
        let dir = tempfile::tempdir().unwrap();
        // What runs in the background ends with the page.
        let script =
            format!("set -eu\ntrap 'kill $(jobs -p) 2>/dev/null || true; wait || true' EXIT\n{script}");
        let out = Command::new("bash")
            .args(["-c", &script])
            .current_dir(dir.path())
            .env("PATH", &path)
            .output()
            .unwrap();
        assert!(
            out.status.success(),
            "{}: {}\n{}{}",
            page.display(),
            out.status,
            String::from_utf8_lossy(&out.stdout),
            String::from_utf8_lossy(&out.stderr)
        );
        tried += 1;
    }
    assert!(tried >= 4, "{tried} pages");
}

#[test]
fn links_lead_somewhere_and_every_page_is_in_the_summary() {
    let mut listed = BTreeSet::new();
    for page in pages() {
        let text = std::fs::read_to_string(&page).unwrap();
        for link in text.split("](").skip(1).map(|rest| rest.split(')').next().unwrap_or("")) {
            let file = link.split('#').next().unwrap_or("");
            if file.is_empty() || file.contains("://") {
                continue;
            }
            let target = page.parent().unwrap().join(file);
            assert!(target.exists(), "{}: {link}", page.display());
            if page.ends_with("SUMMARY.md") {
                listed.insert(target.canonicalize().unwrap());
            }
        }
    }
    for page in pages().iter().filter(|p| !p.ends_with("SUMMARY.md")) {
        assert!(listed.contains(&page.canonicalize().unwrap()), "{} is not in the summary", page.display());
    }
}

#[test]
fn every_tunable_is_explained_and_none_that_is_not_there() {
    let text = std::fs::read_to_string(book().join("tunables.md")).unwrap();
    let (set, device) = (SetTunables::default(), DeviceTunables::default());
    let there: BTreeSet<&str> = set.iter().chain(device.iter()).map(|knob| knob.name).collect();
    let first_cells = text.lines().filter_map(|l| l.strip_prefix("| ")?.split(" | ").next());
    let told: BTreeSet<&str> = first_cells.flat_map(|cell| cell.split('`').skip(1).step_by(2)).collect();
    assert_eq!(told, there);
}
