//! Compares replacement policies: the engine in virtual time, and the offline optimum. Prints the tables of
//! docs/replacement.md.
//!
//! An SSD with 3000 requests per second is in front of a disk with 150.
//!
//! `replacement [--requests N] [--trace FILE.csv [--shift BYTES]] [NAME...]`: NAMEs of workloads, or all.

use bench::study::{CACHE_BLOCKS, Outcome, play, policies};
use bench::workloads::{Access, NAMES, from_csv, optimum, synthetic};

struct Row {
    name: String,
    optimum: f64,
    outcomes: Vec<Outcome>,
}

fn row(name: &str, accesses: &[Access]) -> Row {
    let from = accesses.len() / 4;
    let outcomes = policies().map(|p| play(accesses, from, &p)).collect();
    Row { name: name.to_owned(), optimum: optimum(accesses, CACHE_BLOCKS as usize, from), outcomes }
}

fn table(title: &str, rows: &[Row], best: Option<fn(&Row) -> String>, cell: fn(&Outcome) -> String) {
    let head = best.map_or("", |_| " optimum |");
    println!("\n| {title} |{head} {} |", policies().map(|p| p.0).collect::<Vec<_>>().join(" | "));
    println!("|---|{}", "---:|".repeat(policies().count() + usize::from(best.is_some())));
    for r in rows {
        let first = best.map(|b| format!(" {} |", b(r))).unwrap_or_default();
        let cells: Vec<String> = r.outcomes.iter().map(cell).collect();
        println!("| {} |{first} {} |", r.name, cells.join(" | "));
    }
}

fn main() {
    let (mut requests, mut trace, mut shift, mut names) = (600_000, None, 0, Vec::new());
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let mut number =
            || args.next().and_then(|n| n.parse().ok()).unwrap_or_else(|| panic!("{arg}: a number"));
        match arg.as_str() {
            "--requests" => requests = number() as usize,
            "--shift" => shift = number(),
            "--trace" => trace = args.next(),
            _ => names.push(arg),
        }
    }
    if names.is_empty() && trace.is_none() {
        names = NAMES.map(str::to_owned).to_vec();
    }
    let mut rows = Vec::new();
    for name in &names {
        rows.push(row(name, &synthetic(name, CACHE_BLOCKS, requests)));
        eprintln!("{name}");
    }
    if let Some(file) = trace {
        let text = std::fs::read_to_string(&file).unwrap_or_else(|e| panic!("{file}: {e}"));
        let accesses = from_csv(&text, shift).unwrap_or_else(|e| panic!("{file}: {e}"));
        rows.push(row("trace", &accesses));
    }
    table("read from the cache, %", &rows, Some(|r| format!("{:.1}", r.optimum * 100.0)), |o| {
        format!("{:.1}", o.hits * 100.0)
    });
    table("written to the cache, MiB", &rows, None, |o| format!("{:.0}", o.cache_written as f64 / 1048576.0));
    table("seconds", &rows, None, |o| format!("{:.0}", o.seconds));
    table("requests to the disk", &rows, None, |o| o.disk_requests.to_string());
}
