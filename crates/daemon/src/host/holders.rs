//! The users that a stop of everything waits for.
//!
//! Owns what a client sees of such a stop: the ways that a volume still has, its users, and the command that ends the first use.
//! Must not know how an export ends.

use std::path::Path;

use blockio::users::{self, User, in_words};
use serve::exports::{Opens, Way};
use serve::plain;

use super::{Host, Served};
use crate::order::Holder;

/// The ways to reach a volume, with those of the export that is being ended.
pub(super) fn ways_of(host: &Host<'_>, one: &Served) -> Vec<Way> {
    let name = one.volume.name();
    let ending = host.ending.borrow();
    let left = ending.iter().filter(|(of, _)| *of == name).flat_map(|(_, ways)| ways.clone());
    left.chain(one.exports.iter().flat_map(|e| e.export.ways(&name))).collect()
}

/// The volumes that are in use while everything is being stopped.
pub(super) async fn of(host: &Host<'_>) -> Vec<Holder> {
    let volumes: Vec<_> =
        host.served.borrow().iter().map(|one| (one.volume.clone(), ways_of(host, one))).collect();
    let mut found = Vec::new();
    for (volume, ways) in volumes {
        let users = host.users_of(ways).await;
        if let Some(first) = users.first() {
            let (name, label) = (volume.name(), volume.tunables().label);
            found.push(Holder { name, label, users: in_words(&users), command: end_of_use(first) });
        }
    }
    found
}

/// The command that ends a use, or shows who can end it.
pub(crate) fn end_of_use(user: &User) -> String {
    match user {
        User::Mount { at, .. } => format!("umount {}", plain::in_shell(&at.display().to_string())),
        User::Swap(device) => format!("swapoff {}", device.display()),
        User::Holder(name) => format!("lsblk /dev/{name}"),
        User::Process { pid, .. } => format!("ps -fp {pid}"),
    }
}

/// The users of the exports of a volume, as far as the kernel reports them.
pub(super) fn users_of(way: &Way) -> Vec<User> {
    let place = Path::new(&way.address);
    match way.kind.opens {
        Opens::BlockDevice { .. } => {
            let device = place.strip_prefix("/dev").map(|device| device.to_string_lossy());
            device.map_or_else(|_| Vec::new(), |device| users::of_block_device(&device))
        }
        Opens::File => place.parent().map_or_else(Vec::new, users::of_directory),
        Opens::Connection => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_use_has_a_command() {
        let process = User::Process { pid: 7, name: "dd".into(), path: "/dev/loop0".into() };
        for (user, expected) in [
            (
                User::Mount { device: "/dev/loop0".into(), at: "/mnt/my films".into() },
                "umount '/mnt/my films'",
            ),
            (User::Mount { device: "/dev/loop0".into(), at: "/mnt".into() }, "umount /mnt"),
            (User::Swap("/dev/loop0".into()), "swapoff /dev/loop0"),
            (User::Holder("dm-0".into()), "lsblk /dev/dm-0"),
            (process, "ps -fp 7"),
        ] {
            assert_eq!(end_of_use(&user), expected);
        }
    }
}
