//! A plan: the complete description of a run, as a file that a person can read and shorten.
//!
//! Owns the types and their form on disk: lines that begin with `#` describe the bug, the rest is JSON. A seed stands for
//! a plan (`generate`); the same plan is always the same run. What a plan does not specify (the duration of requests,
//! which unflushed sectors survive, which ready task runs) follows from its `seed`.

use std::fmt::Write as _;

use io::{Nanos, Rng};
use serde::{Deserialize, Serialize};

use crate::disk::{Retained, Speed};
use crate::landmark::Aim;
use crate::layout::Layout;
use crate::world::Order;

/// Which devices report data as durable that is not.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Lying {
    /// The cache device.
    Cache,
    /// The backing devices.
    Backing,
    /// None; but memory that outlives the process is believed whatever became of the cache device.
    CrashLog,
}

/// Settings that a boot begins with.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Settings {
    /// Cache mode of every device; none to leave what its superblock says.
    pub cache_mode: Option<String>,
    /// Bytes of index in memory.
    pub node_cache_bytes: u64,
    /// `journal_delay_ms`.
    pub journal_delay_ms: u16,
    /// `writeback_batch_sectors`.
    pub writeback_batch: u32,
    /// `cutoff_writeback` and `cutoff_writeback_sync`.
    pub cutoffs: (u8, u8),
    /// Congestion is tracked.
    pub congestion: bool,
    /// `writeback_delay`.
    pub writeback_delay: u32,
    /// `writeback_percent`.
    pub writeback_percent: u8,
    /// `writeback_running`.
    pub writeback_running: bool,
    /// `sequential_cutoff`.
    pub sequential_cutoff: u32,
    /// `admission`. Plans from before there was a choice have the kernel's.
    #[serde(default = "kernel")]
    pub admission: String,
    /// `overwrite_in_place`.
    #[serde(default = "off")]
    pub overwrite_in_place: String,
    /// `replacement`.
    #[serde(default = "kernel")]
    pub replacement: String,
    /// `writeback_controller`.
    #[serde(default = "kernel")]
    pub writeback_controller: String,
    /// Gaps in runs of dirty data.
    #[serde(flatten)]
    pub bridge: BridgeSettings,
}

/// Settings of writeback across gaps in runs of dirty data.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct BridgeSettings {
    /// `writeback_bridge`.
    #[serde(default = "off")]
    pub writeback_bridge: String,
    /// `writeback_bridge_limit`.
    #[serde(default)]
    pub writeback_bridge_limit: u32,
}

fn kernel() -> String {
    "kernel".into()
}

fn off() -> String {
    "off".into()
}

/// A device: 0 is the cache, then the backing devices.
pub type DeviceNumber = usize;

/// A device fails every request for a while.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Outage {
    /// Which one.
    pub device: DeviceNumber,
    /// After so many requests to it.
    pub after: u64,
    /// It is back after so many more; never if there is no number.
    pub requests: Option<u64>,
}

/// A device takes requests and does not answer.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Hang {
    /// Which one: a backing device.
    pub device: DeviceNumber,
    /// After so many requests to it.
    pub after: u64,
    /// It answers everything but flushes.
    pub flushes: bool,
    /// It answers again once the others have done their work; else the process dies while it hangs.
    pub released: bool,
}

/// A device loses data that is not durable while the process lives.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Loss {
    /// Which one.
    pub device: DeviceNumber,
    /// After so many requests to it, or so many flushes.
    pub after: u64,
    /// The part that it retains.
    pub retained: Retained,
}

/// The failures in a boot.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Faults {
    /// One in so many requests to the cache device fails; 0 for none.
    pub cache_one_in: u64,
    /// One in so many requests to backing devices fails; 0 for none.
    pub backing_one_in: u64,
    /// A device goes away, perhaps to come back.
    pub outage: Option<Outage>,
    /// First sector and number of sectors of the cache device that cannot be read.
    pub unreadable: Option<(u64, u64)>,
    /// First sector and number of sectors of the first backing device that cannot be read.
    #[serde(default)]
    pub unreadable_backing: Option<(u64, u64)>,
    /// A backing device hangs, and the others must not wait for it.
    #[serde(default)]
    pub hang: Option<Hang>,
    /// A flush fails, and data that is not durable is lost.
    #[serde(default)]
    pub lossy_flush: Option<Loss>,
    /// A device alone loses its power, fails every request from then on, and is back in the next boot.
    #[serde(default)]
    pub pull: Option<Loss>,
}

