//! What the operator does.

use io::Rng;

use super::mix::Mix;
use super::one_of;
use crate::plan::Act;

/// What the operator may do.
#[derive(Clone, Copy)]
pub(super) enum Habit {
    Mode,
    Writeback,
    Sequential,
    Gc,
    CopyGc,
    GcAlwaysRewrite,
    Detach,
    Cutoff,
    JournalDelay,
    Label,
    Recreate,
    Admission,
    Bridge,
    Release,
    GiveUpDetach,
}

impl Habit {
    pub(super) const ALL: [Habit; 15] = [
        Habit::Mode,
        Habit::Writeback,
        Habit::Sequential,
        Habit::Gc,
        Habit::CopyGc,
        Habit::GcAlwaysRewrite,
        Habit::Detach,
        Habit::Cutoff,
        Habit::JournalDelay,
        Habit::Label,
        Habit::Recreate,
        Habit::Admission,
        Habit::Bridge,
        Habit::Release,
        Habit::GiveUpDetach,
    ];
}

fn tune(volume: usize, name: &str, value: &str) -> Act {
    Act::Tune { volume, name: name.into(), value: value.into() }
}

fn tune_set(name: &str, value: &str) -> Act {
    Act::TuneSet { name: name.into(), value: value.into() }
}

fn mode(rng: &mut Rng, volume: usize) -> Act {
    let modes = ["writeback", "writeback", "writethrough", "writearound", "none"];
    tune(volume, "cache_mode", one_of(rng, &modes))
}

impl Mix {
    /// An act out of the operator's habits. `volumes` counts the flash-only one, of which most acts want nothing.
    pub(super) fn act(&self, rng: &mut Rng, volumes: usize) -> Vec<Act> {
        if self.habits.is_empty() {
            return Vec::new();
        }
        let volume = rng.below(volumes as u64) as usize;
        match one_of(rng, &self.habits) {
            Habit::Mode => vec![mode(rng, volume)],
            Habit::Writeback => {
                let (name, values): (_, &[_]) = match rng.below(4) {
                    0 => ("writeback_percent", &["0", "10", "40"]),
                    1 => ("writeback_delay", &["0", "1", "30"]),
                    2 => ("writeback_running", &["0", "1", "1"]),
                    _ => ("writeback_rate", &["1", "1000", "1000000"]),
                };
                vec![tune(volume, name, one_of(rng, values))]
            }
            Habit::Sequential => {
                let values = ["0", "4096", "65536", "4194304"];
                vec![tune(volume, "sequential_cutoff", one_of(rng, &values))]
            }
            Habit::Admission => vec![tune(volume, "admission", one_of(rng, &["kernel", "cost"]))],
            Habit::Bridge => {
                vec![tune(volume, "writeback_bridge", one_of(rng, &["off", "always", "always"]))]
            }
            Habit::Gc => vec![Act::Gc],
            Habit::CopyGc => vec![tune_set("copy_gc_enabled", one_of(rng, &["0", "1", "1"])), Act::Gc],
            Habit::GcAlwaysRewrite => {
                vec![tune_set("gc_always_rewrite", "1"), Act::Gc, tune_set("gc_always_rewrite", "0")]
            }
            Habit::Cutoff => vec![
                tune_set("cutoff_writeback_sync", one_of(rng, &["5", "70", "90"])),
                tune_set("cutoff_writeback", one_of(rng, &["1", "40", "70"])),
            ],
            Habit::JournalDelay => {
                vec![tune_set("journal_delay_ms", one_of(rng, &["0", "10", "100", "5000"]))]
            }
            Habit::Label => vec![tune(volume, "label", one_of(rng, &["", "a", "some other name"]))],
            Habit::Detach => vec![Act::Detach { volume, ns: rng.below(3_000_000_000) }],
            Habit::Recreate => vec![Act::Recreate],
            Habit::Release => vec![Act::Release { volume, ns: rng.below(3_000_000_000) }],
            Habit::GiveUpDetach => {
                vec![Act::GiveUpDetach { volume, ns: one_of(rng, &[0, 1_000_000, 1_000_000_000]) }]
            }
        }
    }

    /// An act in the middle of a series: most often another mode.
    pub(super) fn series_act(&self, rng: &mut Rng, volume: usize) -> Vec<Act> {
        match rng.below(8) {
            0 => vec![Act::Gc],
            1 => vec![Act::Release { volume, ns: rng.below(10_000_000) }],
            2 => vec![Act::Detach { volume, ns: rng.below(10_000_000) }],
            _ => vec![mode(rng, volume)],
        }
    }
}
