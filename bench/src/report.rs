//! Results on disk: `latest.json`, `latest.md`, and plots.

use std::fmt::Write;
use std::io;
use std::path::Path;

use crate::plot;
use crate::result::{Figure, Results};
use crate::subject::Subject;

/// Writes everything that there is so far.
///
/// # Errors
/// If the directory cannot be written to.
pub fn write(results: &Results, dir: &Path) -> io::Result<()> {
    std::fs::create_dir_all(dir)?;
    let json = serde_json::to_string_pretty(results).map_err(io::Error::other)?;
    std::fs::write(dir.join("latest.json"), json)?;
    std::fs::write(dir.join("latest.md"), markdown(results))?;
    plot::write(results, dir)
}

/// A table for each benchmark: a row for each figure, a column for each contender.
pub fn markdown(results: &Results) -> String {
    let mut text = String::from("# Side by side\n\n");
    if results.hurry != 1 {
        text += "**A hurried run: these figures show that the benchmarks work, nothing else.**\n\n";
    }
    for (key, value) in &results.machine {
        let _ = writeln!(text, "* {key}: {value}");
    }
    text +=
        "\nMedian of the repetitions; in brackets the smallest and the largest where there are several.\n";
    let mut jobs: Vec<&str> = results.figures.iter().map(|f| f.job.as_str()).collect();
    jobs.dedup();
    jobs.sort_unstable();
    jobs.dedup();
    for job in jobs {
        table(results, job, &mut text);
    }
    text
}

fn table(results: &Results, job: &str, text: &mut String) {
    let figures: Vec<&Figure> = results.figures.iter().filter(|f| f.job == job).collect();
    let names = Subject::ALL.iter().map(|s| s.name());
    let subjects: Vec<&str> = names.filter(|n| figures.iter().any(|f| f.subject == *n)).collect();
    let mut rows: Vec<(&str, &str)> = Vec::new();
    for f in &figures {
        if !rows.contains(&(&f.what, &f.unit)) {
            rows.push((&f.what, &f.unit));
        }
    }
    let _ = write!(text, "\n## {job}\n\n| |");
    for s in &subjects {
        let _ = write!(text, " {s} |");
    }
    text.push_str("\n|---|");
    text.push_str(&"---:|".repeat(subjects.len()));
    text.push('\n');
    for (what, unit) in rows {
        let _ = write!(text, "| {what}, {unit} |");
        for s in &subjects {
            let cell =
                figures.iter().find(|f| f.what == what && f.subject == *s).map_or(String::new(), |f| cell(f));
            let _ = write!(text, " {cell} |");
        }
        text.push('\n');
    }
}

fn cell(f: &Figure) -> String {
    let show = |v: f64| if v.abs() < 100.0 { format!("{v:.1}") } else { format!("{v:.0}") };
    match (f.values.len(), f.spread()) {
        (1, _) => show(f.median()),
        (_, (low, high)) => format!("{} ({}–{})", show(f.median()), show(low), show(high)),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn a_table_has_a_row_a_figure_and_a_column_a_contender() {
        let mut r = Results::new(BTreeMap::from([("fio".into(), "fio-3".into())]), 1);
        r.add("B2", "writes", "IOPS", true, "ubcache", 1000.4);
        r.add("B1", "reads", "IOPS", true, "ubcache", 50.0);
        r.add("B1", "reads", "IOPS", true, "kernel bcache", 20.0);
        r.add("B1", "reads", "IOPS", true, "kernel bcache", 30.0);
        let text = markdown(&r);
        assert!(text.contains("| | kernel bcache | ubcache |\n|---|---:|---:|\n"), "{text}");
        assert!(text.contains("| reads, IOPS | 20.0 (20.0–30.0) | 50.0 |"), "{text}");
        assert!(text.find("## B1") < text.find("## B2"));
        assert!(text.contains("| writes, IOPS | 1000 |") && text.contains("* fio: fio-3"));
    }
}
