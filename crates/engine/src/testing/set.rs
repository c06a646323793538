//! A whole set on a device in memory, for tests of its components.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use format::superblock::CacheFormat;
use format::{BucketNr, CacheSuper, Ptr, Replacement, Sector, Sectors, Uuid};
use io::{Completer, Device, DeviceInfo, Disk, Handle, IoError, Op, Request};

use super::TestDisk;
use crate::set::{CacheSet, SetOptions};
use crate::volume::Cache;

/// A disk in memory that records its requests, and can fail or hold back some of them.
pub(crate) struct Watching {
    inner: Rc<TestDisk>,
    /// Returns the error of a request that is to fail.
    pub(crate) refuses: Cell<fn(&Request) -> Option<i32>>,
    /// The disk holds back all requests from the first one of this kind on.
    pub(crate) holds: Cell<Option<Op>>,
    /// All requests so far.
    pub(crate) requests: RefCell<Vec<(Op, Sector, Sectors)>>,
}

impl Watching {
    pub(crate) fn new(sectors: u64) -> Rc<Watching> {
        Rc::new(Watching {
            inner: TestDisk::new(sectors),
            refuses: Cell::new(|_| None),
            holds: Cell::new(None),
            requests: RefCell::default(),
        })
    }

    /// The requests of one kind since the last call of `take`, by position and length.
    pub(crate) fn take(&self, op: Op) -> Vec<(u64, u64)> {
        let requests = self.requests.take();
        requests.into_iter().filter(|r| r.0 == op).map(|(_, sector, sectors)| (sector.0, sectors.0)).collect()
    }

    pub(crate) fn disk(&self) -> &Rc<TestDisk> {
        &self.inner
    }
}

impl Device for Watching {
    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }

    fn submit(&self, request: Request, completer: Completer) {
        self.requests.borrow_mut().push((request.op, request.sector, request.sectors));
        if self.holds.get() == Some(request.op) {
            self.inner.hold(true);
        }
        match self.refuses.get()(&request) {
            None => self.inner.submit(request, completer),
            Some(errno) => {
                let error = IoError::of(&self.inner.info().name, &request, errno);
                completer.complete(Err(error), request.buffer);
            }
        }
    }
}

/// Formats all of the device as a cache and opens the set. `shape`: sectors of a bucket, and whether buckets are discarded.
pub(crate) async fn open_set(
    device: &Rc<Watching>,
    rt: &Handle,
    (bucket_sectors, discard): (u64, bool),
    options: SetOptions,
) -> CacheSet {
    let disk = Disk::new(device.clone(), rt.clone());
    let superblock = CacheSuper::format(&CacheFormat {
        uuid: Uuid([1; 16]),
        set_uuid: Uuid([7; 16]),
        device_sectors: disk.info().sectors,
        block_sectors: Sectors(1),
        bucket_sectors: Sectors(bucket_sectors),
        replacement: Replacement::Lru,
        discard,
    });
    let bytes = rt.pool().copy_of(&superblock.unwrap().encode());
    disk.write(Sector(8), bytes, true).await.unwrap();
    CacheSet::open(disk, options).await.unwrap()
}

/// Puts live data into a bucket that holds nothing.
pub(crate) fn fill_bucket(cache: &Cache, b: u32, sectors: u64, dirty: bool) {
    let buckets = &mut *cache.alloc.buckets_mut();
    let b = BucketNr(b);
    let ptr = Ptr::new(0, cache.geometry.bucket_start(b), buckets.generation(b));
    assert!(buckets.add(ptr, Sectors(sectors), dirty));
}

/// The components of an open set, which lives as long as the runtime does.
pub(crate) fn components(set: CacheSet, rt: &Handle) -> Rc<Cache> {
    let cache = set.cache().clone();
    rt.spawn(async move {
        let _set = set;
        std::future::pending::<()>().await;
    });
    cache
}
