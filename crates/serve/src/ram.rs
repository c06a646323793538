//! The memory that this process may use, of which its limits are shares.
//!
//! Owns the reading of the host's memory, of the limit of the control group, and of the process's own limits. Must not know
//! the use of the shares.

use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::OnceLock;

use io::MemoryBudget;
use rustix::process::{Resource, getrlimit};

/// All sets together may take the memory divided by this for what their superblocks require.
const SHARE_OF_SETS: u64 = 2;

/// Assumed memory if the system does not report it.
const ASSUMED_BYTES: u64 = 1 << 30;

/// The limit of the operator, if there is one.
static LIMIT: OnceLock<MemoryLimit> = OnceLock::new();

/// The memory for which the process sizes its reserves, buffers and caches, in place of the memory of the host.
///
/// It bounds what the process takes on demand. The program itself, and buckets and dirty data that a cache device requires, are
/// not refused for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemoryLimit(u64);

impl MemoryLimit {
    /// The smallest limit: below it, a set with volumes does not fit.
    const LEAST_BYTES: u64 = 64 << 20;

    /// Makes it the limit of this process, which it stays. The caller has not used any memory budget yet.
    pub fn apply(self) {
        let _ = LIMIT.set(self);
    }
}

/// Why a text is no memory limit.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("expected a size of at least {} MiB, such as 256MiB, found {found:?}", MemoryLimit::LEAST_BYTES >> 20)]
pub struct MemoryLimitError {
    found: String,
}

impl FromStr for MemoryLimit {
    type Err = MemoryLimitError;

    fn from_str(text: &str) -> Result<MemoryLimit, MemoryLimitError> {
        let bytes = engine::tunables::parse_bytes(text).filter(|bytes| *bytes >= MemoryLimit::LEAST_BYTES);
        bytes.map(MemoryLimit).ok_or_else(|| MemoryLimitError { found: text.to_owned() })
    }
}

/// The limit for the index of one set if the operator gave a memory limit: a quarter of it.
pub(crate) fn index_bytes() -> Option<u64> {
    LIMIT.get().map(|limit| limit.0 / 4)
}

/// Whether the operator's memory limit is the smallest limit of the memory that this process may use.
pub(crate) fn is_limited_by_operator() -> bool {
    LIMIT.get().is_some_and(|limit| limit.0 == available_bytes())
}

/// Bytes of memory that the process may use: those of the host, or fewer if the operator, a control group or the process has a
/// limit.
pub fn available_bytes() -> u64 {
    let host = fs::read_to_string("/proc/meminfo").ok().and_then(|text| total_bytes(&text));
    let group = fs::read_to_string("/proc/self/cgroup").ok().and_then(|text| group_of(&text));
    let limit = group.and_then(|group| group_limit(Path::new("/sys/fs/cgroup"), &group));
    let given = LIMIT.get().map(|limit| limit.0);
    own_limits().chain(limit).chain(given).fold(host.unwrap_or(ASSUMED_BYTES), u64::min)
}

/// The limits of the process's address space in bytes, if it has any.
fn own_limits() -> impl Iterator<Item = u64> {
    [Resource::As, Resource::Data].into_iter().filter_map(|which| getrlimit(which).current)
}

/// Whether address space without memory counts.
///
/// It does if the process has a limit of address space, or the system counts it as memory (`vm.overcommit_memory` is 2).
pub(crate) fn addresses_are_limited() -> bool {
    let mode = fs::read_to_string("/proc/sys/vm/overcommit_memory").unwrap_or_default();
    own_limits().next().is_some() || mode.trim() == "2"
}

/// The memory budget that all sets of the process share.
pub fn budget_of_sets() -> MemoryBudget {
    static BUDGET: OnceLock<MemoryBudget> = OnceLock::new();
    BUDGET.get_or_init(|| MemoryBudget::new(available_bytes() / SHARE_OF_SETS)).clone()
}

fn total_bytes(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// The control group of the process in the unified hierarchy, relative to the root of the hierarchy.
fn group_of(cgroup: &str) -> Option<PathBuf> {
    cgroup.lines().find_map(|line| line.strip_prefix("0::/")).map(PathBuf::from)
}

/// The smallest limit of a group and its ancestors.
fn group_limit(root: &Path, group: &Path) -> Option<u64> {
    let limit = |dir: &Path| fs::read_to_string(dir.join("memory.max")).ok()?.trim().parse::<u64>().ok();
    group.ancestors().filter_map(|dir| limit(&root.join(dir))).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_has_memory() {
        assert!(available_bytes() > 16 << 20);
        assert_eq!(total_bytes("MemTotal:       16384 kB\nMemFree: 1 kB\n"), Some(16 << 20));
        assert_eq!(total_bytes("MemFree: 1 kB\n"), None);
    }

    #[test]
    fn a_memory_limit_is_a_size() {
        assert_eq!("256MiB".parse(), Ok(MemoryLimit(256 << 20)));
        assert_eq!("1G".parse(), Ok(MemoryLimit(1 << 30)));
        for text in ["", "1M", "much", "-1G"] {
            let said = text.parse::<MemoryLimit>().unwrap_err().to_string();
            assert!(said.contains("at least 64 MiB") && said.contains(&format!("{text:?}")), "{said}");
        }
    }

    #[test]
    fn the_smallest_limit_of_the_groups_counts() {
        let root = tempfile::tempdir().unwrap();
        let inner = root.path().join("system.slice/ubcache.service");
        fs::create_dir_all(&inner).unwrap();
        let group = group_of("1:name=x:/y\n0::/system.slice/ubcache.service\n").unwrap();
        assert_eq!(group_limit(root.path(), &group), None);
        fs::write(inner.join("memory.max"), "max\n").unwrap();
        assert_eq!(group_limit(root.path(), &group), None);
        fs::write(inner.join("../memory.max"), "1000\n").unwrap();
        assert_eq!(group_limit(root.path(), &group), Some(1000));
        fs::write(inner.join("memory.max"), "500\n").unwrap();
        assert_eq!(group_limit(root.path(), &group), Some(500));
    }
}
