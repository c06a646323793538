//! The figures of the process for `/metrics`.
//!
//! Owns the system calls and files that they come from. A figure that cannot be read is 0. Must not know how figures are
//! written.

use std::sync::OnceLock;

use metrics::ProcessFigures;
use rustix::process::{Resource, getrlimit};
use rustix::time::{ClockId, clock_gettime};

use crate::wall_clock;

/// The start of the process: the first call, which the daemon makes when it starts.
///
/// The time is read once, so that a change of the clock does not look like a restart.
pub(crate) fn start_seconds() -> f64 {
    static START: OnceLock<f64> = OnceLock::new();
    *START.get_or_init(|| wall_clock::now_ms() as f64 / 1000.0)
}

/// The figures of this process.
pub(crate) fn figures() -> ProcessFigures {
    let cpu = clock_gettime(ClockId::ProcessCPUTime);
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    ProcessFigures {
        cpu_seconds: cpu.tv_sec as f64 + cpu.tv_nsec as f64 / 1e9,
        resident_bytes: resident_pages(&statm).saturating_mul(rustix::param::page_size() as u64),
        // The directory that is being read is a file, too.
        open_files: std::fs::read_dir("/proc/self/fd").map_or(0, |d| d.count().saturating_sub(1)) as u64,
        most_open_files: getrlimit(Resource::Nofile).current.unwrap_or(0),
        start_seconds: start_seconds(),
    }
}

/// The resident pages in a line of `/proc/PID/statm`: the second number.
fn resident_pages(statm: &str) -> u64 {
    statm.split_whitespace().nth(1).and_then(|pages| pages.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_of_the_test_process() {
        assert_eq!((resident_pages("100 7 3 1 0 2 0\n"), resident_pages("")), (7, 0));
        let (first, file) = (figures(), std::fs::File::open("/proc/self/statm").unwrap());
        assert!(first.resident_bytes > 1 << 20 && first.open_files >= 3 && first.most_open_files > 3);
        assert!(first.start_seconds > 1.6e9 && first.cpu_seconds >= 0.0);
        assert_eq!(figures().start_seconds, first.start_seconds);
        drop(file);
    }
}