/// A client's request. Positions and lengths in sectors.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum Request {
    Read {
        start: u64,
        sectors: u64,
    },
    Write {
        start: u64,
        sectors: u64,
        fua: bool,
    },
    Flush,
    Discard {
        start: u64,
        sectors: u64,
    },
    Zeroes {
        start: u64,
        sectors: u64,
        fua: bool,
        may_unmap: bool,
    },
    /// Nothing, for so many nanoseconds.
    Pause {
        ns: u64,
    },
}

/// An act of the operator.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Act {
    /// Sets a tunable of a cached device.
    Tune {
        /// The device.
        volume: usize,
        /// Its tunable.
        name: String,
        /// The value.
        value: String,
    },
    /// Sets a tunable of the set.
    TuneSet {
        /// The tunable.
        name: String,
        /// The value.
        value: String,
    },
    /// Walks the index.
    Gc,
    /// Detaches a device, and attaches it again after so many nanoseconds.
    Detach {
        /// The device.
        volume: usize,
        /// The pause.
        ns: u64,
    },
    /// Deletes the flash-only volume and makes a new one.
    Recreate,
    /// Lets a device go as it is, and registers it again after so many nanoseconds.
    Release {
        /// The device.
        volume: usize,
        /// The pause.
        ns: u64,
    },
    /// Begins to detach a device, and gives that up after so many nanoseconds.
    GiveUpDetach {
        /// The device.
        volume: usize,
        /// How long it takes.
        ns: u64,
    },
    /// Overwrites data that no volume needs, and cancels that after so many nanoseconds; 0 for never.
    Wipe {
        /// How long it takes at most.
        ns: u64,
    },
    /// Waits until a volume has no dirty data, and gives that up after so many nanoseconds.
    Drain {
        /// The device.
        volume: usize,
        /// How long it takes at most.
        ns: u64,
    },
    /// Registers a device that was absent when the set was opened.
    Attach {
        /// The device.
        volume: usize,
    },
}

/// A substituted cache device: the engine gets it first, and then the right one.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Substitute {
    /// The device as it was before an earlier boot: a restored copy.
    Copy(usize),
    /// A flash-only volume ends beyond the largest position of the index.
    LargeVolume,
    /// A leaf has a key beyond the largest position of the index.
    FarKey,
    /// The set is full of dirty data, but for as many buckets as its priorities take.
    Full,
}

/// How a boot ends that does not end in order.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Cut {
    /// The power of all devices fails: this survives on the cache device, and this on backing devices.
    Power(Retained, Retained),
    /// Only the cache device loses its power, and the process dies.
    Cache(Retained),
    /// Only the backing devices lose their power, and the process dies.
    Backing(Retained),
    /// The process dies, the devices stay on.
    Kill,
}

/// One boot: from power on to power off.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Boot {
    /// Speed of the cache device.
    pub cache_speed: Speed,
    /// Speed of the backing devices.
    pub backing_speed: Speed,
    /// Settings.
    pub settings: Settings,
    /// The backing devices are served without the cache, where that loses nothing.
    pub alone: bool,
    /// Backing devices that are not there.
    pub absent: Vec<usize>,
    /// The failures.
    pub faults: Option<Faults>,
    /// Percent of the volumes that is read after the start.
    pub read_back_percent: u64,
    /// Requests: the number of the volume, and what it is asked. Each volume's are carried out by `depth` clients.
    pub requests: Vec<(usize, Request)>,
    /// What the operator does, and after how many requests.
    pub acts: Vec<(u64, Act)>,
    /// Everything is written back before the end.
    pub drain: bool,
    /// The stop is that of the set alone, as at a signal; otherwise each volume is stopped before it.
    #[serde(default)]
    pub stops_set_alone: bool,
    /// The power fails before this effect of a device, counted from power on.
    pub crash: Option<u64>,
    /// The power fails while this durable write to the cache device is under way, counted from power on.
    pub crash_in_durable_write: Option<u64>,
    /// The power fails at a landmark.
    #[serde(default)]
    pub aim: Option<Aim>,
    /// How it ends if it does not end in order.
    pub cut: Cut,
    /// Devices that failed lose their power, too, if `cut` says so. Plans from before there was a choice let the process
    /// die.
    #[serde(default)]
    pub cut_with_faults: bool,
    /// What the process had under way when it died takes effect by this effect of the next boot.
    #[serde(default)]
    pub late: Option<u64>,
    /// All devices come back as they were at this effect of the boot.
    #[serde(default)]
    pub older: Option<u64>,
    /// The engine is given something else before.
    #[serde(default)]
    pub substitute: Option<Substitute>,
    /// The machine is off for so long afterwards.
    pub off_seconds: u64,
}

