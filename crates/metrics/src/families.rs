//! The table of metric families.
//!
//! Owns the table of the families of sets and volumes, and the order of all families: the name of each, its labels, its meaning,
//! and the source of its samples. The families of checksums and of the host have tables of their own. Dashboards and alert rules
//! use the names; tests compare them, and the table of the guide. Names follow Prometheus' conventions: base units, `_total` for counters. Must not know their syntax.

use engine::figures::{SetFigures, VolumeFigures};
use engine::policy::bypass::BypassReason;
use engine::stats::{DeviceFigures, OpKind, Outcome, View, ViewValues};
use format::SECTOR_BYTES;

use crate::Figures;
use crate::checksums::CHECKSUM_FAMILIES;
use crate::family::{
    DEVICE, DEVICE_OP, Family, FamilyInfo, OUTCOME, REASON, SET, VOLUME, counter, gauge, histogram,
};
use crate::host::HOST_FAMILIES;
use crate::states::{BACKING_STATES, RATE_REASONS, state, states};
use crate::text::{Format, Kind, REQUEST_BOUNDS, Text, WORK_BOUNDS};

/// Every family, in the order of the text.
fn all() -> impl Iterator<Item = &'static Family> {
    FAMILIES.iter().chain(CHECKSUM_FAMILIES).chain(HOST_FAMILIES)
}

/// Renders the figures as text.
pub fn render(figures: &Figures, format: Format) -> String {
    let mut text = Text::new(format);
    for family in all() {
        text.family(family.name, family.kind, family.help);
        (family.samples)(figures, &mut text);
    }
    text.end()
}

/// Every family, in the order of the text.
pub fn families() -> impl Iterator<Item = FamilyInfo> {
    all().map(|f| FamilyInfo { name: f.name, kind: f.kind.name(), labels: f.labels, help: f.help })
}

/// The names of all series.
pub fn names() -> Vec<String> {
    let mut names = Vec::new();
    for family in all() {
        match family.kind {
            Kind::Histogram => {
                names.extend(["_bucket", "_sum", "_count"].map(|end| format!("{}{end}", family.name)))
            }
            Kind::Counter | Kind::Gauge => names.push(family.name.to_owned()),
        }
    }
    names
}

/// Calls `see` for each volume of the figures, with its labels.
fn volumes(f: &Figures, mut see: impl FnMut(&[(&str, &str)], &VolumeFigures)) {
    for (set, v) in f.volumes() {
        see(&[("set", &set), ("volume", &v.name)], v);
    }
}

/// Writes a sample with a number for each volume.
fn of_volumes(f: &Figures, text: &mut Text, value: impl Fn(&VolumeFigures) -> f64) {
    volumes(f, |labels, v| text.value(labels, value(v)));
}

/// Calls `see` for each set of the figures, with its UUID.
fn sets(f: &Figures, mut see: impl FnMut(&str, &SetFigures)) {
    for s in &f.sets {
        see(&s.status.set_uuid.to_string(), s);
    }
}

fn of_sets(f: &Figures, text: &mut Text, value: impl Fn(&SetFigures) -> f64) {
    sets(f, |set, s| text.value(&[("set", set)], value(s)));
}

fn count_sets(f: &Figures, text: &mut Text, value: impl Fn(&SetFigures) -> u64) {
    sets(f, |set, s| text.count(&[("set", set)], value(s)));
}

/// Writes a sample with the hits or misses of each volume since the start.
fn view(f: &Figures, text: &mut Text, value: impl Fn(ViewValues) -> u64) {
    volumes(f, |labels, v| text.count(labels, value(v.cache.view(View::Total))));
}

/// Calls `see` for every operation and outcome that has occurred, for each volume.
fn outcomes(f: &Figures, mut see: impl FnMut(&[(&str, &str)], &VolumeFigures, OpKind, Outcome)) {
    volumes(f, |labels, v| {
        for op in OpKind::ALL {
            for outcome in Outcome::all().filter(|o| v.total.of(op, *o).requests > 0) {
                let own = [("op", op.name()), ("outcome", outcome.name()), ("reason", outcome.reason())];
                see(&[labels, &own].concat(), v, op, outcome);
            }
        }
    });
}

fn reasons(f: &Figures, mut see: impl FnMut(&[(&str, &str)], &VolumeFigures, BypassReason)) {
    volumes(f, |labels, v| {
        for reason in BypassReason::ALL {
            see(&[labels, &[("reason", reason.name())]].concat(), v, reason);
        }
    });
}

