//! The order of crates and of the engine's components, from the ground up.
//!
//! Owns both tables. A row names only rows above it in the table. Crates in one row do not name each other; components in
//! one row may.

/// Packages of the workspace without the prefix `ubcache-`. `export-*` are all exports.
pub const CRATES: &[&[&str]] = &[
    &["format"],
    &["io", "inspect"],
    &["blockio", "engine", "repair"],
    &["export-*", "metrics", "sim", "rig"],
    &["serve", "sysfs-view", "bench", "bench-exports"],
    &["daemon"],
    &["cli"],
    &["vm", "pages"],
    &["side-by-side"],
    &["fuzz", "mutants", "tidy"],
];

/// Modules in the root of the engine. A comment marks leaves that all components may name, and the readers of all components.
pub const COMPONENTS: &[&[&str]] = &[
    // `canary` marks places in all components.
    &["human", "canary"],
    &["policy"],
    // Plain values that components name: counters, and settings.
    &["stats"],
    &["tunables"],
    &["refusal", "damage"],
    &["error"],
    &["events"],
    &["tasks", "device"],
    &["journal"],
    // The allocator names the journal, because a prio chain takes effect with an entry.
    &["alloc"],
    &["data"],
    &["uuids"],
    &["index"],
    &["gc"],
    &["volume"],
    &["writeback"],
    &["wipe"],
    &["scrub"],
    &["set"],
    // Plain copies of the counters of all components. No component names it.
    &["figures"],
];

/// The row of a name in one of the tables, from 0 at the ground.
pub fn row(table: &[&[&str]], name: &str) -> Option<usize> {
    let name = if name.starts_with("export-") { "export-*" } else { name };
    table.iter().position(|row| row.contains(&name))
}
