//! Tests of single steps of operations, on devices that the tests make.

use std::cell::RefCell;

use super::*;
use crate::cmd::Cmd;
use crate::conformance;
use crate::operation::device::{PUNCH_HOLE, ZERO_RANGE};
use crate::operation::zeroing::{ZeroWays, Zeroing};
use crate::operation::{Operation, Step};
use crate::{Backend, Driver, DriverOptions};
use ::io::Disk;
use format::{Sector, Sectors};

/// Zeros that stay allocated.
const ZEROES: What = What::WriteZeroes { may_unmap: false };

/// The ways to write zeros on devices that refuse fewer and fewer of them.
fn zero_ways() -> [ZeroWays; 3] {
    let punch_hole = ZeroWays::ALL.without(Zeroing::ZeroRange);
    [ZeroWays::ALL, punch_hole, punch_hole.without(Zeroing::PunchHole)]
}

/// A device that stores requests and does not carry them out.
struct Capture {
    info: DeviceInfo,
    taken: RefCell<Option<(Request, Completer)>>,
}

impl Device for Capture {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn submit(&self, request: Request, completer: Completer) {
        *self.taken.borrow_mut() = Some((request, completer));
    }
}

fn opened(dir: &Path, sectors: Sectors) -> Opened {
    let path = dir.join(format!("{}", std::fs::read_dir(dir).unwrap().count()));
    std::fs::File::create(&path).unwrap().set_len(sectors.bytes()).unwrap();
    open(&path, &OpenOptions::default()).unwrap()
}

/// A new operation before its first command, and the future that waits for it.
fn operation(driver: &Driver, what: What, sectors: u64) -> (DeviceOp, ::io::IoFuture) {
    let dir = tempfile::tempdir().unwrap();
    let device = FileDevice::from_opened(driver.reactor(), opened(dir.path(), Sectors(4096)));
    operation_on(driver, device, what, sectors)
}

fn operation_on(driver: &Driver, device: FileDevice, what: What, sectors: u64) -> (DeviceOp, ::io::IoFuture) {
    let capture = Rc::new(Capture { info: device.info().clone(), taken: RefCell::new(None) });
    let disk = Disk::new(capture.clone(), driver.handle());
    let pool = driver.handle().pool().clone();
    let buffer = what.has_buffer().then(|| pool.take((sectors * 512) as usize));
    let future = disk.start(Request {
        op: what,
        sector: Sector(8),
        sectors: Sectors(sectors),
        buffer,
        buffer_offset_bytes: 0,
    });
    let (request, completer) = capture.taken.borrow_mut().take().unwrap();
    (DeviceOp::new(device.inner.clone(), request, completer, &pool), future)
}

/// Offset and length of the next command.
fn next(step: Step) -> (u64, u64) {
    match step {
        Step::Next(Cmd::Read { offset, len, .. } | Cmd::Write { offset, len, .. })
        | Step::NextHere(Cmd::Read { offset, len, .. } | Cmd::Write { offset, len, .. }) => {
            (offset, len.into())
        }
        Step::Next(Cmd::Fallocate { offset, len, .. }) => (offset, len),
        _ => panic!("expected another command"),
    }
}

#[test]
fn short_transfers_and_interruptions_are_continued() {
    let driver = Driver::new(DriverOptions::default()).unwrap();
    let (mut op, future) = operation(&driver, What::Read, 64);
    assert_eq!(next(op.advance(-libc::EINTR)), (4096, 32768));
    assert_eq!(next(op.advance(8192)), (4096 + 8192, 24576));
    assert!(matches!(op.advance(-libc::EAGAIN), Step::NextBlocking(Cmd::Read { .. })));
    assert_eq!(next(op.advance(512 + 100)), (4096 + 8704, 24064), "continues at a whole block");
    assert!(matches!(op.advance(24064), Step::Done));
    op.finish();
    assert_eq!(driver.block_on(future).result, Ok(()));
}

#[test]
fn a_transfer_that_makes_no_progress_is_an_error() {
    let driver = Driver::new(DriverOptions::default()).unwrap();
    for moved in [0, 100] {
        let (mut op, future) = operation(&driver, What::Write { fua: true }, 64);
        assert!(matches!(op.advance(moved), Step::Done));
        op.finish();
        let done = driver.block_on(future);
        assert_eq!(done.result.unwrap_err().errno, libc::EIO);
        assert!(done.buffer.is_some());
    }
}

