//! Test doubles for the engine's unit tests: a runtime on virtual time and a disk in memory.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::rc::Rc;
use std::sync::Arc;

#[cfg(test)]
mod set;

pub(crate) use set::{Watching, components, fill_bucket, open_set};

use format::superblock::{BackingFormat, CacheFormat};
use format::{BackingSuper, CacheMode, CacheSuper, Geometry, Replacement, Sector, Sectors, Uuid};
use io::{Buffer, Clock, Completer, Device, DeviceInfo, Fifo, Handle, IoError, Nanos, Op, Request, Runtime};

use crate::device::{BackingDevice, CacheDevice};
use crate::error::Place;

/// A cache device with buckets of `bucket` sectors and blocks of one, on a disk in memory.
pub(crate) fn cache_device(disk: &Rc<TestDisk>, rt: &Handle, bucket: Sectors) -> Rc<CacheDevice> {
    cache_device_on(io::Disk::new(disk.clone(), rt.clone()), bucket)
}

/// A cache device with buckets of `bucket` sectors and blocks of one, on a watched disk.
pub(crate) fn watched_cache_device(disk: &Rc<Watching>, rt: &Handle, bucket: Sectors) -> Rc<CacheDevice> {
    cache_device_on(io::Disk::new(disk.clone(), rt.clone()), bucket)
}

/// A backing device in no set, with blocks of one sector.
pub(crate) fn backing_device(disk: &Rc<TestDisk>, rt: &Handle) -> Rc<BackingDevice> {
    backing_device_of(disk, rt, Sectors(1), Sector(16))
}

/// A backing device in no set with blocks of this size, whose data begins at `offset`.
pub(crate) fn backing_device_of(
    disk: &Rc<TestDisk>,
    rt: &Handle,
    block_sectors: Sectors,
    data_offset: Sector,
) -> Rc<BackingDevice> {
    let superblock = BackingSuper::format(&BackingFormat {
        uuid: Uuid([3; 16]),
        set_uuid: Uuid([0; 16]),
        device_sectors: disk.info.sectors,
        block_sectors,
        bucket_sectors: Sectors(64),
        data_offset,
        cache_mode: CacheMode::Writeback,
        label: [0; 32],
    });
    Rc::new(BackingDevice::new(io::Disk::new(disk.clone(), rt.clone()), superblock.unwrap()))
}

fn cache_device_on(disk: io::Disk, bucket: Sectors) -> Rc<CacheDevice> {
    let want = CacheFormat {
        device_sectors: disk.info().sectors,
        bucket_sectors: bucket,
        block_sectors: Sectors(1),
        uuid: Uuid([1; 16]),
        set_uuid: Uuid([2; 16]),
        replacement: Replacement::Lru,
        discard: false,
    };
    let place = Place { device: disk.info().name.clone(), set: "a set".into() };
    Rc::new(CacheDevice::new(disk, place, CacheSuper::format(&want).unwrap()))
}

/// The sizes of a cache device with blocks of one sector and a journal of four buckets.
pub(crate) fn geometry(bucket: Sectors, nbuckets: u32, first_bucket: u16) -> Geometry {
    Geometry::new(bucket, Sectors(1), nbuckets.into(), first_bucket, 4).unwrap()
}

/// Lets all other tasks run until each waits for an event, or has run often.
pub(crate) async fn turns(rt: &Handle) {
    for _ in 0..200 {
        rt.yield_now().await;
    }
}

struct TestClock(Cell<Nanos>);

impl Clock for TestClock {
    fn now(&self) -> Nanos {
        self.0.get()
    }

    fn wall_seconds(&self) -> u64 {
        1_000_000 + self.0.get().0 / 1_000_000_000
    }
}

/// Runs a test to its end on virtual time.
pub(crate) fn run<F: Future<Output = ()> + 'static>(test: impl FnOnce(Handle) -> F) {
    let clock = Rc::new(TestClock(Cell::new(Nanos(1))));
    let rt = Runtime::new(clock.clone(), 1);
    let done = rt.handle().spawn(test(rt.handle()));
    loop {
        while rt.run(&mut Fifo, 10_000) > 0 {}
        if done.try_take().is_some() {
            return;
        }
        let next = rt.next_deadline().expect("the test waits for an event that never happens");
        clock.0.set(next.max(clock.0.get()));
        rt.fire_timers();
    }
}

