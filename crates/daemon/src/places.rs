//! The owners of export addresses: sockets, ports, numbers of ublk devices, directories.
//!
//! Owns the rule that an address belongs to one volume. The first volume that was exported there keeps it over restarts, as
//! long as the configuration gives it the address and its device is registered. The export of any other volume there is
//! refused. Without this rule a client could get another volume after each start. Must not know how an export is started.

use serve::exports::{Sharing, Spec};
use serve::{Failure, plain};

use crate::config::{Config, Key, section};
use crate::names::Named;
use crate::shared::Shared;
use crate::state::Owner;

/// The key and the name of a known volume.
pub(crate) type VolumeKey = (Key, String);

/// A configured address of a volume, and whether the volume may use it.
pub(crate) type Decided = (Spec, Result<Sharing, Failure>);

/// Describes a volume in the form that all messages use.
fn described((key, name): &VolumeKey) -> Named {
    let uuid = (!key.id.contains('/')).then(|| key.id.clone());
    Named { name: Some(name.clone()), uuid, label: key.label.clone(), ..Named::default() }
}

fn conflict(shared: &Shared, place: &Spec, has: &VolumeKey, wants: &VolumeKey) -> String {
    let its = if has.0.id.contains('/') { "its set" } else { "it" };
    let forget = shared.forget_command(&has.0.id).map_or_else(String::new, |command| {
        format!("forget the former if {its} does not come back (`{command}`), or ")
    });
    let label = Some(&*wants.0.label).filter(|label| plain::is_new_label(label));
    format!(
        "{place}: belongs to {}, and the configuration gives it to {} as well: clients could get the wrong volume; {forget}give \
         each its own, with {{volume}} in `exports` or with `exports` in {} of the configuration",
        described(has),
        described(wants),
        section(label.unwrap_or(&wants.0.id))
    )
}

/// The export addresses that a configuration gives to a volume.
fn wanted(shared: &Shared, config: &Config, (key, name): &VolumeKey) -> Vec<Spec> {
    shared.exports_by(config, key, name).iter().filter_map(|text| text.parse().ok()).collect()
}

/// Whether two addresses exclude each other: they overlap and cannot be shared.
fn excludes(one: &Spec, other: &Spec) -> bool {
    one.overlaps(other) && !one.shares(other)
}

/// Finds two of these volumes whose configured addresses exclude each other.
pub(crate) fn conflicts(shared: &Shared, config: &Config, volumes: &[VolumeKey]) -> Option<String> {
    let mut before: Vec<(&VolumeKey, Spec)> = Vec::new();
    for volume in volumes {
        for place in wanted(shared, config, volume) {
            if let Some((has, _)) = before.iter().find(|(_, there)| excludes(there, &place)) {
                return Some(conflict(shared, &place, has, volume));
            }
            before.push((volume, place));
        }
    }
    None
}

/// Decides for each configured export address of a volume whether the volume may have it, and stores the result.
///
/// Blocks while names of hosts are resolved.
///
/// # Errors
/// If the configuration cannot be parsed.
pub(crate) fn claim(shared: &Shared, key: &Key, name: &str) -> Result<Vec<Decided>, Failure> {
    let specs = shared.exports(key, name)?;
    let this = (key.clone(), name.to_owned());
    // The lock orders two volumes that start at the same time.
    let _one = shared.claim_places();
    let config = shared.config().clone();
    let places = shared.state().places();
    let others: Vec<(VolumeKey, Spec)> = places
        .into_iter()
        .filter(|(_, owner)| owner.volume != key.id)
        .filter_map(|(place, owner)| still(shared, &config, &place, owner))
        .collect();
    let mut decided = Vec::new();
    for spec in specs {
        let excluded = others.iter().find(|(_, there)| excludes(there, &spec));
        let result = match excluded {
            Some((has, _)) => Err(Failure::Failed(conflict(shared, &spec, has, &this))),
            None if others.iter().any(|(_, there)| there.shares(&spec)) => Ok(Sharing::Guest),
            None => Ok(Sharing::Owner),
        };
        decided.push((spec, result));
    }
    let owner = Owner { volume: key.id.clone(), label: key.label.clone() };
    let owns = |result: &Result<Sharing, Failure>| matches!(result, Ok(Sharing::Owner));
    let mine = decided.iter().filter(|(spec, result)| owns(result) && spec.overlaps(spec));
    let mine: Vec<String> = mine.map(|(spec, _)| spec.to_string()).collect();
    shared.state().set_places(&owner, &mine);
    Ok(decided)
}