#[test]
fn zeroing_goes_down_the_ladder_and_remembers() {
    let driver = Driver::new(DriverOptions::default()).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let device = FileDevice::from_opened(driver.reactor(), opened(dir.path(), Sectors(4096)));
    let (mut op, future) = operation_on(&driver, device.clone(), ZEROES, 4000);
    assert!(matches!(op.next(), Step::Next(Cmd::Fallocate { mode: ZERO_RANGE, .. })));
    let Step::Next(Cmd::Fallocate { mode: PUNCH_HOLE, .. }) = op.advance(-libc::EOPNOTSUPP) else {
        panic!("expected a hole")
    };
    assert_eq!(next(op.advance(-libc::EOPNOTSUPP)), (4096, 1 << 20), "as much as there are zeros");
    assert_eq!(device.inner.zero_ways.get().best(true, false), Zeroing::Write);
    assert_eq!(next(op.advance(1 << 20)), (4096 + (1 << 20), 4000 * 512 - (1 << 20)));
    assert!(matches!(op.advance(4000 * 512 - (1 << 20)), Step::Done));
    op.finish();
    assert_eq!(driver.block_on(future).result, Ok(()));

    let (mut op, future) = operation(&driver, ZEROES, 8);
    assert!(matches!(op.advance(-libc::ENOSPC), Step::Done), "an error that no other way avoids");
    op.finish();
    assert_eq!(driver.block_on(future).result.unwrap_err().errno, libc::ENOSPC);
}

/// `blkdiscard` on a loop device over a sparse file allocated the whole file, because zeros that may free their space were
/// written with `ZERO_RANGE`, which keeps it.
#[test]
fn zeros_that_may_free_their_space_do() {
    use std::os::unix::fs::MetadataExt;
    let driver = Driver::new(DriverOptions::default()).unwrap();
    let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    let path = dir.path().join("sparse");
    std::fs::File::create(&path).unwrap().set_len(64 << 20).unwrap();
    let allocated = || std::fs::metadata(&path).unwrap().blocks();
    let device = FileDevice::from_opened(driver.reactor(), open(&path, &OpenOptions::default()).unwrap());
    let disk = Disk::new(Rc::new(device), driver.handle());
    let unmap = What::WriteZeroes { may_unmap: true };
    let whole = Sectors((64 << 20) / 512);
    assert_eq!(driver.block_on(disk.start_plain(unmap, Sector(0), whole)).result, Ok(()));
    assert_eq!(allocated(), 0, "a sparse file stays sparse");
    assert_eq!(driver.block_on(disk.write_zeroes(Sector(0), Sectors(2048))), Ok(()));
    assert_eq!(allocated(), 2048, "zeros that stay allocated take space");
    assert_eq!(driver.block_on(disk.start_plain(unmap, Sector(0), whole)).result, Ok(()));
    assert_eq!(allocated(), 0, "the space is free again");
}

fn write_of(byte: u8, sector: u64, sectors: u64, pool: &::io::BufferPool) -> Request {
    let mut buffer = pool.take((sectors * 512) as usize);
    buffer.as_mut().fill(byte);
    Request {
        op: What::Write { fua: false },
        sector: Sector(sector),
        sectors: Sectors(sectors),
        buffer: Some(buffer),
        buffer_offset_bytes: 0,
    }
}

/// Treats a file as one on a disk, because writes to a file system in memory would be made at once.
fn on_a_disk(opened: Opened) -> Opened {
    Opened { in_memory: false, ..opened }
}

