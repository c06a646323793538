//! What a 4 KiB request costs the engine alone, counted, against limits: more than a little above what it was when the limit was
//! set is a change that somebody should know about. docs/performance.md has the figures and says how to look into them.
//!
//! The limits depend on the build: tests have assertions and no optimisation over crates, and a fifth of room, for a processor of
//! another kind copies with other instructions. What is compared with others is the release build, whose limits for reads and
//! inserts are not above the targets (half and four tenths of OCF's):
//! `cargo test --release -p ubcache-bench --test instructions -- --nocapture`.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

const BLOCKS: u64 = 10_000;
/// In the order of the program's phases.
const PHASES: [&str; 5] = ["set-up", "insert", "overwrite", "read", "nothing"];

/// Most instructions of the engine for each request: (what, tests' build, release build).
const LIMITS: [(&str, f64, f64); 3] =
    [("read", 3_320.0, 2_220.0), ("overwrite", 6_120.0, 4_200.0), ("insert", 6_700.0, 4_560.0)];
/// Most of what the program counts by itself; the same in every build.
const COUNTS: [(&str, f64); 3] = [
    ("insert_cache_bytes_per_user_byte", 1.1),
    ("overwrite_cache_bytes_per_user_byte", 1.1),
    ("index_bytes_per_extent", 32.0),
];

/// Instructions of each phase, for each request.
fn instructions(dir: &Path) -> BTreeMap<&'static str, f64> {
    let total = |number: usize| -> u64 {
        let file = dir.join(format!("out.{number}"));
        let text = std::fs::read_to_string(&file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
        let line =
            text.lines().find_map(|l| l.strip_prefix("totals: ").or_else(|| l.strip_prefix("summary: ")));
        line.and_then(|n| n.trim().parse().ok()).unwrap_or_else(|| panic!("{}: no totals", file.display()))
    };
    PHASES.iter().enumerate().map(|(n, phase)| (*phase, total(n + 1) as f64 / BLOCKS as f64)).collect()
}

#[test]
fn a_request_costs_no_more_than_it_did() {
    let dir = tempfile::tempdir().expect("a directory");
    let said = Command::new("valgrind")
        .arg("--tool=callgrind")
        .arg("--dump-before=*end_of_phase*")
        .arg(format!("--callgrind-out-file={}", dir.path().join("out").display()))
        .args([env!("CARGO_BIN_EXE_counts"), &BLOCKS.to_string()])
        .output()
        .expect("valgrind (Debian package of this name)");
    let (out, err) = (String::from_utf8_lossy(&said.stdout), String::from_utf8_lossy(&said.stderr));
    assert!(said.status.success(), "{out}{err}");

    let per_request = instructions(dir.path());
    let mut above = Vec::new();
    let mut judge = |what: &str, found: f64, limit: f64| {
        println!("{what:36} {found:10.2}   limit {limit:10.2}");
        if found > limit {
            above.push(format!("{what}: {found:.2}, at most {limit:.2} expected"));
        }
    };
    for (phase, tests, release) in LIMITS {
        let limit = if cfg!(debug_assertions) { tests } else { release };
        judge(&format!("{phase}, instructions"), per_request[phase] - per_request["nothing"], limit);
    }
    for (what, limit) in COUNTS {
        let found = out.lines().find_map(|l| l.strip_prefix(what)?.trim().parse().ok());
        judge(what, found.unwrap_or_else(|| panic!("no {what} in {out}")), limit);
    }
    assert!(above.is_empty(), "{above:#?}");
}
