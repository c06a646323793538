//! The operator actions in a generated plan.
//!
//! Owns the kinds of operator actions and their drawing. Must not know how an action is carried out.

use io::Rng;

use super::one_of;
use crate::plan::OperatorAction;

/// A kind of operator action that a plan may have.
#[derive(Clone, Copy)]
pub(super) enum ActionKind {
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

impl ActionKind {
    pub(super) const ALL: [ActionKind; 15] = [
        ActionKind::Mode,
        ActionKind::Writeback,
        ActionKind::Sequential,
        ActionKind::Gc,
        ActionKind::CopyGc,
        ActionKind::GcAlwaysRewrite,
        ActionKind::Detach,
        ActionKind::Cutoff,
        ActionKind::JournalDelay,
        ActionKind::Label,
        ActionKind::Recreate,
        ActionKind::Admission,
        ActionKind::Bridge,
        ActionKind::Release,
        ActionKind::GiveUpDetach,
    ];
}

fn tune(volume: usize, name: &str, value: &str) -> OperatorAction {
    OperatorAction::Tune { volume, name: name.into(), value: value.into() }
}

fn tune_set(name: &str, value: &str) -> OperatorAction {
    OperatorAction::TuneSet { name: name.into(), value: value.into() }
}

fn mode(rng: &mut Rng, volume: usize) -> OperatorAction {
    let modes = ["writeback", "writeback", "writethrough", "writearound", "none"];
    tune(volume, "cache_mode", one_of(rng, &modes))
}

/// The operator actions in a plan.
pub(super) struct OperatorMix {
    /// The kinds of operator actions that the plan has.
    pub(super) actions: Vec<ActionKind>,
    pub(super) actions_per_hundred: u64,
}

impl OperatorMix {
    pub(super) fn draw(rng: &mut Rng) -> OperatorMix {
        OperatorMix {
            actions: ActionKind::ALL.into_iter().filter(|_| rng.chance(1, 3)).collect(),
            actions_per_hundred: one_of(rng, &[0, 2, 10, 30]),
        }
    }

    /// Draws an action of one of the selected kinds. `volumes` counts the flash-only volume, which most actions skip.
    pub(super) fn action(&self, rng: &mut Rng, volumes: usize) -> Vec<OperatorAction> {
        if self.actions.is_empty() {
            return Vec::new();
        }
        let volume = rng.below(volumes as u64) as usize;
        match one_of(rng, &self.actions) {
            ActionKind::Mode => vec![mode(rng, volume)],
            ActionKind::Writeback => {
                let (name, values): (_, &[_]) = match rng.below(4) {
                    0 => ("writeback_percent", &["0", "10", "40"]),
                    1 => ("writeback_delay", &["0", "1", "30"]),
                    2 => ("writeback_running", &["0", "1", "1"]),
                    _ => ("writeback_rate", &["1", "1000", "1000000"]),
                };
                vec![tune(volume, name, one_of(rng, values))]
            }
            ActionKind::Sequential => {
                let values = ["0", "4096", "65536", "4194304"];
                vec![tune(volume, "sequential_cutoff", one_of(rng, &values))]
            }
            ActionKind::Admission => vec![tune(volume, "admission", one_of(rng, &["kernel", "cost"]))],
            ActionKind::Bridge => {
                vec![tune(volume, "writeback_bridge", one_of(rng, &["off", "always", "always"]))]
            }
            ActionKind::Gc => vec![OperatorAction::Gc],
            ActionKind::CopyGc => {
                vec![tune_set("copy_gc_enabled", one_of(rng, &["0", "1", "1"])), OperatorAction::Gc]
            }
            ActionKind::GcAlwaysRewrite => {
                vec![
                    tune_set("gc_always_rewrite", "1"),
                    OperatorAction::Gc,
                    tune_set("gc_always_rewrite", "0"),
                ]
            }
            ActionKind::Cutoff => vec![
                tune_set("cutoff_writeback_sync", one_of(rng, &["5", "70", "90"])),
                tune_set("cutoff_writeback", one_of(rng, &["1", "40", "70"])),
            ],
            ActionKind::JournalDelay => {
                vec![tune_set("journal_delay_ms", one_of(rng, &["0", "10", "100", "5000"]))]
            }
            ActionKind::Label => vec![tune(volume, "label", one_of(rng, &["", "a", "some other name"]))],
            ActionKind::Detach => vec![OperatorAction::Detach { volume, ns: rng.below(3_000_000_000) }],
            ActionKind::Recreate => vec![OperatorAction::Recreate],
            ActionKind::Release => vec![OperatorAction::Release { volume, ns: rng.below(3_000_000_000) }],
            ActionKind::GiveUpDetach => {
                vec![OperatorAction::GiveUpDetach { volume, ns: one_of(rng, &[0, 1_000_000, 1_000_000_000]) }]
            }
        }
    }
}

/// Draws an action in the middle of a series: most often a change of the mode.
pub(super) fn series_action(rng: &mut Rng, volume: usize) -> Vec<OperatorAction> {
    match rng.below(8) {
        0 => vec![OperatorAction::Gc],
        1 => vec![OperatorAction::Release { volume, ns: rng.below(10_000_000) }],
        2 => vec![OperatorAction::Detach { volume, ns: rng.below(10_000_000) }],
        _ => vec![mode(rng, volume)],
    }
}
