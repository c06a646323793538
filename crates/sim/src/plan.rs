//! A plan: the complete description of a run, as a file that a person can read and shorten.
//!
//! Owns the types and the form of the file: lines that begin with `#` describe the bug, the rest is JSON. A seed determines
//! a plan (`generate`), and the same plan is always the same run. Details that a plan does not specify (the duration of
//! requests, which unflushed sectors survive, which ready task runs) follow from its `seed`. Must not know how a plan is
//! carried out.

use std::fmt::Write as _;

use io::Rng;
use serde::{Deserialize, Serialize};

use crate::disk::{Retained, Speed};
use crate::landmark::Aim;
use crate::layout::Layout;
use crate::world::Order;

/// The devices that report data as durable that is not.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Lying {
    /// The cache device.
    Cache,
    /// The backing devices.
    Backing,
    /// No device, but the crash log is used whatever happened to the cache device.
    CrashLog,
}

/// The settings with which a boot begins.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Settings {
    /// Cache mode of every device; `None` for the mode in its superblock.
    pub cache_mode: Option<String>,
    /// Limit of the index in memory, in bytes.
    pub node_cache_bytes: u64,
    /// `journal_delay_ms`.
    pub journal_delay_ms: u16,
    /// `writeback_batch_sectors`.
    pub writeback_batch: u32,
    /// `cutoff_writeback` and `cutoff_writeback_sync`.
    pub cutoffs: (u8, u8),
    /// Whether congestion is tracked.
    pub congestion: bool,
    /// `writeback_delay`.
    pub writeback_delay: u32,
    /// `writeback_percent`.
    pub writeback_percent: u8,
    /// `writeback_running`.
    pub writeback_running: bool,
    /// `sequential_cutoff`.
    pub sequential_cutoff: u32,
    /// `admission`. Plans without this field use the kernel's.
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
    /// Settings of bridging.
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

/// Number of a device: 0 is the cache device, then come the backing devices.
pub type DeviceNumber = usize;

/// A fault in which a device fails every request for a while.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Outage {
    /// The device.
    pub device: DeviceNumber,
    /// Number of requests to it before the outage.
    pub after: u64,
    /// Number of requests after which it works again; `None` for never.
    pub requests: Option<u64>,
}

/// A fault in which a device takes requests and does not answer.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Hang {
    /// The device, which is a backing device.
    pub device: DeviceNumber,
    /// Number of requests to it before it hangs.
    pub after: u64,
    /// Whether only flushes hang.
    pub flushes: bool,
    /// Whether it answers again after the other clients have finished; else the process dies while it hangs.
    pub released: bool,
}

/// A fault in which a device loses non-durable data while the process lives.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Loss {
    /// The device.
    pub device: DeviceNumber,
    /// Number of requests to it, or of flushes, before the loss.
    pub after: u64,
    /// The part of the data that it retains.
    pub retained: Retained,
}

/// A fault in which writes of data to a backing device fail.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FailedWrites {
    /// The device, which is a backing device.
    pub device: DeviceNumber,
    /// Number of such writes that succeed before.
    pub after: u32,
    /// Number of such writes that fail.
    pub count: u32,
}

/// A fault in which the cache device returns other data than was written, until the data is written again.
///
/// Only data of clients is damaged whose block has a checksum on the device: nothing else protects data.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct DataDamage {
    /// Number of effects of devices in the boot before it.
    pub after: u64,
    /// One in this many blocks is damaged.
    pub one_in: u64,
}

/// The faults of a boot.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Faults {
    /// One in this many requests to the cache device fails; 0 for none.
    pub cache_one_in: u64,
    /// One in this many requests to backing devices fails; 0 for none.
    pub backing_one_in: u64,
    /// A device fails every request for a while.
    pub outage: Option<Outage>,
    /// First sector and number of sectors of the cache device that cannot be read.
    pub unreadable: Option<(u64, u64)>,
    /// First sector and number of sectors of the first backing device that cannot be read.
    #[serde(default)]
    pub unreadable_backing: Option<(u64, u64)>,
    /// A backing device hangs, and requests to other devices must not wait for it.
    #[serde(default)]
    pub hang: Option<Hang>,
    /// A flush fails, and non-durable data is lost.
    #[serde(default)]
    pub lossy_flush: Option<Loss>,
    /// A device alone loses its power, fails every request from then on, and is back in the next boot.
    #[serde(default)]
    pub pull: Option<Loss>,
    /// Writes of data to a backing device fail.
    #[serde(default)]
    pub failed_writes: Option<FailedWrites>,
    /// Cached data is damaged.
    #[serde(default)]
    pub damage: Option<DataDamage>,
}

