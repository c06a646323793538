//! Checks of the sections of a configuration: no two volumes share an export address, and no section is without a volume.
//!
//! Owns the checks that need no running volume. Must not know which volume gets an address that the configuration gives to
//! all volumes: module `places` of the daemon decides that.

use serve::exports::Spec;
use serve::plain;
use toml::Spanned;

use super::key::Key;

/// The placeholder for the name of a volume in an export.
const VOLUME: &str = "{volume}";

/// The first part in braces of an export that is no placeholder.
pub(super) fn unknown_placeholder(export: &str) -> Option<&str> {
    let mut rest = export;
    while let Some((begin, end)) = rest.find('{').and_then(|at| Some((at, at + rest.get(at..)?.find('}')?))) {
        let part = rest.get(begin..=end)?;
        if part != VOLUME {
            return Some(part);
        }
        rest = rest.get(end..)?;
    }
    None
}

/// The key of a registered set, or the key and the name of a registered volume.
type ConfiguredPlace = (Key, Option<String>);

/// The first export that gives one address to two volumes, with the error message.
pub(super) fn shared<'f>(
    exports: Option<&'f [Spanned<String>]>,
    volumes: impl Iterator<Item = (&'f str, &'f [Spanned<String>])>,
) -> Option<(&'f Spanned<String>, String)> {
    let all = exports.into_iter().map(|specs| ("exports".to_owned(), specs));
    let own = volumes.map(|(id, specs)| (format!("[volume.{id}]"), specs));
    let mut before: Vec<(String, Spec)> = Vec::new();
    for (section, specs) in all.chain(own) {
        for spec in specs {
            let Some(place) = fixed(spec) else { continue };
            let taken = before.iter().find(|(other, there)| {
                // What all volumes are given may be for the one that has no section.
                (*other == section || other != "exports" && !there.shares(&place)) && there.overlaps(&place)
            });
            if let Some((other, _)) = taken {
                let whose = if *other == section {
                    format!("{section} names {place} twice")
                } else {
                    format!("{other} and {section} both name {place}")
                };
                let why = format!("{whose}: clients could get the wrong volume: expected a place for each");
                return Some((spec, why));
            }
            before.push((section.clone(), place));
        }
    }
    None
}

/// The address in the text of an export; `None` if each volume gets its own.
fn fixed(spec: &Spanned<String>) -> Option<Spec> {
    spec.get_ref().parse().ok().filter(|_| !spec.get_ref().contains(VOLUME))
}

/// Whether the section with this name applies to one of these sets or volumes.
fn matches(id: &str, known: &[ConfiguredPlace], set: bool) -> bool {
    let mut same = known.iter().filter(|(key, _)| key.set == set);
    same.any(|(key, _)| key.id == id || key.section_label().as_deref() == Some(id))
}

/// Messages about the sections of volumes that apply to none of the known volumes.
pub(super) fn unmatched_volumes<'a>(
    sections: impl Iterator<Item = &'a String>,
    known: &[ConfiguredPlace],
) -> Vec<String> {
    let uuid_of = |name: &str| {
        let named = known.iter().find(|(_, n)| n.as_deref() == Some(name));
        named.map(|(key, _)| format!("[volume.\"{}\"]", key.id))
    };
    let text = |id: &String| {
        let why = if plain::is_volume_name(id) {
            let instead = uuid_of(id).unwrap_or_else(|| "the UUID or the label of the volume".into());
            format!("names such as {id} are given by the daemon and name no section: write {instead}")
        } else {
            "expected the UUID or label of a volume, found none that is registered".to_owned()
        };
        format!("[volume.{}] has no effect: {why}", plain::escaped(id))
    };
    sections.filter(|id| !matches(id, known, false)).map(text).collect()
}

/// Messages about the sections of sets that apply to none of the known sets.
pub(super) fn unmatched_sets<'a>(
    sections: impl Iterator<Item = &'a String>,
    known: &[ConfiguredPlace],
) -> Vec<String> {
    let text = |id: &String| {
        format!(
            "[set.{}] has no effect: expected the UUID of a set, found none that is registered",
            plain::escaped(id)
        )
    };
    sections.filter(|id| !matches(id, known, true)).map(text).collect()
}

