//! Runs the program `counts` under callgrind and reads the counts of both.
//!
//! Must not judge: limits belong to the test, targets to the report.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::process::Command;

/// Phases of the program, in order. `nothing` is the loop alone.
const PHASES: [&str; 5] = ["set-up", "insert", "overwrite", "read", "nothing"];

/// The costs of 4 KiB requests.
#[derive(Clone, Debug)]
pub struct Counts {
    /// Instructions per request of a phase (`read`, `overwrite`, `insert`), without those of the loop.
    pub instructions: BTreeMap<&'static str, f64>,
    /// The counts of the program itself, by name.
    pub counts: BTreeMap<String, f64>,
}

/// Counts with `blocks` requests a phase.
///
/// # Errors
/// If valgrind cannot be run, the program fails, or the output of one of them cannot be parsed.
pub fn count(program: &Path, blocks: u64) -> io::Result<Counts> {
    let dir = tempfile::tempdir()?;
    let said = Command::new("valgrind")
        .arg("--tool=callgrind")
        .arg("--dump-before=*end_of_phase*")
        .arg(format!("--callgrind-out-file={}", dir.path().join("out").display()))
        .arg(program)
        .arg(blocks.to_string())
        .output()
        .map_err(|e| io::Error::new(e.kind(), format!("valgrind (Debian package of this name): {e}")))?;
    let (out, err) = (String::from_utf8_lossy(&said.stdout), String::from_utf8_lossy(&said.stderr));
    if !said.status.success() {
        return Err(io::Error::other(format!("{}: {out}{err}", program.display())));
    }
    let mut instructions = BTreeMap::new();
    for (n, phase) in PHASES.iter().enumerate() {
        instructions.insert(*phase, total(&dir.path().join(format!("out.{}", n + 1)))? / blocks as f64);
    }
    let nothing = instructions.remove("nothing").unwrap_or(0.0);
    instructions.remove("set-up");
    instructions.values_mut().for_each(|v| *v -= nothing);
    let line = |l: &str| -> Option<(String, f64)> {
        let (what, value) = l.split_once(' ')?;
        Some((what.to_owned(), value.trim().parse().ok()?))
    };
    Ok(Counts { instructions, counts: out.lines().filter_map(line).collect() })
}

/// The number of instructions in one of callgrind's files.
fn total(file: &Path) -> io::Result<f64> {
    let text = std::fs::read_to_string(file)
        .map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", file.display())))?;
    let line = text.lines().find_map(|l| l.strip_prefix("totals: ").or_else(|| l.strip_prefix("summary: ")));
    line.and_then(|n| n.trim().parse::<u64>().ok())
        .map(|n| n as f64)
        .ok_or_else(|| io::Error::other(format!("{}: no totals", file.display())))
}