#[test]
fn neighbours_of_one_turn_are_one_command() {
    for backend in [Backend::Auto, Backend::Pool] {
        let driver = Driver::new(DriverOptions { backend, ..DriverOptions::default() }).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let device = FileDevice::from_opened(driver.reactor(), on_a_disk(opened(dir.path(), Sectors(4096))));
        let disk = Disk::new(Rc::new(device), driver.handle());
        let pool = driver.handle().pool().clone();
        let before = driver.reactor().counts();
        // Two series of adjacent writes in alternation, one write that belongs to neither, and one durable write.
        let writes: Vec<_> = [(1, 0, 8), (2, 800, 16), (3, 8, 8), (4, 816, 1), (5, 100, 8), (6, 16, 24)]
            .map(|(byte, sector, sectors)| disk.start(write_of(byte, sector, sectors, &pool)))
            .into_iter()
            .collect();
        let durable = disk.start(Request { op: What::Write { fua: true }, ..write_of(7, 40, 8, &pool) });
        driver.block_on(async {
            for write in writes {
                let done = write.await;
                assert_eq!(done.result, Ok(()));
                assert!(done.buffer.is_some(), "the buffer comes back");
            }
            assert_eq!(durable.await.result, Ok(()));
        });
        let after = driver.reactor().counts();
        assert_eq!(after.operations - before.operations, 7);
        assert_eq!(after.commands - before.commands, 4);
        driver.block_on(async {
            for (byte, sector, sectors) in
                [(1, 0, 8), (3, 8, 8), (6, 16, 24), (7, 40, 8), (2, 800, 16), (4, 816, 1), (5, 100, 8)]
            {
                let done = disk
                    .start_read(Sector(sector), Sectors(sectors), pool.take((sectors * 512) as usize), 0)
                    .await;
                assert_eq!(done.result, Ok(()));
                let buffer = done.buffer.unwrap();
                assert!(buffer.as_slice().iter().all(|b| *b == byte), "sector {sector}");
            }
        });
    }
}

/// If the kernel refuses a gathered write, each piece is repeated, and its error has its own sector.
#[test]
fn a_failed_gathered_write_is_repeated_piece_by_piece() {
    let driver = Driver::new(DriverOptions::default()).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
    let read_only = OpenOptions { access: crate::Access::ReadOnly, ..OpenOptions::default() };
    let opened = Opened { read_only: false, ..on_a_disk(open(&path, &read_only).unwrap()) };
    let device = FileDevice::from_opened(driver.reactor(), opened);
    let disk = Disk::new(Rc::new(device), driver.handle());
    let pool = driver.handle().pool().clone();
    let before = driver.reactor().counts();
    let writes: Vec<_> = (0..3).map(|n| disk.start(write_of(1, n * 8, 8, &pool))).collect();
    driver.block_on(async {
        for (n, write) in (0..).zip(writes) {
            let e = write.await.result.unwrap_err();
            assert_eq!((e.errno, e.sector), (libc::EBADF, Sector(n * 8)));
        }
    });
    assert_eq!(driver.reactor().counts().commands - before.commands, 1 + 3);
}

#[test]
fn a_command_of_many_writes_has_an_end() {
    let driver = Driver::new(DriverOptions::default()).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let device = FileDevice::from_opened(driver.reactor(), on_a_disk(opened(dir.path(), Sectors(8192))));
    let disk = Disk::new(Rc::new(device), driver.handle());
    let pool = driver.handle().pool().clone();
    for (sectors, commands) in [(1, 2), (256, 4)] {
        let before = driver.reactor().counts();
        let pieces = if sectors == 1 { 100 } else { 28 };
        let writes: Vec<_> =
            (0..pieces).map(|n| disk.start(write_of(9, n * sectors, sectors, &pool))).collect();
        driver.block_on(async {
            for write in writes {
                assert_eq!(write.await.result, Ok(()));
            }
        });
        assert_eq!(driver.reactor().counts().commands - before.commands, commands);
    }
}

/// The suite passes on a device that needs memory in whole pages, with each operation that writes zeros.
#[test]
fn devices_with_other_needs_conform() {
    for backend in [Backend::Auto, Backend::Pool] {
        let driver = Driver::new(DriverOptions { backend, ..DriverOptions::default() }).unwrap();
        let dir = tempfile::tempdir().unwrap();
        for ways in zero_ways() {
            driver.block_on(conformance::check(|sectors| {
                let opened = Opened { memory_align_bytes: 4096, ..opened(dir.path(), sectors) };
                let device = FileDevice::from_opened(driver.reactor(), opened);
                device.inner.zero_ways.set(ways);
                Disk::new(Rc::new(device), driver.handle())
            }));
        }
    }
}