/// Calls `see` for every device: the cache device of each set, and each backing device.
fn devices(f: &Figures, mut see: impl FnMut(&[(&str, &str)], &DeviceFigures)) {
    sets(f, |set, s| {
        see(&[("set", set), ("device", &s.status.device), ("role", "cache")], &s.device);
    });
    for (set, v) in f.volumes() {
        if let Some(device) = &v.backing_name {
            see(&[("set", &set), ("device", device), ("role", "backing")], &v.device);
        }
    }
}

static FAMILIES: &[Family] = &[
    // Requests of clients.
    counter("ubcache_requests_total", OUTCOME, "Answered requests of clients, by outcome.", |f, t| {
        outcomes(f, |l, v, op, outcome| t.count(l, v.total.of(op, outcome).requests));
    }),
    counter("ubcache_request_bytes_total", OUTCOME, "Length of the requests that were answered.", |f, t| {
        outcomes(f, |l, v, op, outcome| t.count(l, v.total.of(op, outcome).bytes));
    }),
    histogram("ubcache_request_duration_seconds", OUTCOME, "Duration of requests of clients.", |f, t| {
        outcomes(f, |l, v, op, outcome| t.histogram(l, v.latencies.of(op, outcome), REQUEST_BOUNDS));
    }),
    counter(
        "ubcache_request_errors_total",
        &["set", "volume", "op"],
        "Failed requests of clients.",
        |f, t| {
            volumes(f, |labels, v| {
                for (op, errors) in OpKind::ALL.into_iter().zip(v.errors) {
                    t.count(&[labels, &[("op", op.name())]].concat(), errors);
                }
            });
        },
    ),
    counter(
        "ubcache_bypassed_requests_total",
        REASON,
        "Requests that were not cached, by reason.",
        |f, t| {
            reasons(f, |l, v, reason| t.count(l, bypassed(v, reason).0));
        },
    ),
    counter(
        "ubcache_bypassed_bytes_total",
        REASON,
        "Length of the requests that were not cached, by reasons that occurred.",
        |f, t| {
            reasons(f, |l, v, reason| {
                let (requests, bytes) = bypassed(v, reason);
                if requests > 0 {
                    t.count(l, bytes);
                }
            });
        },
    ),
    counter(
        "ubcache_cache_hits_total",
        VOLUME,
        "Reads, not bypassed, that the cache had completely.",
        |f, t| {
            view(f, t, |v| v.cache_hits);
        },
    ),
    counter(
        "ubcache_cache_misses_total",
        VOLUME,
        "Reads, not bypassed, that the cache did not have completely.",
        |f, t| {
            view(f, t, |v| v.cache_misses);
        },
    ),
    counter(
        "ubcache_cache_bypass_hits_total",
        VOLUME,
        "Bypassed reads that the cache had completely.",
        |f, t| {
            view(f, t, |v| v.cache_bypass_hits);
        },
    ),
    counter(
        "ubcache_cache_bypass_misses_total",
        VOLUME,
        "Bypassed reads that the cache did not have completely.",
        |f, t| {
            view(f, t, |v| v.cache_bypass_misses);
        },
    ),
    counter(
        "ubcache_cache_miss_collisions_total",
        VOLUME,
        "Misses not cached because of a concurrent write.",
        |f, t| {
            view(f, t, |v| v.cache_miss_collisions);
        },
    ),
    // Volumes.
    gauge(
        "ubcache_volume_info",
        &["set", "volume", "label", "uuid", "device"],
        "Label, UUID and device of the volume; always 1.",
        |f, t| {
            volumes(f, |labels, v| {
                let uuid = v.backing_uuid.map(|u| u.to_string()).unwrap_or_default();
                let device = v.backing_name.as_deref().unwrap_or_default();
                let own = [("label", v.tunables.label.as_str()), ("uuid", &uuid), ("device", device)];
                t.count(&[labels, &own].concat(), 1);
            });
        },
    ),
    gauge("ubcache_volume_size_bytes", VOLUME, "Size of the volume.", |f, t| {
        of_volumes(f, t, |v| bytes(v.size.0))
    }),
    gauge(
        "ubcache_volume_exported",
        VOLUME,
        "1 if clients can reach the volume by every export of the configuration, else 0.",
        |f, t| {
            volumes(f, |labels, v| t.count(labels, u64::from(!f.not_exported.contains(&v.name))));
        },
    ),
    gauge(
        "ubcache_volume_state",
        &["set", "volume", "state"],
        "State in the backing device's superblock: 1 for the current one.",
        |f, t| {
            volumes(f, |labels, v| {
                if let Some(state) = v.state {
                    states(t, labels, "state", &BACKING_STATES, state);
                }
            });
        },
    ),
    gauge("ubcache_dirty_bytes", VOLUME, "Data that is in the cache only.", |f, t| {
        of_volumes(f, t, |v| bytes(v.dirty.0))
    }),
    gauge("ubcache_dirty_target_bytes", VOLUME, "Target of the dirty data, by writeback_percent.", |f, t| {
        of_volumes(f, t, |v| bytes(v.dirty_target.0));
    }),
    gauge(
        "ubcache_writeback_rate_bytes_per_second",
        VOLUME,
        "Rate of writeback that the controller allows.",
        |f, t| {
            of_volumes(f, t, |v| v.writeback.rate.rate as f64);
        },
    ),
    gauge(
        "ubcache_writeback_proportional_bytes_per_second",
        VOLUME,
        "Proportional (or fragmentation) term.",
        |f, t| {
            of_volumes(f, t, |v| v.writeback.rate.proportional as f64);
        },
    ),
    gauge("ubcache_writeback_integral_bytes_per_second", VOLUME, "Integral term of the rate.", |f, t| {
        of_volumes(f, t, |v| v.writeback.rate.integral as f64);
    }),
    gauge(
        "ubcache_writeback_change_bytes_per_second",
        VOLUME,
        "Change of the rate by the last update.",
        |f, t| {
            of_volumes(f, t, |v| v.writeback.rate.change as f64);
        },
    ),
    gauge(
        "ubcache_writeback_rate_reason",
        REASON,
        "Reason for the rate of writeback: 1 for the current one, which alone has a series.",
        |f, t| {
            volumes(f, |labels, v| state(t, labels, "reason", &RATE_REASONS, v.writeback.rate_reason));
        },
    ),
    gauge(
        "ubcache_writeback_pace",
        &["set", "volume", "pace"],
        "Deprecated, removed in the next release: ubcache_writeback_rate_reason with another label.",
        |f, t| {
            volumes(f, |labels, v| state(t, labels, "pace", &RATE_REASONS, v.writeback.rate_reason));
        },
    ),
    counter("ubcache_writeback_bytes_total", VOLUME, "Data written back.", |f, t| {
        volumes(f, |labels, v| t.count(labels, v.writeback.written.bytes()));
    }),
    gauge("ubcache_writeback_failures", VOLUME, "Batches of writeback that failed in a row.", |f, t| {
        of_volumes(f, t, |v| f64::from(v.writeback.failures));
    }),
    // Devices.
    histogram(
        "ubcache_device_request_duration_seconds",
        DEVICE_OP,
        "Duration of requests to a device.",
        |f, t| {
            devices(f, |labels, d| {
                for (op, figures) in d.ops() {
                    t.histogram(&[labels, &[("op", op)]].concat(), &figures.latency, REQUEST_BOUNDS);
                }
            });
        },
    ),
    counter(
        "ubcache_device_bytes_total",
        DEVICE_OP,
        "Length of the requests to a device that succeeded.",
        |f, t| {
            devices(f, |labels, d| {
                for (op, figures) in d.ops().into_iter().filter(|(_, figures)| figures.bytes > 0) {
                    t.count(&[labels, &[("op", op)]].concat(), figures.bytes);
                }
            });
        },
    ),
    counter("ubcache_device_request_errors_total", DEVICE_OP, "Requests to a device that failed.", |f, t| {
        devices(f, |labels, d| {
            // An operation that the device was never asked for has no errors.
            let asked = |f: &io::OpFigures| f.errors > 0 || !f.latency.is_empty();
            for (op, figures) in d.ops().into_iter().filter(|(_, figures)| asked(figures)) {
                t.count(&[labels, &[("op", op)]].concat(), figures.errors);
            }
        });
    }),
    gauge(
        "ubcache_device_errors",
        DEVICE,
        "Errors of the device that count towards the limit (io_errors).",
        |f, t| {
            sets(f, |set, s| {
                t.count(&[("set", set), ("device", &s.status.device), ("role", "cache")], s.io_errors);
            });
            for (set, v) in f.volumes() {
                if let Some(device) = &v.backing_name {
                    t.count(&[("set", &set), ("device", device), ("role", "backing")], v.io_errors);
                }
            }
        },
    ),
    gauge(
        "ubcache_device_error_limit",
        DEVICE,
        "Errors after which every request to the device fails (io_error_limit).",
        |f, t| {
            sets(f, |set, s| {
                let limit = u64::from(s.tunables.io_error_limit);
                t.count(&[("set", set), ("device", &s.status.device), ("role", "cache")], limit);
            });
            for (set, v) in f.volumes() {
                if let Some(device) = &v.backing_name {
                    let limit = u64::from(v.tunables.io_error_limit);
                    t.count(&[("set", &set), ("device", device), ("role", "backing")], limit);
                }
            }
        },
    ),
    // Sets.
    gauge(
        "ubcache_set_info",
        &["set", "label", "device", "uuid"],
        "Label and cache device of the set, and the UUID of the device; always 1.",
        |f, t| {
            sets(f, |set, s| {
                let uuid = s.device_uuid.to_string();
                let device = s.status.device.as_str();
                t.count(&[("set", set), ("label", &s.status.label), ("device", device), ("uuid", &uuid)], 1);
            });
        },
    ),
    gauge(
        "ubcache_set_failed",
        SET,
        "1 if the set is disabled by a failure, or could not be started.",
        |f, t| {
            count_sets(f, t, |s| u64::from(s.status.failed.is_some()));
            let served = |id: &str| f.sets.iter().any(|s| s.status.set_uuid.to_string() == id);
            for id in f.host.iter().flat_map(|h| &h.failed_sets).filter(|id| !served(id)) {
                t.count(&[("set", id)], 1);
            }
        },
    ),
    gauge("ubcache_cache_size_bytes", SET, "Size of all buckets.", |f, t| {
        of_sets(f, t, |s| bytes(u64::from(s.status.nbuckets) * s.status.bucket_sectors.0));
    }),
    gauge(
        "ubcache_cached_bytes",
        SET,
        "Live data in the cache, clean and dirty; that of detached devices counts until garbage collection.",
        |f, t| {
            of_sets(f, t, |s| bytes(s.status.cached_sectors.0));
        },
    ),
    gauge(
        "ubcache_cache_in_use_ratio",
        SET,
        "Share of the buckets that cannot be reused at once.",
        |f, t| {
            of_sets(f, t, |s| f64::from(s.status.in_use_percent) / 100.0);
        },
    ),
    gauge("ubcache_buckets", SET, "Buckets of the cache device.", |f, t| {
        of_sets(f, t, |s| f64::from(s.status.nbuckets));
    }),
    gauge(
        "ubcache_buckets_available",
        SET,
        "Buckets that can be reused at once or are ready for use.",
        |f, t| {
            of_sets(f, t, |s| f64::from(s.available_buckets));
        },
    ),
    gauge(
        "ubcache_congested",
        SET,
        "1 while long requests bypass because the cache device is slow.",
        |f, t| {
            of_sets(f, t, |s| f64::from(u8::from(s.congested.is_some())));
        },
    ),
    gauge("ubcache_btree_nodes", SET, "Nodes of the btree.", |f, t| {
        of_sets(f, t, |s| s.status.btree_nodes as f64)
    }),
    gauge("ubcache_index_bytes", SET, "Memory of the index.", |f, t| {
        of_sets(f, t, |s| s.status.index_bytes as f64)
    }),
    counter(
        "ubcache_cache_written_bytes_total",
        &["set", "kind"],
        "Written to the cache device, by kind of data.",
        |f, t| {
            sets(f, |set, s| {
                let other = s.counters.metadata_written.0.saturating_sub(s.counters.btree_written.0);
                let kinds = [
                    ("data", s.counters.written.0),
                    ("btree", s.counters.btree_written.0),
                    ("metadata", other),
                ];
                for (kind, sectors) in kinds {
                    t.count(&[("set", set), ("kind", kind)], sectors.saturating_mul(SECTOR_BYTES));
                }
            });
        },
    ),
    counter(
        "ubcache_cache_read_races_total",
        SET,
        "Reads that found their bucket reused, and were repeated.",
        |f, t| {
            count_sets(f, t, |s| s.counters.cache_read_races);
        },
    ),
    counter(
        "ubcache_writeback_keys_total",
        &["set", "result"],
        "Extents written back, by whether they became clean.",
        |f, t| {
            sets(f, |set, s| {
                t.count(&[("set", set), ("result", "clean")], s.counters.writeback_keys_done);
                t.count(&[("set", set), ("result", "overwritten")], s.counters.writeback_keys_failed);
            });
        },
    ),
    // Journal.
    counter("ubcache_journal_entries_total", SET, "Journal entries written.", |f, t| {
        count_sets(f, t, |s| s.status.journal_written.0);
    }),
    counter("ubcache_journal_bytes_total", SET, "Length of the journal entries written.", |f, t| {
        count_sets(f, t, |s| s.status.journal_written.1);
    }),
    gauge("ubcache_journal_buckets", SET, "Buckets of the journal.", |f, t| {
        of_sets(f, t, |s| s.status.journal_free.1 as f64);
    }),
    gauge("ubcache_journal_buckets_free", SET, "Buckets of the journal that are free.", |f, t| {
        of_sets(f, t, |s| s.status.journal_free.0 as f64);
    }),
    counter(
        "ubcache_journal_reclaims_total",
        SET,
        "Times that the journal had no free bucket and had to release entries.",
        |f, t| {
            count_sets(f, t, |s| s.counters.reclaim);
        },
    ),
    histogram(
        "ubcache_journal_write_duration_seconds",
        SET,
        "Duration of the write of a journal entry, with its flush.",
        |f, t| {
            sets(f, |set, s| t.histogram(&[("set", set)], &s.times.journal_writes, REQUEST_BOUNDS));
        },
    ),
    // Background work.
    histogram(
        "ubcache_gc_duration_seconds",
        SET,
        "Duration of walks of the index by the garbage collector.",
        |f, t| {
            sets(f, |set, s| t.histogram(&[("set", set)], &s.times.work.gc_durations, WORK_BOUNDS));
        },
    ),
    counter("ubcache_overwrites_in_place_total", SET, "Overwrites of dirty data in its place.", |f, t| {
        count_sets(f, t, |s| s.engine.overwrites);
    }),
    counter("ubcache_gc_moved_extents_total", SET, "Extents that the garbage collector moved.", |f, t| {
        count_sets(f, t, |s| s.engine.moved_extents);
    }),
    histogram(
        "ubcache_writeback_batch_duration_seconds",
        SET,
        "Duration of batches of writeback.",
        |f, t| {
            sets(f, |set, s| t.histogram(&[("set", set)], &s.times.work.writeback_batches, WORK_BOUNDS));
        },
    ),
    histogram(
        "ubcache_background_slice_duration_seconds",
        &["set", "work"],
        "Duration of slices of background work on the thread of the set.",
        |f, t| {
            sets(f, |set, s| {
                for (work, slices) in s.times.slices() {
                    t.histogram(&[("set", set), ("work", work.name())], slices, WORK_BOUNDS);
                }
            });
        },
    ),
    gauge(
        "ubcache_background_slice_longest_seconds",
        &["set", "work"],
        "The longest of these slices since the start.",
        |f, t| {
            sets(f, |set, s| {
                for (work, slices) in s.times.slices().filter(|(_, slices)| !slices.is_empty()) {
                    t.value(&[("set", set), ("work", work.name())], slices.max().as_seconds());
                }
            });
        },
    ),
    counter("ubcache_btree_reads_total", SET, "Btree nodes read after the start.", |f, t| {
        count_sets(f, t, |s| s.engine.btree_reads);
    }),
    counter("ubcache_btree_rewrites_total", SET, "Leaves of the btree that were replaced.", |f, t| {
        count_sets(f, t, |s| s.engine.btree_rewrites);
    }),
];

