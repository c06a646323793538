//! The target of each benchmark, its result, and the limit by ublk alone.
//!
//! A ratio is that of the medians. Must not measure, nor know the source of figures.

use std::fmt::Write;

use crate::jobs::{NBDKIT, OCF};
use crate::result::{Results, shown};
use crate::subject::Subject;

/// A target.
struct Target {
    job: &'static str,
    what: &'static str,
    wanted: Wanted,
    /// The figure that it is about: of ubcache, over that of the other; of ubcache alone if there is no other.
    figure: &'static str,
    of: Option<&'static str>,
}

#[derive(Clone, Copy)]
enum Wanted {
    AtLeast(f64),
    AtMost(f64),
}

use Wanted::{AtLeast, AtMost};

const US: &str = "ubcache";

/// One target. `of` is the subject that ubcache is compared with.
fn target(
    job: &'static str,
    what: &'static str,
    wanted: Wanted,
    figure: &'static str,
    of: Option<&'static str>,
) -> Target {
    Target { job, what, wanted, figure, of }
}

/// All targets, in the order of the benchmarks.
fn targets() -> Vec<Target> {
    let mut all = hits();
    all.extend(sustained_writes());
    all.extend(files());
    all.extend(writeback());
    all.extend(costs());
    all.extend(over_nbd());
    all
}

/// B1 and B2: random requests that the cache answers alone.
fn hits() -> Vec<Target> {
    let kernel = Some(Subject::Bcache.name());
    let ublk = Some(Subject::Ublk.name());
    let reads = "randread depth 16";
    vec![
        target("B1", "reads at depth 16, of the kernel's", AtLeast(1.0), reads, kernel),
        target("B1", "the same, of ublk without a set", AtLeast(0.9), reads, ublk),
        target("B2", "writes at depth 16, of the kernel's", AtLeast(3.0), "randwrite depth 16", kernel),
    ]
}

/// B3: writes that fill the cache.
fn sustained_writes() -> Vec<Target> {
    let kernel = Some(Subject::Bcache.name());
    let dm = Some(Subject::DmWritecache.name());
    let last = "writes, the last 10 s";
    let full = "writes, into a cache that was filled before";
    vec![
        target("B3", "the first 10 s, of the kernel's", AtLeast(1.0), "writes, the first 10 s", kernel),
        target("B3", "the last 10 s, of dm-writecache", AtLeast(10.0), last, dm),
        target("B3", "the last 10 s, of the kernel's", AtLeast(1000.0), last, kernel),
        target("B3", "cache filled before, of dm-writecache", AtLeast(10.0), full, dm),
        target("B3", "cache filled before, of the kernel's", AtLeast(1000.0), full, kernel),
    ]
}

/// B4: `sysbench fileio` on a file system.
fn files() -> Vec<Target> {
    let ssd = Some(Subject::RawCache.name());
    [
        ("run 1, of the SSD", "read and written, run 1"),
        ("run 2, of the SSD", "read and written, run 2"),
        ("run 3, of the SSD", "read and written, run 3"),
    ]
    .map(|(run, figure)| target("B4", run, AtLeast(0.9), figure, ssd))
    .into()
}

/// B5 and B6: the time that writeback takes, and the latency of reads during it.
fn writeback() -> Vec<Target> {
    let kernel = Some(Subject::Bcache.name());
    let at_rest = "99 % during writeback against at rest";
    let longest = "read latency during writeback, longest";
    vec![
        target("B5", "(a), the time of the kernel's", AtMost(1.0 / 20.0), "(a) over 400 MiB", kernel),
        target("B5", "(b), the time of the kernel's", AtMost(1.0 / 5.0), "(b) over 1900 MiB", kernel),
        target("B6", "99 % during writeback, of that at rest", AtMost(1.5), at_rest, None),
        target("B6", "the longest during writeback, ms", AtMost(100.0), longest, None),
    ]
}

/// B7 and B8: instructions, bytes and time that the index costs.
fn costs() -> Vec<Target> {
    let ocf = Some(OCF);
    let written = "written to the cache for each byte, inserts";
    let memory = "memory of the index for each extent";
    let start = "start with 1000000 dirty extents, devices in memory";
    vec![
        target("B7", "read hit, instructions, of OCF", AtMost(0.5), "read hit", ocf),
        target("B7", "insert, instructions, of OCF", AtMost(0.4), "insert of new data", ocf),
        target("B7", "bytes to the cache for each byte", AtMost(1.1), written, None),
        target("B7", "bytes of memory for each extent", AtMost(32.0), memory, None),
        target("B8", "a million dirty extents, ms", AtMost(1000.0), start, None),
    ]
}

