//! B9: NBD over a unix socket, data in memory, beside `nbdkit memory`, on this machine (`scripts/bench-nbd`).

use std::process::Command;

use crate::machine::beside;
use crate::result::Results;

const SECONDS: u32 = 5;
const ROUNDS: u32 = 1;
/// Its column.
pub const NBDKIT: &str = "nbdkit memory";

/// Runs it once.
///
/// # Panics
/// If the script fails.
pub fn run(results: &mut Results) {
    let seconds = (SECONDS / results.shorten_by).max(1);
    let arguments = [seconds, ROUNDS].map(|n| n.to_string());
    let said = Command::new("scripts/bench-nbd").args(arguments).env("UBCACHE", beside("ubcache")).output();
    let said = said.unwrap_or_else(|e| panic!("scripts/bench-nbd: {e}"));
    let out = String::from_utf8_lossy(&said.stdout);
    let rows: Vec<_> = out.lines().filter_map(row).collect();
    let is_good = said.status.success() && !rows.is_empty();
    assert!(is_good, "scripts/bench-nbd: {out}{}", String::from_utf8_lossy(&said.stderr));
    for (what, ours, theirs) in rows {
        results.add(&what, "IOPS", true, NBDKIT, theirs);
        results.add(&what, "IOPS", true, "ubcache", ours);
    }
}

/// A line of the script's table: what, ours, theirs, ratio.
fn row(line: &str) -> Option<(String, f64, f64)> {
    let mut words: Vec<&str> = line.split_whitespace().collect();
    words.pop()?.parse::<f64>().ok()?;
    let theirs = words.pop()?.parse().ok()?;
    let ours = words.pop()?.parse().ok()?;
    Some((words.join(" "), ours, theirs))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_script() {
        let line = "randwrite depth 32, flush every 10          58321        60123     0.97";
        assert_eq!(row(line), Some(("randwrite depth 32, flush every 10".into(), 58321.0, 60123.0)));
        assert_eq!(row("4 KiB, IOPS                ubcache       nbdkit    ratio"), None);
    }
}