#[cfg(test)]
mod tests {
    use crate::config::{Config, Key};

    const OPEN: &str = "nbd_allow_unauthenticated_tcp = true\n";

    /// All volumes were to have one socket, whose name had `{vol}`.
    #[test]
    fn a_placeholder_with_a_typo_is_refused() {
        for (export, place) in [
            ("nbd=/run/{vol}.sock", Some("{vol}")),
            ("fuse=/run/{volume}/{Volume}", Some("{Volume}")),
            ("fuse=/run/{volume}/{volume}", None),
            ("fuse=/run/}{", None),
        ] {
            let parsed = Config::parse(&format!("exports = [\"{export}\"]\n"));
            assert_eq!(parsed.is_err(), place.is_some(), "{export}");
            let said = parsed.err().map(|e| e.to_string()).unwrap_or_default();
            assert!(said.contains(place.unwrap_or_default()), "{said}");
        }
    }

    #[test]
    fn two_sections_with_one_place_are_refused() {
        for (text, line, words) in [
            (
                "[volume.a]\nexports = [\"fuse=/run/x\"]\n[volume.b]\nexports = [\"ublk\",\n\"fuse=/run/x\"]\n",
                6,
                "[volume.a] and [volume.b] both name fuse=/run/x",
            ),
            (
                "[volume.a]\nexports = [\"nbd=127.0.0.1:9\"]\n[volume.b]\nexports = [\"nbd=0.0.0.0:9\"]\n",
                5,
                "both name nbd=0.0.0.0:9",
            ),
            (
                "[volume.a]\nexports = [\"ublk=7\"]\n[volume.b]\nexports = [\"ublk=7\"]\n",
                5,
                "both name ublk=7",
            ),
            ("exports = [\"nbd=/run/x\", \"nbd=/run/x\"]\n", 2, "exports names nbd=/run/x twice"),
        ] {
            let said = Config::parse(&format!("{OPEN}{text}")).unwrap_err().to_string();
            assert!(said.starts_with(&format!("line {line}: ")) && said.contains(words), "{text:?}: {said}");
        }
        for fine in [
            "exports = [\"nbd=/run/x\"]\n[volume.a]\nexports = [\"nbd=/run/x\", \"ublk\"]\n",
            "[volume.a]\nexports = [\"nbd=/run/x\"]\n[volume.b]\nexports = [\"nbd=/run/x\"]\n",
            "[volume.a]\nexports = [\"nbd=127.0.0.1:0\"]\n[volume.b]\nexports = [\"nbd=127.0.0.1:0\"]\n",
            "[volume.a]\nexports = [\"nbd=/run/{volume}\"]\n[volume.b]\nexports = [\"nbd=/run/{volume}\"]\n",
            "[volume.a]\nexports = [\"auto\"]\n[volume.b]\nexports = [\"auto\"]\n",
        ] {
            assert!(Config::parse(&format!("{OPEN}{fine}")).is_ok(), "{fine}");
        }
    }

    #[test]
    fn sections_without_a_volume_are_told() {
        let config = Config::parse(
            "[volume.bcache0]\npreset = \"latency\"\n[volume.Data]\npreset = \"latency\"\n[volume.dat]\n\
             preset = \"latency\"\n[set.s.tunables]\njournal_delay_ms = 9\n",
        )
        .unwrap();
        let key = |id: &str, label: &str, set| Key { id: id.into(), label: label.into(), set };
        let named = |key, name: &str| (key, Some(name.to_owned()));
        let known = [named(key("u1", "data", false), "bcache0"), (key("s", "", true), None)];
        let said = config.unmatched(&known);
        assert_eq!(said.len(), 2, "{said:?}");
        assert!(said[0].starts_with("[volume.bcache0] has no effect") && said[0].contains("[volume.\"u1\"]"));
        assert!(said[1].starts_with("[volume.dat] has no effect"), "{said:?}");
        // A device whose label looks like the name of a volume does not get the section of that volume.
        let foreign = key("u2", "bcache0", false);
        assert!(config.tunables(&foreign).is_empty());
        assert_eq!(config.unmatched(&[(foreign, None)]).len(), 4);
    }
}
