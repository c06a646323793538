//! The files of the kernel's bcache in sysfs, and its answers to writes there.
//!
//! `crates/sysfs-view/tests/data` has a listing of a real kernel, which the sysfs view is compared with. Here a kernel
//! confirms that listing; `UBCACHE_VM_RECORD=1` replaces it.

use std::path::{Path, PathBuf};

use ubcache_vm::*;

const MIB: u64 = 1 << 20;

/// Everything below the directories of bcache, one a line: kind, permissions, path, target or contents in hex.
const LISTING: &str = r#"
cd /sys
show() {
    for f in "$1"/*; do
        if [ -L "$f" ]; then echo "l 777 $f $(readlink "$f" | xxd -p | tr -d '\n')"
        elif [ -d "$f" ]; then echo "d 755 $f"; show "$f"
        elif [ -f "$f" ]; then
            mode=$(stat -c %a "$f"); text=
            case $mode in 4*|6*) text=$(xxd -p "$f" | tr -d '\n') ;; esac
            echo "f $mode $f $text"
        fi
    done
}
show fs/bcache
for d in block/*/bcache; do show "$d"; done
"#;

/// What is written, and where: values at the ends of ranges, beyond them, and nonsense.
const NUMBERS: &[&str] = &["0", "1", "7", "40", "100", "70000", "4294967295", "4294967296", "2147483648"];
const WORDS: &[&str] = &["-1", "abc", "4M", "0x10", " 5 ", "18446744073709551616", "", "5 6", "+5"];
const DEVICE_NUMBERS: &[&str] = &[
    "sequential_cutoff",
    "writeback_running",
    "writeback_delay",
    "writeback_percent",
    "writeback_rate",
    "writeback_rate_update_seconds",
    "writeback_rate_i_term_inverse",
    "writeback_rate_p_term_inverse",
    "writeback_rate_fp_term_low",
    "writeback_rate_fp_term_mid",
    "writeback_rate_fp_term_high",
    "writeback_rate_minimum",
    "writeback_consider_fragment",
    "writeback_metadata",
    "io_error_limit",
];
const SET_NUMBERS: &[&str] = &[
    "journal_delay_ms",
    "io_error_limit",
    "io_error_halflife",
    "congested_read_threshold_us",
    "congested_write_threshold_us",
    "internal/btree_shrinker_disabled",
    "internal/copy_gc_enabled",
    "internal/idle_max_writeback_rate",
    "internal/gc_after_writeback",
];
const CHOICES: &[(&str, &[&str])] = &[
    ("DEV/cache_mode", &["writearound", "WRITEBACK", "nonsense", "writeback ", "", "writeback"]),
    ("DEV/readahead_cache_policy", &["meta-only", "some", "all"]),
    ("DEV/stop_when_cache_set_failed", &["always", "never", "auto"]),
    ("DEV/label", &["a label", "12345678901234567890123456789012", "123456789012345678901234567890123", ""]),
    ("SET/errors", &["panic", "ignore", "unregister"]),
    ("CACHE/cache_replacement_policy", &["fifo", "none", "lru"]),
    ("CACHE/discard", &["1", "0", "x"]),
    ("DEV/attach", &["nonsense", "00000000-0000-0000-0000-000000000001"]),
    ("DEV/running", &["0", "1", "x"]),
    ("DEV/state", &["clean"]),
    ("DEV/dirty_data", &["0"]),
    ("DEV/clear_stats", &["1"]),
    ("SET/clear_stats", &["1"]),
    ("SET/cache_available_percent", &["1"]),
    ("SET/flash_vol_create", &["nonsense", "1Q"]),
    ("SET/internal/trigger_gc", &["1"]),
    ("CACHE/clear_stats", &["1"]),
    ("GLOBAL/register", &["/dev/nonsense", ""]),
    ("GLOBAL/register_quiet", &["/dev/nonsense"]),
];

/// Writes one value and says what came of it: `path|value|error|value afterwards`. Without a process of its own, for
/// there are hundreds.
const PROBE: &str = r#"
SET=$(echo /sys/fs/bcache/*-*); DEV=/sys/block/bcache0/bcache; CACHE=$SET/cache0; GLOBAL=/sys/fs/bcache
probe() {
    eval "f=\$${1%%/*}/${1#*/}"
    : >/run/error
    { echo "$2" >"$f"; } 2>/run/error
    e=; after=
    IFS= read -r e </run/error
    { IFS= read -r after <"$f"; } 2>/dev/null
    echo "$1|$2|${e##*: }|$after"
}
"#;

