//! The families of checksums and scrubs, of sets whose data has checksums.
//!
//! Owns this part of the table of families. Must not know when data is verified.

use engine::figures::ChecksumState;

use crate::Figures;
use crate::family::{Family, SET, counter, gauge};
use crate::text::Text;

/// Calls `see` for each set with checksums.
fn sets(f: &Figures, mut see: impl FnMut(&str, &ChecksumState)) {
    for s in &f.sets {
        if let Some(state) = &s.checksums {
            see(&s.status.set_uuid.to_string(), state);
        }
    }
}

fn count(f: &Figures, text: &mut Text, value: impl Fn(&ChecksumState) -> u64) {
    sets(f, |set, state| text.count(&[("set", set)], value(state)));
}

fn value(f: &Figures, text: &mut Text, value: impl Fn(&ChecksumState) -> f64) {
    sets(f, |set, state| text.value(&[("set", set)], value(state)));
}

pub(crate) static CHECKSUM_FAMILIES: &[Family] = &[
    counter(
        "ubcache_checksum_blocks_total",
        &["set", "result"],
        "Blocks of cached data that were read, by result: verified, unverified (no known checksum), corrected (matched \
         when it was read a second time) or damaged.",
        |f, t| {
            sets(f, |set, s| {
                let c = &s.counters;
                for (result, blocks) in [
                    ("verified", c.verified_blocks),
                    ("unverified", c.unverified_blocks),
                    ("corrected", c.corrected_blocks),
                    ("damaged", c.damaged_blocks),
                ] {
                    t.count(&[("set", set), ("result", result)], blocks);
                }
            });
        },
    ),
    gauge(
        "ubcache_checksum_unverified_blocks",
        SET,
        "Blocks of live data without a known checksum, in buckets whose footer was read or written since the start.",
        |f, t| value(f, t, |s| s.coverage.unverified_blocks as f64),
    ),
    gauge(
        "ubcache_checksum_unread_blocks",
        SET,
        "Blocks of live data in buckets whose footer was neither read nor written since the start.",
        |f, t| value(f, t, |s| s.coverage.unread_blocks as f64),
    ),
    gauge(
        "ubcache_checksum_damaged_dirty_bytes",
        SET,
        "Dirty data that is damaged and that no other device has.",
        |f, t| value(f, t, |s| s.damaged_dirty.bytes() as f64),
    ),
    counter(
        "ubcache_checksum_learnt_blocks_total",
        SET,
        "Blocks that got a checksum from a scrub.",
        |f, t| count(f, t, |s| s.counters.learnt_blocks),
    ),
    counter(
        "ubcache_checksum_footers_total",
        &["set", "op"],
        "Footers of buckets that were written, read, or replaced by zeros before their bucket was overwritten.",
        |f, t| {
            sets(f, |set, s| {
                let c = &s.counters;
                for (op, footers) in
                    [("write", c.footers_written), ("read", c.footers_read), ("erase", c.footers_erased)]
                {
                    t.count(&[("set", set), ("op", op)], footers);
                }
            });
        },
    ),
    gauge("ubcache_scrub_running", SET, "1 while a scrub is under way.", |f, t| {
        value(f, t, |s| f64::from(u8::from(s.scrub.running)));
    }),
    gauge(
        "ubcache_scrub_completed_timestamp_seconds",
        SET,
        "Unix time at which the last complete scrub ended; 0 if there was none.",
        |f, t| value(f, t, |s| s.scrub.completed_unix_seconds.unwrap_or(0) as f64),
    ),
];
