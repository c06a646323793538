//! The figures of the host and of the process, and their families.
//!
//! Owns what is not a figure of an engine: registered devices that are not served, and the process. The names of the
//! `process_` families are those of Prometheus' client libraries, so that its dashboards of processes show ubcache, too. Must
//! not know where the numbers come from.

use std::collections::{BTreeMap, BTreeSet};

use crate::family::{Family, counter, gauge};

/// Figures of the host and of the process.
#[derive(Clone, Default, Debug)]
pub struct HostFigures {
    /// Version of the program.
    pub version: &'static str,
    /// Number of the registered devices in each state; the states are a fixed list.
    pub devices: BTreeMap<&'static str, u64>,
    /// Number of the devices that wait, by reason; the reasons are a fixed list.
    pub waiting: BTreeMap<&'static str, u64>,
    /// UUIDs of sets that are registered and have no thread that serves them, because of a failure.
    pub failed_sets: BTreeSet<String>,
    /// Number of problems that `status` lists, by kind; the kinds are a fixed list.
    pub problems: BTreeMap<&'static str, u64>,
    /// Whether the state can be written: 0 while changes are refused or could not be stored.
    pub state_writable: bool,
    /// The process.
    pub process: ProcessFigures,
}

/// Figures of the process.
#[derive(Clone, Copy, Default, Debug)]
pub struct ProcessFigures {
    /// Time that the process has used of all processors, in seconds.
    pub cpu_seconds: f64,
    /// Resident memory.
    pub resident_bytes: u64,
    /// Open file descriptors.
    pub open_files: u64,
    /// Limit of the open file descriptors.
    pub most_open_files: u64,
    /// Start of the process, in seconds since 1970.
    pub start_seconds: f64,
}

pub(crate) static HOST_FAMILIES: &[Family] = &[
    gauge("ubcache_volumes_not_exported", &[], "Volumes that clients cannot reach as configured.", |f, t| {
        if f.host.is_some() {
            t.count(&[], f.not_exported.len() as u64);
        }
    }),
    gauge("ubcache_devices", &["state"], "Registered devices, by state.", |f, t| {
        for (state, count) in f.host.iter().flat_map(|h| &h.devices) {
            t.count(&[("state", state)], *count);
        }
    }),
    gauge(
        "ubcache_devices_waiting",
        &["reason"],
        "Registered devices that wait to be served, by reason.",
        |f, t| {
            for (reason, count) in f.host.iter().flat_map(|h| &h.waiting) {
                t.count(&[("reason", reason)], *count);
            }
        },
    ),
    gauge("ubcache_problems", &["kind"], "Problems that `ubcache status` lists, by kind.", |f, t| {
        for (kind, count) in f.host.iter().flat_map(|h| &h.problems) {
            t.count(&[("kind", kind)], *count);
        }
    }),
    gauge(
        "ubcache_state_writable",
        &[],
        "Whether the state directory can be written: 0 while commands are refused or changes are not stored.",
        |f, t| {
            if let Some(host) = &f.host {
                t.count(&[], u64::from(host.state_writable));
            }
        },
    ),
    gauge("ubcache_build_info", &["version"], "Version of the program; always 1.", |f, t| {
        if let Some(host) = &f.host {
            t.count(&[("version", host.version)], 1);
        }
    }),
    counter("process_cpu_seconds_total", &[], "Time that the process has used of all processors.", |f, t| {
        if let Some(host) = &f.host {
            t.value(&[], host.process.cpu_seconds);
        }
    }),
    gauge("process_resident_memory_bytes", &[], "Resident memory of the process.", |f, t| {
        if let Some(host) = &f.host {
            t.count(&[], host.process.resident_bytes);
        }
    }),
    gauge("process_open_fds", &[], "Open file descriptors of the process.", |f, t| {
        if let Some(host) = &f.host {
            t.count(&[], host.process.open_files);
        }
    }),
    gauge("process_max_fds", &[], "Limit of the open file descriptors of the process.", |f, t| {
        if let Some(host) = &f.host {
            t.count(&[], host.process.most_open_files);
        }
    }),
    gauge("process_start_time_seconds", &[], "Start of the process, in seconds since 1970.", |f, t| {
        if let Some(host) = &f.host {
            t.value(&[], host.process.start_seconds);
        }
    }),
];