/// A device with its own threads, like a block device on a ring.
fn with_threads(driver: &Driver, opened: Opened) -> FileDevice {
    let threads = driver.reactor().start_threads_for(opened.file.as_raw_fd());
    assert!(threads.is_some(), "a ring, and threads");
    FileDevice::with_threads(driver.reactor(), opened, threads)
}

#[test]
fn operations_that_would_block_the_ring_go_to_threads() {
    let driver = Driver::new(DriverOptions { backend: Backend::Uring, ..DriverOptions::default() }).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let threaded = || with_threads(&driver, opened(dir.path(), Sectors(4096)));
    let (mut op, future) = operation_on(&driver, threaded(), What::Read, 64);
    assert!(matches!(op.next(), Step::Next(Cmd::Read { nowait: true, .. })));
    assert!(matches!(op.advance(-libc::EAGAIN), Step::NextBlocking(Cmd::Read { nowait: false, .. })));
    // The rest of the transfer is tried on the ring again.
    let Step::Next(Cmd::Read { nowait: true, offset: 12288, .. }) = op.advance(8192) else {
        panic!("expected the ring")
    };
    assert!(matches!(op.advance(24576), Step::Done));
    op.finish();
    assert_eq!(driver.block_on(future).result, Ok(()));

    for what in [What::Flush, What::Discard] {
        let (mut op, future) =
            operation_on(&driver, threaded(), what, if what == What::Flush { 0 } else { 8 });
        assert!(
            matches!(op.next(), Step::NextBlocking(Cmd::Flush { .. } | Cmd::Fallocate { .. })),
            "{what:?}"
        );
        assert!(matches!(op.advance(0), Step::Done));
        op.finish();
        assert_eq!(driver.block_on(future).result, Ok(()));
    }
    // Zeros that the device makes go to the threads; zeros that are written go to the ring.
    let (mut op, future) = operation_on(&driver, threaded(), ZEROES, 8);
    assert!(matches!(op.next(), Step::NextBlocking(Cmd::Fallocate { .. })));
    assert!(matches!(op.advance(-libc::EOPNOTSUPP), Step::NextBlocking(Cmd::Fallocate { .. })));
    assert!(matches!(op.advance(-libc::EOPNOTSUPP), Step::Next(Cmd::Write { nowait: true, .. })));
    assert!(matches!(op.advance(4096), Step::Done));
    op.finish();
    assert_eq!(driver.block_on(future).result, Ok(()));
}

#[test]
fn a_device_that_cannot_say_that_it_would_wait() {
    let driver = Driver::new(DriverOptions { backend: Backend::Uring, ..DriverOptions::default() }).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let device = with_threads(&driver, opened(dir.path(), Sectors(4096)));
    let (mut op, future) = operation_on(&driver, device.clone(), What::Read, 64);
    assert!(matches!(op.next(), Step::Next(Cmd::Read { nowait: true, .. })));
    assert!(matches!(op.advance(-libc::EOPNOTSUPP), Step::Next(Cmd::Read { nowait: false, .. })));
    assert!(matches!(op.advance(-libc::EOPNOTSUPP), Step::Done), "the answer of the device itself");
    op.finish();
    assert_eq!(driver.block_on(future).result.unwrap_err().errno, libc::EOPNOTSUPP);
    let (mut op, future) = operation_on(&driver, device, What::Write { fua: true }, 64);
    assert!(matches!(op.next(), Step::Next(Cmd::Write { nowait: false, .. })), "it is not asked again");
    assert!(matches!(op.advance(64 * 512), Step::Done));
    op.finish();
    assert_eq!(driver.block_on(future).result, Ok(()));
}

/// The suite passes on a device with its own threads.
///
/// A file system answers EAGAIN when it has to allocate, so the threads carry out most of these writes.
#[test]
fn devices_with_threads_conform() {
    let driver = Driver::new(DriverOptions { backend: Backend::Uring, ..DriverOptions::default() }).unwrap();
    let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    for ways in zero_ways() {
        driver.block_on(conformance::check(|sectors| {
            let device = with_threads(&driver, on_a_disk(opened(dir.path(), sectors)));
            device.inner.zero_ways.set(ways);
            Disk::new(Rc::new(device), driver.handle())
        }));
    }
}
