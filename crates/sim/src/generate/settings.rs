//! The settings of a boot.
//!
//! Owns their drawing. Must not know how a setting is applied.

use engine::policy::replacement::InPlaceOfLru;
use io::Rng;

use super::mix::Lean;
use super::{Life, one_of};
use crate::plan::{BridgeSettings, Settings};

pub(super) fn draw(rng: &mut Rng, life: Life) -> Settings {
    let pressure = matches!(life, Life::Pressure | Life::Churn);
    Settings {
        cache_mode: None,
        node_cache_bytes: one_of(rng, &[1, 20_000, 1 << 30]),
        replacement: replacement(rng),
        journal_delay_ms: one_of(rng, &[0, 100, 100, 2000, 30_000]),
        writeback_batch: one_of(rng, &[8, 64, 65536]),
        cutoffs: if pressure { (70, 90) } else { one_of(rng, &[(40, 70), (40, 70), (1, 5), (70, 90)]) },
        congestion: rng.chance(1, 4),
        writeback_delay: if pressure { 30 } else { one_of(rng, &[0, 1, 30]) },
        writeback_percent: one_of(rng, &[0, 10, 40]),
        writeback_running: life == Life::Churn || rng.chance(if pressure { 1 } else { 3 }, 4),
        sequential_cutoff: if pressure { 0 } else { one_of(rng, &[0, 0, 4096, 65536, 4 << 20]) },
        admission: one_of(rng, &["kernel", "cost"]).into(),
        overwrite_in_place: one_of(rng, &["off", "auto", "always"]).into(),
        writeback_controller: one_of(rng, &["kernel", "yield"]).into(),
        bridge: BridgeSettings {
            writeback_bridge: one_of(rng, &["off", "auto", "always", "always"]).into(),
            writeback_bridge_limit: one_of(rng, &[512, 4096, 65536, 1 << 20]),
        },
    }
}

/// The kernel's policy, or, twice as likely each, one of our own.
fn replacement(rng: &mut Rng) -> String {
    let names = InPlaceOfLru::names();
    let weighted: Vec<&str> = names.iter().chain(names.iter().skip(1)).copied().collect();
    one_of(rng, &weighted).into()
}

/// Changes settings so that the combination that a plan leans towards is likely, each by chance.
pub(super) fn lean(rng: &mut Rng, lean: Lean, s: &mut Settings) {
    let mut tilt = |change: &mut dyn FnMut(&mut Settings, &mut Rng)| {
        if rng.chance(5, 6) {
            change(s, rng);
        }
    };
    match lean {
        Lean::Toggling | Lean::Failing => {
            tilt(&mut |s, _| (s.writeback_percent, s.writeback_running) = (0, true));
            tilt(&mut |s, rng| s.writeback_delay = one_of(rng, &[0, 1]));
            let bypass: &[u32] = if lean == Lean::Failing { &[0, 4096] } else { &[0] };
            tilt(&mut |s, rng| s.sequential_cutoff = one_of(rng, bypass));
            tilt(&mut |s, rng| s.journal_delay_ms = one_of(rng, &[100, 30_000]));
            tilt(&mut |s, _| s.cutoffs = (70, 90));
        }
        Lean::Moving => tilt(&mut |s, _| (s.sequential_cutoff, s.congestion) = (0, false)),
        Lean::Evicting => tilt(&mut |s, _| s.sequential_cutoff = 0),
        Lean::Tearing => {
            tilt(&mut |s, _| (s.journal_delay_ms, s.writeback_running) = (2000, false));
            tilt(&mut |s, _| (s.sequential_cutoff, s.cutoffs) = (0, (70, 90)));
        }
        Lean::Discarding => {
            tilt(&mut |s, _| (s.journal_delay_ms, s.writeback_running) = (30_000, false));
            tilt(&mut |s, _| (s.cutoffs, s.congestion, s.sequential_cutoff) = ((70, 90), false, 0));
        }
        Lean::Bridging => {
            tilt(&mut |s, _| {
                s.bridge =
                    BridgeSettings { writeback_bridge: "always".into(), writeback_bridge_limit: 1 << 20 };
            });
            tilt(&mut |s, _| (s.writeback_percent, s.writeback_running, s.cutoffs) = (0, true, (70, 90)));
            tilt(&mut |s, rng| s.writeback_delay = one_of(rng, &[0, 0, 1]));
        }
        Lean::Places => {
            tilt(&mut |s, rng| s.journal_delay_ms = one_of(rng, &[2000, 30_000]));
            tilt(&mut |s, _| (s.cutoffs, s.congestion, s.sequential_cutoff) = ((70, 90), false, 0));
        }
        Lean::Wrapping => {
            tilt(&mut |s, rng| s.journal_delay_ms = one_of(rng, &[100, 2000]));
            tilt(&mut |s, _| (s.cutoffs, s.congestion, s.sequential_cutoff) = ((70, 90), false, 0));
        }
        Lean::Dying | Lean::Hanging => {}
    }
}