/// A request of a client. Positions and lengths are in sectors.
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
    /// A pause of this many nanoseconds.
    Pause {
        ns: u64,
    },
    /// A flush whose client gives it up after this many nanoseconds.
    FlushGivenUp {
        ns: u64,
    },
    /// A pause until a request to the backing device of the volume fails, of at most this many nanoseconds.
    PauseUntilFailure {
        ns: u64,
    },
    /// A pause until another client of the volume reads, and of this many nanoseconds after that.
    PauseUntilRead {
        ns: u64,
    },
}

/// The pause after which a released device is not registered again.
pub const NOT_AGAIN: u64 = u64::MAX;

/// An operator action.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum OperatorAction {
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
    /// Detaches a device, and attaches it again after `ns` nanoseconds.
    Detach {
        /// The device.
        volume: usize,
        /// The pause in ns.
        ns: u64,
    },
    /// Deletes the flash-only volume and makes a new one.
    Recreate,
    /// Releases a device without draining it, and registers it again after `ns` nanoseconds.
    Release {
        /// The device.
        volume: usize,
        /// The pause in ns; [`NOT_AGAIN`] if it is not registered again in this boot.
        ns: u64,
    },
    /// Begins to detach a device, and cancels that after `ns` nanoseconds.
    GiveUpDetach {
        /// The device.
        volume: usize,
        /// Time until the cancellation in ns.
        ns: u64,
    },
    /// Overwrites data that no volume needs, and cancels that after `ns` nanoseconds; 0 for never.
    Wipe {
        /// Time until the cancellation in ns.
        ns: u64,
    },
    /// Scrubs the set, and cancels that after `ns` nanoseconds; 0 for never.
    Scrub {
        /// Time until the cancellation in ns.
        ns: u64,
    },
    /// Waits until a volume has no dirty data, and cancels that after `ns` nanoseconds.
    Drain {
        /// The device.
        volume: usize,
        /// Time until the cancellation in ns.
        ns: u64,
    },
    /// The next flush of a device fails, and the device loses all data that is not durable then. The boot has faults.
    NextFlushLoses {
        /// The device.
        device: DeviceNumber,
    },
    /// The power fails, or the process dies, as the end of the boot says.
    PowerFails,
    /// Registers a device that was absent when the set was opened.
    Attach {
        /// The device.
        volume: usize,
    },
}

/// A substituted cache device: the engine gets the substitute first, and then the right device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Substitute {
    /// The cache device as it was before the boot with this number: a restored copy.
    Copy(usize),
    /// A set with a flash-only volume that ends beyond the largest position of the index.
    LargeVolume,
    /// A set with a leaf that has a key beyond the largest position of the index.
    FarKey,
    /// A set that is full of dirty data, except for as many buckets as its priorities take.
    Full,
}

/// The end of a boot that does not end in order.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Cut {
    /// The power of all devices fails; the cache device retains the first part and each backing device the second.
    Power(Retained, Retained),
    /// Only the cache device loses its power, and the process dies.
    Cache(Retained),
    /// Only the backing devices lose their power, and the process dies.
    Backing(Retained),
    /// The process dies, and the devices stay on.
    Kill,
}

