//! The parameters of a volume, in the structures of the driver.
//!
//! Owns the limits of requests that the server announces. Must not know devices.

use io::BlockVolume;

use crate::abi::{self, BasicParams, DiscardParams, Params};

/// Largest discard, in sectors: 1 GiB. The volume drops the keys of a discard in one step.
const MAX_DISCARD_SECTORS: u32 = 1 << 21;

/// Largest write of zeros, in sectors: 64 MiB. A device without a command for zeros has to write them.
const MAX_WRITE_ZEROES_SECTORS: u32 = 1 << 17;

/// Largest optimal size that is accepted, in bytes.
const MAX_OPTIMAL_BYTES: u32 = 1 << 30;

/// Parameters of the device for `volume`, whose requests carry at most `max_io_bytes`.
pub(crate) fn of(volume: &impl BlockVolume, max_io_bytes: u32) -> Params {
    let logical = volume.logical_block_bytes().clamp(512, 4096);
    let physical = volume.physical_block_bytes().max(logical);
    let optimal = volume.optimal_io_bytes();
    // The driver takes only powers of two; the stripe of a RAID over three disks is not one.
    let optimal_shift = if optimal.is_power_of_two() && optimal <= MAX_OPTIMAL_BYTES && optimal >= logical {
        shift(optimal)
    } else {
        shift(logical)
    };
    let read_only = if volume.read_only() { abi::ATTR_READ_ONLY } else { 0 };
    Params {
        len: size_of::<Params>() as u32,
        types: abi::PARAM_BASIC | abi::PARAM_DISCARD,
        basic: BasicParams {
            // Not rotational, because the cache hides seeks.
            attrs: read_only | abi::ATTR_VOLATILE_CACHE | abi::ATTR_FUA,
            logical_shift: shift(logical),
            physical_shift: shift(physical),
            io_opt_shift: optimal_shift,
            io_min_shift: shift(physical),
            max_sectors: max_io_bytes / 512,
            chunk_sectors: 0,
            device_sectors: volume.sectors().0,
            virt_boundary_mask: 0,
        },
        discard: DiscardParams {
            alignment_bytes: 0,
            granularity_bytes: physical,
            max_discard_sectors: MAX_DISCARD_SECTORS,
            max_write_zeroes_sectors: MAX_WRITE_ZEROES_SECTORS,
            max_segments: 1,
            reserved: 0,
        },
        pad: 0,
    }
}

fn shift(bytes: u32) -> u8 {
    // The exponent is below 32, so it fits.
    bytes.next_power_of_two().trailing_zeros() as u8
}

#[cfg(test)]
mod tests {
    use rig::{RamDisk, RamVolume};

    use super::*;

    #[test]
    fn blocks_and_limits() {
        let disk = RamDisk::new("ram", 1000 * 512).with_blocks(512, 4096).with_optimal_io(65536);
        let volume = RamVolume::on(disk.shared());
        let p = of(&volume, 512 << 10);
        assert_eq!((p.len, p.types), (64, 3));
        assert_eq!(p.basic.attrs, abi::ATTR_VOLATILE_CACHE | abi::ATTR_FUA);
        assert_eq!((p.basic.logical_shift, p.basic.physical_shift, p.basic.io_opt_shift), (9, 12, 16));
        assert_eq!((p.basic.max_sectors, p.basic.device_sectors), (1024, 1000));
        assert_eq!((p.discard.granularity_bytes, p.discard.max_segments), (4096, 1));
    }

    #[test]
    fn sizes_that_are_no_powers_of_two_are_left_out() {
        let disk = RamDisk::new("ram", 8 * 512).with_blocks(4096, 512).with_optimal_io(3 << 16);
        let volume = RamVolume::on(disk.with_read_only().shared());
        let p = of(&volume, 4096);
        assert_eq!((p.basic.logical_shift, p.basic.physical_shift, p.basic.io_opt_shift), (12, 12, 12));
        assert_ne!(p.basic.attrs & abi::ATTR_READ_ONLY, 0);
    }
}