/// A whole run.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Plan {
    /// For everything that is not spelled out.
    pub seed: u64,
    /// Devices.
    pub layout: Layout,
    /// Size of the flash-only volume; 0 for none.
    pub flash_sectors: u64,
    /// Order of tasks.
    pub order: Order,
    /// Requests under way at once, for each volume.
    pub depth: u64,
    /// Generation of the buckets to begin with; 0 for a set that is initialised in the first boot.
    #[serde(default)]
    pub first_gen: u8,
    /// There is memory that outlives the process, but not the machine.
    #[serde(default)]
    pub crash_log: bool,
    /// Devices report data as durable that is not: never drawn, for tests of the simulator.
    pub lying: Option<Lying>,
    /// The boots.
    pub boots: Vec<Boot>,
}

impl Plan {
    /// The plan as a file, with a description at its head.
    ///
    /// # Panics
    /// Never: every value of a plan can be written.
    pub fn to_text(&self, description: &str) -> String {
        let mut text = String::new();
        for line in description.lines() {
            let _ = writeln!(text, "{}", format!("# {line}").trim_end());
        }
        let mut whole = self.clone();
        let boots = std::mem::take(&mut whole.boots);
        let json =
            |v: serde_json::Result<String>| v.unwrap_or_else(|e| panic!("a plan that is no JSON: {e}"));
        let head = json(serde_json::to_string(&whole));
        let Some(head) = head.strip_suffix("[]}") else { panic!("the boots come last: {head}") };
        let _ = writeln!(text, "{head}[");
        for (i, b) in boots.iter().enumerate() {
            let mut b = b.clone();
            let requests = std::mem::take(&mut b.requests);
            let requests: Vec<String> = requests.iter().map(|r| json(serde_json::to_string(r))).collect();
            let whole = json(serde_json::to_string(&b));
            let comma = if i + 1 < boots.len() { "," } else { "" };
            let spelled = format!("\"requests\":[\n  {}]", requests.join(",\n  "));
            let _ = writeln!(text, "{}{comma}", whole.replacen("\"requests\":[]", &spelled, 1));
        }
        text + "]}\n"
    }

    /// Reads a plan from a file's text.
    ///
    /// # Errors
    /// If it is none: where, and what was expected.
    pub fn from_text(text: &str) -> Result<Plan, String> {
        let body: String =
            text.lines().map(|l| if l.starts_with('#') { "\n".into() } else { format!("{l}\n") }).collect();
        serde_json::from_str(&body).map_err(|e| e.to_string())
    }

    /// A plan like this one: the seed and the moments of crashes are others. Crashes come earlier, if anything.
    pub fn like(&self, rng: &mut Rng) -> Plan {
        let mut plan = Plan { seed: rng.below(1 << 32), ..self.clone() };
        for b in &mut plan.boots {
            if let Some(at) = &mut b.crash {
                *at = 1 + rng.below(*at + 2);
            }
            if let Some(n) = &mut b.crash_in_durable_write {
                *n = 1 + rng.below(*n + 1);
            }
            if let Some(aim) = &mut b.aim {
                aim.nth = 1 + rng.below(aim.nth + 1);
            }
        }
        plan
    }

    /// Requests and acts of all boots: how long the plan is.
    pub fn len(&self) -> usize {
        self.boots.iter().map(|b| 1 + b.requests.len() + b.acts.len()).sum()
    }

    /// Whether nothing happens at all.
    pub fn is_empty(&self) -> bool {
        self.boots.is_empty()
    }
}

/// A span as a number of nanoseconds.
pub mod as_ns {
    use super::Nanos;
    use serde::{Deserialize, Deserializer, Serializer};

    /// Writes it.
    ///
    /// # Errors
    /// Those of the serializer.
    pub fn serialize<S: Serializer>(v: &Nanos, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_u64(v.0)
    }

    /// Reads it.
    ///
    /// # Errors
    /// Those of the deserializer.
    pub fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Nanos, D::Error> {
        u64::deserialize(d).map(Nanos)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_survives_its_file() {
        for seed in 0..300 {
            let plan = Plan::from_seed(seed);
            let text = plan.to_text("a bug\n\nof two paragraphs");
            assert!(text.starts_with("# a bug\n#\n# of two"), "{text}");
            assert_eq!(Plan::from_text(&text).as_ref(), Ok(&plan), "seed {seed}");
        }
        assert!(Plan::from_text("# nothing\n{").is_err());
    }
}
