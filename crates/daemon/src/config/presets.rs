//! The presets: groups of tunables with a name that a configuration can use.
//!
//! Owns the table. Must not know how a tunable is applied.

/// Each preset with its tunables.
pub(super) const PRESETS: &[(&str, &[(&str, &str)])] = &[
    ("default", &[]),
    // Every request is cached, even if the cache is congested.
    (
        "latency",
        &[
            ("sequential_cutoff", "0"),
            ("congested_read_threshold_us", "0"),
            ("congested_write_threshold_us", "0"),
            ("writeback_percent", "40"),
        ],
    ),
    // Sequential streams bypass the cache, because disks are fast at them; dirty data is written back in large pieces.
    (
        "throughput",
        &[
            ("sequential_cutoff", "1048576"),
            ("writeback_percent", "20"),
            ("writeback_batch_sectors", "16384"),
            ("writeback_rate_minimum", "2048"),
        ],
    ),
    // The journal of an OSD writes sequentially and waits for each write. Its disk must never wait because the cache is
    // full.
    (
        "ceph-osd",
        &[
            ("sequential_cutoff", "0"),
            ("congested_read_threshold_us", "0"),
            ("congested_write_threshold_us", "0"),
            ("writeback_percent", "20"),
            ("writeback_rate_minimum", "4096"),
        ],
    ),
    // The disk may sleep. Dirty data is collected for an hour, and writeback does not start because the set is idle.
    (
        "quiet-disk",
        &[
            ("sequential_cutoff", "0"),
            ("writeback_percent", "40"),
            ("writeback_delay", "3600"),
            ("idle_max_writeback_rate", "0"),
        ],
    ),
];
