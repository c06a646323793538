//! The results of a run, as text.
//!
//! Owns the table and the share of killed mutants. Invariant: a mutant that no suite reaches counts as not killed.

use std::collections::BTreeMap;
use std::fmt::Write;

use crate::results::{Fate, Verdict};
use crate::table::Mutant;

/// Counts of mutants by verdict.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
struct Counts {
    built: u32,
    killed: u32,
    timed_out: u32,
    survived: u32,
    unreached: u32,
    equivalent: u32,
}

impl Counts {
    fn add(&mut self, verdict: Option<&Verdict>, equivalent: bool) {
        self.built += 1;
        match verdict.map(|v| v.fate) {
            Some(Fate::Killed) => self.killed += 1,
            Some(Fate::TimedOut) => self.timed_out += 1,
            Some(_) if equivalent => self.equivalent += 1,
            Some(Fate::Survived) => self.survived += 1,
            Some(Fate::Unreached) => self.unreached += 1,
            None => {}
        }
    }

    /// Share of killed mutants among those that were run and are not equivalent, in tenths of a percent.
    fn share(&self) -> String {
        let dead = self.killed + self.timed_out;
        let of = dead + self.survived + self.unreached;
        match (dead * 1000).checked_div(of) {
            Some(n) => format!("{}.{} %", n / 10, n % 10),
            None => "-".into(),
        }
    }

    fn row(&self, name: &str) -> String {
        format!(
            "{name:<14} {:>6} {:>7} {:>9} {:>9} {:>9} {:>10} {:>8}\n",
            self.built,
            self.killed,
            self.timed_out,
            self.survived,
            self.unreached,
            self.equivalent,
            self.share()
        )
    }
}

/// The report as text.
pub fn report(
    mutants: &[Mutant],
    known: &BTreeMap<String, Verdict>,
    equivalent: &BTreeMap<String, String>,
) -> String {
    let mut parts: BTreeMap<&str, Counts> = BTreeMap::new();
    let mut all = Counts::default();
    let mut suites: BTreeMap<&str, u32> = BTreeMap::new();
    let mut alive = String::new();
    for m in mutants {
        let part = m.part();
        let verdict = known.get(&m.key);
        let reason = equivalent.get(&m.key);
        parts.entry(part).or_default().add(verdict, reason.is_some());
        all.add(verdict, reason.is_some());
        match verdict {
            Some(v) if matches!(v.fate, Fate::Killed | Fate::TimedOut) => {
                *suites.entry(v.by.split(": ").next().unwrap_or(&v.by)).or_default() += 1;
                if reason.is_some() {
                    let _ = writeln!(alive, "KILLED, so not equivalent: {} by {}", m.describe(), v.by);
                }
            }
            Some(v) if reason.is_none() => {
                let _ = writeln!(alive, "{:<9} {}", format!("{:?}", v.fate).to_lowercase(), m.describe());
            }
            _ => {}
        }
    }
    let mut out = format!(
        "{:<14} {:>6} {:>7} {:>9} {:>9} {:>9} {:>10} {:>8}\n",
        "part", "built", "killed", "timed out", "survived", "unreached", "equivalent", "share"
    );
    for (name, counts) in &parts {
        out += &counts.row(name);
    }
    out += &all.row("all");
    out += "\nkilled or timed out by\n";
    for (name, count) in suites {
        let _ = writeln!(out, "{count:>6}  {name}");
    }
    if !alive.is_empty() {
        let _ = write!(out, "\nnot killed, and not shown to be equivalent\n{alive}");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_is_of_those_run_and_not_equivalent() {
        let mut mutants = Vec::new();
        let mut known = BTreeMap::new();
        let fates = [
            Some(Fate::Killed),
            Some(Fate::TimedOut),
            Some(Fate::Survived),
            Some(Fate::Survived),
            Some(Fate::Unreached),
            None,
        ];
        for (n, fate) in fates.into_iter().enumerate() {
            let key = format!("gc/mod.rs walk: change {n}");
            mutants.push(Mutant {
                number: n as u32,
                file: "gc/mod.rs".into(),
                line: n + 1,
                key: key.clone(),
            });
            if let Some(fate) = fate {
                let by = "sim/tests/model: a_test".into();
                known.insert(key.clone(), Verdict { key, fate, by, millis: 1 });
            }
        }
        let equivalent =
            BTreeMap::from([("gc/mod.rs walk: change 3".to_owned(), "no difference".to_owned())]);
        let text = report(&mutants, &known, &equivalent);
        let row: Vec<&str> = text.lines().find(|l| l.starts_with("gc")).unwrap().split_whitespace().collect();
        assert_eq!(row, ["gc", "6", "1", "1", "1", "1", "1", "50.0", "%"], "{text}");
        assert!(text.contains("     2  sim/tests/model\n"), "{text}");
        assert!(text.contains("survived  gc/mod.rs:3 walk: change 2\n"), "{text}");
        assert!(text.contains("unreached gc/mod.rs:5 walk: change 4\n"), "{text}");
        assert!(!text.contains("change 3"), "{text}");
    }
}
