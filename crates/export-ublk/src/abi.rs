//! The ABI of the ublk driver: the numbers and structures of the kernel's `linux/ublk_cmd.h`.
//!
//! Owns the constants and structures. All fields are in the byte order of this machine. Sizes and offsets are checked at compile
//! time, so that a wrong change is a compile error. Must not know how they are used.

use std::mem::{offset_of, size_of};

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The device to which control commands are sent.
pub(crate) const CONTROL: &str = "/dev/ublk-control";

/// Largest queue depth.
pub(crate) const MAX_QUEUE_DEPTH: u16 = 4096;
/// Device numbers are below this number.
pub(crate) const MAX_DEVICES: u32 = 1 << 20;
/// In place of a device number: the driver chooses.
pub(crate) const ANY_DEVICE: u32 = u32::MAX;
/// In place of a queue number: the command is not about a queue.
pub(crate) const NO_QUEUE: u16 = u16::MAX;

const IOC_READ: u32 = 2;
const IOC_WRITE: u32 = 1;

/// The number of a command, encoded as for ioctl(2): direction, size of the structure, letter of the driver, number.
const fn code(direction: u32, number: u32, bytes: usize) -> u32 {
    direction << 30 | (bytes as u32) << 16 | (b'u' as u32) << 8 | number
}

const fn control(direction: u32, number: u32) -> u32 {
    code(direction, number, size_of::<ControlCommand>())
}

pub(crate) const CMD_ADD: u32 = control(IOC_READ | IOC_WRITE, 0x04);
pub(crate) const CMD_DELETE: u32 = control(IOC_READ | IOC_WRITE, 0x05);
pub(crate) const CMD_START: u32 = control(IOC_READ | IOC_WRITE, 0x06);
pub(crate) const CMD_STOP: u32 = control(IOC_READ | IOC_WRITE, 0x07);
pub(crate) const CMD_SET_PARAMS: u32 = control(IOC_READ | IOC_WRITE, 0x08);
pub(crate) const CMD_GET_PARAMS: u32 = control(IOC_READ, 0x09);
pub(crate) const CMD_START_RECOVERY: u32 = control(IOC_READ | IOC_WRITE, 0x10);
pub(crate) const CMD_END_RECOVERY: u32 = control(IOC_READ | IOC_WRITE, 0x11);
pub(crate) const CMD_GET_INFO: u32 = control(IOC_READ, 0x12);
pub(crate) const CMD_GET_FEATURES: u32 = control(IOC_READ, 0x13);

/// Fetches the first request of a tag.
pub(crate) const IO_FETCH: u32 = code(IOC_READ | IOC_WRITE, 0x20, size_of::<IoCommand>());
/// Answers the request of a tag and fetches the next one.
pub(crate) const IO_COMMIT_AND_FETCH: u32 = code(IOC_READ | IOC_WRITE, 0x21, size_of::<IoCommand>());

/// The result of a fetch that has a request.
pub(crate) const RESULT_OK: i32 = 0;
/// The result of a fetch if the device is removed.
pub(crate) const RESULT_ABORT: i32 = -libc::ENODEV;

/// The device stays when its server ends.
pub(crate) const F_USER_RECOVERY: u64 = 1 << 3;
/// The driver gives unanswered requests of an ended server to the next one.
pub(crate) const F_USER_RECOVERY_REISSUE: u64 = 1 << 4;
/// A user without privileges has made the device.
pub(crate) const F_UNPRIVILEGED_DEV: u64 = 1 << 5;

/// The device is added and not started, or stopped.
pub(crate) const STATE_DEAD: u16 = 0;
/// The device is in service.
pub(crate) const STATE_LIVE: u16 = 1;
/// The server of the device has ended; requests wait for the next one.
pub(crate) const STATE_QUIESCED: u16 = 2;

/// A control command: 32 of the 80 bytes for a command in a large entry of the ring.
#[derive(Clone, Copy, Default, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct ControlCommand {
    pub(crate) device: u32,
    pub(crate) queue: u16,
    /// Length of the payload at `address`, in bytes.
    pub(crate) len: u16,
    /// Address of the payload, in or out. The payload begins with the path of the character device if `path_len` is not 0.
    pub(crate) address: u64,
    pub(crate) data: u64,
    /// Length of the path at the beginning of the payload, in bytes.
    pub(crate) path_len: u16,
    pub(crate) pad: u16,
    pub(crate) reserved: u32,
}