/// A disk in memory that can hold requests back, answer reads late, and fail flushes.
pub(crate) struct TestDisk {
    info: DeviceInfo,
    bytes: RefCell<Vec<u8>>,
    hold: Cell<bool>,
    waiting: RefCell<Vec<(Request, Completer)>>,
    /// How many of the next reads are answered late.
    late: Cell<usize>,
    /// Reads that have taken effect and are not answered yet.
    answers: RefCell<Vec<(Option<Buffer>, Completer)>>,
    fail_flushes: Cell<u32>,
}

impl TestDisk {
    pub(crate) fn new(sectors: u64) -> Rc<TestDisk> {
        Rc::new(TestDisk {
            info: DeviceInfo {
                name: Arc::from("test disk"),
                sectors: Sectors(sectors),
                logical_block_bytes: 512,
                physical_block_bytes: 512,
                optimal_io_bytes: 0,
                rotational: false,
                discard: true,
                sparse: false,
                partial_stripes_expensive: false,
            },
            bytes: RefCell::new(vec![0; sectors as usize * 512]),
            hold: Cell::new(false),
            waiting: RefCell::default(),
            late: Cell::new(0),
            answers: RefCell::default(),
            fail_flushes: Cell::new(0),
        })
    }

    /// A disk on which it is expensive to write a part of a stripe of this size.
    pub(crate) fn with_stripes(sectors: u64, stripe: Sectors) -> Rc<TestDisk> {
        let mut disk = Rc::into_inner(TestDisk::new(sectors)).expect("nothing else refers to a new disk");
        disk.info.optimal_io_bytes = stripe.bytes() as u32;
        disk.info.partial_stripes_expensive = true;
        Rc::new(disk)
    }

    pub(crate) fn hold(&self, hold: bool) {
        self.hold.set(hold);
        if !hold {
            for (request, completer) in self.waiting.take() {
                self.carry_out(request, completer);
            }
        }
    }

    /// Waits until `n` requests are held back.
    pub(crate) async fn held(&self, n: usize, rt: &Handle) {
        while self.waiting.borrow().len() < n {
            rt.yield_now().await;
        }
    }

    /// The next `n` reads return what is on the disk now, and are answered when [`Self::answer`] is called.
    pub(crate) fn answer_late(&self, n: usize) {
        self.late.set(n);
    }

    /// Waits until `n` reads have taken effect and are not answered.
    pub(crate) async fn late(&self, n: usize, rt: &Handle) {
        while self.answers.borrow().len() < n {
            rt.yield_now().await;
        }
    }

    /// Answers the reads that are late.
    pub(crate) fn answer(&self) {
        for (buffer, completer) in self.answers.take() {
            completer.complete(Ok(()), buffer);
        }
    }

    pub(crate) fn fail_flushes(&self, n: u32) {
        self.fail_flushes.set(n);
    }

    fn carry_out(&self, mut request: Request, completer: Completer) {
        if request.op == Op::Flush && self.fail_flushes.get() > 0 {
            self.fail_flushes.set(self.fail_flushes.get() - 1);
            let e = IoError::of(&self.info.name, &request, 5);
            return completer.complete(Err(e), request.buffer);
        }
        let range = request.byte_range();
        let at = request.sector.bytes() as usize;
        if matches!(request.op, Op::WriteZeroes { .. }) {
            self.bytes.borrow_mut()[at..at + request.sectors.bytes() as usize].fill(0);
        }
        if let Some(buffer) = &mut request.buffer {
            let mut bytes = self.bytes.borrow_mut();
            let disk = &mut bytes[at..at + range.len()];
            match request.op {
                Op::Read => buffer.as_mut()[range].copy_from_slice(disk),
                _ => disk.copy_from_slice(&buffer.as_slice()[range]),
            }
        }
        if request.op == Op::Read && self.late.get() > 0 {
            self.late.set(self.late.get() - 1);
            return self.answers.borrow_mut().push((request.buffer, completer));
        }
        completer.complete(Ok(()), request.buffer);
    }
}

impl Device for TestDisk {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn submit(&self, request: Request, completer: Completer) {
        if self.hold.get() {
            self.waiting.borrow_mut().push((request, completer));
        } else {
            self.carry_out(request, completer);
        }
    }
}
