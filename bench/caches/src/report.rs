//! Results on disk: for each benchmark its newest results, `B1.json`, and its plots; of all of them together a table,
//! `latest.md`, which is also in the documentation.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::io;
use std::path::Path;

use crate::jobs::Job;
use crate::plot;
use crate::result::{Figure, Results, shown};
use crate::target;

/// Between these lines of a document the table is renewed.
const BEGIN: &str = "<!-- The table begins. `make bench` renews it. -->\n";
const END: &str = "<!-- The table ends. -->\n";

/// Results of a benchmark that begins: empty, or, to `add` to them, those in `dir` of the same commit.
///
/// # Errors
/// If they cannot be read, or are of another commit or shortened by another number.
pub fn begin(
    job: Job,
    machine: BTreeMap<String, String>,
    shorten_by: u32,
    dir: &Path,
    add: bool,
) -> io::Result<Results> {
    let path = dir.join(format!("{}.json", job.name()));
    if !add || !path.exists() {
        return Ok(Results::new(job.name(), machine, shorten_by));
    }
    let old: Results = serde_json::from_slice(&std::fs::read(&path)?).map_err(io::Error::other)?;
    let commit = |m: &BTreeMap<String, String>| m.get("commit").cloned();
    if (commit(&old.machine), old.shorten_by) != (commit(&machine), shorten_by) {
        let (theirs, ours) = (commit(&old.machine).unwrap_or_default(), commit(&machine).unwrap_or_default());
        let why = format!("{}: of {theirs}, not of {ours}: nothing can be added to it", path.display());
        return Err(io::Error::new(io::ErrorKind::InvalidData, why));
    }
    Ok(old)
}

/// Writes what there is so far of a benchmark.
///
/// # Errors
/// If the directory cannot be written to.
pub fn write(results: &Results, dir: &Path) -> io::Result<()> {
    std::fs::create_dir_all(dir)?;
    let json = serde_json::to_string_pretty(results).map_err(io::Error::other)?;
    std::fs::write(dir.join(format!("{}.json", results.job)), json)?;
    plot::write(results, dir)
}

/// The newest results of every benchmark that ever ran.
///
/// # Errors
/// If a file cannot be read, or is of another version of this program.
pub fn read_all(dir: &Path) -> io::Result<Vec<Results>> {
    let mut all: Vec<Results> = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        let path = entry?.path();
        if path.extension().is_some_and(|e| e == "json") {
            all.push(serde_json::from_slice(&std::fs::read(&path)?).map_err(io::Error::other)?);
        }
    }
    all.sort_by(|a, b| a.job.cmp(&b.job));
    Ok(all)
}

/// Renews the table in `dir`, and in `document` where there is a place for it.
///
/// # Errors
/// If one of them cannot be written.
pub fn write_table(all: &[Results], dir: &Path, document: Option<&Path>) -> io::Result<()> {
    let table = markdown(all);
    std::fs::write(dir.join("latest.md"), format!("# Side by side\n\n{table}"))?;
    let Some(document) = document else { return Ok(()) };
    let text = std::fs::read_to_string(document)?;
    let parts = text.split_once(BEGIN).and_then(|(before, rest)| Some((before, rest.split_once(END)?.1)));
    let Some((before, after)) = parts else {
        let why = format!("{}: no place for the table", document.display());
        return Err(io::Error::new(io::ErrorKind::InvalidData, why));
    };
    std::fs::write(document, format!("{before}{BEGIN}\n{table}\n{END}{after}"))
}

/// The targets, then a table for each benchmark: a row for each figure, a column for each contender. What is the same of all of
/// them about machine and versions is said once.
pub fn markdown(all: &[Results]) -> String {
    let mut text = String::new();
    let mut common: BTreeMap<&str, &str> = BTreeMap::new();
    if let Some(first) = all.first() {
        common.extend(first.machine.iter().map(|(k, v)| (k.as_str(), v.as_str())));
        common.retain(|k, v| all.iter().all(|r| r.machine.get(*k).is_none_or(|x| x == v)));
    }
    for (key, value) in &common {
        let _ = writeln!(text, "* {key}: {value}");
    }
    text += &target::markdown(all);
    text +=
        "\nMedian of the repetitions; in brackets the smallest and the largest where there are several.\n";
    for results in all {
        let _ = writeln!(text, "\n### {}", results.job);
        if results.shorten_by != 1 {
            text += "\n**A shortened run: these figures show that the benchmark works, nothing else.**\n";
        }
        let own: Vec<String> = results
            .machine
            .iter()
            .filter(|(k, _)| !common.contains_key(k.as_str()))
            .map(|(k, v)| format!("{k}: {v}"))
            .collect();
        if !own.is_empty() {
            let _ = writeln!(text, "\n{}", own.join(", "));
        }
        table(results, &mut text);
    }
    text
}

