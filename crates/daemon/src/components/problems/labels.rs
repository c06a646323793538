//! Problems of labels: several volumes and sets have one label, or a volume has a label that another volume had first.
//!
//! Owns these problems. A problem lists every volume and set with the label. Nothing on a device says which of them is older, so
//! the operator chooses the one that gets another label. Must not know how a label is set.

use std::collections::BTreeMap;

use format::counted;
use serve::plain;

use super::{DeviceView, Problem, SetView, label_of};
use crate::components::views::LabelOwner;
use crate::config::section;

/// The volumes and sets that have one label, as messages name them.
#[derive(Default)]
struct Bearers<'a> {
    volumes: Vec<String>,
    /// The number of these volumes that are not served, such as stopped ones.
    not_served: usize,
    sets: Vec<String>,
    /// The last volume to which the section of the label does not apply, and the volume to which it does.
    without_section: Option<(&'a str, &'a LabelOwner)>,
}

impl Bearers<'_> {
    fn len(&self) -> usize {
        self.volumes.len() + self.sets.len()
    }
}

/// Whether a device that is not served has a label that no served volume and no set counts. A copy of a served device is not
/// registered as well, and a device that has failed may be another one by now.
fn counts_alone(sets: &[SetView], device: &DeviceView) -> bool {
    let is_served =
        || sets.iter().flat_map(|set| &set.figures.volumes).any(|v| v.backing_uuid == device.uuid);
    device.kind == Some("backing") && matches!(device.state, "stopped" | "waiting") && !is_served()
}

/// Every label of volumes and sets, also of volumes that are stopped or wait.
fn by_label<'a>(sets: &'a [SetView], devices: &'a [DeviceView]) -> BTreeMap<&'a str, Bearers<'a>> {
    let mut all: BTreeMap<&str, Bearers<'_>> = BTreeMap::new();
    for set in sets {
        let is_cache = |d: &&DeviceView| d.kind == Some("cache") && d.set.as_ref() == Some(&set.id);
        let cache = devices.iter().find(is_cache);
        if set.has_cache {
            let path = cache.map_or_else(String::new, |d| format!(" ({})", d.path.display()));
            all.entry(label_of(set, cache)).or_default().sets.push(format!("set {}{path}", set.id));
        }
        for volume in &set.figures.volumes {
            let path = volume.backing_device.as_ref().map_or_else(String::new, |path| format!(" ({path})"));
            let of_label = all.entry(&volume.label).or_default();
            of_label.volumes.push(format!("{}{path}", volume.name));
            if let Some(owner) = set.without_section.get(&volume.name) {
                of_label.without_section = Some((&volume.name, owner));
            }
        }
    }
    for device in devices.iter().filter(|device| counts_alone(sets, device)) {
        let of_label = all.entry(&device.label).or_default();
        let name = device.name.as_deref().or(device.uuid.as_deref()).unwrap_or("a disk");
        of_label.volumes.push(format!("{name} ({}, {})", device.path.display(), device.state));
        of_label.not_served += 1;
    }
    all.remove("");
    all
}

/// The problem of each of these labels that several volumes and sets have, or that another volume had first.
pub(crate) fn shared(
    sets: &[SetView],
    devices: &[DeviceView],
    is_of_these: impl Fn(&str) -> bool,
) -> Vec<Problem> {
    let all = by_label(sets, devices);
    let shared = all.iter().filter(|(_, of)| of.len() > 1 || of.without_section.is_some());
    shared
        .filter(|(label, _)| is_of_these(label))
        .map(|(label, bearers)| {
            let renamed = bearers.without_section.map_or("NAME", |(volume, _)| volume);
            let command = format!("ubcache set-label {renamed} {}", another(&all, label));
            Problem::new("label_shared", text(label, bearers), command)
        })
        .collect()
}

/// What is wrong with a label.
fn text(label: &str, bearers: &Bearers<'_>) -> String {
    let Bearers { volumes, not_served, sets, without_section } = bearers;
    let shown = plain::label(label);
    let applies = without_section.map_or_else(String::new, |(_, owner)| {
        let section = section(&label.to_lowercase());
        format!("; {section} of the configuration applies to {} alone", owner.name)
    });
    if let (1, Some((volume, LabelOwner { name, label: its, is_served, forget }))) =
        (bearers.len(), without_section)
    {
        let more = match forget {
            _ if its.as_ref().is_some_and(|its| its != label) => {
                ", written in other capital or small letters".to_owned()
            }
            // It has the same label, but its set does not answer, so it has no figures.
            _ if *is_served => String::new(),
            Some(command) => format!("; if {name} does not come back, forget it with `{command}`"),
            None => String::new(),
        };
        return format!("{volume} has the label {shown}, which {name} had first{more}{applies}");
    }
    let kinds = [(volumes, "volume"), (sets, "set")];
    let counts = kinds.iter().filter(|(of, _)| !of.is_empty());
    let counts: Vec<String> = counts.map(|(of, kind)| counted(of.len() as u64, kind)).collect();
    let link = match (volumes.len(), volumes.len() - not_served) {
        (0 | 1, _) | (_, 0) => "",
        (_, 1) => ", and the link of this name in /dev/ubcache is that of the served one",
        _ => ", and /dev/ubcache has no link of this name",
    };
    let choice = match without_section {
        Some(_) => "",
        None => "; give another label to the one that you choose",
    };
    format!(
        "{} have the label {shown} ({}): no command takes it as a name{link}{applies}{choice}",
        counts.join(" and "),
        [volumes.as_slice(), sets.as_slice()].concat().join(", ")
    )
}

/// A new label, made of `label`, that no volume and no set has.
fn another(all: &BTreeMap<&str, Bearers<'_>>, label: &str) -> String {
    let base = if plain::typed(label, "").is_empty() || label.len() > 28 { "other" } else { label };
    let mut new = (2..=99).map(|n| format!("{base}-{n}"));
    new.find(|new| !all.contains_key(&**new)).unwrap_or_else(|| "NEW-LABEL".to_owned())
}
