//! The conformance suite of devices: checks that every implementation of `io::Device` must pass.
//!
//! Owns the checks of the contract in the head of `io`'s device module, except for a power loss, which crate `sim` checks. Runs
//! on any driver, in real or simulated time. A failed check panics with expected and found. Must not know how a device is made.

use std::collections::BTreeMap;

use format::{SECTOR_BYTES, Sector, Sectors};
use io::{Buffer, Disk, Op, Request, Rng};

const EINVAL: i32 = 22;
const EOPNOTSUPP: i32 = 95;

/// Size of the devices that the suite requests: 8 MiB.
pub const DEVICE_SECTORS: Sectors = Sectors(16384);

/// Runs every check, each on a fresh device of [`DEVICE_SECTORS`] from `make`.
///
/// # Panics
/// If the device breaks its contract.
pub async fn check(mut make: impl FnMut(Sectors) -> Disk) {
    info_is_sane(&make(DEVICE_SECTORS));
    a_write_is_read_back(&make(DEVICE_SECTORS)).await;
    a_write_changes_nothing_around_it(&make(DEVICE_SECTORS)).await;
    only_the_named_part_of_the_buffer_moves(&make(DEVICE_SECTORS)).await;
    many_operations_at_once(&make(DEVICE_SECTORS)).await;
    durable_writes_and_flushes(&make(DEVICE_SECTORS)).await;
    bad_requests_are_refused(&make(DEVICE_SECTORS)).await;
    shared_buffers(&make(DEVICE_SECTORS)).await;
    requests_of_nothing(&make(DEVICE_SECTORS)).await;
    zeroes_and_discards(&make(DEVICE_SECTORS)).await;
    an_abandoned_write_still_happens(&make(DEVICE_SECTORS)).await;
    random_operations_match_a_model(&make(DEVICE_SECTORS)).await;
}

/// Length of a logical block in sectors.
fn block(disk: &Disk) -> u64 {
    u64::from(disk.info().logical_block_bytes) / SECTOR_BYTES
}

/// A buffer in which every 8 bytes have their position and the tag of their write.
fn pattern(disk: &Disk, sector: u64, sectors: u64, tag: u64) -> Buffer {
    let mut b = disk.runtime().pool().take((sectors * SECTOR_BYTES) as usize);
    let first = sector * SECTOR_BYTES / 8;
    for (i, word) in b.as_mut().chunks_exact_mut(8).enumerate() {
        word.copy_from_slice(&((first + i as u64) ^ tag.rotate_left(48)).to_le_bytes());
    }
    b
}

async fn write(disk: &Disk, sector: u64, buffer: Buffer) {
    if let Err(e) = disk.write(Sector(sector), buffer, false).await {
        panic!("expected the write to succeed, found: {e}");
    }
}

async fn read(disk: &Disk, sector: u64, sectors: u64) -> Buffer {
    let buffer = disk.runtime().pool().take((sectors * SECTOR_BYTES) as usize);
    let (buffer, result) = disk.read(Sector(sector), buffer).await;
    if let Err(e) = result {
        panic!("expected the read to succeed, found: {e}");
    }
    buffer
}

#[track_caller]
fn assert_same(found: &Buffer, expected: &Buffer, what: &str) {
    if let Some(at) = found.as_slice().iter().zip(expected.as_slice()).position(|(f, e)| f != e) {
        panic!(
            "{what}: byte {at} of {}: expected {:#04x}, found {:#04x}",
            expected.len(),
            expected.as_slice()[at],
            found.as_slice()[at]
        );
    }
    assert_eq!(found.len(), expected.len(), "{what}");
}

fn info_is_sane(disk: &Disk) {
    let info = disk.info();
    assert_eq!(info.sectors, DEVICE_SECTORS, "size");
    assert!(matches!(info.logical_block_bytes, 512 | 4096), "{info:?}");
    assert!(info.physical_block_bytes >= info.logical_block_bytes, "{info:?}");
    assert!(!info.name.is_empty(), "{info:?}");
}

