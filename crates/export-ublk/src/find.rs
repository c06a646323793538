//! Devices that a process left behind, and the volumes to which they belong.
//!
//! Owns the identity of devices. The driver stores 64 bits for the server of a device. They hold a checksum of what names the volume,
//! so that a process that serves the same volume again finds the device without a file or registry. The driver never changes them.

use format::checksum::crc64;

use crate::abi::{self, DeviceInfo};
use crate::control::Control;
use crate::error::UblkError;
use crate::sysfs;

/// The identity of a device across processes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Identity(u64);

impl Identity {
    /// The identity of what `parts` name together, such as the UUID of a set and a slot of it.
    pub fn of(parts: &[&[u8]]) -> Identity {
        let mut bytes = b"ubcache ublk".to_vec();
        for part in parts {
            bytes.extend((part.len() as u64).to_le_bytes());
            bytes.extend(*part);
        }
        // Other servers leave zero there.
        Identity(crc64(&bytes).max(1))
    }

    pub(crate) fn bits(self) -> u64 {
        self.0
    }
}

/// The identities by which the device of a volume is found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Identities {
    /// The identity of a new device.
    pub new: Identity,
    /// The identity that an earlier version of this program gave the device, if it was another one.
    pub earlier: Option<Identity>,
}

impl Identities {
    /// All of them, in the order of the search.
    pub fn all(self) -> impl Iterator<Item = Identity> {
        std::iter::once(self.new).chain(self.earlier)
    }
}

impl From<Identity> for Identities {
    fn from(new: Identity) -> Identities {
        Identities { new, earlier: None }
    }
}

/// A device of a volume, in service or left behind.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Left {
    /// Number of the device.
    pub number: u32,
    /// The process that serves it, or served it last.
    pub pid: i32,
    /// Whether that process runs.
    pub alive: bool,
}

/// The device with this identity, if there is one.
pub(crate) fn find(control: &Control, identity: Identity) -> Option<DeviceInfo> {
    control
        .port()
        .devices()
        .into_iter()
        .filter_map(|number| control.info(number).ok())
        .find(|info| info.server_flags == identity.bits() && info.flags & abi::F_USER_RECOVERY != 0)
}

/// The devices with these identities, in service or left behind. May block for a moment.
///
/// # Errors
/// If the driver cannot be opened.
pub fn left_behind(identities: &[Identity]) -> Result<Vec<Left>, UblkError> {
    if !sysfs::is_root() {
        // Devices of users without privileges do not outlive their process.
        return Ok(Vec::new());
    }
    let control = Control::open()?;
    let found = identities.iter().filter_map(|i| find(&control, *i));
    let left = |info: DeviceInfo| Left {
        number: info.device,
        pid: info.server_pid,
        alive: info.state == abi::STATE_LIVE && control.port().is_alive(info.server_pid),
    };
    Ok(found.map(left).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identities_tell_parts_apart() {
        let of = Identity::of;
        assert_eq!(of(&[b"ab", b"c"]), of(&[b"ab", b"c"]));
        assert_ne!(of(&[b"ab", b"c"]), of(&[b"a", b"bc"]));
        assert_ne!(of(&[]), of(&[b""]));
    }
}