/// The owner of an address, if the configuration still gives it to that volume.
fn still(shared: &Shared, config: &Config, place: &str, owner: Owner) -> Option<(VolumeKey, Spec)> {
    let place: Spec = place.parse().ok()?;
    let name = shared.state().known_name(&owner.volume)?;
    let volume = (Key { id: owner.volume, label: owner.label, set: false }, name);
    wanted(shared, config, &volume).iter().any(|spec| spec.overlaps(&place)).then_some((volume, place))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::State;

    fn shared(dir: &std::path::Path, config: &str) -> Shared {
        Shared::new(Config::parse(config).unwrap(), State::open(dir).unwrap())
    }

    fn key(id: &str, label: &str) -> Key {
        Key { id: id.into(), label: label.into(), set: false }
    }

    /// Claims the addresses of a volume. Returns why the first one is refused.
    fn comes_up(shared: &Shared, id: &str, label: &str) -> Option<String> {
        let name = shared.name(id);
        let decided = claim(shared, &key(id, label), &name).unwrap();
        decided[0].1.as_ref().err().and_then(|e| e.message()).map(str::to_owned)
    }

    const ONE_DIR: &str = "exports = [\"fuse=/run/one\"]\n";

    #[test]
    fn a_place_stays_with_its_volume_whichever_comes_up_first() {
        let dir = tempfile::tempdir().unwrap();
        let first = shared(dir.path(), ONE_DIR);
        assert_eq!(comes_up(&first, "u1", "one"), None);
        let said = comes_up(&first, "u2", "").unwrap();
        for words in ["fuse=/run/one: belongs to one, bcache0 (UUID u1)", "bcache1 (UUID u2)"] {
            assert!(said.contains(words), "{said}");
        }
        drop(first);
        let second = shared(dir.path(), ONE_DIR);
        assert!(comes_up(&second, "u2", "").is_some(), "it comes up first, and is refused all the same");
        assert_eq!(comes_up(&second, "u1", "one"), None);
        drop(second);
        // The configuration decides, also while the volume that had the address is not served yet.
        let moved = format!("{ONE_DIR}[volume.one]\nexports = [\"fuse=/run/other\"]\n");
        let third = shared(dir.path(), &moved);
        assert_eq!(comes_up(&third, "u2", ""), None);
        assert_eq!(comes_up(&third, "u1", "one"), None);
        drop(third);
        let fourth = shared(dir.path(), ONE_DIR);
        assert!(comes_up(&fourth, "u1", "one").is_some(), "it has become the other's");
        // A released device owns no addresses.
        fourth.state().forget_places("u2");
        assert_eq!(comes_up(&fourth, "u1", "one"), None);
    }

    /// Several volumes may share a socket. A client that names no volume gets the owner's volume, or none while the owner is absent.
    #[test]
    fn a_socket_has_one_owner_and_guests() {
        let dir = tempfile::tempdir().unwrap();
        let first = shared(dir.path(), "exports = [\"nbd=/run/one.sock\"]\n");
        let role = |id: &str| {
            let name = first.name(id);
            let decided = claim(&first, &key(id, ""), &name).unwrap();
            decided[0].1.as_ref().map(|role| *role).map_err(ToString::to_string)
        };
        assert_eq!(role("u1"), Ok(Sharing::Owner));
        assert_eq!(role("u2"), Ok(Sharing::Guest));
        assert_eq!(role("u1"), Ok(Sharing::Owner));
        let both = [(key("u1", ""), "bcache0".into()), (key("u2", ""), "bcache1".into())];
        assert_eq!(conflicts(&first, &first.config(), &both), None);
        first.state().forget_places("u1");
        assert_eq!(role("u2"), Ok(Sharing::Owner));
    }

    /// The command named the volume, which has no name while it is absent, or a flash-only volume, which has no device.
    #[test]
    fn the_command_that_forgets_an_owner_names_its_device() {
        let dir = tempfile::tempdir().unwrap();
        let shared = shared(dir.path(), ONE_DIR);
        let said_after = |owner: &str, device: (&str, &str)| {
            assert_eq!(comes_up(&shared, owner, "one"), None);
            shared.state().add_device(std::path::Path::new(device.0), device.1, true);
            let said = comes_up(&shared, "u9", "").expect("the address has an owner");
            let served = shared.serves(&Key { id: owner.into(), label: String::new(), set: false });
            let of_served = comes_up(&shared, "u9", "").expect("the address has an owner");
            drop(served);
            assert!(!of_served.contains("does not come back"), "it is there: {of_served}");
            shared.state().forget_places(owner);
            said
        };
        let said = said_after("u1", ("/dev/one", "u1"));
        assert!(said.contains("if it does not come back (`ubcache unregister /dev/one`)"), "{said}");
        let mark = crate::state::Mark {
            identity: crate::identity::Identity::default().with_cache("c1"),
            sequence: 0,
            path: None,
            label: String::new(),
        };
        shared.state().set_mark("s", mark);
        let said = said_after("s/3", ("/dev/ssd", "c1"));
        assert!(said.contains("if its set does not come back (`ubcache unregister /dev/ssd`)"), "{said}");
    }

    #[test]
    fn places_that_are_made_for_a_volume_are_nobody_elses() {
        let dir = tempfile::tempdir().unwrap();
        for config in
            ["exports = [\"nbd=/run/{volume}.sock\"]\n", "exports = [\"auto\"]\n", "exports = [\"ublk\"]\n"]
        {
            let shared = shared(dir.path(), config);
            assert_eq!(comes_up(&shared, "u1", ""), None);
            assert_eq!(comes_up(&shared, "u2", ""), None);
            assert_eq!(
                conflicts(
                    &shared,
                    &shared.config(),
                    &[(key("u1", ""), "bcache0".into()), (key("u2", ""), "bcache1".into())]
                ),
                None
            );
        }
        let one = Config::parse(ONE_DIR).unwrap();
        let shared = shared(dir.path().join("other").as_path(), ONE_DIR);
        let said =
            conflicts(&shared, &one, &[(key("u1", ""), "bcache0".into()), (key("u2", ""), "bcache1".into())]);
        assert!(said.unwrap().contains("bcache1 (UUID u2)"));
    }
}