async fn a_write_is_read_back(disk: &Disk) {
    let b = block(disk);
    let end = DEVICE_SECTORS.0;
    let places = [(0, b), (end - b, b), (8 * b, 3 * b), (1024, 2048), (0, end)];
    for (tag, (sector, sectors)) in places.into_iter().enumerate() {
        let data = pattern(disk, sector, sectors, tag as u64);
        write(disk, sector, data.clone()).await;
        assert_same(&read(disk, sector, sectors).await, &data, "what was written");
        let again = pattern(disk, sector, sectors, tag as u64 + 100);
        write(disk, sector, again.clone()).await;
        assert_same(&read(disk, sector, sectors).await, &again, "what was written last");
    }
}

async fn a_write_changes_nothing_around_it(disk: &Disk) {
    let b = block(disk);
    write(disk, 0, pattern(disk, 0, 64 * b, 1)).await;
    write(disk, 10 * b, pattern(disk, 10 * b, 5 * b, 2)).await;
    assert_same(&read(disk, 0, 10 * b).await, &pattern(disk, 0, 10 * b, 1), "before the write");
    assert_same(&read(disk, 10 * b, 5 * b).await, &pattern(disk, 10 * b, 5 * b, 2), "the write");
    assert_same(&read(disk, 15 * b, 49 * b).await, &pattern(disk, 15 * b, 49 * b, 1), "behind the write");
}

async fn only_the_named_part_of_the_buffer_moves(disk: &Disk) {
    let b = block(disk);
    // The offset in the buffer is one sector for any logical block, because the contract demands only 512 bytes.
    for offset in [SECTOR_BYTES, 4096] {
        let offset = offset as usize;
        let data = pattern(disk, 32 * b, 4 * b, 3);
        let mut out = disk.runtime().pool().zeroed(offset + data.len() + 512);
        out.as_mut()[offset..offset + data.len()].copy_from_slice(data.as_slice());
        let done = disk.start_write(Sector(32 * b), Sectors(4 * b), out, offset, false).await;
        assert_eq!(done.result, Ok(()), "write from the middle of a buffer");
        assert!(done.buffer.is_some(), "the buffer comes back from a write");
        let mut into = disk.runtime().pool().take(offset + data.len() + 512);
        into.as_mut().fill(0xee);
        let done = disk.start_read(Sector(32 * b), Sectors(4 * b), into, offset).await;
        assert_eq!(done.result, Ok(()), "read into the middle of a buffer");
        let Some(into) = done.buffer else { panic!("the buffer comes back from a read") };
        let bytes = into.as_slice();
        assert!(bytes[..offset].iter().all(|x| *x == 0xee), "bytes before the part that takes part");
        assert_eq!(&bytes[offset..offset + data.len()], data.as_slice(), "the part that takes part");
        assert!(bytes[offset + data.len()..].iter().all(|x| *x == 0xee), "bytes behind it");
    }
}

async fn many_operations_at_once(disk: &Disk) {
    let b = block(disk);
    let n = (DEVICE_SECTORS.0 / (2 * b)).min(1500);
    let writes: Vec<_> = (0..n)
        .map(|i| {
            let data = pattern(disk, 2 * b * i, 2 * b, i);
            disk.start_write(Sector(2 * b * i), Sectors(2 * b), data, 0, i % 7 == 0)
        })
        .collect();
    // Awaited in reverse order, because callers must not depend on the order of completions.
    for w in writes.into_iter().rev() {
        assert_eq!(w.await.result, Ok(()), "one of many writes");
    }
    let reads: Vec<_> = (0..n)
        .map(|i| {
            let buffer = disk.runtime().pool().take((2 * b * SECTOR_BYTES) as usize);
            disk.start_read(Sector(2 * b * i), Sectors(2 * b), buffer, 0)
        })
        .collect();
    for (i, r) in reads.into_iter().enumerate() {
        let done = r.await;
        assert_eq!(done.result, Ok(()), "one of many reads");
        let Some(buffer) = done.buffer else { panic!("the buffer comes back from a read") };
        assert_same(&buffer, &pattern(disk, 2 * b * i as u64, 2 * b, i as u64), "one of many reads");
    }
}

