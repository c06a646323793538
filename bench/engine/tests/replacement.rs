//! Replacement by costs and benefits beside lru, in the engine: counts of hits in virtual time. The whole table is in
//! docs/replacement.md.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use bench::study::{CACHE_BLOCKS, play, policy};
use bench::workloads::{NAMES, from_csv, optimum, synthetic};

const COST_BENEFIT: &str = "cost_benefit";
const LRU: &str = "lru";

fn hits(name: &str, replacement: &str) -> f64 {
    // Twelve times the cache: before it has been full for a while, the policies are alike.
    let accesses = synthetic(name, CACHE_BLOCKS, 400_000);
    play(&accesses, accesses.len() / 4, &policy(replacement)).hits
}

/// Everything is read once, twice, beside what is hot.
#[test]
fn a_scan_of_the_whole_disk_leaves_the_hot_set_where_it_is() {
    let (cost_benefit, lru) = (hits("zipf and scans", COST_BENEFIT), hits("zipf and scans", LRU));
    println!("cost_benefit {cost_benefit:.3}, lru {lru:.3}");
    assert!(cost_benefit > lru + 0.02, "cost_benefit {cost_benefit:.3}, lru {lru:.3}");
}

/// lru gives up each block of a loop just before it is read again.
#[test]
fn a_loop_larger_than_the_cache_is_read_from_it_in_part() {
    let (cost_benefit, lru) = (hits("loop 1.5", COST_BENEFIT), hits("loop 1.5", LRU));
    println!("cost_benefit {cost_benefit:.3}, lru {lru:.3}");
    assert!(lru < 0.01 && cost_benefit > 0.25, "cost_benefit {cost_benefit:.3}, lru {lru:.3}");
}

#[test]
fn popular_blocks_stay() {
    let (cost_benefit, lru) = (hits("zipf 0.9", COST_BENEFIT), hits("zipf 0.9", LRU));
    println!("cost_benefit {cost_benefit:.3}, lru {lru:.3}");
    assert!(cost_benefit > lru + 0.02, "cost_benefit {cost_benefit:.3}, lru {lru:.3}");
}

/// The optimum against every way to fill a cache of two blocks, and the generators against their bounds.
#[test]
fn the_optimum_is_the_optimum() {
    let csv = |ops: &[(char, u64)]| {
        let lines: String = ops.iter().map(|(op, b)| format!("0,{op},{},4096\n", b * 4096)).collect();
        from_csv(&format!("time,op,offset,length\n{lines}"), 0).unwrap()
    };
    // Each letter once, then again.
    let twice = csv(&[('R', 0), ('R', 1), ('R', 2), ('R', 0), ('R', 1), ('R', 2)]);
    assert_eq!(optimum(&twice, 2, 0), 2.0 / 6.0);
    assert_eq!(optimum(&twice, 3, 0), 3.0 / 6.0);
    assert_eq!(optimum(&twice, 3, 3), 1.0, "the first half does not count");
    // What is overwritten needs no room until it is read.
    let written = csv(&[('R', 0), ('R', 1), ('W', 0), ('R', 1), ('R', 0)]);
    assert_eq!(optimum(&written, 1, 0), 1.0 / 4.0);
    assert_eq!(optimum(&written, 2, 0), 2.0 / 4.0);
    for name in NAMES {
        let some = synthetic(name, CACHE_BLOCKS, 2000);
        assert_eq!(some.len(), 2000, "{name}");
        assert_eq!(some, synthetic(name, CACHE_BLOCKS, 2000), "{name}: the same each time");
        assert!(some.iter().all(|a| a.blocks > 0 && a.block + a.blocks <= CACHE_BLOCKS * 8), "{name}");
    }
    assert!(from_csv("head\n1,X,0,4096\n", 0).is_err());
    assert_eq!(from_csv("head\n1,R,3584,4097\n", 3584).unwrap()[0].blocks, 2);
}
