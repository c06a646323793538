//! Places that exports have, and the sections that say them: no two volumes at one place, and no section without a volume.
//!
//! Owns what can be found out without knowing a volume. Which volume has a place that all of them are given is for `places`
//! of the daemon to say.

use serve::exports::Spec;
use serve::plain;
use toml::Spanned;

use super::{Config, File, Key, Parser};

/// What stands for the name of a volume in an export.
const VOLUME: &str = "{volume}";

impl Parser<'_> {
    /// Refuses two volumes that are to be at one place.
    pub(super) fn distinct_places(&self, file: &File) -> Result<(), String> {
        let all = file.exports.iter().map(|e| ("exports".to_owned(), e));
        let own = file
            .volume
            .iter()
            .filter_map(|(id, section)| Some((format!("[volume.{id}]"), section.exports.as_ref()?)));
        let mut before: Vec<(String, Spec)> = Vec::new();
        for (section, specs) in all.chain(own) {
            for spec in specs {
                let Some(place) = fixed(spec) else { continue };
                let taken = before.iter().find(|(other, there)| {
                    // What all volumes are given may be for the one that has no section.
                    (*other == section || other != "exports") && there.overlaps(&place)
                });
                if let Some((other, _)) = taken {
                    let whose = if *other == section {
                        format!("{section} names {place} twice")
                    } else {
                        format!("{other} and {section} both name {place}")
                    };
                    return Err(self.at(
                        spec,
                        format!("{whose}: clients could get the wrong volume: expected a place for each"),
                    ));
                }
                before.push((section.clone(), place));
            }
        }
        Ok(())
    }
}

/// The place that an export text names, if it is the same place for every volume.
fn fixed(spec: &Spanned<String>) -> Option<Spec> {
    spec.get_ref().parse().ok().filter(|_| !spec.get_ref().contains(VOLUME))
}

impl Config {
    /// Whether anything is said of a single set or volume.
    pub(crate) fn has_sections(&self) -> bool {
        !self.volumes.is_empty() || !self.sets.is_empty()
    }

    /// Sections that apply to none of these volumes and sets; what to say of each.
    pub(crate) fn unmatched(&self, known: &[(Key, Option<String>)]) -> Vec<String> {
        let matches = |id: &str, set: bool| {
            let mut same = known.iter().filter(|(key, _)| key.set == set);
            same.any(|(key, _)| key.id == id || label_of(key).as_deref() == Some(id))
        };
        let uuid_of = |name: &str| {
            let named = known.iter().find(|(_, n)| n.as_deref() == Some(name));
            named.map(|(key, _)| format!("[volume.\"{}\"]", key.id))
        };
        let volume = |id: &String| {
            let why = if plain::is_volume_name(id) {
                let instead = uuid_of(id).unwrap_or_else(|| "the UUID or the label of the volume".into());
                format!("names such as {id} are given by the daemon and name no section: write {instead}")
            } else {
                "expected the UUID or label of a volume, found none that is registered".to_owned()
            };
            format!("[volume.{}] has no effect: {why}", plain::escaped(id))
        };
        let set = |id: &String| {
            format!(
                "[set.{}] has no effect: expected the UUID of a set, found none that is registered",
                plain::escaped(id)
            )
        };
        let volumes = self.volumes.keys().filter(|id| !matches(id, false)).map(volume);
        volumes.chain(self.sets.keys().filter(|id| !matches(id, true)).map(set)).collect()
    }
}

/// The label by which a section may be named. One that looks like the name of a volume is none.
pub(super) fn label_of(key: &Key) -> Option<String> {
    let label = key.label.to_lowercase();
    (!label.is_empty() && !plain::is_volume_name(&label)).then_some(label)
}

#[cfg(test)]
mod tests {
    use super::*;

    const OPEN: &str = "nbd_allow_unauthenticated_tcp = true\n";

    #[test]
    fn two_sections_with_one_place_are_refused() {
        for (text, line, words) in [
            (
                "[volume.a]\nexports = [\"nbd=/run/x\"]\n[volume.b]\nexports = [\"ublk\",\n\"nbd=/run/x\"]\n",
                6,
                "[volume.a] and [volume.b] both name nbd=/run/x",
            ),
            (
                "[volume.a]\nexports = [\"nbd=127.0.0.1:9\"]\n[volume.b]\nexports = [\"nbd=127.0.0.1:9\"]\n",
                5,
                "both name nbd=127.0.0.1:9",
            ),
            (
                "[volume.a]\nexports = [\"ublk=7\"]\n[volume.b]\nexports = [\"ublk=7\"]\n",
                5,
                "both name ublk=7",
            ),
            ("exports = [\"nbd=/run/x\", \"nbd=/run/x\"]\n", 2, "exports names nbd=/run/x twice"),
        ] {
            let said = Config::parse(&format!("{OPEN}{text}")).unwrap_err();
            assert!(said.starts_with(&format!("line {line}: ")) && said.contains(words), "{text:?}: {said}");
        }
        for fine in [
            "exports = [\"nbd=/run/x\"]\n[volume.a]\nexports = [\"nbd=/run/x\", \"ublk\"]\n",
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
        // A disk that somebody else has labelled like a volume does not take its section.
        let foreign = key("u2", "bcache0", false);
        assert!(config.tunables(&foreign).is_empty());
        assert_eq!(config.unmatched(&[(foreign, None)]).len(), 4);
    }
}
