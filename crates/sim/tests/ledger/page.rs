//! A page of the ledger: what a scenario did to the devices and what the figures say at its end, compared with the page that
//! is kept in `tests/ledger`.
//!
//! Owns the form of a page and the comparison. With `UBCACHE_LEDGER=write` in the environment, pages are written instead of
//! compared: what changed is then seen in the difference that the version control shows.

use std::fs;
use std::path::PathBuf;

use sim::disk::{Counters, Retained};
use sim::hardware::Layout;
use sim::scenario::{Boot, Scenario};

/// Lines of a kept page that a difference shows before itself.
const BEFORE: usize = 12;

/// What a page lists.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Detail {
    /// Every request of clients and to devices, with its moment.
    Requests,
    /// Sums alone, where the scenario asks for them; the requests are too many to be read.
    Sums,
}

/// Runs a scenario on new devices and compares its page. The devices are judged afterwards, and a last boot must end well.
pub fn page<F: Future<Output = ()> + 'static>(
    name: &str,
    detail: Detail,
    (layout, flash_sectors): (Layout, u64),
    script: impl FnOnce(Boot) -> F + 'static,
) {
    let mut scenario = Scenario::new(1, layout, flash_sectors);
    let lines = chapter(&mut scenario, detail, script);
    scenario.power_loss(Retained::Nothing).judge().happy_end();
    compare(name, &lines);
}

/// Runs one boot of a scenario and returns its lines. The machine stays on.
pub fn chapter<F: Future<Output = ()> + 'static>(
    scenario: &mut Scenario,
    detail: Detail,
    script: impl FnOnce(Boot) -> F + 'static,
) -> Vec<String> {
    scenario.hardware.world.begin_tape();
    scenario.boot(move |b| async move {
        script(b.clone()).await;
        b.world.log(|| "= end".into());
        figures(&b).into_iter().for_each(|line| b.world.log(|| format!("= {line}")));
    });
    let tape = scenario.hardware.world.end_tape();
    let wanted = |line: &&String| match detail {
        Detail::Requests => !line.contains(" end ") || line.contains("FAILED"),
        Detail::Sums => line.contains("us  = "),
    };
    tape.iter().filter(wanted).cloned().collect()
}

/// Writes down how many requests each device had so far, and what the buckets hold.
pub fn sums(b: &Boot, what: &str) {
    let of = |c: Counters| {
        format!(
            "{} reads, {} writes, {} with FUA, {} flushes, {} discards and zeros; {} sectors written",
            c.reads, c.writes, c.durable_writes, c.flushes, c.plain, c.sectors_written
        )
    };
    b.world.log(|| format!("= {what}"));
    b.world.log(|| format!("=   cache: {}", of(b.cache.counters())));
    for (i, disk) in b.backings.iter().enumerate() {
        b.world.log(|| format!("=   backing{i}: {}", of(disk.counters())));
    }
    let buckets = b.set().bucket_figures();
    b.world.log(|| format!("=   {buckets:?}"));
}

/// Every figure of the set that is not zero, and the events that no command caused, a line each.
fn figures(b: &Boot) -> Vec<String> {
    let set = b.set();
    let mut lines = flat("set", &format!("{:#?}", set.figures()));
    lines.extend(flat("buckets", &format!("{:#?}", set.bucket_figures())));
    let mut events: Vec<String> =
        set.take_events().iter().map(|e| format!("event of the set: {e:?}")).collect();
    for v in set.volumes() {
        events.extend(v.take_events().iter().map(|e| format!("event of {}: {e:?}", v.name())));
    }
    lines.extend(counted(&events));
    lines
}

/// Each line once, where it came first, with how often it came.
fn counted(lines: &[String]) -> Vec<String> {
    let mut counts: Vec<(&String, usize)> = Vec::new();
    for line in lines {
        match counts.iter_mut().find(|(l, _)| *l == line) {
            Some((_, n)) => *n += 1,
            None => counts.push((line, 1)),
        }
    }
    let times = |n: usize| if n > 1 { format!(" ({n} times)") } else { String::new() };
    counts.into_iter().map(|(line, n)| format!("{line}{}", times(n))).collect()
}

/// The lines of a pretty-printed value as paths with their values, without zeros and settings.
fn flat(name: &str, pretty: &str) -> Vec<String> {
    let mut path: Vec<String> = vec![name.to_owned()];
    // How many elements each open list has had.
    let mut seen: Vec<Option<usize>> = vec![None];
    let mut lines = Vec::new();
    for line in pretty.lines().skip(1) {
        let line = line.trim().trim_end_matches(',');
        if matches!(line, "}" | "]" | ")") {
            path.pop();
            seen.pop();
            continue;
        }
        let field = match line.split_once(": ") {
            Some((field, _)) => format!(".{field}"),
            None => {
                let n = seen.last_mut().and_then(Option::as_mut);
                n.map_or_else(String::new, |n| {
                    *n += 1;
                    format!("[{}]", *n - 1)
                })
            }
        };
        let value = line.split_once(": ").map_or(line, |(_, value)| value);
        if value.ends_with(['{', '[', '(']) {
            let is_list = value.ends_with('[');
            path.push(field);
            seen.push(is_list.then_some(0));
        } else if !matches!(value, "0" | "0.0" | "false" | "None" | "[]") {
            lines.push(format!("{}{field} = {value}", path.concat()));
        }
    }
    // Settings have tests of their own; how much memory an entry takes, and how often a task runs, are no promise.
    let left_out = [".tunables.", ".index_bytes", ".slices", "set.now"];
    lines.retain(|l| !left_out.iter().any(|name| l.contains(name)));
    lines
}

/// Compares a page with the one that is kept.
#[track_caller]
pub fn compare(name: &str, lines: &[String]) {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/ledger").join(format!("{name}.txt"));
    if std::env::var_os("UBCACHE_LEDGER").is_some_and(|v| v == "write") {
        fs::write(&path, lines.join("\n") + "\n").expect("the page is written");
        return;
    }
    let kept = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let kept: Vec<&str> = kept.lines().collect();
    let longest = kept.len().max(lines.len());
    let differs = (0..longest).find(|n| kept.get(*n).copied() != lines.get(*n).map(String::as_str));
    if let Some(n) = differs {
        let before = kept.get(n.saturating_sub(BEFORE)..n).unwrap_or_default().join("\n");
        panic!(
            "{name}, line {}: expected {:?}, found {:?}; before it:\n{before}\nIf the engine is right, write the page anew with \
             UBCACHE_LEDGER=write and look at the difference.",
            n + 1,
            kept.get(n),
            lines.get(n)
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    #[allow(dead_code)]
    struct Inner {
        zero: u64,
        list: Vec<Option<u32>>,
    }

    #[test]
    fn figures_are_paths_with_values() {
        let value = Inner { zero: 0, list: vec![None, Some(7)] };
        assert_eq!(flat("x", &format!("{value:#?}")), ["x.list[1] = 7"]);
    }
}