/// Requests and bytes that bypassed the cache for this reason.
///
/// `clear_stats` may reset these counters: a scraper takes a counter that decreases as a restart.
fn bypassed(v: &VolumeFigures, reason: BypassReason) -> (u64, u64) {
    let all = v.total.bypassed(reason);
    match reason {
        BypassReason::NoBucket => {
            let parts = v.total.not_cached;
            (all.requests.saturating_add(parts.requests), all.bytes.saturating_add(parts.bytes))
        }
        _ => (all.requests, all.bytes),
    }
}

fn bytes(sectors: u64) -> f64 {
    sectors.saturating_mul(SECTOR_BYTES) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_keep_to_the_conventions_and_differ() {
        let mut names: Vec<&str> = all().map(|f| f.name).collect();
        for f in all() {
            assert!(f.name.starts_with("ubcache_") || f.name.starts_with("process_"), "{}", f.name);
            assert_eq!(f.name.ends_with("_total"), f.kind == Kind::Counter, "{}", f.name);
            assert!(f.kind != Kind::Histogram || f.name.ends_with("_seconds"), "{}", f.name);
            assert!(f.help.ends_with('.') && !f.help.contains('\n'), "{}", f.name);
        }
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all().count());
    }

    #[test]
    fn without_sets_there_is_text_all_the_same() {
        let text = render(&Figures::default(), Format::OpenMetrics);
        assert_eq!(text.lines().count(), 2 * all().count() + 1);
    }
}