/// What is written where.
fn probes() -> Vec<(String, &'static str)> {
    let mut probes = Vec::new();
    for (owner, names) in [("DEV", DEVICE_NUMBERS), ("SET", SET_NUMBERS)] {
        for name in names {
            for value in NUMBERS.iter().chain(WORDS) {
                probes.push((format!("{owner}/{name}"), *value));
            }
        }
    }
    for (path, values) in CHOICES {
        probes.extend(values.iter().map(|value| ((*path).to_owned(), *value)));
    }
    probes
}

fn recorded(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../crates/sysfs-view/tests/data").join(name)
}

/// Names, without what differs from one machine to the next: UUIDs and what a device is called.
fn names(listing: &str) -> Vec<String> {
    let mut names: Vec<String> = listing
        .lines()
        .map(|line| line.split(' ').take(3).collect::<Vec<_>>().join(" "))
        .filter(|line| line.len() > 2)
        .collect();
    names.sort();
    names
}

/// Answers without the values that depend on how far writeback has come.
fn comparable(answers: &str) -> Vec<&str> {
    let moving = ["DEV/state|", "DEV/dirty_data|"];
    answers
        .lines()
        .map(|line| match moving.iter().any(|m| line.starts_with(m)) {
            true => line.rsplit_once('|').map_or(line, |(asked, _)| asked),
            false => line,
        })
        .collect()
}

#[test]
fn the_listing_is_what_a_kernel_shows() {
    if skipped("the_listing_is_what_a_kernel_shows") {
        return;
    }
    let dir = Dir::new();
    let (cache, backing) = (dir.disk("cache", 64 * MIB), dir.disk("backing", 128 * MIB));
    let mut kernel = Kernel::boot("sysfs", &[&cache, &backing]);
    kernel.make("-C /dev/disk/cache -B /dev/disk/backing -b 64k --writeback");
    kernel.register(&[&cache, &backing]);
    kernel.create_volume(1, "8M");
    kernel.set(&backing, "label", "a label");
    kernel
        .vm
        .sh("dd if=/dev/zero of=/dev/bcache0 bs=64k count=64 oflag=direct &&
             dd if=/dev/bcache0 of=/dev/null bs=4k count=512 iflag=direct skip=512 &&
             dd if=/dev/zero of=/dev/bcache1 bs=64k count=16 oflag=direct")
        .ok();
    // Figures of the last minutes show what was counted up to the last tick, every 14 seconds.
    kernel.vm.wait_for("a tick", "grep -qv '^0$' /sys/block/bcache0/bcache/stats_hour/cache_misses");
    let set = kernel.set_uuid();
    let listing = kernel.vm.sh(LISTING).ok().out.replace(&set, "SET");
    let mut answers = String::new();
    for some in probes().chunks(50) {
        let lines: Vec<String> =
            some.iter().map(|(path, value)| format!("probe '{path}' '{value}'\n")).collect();
        answers.push_str(&kernel.vm.sh(&format!("{PROBE}{}", lines.concat())).ok().out);
    }
    let answers = answers.replace(&set, "SET");
    kernel.stop_set();
    if std::env::var_os("UBCACHE_VM_RECORD").is_some() {
        std::fs::create_dir_all(recorded("")).expect("a directory");
        std::fs::write(recorded("listing.txt"), &listing).expect("a file");
        std::fs::write(recorded("probes.txt"), &answers).expect("a file");
        return;
    }
    let read = |name: &str| std::fs::read_to_string(recorded(name)).expect(name);
    assert_eq!(names(&listing), names(&read("listing.txt")));
    assert_eq!(comparable(&answers), comparable(&read("probes.txt")));
}
