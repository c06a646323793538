//! Decodes descriptors into requests, and encodes results.
//!
//! Owns the checks of descriptors, which are not trusted. Invariant: a decoded request fits into its buffer. The volume checks
//! whether the request lies in the volume.

use format::{Sector, Sectors};
use io::{ReadFlags, VolumeError, WriteFlags};

use crate::abi::{self, IoDescriptor};

/// A decoded request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Request {
    Read { sector: Sector, sectors: Sectors, flags: ReadFlags },
    Write { sector: Sector, sectors: Sectors, flags: WriteFlags },
    Flush,
    Discard { sector: Sector, sectors: Sectors },
    WriteZeroes { sector: Sector, sectors: Sectors, fua: bool, may_unmap: bool },
}

impl Request {
    /// Decodes a descriptor whose buffer has `max_bytes` bytes.
    ///
    /// # Errors
    /// The error number for an unknown or impossible operation.
    pub(crate) fn decode(descriptor: &IoDescriptor, max_bytes: u32) -> Result<Request, i32> {
        let sector = Sector(descriptor.start_sector);
        let sectors = Sectors(u64::from(descriptor.sectors));
        let has = |flag: u32| descriptor.op_flags & flag != 0;
        let meta = has(abi::IO_META);
        if sector.checked_add(sectors).is_none() {
            return Err(libc::EINVAL);
        }
        let request = match (descriptor.op_flags & 0xff) as u8 {
            abi::OP_READ => Request::Read { sector, sectors, flags: ReadFlags { meta } },
            abi::OP_WRITE => {
                let flags = WriteFlags { fua: has(abi::IO_FUA), meta };
                Request::Write { sector, sectors, flags }
            }
            abi::OP_FLUSH => return Ok(Request::Flush),
            abi::OP_DISCARD => return Ok(Request::Discard { sector, sectors }),
            abi::OP_WRITE_ZEROES => {
                let (fua, may_unmap) = (has(abi::IO_FUA), !has(abi::IO_NO_UNMAP));
                return Ok(Request::WriteZeroes { sector, sectors, fua, may_unmap });
            }
            _ => return Err(libc::EOPNOTSUPP),
        };
        if sectors.bytes() > u64::from(max_bytes) {
            return Err(libc::EINVAL);
        }
        Ok(request)
    }

    /// The result for the driver after success: the number of bytes of a read or write, else 0.
    pub(crate) fn success(self) -> i32 {
        match self {
            // A request has the size of a buffer at most, so the number fits.
            Request::Read { sectors, .. } | Request::Write { sectors, .. } => sectors.bytes() as i32,
            Request::Flush | Request::Discard { .. } | Request::WriteZeroes { .. } => 0,
        }
    }
}

/// The result for the driver after a failure: the negated error number.
///
/// The block layer knows only some numbers; all others become an I/O error.
pub(crate) fn failure(error: &VolumeError) -> i32 {
    let errno = match error {
        VolumeError::NoSpace(_) => libc::ENOSPC,
        VolumeError::Io(e) => match e.errno {
            e @ (libc::ENOSPC
            | libc::EOPNOTSUPP
            | libc::ETIMEDOUT
            | libc::EREMOTEIO
            | libc::ENODATA
            | libc::EILSEQ) => e,
            _ => libc::EIO,
        },
        VolumeError::OutOfRange { .. }
        | VolumeError::Stopped(_)
        | VolumeError::ReadOnly(_)
        | VolumeError::Failed(_) => libc::EIO,
    };
    -errno
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn descriptor(op_flags: u32, start_sector: u64, sectors: u32) -> IoDescriptor {
        IoDescriptor { op_flags, sectors, start_sector, address: 0 }
    }

    #[test]
    fn operations_and_flags() {
        let (sector, sectors) = (Sector(7), Sectors(8));
        let decode = |op_flags| Request::decode(&descriptor(op_flags, 7, 8), 4096);
        let read = |meta| Ok(Request::Read { sector, sectors, flags: ReadFlags { meta } });
        let write = |fua, meta| Ok(Request::Write { sector, sectors, flags: WriteFlags { fua, meta } });
        assert_eq!((decode(0), decode(1 << 11)), (read(false), read(true)));
        assert_eq!((decode(1), decode(1 | 1 << 11)), (write(false, false), write(false, true)));
        assert_eq!(decode(1 | 1 << 13 | 1 << 11), write(true, true));
        assert_eq!(decode(1 | 1 << 13 | 1 << 8), write(true, false), "flags without meaning here");
        assert_eq!(decode(2), Ok(Request::Flush));
        assert_eq!(decode(3), Ok(Request::Discard { sector, sectors }));
        assert_eq!(decode(5), Ok(Request::WriteZeroes { sector, sectors, fua: false, may_unmap: true }));
        assert_eq!(
            decode(5 | 1 << 15 | 1 << 13),
            Ok(Request::WriteZeroes { sector, sectors, fua: true, may_unmap: false })
        );
        for unknown in [4, 6, 255] {
            assert_eq!(decode(unknown), Err(libc::EOPNOTSUPP));
        }
    }

    #[test]
    fn a_descriptor_outside_its_limits_is_refused() {
        assert_eq!(Request::decode(&descriptor(0, 0, 9), 4096), Err(libc::EINVAL));
        assert_eq!(Request::decode(&descriptor(1, u64::MAX, 1), 4096), Err(libc::EINVAL));
        let large = Request::decode(&descriptor(3, 0, u32::MAX), 4096);
        assert_eq!(large, Ok(Request::Discard { sector: Sector(0), sectors: Sectors(u64::from(u32::MAX)) }));
    }

    #[test]
    fn results_are_what_the_block_layer_knows() {
        assert_eq!(Request::decode(&descriptor(1, 0, 8), 4096).unwrap().success(), 4096);
        assert_eq!(Request::Flush.success(), 0);
        assert_eq!(failure(&VolumeError::no_space("full")), -libc::ENOSPC);
        assert_eq!(failure(&VolumeError::Stopped("x".into())), -libc::EIO);
    }

    proptest! {
        #[test]
        fn no_request_is_larger_than_its_buffer(op_flags: u32, start: u64, sectors: u32, pages in 1u32..1024) {
            let max = pages * 4096;
            match Request::decode(&descriptor(op_flags, start, sectors), max) {
                Ok(r @ (Request::Read { sectors, .. } | Request::Write { sectors, .. })) => {
                    prop_assert!(sectors.bytes() <= u64::from(max));
                    prop_assert_eq!(u64::try_from(r.success()).unwrap(), sectors.bytes());
                }
                Ok(r) => prop_assert_eq!(r.success(), 0),
                Err(e) => prop_assert!(e > 0),
            }
        }
    }
}
