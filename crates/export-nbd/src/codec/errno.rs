//! Error numbers of replies: this module alone maps errors of a volume to errors of the protocol.
//!
//! Owns the error numbers of the protocol. Must not know requests.

use io::VolumeError;

/// The error numbers of the protocol that this server uses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum Errno {
    /// The export is read-only.
    Perm = 1,
    /// A device failed.
    Io = 5,
    /// The server is short of memory.
    NoMem = 12,
    /// The request is not valid.
    Inval = 22,
    /// No space, or a write beyond the end.
    NoSpace = 28,
    /// The server shuts down.
    Shutdown = 108,
}

impl Errno {
    /// The number on the wire.
    pub const fn code(self) -> u32 {
        self as u32
    }

    /// The error number that a client gets for `error`; `writing` is true if the request stores data.
    pub fn of_volume_error(error: &VolumeError, writing: bool) -> Errno {
        match error {
            // The protocol asks for ENOSPC where a write does not fit.
            VolumeError::OutOfRange { .. } if writing => Errno::NoSpace,
            VolumeError::OutOfRange { .. } => Errno::Inval,
            VolumeError::Stopped(_) => Errno::Shutdown,
            VolumeError::ReadOnly(_) => Errno::Perm,
            VolumeError::NoSpace(_) => Errno::NoSpace,
            VolumeError::Io(io) => match io.errno {
                12 => Errno::NoMem,
                // ENOSPC, EFBIG and EDQUOT of the device below.
                28 | 27 | 122 => Errno::NoSpace,
                // Any other number of the system could mean something else to the client. For example, an EINVAL of a device
                // is not caused by the client's request.
                _ => Errno::Io,
            },
            VolumeError::Failed(_) => Errno::Io,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use format::{Sector, Sectors};
    use io::{FailedOperation, Op};

    use super::*;

    fn device_error(errno: i32) -> VolumeError {
        let (sector, sectors) = (Sector(8), Sectors(1));
        VolumeError::Io(
            FailedOperation { device: Arc::from("sdb"), op: Op::Read, sector, sectors, errno }.into(),
        )
    }

    #[test]
    fn every_failure_has_its_number() {
        let range = VolumeError::OutOfRange { sector: Sector(9), sectors: Sectors(1), capacity: Sectors(8) };
        let cases = [
            (range.clone(), true, Errno::NoSpace),
            (range, false, Errno::Inval),
            (VolumeError::Stopped("v".into()), true, Errno::Shutdown),
            (VolumeError::ReadOnly("v".into()), true, Errno::Perm),
            (VolumeError::no_space("full"), true, Errno::NoSpace),
            (VolumeError::failed("damaged"), false, Errno::Io),
            (device_error(5), false, Errno::Io),
            (device_error(22), false, Errno::Io),
            (device_error(12), false, Errno::NoMem),
            (device_error(28), true, Errno::NoSpace),
        ];
        for (error, writing, expected) in cases {
            assert_eq!(Errno::of_volume_error(&error, writing), expected, "{error}");
        }
    }

    #[test]
    fn numbers_are_those_of_the_protocol() {
        let codes = [Errno::Perm, Errno::Io, Errno::NoMem, Errno::Inval, Errno::NoSpace, Errno::Shutdown];
        assert_eq!(codes.map(Errno::code), [1, 5, 12, 22, 28, 108]);
    }
}
