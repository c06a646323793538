//! The presets: groups of tunables with a name that a configuration can use.

/// A preset is a handful of tunables that belong together.
pub(super) const PRESETS: &[(&str, &[(&str, &str)])] = &[
    ("default", &[]),
    // Everything is cached, however busy the cache is.
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
    // The journal of an OSD writes in streams and waits for each; its disk must never wait for the cache to be full.
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
    // The disk may sleep: dirty data is collected for an hour, and idleness is no reason to wake it.
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