/// B9: NBD, compared with nbdkit.
fn over_nbd() -> Vec<Target> {
    [
        ("randread depth 1", 1.0),
        ("randread depth 32", 1.0),
        ("randwrite depth 1", 1.0),
        ("randwrite depth 32", 1.0),
        ("randwrite depth 32, flush every 10", 0.9),
    ]
    .map(|(what, wanted)| target("B9", what, AtLeast(wanted), what, Some(NBDKIT)))
    .into()
}

impl Target {
    /// The ratio, or the figure, for this contender in our place.
    fn measured(&self, results: &Results, ours: &str) -> Option<f64> {
        let median = |subject: &str| {
            let same = |f: &&crate::result::Figure| f.what == self.figure && f.subject == subject;
            results.figures.iter().find(same).map(|f| f.median())
        };
        let ours = median(ours)?;
        match self.of {
            Some(other) => median(other).filter(|v| *v > 0.0).map(|other| ours / other),
            None => Some(ours),
        }
    }

    fn reached(&self, value: f64) -> bool {
        match self.wanted {
            AtLeast(least) => value >= least,
            AtMost(most) => value <= most,
        }
    }
}

/// A table of all targets, also of those that nothing was measured for.
pub fn markdown(all: &[Results]) -> String {
    let mut text =
        String::from("\n| | target | wanted | measured | | ublk alone |\n|---|---|---:|---:|---|---:|\n");
    for target in targets() {
        let results = all.iter().find(|r| r.job == target.job && r.shorten_by == 1);
        let value = results.and_then(|r| target.measured(r, US));
        // What our server makes of the cache device without a set: no cache over ublk can do better.
        let limit = results.filter(|_| target.of != Some(Subject::Ublk.name()));
        let limit = limit.and_then(|r| target.measured(r, Subject::Ublk.name()));
        let (sign, wanted) = match target.wanted {
            AtLeast(v) => ("≥", v),
            AtMost(v) => ("≤", v),
        };
        let verdict = match value {
            Some(v) if target.reached(v) => "reached",
            Some(_) => "**not reached**",
            None => "not measured",
        };
        let [value, limit] = [value, limit].map(|v| v.map_or(String::new(), shown));
        let (job, what, wanted) = (target.job, target.what, shown(wanted));
        let _ = writeln!(text, "| {job} | {what} | {sign} {wanted} | {value} | {verdict} | {limit} |");
    }
    text
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn ratios_are_judged_and_the_limit_is_named() {
        let mut b1 = Results::new("B1", BTreeMap::new(), 1);
        for (subject, iops) in
            [("kernel bcache", 200.0), ("cache device over ublk", 100.0), ("ubcache", 95.0)]
        {
            b1.add("randread depth 16", "IOPS", true, subject, iops);
        }
        let mut b5 = Results::new("B5", BTreeMap::new(), 1);
        b5.add("(a) over 400 MiB", "s", false, "kernel bcache", 240.0);
        b5.add("(a) over 400 MiB", "s", false, "ubcache", 6.0);
        let mut b7 = Results::new("B7", BTreeMap::new(), 1);
        b7.add("memory of the index for each extent", "bytes", false, "ubcache", 33.0);
        let text = markdown(&[b1, b5, b7]);
        assert!(
            text.contains(
                "| B1 | reads at depth 16, of the kernel's | ≥ 1.00 | 0.475 | **not reached** | 0.500 |"
            ),
            "{text}"
        );
        assert!(
            text.contains("| B1 | the same, of ublk without a set | ≥ 0.900 | 0.950 | reached |  |"),
            "{text}"
        );
        assert!(
            text.contains("| B5 | (a), the time of the kernel's | ≤ 0.050 | 0.025 | reached |  |"),
            "{text}"
        );
        assert!(
            text.contains("| B7 | bytes of memory for each extent | ≤ 32.0 | 33.0 | **not reached** |  |"),
            "{text}"
        );
        assert!(
            text.contains("| B2 | writes at depth 16, of the kernel's | ≥ 3.00 |  | not measured |  |"),
            "{text}"
        );
        assert_eq!(text.lines().count(), 3 + targets().len(), "{text}");
    }
}
