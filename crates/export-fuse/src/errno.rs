//! Error numbers of replies: this module alone maps errors of a volume to the error number of a system call.
//!
//! Owns this mapping. Must not know requests.

use fuser::Errno;
use io::VolumeError;

/// The error number that the caller gets for `error`.
pub(crate) fn of_volume_error(error: &VolumeError) -> Errno {
    match error {
        // Byte ranges are cut to the volume before the request, so this error is a bug and not caused by the caller.
        VolumeError::OutOfRange { .. } => Errno::EIO,
        // A block device that was removed returns this error too.
        VolumeError::Stopped(_) => Errno::ENODEV,
        VolumeError::ReadOnly(_) => Errno::EROFS,
        VolumeError::NoSpace(_) => Errno::ENOSPC,
        VolumeError::Io(io) => match io.errno {
            libc::ENOMEM => Errno::ENOMEM,
            libc::ENOSPC | libc::EFBIG | libc::EDQUOT => Errno::ENOSPC,
            // Any other number could mean something else to the caller. An EINVAL of a device is not caused by the request,
            // and its EOPNOTSUPP would make the loop driver change the features that it offers.
            _ => Errno::EIO,
        },
        VolumeError::Failed(_) => Errno::EIO,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use format::{Sector, Sectors};
    use io::{FailedOperation, Op};

    use super::*;

    #[test]
    fn every_failure_has_its_number() {
        let device = |errno| {
            let (device, sector, sectors) = (Arc::from("sdb"), Sector(8), Sectors(1));
            VolumeError::Io(FailedOperation { device, op: Op::Read, sector, sectors, errno }.into())
        };
        let range = VolumeError::OutOfRange { sector: Sector(9), sectors: Sectors(1), capacity: Sectors(8) };
        let cases = [
            (range, libc::EIO),
            (VolumeError::Stopped("v".into()), libc::ENODEV),
            (VolumeError::ReadOnly("v".into()), libc::EROFS),
            (VolumeError::no_space("full"), libc::ENOSPC),
            (VolumeError::failed("damaged"), libc::EIO),
            (device(libc::EIO), libc::EIO),
            (device(libc::EINVAL), libc::EIO),
            (device(libc::EOPNOTSUPP), libc::EIO),
            (device(libc::ENOMEM), libc::ENOMEM),
            (device(libc::ENOSPC), libc::ENOSPC),
        ];
        for (error, expected) in cases {
            assert_eq!(of_volume_error(&error).code(), expected, "{error}");
        }
    }
}
