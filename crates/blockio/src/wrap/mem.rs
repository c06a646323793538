//! A device in memory: it does no I/O, and every request ends at once.
//!
//! Owns the contents in pieces of 64 KiB, which are allocated at their first write; a discarded piece is freed. Contents last as
//! long as the value. The device refuses every request that breaks the contract of `io::Device`.

use std::cell::RefCell;
use std::sync::Arc;

use ::io::{Completer, Device, DeviceInfo, Op, Request};
use format::{SECTOR_BYTES, Sectors};

const PIECE_BYTES: usize = 1 << 16;

type MemPiece = Option<Box<[u8]>>;

/// A RAM device. Ranges that were never written read as zeros.
pub struct MemDisk {
    info: DeviceInfo,
    pieces: RefCell<Vec<MemPiece>>,
}

impl MemDisk {
    /// A device of `sectors` in blocks of 512 or 4096 bytes.
    ///
    /// # Panics
    /// For another block size, or a size that is not a whole number of blocks.
    pub fn new(name: &str, sectors: Sectors, logical_block_bytes: u32) -> MemDisk {
        assert!(matches!(logical_block_bytes, 512 | 4096), "logical blocks of {logical_block_bytes} bytes");
        let whole = sectors.bytes().is_multiple_of(u64::from(logical_block_bytes));
        assert!(whole, "{sectors} sectors in blocks of {logical_block_bytes} bytes");
        let info = DeviceInfo {
            name: Arc::from(name),
            sectors,
            logical_block_bytes,
            physical_block_bytes: logical_block_bytes,
            optimal_io_bytes: 0,
            rotational: false,
            discard: true,
            sparse: false,
            partial_stripes_expensive: false,
        };
        let pieces = usize::try_from(sectors.bytes().div_ceil(PIECE_BYTES as u64)).expect("fits into memory");
        MemDisk { info, pieces: RefCell::new(vec![None; pieces]) }
    }

    /// Memory in use, in bytes.
    pub fn used_bytes(&self) -> usize {
        self.pieces.borrow().iter().flatten().count() * PIECE_BYTES
    }

    /// Calls `f` for each piece of the range of `request`: with the piece, the range inside the piece, and the position of its
    /// first byte in the request.
    fn each(&self, request: &Request, mut f: impl FnMut(&mut MemPiece, std::ops::Range<usize>, usize)) {
        let pieces = &mut *self.pieces.borrow_mut();
        // `submit` has checked that the range lies in the device, and the size of the device fits into memory.
        let start = request.sector.bytes() as usize;
        let end = start + request.sectors.bytes() as usize;
        let mut at = start;
        while at < end {
            let from = at % PIECE_BYTES;
            let to = PIECE_BYTES.min(from + (end - at));
            f(&mut pieces[at / PIECE_BYTES], from..to, at - start);
            at += to - from;
        }
    }

    fn run(&self, request: &mut Request) {
        let range = request.byte_range();
        match request.op {
            Op::Flush => {}
            Op::Read => {
                let Some(mut buffer) = request.buffer.take() else { return };
                let to = &mut buffer.as_mut()[range];
                self.each(request, |piece, part, at| match piece {
                    Some(bytes) => to[at..][..part.len()].copy_from_slice(&bytes[part]),
                    None => to[at..][..part.len()].fill(0),
                });
                request.buffer = Some(buffer);
            }
            Op::Write { .. } => {
                let Some(buffer) = &request.buffer else { return };
                let from = &buffer.as_slice()[range];
                self.each(request, |piece, part, at| {
                    let bytes = piece.get_or_insert_with(|| vec![0; PIECE_BYTES].into_boxed_slice());
                    let n = part.len();
                    bytes[part].copy_from_slice(&from[at..][..n]);
                });
            }
            Op::Discard | Op::WriteZeroes { .. } => self.each(request, |piece, part, _| {
                if part.len() == PIECE_BYTES {
                    *piece = None;
                } else if let Some(bytes) = piece {
                    bytes[part].fill(0);
                }
            }),
        }
    }
}

const _: () = assert!((PIECE_BYTES as u64).is_multiple_of(SECTOR_BYTES));

impl Device for MemDisk {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn submit(&self, mut request: Request, completer: Completer) {
        let result = self.info.check(&mut request);
        if result.is_ok() {
            self.run(&mut request);
        }
        completer.complete(result, request.buffer);
    }
}
