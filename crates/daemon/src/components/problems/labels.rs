//! Labels that name several served volumes and sets.
//!
//! Owns their problem. It lists all that have the label: nothing on a device says which of them is older, so the operator chooses the
//! one that gets another label. Must not know how a label is set.

use std::collections::BTreeMap;

use format::counted;
use serve::plain;

use super::{DeviceView, Problem, SetView, label_of};

/// The volumes and sets that have one label, as messages name them.
#[derive(Default)]
struct Bearers {
    volumes: Vec<String>,
    sets: Vec<String>,
}

/// Every label of served volumes and sets.
fn by_label<'a>(sets: &'a [SetView], devices: &'a [DeviceView]) -> BTreeMap<&'a str, Bearers> {
    let mut all: BTreeMap<&str, Bearers> = BTreeMap::new();
    for set in sets {
        let is_cache = |d: &&DeviceView| d.kind == Some("cache") && d.set.as_ref() == Some(&set.id);
        let cache = devices.iter().find(is_cache);
        if set.has_cache {
            let path = cache.map_or_else(String::new, |d| format!(" ({})", d.path.display()));
            all.entry(label_of(set, cache)).or_default().sets.push(format!("set {}{path}", set.id));
        }
        for volume in &set.figures.volumes {
            let path = volume.backing_device.as_ref().map_or_else(String::new, |path| format!(" ({path})"));
            all.entry(&volume.label).or_default().volumes.push(format!("{}{path}", volume.name));
        }
    }
    all.remove("");
    all
}

/// The problem of each label that names several.
pub(super) fn shared(sets: &[SetView], devices: &[DeviceView]) -> Vec<Problem> {
    let all = by_label(sets, devices);
    let several = all.iter().filter(|(_, of)| of.volumes.len() + of.sets.len() > 1);
    several
        .map(|(label, Bearers { volumes, sets })| {
            let kinds = [(volumes, "volume"), (sets, "set")];
            let counts = kinds.iter().filter(|(of, _)| !of.is_empty());
            let counts: Vec<String> = counts.map(|(of, kind)| counted(of.len() as u64, kind)).collect();
            let link = match volumes.len() {
                0 | 1 => "",
                _ => ", and /dev/ubcache has no link of this name",
            };
            let text = format!(
                "{} have the label {} ({}): it names none of them{link}; give another label to the one that you choose",
                counts.join(" and "),
                plain::label(label),
                [volumes.as_slice(), sets.as_slice()].concat().join(", ")
            );
            Problem::new("label_shared", text, format!("ubcache set-label NAME {}", another(&all, label)))
        })
        .collect()
}

/// A label that nothing has, made of `label`.
fn another(all: &BTreeMap<&str, Bearers>, label: &str) -> String {
    let base = if plain::typed(label, "").is_empty() || label.len() > 28 { "other" } else { label };
    let mut new = (2..=99).map(|n| format!("{base}-{n}"));
    new.find(|new| !all.contains_key(&**new)).unwrap_or_else(|| "NEW-LABEL".to_owned())
}
