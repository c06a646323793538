//! Instructions of a 4 KiB request in the engine alone, against limits. docs/performance.md has the figures and says how to
//! examine them.
//!
//! The limits depend on the build: tests have assertions and no optimisation over crates, and a fifth of room, for a processor of
//! another kind copies with other instructions. The figures that are compared with other caches are of the release build:
//! `cargo test --release -p ubcache-bench --test instructions -- --nocapture`.

use std::path::Path;

use bench::callgrind;

const BLOCKS: u64 = 10_000;

/// Most instructions of the engine for each request: (what, tests' build, release build).
const LIMITS: [(&str, f64, f64); 3] =
    [("read", 3_320.0, 2_270.0), ("overwrite", 6_120.0, 4_350.0), ("insert", 6_700.0, 4_720.0)];
/// Most of what the program counts by itself; the same in every build.
const COUNTS: [(&str, f64); 3] = [
    ("insert_cache_bytes_per_user_byte", 1.1),
    ("overwrite_cache_bytes_per_user_byte", 1.1),
    ("index_bytes_per_extent", 32.0),
];

#[test]
fn a_request_costs_no_more_than_it_did() {
    let found =
        callgrind::count(Path::new(env!("CARGO_BIN_EXE_counts")), BLOCKS).unwrap_or_else(|e| panic!("{e}"));
    let mut above = Vec::new();
    let mut judge = |what: &str, found: f64, limit: f64| {
        println!("{what:36} {found:10.2}   limit {limit:10.2}");
        if found > limit {
            above.push(format!("{what}: {found:.2}, at most {limit:.2} expected"));
        }
    };
    for (phase, tests, release) in LIMITS {
        let limit = if cfg!(debug_assertions) { tests } else { release };
        judge(&format!("{phase}, instructions"), found.instructions[phase], limit);
    }
    for (what, limit) in COUNTS {
        judge(what, found.counts[what], limit);
    }
    assert!(above.is_empty(), "{above:#?}");
}