async fn durable_writes_and_flushes(disk: &Disk) {
    let b = block(disk);
    let data = pattern(disk, 0, 8 * b, 4);
    assert_eq!(disk.write(Sector(0), data.clone(), true).await, Ok(()), "durable write");
    assert_eq!(disk.flush().await, Ok(()), "flush");
    let slow = disk.start_write(Sector(64 * b), Sectors(8 * b), data.clone(), 0, false);
    let flushes: Vec<_> = (0..4).map(|_| disk.start_flush()).collect();
    for f in flushes {
        assert_eq!(f.await.result, Ok(()), "flush beside a write");
    }
    assert_eq!(slow.await.result, Ok(()), "write beside flushes");
    assert_same(&read(disk, 0, 8 * b).await, &data, "durable write");
    assert_same(&read(disk, 64 * b, 8 * b).await, &data, "write beside flushes");
}

async fn refused(disk: &Disk, request: Request, what: &str) {
    let had_buffer = request.buffer.is_some();
    let (op, sector) = (request.op, request.sector);
    let done = disk.start(request).await;
    let Err(e) = done.result else { panic!("{what}: expected {op} to be refused, found success") };
    assert_eq!(e.errno, EINVAL, "{what}: {e}");
    assert_eq!(
        (&*e.device, e.op, e.sector),
        (&*disk.info().name, op, sector),
        "{what}: what the error names"
    );
    assert_eq!(done.buffer.is_some(), had_buffer, "{what}: the buffer comes back");
}

async fn bad_requests_are_refused(disk: &Disk) {
    let b = block(disk);
    let end = DEVICE_SECTORS.0;
    let data = pattern(disk, 0, end, 5);
    write(disk, 0, data.clone()).await;
    let zeros = || Some(disk.runtime().pool().zeroed((2 * b * SECTOR_BYTES) as usize));
    for op in [
        Op::Read,
        Op::Write { fua: false },
        Op::Write { fua: true },
        Op::Discard,
        Op::WriteZeroes { may_unmap: false },
    ] {
        let request = |sector, sectors| Request {
            op,
            sector: Sector(sector),
            sectors: Sectors(sectors),
            buffer: if op.has_buffer() { zeros() } else { None },
            buffer_offset_bytes: 0,
        };
        refused(disk, request(end, b), "behind the end").await;
        refused(disk, request(end - b, 2 * b), "over the end").await;
        refused(disk, request(u64::MAX - 7, 8), "a sector that overflows").await;
        if b > 1 {
            refused(disk, request(1, b), "a position inside a block").await;
            refused(disk, request(0, b - 1), "part of a block").await;
        }
        if op.has_buffer() {
            refused(disk, request(0, 4 * b), "a buffer that is too small").await;
            refused(disk, Request { buffer: None, ..request(0, b) }, "no buffer").await;
            let odd = Request { buffer_offset_bytes: 4, ..request(0, b) };
            refused(disk, odd, "an offset inside a sector").await;
            let late = Request { buffer_offset_bytes: (2 * b * SECTOR_BYTES) as usize, ..request(0, b) };
            refused(disk, late, "an offset at the end of the buffer").await;
        }
    }
    assert_same(&read(disk, 0, end).await, &data, "after refused requests");
}

async fn shared_buffers(disk: &Disk) {
    let b = block(disk);
    let data = pattern(disk, 0, b, 6);
    let other = data.clone();
    write(disk, 0, data).await;
    write(disk, 4 * b, other.clone()).await;
    assert_same(&read(disk, 4 * b, b).await, &other, "a write from a shared buffer");
    let request = Request {
        op: Op::Read,
        sector: Sector(0),
        sectors: Sectors(b),
        buffer: Some(other.clone()),
        buffer_offset_bytes: 0,
    };
    refused(disk, request, "a read into a shared buffer").await;
}

async fn requests_of_nothing(disk: &Disk) {
    for op in [Op::Read, Op::Write { fua: false }] {
        let buffer = Some(disk.runtime().pool().take(512));
        let (sector, sectors) = (Sector(0), Sectors(0));
        let done = disk.start(Request { op, sector, sectors, buffer, buffer_offset_bytes: 0 }).await;
        assert_eq!(done.result, Ok(()), "{op} of nothing");
    }
    assert_eq!(disk.write_zeroes(Sector(0), Sectors(0)).await, Ok(()), "write zeroes of nothing");
}

