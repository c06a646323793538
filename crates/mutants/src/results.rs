//! The results of earlier runs: verdicts on disk, and the lists of mutants that are not tested.
//!
//! Owns the file of results. A run appends a line for each mutant, so that the next run continues after an interruption.
//! Invariant: a verdict is valid only for the sources with which it was found.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use serde::{Deserialize, Serialize};

use crate::error::{Error, ListError};

/// The verdict about a mutant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Fate {
    /// A suite failed with the mutant.
    Killed,
    /// A suite did not end in time with the mutant.
    TimedOut,
    /// Every suite that reaches the mutant passed.
    Survived,
    /// No suite reaches the mutant.
    Unreached,
}

/// The fate of a mutant, and the suite that decided it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verdict {
    /// Key of the mutant.
    pub key: String,
    /// Fate of the mutant.
    pub fate: Fate,
    /// Suite, and test in it, that decided.
    pub by: String,
    /// Duration of the suites in milliseconds.
    pub millis: u64,
}

/// The first line of the file of results.
#[derive(Serialize, Deserialize)]
struct Head {
    fingerprint: String,
}

/// The file of results.
pub struct Results {
    path: PathBuf,
    file: Mutex<File>,
    /// The verdicts by key.
    pub known: BTreeMap<String, Verdict>,
}

impl Results {
    /// Opens the file, and drops verdicts of other sources.
    ///
    /// With `retain_killed`, verdicts of killed mutants stay. That is correct if only tests were added since.
    pub fn open(path: &Path, fingerprint: &str, retain_killed: bool) -> Result<Results, Error> {
        let text = fs::read_to_string(path).unwrap_or_default();
        let same = serde_json::from_str::<Head>(text.lines().next().unwrap_or_default())
            .is_ok_and(|h| h.fingerprint == fingerprint);
        let mut known = BTreeMap::new();
        // A line that a crash has cut off is not a verdict.
        for v in text.lines().skip(1).filter_map(|l| serde_json::from_str::<Verdict>(l).ok()) {
            let dead = matches!(v.fate, Fate::Killed | Fate::TimedOut);
            if same || (retain_killed && dead) {
                known.insert(v.key.clone(), v);
            }
        }
        let head = Head { fingerprint: fingerprint.to_owned() };
        let mut out = serde_json::to_string(&head).map_err(Error::json(path))?;
        out.push('\n');
        for v in known.values() {
            out.push_str(&serde_json::to_string(v).map_err(Error::json(path))?);
            out.push('\n');
        }
        fs::write(path, out).map_err(Error::file(path))?;
        let file = File::options().append(true).open(path).map_err(Error::file(path))?;
        Ok(Results { path: path.to_path_buf(), file: Mutex::new(file), known })
    }

    /// Appends a verdict to the file.
    pub fn append(&self, verdict: &Verdict) -> Result<(), Error> {
        let line = serde_json::to_string(verdict).map_err(Error::json(&self.path))?;
        let mut file = self.file.lock().map_err(|_| Error::WorkerPanicked)?;
        file.write_all(format!("{line}\n").as_bytes()).map_err(Error::file(&self.path))
    }
}

/// Parses a list of keys. The reason of a key stands in the indented lines after it; lines with # are comments.
pub fn reasons(text: &str) -> Result<BTreeMap<String, String>, ListError> {
    let mut found: BTreeMap<String, String> = BTreeMap::new();
    let mut open: Vec<String> = Vec::new();
    let mut has_reason = true;
    for (n, line) in text.lines().enumerate() {
        if line.trim().is_empty() || line.starts_with('#') {
            continue;
        }
        if line.starts_with(' ') {
            if open.is_empty() {
                return Err(ListError::NoMutant { line: n + 1 });
            }
            for key in &open {
                let reason = found.entry(key.clone()).or_default();
                if !reason.is_empty() {
                    reason.push(' ');
                }
                reason.push_str(line.trim());
            }
            has_reason = true;
        } else {
            // Consecutive keys share one reason.
            if has_reason {
                open.clear();
            }
            has_reason = false;
            open.push(line.trim_end().to_owned());
        }
    }
    if has_reason { Ok(found) } else { Err(ListError::NoReason { mutants: open.join(", ") }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(key: &str, fate: Fate) -> Verdict {
        Verdict { key: key.into(), fate, by: "a suite".into(), millis: 1 }
    }

    #[test]
    fn verdicts_outlive_an_interrupted_run_and_no_change_of_sources() {
        let path = std::env::temp_dir().join(format!("ubcache-mutants-results-{}", std::process::id()));
        let _ = fs::remove_file(&path);
        let r = Results::open(&path, "aa", false).unwrap();
        r.append(&verdict("a", Fate::Killed)).unwrap();
        r.append(&verdict("b", Fate::Survived)).unwrap();
        let torn = fs::read_to_string(&path).unwrap() + "{\"key\":\"c\"";
        fs::write(&path, torn).unwrap();
        let again = Results::open(&path, "aa", false).unwrap();
        assert_eq!(again.known.keys().collect::<Vec<_>>(), ["a", "b"]);
        let more_tests = Results::open(&path, "bb", true).unwrap();
        assert_eq!(more_tests.known.keys().collect::<Vec<_>>(), ["a"]);
        assert!(Results::open(&path, "cc", false).unwrap().known.is_empty());
        fs::remove_file(&path).unwrap();
    }

    #[test]
    fn lists_have_reasons() {
        let text =
            "# comment\n\na.rs f: x\na.rs g: y\n    first half\n    second half\nb.rs h: z\n    other\n";
        let found = reasons(text).unwrap();
        assert_eq!(found["a.rs f: x"], "first half second half");
        assert_eq!(found["a.rs g: y"], "first half second half");
        assert_eq!(found["b.rs h: z"], "other");
        assert!(reasons("a.rs f: x\n").is_err());
        assert!(reasons("   reason\n").is_err());
    }
}