const _: () = assert!(size_of::<ControlCommand>() == 32);
const _: () = assert!(offset_of!(ControlCommand, address) == 8);
const _: () = assert!(offset_of!(ControlCommand, data) == 16);
const _: () = assert!(offset_of!(ControlCommand, path_len) == 24);

/// The driver's information about a device.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct DeviceInfo {
    pub(crate) queues: u16,
    pub(crate) depth: u16,
    pub(crate) state: u16,
    pub(crate) pad0: u16,
    pub(crate) max_io_bytes: u32,
    pub(crate) device: u32,
    pub(crate) server_pid: i32,
    pub(crate) pad1: u32,
    pub(crate) flags: u64,
    /// Stored by the driver for the server and not used by it: here, the device's identity.
    pub(crate) server_flags: u64,
    pub(crate) owner_uid: u32,
    pub(crate) owner_gid: u32,
    pub(crate) reserved1: u64,
    pub(crate) reserved2: u64,
}

const _: () = assert!(size_of::<DeviceInfo>() == 64);
const _: () = assert!(offset_of!(DeviceInfo, max_io_bytes) == 8);
const _: () = assert!(offset_of!(DeviceInfo, server_pid) == 16);
const _: () = assert!(offset_of!(DeviceInfo, flags) == 24);
const _: () = assert!(offset_of!(DeviceInfo, server_flags) == 32);
const _: () = assert!(offset_of!(DeviceInfo, owner_uid) == 40);

/// `Params::basic` is filled in.
pub(crate) const PARAM_BASIC: u32 = 1;
/// `Params::discard` is filled in.
pub(crate) const PARAM_DISCARD: u32 = 1 << 1;

/// The device refuses writes.
pub(crate) const ATTR_READ_ONLY: u32 = 1;
/// The device has a volatile cache, and flushes make its data durable.
pub(crate) const ATTR_VOLATILE_CACHE: u32 = 1 << 2;
/// The device has durable writes (FUA).
pub(crate) const ATTR_FUA: u32 = 1 << 3;

/// Sizes and limits. Shifts are powers of two of bytes; a limit of zero means that there is none.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct BasicParams {
    pub(crate) attrs: u32,
    pub(crate) logical_shift: u8,
    pub(crate) physical_shift: u8,
    pub(crate) io_opt_shift: u8,
    pub(crate) io_min_shift: u8,
    pub(crate) max_sectors: u32,
    pub(crate) chunk_sectors: u32,
    pub(crate) device_sectors: u64,
    pub(crate) virt_boundary_mask: u64,
}

const _: () = assert!(size_of::<BasicParams>() == 32);
const _: () = assert!(offset_of!(BasicParams, max_sectors) == 8);
const _: () = assert!(offset_of!(BasicParams, device_sectors) == 16);

/// Limits of discards and of writes of zeros.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct DiscardParams {
    pub(crate) alignment_bytes: u32,
    pub(crate) granularity_bytes: u32,
    pub(crate) max_discard_sectors: u32,
    pub(crate) max_write_zeroes_sectors: u32,
    pub(crate) max_segments: u16,
    pub(crate) reserved: u16,
}

const _: () = assert!(size_of::<DiscardParams>() == 20);

/// The parameters that this server uses. They are a prefix of the driver's own structure.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct Params {
    pub(crate) len: u32,
    pub(crate) types: u32,
    pub(crate) basic: BasicParams,
    pub(crate) discard: DiscardParams,
    pub(crate) pad: u32,
}

const _: () = assert!(size_of::<Params>() == 64);
const _: () = assert!(offset_of!(Params, basic) == 8);
const _: () = assert!(offset_of!(Params, discard) == 40);

pub(crate) const OP_READ: u8 = 0;
pub(crate) const OP_WRITE: u8 = 1;
pub(crate) const OP_FLUSH: u8 = 2;
pub(crate) const OP_DISCARD: u8 = 3;
pub(crate) const OP_WRITE_ZEROES: u8 = 5;

