//! B7: the engine alone, one thread, devices that cost nothing, counted by callgrind; beside what the same counting said of OCF.
//!
//! OCF's figures were counted once (its master, posix environment, same shape, without its copy) and are constants here: they are
//! instructions, not times, and do not depend on the machine.

use bench::callgrind;

use crate::machine::beside;
use crate::result::Results;

const BLOCKS: u64 = 10_000;
/// Its column.
pub const OCF: &str = "OCF, counted once";
/// `read`, `overwrite` and `insert` in instructions.
const OCF_INSTRUCTIONS: [(&str, f64); 3] = [("read", 4443.0), ("overwrite", 5125.0), ("insert", 11_738.0)];
const OCF_COUNTS: [(&str, f64); 3] = [
    ("insert_cache_bytes_per_user_byte", 2.0),
    ("overwrite_cache_bytes_per_user_byte", 2.0),
    ("index_bytes_per_extent", 41.0),
];

/// What a figure is called, and its unit.
fn named(key: &str) -> (&'static str, &'static str) {
    match key {
        "read" => ("read hit", "instructions"),
        "overwrite" => ("overwrite of dirty data", "instructions"),
        "insert" => ("insert of new data", "instructions"),
        "insert_cache_bytes_per_user_byte" => ("written to the cache for each byte, inserts", "bytes"),
        "overwrite_cache_bytes_per_user_byte" => ("written to the cache for each byte, overwrites", "bytes"),
        _ => ("memory of the index for each extent", "bytes"),
    }
}

/// Counts once.
///
/// # Panics
/// If callgrind cannot count.
pub fn run(results: &mut Results) {
    let found = callgrind::count(&beside("counts"), BLOCKS).unwrap_or_else(|e| panic!("B7: {e}"));
    let both = [
        (&OCF_INSTRUCTIONS, found.instructions.iter().map(|(k, v)| (k.to_string(), *v)).collect::<Vec<_>>()),
        (&OCF_COUNTS, found.counts.into_iter().collect()),
    ];
    for (theirs, ours) in both {
        for (key, ocf) in theirs {
            let (what, unit) = named(key);
            let ours = ours.iter().find(|(k, _)| k == key).map(|(_, v)| *v);
            let ours = ours.unwrap_or_else(|| panic!("B7: the program does not say {key}"));
            results.add(what, unit, false, OCF, *ocf);
            results.add(what, unit, false, "ubcache", ours);
        }
    }
}