async fn zeroes_and_discards(disk: &Disk) {
    let b = block(disk);
    let end = DEVICE_SECTORS.0;
    write(disk, 0, pattern(disk, 0, end, 7)).await;
    // Ranges that are small and aligned only to the block, and one that is larger than any internal piece.
    for (sector, sectors, may_unmap) in [(3 * b, b, false), (5 * b, 7 * b, true), (1024, 6144, false)] {
        let zeroes = Op::WriteZeroes { may_unmap };
        let done = disk.start_plain(zeroes, Sector(sector), Sectors(sectors)).await;
        assert_eq!(done.result, Ok(()), "write zeroes");
        let zeros = disk.runtime().pool().zeroed((sectors * SECTOR_BYTES) as usize);
        assert_same(&read(disk, sector, sectors).await, &zeros, "zeroed range");
    }
    for (sector, sectors) in [(0, 3 * b), (4 * b, b), (12 * b, 4 * b), (7168, end - 7168)] {
        assert_same(
            &read(disk, sector, sectors).await,
            &pattern(disk, sector, sectors, 7),
            "beside zeroed ranges",
        );
    }
    let data = pattern(disk, 0, end, 8);
    write(disk, 0, data.clone()).await;
    match disk.discard(Sector(8 * b), Sectors(16 * b)).await {
        Ok(()) => {}
        Err(e) => {
            let allowed = !disk.info().discard && e.errno == EOPNOTSUPP;
            assert!(allowed, "expected success or, where discard does nothing, EOPNOTSUPP; found: {e}");
        }
    }
    assert_same(&read(disk, 0, 8 * b).await, &pattern(disk, 0, 8 * b, 8), "before a discarded range");
    assert_same(
        &read(disk, 24 * b, 40 * b).await,
        &pattern(disk, 24 * b, 40 * b, 8),
        "behind a discarded range",
    );
    read(disk, 8 * b, 16 * b).await;
    write(disk, 8 * b, pattern(disk, 8 * b, 16 * b, 9)).await;
    assert_same(
        &read(disk, 8 * b, 16 * b).await,
        &pattern(disk, 8 * b, 16 * b, 9),
        "a discarded range that was written again",
    );
}

async fn an_abandoned_write_still_happens(disk: &Disk) {
    let b = block(disk);
    write(disk, 0, pattern(disk, 0, 16 * b, 10)).await;
    let new = pattern(disk, 0, 16 * b, 11);
    drop(disk.start_write(Sector(0), Sectors(16 * b), new.clone(), 0, false));
    // A read returns either content until the write has ended. The number of reads is bounded.
    for _ in 0..100_000 {
        if read(disk, 0, 16 * b).await.as_slice() == new.as_slice() {
            return;
        }
    }
    panic!("an abandoned write never came through");
}

async fn random_operations_match_a_model(disk: &Disk) {
    let b = block(disk);
    let blocks = DEVICE_SECTORS.0 / b;
    let mut rng = Rng::new(disk.runtime().random());
    // For each block, the tag that it must hold; 0 stands for zeros. Blocks that were never written are absent.
    let mut model: BTreeMap<u64, u64> = BTreeMap::new();
    for tag in 1..600u64 {
        let first = rng.below(blocks);
        let n = (1 + rng.below(48)).min(blocks - first);
        match rng.below(10) {
            0..=3 => {
                write(disk, first * b, pattern(disk, first * b, n * b, tag)).await;
                model.extend((first..first + n).map(|i| (i, tag)));
            }
            4 => {
                let zeroed = disk.write_zeroes(Sector(first * b), Sectors(n * b)).await;
                assert_eq!(zeroed, Ok(()), "write zeroes");
                model.extend((first..first + n).map(|i| (i, 0)));
            }
            5 => assert_eq!(disk.flush().await, Ok(()), "flush"),
            _ => {
                let found = read(disk, first * b, n * b).await;
                let block_bytes = (b * SECTOR_BYTES) as usize;
                for (i, bytes) in (first..).zip(found.as_slice().chunks_exact(block_bytes)) {
                    let expected = match model.get(&i) {
                        None => continue,
                        Some(0) => disk.runtime().pool().zeroed(block_bytes),
                        Some(tag) => pattern(disk, i * b, b, *tag),
                    };
                    assert_eq!(bytes, expected.as_slice(), "block {i} after {tag} random operations");
                }
            }
        }
    }
}
