//! The handler of `make`: formats devices for a client.
//!
//! Owns what a client may not have formatted: devices of this daemon, files, and dirty data whose device the client has not named. The checks of the contents and the texts are those of the command `make`. Must not know the client.

use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use axum::Extension;
use axum::body::Bytes;
use axum::extract::State;
use rustix::process::geteuid;
use serde_json::json;
use serve::Failure;

use super::change::Audited;
use super::context::{Api, SharedApi};
use crate::answer::{Answered, Refusal, ok, parse, to_the_end};
use crate::audit::Peer;
use crate::order::MakeOrder;

pub(super) async fn make(
    State(api): SharedApi,
    Extension(audit): Audited,
    Extension(peer): Extension<Peer>,
    body: Bytes,
) -> Answered {
    let mut order: MakeOrder = parse(&body)?;
    let devices: Vec<PathBuf> = order.cache.iter().chain(&order.backing).cloned().collect();
    if let Some(relative) = devices.iter().find(|d| !d.is_absolute()) {
        return Err(Refusal::malformed(format!("{}: expected an absolute path", relative.display())));
    }
    audit.does(in_words(&order, &devices));
    order.lose_dirty_data_of = named_devices(&order.lose_dirty_data_of, &devices)?;
    not_registered(&api, &devices)?;
    for label in [&order.label, &order.set_label] {
        api.registry.settings.label_is_free(label, |_| false).await?;
    }
    let (dry_run, carry_out) = (order.dry_run, api.make);
    let work = tokio::task::spawn_blocking(move || {
        devices.iter().try_for_each(|path| is_for(peer, path))?;
        carry_out(&order)
    });
    let made =
        to_the_end(async move { work.await.map_err(|e| Failure::because("make: internal error", e))? });
    let made = made.await?;
    ok(json!({"made": made.report, "lines": made.lines, "dry_run": dry_run}))
}

/// The action for the audit.
fn in_words(order: &MakeOrder, devices: &[PathBuf]) -> String {
    let mut words = String::from("make");
    devices.iter().for_each(|path| words.push_str(&format!(" {}", path.display())));
    let options = [(order.wipe, " --wipe"), (order.force, " --force"), (order.dry_run, " --dry-run")];
    options.iter().filter(|(is_on, _)| *is_on).for_each(|(_, option)| words.push_str(option));
    order
        .lose_dirty_data_of
        .iter()
        .for_each(|d| words.push_str(&format!(", losing dirty data of {}", d.display())));
    words
}

/// The devices whose dirty data a client has agreed to lose, by their paths. A client names each by its path or the last part of it.
fn named_devices(names: &[PathBuf], devices: &[PathBuf]) -> Result<Vec<PathBuf>, Refusal> {
    let device_of = |name: &PathBuf| {
        let is_it = |device: &&PathBuf| *device == name || device.file_name() == Some(name.as_os_str());
        devices.iter().find(is_it).cloned().ok_or_else(|| {
            Refusal::malformed(format!(
                "lose_dirty_data_of: expected the name of a device that is to be formatted, found {:?}",
                name.display().to_string()
            ))
        })
    };
    names.iter().map(device_of).collect()
}

/// Refuses devices of this daemon, also those that it does not have open.
pub(super) fn not_registered(api: &Api, devices: &[PathBuf]) -> Result<(), Refusal> {
    let number = |path: &Path| {
        let there = std::fs::metadata(path).ok()?;
        let is_block = there.file_type().is_block_device();
        Some(if is_block { (0, 0, there.rdev()) } else { (there.dev(), there.ino(), 0) })
    };
    let registered: Vec<_> = api.registry.inventory.devices.all().into_keys().collect();
    for path in devices {
        let is_it =
            |other: &&PathBuf| *other == path || number(path).is_some_and(|n| number(other) == Some(n));
        if let Some(other) = registered.iter().find(is_it) {
            let (path, other) = (path.display(), other.display());
            return Err(Refusal::from(Failure::Failed(format!(
                "{path}: is registered; to format it, first end its service: ubcache unregister {other}"
            ))));
        }
    }
    Ok(())
}

/// Refuses files, unless the client is root or the user of the daemon, who can overwrite every file anyway.
///
/// The daemon is root and a member of its group is not. By a path that leads elsewhere a moment later, such a client could have
/// any file of the host overwritten.
pub(super) fn is_for(peer: Peer, path: &Path) -> Result<(), Failure> {
    let there = std::fs::metadata(path).map_err(|e| Failure::at(path, "cannot be opened", e))?;
    let may_have_files = matches!(peer, Peer::Local { uid, .. } if uid == 0 || uid == geteuid().as_raw());
    if there.file_type().is_block_device() || there.is_file() && may_have_files {
        return Ok(());
    }
    Err(Failure::Failed(format!(
        "{}: expected a block device: `ubcache make` on the host itself, as root, also formats files",
        path.display()
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dirty_data_is_lost_of_named_devices_only() {
        let devices: Vec<PathBuf> = vec!["/dev/sdb".into(), "/dev/disk/by-id/x".into()];
        let named = |names: &[&str]| {
            let names: Vec<PathBuf> = names.iter().map(PathBuf::from).collect();
            named_devices(&names, &devices).map_err(|refusal| refusal.text)
        };
        assert_eq!(named(&["x", "/dev/sdb"]).unwrap(), [devices[1].clone(), devices[0].clone()]);
        assert_eq!(named(&[]).unwrap(), [] as [PathBuf; 0]);
        for wrong in ["", "sd", "/dev", "dev/sdb", "*"] {
            assert!(named(&[wrong]).unwrap_err().contains("expected the name of a device"), "{wrong}");
        }
    }

    /// A member of the group of the socket could have had `/etc/shadow` overwritten by root.
    #[test]
    fn files_of_the_host_are_formatted_for_root_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, "x").unwrap();
        let local = |uid| Peer::Local { uid, gid: 0, pid: None };
        assert!(is_for(local(geteuid().as_raw()), &path).is_ok());
        for peer in [local(12345), Peer::Remote("127.0.0.1:1".parse().unwrap()), Peer::Other("a test")] {
            let said = is_for(peer, &path).unwrap_err();
            assert!(said.message().unwrap().contains("expected a block device"), "{said:?}");
        }
        for wrong in [dir.path(), Path::new("/dev/null"), &dir.path().join("none")] {
            assert!(is_for(local(0), wrong).is_err(), "{}", wrong.display());
        }
    }
}