fn table(results: &Results, text: &mut String) {
    let figures = &results.figures;
    let mut subjects: Vec<&str> = Vec::new();
    let mut rows: Vec<(&str, &str)> = Vec::new();
    for f in figures {
        if !subjects.contains(&f.subject.as_str()) {
            subjects.push(&f.subject);
        }
        if !rows.contains(&(&f.what, &f.unit)) {
            rows.push((&f.what, &f.unit));
        }
    }
    text.push_str("\n| |");
    for s in &subjects {
        let _ = write!(text, " {s} |");
    }
    text.push_str("\n|---|");
    text.push_str(&"---:|".repeat(subjects.len()));
    text.push('\n');
    for (what, unit) in rows {
        let _ = write!(text, "| {what}, {unit} |");
        for s in &subjects {
            let cell = figures.iter().find(|f| f.what == what && f.subject == *s).map_or(String::new(), cell);
            let _ = write!(text, " {cell} |");
        }
        text.push('\n');
    }
}

fn cell(f: &Figure) -> String {
    match (f.values.len(), f.spread()) {
        (1, _) => shown(f.median()),
        (_, (low, high)) => format!("{} ({}–{})", shown(f.median()), shown(low), shown(high)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(commit: &str) -> BTreeMap<String, String> {
        [("fio", "fio-3"), ("commit", commit)].map(|(k, v)| (k.to_owned(), v.to_owned())).into()
    }

    #[test]
    fn a_table_has_a_row_a_figure_and_a_column_a_contender() {
        let mut first = Results::new("B1", machine("abc"), 1);
        first.add("reads", "IOPS", true, "kernel bcache", 20.0);
        first.add("reads", "IOPS", true, "kernel bcache", 30.0);
        first.add("reads", "IOPS", true, "ubcache", 50.0);
        let mut second = Results::new("B2", machine("def"), 2);
        second.add("writes", "IOPS", true, "ubcache", 1000.4);
        let text = markdown(&[first, second]);
        assert!(text.contains("| | kernel bcache | ubcache |\n|---|---:|---:|\n"), "{text}");
        assert!(text.contains("| reads, IOPS | 25.0 (20.0–30.0) | 50.0 |"), "{text}");
        assert!(text.find("### B1") < text.find("### B2"));
        assert!(text.contains("| writes, IOPS | 1000 |"), "{text}");
        assert!(text.starts_with("* fio: fio-3\n\n"), "{text}");
        assert!(text.contains("\ncommit: abc\n") && text.contains("\ncommit: def\n"), "{text}");
        assert_eq!(text.matches("A shortened run").count(), 1);
    }

    #[test]
    fn repetitions_are_added_to_those_of_the_same_commit() {
        let dir = tempfile::tempdir().unwrap();
        let begin = |commit: &str, add| begin(Job::B2, machine(commit), 1, dir.path(), add);
        let mut results = begin("abc", true).unwrap();
        results.add("writes", "IOPS", true, "ubcache", 7.0);
        write(&results, dir.path()).unwrap();
        let mut results = begin("abc", true).unwrap();
        results.add("writes", "IOPS", true, "ubcache", 9.0);
        assert_eq!(results.figures[0].values, [7.0, 9.0]);
        assert!(begin("abc", false).unwrap().figures.is_empty());
        let refused = begin("def", true).unwrap_err().to_string();
        assert!(refused.ends_with("of abc, not of def: nothing can be added to it"), "{refused}");
    }

    #[test]
    fn benchmarks_that_ran_at_different_times_are_in_one_table() {
        let dir = tempfile::tempdir().unwrap();
        let document = dir.path().join("benchmarks.md");
        std::fs::write(&document, format!("before\n{BEGIN}old\n{END}after\n")).unwrap();
        for (job, commit) in [("B2", "abc"), ("B1", "def"), ("B2", "new")] {
            let mut results = Results::new(job, machine(commit), 1);
            results.add("writes", "IOPS", true, "ubcache", 7.0);
            write(&results, dir.path()).unwrap();
            let all = read_all(dir.path()).unwrap();
            write_table(&all, dir.path(), Some(&document)).unwrap();
        }
        let text = std::fs::read_to_string(&document).unwrap();
        assert!(text.starts_with("before\n") && text.ends_with("after\n"), "{text}");
        assert!(!text.contains("old") && !text.contains("abc"), "{text}");
        assert!(text.find("commit: def") < text.find("commit: new"), "{text}");
        let latest = std::fs::read_to_string(dir.path().join("latest.md")).unwrap();
        assert!(text.contains(latest.strip_prefix("# Side by side\n\n").unwrap()));
    }
}
