//! The costs of whole runs: seeds and saved plans, with crashes, faults and all operator actions.
//!
//! The pages of the ledger cover one feature at a time, and the model test checks data. Here whole runs are
//! counted: how many requests each sends to the devices, what the index, the journal and the collector did in it, and when
//! it ended. A recovery that reads a leaf twice, a flush too many after an error, or a wait that ends later shows here. The
//! page is compared and written like those of the ledger; it also changes whenever the generator does.
#![allow(clippy::unwrap_used)]

#[path = "ledger/page.rs"]
#[allow(dead_code)]
mod page;

use std::fs;

use sim::disk::Counters;
use sim::plan::Plan;
use sim::run::run_and_count;
use sim::world::Order;

use page::compare;

/// Seeds that no other test has.
const SEEDS: std::ops::Range<u64> = 10_000..10_160;

/// Runs a plan with its tasks in the order in which they became ready, which depends on little; returns its lines.
fn life(name: &str, plan: Plan) -> Vec<String> {
    let (r, cost) =
        run_and_count(&Plan { order: Order::Fifo, ..plan }, false).unwrap_or_else(|f| panic!("{name}: {f}"));
    let device = |what: &str, c: Counters| {
        format!(
            "  {what}: {} reads, {} writes, {} with FUA, {} flushes, {} discards and zeros, {} failed; {} sectors written",
            c.reads, c.writes, c.durable_writes, c.flushes, c.plain, c.failed, c.sectors_written
        )
    };
    vec![
        format!(
            "{name}: {} boots, {} crashes, {} stops, {} requests, ended at {} us",
            r.boots,
            r.crashes,
            r.stops,
            r.requests,
            cost.ended.0 / 1000
        ),
        device("cache", cost.cache),
        device("backing", cost.backing),
        format!(
            "  {} entries, {} nodes replaced, {} read, {} walks, {} moved, {} kept, {} runs over gaps, {} chains of priorities",
            r.journal_entries,
            r.rewrites,
            r.node_reads,
            r.gc_runs,
            r.moved,
            r.promoted,
            r.bridged,
            r.prio_writes
        ),
    ]
}

#[test]
fn costs_of_generated_runs_are_as_stored() {
    let lines: Vec<String> =
        SEEDS.flat_map(|seed| life(&format!("seed {seed}"), Plan::from_seed(seed))).collect();
    compare("run_costs", &lines);
}

/// Plans that once found a bug, and those of deliberate bugs, go where engines break.
#[test]
fn costs_of_stored_plans_are_as_stored() {
    let dirs = ["plans", "plans/canaries"].map(|d| format!("{}/{d}", env!("CARGO_MANIFEST_DIR")));
    let mut files: Vec<_> =
        dirs.iter().flat_map(|d| fs::read_dir(d).unwrap()).map(|f| f.unwrap().path()).collect();
    files.retain(|f| f.extension().is_some_and(|e| e == "plan"));
    files.sort();
    let lines: Vec<String> = files
        .iter()
        .flat_map(|file| {
            let name = file.file_stem().unwrap().to_string_lossy().into_owned();
            life(&name, Plan::from_text(&fs::read_to_string(file).unwrap()).unwrap())
        })
        .collect();
    compare("plans", &lines);
}