/// In `IoDescriptor::op_flags`: the data is a file system's metadata.
pub(crate) const IO_META: u32 = 1 << 11;
/// In `IoDescriptor::op_flags`: the write is durable at completion.
pub(crate) const IO_FUA: u32 = 1 << 13;
/// In `IoDescriptor::op_flags`: the range of zeros must stay allocated.
pub(crate) const IO_NO_UNMAP: u32 = 1 << 15;

/// A request, in memory that the driver shares. Each tag of a queue has one.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct IoDescriptor {
    /// Operation in the low eight bits, flags in the others.
    pub(crate) op_flags: u32,
    pub(crate) sectors: u32,
    pub(crate) start_sector: u64,
    pub(crate) address: u64,
}

const _: () = assert!(size_of::<IoDescriptor>() == 24);
const _: () = assert!(offset_of!(IoDescriptor, start_sector) == 8);

/// A command about one tag.
#[derive(Clone, Copy, Default, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct IoCommand {
    pub(crate) queue: u16,
    pub(crate) tag: u16,
    /// Result of the answered request: a number of bytes, or a negated error number.
    pub(crate) result: i32,
    /// Address of the buffer of the answered read and of the next request.
    pub(crate) address: u64,
}

const _: () = assert!(size_of::<IoCommand>() == 16);
const _: () = assert!(offset_of!(IoCommand, address) == 8);

/// Distance of two queues' descriptors in the character device, in bytes.
pub(crate) fn descriptors_stride(page_bytes: usize) -> usize {
    (usize::from(MAX_QUEUE_DEPTH) * size_of::<IoDescriptor>()).next_multiple_of(page_bytes)
}

/// Length of the descriptors of a queue, in bytes.
pub(crate) fn descriptors_len(depth: u16, page_bytes: usize) -> usize {
    (usize::from(depth) * size_of::<IoDescriptor>()).next_multiple_of(page_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The command codes equal the values of the header's macros.
    #[test]
    fn codes_are_those_of_the_header() {
        assert_eq!(CMD_ADD, 0xc020_7504);
        assert_eq!(CMD_GET_PARAMS, 0x8020_7509);
        assert_eq!(CMD_GET_INFO, 0x8020_7512);
        assert_eq!(CMD_GET_FEATURES, 0x8020_7513);
        assert_eq!(IO_FETCH, 0xc010_7520);
        assert_eq!(IO_COMMIT_AND_FETCH, 0xc010_7521);
    }

    /// The structures equal those in the header of this host, if it has one.
    #[test]
    fn numbers_are_those_of_the_header_of_this_host() {
        let path = "/usr/include/linux/ublk_cmd.h";
        let header = match std::fs::read_to_string(path) {
            Ok(header) => header,
            Err(e) => return rig::skipped(format_args!("{path}: {e}")),
        };
        let number = |name: &str| {
            let mut words = header
                .lines()
                .filter_map(|l| l.trim().strip_prefix("#define"))
                .map(str::split_whitespace)
                .find(|words| words.clone().next() == Some(name))
                .unwrap_or_else(|| panic!("{name} is not in the header"));
            words.nth(1).unwrap_or_default().trim_start_matches("0x").to_owned()
        };
        assert_eq!(number("UBLK_MAX_QUEUE_DEPTH"), MAX_QUEUE_DEPTH.to_string());
        assert_eq!(number("UBLK_S_DEV_QUIESCED"), STATE_QUIESCED.to_string());
        assert_eq!(number("UBLK_IO_OP_WRITE_ZEROES"), OP_WRITE_ZEROES.to_string());
        assert_eq!(number("UBLK_CMD_END_USER_RECOVERY"), format!("{:x}", CMD_END_RECOVERY & 0xff));
        assert_eq!(number("UBLK_IO_COMMIT_AND_FETCH_REQ"), format!("{:x}", IO_COMMIT_AND_FETCH & 0xff));
    }

    #[test]
    fn queues_lie_where_the_driver_puts_them() {
        assert_eq!(descriptors_stride(4096), 98_304);
        assert_eq!(descriptors_len(128, 4096), 4096);
        assert_eq!(descriptors_len(171, 4096), 8192);
    }
}