/// One boot: from power on to power off.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct BootPlan {
    /// Speed of the cache device.
    pub cache_speed: Speed,
    /// Speed of the backing devices.
    pub backing_speed: Speed,
    /// The settings at the start of the boot.
    pub settings: Settings,
    /// Whether the backing devices are served without the cache, as far as that loses no data.
    pub alone: bool,
    /// Numbers of the backing devices that are absent.
    pub absent: Vec<usize>,
    /// The faults.
    pub faults: Option<Faults>,
    /// Percentage of the volumes that is read after the start.
    pub read_back_percent: u64,
    /// Requests: the number of the volume, and the request. `depth` clients carry out the requests of a volume.
    pub requests: Vec<(usize, Request)>,
    /// Operator actions, each with the number of requests after which it happens.
    // Saved plans have the former name.
    #[serde(rename = "acts")]
    pub actions: Vec<(u64, OperatorAction)>,
    /// Whether all dirty data is written back before the end.
    pub drain: bool,
    /// Whether the set alone is stopped, as at a signal; otherwise each volume is stopped before the set.
    #[serde(default)]
    pub stops_set_alone: bool,
    /// Number of the device effect before which the power fails, counted from power on.
    pub crash: Option<u64>,
    /// Number of the durable write to the cache device during which the power fails, counted from power on.
    pub crash_in_durable_write: Option<u64>,
    /// The landmark at which the power fails.
    #[serde(default)]
    pub aim: Option<Aim>,
    /// How the boot ends if it does not end in order.
    pub cut: Cut,
    /// Whether failed devices lose their power as `cut` says. In plans without this field the process dies.
    #[serde(default)]
    pub cut_with_faults: bool,
    /// Number of the effect of the next boot before which requests in flight of the dead process take effect.
    #[serde(default)]
    pub late: Option<u64>,
    /// Number of the effect of this boot whose state all devices return to after the boot.
    #[serde(default)]
    pub older: Option<u64>,
    /// A substitute that the engine gets before the boot.
    #[serde(default)]
    pub substitute: Option<Substitute>,
    /// Time for which the machine is off after the boot, in seconds.
    pub off_seconds: u64,
}

impl BootPlan {
    /// Whether a device loses data in a flush that fails, while the process lives.
    pub fn loses_in_flush(&self) -> bool {
        let loses = |a: &OperatorAction| matches!(a, OperatorAction::NextFlushLoses { .. });
        self.faults.as_ref().is_some_and(|f| f.lossy_flush.is_some())
            || self.actions.iter().any(|(_, a)| loses(a))
    }

    /// Whether damaged data is the only fault: then only requests that need damaged data may fail.
    pub fn only_damages(&self) -> bool {
        let only =
            |f: &Faults| f.damage.is_some() && Faults { damage: None, ..f.clone() } == Faults::default();
        self.faults.as_ref().is_some_and(only) && !self.loses_in_flush()
    }
}

/// A whole run.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Plan {
    /// Seed of everything that the plan does not specify.
    pub seed: u64,
    /// The devices.
    pub layout: Layout,
    /// Size of the flash-only volume in sectors; 0 for none.
    pub flash_sectors: u64,
    /// The order in which ready tasks run.
    pub order: Order,
    /// Number of requests in flight for each volume.
    pub depth: u64,
    /// Initial generation of the buckets; 0 for a set that is initialised in the first boot.
    #[serde(default)]
    pub first_gen: u8,
    /// Number of boots before the set gets checksums, if it has them: until then it is written as a kernel writes it.
    #[serde(default)]
    pub kernel_boots: u64,
    /// Whether there is memory that outlives the process, but not the machine.
    #[serde(default)]
    pub crash_log: bool,
    /// Devices that report data as durable that is not. No seed has them; they are for tests of the simulator.
    pub lying: Option<Lying>,
    /// The boots.
    pub boots: Vec<BootPlan>,
}

impl Plan {
    /// The plan as the text of a file, with a description at its head.
    ///
    /// # Panics
    /// Never: every value of a plan can be serialized.
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

    /// Parses the text of a file.
    ///
    /// # Errors
    /// If the text is no plan; the message has the place and what was expected there.
    pub fn from_text(text: &str) -> serde_json::Result<Plan> {
        let body: String =
            text.lines().map(|l| if l.starts_with('#') { "\n".into() } else { format!("{l}\n") }).collect();
        serde_json::from_str(&body)
    }

    /// A plan like this one with another seed and other moments of crashes. Crashes do not come later than in this one.
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

    /// The length of the plan: the number of boots, requests and actions.
    pub fn len(&self) -> usize {
        self.boots.iter().map(|b| 1 + b.requests.len() + b.actions.len()).sum()
    }

    /// Whether the plan has no boots.
    pub fn is_empty(&self) -> bool {
        self.boots.is_empty()
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
            assert_eq!(Plan::from_text(&text).unwrap(), plan, "seed {seed}");
        }
        assert!(Plan::from_text("# nothing\n{").is_err());
    }
}
