//! The acts of the operator in a generated plan.
//!
//! Owns the kinds of acts and their drawing. Must not know how an act is carried out.

use io::Rng;

use super::one_of;
use crate::plan::Act;

/// A kind of act that the operator may choose.
#[derive(Clone, Copy)]
pub(super) enum OperatorAction {
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

impl OperatorAction {
    pub(super) const ALL: [OperatorAction; 15] = [
        OperatorAction::Mode,
        OperatorAction::Writeback,
        OperatorAction::Sequential,
        OperatorAction::Gc,
        OperatorAction::CopyGc,
        OperatorAction::GcAlwaysRewrite,
        OperatorAction::Detach,
        OperatorAction::Cutoff,
        OperatorAction::JournalDelay,
        OperatorAction::Label,
        OperatorAction::Recreate,
        OperatorAction::Admission,
        OperatorAction::Bridge,
        OperatorAction::Release,
        OperatorAction::GiveUpDetach,
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

/// The acts of the operator in a plan.
pub(super) struct OperatorMix {
    /// The kinds of acts that the plan has.
    pub(super) actions: Vec<OperatorAction>,
    pub(super) acts_per_hundred: u64,
}

impl OperatorMix {
    pub(super) fn draw(rng: &mut Rng) -> OperatorMix {
        OperatorMix {
            actions: OperatorAction::ALL.into_iter().filter(|_| rng.chance(1, 3)).collect(),
            acts_per_hundred: one_of(rng, &[0, 2, 10, 30]),
        }
    }

    /// Draws an act of one of the selected kinds. `volumes` counts the flash-only volume, which most acts skip.
    pub(super) fn act(&self, rng: &mut Rng, volumes: usize) -> Vec<Act> {
        if self.actions.is_empty() {
            return Vec::new();
        }
        let volume = rng.below(volumes as u64) as usize;
        match one_of(rng, &self.actions) {
            OperatorAction::Mode => vec![mode(rng, volume)],
            OperatorAction::Writeback => {
                let (name, values): (_, &[_]) = match rng.below(4) {
                    0 => ("writeback_percent", &["0", "10", "40"]),
                    1 => ("writeback_delay", &["0", "1", "30"]),
                    2 => ("writeback_running", &["0", "1", "1"]),
                    _ => ("writeback_rate", &["1", "1000", "1000000"]),
                };
                vec![tune(volume, name, one_of(rng, values))]
            }
            OperatorAction::Sequential => {
                let values = ["0", "4096", "65536", "4194304"];
                vec![tune(volume, "sequential_cutoff", one_of(rng, &values))]
            }
            OperatorAction::Admission => vec![tune(volume, "admission", one_of(rng, &["kernel", "cost"]))],
            OperatorAction::Bridge => {
                vec![tune(volume, "writeback_bridge", one_of(rng, &["off", "always", "always"]))]
            }
            OperatorAction::Gc => vec![Act::Gc],
            OperatorAction::CopyGc => {
                vec![tune_set("copy_gc_enabled", one_of(rng, &["0", "1", "1"])), Act::Gc]
            }
            OperatorAction::GcAlwaysRewrite => {
                vec![tune_set("gc_always_rewrite", "1"), Act::Gc, tune_set("gc_always_rewrite", "0")]
            }
            OperatorAction::Cutoff => vec![
                tune_set("cutoff_writeback_sync", one_of(rng, &["5", "70", "90"])),
                tune_set("cutoff_writeback", one_of(rng, &["1", "40", "70"])),
            ],
            OperatorAction::JournalDelay => {
                vec![tune_set("journal_delay_ms", one_of(rng, &["0", "10", "100", "5000"]))]
            }
            OperatorAction::Label => vec![tune(volume, "label", one_of(rng, &["", "a", "some other name"]))],
            OperatorAction::Detach => vec![Act::Detach { volume, ns: rng.below(3_000_000_000) }],
            OperatorAction::Recreate => vec![Act::Recreate],
            OperatorAction::Release => vec![Act::Release { volume, ns: rng.below(3_000_000_000) }],
            OperatorAction::GiveUpDetach => {
                vec![Act::GiveUpDetach { volume, ns: one_of(rng, &[0, 1_000_000, 1_000_000_000]) }]
            }
        }
    }
}

/// Draws an act in the middle of a series: most often a change of the mode.
pub(super) fn series_act(rng: &mut Rng, volume: usize) -> Vec<Act> {
    match rng.below(8) {
        0 => vec![Act::Gc],
        1 => vec![Act::Release { volume, ns: rng.below(10_000_000) }],
        2 => vec![Act::Detach { volume, ns: rng.below(10_000_000) }],
        _ => vec![mode(rng, volume)],
    }
}
